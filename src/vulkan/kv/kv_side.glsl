// One side of a KV cache, and where its rows are, as shaders read them: the structs of kv_side.h.
#include "vulkan/common/views.glsl"
#include "vulkan/common/lanes.glsl"
#extension GL_EXT_shader_8bit_storage : require

struct Side {
  uint64_t codes, gains, mean, dense;
  int64_t codes_block, codes_head, codes_row;
  int64_t gains_block, gains_head, gains_row;
  int64_t mean_head, dense_row;
  int64_t plane_offset[3];
  uint plane_width[3], plane_shift[3], planes, role_v;
  uint D, bits, gain_group, code_bytes, gain_bytes, value, gain;
  uint tiles, lanes, passthrough, bytes_each, words;
  float gain_factor;
  float tiny, unit, most;
  uint rule, rotation, base, run;
  float rotate_scale;
  uint signs[16], rows[28];
  float levels[256];
};

struct CacheIndex {
  int64_t kind, blocks, rows, pinned;
  Indices slots, lengths;
  View page_table;
};

const uint kThreads = 128, kRowFloats = 2048;
const uint kTileTokens = 64;

layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Words { uint value; };
layout(buffer_reference, scalar, buffer_reference_align = 1) buffer Bytes { uint8_t value; };

uint word_at(uint64_t data, uint i) { return Words(data + uint64_t(i) * 4).value; }
uint byte_at(uint64_t data, uint i) { return uint(Bytes(data + uint64_t(i)).value); }
float float_at(uint64_t data, int64_t i) { return Float32(address(data, i, 4)).value; }

// A row of the cache. block < 0: there is no such row, the token is inert.
struct Location {
  int64_t block;
  uint row;
};
