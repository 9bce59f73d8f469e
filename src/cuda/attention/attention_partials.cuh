// Split-KV partials and their merge: lowered arguments and launches of the f32 kernels that take any cache.
#pragma once

#include "core/backend.h"
#include "cuda/attention/attention.cuh"

namespace weft::cuda {

// Where the partials of a call go, and which tokens each split covers: `block_tokens` tokens, or an equal share of the live ones
// when 0.
struct PartialsPlan {
  PartialsView out;
  int64_t splits = 0, block_tokens = 0;
};

// Partials of every sequence that has at most `most_rows` query rows for a kv head.
void launch_partials(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                     const PartialsPlan& plan, int64_t most_rows);

// Merges the partials of every token of `sequences` and finishes the rows. Strides are in elements.
struct MergeParams {
  PartialsView in;
  int64_t splits = 0;
  SequencesView sequences;
  int64_t T = 0, longest = 0, Hq = 0, group = 1;
  int64_t most_rows = INT64_MAX;  // sequences with more query rows for a kv head are skipped
  RotateView rotate;              // to undo; none: o stays in V's rotated domain
  MeanView mean;
  const float* sinks = nullptr;  // [Hq], or null
  int64_t sink_stride = 0;
  void* o = nullptr;  // [T, Hq, Dv]
  DType o_dtype = DType::f32;
  int64_t o_token = 0, o_head = 0;
  float* lse = nullptr;  // [T, Hq], or null
  int64_t lse_token = 0, lse_head = 0;

  void set_outputs(const Tensor& sink_logits, const Tensor& output, const Tensor& log_sums) {
    if (sink_logits.present()) sinks = static_cast<const float*>(sink_logits.data), sink_stride = sink_logits.stride(0);
    o = output.data, o_dtype = output.dtype, o_token = output.stride(0), o_head = output.stride(1);
    if (log_sums.present()) lse = static_cast<float*>(log_sums.data), lse_token = log_sums.stride(0), lse_head = log_sums.stride(1);
  }
};
void launch_merge(const char* op, const Stream& stream, const MergeParams& params);

// How an op leaves V's rotated domain: the rotation to undo and the mean to add.
inline void leave_rotated(const KvFormat& format, KvDomain domain, RotateView& rotate, MeanView& mean) {
  rotate.D = static_cast<int>(format.head_dim);
  if (domain == KvDomain::rotated) return;
  rotate = rotate_view(format);
  mean = mean_view(format);
}

}  // namespace weft::cuda
