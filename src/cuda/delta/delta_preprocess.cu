// delta_gates, l2_norm and gated_rms_norm on cuda: memory-bound, so that data is read and written once, in vector accesses.
#include "cuda/common/elements.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128;
// Rows per thread of the vectorised kernel, and its blocks per multiprocessor with one row per thread.
constexpr int kMostRows = 3, kOneRowBlocks = 16;

// --- delta_gates --------------------------------------------------------------------------------------------------------------

// Tokens [first, first + total / (Hv K)). Offsets within them fit in 32 bits, whose divisions are cheap.
__global__ void __launch_bounds__(kThreads)
    delta_gates_kernel(const __grid_constant__ DeltaGatesArgs args, int64_t first, uint32_t total) {
  prefetch_arguments(args);
  pdl_wait();
  pdl_launch_dependents();
  const auto Hv = static_cast<uint32_t>(args.a.size(1)), K = args.a.rank == 3 ? static_cast<uint32_t>(args.a.size(2)) : 1u;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= total) return;
  const uint32_t c = i % K, h = i / K % Hv;
  const int64_t t = first + i / K / Hv;
  const float a_log = load(args.a_log, h * args.a_log.strides[0]), bias = load(args.dt_bias, h * args.dt_bias.strides[0] + c);
  store(args.g, t * args.g.strides[0] + h * args.g.strides[1] + c,
        log_decay(load(args.a, t * args.a.strides[0] + h * args.a.strides[1] + c), a_log, bias));
  if (c == 0 && args.b.present())
    store(args.beta, t * args.beta.strides[0] + h * args.beta.strides[1],
          (args.double_beta ? 2.0f : 1.0f) * sigmoid(load(args.b, t * args.b.strides[0] + h * args.b.strides[1])));
}

void delta_gates(const Stream& stream, const DeltaGatesArgs& args, Scratch) {
  if (args.a.elements() == 0) return;
  const int64_t T = args.a.size(0), row = args.a.elements() / T, slab = std::max<int64_t>((int64_t{1} << 30) / row, 1);
  for (int64_t first = 0; first < T; first += slab) {
    const int64_t total = std::min(slab, T - first) * row;
    launch_pdl("delta_gates", stream, ceil_div(total, kThreads), kThreads, 0, delta_gates_kernel, args, first,
               static_cast<uint32_t>(total));
  }
}

// --- norms --------------------------------------------------------------------------------------------------------------------

// Where rows begin: the leading dimensions folded into two, outer and inner.
struct RowStrides {
  int64_t outer = 0, inner = 0;
  __device__ int64_t at(uint32_t o, uint32_t i) const { return o * outer + i * inner; }
};

struct RowNorm {
  Tensor x, z, weight, y;  // z and weight absent: l2_norm
  float eps = 0;
  bool sigmoid_gate = false;
  int64_t rows = 0, D = 0;
  RowStrides x_rows, z_rows, y_rows;
  uint32_t inner = 1;  // size of the inner dimension

  __device__ int64_t offset(const RowStrides& strides, int64_t row) const {
    const auto r = static_cast<uint32_t>(row);
    return strides.at(r / inner, r % inner);
  }
};

__device__ float gate_of(float z, bool sigmoid_gate) { return sigmoid_gate ? quick_sigmoid(z) : quick_silu(z); }

// 1 / sqrt(sum or mean of squares + eps); 0 for a row of zeros without eps.
__device__ float norm_factor(float square, float eps) { return square + eps > 0.0f ? 1.0f / sqrtf(square + eps) : 0.0f; }

// A warp per row, for any dtypes and sizes.
__global__ void __launch_bounds__(kThreads) row_norm_kernel(const __grid_constant__ RowNorm p) {
  const int64_t row = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t x = p.offset(p.x_rows, row), y = p.offset(p.y_rows, row), z = p.offset(p.z_rows, row);
  float sum = 0;
  for (int64_t d = lane; d < p.D; d += 32) {
    const float value = load(p.x, x + d);
    sum += value * value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const float factor = norm_factor(p.z.present() ? sum / static_cast<float>(p.D) : sum, p.eps);
  for (int64_t d = lane; d < p.D; d += 32) {
    float value = load(p.x, x + d) * factor;
    if (p.z.present()) value = load(p.weight, d * p.weight.strides[0]) * value * gate_of(load(p.z, z + d), p.sigmoid_gate);
    store(p.y, y + d, value);
  }
}

// Parameters of the vectorised kernel, packed tightly: a cold kernel waits for every cache line of them.
struct PackedNorm {
  const void *x, *z, *weight;
  void* y;
  RowStrides x_rows, z_rows, y_rows;
  uint32_t rows, inner;  // inner: size of the inner dimension. With `flat`, the inner stride reaches every row
  int D, width;          // width: lanes per row, a power of two
  float eps, share;      // share: factor of the sum of squares, 1 or 1 / D for its mean
  DType weight_type;
  bool flat, packed_weight, sigmoid_gate;
};

// The weights of a lane's channels.
template <int N>
__device__ void load_weights(const PackedNorm& p, int first, float (&out)[N]) {
  if (!p.packed_weight) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = load(p.weight, p.weight_type, first + i);
  } else if (p.weight_type == DType::f32) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float quad[4];
      load_pack(static_cast<const float*>(p.weight) + first + i * 4, quad);
#pragma unroll
      for (int e = 0; e < 4; ++e) out[i * 4 + e] = quad[e];
    }
  } else if (p.weight_type == DType::bf16) {
    load_pack(static_cast<const __nv_bfloat16*>(p.weight) + first, out);
  } else {
    load_pack(static_cast<const __half*>(p.weight) + first, out);
  }
}

// Rows of at most 32 vectors of 16 bytes and one dtype: `width` lanes hold a row in registers. All loads are issued before any result is
// used.
template <class T, bool Gated, int Rows>
__global__ void __launch_bounds__(kThreads, Rows == 1 ? kOneRowBlocks : 8) row_norm_packs(const __grid_constant__ PackedNorm p) {
  constexpr int kPack = 16 / sizeof(T);
  using Raw = Words<T, kPack>;
  const int lane = threadIdx.x & (p.width - 1), d = lane * kPack, safe = d < p.D ? d : 0;
  const uint32_t per_block = kThreads / p.width, first = blockIdx.x * per_block * Rows + threadIdx.x / p.width;
  prefetch_arguments(p);
  pdl_wait();
  pdl_launch_dependents();
  Raw raw_x[Rows], raw_z[Rows];
  uint32_t outer[Rows], inner[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const uint32_t row = min(first + r * per_block, p.rows - 1);
    outer[r] = p.flat ? 0 : row / p.inner;
    inner[r] = row - outer[r] * p.inner;
    raw_x[r] = Raw::load(static_cast<const T*>(p.x) + p.x_rows.at(outer[r], inner[r]) + safe);
    if constexpr (Gated) raw_z[r] = Raw::load(static_cast<const T*>(p.z) + p.z_rows.at(outer[r], inner[r]) + safe);
  }
  float weight[kPack], sum[Rows];
  if constexpr (Gated) load_weights(p, safe, weight);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    sum[r] = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float x = d < p.D ? raw_x[r].at(i) : 0.0f;
      sum[r] = fmaf(x, x, sum[r]);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < p.width)
#pragma unroll
      for (int r = 0; r < Rows; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const float factor = norm_factor(sum[r] * p.share, p.eps);
    float y[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      y[i] = raw_x[r].at(i) * factor;
      if constexpr (Gated) y[i] = weight[i] * y[i] * gate_of(raw_z[r].at(i), p.sigmoid_gate);
    }
    if (d < p.D && first + r * per_block < p.rows) Raw::of(y).store(static_cast<T*>(p.y) + p.y_rows.at(outer[r], inner[r]) + d);
  }
}

template <class T>
void launch_packs(const char* op, const Stream& stream, const RowNorm& p) {
  constexpr int kPack = 16 / sizeof(T);
  int width = 1;
  while (width * kPack < p.D) width *= 2;
  const auto flat = [&](const RowStrides& strides) { return p.rows <= p.inner || strides.outer == strides.inner * p.inner; };
  const PackedNorm packed{p.x.data,
                          p.z.data,
                          p.weight.data,
                          p.y.data,
                          p.x_rows,
                          p.z_rows,
                          p.y_rows,
                          static_cast<uint32_t>(p.rows),
                          p.inner,
                          static_cast<int>(p.D),
                          width,
                          p.eps,
                          p.z.present() ? 1.0f / static_cast<float>(p.D) : 1.0f,
                          p.weight.dtype,
                          flat(p.x_rows) && flat(p.y_rows) && (!p.z.present() || flat(p.z_rows)),
                          packs_of(p.weight, kPack),
                          p.sigmoid_gate};
  // Several rows per thread keep more loads in flight. One row per thread ends sooner where all blocks are resident at once.
  const int64_t per_block = kThreads / width;
  const auto run = [&](int rows, auto kernel) {
    launch_pdl(op, stream, ceil_div(p.rows, per_block * rows), kThreads, 0, kernel, packed);
  };
  if (p.rows <= per_block * kOneRowBlocks * facts_of(stream).multiprocessors)
    return run(1, p.z.present() ? row_norm_packs<T, true, 1> : row_norm_packs<T, false, 1>);
  run(kMostRows, p.z.present() ? row_norm_packs<T, true, kMostRows> : row_norm_packs<T, false, kMostRows>);
}

bool takes_packs(const RowNorm& p) {
  const int64_t pack = 16 / dtype_bytes(p.x.dtype);
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == p.x.dtype && packs_of(t, pack)); };
  return p.rows < int64_t{1} << 31 && p.D <= 32 * pack && fits(p.x) && fits(p.y) && fits(p.z);
}

void launch_rows(const char* op, const Stream& stream, const RowNorm& p) {
  if (p.rows == 0) return;
  if (!takes_packs(p)) return launch(op, stream, ceil_div(p.rows * 32, kThreads), kThreads, 0, row_norm_kernel, p);
  if (p.x.dtype == DType::f32) return launch_packs<float>(op, stream, p);
  if (p.x.dtype == DType::bf16) return launch_packs<__nv_bfloat16>(op, stream, p);
  launch_packs<__half>(op, stream, p);
}

// Strides of a tensor as [outer, inner, D]: `inner` is the last leading dimension, and folds() holds for the others.
RowStrides strides_of(const Tensor& t) {
  if (!t.present() || t.rank < 2) return {};
  return {t.rank > 2 ? t.stride(-3) : 0, t.stride(-2)};
}

// Can all leading dimensions but the last be traversed with one stride?
bool folds(const Tensor& t) {
  for (int d = 0; d + 3 < t.rank; ++d)
    if (t.sizes[static_cast<size_t>(d)] > 1 &&
        t.strides[static_cast<size_t>(d)] != t.strides[static_cast<size_t>(d + 1)] * t.sizes[static_cast<size_t>(d + 1)])
      return false;
  return true;
}

RowNorm rows_of(const Tensor& x, const Tensor& z, const Tensor& weight, const Tensor& y, float eps, bool sigmoid_gate) {
  RowNorm p{x, z, weight, y, eps, sigmoid_gate, 0, x.size(-1), strides_of(x), strides_of(z), strides_of(y), 1};
  p.rows = p.D > 0 ? x.elements() / p.D : 0;
  if (x.rank > 1) p.inner = static_cast<uint32_t>(std::max<int64_t>(x.size(-2), 1));
  return p;
}

RowNorm l2_rows(const L2NormArgs& args) { return rows_of(args.x, {}, {}, args.y, args.eps, false); }
RowNorm gated_rows(const GatedRmsNormArgs& args) {
  return rows_of(args.x, args.z, args.weight, args.y, args.eps, args.gate == Gate::sigmoid);
}

// Calls with more rows than 32 bits count, or with dimensions that do not fold, run piece by piece along the first dimension.
template <class Run>
void in_pieces(Tensor x, Tensor y, Run&& run) {
  constexpr int64_t kMaxRows = int64_t{1} << 30;
  const int64_t rows = x.elements() / std::max<int64_t>(x.size(-1), 1);
  if (x.rank < 3 || (rows <= kMaxRows && folds(x) && folds(y))) return run(x, y);
  for (int64_t i = 0; i < x.size(0); ++i) {
    const auto slice = [&](const Tensor& t) {
      Tensor one = t;
      one.data = static_cast<char*>(t.data) + i * t.strides[0] * dtype_bytes(t.dtype);
      one.rank = static_cast<int8_t>(t.rank - 1);
      for (size_t d = 0; d + 1 < static_cast<size_t>(t.rank); ++d) {
        one.sizes[d] = t.sizes[d + 1];
        one.strides[d] = t.strides[d + 1];
      }
      return one;
    };
    in_pieces(slice(x), slice(y), run);
  }
}

Choice row_choice(const char* op, const RowNorm& p) {
  if (takes_packs(p)) return {std::string("cuda.") + op + ".packs", "rows in registers, 16 bytes per access"};
  return {std::string("cuda.") + op + ".rows", "a warp per row"};
}

void l2_norm(const Stream& stream, const L2NormArgs& args, Scratch) {
  in_pieces(args.x, args.y, [&](const Tensor& x, const Tensor& y) { launch_rows("l2_norm", stream, l2_rows({x, y, args.eps})); });
}
Choice l2_norm_choice(const Stream&, const L2NormArgs& args) { return row_choice("l2_norm", l2_rows(args)); }

void gated_rms_norm(const Stream& stream, const GatedRmsNormArgs& args, Scratch) {
  launch_rows("gated_rms_norm", stream, gated_rows(args));
}
Choice gated_rms_norm_choice(const Stream&, const GatedRmsNormArgs& args) { return row_choice("gated_rms_norm", gated_rows(args)); }

}  // namespace

OpRow<DeltaGatesArgs> delta_gates_row() { return {delta_gates, kAllFloats}; }
OpRow<L2NormArgs> l2_norm_row() { return {l2_norm, kAllFloats, nullptr, l2_norm_choice}; }
OpRow<GatedRmsNormArgs> gated_rms_norm_row() { return {gated_rms_norm, kAllFloats, nullptr, gated_rms_norm_choice}; }

}  // namespace weft::cuda
