// Writes the codes of a block of kv_encode: 64 tokens of one head and side, in shared memory a byte each.
#pragma once

#include "cuda/kv/kv_encode.cuh"

namespace weft::cuda::encode {

constexpr int kTile = static_cast<int>(kTileTokens), kWarps = kTile / 8, kThreads = 32 * kWarps;

// Stride of a row of codes: an odd number of words, so that rows begin in different banks.
template <int D>
constexpr int kCodesRow = D + 4;

// Transposes 8 x 8 codes among the lanes 4 j + t of one t. A lane's word holds codes e < 8 of token j, code f as nibble f / 4 of byte
// f % 4; the result holds code j of tokens e < 8.
__device__ inline uint32_t transpose_nibbles(uint32_t x, int lane) {
  const auto from = [&](int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); };
  const uint32_t four = from(16), kept = lane & 16 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
  x = (x & kept) | (__funnelshift_l(four, four, lane & 16 ? 28 : 4) & ~kept);
  x = __byte_perm(x, from(8), lane & 8 ? 0x3276 : 0x5410);
  return __byte_perm(x, from(4), lane & 4 ? 0x3715 : 0x6240);
}

// How words of a plane of lanes order are packed: `Width` bits of every code from `shift` on.
template <int Width>
struct PlaneWords {
  static constexpr int kPacked = 32 / Width;  // tokens or coordinates of a word
  static constexpr uint32_t kMask = ((1u << Width) - 1) * 0x01010101u;
  int shift;
  __device__ uint32_t part(uint32_t codes, int s) const { return (codes >> shift & kMask) << (Width * s); }
};

template <int Width, int D>
__device__ void write_plane(const SideView& side, const LanePlane& plane, const RowAt* at, bool aligned, int begin, int end,
                            const uint8_t* codes) {
  using Words = PlaneWords<Width>;
  const Words words{plane.shift};
  if (side.role == KvRole::k) {  // a word holds codes of one token, and a thread writes words of one token
    const int r = threadIdx.x % kTile;
    uint8_t* tile = at[r].codes;
    if (!tile) return;
    auto* to = reinterpret_cast<uint32_t*>(tile + plane.offset) + at[r].token;
    const auto* from = reinterpret_cast<const uint32_t*>(codes + r * kCodesRow<D>);
#pragma unroll 4
    for (int group = threadIdx.x / kTile; group < D / Words::kPacked; group += kThreads / kTile) {
      uint32_t word = 0;
#pragma unroll
      for (int s = 0; s < 8 / Width; ++s) word |= words.part(from[group * (8 / Width) + s], s);
      to[group * kTile] = word;
    }
  } else if (aligned) {  // a word holds one coordinate of several tokens: a thread packs four words from as many rows
    uint8_t* tile = at[begin].codes + plane.offset;
#pragma unroll 1
    for (int item = threadIdx.x; item < kTile / Words::kPacked * (D / 4); item += kThreads) {
      const int c = item % (D / 4), first = item / (D / 4) * Words::kPacked;
      if (first >= end || first + Words::kPacked <= begin) continue;
      uint4 word{};
#pragma unroll
      for (int s = 0; s < 8 / Width; ++s) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = reinterpret_cast<const uint32_t*>(codes + (first + 4 * s + i) * kCodesRow<D>)[c];
        const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140),
                       d = __byte_perm(x[0], x[1], 0x7362), e = __byte_perm(x[2], x[3], 0x7362);
        word.x |= words.part(__byte_perm(a, b, 0x5410), s);
        word.y |= words.part(__byte_perm(a, b, 0x7632), s);
        word.z |= words.part(__byte_perm(d, e, 0x5410), s);
        word.w |= words.part(__byte_perm(d, e, 0x7632), s);
      }
      uint8_t* to = tile + item * 16;
      if (first >= begin && first + Words::kPacked <= end) {
        *reinterpret_cast<uint4*>(to) = word;
        continue;
      }
      uint32_t mask = 0;
#pragma unroll
      for (int f = 0; f < Words::kPacked; ++f)
        if (first + f >= begin && first + f < end) mask |= ((1u << Width) - 1) << (f % 4 * 8 + f / 4 * Width);
      const uint32_t wanted[4] = {word.x, word.y, word.z, word.w};
      auto* old = reinterpret_cast<unsigned*>(to);
#pragma unroll
      for (int x = 0; x < 4; ++x)
        if (const uint32_t change = (__ldcg(old + x) ^ wanted[x]) & mask) atomicXor(old + x, change);
    }
  } else {
#pragma unroll 1
    for (int item = threadIdx.x; item < kTile * D; item += kThreads) {
      const int r = item / D, c = item % D;
      if (!at[r].codes) continue;
      const LaneField field = lane_field(side.role, Width, D, at[r].token, c);
      auto* to = reinterpret_cast<unsigned*>(at[r].codes + plane.offset + (field.byte & ~int64_t{3}));
      const int shift = static_cast<int>(field.byte & 3) * 8 + field.bit;
      const uint32_t mask = (1u << Width) - 1, wanted = (codes[r * kCodesRow<D> + c] >> plane.shift & mask) << shift;
      if (const uint32_t change = (__ldcg(to) ^ wanted) & (mask << shift)) atomicXor(to, change);
    }
  }
}

// Writes the block's codes in lanes order. Words whose tokens are all in the block are stored whole; of other words only the bits of the
// block's tokens change.
template <int D>
__device__ void write_lanes(const SideView& side, const RowAt* at, bool aligned, int begin, int end, const uint8_t* codes) {
#pragma unroll 1
  for (int i = 0; i < side.planes.count; ++i) {
    const LanePlane& plane = side.planes.plane[i];
    switch (plane.width) {
      case 8: write_plane<8, D>(side, plane, at, aligned, begin, end, codes); break;
      case 4: write_plane<4, D>(side, plane, at, aligned, begin, end, codes); break;
      case 2: write_plane<2, D>(side, plane, at, aligned, begin, end, codes); break;
      default: write_plane<1, D>(side, plane, at, aligned, begin, end, codes);
    }
  }
}

// Writes rows as words of `Each` codes: 4 codes of 8 bits, or 8 codes of 4 bits.
template <int Each, int D>
__device__ void write_words(const RowAt* at, const uint8_t* codes) {
#pragma unroll 4
  for (int item = threadIdx.x; item < kTile * D / Each; item += kThreads) {
    const int r = item / (D / Each), u = item % (D / Each);
    uint8_t* to = at[r].codes;
    if (!to) continue;
    const auto* from = reinterpret_cast<const uint32_t*>(codes + r * kCodesRow<D> + Each * u);
    uint32_t word = from[0];
    if constexpr (Each == 8) word = __byte_perm(word | word >> 4, from[1] | from[1] >> 4, 0x6420);
    reinterpret_cast<uint32_t*>(to)[u] = word;
  }
}

template <int D>
__device__ void write_rows(const SideView& side, const RowAt* at, const uint8_t* codes) {
  if (side.words && side.bits == 4 && !side.bytes_each) return write_words<8, D>(at, codes);
  if (side.words && (side.bits == 8 || side.bytes_each)) return write_words<4, D>(at, codes);
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < kTile; r += kThreads / 32)
    if (at[r].codes) write_codes(side, at[r], codes + r * kCodesRow<D>, threadIdx.x % 32);
}

}  // namespace weft::cuda::encode
