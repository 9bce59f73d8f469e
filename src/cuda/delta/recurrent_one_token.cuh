// The gated delta rule for at most one token per sequence. Its time is the memory traffic of the states, each read and written once.
//
// A block updates some rows of one state and exits. It issues all of its loads (rows, key, query, value, gates) before it uses any, so
// that it waits for memory once. Other blocks of the multiprocessor keep memory busy while one computes, and each block prefetches the
// rows of a later block into the L2, which keeps memory busy while blocks exit and start. A lane holds a row in vectors of 16 bytes.
// The parameters are packed tightly, because a cold kernel waits for every cache line of them.
#pragma once

#include <type_traits>

#include "cuda/common/divisor.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/views.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/row_lanes.cuh"

namespace weft::cuda::one_token {

inline constexpr int kThreads = 128, kGroups = kThreads / kLanes;  // groups of lanes that share a row

// [T, heads, ..] of 16-bit or f32 elements.
struct HeadRows {
  void* data = nullptr;
  int64_t token = 0, head = 0;  // strides
  __device__ int64_t at(int64_t t, int64_t h) const { return t * token + h * head; }
};

enum class DecayForm : uint8_t { log, factor, raw };  // g, alpha, or a with a_log and dt_bias

struct OneTokenParams {
  HeadRows in, out;  // states: the first stride is that of slots
  IndexView in_slots, out_slots, has_initial, cu_seqlens;
  int64_t in_count = 0, out_count = 0, T = 0;  // slots, tokens
  int64_t max_tokens = 0;                      // bound of a sequence's tokens; of every sequence when uniform
  HeadRows k, q, v, o, decay, strength;
  const float *a_log = nullptr, *dt_bias = nullptr;
  float scale = 1;
  Divisor row_blocks, Hv, Hk, group;  // group: value heads of a key head
  uint32_t V = 0;
  HeadMap head_map = HeadMap::grouped;
  DType key = DType::f32, output = DType::f32, decay_type = DType::f32, strength_type = DType::f32;
  DecayForm decay_form = DecayForm::log;
  bool raw_strength = false, double_beta = false, l2_norm = false;
  bool indexed = false;            // cu_seqlens, slots or has_initial must be read before the addresses are known
  uint32_t prefetch_distance = 0;  // a block prefetches the rows of the block this far ahead into the L2; 0: none
  HeadRows record_k, record_delta, record_g;
};

// What the compiler knows of a kernel. A thread updates Stages times R rows of E channels; the rows of a stage arrive together.
template <class StateType, int Channels, bool WideKeys, int RowsPerStage, int StageCount>
struct Shape {
  using State = StateType;
  using KeyBits = std::conditional_t<WideKeys, uint32_t, uint16_t>;  // of keys, queries and values
  static constexpr bool kWideKeys = WideKeys;
  static constexpr int E = Channels, R = RowsPerStage, Stages = StageCount;
  static constexpr int kVectorSize = 16 / sizeof(State), kVectors = E / kVectorSize, K = E * kLanes;
  static constexpr int kStageRows = kGroups * R, kBlockRows = kStageRows * Stages;
  static constexpr int kRowBytes = K * static_cast<int>(sizeof(State)), kRowVectors = kRowBytes / 16;
  static_assert(kBlockRows <= kThreads);
  using Vector = Words<State, kVectorSize>;
  // Rows pass through shared memory, so that bytes in flight cost no registers. One stage: every thread copies its own rows with
  // cp.async and waits for them alone, so that threads never synchronise, and stores are evict-first. Several stages, on Hopper:
  // TMA loads and stores.
#if WEFT_HAS_WGMMA
  static constexpr bool kTma = Stages > 1;
#else
  static constexpr bool kTma = false;
#endif
  // Elements of v that a thread loads: with TMA that of row threadIdx.x, else those of its own rows.
  static constexpr int kValues = kTma ? 1 : R * Stages;

  // Vector j of a lane's row r of a stage, counted in vectors from the lane's first.
  __device__ static constexpr int vector_at(int stage, int r, int j) {
    return (stage * R + r) * kGroups * kRowVectors + j * kLanes;
  }
};

// A block's rows of one state and a thread's share of them.
struct BlockRows {
  int lane, group;
  unsigned row_block, head;
  uint32_t first;  // first row of the block
  int64_t n, hv, hk;
};

template <class S>
__device__ __forceinline__ BlockRows block_rows(const OneTokenParams& p) {
  BlockRows at;
  at.lane = threadIdx.x % kLanes;
  at.group = threadIdx.x / kLanes;
  unsigned sequence = blockIdx.x;
  at.row_block = p.row_blocks.take(sequence);
  at.head = p.Hv.take(sequence);
  at.n = sequence;
  at.hv = at.head;
  at.hk = p.head_map == HeadMap::grouped ? p.group.quotient(at.head) : at.head - p.Hk.quotient(at.head) * p.Hk.by;
  at.first = at.row_block * S::kBlockRows;
  return at;
}

// The token and the slots of a block's sequence.
struct Sequence {
  int64_t t, in, out;
  bool zeros;      // the state starts from zeros
  bool has_token;  // false: the sequence is empty
  bool writes;     // the state is stored
  bool inert;      // the output is 0 and no state is touched

  // As if nothing was indexed.
  __device__ __forceinline__ Sequence(const OneTokenParams& p, int64_t n)
      : t(n * p.max_tokens),
        in(n),
        out(n),
        zeros(!p.in.data),
        has_token(p.max_tokens > 0),
        writes(n < p.out_count),
        inert(p.in.data && n >= p.in_count) {}

  // Reads the indices, all at once. False: the sequence has illegal bounds.
  __device__ __forceinline__ bool read(const OneTokenParams& p, int64_t n) {
    int64_t end = t + p.max_tokens;
    if (p.cu_seqlens.data) t = p.cu_seqlens.at(n), end = p.cu_seqlens.at(n + 1);
    if (p.in_slots.data) in = out = p.in_slots.at(n);
    if (p.out_slots.data) out = p.out_slots.at(n);
    if (p.has_initial.data && p.has_initial.at(n) == 0) zeros = true;
    if (t < 0 || end < t || end > p.T || end - t > p.max_tokens) return false;
    inert = in < 0 || (p.in.data && in >= p.in_count);
    has_token = end > t;
    writes = out >= 0 && out < p.out_count;
    return true;
  }
};

// Addresses of what a thread reads and writes.
template <class S>
struct Addresses {
  const typename S::State* states;
  typename S::State* to;
  const typename S::KeyBits *k, *q, *v;
  const char *decay, *strength;

  __device__ __forceinline__ void set(const OneTokenParams& p, const BlockRows& at, const Sequence& sequence) {
    using State = typename S::State;
    using KeyBits = typename S::KeyBits;
    const int64_t t = sequence.t,
                  own = int64_t{at.first + at.group} * S::K + at.lane * S::kVectorSize;  // the thread's first vector
    states = static_cast<const State*>(p.in.data) + p.in.at(sequence.in, at.hv) + (S::kTma ? int64_t{at.first} * S::K : own);
    to = static_cast<State*>(p.out.data) + p.out.at(sequence.out, at.hv) + own;
    k = static_cast<const KeyBits*>(p.k.data) + p.k.at(t, at.hk) + at.lane * S::kVectorSize;
    q = static_cast<const KeyBits*>(p.q.data) + p.q.at(t, at.hk) + at.lane * S::kVectorSize;
    v = static_cast<const KeyBits*>(p.v.data) + p.v.at(t, at.hv) + at.first + (S::kTma ? threadIdx.x : at.group);
    decay = static_cast<const char*>(p.decay.data) + p.decay.at(t, at.hv) * (p.decay_type == DType::f32 ? 4 : 2);
    strength = static_cast<const char*>(p.strength.data) + p.strength.at(t, at.hv) * (p.strength_type == DType::f32 ? 4 : 2);
  }
  // Keeps the computation of the addresses before this point.
  __device__ __forceinline__ void pin() {
    asm volatile("" : "+l"(states), "+l"(to), "+l"(k), "+l"(q), "+l"(v), "+l"(decay), "+l"(strength));
  }
};

// Brings the rows of a row block of one state into the L2.
template <class S>
__device__ __forceinline__ void prefetch_rows(const OneTokenParams& p, uint32_t row_block, uint32_t head, int64_t slot) {
  const int64_t at = p.in.at(slot, head) + int64_t{row_block} * S::kBlockRows * S::K;
  const uint32_t count = min(p.V - row_block * S::kBlockRows, static_cast<uint32_t>(S::kBlockRows));
  if (slot >= 0 && slot < p.in_count)
    prefetch_l2(static_cast<const typename S::State*>(p.in.data) + at, count * S::K * sizeof(typename S::State));
}

// Prefetches the token's inputs before pdl_wait(), where blocks are large and cu_seqlens does not say which token that is. One lane
// prefetches each kind of input.
template <class S>
__device__ __forceinline__ void prefetch_token(const OneTokenParams& p, const BlockRows& at, const Addresses<S>& from,
                                               bool has_token) {
  if (S::Stages > 1 && !p.cu_seqlens.data && at.lane == 0 && has_token) {
    if (at.group == 1) prefetch_l2_lines(from.k, S::K * sizeof(typename S::KeyBits));
    if (at.group == 2) prefetch_l2_lines(from.q, S::K * sizeof(typename S::KeyBits));
    if (at.group == 3) prefetch_l2_lines(from.v - (S::kTma ? threadIdx.x : at.group), 1);
    if (at.group == 4) prefetch_l2_lines(from.decay, 1), prefetch_l2_lines(from.strength, 1);
  }
}

// A lane's channels of a row: vectors of VectorSize neighbours, kLanes * VectorSize apart.
template <int VectorSize>
__device__ int channel(int lane, int e) {
  return e / VectorSize * (kLanes * VectorSize) + lane * VectorSize + e % VectorSize;
}

// E raw elements of a key or query.
template <int E, int VectorSize, bool Wide>
struct RawKey {
  static constexpr int kWords = Wide ? E : E / 2, kEach = Wide ? VectorSize : VectorSize / 2;  // words in all, of a vector
  uint32_t words[kWords];

  // From the lane's first element on.
  __device__ void load(const void* data) {
    const uint32_t* from = static_cast<const uint32_t*>(data);
#pragma unroll
    for (int j = 0; j < E / VectorSize; ++j) {
      const int first = channel<VectorSize>(0, j * VectorSize) / (Wide ? 1 : 2);
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

__device__ inline uint32_t bits_at(const void* data, DType dtype) {
  return dtype == DType::f32 ? *static_cast<const uint32_t*>(data) : uint32_t{*static_cast<const uint16_t*>(data)};
}

// Shared memory of a block. Only TMA kernels use the last three.
struct SharedRows {
  uint4* staged;       // the block's rows
  float *v, *o;        // [kBlockRows] values and outputs
  uint64_t* barriers;  // [Stages] mbarriers

  template <class S>
  __device__ uint4* own(const BlockRows& at) const {  // the thread's first vector
    return staged + at.group * S::kRowVectors + at.lane;
  }
};

#if WEFT_HAS_WGMMA
// Bytes of the rows of a stage.
template <class S>
__device__ __forceinline__ uint32_t stage_bytes(const OneTokenParams& p, const BlockRows& at, int stage) {
  return static_cast<uint32_t>(max(0, min(static_cast<int>(p.V - at.first) - stage * S::kStageRows, S::kStageRows)) * S::kRowBytes);
}

template <class S>
__device__ __forceinline__ void load_rows_tma(const OneTokenParams& p, const BlockRows& at, const typename S::State* states,
                                              const SharedRows& shared) {
#pragma unroll
  for (int stage = 0; stage < S::Stages; ++stage) mbarrier_init(shared_address(&shared.barriers[stage]), 1);
  fence_proxy_async();
#pragma unroll
  for (int stage = 0; stage < S::Stages; ++stage) {
    mbarrier_arrive_expect_tx(shared_address(&shared.barriers[stage]), stage_bytes<S>(p, at, stage));
    if (stage_bytes<S>(p, at, stage) > 0)
      tma_load_bulk(shared_address(shared.staged + stage * S::kStageRows * S::kRowVectors), states + stage * S::kStageRows * S::K,
                    stage_bytes<S>(p, at, stage), shared_address(&shared.barriers[stage]));
  }
}
#endif

// Issues the loads of the block's rows.
template <class S>
__device__ __forceinline__ void load_rows(const OneTokenParams& p, const BlockRows& at, const typename S::State* states, bool zeros,
                                          const SharedRows& shared) {
#if WEFT_HAS_WGMMA
  if (S::kTma && threadIdx.x == 0 && !zeros) load_rows_tma<S>(p, at, states, shared);
#endif
  if constexpr (!S::kTma)
#pragma unroll
    for (int stage = 0; stage < S::Stages; ++stage) {
#pragma unroll
      for (int r = 0; r < S::R; ++r)
#pragma unroll
        for (int j = 0; j < S::kVectors; ++j) {
          const bool there = !zeros && at.first + at.group + (stage * S::R + r) * kGroups < p.V;
          const uint4* from = reinterpret_cast<const uint4*>(states) + S::vector_at(stage, r, j);
          cp_async(shared_address(shared.own<S>(at) + S::vector_at(stage, r, j)), there ? from : p.k.data, there);
        }
      cp_async_commit();
    }
}

// Waits for the rows of a stage.
template <class S>
__device__ __forceinline__ void wait_for_rows([[maybe_unused]] bool zeros, [[maybe_unused]] const SharedRows& shared, int stage) {
#if WEFT_HAS_WGMMA
  if (S::kTma && !zeros) mbarrier_wait(shared_address(&shared.barriers[stage]), 0);
#endif
  if constexpr (!S::kTma) {
    static_assert(S::Stages <= 2);
    stage + 1 < S::Stages ? cp_async_wait<1>() : cp_async_wait<0>();
  }
}

// What a thread keeps of its token. As initialised, the token leaves the state unchanged.
template <class S>
struct Token {
  float k[S::E] = {}, q[S::E] = {}, decay = 1, beta = 0;
  float q_factor = 0;  // of S q: scale and norm
  typename S::KeyBits v[S::kValues] = {};
};

// Does this thread move a value in and an output out for all threads of its row? Only TMA kernels share them.
template <class S>
__device__ __forceinline__ bool moves_row(const OneTokenParams& p, const BlockRows& at) {
  return threadIdx.x < S::kBlockRows && at.first + threadIdx.x < p.V;
}

template <class S>
__device__ __forceinline__ void load_token(const OneTokenParams& p, const BlockRows& at, int64_t t, const Addresses<S>& from,
                                           Token<S>& token) {
  RawKey<S::E, S::kVectorSize, S::kWideKeys> raw_k, raw_q;
  raw_k.load(from.k);
  raw_q.load(from.q);
  const uint32_t decay_bits = bits_at(from.decay, p.decay_type), strength_bits = bits_at(from.strength, p.strength_type);
#pragma unroll
  for (int r = 0; r < S::kValues; ++r)
    if (S::kTma ? moves_row<S>(p, at) : at.first + at.group + r * kGroups < p.V) token.v[r] = from.v[r * kGroups];
  float a_log = 0, bias = 0;
  if (p.decay_form == DecayForm::raw) a_log = p.a_log[at.hv], bias = p.dt_bias[at.hv];
  const float x = bits_to_float(decay_bits, p.decay_type), y = bits_to_float(strength_bits, p.strength_type);
  const float g = p.decay_form == DecayForm::raw ? log_decay(x, a_log, bias) : p.decay_form == DecayForm::factor ? logf(x) : x;
  token.decay = expf(g);
  token.beta = p.raw_strength ? (p.double_beta ? 2.0f : 1.0f) * sigmoid(y) : y;
  raw_k.convert(p.key, token.k);
  raw_q.convert(p.key, token.q);
  if (p.l2_norm) {
    const float factor = inverse_norm<S::E>(token.k);
#pragma unroll
    for (int e = 0; e < S::E; ++e) token.k[e] *= factor;
  }
  token.q_factor = p.scale * (p.l2_norm ? inverse_norm<S::E>(token.q) : 1.0f);
  // The key is recorded once per key head, the decay once per value head.
  if (p.record_k.data && at.row_block == 0 && at.group == 0) {
    if (at.hv == (p.head_map == HeadMap::grouped ? at.hk * p.group.by : at.hk))
#pragma unroll
      for (int e = 0; e < S::E; ++e)
        static_cast<float*>(p.record_k.data)[p.record_k.at(t, at.hk) + channel<S::kVectorSize>(at.lane, e)] = token.k[e];
    if (at.lane == 0) static_cast<float*>(p.record_g.data)[p.record_g.at(t, at.hv)] = g;
  }
}

// Updates the rows of one stage, from raw elements to stores and outputs. Every row takes the operations of update_rows() in recurrent.cu
// in the same order, because replay repeats them; rows are interleaved, because each is a dependent chain.
template <class S>
__device__ __forceinline__ void update_rows(const OneTokenParams& p, const BlockRows& at, const Sequence& sequence,
                                            const Token<S>& token, typename S::State* to, const SharedRows& shared,
                                            const typename S::Vector (&raw)[S::R][S::kVectors], int stage) {
  constexpr int E = S::E, R = S::R, kVectorSize = S::kVectorSize;
  [[maybe_unused]] const DType value_type = S::kWideKeys ? DType::f32 : p.key;
  float state[R][E], delta[R], sum[R];
#pragma unroll
  for (int r = 0; r < R; ++r) delta[r] = sum[r] = 0.0f;
#pragma unroll
  for (int e = 0; e < E; ++e)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      state[r][e] = __fmul_rn(token.decay, raw[r][e / kVectorSize].at(e % kVectorSize));
      delta[r] = __fmaf_rn(state[r][e], token.k[e], delta[r]);
    }
  sum_rows(delta);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = stage * R + r;
    const float value =
        S::kTma ? shared.v[S::kTma ? at.group + row * kGroups : 0] : bits_to_float(token.v[S::kTma ? 0 : row], value_type);
    delta[r] = __fmul_rn(token.beta, __fadd_rn(value, -delta[r]));
  }
#pragma unroll
  for (int j = 0; j < S::kVectors; ++j)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float updated[kVectorSize];
#pragma unroll
      for (int c = 0; c < kVectorSize; ++c) {
        const int e = j * kVectorSize + c;
        updated[c] = __fmaf_rn(delta[r], token.k[e], state[r][e]);
        sum[r] = fmaf(updated[c], token.q[e], sum[r]);
      }
      const typename S::Vector changed = S::Vector::of(updated);
      if constexpr (S::kTma)
        shared.own<S>(at)[S::vector_at(stage, r, j)] = uint4{changed.word[0], changed.word[1], changed.word[2], changed.word[3]};
      else if (sequence.writes && at.first + at.group + (stage * R + r) * kGroups < p.V)
        changed.store_streaming(to + S::vector_at(stage, r, j) * kVectorSize);
    }
  sum_rows(sum);
  if (at.lane != 0) return;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint32_t row = at.group + (stage * R + r) * kGroups;
    if constexpr (S::kTma) {
      shared.o[row] = sum[r] * token.q_factor;
    } else {
      if (sequence.has_token && at.first + row < p.V)
        store(p.o.data, p.output, p.o.at(sequence.t, at.hv) + at.first + row, sum[r] * token.q_factor);
    }
    if (sequence.has_token && p.record_delta.data && at.first + row < p.V)
      static_cast<float*>(p.record_delta.data)[p.record_delta.at(sequence.t, at.hv) + at.first + row] = delta[r];
  }
}

// Takes the rows through their stages.
template <class S>
__device__ __forceinline__ void run_stages(const OneTokenParams& p, const BlockRows& at, const Sequence& sequence,
                                           const Token<S>& token, typename S::State* to, const SharedRows& shared) {
#pragma unroll
  for (int stage = 0; stage < S::Stages; ++stage) {
    wait_for_rows<S>(sequence.zeros, shared, stage);
    typename S::Vector raw[S::R][S::kVectors];
#pragma unroll
    for (int r = 0; r < S::R; ++r)
#pragma unroll
      for (int j = 0; j < S::kVectors; ++j) {
        const uint4 x = S::kTma && sequence.zeros ? uint4{0, 0, 0, 0} : shared.own<S>(at)[S::vector_at(stage, r, j)];
        raw[r][j] = {{x.x, x.y, x.z, x.w}};
      }
    update_rows<S>(p, at, sequence, token, to, shared, raw, stage);
#if WEFT_HAS_WGMMA
    if constexpr (S::kTma) {
      fence_proxy_async();
      __syncthreads();
      if (threadIdx.x == 0 && sequence.writes && stage_bytes<S>(p, at, stage) > 0)
        tma_store_bulk(to + stage * S::kStageRows * S::K, shared_address(shared.staged + stage * S::kStageRows * S::kRowVectors),
                       stage_bytes<S>(p, at, stage));
    }
#endif
  }
}

template <class State, int E, bool WideKeys, int R, int Stages>
__global__ void __launch_bounds__(kThreads, 5) recurrent_one_token_kernel(const __grid_constant__ OneTokenParams p) {
  using S = Shape<State, E, WideKeys, R, Stages>;
  extern __shared__ __align__(128) uint4 staged[];
  __shared__ float v[S::kTma ? S::kBlockRows : 1], o[S::kTma ? S::kBlockRows : 1];
  __shared__ uint64_t barriers[Stages];
  const SharedRows shared{staged, v, o, barriers};
  const BlockRows at = block_rows<S>(p);
  Sequence sequence(p, at.n);
  // Addresses are computed before pdl_wait() and, where indices change them, once more.
  Addresses<S> addresses;
  addresses.set(p, at, sequence);
  addresses.pin();
  // Thread 0 prefetches the rows of a later block, and its own where no earlier block did.
  unsigned later = blockIdx.x + p.prefetch_distance;
  const bool prefetches = threadIdx.x == 0 && p.in.data && p.prefetch_distance > 0, later_exists = prefetches && later < gridDim.x;
  const unsigned later_block = p.row_blocks.take(later), later_head = p.Hv.take(later);
  prefetch_arguments(p);
  if (!p.indexed) {
    if (prefetches && blockIdx.x < p.prefetch_distance) prefetch_rows<S>(p, at.row_block, at.head, at.n);
    if (later_exists) prefetch_rows<S>(p, later_block, later_head, later);
  }
  prefetch_token<S>(p, at, addresses, sequence.has_token);
  pdl_wait();
  pdl_launch_dependents();

  int64_t later_slot = later;
  if (p.indexed) {
    if (later_exists && p.in_slots.data) later_slot = p.in_slots.at(later);
    if (!sequence.read(p, at.n)) return;
    addresses.set(p, at, sequence);
  }
  if (sequence.inert) {
    if (sequence.has_token && moves_row<S>(p, at))
      store(p.o.data, p.output, p.o.at(sequence.t, at.hv) + at.first + threadIdx.x, 0.0f);
    return;
  }
  load_rows<S>(p, at, addresses.states, sequence.zeros, shared);
  if (p.indexed && later_exists) prefetch_rows<S>(p, later_block, later_head, later_slot);
  Token<S> token;
  if (sequence.has_token) load_token<S>(p, at, sequence.t, addresses, token);
  if constexpr (S::kTma) {
    if (threadIdx.x < S::kBlockRows) v[threadIdx.x] = bits_to_float(token.v[0], WideKeys ? DType::f32 : p.key);
    __syncthreads();
  }
  run_stages<S>(p, at, sequence, token, addresses.to, shared);
  if constexpr (S::kTma) {
    __syncthreads();
    if (sequence.has_token && moves_row<S>(p, at))
      store(p.o.data, p.output, p.o.at(sequence.t, at.hv) + at.first + threadIdx.x, o[threadIdx.x]);
  }
#if WEFT_HAS_WGMMA
  if (S::kTma && threadIdx.x == 0) tma_store_wait_read();
#endif
}

}  // namespace weft::cuda::one_token
