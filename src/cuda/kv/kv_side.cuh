// One side of a KV cache lowered for kernels, and the code that rotates, reads and writes a row by one warp.
#pragma once

#include <cmath>

#include "common/bit_pack.h"
#include "common/hadamard_bits.h"
#include "common/kv_index.h"
#include "common/lanes_tile.h"
#include "cuda/common/views.cuh"

namespace weft::cuda {

// --- lowered formats ----------------------------------------------------------------------------------------------------------

struct SideView {
  uint8_t* codes = nullptr;
  uint8_t* gains = nullptr;                                // rows layout only: a tile holds its gains
  int64_t codes_block = 0, codes_head = 0, codes_row = 0;  // strides in bytes; codes_row is that of tiles in the tiles layout
  int64_t gains_block = 0, gains_head = 0, gains_row = 0;
  int64_t code_bytes = 0, gain_bytes = 0;  // of a row
  KvRole role = KvRole::k;
  bool tiles = false, lanes = false, passthrough = false, bytes_each = false, words = false;  // words: codes are 4-byte aligned
  int D = 0, bits = 0, gain_group = 1;
  DType value = DType::f16, gain = DType::f16;
  float gain_factor = 1;  // y^ = gain * gain_factor * level
  LanePlanes planes;
  float codebook[256];
};

inline SideView side_view(const KvCache& cache, KvRole role) {
  const KvSide& side = role == KvRole::k ? cache.k : cache.v;
  const KvFormat& format = side.format;
  SideView view;
  view.role = role;
  view.D = static_cast<int>(format.head_dim);
  view.passthrough = format.passthrough.has_value();
  view.tiles = cache.layout == KvLayout::tiles;
  view.lanes = view.tiles && cache.tile_order == TileOrder::lanes && !view.passthrough;
  view.code_bytes = code_bytes(format);
  view.codes = static_cast<uint8_t*>(side.codes.data);
  const int64_t element = dtype_bytes(side.codes.dtype);
  view.codes_block = side.codes.stride(0) * element;
  view.codes_head = side.codes.stride(1) * element;
  view.codes_row = side.codes.stride(2) * element;
  view.words =
      (reinterpret_cast<uintptr_t>(view.codes) | static_cast<uintptr_t>(view.codes_block | view.codes_head | view.codes_row)) % 4 ==
      0;
  if (view.passthrough) {
    view.value = *format.passthrough;
    return view;
  }
  view.bits = format.bits;
  view.bytes_each = format.packing == Packing::byte;
  view.gain = format.gain_dtype;
  view.gain_group = static_cast<int>(format.gain_group);
  view.gain_bytes = gain_bytes(format);
  if (format.gain_units == GainUnits::unit_vector) view.gain_factor = 1 / std::sqrt(static_cast<float>(format.gain_group));
  if (side.gains.present()) {
    const int64_t bytes = dtype_bytes(side.gains.dtype);
    view.gains = static_cast<uint8_t*>(side.gains.data);
    view.gains_block = side.gains.stride(0) * bytes;
    view.gains_head = side.gains.stride(1) * bytes;
    view.gains_row = side.gains.stride(2) * bytes;
  }
  view.planes = lane_planes(format.bits, format.head_dim);
  for (size_t i = 0; i < size_t{1} << format.bits; ++i) view.codebook[i] = format.codebook[i];
  return view;
}

// The rotation R of a format.
struct RotateView {
  Rotation rotation = Rotation::none;
  int D = 0, base = 1, run = 1;  // srht: H_base (x) H_run on every group
  float scale = 1;
  uint32_t signs[kMaxHeadDim / 32];
  uint32_t rows[28];  // sign bits of H_base
  const float* dense = nullptr;
  int64_t dense_row = 0;
};

inline RotateView rotate_view(const KvFormat& format) {
  RotateView view;
  view.D = static_cast<int>(format.head_dim);
  if (format.passthrough) return view;
  view.rotation = format.rotation;
  if (format.rotation == Rotation::dense) {
    view.dense = static_cast<const float*>(format.dense_rotation.data);
    view.dense_row = format.dense_rotation.stride(0);
  } else if (format.rotation == Rotation::srht) {
    const HadamardOrder order = hadamard_order(format.rotation_group);
    view.base = static_cast<int>(order.base);
    view.run = static_cast<int>(order.sylvester);
    view.scale = 1 / std::sqrt(static_cast<float>(format.rotation_group));
    for (size_t i = 0; i < format.signs.size(); ++i) view.signs[i] = format.signs[i];
    for (int i = 0; view.base > 1 && i < view.base; ++i) view.rows[i] = order.rows[i];
  }
  return view;
}

// Means of the heads; data null: none.
struct MeanView {
  const float* data = nullptr;
  int64_t head = 0;
};
inline MeanView mean_view(const KvFormat& format) {
  if (format.passthrough || !format.mean.present()) return {};
  return {static_cast<const float*>(format.mean.data), format.mean.stride(0)};
}

// Floats of a row in shared memory, rounded up so that rows begin at multiples of 16 bytes. A warp needs two rows: one is for rotation.
__host__ __device__ constexpr int64_t row_floats(int64_t D) { return (D + 3) / 4 * 4; }

// --- a warp and a row ---------------------------------------------------------------------------------------------------------

__device__ inline float sum_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float max_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Applies H_run to every run of a row of 32 E coordinates; a lane holds E consecutive ones.
template <int E>
__device__ inline void butterflies(float (&x)[E], int run, int lane) {
#pragma unroll
  for (int half = 1; half < E; half *= 2)
    if (half < run) {
#pragma unroll
      for (int e = 0; e < E; ++e)
        if (!(e & half)) {
          const float low = x[e], high = x[e + half];
          x[e] = low + high;
          x[e + half] = low - high;
        }
    }
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2)
    if (apart * E < run) {
      const float sign = lane & apart ? -1.0f : 1.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) x[e] = fmaf(sign, x[e], __shfl_xor_sync(0xffffffffu, x[e], apart));
    }
}

template <int E>
__device__ inline void butterflies_in(float* row, int run, int lane) {
  float x[E];
#pragma unroll
  for (int e = 0; e < E; ++e) x[e] = row[lane * E + e];
  butterflies<E>(x, run, lane);
#pragma unroll
  for (int e = 0; e < E; ++e) row[lane * E + e] = x[e];
}

// x <- R x or R^T x for one row in shared memory; `spare` has D floats too. The warp must have synchronised before the call, and has
// synchronised on return.
__device__ inline void rotate_row(const RotateView& r, bool inverse, float* x, float* spare, int lane) {
  if (r.rotation == Rotation::none) return;
  const int D = r.D;
  if (r.rotation == Rotation::dense) {
    for (int i = lane; i < D; i += 32) {
      float sum = 0;
      for (int j = 0; j < D; ++j) sum = fmaf(inverse ? r.dense[j * r.dense_row + i] : r.dense[i * r.dense_row + j], x[j], sum);
      spare[i] = sum;
    }
    __syncwarp();
    for (int i = lane; i < D; i += 32) x[i] = spare[i];
    __syncwarp();
    return;
  }
  const auto sign = [&](int j) { return r.signs[j / 32] >> (j % 32) & 1 ? -r.scale : r.scale; };
  if (!inverse) {
    for (int j = lane; j < D; j += 32) x[j] *= sign(j);
    __syncwarp();
  }
  switch (D) {
    case 64: butterflies_in<2>(x, r.run, lane); break;
    case 128: butterflies_in<4>(x, r.run, lane); break;
    case 256: butterflies_in<8>(x, r.run, lane); break;
    case 512: butterflies_in<16>(x, r.run, lane); break;
    default:
      for (int half = 1; half < r.run; half *= 2) {
        for (int p = lane; p < D / 2; p += 32) {
          const int i = p / half * 2 * half + p % half;
          const float low = x[i], high = x[i + half];
          x[i] = low + high;
          x[i + half] = low - high;
        }
        __syncwarp();
      }
  }
  __syncwarp();
  if (r.base > 1) {
    const int group = r.base * r.run;
    for (int j = lane; j < D; j += 32) {
      const int inside = j % group, i = inside / r.run;
      const float* from = x + j - inside + inside % r.run;
      float sum = 0;
      for (int k = 0; k < r.base; ++k) {
        const uint32_t minus = (inverse ? r.rows[k] >> i : r.rows[i] >> k) & 1;
        sum += minus ? -from[k * r.run] : from[k * r.run];
      }
      spare[j] = sum;
    }
    __syncwarp();
    for (int j = lane; j < D; j += 32) x[j] = spare[j];
    __syncwarp();
  }
  if (inverse) {
    for (int j = lane; j < D; j += 32) x[j] *= sign(j);
    __syncwarp();
  }
}

// Where a row is stored. In lanes order `codes` is its tile.
struct RowAt {
  uint8_t* codes;
  uint8_t* gains;
  int token;  // index in its tile
};

__device__ inline RowAt row_at(const SideView& s, int64_t block, int64_t head, int64_t row) {
  uint8_t* codes = s.codes + block * s.codes_block + head * s.codes_head;
  if (!s.tiles) return {codes + row * s.codes_row, s.gains + block * s.gains_block + head * s.gains_head + row * s.gains_row, 0};
  uint8_t* tile = codes + row / kTileTokens * s.codes_row;
  const int token = static_cast<int>(row % kTileTokens);
  return {s.lanes ? tile : tile + token * s.code_bytes, tile + kTileTokens * s.code_bytes + token * s.gain_bytes, token};
}

__device__ inline uint32_t code_at(const SideView& s, const RowAt& at, int j) {
  if (s.lanes) {
    uint32_t code = 0;
    for (int p = 0; p < s.planes.count; ++p) {
      const LanePlane& plane = s.planes.plane[p];
      const LaneField field = lane_field(s.role, plane.width, s.D, at.token, j);
      code |= (at.codes[plane.offset + field.byte] >> field.bit & ((1u << plane.width) - 1)) << plane.shift;
    }
    return code;
  }
  if (s.bytes_each) return at.codes[j] & ((1u << s.bits) - 1);
  if (!s.words) return packed_code(at.codes, j, s.bits);
  const auto* words = reinterpret_cast<const uint32_t*>(at.codes);
  const int first = j * s.bits, shift = first % 32;
  uint32_t code = words[first / 32] >> shift;
  if (shift + s.bits > 32) code |= words[first / 32 + 1] << (32 - shift);
  return code & ((1u << s.bits) - 1);
}

// The factor of the levels of coordinate j's gain group.
__device__ inline float gain_at(const SideView& s, const RowAt& at, int j) {
  return load(at.gains, s.gain, j / s.gain_group) * s.gain_factor;
}

// Coordinate j of y^ (passthrough: of the row itself); `levels` is the codebook in shared memory.
__device__ inline float value_at(const SideView& s, const RowAt& at, const float* levels, int j) {
  if (s.passthrough) return load(at.codes, s.value, j);
  return gain_at(s, at, j) * levels[code_at(s, at, j)];
}

// Writes a row's codes, a byte each in shared memory, by one warp. Every byte of the row is written. In lanes order other tokens of V share
// its words: only the row's own bits change, by atomic operations.
__device__ inline void write_codes(const SideView& s, const RowAt& at, const uint8_t* codes, int lane) {
  if (s.lanes) {
    for (int p = 0; p < s.planes.count; ++p) {
      const LanePlane& plane = s.planes.plane[p];
      const int w = plane.width, mask = (1 << w) - 1;
      uint8_t* bytes = at.codes + plane.offset;
      if (s.role == KvRole::k) {  // a word belongs to one token
        for (int u = lane; u < s.D * w / 32; u += 32) {
          uint32_t word = 0;
          for (int f = 0; f < 32 / w; ++f)
            word |= static_cast<uint32_t>(codes[32 / w * u + f] >> plane.shift & mask) << (f % 4 * 8 + f / 4 * w);
          *reinterpret_cast<uint32_t*>(bytes + lane_field(s.role, w, s.D, at.token, 32 / w * u).byte) = word;
        }
      } else {
        for (int j = lane; j < s.D; j += 32) {
          const LaneField field = lane_field(s.role, w, s.D, at.token, j);
          auto* word = reinterpret_cast<unsigned*>(bytes + (field.byte & ~int64_t{3}));
          const int shift = static_cast<int>(field.byte & 3) * 8 + field.bit;
          const unsigned wanted = static_cast<unsigned>(codes[j] >> plane.shift & mask) << shift;
          const unsigned change = (__ldcg(word) ^ wanted) & (static_cast<unsigned>(mask) << shift);
          if (change) atomicXor(word, change);
        }
      }
    }
    return;
  }
  if (s.bytes_each) {
    for (int j = lane; j < s.D; j += 32) at.codes[j] = codes[j];
    return;
  }
  for (int w = lane; w < s.code_bytes / 4; w += 32) {
    uint32_t word = 0;
    for (int j = 32 * w / s.bits; j < s.D && j * s.bits < 32 * (w + 1); ++j) {
      const int shift = j * s.bits - 32 * w;
      word |= shift >= 0 ? static_cast<uint32_t>(codes[j]) << shift : static_cast<uint32_t>(codes[j]) >> -shift;
    }
    if (s.words)
      reinterpret_cast<uint32_t*>(at.codes)[w] = word;
    else
      for (int i = 0; i < 4; ++i) at.codes[4 * w + i] = static_cast<uint8_t>(word >> 8 * i);
  }
}

}  // namespace weft::cuda
