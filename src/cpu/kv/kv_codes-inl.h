// Unpacking of a cache row's codes to one byte each, from dense bit streams, bytes and lane tiles.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_CODES_INL_H_
#undef WEFT_CPU_KV_CODES_INL_H_
#else
#define WEFT_CPU_KV_CODES_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/bit_pack.h"
#include "cpu/common/simd-inl.h"
#include "cpu/kv/kv_params.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Bytes between rows in a buffer of unpacked codes. The padding lets kernels read whole vectors.
constexpr int64_t kCodeStride = kMaxHeadDim + 16;
// A quad: the four tokens, or coordinates, that a 32-bit lane of a lane tile holds in its four bytes.
constexpr int64_t kQuadTokens = 4;

// ---- dense bit streams to bytes

#if !WEFT_EMULATED
using Block8 = hn::Full128<uint8_t>;
using Block16 = hn::Full128<uint16_t>;
using Block32 = hn::Full128<uint32_t>;
using Block64 = hn::Full128<uint64_t>;

// 16 codes of b bits take 2 b bytes. Code j begins in byte j b / 8 and ends there or in the next byte. A shuffle brings both bytes
// into a 16-bit lane, and a multiplication moves the code to bit 8. Even and odd codes use separate vectors, which merge into one
// of bytes.
struct DenseShuffle {
  uint8_t bytes[2][16];
  uint16_t factor[2][8];
};
struct DenseShuffles {
  DenseShuffle of[9];  // by bits
};
constexpr DenseShuffles make_dense_shuffles() {
  DenseShuffles all{};
  for (int bits = 2; bits <= 8; ++bits)
    for (int j = 0; j < 16; ++j) {
      const int byte = j * bits / 8, shift = j * bits % 8;
      DenseShuffle& s = all.of[bits];
      s.bytes[j % 2][j / 2 * 2] = static_cast<uint8_t>(byte);
      s.bytes[j % 2][j / 2 * 2 + 1] = static_cast<uint8_t>(byte < 15 ? byte + 1 : 15);
      s.factor[j % 2][j / 2] = static_cast<uint16_t>(1 << (8 - shift));
    }
  return all;
}
inline constexpr DenseShuffles kDenseShuffles = make_dense_shuffles();
#endif

// Unpacks a dense row. Reads no byte past the row; may write up to 16 bytes past the last code.
inline void unpack_dense(const uint8_t* HWY_RESTRICT row, int64_t count, int bits, uint8_t* HWY_RESTRICT codes) {
#if WEFT_EMULATED
  unpack_codes(row, count, bits, codes);
#else
  const Block8 d8;
  const Block16 d16;
  const int64_t bytes = packed_bytes(count, bits);
  if (bytes < 16) return unpack_codes(row, count, bits, codes);
  if (bits == 4 && bytes % 16 == 0) {
    const auto low = hn::Set(d8, uint8_t{15});
    for (int64_t i = 0; i < bytes; i += 16) {
      const auto v = hn::LoadU(d8, row + i);
      const auto even = hn::And(v, low);
      const auto odd = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, v))), low);
      hn::StoreU(hn::InterleaveLower(d8, even, odd), d8, codes + 2 * i);
      hn::StoreU(hn::InterleaveUpper(d8, even, odd), d8, codes + 2 * i + 16);
    }
    return;
  }
  const DenseShuffle& s = kDenseShuffles.of[bits];
  const auto even_bytes = hn::LoadU(d8, s.bytes[0]), odd_bytes = hn::LoadU(d8, s.bytes[1]), last = hn::Set(d8, uint8_t{15});
  const auto even_factor = hn::LoadU(d16, s.factor[0]), odd_factor = hn::LoadU(d16, s.factor[1]);
  const auto mask = hn::Set(d8, static_cast<uint8_t>((1 << bits) - 1));
  const auto high = hn::Set(d16, uint16_t{0xff00});
  for (int64_t j = 0; j < count; j += 16) {
    // Near the end, the load covers the row's last 16 bytes, and `up` moves the shuffle to where the codes are in them.
    const int64_t offset = j / 8 * bits, base = std::min(offset, bytes - 16);
    const auto up = hn::Set(d8, static_cast<uint8_t>(offset - base));
    const auto v = hn::LoadU(d8, row + base);
    const auto even = hn::TableLookupBytes(v, hn::Min(hn::Add(even_bytes, up), last));
    const auto odd = hn::TableLookupBytes(v, hn::Min(hn::Add(odd_bytes, up), last));
    const auto even16 = hn::Mul(hn::BitCast(d16, even), even_factor), odd16 = hn::Mul(hn::BitCast(d16, odd), odd_factor);
    const auto both = hn::Or(hn::ShiftRight<8>(even16), hn::And(odd16, high));
    hn::StoreU(hn::And(hn::BitCast(d8, both), mask), d8, codes + j);
  }
#endif
}

// Unpacks a cache row stored as rows or token-major tiles.
inline void unpack_codes_row(const SideView& side, const uint8_t* row, uint8_t* HWY_RESTRICT codes) {
  const int bits = side.format->bits;
  if (side.format->packing == Packing::dense && bits < 8) return unpack_dense(row, side.D, bits, codes);
  const hn::CappedTag<uint8_t, 8> d;  // D is a multiple of 8
  const auto mask = hn::Set(d, static_cast<uint8_t>((1 << bits) - 1));
  for (int64_t j = 0; j < side.D; j += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::And(hn::LoadU(d, row + j), mask), d, codes + j);
}

// ---- lane tiles to bytes

// Calls use(std::integral_constant<int, bits>()).
template <class Use>
HWY_INLINE void with_bits(int bits, Use&& use) {
  switch (bits) {
    case 2: return use(std::integral_constant<int, 2>());
    case 3: return use(std::integral_constant<int, 3>());
    case 4: return use(std::integral_constant<int, 4>());
    case 5: return use(std::integral_constant<int, 5>());
    case 6: return use(std::integral_constant<int, 6>());
    case 7: return use(std::integral_constant<int, 7>());
    default: return use(std::integral_constant<int, 8>());
  }
}

// Codes of kBits bits from their planes, widest first: the bitwise OR of plane(width, shift) << shift. width and shift are
// std::integral_constant.
template <int kBits, int kWidth = 8, int kShift = 0, class V, class Plane>
HWY_INLINE V join_planes(V codes, const Plane& plane) {
  if constexpr (kWidth == 0) {
    return codes;
  } else if constexpr ((kBits & kWidth) == 0) {
    return join_planes<kBits, kWidth / 2, kShift>(codes, plane);
  } else {
    const V field = plane(std::integral_constant<int, kWidth>(), std::integral_constant<int, kShift>());
    return join_planes<kBits, kWidth / 2, kShift + kWidth>(hn::Or(codes, hn::ShiftLeft<kShift>(field)), plane);
  }
}
// Offset of the plane whose lowest bit is `shift`: the planes before it hold `shift` bits of every code.
constexpr int64_t plane_offset(int64_t D, int shift) { return kTileTokens * D * shift / 8; }

#if !WEFT_EMULATED
// Codes of tokens [token, token + 4) and coordinates [j + 4 kFour, j + 4 kFour + 4) of a K tile, a byte each, with tokens in lanes.
// j must be a multiple of 32.
template <int kBits, int kFour>
HWY_INLINE hn::Vec<Block32> key_block(const uint8_t* tile, int64_t D, int64_t token, int64_t j) {
  const Block32 d32;
  return join_planes<kBits>(hn::Zero(d32), [&](auto width, auto shift) {
    constexpr int w = decltype(width)::value;
    const uint8_t* from = tile + plane_offset(D, decltype(shift)::value) +
                          (j * w / 32 + kFour * w / 8) * (kTileTokens / kLaneTokens) * kLaneVectorBytes + 4 * token;
    const auto fields = hn::ShiftRight<kFour % (8 / w) * w>(hn::BitCast(d32, hn::LoadU(Block8(), from)));
    return hn::And(fields, hn::Set(d32, ((1u << w) - 1) * 0x01010101u));
  });
}

// Codes of tokens [token, token + 4) and coordinates [j, j + 4) of a V tile, a byte each, with tokens in lanes.
template <int kBits>
HWY_INLINE hn::Vec<Block32> value_block(const uint8_t* tile, int64_t D, int64_t token, int64_t j) {
  const Block32 d32;
  alignas(16) static constexpr uint8_t kTranspose[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const auto codes = join_planes<kBits>(hn::Zero(d32), [&](auto width, auto shift) {
    constexpr int w = decltype(width)::value;
    const uint8_t* from = tile + plane_offset(D, decltype(shift)::value) + token * w / 32 * (4 * D) + 4 * j;
    const auto fields = hn::ShiftRightSame(hn::BitCast(d32, hn::LoadU(Block8(), from)), static_cast<int>(token / 4 % (8 / w) * w));
    return hn::And(fields, hn::Set(d32, ((1u << w) - 1) * 0x01010101u));
  });
  return hn::BitCast(d32, hn::TableLookupBytes(hn::BitCast(Block8(), codes), hn::Load(Block8(), kTranspose)));
}

// Stores four blocks of 4 tokens x 4 coordinates as 16 neighbouring coordinates of each token.
HWY_INLINE void store_blocks(const hn::Vec<Block32>* block, uint8_t* HWY_RESTRICT codes) {
  const Block8 d8;
  const Block32 d32;
  const Block64 d64;
  const auto a = hn::BitCast(d64, hn::InterleaveLower(d32, block[0], block[1]));
  const auto b = hn::BitCast(d64, hn::InterleaveUpper(d32, block[0], block[1]));
  const auto c = hn::BitCast(d64, hn::InterleaveLower(d32, block[2], block[3]));
  const auto d = hn::BitCast(d64, hn::InterleaveUpper(d32, block[2], block[3]));
  hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d64, a, c)), d8, codes);
  hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d64, a, c)), d8, codes + kCodeStride);
  hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d64, b, d)), d8, codes + 2 * kCodeStride);
  hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d64, b, d)), d8, codes + 3 * kCodeStride);
}
#endif

// Unpacks tokens [token, token + 4) of a lane tile, token a multiple of 4: codes[i * kCodeStride + j] is coordinate j of token + i.
template <int kBits>
HWY_INLINE void unpack_lane_quad(const SideView& side, const uint8_t* tile, int64_t token, uint8_t* HWY_RESTRICT codes) {
  const int64_t D = side.D;
#if WEFT_EMULATED
  for (int64_t j = 0; j < D; ++j)
    for (int64_t i = 0; i < kQuadTokens; ++i) {
      int code = 0;
      for (int p = 0; p < side.planes.count; ++p) {
        const LanePlane& plane = side.planes.plane[p];
        const LaneField at = lane_field(side.role, plane.width, D, token + i, j);
        code |= (tile[plane.offset + at.byte] >> at.bit & ((1 << plane.width) - 1)) << plane.shift;
      }
      codes[i * kCodeStride + j] = static_cast<uint8_t>(code);
    }
#else
  for (int64_t j = 0; j < D; j += 32) {
    hn::Vec<Block32> block[8];
    if (side.role == KvRole::k) {
      block[0] = key_block<kBits, 0>(tile, D, token, j);
      block[1] = key_block<kBits, 1>(tile, D, token, j);
      block[2] = key_block<kBits, 2>(tile, D, token, j);
      block[3] = key_block<kBits, 3>(tile, D, token, j);
      block[4] = key_block<kBits, 4>(tile, D, token, j);
      block[5] = key_block<kBits, 5>(tile, D, token, j);
      block[6] = key_block<kBits, 6>(tile, D, token, j);
      block[7] = key_block<kBits, 7>(tile, D, token, j);
    } else {
      WEFT_UNROLL for (int64_t b = 0; b < 8; ++b) block[b] = value_block<kBits>(tile, D, token, j + 4 * b);
    }
    store_blocks(block, codes + j);
    store_blocks(block + 4, codes + j + 16);
  }
#endif
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
