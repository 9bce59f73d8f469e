// The tokens of a block of kv_encode: where they go, and which of their rows a later token overwrites. See kv_encode_tiles.cu.
#pragma once

#include "cuda/kv/kv_encode_write.cuh"

namespace weft::cuda::encode {

// A block's tokens.
struct Tokens {
  int64_t block[kTile], row[kTile];  // block < 0: not written
  int64_t key[kTile];                // row_key() of the position
  int token[kTile];                  // index in the sequence, -1: none
  unsigned lost[2];                  // bits of rows that a later token overwrites
};

// The positions of a sequence.
struct SequencePositions {
  const int32_t* data;
  int64_t stride;
  int length;
  __device__ SequencePositions(const TokenRows& p, const TokenRange& range)
      : data(static_cast<const int32_t*>(p.positions.data) + range.begin * p.positions.stride),
        stride(p.positions.stride),
        length(static_cast<int>(range.length())) {}
  __device__ int at(int token) const { return data[static_cast<unsigned>(token) * stride]; }
};

// The positions that a thread loads: of its own row of the block and the row before, of the block's first and last tokens, and of
// kTogether tokens that follow, clamped to the sequence's last. All loads are issued together, so that a scan of thousands of tokens pays
// the latency of a load once per kTogether of them.
struct Positions {
  static constexpr int kTogether = 16;
  int own, before, low, high, later[kTogether];

  // For a block of tokens [begin, end) and the thread's own token.
  __device__ void load(const SequencePositions& all, int begin, int end, int token) {
    const int row = min(max(token, begin), end - 1);
    own = all.at(row);
    before = all.at(max(row - 1, 0));
    low = all.at(begin);
    high = all.at(end - 1);
    if (end < all.length) load_later(all, end + static_cast<int>(threadIdx.x));
  }
  __device__ void load_later(const SequencePositions& all, int from) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) later[i] = all.at(min(from + i * kThreads, all.length - 1));
  }

  // May a token of the sequence overwrite the row of an earlier one of the block's tokens, which end at `end`? Growing positions rule that
  // out. `follows`: this thread's token is one of the block's, and not the first.
  __device__ bool suspect(const CacheIndex& index, const SequencePositions& all, int end, bool follows) {
    const int64_t around = index.kind == CacheKind::ring ? index.rows - index.pinned : INT64_MAX;
    unsigned least = 0x7fffffffu;  // unsigned: negative positions have no row
    int most = 0;
#pragma unroll 1
    for (int from = end + static_cast<int>(threadIdx.x); from < all.length;) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        least = min(least, static_cast<unsigned>(later[i]));
        most = max(most, later[i]);
      }
      from += kTogether * kThreads;
      if (from < all.length) load_later(all, from);
    }
    return (follows && own <= before) || int64_t{high} - low >= around || static_cast<int64_t>(least) <= high ||
           int64_t{most} - low >= around;
  }
};

// Marks the rows of tokens from `first` on that a later token overwrites.
__device__ inline void find_lost(const TokenRows& p, const TokenRange& range, int first, Tokens& tokens) {
#pragma unroll 1
  for (int i = first + 1 + static_cast<int>(threadIdx.x); i < static_cast<int>(range.length()); i += kThreads) {
    const int64_t key = row_key(p.index, index_at(p.positions, range.begin + i));
#pragma unroll 1
    for (int r = 0; r < kTile; ++r)
      if (key >= 0 && tokens.key[r] == key && tokens.token[r] < i) atomicOr(&tokens.lost[r / 32], 1u << r % 32);
  }
  __syncthreads();
}

}  // namespace weft::cuda::encode
