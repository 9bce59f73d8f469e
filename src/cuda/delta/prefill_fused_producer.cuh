// What prepares chunks beside the walk of the fused prefill: M, R and factors as prefill.cuh has them, for parts of 32 tokens.
//
// Keys and queries of a part, which lie together, are multiplied with its keys: the first two warps then have rows of K K^T, the
// others of Q K^T. With blocks 1 and 2 of 16 tokens, X' = diag(rk) X as in prefill_prepare_wgmma.cu and N = -diag(beta rk) K
// K^T, the inverse of a part is X'_11, X'_22 and X'_21 = X'_22 N_21 X'_11, which the first two warps make for both parts while the
// others write scores. Then M transposed and R are products of keys and scores with it, in shared memory all of them. A product of
// scores has 64 rows, of either part, and columns of either part's inverse; those where they differ are not used, whatever they
// are.
#pragma once

#include "cuda/delta/prefill_fused.cuh"

#if WEFT_HAS_WGMMA

namespace weft::cuda::fused {

// The two warps of a preparer that invert meet; its warps meet at warpgroup_sync(preparer).
__device__ inline void meet_inverters(int preparer) {
  asm volatile("bar.sync %0, 64;" ::"r"(kPreparers + 1 + preparer) : "memory");
}

// Accumulators of 16 x 16 in two parts, as A operand; the same registers are the B operand of a product over their columns.
template <class Half>
struct Block {
  FragmentA high, low;
  __device__ void split_of(const float (&left)[4], const float (&right)[4]) { split<Half>(left, right, high, low); }
  __device__ void load(uint32_t at) {
    ldmatrix(high.x, at);
    ldmatrix(low.x, at ^ kLow);
  }
  __device__ void store(uint32_t at) const {
    stmatrix(at, high.x[0], high.x[1], high.x[2], high.x[3]);
    stmatrix(at ^ kLow, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
};

__device__ inline float inverse_root(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x + kKeyNormEps<float>));
  return root;
}

// 1 / sqrt(x + kKeyNormEps) of the diagonal of a block, whose row g has column g, of 8, in lane 4 g + g / 2. To every lane, for its rows.
__device__ inline void inverse_lengths(const float (&x)[2][4], int lane, float (&out)[2]) {
  const int g = lane / 4, from = lane - lane % 4 + g / 2;
  const float own[2] = {g % 2 ? x[0][1] : x[0][0], g % 2 ? x[1][3] : x[1][2]};
#pragma unroll
  for (int i = 0; i < 2; ++i) out[i] = inverse_root(__shfl_sync(0xffffffffu, own[i], from));
}

// 1 / sqrt(x + kKeyNormEps) of the squared lengths of 16 rows of queries of either part, of which the second lies `next_part` further, to
// every lane for its rows. Products for these would wait for the tensor cores, behind others'; and code that is not unrolled leaves room
// for the rest in the instruction cache.
template <class Half>
__device__ void query_lengths(uint32_t first_row, uint32_t next_part, int lane, float (&out)[kParts][2]) {
  uint32_t row = first_row + lane / 16 * kPanel + lane % 16 * 128;
  float roots[kParts] = {};
#pragma unroll 1
  for (int part = 0; part < kParts; ++part, row += next_part) {
    float even = 0, odd = 0;
#pragma unroll 4
    for (int piece = 0; piece < 8; ++piece) {
      const uint4 x = load_shared(row ^ (piece ^ lane % 8) << 4);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpack<Half>(pairs[i]);
        even = fmaf(y.x, y.x, even);
        odd = fmaf(y.y, y.y, odd);
      }
    }
    const float half = even + odd, root = inverse_root(half + __shfl_xor_sync(0xffffffffu, half, 16));
    roots[0] = part ? roots[0] : root;
    roots[1] = root;
  }
#pragma unroll
  for (int i = 0; i < 2 * kParts; ++i) out[i / 2][i % 2] = __shfl_sync(0xffffffffu, roots[i / 2], lane / 4 + i % 2 * 8);
}

// Inverts diag(1 / rk) - N of 16 tokens of either part, by substitution in f32: a lane per part and column. `columns` are those of rk N.
// A column becomes a row of `inverse`, which begins with the block's.
template <class Half>
__device__ void invert_tokens(const float (&columns)[kParts][kBlock][kBlock + 4], const float (&rk)[kParts][2], char* inverse,
                              int block, int lane) {
  const int column = lane % kBlock, part = lane / kBlock, from = column % 8 * 4;
  float root[kParts][2];
#pragma unroll
  for (int i = 0; i < 2 * kParts; ++i) root[i / 2][i % 2] = __shfl_sync(0xffffffffu, rk[i / 2][i % 2], from);
  const float own = part ? (column < 8 ? root[1][0] : root[1][1]) : (column < 8 ? root[0][0] : root[0][1]);
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = i == column ? own : 0.0f;
#pragma unroll
  for (int m = 0; m + 1 < kBlock; ++m)
#pragma unroll
    for (int four = (m + 1) / 4 * 4; four < kBlock; four += 4) {
      const float4 n = *reinterpret_cast<const float4*>(&columns[part][m][four]);
      if (four > m) x[four] = fmaf(n.x, x[m], x[four]);
      if (four + 1 > m) x[four + 1] = fmaf(n.y, x[m], x[four + 1]);
      if (four + 2 > m) x[four + 2] = fmaf(n.z, x[m], x[four + 2]);
      if (four + 3 > m) x[four + 3] = fmaf(n.w, x[m], x[four + 3]);
    }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const uint32_t place = Square::offset(part * kPart + block * kBlock + column, block * 2 + piece);
    store_eight<Half>(inverse + place, inverse + (place ^ kLow), x + piece * 8);
  }
}

// X'_21 of a part, transposed, from N_21: X'_11^T N_21^T X'_22^T. From the part's first row on.
template <class Half>
__device__ void invert_below(uint32_t inverse, const LdmatrixLane& at, Block<Half>& below) {
  const uint32_t first_at = inverse + Square::offset(at.across_row(), at.across_piece()),
                 below_at = inverse + Square::offset(at.across_row(), 2 + at.across_piece()), second_at = below_at + kBlock * 128;
  Block<Half> first, sum;
  first.load(first_at);
  float z[2][4] = {}, x[2][4] = {};
  const uint32_t n_high[4] = {below.high.x[0], below.high.x[2], below.high.x[1], below.high.x[3]},
                 n_low[4] = {below.low.x[0], below.low.x[2], below.low.x[1], below.low.x[3]};
  multiply_parts<Half>(z, first.high, first.low, n_high, n_low);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) z[m][e] *= kKeyUnit<Half>;
  sum.split_of(z[0], z[1]);
  uint32_t high[4], low[4];
  ldmatrix_trans(high, second_at);
  ldmatrix_trans(low, second_at ^ kLow);
  multiply_parts<Half>(x, sum.high, sum.low, high, low);
  below.split_of(x[0], x[1]);
  below.store(below_at);
}

// d = scores of all tokens times the inverses of both parts, 64 by 64.
template <class Half>
__device__ void start_r(float (&d)[8][4], uint32_t scores, uint32_t inverse) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kPart / 16; ++ks) {
    const uint32_t high = ks * 32 >> 4, low = (kLow + ks * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false>(d, scores + high, inverse + low);
    else
      wgmma_shared<Half, true>(d, scores + high, inverse + low);
    wgmma_shared<Half, true>(d, scores + low, inverse + high);
    wgmma_shared<Half, true>(d, scores + high, inverse + high);
  }
  wgmma_commit();
}

// M transposed: 64 channels by the tokens of a part, from the descriptors of its keys and its inverse.
template <class Half>
__device__ void start_m(float (&d)[kPart / 8][4], uint32_t keys, uint32_t inverse) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kPart / 16; ++ks) {
    const uint32_t a = keys + (ks * kBlock * 128 >> 4), high = inverse + (ks * 32 >> 4), low = high + (kLow >> 4);
    if (ks == 0)
      wgmma_shared<Half, false, true>(d, a, low);
    else
      wgmma_shared<Half, true, true>(d, a, low);
    wgmma_shared<Half, true, true>(d, a, high);
  }
  wgmma_commit();
}

// What R's rows i of the warp's part are multiplied with, for its lane: decays and strengths. Those between blocks are products of two
// factors, neither above 1, from the last token of the first block on.
struct RowDecays {
  float upto[2], last;
  float2 from[kPart / 8];
  __device__ RowDecays(const Gates& gates, int warp, int lane)
      : upto{gates.G[warp * kBlock + lane / 4], gates.G[warp * kBlock + lane / 4 + 8]},
        last(gates.G[warp / 2 * kPart + kBlock - 1]) {
    load_factors(gates.G + warp / 2 * kPart, lane, from);
  }
};

// R's rows i of the warp's part; behind token i there are zeros, which stay zeros.
template <class Half>
__device__ void finish_r(uint32_t to, const RowDecays& decays, const float* beta, const LdmatrixLane& at, int warp, int lane,
                         const float (&r)[8][4]) {
  const int part = warp / 2, block = warp % 2;
  to += Square::offset(block * kBlock + at.across_row(), part * 4 + at.across_piece());
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float own[2][4] = {};
    if (n <= block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 strength = *reinterpret_cast<const float2*>(&beta[part * kPart + n * kBlock + half * 8 + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          own[half][e] = (part ? r[4 + 2 * n + half][e] : r[2 * n + half][e]) * (e % 2 ? strength.y : strength.x);
      }
      if (n == block) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 from = decays.from[2 * n + half];
            own[half][e] *= power2(fminf(decays.upto[e / 2] - (e % 2 ? from.y : from.x), 0.0f));
          }
      } else {
        const float row[2] = {power2(decays.upto[0] - decays.last), power2(decays.upto[1] - decays.last)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 from = decays.from[2 * n + half];
          const float column[2] = {power2(decays.last - from.x), power2(decays.last - from.y)};
#pragma unroll
          for (int e = 0; e < 4; ++e) own[half][e] *= row[e / 2] * column[e % 2];
        }
      }
    }
    const FragmentA rounded = operand<Half>(own[0], own[1]);
    stmatrix(to ^ n * 32, rounded.x[0], rounded.x[1], rounded.x[2], rounded.x[3]);
  }
}

// 64 channels of M transposed, of which a warp has 16, by the tokens of a part, with decays and strengths.
template <class Half>
__device__ void finish_m(uint32_t to, const float2 (&carry)[kPart / 8], float (&m)[kPart / 8][4]) {
  pin(m);
#pragma unroll
  for (int pair = 0; pair < kPart / 16; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) m[pair * 2 + half][e] *= e % 2 ? carry[pair * 2 + half].y : carry[pair * 2 + half].x;
    const FragmentA rounded = operand<Half>(m[pair * 2], m[pair * 2 + 1]);
    stmatrix(to ^ pair * 32, rounded.x[0], rounded.x[1], rounded.x[2], rounded.x[3]);
  }
}

// Keys and queries of a chunk beyond the sequence become 0, whatever lies there: they count for nothing, but NaN would not.
__device__ inline void clear_tokens(unsigned char* first, unsigned char* second, int length, int thread) {
  for (int i = length * 8 + thread; i < kChunk * 8; i += 128)
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      unsigned char* key = (i < kPart * 8 ? first : second) + panel * kPanel + i % (kPart * 8) * 16;
      *reinterpret_cast<uint4*>(key) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(key + KeyStage::kQueries) = uint4{0, 0, 0, 0};
    }
  fence_proxy_async();
}

// Every other chunk of a lane, by a warpgroup.
template <class Half>
__device__ void prepare_all(const Prefill& p, const Maps& maps, const Lane& lane_of, unsigned char* shared, uint32_t base,
                            const Barriers& barriers, int preparer, int thread) {
  constexpr int kStep = kPreparers * kChunk;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), self = static_cast<int>(kept(thread % 32)), block = warp % 2;
  const bool has_keys = warp < 2;  // the others have queries, and the gates of a part each
  const uint32_t place = kWorkplaces + preparer * static_cast<uint32_t>(sizeof(Workplace)),
                 unit = kUnits + preparer * UnitStage::kBytes;
  auto& work = *reinterpret_cast<Workplace*>(shared + place);
  const uint32_t scores = base + place + offsetof(Workplace, scores), inverse = base + place + offsetof(Workplace, inverse);
  // What belongs to tokens to come is never written.
  for (int i = thread; i < static_cast<int>(offsetof(Workplace, diagonal)) / 16; i += 128)
    reinterpret_cast<uint4*>(&work)[i] = uint4{};
  int c = preparer, left = static_cast<int>(lane_of.range.length()) - preparer * kChunk;  // tokens from the chunk on
  // Of the chunk that begins so many tokens further, the part whose gates the warp has: none where the sequence ends before.
  const auto gated = [&](int further) {
    const int64_t begin = lane_of.range.end - left + further + block * kPart;
    return Chunk{lane_of.n, 0, begin, min(begin + kPart, lane_of.range.end)};
  };
  const auto finish = [&](Gates& to, const IncomingGates<1>& in, int further, int lane) {
    finish_gates(to.G + block * kPart, to.beta + block * kPart, p.args.gates, gated(further), lane, in);
  };
  // Asks for a part's keys and queries; rows beyond a sequence are those of the next one.
  const auto request = [&](int part, int token) {
    const uint32_t full = barriers.keys.full_of(KeyStage::slot(part)), to = base + KeyStage::offset(part);
    // The first round finds every stage free.
    mbarrier_wait(barriers.keys.empty_of(KeyStage::slot(part)), KeyStage::parity(part) ^ 1);
    mbarrier_arrive_expect_tx(full, KeyStage::kBytes);
#pragma unroll
    for (int i = 0; i < 2 * (K / 64); ++i)
      tma_load(to + i / 2 * kPanel + i % 2 * KeyStage::kQueries, i % 2 ? maps.q : maps.k, i / 2 * 64, static_cast<int>(lane_of.hk),
               token, full);
  };
  const bool requests = warp == 3 && self == 0;
  const auto request_next = [&](int part) {  // of the preparer's next chunk
    if (requests && left > kStep)
      request((c + kPreparers) * kParts + part, static_cast<int>(lane_of.range.end) - left + kStep + part * kPart);
    __syncwarp();
  };
  if (requests && left > 0)
    for (int part = 0; part < kParts; ++part) request(c * kParts + part, static_cast<int>(lane_of.range.end) - left + part * kPart);
  __syncwarp();
  if (!has_keys && left > 0) {
    IncomingGates<1> first;
    first.load(p.args.gates, gated(0), lane_of.hv, self);
    finish(work.gates[0], first, 0, self);
  }
  for (; left > 0; left -= kStep, c += kPreparers) {
    const int turn = c / kPreparers % 2;
    Gates& gate = work.gates[turn];
    const uint32_t stage[kParts] = {KeyStage::offset(c * kParts), KeyStage::offset(c * kParts + 1)};
    const uint32_t keys[kParts] = {smem_descriptor(base + stage[0]), smem_descriptor(base + stage[1])};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int slot = KeyStage::slot(c * kParts + part);
      const uint32_t parity = KeyStage::parity(c * kParts + part);
      mbarrier_wait(barriers.keys.empty_of(slot), parity ^ 1);  // else `full` might still be that of seven parts before
      mbarrier_wait(barriers.keys.full_of(slot), parity);
    }
    if (left < kChunk) {  // what lies behind is somebody else's
      clear_tokens(shared + stage[0], shared + stage[1], static_cast<int>(kept(left)), static_cast<int>(kept(thread)));
      warpgroup_sync(preparer);
    }
    float d[kParts][kPart / 8][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) start_scores<Half, K>(d[part], keys[part], keys[part]);
    wgmma_wait<0>();
    warpgroup_sync(preparer);  // nobody is at the chunk before any more
    // Places that depend on the lane are found anew in every chunk: kept, they would not fit into registers.
    int lane = static_cast<int>(kept(self)), g = lane / 4, t = lane % 4;
    IncomingGates<1> coming;
    if (!has_keys && left > kStep) coming.load(p.args.gates, gated(kStep), lane_of.hv, lane);
    float root[kParts][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};  // rk, or scale rq, of the lane's rows
    if (!has_keys && p.args.l2_norm)
      query_lengths<Half>(base + stage[0] + KeyStage::kQueries + block * kBlock * 128, stage[1] - stage[0], lane, root);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pin(d[part]);
      const int row = part * kPart + block * kBlock + g;
      if (has_keys) {
        float own[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) own[i][e] = block ? d[part][2 + i][e] : d[part][i][e];
        if (p.args.l2_norm) inverse_lengths(own, lane, root[part]);
        const float write[2] = {-gate.beta[row] * root[part][0], -gate.beta[row + 8] * root[part][1]};
        const float both[2] = {root[part][0] * write[0], root[part][1] * write[1]};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            work.diagonal[block][part][i * 8 + 2 * t + e % 2][e / 2 * 8 + g] = own[i][e] * both[e / 2];
            d[part][i][e] *= write[e / 2] * (1 / kKeyUnit<Half>);
          }
      } else {
        root[part][0] *= p.scale;
        root[part][1] *= p.scale;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (n > block) continue;
          float s[2][4];
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              s[i][e] = n < block || i * 8 + 2 * t + e % 2 <= e / 2 * 8 + g ? d[part][2 * n + i][e] * root[part][e / 2] : 0.0f;
          Block<Half> x;
          x.split_of(s[0], s[1]);
          const LdmatrixLane at(lane);
          x.store(scores + Square::offset(part * kPart + block * kBlock + at.across_row(), n * 2 + at.across_piece()));
        }
      }
    }
    if (has_keys) {
      // N_21 of both parts is the second warp's; each then makes X'_21 of one.
      Block<Half> below;
      auto* passed = work.below + lane;
      if (block) {
        below.split_of(d[0][0], d[0][1]);
        passed[0] = uint4{below.high.x[0], below.high.x[1], below.high.x[2], below.high.x[3]};
        passed[32] = uint4{below.low.x[0], below.low.x[1], below.low.x[2], below.low.x[3]};
        below.split_of(d[1][0], d[1][1]);
      }
      __syncwarp();
      invert_tokens<Half>(work.diagonal[block], root, reinterpret_cast<char*>(work.inverse), block, lane);
      meet_inverters(preparer);
      if (!block) {
        const uint4 high = passed[0], low = passed[32];
        below.high = FragmentA{{high.x, high.y, high.z, high.w}};
        below.low = FragmentA{{low.x, low.y, low.z, low.w}};
      }
      invert_below<Half>(inverse + block * kPart * 128, LdmatrixLane(lane), below);
    } else {
      const int j = block * kPart + lane;
      work.carry[j] = gate.beta[j] * power2(gate.G[block * kPart + kPart - 1] - gate.G[j]);
      request_next(0);
      if (left > kStep) finish(work.gates[turn ^ 1], coming, kStep, lane);
    }
    fence_proxy_async();
    warpgroup_sync(preparer);
    lane = static_cast<int>(kept(self)), g = lane / 4, t = lane % 4;
    const LdmatrixLane at(lane);
    const uint32_t inverse_of = smem_descriptor(kept(inverse));
    // Quarters of M, a panel of channels and a part each, take turns in two places.
    float r[8][4], m[2][kPart / 8][4];
    const auto start_quarter = [&](int i) {
      const int panel = i / kParts, part = i % kParts;
      start_m<Half>(m[i % 2], keys[part] + (panel * kPanel >> 4), inverse_of + (part * kPart * 128 >> 4));
    };
    float2 carry[kParts][kPart / 8];
    const uint32_t rows = base + unit + Square::offset(warp * kBlock + at.across_row(), at.across_piece());
    const auto finish_quarter = [&](int i) {
      const int panel = i / kParts, part = i % kParts;
      finish_m<Half>((rows + panel * kPanel) ^ part * 64, carry[part], m[i % 2]);
    };
    start_r<Half>(r, smem_descriptor(kept(scores)), inverse_of);
    start_quarter(0);
    mbarrier_wait(barriers.units.empty_of(preparer), turn ^ 1);
    // Factors: those of W from the warps that have rk, those of S q from the others.
    if (t == 0) {
      float* factors = reinterpret_cast<float*>(shared + unit + UnitStage::kFactors);
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const int row = i / 2 * kPart + block * kBlock + i % 2 * 8 + g;
        const float decay = power2(gate.G[row]) * root[i / 2][i % 2];
        factors[has_keys ? row : kChunk + row] = decay;
      }
      if (warp < kParts && lane == 0) factors[2 * kChunk + warp] = power2(gate.G[warp * kPart + kPart - 1]);
    }
    const RowDecays decays(gate, warp, lane);
    wgmma_wait<1>();
    pin(r);
    finish_r<Half>(base + unit + UnitStage::kR, decays, gate.beta, at, warp, lane, r);
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_factors(work.carry + part * kPart, lane, carry[part]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < 3) start_quarter(i + 1);
      if (i < 3)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
      finish_quarter(i);
      if (i == 0) request_next(1);
    }
    fence_proxy_async();
    __syncwarp();
    // One lane would do for the warp; but tools that look for races follow threads, and these have written factors.
    if (t == 0) mbarrier_arrive(barriers.units.full_of(preparer));
  }
}

}  // namespace weft::cuda::fused

#endif  // WEFT_HAS_WGMMA
