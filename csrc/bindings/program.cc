#include <signal.h>

#include <algorithm>
#include <cstring>

#include "bindings.h"

namespace pe_py {

namespace {

struct Field {
  const char* name;
  size_t offset;
  bool is_float;
};

#define PE_FIELD(name) \
  Field { #name, offsetof(pe_op, name), false }
constexpr Field kOpFields[] = {PE_FIELD(kind),
                               PE_FIELD(stage),
                               PE_FIELD(layer),
                               PE_FIELD(input),
                               PE_FIELD(output),
                               PE_FIELD(scratch),
                               PE_FIELD(routing),
                               PE_FIELD(rows),
                               PE_FIELD(weight),
                               PE_FIELD(weight2),
                               PE_FIELD(bias),
                               PE_FIELD(bias2),
                               PE_FIELD(norm),
                               PE_FIELD(norm2),
                               PE_FIELD(norm_bias),
                               PE_FIELD(rope),
                               PE_FIELD(kv_group),
                               PE_FIELD(kv_layer),
                               PE_FIELD(heads),
                               PE_FIELD(kv_heads),
                               PE_FIELD(head_dim),
                               PE_FIELD(window),
                               PE_FIELD(activation),
                               PE_FIELD(norm_kind),
                               PE_FIELD(experts),
                               PE_FIELD(top_k),
                               PE_FIELD(groups),
                               PE_FIELD(top_groups),
                               PE_FIELD(scoring),
                               PE_FIELD(group_score),
                               PE_FIELD(normalise),
                               {"eps", offsetof(pe_op, eps), true},
                               {"softcap", offsetof(pe_op, softcap), true},
                               {"scale", offsetof(pe_op, scale), true}};
#undef PE_FIELD

// A dict of pe_op fields; ids that are left out are -1, numbers 0.
pe_op to_op(const py::dict& d) {
  pe_op op{};
  op.struct_size = sizeof op;
  op.layer = op.input = op.output = op.scratch = op.routing = op.rows = op.weight = op.weight2 = op.bias = op.bias2 =
      op.norm = op.norm2 = op.norm_bias = op.rope = op.kv_group = op.kv_layer = -1;
  for (const auto& [key, value] : d) {
    const auto name = key.cast<std::string>();
    const Field* field = nullptr;
    for (const Field& f : kOpFields)
      if (name == f.name) field = &f;
    if (!field) raise("RequestError", "an op has no field '" + name + "'");
    char* at = reinterpret_cast<char*>(&op) + field->offset;
    if (field->is_float) {
      const auto x = value.cast<float>();
      std::memcpy(at, &x, 4);
    } else {
      const auto x = value.cast<int32_t>();
      std::memcpy(at, &x, 4);
    }
  }
  return op;
}

// Ctrl-C during a run sets the run's cancel flag from the signal handler itself: Python's own handler only notes the
// signal, and the interpreter would look at the note after the run.
volatile int32_t* interrupt_flag = nullptr;
struct sigaction previous_action;

void on_interrupt(int number, siginfo_t* info, void* context) {
  if (interrupt_flag) *interrupt_flag = 1;
  if (previous_action.sa_flags & SA_SIGINFO)
    previous_action.sa_sigaction(number, info, context);
  else if (previous_action.sa_handler != SIG_IGN && previous_action.sa_handler != SIG_DFL)
    previous_action.sa_handler(number);
}

class WatchInterrupt {
 public:
  explicit WatchInterrupt(volatile int32_t* flag) {
    if (!flag || interrupt_flag) return;
    sigaction(SIGINT, nullptr, &previous_action);
    if (!(previous_action.sa_flags & SA_SIGINFO) &&
        (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN))
      return;  // nobody asked to hear of it
    interrupt_flag = flag;
    struct sigaction mine{};
    mine.sa_sigaction = on_interrupt;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGINT, &mine, nullptr);
    watching_ = true;
  }
  ~WatchInterrupt() {
    if (!watching_) return;
    sigaction(SIGINT, &previous_action, nullptr);
    interrupt_flag = nullptr;
  }

 private:
  bool watching_ = false;
};

class Program {
 public:
  Program(const py::object& backend, const py::list& ops, const py::list& buffers, int max_batch_tokens,
          int max_sequences, bool timed)
      : object_(backend), backend_(backend.cast<Backend&>()) {
    std::vector<pe_op> c_ops;
    for (const auto& op : ops) c_ops.push_back(to_op(op.cast<py::dict>()));
    std::vector<pe_buffer_desc> c_buffers;
    for (const auto& b : buffers) {
      const auto fields = b.cast<py::tuple>();  // (quantized, width), and rows a token where that is not 1
      if (fields.size() < 2 || fields.size() > 3) raise("RequestError", "a buffer is (quantized, width[, rows])");
      c_buffers.push_back({sizeof(pe_buffer_desc), fields[0].cast<bool>() ? 1 : 0, fields[1].cast<int64_t>(),
                           fields.size() > 2 ? fields[2].cast<int32_t>() : 1});
    }
    op_count_ = c_ops.size();
    for (const pe_op& op : c_ops) {
      if (op.kind == PE_OP_LM_HEAD) vocab_ = rows_of(op.weight);
      if (op.kind == PE_OP_TAP) {
        const auto at = static_cast<size_t>(op.head_dim);
        if (tap_widths_.size() <= at) tap_widths_.resize(at + 1);
        if (op.input >= 0 && static_cast<size_t>(op.input) < c_buffers.size())
          tap_widths_[at] = tap_width(c_buffers[static_cast<size_t>(op.input)]);
      }
      if (op.kind == PE_OP_LOAD_HIDDEN && op.output >= 0 && static_cast<size_t>(op.output) < c_buffers.size())
        hidden_width_ = c_buffers[static_cast<size_t>(op.output)].width;
      if (op.kv_group >= groups_) groups_ = op.kv_group + 1;
    }
    pe_program_desc desc{};
    desc.struct_size = sizeof desc;
    desc.op_count = static_cast<int32_t>(c_ops.size());
    desc.buffer_count = static_cast<int32_t>(c_buffers.size());
    desc.ops = c_ops.data();
    desc.buffers = c_buffers.data();
    desc.max_batch_tokens = max_batch_tokens;
    desc.max_sequences = max_sequences;
    desc.timed = timed;
    backend_.check(backend_.api.program_create(backend_.handle, &desc, &handle_));
  }
  ~Program() { backend_.api.program_destroy(handle_); }
  Program(const Program&) = delete;

  // Returns None when sampling is not asked for, else sampled ids and their log probabilities, those of targets (None
  // without), and the `top` most likely ids and theirs (None where top is 0).
  py::object run(const Array<int32_t>& token_ids, const Array<int32_t>& positions, const Array<int32_t>& query_start,
                 const std::vector<Array<int32_t>>& block_tables, const Array<int32_t>& logits_rows,
                 const py::object& logits, const py::object& sampling, const py::object& hidden,
                 const std::vector<py::array_t<float>>& taps, const py::object& cancel, bool interruptible,
                 const py::object& targets, int32_t top) {
    pe_batch b{};
    b.struct_size = sizeof b;
    b.tokens = static_cast<int32_t>(positions.size());
    b.sequences = static_cast<int32_t>(query_start.size()) - 1;
    if (b.sequences < 1) raise("RequestError", "query_start must be int32 [sequences + 1]");
    if (token_ids.size() && token_ids.size() != b.tokens)
      raise("RequestError", "token_ids and positions differ in length");
    b.token_ids = token_ids.size() ? token_ids.data() : nullptr;
    b.positions = positions.data();
    b.query_start = query_start.data();
    if (static_cast<int32_t>(block_tables.size()) < groups_)
      raise("RequestError", "a block table for every KV group is needed");
    std::vector<const int32_t*> tables;
    for (const auto& t : block_tables) {
      if (t.ndim() != 2 || t.shape(0) != b.sequences || t.shape(1) != block_tables[0].shape(1))
        raise("RequestError", "block tables must be int32 [sequences, blocks], all of one width");
      tables.push_back(t.data());
      b.block_table_width = static_cast<int32_t>(t.shape(1));
    }
    b.block_tables = tables.empty() ? nullptr : tables.data();
    b.logits_count = static_cast<int32_t>(logits_rows.size());
    b.logits_rows = logits_rows.data();
    Array<float> out;
    if (!logits.is_none()) {
      out = writable(logits, "logits", b.logits_count, vocab_);
      b.logits = out.mutable_data();
    }
    Array<float> hidden_array;
    if (!hidden.is_none()) {
      hidden_array = hidden.cast<Array<float>>();
      if (hidden_array.ndim() != 2 || hidden_array.shape(0) != b.tokens || hidden_array.shape(1) != hidden_width_)
        raise("RequestError", "hidden must be float32 [tokens, width of the load_hidden op]");
      b.hidden = hidden_array.data();
    }
    std::vector<float*> tap_pointers;
    if (taps.size() != tap_widths_.size())
      raise("RequestError", "the program has " + std::to_string(tap_widths_.size()) + " taps");
    for (size_t i = 0; i < taps.size(); ++i)
      tap_pointers.push_back(writable(taps[i], "a tap", b.tokens, tap_widths_[i]).mutable_data());
    b.taps = tap_pointers.empty() ? nullptr : tap_pointers.data();
    std::vector<pe_sampling> params;
    std::vector<Array<int32_t>> ids;
    std::vector<Array<float>> values;
    py::array_t<int32_t> sampled(b.logits_count);
    py::array_t<float> logprobs(b.logits_count);
    if (!sampling.is_none()) {
      const auto list = sampling.cast<py::list>();
      if (static_cast<int32_t>(list.size()) != b.logits_count)
        raise("RequestError", "one sampling entry per logits row is needed");
      bool greedy = true;
      for (const auto& entry : list) {
        params.push_back(to_sampling(entry, ids, values));
        greedy = greedy && entry.is_none();
      }
      b.sampling = greedy ? nullptr : params.data();
      b.sampled = sampled.mutable_data();
      b.sampled_logprob = logprobs.mutable_data();
    }
    Array<int32_t> target_ids;
    py::object target_logprobs = py::none(), top_ids = py::none(), top_logprobs = py::none();
    if (!targets.is_none()) {
      target_ids = targets.cast<Array<int32_t>>();
      if (target_ids.size() != b.logits_count) raise("RequestError", "one target per logits row is needed");
      py::array_t<float> out_logprobs(b.logits_count);
      b.targets = target_ids.data();
      b.target_logprob = out_logprobs.mutable_data();
      target_logprobs = out_logprobs;
    }
    if (top > 0 && top <= vocab_) {
      const py::array::ShapeContainer shape{py::ssize_t{b.logits_count}, py::ssize_t{top}};
      py::array_t<int32_t> ids_out(shape);
      py::array_t<float> logprobs_out(shape);
      b.top_ids = ids_out.mutable_data();
      b.top_logprob = logprobs_out.mutable_data();
      top_ids = ids_out;
      top_logprobs = logprobs_out;
    }
    b.top_count = top;
    volatile int32_t own_flag = 0;
    Array<int32_t> cancel_array;
    if (!cancel.is_none()) {
      cancel_array = cancel.cast<Array<int32_t>>();
      if (cancel_array.size() < 1) raise("RequestError", "cancel must be int32 [1]");
    }
    volatile int32_t* flag = cancel.is_none() ? &own_flag : const_cast<volatile int32_t*>(cancel_array.data());
    b.cancel = flag;
    pe_status status;
    {
      WatchInterrupt watch(interruptible ? flag : nullptr);
      py::gil_scoped_release release;
      status = backend_.api.program_run(handle_, &b);
    }
    if (status == PE_CANCELLED && interruptible) {
      if (!cancel.is_none()) *flag = 0;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    backend_.check(status);
    if (sampling.is_none()) return py::none();
    return py::make_tuple(sampled, logprobs, target_logprobs, top_ids, top_logprobs);
  }

  py::tuple times(bool reset) {
    py::array_t<uint64_t> ns(static_cast<py::ssize_t>(op_count_));
    uint64_t runs, run_ns;
    backend_.check(backend_.api.program_times(handle_, ns.mutable_data(), &runs, &run_ns, reset));
    return py::make_tuple(ns, runs, run_ns);
  }

  py::array_t<uint64_t> routing(bool reset) {
    int64_t count;
    backend_.check(backend_.api.program_routing(handle_, nullptr, &count, 0));
    py::array_t<uint64_t> tokens(static_cast<py::ssize_t>(count));
    backend_.check(backend_.api.program_routing(handle_, tokens.mutable_data(), nullptr, reset));
    return tokens;
  }

  py::dict info() {
    size_t arena;
    uint64_t barriers, allocations;
    backend_.check(backend_.api.program_info(handle_, &arena, &barriers, &allocations));
    py::dict d;
    d["arena_bytes"] = arena;
    d["barriers"] = barriers;
    d["allocations"] = allocations;
    return d;
  }

 private:
  static int64_t tap_width(const pe_buffer_desc& b) { return b.width * std::max(b.rows, 1); }

  int64_t rows_of(int32_t tensor) {
    void* data;
    backend_.check(backend_.api.tensor_data(backend_.handle, tensor, &data, nullptr));
    int64_t rows;
    std::memcpy(&rows, static_cast<const char*>(data) + 24, 8);  // TensorHeader.rows
    return rows;
  }

  static Array<float> writable(const py::object& object, const char* what, int64_t rows, int64_t cols) {
    if (!py::isinstance<Array<float>>(object))
      raise("RequestError", std::string(what) + " must be C-contiguous float32");
    const auto array = object.cast<Array<float>>();
    if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != cols || !array.writeable())
      raise("RequestError", std::string(what) + " must be writable float32 [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "]");
    return array;
  }

  static pe_sampling to_sampling(const py::handle& entry, std::vector<Array<int32_t>>& ids,
                                 std::vector<Array<float>>& values) {
    pe_sampling p{};
    p.struct_size = sizeof p;
    p.top_p = p.repetition_penalty = 1.0f;
    if (entry.is_none()) return p;
    py::ssize_t counted = -1;
    for (const auto& [key, value] : entry.cast<py::dict>()) {
      const auto name = key.cast<std::string>();
      if (name == "temperature")
        p.temperature = value.cast<float>();
      else if (name == "top_p")
        p.top_p = value.cast<float>();
      else if (name == "min_p")
        p.min_p = value.cast<float>();
      else if (name == "repetition_penalty")
        p.repetition_penalty = value.cast<float>();
      else if (name == "frequency_penalty")
        p.frequency_penalty = value.cast<float>();
      else if (name == "presence_penalty")
        p.presence_penalty = value.cast<float>();
      else if (name == "top_k")
        p.top_k = value.cast<int32_t>();
      else if (name == "seed")
        p.seed = value.cast<uint64_t>();
      else if (name == "step")
        p.step = value.cast<uint64_t>();
      else if (name == "penalty_ids" || name == "bias_ids") {
        ids.push_back(value.cast<Array<int32_t>>());
        (name == "bias_ids" ? p.bias_ids : p.penalty_ids) = ids.back().data();
        (name == "bias_ids" ? p.bias_count : p.penalty_count) = static_cast<int32_t>(ids.back().size());
      } else if (name == "penalty_counts") {
        ids.push_back(value.cast<Array<int32_t>>());
        p.penalty_counts = ids.back().data();
        counted = ids.back().size();
      } else if (name == "bias_values") {
        values.push_back(value.cast<Array<float>>());
        p.bias_values = values.back().data();
      } else {
        raise("RequestError", "sampling has no '" + name + "'");
      }
    }
    if (p.bias_count && (!p.bias_values || values.back().size() != p.bias_count))
      raise("RequestError", "bias_ids and bias_values differ in length");
    if (counted >= 0 && counted != p.penalty_count)
      raise("RequestError", "penalty_ids and penalty_counts differ in length");
    return p;
  }

  py::object object_;  // the backend, kept alive
  Backend& backend_;
  pe_program* handle_ = nullptr;
  size_t op_count_ = 0;
  int64_t vocab_ = 0, hidden_width_ = 0;
  int32_t groups_ = 0;
  std::vector<int64_t> tap_widths_;
};

}  // namespace

void bind_program(py::module_& m) {
  py::class_<Program>(m, "Program", "Ops checked once, run as a whole with the GIL released.")
      .def(py::init<const py::object&, const py::list&, const py::list&, int, int, bool>(), py::arg("backend"),
           py::arg("ops"), py::arg("buffers"), py::arg("max_batch_tokens"), py::arg("max_sequences"), py::arg("timed"))
      .def("run", &Program::run, py::arg("token_ids"), py::arg("positions"), py::arg("query_start"),
           py::arg("block_tables"), py::arg("logits_rows"), py::arg("logits"), py::arg("sampling"), py::arg("hidden"),
           py::arg("taps"), py::arg("cancel"), py::arg("interruptible"), py::arg("targets") = py::none(),
           py::arg("top") = 0)
      .def("times", &Program::times, py::arg("reset") = false)
      .def("routing", &Program::routing, py::arg("reset") = false)
      .def("info", &Program::info);
#define PE_KIND(name) .value(#name, PE_OP_##name)
  py::enum_<pe_op_kind>(m, "OpKind", py::arithmetic()) PE_KIND(EMBED) PE_KIND(LOAD_HIDDEN) PE_KIND(NORM)
      PE_KIND(QUANTIZE) PE_KIND(LINEAR) PE_KIND(QK_NORM) PE_KIND(ROPE) PE_KIND(KV_APPEND) PE_KIND(ATTENTION)
          PE_KIND(ADD) PE_KIND(ACT_MUL) PE_KIND(ACT) PE_KIND(MASK_COLUMNS) PE_KIND(HEAD_LINEAR) PE_KIND(LATENT_APPEND)
              PE_KIND(TAP) PE_KIND(DEQUANTIZE) PE_KIND(ROUTER) PE_KIND(MOE_GATE_UP) PE_KIND(MOE_DOWN) PE_KIND(GATE)
                  PE_KIND(NORM_QUANTIZE) PE_KIND(QKV_ROPE_APPEND) PE_KIND(ATTENTION_QUANTIZE) PE_KIND(LINEAR_RESIDUAL)
                      PE_KIND(NORM_RESIDUAL) PE_KIND(GATED_FFN) PE_KIND(GATED_FFN_RESIDUAL) PE_KIND(FFN)
                          PE_KIND(FFN_RESIDUAL) PE_KIND(MOE_FFN_RESIDUAL) PE_KIND(LM_HEAD) PE_KIND(SAMPLE);
#undef PE_KIND
#define PE_STAGE(name) .value(#name, PE_STAGE_##name)
  py::enum_<pe_stage>(m, "Stage", py::arithmetic()) PE_STAGE(EMBED) PE_STAGE(NORM) PE_STAGE(ATTENTION) PE_STAGE(ROUTER)
      PE_STAGE(FFN) PE_STAGE(LM_HEAD) PE_STAGE(SAMPLE);
#undef PE_STAGE
  py::enum_<pe_norm>(m, "Norm", py::arithmetic()).value("RMS_NORM", PE_RMS_NORM).value("LAYER_NORM", PE_LAYER_NORM);
  py::enum_<pe_scoring>(m, "Scoring", py::arithmetic()).value("SOFTMAX", PE_SOFTMAX).value("SIGMOID", PE_SIGMOID);
  py::enum_<pe_group_score>(m, "GroupScore", py::arithmetic())
      .value("MAX", PE_GROUP_MAX)
      .value("TOP2_SUM", PE_GROUP_TOP2_SUM);
  py::enum_<pe_activation>(m, "Activation", py::arithmetic())
      .value("SILU", PE_SILU)
      .value("GELU_TANH", PE_GELU_TANH)
      .value("GELU", PE_GELU)
      .value("RELU", PE_RELU);
}

}  // namespace pe_py
