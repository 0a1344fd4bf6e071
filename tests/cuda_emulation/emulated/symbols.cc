#include "symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

namespace cuda_emulation {

namespace {

struct Symbol {
  std::string name;
  char* address;
  size_t bytes;
  bool function, zeroed;  // zeroed: in .bss, where variables without an initializer lie
};
struct File {
  std::string path;
  char* base = nullptr;
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
      if ((type != STT_FUNC && type != STT_OBJECT) || section == SHN_UNDEF || section >= header->e_shnum) continue;
      file.symbols.push_back({names + symbols[s].st_name, file.base + symbols[s].st_value, symbols[s].st_size,
                              type == STT_FUNC, sections[section].sh_type == SHT_NOBITS});
    }
  }
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
  }
  return &found->second;
}

const Symbol* symbol_of(const void* function) {
  const File* file = file_of(function);
  if (!file) return nullptr;
  for (const Symbol& s : file->symbols)
    if (s.function && s.address == function) return &s;
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
  name.erase(std::min(name.find('('), name.size()));
  if (name.starts_with("void ")) name.erase(0, 5);
  return name;
}

const std::vector<std::pair<char*, size_t>>& shared_variables(const void* kernel) {
  static std::map<const void*, std::vector<std::pair<char*, size_t>>> known;
  auto [found, added] = known.try_emplace(kernel);
  const Symbol* symbol = added ? symbol_of(kernel) : nullptr;
  if (symbol && symbol->name.starts_with("_Z")) {
    const std::string prefix = "_ZZ" + symbol->name.substr(2) + "E";  // locals of the function, by the Itanium ABI
    for (const Symbol& s : file_of(kernel)->symbols)
      if (!s.function && s.zeroed && s.name.starts_with(prefix)) found->second.emplace_back(s.address, s.bytes);
  }
  return found->second;
}

}  // namespace cuda_emulation
