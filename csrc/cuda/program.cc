// Creating a program on the device, and running it.
#include "cuda/program.h"

#include <algorithm>
#include <numeric>

#include "core/status.h"
#include "cuda/kv_layout.h"
#include "cuda/repack.h"

namespace pe::cuda {

namespace {

constexpr size_t kGraphBytes = size_t{8} << 20;  // kept free for the driver's graphs
constexpr size_t kMostGraphs = 64;
constexpr uint64_t kTimedEvery = 16;  // runs of a graph
constexpr size_t kOpsAhead = 8;       // a large batch is launched so far ahead of the device, twice
constexpr size_t kDeviceAlign = 256;

Matrix size_of(const Packed* w) { return w && is_packed(w->format) ? matrix_view(*w, nullptr, nullptr) : Matrix{}; }

}  // namespace

// ---- graphs ---------------------------------------------------------------------------------------------------------

Graph::~Graph() {
  if (exec_) cudaGraphExecDestroy(exec_);
}

void Graph::instantiate(cudaGraph_t graph) {
  const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(error, "making a graph");
}

template <class F>
void Graph::capture(Stream stream, F&& emit) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a graph");
  try {
    emit();
  } catch (...) {
    if (cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream, &graph), "capturing a graph");
  instantiate(graph);
}

// ---- creation -------------------------------------------------------------------------------------------------------

CudaProgram::CudaProgram(CudaBackend& backend, const pe_program_desc& desc) : Program(backend, desc), cuda_(backend) {
  for (const Op& op : ops_)
    if (op.kv && std::find(groups_.begin(), groups_.end(), op.d.kv_group) == groups_.end())
      groups_.push_back(op.d.kv_group);
  plan();
  view_tensors();
  cuda_.upload(tensors_);
  view_ropes();
  if (timed_)
    for (size_t i = 0; i <= ops_.size(); ++i) events_.emplace_back();
  for (int i = 0; i < 2; ++i) throttle_.emplace_back(false);
  seen_changes_ = cuda_.changes();
  seen_moves_ = cuda_.moves();
}

CudaProgram::~CudaProgram() { cudaStreamSynchronize(cuda_.stream()); }

// What products and FFNs of many tokens take; checks that attention has kernels for the heads.
size_t CudaProgram::plan_scratch() {
  size_t bytes = 0;
  const bool many = max_tokens_ > kFewTokens && cuda_.gemm().available();
  for (const Op& op : ops_) {
    const int32_t kind = op.d.kind;
    if (kind == PE_OP_ATTENTION || kind == PE_OP_ATTENTION_QUANTIZE)
      attention_scratch_floats(attention_of(op, kv_view(op.kv->desc(), nullptr, 0, nullptr), max_tokens_, 1, 1));
    if (!many) continue;
    if (kind == PE_OP_LINEAR || kind == PE_OP_LINEAR_RESIDUAL || kind == PE_OP_QKV_ROPE_APPEND)
      bytes = std::max(bytes, gemm_scratch_bytes(size_of(op.weight), max_tokens_));
    if (kind == PE_OP_LM_HEAD && logits_capacity_ > kFewTokens)
      bytes = std::max(bytes, gemm_scratch_bytes(size_of(op.weight), logits_capacity_));
    if (!is_ffn(kind)) continue;
    Ffn f;
    f.up = size_of(op.weight);
    f.down = size_of(op.weight2);
    f.gated = is_gated_ffn(kind);
    f.tokens = max_tokens_;
    bytes = std::max(bytes, ffn_scratch_bytes(f));
  }
  return bytes;
}

void CudaProgram::plan() {
  size_t total = plan_lives();
  const auto take = [&](size_t bytes) {
    total = align_up(total, kDeviceAlign);
    const size_t here = total;
    total += bytes;
    return here;
  };
  const auto tokens = static_cast<size_t>(max_tokens_);
  logits_capacity_ = std::max(max_sequences_, kFewTokens);
  size_t taps = 0, hidden = 0, rows = 0, experts = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    views_.emplace_back();
    if (op.d.kind == PE_OP_TAP) {
      views_[i].tap = taps;
      taps += tokens * static_cast<size_t>(op.input->per_token * op.input->width);
    }
    if (op.d.kind == PE_OP_LOAD_HIDDEN) hidden = std::max(hidden, tokens * static_cast<size_t>(op.output->width));
    if (op.d.kind == PE_OP_ROUTER) {
      rows = std::max(rows, tokens * static_cast<size_t>(op.d.top_k));
      experts = std::max(experts, static_cast<size_t>(op.d.experts));
    }
    // the head's input has to stay where the logits are taken in parts
    if (op.d.kind == PE_OP_LM_HEAD && i + 1 + (has_sample_ ? 1 : 0) < ops_.size())
      logits_capacity_ = std::max(logits_capacity_, max_tokens_);
  }
  if (vocab_) {
    shape(head_, logits_capacity_);
    shape(logits_, logits_capacity_);
    head_.offset = take(head_.bytes);
    logits_.offset = take(logits_.bytes);
  }
  scratch_bytes_ = plan_scratch();
  const size_t scratch = take(scratch_bytes_), taps_at = take(taps * 4), hidden_at = take(hidden * 4),
               sample_at = take(vocab_ ? sample_scratch_bytes(logits_capacity_, vocab_) : 0),
               first_at = take((experts + 1) * 4), order_at = take(rows * 4), place_at = take(rows * 4),
               counts_at = take(expert_tokens_.size() * sizeof(uint64_t));
  arena_bytes_ = total;
  tensors_ = cuda_.place_tensors(held_, total + kGraphBytes);
  arena_ = DeviceMemory(total);
  uint8_t* base = arena_.data();
  check_cuda(cudaMemsetAsync(base, 0, total, cuda_.stream()), "clearing buffers");
  place_lives(base);
  if (vocab_) {
    place(head_, base, logits_capacity_);
    place(logits_, base, logits_capacity_);
  }
  scratch_ = base + scratch;
  taps_ = reinterpret_cast<float*>(base + taps_at);
  hidden_ = reinterpret_cast<float*>(base + hidden_at);
  sample_scratch_ = base + sample_at;
  first_row_ = reinterpret_cast<int32_t*>(base + first_at);
  order_ = reinterpret_cast<int32_t*>(base + order_at);
  place_ = reinterpret_cast<int32_t*>(base + place_at);
  counts_ = reinterpret_cast<uint64_t*>(base + counts_at);
}

void CudaProgram::view_tensors() {
  std::unordered_map<const Tensor*, std::shared_ptr<DeviceTensor>> of_host;
  for (const auto& t : tensors_) of_host[t->host.get()] = t;
  const auto find = [&](int32_t id) { return id < 0 ? nullptr : of_host.at(&cuda_.tensor(id)); };
  const auto vector = [&](int32_t id) { return id < 0 ? nullptr : reinterpret_cast<const float*>(find(id)->data); };
  for (size_t i = 0; i < ops_.size(); ++i) {
    const pe_op& d = ops_[i].d;
    OpViews& v = views_[i];
    v.weight = find(d.weight);
    v.weight2 = find(d.weight2);
    v.bias = vector(d.bias);
    v.bias2 = vector(d.bias2);
    v.norm = vector(d.norm);
    v.norm2 = vector(d.norm2);
    v.norm_bias = vector(d.norm_bias);
  }
}

void CudaProgram::view_ropes() {
  for (size_t i = 0; i < ops_.size(); ++i)
    if (ops_[i].rope) views_[i].rope = cuda_.rope_view(*ops_[i].rope);
}

// ---- runs -----------------------------------------------------------------------------------------------------------

// What was packed again since the last run, or lies elsewhere.
void CudaProgram::refresh() {
  if (seen_changes_ != cuda_.changes()) cuda_.upload(tensors_);
  seen_changes_ = cuda_.changes();
  if (seen_moves_ == cuda_.moves()) return;
  replays_.clear();
  view_ropes();
  seen_moves_ = cuda_.moves();
}

void CudaProgram::stop_if_cancelled() {
  if (cancelled()) fail(PE_CANCELLED, "cancelled");
}

void CudaProgram::run(const pe_batch& batch) {
  const uint64_t start = now_ns();
  batch_ = &batch;
  check_batch(batch);
  cuda_.select();
  try {
    stop_if_cancelled();
    refresh();
    const Shape shape = shape_of(batch);
    make_room(shape);
    fill(shape, 0);
    send(shape);
    send_hidden();
    const std::vector<double>* shares = execute(shape);
    fetch(shape, 0);
    more_logits(shape);
    fetch_taps();
    stop_if_cancelled();
    const uint64_t run_ns = now_ns() - start;
    ++runs_;
    run_ns_ += run_ns;
    if (!shares) return;
    add_times(*shares, run_ns);
  } catch (...) {
    cudaStreamSynchronize(cuda_.stream());  // nothing may read the arrays of this step while the next one's are written
    throw;
  }
}

const std::vector<double>* CudaProgram::execute(const Shape& shape) {
  const bool replayed = shape.tokens <= kFewTokens && shape.rows == batch_->logits_count;
  if (!replayed) {
    launch_all(shape, timed_);
    if (timed_) shares_ = measured_shares();
    return timed_ ? &shares_ : nullptr;
  }
  if (replays_.size() >= kMostGraphs && !replays_.count(shape.key())) replays_.clear();
  Replay& replay = replays_[shape.key()];
  const uint64_t run = replay.runs++;
  if (timed_ && (run == 0 || run % kTimedEvery == 1)) {
    launch_all(shape, true);
    replay.shares = measured_shares();
  } else if (run == 0) {
    launch_all(shape, false);
  } else {
    if (!replay.graph) replay.graph.capture(cuda_.stream(), [&] { launch_all(shape, false); });
    replay.graph.launch(cuda_.stream());
  }
  return timed_ ? &replay.shares : nullptr;
}

// Launches return at once: a large batch is held back to a few ops in front of the device, so that a cancel is seen.
void CudaProgram::launch_all(const Shape& shape, bool timed) {
  const Stream stream = cuda_.stream();
  if (timed) events_[0].record(stream);
  for (size_t i = 0; i < ops_.size(); ++i) {
    emit(i, shape);
    if (timed) events_[i + 1].record(stream);
    if (shape.tokens <= kFewTokens || (i + 1) % kOpsAhead) continue;
    const size_t turn = (i + 1) / kOpsAhead;
    throttle_[turn % 2].record(stream);
    if (turn > 1) throttle_[(turn + 1) % 2].wait();
    stop_if_cancelled();
  }
}

std::vector<double> CudaProgram::measured_shares() {
  events_.back().wait();
  std::vector<double> ms(ops_.size());
  for (size_t i = 0; i < ops_.size(); ++i) ms[i] = events_[i + 1].ms_since(events_[i]);
  const double total = std::accumulate(ms.begin(), ms.end(), 0.0);
  for (double& x : ms) x = total > 0.0 ? x / total : 1.0 / static_cast<double>(ms.size());
  return ms;
}

// A run's time, shared out as last measured; the parts add up to it.
void CudaProgram::add_times(const std::vector<double>& shares, uint64_t run_ns) {
  double upto = 0.0;
  uint64_t given = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    upto += shares[i];
    const auto now = i + 1 == shares.size()
                         ? run_ns
                         : std::clamp(static_cast<uint64_t>(upto * static_cast<double>(run_ns)), given, run_ns);
    op_ns_[i] += now - given;
    given = now;
  }
}

// Logits of more rows than there is memory for: the head again, for the next rows of the same hidden state.
void CudaProgram::more_logits(const Shape& first) {
  for (int32_t row = first.rows; row < batch_->logits_count;) {
    Shape shape = first;
    shape.rows = std::min(batch_->logits_count - row, logits_capacity_);
    fill(shape, row);
    send(shape);
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].d.kind == PE_OP_LM_HEAD || ops_[i].d.kind == PE_OP_SAMPLE) emit(i, shape);
    fetch(shape, row);
    row += shape.rows;
  }
}

void CudaProgram::routing(uint64_t* tokens, int64_t* count, bool reset) {
  if (!expert_tokens_.empty()) {
    const size_t bytes = expert_tokens_.size() * sizeof(uint64_t);
    cuda_.select();
    check_cuda(cudaMemcpy(expert_tokens_.data(), counts_, bytes, cudaMemcpyDeviceToHost), "copying routing");
    if (reset) check_cuda(cudaMemsetAsync(counts_, 0, bytes, cuda_.stream()), "clearing routing");
  }
  Program::routing(tokens, count, reset);
}

}  // namespace pe::cuda
