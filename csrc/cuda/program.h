// A program on a CUDA device: run() copies the step's arrays, launches the ops' kernels on the backend's stream, or for
// few tokens the graph that was captured of them, and copies back what was asked for. program.cc creates and runs,
// emit.cc launches, step.cc has the step's arrays, results.cc what comes back.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cuda/backend.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "runtime/program.h"

namespace pe::cuda {

using ShapeKey = std::tuple<int32_t, int32_t, int32_t, int32_t>;

// What of a batch decides which kernels are launched on which addresses.
struct Shape {
  int32_t tokens = 0, sequences = 0, rows = 0;  // rows of logits
  int32_t partitions = 0;                       // of 256 keys, of the longest context, rounded up to a power of two
  ShapeKey key() const { return {tokens, sequences, rows, partitions}; }
};

// Where a step's arrays lie in their memory, behind each other: what a run brings back first.
struct StepLayout {
  size_t failure = 0, sampled = 0, results_end = 0, token_ids = 0, positions = 0, sequences = 0, query_start = 0,
         logits_rows = 0, params = 0, tables = 0, end = 0;
  StepLayout(const Shape& shape, size_t groups, int32_t table_width);
};

// What the tensors, tables and groups of an op are on the device.
struct OpViews {
  std::shared_ptr<DeviceTensor> weight, weight2;
  const float *bias = nullptr, *bias2 = nullptr, *norm = nullptr, *norm2 = nullptr, *norm_bias = nullptr;
  Rope rope;
  size_t tap = 0;  // floats before this tap's in taps_
};

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept { std::swap(exec_, other.exec_); }
  Graph& operator=(Graph&&) = delete;
  template <class F>
  void capture(Stream stream, F&& emit);
  void launch(Stream stream) { check_cuda(cudaGraphLaunch(exec_, stream), "launching a graph"); }
  explicit operator bool() const { return exec_ != nullptr; }

 private:
  void instantiate(cudaGraph_t graph);
  cudaGraphExec_t exec_ = nullptr;
};

class CudaProgram final : public Program {
 public:
  CudaProgram(CudaBackend& backend, const pe_program_desc& desc);
  ~CudaProgram() override;
  void run(const pe_batch& batch) override;
  void routing(uint64_t* tokens, int64_t* count, bool reset) override;

 private:
  // A shape's runs: the first is launched op by op, which loads the kernels; the second captures.
  struct Replay {
    Graph graph;
    uint64_t runs = 0;
    std::vector<double> shares;  // of every op in the run's time, as last measured
  };

  // program.cc
  void plan();
  size_t plan_scratch();
  void view_tensors();
  void view_ropes();
  void refresh();
  const std::vector<double>* execute(const Shape& shape);  // the ops' shares, of a timed program
  void launch_all(const Shape& shape, bool timed);
  std::vector<double> measured_shares();
  void add_times(const std::vector<double>& shares, uint64_t run_ns);
  void more_logits(const Shape& first);
  bool cancelled() const { return batch_->cancel && __atomic_load_n(batch_->cancel, __ATOMIC_RELAXED); }
  void stop_if_cancelled();

  // step.cc
  Shape shape_of(const pe_batch& batch) const;
  void make_room(const Shape& shape);
  void fill(const Shape& shape, int32_t first_row);
  void send(const Shape& shape);
  void send_hidden();
  Step step_of(const Shape& shape) const;
  KvView kv_view_of(const Op& op, const Shape& shape) const;

  // emit.cc
  void emit(size_t op, const Shape& shape);
  void emit_linear(const Op& op, const OpViews& v, const Rows& out, float factor, const Shape& shape);
  void emit_heads(const Op& op, const OpViews& v, const Rows& qkv, const Shape& shape);
  void emit_attention(const Op& op, const Shape& shape);
  void emit_ffn(const Op& op, const OpViews& v, const Shape& shape);
  void emit_router(const Op& op, const OpViews& v, const Shape& shape);
  void emit_experts(const Op& op, const OpViews& v, const Shape& shape);
  void emit_head(const Op& op, const OpViews& v, const Shape& shape);
  void emit_sample(const Shape& shape);
  Attention attention_of(const Op& op, const KvView& kv, int tokens, int sequences, int partitions) const;
  Ffn ffn_of(const Op& op, const OpViews& v, int tokens) const;
  Routing routing_of(const Op& op) const;

  // results.cc
  void fetch(const Shape& shape, int32_t first_row);
  void check_failure(const Shape& shape, int32_t first_row) const;
  void take_sampled(const Shape& shape, int32_t first_row);
  void sample_on_host(const std::vector<int32_t>& rows, const float* logits, int32_t first_row);
  void fetch_taps();
  bool on_device(int32_t row) const;  // whether it is sampled there
  void fill_params(const Shape& shape, int32_t first_row, SampleRow* to) const;

  CudaBackend& cuda_;
  std::vector<OpViews> views_;
  DeviceTensors tensors_;
  std::vector<int32_t> groups_;  // ids of the KV groups that ops use
  DeviceMemory arena_, partials_, step_;
  PinnedMemory staging_;  // the host's side of step_
  uint8_t* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  void* sample_scratch_ = nullptr;
  float *taps_ = nullptr, *hidden_ = nullptr;
  int32_t *first_row_ = nullptr, *order_ = nullptr, *place_ = nullptr;
  uint64_t* counts_ = nullptr;   // of all routers
  int32_t logits_capacity_ = 0;  // rows
  int32_t table_width_ = 16;     // blocks of a sequence
  bool with_graphs_ = true;
  std::map<ShapeKey, Replay> replays_;
  std::vector<double> shares_;   // of a run without a graph
  std::vector<Event> events_;    // around every op of a timed run
  std::vector<Event> throttle_;  // of large batches: how far the device is
  std::vector<float> host_logits_, work_;
  uint64_t seen_changes_ = 0, seen_moves_ = 0;

  const pe_batch* batch_ = nullptr;  // of the run in progress
};

inline Rows rows_of(const Buffer& b) { return {b.f, b.stride, b.width, b.quantized, b.quant}; }

}  // namespace pe::cuda
