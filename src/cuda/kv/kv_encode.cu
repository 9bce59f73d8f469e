// kv_encode on cuda for any format, a warp per row. kv_encode_tiles.cu handles the common formats.
#include <cfloat>

#include "cuda/common/launch.cuh"
#include "cuda/kv/kv_encode.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kMaxEncodeWarps = 16, kMaxEncodeTokens = 8;  // per block

// Bits of the block's tokens [t, t + count) whose row a later token of the sequence overwrites. All threads of the block must call it.
__device__ uint32_t overwritten(const EncodeParams& p, int64_t t, int count, int64_t end) {
  const auto row_of = [&](int64_t token) { return row_key(p.index, index_at(p.positions, token)); };
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

// Encodes one row by one warp. `bounds` and `levels` are in shared memory.
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
    const float unit = unit_for(top);
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
    if (lane == 0) store(at.gains, side.gain, base / g, stored_gain(p, yy, cc, yc, g, tiny, unit));
  }
  __syncwarp();
  write_codes(side, at, codes, lane);
  __syncwarp();
}

// A block takes a few tokens; its warps share out their heads and sides.
__global__ void __launch_bounds__(32 * kMaxEncodeWarps) encode_kernel(const __grid_constant__ EncodeParams p) {
  extern __shared__ float shared[];
  const int64_t n = blockIdx.x / p.blocks, first = blockIdx.x % p.blocks * p.tokens_per_block;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  if (first >= range.length()) return;
  const int count = static_cast<int>(range.length() - first < p.tokens_per_block ? range.length() - first : p.tokens_per_block);
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
      encode_row(side, t, head, to, own_bounds, own_levels, x, x + row_floats(D), codes, lane);
    }
  }
}

EncodeSide encode_side(const KvCache& cache, KvRole role, const Tensor& x) {
  EncodeSide side;
  const KvFormat& format = role == KvRole::k ? cache.k.format : cache.v.format;
  side.x = view_of(x);
  side.side = side_view(cache, role);
  side.rotate = rotate_view(format);
  side.mean = mean_view(format);
  side.rule = format.gain_rule;
  side.tiny = format.tiny_norm;
  if (format.gain_units == GainUnits::unit_vector) side.unit = std::sqrt(static_cast<float>(format.gain_group));
  side.most = format.gain_dtype == DType::f16 ? 65504.0f : format.gain_dtype == DType::bf16 ? 0x1.FEp127f : FLT_MAX;
  return side;
}

void kv_encode(const Stream& stream, const KvEncodeArgs& args) {
  EncodeParams p{token_rows(args), encode_side(args.cache, KvRole::k, args.k), encode_side(args.cache, KvRole::v, args.v)};
  if (launch_encode_tiles(stream, p, args)) return;
  const int64_t heads = args.cache.heads(), items = heads * (args.k.present() + args.v.present());
  const int warps = static_cast<int>(std::clamp<int64_t>(items, 1, kMaxEncodeWarps));
  const int64_t row = row_floats(std::max(args.cache.k.format.head_dim, args.cache.v.format.head_dim));
  const size_t shared = static_cast<size_t>(1024 + warps * (2 * row + row / 4)) * sizeof(float);
  constexpr int64_t kBlocksPerSm = 4;  // beyond this many, blocks take several tokens
  const int64_t blocks = kBlocksPerSm * facts_of(stream).multiprocessors;
  p.tokens_per_block = static_cast<int>(std::clamp<int64_t>(args.sequences.count * p.longest / blocks, 1, kMaxEncodeTokens));
  p.blocks = ceil_div(p.longest, p.tokens_per_block);
  launch("kv_encode", stream, args.sequences.count * p.blocks, 32 * warps, shared, encode_kernel, p);
}

}  // namespace

OpEntry<KvEncodeArgs> kv_encode_entry() { return entry<kv_encode>(kAllFloats); }

}  // namespace weft::cuda
