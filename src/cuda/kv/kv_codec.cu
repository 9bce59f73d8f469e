// kv_rotate, kv_decode and kv_repack on cuda: a warp per row, with rows in shared memory.
#include "cuda/common/launch.cuh"
#include "cuda/kv/kv_rows.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kWarps = 4;

// --- kv_rotate ----------------------------------------------------------------------------------------------------------------

struct RotateParams {
  StridedView x, y;
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

void kv_rotate(const Stream& stream, const KvRotateArgs& args) {
  const size_t shared = static_cast<size_t>(kWarps * 2 * row_floats(args.format.head_dim)) * sizeof(float);
  launch("kv_rotate", stream, ceil_div(args.x.size(0) * args.x.size(1), kWarps), 32 * kWarps, shared, rotate_kernel,
         RotateParams{view_of(args.x), view_of(args.y), rotate_view(args.format), args.inverse});
}

// --- kv_decode ----------------------------------------------------------------------------------------------------------------

struct DecodeSide {
  StridedView x;
  SideView side;
  RotateView rotate;
  MeanView mean;
};

struct DecodeParams : TokenRows {
  DecodeSide k, v;
  int64_t heads = 0;
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
  return {view_of(x), side_view(cache, role), rotate_view(format), mean_view(format)};
}

void kv_decode(const Stream& stream, const KvDecodeArgs& args) {
  DecodeParams p{token_rows(args), decode_side(args.cache, KvRole::k, args.k), decode_side(args.cache, KvRole::v, args.v)};
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

void kv_repack(const Stream& stream, const KvRepackArgs& args) {
  for (KvRole role : {KvRole::k, KvRole::v}) {
    RepackParams p{side_view(args.from, role), side_view(args.to, role), args.from.heads(), args.from.capacity(), 0};
    p.rows = args.from.k.codes.size(0) * p.heads * p.capacity;
    launch("kv_repack", stream, ceil_div(p.rows, kWarps), 32 * kWarps, 0, repack_kernel, p);
  }
}

}  // namespace

OpEntry<KvRotateArgs> kv_rotate_entry() { return entry<kv_rotate>(kAllFloats); }
OpEntry<KvDecodeArgs> kv_decode_entry() { return entry<kv_decode>(kAllFloats); }
OpEntry<KvRepackArgs> kv_repack_entry() { return entry<kv_repack>(kAllFloats); }

}  // namespace weft::cuda
