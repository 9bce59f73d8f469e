// delta_gates, l2_norm and gated_rms_norm on cuda: memory-bound, so that data is read and written once, in vector accesses.
#include "cuda/common/pdl.cuh"
#include "cuda/common/views.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128;
// Rows per thread of the vectorised kernel, and its blocks per multiprocessor with one row per thread.
constexpr int kMostRows = 3, kOneRowBlocks = 16;

// --- delta_gates --------------------------------------------------------------------------------------------------------------

struct GatesParams {
  StridedView a, a_log, dt_bias, b, g, beta;
  bool double_beta = false;
};

// Tokens [first, first + total / (Hv K)). Offsets within them fit in 32 bits, whose divisions are cheap.
__global__ void __launch_bounds__(kThreads)
    delta_gates_kernel(const __grid_constant__ GatesParams p, int64_t first, uint32_t total) {
  prefetch_arguments(p);
  pdl_wait();
  pdl_launch_dependents();
  const auto Hv = static_cast<uint32_t>(p.a.size(1)), K = p.a.rank == 3 ? static_cast<uint32_t>(p.a.size(2)) : 1u;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= total) return;
  const uint32_t c = i % K, h = i / K % Hv;
  const int64_t t = first + i / K / Hv;
  const float a_log = load(p.a_log, h * p.a_log.strides[0]), bias = load(p.dt_bias, h * p.dt_bias.strides[0] + c);
  store(p.g, t * p.g.strides[0] + h * p.g.strides[1] + c,
        log_decay(load(p.a, t * p.a.strides[0] + h * p.a.strides[1] + c), a_log, bias));
  if (c == 0 && p.b.present())
    store(p.beta, t * p.beta.strides[0] + h * p.beta.strides[1],
          (p.double_beta ? 2.0f : 1.0f) * sigmoid(load(p.b, t * p.b.strides[0] + h * p.b.strides[1])));
}

void delta_gates(const Stream& stream, const DeltaGatesArgs& args) {
  if (args.a.elements() == 0) return;
  const int64_t T = args.a.size(0), row = args.a.elements() / T, slab = std::max<int64_t>((int64_t{1} << 30) / row, 1);
  const GatesParams p{view_of(args.a), view_of(args.a_log), view_of(args.dt_bias), view_of(args.b),
                      view_of(args.g), view_of(args.beta),  args.double_beta};
  for (int64_t first = 0; first < T; first += slab) {
    const int64_t total = std::min(slab, T - first) * row;
    launch_pdl("delta_gates", stream, ceil_div(total, kThreads), kThreads, 0, delta_gates_kernel, p, first,
               static_cast<uint32_t>(total));
  }
}

// --- norms --------------------------------------------------------------------------------------------------------------------

// Where rows begin: the leading dimensions folded into two, outer and inner.
struct RowStrides {
  int64_t outer = 0, inner = 0;
  __device__ int64_t at(uint32_t o, uint32_t i) const { return o * outer + i * inner; }
};

struct NormParams {
  StridedView x, z, weight, y;  // z and weight absent: l2_norm
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
__global__ void __launch_bounds__(kThreads) row_norm_kernel(const __grid_constant__ NormParams p) {
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

// A call with its tensors, whose alignment decides the kernel.
struct NormCall {
  Tensor x, z, weight, y;
  NormParams params;
};

template <class T>
void launch_packs(const char* op, const Stream& stream, const NormCall& call) {
  constexpr int kPack = 16 / sizeof(T);
  const NormParams& p = call.params;
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
                          packs_of(call.weight, kPack),
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

bool takes_packs(const NormCall& call) {
  const int64_t pack = 16 / dtype_bytes(call.x.dtype);
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == call.x.dtype && packs_of(t, pack)); };
  return call.params.rows < int64_t{1} << 31 && call.params.D <= 32 * pack && fits(call.x) && fits(call.y) && fits(call.z);
}

void launch_norm(const char* op, const Stream& stream, const NormCall& call) {
  const NormParams& p = call.params;
  if (p.rows == 0) return;
  if (!takes_packs(call)) return launch(op, stream, ceil_div(p.rows * 32, kThreads), kThreads, 0, row_norm_kernel, p);
  if (p.x.dtype == DType::f32) return launch_packs<float>(op, stream, call);
  if (p.x.dtype == DType::bf16) return launch_packs<__nv_bfloat16>(op, stream, call);
  launch_packs<__half>(op, stream, call);
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

NormCall norm_call(const Tensor& x, const Tensor& z, const Tensor& weight, const Tensor& y, float eps, bool sigmoid_gate) {
  const int64_t D = x.size(-1), rows = D > 0 ? x.elements() / D : 0;
  const auto inner = static_cast<uint32_t>(x.rank > 1 ? std::max<int64_t>(x.size(-2), 1) : 1);
  return {x,
          z,
          weight,
          y,
          {view_of(x), view_of(z), view_of(weight), view_of(y), eps, sigmoid_gate, rows, D, strides_of(x), strides_of(z),
           strides_of(y), inner}};
}

NormCall l2_call(const L2NormArgs& args) { return norm_call(args.x, {}, {}, args.y, args.eps, false); }
NormCall gated_call(const GatedRmsNormArgs& args) {
  return norm_call(args.x, args.z, args.weight, args.y, args.eps, args.gate == Gate::sigmoid);
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

struct NormPlan {
  NormCall call;
  size_t scratch_bytes = 0;
};
NormPlan plan_l2_norm(const Stream&, const L2NormArgs& args) { return {l2_call(args)}; }
NormPlan plan_gated_rms_norm(const Stream&, const GatedRmsNormArgs& args) { return {gated_call(args)}; }

Choice describe_norm(const char* op, const NormCall& call) {
  if (takes_packs(call)) return {std::string("cuda.") + op + ".packs", "rows in registers, 16 bytes per access"};
  return {std::string("cuda.") + op + ".rows", "a warp per row"};
}

void l2_norm(const Stream& stream, const L2NormArgs& args, const NormPlan&, Scratch) {
  in_pieces(args.x, args.y, [&](const Tensor& x, const Tensor& y) { launch_norm("l2_norm", stream, l2_call({x, y, args.eps})); });
}
Choice describe_l2_norm(const Stream&, const L2NormArgs&, const NormPlan& plan) { return describe_norm("l2_norm", plan.call); }

void gated_rms_norm(const Stream& stream, const GatedRmsNormArgs&, const NormPlan& plan, Scratch) {
  launch_norm("gated_rms_norm", stream, plan.call);
}
Choice describe_gated_rms_norm(const Stream&, const GatedRmsNormArgs&, const NormPlan& plan) {
  return describe_norm("gated_rms_norm", plan.call);
}

}  // namespace

OpEntry<DeltaGatesArgs> delta_gates_entry() { return entry<delta_gates>(kAllFloats); }
OpEntry<L2NormArgs> l2_norm_entry() { return entry<plan_l2_norm, describe_l2_norm, l2_norm>(kAllFloats); }
OpEntry<GatedRmsNormArgs> gated_rms_norm_entry() {
  return entry<plan_gated_rms_norm, describe_gated_rms_norm, gated_rms_norm>(kAllFloats);
}

}  // namespace weft::cuda
