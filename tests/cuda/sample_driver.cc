// sample.cu, flat.
#include "driver.h"

using namespace pe;
using namespace pe::cuda;

extern "C" {

const char* driver_error() { return last_error(); }

int sample_softcap(float* x, float cap, int64_t rows, int64_t vocab) {
  return driven([&](Stream stream) {
    const FloatRows logits(x, rows, vocab);
    softcap(stream, logits.rows(), cap, static_cast<int>(rows));
    must(cudaStreamSynchronize(stream));
    logits.read(x);
  });
}

int sample_rows(const float* x, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k,
                const uint64_t* seed, const uint64_t* step, const int32_t* target, int32_t* id, float* logprob,
                float* target_logprob, int32_t* finite) {
  return driven([&](Stream stream) {
    const FloatRows logits(x, rows, vocab);
    std::vector<SampleRow> params;
    for (int64_t r = 0; r < rows; ++r) params.push_back({temperature[r], top_k[r], seed[r], step[r], target[r]});
    const Array<SampleRow> given(params.data(), rows);
    const Array<SampleOut> out(rows);
    const Array<uint8_t> scratch(static_cast<int64_t>(sample_scratch_bytes(static_cast<int>(rows), vocab)));
    sample(stream, logits.rows(), given.data(), out.data(), scratch.data(), static_cast<int>(rows));
    must(cudaStreamSynchronize(stream));
    std::vector<SampleOut> read(static_cast<size_t>(rows));
    out.read(read.data());
    for (size_t r = 0; r < read.size(); ++r) {
      id[r] = read[r].id;
      logprob[r] = read[r].logprob;
      target_logprob[r] = read[r].target_logprob;
      finite[r] = read[r].finite;
    }
  });
}

}  // extern "C"
