// The gated delta rule token by token: see recurrent.cuh.
//
// Eight lanes share a row of the state, each with four consecutive channels of every 32, so that a warp reads whole 128-byte lines and a
// row's dot products end in three shuffles. Rows are independent: threads never synchronise. Every product and sum of the update is
// written as an intrinsic, so that replay repeats the bits of decode.
#include "cuda/delta/recurrent.cuh"

#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/row_lanes.cuh"
#include "cuda/delta/states_view.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2;                               // state rows per thread
constexpr int kBlockRows = kThreads / kLanes * kRows;  // state rows per block

// A RecurrentCall lowered for kernels.
struct RecurrentParams {
  StridedView q, k, v, o;
  GatesView gates;
  SequencesView sequences;
  StatesView states;
  StridedView record_k, record_delta, record_g;
  IndexView accepted;
  StridedView checkpoints;
  int64_t checkpoint_every = 0;
  StridedView p, map_q;
  float scale = 1;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  int64_t T = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  int64_t each = 0;  // tokens of every sequence, when uniform
  // Which tensors allow accesses of four elements.
  bool packed_keys = false, packed_in = false, packed_out = false, packed_checkpoints = false;
};

// First channel of a lane's group j of four.
__device__ int channel(int lane, int j) { return j * 4 * kLanes + lane * 4; }

// A lane's raw channels of a row. Conversion is separate, so that loads of several rows and operands can be in flight together. Four 16-bit
// elements take two words, four f32 elements take four.
template <int E>
struct RawRow {
  uint32_t words[E];
};

// Loads a lane's channels of the K contiguous elements at `base`; zeros beyond K.
template <int E>
__device__ void load_raw(const void* data, DType dtype, int64_t base, int lane, int K, bool packed, RawRow<E>& raw) {
  const bool wide = dtype == DType::f32;
#pragma unroll
  for (int j = 0; j < E / 4; ++j) {
    const int c = channel(lane, j);
    uint4 quad{0, 0, 0, 0};
    if (packed) {
      if (c < K && wide) quad = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(data) + base + c);
      if (c < K && !wide) {
        const uint2 half = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + base + c);
        quad.x = half.x;
        quad.y = half.y;
      }
    } else {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = c + i >= K ? 0u
               : wide     ? static_cast<const uint32_t*>(data)[base + c + i]
                          : uint32_t{static_cast<const uint16_t*>(data)[base + c + i]};
      quad = wide ? uint4{x[0], x[1], x[2], x[3]} : uint4{x[0] | x[1] << 16, x[2] | x[3] << 16, 0, 0};
    }
    raw.words[j * 4] = quad.x;
    raw.words[j * 4 + 1] = quad.y;
    raw.words[j * 4 + 2] = quad.z;
    raw.words[j * 4 + 3] = quad.w;
  }
}

template <int E>
__device__ void to_floats(const RawRow<E>& raw, DType dtype, float (&out)[E]) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const uint32_t pair = raw.words[e / 4 * 4 + e % 4 / 2];
    if (dtype == DType::f32)
      out[e] = __uint_as_float(raw.words[e]);
    else if (dtype == DType::bf16)
      out[e] = __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
    else
      out[e] = __half2float(__ushort_as_half(static_cast<unsigned short>(e % 2 ? pair >> 16 : pair & 0xffffu)));
  }
}

template <int E>
__device__ void store_channels(void* data, DType dtype, int64_t base, int lane, int K, bool packed, const float (&in)[E]) {
#pragma unroll
  for (int j = 0; j < E / 4; ++j) {
    const int c = channel(lane, j);
    const float quad[4] = {in[j * 4], in[j * 4 + 1], in[j * 4 + 2], in[j * 4 + 3]};
    if (packed) {
      if (c < K) store4(data, dtype, base + c, quad);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (c + i < K) store(data, dtype, base + c + i, quad[i]);
    }
  }
}

// Row `row` of the matrix that begins at `base`, in either layout. In the kv layout the words are floats already.
template <int E>
__device__ void load_state_row(const StridedView& t, DType dtype, int64_t base, StateLayout layout, int row, int lane, int K, int V,
                               bool packed, RawRow<E>& raw) {
  if (layout == StateLayout::vk) return load_raw<E>(t.data, dtype, base + int64_t{row} * K, lane, K, packed, raw);
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int c = channel(lane, e / 4) + e % 4;
    raw.words[e] = __float_as_uint(c < K ? load(t, base + int64_t{c} * V + row) : 0.0f);
  }
}

template <int E>
__device__ void store_state_row(const StridedView& t, DType dtype, int64_t base, StateLayout layout, int row, int lane, int K,
                                int V, bool packed, const float (&in)[E]) {
  if (layout == StateLayout::vk) return store_channels<E>(t.data, dtype, base + int64_t{row} * K, lane, K, packed, in);
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int c = channel(lane, e / 4) + e % 4;
    if (c < K) store(t, base + int64_t{c} * V + row, in[e]);
  }
}

// Properties of a call that specialised kernels know at compile time, which makes their loads unconditional vector accesses.
struct CallTraits {
  DType key, state;
  bool packed_keys, packed_in, packed_out;
  StateLayout layout;
  int K;
  bool maps;  // summarize
};

inline constexpr int kAnyTypes = -1;

template <int E, int Types>
__device__ CallTraits traits_of(const RecurrentParams& p) {
  if constexpr (Types == kAnyTypes)
    return {p.k.dtype,    p.states.in.dtype, p.packed_keys,         p.packed_in,
            p.packed_out, p.states.layout,   static_cast<int>(p.K), p.p.present()};
  else
    return {static_cast<DType>(Types / 3), static_cast<DType>(Types % 3), true, true, true, StateLayout::vk, E * kLanes, false};
}

// The raw inputs of a token.
template <int E>
struct RawToken {
  RawRow<E> k, q;
  float v[kRows], g = 0, beta = 0;
};

template <int E, bool PerChannel>
__device__ void load_token(const RecurrentParams& p, const CallTraits& traits, int64_t t, int64_t hv, int64_t hk, int lane,
                           int first_row, RawToken<E>& in) {
  const int K = traits.K, V = static_cast<int>(p.V);
  load_raw<E>(p.k.data, traits.key, t * p.k.strides[0] + hk * p.k.strides[1], lane, K, traits.packed_keys, in.k);
  if (p.q.present()) load_raw<E>(p.q.data, traits.key, t * p.q.strides[0] + hk * p.q.strides[1], lane, K, traits.packed_keys, in.q);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r - (traits.maps ? K : 0);  // rows of the identity have no v
    in.v[r] = row >= 0 && row < V ? load(p.v.data, traits.key, t * p.v.strides[0] + hv * p.v.strides[1] + row) : 0.0f;
  }
  if (!PerChannel) in.g = log_decay_of(p.gates, t, hv, 0);
  if (!p.accepted.present()) in.beta = strength_of(p.gates, t, hv);
}

// The converted inputs of a token, besides q and v.
template <int E, bool PerChannel>
struct Token {
  float k[E], decay[PerChannel ? E : 1];
};

template <int E, bool PerChannel>
__device__ void convert_token(const RecurrentParams& p, const CallTraits& traits, int64_t t, int64_t hv, int lane,
                              const RawToken<E>& in, Token<E, PerChannel>& token) {
  to_floats<E>(in.k, traits.key, token.k);
  if (p.l2_norm) {
    const float factor = inverse_norm<E>(token.k);
#pragma unroll
    for (int e = 0; e < E; ++e) token.k[e] *= factor;
  }
  if constexpr (PerChannel) {
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int c = channel(lane, e / 4) + e % 4;
      token.decay[e] = c < traits.K ? expf(log_decay_of(p.gates, t, hv, c)) : 0.0f;
    }
  } else {
    token.decay[0] = expf(in.g);
  }
}

// Records key and log decay. The first row block of a head does it: the key for the first value head of its key head, the decay for every
// value head.
template <int E, bool PerChannel>
__device__ void record_token(const RecurrentParams& p, int64_t t, int64_t hv, int64_t hk, int lane, float g,
                             const Token<E, PerChannel>& token) {
  const int64_t first = p.head_map == HeadMap::grouped ? hk * (p.Hv / p.Hk) : hk;
  const int K = static_cast<int>(p.K);
  if (hv == first)
    store_channels<E>(p.record_k.data, DType::f32, t * p.record_k.strides[0] + hk * p.record_k.strides[1], lane, K, false, token.k);
  const int64_t base = t * p.record_g.strides[0] + hv * p.record_g.strides[1];
  if constexpr (PerChannel) {
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int c = channel(lane, e / 4) + e % 4;
      if (c < K) store(p.record_g, base + c, log_decay_of(p.gates, t, hv, c));
    }
  } else if (lane == 0) {
    store(p.record_g, base, g);
  }
}

// The rows of the state of one sequence and head that a block updates.
struct BlockRows {
  TokenRange range;
  StateSlots slots;
  int64_t n, hv, hk;
  int row_block, first;  // first: first row of this thread
  bool legal;            // false: the sequence is inert
};

__device__ BlockRows block_rows(const RecurrentParams& p, const CallTraits& traits, uint32_t block) {
  const auto count = static_cast<uint32_t>(traits.maps ? traits.K + p.V : p.V), Hv = static_cast<uint32_t>(p.Hv);
  const uint32_t row_blocks = (count + kBlockRows - 1) / kBlockRows;  // 32 bits: divisions of 64 bits would dominate
  BlockRows rows{};
  rows.hv = block / row_blocks % Hv;
  rows.n = block / row_blocks / Hv;
  rows.hk = key_head(rows.hv, p.Hv, p.Hk, p.head_map);
  rows.row_block = static_cast<int>(block % row_blocks);
  rows.first = rows.row_block * kBlockRows + threadIdx.x / kLanes * kRows;
  rows.range = tokens_of(p.sequences, rows.n, p.T, p.each);
  rows.legal = rows.range.legal;
  if (rows.legal && !traits.maps) rows.slots = state_slots(p.states, rows.n);
  return rows;
}

// The outputs of an inert sequence are 0.
__device__ void clear_outputs(const RecurrentParams& p, const BlockRows& rows, int lane) {
  if (p.o.present() && lane < kRows && rows.first + lane < p.V)
    for (int64_t t = rows.range.begin; t < rows.range.end; ++t)
      store(p.o, t * p.o.strides[0] + rows.hv * p.o.strides[1] + rows.first + lane, 0.0f);
}

// Updates the rows token by token, from raw state to stored state.
template <int E, bool PerChannel, int Types>
__device__ void update_rows(const RecurrentParams& p, const CallTraits& traits, const BlockRows& at,
                            const RawRow<E> (&raw_state)[kRows]) {
  const int lane = threadIdx.x % kLanes, K = traits.K, V = static_cast<int>(p.V), first_row = at.first, row_block = at.row_block;
  const bool maps = traits.maps, replay = p.accepted.present();
  const int rows = maps ? K + V : V;
  const TokenRange& range = at.range;
  const StateSlots& slots = at.slots;
  const int64_t n = at.n, hv = at.hv, hk = at.hk;
  const DType state_type = traits.layout == StateLayout::vk ? traits.state : DType::f32;
  const int64_t last = replay ? range.begin + max(int64_t{0}, min(index_at(p.accepted, n), range.length())) : range.end;
  RawToken<E> next;
  if (range.begin < last) load_token<E, PerChannel>(p, traits, range.begin, hv, hk, lane, first_row, next);
  float state[kRows][E];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    if (slots.in >= 0 && row < V) {
      to_floats<E>(raw_state[r], state_type, state[r]);
    } else {
#pragma unroll
      for (int e = 0; e < E; ++e) state[r][e] = maps && row < K && channel(lane, e / 4) + e % 4 == row ? 1.0f : 0.0f;
    }
  }

  for (int64_t t = range.begin; t < last; ++t) {
    const RawToken<E> now = next;
    if (t + 1 < last) load_token<E, PerChannel>(p, traits, t + 1, hv, hk, lane, first_row, next);
    Token<E, PerChannel> token;
    convert_token(p, traits, t, hv, lane, now, token);
    float q[E];
    if (p.q.present()) to_floats<E>(now.q, traits.key, q);
    const float q_factor = p.q.present() ? p.scale * (p.l2_norm ? inverse_norm<E>(q) : 1.0f) : 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float delta = now.v[r];
      float dot = 0;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        state[r][e] = __fmul_rn(token.decay[PerChannel ? e : 0], state[r][e]);
        dot = __fmaf_rn(state[r][e], token.k[e], dot);
      }
      if (!replay) delta = __fmul_rn(now.beta, __fadd_rn(now.v[r], -sum_row(dot)));
#pragma unroll
      for (int e = 0; e < E; ++e) state[r][e] = __fmaf_rn(delta, token.k[e], state[r][e]);
      if (p.record_k.present() && lane == 0 && first_row + r < V)
        store(p.record_delta, t * p.record_delta.strides[0] + hv * p.record_delta.strides[1] + first_row + r, delta);
    }
    if (p.q.present()) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float dot = 0;
#pragma unroll
        for (int e = 0; e < E; ++e) dot = fmaf(state[r][e], q[e], dot);
        dot = sum_row(dot) * q_factor;
        if (lane == r && first_row + r < V) store(p.o, t * p.o.strides[0] + hv * p.o.strides[1] + first_row + r, dot);
      }
    }
    if (p.record_k.present() && row_block == 0 && threadIdx.x < kLanes) record_token(p, t, hv, hk, lane, now.g, token);
    if (Types == kAnyTypes && p.checkpoint_every > 0 && (t + 1 - range.begin) % p.checkpoint_every == 0) {
      const int64_t index = (t + 1 - range.begin) / p.checkpoint_every - 1;
      const StridedView& out = p.checkpoints;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (first_row + r < V)
          store_state_row<E>(out, out.dtype, n * out.strides[0] + index * out.strides[1] + hv * out.strides[2], p.states.layout,
                             first_row + r, lane, K, V, p.packed_checkpoints, state[r]);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    if (maps) {
      const StridedView& out = row < K ? p.p : p.map_q;
      if (row < rows)
        store_channels<E>(out.data, DType::f32, n * out.strides[0] + hv * out.strides[1] + int64_t{row < K ? row : row - K} * K,
                          lane, K, false, state[r]);
    } else if (slots.out >= 0 && row < V) {
      store_state_row<E>(p.states.out, Types == kAnyTypes ? p.states.out.dtype : traits.state,
                         slots.out * p.states.out.strides[0] + hv * p.states.out.strides[1], traits.layout, row, lane, K, V,
                         traits.packed_out, state[r]);
    }
  }
}

// Registers of four blocks per multiprocessor are enough for the smallest kernel; 0: no bound.
template <int E, bool PerChannel>
__global__ void __launch_bounds__(kThreads, E == 8 ? 4 : 0) recurrent_kernel(const __grid_constant__ RecurrentParams p) {
  const CallTraits traits = traits_of<E, kAnyTypes>(p);
  const int lane = threadIdx.x % kLanes;
  const BlockRows at = block_rows(p, traits, blockIdx.x);
  if (!at.legal) return;
  if (at.slots.inert) return clear_outputs(p, at, lane);
  RawRow<E> raw_state[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (at.slots.in >= 0 && at.first + r < p.V)
      load_state_row<E>(p.states.in, traits.state, at.slots.in * p.states.in.strides[0] + at.hv * p.states.in.strides[1],
                        traits.layout, at.first + r, lane, traits.K, static_cast<int>(p.V), traits.packed_in, raw_state[r]);
  update_rows<E, PerChannel, kAnyTypes>(p, traits, at, raw_state);
}

// Kernels specialised by type are persistent: a block takes row block after row block, and copies the states of the next two to shared
// memory with cp.async while it computes. Every thread copies what it reads itself.
constexpr int kStages = 3;

template <int Types>
constexpr int kQuadBytes = Types % 3 == 0 ? 16 : 8;  // of four state elements

template <int E, int Types>
constexpr uint32_t kStageBytes = kRows*(E / 4) * kThreads* kQuadBytes<Types>;

// Issues the copies of the rows of row block `block`, every thread those of its own rows, as one cp.async group.
template <int E, int Types>
__device__ void load_rows_async(const RecurrentParams& p, const CallTraits& traits, uint32_t block, uint32_t blocks, uint32_t to) {
  constexpr int kQuad = kQuadBytes<Types>, kLineBytes = 4 * kLanes * (kQuad / 4);
  const int lane = threadIdx.x % kLanes;
  if (block < blocks) {
    const BlockRows at = block_rows(p, traits, block);
    if (at.legal && at.slots.in >= 0 && !at.slots.inert)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (at.first + r >= p.V) break;
        const char* from =
            static_cast<const char*>(p.states.in.data) +
            (at.slots.in * p.states.in.strides[0] + at.hv * p.states.in.strides[1] + int64_t{at.first + r} * traits.K + lane * 4) *
                (kQuad / 4);
#pragma unroll
        for (int j = 0; j < E / 4; ++j) {
          const uint32_t address = to + static_cast<uint32_t>(((r * (E / 4) + j) * kThreads + threadIdx.x) * kQuad);
          if constexpr (kQuad == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from + j * kLineBytes) : "memory");
          else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from + j * kLineBytes) : "memory");
        }
      }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int E, int Types>
__device__ void read_rows(const unsigned char* from, RawRow<E> (&raw_state)[kRows]) {
  constexpr int kQuad = kQuadBytes<Types>;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < E / 4; ++j) {
      const unsigned char* address = from + ((r * (E / 4) + j) * kThreads + threadIdx.x) * kQuad;
      if constexpr (kQuad == 16) {
        const uint4 x = *reinterpret_cast<const uint4*>(address);
        raw_state[r].words[j * 4] = x.x;
        raw_state[r].words[j * 4 + 1] = x.y;
        raw_state[r].words[j * 4 + 2] = x.z;
        raw_state[r].words[j * 4 + 3] = x.w;
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(address);
        raw_state[r].words[j * 4] = x.x;
        raw_state[r].words[j * 4 + 1] = x.y;
      }
    }
}

template <int E, int Types>
__global__ void __launch_bounds__(kThreads, 4) recurrent_stream_kernel(const __grid_constant__ RecurrentParams p, uint32_t blocks) {
  extern __shared__ __align__(16) unsigned char raw[];
  const CallTraits traits = traits_of<E, Types>(p);
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const auto load = [&](uint32_t block, uint32_t stage) {
    load_rows_async<E, Types>(p, traits, block, blocks, base + stage * kStageBytes<E, Types>);
  };
  load(blockIdx.x, 0);
  load(blockIdx.x + gridDim.x, 1);
  uint32_t stage = 0;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    load(block + 2 * gridDim.x, stage == 0 ? 2 : stage - 1);
    const BlockRows at = block_rows(p, traits, block);
    asm volatile("cp.async.wait_group 2;" ::: "memory");
    if (at.legal && at.slots.inert) clear_outputs(p, at, threadIdx.x % kLanes);
    if (at.legal && !at.slots.inert) {
      RawRow<E> raw_state[kRows];
      read_rows<E, Types>(raw + stage * kStageBytes<E, Types>, raw_state);
      update_rows<E, false, Types>(p, traits, at, raw_state);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace

int64_t recurrent_blocks(const RecurrentCall& call) {
  return ceil_div(call.p.present() ? call.K + call.V : call.V, kBlockRows) * call.Hv * call.N;
}

namespace {

// Kernels by dtype of the keys (slow index) and of the states.
struct StreamKernel {
  void (*kernel)(RecurrentParams, uint32_t);
  size_t shared;
};
template <int E, int Types>
constexpr StreamKernel kStream{recurrent_stream_kernel<E, Types>, kStages* kStageBytes<E, Types>};
template <int E>
constexpr StreamKernel kStreams[9] = {kStream<E, 0>, kStream<E, 1>, kStream<E, 2>, kStream<E, 3>, kStream<E, 4>,
                                      kStream<E, 5>, kStream<E, 6>, kStream<E, 7>, kStream<E, 8>};

bool allows_packs(const Tensor& t) { return packs_of(t, 4); }

// The stream kernels support rows of 64 or 128 channels that allow vector accesses, one decay per head, and one dtype of states.
bool takes_stream(const RecurrentCall& call) {
  const DeltaStates& states = call.states;
  return (call.K == 64 || call.K == 128) && !per_channel(call.gates) && allows_packs(call.k) && allows_packs(call.q) &&
         allows_packs(states.in) && allows_packs(states.out) && states.layout == StateLayout::vk && !call.p.present() &&
         call.checkpoint_every == 0 && (!states.in.present() || !states.out.present() || states.in.dtype == states.out.dtype);
}

RecurrentParams lowered(const RecurrentCall& call) {
  RecurrentParams p;
  p.q = view_of(call.q);
  p.k = view_of(call.k);
  p.v = view_of(call.v);
  p.o = view_of(call.o);
  p.gates = view_of(call.gates);
  p.sequences = view_of(call.sequences);
  p.states = view_of(call.states);
  p.record_k = view_of(call.record.k);
  p.record_delta = view_of(call.record.delta);
  p.record_g = view_of(call.record.g);
  p.accepted = indices_of(call.accepted);
  p.checkpoints = view_of(call.checkpoints);
  p.checkpoint_every = call.checkpoint_every;
  p.p = view_of(call.p);
  p.map_q = view_of(call.map_q);
  p.scale = call.scale;
  p.l2_norm = call.l2_norm;
  p.head_map = call.head_map;
  p.T = call.T;
  p.Hk = call.Hk;
  p.Hv = call.Hv;
  p.K = call.K;
  p.V = call.V;
  p.each = max_tokens(call.sequences, call.T);
  const bool rows = call.states.layout == StateLayout::vk;
  p.packed_keys = allows_packs(call.k) && allows_packs(call.q);
  p.packed_in = rows && allows_packs(call.states.in);
  p.packed_out = rows && allows_packs(call.states.out);
  p.packed_checkpoints = rows && allows_packs(call.checkpoints);
  return p;
}

bool uses_one_token(const RecurrentCall& call) { return takes_stream(call) && takes_one_token(call) && !call.accepted.present(); }

}  // namespace

const char* recurrent_kernel_name(const RecurrentCall& call) {
  return uses_one_token(call) ? "recurrent_one" : takes_stream(call) ? "stream" : "recurrent";
}

void launch_recurrent(const char* op, const Stream& stream, const RecurrentCall& call) {
  if (uses_one_token(call)) return launch_recurrent_one_token(op, stream, call);
  const RecurrentParams p = lowered(call);
  if (takes_stream(call)) {
    const Tensor& states = call.states.in.present() ? call.states.in : call.states.out;
    const int types = static_cast<int>(call.k.dtype) * 3 + static_cast<int>(states.present() ? states.dtype : DType::f32);
    const StreamKernel chosen = call.K == 64 ? kStreams<8>[types] : kStreams<16>[types];
    const int64_t blocks = recurrent_blocks(call), resident = int64_t{4} * facts_of(stream).multiprocessors;
    if (Status status = check_grid(op, 4 * blocks); !status) throw Error(std::move(status));  // block indices run two grids ahead
    return launch(op, stream, std::min(blocks, resident), kThreads, chosen.shared, chosen.kernel, p, static_cast<uint32_t>(blocks));
  }
  const auto run = [&](auto kernel) { launch(op, stream, recurrent_blocks(call), kThreads, 0, kernel, p); };
  const bool channels = per_channel(call.gates);
  if (call.K <= 64) return run(channels ? recurrent_kernel<8, true> : recurrent_kernel<8, false>);
  if (call.K <= 128) return run(channels ? recurrent_kernel<16, true> : recurrent_kernel<16, false>);
  run(channels ? recurrent_kernel<32, true> : recurrent_kernel<32, false>);
}

}  // namespace weft::cuda
