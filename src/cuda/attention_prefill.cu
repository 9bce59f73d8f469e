// Attention of many query rows over tiles in lanes order: a warpgroup decodes tiles of 64 tokens to f16 in shared memory, two others of
// 64 query rows each run them through warpgroup products.
//
// A decoded key is (n + 1/2) times its gain over the largest of its tile, a power of two that the scores get back; values alike, in
// weights that carry the ratio of their tile's largest gain to the largest so far. Queries and weights are f16, too, relative to their
// row's largest: each rounding is 2^-12 of a number at most, sums are f32. Codes of a word come out of the table in an order of their
// own (packed_place): queries take that order along coordinates, rows of keys that of the values along tokens, so that nothing is moved.
#include "cuda/attention_prefill.h"

#include "cuda/attention_prefill_decode.cuh"
#include "cuda/launch_early.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {
namespace {

using namespace prefill;

constexpr int kStages = 3, kGroups = 2, kConsumers = 128 * kGroups, kThreads = kConsumers + kProducers;
// What a block starts with is what its warpgroups share; one that asks for more than is left waits for ever.
constexpr int kRegisters = 168, kProducerRegisters = 88, kConsumerRegisters = 208;
static_assert(kProducers * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kRegisters);

struct PrefillParams {
  QueryParams queries;
  LanesSide k, v;
  PartialsPlan plan;
  int64_t row_tiles = 0;
  int k_bits = 4, v_bits = 4;
  int k_bytes = 0, v_bytes = 0;  // of a tile
};

// What a stage says about its tile besides decoded keys and values.
struct alignas(16) TileFacts {
  int position[kTile];  // of the token in each row of keys; -1: none
  float k_scale;        // of scores
  int v_exponent;       // of the largest gain
  int whole;            // every token is there
};

template <int D>
struct Layout {
  static constexpr int kKeys = kTile * D * 2, kStage = 2 * kKeys;  // keys, then values
  static constexpr int kQueryRow = D * 2 + 16;                     // bytes, so that matrices of 8 rows meet all banks
  static constexpr int kQueries = kStages * kStage, kRaw = kQueries + kPrefillRows * kQueryRow;
  static constexpr int shared(int raw_bytes) { return kRaw + 2 * raw_bytes + 1024; }
};

#if WEFT_HAS_WGMMA

// What producers and consumers of a block agree on.
struct Share {
  int64_t appended, live, slot;
  unsigned n, hk, part, tiles_per_page;
  int first_tile, last_tile;
  int first_all, end_all;  // positions that every row sees
  bool ring, paged;
};

__device__ inline int64_t block_of(const QueryParams& q, const Share& at, int tile) {
  if (!at.paged) return at.slot;
  const Tensor& table = q.index.page_table;
  const int64_t block =
      static_cast<const int32_t*>(table.data)[at.n * table.strides[0] + tile / at.tiles_per_page * table.strides[1]];
  return block < q.index.blocks ? block : -1;
}

struct Barriers {
  uint32_t full, empty;  // of stage 0; the others follow
  __device__ uint32_t full_of(int slot) const { return full + slot * 8; }
  __device__ uint32_t empty_of(int slot) const { return empty + slot * 8; }
};

// Smallest e with gain <= 2^e, of a positive number.
__device__ inline int exponent_above(uint32_t bits) { return static_cast<int>((bits + 0x7fffffu) >> 23) - 127; }
__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

struct WarpGains {
  uint32_t k[kTile];                // twice each
  __align__(16) uint16_t v[kTile];  // in the order of rows of keys
};

template <int D>
__device__ void produce(const PrefillParams& p, const Share& at, uint8_t* shared, const Barriers& barriers, TileFacts* facts,
                        WarpGains* all_gains, int thread) {
  using L = Layout<D>;
  const QueryParams& q = p.queries;
  const int lane = thread % 32, raw_bytes = p.k_bytes + p.v_bytes;
  WarpGains& gains = all_gains[thread / 32];
  const bool wrapped = at.ring && at.appended > q.index.rows;
  const RingPositions around(q.index, at.appended);
  const auto fetch = [&](int tile, int slot) {
    if (tile < at.last_tile)
      if (const int64_t block = block_of(q, at, tile); block >= 0) {
        const int64_t inside = at.paged ? tile % at.tiles_per_page : tile;
        const uint32_t to = shared_address(shared + L::kRaw + slot * raw_bytes);
        RawSide<KvRole::k, D>::copy(to, p.k.data + block * p.k.block + at.hk * p.k.head + inside * p.k.tile, p.k_bits, thread);
        RawSide<KvRole::v, D>::copy(to + p.k_bytes, p.v.data + block * p.v.block + at.hk * p.v.head + inside * p.v.tile, p.v_bits,
                                    thread);
      }
    commit_copies();
  };
  int stage = 0;
  uint32_t parity = 1;  // the first round finds every stage free
  fetch(at.first_tile, 0);
  for (int tile = at.first_tile; tile < at.last_tile; ++tile) {
    const int slot = (tile - at.first_tile) & 1;
    wait_copies<0>();
    meet(kGroups);  // the tile is there, and nobody reads the one before any more
    fetch(tile + 1, slot ^ 1);
    const uint8_t* raw = shared + L::kRaw + slot * raw_bytes;
    const bool there = block_of(q, at, tile) >= 0;
    // Gains of tokens 2 lane and 2 lane + 1. Tokens that do not live weigh nothing; a value that is no number makes its key one, too, so
    // that those who do not see it do not get it.
    const uint32_t k_pair = *reinterpret_cast<const uint32_t*>(raw + p.k_bytes - 2 * kTile + 4 * lane);
    const uint32_t v_pair = *reinterpret_cast<const uint32_t*>(raw + raw_bytes - 2 * kTile + 4 * lane);
    float k_gain[2], v_gain[2];
    int position[2];
    uint32_t k_top = 0, v_top = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = tile * kTile + 2 * lane + e;
      position[e] = !there || row >= at.live ? -1 : wrapped ? around.of(row) : row;
      k_gain[e] = __half2float(__ushort_as_half(static_cast<unsigned short>(k_pair >> 16 * e)));
      v_gain[e] = __half2float(__ushort_as_half(static_cast<unsigned short>(v_pair >> 16 * e)));
      if (!isfinite(v_gain[e])) v_gain[e] = 0, k_gain[e] = NAN;
      if (position[e] < 0) k_gain[e] = v_gain[e] = 0;
      if (isfinite(k_gain[e])) k_top = max(k_top, __float_as_uint(fabsf(k_gain[e])));
      v_top = max(v_top, __float_as_uint(fabsf(v_gain[e])));
    }
    k_top = __reduce_max_sync(0xffffffffu, k_top);
    v_top = __reduce_max_sync(0xffffffffu, v_top);
    const int k_exponent = k_top > 0 ? exponent_above(k_top) : 0, v_exponent = v_top > 0 ? exponent_above(v_top) : -24;
    const bool whole = __all_sync(0xffffffffu, position[0] >= 0 && position[1] >= 0) && !at.ring;
    __syncwarp();  // the last tile's gains have been read
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t bits = __half_as_ushort(__float2half_rn(k_gain[e] * power_of_two(-k_exponent)));
      gains.k[2 * lane + e] = bits | bits << 16;
      gains.v[packed_place(p.v_bits, 2 * lane + e)] = __half_as_ushort(__float2half_rn(v_gain[e] * power_of_two(-v_exponent)));
    }
    __syncwarp();
    barrier_wait(barriers.empty_of(stage), parity);
    uint8_t* to = shared + stage * L::kStage;
    if (thread < 32) {
#pragma unroll
      for (int e = 0; e < 2; ++e) facts[stage].position[packed_place(p.v_bits, 2 * lane + e)] = position[e];
      if (lane == 0) {
        facts[stage].k_scale = power_of_two(k_exponent);
        facts[stage].v_exponent = v_exponent;
        facts[stage].whole = whole;
      }
    }
    switch (p.k_bits) {
      case 2: decode_keys<2, D>(raw, p.k.table, gains.k, p.v_bits, to, thread); break;
      case 3: decode_keys<3, D>(raw, p.k.table, gains.k, p.v_bits, to, thread); break;
      case 4: decode_keys<4, D>(raw, p.k.table, gains.k, p.v_bits, to, thread); break;
      default: decode_keys<8, D>(raw, p.k.table, gains.k, p.v_bits, to, thread);
    }
    const uint8_t* v_raw = raw + p.k_bytes;
    const auto* v_gains = reinterpret_cast<const uint8_t*>(gains.v);
    switch (p.v_bits) {
      case 2: decode_values<2, D>(v_raw, p.v.table, v_gains, to + L::kKeys, thread); break;
      case 3: decode_values<3, D>(v_raw, p.v.table, v_gains, to + L::kKeys, thread); break;
      case 4: decode_values<4, D>(v_raw, p.v.table, v_gains, to + L::kKeys, thread); break;
      default: decode_values<8, D>(v_raw, p.v.table, v_gains, to + L::kKeys, thread);
    }
    fence_async();
    barrier_arrive(barriers.full_of(stage));
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Rows of a consumer's warp: 16, of which a lane has lane / 4 and 8 more.
template <int D>
__device__ void consume(const PrefillParams& p, const RowTile& rows, const Share& at, uint8_t* shared, const Barriers& barriers,
                        const TileFacts* facts, float (*row_facts)[2]) {
  using L = Layout<D>;
  constexpr int kSteps = D / 16, kOwn = D / 32;
  constexpr float kLog2e = 1.4426950408889634f, kNone = -INFINITY, kSlack = 6,
                  kOffset = 8;  // weights are below 2^(kSlack + kOffset)
  const QueryParams& q = p.queries;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const bool softcap = q.mask.softcap.has_value();

  // Queries: rotated, relative to a power of two, in the order of the keys' coordinates.
  uint8_t* queries = shared + L::kQueries + warp * 16 * L::kQueryRow;
  uint32_t bits[kOwn] = {};
  const auto load_row = [&](int row) {
    if (row < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, row), lane, bits);
  };
  load_row(warp * 16);
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row = warp * 16 + r;
    float x[kOwn] = {}, from_mean = 0, unit = 0;
    uint32_t now[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) now[e] = bits[e];
    if (r < 15) load_row(row + 1);
    if (row < rows.rows) {
      from_mean = rotate_query<kOwn>(q, now, at.hk, lane, x);
      float top = 0, bad = 0;  // bad: NaN where q holds NaN or infinity, and so are its scores then
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        top = fmaxf(top, fabsf(x[e]));
        bad += x[e] * 0.0f;
      }
      from_mean += sum_warp(bad);
      const int exponent = min(max(exponent_above(__float_as_uint(max_warp(top))), -100), 100);
      unit = power_of_two(exponent);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] *= power_of_two(-exponent);
    }
#pragma unroll
    for (int e = 0; e < kOwn; ++e)
      *reinterpret_cast<__half*>(queries + r * L::kQueryRow + packed_place(p.k_bits, lane * kOwn + e) * 2) = __float2half_rn(x[e]);
    if (lane == 0) {
      const float scale = softcap ? q.scale : q.scale * kLog2e;  // softcap wants natural units
      row_facts[row][0] = unit * p.k.step * scale;
      row_facts[row][1] = from_mean * scale;
    }
  }
  __syncwarp();
  FragmentA query[kSteps];
  {
    const LanePlace place(lane);
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks)
      load_matrices(query[ks].x,
                    shared_address(queries) + place.across_row() * L::kQueryRow + (2 * ks + place.across_piece()) * 16);
  }
  const int own[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  float factor[2], mean[2], base[2] = {kNone, kNone}, sum[2] = {};
  Seen seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    factor[h] = row_facts[own[h]][0];
    mean[h] = row_facts[own[h]][1];
    seen[h] = own[h] < rows.rows ? seen_by(q, rows, at.appended, query_row(rows, q.group, own[h]).t) : Seen{0, 0};
  }

  float o[D / 8][4] = {}, s[8][4], keep[2];
  FragmentA weights[4];
  int top_exponent = -24;
  const auto keys_of = [&](int stage) { return matrix_descriptor(shared_address(shared + stage * L::kStage)); };
  const auto multiply_keys = [&](int stage) {
    const uint64_t keys = keys_of(stage);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks) {
      const uint64_t k = keys + ((ks / 4 * (kTile * 128) + ks % 4 * 32) >> 4);
      if (ks == 0)
        wgmma<__half, false>(s, query[ks], k);
      else
        wgmma<__half, true>(s, query[ks], k);
    }
    wgmma_commit();
  };
  const auto multiply_values = [&](int stage) {
    const uint64_t values = keys_of(stage) + (L::kKeys >> 4);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) wgmma<__half, true>(o, weights[ks], values + (ks * 32 >> 4));
    wgmma_commit();
  };
  // Scores to weights, and what o is to be multiplied by. Sums are relative to a score that none so far passes by much, and to the
  // largest gain of values.
  const auto weigh = [&](int tile, int stage) {
    const TileFacts& own_facts = facts[stage];
    float unit[2] = {factor[0] * own_facts.k_scale, factor[1] * own_facts.k_scale}, shift[2] = {mean[0], mean[1]};
    const int first_token = tile * kTile;
    if (softcap || !own_facts.whole || first_token < at.first_all || first_token + kTile > at.end_all) {
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const int2 position = *reinterpret_cast<const int2*>(own_facts.position + 8 * nt + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2, where = e % 2 ? position.y : position.x;
          float score = fmaf(s[nt][e], unit[h], shift[h]);
          if (softcap) score = capped_fast(score, *q.mask.softcap) * kLog2e;
          s[nt][e] = where < 0 || where < seen[h].first || where >= seen[h].end ? kNone : score;
        }
      }
      unit[0] = unit[1] = 1, shift[0] = shift[1] = 0;
    }
    keep[0] = keep[1] = 1;
    if (own_facts.v_exponent > top_exponent) {
      keep[0] = keep[1] = power_of_two(top_exponent - own_facts.v_exponent);
      top_exponent = own_facts.v_exponent;
    }
    float top[2] = {kNone, kNone};
#pragma unroll
    for (int nt = 0; nt < 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[nt][e]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
      top[h] = fmaf(fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 2)), unit[h], shift[h]);
      if (top[h] > base[h] + kSlack) {
        const float less = exp2_fast(base[h] - top[h]);
        keep[h] *= less;
        sum[h] *= less;
        base[h] = top[h];
      }
    }
    const int behind = own_facts.v_exponent - top_exponent;  // <= 0
    float here[2] = {}, from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) from[h] = shift[h] - (base[h] == kNone ? 0.0f : base[h]) + kOffset + static_cast<float>(behind);
#pragma unroll
    for (int nt = 0; nt < 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[nt][e] = exp2_fast(fmaf(s[nt][e], unit[e / 2], from[e / 2]));
        here[e / 2] += s[nt][e];
      }
    const float ahead = power_of_two(-behind);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(here[h], ahead, sum[h]);
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) weights[ks] = operand<__half>(s[2 * ks], s[2 * ks + 1]);
  };
  // Scores of a tile are worked on while the values of the one before are summed.
  if (at.first_tile < at.last_tile) {
    int stage = 0;
    uint32_t parity = 0;
    barrier_wait(barriers.full_of(0), 0);
    multiply_keys(0);
    wgmma_wait<0>();
    pin(s);
    weigh(at.first_tile, 0);
    pack_weights();
#pragma unroll 1
    for (int tile = at.first_tile + 1; tile < at.last_tile; ++tile) {
      const int before = stage;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
      barrier_wait(barriers.full_of(stage), parity);
      pin(s);
      multiply_keys(stage);
      pin(o);
      multiply_values(before);
      wgmma_wait<1>();
      pin(s);
      weigh(tile, stage);
      wgmma_wait<0>();
      pin(o);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.empty_of(before));
      if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[nt][e] *= keep[e / 2];
      }
      pack_weights();
    }
    pin(o);
    multiply_values(stage);
    wgmma_wait<0>();
    pin(o);
  }

  const PartialsView& out = p.plan.out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    if (own[h] >= rows.rows) continue;
    const QueryRow row = query_row(rows, q.group, own[h]);
    const float unit = p.v.step * power_of_two(top_exponent);
    float* to = out.o + out.o_at(row.t, row.hq, at.part, 0) + 2 * t;
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt) *reinterpret_cast<float2*>(to + 8 * nt) = {o[nt][2 * h] * unit, o[nt][2 * h + 1] * unit};
    if (t == 0) {
      out.m[out.m_at(row.t, row.hq, at.part)] = sum[h] != sum[h] ? NAN : (base[h] - kOffset) / kLog2e;
      out.l[out.l_at(row.t, row.hq, at.part)] = sum[h];
    }
  }
}

#endif  // WEFT_HAS_WGMMA

template <int D>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams p) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t unaligned[];
  __shared__ alignas(8) uint64_t counters[2 * kStages];
  __shared__ TileFacts facts[kStages];
  __shared__ __align__(16) WarpGains gains[kProducers / 32];
  __shared__ float row_facts[kPrefillRows][2];
  __shared__ int bounds[4][4];
  wait_for_kernels_before();
  release_kernels_behind();
  const QueryParams& q = p.queries;
  unsigned item = blockIdx.x;
  const auto row_tiles = static_cast<unsigned>(p.row_tiles), parts = static_cast<unsigned>(p.plan.count),
             heads = static_cast<unsigned>(q.Hk);
  const unsigned tile_index = item % row_tiles;
  Share at;
  at.part = (item /= row_tiles) % parts;
  at.hk = (item /= parts) % heads;
  at.n = item / heads;
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, at.n, at.hk, tile_index, kPrefillRows);
  if (rows.rows == 0 || rows.range.length() * q.group < kPrefillFewest) return;
  at.ring = q.index.kind == CacheKind::ring;
  at.paged = q.index.kind == CacheKind::paged;
  at.appended = appended_tokens(q.index, at.n);
  at.live = live_tokens(q.index, at.appended);
  at.slot = at.paged ? 0 : slot_of(q.index.slots, at.n, q.index.blocks);
  at.tiles_per_page = static_cast<unsigned>(q.index.rows / kTileTokens);

  // What the rows see: any of them, and all of them.
  uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const Barriers barriers{shared_address(counters), shared_address(counters + kStages)};
  if (threadIdx.x < kPrefillRows) {
    const int row = threadIdx.x;
    Seen mine{0x7fffffff, 0};
    if (row < rows.rows) mine = seen_by(q, rows, at.appended, query_row(rows, q.group, row).t);
    const bool there = row < rows.rows, some = there && mine.first < mine.end;
    const int first_seen = __reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff);
    const int end_seen = __reduce_max_sync(0xffffffffu, some ? mine.end : 0);
    const int first_all = __reduce_max_sync(0xffffffffu, there ? mine.first : 0);
    const int end_all = __reduce_min_sync(0xffffffffu, there ? mine.end : 0x7fffffff);
    if (row % 32 == 0) {
      int* own = bounds[row / 32];
      own[0] = first_seen, own[1] = end_seen, own[2] = first_all, own[3] = end_all;
    }
  }
  if (threadIdx.x == kPrefillRows) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full_of(i), kProducers);
      barrier_init(barriers.empty_of(i), kConsumers / 32);
    }
    fence_async();
  }
  __syncthreads();
  int first_seen = bounds[0][0], end_seen = bounds[0][1];
  at.first_all = bounds[0][2], at.end_all = bounds[0][3];
#pragma unroll
  for (int w = 1; w < 4; ++w) {
    first_seen = min(first_seen, bounds[w][0]), end_seen = max(end_seen, bounds[w][1]);
    at.first_all = max(at.first_all, bounds[w][2]), at.end_all = min(at.end_all, bounds[w][3]);
  }
  const int64_t end_token = at.ring || end_seen > at.live ? at.live : end_seen;
  int64_t tile_begin = at.ring ? 0 : first_seen / kTileTokens, tile_end = (end_token + kTileTokens - 1) / kTileTokens;
  if (at.slot < 0 || first_seen >= end_seen || tile_begin > tile_end) tile_begin = tile_end = 0;
  const auto tiles = static_cast<unsigned>(tile_end - tile_begin);
  const unsigned share = (tiles + parts - 1) / parts, begin = min(at.part * share, tiles), end = min(begin + share, tiles);
  at.first_tile = static_cast<int>(tile_begin + begin), at.last_tile = static_cast<int>(tile_begin + end);

  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    produce<D>(p, at, shared, barriers, facts, gains, threadIdx.x - kConsumers);
  } else {
    take_registers<kConsumerRegisters>();
    consume<D>(p, rows, at, shared, barriers, facts, row_facts);
  }
#endif
}

// Was the kernel compiled for Hopper's own instructions, not from the PTX for older devices?
bool built_for_hopper() {
  static const bool built = [] {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(prefill_kernel<128>)) == cudaSuccess)
      return attributes.ptxVersion >= 90;
    cudaGetLastError();
    return false;
  }();
  return built;
}

bool bits_fit(const KvFormat& format) { return format.bits <= 4 || format.bits == 8; }

}  // namespace

bool prefill_takes(const Stream& stream, const KvCache& cache) {
  const int64_t D = cache.k.format.head_dim;
  return facts_of(stream).major == 9 && (D == 64 || D == 128) && lanes_cache(cache) && bits_fit(cache.k.format) &&
         bits_fit(cache.v.format) && built_for_hopper();
}

void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan) {
  PrefillParams p{queries, lanes_side(cache.k, 128), lanes_side(cache.v, 128), plan};
  p.row_tiles = ceil_div(queries.longest * queries.group, kPrefillRows);
  p.k_bits = cache.k.format.bits;
  p.v_bits = cache.v.format.bits;
  p.k_bytes = static_cast<int>(tile_bytes(cache.k.format));
  p.v_bytes = static_cast<int>(tile_bytes(cache.v.format));
  const int64_t blocks = queries.queries.sequences.count * queries.Hk * plan.count * p.row_tiles;
  const int raw = p.k_bytes + p.v_bytes;
  if (cache.k.format.head_dim == 64)
    launch_early(op, stream, blocks, kThreads, static_cast<size_t>(Layout<64>::shared(raw)), prefill_kernel<64>, p);
  else
    launch_early(op, stream, blocks, kThreads, static_cast<size_t>(Layout<128>::shared(raw)), prefill_kernel<128>, p);
}

}  // namespace weft::cuda
