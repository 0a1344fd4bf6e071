#include "bindings.h"

namespace pe_py {

namespace {

const char* or_null(const std::string& s) { return s.empty() ? nullptr : s.c_str(); }

}  // namespace

Backend::Backend(int threads, const std::string& isa, const Library* library, const std::string& device)
    : api(library ? library->api : linked()) {
  const pe_backend_config config{sizeof(pe_backend_config), threads, or_null(isa), or_null(device)};
  check(api.backend_create(&config, &handle));
}

Backend::~Backend() { api.backend_destroy(handle); }

namespace {

int32_t tensor_create(Backend& b, int format, int64_t rows, int64_t cols, int group) {
  const pe_tensor_desc desc{sizeof(pe_tensor_desc), format, rows, cols, group};
  int32_t id;
  b.check(b.api.tensor_create(b.handle, &desc, &id));
  return id;
}

// source: float32, float16, or uint16 holding bfloat16, C-contiguous [rows, cols]
void tensor_pack(Backend& b, int32_t id, const py::array& source, int64_t offset, int64_t stride,
                 const py::object& importance) {
  pe_pack_args args{};
  args.struct_size = sizeof args;
  if (py::isinstance<py::array_t<float>>(source))
    args.source_dtype = PE_SRC_F32;
  else if (py::isinstance<py::array_t<uint16_t>>(source))
    args.source_dtype = PE_SRC_BF16;
  else if (source.dtype().kind() == 'f' && source.itemsize() == 2)
    args.source_dtype = PE_SRC_F16;
  else
    raise("RequestError", "pack takes float32, float16 or bfloat16 (as uint16)");
  if (source.ndim() < 1 || source.ndim() > 2 || !(source.flags() & py::array::c_style))
    raise("RequestError", "pack takes a C-contiguous array of one or two dimensions");
  args.source = source.data();
  args.rows = source.ndim() == 2 ? source.shape(0) : 1;
  args.panel_offset = offset;
  args.panel_stride = stride;
  Array<float> weights;
  const int64_t cols = source.shape(source.ndim() - 1);
  if (!importance.is_none()) {
    weights = importance.cast<Array<float>>();
    if (weights.ndim() != 1 || weights.shape(0) != cols) raise("RequestError", "importance must be float32 [cols]");
    args.importance = weights.data();
  }
  void* data;
  b.check(b.api.tensor_data(b.handle, id, &data, nullptr));
  int64_t expected;
  std::memcpy(&expected, static_cast<const char*>(data) + 32, 8);  // TensorHeader.cols
  if (cols != expected)
    raise("RequestError",
          "pack: the source has " + std::to_string(cols) + " columns; the tensor " + std::to_string(expected));
  pe_status status;
  {
    py::gil_scoped_release release;
    status = b.api.tensor_pack(b.handle, id, &args);
  }
  b.check(status);
}

py::array_t<uint8_t> tensor_bytes(Backend& b, int32_t id) {
  void* data;
  size_t bytes;
  b.check(b.api.tensor_data(b.handle, id, &data, &bytes));
  py::array_t<uint8_t> copy(static_cast<py::ssize_t>(bytes));
  std::memcpy(copy.mutable_data(), data, bytes);
  return copy;
}

// The other way round: bytes of a tensor with the same header, as tensor_bytes gave them.
void tensor_write(Backend& b, int32_t id, const Array<uint8_t>& source) {
  constexpr size_t kHeader = 48;  // what describes the tensor; a checksum follows
  void* data;
  size_t bytes;
  b.check(b.api.tensor_data(b.handle, id, &data, &bytes));
  if (static_cast<size_t>(source.size()) != bytes || std::memcmp(source.data(), data, kHeader) != 0)
    raise("RequestError", "tensor_write: the bytes are not those of a tensor like this one");
  std::memcpy(data, source.data(), bytes);
}

size_t tensor_size(Backend& b, int32_t id) {
  size_t bytes;
  b.check(b.api.tensor_data(b.handle, id, nullptr, &bytes));
  return bytes;
}

py::array_t<float> tensor_dequantize(Backend& b, int32_t id) {
  void* data;
  b.check(b.api.tensor_data(b.handle, id, &data, nullptr));
  int64_t shape[2];
  std::memcpy(shape, static_cast<const char*>(data) + 24, 16);  // TensorHeader.rows, cols
  py::array_t<float> out({shape[0], shape[1]});
  b.check(b.api.tensor_dequantize(b.handle, id, out.mutable_data()));
  return out;
}

void tensors_gather(Backend& b, const std::vector<int32_t>& ids) {
  b.check(b.api.tensors_gather(b.handle, ids.data(), static_cast<int32_t>(ids.size())));
}

// Returns the bytes written.
uint64_t tensors_write(Backend& b, int fd, uint64_t offset, std::vector<int32_t> ids) {
  pe_tensor_file file{};
  file.struct_size = sizeof file;
  file.fd = fd;
  file.offset = offset;
  file.count = static_cast<int32_t>(ids.size());
  file.ids = ids.data();
  uint64_t bytes;
  pe_status status;
  {
    py::gil_scoped_release release;
    status = b.api.tensors_write(b.handle, &file, &bytes);
  }
  b.check(status);
  return bytes;
}

// descs: (format, rows, cols, group) of each tensor; returns their ids.
std::vector<int32_t> tensors_map(Backend& b, int fd, uint64_t offset,
                                 const std::vector<std::tuple<int, int64_t, int64_t, int>>& descs) {
  std::vector<pe_tensor_desc> c_descs;
  for (const auto& [format, rows, cols, group] : descs)
    c_descs.push_back({sizeof(pe_tensor_desc), format, rows, cols, group});
  std::vector<int32_t> ids(descs.size());
  pe_tensor_file file{};
  file.struct_size = sizeof file;
  file.fd = fd;
  file.offset = offset;
  file.count = static_cast<int32_t>(ids.size());
  file.ids = ids.data();
  file.descs = c_descs.data();
  pe_status status;
  {
    py::gil_scoped_release release;
    status = b.api.tensors_map(b.handle, &file);
  }
  b.check(status);
  return ids;
}

int32_t rope_set(Backend& b, int32_t id, const Array<float>& table, const py::object& q_scale) {
  if (table.ndim() != 2) raise("RequestError", "a rope table is float32 [positions, rotary_dim]");
  Array<float> scales;
  if (!q_scale.is_none()) {
    scales = q_scale.cast<Array<float>>();
    if (scales.ndim() != 1 || scales.shape(0) != table.shape(0))
      raise("RequestError", "q_scale is float32 [positions] of the rope table");
  }
  b.check(b.api.rope_set(b.handle, &id, table.data(), table.shape(0), static_cast<int32_t>(table.shape(1)),
                         q_scale.is_none() ? nullptr : scales.data()));
  return id;
}

int32_t kv_create(Backend& b, int layers, int kv_heads, int k_dim, int v_dim, int dtype) {
  const pe_kv_desc desc{sizeof(pe_kv_desc), layers, kv_heads, k_dim, v_dim, dtype};
  int32_t id;
  b.check(b.api.kv_create(b.handle, &desc, &id));
  return id;
}

size_t kv_block_bytes(Backend& b, int32_t group) {
  size_t bytes;
  b.check(b.api.kv_block_bytes(b.handle, group, &bytes));
  return bytes;
}

py::array_t<double> measure(Backend& b, int limit, int64_t work, int32_t passes) {
  py::array_t<double> rates(passes > 0 ? passes : 1);  // the core refuses other numbers
  const pe_limit_args args{sizeof(pe_limit_args), limit, work, passes, rates.mutable_data()};
  pe_status status;
  {
    py::gil_scoped_release release;
    status = b.api.limit_measure(b.handle, &args);
  }
  b.check(status);
  return rates;
}

}  // namespace

void bind_backend(py::module_& m) {
  py::class_<Library>(m, "Library", "Another library with the functions of pyengine.h, opened by its path.")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_readonly("path", &Library::path)
      .def_property_readonly("compiler", [](const Library& l) { return std::string(l.api.compiler()); })
      .def_property_readonly("commit", [](const Library& l) { return std::string(l.api.commit()); });
  py::class_<Backend>(m, "Backend", "Threads, kernels, tensors, rope tables and KV groups of one backend.")
      .def(py::init<int, const std::string&, const Library*, const std::string&>(), py::arg("threads") = 0,
           py::arg("isa") = "", py::arg("library") = py::none(), py::arg("device") = "")
      .def_property_readonly("isa", [](const Backend& b) { return std::string(b.api.backend_isa(b.handle)); })
      .def_property_readonly("device", [](const Backend& b) { return std::string(b.api.backend_device(b.handle)); })
      .def_property_readonly("threads", [](const Backend& b) { return b.api.backend_threads(b.handle); })
      .def("measure", &measure, py::arg("limit"), py::arg("work"), py::arg("passes"))
      .def("flush_caches", [](Backend& b) { b.check(b.api.flush_caches(b.handle)); })
      .def("tensor_create", &tensor_create, py::arg("format"), py::arg("rows"), py::arg("cols"), py::arg("group") = 0)
      .def("tensor_pack", &tensor_pack, py::arg("id"), py::arg("source"), py::arg("offset") = 0, py::arg("stride") = 1,
           py::arg("importance") = py::none())
      .def("tensor_bytes", &tensor_bytes, py::arg("id"))
      .def("tensor_write", &tensor_write, py::arg("id"), py::arg("source"))
      .def("tensor_size", &tensor_size, py::arg("id"))
      .def("tensor_dequantize", &tensor_dequantize, py::arg("id"))
      .def(
          "tensor_free", [](Backend& b, int32_t id) { b.check(b.api.tensor_free(b.handle, id)); }, py::arg("id"))
      .def("tensors_gather", &tensors_gather, py::arg("ids"))
      .def("tensors_write", &tensors_write, py::arg("fd"), py::arg("offset"), py::arg("ids"))
      .def("tensors_map", &tensors_map, py::arg("fd"), py::arg("offset"), py::arg("descs"))
      .def("rope_set", &rope_set, py::arg("id"), py::arg("table"), py::arg("q_scale") = py::none())
      .def("kv_create", &kv_create, py::arg("layers"), py::arg("kv_heads"), py::arg("k_dim"), py::arg("v_dim"),
           py::arg("dtype"))
      .def(
          "kv_reserve",
          [](Backend& b, int32_t group, int32_t blocks) { b.check(b.api.kv_reserve(b.handle, group, blocks)); },
          py::arg("group"), py::arg("blocks"))
      .def("kv_block_bytes", &kv_block_bytes, py::arg("group"));
  py::enum_<pe_limit>(m, "Limit", py::arithmetic())
      .value("READ", PE_LIMIT_READ)
      .value("INT8", PE_LIMIT_INT8)
      .value("F32", PE_LIMIT_F32)
      .value("HOP", PE_LIMIT_HOP);
  py::enum_<pe_format>(m, "Format", py::arithmetic())
      .value("F32", PE_F32)
      .value("BF16", PE_BF16)
      .value("INT8", PE_INT8)
      .value("INT4_SYM", PE_INT4_SYM)
      .value("INT4_MIN", PE_INT4_MIN)
      .value("ROWS_F32", PE_ROWS_F32)
      .value("ROWS_BF16", PE_ROWS_BF16)
      .value("VECTOR_F32", PE_VECTOR_F32);
  py::enum_<pe_kv_dtype>(m, "KvDtype", py::arithmetic())
      .value("F32", PE_KV_F32)
      .value("BF16", PE_KV_BF16)
      .value("INT8", PE_KV_INT8);
}

}  // namespace pe_py
