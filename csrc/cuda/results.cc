// What comes back from a run: what was found wrong, sampled ids, logits and taps.
#include <algorithm>
#include <atomic>

#include "core/status.h"
#include "cuda/program.h"

namespace pe::cuda {

bool CudaProgram::on_device(int32_t row) const {
  if (batch_->top_count) return false;
  if (!batch_->sampling) return true;
  const pe_sampling& p = batch_->sampling[row];
  if (p.bias_count || p.penalty_count) return false;
  if (p.temperature == 0.0f) return true;
  return p.top_k >= 1 && p.top_k <= kMaxDeviceTopK && p.top_p >= 1.0f && p.min_p <= 0.0f;
}

// Rows that the host samples are greedy here: that finds NaN and Inf.
void CudaProgram::fill_params(const Shape& shape, int32_t first_row, SampleRow* to) const {
  for (int32_t row = first_row; row < first_row + shape.rows; ++row, ++to) {
    *to = {0.0f, 0, 0, 0, batch_->targets ? batch_->targets[row] : -1};
    if (!batch_->sampling || !batch_->sampled || !on_device(row)) continue;
    const pe_sampling& p = batch_->sampling[row];
    to->temperature = p.temperature;
    to->top_k = p.top_k;
    to->seed = p.seed;
    to->step = p.step;
  }
}

void CudaProgram::check_failure(const Shape& shape, int32_t first_row) const {
  const StepLayout layout(shape, groups_.size(), table_width_);
  const auto& failure = *reinterpret_cast<const Failure*>(staging_.data() + layout.failure);
  if (failure.status != PE_OK)
    fail(static_cast<pe_status>(failure.status), "NaN or Inf in the router of layer %d at position %d", failure.layer,
         batch_->positions[std::clamp(failure.token, 0, batch_->tokens - 1)]);
  const auto* out = reinterpret_cast<const SampleOut*>(staging_.data() + layout.sampled);
  for (int32_t r = 0; r < shape.rows; ++r)
    if (!out[r].finite)
      fail(PE_COMPUTE, "NaN or Inf in the logits at position %d",
           batch_->positions[batch_->logits_rows[first_row + r]]);
}

// One wait for everything; logits only where somebody reads them.
void CudaProgram::fetch(const Shape& shape, int32_t first_row) {
  const pe_batch& b = *batch_;
  const Stream stream = cuda_.stream();
  const StepLayout layout(shape, groups_.size(), table_width_);
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copying results");
  };
  copy(staging_.data(), step_.data(), layout.results_end);
  std::vector<int32_t> on_host;
  for (int32_t r = 0; b.sampled && r < shape.rows; ++r)
    if (!on_device(first_row + r)) on_host.push_back(first_row + r);
  float* logits = b.logits ? b.logits + int64_t{first_row} * vocab_ : nullptr;
  if (!logits && !on_host.empty()) {
    host_logits_.resize(static_cast<size_t>(logits_capacity_) * static_cast<size_t>(vocab_));
    logits = host_logits_.data();
  }
  for (int32_t r = 0; r < shape.rows; ++r)
    if (b.logits || std::binary_search(on_host.begin(), on_host.end(), first_row + r))
      copy(logits + int64_t{r} * vocab_, logits_.row(r), static_cast<size_t>(vocab_) * sizeof(float));
  check_cuda(cudaStreamSynchronize(stream), "running a program");
  check_failure(shape, first_row);
  if (!b.sampled) return;
  take_sampled(shape, first_row);
  if (!on_host.empty()) sample_on_host(on_host, logits, first_row);
}

void CudaProgram::take_sampled(const Shape& shape, int32_t first_row) {
  const pe_batch& b = *batch_;
  const StepLayout layout(shape, groups_.size(), table_width_);
  const auto* out = reinterpret_cast<const SampleOut*>(staging_.data() + layout.sampled);
  for (int32_t row = first_row; row < first_row + shape.rows; ++row, ++out) {
    if (!on_device(row)) continue;
    b.sampled[row] = out->id;
    if (b.sampled_logprob) b.sampled_logprob[row] = out->logprob;
    if (b.targets && b.targets[row] >= 0) b.target_logprob[row] = out->target_logprob;
  }
}

// logits: of first_row and those behind it.
void CudaProgram::sample_on_host(const std::vector<int32_t>& rows, const float* logits, int32_t first_row) {
  const auto work = static_cast<size_t>(2 * int64_t{vocab_});
  work_.resize(work * static_cast<size_t>(cuda_.team.size()));
  std::atomic<size_t> next{0};
  std::atomic<bool> nothing{false};
  cuda_.team.run([&](int thread) {
    for (size_t i; (i = next.fetch_add(1)) < rows.size();) {
      const int32_t row = rows[i];
      const int32_t id = sample_row(cuda_.kernels, logits + int64_t{row - first_row} * vocab_, vocab_, *batch_, row,
                                    work_.data() + work * static_cast<size_t>(thread));
      batch_->sampled[row] = id;
      if (id < 0) nothing = true;
    }
  });
  if (nothing) fail(PE_REQUEST, "no token can be chosen: every logit is -inf after the logit bias");
}

void CudaProgram::fetch_taps() {
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (op.d.kind != PE_OP_TAP) continue;
    const int64_t floats = batch_->tokens * op.input->per_token * op.input->width;
    check_cuda(cudaMemcpyAsync(batch_->taps[op.d.head_dim], taps_ + views_[i].tap,
                               static_cast<size_t>(floats) * sizeof(float), cudaMemcpyDeviceToHost, cuda_.stream()),
               "copying taps");
  }
  if (tap_count_) check_cuda(cudaStreamSynchronize(cuda_.stream()), "copying taps");
}

}  // namespace pe::cuda
