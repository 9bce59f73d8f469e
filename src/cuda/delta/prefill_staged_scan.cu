// The state scan of the staged prefill: see prefill_staged.cuh.
//
// A warp holds 16 rows of the state by a slice of the channels, in accumulators. The warps of a group split K among them and share the
// rows: they exchange partial sums of S D and S Q through shared memory, and each finishes some of the tokens. A block has several groups,
// which share the operands. These pass through a ring of pipeline stages in the order D, Q, M of chunk after chunk. Every thread copies with
// cp.async; one barrier per operand publishes it, releases the one before and separates the writers and readers of the exchange.
#include "cuda/delta/prefill_scan.cuh"
#include "cuda/delta/prefill_staged.cuh"

namespace weft::cuda {
namespace {

constexpr int kRows = 16, kMostWarps = 8, kTokenBlocks = kChunk / 16;
constexpr int kBlockFloats = 256;  // a block of 16 tokens by 16 rows

// Warps of a group, and k-steps of 16 channels of each.
template <int Warps, int Steps>
struct Shape {
  static constexpr int kWarps = Warps, kSteps = Steps, kChannels = Steps * 16, kPadded = kWarps * kChannels;
  static constexpr int kOwn = kTokenBlocks / kWarps;  // blocks of tokens that a warp finishes
  // Blocks of tokens are shared out so that R W, which grows with the block, is even.
  __device__ static constexpr int owner(int block) { return kWarps == 1 ? 0 : kWarps == 2 ? (block % 3 == 0 ? 0 : 1) : block; }
  __device__ static constexpr int index(int block) { return kWarps == 1 ? block : kWarps == 2 ? block / 2 : 0; }
  __device__ static int owned(int warp, int index) {
    return kWarps == 1 ? index : kWarps == 2 ? (index == 0 ? warp : 3 - warp) : warp;
  }
};

// Shared memory after the ring of operands. Bytes.
struct ScanLayout {
  int operand, tail, tails, exchange, corrections;
  WEFT_HOST_DEVICE constexpr ScanLayout(const StagedLayout& chunk, int warps, int stages, bool outputs)
      : operand(chunk.operand()),
        tail((chunk.tail_bytes() + 127) / 128 * 128),
        tails((stages + (outputs ? 2 : 1)) / (outputs ? 3 : 2)),  // a tail is read a chunk's operands after the one before
        exchange(warps == 1 ? 0 : (warps - 1) * kTokenBlocks * kBlockFloats * 4),
        corrections(warps == 1 ? 0 : chunk.parts * kTokenBlocks * 512) {}
  // Per group: partial sums of S D, of S Q, and W.
  WEFT_HOST_DEVICE constexpr int group() const { return 2 * exchange + corrections; }
  WEFT_HOST_DEVICE constexpr int bytes(int stages, int groups) const { return stages * operand + tails * tail + groups * group(); }
};

// The ring of operands: what is loaded next.
struct Ring {
  const char* from;    // the next chunk
  int64_t chunk_step;  // bytes from a chunk to the next
  int64_t left;        // chunks left to load
  int which = 0;       // 0: D, 1: Q, 2: M
  int stage = 0, tail = 0;
};

template <int Parts>
__device__ void load_operand(const StagedParams& s, const StagedLayout& layout, const ScanLayout& shared, uint32_t base,
                             Ring& ring) {
  if (ring.left > 0) {
    const char* from = ring.from + ring.which * layout.operand();
    const uint32_t to = base + static_cast<uint32_t>(ring.stage * shared.operand);
#pragma unroll 4
    for (int i = threadIdx.x * 16; i < layout.operand(); i += static_cast<int>(blockDim.x) * 16) cp_async(to + i, from + i, true);
    if (ring.which == 2) {
      const uint32_t tail = base + static_cast<uint32_t>(s.stages * shared.operand + ring.tail * shared.tail);
#pragma unroll 4
      for (int i = threadIdx.x * 16; i < layout.tail_bytes(); i += static_cast<int>(blockDim.x) * 16)
        cp_async(tail + i, ring.from + layout.tail() + i, true);
      ring.tail = ring.tail + 1 == shared.tails ? 0 : ring.tail + 1;
      ring.from += ring.chunk_step;
      --ring.left;
    }
    ring.which = ring.which == 2 ? 0 : s.p.q.present() ? ring.which + 1 : 2;
    ring.stage = ring.stage + 1 == s.stages ? 0 : ring.stage + 1;
  }
  cp_async_commit();
}

__device__ inline void wait_operand(int stages) {
  if (stages == 2)
    cp_async_wait<0>();
  else if (stages == 3)
    cp_async_wait<1>();
  else
    cp_async_wait<4>();
  __syncthreads();
}

// The state of a warp: 16 rows by Steps * 16 channels.
template <int Steps>
using State = float[2 * Steps][4];

// Visits the accumulators of a state: visit(row, channel, value).
template <int Steps, class Visit>
__device__ void visit_state(State<Steps>& state, int first_row, int first_channel, int lane, int rows, int K, Visit&& visit) {
#pragma unroll
  for (int nt = 0; nt < 2 * Steps; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + lane / 4 + e / 2 * 8, c = first_channel + nt * 8 + lane % 4 * 2 + e % 2;
      if (row < rows && c < K) visit(row, c, state[nt][e]);
    }
}

template <int Steps>
__device__ void store_matrix(const StagedParams& s, const StridedView& out, int64_t base, int first_row, int first_channel,
                             int lane, State<Steps>& state) {
  const int K = static_cast<int>(s.p.K), V = static_cast<int>(s.p.V);
  const bool vk = s.p.states.layout == StateLayout::vk;
  visit_state<Steps>(state, first_row, first_channel, lane, V, K,
                     [&](int row, int c, float x) { store(out, base + (vk ? int64_t{row} * K + c : int64_t{c} * V + row), x); });
}

template <int Steps>
__device__ void load_initial(const StagedParams& s, const WorkTile& work, int64_t slot, int first_row, int first_channel, int lane,
                             State<Steps>& state) {
  const Prefill& p = s.p;
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V);
  if (s.map_p.present())
    return visit_state<Steps>(state, first_row, first_channel, lane, s.first_value, K,
                              [&](int row, int c, float& x) { x = row == c ? 1.0f : 0.0f; });
  if (slot < 0) return;
  const StridedView& in = p.states.in;
  const int64_t base = slot * in.strides[0] + work.hv * in.strides[1];
  const bool vk = p.states.layout == StateLayout::vk;
  // Raw elements first, so that all loads are in flight before a conversion waits.
  visit_state<Steps>(state, first_row, first_channel, lane, V, K, [&](int row, int c, float& x) {
    x = __uint_as_float(load_bits(in, base + (vk ? int64_t{row} * K + c : int64_t{c} * V + row)));
  });
  if (in.dtype != DType::f32)
    visit_state<Steps>(state, first_row, first_channel, lane, V, K,
                       [&](int, int, float& x) { x = bits_to_float(__float_as_uint(x), in.dtype); });
}

template <int Steps>
__device__ void store_final(const StagedParams& s, const WorkTile& work, int64_t slot, int first_row, int first_channel, int lane,
                            State<Steps>& state) {
  const StridedView& out = s.p.states.out;
  if (s.map_p.present()) {
    const int K = static_cast<int>(s.p.K);
    return visit_state<Steps>(state, first_row, first_channel, lane, static_cast<int>(s.p.V), K, [&](int row, int c, float x) {
      const bool values = row >= s.first_value;
      const StridedView& map = values ? s.map_q : s.map_p;
      static_cast<float*>(
          map.data)[work.n * map.strides[0] + work.hv * map.strides[1] + int64_t{values ? row - s.first_value : row} * K + c] = x;
    });
  }
  if (slot >= 0)
    store_matrix<Steps>(s, out, slot * out.strides[0] + work.hv * out.strides[1], first_row, first_channel, lane, state);
}

// S X^T of the warp's channels for all tokens of a chunk, X = D or Q.
template <class Half, int Parts, int Steps>
__device__ void multiply_state(const State<Steps>& state, uint32_t tiles, int matrix, int first_channel, const LdmatrixLane& at,
                               float (&out)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[i][e] = 0.0f;
#pragma unroll
  for (int ks = 0; ks < Steps; ++ks) {
    const int c = first_channel + ks * 16;
    const uint32_t panel = tiles + c / 64 * kPanel;
    FragmentA high, low;
    if constexpr (Parts == 2)
      split<Half>(state[2 * ks], state[2 * ks + 1], high, low);
    else
      high = operand<Half>(state[2 * ks], state[2 * ks + 1]);
#pragma unroll
    for (int pair = 0; pair < kTokenBlocks; ++pair) {
      uint32_t b[4];
      const uint32_t from = panel + Tile64::offset(pair * 16 + at.row(), c % 64 / 8 + at.piece());
      ldmatrix(b, from);
      if constexpr (Parts == 2) {
        uint32_t rest[4];
        ldmatrix(rest, from + matrix);
        multiply<Half>(out[2 * pair], high, rest[0], rest[1]);
        multiply<Half>(out[2 * pair + 1], high, rest[2], rest[3]);
        multiply<Half>(out[2 * pair], low, b[0], b[1]);
        multiply<Half>(out[2 * pair + 1], low, b[2], b[3]);
      }
      multiply<Half>(out[2 * pair], high, b[0], b[1]);
      multiply<Half>(out[2 * pair + 1], high, b[2], b[3]);
    }
  }
}

// W of a chunk as left operands.
template <int Parts>
struct Corrections {
  FragmentA parts[Parts][kTokenBlocks];
};

template <class Half, int Parts>
__device__ void round_corrections(const float (&left)[4], const float (&right)[4], Corrections<Parts>& w, int block) {
  if constexpr (Parts == 2)
    split<Half>(left, right, w.parts[0][block], w.parts[1][block]);
  else
    w.parts[0][block] = operand<Half>(left, right);
}

// S <- S diag(decay) + W^T M.
template <class Half, int Parts, int Steps>
__device__ void update_state(State<Steps>& state, const Corrections<Parts>& w, uint32_t tiles, int matrix, const float* decays,
                             int first_channel, const LdmatrixLane& at, int lane) {
#pragma unroll
  for (int nt = 0; nt < 2 * Steps; ++nt) {
    const float2 decay = *reinterpret_cast<const float2*>(decays + first_channel + nt * 8 + lane % 4 * 2);
    state[nt][0] *= decay.x, state[nt][1] *= decay.y, state[nt][2] *= decay.x, state[nt][3] *= decay.y;
  }
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block)
#pragma unroll
    for (int ks = 0; ks < Steps; ++ks) {
      const int c = first_channel + ks * 16;
      const uint32_t from = tiles + c / 64 * kPanel + Tile64::offset(block * 16 + at.across_row(), c % 64 / 8 + at.across_piece());
      uint32_t b[4];
      ldmatrix_trans(b, from);
      if constexpr (Parts == 2) {
        uint32_t rest[4];
        ldmatrix_trans(rest, from + matrix);
        multiply<Half>(state[2 * ks], w.parts[0][block], rest[0], rest[1]);
        multiply<Half>(state[2 * ks + 1], w.parts[0][block], rest[2], rest[3]);
        multiply<Half>(state[2 * ks], w.parts[1][block], b[0], b[1]);
        multiply<Half>(state[2 * ks + 1], w.parts[1][block], b[2], b[3]);
      }
      multiply<Half>(state[2 * ks], w.parts[0][block], b[0], b[1]);
      multiply<Half>(state[2 * ks + 1], w.parts[0][block], b[2], b[3]);
    }
}

// o += R W for 16 tokens.
template <class Half, int Parts>
__device__ void add_corrections(float (&left)[4], float (&right)[4], const Corrections<Parts>& w, uint32_t r, int block,
                                const LdmatrixLane& at) {
#pragma unroll
  for (int j = 0; j < kTokenBlocks; ++j) {
    if (j > block) break;
    uint32_t b[4];
    const uint32_t from = r + Tile64::offset(block * 16 + at.row(), j * 2 + at.piece());
    ldmatrix(b, from);
    if constexpr (Parts == 2) {
      uint32_t rest[4];
      ldmatrix(rest, from + kPanel);
      multiply<Half>(left, w.parts[0][j], rest[0], rest[1]);
      multiply<Half>(right, w.parts[0][j], rest[2], rest[3]);
      multiply<Half>(left, w.parts[1][j], b[0], b[1]);
      multiply<Half>(right, w.parts[1][j], b[2], b[3]);
    }
    multiply<Half>(left, w.parts[0][j], b[0], b[1]);
    multiply<Half>(right, w.parts[0][j], b[2], b[3]);
  }
}

// Where the partial sums of warp `from` for a block of tokens lie: a lane's eight numbers as two vectors. The owner stores none.
template <class S>
__device__ float4* partials(char* exchange, int from, int block, int lane) {
  const int owner = S::owner(block), slot = from < owner ? from : from - 1;
  return reinterpret_cast<float4*>(exchange) + (block * (S::kWarps - 1) + slot) * (kBlockFloats / 4) + lane;
}

// Stores the partial sums of the tokens that other warps finish.
template <class S>
__device__ void send_partials(char* exchange, int warp, int lane, const float (&x)[8][4]) {
  if constexpr (S::kWarps > 1) {
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
      if (S::owner(block) == warp) continue;
      float4* to = partials<S>(exchange, warp, block, lane);
      to[0] = float4{x[2 * block][0], x[2 * block][1], x[2 * block][2], x[2 * block][3]};
      to[32] = float4{x[2 * block + 1][0], x[2 * block + 1][1], x[2 * block + 1][2], x[2 * block + 1][3]};
    }
  }
}

__device__ inline void add_four(float (&x)[4], float4 y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; }

// Adds the other warps' partial sums for a block of tokens that this warp finishes.
template <class S>
__device__ void add_partials(char* exchange, int warp, int block, int lane, float (&left)[4], float (&right)[4]) {
#pragma unroll
  for (int other = 0; other < S::kWarps; ++other) {
    if (other == warp) continue;
    const float4* from = partials<S>(exchange, other, block, lane);
    add_four(left, from[0]);
    add_four(right, from[32]);
  }
}

// The lane's values of the tokens that the warp finishes, as loaded.
template <class S>
struct Values {
  uint32_t bits[S::kOwn][2][4];

  __device__ void load(const StagedParams& s, const WorkTile& work, int64_t index, int first_row, int warp, int lane) {
    const StridedView& v = s.p.v;
    const int64_t begin = work.range.begin + index * kChunk;
    const int length = static_cast<int>(min(int64_t{kChunk}, work.range.end - begin));  // <= 0 after the last chunk
    const int row = first_row - s.first_value + lane / 4, rows = static_cast<int>(s.p.V) - s.first_value;
#pragma unroll
    for (int i = 0; i < S::kOwn; ++i)
#pragma unroll
      for (int nt = 0; nt < 2; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = S::owned(warp, i) * 16 + nt * 8 + lane % 4 * 2 + e % 2, r = row + e / 2 * 8;
          const bool there = token < length && r >= 0 && r < rows;
          bits[i][nt][e] = there ? load_bits(v, (begin + token) * v.strides[0] + work.hv * v.strides[1] + r) : 0u;
        }
  }
};

// Stores the outputs of 16 tokens from sums without the scale.
__device__ void store_outputs(const StagedParams& s, const WorkTile& work, int64_t index, int block, int first_row, int lane,
                              const float (&left)[4], const float (&right)[4]) {
  const StridedView& o = s.p.o;
  const OutputChunk chunk(s.p, work, index);
  const int V = static_cast<int>(s.p.V);
#pragma unroll
  for (int nt = 0; nt < 2; ++nt) {
    const float(&sums)[4] = nt == 0 ? left : right;
    const float x[4] = {sums[0] * s.p.scale, sums[1] * s.p.scale, sums[2] * s.p.scale, sums[3] * s.p.scale};
    if (s.pairs_o) {  // transposed, so that a lane holds neighbours of a token
      const bool f16 = o.dtype == DType::f16;
      const int token = block * 16 + nt * 8 + lane / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = transpose(f16 ? pack<__half>(x[2 * h], x[2 * h + 1]) : pack<__nv_bfloat16>(x[2 * h], x[2 * h + 1]));
        const int row = first_row + 8 * h + lane % 4 * 2;
        if (token < chunk.length && row < V)
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(o.data) + chunk.base + token * o.strides[0] + row) = pair;
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = block * 16 + nt * 8 + lane % 4 * 2 + e % 2, row = first_row + lane / 4 + e / 2 * 8;
      if (token < chunk.length && row < V) store(o, chunk.base + token * o.strides[0] + row, x[e]);
    }
  }
}

// Stores the state after chunk `index` where a checkpoint is due.
template <int Steps>
__device__ void store_due_checkpoint(const StagedParams& s, const WorkTile& work, int64_t index, int first_row, int first_channel,
                                     int lane, State<Steps>& state) {
  const int64_t done = (index + 1) * kChunk, every = s.p.checkpoint_every;
  if (every == 0 || done > work.range.length() || done % every != 0) return;
  const StridedView& out = s.p.checkpoints;
  store_matrix<Steps>(s, out, work.n * out.strides[0] + (done / every - 1) * out.strides[1] + work.hv * out.strides[2], first_row,
                      first_channel, lane, state);
}

// W = v - S D of the warp's tokens from the complete sums, for all warps of the group.
template <class Half, int Parts, class S>
__device__ void compute_corrections(const StagedParams& s, char* sums, char* shared_w, const Values<S>& v, int warp, int lane,
                                    float (&u)[8][4], Corrections<Parts>& w) {
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
    if (S::owner(block) != warp) continue;
    add_partials<S>(sums, warp, block, lane, u[2 * block], u[2 * block + 1]);
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        u[2 * block + nt][e] = bits_to_float(v.bits[S::index(block)][nt][e], s.p.v.dtype) - u[2 * block + nt][e];
    round_corrections<Half, Parts>(u[2 * block], u[2 * block + 1], w, block);
    if constexpr (S::kWarps > 1) {
#pragma unroll
      for (int part = 0; part < Parts; ++part) {
        const FragmentA& x = w.parts[part][block];
        reinterpret_cast<uint4*>(shared_w)[(part * kTokenBlocks + block) * 32 + lane] = uint4{x.x[0], x.x[1], x.x[2], x.x[3]};
      }
    }
  }
}

template <int Parts>
__device__ void load_corrections(const char* shared_w, int lane, Corrections<Parts>& w) {
#pragma unroll
  for (int part = 0; part < Parts; ++part)
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
      const uint4 x = reinterpret_cast<const uint4*>(shared_w)[(part * kTokenBlocks + block) * 32 + lane];
      w.parts[part][block] = FragmentA{{x.x, x.y, x.z, x.w}};
    }
}

template <class Half, int Parts, class S>
__global__ void __launch_bounds__(kMostWarps * 32) staged_scan_kernel(const __grid_constant__ StagedParams s) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const Prefill& p = s.p;
  constexpr StagedLayout kLayout(S::kPadded, Parts);
  StateSlots slots;
  WorkTile work;
  if (!find_work(p, s.groups * kRows, slots, work)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % S::kWarps, group = threadIdx.x / 32 / S::kWarps;
  const int first_row = work.first_v + group * kRows, first_channel = warp * S::kChannels;
  const bool outputs = p.q.present();
  const ScanLayout shared(kLayout, S::kWarps, s.stages, outputs);
  const uint32_t base = shared_address(raw);
  char* const tails = reinterpret_cast<char*>(raw) + s.stages * shared.operand;
  char* const sums = tails + shared.tails * shared.tail + group * shared.group();
  char *const output_sums = sums + shared.exchange, *const shared_w = output_sums + shared.exchange;
  const LdmatrixLane at(lane);

  Ring ring;
  ring.from = p.prepared + (work.first_chunk * p.Hv + work.hv) * kLayout.bytes();
  ring.chunk_step = p.Hv * kLayout.bytes();
  ring.left = work.chunks;
  for (int i = 0; i < s.stages - 1; ++i) load_operand<Parts>(s, kLayout, shared, base, ring);
  int stage = 0, tail = 0;
  // Waits for the next operand and starts a load into the stage of the one before, which all warps have read.
  const auto next_operand = [&] {
    wait_operand(s.stages);
    load_operand<Parts>(s, kLayout, shared, base, ring);
    const uint32_t operand = base + static_cast<uint32_t>(stage * shared.operand);
    stage = stage + 1 == s.stages ? 0 : stage + 1;
    return operand;
  };
  Values<S> v;
  v.load(s, work, 0, first_row, warp, lane);
  State<S::kSteps> state = {};
  load_initial<S::kSteps>(s, work, slots.in, first_row, first_channel, lane, state);
#pragma unroll 1
  for (int64_t c = 0; c < work.chunks; ++c) {
    float x[8][4];
    Corrections<Parts> w;
    multiply_state<Half, Parts, S::kSteps>(state, next_operand(), kLayout.matrix, first_channel, at, x);
    send_partials<S>(sums, warp, lane, x);
    uint32_t queries = 0;
    if (outputs)
      queries = next_operand();
    else if (S::kWarps > 1)
      __syncthreads();
    compute_corrections<Half, Parts, S>(s, sums, shared_w, v, warp, lane, x, w);
    v.load(s, work, c + 1, first_row, warp, lane);
    if (outputs) {
      multiply_state<Half, Parts, S::kSteps>(state, queries, kLayout.matrix, first_channel, at, x);
      send_partials<S>(output_sums, warp, lane, x);
    }
    const uint32_t updates = next_operand();
    if constexpr (S::kWarps > 1) load_corrections<Parts>(shared_w, lane, w);
    const char* const rest = tails + tail * shared.tail;
    tail = tail + 1 == shared.tails ? 0 : tail + 1;
    update_state<Half, Parts, S::kSteps>(state, w, updates, kLayout.matrix, reinterpret_cast<const float*>(rest + kLayout.decays()),
                                         first_channel, at, lane);
    if (outputs) {
#pragma unroll
      for (int block = 0; block < kTokenBlocks; ++block) {
        if (S::owner(block) != warp) continue;
        add_partials<S>(output_sums, warp, block, lane, x[2 * block], x[2 * block + 1]);
        add_corrections<Half, Parts>(x[2 * block], x[2 * block + 1], w, shared_address(rest), block, at);
        store_outputs(s, work, c, block, first_row, lane, x[2 * block], x[2 * block + 1]);
      }
    }
    store_due_checkpoint<S::kSteps>(s, work, c, first_row, first_channel, lane, state);
  }
  store_final<S::kSteps>(s, work, slots.out, first_row, first_channel, lane, state);
}

// run.operator()<Shape>() for the padded K.
template <class Run>
auto dispatch_shape(int padded, const Run& run) {
  if (padded == 64) return run.template operator()<Shape<1, 4>>();
  if (padded == 128) return run.template operator()<Shape<2, 4>>();
  if (padded == 192) return run.template operator()<Shape<4, 3>>();
  return run.template operator()<Shape<4, 4>>();
}

constexpr int warps_of(int padded) { return padded == 64 ? 1 : padded == 128 ? 2 : 4; }

// Estimated cycles of the scan of a chunk by all blocks: products of the busiest scheduler, or reading the operands from the L2 (23 bytes a
// cycle and multiprocessor); and a constant for latencies and barriers.
int64_t chunk_cycles(const StagedParams& s, int groups, int64_t blocks, int multiprocessors) {
  const int warps = warps_of(s.padded), steps = s.padded / warps / 16;
  const int64_t products = (s.parts == 2 ? 3 : 1) * (24 * steps + 20 / warps), running = std::min<int64_t>(blocks, multiprocessors);
  const int64_t multiply = ceil_div(groups * warps, 4) * products * 13,
                read = s.layout().bytes() * running / (23 * multiprocessors);
  return ceil_div(blocks, multiprocessors) * (800 + std::max(multiply, read));
}

}  // namespace

StagedPlan staged_plan(const Stream& stream, const StagedParams& s) {
  const DeviceFacts& facts = facts_of(stream);
  const int warps = warps_of(s.padded);
  const bool outputs = s.p.q.present();
  const auto shared = [&](int stages, int groups) {
    return static_cast<size_t>(ScanLayout(s.layout(), warps, stages, outputs).bytes(stages, groups));
  };
  StagedPlan best;
  int64_t least = 0;
  for (int groups = 1; groups * warps <= kMostWarps; groups *= 2) {
    const int64_t blocks = ceil_div(s.p.V, int64_t{groups} * kRows) * s.p.Hv * s.p.N;
    const int64_t cycles = chunk_cycles(s, groups, blocks, facts.multiprocessors);
    const auto fits = [&](int stages) { return shared(stages, groups) <= static_cast<size_t>(facts.shared_bytes); };
    if (!fits(2) || (best.stages > 0 && cycles >= least)) continue;
    // More blocks than multiprocessors: leave room for a second block.
    const int stages = blocks <= facts.multiprocessors && fits(6) ? 6 : fits(3) ? 3 : 2;
    best = {groups, stages, blocks, shared(stages, groups)};
    least = cycles;
  }
  return best;
}

void launch_staged_scan(const char* op, const Stream& stream, const StagedParams& s, const StagedPlan& plan) {
  StagedParams cut = s;
  cut.groups = plan.groups, cut.stages = plan.stages;
  dispatch_shape(s.padded, [&]<class S>() {
    const auto run = [&](auto kernel) { launch(op, stream, plan.blocks, plan.groups * S::kWarps * 32, plan.shared, kernel, cut); };
    if (s.parts == 2) return run(staged_scan_kernel<__nv_bfloat16, 2, S>);
    if (s.p.k.dtype == DType::f16) return run(staged_scan_kernel<__half, 1, S>);
    run(staged_scan_kernel<__nv_bfloat16, 1, S>);
  });
}

}  // namespace weft::cuda
