// Math, parameters and launches that the kernels of the chunked tensor-core prefill share.
//
// Symbols of one sequence and value head, for a chunk of C = 64 tokens i, j, m:
//   S [V, K]         state before the chunk
//   k_i, q_i, v_i    rows as given
//   rk_i, rq_i       inverse l2 norms of k_i and q_i; 1 without l2_norm
//   beta_i           write strength
//   G_i, G_C         prefix sum of the log decay in the chunk, and its last value
//
// prepare runs on all chunks in parallel:
//   X    = (I + tril_{-1}(beta_i rk_i rk_j k_i.k_j))^-1                         independent of the decay
//   M_j  = beta_j e^(G_C - G_j) sum_i X_ij rk_i k_i                             what W_j adds to the state, [C, K]
//   R_ij = beta_j e^(G_i - G_j) sum_m scale rq_i rk_m (q_i.k_m) X_mj, m <= i    what W_j adds to output i, [C, C]
//   a_i  = e^(G_i) rk_i,  c_i = scale rq_i e^(G_i),  e^(G_C)                    factors
// state scan runs through the chunks of a sequence in order:
//   W_i  = v_i - a_i S k_i                                                      corrections, [C, V]
//   o_i  = c_i S q_i + sum_j R_ij W_j
//   S   <- e^(G_C) S + sum_j W_j M_j^T
//
// Precision: X multiplies keys and scores before anything is rounded. With correlated keys the rows of X nearly cancel, and the
// result would be the rounding error of the cancelled terms. prepare therefore splits operands into a high and a low 16-bit number,
// and rounds M and R once to 16 bits. Keys and queries enter products as given; norms, decays and scale multiply f32 sums.
//
// Who computes what:
//   prepare          prefill_prepare_wgmma.cu or prefill_prepare_mma.cu   one warpgroup or block per chunk and key head
//   state scan       prefill_scan_wgmma.cu or prefill_scan_mma.cu         one block per sequence, value head and tile of state rows
//   both, fused      prefill_fused.cu                                     producer and consumer warpgroups of one block, no scratch
//   scan in ranges   prefill_ranges.cu                                    sequences cut into token ranges when there are few heads
//   all other calls  prefill_staged_prepare.cu, prefill_staged_scan.cu    see prefill_staged.cuh
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/mma.cuh"
#include "cuda/delta/chunk_map.cuh"
#include "cuda/delta/states_view.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

inline constexpr int kChunk = 64;
inline constexpr int kPanel = kChunk * 128;  // bytes of 64 rows of 64 16-bit elements
using Tile64 = Tile<64>;

// What prepare writes for a chunk and value head, in the layout that the state scan needs in shared memory: M transposed [KP][64]
// and R [64][64] as swizzled tiles of 64 columns, then a, c and e^(G_C). KP is K padded to 64 or 128. Offsets in bytes.
template <int KP>
struct PreparedChunk {
  static constexpr int kM = 0, kR = KP * kChunk * 2, kFactors = kR + kChunk * kChunk * 2, kBytes = kFactors + 3 * kChunk * 4;
  static_assert(kBytes % 256 == 0);
};

// Token ranges of a sequence, for calls with few heads. The scan of the first range runs beside summaries of the ranges between the
// first and the last. Then one scan runs through all other ranges at once. A range is an affine map of the state, S -> S P + Q:
//   summarize (a block per range and tile of rows)   Q = the range applied to 0; P = to the identity, without values
//   compose (a block per head and tile of rows)      start_state[r + 1] = start_state[r] P_r + Q_r, range after range
struct Ranges {
  int count = 1;
  int begin = 0, end = 1;  // the ranges of one scan launch
  int64_t chunks = 0;      // per range
  // [N, Hv, count - 1, V, K]: summarize writes Q of the previous range, compose the range's first state.
  float* start_states = nullptr;
  float* transitions = nullptr;  // [N, Hv, count - 2, K, K]: P of all ranges but the first and the last

  // State before range r >= 1; `head` counts the value heads of all sequences.
  __device__ float* start_state(int64_t head, int r, int64_t V, int64_t K) const {
    return start_states + (head * (count - 1) + r - 1) * V * K;
  }
};

// How the decay of a token is given: its log, itself, or raw (log_decay in gate_math.cuh).
enum class DecayForm : uint8_t { log, linear, raw };

// Gates per token and value head.
struct GateParams {
  StridedView decay, strength;  // [T, Hv]
  StridedView a_log, dt_bias;   // [Hv], with DecayForm::raw
  DecayForm decay_form = DecayForm::log;
  bool raw_strength = false;  // beta = beta_scale sigmoid(strength)
  float beta_scale = 1;
};

// What the kernels of a call read.
struct Prefill {
  StridedView q, k;  // [T, Hk, K]
  StridedView v, o;  // [T, Hv, V]
  GateParams gates;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  SequencesView sequences;
  StatesView states;
  StridedView checkpoints;  // [N, checkpoints, Hv, V, K] or [.., K, V]
  int64_t checkpoint_every = 0;
  Ranges ranges;
  ChunkMap map;
  float scale = 1;
  int64_t T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  char* prepared = nullptr;               // [chunk row][Hv] of PreparedChunk
  int64_t max_tokens = 0;                 // longest sequence; the length of every sequence when uniform
  Schedule schedule = Schedule::fastest;  // read by the host only
};

// run.operator()<Half, KP>() for the call's dtype and its padded K.
template <class Run>
auto dispatch_types(const Prefill& p, Run&& run) {
  const bool bf16 = p.k.dtype == DType::bf16;
  if (p.K <= 64) return bf16 ? run.template operator()<__nv_bfloat16, 64>() : run.template operator()<__half, 64>();
  return bf16 ? run.template operator()<__nv_bfloat16, 128>() : run.template operator()<__half, 128>();
}

// Outputs have the inputs' dtype, and there are no checkpoints.
inline bool simple_output(const Prefill& p) { return p.o.dtype == p.q.dtype && p.checkpoint_every == 0; }

// How a state scan is cut into blocks, and how many chunks a block keeps in flight.
struct ScanPlan {
  const char* kernel = "";
  int rows = 0;    // state rows per block; 0: no block fits the shared memory of the device
  int stages = 0;  // 1: a stage used in halves
  int ranges = 1;
  int64_t blocks = 0;
  int cluster = 1;    // blocks per cluster: they multicast the loads that they share
  size_t shared = 0;  // bytes
};

// mma kernels, for every device. can_use_mma: does the device have the shared memory that the two kernels want?
bool can_use_mma(const Stream& stream, const Prefill& p);
size_t prepare_mma_shared(const Prefill& p);  // bytes
void launch_prepare_mma(const Stream& stream, const Prefill& p);
ScanPlan scan_plan_mma(const Stream& stream, const Prefill& p);
void launch_scan_mma(const Stream& stream, const Prefill& p);

// wgmma kernels, for devices and builds of sm_90a.
bool can_use_wgmma(const Stream& stream, const Prefill& p);
// TMA tensor map of rows [T, heads, D] with boxes of 64 channels, one head and `tokens` tokens.
CUtensorMap token_tensor_map(const StridedView& rows, int64_t T, int64_t heads, int64_t D, int tokens = kChunk);
void launch_prepare_wgmma(const Stream& stream, const Prefill& p);
ScanPlan scan_plan_wgmma(const Stream& stream, const Prefill& p);
void launch_scan_wgmma(const Stream& stream, const Prefill& p);

// Fused kernel without scratch, for calls with many heads.
bool use_fused(const Stream& stream, const Prefill& p);
ScanPlan fused_plan(const Prefill& p);
void launch_fused(const Stream& stream, const Prefill& p);

// plan_ranges decides how a call is cut and leaves the addresses unset. launch_ranges computes P, Q and the start states; it is
// launched after the scan of the first range and before the scan of the others.
Ranges plan_ranges(const Stream& stream, const Prefill& p);
size_t range_bytes(const Prefill& p, const Ranges& ranges);
void launch_ranges(const Stream& stream, const Prefill& p);

}  // namespace weft::cuda
