// Attention in f32 over any cache: lowered arguments of the kernels that decode tiles of tokens into shared memory.
#pragma once

#include "core/backend.h"
#include "cuda/attention/attention.cuh"

namespace weft::cuda {

// Where the partials of a call go, and which tokens each covers: `block_tokens` each, or an equal share of the live ones when 0.
struct PartialsPlan {
  PartialsView out;
  int64_t count = 0, block_tokens = 0;
};

// Of every sequence that has at most `most_rows` query rows for a kv head.
void launch_partials(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                     const PartialsPlan& plan, int64_t most_rows);

// Joins the partials of every token of `sequences` and finishes the rows.
struct MergeParams {
  PartialsView in;
  int64_t count = 0;
  Sequences sequences;
  int64_t T = 0, longest = 0, Hq = 0, group = 1;
  RotateView rotate;  // undone; none: o stays in V's rotated domain
  MeanView mean;
  Tensor sinks, o, lse;
};
void launch_merge(const char* op, const Stream& stream, const MergeParams& params);

// What every op that ends in V's domain needs to leave it.
inline void leave_rotated(const KvFormat& format, KvDomain domain, RotateView& rotate, MeanView& mean) {
  rotate.D = static_cast<int>(format.head_dim);
  if (domain == KvDomain::rotated) return;
  rotate = rotate_view(format);
  mean = mean_view(format);
}

}  // namespace weft::cuda
