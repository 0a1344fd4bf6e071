#include "bindings.h"

namespace pe_py {

void raise(const char* error_class, const std::string& message) {
  const py::object type = py::module_::import("pyengine.errors").attr(error_class);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

void check(const Api& api, pe_status status) {
  static constexpr const char* kClasses[] = {
      nullptr,         "RequestError", "ModelFormatError", "UnsupportedModelError",
      "ResourceError", "ComputeError", "CancelledError",   "PyEngineError"};
  if (status == PE_OK) return;
  raise(kClasses[status], api.last_error());
}

}  // namespace pe_py

PYBIND11_MODULE(_core, m) {
  namespace py = pybind11;
  m.doc() = "The C++ core of pyengine: a thin layer over the C ABI in pyengine.h.";
  m.def("isas", [] {
    py::list list;
    bool chosen = false;
    for (int32_t i = pe_isa_count() - 1; i >= 0; --i) {
      py::dict one;
      const bool available = pe_isa_available(i) != 0;
      one["name"] = pe_isa_name(i);
      one["available"] = available;
      one["chosen"] = available && !chosen;
      chosen = chosen || available;
      list.insert(0, one);
    }
    return list;
  });
  m.def("cpu_features", [] { return py::str(pe_cpu_features()).attr("split")(); });
  m.def("default_threads", &pe_default_threads);
  m.def("compiler", [] { return std::string(pe_compiler()); });
  m.def("commit", [] { return std::string(pe_commit()); });
  m.def("abi_version", &pe_abi_version);
  m.def(
      "checksum",
      [](const py::bytes& data) {
        const auto view = static_cast<std::string_view>(data);
        uint64_t sum;
        pe_py::check(pe_py::linked(), pe_checksum(view.data(), view.size(), &sum));
        return sum;
      },
      py::arg("data"));
  m.attr("LAYOUT_VERSION") = PE_LAYOUT_VERSION;
  m.attr("KV_BLOCK") = PE_KV_BLOCK;
  pe_py::bind_backend(m);
  pe_py::bind_program(m);
}
