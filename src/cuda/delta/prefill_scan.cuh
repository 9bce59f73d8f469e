// Device functions that all state scans share: a block's work, pipeline stages, states and outputs. See prefill.cuh.
#pragma once

#include "common/state_slots.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill.cuh"

namespace weft::cuda {

// One pipeline stage holds a chunk: its PreparedChunk, keys and queries in panels of 64 channels, VT columns of v. Offsets in
// bytes.
template <int KP, int VT>
struct ScanStage {
  static constexpr int kK = (PreparedChunk<KP>::kBytes + 1023) / 1024 * 1024, kQ = kK + KP / 64 * kPanel,
                       kV = kQ + KP / 64 * kPanel;
  static constexpr int kBytes = kV + kChunk * VT * 2;
  static_assert(kBytes % 1024 == 0);

  // Offset of a 16-byte piece of a row: of keys or queries, and of v.
  __device__ static uint32_t key(int row, int piece) { return piece / 8 * kPanel + Tile64::offset(row, piece % 8); }
  __device__ static constexpr uint32_t value(int row, int piece) {
    if constexpr (VT < 64) return Tile<VT>::offset(row, piece);
    return piece / 8 * kPanel + Tile64::offset(row, piece % 8);
  }
};

// The work of one block: a token range, a value head and a tile of state rows.
struct WorkTile {
  TokenRange range;  // the whole sequence, or one of its ranges
  int64_t n, hv, hk, first_chunk, chunks;
  int64_t skipped;     // chunks of the sequence before the range
  const float* start;  // state before the range; null: the call's initial state
  float* next;         // where the state after the range goes for the next range; null: nowhere
  bool last;           // the range ends the sequence, so its state is the final one
  int first_v;         // first state row
};

// Reduces a sequence to its r-th range; false when that range is empty.
__device__ inline bool cut_range(const Ranges& ranges, int r, WorkTile& work) {
  work.skipped = r * ranges.chunks;
  work.last = ranges.count == 1 || work.skipped + ranges.chunks >= work.chunks;
  if (ranges.count == 1) return true;
  if (r > 0 && work.skipped >= work.chunks) return false;
  work.range.begin += work.skipped * kChunk;
  work.range.end = min(work.range.end, work.range.begin + ranges.chunks * kChunk);
  work.first_chunk += work.skipped;
  work.chunks = min(work.chunks - work.skipped, ranges.chunks);
  return true;
}

// Finds the work of a block that has `rows` state rows. False when there is nothing to scan; the outputs of a sequence without a legal slot
// are then set to 0.
__device__ inline bool find_work(const Prefill& p, int rows, StateSlots& slots, WorkTile& work) {
  const auto high = static_cast<uint32_t>(rows);
  const uint32_t tiles = (static_cast<uint32_t>(p.V) + high - 1) / high, heads = static_cast<uint32_t>(p.Hv), block = blockIdx.x;
  work.first_v = static_cast<int>(block % tiles) * rows;
  work.hv = block / tiles % heads;
  const uint32_t ranges = static_cast<uint32_t>(p.ranges.end - p.ranges.begin);
  const int range = p.ranges.begin + static_cast<int>(block / tiles / heads % ranges);
  work.n = block / tiles / heads / ranges;
  work.hk = key_head(work.hv, p.Hv, p.Hk, p.head_map);
  work.range = tokens_of(p.sequences, work.n, p.T, p.max_tokens);
  work.first_chunk = first_chunk(p.map, work.n);
  if (!work.range.legal || work.first_chunk < 0) return false;
  work.chunks = (work.range.length() + kChunk - 1) >> 6;
  slots = state_slots(p.states, work.n);
  if (!cut_range(p.ranges, range, work)) return false;
  const int64_t head = work.n * p.Hv + work.hv;
  work.start = range == 0 ? nullptr : p.ranges.start_state(head, range, p.V, p.K);
  work.next = range == 0 && !work.last ? p.ranges.start_state(head, 1, p.V, p.K) : nullptr;
  if (!slots.inert) return true;
  const int columns = min(rows, static_cast<int>(p.V) - work.first_v);
  const StridedView& o = p.o;
  for (int64_t t = work.range.begin; t < work.range.end; ++t)
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
      store(o.data, o.dtype, t * o.strides[0] + work.hv * o.strides[1] + work.first_v + c, 0.0f);
  return false;
}

template <int VT>
__device__ bool find_work(const Prefill& p, StateSlots& slots, WorkTile& work) {
  return find_work(p, VT, slots, work);
}

// Loads rows of a chunk with cp.async, by `Threads` threads: `columns` elements from element `first` of a head, in pieces of 16 bytes. Rows
// beyond the sequence and elements beyond the columns are 0. offset(row, piece) is where a piece goes.
template <int Pieces, int Threads, class Offset>
__device__ void load_chunk_rows(const StridedView& t, const WorkTile& work, int64_t index, int64_t head, int first, int columns,
                                int thread, uint32_t stage, Offset&& offset) {
  const int64_t begin = work.range.begin + index * kChunk;
  const int length = static_cast<int>(min(int64_t{kChunk}, work.range.end - begin));
  static_assert(Threads % Pieces == 0);
  constexpr int kStep = Threads / Pieces;
  const int piece = thread % Pieces;
  const bool inside = piece * 8 < columns;
  const uint16_t* from =
      static_cast<const uint16_t*>(t.data) + begin * t.strides[0] + head * t.strides[1] + first + (inside ? piece * 8 : 0);
  const int64_t step = kStep * t.strides[0];
  int row = thread / Pieces;
  from += row * t.strides[0];
#pragma unroll 4
  for (; row < kChunk; row += kStep, from += step) {
    const bool there = inside && row < length;
    cp_async(stage + offset(row, piece), there ? from : static_cast<const uint16_t*>(t.data), there);
  }
}

// Loads k and q of a chunk.
template <int KP, int VT, int Threads>
__device__ void load_chunk_keys(const Prefill& p, const WorkTile& work, int64_t index, int thread, uint32_t stage) {
  using S = ScanStage<KP, VT>;
  load_chunk_rows<KP / 8, Threads>(p.k, work, index, work.hk, 0, static_cast<int>(p.K), thread, stage,
                                   [](int row, int piece) { return S::kK + S::key(row, piece); });
  load_chunk_rows<KP / 8, Threads>(p.q, work, index, work.hk, 0, static_cast<int>(p.K), thread, stage,
                                   [](int row, int piece) { return S::kQ + S::key(row, piece); });
}

// Loads v of a chunk.
template <int KP, int VT, int Threads>
__device__ void load_chunk_values(const Prefill& p, const WorkTile& work, int64_t index, int thread, uint32_t stage) {
  using S = ScanStage<KP, VT>;
  load_chunk_rows<VT / 8, Threads>(p.v, work, index, work.hv, work.first_v, static_cast<int>(p.V) - work.first_v, thread, stage,
                                   [](int row, int piece) { return S::kV + S::value(row, piece); });
}

template <int KP>
__device__ const char* prepared_of(const Prefill& p, const WorkTile& work, int64_t index) {
  return p.prepared + ((work.first_chunk + index) * p.Hv + work.hv) * PreparedChunk<KP>::kBytes;
}

// Visits the accumulators of 16 rows of a state: visit(offset of the element in its matrix, value).
template <int KP, class Visit>
__device__ void for_each_element(float (&state)[KP / 8][4], StateLayout layout, int first_row, int lane, int K, int V,
                                 Visit&& visit) {
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + lane / 4 + e / 2 * 8, column = nt * 8 + lane % 4 * 2 + e % 2;
      if (row < V && column < K)
        visit(layout == StateLayout::vk ? int64_t{row} * K + column : int64_t{column} * V + row, state[nt][e]);
    }
}

// The same for dense rows of K = KP elements, by pairs of neighbours: visit(offset of the pair, first value, second value).
template <int KP, class Visit>
__device__ void for_each_pair(float (&state)[KP / 8][4], int first_row, int lane, Visit&& visit) {
  const int64_t first = int64_t{first_row + lane / 4} * KP + lane % 4 * 2;
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt) {
    visit(first + nt * 8, state[nt][0], state[nt][1]);
    visit(first + 8 * KP + nt * 8, state[nt][2], state[nt][3]);
  }
}

// Can 16 rows from element `base` of a pool of states or checkpoints be visited in pairs? The element by element path is slower.
template <int KP>
__device__ bool in_pairs(const StridedView& t, int64_t base, StateLayout layout, int first_row, int K, int rows) {
  return t.dtype == DType::f32 && layout == StateLayout::vk && K == KP && first_row + 16 <= rows &&
         (reinterpret_cast<uintptr_t>(static_cast<const float*>(t.data) + base) & 7) == 0;
}

template <int KP>
__device__ void load_state(const Prefill& p, const WorkTile& work, int64_t slot, int first_row, int lane,
                           float (&state)[KP / 8][4]) {
  const StridedView& in = p.states.in;
  const int64_t base = slot * in.strides[0] + work.hv * in.strides[1];
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V);
  if (in_pairs<KP>(in, base, p.states.layout, first_row, K, V)) {
    const float* from = static_cast<const float*>(in.data) + base;
    for_each_pair<KP>(state, first_row, lane, [&](int64_t offset, float& left, float& right) {
      const float2 both = *reinterpret_cast<const float2*>(from + offset);
      left = both.x;
      right = both.y;
    });
    return;
  }
  for_each_element<KP>(state, p.states.layout, first_row, lane, K, V,
                       [&](int64_t offset, float& x) { x = load(in, base + offset); });
}

template <int KP>
__device__ void store_state(const Prefill& p, const StridedView& out, int64_t base, int first_row, int lane,
                            float (&state)[KP / 8][4]) {
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V);
  if (in_pairs<KP>(out, base, p.states.layout, first_row, K, V)) {
    float* to = static_cast<float*>(out.data) + base;
    for_each_pair<KP>(state, first_row, lane, [&](int64_t offset, float left, float right) {
      *reinterpret_cast<float2*>(to + offset) = float2{left, right};
    });
    return;
  }
  for_each_element<KP>(state, p.states.layout, first_row, lane, K, V,
                       [&](int64_t offset, float& x) { store(out.data, out.dtype, base + offset, x); });
}

// Load and store 16 rows of a dense f32 matrix [rows, K] in scratch.
template <int KP>
__device__ void load_rows_of(const float* matrix, int first_row, int lane, int K, int rows, float (&state)[KP / 8][4]) {
  if (K == KP && first_row + 16 <= rows) {
    for_each_pair<KP>(state, first_row, lane, [&](int64_t offset, float& left, float& right) {
      const float2 both = *reinterpret_cast<const float2*>(matrix + offset);
      left = both.x;
      right = both.y;
    });
    return;
  }
  for_each_element<KP>(state, StateLayout::vk, first_row, lane, K, rows, [&](int64_t offset, float& x) { x = matrix[offset]; });
}

template <int KP>
__device__ void store_rows_to(float* matrix, int first_row, int lane, int K, int rows, float (&state)[KP / 8][4]) {
  if (K == KP && first_row + 16 <= rows) {
    for_each_pair<KP>(state, first_row, lane, [&](int64_t offset, float left, float right) {
      *reinterpret_cast<float2*>(matrix + offset) = float2{left, right};
    });
    return;
  }
  for_each_element<KP>(state, StateLayout::vk, first_row, lane, K, rows, [&](int64_t offset, float& x) { matrix[offset] = x; });
}

// Stores the state after chunk `index` where a checkpoint is due.
template <int KP>
__device__ void store_checkpoint(const Prefill& p, const WorkTile& work, int64_t index, int first_row, int lane,
                                 float (&state)[KP / 8][4]) {
  const int64_t done = (work.skipped + index + 1) * kChunk, every = p.checkpoint_every;
  if (every == 0 || (index + 1) * kChunk > work.range.length() || done % every != 0) return;
  const StridedView& out = p.checkpoints;
  store_state<KP>(p, out, work.n * out.strides[0] + (done / every - 1) * out.strides[1] + work.hv * out.strides[2], first_row, lane,
                  state);
}

// Rounds and transposes the outputs of a chunk. Accumulators hold 16 rows of V by tokens; the result of lane 4 g + t is token g of
// every eight, V rows 2t, 2t + 1 and 2t + 8, 2t + 9.
template <class Half>
__device__ void round_outputs(const float (&out)[8][4], uint32_t (&rounded)[8][2]) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    rounded[nt][0] = transpose(pack<Half>(out[nt][0], out[nt][1]));
    rounded[nt][1] = transpose(pack<Half>(out[nt][2], out[nt][3]));
  }
}

// Where the outputs of a chunk go.
struct OutputChunk {
  int64_t base;  // element of o
  int length;    // tokens
  __device__ OutputChunk(const Prefill& p, const WorkTile& work, int64_t index)
      : base((work.range.begin + index * kChunk) * p.o.strides[0] + work.hv * p.o.strides[1]),
        length(static_cast<int>(min(int64_t{kChunk}, work.range.length() - index * kChunk))) {}
};

__device__ inline void store_rounded(const Prefill& p, const WorkTile& work, int64_t index, const uint32_t (&rounded)[8][2],
                                     int first_row, int lane) {
  const StridedView& o = p.o;
  const OutputChunk chunk(p, work, index);
  const int g = lane / 4, row = first_row + lane % 4 * 2, V = static_cast<int>(p.V);
  uint16_t* to = static_cast<uint16_t*>(o.data) + chunk.base + g * o.strides[0] + row;
  const int64_t step = 8 * o.strides[0];
#pragma unroll
  for (int nt = 0; nt < 8; ++nt, to += step) {
    if (nt * 8 + g >= chunk.length) break;
    if (row < V) *reinterpret_cast<uint32_t*>(to) = rounded[nt][0];
    if (row + 8 < V) *reinterpret_cast<uint32_t*>(to + 8) = rounded[nt][1];
  }
}

// Stores outputs whose dtype is not the inputs', element by element.
__device__ inline void store_unrounded(const Prefill& p, const WorkTile& work, int64_t index, const float (&out)[8][4],
                                       int first_row, int lane) {
  const StridedView& o = p.o;
  const OutputChunk chunk(p, work, index);
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = nt * 8 + lane % 4 * 2 + e % 2, row = first_row + lane / 4 + e / 2 * 8;
      if (token < chunk.length && row < p.V) store(o.data, o.dtype, chunk.base + token * o.strides[0] + row, out[nt][e]);
    }
}

// Loads the factors of the tokens whose accumulator columns a lane holds.
template <int Tiles>
__device__ inline void load_factors(const float* factors, int lane, float2 (&out)[Tiles]) {
#pragma unroll
  for (int nt = 0; nt < Tiles; ++nt) out[nt] = *reinterpret_cast<const float2*>(factors + nt * 8 + lane % 4 * 2);
}

// A lane's operands of W besides the product S k: v transposed to the warp's 16 rows of V, and the factors a.
template <int Tokens = kChunk>
struct LaneOperands {
  uint32_t v[Tokens / 16][4];
  float2 a[Tokens / 8];

  template <int KP, int VT>
  __device__ void load(uint32_t stage, const float* factors, int warp, int lane) {
    using S = ScanStage<KP, VT>;
    const LdmatrixLane at(lane);
    load(stage + S::kV + S::value(at.row(), warp * 2 + at.piece()), S::value(16, 0), factors, lane);
  }
  // `first` is the lane's ldmatrix address of the first 16 tokens; the next 16 tokens lie `step` bytes further.
  __device__ void load(uint32_t first, uint32_t step, const float* factors, int lane) {
#pragma unroll
    for (int pair = 0; pair < Tokens / 16; ++pair) ldmatrix_trans(v[pair], first + pair * step);
    load_factors(factors, lane, a);
  }
};

// W = v - a (S k) of 16 rows, rounded, as the A operand of products over tokens. The first tiles of u are S k.
template <class Half, int Tokens, int Tiles>
__device__ void compute_corrections(const LaneOperands<Tokens>& operands, const float (&u)[Tiles][4], FragmentA (&w)[Tokens / 16]) {
  static_assert(Tiles >= Tokens / 8);
#pragma unroll
  for (int nt = 0; nt < Tokens / 8; ++nt) {
    const int pair = nt / 2, half = nt % 2;
    const float2 a = operands.a[nt];
    const float2 upper = unpack<Half>(operands.v[pair][2 * half]), lower = unpack<Half>(operands.v[pair][2 * half + 1]);
    w[pair].x[2 * half] = pack<Half>(fmaf(-a.x, u[nt][0], upper.x), fmaf(-a.y, u[nt][1], upper.y));
    w[pair].x[2 * half + 1] = pack<Half>(fmaf(-a.x, u[nt][2], lower.x), fmaf(-a.y, u[nt][3], lower.y));
  }
}

// Sets W of tokens beyond the first `count` to 0, even where it is NaN.
template <int Pairs>
__device__ inline void mask_tokens(FragmentA (&w)[Pairs], int count, int lane) {
#pragma unroll
  for (int pair = 0; pair < Pairs; ++pair)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = pair * 16 + i / 2 * 8 + lane % 4 * 2;
      w[pair].x[i] &= token + 1 < count ? 0xffffffffu : token < count ? 0xffffu : 0u;
    }
}

// o = c (S q), before R W is added.
__device__ inline void scale_outputs(const float2 (&c)[8], float (&out)[8][4]) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    out[nt][0] *= c[nt].x;
    out[nt][1] *= c[nt].y;
    out[nt][2] *= c[nt].x;
    out[nt][3] *= c[nt].y;
  }
}

}  // namespace weft::cuda
