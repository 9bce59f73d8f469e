// Attention of many query rows over tiles in lanes order: one warpgroup decodes keys of 64 tokens to f16 in shared memory, one values, two
// others of 64 query rows each run them through warpgroup products.
//
// A decoded key is n + 1/2, exact; its gain multiplies its scores, in f32. (As f16 products of the two, all of whose 16 are rounded the
// same way wherever they occur, keys would err by more than all else: with scores of 15 and more by 1e-3 of the output alone.) A value is
// n + 1/2 times its gain over the largest of its tile, a power of two, in weights that carry the ratio of that to the largest so far.
// Queries and weights are f16, too: each rounding is 2^-12 of a number at most, sums are f32. Codes of a word come out of the table in an
// order of their own (packed_place): queries take that order along coordinates, rows of keys that of the values along tokens, so that
// nothing is moved.
#include "cuda/attention/prefill.h"

#include "cuda/attention/prefill_uncompressed.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {
namespace {

using namespace prefill;

constexpr int kConsumers = 2 * kGroup, kThreads = kConsumers + 2 * kGroup;
// What a block starts with is what its warpgroups share; one that asks for more than is left waits for ever.
template <int D>
struct Registers {
  static constexpr int kAll = 128, kProducer = D > 128 ? 40 : 64, kConsumer = D > 128 ? 216 : 192;
  static_assert(2 * kGroup * kProducer + kConsumers * kConsumer <= kThreads * kAll);
};

#if WEFT_HAS_WGMMA

// Consumers take turns: named barriers that one warpgroup waits at and the other only reaches.
constexpr int kFirstTurn = 5;
__device__ inline void turn_sync(uint32_t turn) { asm volatile("bar.sync %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory"); }
__device__ inline void turn_arrive(uint32_t turn) { asm volatile("bar.arrive %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory"); }

// Powers of two that a row's largest query may be near to be f16 as it is.
constexpr int kMinQueryExponent = -8, kMaxQueryExponent = 15;

// Rows of a consumer's warp: 16, of which a lane has lane / 4 and 8 more.
template <int D, bool Uncompressed>
__device__ void consume(const PrefillParams& p, const RowTile& rows, const CacheTiles& at, unsigned part, const Layout<D>& places,
                        SharedState& share, float (*row_facts)[2]) {
  using L = Layout<D>;
  constexpr int kSteps = D / 16, kOwn = D / 32;
  constexpr int kColumns = D > 128 ? 16 : D / 8, kParts = D / 8 / kColumns;  // products for values have 128 columns at most
  constexpr float kOffset = 8;                                               // weights are below 2^(kLazyRescale + kOffset)
  const QueryParams& q = p.queries;
  const int warp = threadIdx.x / 32, lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32), t = lane % 4;
  const bool softcap = q.mask.softcap.has_value();

  // Queries: rotated, as f16, in the order of the keys' coordinates. Rows that would not fit are relative to a power of two of their own.
  uint8_t* queries = places.queries + (L::kQueriesInShared ? warp / 4 * L::kTileBytes : warp * 16 * L::kQueryRow);
  uint32_t bits[kOwn] = {};
  const auto load_row = [&](int row) {
    if (row < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, row), lane, bits);
  };
  load_row(warp * 16);
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row = warp * 16 + r;
    float x[kOwn] = {}, from_mean = 0, unit = 1;
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
      top = max_warp(top);
      const int exponent = min(max(exponent_above(__float_as_uint(top)), -100), 100);
      const bool fits = top == 0 || (exponent >= kMinQueryExponent && exponent <= kMaxQueryExponent);
      if (!fits) unit = power_of_two(exponent);
      // Larger sums must be larger scores: what is negative in the scale goes to q.
      const float down = copysignf(fits ? 1.0f : power_of_two(-exponent), q.scale);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] *= down;
    }
    if constexpr (L::kQueriesInShared) {  // as products take them; a lane has a piece
      const int inside = warp % 4 * 16 + r;
      *reinterpret_cast<uint4*>(queries + lane / 8 * (kTile * 128) + inside * 128 + (((lane ^ inside) & 7) << 4)) = {
          pack<__half>(x[0], x[1]), pack<__half>(x[2], x[3]), pack<__half>(x[4], x[5]), pack<__half>(x[6], x[7])};
    } else {
#pragma unroll
      for (int e = 0; e < kOwn; ++e)
        *reinterpret_cast<__half*>(queries + r * L::kQueryRow + packed_place(p.k_bits, lane * kOwn + e) * 2) =
            __float2half_rn(x[e]);
    }
    if (lane == 0) {
      row_facts[row][0] = unit;
      row_facts[row][1] = from_mean * score_unit(q.scale, softcap);
    }
  }
  __syncwarp();
  FragmentA query[L::kQueriesInShared ? 1 : kSteps];
  if constexpr (L::kQueriesInShared) {
    fence_proxy_async();
    warpgroup_sync(warp / 4);
  } else {
    const LdmatrixLane place(lane);
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks)
      ldmatrix(query[ks].x, shared_address(queries) + place.across_row() * L::kQueryRow + (2 * ks + place.across_piece()) * 16);
  }
  __syncwarp();
  if (lane < L::kStages)
    mbarrier_arrive(values_barriers(shared_address(&share)).empty_of(lane));  // the queries have left the place of the values
  const int own[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  float unit[2], shift[2];
  RunningSoftmax softmax[2];
  VisibleRange seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unit[h] = row_facts[own[h]][0];
    shift[h] = row_facts[own[h]][1];
    seen[h] = own[h] < rows.rows ? seen_by(q, rows, at.appended, query_row(rows, q.group, own[h]).t) : VisibleRange{0, 0};
  }

  const bool apart = __any_sync(0xffffffffu, unit[0] != 1.0f || unit[1] != 1.0f);

  float o[kParts][kColumns][4] = {}, s[8][4], keep[2];
  float gains[8][2];  // of tokens 8 nt + 2 t and the next
  FragmentA weights[4];
  int top_exponent = -24,
      sum_exponent = p.bf16 ? kMinExponent : 0;  // sum_exponent: bf16, of the power of two that sums have been left without
  const uint32_t shared_base = uniform(shared_address(&share)), keys_at = uniform(shared_address(places.keys)),
                 values_at = uniform(shared_address(places.values)), queries_at = uniform(shared_address(queries)),
                 group = uniform(warp / 4), own_turn = uniform(kFirstTurn + group), other_turn = uniform(kFirstTurn + 1 - group);
  const StageBarriers of_keys = keys_barriers(shared_base), of_values = values_barriers(shared_base);
  const auto pin_sums = [&] {
#pragma unroll
    for (int part = 0; part < kParts; ++part) pin(o[part]);
  };
  const auto multiply_keys = [&](int stage) {
    const uint32_t first = smem_descriptor(keys_at + stage * L::kTileBytes), query_at = smem_descriptor(queries_at);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks) {
      const uint32_t further = (ks / 4 * (kTile * 128) + ks % 4 * 32) >> 4, k = first + further;
      if constexpr (L::kQueriesInShared)
        ks == 0 ? wgmma_shared<__half, false>(s, query_at, k) : wgmma_shared<__half, true>(s, query_at + further, k);
      else if (ks == 0)
        wgmma<__half, false>(s, query[ks], k);
      else
        wgmma<__half, true>(s, query[ks], k);
    }
    wgmma_commit();
  };
  const auto multiply_values = [&](int stage) {
    const uint32_t address = values_at + stage * L::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ++ks)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if constexpr (Uncompressed)
          wgmma_transposed(o[part], weights[ks], transposed_descriptor(address + part * 2 * (kTile * 128) + ks * 16 * 128));
        else
          wgmma<__half, true>(o[part], weights[ks], smem_descriptor(address) + (ks * 32 >> 4));
    wgmma_commit();
  };
  // Values that were bf16 have left out a power of two, which may be less than what sums leave out, or more.
  const auto relate_values = [&](int stage) {
    if constexpr (Uncompressed) {
      if (!p.bf16) return;
      const int own = share.exponent[stage];
      if (own > sum_exponent) {
        const float less = own - sum_exponent <= 126 ? power_of_two(sum_exponent - own) : 0.0f;
        sum_exponent = own;
#pragma unroll
        for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[nt / kColumns][nt % kColumns][e] *= less;
      } else if (own < sum_exponent) {
        const uint32_t less = GainPairs::inverse(min(sum_exponent - own, 40));
#pragma unroll
        for (int ks = 0; ks < 4; ++ks)
#pragma unroll
          for (uint32_t& pair : weights[ks].x) pair = times(pair, less);
      }
    }
  };
  const auto facts_of = [&](int tile) -> const TileInfo& { return share.facts[info_slot(tile)]; };
  // What is known of a tile before its scores.
  struct Known {
    bool hides;
    int behind;            // exponent of the largest gain of its values relative to that so far, <= 0
    float above, from[2];  // of exponents of weights: what all have, and what makes them of scores
  };
  const auto expect = [&](int tile) {
    const TileInfo& facts = facts_of(tile);
    const float unit_of_keys = Uncompressed && p.bf16 ? facts.unit : p.unit;
#pragma unroll
    for (int nt = 0; nt < 8; nt += 2) {
      const float4 four = Uncompressed ? float4{unit_of_keys, unit_of_keys, unit_of_keys, unit_of_keys}
                                       : *reinterpret_cast<const float4*>(facts.gain[t] + 2 * nt);
      gains[nt][0] = four.x, gains[nt][1] = four.y, gains[nt + 1][0] = four.z, gains[nt + 1][1] = four.w;
    }
    const int2 others = *reinterpret_cast<const int2*>(&facts.v_exponent);
    keep[0] = keep[1] = 1;
    if (others.x > top_exponent) {
      keep[0] = keep[1] = power_of_two(top_exponent - others.x);
      top_exponent = others.x;
    }
    Known known{others.y != 0, others.x - top_exponent};
    known.above = kOffset + static_cast<float>(known.behind);
#pragma unroll
    for (int h = 0; h < 2; ++h) known.from[h] = known.above - softmax[h].reference();
    return known;
  };
  // Scores to weights, and what o is to be multiplied by. Sums are relative to a score that none so far passes by much, and to the
  // largest gain of values.
  const auto weigh = [&](int tile, const Known& known, const PipelineStage<L::kStages>& place) {
    const bool hides = known.hides;
    const float above = known.above;
    if (softcap || hides || apart) {
      if constexpr (Uncompressed)
        if (hides) mbarrier_wait(of_values.full_of(place.slot), place.parity);
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const int2 position = *reinterpret_cast<const int2*>(facts_of(tile).position + 8 * nt + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2, where = e % 2 ? position.y : position.x;
          float score = fmaf(s[nt][e] * gains[nt][e % 2], unit[h], shift[h]);
          if (softcap) score = softcap_fast(score, *q.mask.softcap) * kLog2e;
          if constexpr (Uncompressed)
            if (hides && share.bad[place.slot][nt / 4] >> (8 * nt % 32 + 2 * t + e % 2) & 1) score = NAN;
          s[nt][e] = seen[h].hides(where) ? kMasked : score + known.from[h];
        }
      }
    } else {
      const float from[2] = {known.from[0] + shift[0], known.from[1] + shift[1]};
#pragma unroll
      for (int nt = 0; nt < 8; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[nt][e] = fmaf(s[nt][e], gains[nt][e % 2], from[e / 2]);
    }
    // Whether somebody's score is that much larger: seldom. As integers, floats above zero are in order and those below are less.
    bool passed = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int tops[2] = {__float_as_int(s[0][2 * h]), __float_as_int(s[0][2 * h + 1])};
#pragma unroll
      for (int nt = 1; nt < 7; nt += 2)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          tops[e] = __vimax3_s32(tops[e], __float_as_int(s[nt][2 * h + e]), __float_as_int(s[nt + 1][2 * h + e]));
      const int top = __vimax3_s32(max(tops[0], tops[1]), __float_as_int(s[7][2 * h]), __float_as_int(s[7][2 * h + 1]));
      passed |= softmax[h].max == kMasked || !(kLazyRescale + above > 0) || __int_as_float(top) > kLazyRescale + above;
    }
    if (__any_sync(0xffffffffu, passed)) {
      float lower[2], top[2] = {kMasked, kMasked};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int nt = 0; nt < 8; ++nt) top[h] = fmaxf(top[h], fmaxf(s[nt][2 * h], s[nt][2 * h + 1]));
        lower[h] = softmax[h].raise_relative(max_over_lanes<1, 4>(top[h]) - above, keep[h]);
      }
#pragma unroll
      for (int nt = 0; nt < 8; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[nt][e] -= lower[e / 2];
    }
    float sums[4] = {};
#pragma unroll
    for (int nt = 0; nt < 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[nt][e] = add_weight(s[nt][e], sums[e]);
    const float here[2] = {sums[0] + sums[1], sums[2] + sums[3]};
    const float ahead = power_of_two(-known.behind);
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax[h].sum = fmaf(here[h], ahead, softmax[h].sum);
    return here[0] + here[1];
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) weights[ks] = operand<__half>(s[2 * ks], s[2 * ks + 1]);
  };
  // Scores of a tile are worked on while the values of the one before are summed, and while the other warpgroup has its products: the
  // two take turns, which end when a warpgroup has its scores. (When all products have only been asked for, those of the two mix, and
  // both wait for scores at the same time; when the sums are there, too, the other's turn comes too late.)
  // `known`: a number that is never -1, so that what it is made of comes first: the assembler would wait for the sums before it weighs.
  const auto done_with = [&](uint32_t barrier, float known) {
    __syncwarp();
    if (lane == 0 && known != -1.0f) mbarrier_arrive(barrier);
  };
  if (group == 1) turn_arrive(other_turn);
  PipelineStage<L::kStages> keys, values;
  if (at.first_tile < at.last_tile) {
    mbarrier_wait(of_keys.full_of(keys.slot), keys.parity);
    turn_sync(own_turn);
    multiply_keys(keys.slot);
    turn_arrive(other_turn);
    const Known known = expect(at.first_tile);
    wgmma_wait<0>();
    pin(s);
    done_with(of_keys.empty_of(keys.slot), weigh(at.first_tile, known, keys));
    keys.next();
    pack_weights();
    bool keys_there = false, values_there = false;  // asked for long before, since the answer takes its time
#pragma unroll 1
    for (int tile = at.first_tile + 1; tile < at.last_tile; ++tile) {
      if (!keys_there) mbarrier_wait(of_keys.full_of(keys.slot), keys.parity);
      if (!values_there) mbarrier_wait(of_values.full_of(values.slot), values.parity);
      relate_values(values.slot);
      turn_sync(own_turn);
      pin(s);
      multiply_keys(keys.slot);
      pin_sums();
      multiply_values(values.slot);
      const PipelineStage<L::kStages> now = keys, summed = values;
      keys.next();
      values.next();
      keys_there = mbarrier_test(of_keys.full_of(keys.slot), keys.parity);
      values_there = mbarrier_test(of_values.full_of(values.slot), values.parity);
      const Known known = expect(tile);
      wgmma_wait<1>();
      pin(s);
      turn_arrive(other_turn);
      done_with(of_keys.empty_of(now.slot), weigh(tile, known, now));
      pin(s);
      wgmma_wait<0>();
      pin_sums();
      done_with(of_values.empty_of(summed.slot), 0.0f);
      if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[nt / kColumns][nt % kColumns][e] *= keep[e / 2];
      }
      pack_weights();
    }
    mbarrier_wait(of_values.full_of(values.slot), values.parity);
    relate_values(values.slot);
    pin_sums();
    multiply_values(values.slot);
    wgmma_wait<0>();
    pin_sums();
  }
  if (group == 0) turn_sync(own_turn);

  const PartialsView& out = p.plan.out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = sum_over_lanes<1, 4>(softmax[h].sum);
    if (own[h] >= rows.rows) continue;
    const QueryRow row = query_row(rows, q.group, own[h]);
    const float unit = p.v.step * power_of_two(top_exponent) * (Uncompressed ? power_of_two(sum_exponent) : 1.0f);
    float* to = out.o + out.o_at(row.t, row.hq, part, 0) + 2 * t;
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt) {
      const float(&sums)[4] = o[nt / kColumns][nt % kColumns];
      *reinterpret_cast<float2*>(to + 8 * nt) = {sums[2 * h] * unit, sums[2 * h + 1] * unit};
    }
    if (t == 0) {
      out.m[out.m_at(row.t, row.hq, part)] = sum != sum ? NAN : natural_max(softmax[h].max, kOffset);
      out.l[out.l_at(row.t, row.hq, part)] = sum;
    }
  }
}

#endif  // WEFT_HAS_WGMMA

template <int D, bool Uncompressed>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams p) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];  // as matrices want it
  __shared__ SharedState share;
  __shared__ float row_facts[kPrefillRows][2];
  __shared__ int bounds[4][4];
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const BlockItem item(q, p.row_tiles, p.plan.count);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, kPrefillRows);
  if (rows.rows == 0 || rows.range.length() * q.group < kPromptRows) return;
  CacheTiles at(q, item);

  // What the rows see: any of them, and all of them.
  if (threadIdx.x < kPrefillRows) {
    const int row = threadIdx.x;
    VisibleRange mine = kSeesNothing;
    if (row < rows.rows) mine = seen_by(q, rows, at.appended, query_row(rows, q.group, row).t);
    const VisibleRange any = seen_by_any(mine, row < rows.rows), all = seen_by_all(mine, row < rows.rows);
    if (row % 32 == 0) {
      int* own = bounds[row / 32];
      own[0] = any.first, own[1] = any.end, own[2] = all.first, own[3] = all.end;
    }
  }
  if (threadIdx.x == kPrefillRows) {
    for (int i = 0; i < Layout<D>::kStages; ++i) {
      mbarrier_init(shared_address(share.k_full + i), kGroup);
      mbarrier_init(shared_address(share.v_full + i), kGroup);
      mbarrier_init(shared_address(share.k_empty + i), kConsumers / 32);
      mbarrier_init(shared_address(share.v_empty + i), kConsumers / 32);
    }
    fence_proxy_async();
  }
  static_assert(Layout<D>::kQueriesInShared ||
                Layout<D>::kReserved + sizeof share + sizeof row_facts + 1024 + Layout<D>::kStages * Layout<D>::kTileBytes <=
                    Layout<D>::kTableAt);
  const Layout<D> places(p, shared);
  if (threadIdx.x >= kConsumers && places.table_bytes(p) > 0)
    fill_table(p, places.table, threadIdx.x - kConsumers, kThreads - kConsumers);
  __syncthreads();
  int first_seen = bounds[0][0], end_seen = bounds[0][1];
  VisibleToAll all{bounds[0][2], bounds[0][3]};
#pragma unroll
  for (int w = 1; w < 4; ++w) {
    first_seen = min(first_seen, bounds[w][0]), end_seen = max(end_seen, bounds[w][1]);
    all.first = max(all.first, bounds[w][2]), all.end = min(all.end, bounds[w][3]);
  }
  at.take(item, p.plan.count, {first_seen, end_seen});

  if (threadIdx.x < kConsumers) {
    setmaxnreg_inc<Registers<D>::kConsumer>();
    consume<D, Uncompressed>(p, rows, at, item.split, places, share, row_facts);
  } else {
    setmaxnreg_dec<Registers<D>::kProducer>();
    const bool k = threadIdx.x < kConsumers + kGroup;
    const KvRole role = k ? KvRole::k : KvRole::v;
    if constexpr (Uncompressed)
      produce_uncompressed<D>(role, p, at, all, places, share, threadIdx.x % kGroup);
    else
      produce<D>(role, p, at, all, places, share, threadIdx.x % kGroup);
  }
#endif
}

bool bits_fit(const KvFormat& format) { return format.bits <= 4 || format.bits == 8; }

}  // namespace

bool prefill_takes(const Stream& stream, const KvCache& cache) {
  const auto built = [] {
    static const bool is = compiled_for_hopper(reinterpret_cast<const void*>(prefill_kernel<128, false>));
    return is;
  };
  const int64_t D = cache.k.format.head_dim;
  const bool coded = (D == 64 || D == 128) && coded_tile_cache(cache) && bits_fit(cache.k.format) && bits_fit(cache.v.format);
  return facts_of(stream).major == 9 && (coded || uncompressed_tiles(cache)) && built();
}

void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan) {
  const bool plain = uncompressed_tiles(cache);
  const auto side = [&](const KvSide& own) { return plain ? CodedSide{side_addresses(own)} : coded_side(own, 128); };
  PrefillParams p{queries, side(cache.k), side(cache.v), plan};
  p.row_tiles = ceil_div(queries.longest * queries.group, kPrefillRows);
  p.k_bits = plain ? 16 : cache.k.format.bits;
  p.v_bits = plain ? 16 : cache.v.format.bits;
  p.bf16 = plain && cache.k.format.passthrough == DType::bf16;
  p.k_bytes = static_cast<int>(tile_bytes(cache.k.format));
  p.v_bytes = static_cast<int>(tile_bytes(cache.v.format));
  p.unit = p.k.step * std::fabs(queries.scale) * score_unit(1.0f, queries.mask.softcap.has_value());
  const int64_t blocks = queries.queries.sequences.count * queries.Hk * plan.count * p.row_tiles;
  const auto enqueue = [&]<int D, bool Uncompressed>() {
    launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(Layout<D>::shared(p)), prefill_kernel<D, Uncompressed>, p);
  };
  switch (cache.k.format.head_dim) {
    case 64: return plain ? enqueue.template operator()<64, true>() : enqueue.template operator()<64, false>();
    case 128: return plain ? enqueue.template operator()<128, true>() : enqueue.template operator()<128, false>();
    default: enqueue.template operator()<256, true>();
  }
}

}  // namespace weft::cuda
