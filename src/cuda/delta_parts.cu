// delta_gates, l2_norm and gated_rms_norm on cuda: bound by memory, so read and written once in wide accesses.
#include "cuda/elements.cuh"
#include "cuda/gate_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 256;

// --- delta_gates --------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) delta_gates_kernel(const __grid_constant__ DeltaGatesArgs args) {
  const int64_t Hv = args.a.size(1), K = args.a.rank == 3 ? args.a.size(2) : 1, total = args.a.size(0) * Hv * K;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t c = i % K, h = i / K % Hv, t = i / K / Hv;
    const float a_log = load(args.a_log, h * args.a_log.strides[0]), bias = load(args.dt_bias, h * args.dt_bias.strides[0] + c);
    store(args.g, t * args.g.strides[0] + h * args.g.strides[1] + c,
          log_decay(load(args.a, t * args.a.strides[0] + h * args.a.strides[1] + c), a_log, bias));
    if (c == 0 && args.b.present())
      store(args.beta, t * args.beta.strides[0] + h * args.beta.strides[1],
            (args.double_beta ? 2.0f : 1.0f) * sigmoid(load(args.b, t * args.b.strides[0] + h * args.b.strides[1])));
  }
}

void delta_gates(const Stream& stream, const DeltaGatesArgs& args, Scratch) {
  constexpr int64_t kBlocks = 4096;  // the rest is walked
  launch("delta_gates", stream, std::min(ceil_div(args.a.elements(), kThreads), kBlocks), kThreads, 0, delta_gates_kernel, args);
}

// --- rows ---------------------------------------------------------------------------------------------------------------------

// Sum over the `width` (a power of two) neighbouring lanes that share a row.
__device__ float sum_lanes(float x, int width) {
  for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Offset of row r (leading dimensions counted as one).
__device__ int64_t row_offset(const Tensor& t, int64_t r) {
  int64_t offset = 0;
  for (int d = t.rank - 2; d >= 0; --d) {
    offset += r % t.sizes[d] * t.strides[d];
    r /= t.sizes[d];
  }
  return offset;
}

struct RowNorm {
  Tensor x, z, weight, y;  // z and weight absent: l2_norm
  float eps = 0;
  bool sigmoid_gate = false;
  int64_t rows = 0, D = 0;
};

__device__ float gate_of(float z, bool plain_sigmoid) { return plain_sigmoid ? sigmoid(z) : z * sigmoid(z); }

// 1 / sqrt(sum or mean of squares + eps); 0 for a row of zeros without eps.
__device__ float norm_factor(const RowNorm& p, float sum) {
  const float square = (p.z.present() ? sum / static_cast<float>(p.D) : sum) + p.eps;
  return square > 0.0f ? 1.0f / sqrtf(square) : 0.0f;
}

// A warp per row, any dtypes and sizes.
__global__ void __launch_bounds__(kThreads) row_norm_kernel(const __grid_constant__ RowNorm p) {
  const int64_t row = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t x = row_offset(p.x, row), y = row_offset(p.y, row), z = p.z.present() ? row_offset(p.z, row) : 0;
  float sum = 0;
  for (int64_t d = lane; d < p.D; d += 32) {
    const float value = load(p.x, x + d);
    sum += value * value;
  }
  const float factor = norm_factor(p, sum_lanes(sum, 32));
  for (int64_t d = lane; d < p.D; d += 32) {
    float value = load(p.x, x + d) * factor;
    if (p.z.present()) value = load(p.weight, d * p.weight.strides[0]) * value * gate_of(load(p.z, z + d), p.sigmoid_gate);
    store(p.y, y + d, value);
  }
}

// Rows of at most 32 packs of one dtype: `width` lanes hold a row in registers, each thread several rows for the sake of bytes in
// flight.
template <class T, bool Gated>
__global__ void __launch_bounds__(kThreads) row_norm_packs(const __grid_constant__ RowNorm p, int width) {
  constexpr int kPack = 16 / sizeof(T), kRows = 4;
  const int lane = threadIdx.x % width, d = lane * kPack;
  const bool inside = d < p.D;
  const int64_t per_block = kThreads / width, first = blockIdx.x * per_block * kRows + threadIdx.x / width;
  float x[kRows][kPack], z[kRows][kPack], weight[kPack];
  if constexpr (Gated)
#pragma unroll
    for (int i = 0; i < kPack; ++i) weight[i] = inside ? load(p.weight, (d + i) * p.weight.strides[0]) : 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * per_block;
    const bool live = inside && row < p.rows;
    if (live) {
      load_pack<T, kPack>(static_cast<const T*>(p.x.data) + row_offset(p.x, row) + d, x[r]);
      if constexpr (Gated) load_pack<T, kPack>(static_cast<const T*>(p.z.data) + row_offset(p.z, row) + d, z[r]);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[r][i] = z[r][i] = 0.0f;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * per_block;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += x[r][i] * x[r][i];
    const float factor = norm_factor(p, sum_lanes(sum, width));
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x[r][i] *= factor;
      if constexpr (Gated) x[r][i] = weight[i] * x[r][i] * gate_of(z[r][i], p.sigmoid_gate);
    }
    if (inside && row < p.rows) store_pack<T, kPack>(static_cast<T*>(p.y.data) + row_offset(p.y, row) + d, x[r]);
  }
}

template <class T>
void launch_packs(const char* op, const Stream& stream, const RowNorm& p) {
  constexpr int kPack = 16 / sizeof(T), kRows = 4;
  int width = 1;
  while (width * kPack < p.D) width *= 2;
  const int64_t blocks = ceil_div(p.rows, int64_t{kThreads / width} * kRows);
  if (p.z.present())
    launch(op, stream, blocks, kThreads, 0, row_norm_packs<T, true>, p, width);
  else
    launch(op, stream, blocks, kThreads, 0, row_norm_packs<T, false>, p, width);
}

bool takes_packs(const RowNorm& p) {
  const int64_t pack = 16 / dtype_bytes(p.x.dtype);
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == p.x.dtype && packs_of(t, pack)); };
  return p.D <= 32 * pack && fits(p.x) && fits(p.y) && fits(p.z);
}

void launch_rows(const char* op, const Stream& stream, const RowNorm& p) {
  if (p.rows == 0) return;
  if (!takes_packs(p)) return launch(op, stream, ceil_div(p.rows * 32, kThreads), kThreads, 0, row_norm_kernel, p);
  if (p.x.dtype == DType::f32) return launch_packs<float>(op, stream, p);
  if (p.x.dtype == DType::bf16) return launch_packs<__nv_bfloat16>(op, stream, p);
  launch_packs<__half>(op, stream, p);
}

RowNorm l2_rows(const L2NormArgs& args) {
  const int64_t D = args.x.size(-1);
  return {args.x, {}, {}, args.y, args.eps, false, D > 0 ? args.x.elements() / D : 0, D};
}

RowNorm gated_rows(const GatedRmsNormArgs& args) {
  const int64_t D = args.x.size(2);
  return {args.x, args.z, args.weight, args.y, args.eps, args.gate == Gate::sigmoid, D > 0 ? args.x.elements() / D : 0, D};
}

Choice row_choice(const char* op, const RowNorm& p) {
  if (takes_packs(p)) return {std::string("cuda.") + op + ".packs", "rows in registers, 16 bytes per access"};
  return {std::string("cuda.") + op + ".rows", "a warp per row"};
}

void l2_norm(const Stream& stream, const L2NormArgs& args, Scratch) { launch_rows("l2_norm", stream, l2_rows(args)); }
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
