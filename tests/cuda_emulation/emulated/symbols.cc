#include "symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

extern "C" void* __tls_get_addr(void*);  // glibc's

namespace cuda_emulation {

namespace {

struct Symbol {
  std::string name;
  char* base;
  size_t value, bytes;
  int type;
  bool zeroed;  // in .bss or .tbss, where variables without an initializer lie
};
struct File {
  std::string path;
  char* base = nullptr;
  size_t tls_module = 0;
  std::vector<Symbol> symbols;
};

void read_symbols(File& file) {
  std::ifstream in(file.path, std::ios::binary);
  const std::string data{std::istreambuf_iterator<char>(in), {}};
  if (data.size() < sizeof(ElfW(Ehdr))) return;
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(data.data());
  if (header->e_shoff + size_t{header->e_shnum} * sizeof(ElfW(Shdr)) > data.size()) return;
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(data.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* names = data.data() + sections[sections[i].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(data.data() + sections[i].sh_offset);
    for (size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); ++s) {
      const int type = ELF64_ST_TYPE(symbols[s].st_info);
      const int section = symbols[s].st_shndx;
      if ((type != STT_FUNC && type != STT_OBJECT && type != STT_TLS) || section == SHN_UNDEF ||
          section >= header->e_shnum)
        continue;
      file.symbols.push_back({names + symbols[s].st_name, type == STT_TLS ? nullptr : file.base, symbols[s].st_value,
                              symbols[s].st_size, type, sections[section].sh_type == SHT_NOBITS});
    }
  }
}

int find_tls_module(dl_phdr_info* info, size_t, void* file) {
  auto* f = static_cast<File*>(file);
  if (reinterpret_cast<char*>(info->dlpi_addr) != f->base) return 0;
  f->tls_module = info->dlpi_tls_modid;
  return 1;
}

const File* file_of(const void* address) {
  static std::map<void*, File> files;
  Dl_info info{};
  link_map* map = nullptr;
  if (!dladdr1(address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) || !map) return nullptr;
  auto [found, added] = files.try_emplace(map);
  if (added) {
    found->second.path = *map->l_name ? map->l_name : "/proc/self/exe";
    found->second.base = reinterpret_cast<char*>(map->l_addr);
    read_symbols(found->second);
    dl_iterate_phdr(find_tls_module, &found->second);
  }
  return &found->second;
}

bool has_symbol(const File& file, const std::string& name) {
  return std::any_of(file.symbols.begin(), file.symbols.end(), [&](const Symbol& s) { return s.name == name; });
}

const Symbol* symbol_of(const void* function) {
  const File* file = file_of(function);
  if (!file) return nullptr;
  for (const Symbol& s : file->symbols)
    if (s.type == STT_FUNC && s.base + s.value == function) return &s;
  return nullptr;
}

}  // namespace

std::string symbol_name(const void* function) {
  const Symbol* symbol = symbol_of(function);
  if (!symbol) {
    const File* file = file_of(function);
    char text[32];
    snprintf(text, sizeof text, "+0x%zx",
             static_cast<size_t>(static_cast<const char*>(function) - (file ? file->base : nullptr)));
    return (file ? file->path : std::string("kernel")) + text;
  }
  int status = 0;
  char* demangled = abi::__cxa_demangle(symbol->name.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : symbol->name;
  free(demangled);
  const std::string unnamed = "(anonymous namespace)::";
  for (size_t at; (at = name.find(unnamed)) != std::string::npos;) name.erase(at, unnamed.size());
  int depth = 0;  // of template arguments: the parameters begin at the first ( outside
  for (size_t i = 0; i < name.size(); ++i) {
    depth += (name[i] == '<') - (name[i] == '>');
    if (name[i] == '(' && depth == 0) name.erase(i);
  }
  if (name.starts_with("void ")) name.erase(0, 5);
  return name;
}

std::vector<std::pair<char*, size_t>> shared_variables(const void* kernel) {
  static std::map<const File*, std::vector<const Symbol*>> known;
  const File* file = file_of(kernel);
  if (!file) return {};
  auto [found, added] = known.try_emplace(file);
  if (added)
    for (const Symbol& s : file->symbols)  // locals of functions, by the Itanium ABI, without a constructor's guard
      if (s.type == STT_TLS && s.zeroed && s.name.starts_with("_ZZ") && !has_symbol(*file, "_ZGV" + s.name.substr(2)))
        found->second.push_back(&s);
  std::vector<std::pair<char*, size_t>> variables;
  size_t index[2] = {file->tls_module, 0};
  char* base = found->second.empty() || !file->tls_module ? nullptr : static_cast<char*>(__tls_get_addr(index));
  if (base)
    for (const Symbol* s : found->second) variables.emplace_back(base + s->value, s->bytes);
  return variables;
}

}  // namespace cuda_emulation
