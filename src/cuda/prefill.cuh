// The chunked prefill on tensor cores: what its two kernels share.
//
// With rk, rq the factors of the in-op l2 norm (1 without it), G the prefix sums of the log decay in a chunk of 64 and G_C the last:
//   prepare (a block per chunk and key head)
//     A = (I + tril_{-1}(beta_i rk_i rk_j k_i.k_j))^-1                       f32; does not depend on the decay
//     T_ij = A_ij e^(G_i - G_j) beta_j                                       16 bits
//     P_ij = scale rq_i rk_j (q_i.k_j) e^(G_i - G_j)   for j <= i            16 bits
//     factors  a_i = e^(G_i) rk_i,  c_i = scale rq_i e^(G_i),  d_i = e^(G_C - G_i) rk_i,  e^(G_C)    f32
//   pass (a block per sequence, value head and some rows of the state, chunk after chunk)
//     W_i = v_i - a_i S k_i;   V' = T W;   o_i = c_i S q_i + sum_j P_ij V'_j;   S <- e^(G_C) S + sum_j d_j V'_j k_j^T
// Keys and queries enter the products as they are given: norms, decays and scale act on f32 sums.
#pragma once

#include "cuda/chunks.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

inline constexpr int kChunk = 64;
inline constexpr int kMatrix = kChunk * kChunk;  // elements of T and of P
inline constexpr int kFactors = 4 * kChunk;      // a, c, d, and e^(G_C) in the first of the rest

struct Prefill {
  GatedDeltaRulePrefillArgs args;
  ChunkMap map;
  float scale = 1;
  int64_t T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  uint16_t* matrices = nullptr;  // [chunk row][Hv][2]: T, then P
  float* factors = nullptr;      // [chunk row][Hv]
};

// How the pass cuts the rows of a state, and how many chunks it reads ahead.
struct PassPlan {
  int warps = 0;  // of 16 state rows each
  int stages = 0;
  int64_t blocks = 0;
  size_t shared = 0;
};

void launch_prepare(const Stream& stream, const Prefill& p);
PassPlan pass_plan(const Stream& stream, const Prefill& p);
void launch_pass(const Stream& stream, const Prefill& p);

}  // namespace weft::cuda
