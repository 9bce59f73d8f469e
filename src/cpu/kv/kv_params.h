// SideView: one side (K or V) of a KV cache as the cpu kernels read it, lowered from KvCache.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/lanes_tile.h"
#include "weft/kv_codec.h"

namespace weft::cpu {

// rows: KvLayout::rows. token_major_tiles: tiles of whole rows, coded or uncompressed. lane_tiles: coded tiles in lanes order, in
// which tokens or coordinates share bytes (common/lanes_tile.h).
enum class KvStorage { rows, token_major_tiles, lane_tiles };

// All strides are in bytes. A view points into the KvSide it was made from, which must outlive it.
struct SideView {
  const KvFormat* format = nullptr;
  KvRole role = KvRole::k;
  KvStorage storage = KvStorage::rows;
  int64_t D = 0;

  uint8_t* codes = nullptr;
  int64_t code_block = 0, code_head = 0, code_row = 0;  // strides; code_row is the stride of tiles where storage is tiles
  uint8_t* gains = nullptr;                             // KvStorage::rows only: tiles hold their gains
  int64_t gain_block = 0, gain_head = 0, gain_row = 0;

  int64_t row_code_bytes = 0, row_gain_bytes = 0;
  int64_t groups = 0;     // gains per cache row
  float gain_factor = 1;  // y^ = gain * gain_factor * level
  LanePlanes planes;      // lane_tiles
  // affine: levels[i] == (i + affine_first) * affine_step bit for bit in f32, so that a level needs no table.
  bool affine = false;
  float affine_first = 0, affine_step = 0;

  bool passthrough() const { return format->passthrough.has_value(); }
  const float* levels() const { return format->codebook.data(); }
  uint8_t* tile(int64_t block, int64_t head, int64_t row) const {
    return codes + block * code_block + head * code_head + row / kTileTokens * code_row;
  }
  // Address of a cache row's codes. Not for lane_tiles, whose tokens share bytes.
  uint8_t* codes_at(int64_t block, int64_t head, int64_t row) const {
    if (storage == KvStorage::rows) return codes + block * code_block + head * code_head + row * code_row;
    return tile(block, head, row) + row % kTileTokens * row_code_bytes;
  }
  uint8_t* gains_at(int64_t block, int64_t head, int64_t row) const {
    if (storage == KvStorage::rows) return gains + block * gain_block + head * gain_head + row * gain_row;
    return tile(block, head, row) + kTileTokens * row_code_bytes + row % kTileTokens * row_gain_bytes;
  }
};

inline KvStorage kv_storage(const KvCache& cache, const KvFormat& format) {
  if (cache.layout == KvLayout::rows) return KvStorage::rows;
  return !format.passthrough && cache.tile_order == TileOrder::lanes ? KvStorage::lane_tiles : KvStorage::token_major_tiles;
}

inline int64_t gains_per_row(const KvFormat& format) { return format.passthrough ? 0 : format.head_dim / format.gain_group; }

inline SideView side_view(const KvCache& cache, KvRole role) {
  const KvSide& side = role == KvRole::k ? cache.k : cache.v;
  const KvFormat& format = side.format;
  SideView view;
  view.format = &format;
  view.role = role;
  view.D = format.head_dim;
  view.storage = kv_storage(cache, format);
  const int64_t code = dtype_bytes(side.codes.dtype);
  view.codes = static_cast<uint8_t*>(side.codes.data);
  view.code_block = side.codes.stride(0) * code;
  view.code_head = side.codes.stride(1) * code;
  view.code_row = side.codes.stride(2) * code;
  view.row_code_bytes = code_bytes(format);
  view.row_gain_bytes = gain_bytes(format);
  if (format.passthrough) return view;
  if (side.gains.present()) {
    const int64_t gain = dtype_bytes(side.gains.dtype);
    view.gains = static_cast<uint8_t*>(side.gains.data);
    view.gain_block = side.gains.stride(0) * gain;
    view.gain_head = side.gains.stride(1) * gain;
    view.gain_row = side.gains.stride(2) * gain;
  }
  view.groups = gains_per_row(format);
  if (format.gain_units == GainUnits::unit_vector) view.gain_factor = 1 / std::sqrt(static_cast<float>(format.gain_group));
  view.planes = lane_planes(format.bits, format.head_dim);
  if (format.grid_step) {
    const float step = *format.grid_step, first = std::floor(format.codebook[0] / step) + 0.5f;
    view.affine = true;
    for (int i = 0; i < 1 << format.bits; ++i)
      view.affine &= format.codebook[static_cast<size_t>(i)] == (static_cast<float>(i) + first) * step;
    view.affine_first = first;
    view.affine_step = step;
  }
  return view;
}

}  // namespace weft::cpu
