// The staged prefill: chunks on tensor cores for every legal call, also with decays per channel, K up to 256, f32 inputs and rows of any
// alignment. Math, parameters and launches.
//
// Symbols are those of prefill.cuh, with keys and queries normalised and G per channel of K. C = 64.
//
// prepare runs on all chunks and value heads in parallel:
//   L_ij = sum_c k_ic k_jc e^(G_ic - G_jc) for j < i          P_ij = sum_c q_ic k_jc e^(G_ic - G_jc) for j <= i
//   T    = (I + diag(beta) L)^-1 diag(beta)
//   D_i  = k_i e^(G_i)     the key that W_i reads the state with             [C, K]
//   Q_i  = q_i e^(G_i)                                                       [C, K]
//   M_j  = sum_i T_ij k_i e^(G_C - G_i)     what W_j adds to the state       [C, K]
//   R    = P T                              what W_j adds to output i        [C, C], lower triangular
//   e^(G_C)                                                                  [K]
// state scan runs through the chunks of a sequence in order:
//   W_i  = v_i - S D_i,    o_i = scale (S Q_i + sum_j R_ij W_j),    S <- S diag(e^(G_C)) + sum_j W_j M_j^T
//
// Decays per channel do not factor out of L and P. Two blocks of 16 tokens, b before a, therefore meet at a reference point between them:
// k_i e^(G_i - r) and k_j e^(r - G_j) have exponents <= 0, so that nothing overflows and underflow is harmless. In a diagonal block the
// reference is the middle of the channel's range. Where the range exceeds kMostRange, the block's sums are computed pair by pair.
//
// Precision: prepare splits its operands into two bf16 numbers. 16-bit inputs: D, Q, M, R, S and W are rounded once to the inputs' dtype.
// f32 inputs, keys of few channels and summaries of f16 inputs (splits_operands): each of them is split into two bf16 numbers, and a product
// takes three mma. The scale is applied to sums in f32, so that no operand leaves the range of f16 because of it.
#pragma once

#include "cuda/delta/prefill.cuh"

namespace weft::cuda {

// What prepare writes for a chunk and value head, in the layout that the scan needs in shared memory: D, Q and M as swizzled panels of 64
// channels, R as one swizzled panel, each as `parts` matrices (2: high and low halves), then e^(G_C) in f32. Bytes.
struct StagedLayout {
  int matrix, parts, channels;  // matrix: one part of D, Q or M
  WEFT_HOST_DEVICE constexpr StagedLayout(int padded, int number_of_parts)
      : matrix(padded * kChunk * 2), parts(number_of_parts), channels(padded) {}
  WEFT_HOST_DEVICE constexpr int operand() const { return matrix * parts; }  // D, Q or M
  WEFT_HOST_DEVICE constexpr int keys() const { return 0; }
  WEFT_HOST_DEVICE constexpr int queries() const { return operand(); }
  WEFT_HOST_DEVICE constexpr int updates() const { return 2 * operand(); }  // M
  WEFT_HOST_DEVICE constexpr int tail() const { return 3 * operand(); }     // R, then the decays
  WEFT_HOST_DEVICE constexpr int decays() const { return parts * kPanel; }  // from the beginning of the tail
  WEFT_HOST_DEVICE constexpr int tail_bytes() const { return decays() + channels * 4; }
  WEFT_HOST_DEVICE constexpr int bytes() const { return (tail() + tail_bytes() + 255) / 256 * 256; }
};

struct StagedParams {
  Prefill p;  // with V = first_value + V when it summarizes; q, o and states are absent then
  // gated_delta_rule_summarize: state rows from first_value = K on have values and start from 0, the rows before from the identity.
  StridedView map_p, map_q;
  int first_value = 0;
  int parts = 1;                                              // 2: operands are split
  int padded = 64;                                            // K padded to 64, 128, 192 or 256
  bool per_channel = false;                                   // decays
  bool fours_q = false, fours_k = false, fours_gate = false;  // aligned to four elements
  bool pairs_o = false;                                       // 16-bit outputs, aligned to two elements
  // The scan's blocks.
  int groups = 1;  // of 16 state rows
  int stages = 0;  // operands in flight
  WEFT_HOST_DEVICE StagedLayout layout() const { return {padded, parts}; }
  // Are operands f16? Else they are bf16, as split ones always are.
  WEFT_HOST_DEVICE bool f16() const { return parts == 1 && p.k.dtype == DType::f16; }
};

// How the scan is cut. stages == 0: no block fits the shared memory of the device.
struct StagedPlan {
  int groups = 1, stages = 0;
  int64_t blocks = 0;
  size_t shared = 0;
};

inline size_t staged_chunks_bytes(const StagedParams& s) {
  return static_cast<size_t>(s.p.map.rows * s.p.Hv) * static_cast<size_t>(s.layout().bytes());
}
size_t staged_prepare_shared(const StagedParams& s);
void launch_staged_prepare(const char* op, const Stream& stream, const StagedParams& s);
StagedPlan staged_plan(const Stream& stream, const StagedParams& s);
void launch_staged_scan(const char* op, const Stream& stream, const StagedParams& s, const StagedPlan& plan);

}  // namespace weft::cuda
