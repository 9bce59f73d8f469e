// The sequential part of the tensor-core prefill: see prefill.cuh.
//
// A warp owns 16 rows of the state, in accumulators, and never shares them: every product has rows of V as its rows, so that a result
// becomes the next product's operand in the registers where it lies. Two more warps copy the chunks to come into shared memory.
#include "cuda/elements.cuh"
#include "cuda/gate_math.cuh"
#include "cuda/mma.cuh"
#include "cuda/prefill.cuh"
#include "shared/state_slots.h"

namespace weft::cuda {
namespace {

constexpr int kRows = 16, kCopyThreads = 64;

// Where the parts of a stage lie, in bytes.
template <int KP, int Warps>
struct Stage {
  static constexpr int kValues = Warps * kRows;  // columns of v
  static constexpr int kQ = 0, kK = kQ + kChunk * KP * 2, kT = kK + kChunk * KP * 2, kP = kT + kMatrix * 2;
  static constexpr int kV = kP + kMatrix * 2, kFactor = kV + kChunk * kValues * 2, kBytes = kFactor + kFactors * 4;
};

struct Place4 {
  int matrix, r;  // of a lane's address in a load of four matrices
};

template <int KP, int Warps>
__device__ void copy_chunk(const Prefill& p, const TokenRange& range, int64_t first, int64_t index, int64_t hv, int64_t hk,
                           int first_v, int thread, uint32_t stage) {
  using S = Stage<KP, Warps>;
  const int64_t begin = range.begin + index * kChunk;
  const int length = static_cast<int>(min(int64_t{kChunk}, range.end - begin));
  const uint16_t* q = static_cast<const uint16_t*>(p.args.q.data) + begin * p.args.q.strides[0] + hk * p.args.q.strides[1];
  const uint16_t* k = static_cast<const uint16_t*>(p.args.k.data) + begin * p.args.k.strides[0] + hk * p.args.k.strides[1];
  const uint16_t* v =
      static_cast<const uint16_t*>(p.args.v.data) + begin * p.args.v.strides[0] + hv * p.args.v.strides[1] + first_v;
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V) - first_v;
  constexpr int kPieces = KP / 8, kRowStep = kCopyThreads / kPieces;
  {
    const int piece = thread % kPieces;
#pragma unroll 4
    for (int row = thread / kPieces; row < kChunk; row += kRowStep) {
      const bool there = row < length && piece * 8 < K;
      const uint32_t to = stage + Tile<KP>::offset(row, piece);
      copy_async(to + S::kK, k + (there ? row * p.args.k.strides[0] + piece * 8 : 0), there);
      copy_async(to + S::kQ, q + (there ? row * p.args.q.strides[0] + piece * 8 : 0), there);
    }
  }
  constexpr int kValuePieces = S::kValues / 8;
  for (int at = thread; at < kChunk * kValuePieces; at += kCopyThreads) {
    const int row = at / kValuePieces, piece = at % kValuePieces;
    const bool there = row < length && piece * 8 < V;
    copy_async(stage + S::kV + Tile<S::kValues>::offset(row, piece), v + (there ? row * p.args.v.strides[0] + piece * 8 : 0),
               there);
  }
  const int64_t unit = (first + index) * p.Hv + hv;
  const uint16_t* matrices = p.matrices + unit * 2 * kMatrix;
#pragma unroll 4
  for (int at = thread; at < kMatrix / 8; at += kCopyThreads) {
    const int row = at / (kChunk / 8), piece = at % (kChunk / 8);
    const uint32_t to = stage + Tile<kChunk>::offset(row, piece);
    const bool there = piece / 2 <= row / 16;  // blocks above the diagonal are neither written nor read
    copy_async(to + S::kT, matrices + row * kChunk + piece * 8, there);
    copy_async(to + S::kP, matrices + kMatrix + row * kChunk + piece * 8, there);
  }
  for (int at = thread; at < kFactors / 4; at += kCopyThreads)
    copy_async(stage + S::kFactor + at * 16, p.factors + unit * kFactors + at * 4, true);
}

// Elements (row, column) and (row, column + 1) of a state matrix at `base`.
__device__ int64_t element(StateLayout layout, int row, int column, int K, int V) {
  return layout == StateLayout::vk ? int64_t{row} * K + column : int64_t{column} * V + row;
}

// Visits the accumulators of a warp's rows: visit(row, column, value).
template <int KP, class Visit>
__device__ void for_each_element(float (&state)[KP / 8][4], int first_row, int lane, int K, int V, Visit&& visit) {
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + lane / 4 + e / 2 * 8, column = nt * 8 + lane % 4 * 2 + e % 2;
      if (row < V && column < K) visit(row, column, state[nt][e]);
    }
}

template <class Half, int KP, int Warps>
__device__ void chunk_step(float (&state)[KP / 8][4], uint32_t stage, const float* factors, const Place4& at, int warp, int lane,
                           float (&out)[8][4]) {
  using S = Stage<KP, Warps>;
  const int t = lane % 4;
  // S k and S q of every token.
  float u[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) u[i][e] = out[i][e] = 0.0f;
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const FragmentA a = operand<Half>(state[2 * ks], state[2 * ks + 1]);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t from = stage + Tile<KP>::offset(pair * 16 + (at.matrix >> 1) * 8 + at.r, ks * 2 + (at.matrix & 1));
      uint32_t b[4];
      load_matrices(b, from + S::kK);
      multiply<Half>(u[2 * pair], a, b[0], b[1]);
      multiply<Half>(u[2 * pair + 1], a, b[2], b[3]);
      load_matrices(b, from + S::kQ);
      multiply<Half>(out[2 * pair], a, b[0], b[1]);
      multiply<Half>(out[2 * pair + 1], a, b[2], b[3]);
    }
  }
  // W = v - a S k, as the operand of T.
  FragmentA w[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t v[4];
    load_matrices_transposed(
        v, stage + S::kV + Tile<S::kValues>::offset(pair * 16 + (at.matrix >> 1) * 8 + at.r, warp * 2 + (at.matrix & 1)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int nt = 2 * pair + half;
      const float2 a = *reinterpret_cast<const float2*>(factors + nt * 8 + 2 * t);
      const float2 c = *reinterpret_cast<const float2*>(factors + kChunk + nt * 8 + 2 * t);
      const float2 upper = unpack<Half>(v[2 * half]), lower = unpack<Half>(v[2 * half + 1]);
      w[pair].x[2 * half] = pack<Half>(fmaf(-a.x, u[nt][0], upper.x), fmaf(-a.y, u[nt][1], upper.y));
      w[pair].x[2 * half + 1] = pack<Half>(fmaf(-a.x, u[nt][2], lower.x), fmaf(-a.y, u[nt][3], lower.y));
      out[nt][0] *= c.x;
      out[nt][1] *= c.y;
      out[nt][2] *= c.x;
      out[nt][3] *= c.y;
    }
  }
  // V' = T W.
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) u[i][e] = 0.0f;
#pragma unroll
  for (int js = 0; js < 4; ++js)
#pragma unroll
    for (int pair = js; pair < 4; ++pair) {
      uint32_t b[4];
      load_matrices(b, stage + S::kT + Tile<kChunk>::offset(pair * 16 + (at.matrix >> 1) * 8 + at.r, js * 2 + (at.matrix & 1)));
      multiply<Half>(u[2 * pair], w[js], b[0], b[1]);
      multiply<Half>(u[2 * pair + 1], w[js], b[2], b[3]);
    }
  // S <- e^(G_C) S + (d V') k^T, then o += P V'.
  const float decay = factors[3 * kChunk];
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[nt][e] *= decay;
#pragma unroll
  for (int js = 0; js < 4; ++js) {
    const float2 d0 = *reinterpret_cast<const float2*>(factors + 2 * kChunk + js * 16 + 2 * t);
    const float2 d1 = *reinterpret_cast<const float2*>(factors + 2 * kChunk + js * 16 + 8 + 2 * t);
    const float left[4] = {u[2 * js][0] * d0.x, u[2 * js][1] * d0.y, u[2 * js][2] * d0.x, u[2 * js][3] * d0.y};
    const float right[4] = {u[2 * js + 1][0] * d1.x, u[2 * js + 1][1] * d1.y, u[2 * js + 1][2] * d1.x, u[2 * js + 1][3] * d1.y};
    const FragmentA a = operand<Half>(left, right);
#pragma unroll
    for (int pair = 0; pair < KP / 16; ++pair) {
      uint32_t b[4];
      load_matrices_transposed(b,
                               stage + S::kK + Tile<KP>::offset(js * 16 + (at.matrix & 1) * 8 + at.r, pair * 2 + (at.matrix >> 1)));
      multiply<Half>(state[2 * pair], a, b[0], b[1]);
      multiply<Half>(state[2 * pair + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int js = 0; js < 4; ++js) {
    const FragmentA a = operand<Half>(u[2 * js], u[2 * js + 1]);
#pragma unroll
    for (int pair = js; pair < 4; ++pair) {
      uint32_t b[4];
      load_matrices(b, stage + S::kP + Tile<kChunk>::offset(pair * 16 + (at.matrix >> 1) * 8 + at.r, js * 2 + (at.matrix & 1)));
      multiply<Half>(out[2 * pair], a, b[0], b[1]);
      multiply<Half>(out[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// Outputs lie transposed in the accumulators: rows of V by tokens.
template <class Half>
__device__ void store_outputs(const Prefill& p, const float (&out)[8][4], int64_t begin, int length, int64_t hv, int first_row,
                              int lane) {
  const Tensor& o = p.args.o;
  const int g = lane / 4, t = lane % 4, V = static_cast<int>(p.V);
  const bool halves = o.dtype == p.args.q.dtype;
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    if (halves) {
      const uint32_t upper = transpose(pack<Half>(out[nt][0], out[nt][1])), lower = transpose(pack<Half>(out[nt][2], out[nt][3]));
      const int token = nt * 8 + g, row = first_row + 2 * t;
      if (token >= length) continue;
      uint16_t* to = static_cast<uint16_t*>(o.data) + (begin + token) * o.strides[0] + hv * o.strides[1] + row;
      if (row < V) *reinterpret_cast<uint32_t*>(to) = upper;
      if (row + 8 < V) *reinterpret_cast<uint32_t*>(to + 8) = lower;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = nt * 8 + 2 * t + e % 2, row = first_row + g + e / 2 * 8;
        if (token < length && row < V) store(o, (begin + token) * o.strides[0] + hv * o.strides[1] + row, out[nt][e]);
      }
    }
  }
}

template <class Half, int KP, int Warps>
__global__ void __launch_bounds__(Warps * 32 + kCopyThreads) pass_kernel(const __grid_constant__ Prefill p, int stages) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using S = Stage<KP, Warps>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, K = static_cast<int>(p.K), V = static_cast<int>(p.V);
  const int tiles = (V + S::kValues - 1) / S::kValues, first_v = static_cast<int>(blockIdx.x % tiles) * S::kValues;
  const int64_t hv = blockIdx.x / tiles % p.Hv, n = blockIdx.x / tiles / p.Hv, hk = key_head(hv, p.Hv, p.Hk, p.args.head_map);
  const TokenRange range = tokens_of(p.args.sequences, n, p.T);
  const int64_t first = first_chunk(p.map, n);
  if (!range.legal || first < 0) return;
  const StateSlots slots = state_slots(p.args.states, n);
  const int first_row = first_v + warp * kRows;
  const DeltaStates& states = p.args.states;
  if (slots.inert) {
    const int columns = min(S::kValues, V - first_v);
    for (int64_t at = threadIdx.x; at < range.length() * columns; at += blockDim.x)
      store(p.args.o, (range.begin + at / columns) * p.args.o.strides[0] + hv * p.args.o.strides[1] + first_v + at % columns, 0.0f);
    return;
  }
  const int64_t chunks = chunks_of(range, kChunk);
  const bool copies = warp >= Warps;
  const uint32_t base = shared_address(raw);
  float state[KP / 8][4] = {};
  if (copies) {
    for (int64_t c = 0; c < stages - 1; ++c) {
      if (c < chunks)
        copy_chunk<KP, Warps>(p, range, first, c, hv, hk, first_v, threadIdx.x - Warps * 32,
                              base + static_cast<uint32_t>(c) * S::kBytes);
      commit_copies();
    }
  } else if (slots.in >= 0) {
    const int64_t from = slots.in * states.in.strides[0] + hv * states.in.strides[1];
    for_each_element<KP>(state, first_row, lane, K, V, [&](int row, int column, float& x) {
      x = load(states.in, from + element(states.layout, row, column, K, V));
    });
  }
  const Place4 at{lane / 8, lane % 8};
  int slot = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    if (copies) {
      if (stages == 3)
        wait_copies<1>();
      else
        wait_copies<0>();
    }
    __syncthreads();  // chunk c is there, and nobody reads chunk c - 1 any more
    const uint32_t stage = base + static_cast<uint32_t>(slot * S::kBytes);
    if (copies) {
      const int64_t ahead = c + stages - 1;
      const int into = slot == 0 ? stages - 1 : slot - 1;
      if (ahead < chunks)
        copy_chunk<KP, Warps>(p, range, first, ahead, hv, hk, first_v, threadIdx.x - Warps * 32,
                              base + static_cast<uint32_t>(into * S::kBytes));
      commit_copies();
    } else {
      const float* factors = reinterpret_cast<const float*>(raw + slot * S::kBytes + S::kFactor);
      float out[8][4];
      chunk_step<Half, KP, Warps>(state, stage, factors, at, warp, lane, out);
      const int64_t begin = range.begin + c * kChunk;
      store_outputs<Half>(p, out, begin, static_cast<int>(min(int64_t{kChunk}, range.end - begin)), hv, first_row, lane);
      const int64_t done = (c + 1) * kChunk;
      if (p.args.checkpoint_every > 0 && done <= range.length() && done % p.args.checkpoint_every == 0) {
        const Tensor& to = p.args.checkpoints;
        const int64_t matrix = n * to.strides[0] + (done / p.args.checkpoint_every - 1) * to.strides[1] + hv * to.strides[2];
        for_each_element<KP>(state, first_row, lane, K, V, [&](int row, int column, float& x) {
          store(to, matrix + element(states.layout, row, column, K, V), x);
        });
      }
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
  }
  if (!copies && slots.out >= 0) {
    const int64_t to = slots.out * states.out.strides[0] + hv * states.out.strides[1];
    for_each_element<KP>(state, first_row, lane, K, V, [&](int row, int column, float& x) {
      store(states.out, to + element(states.layout, row, column, K, V), x);
    });
  }
}

template <int KP>
size_t stage_bytes(int warps) {
  return static_cast<size_t>(warps == 2 ? Stage<KP, 2>::kBytes : warps == 4 ? Stage<KP, 4>::kBytes : Stage<KP, 8>::kBytes);
}

template <class Half, int KP>
void launch_typed(const Stream& stream, const Prefill& p, const PassPlan& plan) {
  const auto run = [&](auto kernel) {
    launch("gated_delta_rule_prefill", stream, plan.blocks, plan.warps * 32 + kCopyThreads, plan.shared, kernel, p, plan.stages);
  };
  if (plan.warps == 2) return run(pass_kernel<Half, KP, 2>);
  if (plan.warps == 4) return run(pass_kernel<Half, KP, 4>);
  run(pass_kernel<Half, KP, 8>);
}

}  // namespace

// As few rows per block as still leave a multiprocessor for every block, since blocks that share one share its tensor cores too.
PassPlan pass_plan(const Stream& stream, const Prefill& p) {
  const DeviceFacts& facts = facts_of(stream);
  PassPlan plan;
  for (int warps : {2, 4, 8}) {
    plan.warps = warps;
    plan.blocks = ceil_div(p.V, warps * kRows) * p.Hv * p.N;
    if (plan.blocks <= facts.multiprocessors || p.V <= warps * kRows) break;
  }
  const size_t stage = p.K <= 64 ? stage_bytes<64>(plan.warps) : stage_bytes<128>(plan.warps);
  plan.stages = 3 * stage <= static_cast<size_t>(facts.shared_bytes) ? 3 : 2;
  plan.shared = stage * static_cast<size_t>(plan.stages);
  return plan;
}

void launch_pass(const Stream& stream, const Prefill& p) {
  const PassPlan plan = pass_plan(stream, p);
  const bool bf16 = p.args.k.dtype == DType::bf16;
  if (p.K <= 64) return bf16 ? launch_typed<__nv_bfloat16, 64>(stream, p, plan) : launch_typed<__half, 64>(stream, p, plan);
  bf16 ? launch_typed<__nv_bfloat16, 128>(stream, p, plan) : launch_typed<__half, 128>(stream, p, plan);
}

}  // namespace weft::cuda
