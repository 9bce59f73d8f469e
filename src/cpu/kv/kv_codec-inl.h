// The kernels of kv_rotate, kv_decode and kv_repack over ranges of rows.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_CODEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_CODEC_INL_H_
#undef WEFT_CPU_KV_CODEC_INL_H_
#else
#define WEFT_CPU_KV_CODEC_INL_H_
#endif

#include "cpu/kv/kv_encode_many-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Rotates rows [first, last) of the T x H rows of x into y.
void rotate_rows(const RotatePlan& plan, const RowsView& x, const RowsView& y, int64_t H, int64_t first, int64_t last) {
  HWY_ALIGN float row[kPaddedHeadDim];
  // Whole vectors of f32 need no buffer, whose copies would take a third of the time.
  const bool direct = plan.rotation == Rotation::srht && x.dtype == DType::f32 && y.dtype == DType::f32 && plan.D % kLanes == 0;
  for (int64_t i = first; i < last; ++i) {
    const int64_t t = i / H, h = i % H;
    if (direct) {
      rotate_srht(plan, static_cast<const float*>(x.data) + x.at(t, h), static_cast<float*>(y.data) + y.at(t, h));
      continue;
    }
    unpack_row(x.dtype, x.data, x.at(t, h), plan.D, row);
    rotate_row(plan, row);
    pack_row(row, plan.D, y.dtype, y.data, y.at(t, h));
  }
}

// Rows decoded at a time; their f32 values fit in the L1 cache.
constexpr int64_t kDecodeRows = 8;

// Decodes tokens of one sequence and head. Tokens without a cache row become zeros.
HWY_INLINE void decode_head(const DecodePlan& plan, const TokenLocations& tokens, int64_t head) {
  const SideView& side = plan.side;
  const int64_t D = side.D;
  HWY_ALIGN float rows[kDecodeRows * kPaddedHeadDim];
  for (int64_t i = 0; i < tokens.count;) {
    const KvLocation& from = tokens.at[i];
    int64_t count = 1;
    if (from.exists()) {
      while (count < kDecodeRows && i + count < tokens.count && tokens.at[i + count].block == from.block &&
             tokens.at[i + count].row == from.row + count)
        ++count;
      decode_rows(side, from.block, head, from.row, count, rows, kPaddedHeadDim);
    }
    for (int64_t r = 0; r < count; ++r) {
      float* row = rows + r * kPaddedHeadDim;
      if (!from.exists()) {
        fill_row(row, D, 0);
      } else if (!plan.rotated) {
        rotate_row(plan.rotate, row);
        if (const float* mean = plan.mean.of(head))
          for (int64_t j = 0; j < D; ++j) row[j] += mean[j];
      }
      pack_row(row, D, plan.x.dtype, plan.x.data, plan.x.at(tokens.first + i + r, head));
    }
    i += count;
  }
}

// Decodes tokens of one sequence for heads [first_head, last_head).
void decode_tokens(const DecodePlan& plan, const TokenLocations& tokens, int64_t first_head, int64_t last_head) {
  for (int64_t head = first_head; head < last_head; ++head) decode_head(plan, tokens, head);
}

// Repacks cache rows [first, first + count) of a block and head between sides with the same codes. Concurrent calls must not share
// a tile.
void repack_rows(const SideView& from, const SideView& to, int64_t block, int64_t head, int64_t first, int64_t count) {
  const bool whole =
      from.passthrough() ||  // rows are copied byte for byte: there are no pad bits to clear
      (from.storage != KvStorage::lane_tiles && to.storage != KvStorage::lane_tiles && from.format->packing == Packing::dense &&
       to.format->packing == Packing::dense && from.D * from.format->bits % 32 == 0);
  const auto code_bytes = static_cast<size_t>(from.row_code_bytes), gain_bytes = static_cast<size_t>(from.row_gain_bytes);
  for (int64_t row = first; whole && row < first + count; ++row)
    std::memcpy(to.codes_at(block, head, row), from.codes_at(block, head, row), code_bytes);
  if (!from.passthrough())
    for (int64_t row = first; row < first + count; ++row)
      std::memcpy(to.gains_at(block, head, row), from.gains_at(block, head, row), gain_bytes);
  if (whole) return;

  with_bits(from.format->bits, [&](auto bits) {
    CodeWriter writer(to);
    HWY_ALIGN uint8_t codes[kQuadTokens * kCodeStride];
    for (int64_t row = first; row < first + count; ++row) {
      const uint8_t* found = codes;
      if (from.storage == KvStorage::lane_tiles) {
        if (row == first || row % kQuadTokens == 0)
          unpack_lane_quad<decltype(bits)::value>(from, from.tile(block, head, row), row % kTileTokens / kQuadTokens * kQuadTokens,
                                                  codes);
        found = codes + row % kQuadTokens * kCodeStride;
      } else {
        unpack_codes_row(from, from.codes_at(block, head, row), codes);
      }
      writer.put(block, head, row, found);
    }
    writer.finish();
  });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
