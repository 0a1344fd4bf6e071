#include "runtime/backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/status.h"

using namespace pe;

namespace {

template <class List>
auto& find(const List& list, int32_t id, const char* what) {
  if (id < 0 || static_cast<size_t>(id) >= list.size() || !list[static_cast<size_t>(id)])
    fail(PE_REQUEST, "%s %d does not exist", what, id);
  return *list[static_cast<size_t>(id)];
}

// [cols], 1 where none is given. Only the ratios inside a group matter: where its largest is so small or so large that
// float32 would lose the products with squared weights, all are divided by it; where all are 0, they count the same.
std::vector<float> importance_of(const Packed& t, const float* given) {
  std::vector<float> h(static_cast<size_t>(t.cols), 1.0f);
  if (!given) return h;
  h.assign(given, given + t.cols);
  for (int64_t k = 0; k < t.cols; k += t.group) {
    const auto first = h.begin() + k, last = h.begin() + std::min<int64_t>(k + t.group, t.cols);
    const float top = *std::max_element(first, last);
    if (top >= 1e-30f && top <= 1e30f) continue;
    for (auto x = first; x != last; ++x) *x = top > 0.0f ? static_cast<float>(double{*x} / double{top}) : 1.0f;
  }
  return h;
}

int checked_threads(int threads) {
  if (threads < 0 || threads > 1024) fail(PE_REQUEST, "threads is %d; expected 0 (automatic) to 1024", threads);
  return threads ? threads : default_threads();
}

size_t element_bytes(int32_t dtype) { return dtype == PE_SRC_F32 ? 4 : 2; }

// Rows of PE_ROWS_* and PE_VECTOR_F32: converted one by one.
void copy_rows(const Packed& t, const pe_pack_args& a, int64_t begin, int64_t end) {
  const uint8_t* source = static_cast<const uint8_t*>(a.source);
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* p = source + static_cast<size_t>(row * t.cols) * element_bytes(a.source_dtype);
    const size_t at = static_cast<size_t>((a.panel_offset + row) * t.cols);
    for (int64_t k = 0; k < t.cols; ++k) {
      float x;
      uint16_t half = 0;
      if (a.source_dtype == PE_SRC_F32) {
        std::memcpy(&x, p + 4 * k, 4);
      } else {
        std::memcpy(&half, p + 2 * k, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(&x, &bits, 4);
      }
      if (!(x * 0.0f == 0.0f))
        fail(PE_FORMAT, "%s at row %lld, column %lld", x != x ? "NaN" : "Inf", static_cast<long long>(row),
             static_cast<long long>(k));
      if (t.format == PE_ROWS_BF16)
        reinterpret_cast<uint16_t*>(t.data)[at + static_cast<size_t>(k)] = half;
      else
        reinterpret_cast<float*>(t.data)[at + static_cast<size_t>(k)] = x;
    }
  }
}

}  // namespace

pe_backend::pe_backend(int threads, const char* isa) : kernels(choose_kernels(isa)), team(checked_threads(threads)) {}

const Tensor& pe_backend::tensor(int32_t id) const { return find(tensors, id, "tensor"); }
const RopeTable& pe_backend::rope(int32_t id) const { return find(ropes, id, "rope table"); }
KvGroup& pe_backend::kv(int32_t id) const { return find(kv_groups, id, "KV group"); }

void pe_backend::gather_tensors(const int32_t* ids, int32_t count) {
  constexpr size_t kAlone = 8 * kHugePage;  // from here on a tensor's own huge pages are nearly all of it
  std::vector<int32_t> moved;
  size_t bytes = 0;
  for (int32_t i = 0; i < count; ++i) {
    const Tensor& t = tensor(ids[i]);
    if (!t.writable() || t.size() >= kAlone) continue;
    moved.push_back(ids[i]);
    bytes += align_up(t.size(), kAlign) + kRedZone;
  }
  if (moved.empty()) return;
  const auto memory = std::make_shared<Memory>(bytes);
  size_t at = 0;
  for (const int32_t id : moved) {  // each old one goes before the next page is touched
    auto& place = tensors[static_cast<size_t>(id)];
    place = std::make_shared<Tensor>(*place, memory, at);
    at += align_up(place->size(), kAlign);
    memory->fence(at);
    at += kRedZone;
  }
}

void pe_backend::pack(int32_t id, const pe_pack_args& a) {
  const Packed& t = tensor(id).view();
  if (!tensor(id).writable()) fail(PE_REQUEST, "tensor %d is mapped from a file, read-only", id);
  tensor_changes(tensor(id));
  const bool panels = is_packed(t.format);
  const int64_t units = panels ? (a.rows + kPanel - 1) / kPanel : a.rows, all = panels ? t.panels : t.rows;
  if (a.source_dtype < PE_SRC_F32 || a.source_dtype > PE_SRC_F16)
    fail(PE_REQUEST, "source dtype %d is unknown", a.source_dtype);
  if (!a.source || a.rows < 1 || a.panel_offset < 0 || a.panel_stride < 1 || (!panels && a.panel_stride != 1) ||
      units > all || a.panel_offset + (units - 1) * a.panel_stride >= all)
    fail(PE_REQUEST, "%lld rows at %lld with stride %lld do not fit a tensor of %lld %s",
         static_cast<long long>(a.rows), static_cast<long long>(a.panel_offset), static_cast<long long>(a.panel_stride),
         static_cast<long long>(all), panels ? "panels" : "rows");
  for (int64_t k = 0; a.importance && k < t.cols; ++k)
    if (!(a.importance[k] >= 0.0f) || a.importance[k] > 3.0e38f)
      fail(PE_REQUEST, "importance of column %lld is %g; expected 0 or more, finite", static_cast<long long>(k),
           static_cast<double>(a.importance[k]));
  if (!panels) {
    if (a.source_dtype == PE_SRC_F16 || (t.format == PE_ROWS_BF16 && a.source_dtype != PE_SRC_BF16))
      fail(PE_UNSUPPORTED, "source dtype %d for %s", a.source_dtype, format_name(t.format));
    copy_rows(t, a, 0, a.rows);
    return;
  }
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  int64_t bad_row = -1, bad_col = -1;
  const size_t scratch_bytes =
      (align_up(static_cast<size_t>(t.cols), 8) + 2 * static_cast<size_t>(t.groups)) * kPanel * sizeof(float);
  std::vector<float> importance;
  if (is_integer(t.format)) importance = importance_of(t, a.importance);
  Memory scratch(scratch_bytes * static_cast<size_t>(team.size()));
  team.run([&](int thread) {
    PackArgs p{};
    p.weight = &t;
    p.source = a.source;
    p.source_dtype = a.source_dtype;
    p.source_rows = a.rows;
    p.importance = importance.data();
    p.scratch = reinterpret_cast<float*>(scratch.data() + scratch_bytes * static_cast<size_t>(thread));
    for (int64_t i; (i = next.fetch_add(1)) < units;) {
      p.first_row = i * kPanel;
      p.panel = a.panel_offset + i * a.panel_stride;
      p.bad_row = p.bad_col = -1;
      kernels.pack_panel(&p);
      if (p.bad_row < 0) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (bad_row < 0 || p.bad_row < bad_row) {
        bad_row = p.bad_row;
        bad_col = p.bad_col;
      }
    }
  });
  if (bad_row >= 0)
    fail(PE_FORMAT, "NaN or Inf at row %lld, column %lld", static_cast<long long>(bad_row),
         static_cast<long long>(bad_col));
}

void pe_backend::dequantize(int32_t id, float* out) {
  const Packed& t = tensor(id).view();
  std::atomic<int64_t> next{0};
  team.run([&](int) {
    for (int64_t row; (row = next.fetch_add(1)) < t.rows;) kernels.gather_row(&t, row, out + row * t.cols);
  });
}
