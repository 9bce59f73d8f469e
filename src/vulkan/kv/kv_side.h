// One side of a KV cache, and where its rows are, lowered for shaders: the structs of kv_side.glsl, member by member.
#pragma once

#include <vector>

#include "common/kv_index.h"
#include "common/lanes_tile.h"
#include "core/backend.h"
#include "vulkan/common/views.h"

namespace weft::vulkan {

struct SideView {
  uint64_t codes = 0, gains = 0;                           // gains: in rows layout only; a tile holds its own gains
  uint64_t mean = 0, dense = 0;                            // 0: none
  int64_t codes_block = 0, codes_head = 0, codes_row = 0;  // strides in bytes; in tiles layout, codes_row is the stride of tiles
  int64_t gains_block = 0, gains_head = 0, gains_row = 0;
  int64_t mean_head = 0, dense_row = 0;  // in elements
  int64_t plane_offset[3] = {};
  uint32_t plane_width[3] = {}, plane_shift[3] = {}, planes = 0, role_v = 0;
  uint32_t D = 0, bits = 0, gain_group = 1, code_bytes = 0, gain_bytes = 0, value = 0, gain = 0;
  uint32_t tiles = 0, lanes = 0, passthrough = 0, bytes_each = 0, words = 0;  // words: codes are aligned to 4 bytes
  float gain_factor = 1;                                                      // y^ = gain * gain_factor * level
  float tiny = 0, unit = 1, most = 0;                                         // unit and largest value of a stored gain
  uint32_t rule = 0, rotation = 0, base = 1, run = 1;                         // srht: H_base (x) H_run on every group
  float rotate_scale = 1;
  uint32_t signs[kMaxHeadDim / 32] = {}, rows[28] = {};  // rows: sign bits of H_base
  float levels[256] = {};
};
// A format, for rotating; and a side of a cache, which adds the addresses and strides of its memory.
SideView side_view(const KvFormat& format);
SideView side_view(const KvCache& cache, KvRole role);

// Where the rows of a cache are.
struct CacheIndex {
  int64_t kind = 0, blocks = 0, rows = 0, pinned = 0;  // rows: rows of one block
  Indices slots, lengths;
  View page_table;
};
CacheIndex cache_index(const KvCache& cache);

// A workgroup of kThreads threads keeps rows of kRowFloats floats in all in shared memory: see rotate.glsl.
inline constexpr int64_t kThreads = 128, kRowFloats = 2048;
inline int64_t rows_per_group(int64_t D) { return std::min<int64_t>(16, kRowFloats / D); }

// The specialization constants about the rotations of both sides: the kinds for ROTATIONS of rotate.glsl, and whether K has a mean.
std::vector<uint32_t> rotation_constants(const SideView (&sides)[2]);

// Shaders that read codes access bytes. Refuses devices that cannot.
Status needs_bytes(const Stream& stream, const char* op);

}  // namespace weft::vulkan
