/// The stages of the chunked gated delta rule as separate ops.
/// @file
///
/// Inside a chunk of n <= C tokens with entry state S0 [V, K] and G_i = g_0 + ... + g_i:
///
///     A_ij = beta_i (k_i . k_j) e^(G_i - G_j)  for i > j, else 0                        chunk_kkt
///     X    = (I + A)^-1                                                                 chunk_tri_inverse
///     u    = X diag(beta) v,   w = X diag(beta e^G) k                                   chunk_wu
///     vn   = u - w S0^T,       S_n = e^(G_n) S0 + sum_i e^(G_n-G_i) vn_i k_i^T          chunk_state
///     o_i  = scale (e^(G_i) S0 q_i + sum_{j<=i} e^(G_i-G_j) (q_i . k_j) vn_j)           chunk_output
///
/// With a decay per channel (KDA), g and G are [T, Hv, K], and every e^(..) multiplies inside the dot products, channel by channel.
///
/// Chunks restart at every sequence, and the last chunk of a sequence may be short. Matrices over a chunk are [T, Hv, C]: row t of
/// head h holds the C columns of its chunk, C innermost (row stride Hv * C when dense). Columns at or past the length of the chunk
/// are 0. The states h at chunk entries are packed: chunk c of sequence n is row sum_{m<n} ceil(len_m / C) + c, and max_chunks()
/// bounds their number. States are matrices: the last two dimensions of state_in, h and state_out are dense.
/// q, k, v, w, u, v_new, h and o are f32, f16 or bf16; g, beta, A and X are f32. 1 <= K, V <= kMaxDeltaHeadSize.
/// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/op.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// The largest K and V of the delta ops.
inline constexpr int64_t kMaxDeltaHeadSize = 256;

/// Which key head the value head hv reads.
enum class HeadMap {
  grouped,  ///< hv / (Hv / Hk), as Hugging Face has it
  tiled,    ///< hv % Hk, as some GGUF converters have it
};

/// How a state matrix is stored.
enum class StateLayout {
  vk,  ///< [V, K], K contiguous
  kv,  ///< [K, V], V contiguous
};

/// The most chunks that `tokens` packed tokens may have, from host-side facts alone: the rows that h needs.
int64_t max_chunks(int64_t tokens, const Sequences& sequences, int64_t chunk);

/// Arguments of chunk_cumsum(): prefix sums of g inside each chunk.
struct ChunkCumsumArgs {
  Tensor g;             ///< [T, Hv] or [T, Hv, K] f32
  Tensor g_cumsum;      ///< as g, f32, out; may be g itself
  Sequences sequences;  ///< how the T tokens belong to sequences
  int64_t chunk = 64;   ///< C: 16, 32 or 64
};
WEFT_OP(chunk_cumsum, ChunkCumsumArgs);

/// Arguments of chunk_kkt(): the matrix A of every chunk.
struct ChunkKktArgs {
  Tensor k;                             ///< [T, Hk, K]
  Tensor beta;                          ///< [T, Hv] f32
  Tensor g_cumsum;                      ///< [T, Hv] or [T, Hv, K] f32
  Tensor a;                             ///< [T, Hv, C] f32, out: strictly lower triangular, 0 elsewhere
  Sequences sequences;                  ///< how the T tokens belong to sequences
  int64_t chunk = 64;                   ///< C: 16, 32 or 64
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
};
WEFT_OP(chunk_kkt, ChunkKktArgs);

/// Arguments of chunk_tri_inverse(): (I + A)^-1 of every strictly lower triangular chunk matrix. The result is unit lower
/// triangular, its upper part exactly 0.
struct ChunkTriInverseArgs {
  Tensor a;             ///< [T, Hv, C] f32; entries on and above the diagonal are ignored
  Tensor a_inv;         ///< [T, Hv, C] f32, out; may be a itself
  Sequences sequences;  ///< how the T tokens belong to sequences
  int64_t chunk = 64;   ///< C: 16, 32 or 64
};
WEFT_OP(chunk_tri_inverse, ChunkTriInverseArgs);

/// Arguments of chunk_wu(): the matrices w and u of every chunk.
///
/// The accelerated backends round beta v and beta e^G k to the dtype of k, accumulate products in f32, and round u and w once. The
/// reference rounds only at the store.
struct ChunkWuArgs {
  Tensor k;                             ///< [T, Hk, K]
  Tensor v;                             ///< [T, Hv, V]
  Tensor beta;                          ///< [T, Hv] f32
  Tensor g_cumsum;                      ///< [T, Hv] or [T, Hv, K] f32
  Tensor a_inv;                         ///< [T, Hv, C] f32, as chunk_tri_inverse leaves it: 0 above the diagonal
  Tensor w;                             ///< [T, Hv, K], out
  Tensor u;                             ///< [T, Hv, V], out
  Sequences sequences;                  ///< how the T tokens belong to sequences
  int64_t chunk = 64;                   ///< C: 16, 32 or 64
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
};
WEFT_OP(chunk_wu, ChunkWuArgs);

/// Arguments of chunk_state(): the states at chunk entries, and the corrected values vn.
struct ChunkStateArgs {
  Tensor k;                             ///< [T, Hk, K]
  Tensor w;                             ///< [T, Hv, K]
  Tensor u;                             ///< [T, Hv, V]
  Tensor g_cumsum;                      ///< [T, Hv] or [T, Hv, K] f32
  Tensor state_in;                      ///< [N, Hv, V, K] f32, f16 or bf16, optional: zeros
  Tensor h;                             ///< [>= max_chunks, Hv, V, K], out: the state at the entry of every chunk
  Tensor v_new;                         ///< [T, Hv, V], out: vn, before the decay factor
  Tensor state_out;                     ///< [N, Hv, V, K], optional, out: the final states. May be state_in itself
  Sequences sequences;                  ///< how the T tokens belong to sequences
  int64_t chunk = 64;                   ///< C: 16, 32 or 64
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
};
WEFT_OP(chunk_state, ChunkStateArgs);

/// Arguments of chunk_output(): the outputs from states at chunk entries and corrected values.
struct ChunkOutputArgs {
  Tensor q;                             ///< [T, Hk, K]
  Tensor k;                             ///< [T, Hk, K]
  Tensor v_new;                         ///< [T, Hv, V]
  Tensor h;                             ///< [>= max_chunks, Hv, V, K]
  Tensor g_cumsum;                      ///< [T, Hv] or [T, Hv, K] f32
  Tensor o;                             ///< [T, Hv, V], out
  std::optional<float> scale;           ///< default K^-1/2
  Sequences sequences;                  ///< how the T tokens belong to sequences
  int64_t chunk = 64;                   ///< C: 16, 32 or 64
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
};
WEFT_OP(chunk_output, ChunkOutputArgs);

}  // namespace weft
#pragma GCC visibility pop
