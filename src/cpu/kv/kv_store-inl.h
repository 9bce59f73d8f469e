// Packing of a cache row's codes from one byte each into dense bit streams, bytes and lane tiles.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_STORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_STORE_INL_H_
#undef WEFT_CPU_KV_STORE_INL_H_
#else
#define WEFT_CPU_KV_STORE_INL_H_
#endif

#include "cpu/kv/kv_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// ---- dense bit streams

#if !WEFT_EMULATED
// Shuffle that joins 16 packed codes of b bits: the low b bytes of each half of a 128-bit block.
struct DenseGathers {
  uint8_t bytes[9][16];  // by bits
};
constexpr DenseGathers make_dense_gathers() {
  DenseGathers all{};
  for (int bits = 2; bits <= 8; ++bits)
    for (int i = 0; i < 16; ++i) all.bytes[bits][i] = static_cast<uint8_t>(i < bits ? i : i < 2 * bits ? 8 + i - bits : 15);
  return all;
}
inline constexpr DenseGathers kDenseGathers = make_dense_gathers();
#endif

// Packs codes, a byte each and readable up to a multiple of 16, into a dense row. Writes every byte of the row, with pad bits 0,
// and no byte outside of it.
inline void pack_dense(const uint8_t* HWY_RESTRICT codes, int64_t count, int bits, uint8_t* HWY_RESTRICT row) {
#if WEFT_EMULATED
  pack_codes(codes, count, bits, row);
#else
  const Block8 d8;
  const Block16 d16;
  const Block32 d32;
  const Block64 d64;
  if (count % 16 != 0) return pack_codes(codes, count, bits, row);
  uint8_t packed[kMaxHeadDim + 16];
  if (bits == 4 && count % 32 == 0) {
    const auto low = hn::Set(d16, uint16_t{0x00ff});
    for (int64_t j = 0; j < count; j += 32) {
      const auto a = hn::BitCast(d16, hn::LoadU(d8, codes + j)), b = hn::BitCast(d16, hn::LoadU(d8, codes + j + 16));
      const auto a4 = hn::And(hn::Or(a, hn::ShiftRight<4>(a)), low), b4 = hn::And(hn::Or(b, hn::ShiftRight<4>(b)), low);
      hn::StoreU(hn::ConcatEven(d8, hn::BitCast(d8, b4), hn::BitCast(d8, a4)), d8, packed + j / 2);
    }
  } else {
    // Merges neighbours three times: codes of b bits into fields of 2 b, 4 b and 8 b bits. The last are b bytes in each half.
    const auto gather = hn::LoadU(d8, kDenseGathers.bytes[bits]);
    const auto mask16 = hn::Set(d16, uint16_t{0x00ff});
    const auto mask32 = hn::Set(d32, uint32_t{0x0000ffff});
    const auto mask64 = hn::Set(d64, uint64_t{0xffffffff});
    for (int64_t j = 0; j < count; j += 16) {
      const auto a = hn::BitCast(d16, hn::LoadU(d8, codes + j));
      const auto b = hn::BitCast(d32, hn::Or(hn::And(a, mask16), hn::ShiftLeftSame(hn::ShiftRight<8>(a), bits)));
      const auto c = hn::BitCast(d64, hn::Or(hn::And(b, mask32), hn::ShiftLeftSame(hn::ShiftRight<16>(b), 2 * bits)));
      const auto e = hn::Or(hn::And(c, mask64), hn::ShiftLeftSame(hn::ShiftRight<32>(c), 4 * bits));
      hn::StoreU(hn::TableLookupBytes(hn::BitCast(d8, e), gather), d8, packed + j / 8 * bits);
    }
  }
  const int64_t written = count / 8 * bits, bytes = packed_bytes(count, bits);
  std::memset(packed + written, 0, static_cast<size_t>(bytes - written));
  std::memcpy(row, packed, static_cast<size_t>(bytes));
#endif
}

// Stores a cache row's codes in rows or token-major tiles.
inline void store_codes_row(const SideView& side, const uint8_t* codes, uint8_t* row) {
  if (side.format->packing == Packing::dense && side.format->bits < 8)
    pack_dense(codes, side.D, side.format->bits, row);
  else
    std::memcpy(row, codes, static_cast<size_t>(side.D));
}

// ---- lane tiles

// Stores one plane of a K token. The token owns its 32-bit lanes: each holds 32 / w coordinates, quad s of them at bit w s of every
// byte.
template <int kWidth>
HWY_INLINE void store_key_plane(const uint8_t* HWY_RESTRICT codes, int64_t D, int shift, uint8_t* HWY_RESTRICT to) {
  constexpr uint64_t kMask = ((1u << kWidth) - 1) * 0x0101010101010101u;
  for (int64_t j = 0; j < D; j += 32 / kWidth, to += kTileTokens / kLaneTokens * kLaneVectorBytes) {
    uint32_t word = 0;
    if constexpr (kWidth == 8) {
      std::memcpy(&word, codes + j, sizeof(word));
    } else {
      WEFT_UNROLL for (int s = 0; s < 8 / kWidth; s += 2) {  // two quads at a time
        uint64_t two;
        std::memcpy(&two, codes + j + 4 * s, sizeof(two));
        two = two >> shift & kMask;
        word |= static_cast<uint32_t>(two | two >> (32 - kWidth)) << (kWidth * s);
      }
    }
    std::memcpy(to, &word, sizeof(word));
  }
}

HWY_INLINE void store_lane_key(const SideView& side, uint8_t* tile, int64_t token, const uint8_t* codes) {
  for (int p = 0; p < side.planes.count; ++p) {
    const LanePlane& plane = side.planes.plane[p];
    uint8_t* to = tile + plane.offset + lane_field(KvRole::k, plane.width, side.D, token, 0).byte;
    switch (plane.width) {
      case 1: store_key_plane<1>(codes, side.D, plane.shift, to); break;
      case 2: store_key_plane<2>(codes, side.D, plane.shift, to); break;
      case 4: store_key_plane<4>(codes, side.D, plane.shift, to); break;
      default: store_key_plane<8>(codes, side.D, plane.shift, to); break;
    }
  }
}

// Tokens of a V tile share 32-bit lanes, up to 32 tokens in one. A batch collects their codes, and flush() stores them together:
// whole lanes where all of their tokens are present, else only the bits of the tokens that are.
constexpr int64_t kBatchTokens = 32;

struct LaneBatch {
  uint32_t present = 0;     // bit i: token first + i is present
  uint8_t* tile = nullptr;  // destination
  int64_t first = 0;        // first token of the batch, within the tile
  uint8_t codes[kBatchTokens * kCodeStride];
};

#if !WEFT_EMULATED
// Interleaves four rows of codes to quads: byte i of lane j is coordinate j of row i.
HWY_INLINE void interleave_quad(const uint8_t* const* rows, int64_t D, uint8_t* HWY_RESTRICT out) {
  const Block8 d8;
  const Block16 d16;
  for (int64_t j = 0; j < D; j += 16) {
    const auto r0 = hn::LoadU(d8, rows[0] + j), r1 = hn::LoadU(d8, rows[1] + j), r2 = hn::LoadU(d8, rows[2] + j),
               r3 = hn::LoadU(d8, rows[3] + j);
    const auto a = hn::BitCast(d16, hn::InterleaveLower(d8, r0, r1)), b = hn::BitCast(d16, hn::InterleaveUpper(d8, r0, r1));
    const auto c = hn::BitCast(d16, hn::InterleaveLower(d8, r2, r3)), e = hn::BitCast(d16, hn::InterleaveUpper(d8, r2, r3));
    hn::Store(hn::BitCast(d8, hn::InterleaveLower(d16, a, c)), d8, out + 4 * j);
    hn::Store(hn::BitCast(d8, hn::InterleaveUpper(d16, a, c)), d8, out + 4 * j + 16);
    hn::Store(hn::BitCast(d8, hn::InterleaveLower(d16, b, e)), d8, out + 4 * j + 32);
    hn::Store(hn::BitCast(d8, hn::InterleaveUpper(d16, b, e)), d8, out + 4 * j + 48);
  }
}
#endif

inline HWY_NOINLINE void flush(const SideView& side, LaneBatch& batch) {
  const uint32_t present = batch.present;
  batch.present = 0;
  if (present == 0) return;
#if WEFT_EMULATED
  for (int64_t i = 0; i < kBatchTokens; ++i)
    for (int p = 0; p < side.planes.count && (present >> i & 1); ++p)
      for (int64_t j = 0; j < side.D; ++j) {
        const LanePlane& plane = side.planes.plane[p];
        const LaneField at = lane_field(KvRole::v, plane.width, side.D, batch.first + i, j);
        const int mask = (1 << plane.width) - 1;
        uint8_t& byte = batch.tile[plane.offset + at.byte];
        byte =
            static_cast<uint8_t>((byte & ~(mask << at.bit)) | (batch.codes[i * kCodeStride + j] >> plane.shift & mask) << at.bit);
      }
#else
  const hn::ScalableTag<uint32_t> d32;
  const auto bytes = static_cast<int64_t>(hn::Lanes(d32)) * 4;
  HWY_ALIGN uint8_t quads[kBatchTokens / kQuadTokens][kQuadTokens * kMaxHeadDim];
  for (int64_t q = 0; q < kBatchTokens / kQuadTokens; ++q) {
    const uint32_t here = present >> (kQuadTokens * q) & 15;
    if (here == 0) continue;
    const uint8_t* rows[kQuadTokens];
    // A present token stands in for an absent one, whose bits the mask below keeps from being stored.
    for (int64_t i = 0; i < kQuadTokens; ++i) {
      const int64_t from = here >> i & 1 ? i : static_cast<int64_t>(hwy::Num0BitsBelowLS1Bit_Nonzero32(here));
      rows[i] = batch.codes + (kQuadTokens * q + from) * kCodeStride;
    }
    interleave_quad(rows, side.D, quads[q]);
  }
  for (int p = 0; p < side.planes.count; ++p) {
    const LanePlane& plane = side.planes.plane[p];
    const int w = plane.width, fields = 8 / w;
    const auto field_mask = hn::Set(d32, ((1u << w) - 1) * 0x01010101u);
    for (int64_t group = 0; group < w; ++group) {  // 32 / w tokens each
      uint32_t mask = 0;
      for (int64_t i = 0; i < 32 / w; ++i)
        if (present >> (32 / w * group + i) & 1) mask |= ((1u << w) - 1) << (8 * (i % 4) + w * (i / 4));
      if (mask == 0) continue;
      const int64_t vector = (batch.first * w / 32 + group) * (side.D / kLaneTokens);
      uint8_t* to = batch.tile + plane.offset + vector * kLaneVectorBytes;
      const auto over = hn::Set(d32, mask);
      for (int64_t j = 0; j < 4 * side.D; j += bytes) {
        auto* at = reinterpret_cast<uint32_t*>(to + j);
        auto value = hn::Zero(d32);
        for (int s = 0; s < fields; ++s) {
          const int64_t q = group * fields + s;
          if ((present >> (kQuadTokens * q) & 15) == 0) continue;
          const auto quad = hn::Load(d32, reinterpret_cast<const uint32_t*>(quads[q] + j));
          value = hn::Or(value, hn::ShiftLeftSame(hn::And(hn::ShiftRightSame(quad, plane.shift), field_mask), w * s));
        }
        if (mask != ~0u) value = hn::Or(hn::AndNot(over, hn::Load(d32, at)), hn::And(value, over));
        hn::Store(value, d32, at);
      }
    }
  }
#endif
}

// Stores codes row by row in any storage. Rows of V tiles reach memory with the next row that does not fit in their batch, or with
// finish(). The last of several writes to one cache row stays.
class CodeWriter {
 public:
  HWY_INLINE explicit CodeWriter(const SideView& side) : side_(side) {}
  CodeWriter(const CodeWriter&) = delete;
  CodeWriter& operator=(const CodeWriter&) = delete;

  // Not inlined, like load_rotated, to limit code size: every source of levels on every target calls it.
  HWY_NOINLINE void put(int64_t block, int64_t head, int64_t row, const uint8_t* codes) {
    if (side_.storage != KvStorage::lane_tiles) return store_codes_row(side_, codes, side_.codes_at(block, head, row));
    uint8_t* tile = side_.tile(block, head, row);
    const int64_t token = row % kTileTokens, first = token / kBatchTokens * kBatchTokens;
    if (side_.role == KvRole::k) return store_lane_key(side_, tile, token, codes);
    const uint32_t bit = 1u << (token - first);
    if (tile != batch_.tile || first != batch_.first || (batch_.present & bit)) {
      finish();
      batch_.tile = tile;
      batch_.first = first;
    }
    batch_.present |= bit;
    std::memcpy(batch_.codes + (token - first) * kCodeStride, codes, static_cast<size_t>(side_.D));
  }
  HWY_INLINE void finish() { flush(side_, batch_); }

 private:
  const SideView& side_;
  LaneBatch batch_;
};

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
