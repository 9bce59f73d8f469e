// The chunked prefill on tensor cores: what its kernels share.
//
// With rk, rq the factors of the in-op l2 norm (1 without it), G the prefix sums of the log decay in a chunk of 64 and G_C the last:
//   prepare (a warpgroup or block per chunk and key head)
//     X   = (I + tril_{-1}(beta_i rk_i rk_j k_i.k_j))^-1                         does not depend on the decay
//     M_j = beta_j e^(G_C - G_j) sum_i X_ij rk_i k_i                             what W_j adds to the state
//     R_ij = beta_j e^(G_i - G_j) sum_m scale rq_i rk_m (q_i.k_m) X_mj, m <= i   what W_j adds to output i
//     a_i = e^(G_i) rk_i,  c_i = scale rq_i e^(G_i),  e^(G_C)
//   pass (a block per sequence, value head and some rows of the state, chunk after chunk)
//     W_i = v_i - a_i S k_i;   o_i = c_i S q_i + sum_j R_ij W_j;   S <- e^(G_C) S + sum_j W_j M_j^T
// The inverse is multiplied into keys and scores before anything is rounded: with correlated keys its rows nearly cancel, and would
// leave the rounding of what they cancel. Prepare works with operands split in two, M and R are rounded once to 16 bits. Keys and
// queries enter products as they are given: norms, decays and scale act on f32 sums.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/delta/chunk_map.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

inline constexpr int kChunk = 64;
inline constexpr int kPanel = kChunk * 128;  // bytes of 64 rows of 64 16-bit elements

// What prepare leaves of a chunk and value head, as the pass wants it in shared memory: M transposed [KP][64] and R [64][64] as tiles
// of 64 columns, then a, c and e^(G_C).
template <int KP>
struct Unit {
  static constexpr int kM = 0, kR = KP * kChunk * 2, kFactors = kR + kChunk * kChunk * 2, kBytes = kFactors + 3 * kChunk * 4;
  static_assert(kBytes % 256 == 0);
};

// Sequences cut into ranges of tokens, when there are few heads: the pass through the first runs beside summaries of those between it and
// the last, then the pass through all others at once. Ranges are affine maps of the state, which begins the next one:
//   summarize (a block per range and some rows)   Q = what a range makes of 0, P = of the identity
//   compose (a block per head and some rows)      starts[r + 1] = starts[r] P_r + Q_r, range after range
struct Ranges {
  int count = 1;
  int begin = 0, end = 1;   // those that a pass goes through
  int64_t chunks = 0;       // of a range
  float* starts = nullptr;  // [N, Hv, count - 1, V, K]: first Q of the range before, then the state that a range begins with
  float* maps = nullptr;    // [N, Hv, count - 2, K, K]: P of all but the first and the last

  // Of a head of all heads of all sequences: what range r, not the first, begins with.
  __device__ float* start_of(int64_t head, int r, int64_t V, int64_t K) const {
    return starts + (head * (count - 1) + r - 1) * V * K;
  }
};

struct Prefill {
  GatedDeltaRulePrefillArgs args;
  Ranges ranges;
  ChunkMap map;
  float scale = 1;
  int64_t T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  char* units = nullptr;  // [chunk row][Hv]
  int64_t each = 0;       // tokens of every sequence, when uniform
};

// run.operator()<Half, KP>() for the dtype of a call and the channels of its keys, padded.
template <class Run>
auto for_types(const Prefill& p, Run&& run) {
  const bool bf16 = p.args.k.dtype == DType::bf16;
  if (p.K <= 64) return bf16 ? run.template operator()<__nv_bfloat16, 64>() : run.template operator()<__half, 64>();
  return bf16 ? run.template operator()<__nv_bfloat16, 128>() : run.template operator()<__half, 128>();
}

// Outputs of the inputs' dtype, and no checkpoints.
inline bool plain(const Prefill& p) { return p.args.o.dtype == p.args.q.dtype && p.args.checkpoint_every == 0; }

// How the pass cuts the rows of a state, and how many chunks it reads ahead.
struct PassPlan {
  const char* kernel = "";
  int rows = 0;  // of the state, for a block
  int stages = 0;
  int ranges = 1;
  int64_t blocks = 0;
  int cluster = 1;  // blocks that copy together what they all read
  size_t shared = 0;
};

// By mma instructions, on every device.
void launch_mma_prepare(const Stream& stream, const Prefill& p);
PassPlan mma_plan(const Stream& stream, const Prefill& p);
void launch_mma_pass(const Stream& stream, const Prefill& p);

// By Hopper's warpgroup instructions; not usable when the device or the build lacks them.
bool takes_wgmma(const Stream& stream, const Prefill& p);
// [T, heads, D] for the copy engine: boxes of 64 channels, one head and so many tokens.
CUtensorMap token_map(const Tensor& t, int tokens = kChunk);
void launch_wgmma_prepare(const Stream& stream, const Prefill& p);
PassPlan wgmma_plan(const Stream& stream, const Prefill& p);
void launch_wgmma_pass(const Stream& stream, const Prefill& p);

// Both stages in one kernel, without scratch, for calls with many heads.
bool takes_fused(const Stream& stream, const Prefill& p);
PassPlan fused_plan(const Prefill& p);
void launch_fused(const Stream& stream, const Prefill& p);

// How a call is cut, without the addresses; the bytes that its maps take; and their making, after the pass through the first range was
// launched and before that through the others.
Ranges ranges_of(const Stream& stream, const Prefill& p);
size_t range_bytes(const Prefill& p, const Ranges& ranges);
void launch_ranges(const Stream& stream, const Prefill& p);

}  // namespace weft::cuda
