// The chunk ops on cuda: f32 sums over tiles in shared memory, a block per chunk and value head.
//
// These public building blocks support every shape. Callers who want speed use gated_delta_rule_prefill, which fuses them.
#include <cmath>

#include "common/conventions.h"
#include "cuda/delta/chunk_map.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 256, kMaxChunk = 64;
constexpr int kTile = 16;  // rows of a state that a block holds

WEFT_HOST_DEVICE constexpr int pitch(int64_t columns) {
  return static_cast<int>(columns) + 1;
}  // odd for even sizes: no bank conflicts

// Prefix sums of a chunk's log decays, per head or per channel.
struct Prefix {
  const float* g;
  int64_t stride;  // between tokens
  bool channels;
  __device__ float operator()(int i, int c) const { return g[i * stride + (channels ? c : 0)]; }
};

__device__ Prefix prefix_of(const StridedView& g_cumsum, int64_t begin, int64_t hv) {
  return {static_cast<const float*>(g_cumsum.data) + begin * g_cumsum.strides[0] + hv * g_cumsum.strides[1], g_cumsum.strides[0],
          g_cumsum.rank == 3};
}

// Loads rows [begin, begin + n) of one head into a tile as f32, multiplied by factor(i, c).
template <class Factor>
__device__ void load_tile(const StridedView& t, int64_t begin, int n, int64_t head, int columns, float* tile, Factor&& factor) {
  for (int at = threadIdx.x; at < n * columns; at += blockDim.x) {
    const int i = at / columns, c = at % columns;
    tile[i * pitch(columns) + c] = load(t, (begin + i) * t.strides[0] + head * t.strides[1] + c) * factor(i, c);
  }
}
struct One {
  __device__ float operator()(int, int) const { return 1.0f; }
};

// sum_c x_ic y_jc e^(G_i - G_j)
__device__ float decayed_dot(const float* x, const float* y, int K, const Prefix& G, int i, int j) {
  float sum = 0;
  if (!G.channels) {
    for (int c = 0; c < K; ++c) sum = fmaf(x[c], y[c], sum);
    return sum * expf(G(i, 0) - G(j, 0));
  }
  for (int c = 0; c < K; ++c) sum = fmaf(x[c] * y[c], expf(G(i, c) - G(j, c)), sum);
  return sum;
}

// --- chunk_cumsum -------------------------------------------------------------------------------------------------------------

struct CumsumParams {
  StridedView g, g_cumsum;
};

__global__ void __launch_bounds__(kThreads)
    cumsum_kernel(const __grid_constant__ CumsumParams p, const __grid_constant__ ChunkMap map) {
  const int64_t Hv = p.g.size(1), K = p.g.rank == 3 ? p.g.size(2) : 1, columns = Hv * K;
  const int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (at >= map.rows * columns) return;
  const Chunk chunk = chunk_at(map, at / columns);
  if (chunk.n < 0) return;
  const int64_t h = at % columns / K, c = at % K;
  float sum = 0;
  for (int64_t t = chunk.begin; t < chunk.end; ++t) {
    sum += load(p.g, t * p.g.strides[0] + h * p.g.strides[1] + c);
    store(p.g_cumsum, t * p.g_cumsum.strides[0] + h * p.g_cumsum.strides[1] + c, sum);
  }
}

// --- chunk_kkt ----------------------------------------------------------------------------------------------------------------

struct KktParams {
  StridedView k, beta, g_cumsum, a;
  HeadMap head_map = HeadMap::grouped;
  int C = 0;
};

__global__ void __launch_bounds__(kThreads) kkt_kernel(const __grid_constant__ KktParams p, const __grid_constant__ ChunkMap map) {
  extern __shared__ float k[];
  const int64_t Hk = p.k.size(1), Hv = p.a.size(1), hv = blockIdx.x % static_cast<uint32_t>(Hv);
  const int K = static_cast<int>(p.k.size(2)), C = p.C;
  const Chunk chunk = chunk_at(map, blockIdx.x / static_cast<uint32_t>(Hv));
  if (chunk.n < 0) return;
  const Prefix G = prefix_of(p.g_cumsum, chunk.begin, hv);
  load_tile(p.k, chunk.begin, chunk.length(), key_head(hv, Hv, Hk, p.head_map), K, k, One{});
  __syncthreads();
  for (int at = threadIdx.x; at < chunk.length() * C; at += kThreads) {
    const int i = at / C, j = at % C;
    const int64_t t = chunk.begin + i;
    float value = 0;
    if (j < i)
      value = load(p.beta, t * p.beta.strides[0] + hv * p.beta.strides[1]) *
              decayed_dot(k + i * pitch(K), k + j * pitch(K), K, G, i, j);
    store(p.a, t * p.a.strides[0] + hv * p.a.strides[1] + j, value);
  }
}

// --- chunk_tri_inverse --------------------------------------------------------------------------------------------------------

struct TriInverseParams {
  StridedView a, a_inv;
  int C = 0;
};

// X_ij = d_ij - sum_{j <= m < i} A_im X_mj, with a thread per column.
__global__ void __launch_bounds__(kMaxChunk)
    tri_inverse_kernel(const __grid_constant__ TriInverseParams p, const __grid_constant__ ChunkMap map) {
  __shared__ float a[kMaxChunk][kMaxChunk + 1], x[kMaxChunk][kMaxChunk + 1];
  const int64_t Hv = p.a.size(1), hv = blockIdx.x % static_cast<uint32_t>(Hv);
  const int C = p.C, j = threadIdx.x;
  const Chunk chunk = chunk_at(map, blockIdx.x / static_cast<uint32_t>(Hv));
  if (chunk.n < 0) return;
  for (int i = 0; i < chunk.length(); ++i)
    if (j < C) a[i][j] = load(p.a, (chunk.begin + i) * p.a.strides[0] + hv * p.a.strides[1] + j);
  __syncthreads();
  if (j >= C) return;
  for (int i = 0; i < chunk.length(); ++i) {
    float sum = i == j ? 1.0f : 0.0f;
    for (int m = j; m < i; ++m) sum = fmaf(-a[i][m], x[m][j], sum);
    x[i][j] = sum;
    store(p.a_inv, (chunk.begin + i) * p.a_inv.strides[0] + hv * p.a_inv.strides[1] + j, sum);
  }
}

// --- chunk_wu -----------------------------------------------------------------------------------------------------------------

struct WuParams {
  StridedView k, v, beta, g_cumsum, a_inv, w, u;
  HeadMap head_map = HeadMap::grouped;
};

__device__ float rounded(float value, DType dtype) {
  if (dtype == DType::bf16) return to_float(from_float<__nv_bfloat16>(value));
  if (dtype == DType::f16) return to_float(from_float<__half>(value));
  return value;
}

// out_i = sum_{j <= i} X_ij staged_j, with a thread per column.
__device__ void times_inverse(const float* x, int xs, const float* staged, int columns, const Chunk& chunk, int64_t hv,
                              const StridedView& out) {
  constexpr int kRows = 16;
  for (int c = threadIdx.x; c < columns; c += kThreads)
    for (int first = 0; first < chunk.length(); first += kRows) {
      float sums[kRows] = {};
      for (int j = 0; j < min(first + kRows, chunk.length()); ++j) {
        const float value = staged[j * pitch(columns) + c];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = fmaf(x[(first + r) * xs + j], value, sums[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (first + r < chunk.length()) store(out, (chunk.begin + first + r) * out.strides[0] + hv * out.strides[1] + c, sums[r]);
    }
}

__global__ void __launch_bounds__(kThreads) wu_kernel(const __grid_constant__ WuParams p, const __grid_constant__ ChunkMap map) {
  extern __shared__ float staged[];
  __shared__ float x[kMaxChunk][kMaxChunk + 1];
  const int64_t Hk = p.k.size(1), Hv = p.v.size(1), hv = blockIdx.x % static_cast<uint32_t>(Hv);
  const int K = static_cast<int>(p.k.size(2)), V = static_cast<int>(p.v.size(2));
  const Chunk chunk = chunk_at(map, blockIdx.x / static_cast<uint32_t>(Hv));
  if (chunk.n < 0) return;
  const int n = chunk.length();
  const Prefix G = prefix_of(p.g_cumsum, chunk.begin, hv);
  const DType dtype = p.k.dtype;
  for (int at = threadIdx.x; at < kMaxChunk * kMaxChunk; at += kThreads) {
    const int i = at / kMaxChunk, j = at % kMaxChunk;
    x[i][j] = i < n && j <= i ? load(p.a_inv, (chunk.begin + i) * p.a_inv.strides[0] + hv * p.a_inv.strides[1] + j) : 0.0f;
  }
  const auto beta = [&](int i) { return load(p.beta, (chunk.begin + i) * p.beta.strides[0] + hv * p.beta.strides[1]); };
  const auto stage = [&](const StridedView& t, int64_t head, int columns, auto&& factor) {
    load_tile(t, chunk.begin, n, head, columns, staged, factor);
    for (int at = threadIdx.x; at < n * columns; at += kThreads) {  // the same elements that this thread loaded
      float& value = staged[at / columns * pitch(columns) + at % columns];
      value = rounded(value, dtype);
    }
    __syncthreads();
  };
  stage(p.k, key_head(hv, Hv, Hk, p.head_map), K, [&](int i, int c) { return beta(i) * expf(G(i, c)); });
  times_inverse(&x[0][0], kMaxChunk + 1, staged, K, chunk, hv, p.w);
  __syncthreads();
  stage(p.v, hv, V, [&](int i, int) { return beta(i); });
  times_inverse(&x[0][0], kMaxChunk + 1, staged, V, chunk, hv, p.u);
}

// --- chunk_state --------------------------------------------------------------------------------------------------------------

struct StateParams {
  StridedView k, w, u, g_cumsum, state_in, state_out, h, v_new;
  HeadMap head_map = HeadMap::grouped;
  int C = 0;
};

__global__ void __launch_bounds__(kThreads)
    state_kernel(const __grid_constant__ StateParams p, const __grid_constant__ ChunkMap map) {
  extern __shared__ float shared[];
  const int64_t Hk = p.k.size(1), Hv = p.u.size(1);
  const int K = static_cast<int>(p.k.size(2)), V = static_cast<int>(p.u.size(2)), C = p.C;
  const int tiles = (V + kTile - 1) / kTile, first_v = static_cast<int>(blockIdx.x % tiles) * kTile, rows = min(kTile, V - first_v);
  const int64_t hv = blockIdx.x / tiles % Hv, n = blockIdx.x / tiles / Hv, hk = key_head(hv, Hv, Hk, p.head_map);
  float* k = shared;
  float* w = k + C * pitch(K);
  float* state = w + C * pitch(K);          // [kTile][K]
  float* v_new = state + kTile * pitch(K);  // [C][kTile]
  const TokenRange range = tokens_of(map.sequences, n, map.tokens, map.each);
  const int64_t first = first_chunk(map, n);
  if (!range.legal || first < 0) return;
  const int64_t base = static_cast<int64_t>(first_v) * K;
  for (int at = threadIdx.x; at < rows * K; at += kThreads)
    state[at / K * pitch(K) + at % K] =
        p.state_in.present() ? load(p.state_in, n * p.state_in.strides[0] + hv * p.state_in.strides[1] + base + at) : 0.0f;
  for (int64_t begin = range.begin, row = first; begin < range.end; begin += C, ++row) {
    const int length = static_cast<int>(min(int64_t{C}, range.end - begin));
    const Prefix G = prefix_of(p.g_cumsum, begin, hv);
    load_tile(p.w, begin, length, hv, K, w, One{});
    load_tile(p.k, begin, length, hk, K, k, [&](int i, int c) { return expf(G(length - 1, c) - G(i, c)); });
    __syncthreads();
    for (int at = threadIdx.x; at < rows * K; at += kThreads)
      store(p.h, row * p.h.strides[0] + hv * p.h.strides[1] + base + at, state[at / K * pitch(K) + at % K]);
    for (int at = threadIdx.x; at < length * rows; at += kThreads) {
      const int i = at / rows, v = at % rows;
      float sum = load(p.u, (begin + i) * p.u.strides[0] + hv * p.u.strides[1] + first_v + v);
      for (int c = 0; c < K; ++c) sum = fmaf(-w[i * pitch(K) + c], state[v * pitch(K) + c], sum);
      v_new[i * kTile + v] = sum;
      store(p.v_new, (begin + i) * p.v_new.strides[0] + hv * p.v_new.strides[1] + first_v + v, sum);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows * K; at += kThreads) {
      const int v = at / K, c = at % K;
      float sum = expf(G(length - 1, c)) * state[v * pitch(K) + c];
      for (int i = 0; i < length; ++i) sum = fmaf(v_new[i * kTile + v], k[i * pitch(K) + c], sum);
      state[v * pitch(K) + c] = sum;
    }
    __syncthreads();
  }
  if (!p.state_out.present()) return;
  __syncthreads();
  for (int at = threadIdx.x; at < rows * K; at += kThreads)
    store(p.state_out, n * p.state_out.strides[0] + hv * p.state_out.strides[1] + base + at, state[at / K * pitch(K) + at % K]);
}

// --- chunk_output -------------------------------------------------------------------------------------------------------------

struct OutputParams {
  StridedView q, k, v_new, h, g_cumsum, o;
  HeadMap head_map = HeadMap::grouped;
  float scale = 1;
  int C = 0;
};

__global__ void __launch_bounds__(kThreads)
    output_kernel(const __grid_constant__ OutputParams p, const __grid_constant__ ChunkMap map) {
  extern __shared__ float shared[];
  const int64_t Hk = p.k.size(1), Hv = p.v_new.size(1), row = blockIdx.x / static_cast<uint32_t>(Hv),
                hv = blockIdx.x % static_cast<uint32_t>(Hv);
  const int K = static_cast<int>(p.k.size(2)), V = static_cast<int>(p.v_new.size(2)), C = p.C;
  const Chunk chunk = chunk_at(map, row);
  if (chunk.n < 0) return;
  const int n = chunk.length();
  const int64_t hk = key_head(hv, Hv, Hk, p.head_map);
  float* q = shared;
  float* k = q + C * pitch(K);             // then [kTile][K] of the state
  float* weights = k + C * pitch(K);       // [C][C]
  float* values = weights + C * pitch(C);  // [C][kTile]
  const Prefix G = prefix_of(p.g_cumsum, chunk.begin, hv);
  load_tile(p.q, chunk.begin, n, hk, K, q, One{});
  load_tile(p.k, chunk.begin, n, hk, K, k, One{});
  __syncthreads();
  for (int at = threadIdx.x; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    if (j <= i) weights[i * pitch(C) + j] = decayed_dot(q + i * pitch(K), k + j * pitch(K), K, G, i, j);
  }
  __syncthreads();
  for (int at = threadIdx.x; at < n * K; at += kThreads) q[at / K * pitch(K) + at % K] *= expf(G(at / K, at % K));
  for (int first_v = 0; first_v < V; first_v += kTile) {
    const int rows = min(kTile, V - first_v);
    __syncthreads();
    for (int at = threadIdx.x; at < rows * K; at += kThreads)
      k[at / K * pitch(K) + at % K] =
          load(p.h, row * p.h.strides[0] + hv * p.h.strides[1] + static_cast<int64_t>(first_v) * K + at);
    for (int at = threadIdx.x; at < n * rows; at += kThreads)
      values[at / rows * kTile + at % rows] =
          load(p.v_new, (chunk.begin + at / rows) * p.v_new.strides[0] + hv * p.v_new.strides[1] + first_v + at % rows);
    __syncthreads();
    for (int at = threadIdx.x; at < n * rows; at += kThreads) {
      const int i = at / rows, v = at % rows;
      float sum = 0;
      for (int c = 0; c < K; ++c) sum = fmaf(q[i * pitch(K) + c], k[v * pitch(K) + c], sum);
      for (int j = 0; j <= i; ++j) sum = fmaf(weights[i * pitch(C) + j], values[j * kTile + v], sum);
      store(p.o, (chunk.begin + i) * p.o.strides[0] + hv * p.o.strides[1] + first_v + v, p.scale * sum);
    }
  }
}

// --- entries of the table -----------------------------------------------------------------------------------------------------

// Shared memory of each stage, in bytes.
size_t floats(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }
size_t shared_of(const ChunkKktArgs& a) { return floats(a.chunk * pitch(a.k.size(2))); }
size_t shared_of(const ChunkWuArgs& a) { return floats(a.chunk * pitch(std::max(a.k.size(2), a.v.size(2)))); }
size_t shared_of(const ChunkStateArgs& a) { return floats((2 * a.chunk + kTile) * pitch(a.k.size(2)) + a.chunk * kTile); }
size_t shared_of(const ChunkOutputArgs& a) {
  // The tile of keys also holds kTile rows of the state, which are no more than C.
  return floats(2 * a.chunk * pitch(a.k.size(2)) + a.chunk * pitch(a.chunk) + a.chunk * kTile);
}

const char* op_of(const ChunkKktArgs&) { return "chunk_kkt"; }
const char* op_of(const ChunkWuArgs&) { return "chunk_wu"; }
const char* op_of(const ChunkStateArgs&) { return "chunk_state"; }
const char* op_of(const ChunkOutputArgs&) { return "chunk_output"; }

// Static shared memory of each stage: wu_kernel's x.
template <class Args>
constexpr int64_t kStaticFloats = 0;
template <>
constexpr int64_t kStaticFloats<ChunkWuArgs> = kMaxChunk*(kMaxChunk + 1);

template <class Args>
Status fits(const Stream& stream, const Args& args) {
  const size_t wanted = shared_of(args) + floats(kStaticFloats<Args>), has = static_cast<size_t>(facts_of(stream).shared_bytes);
  if (wanted <= has) return {};
  return fail(Code::unsupported, op_of(args), "k",
              "has K=" + std::to_string(args.k.size(2)) + ", whose tiles take " + std::to_string(wanted) +
                  " bytes of shared memory; the device has " + std::to_string(has));
}

const Tensor& tokens_tensor(const ChunkCumsumArgs& a) { return a.g; }
const Tensor& tokens_tensor(const ChunkTriInverseArgs& a) { return a.a; }
template <class Args>
const Tensor& tokens_tensor(const Args& a) {
  return a.k;
}

struct Plan {
  size_t scratch_bytes = 0;  // of the chunk map
};
template <class Args>
Plan plan_chunks(const Stream&, const Args& args) {
  return {chunk_map_bytes(args.sequences, tokens_tensor(args).size(0), args.chunk)};
}

template <class Args>
ChunkMap counted(const char* op, const Stream& stream, const Args& args, Scratch scratch) {
  const ChunkMap map = chunk_map(args.sequences, tokens_tensor(args).size(0), args.chunk, scratch.data);
  map_chunks(op, stream, map);
  return map;
}

void cumsum(const Stream& stream, const ChunkCumsumArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_cumsum", stream, args, scratch);
  const int64_t columns = args.g.size(1) * (args.g.rank == 3 ? args.g.size(2) : 1);
  launch("chunk_cumsum", stream, ceil_div(map.rows * columns, kThreads), kThreads, 0, cumsum_kernel,
         CumsumParams{view_of(args.g), view_of(args.g_cumsum)}, map);
}

void kkt(const Stream& stream, const ChunkKktArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_kkt", stream, args, scratch);
  const KktParams p{view_of(args.k), view_of(args.beta), view_of(args.g_cumsum),
                    view_of(args.a), args.head_map,      static_cast<int>(args.chunk)};
  launch("chunk_kkt", stream, map.rows * args.a.size(1), kThreads, shared_of(args), kkt_kernel, p, map);
}

void tri_inverse(const Stream& stream, const ChunkTriInverseArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_tri_inverse", stream, args, scratch);
  const TriInverseParams p{view_of(args.a), view_of(args.a_inv), static_cast<int>(args.chunk)};
  launch("chunk_tri_inverse", stream, map.rows * args.a.size(1), kMaxChunk, 0, tri_inverse_kernel, p, map);
}

void wu(const Stream& stream, const ChunkWuArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_wu", stream, args, scratch);
  const WuParams p{view_of(args.k),     view_of(args.v), view_of(args.beta), view_of(args.g_cumsum),
                   view_of(args.a_inv), view_of(args.w), view_of(args.u),    args.head_map};
  launch("chunk_wu", stream, map.rows * args.v.size(1), kThreads, shared_of(args), wu_kernel, p, map);
}

void state(const Stream& stream, const ChunkStateArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_state", stream, args, scratch);
  const int64_t blocks = ceil_div(args.u.size(2), kTile) * args.u.size(1) * args.sequences.count;
  const StateParams p{
      view_of(args.k),         view_of(args.w), view_of(args.u),     view_of(args.g_cumsum), view_of(args.state_in),
      view_of(args.state_out), view_of(args.h), view_of(args.v_new), args.head_map,          static_cast<int>(args.chunk)};
  launch("chunk_state", stream, blocks, kThreads, shared_of(args), state_kernel, p, map);
}

void output(const Stream& stream, const ChunkOutputArgs& args, const Plan&, Scratch scratch) {
  const ChunkMap map = counted("chunk_output", stream, args, scratch);
  const OutputParams p{view_of(args.q),
                       view_of(args.k),
                       view_of(args.v_new),
                       view_of(args.h),
                       view_of(args.g_cumsum),
                       view_of(args.o),
                       args.head_map,
                       scale_or_default(args.scale, args.k.size(2)),
                       static_cast<int>(args.chunk)};
  launch("chunk_output", stream, map.rows * args.v_new.size(1), kThreads, shared_of(args), output_kernel, p, map);
}

}  // namespace

OpEntry<ChunkCumsumArgs> chunk_cumsum_entry() { return entry<plan_chunks<ChunkCumsumArgs>, nullptr, cumsum>(kOnlyF32); }
OpEntry<ChunkKktArgs> chunk_kkt_entry() { return entry<plan_chunks<ChunkKktArgs>, nullptr, kkt>(kAllFloats, fits<ChunkKktArgs>); }
OpEntry<ChunkTriInverseArgs> chunk_tri_inverse_entry() {
  return entry<plan_chunks<ChunkTriInverseArgs>, nullptr, tri_inverse>(kOnlyF32);
}
OpEntry<ChunkWuArgs> chunk_wu_entry() { return entry<plan_chunks<ChunkWuArgs>, nullptr, wu>(kAllFloats, fits<ChunkWuArgs>); }
OpEntry<ChunkStateArgs> chunk_state_entry() {
  return entry<plan_chunks<ChunkStateArgs>, nullptr, state>(kAllFloats, fits<ChunkStateArgs>);
}
OpEntry<ChunkOutputArgs> chunk_output_entry() {
  return entry<plan_chunks<ChunkOutputArgs>, nullptr, output>(kAllFloats, fits<ChunkOutputArgs>);
}

}  // namespace weft::cuda
