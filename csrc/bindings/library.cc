#include "library.h"

#include <dlfcn.h>

#include "bindings.h"

namespace pe_py {

namespace {

template <class Function>
void find(void* handle, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (!function)
    raise("ResourceError", path + ": no function " + name + "; expected a library with the functions of pyengine.h");
}

}  // namespace

const Api& linked() {
#define PE_LINKED(name) &::pe_##name,
  static const Api api{PE_FUNCTIONS(PE_LINKED)};
#undef PE_LINKED
  return api;
}

Library::Library(const std::string& file) : path(file) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    raise("ResourceError", "cannot open " + path + ": " + (why ? why : "no reason given"));
  }
  find(handle, path, "pe_abi_version", api.abi_version);  // first: another version may lack other functions
  const int32_t version = api.abi_version();
  if (version != PE_ABI_VERSION)
    raise("ResourceError", path + ": ABI version " + std::to_string(version) + "; expected " +
                               std::to_string(PE_ABI_VERSION) + ": build it from the same sources as this package");
#define PE_FIND(name) find(handle, path, "pe_" #name, api.name);
  PE_FUNCTIONS(PE_FIND)
#undef PE_FIND
}

}  // namespace pe_py
