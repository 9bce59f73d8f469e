// The gated delta rule for one token per sequence: memory moves every state once, and everything else hides behind it.
//
// A block takes some rows of one state and ends. All that it reads (rows, key, query, value, gates) is on its way before anything is
// looked at, so that a block waits for memory once; blocks that share a multiprocessor keep memory busy while one computes, and each asks
// for the rows of a later one, so that memory is as busy while blocks come and go. Lanes hold a row in pieces of 16 bytes. Arguments are
// packed tightly: a cold kernel waits for every line of them.
#include <type_traits>

#include "common/state_slots.h"
#include "cuda/common/divisor.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/recurrent.cuh"
#include "cuda/delta/row_lanes.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kGroups = kThreads / kLanes;  // groups of lanes that share a row

struct Indices {
  const void* data = nullptr;
  int64_t stride = 0;
  bool wide = false;

  __device__ int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }
};

// [T, heads, ..] of 16-bit or f32 elements.
struct Rows {
  void* data = nullptr;
  int64_t token = 0, head = 0;  // strides
  __device__ int64_t at(int64_t t, int64_t h) const { return t * token + h * head; }
};

enum class Decay : uint8_t { log, itself, raw };

struct TokenStep {
  Rows in, out;  // states: the first stride is that of slots
  Indices in_slots, out_slots, has_initial, cu_seqlens;
  int64_t in_count = 0, out_count = 0, T = 0;  // slots, tokens
  int64_t most = 0;                            // tokens of a sequence; of every one, when uniform
  Rows k, q, v, o, decay, strength;
  const float *a_log = nullptr, *dt_bias = nullptr;
  float scale = 1;
  Divisor row_blocks, Hv, Hk, group;  // group: value heads of a key head
  uint32_t V = 0;
  HeadMap head_map = HeadMap::grouped;
  DType key = DType::f32, output = DType::f32, decay_type = DType::f32, strength_type = DType::f32;
  Decay decay_kind = Decay::log;
  bool raw_strength = false, double_beta = false, l2_norm = false;
  bool indexed = false;  // cu_seqlens, slots or has_initial say where things are
  uint32_t ahead = 0;    // blocks: so far ahead of their reader are rows brought into the L2; 0: they are not
  Rows record_k, record_delta, record_g;
};

// A lane's channels of a row: pieces of Piece neighbours, kLanes * Piece apart.
template <int Piece>
__device__ int channel(int lane, int e) {
  return e / Piece * (kLanes * Piece) + lane * Piece + e % Piece;
}

// E elements of a key or query, as they lie in memory.
template <int E, int Piece, bool Wide>
struct RawKey {
  static constexpr int kWords = Wide ? E : E / 2, kEach = Wide ? Piece : Piece / 2;  // words in all, of a piece
  uint32_t words[kWords];

  // From the lane's first element on.
  __device__ void load(const void* data) {
    const uint32_t* from = static_cast<const uint32_t*>(data);
#pragma unroll
    for (int j = 0; j < E / Piece; ++j) {
      const int first = channel<Piece>(0, j * Piece) / (Wide ? 1 : 2);
      if constexpr (kEach == 2) {
        const uint2 x = *reinterpret_cast<const uint2*>(from + first);
        words[j * 2] = x.x, words[j * 2 + 1] = x.y;
      } else {
#pragma unroll
        for (int i = 0; i < kEach / 4; ++i) {
          const uint4 x = *reinterpret_cast<const uint4*>(from + first + i * 4);
          uint32_t* to = words + j * kEach + i * 4;
          to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
      }
    }
  }
  __device__ void convert(DType dtype, float (&out)[E]) const {
    if constexpr (Wide) {
#pragma unroll
      for (int e = 0; e < E; ++e) out[e] = __uint_as_float(words[e]);
    } else if (dtype == DType::bf16) {
#pragma unroll
      for (int e = 0; e < E; ++e) out[e] = __uint_as_float(e % 2 ? words[e / 2] & 0xffff0000u : words[e / 2] << 16);
    } else {
#pragma unroll
      for (int e = 0; e < E; ++e)
        out[e] = __half2float(__ushort_as_half(static_cast<unsigned short>(e % 2 ? words[e / 2] >> 16 : words[e / 2])));
    }
  }
};

__device__ uint32_t bits_at(const void* data, DType dtype) {
  return dtype == DType::f32 ? *static_cast<const uint32_t*>(data) : uint32_t{*static_cast<const uint16_t*>(data)};
}

// Copies of turn `turn` have come, later ones perhaps not.
template <int Turns>
__device__ void wait_for_turn(int turn) {
  static_assert(Turns <= 2);
  turn + 1 < Turns ? cp_async_wait<1>() : cp_async_wait<0>();
}

// Rows of a thread: Turns times R. They come through shared memory, so that bytes on their way cost no registers: in one turn by copies
// of which every thread waits for its own, so that threads need nothing of each other, and go back without staying in the cache; in
// several, on Hopper, both ways by the copy engine.
template <class State, int E, bool WideKeys, int R, int Turns>
__global__ void __launch_bounds__(kThreads, 5) recurrent_one_token_kernel(const __grid_constant__ TokenStep p) {
  constexpr int kPiece = 16 / sizeof(State), kPieces = E / kPiece, K = E * kLanes, kBlockRows = kGroups * R * Turns;
  static_assert(kBlockRows <= kThreads);
  using Piece = Words<State, kPiece>;
  using KeyBits = std::conditional_t<WideKeys, uint32_t, uint16_t>;  // of keys, queries and values
  extern __shared__ __align__(128) uint4 staged[];                   // the block's rows
#if WEFT_HAS_WGMMA
  constexpr bool kAlone = Turns == 1;
#else
  constexpr bool kAlone = true;
#endif
  __shared__ float values[kAlone ? 1 : kBlockRows], outputs[kAlone ? 1 : kBlockRows];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  unsigned sequence = blockIdx.x;
  const unsigned block = p.row_blocks.take(sequence), head = p.Hv.take(sequence);
  const int64_t n = sequence, hv = head;
  const int64_t hk = p.head_map == HeadMap::grouped ? p.group.quotient(head) : head - p.Hk.quotient(head) * p.Hk.by;
  const uint32_t first = block * kBlockRows;
  // Where everything is, for token t and slots in and out: computed before the wait, where the empty instruction keeps it, and again if
  // memory says otherwise.
  const State* states;
  State* to;
  const KeyBits *keys, *queries, *v;
  const char *decay_at, *strength_at;
  const auto locate = [&](int64_t t, int64_t in, int64_t out) {
    const int64_t own = kAlone ? int64_t{first + group} * K + lane * kPiece : int64_t{first} * K;  // the thread's first piece
    states = static_cast<const State*>(p.in.data) + p.in.at(in, hv) + own;
    to = static_cast<State*>(p.out.data) + p.out.at(out, hv) + int64_t{first + group} * K + lane * kPiece;
    keys = static_cast<const KeyBits*>(p.k.data) + p.k.at(t, hk) + lane * kPiece;
    queries = static_cast<const KeyBits*>(p.q.data) + p.q.at(t, hk) + lane * kPiece;
    v = static_cast<const KeyBits*>(p.v.data) + p.v.at(t, hv) + first + (kAlone ? group : threadIdx.x);
    decay_at = static_cast<const char*>(p.decay.data) + p.decay.at(t, hv) * (p.decay_type == DType::f32 ? 4 : 2);
    strength_at = static_cast<const char*>(p.strength.data) + p.strength.at(t, hv) * (p.strength_type == DType::f32 ? 4 : 2);
  };
  int64_t t = n * p.most, in = n, out = n;
  bool fresh = !p.in.data, any = p.most > 0, writes = n < p.out_count, inert = p.in.data && n >= p.in_count;
  locate(t, in, out);
  asm volatile("" : "+l"(states), "+l"(to), "+l"(keys), "+l"(queries), "+l"(v), "+l"(decay_at), "+l"(strength_at));
  const auto fetch_rows = [&](uint32_t rows, uint32_t of_head, int64_t slot) {  // those of a block
    const int64_t at = p.in.at(slot, of_head) + int64_t{rows} * kBlockRows * K;
    const uint32_t count = min(p.V - rows * kBlockRows, static_cast<uint32_t>(kBlockRows));
    if (slot >= 0 && slot < p.in_count) prefetch_l2(static_cast<const State*>(p.in.data) + at, count * K * sizeof(State));
  };
  unsigned later = blockIdx.x + p.ahead;
  const bool asks = threadIdx.x == 0 && p.in.data && p.ahead > 0, asks_later = asks && later < gridDim.x;
  const unsigned later_block = p.row_blocks.take(later), later_head = p.Hv.take(later);
  prefetch_arguments(p);
  if (!p.indexed) {
    if (asks && blockIdx.x < p.ahead) fetch_rows(block, head, n);
    if (asks_later) fetch_rows(later_block, later_head, later);
  }
  // Where blocks are large also what is read beside rows, unless cu_seqlens say which token that is: a kind by the first lane of each
  // of four groups.
  if (Turns > 1 && !p.cu_seqlens.data && lane == 0 && any) {
    if (group == 1) prefetch_l2_lines(keys, K * sizeof(KeyBits));
    if (group == 2) prefetch_l2_lines(queries, K * sizeof(KeyBits));
    if (group == 3) prefetch_l2_lines(v - (kAlone ? group : threadIdx.x), 1);
    if (group == 4) prefetch_l2_lines(decay_at, 1), prefetch_l2_lines(strength_at, 1);
  }
  pdl_wait();
  pdl_launch_dependents();

  int64_t later_slot = later;
  if (p.indexed) {  // all indices are read at once
    if (asks_later && p.in_slots.data) later_slot = p.in_slots.at(later);
    int64_t end = t + p.most;
    if (p.cu_seqlens.data) t = p.cu_seqlens.at(n), end = p.cu_seqlens.at(n + 1);
    if (p.in_slots.data) in = out = p.in_slots.at(n);
    if (p.out_slots.data) out = p.out_slots.at(n);
    if (p.has_initial.data) fresh = fresh || p.has_initial.at(n) == 0;
    if (t < 0 || end < t || end > p.T || end - t > p.most) return;
    inert = in < 0 || (p.in.data && in >= p.in_count);
    any = end > t;
    writes = out >= 0 && out < p.out_count;
    locate(t, in, out);
  }
  // A thread of the first kBlockRows moves one value in and one output out, where threads share them.
  const bool moves = threadIdx.x < kBlockRows && first + threadIdx.x < p.V;
  if (inert) {
    if (any && moves) store(p.o.data, p.output, p.o.at(t, hv) + first + threadIdx.x, 0.0f);
    return;
  }

  Piece raw[R][kPieces];
  [[maybe_unused]] constexpr int kTurnRows = kGroups * R;
  constexpr int kRowBytes = K * static_cast<int>(sizeof(State));
  // Piece j of a lane's row r of a turn: in pieces from its first, or from the first of the block.
  const auto step_to = [](int turn, int r, int j) { return (turn * R + r) * kGroups * (kRowBytes / 16) + j * kLanes; };
  const int staged_at = group * (kRowBytes / 16) + lane;
#if WEFT_HAS_WGMMA
  __shared__ uint64_t arrived[Turns];
  const auto turn_bytes = [&](int turn) {
    return static_cast<uint32_t>(max(0, min(static_cast<int>(p.V - first) - turn * kTurnRows, kTurnRows)) * kRowBytes);
  };
  if (!kAlone && threadIdx.x == 0 && !fresh) {
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) mbarrier_init(shared_address(&arrived[turn]), 1);
    fence_proxy_async();
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      mbarrier_arrive_expect_tx(shared_address(&arrived[turn]), turn_bytes(turn));
      if (turn_bytes(turn) > 0)
        tma_load_bulk(shared_address(staged + turn * kTurnRows * (kRowBytes / 16)), states + turn * kTurnRows * K, turn_bytes(turn),
                      shared_address(&arrived[turn]));
    }
  }
#endif
  if constexpr (kAlone)
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          const bool there = !fresh && first + group + (turn * R + r) * kGroups < p.V;
          const uint4* from = reinterpret_cast<const uint4*>(states) + step_to(turn, r, j);
          cp_async(shared_address(staged + staged_at + step_to(turn, r, j)), there ? from : p.k.data, there);
        }
      cp_async_commit();
    }
  if (p.indexed && asks_later) fetch_rows(later_block, later_head, later_slot);
  float k[E] = {}, q[E] = {}, decay = 1, beta = 0, read = 0;
  constexpr int kOwn = kAlone ? R * Turns : 1;
  KeyBits own[kOwn] = {};  // values of the thread's rows, or of row threadIdx.x
  const DType value_type = WideKeys ? DType::f32 : p.key;
  if (any) {
    RawKey<E, kPiece, WideKeys> raw_k, raw_q;
    raw_k.load(keys);
    raw_q.load(queries);
    const uint32_t decay_bits = bits_at(decay_at, p.decay_type), strength_bits = bits_at(strength_at, p.strength_type);
#pragma unroll
    for (int r = 0; r < kOwn; ++r)
      if (kAlone ? first + group + r * kGroups < p.V : moves) own[r] = v[r * kGroups];
    float a_log = 0, bias = 0;
    if (p.decay_kind == Decay::raw) a_log = p.a_log[hv], bias = p.dt_bias[hv];
    const float x = bits_to_float(decay_bits, p.decay_type), y = bits_to_float(strength_bits, p.strength_type);
    const float g = p.decay_kind == Decay::raw ? log_decay(x, a_log, bias) : p.decay_kind == Decay::itself ? logf(x) : x;
    decay = expf(g);
    beta = p.raw_strength ? (p.double_beta ? 2.0f : 1.0f) * sigmoid(y) : y;
    raw_k.convert(p.key, k);
    raw_q.convert(p.key, q);
    if (p.l2_norm) {
      const float factor = inverse_norm<E>(k);
#pragma unroll
      for (int e = 0; e < E; ++e) k[e] *= factor;
    }
    read = p.scale * (p.l2_norm ? inverse_norm<E>(q) : 1.0f);
    // The key once per key head, the decay once per value head.
    if (p.record_k.data && block == 0 && group == 0) {
      if (hv == (p.head_map == HeadMap::grouped ? hk * p.group.by : hk))
#pragma unroll
        for (int e = 0; e < E; ++e) static_cast<float*>(p.record_k.data)[p.record_k.at(t, hk) + channel<kPiece>(lane, e)] = k[e];
      if (lane == 0) static_cast<float*>(p.record_g.data)[p.record_g.at(t, hv)] = g;
    }
  }
  if constexpr (!kAlone) {
    if (threadIdx.x < kBlockRows) values[threadIdx.x] = bits_to_float(own[0], value_type);
    __syncthreads();
  }

  // The operations of walk() in recurrent.cu, in their order for every row, since replay repeats them; rows side by side, since each
  // is a chain. An empty sequence has decay 1, beta 0 and zeros for key and query, and hands its state on as it is.
  const auto take_turn = [&](const int turn) {
    float state[R][E], delta[R], sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) delta[r] = sum[r] = 0.0f;
#pragma unroll
    for (int e = 0; e < E; ++e)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        state[r][e] = __fmul_rn(decay, raw[r][e / kPiece].at(e % kPiece));
        delta[r] = __fmaf_rn(state[r][e], k[e], delta[r]);
      }
    sum_rows(delta);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = turn * R + r;
      const float value = kAlone ? bits_to_float(own[kAlone ? row : 0], value_type) : values[kAlone ? 0 : group + row * kGroups];
      delta[r] = __fmul_rn(beta, __fadd_rn(value, -delta[r]));
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float piece[kPiece];
#pragma unroll
        for (int c = 0; c < kPiece; ++c) {
          const int e = j * kPiece + c;
          piece[c] = __fmaf_rn(delta[r], k[e], state[r][e]);
          sum[r] = fmaf(piece[c], q[e], sum[r]);
        }
        const Piece changed = Piece::of(piece);
        if constexpr (!kAlone)
          staged[staged_at + step_to(turn, r, j)] = uint4{changed.word[0], changed.word[1], changed.word[2], changed.word[3]};
        else if (writes && first + group + (turn * R + r) * kGroups < p.V)
          changed.store_past(to + step_to(turn, r, j) * kPiece);
      }
    sum_rows(sum);
    if (lane != 0) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const uint32_t row = group + (turn * R + r) * kGroups;
      if constexpr (kAlone) {
        if (any && first + row < p.V) store(p.o.data, p.output, p.o.at(t, hv) + first + row, sum[r] * read);
      } else {
        outputs[row] = sum[r] * read;
      }
      if (any && p.record_delta.data && first + row < p.V)
        static_cast<float*>(p.record_delta.data)[p.record_delta.at(t, hv) + first + row] = delta[r];
    }
  };
#pragma unroll
  for (int turn = 0; turn < Turns; ++turn) {
#if WEFT_HAS_WGMMA
    if (!kAlone && !fresh) mbarrier_wait(shared_address(&arrived[turn]), 0);
#endif
    if constexpr (kAlone) wait_for_turn<Turns>(turn);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const uint4 x = !kAlone && fresh ? uint4{0, 0, 0, 0} : staged[staged_at + step_to(turn, r, j)];
        raw[r][j] = {{x.x, x.y, x.z, x.w}};
      }
    take_turn(turn);
#if WEFT_HAS_WGMMA
    if constexpr (!kAlone) {
      fence_proxy_async();
      __syncthreads();
      if (threadIdx.x == 0 && writes && turn_bytes(turn) > 0)
        tma_store_bulk(to + turn * kTurnRows * K, shared_address(staged + turn * kTurnRows * (kRowBytes / 16)), turn_bytes(turn));
    }
#endif
  }
  if constexpr (!kAlone) {
    __syncthreads();
    if (any && moves) store(p.o.data, p.output, p.o.at(t, hv) + first + threadIdx.x, outputs[threadIdx.x]);
  }
#if WEFT_HAS_WGMMA
  if (!kAlone && threadIdx.x == 0) tma_store_wait_read();
#endif
}

Indices indices_of(const Tensor& t) { return t.present() ? Indices{t.data, t.strides[0], t.dtype == DType::i64} : Indices{}; }
Rows rows_of(const Tensor& t) { return t.present() ? Rows{t.data, t.strides[0], t.strides[1]} : Rows{}; }

TokenStep packed(const RecurrentCall& call) {
  const DeltaGateInputs& gates = call.gates;
  TokenStep p;
  p.in = rows_of(call.states.in);
  p.out = rows_of(call.states.out);
  p.in_slots = indices_of(call.states.in_slots);
  p.out_slots = indices_of(call.states.out_slots);
  p.has_initial = indices_of(call.states.has_initial);
  p.cu_seqlens = indices_of(call.sequences.cu_seqlens);
  p.indexed = p.in_slots.data || p.out_slots.data || p.has_initial.data || p.cu_seqlens.data;
  p.in_count = call.states.in.present() ? call.states.in.size(0) : 0;
  p.out_count = call.states.out.present() ? call.states.out.size(0) : 0;
  p.T = call.T;
  p.most = call.sequences.cu_seqlens.present() ? call.sequences.max_tokens : call.each;
  p.k = rows_of(call.k);
  p.q = rows_of(call.q);
  p.v = rows_of(call.v);
  p.o = rows_of(call.o);
  const Tensor& decay = gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a;
  const Tensor& strength = gates.beta.present() ? gates.beta : gates.b;
  p.decay = rows_of(decay);
  p.strength = rows_of(strength);
  p.a_log = static_cast<const float*>(gates.a_log.data);
  p.dt_bias = static_cast<const float*>(gates.dt_bias.data);
  p.scale = call.scale;
  p.Hv = Divisor(call.Hv);
  p.Hk = Divisor(call.Hk);
  p.group = Divisor(call.Hv / call.Hk);
  p.V = static_cast<uint32_t>(call.V);
  p.head_map = call.head_map;
  p.key = call.k.dtype;
  p.output = call.o.dtype;
  p.decay_type = decay.dtype;
  p.strength_type = strength.dtype;
  p.decay_kind = gates.g.present() ? Decay::log : gates.alpha.present() ? Decay::itself : Decay::raw;
  p.raw_strength = !gates.beta.present();
  p.double_beta = gates.double_beta;
  p.l2_norm = call.l2_norm;
  p.record_k = rows_of(call.record.k);
  p.record_delta = rows_of(call.record.delta);
  p.record_g = rows_of(call.record.g);
  return p;
}

// Kernels by dtype of the states. States of 16 bits bring half the bytes for the same work on keys and gates, so that their blocks are
// larger where there are enough of them.
template <class State, int E, bool WideKeys>
void launch_typed(const char* op, const Stream& stream, const RecurrentCall& call, TokenStep p) {
  const int multiprocessors = facts_of(stream).multiprocessors;
  // Rows ahead pay where all blocks start at once, which then ask for their own before they wait, and where blocks come and go many times.
  const auto run = [&](auto kernel, int rows, int ahead) {
    const int64_t blocks = ceil_div(call.V, rows) * call.Hv * call.N;
    p.row_blocks = Divisor(ceil_div(call.V, rows));
    p.ahead = static_cast<uint32_t>(blocks <= 4 * multiprocessors ? blocks : blocks >= 24 * multiprocessors ? ahead : 0);
    launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(rows * kLanes) * E * sizeof(State), kernel, p);
  };
  if constexpr (sizeof(State) == 2)
    if (ceil_div(call.V, kGroups) * call.Hv * call.N > int64_t{4} * multiprocessors)
      return run(recurrent_one_token_kernel<State, E, WideKeys, 2, 2>, kGroups * 4, multiprocessors / 2);
  run(recurrent_one_token_kernel<State, E, WideKeys, 1, 1>, kGroups, 3 * multiprocessors);
}

template <class State>
void launch_state(const char* op, const Stream& stream, const RecurrentCall& call) {
  const TokenStep p = packed(call);
  const bool wide = call.k.dtype == DType::f32;
  if (call.K == 64)
    return wide ? launch_typed<State, 8, true>(op, stream, call, p) : launch_typed<State, 8, false>(op, stream, call, p);
  wide ? launch_typed<State, 16, true>(op, stream, call, p) : launch_typed<State, 16, false>(op, stream, call, p);
}

const Tensor& pool_of(const RecurrentCall& call) { return call.states.in.present() ? call.states.in : call.states.out; }

}  // namespace

bool takes_one_token(const RecurrentCall& call) {
  const Tensor& pool = pool_of(call);
  const int64_t piece = pool.present() ? 16 / dtype_bytes(pool.dtype) : 4;
  return call.each <= 1 && call.q.present() && packs_of(call.k, piece) && packs_of(call.q, piece) &&
         packs_of(call.states.in, piece) && packs_of(call.states.out, piece);
}

void launch_recurrent_one_token(const char* op, const Stream& stream, const RecurrentCall& call) {
  const Tensor& pool = pool_of(call);
  if (!pool.present() || pool.dtype == DType::f32) return launch_state<float>(op, stream, call);
  pool.dtype == DType::bf16 ? launch_state<__nv_bfloat16>(op, stream, call) : launch_state<__half>(op, stream, call);
}

}  // namespace weft::cuda
