// kv_rotate, kv_encode, kv_decode and kv_repack on cuda: a warp per row, rows in shared memory.
#include <cfloat>

#include "cuda/kv_side.cuh"
#include "cuda/kv_table.h"
#include "cuda/launch.cuh"

namespace weft::cuda {
namespace {

constexpr int kWarps = 4;

// Shared memory of one warp: a row, and room for its rotation. Rows begin at multiples of 16 bytes.
__host__ __device__ constexpr int64_t row_floats(int64_t D) { return (D + 3) / 4 * 4; }

// --- kv_rotate ----------------------------------------------------------------------------------------------------------------

struct RotateParams {
  Tensor x, y;
  RotateView rotate;
  bool inverse;
};

__global__ void __launch_bounds__(32 * kWarps) rotate_kernel(const __grid_constant__ RotateParams p) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = p.rotate.D;
  const int64_t H = p.x.sizes[1], row = blockIdx.x * int64_t{kWarps} + warp;
  if (row >= p.x.sizes[0] * H) return;
  float *x = shared + warp * 2 * row_floats(D), *spare = x + row_floats(D);
  const int64_t from = row / H * p.x.strides[0] + row % H * p.x.strides[1],
                to = row / H * p.y.strides[0] + row % H * p.y.strides[1];
  for (int j = lane; j < D; j += 32) x[j] = load(p.x, from + j);
  __syncwarp();
  rotate_row(p.rotate, p.inverse, x, spare, lane);
  for (int j = lane; j < D; j += 32) store(p.y, to + j, x[j]);
}

void kv_rotate(const Stream& stream, const KvRotateArgs& args, Scratch) {
  const size_t shared = static_cast<size_t>(kWarps * 2 * row_floats(args.format.head_dim)) * sizeof(float);
  launch("kv_rotate", stream, ceil_div(args.x.size(0) * args.x.size(1), kWarps), 32 * kWarps, shared, rotate_kernel,
         RotateParams{args.x, args.y, rotate_view(args.format), args.inverse});
}

// --- kv_encode ----------------------------------------------------------------------------------------------------------------

constexpr int kMaxEncodeWarps = 16, kMaxEncodeTokens = 8;  // of a block

struct EncodeSide {
  Tensor x;
  SideView side;
  RotateView rotate;
  MeanView mean;
  GainRule rule = GainRule::unbiased;
  float tiny = 0, unit = 1, most = FLT_MAX;  // unit: of the stored gain
  bool in_registers = false;                 // encode_in_registers() may be tried
};

struct EncodeParams {
  EncodeSide k, v;
  Tensor positions;
  Sequences sequences;
  KvIndex index;
  int64_t T = 0, longest = 0, blocks = 0;  // blocks: of a sequence
  int each = 1;                            // tokens of a block
};

// Which of the block's tokens [t, t + count) lose their row to a later one of the sequence? Asked by the whole block.
__device__ uint32_t overwritten(const EncodeParams& p, int64_t t, int count, int64_t end) {
  const bool ring = p.index.kind == CacheKind::ring;
  const auto row_of = [&](int64_t token) {
    const int64_t position = index_at(p.positions, token);
    return position >= 0 && ring ? ring_row(position, p.index.rows, p.index.pinned) : position;
  };
  int64_t row[kMaxEncodeTokens];
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kMaxEncodeTokens; ++i) row[i] = i < count ? row_of(t + i) : -1;
  for (int64_t later = t + 1 + threadIdx.x; later < end; later += blockDim.x) {
    const int64_t other = row_of(later);
#pragma unroll
    for (int i = 0; i < kMaxEncodeTokens; ++i) found |= other >= 0 && other == row[i] && later > t + i ? 1u << i : 0u;
  }
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kMaxEncodeTokens; ++i)
    if (i < count) any |= __syncthreads_or(found >> i & 1) ? 1u << i : 0u;
  return any;
}

// Gain of a group from its sums, in N(0,1) units; `tiny`: too small to normalise.
__device__ float gain_of(GainRule rule, float yy, float cc, float yc, int g, bool tiny) {
  const float rms = sqrtf(yy / static_cast<float>(g));
  switch (rule) {
    case GainRule::rms: return rms;
    case GainRule::matched: return cc > 0 ? sqrtf(yy / cc) : rms;
    case GainRule::least_squares: return !tiny && cc > 0 ? yc / cc : 0.0f;
    default: return !tiny && yc > 0 ? yy / yc : 0.0f;
  }
}

// Encodes one row; the tables are in shared memory.
__device__ void encode_row(const EncodeSide& p, int64_t t, int64_t head, const KvLocation& to, const float* bounds,
                           const float* levels, float* x, float* spare, uint8_t* codes, int lane) {
  const SideView& side = p.side;
  const int D = side.D;
  const RowAt at = row_at(side, to.block, head, to.row);
  const int64_t from = t * p.x.strides[0] + head * p.x.strides[1];
  if (side.passthrough) {
    for (int j = lane; j < D; j += 32) store(at.codes, side.value, j, load(p.x, from + j));
    return;
  }
  const float* mean = p.mean.data ? p.mean.data + head * p.mean.head : nullptr;
  for (int j = lane; j < D; j += 32) x[j] = load(p.x, from + j) - (mean ? mean[j] : 0.0f);
  __syncwarp();
  rotate_row(p.rotate, false, x, spare, lane);
  const int g = side.gain_group;
  for (int base = 0; base < D; base += g) {
    float top = 0, yy = 0;
    for (int j = lane; j < g; j += 32) top = fmaxf(top, fabsf(x[base + j]));
    top = max_warp(top);
    // Squares of very large and very small rows are taken in other units.
    const float unit = top > 0x1p40f ? 0x1p-80f : top < 0x1p-40f ? 0x1p80f : 1.0f;
    for (int j = lane; j < g; j += 32) {
      const float y = x[base + j] * unit;
      yy = fmaf(y, y, yy);
    }
    yy = sum_warp(yy);
    const float norm = sqrtf(yy), root = sqrtf(static_cast<float>(g));
    const bool tiny = norm / unit <= p.tiny;
    const float factor = tiny ? 0.0f : root / norm * unit;
    float cc = 0, yc = 0;
    for (int j = lane; j < g; j += 32) {
      const float y = x[base + j], z = tiny ? 0.0f : y * factor;
      int code = 0;
      for (int step = 1 << (side.bits - 1); step > 0; step /= 2)
        if (z > bounds[code + step]) code += step;
      const float level = levels[code];
      codes[base + j] = static_cast<uint8_t>(code);
      cc = fmaf(level, level, cc);
      yc = fmaf(y * unit, level, yc);
    }
    cc = sum_warp(cc);
    yc = sum_warp(yc);
    if (lane == 0) {
      float gain = gain_of(p.rule, yy, cc, yc, g, tiny) / unit * p.unit;
      gain = gain > p.most ? p.most : gain < -p.most ? -p.most : gain;
      store(at.gains, side.gain, base / g, isfinite(yy) ? gain : NAN);
    }
  }
  __syncwarp();
  write_codes(side, at, codes, lane);
  __syncwarp();
}

// Encodes one row of 32 E coordinates, one gain for all, in registers; false, and nothing written, where its squares would need other
// units. Lanes hold E neighbours.
template <int E>
__device__ bool encode_in_registers(const EncodeSide& p, int64_t t, int64_t head, const KvLocation& to, const float* bounds,
                                    const float* levels, uint8_t* codes, int lane) {
  const SideView& side = p.side;
  const int first = lane * E, bits = side.bits;
  float x[E];
  const int64_t from = t * p.x.strides[0] + head * p.x.strides[1] + first;
  constexpr int kPack = E < 4 ? E : 4;
#pragma unroll
  for (int e = 0; e < E; e += kPack) {
    float four[kPack];
    if (p.x.dtype == DType::f32)
      load_pack<float, kPack>(static_cast<const float*>(p.x.data) + from + e, four);
    else if (p.x.dtype == DType::bf16)
      load_pack<__nv_bfloat16, kPack>(static_cast<const __nv_bfloat16*>(p.x.data) + from + e, four);
    else
      load_pack<__half, kPack>(static_cast<const __half*>(p.x.data) + from + e, four);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[e + i] = four[i];
  }
  if (p.mean.data) {
    const float* mean = p.mean.data + head * p.mean.head + first;
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] -= mean[e];
  }
  const uint32_t signs = p.rotate.signs[first / 32] >> first % 32;
#pragma unroll
  for (int e = 0; e < E; ++e) x[e] *= signs >> e & 1 ? -p.rotate.scale : p.rotate.scale;
  butterflies<E>(x, p.rotate.run, lane);
  float yy = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) yy = fmaf(x[e], x[e], yy);
  yy = sum_warp(yy);
  if (!(yy > 0x1p-60f && yy < 0x1p100f)) return false;
  const float norm = sqrtf(yy);
  const bool tiny = norm <= p.tiny;
  const float factor = tiny ? 0.0f : sqrtf(static_cast<float>(32 * E)) / norm;
  int code[E];
#pragma unroll
  for (int e = 0; e < E; ++e) code[e] = 0;
  for (int step = 1 << (bits - 1); step > 0; step /= 2)
#pragma unroll
    for (int e = 0; e < E; ++e) code[e] += x[e] * factor > bounds[code[e] + step] ? step : 0;
  float cc = 0, yc = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const float level = levels[code[e]];
    cc = fmaf(level, level, cc);
    yc = fmaf(x[e], level, yc);
  }
  yc = sum_warp(yc);
  if (p.rule == GainRule::matched || p.rule == GainRule::least_squares) cc = sum_warp(cc);
  const RowAt at = row_at(side, to.block, head, to.row);
  if (lane == 0) {
    const float gain = gain_of(p.rule, yy, cc, yc, 32 * E, tiny) * p.unit;
    store(at.gains, side.gain, 0, gain > p.most ? p.most : gain < -p.most ? -p.most : gain);
  }
  // A lane's codes as bytes of their own, where they are whole ones; else by way of shared memory.
  const int bytes = E * bits / 8;
  if (!side.lanes && !side.bytes_each && side.words && E * bits % 8 == 0 && (bytes & (bytes - 1)) == 0) {
    uint64_t packed = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) packed |= static_cast<uint64_t>(code[e]) << e * bits;
    uint8_t* mine = at.codes + lane * bytes;
    if (bytes == 1) *mine = static_cast<uint8_t>(packed);
    if (bytes == 2) *reinterpret_cast<uint16_t*>(mine) = static_cast<uint16_t>(packed);
    if (bytes >= 4) reinterpret_cast<uint32_t*>(mine)[0] = static_cast<uint32_t>(packed);
    if (bytes == 8) reinterpret_cast<uint32_t*>(mine)[1] = static_cast<uint32_t>(packed >> 32);
    return true;
  }
#pragma unroll
  for (int e = 0; e < E; ++e) codes[first + e] = static_cast<uint8_t>(code[e]);
  __syncwarp();
  write_codes(side, at, codes, lane);
  __syncwarp();
  return true;
}

// A block takes a few tokens, its warps take their heads and sides.
__global__ void __launch_bounds__(32 * kMaxEncodeWarps) encode_kernel(const __grid_constant__ EncodeParams p) {
  extern __shared__ float shared[];
  const int64_t n = blockIdx.x / p.blocks, first = blockIdx.x % p.blocks * p.each;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  if (first >= range.length()) return;
  const int count = static_cast<int>(range.length() - first < p.each ? range.length() - first : p.each);
  const uint32_t lost = overwritten(p, range.begin + first, count, range.end);

  // bounds[c] is the boundary below level c.
  float *bounds = shared, *levels = shared + 512;
  for (int e = threadIdx.x; e < 512; e += blockDim.x) {
    const SideView& side = e < 256 ? p.k.side : p.v.side;
    const int c = e % 256;
    if (c >= 1 << side.bits) continue;
    levels[e] = side.codebook[c];
    if (c > 0) bounds[e] = 0.5f * (side.codebook[c - 1] + side.codebook[c]);
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int D = max(p.k.side.D, p.v.side.D);
  float* x = shared + 1024 + warp * (2 * row_floats(D) + row_floats(D) / 4);
  const int64_t heads_k = p.k.x.present() ? p.k.x.sizes[1] : 0, heads_v = p.v.x.present() ? p.v.x.sizes[1] : 0;
  for (int i = 0; i < count; ++i) {
    const int64_t t = range.begin + first + i;
    const KvLocation to = locate(p.index, n, index_at(p.positions, t));
    if (!to.exists() || lost >> i & 1) continue;
    for (int64_t item = warp; item < heads_k + heads_v; item += warps) {
      const bool k = item < heads_k;
      const EncodeSide& side = k ? p.k : p.v;
      const int64_t head = k ? item : item - heads_k;
      const float *own_bounds = bounds + (k ? 0 : 256), *own_levels = levels + (k ? 0 : 256);
      auto* codes = reinterpret_cast<uint8_t*>(x + 2 * row_floats(D));
      bool done = false;
      if (side.in_registers) {
        if (side.side.D == 64) done = encode_in_registers<2>(side, t, head, to, own_bounds, own_levels, codes, lane);
        if (side.side.D == 128) done = encode_in_registers<4>(side, t, head, to, own_bounds, own_levels, codes, lane);
        if (side.side.D == 256) done = encode_in_registers<8>(side, t, head, to, own_bounds, own_levels, codes, lane);
      }
      if (!done) encode_row(side, t, head, to, own_bounds, own_levels, x, x + row_floats(D), codes, lane);
    }
  }
}

EncodeSide encode_side(const KvCache& cache, KvRole role, const Tensor& x) {
  EncodeSide side;
  const KvFormat& format = role == KvRole::k ? cache.k.format : cache.v.format;
  side.x = x;
  side.side = side_view(cache, role);
  side.rotate = rotate_view(format);
  side.mean = mean_view(format);
  side.rule = format.gain_rule;
  side.tiny = format.tiny_norm;
  if (format.gain_units == GainUnits::unit_vector) side.unit = std::sqrt(static_cast<float>(format.gain_group));
  const int64_t D = format.head_dim;
  side.in_registers = !format.passthrough && format.rotation == Rotation::srht && side.rotate.base == 1 && format.gain_group == D &&
                      (D == 64 || D == 128 || D == 256) && packs_of(x, D == 64 ? 2 : 4);
  side.most = format.gain_dtype == DType::f16 ? 65504.0f : format.gain_dtype == DType::bf16 ? 0x1.FEp127f : FLT_MAX;
  return side;
}

void kv_encode(const Stream& stream, const KvEncodeArgs& args, Scratch) {
  EncodeParams p;
  p.k = encode_side(args.cache, KvRole::k, args.k);
  p.v = encode_side(args.cache, KvRole::v, args.v);
  p.positions = args.positions;
  p.sequences = args.sequences;
  p.index = index_of(args.cache);
  p.T = args.positions.size(0);
  p.longest = max_tokens(args.sequences, p.T);
  const int64_t heads = args.cache.heads(), items = heads * (args.k.present() + args.v.present());
  const int warps = static_cast<int>(std::clamp<int64_t>(items, 1, kMaxEncodeWarps));
  const int64_t row = row_floats(std::max(args.cache.k.format.head_dim, args.cache.v.format.head_dim));
  const size_t shared = static_cast<size_t>(1024 + warps * (2 * row + row / 4)) * sizeof(float);
  constexpr int64_t kBlocksEach = 4;  // of a multiprocessor, before blocks take several tokens
  const int64_t blocks = kBlocksEach * facts_of(stream).multiprocessors;
  p.each = static_cast<int>(std::clamp<int64_t>(args.sequences.count * p.longest / blocks, 1, kMaxEncodeTokens));
  p.blocks = ceil_div(p.longest, p.each);
  launch("kv_encode", stream, args.sequences.count * p.blocks, 32 * warps, shared, encode_kernel, p);
}

// --- kv_decode ----------------------------------------------------------------------------------------------------------------

struct DecodeSide {
  Tensor x;
  SideView side;
  RotateView rotate;
  MeanView mean;
};

struct DecodeParams {
  DecodeSide k, v;
  Tensor positions;
  Sequences sequences;
  KvIndex index;
  int64_t T = 0, longest = 0, heads = 0;
  bool rotated = false;
};

__global__ void __launch_bounds__(32 * kWarps) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ float shared[];
  float* levels = shared;
  for (int e = threadIdx.x; e < 512; e += blockDim.x) {
    const SideView& side = e < 256 ? p.k.side : p.v.side;
    if (e % 256 < 1 << side.bits) levels[e] = side.codebook[e % 256];
  }
  __syncthreads();
  const int64_t n = blockIdx.x / p.longest, i = blockIdx.x % p.longest;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int64_t t = range.begin + i;
  if (t >= range.end) return;
  const KvLocation from = locate(p.index, n, index_at(p.positions, t));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t floats = row_floats(max(p.k.side.D, p.v.side.D));
  float *x = shared + 512 + warp * 2 * floats, *spare = x + floats;
  for (int64_t item = warp; item < 2 * p.heads; item += kWarps) {
    const bool k = item < p.heads;
    const DecodeSide& d = k ? p.k : p.v;
    if (!d.x.present()) continue;
    const int64_t head = k ? item : item - p.heads, to = t * d.x.strides[0] + head * d.x.strides[1];
    const int D = d.side.D;
    if (!from.exists()) {
      for (int j = lane; j < D; j += 32) store(d.x, to + j, 0.0f);
      continue;
    }
    const RowAt at = row_at(d.side, from.block, head, from.row);
    for (int j = lane; j < D; j += 32) x[j] = value_at(d.side, at, levels + (k ? 0 : 256), j);
    __syncwarp();
    const float* mean = nullptr;
    if (!p.rotated) {
      rotate_row(d.rotate, true, x, spare, lane);
      if (d.mean.data) mean = d.mean.data + head * d.mean.head;
    }
    for (int j = lane; j < D; j += 32) store(d.x, to + j, x[j] + (mean ? mean[j] : 0.0f));
    __syncwarp();
  }
}

DecodeSide decode_side(const KvCache& cache, KvRole role, const Tensor& x) {
  const KvFormat& format = role == KvRole::k ? cache.k.format : cache.v.format;
  return {x, side_view(cache, role), rotate_view(format), mean_view(format)};
}

void kv_decode(const Stream& stream, const KvDecodeArgs& args, Scratch) {
  DecodeParams p;
  p.k = decode_side(args.cache, KvRole::k, args.k);
  p.v = decode_side(args.cache, KvRole::v, args.v);
  p.positions = args.positions;
  p.sequences = args.sequences;
  p.index = index_of(args.cache);
  p.T = args.positions.size(0);
  p.longest = max_tokens(args.sequences, p.T);
  p.heads = args.cache.heads();
  p.rotated = args.domain == KvDomain::rotated;
  const int64_t row = row_floats(std::max(args.cache.k.format.head_dim, args.cache.v.format.head_dim));
  launch("kv_decode", stream, args.sequences.count * p.longest, 32 * kWarps,
         static_cast<size_t>(512 + kWarps * 2 * row) * sizeof(float), decode_kernel, p);
}

// --- kv_repack ----------------------------------------------------------------------------------------------------------------

struct RepackParams {
  SideView from, to;
  int64_t heads = 0, capacity = 0, rows = 0;
};

__global__ void __launch_bounds__(32 * kWarps) repack_kernel(const __grid_constant__ RepackParams p) {
  __shared__ uint8_t shared[kWarps][kMaxHeadDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t item = blockIdx.x * int64_t{kWarps} + warp;
  if (item >= p.rows) return;
  const int64_t row = item % p.capacity, head = item / p.capacity % p.heads, block = item / p.capacity / p.heads;
  const RowAt from = row_at(p.from, block, head, row), to = row_at(p.to, block, head, row);
  if (p.from.passthrough) {
    for (int64_t i = lane; i < p.from.code_bytes; i += 32) to.codes[i] = from.codes[i];
    return;
  }
  for (int j = lane; j < p.from.D; j += 32) shared[warp][j] = static_cast<uint8_t>(code_at(p.from, from, j));
  for (int64_t i = lane; i < p.from.gain_bytes; i += 32) to.gains[i] = from.gains[i];
  __syncwarp();
  write_codes(p.to, to, shared[warp], lane);
}

void kv_repack(const Stream& stream, const KvRepackArgs& args, Scratch) {
  for (KvRole role : {KvRole::k, KvRole::v}) {
    RepackParams p{side_view(args.from, role), side_view(args.to, role), args.from.heads(), args.from.capacity(), 0};
    p.rows = args.from.k.codes.size(0) * p.heads * p.capacity;
    launch("kv_repack", stream, ceil_div(p.rows, kWarps), 32 * kWarps, 0, repack_kernel, p);
  }
}

}  // namespace

OpRow<KvRotateArgs> kv_rotate_row() { return {kv_rotate, kAllFloats}; }
OpRow<KvEncodeArgs> kv_encode_row() { return {kv_encode, kAllFloats}; }
OpRow<KvDecodeArgs> kv_decode_row() { return {kv_decode, kAllFloats}; }
OpRow<KvRepackArgs> kv_repack_row() { return {kv_repack, kAllFloats}; }

}  // namespace weft::cuda
