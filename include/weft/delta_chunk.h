// The stages of the chunked gated delta rule as separate ops.
//
// Inside a chunk of n <= C tokens with entry state S0 [V, K] and G_i = g_0 + ... + g_i:
//   A_ij = beta_i (k_i . k_j) e^(G_i - G_j)  for i > j, else 0          chunk_kkt
//   X    = (I + A)^-1                                                   chunk_tri_inverse
//   u    = X diag(beta) v,   w = X diag(beta e^G) k                     chunk_wu
//   vn   = u - w S0^T,       S_n = e^(G_n) S0 + sum_i e^(G_n-G_i) vn_i k_i^T    chunk_state
//   o_i  = scale (e^(G_i) S0 q_i + sum_{j<=i} e^(G_i-G_j) (q_i . k_j) vn_j)     chunk_output
// With a per-channel decay (KDA) g and G are [T, Hv, K] and every e^(..) multiplies inside the dot products, channel by channel.
//
// Chunks restart at every sequence; a sequence's last chunk may be short. Matrices over a chunk are [T, Hv, C]: row t of head h
// holds the C columns of its chunk, C innermost (row stride Hv * C when dense); columns at or past the chunk's length are 0.
// Chunk rows (h) are packed: sequence n's chunk c is row sum_{m<n} ceil(len_m / C) + c; max_chunks() bounds their number.
// States are matrices: the last two dimensions of state_in, h and state_out are dense.
// q, k, v, w, u, v_new, h, o: f32, f16 or bf16; g, beta, A, X: f32. 1 <= K, V <= kMaxDeltaHeadSize.
// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/op.h"

namespace weft {

inline constexpr int64_t kMaxDeltaHeadSize = 256;

// Which key head value head hv reads: grouped hv / (Hv/Hk) as Hugging Face, tiled hv % Hk as some GGUF converters.
enum class HeadMap { grouped, tiled };

// How a state matrix is stored: [V, K] (K contiguous) or [K, V] (V contiguous).
enum class StateLayout { vk, kv };

// Rows that chunk snapshots of `tokens` packed tokens may need, from host-side facts alone.
int64_t max_chunks(int64_t tokens, const Sequences& sequences, int64_t chunk);

// Prefix sums of g inside each chunk.
struct ChunkCumsumArgs {
  Tensor g;         // [T, Hv] or [T, Hv, K] f32
  Tensor g_cumsum;  // as g, f32, out; may be g itself
  Sequences sequences;
  int64_t chunk = 64;  // C: 16, 32 or 64
};
WEFT_OP(chunk_cumsum, ChunkCumsumArgs);

struct ChunkKktArgs {
  Tensor k;         // [T, Hk, K]
  Tensor beta;      // [T, Hv] f32
  Tensor g_cumsum;  // [T, Hv] or [T, Hv, K] f32
  Tensor a;         // [T, Hv, C] f32, out: strictly lower, 0 elsewhere
  Sequences sequences;
  int64_t chunk = 64;
  HeadMap head_map = HeadMap::grouped;
};
WEFT_OP(chunk_kkt, ChunkKktArgs);

// (I + A)^-1 of every strictly lower triangular chunk matrix: unit lower triangular, upper part exactly 0.
struct ChunkTriInverseArgs {
  Tensor a;      // [T, Hv, C] f32; entries on and above the diagonal are ignored
  Tensor a_inv;  // [T, Hv, C] f32, out; may be a itself
  Sequences sequences;
  int64_t chunk = 64;
};
WEFT_OP(chunk_tri_inverse, ChunkTriInverseArgs);

// Rounding contract of the accelerated backends (the reference rounds only at the store): beta v and beta e^G k are rounded to
// k's dtype, products accumulate in f32, u and w are rounded once.
struct ChunkWuArgs {
  Tensor k;         // [T, Hk, K]
  Tensor v;         // [T, Hv, V]
  Tensor beta;      // [T, Hv] f32
  Tensor g_cumsum;  // [T, Hv] or [T, Hv, K] f32
  Tensor a_inv;     // [T, Hv, C] f32, as chunk_tri_inverse leaves it: 0 above the diagonal
  Tensor w;         // [T, Hv, K], out
  Tensor u;         // [T, Hv, V], out
  Sequences sequences;
  int64_t chunk = 64;
  HeadMap head_map = HeadMap::grouped;
};
WEFT_OP(chunk_wu, ChunkWuArgs);

struct ChunkStateArgs {
  Tensor k;          // [T, Hk, K]
  Tensor w;          // [T, Hv, K]
  Tensor u;          // [T, Hv, V]
  Tensor g_cumsum;   // [T, Hv] or [T, Hv, K] f32
  Tensor state_in;   // [N, Hv, V, K] f32, f16 or bf16, optional: zeros
  Tensor h;          // [rows >= max_chunks, Hv, V, K], out: the state at the entry of every chunk
  Tensor v_new;      // [T, Hv, V], out: before the decay factor
  Tensor state_out;  // [N, Hv, V, K], optional, out
  Sequences sequences;
  int64_t chunk = 64;
  HeadMap head_map = HeadMap::grouped;
};
WEFT_OP(chunk_state, ChunkStateArgs);

struct ChunkOutputArgs {
  Tensor q;                    // [T, Hk, K]
  Tensor k;                    // [T, Hk, K]
  Tensor v_new;                // [T, Hv, V]
  Tensor h;                    // [rows >= max_chunks, Hv, V, K]
  Tensor g_cumsum;             // [T, Hv] or [T, Hv, K] f32
  Tensor o;                    // [T, Hv, V], out
  std::optional<float> scale;  // default K^-1/2
  Sequences sequences;
  int64_t chunk = 64;
  HeadMap head_map = HeadMap::grouped;
};
WEFT_OP(chunk_output, ChunkOutputArgs);

}  // namespace weft
