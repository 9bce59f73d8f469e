// TileOrder::lanes: where the code of a token and coordinate lies inside a tile of 64 tokens.
//
// A code of b bits is cut into planes of 8, 4, 2 and 1 bits (b = 8: one plane of 8; else those of 4, 2, 1 that are in b, low bits in the
// widest plane), stored one after another. A plane of w bits is made of vectors of 64 bytes, 16 lanes of 4 bytes; a byte holds 8 / w
// fields of w bits, field s at bit w s.
//   K: lane = token, byte = coordinate. Vector (group, quarter): lane l is token 16 quarter + l, byte i and field s are coordinate
//      (32 / w) group + 4 s + i. Byte dot products then sum over coordinates with 16 tokens side by side.
//   V: lane = coordinate, byte = token. Vector (group, block): lane l is coordinate 16 block + l, byte i and field s are token
//      (32 / w) group + 4 s + i. Byte dot products then sum over tokens with 16 coordinates side by side.
// Vectors are ordered by group first. After the planes come the gains, 64 tokens by D / gain_group, as in TileOrder::token_major. A plane
// takes exactly 64 D w / 8 bytes, so a tile is as long as a token_major tile of dense codes. D must be a multiple of 32. A passthrough
// side has no codes: its tiles are token_major in either order.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "weft/kv_codec.h"

namespace weft {

enum class KvRole { k, v };

inline constexpr int64_t kLaneVectorBytes = 64;
inline constexpr int64_t kLaneTokens = 16;

// Can rows of the format lie in lanes order?
inline bool lanes_fit(const KvFormat& format) {
  return format.passthrough || (format.head_dim % 32 == 0 && (format.packing == Packing::dense || format.bits == 8));
}

// The planes of a code, widest first.
struct LanePlane {
  int width = 0;       // w
  int shift = 0;       // lowest bit of the code that the plane holds
  int64_t offset = 0;  // bytes from the tile's start
};

struct LanePlanes {
  LanePlane plane[3];
  int count = 0;
  int64_t bytes = 0;  // of all planes: where the gains begin
};

WEFT_HOST_DEVICE inline LanePlanes lane_planes(int bits, int64_t head_dim) {
  LanePlanes planes;
  int shift = 0;
  for (int width : {8, 4, 2, 1}) {
    if (!(bits & width)) continue;
    planes.plane[planes.count++] = {width, shift, planes.bytes};
    shift += width;
    planes.bytes += kTileTokens * head_dim * width / 8;
  }
  return planes;
}

// Where a field lies: its byte, from the start of the plane, and its lowest bit.
struct LaneField {
  int64_t byte = 0;
  int bit = 0;
};

WEFT_HOST_DEVICE inline LaneField lane_field(KvRole role, int width, int64_t head_dim, int64_t token, int64_t coordinate) {
  const int64_t per_vector = 32 / width;
  const int64_t packed = role == KvRole::k ? coordinate : token;  // the index that shares lanes
  const int64_t spread = role == KvRole::k ? token : coordinate;  // the index that lanes tell apart
  const int64_t vectors = (role == KvRole::k ? kTileTokens : head_dim) / kLaneTokens;
  const int64_t group = packed / per_vector, inside = packed % per_vector;
  const int64_t vector = group * vectors + spread / kLaneTokens;
  return {vector * kLaneVectorBytes + spread % kLaneTokens * 4 + inside % 4, static_cast<int>(inside / 4) * width};
}

}  // namespace weft
