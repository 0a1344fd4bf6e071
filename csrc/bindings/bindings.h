// What the binding's files share: array types, and statuses as Python exceptions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "library.h"

namespace pe_py {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;

[[noreturn]] void raise(const char* error_class, const std::string& message);  // of pyengine.errors
void check(const Api& api, pe_status status);                                  // raises unless PE_OK

void bind_backend(py::module_& m);
void bind_program(py::module_& m);

// Owns the C backend; programs keep it alive.
struct Backend {
  Backend(int threads, const std::string& isa, const Library* library, const std::string& device);
  ~Backend();
  Backend(const Backend&) = delete;
  void check(pe_status status) const { pe_py::check(api, status); }
  const Api api;  // the functions of its library
  pe_backend* handle = nullptr;
};

}  // namespace pe_py
