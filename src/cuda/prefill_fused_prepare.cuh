// What prepares chunks beside the walk of the fused prefill: M, R and factors as prefill.cuh has them, for parts of 32 tokens.
//
// Keys and queries of a part, which lie together, are multiplied with the keys, a chunk ahead: the first two warps then have rows of
// K K^T, the others of Q K^T. With blocks 1 and 2 of 16 tokens, X' = diag(rk) X as in prefill_prepare_wgmma.cuh and
// N = -diag(beta rk) K K^T, the inverse of a part is X'_11, X'_22 and X'_21 = X'_22 N_21 X'_11, which the first two warps make for both
// parts while the others write scores. Then every warp has a block column of one part's inverse as its operand of two products, M and R
// transposed, in which the other part's columns are zeros.
#pragma once

#include "cuda/prefill_fused.cuh"

#if WEFT_HAS_WGMMA

namespace weft::cuda::fused {

inline constexpr int kPrepareMeeting = 2 * kOutputStages;  // of meet(), behind those where outputs are stored
// The two warps that invert meet.
__device__ inline void meet_inverters() { asm volatile("bar.sync %0, 64;" ::"n"(kPrepareMeeting + 2) : "memory"); }

// Accumulators of 16 x 16 in two parts, as A operand; the same registers are the B operand of a product over their columns.
template <class Half>
struct Block {
  FragmentA high, low;
  __device__ void split_of(const float (&x)[2][4]) { split<Half>(x[0], x[1], high, low); }
  __device__ void load(uint32_t at) {
    load_matrices(high.x, at);
    load_matrices(low.x, at + Workplace::kLow);
  }
  __device__ void store(uint32_t at, uint32_t low_at) const {
    store_matrices(at, high.x[0], high.x[1], high.x[2], high.x[3]);
    store_matrices(low_at, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
};

__device__ inline float inverse_root(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x + 1e-6f));
  return root;
}

// 1 / sqrt(x + 1e-6) of the diagonal of a block, whose row g has column g, of 8, in lane 4 g + g / 2. To every lane, for its rows.
__device__ inline void inverse_lengths(const float (&x)[2][4], int lane, float (&out)[2]) {
  const int g = lane / 4, from = lane - lane % 4 + g / 2;
  const float own[2] = {g % 2 ? x[0][1] : x[0][0], g % 2 ? x[1][3] : x[1][2]};
#pragma unroll
  for (int i = 0; i < 2; ++i) out[i] = inverse_root(__shfl_sync(0xffffffffu, own[i], from));
}

// Inverts diag(1 / rk) - N of 16 tokens of either part, by substitution in f32: a lane per part and column. `columns` are those of rk N.
// In two parts of 16 bits to `to`, a column as a row.
template <class Half>
__device__ void invert_tokens(const float (&columns)[kParts][kBlock][kBlock + 4], const float (&rk)[kParts][2], char* to,
                              int lane) {
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
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &x[piece * 8 + i * 2];
      high[i] = pack<Half>(pair[0], pair[1]);
      const float2 whole = unpack<Half>(high[i]);
      low[i] = pack<Half>(pair[0] - whole.x, pair[1] - whole.y);
    }
    char* const place = to + part * (2 * Workplace::kLow) + Small::offset(column, piece);
    *reinterpret_cast<uint4*>(place) = uint4{high[0], high[1], high[2], high[3]};
    *reinterpret_cast<uint4*>(place + Workplace::kLow) = uint4{low[0], low[1], low[2], low[3]};
  }
}

// X'_21 of a part, transposed, from N_21 in the accumulators of the second warp: X'_11^T N_21^T X'_22^T.
template <class Half>
__device__ void invert_below(uint32_t inverse, const LanePlace& at, const float (&n)[2][4]) {
  const uint32_t as_a = Small::offset(at.across_row(), at.across_piece());
  Block<Half> below, first, sum;
  below.split_of(n);
  first.load(inverse + Workplace::kFirst + as_a);
  float z[2][4] = {}, x[2][4] = {};
  const uint32_t n_high[4] = {below.high.x[0], below.high.x[2], below.high.x[1], below.high.x[3]},
                 n_low[4] = {below.low.x[0], below.low.x[2], below.low.x[1], below.low.x[3]};
  multiply_parts<Half>(z, first.high, first.low, n_high, n_low);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) z[m][e] *= kKeyUnit<Half>;
  sum.split_of(z);
  uint32_t high[4], low[4];
  load_matrices_transposed(high, inverse + Workplace::kSecond + as_a);
  load_matrices_transposed(low, inverse + Workplace::kSecond + Workplace::kLow + as_a);
  multiply_parts<Half>(x, sum.high, sum.low, high, low);
  below.split_of(x);
  below.store(inverse + Workplace::kBelow + as_a, inverse + Workplace::kBelow + Workplace::kLow + as_a);
}

// A warp's block column of the inverse of its part; the other part's rows are zeros.
template <class Half>
__device__ void load_column(uint32_t inverse, const LanePlace& at, int part, int block, BlockColumn& x) {
  const uint32_t as_a = Small::offset(at.across_row(), at.across_piece());
  inverse += part * (2 * Workplace::kLow) + as_a;
  Block<Half> own, below;
  own.load(inverse + (block ? Workplace::kSecond : Workplace::kFirst));
  below.load(inverse + Workplace::kBelow);
#pragma unroll
  for (int ks = 0; ks < kBlocks; ++ks)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool first = ks % 2 == 0, mine = ks / 2 == part;
      x.high[ks].x[i] = !mine ? 0 : first ? (block ? 0 : own.high.x[i]) : (block ? own.high.x[i] : below.high.x[i]);
      x.low[ks].x[i] = !mine ? 0 : first ? (block ? 0 : own.low.x[i]) : (block ? own.low.x[i] : below.low.x[i]);
    }
}

// R's rows j (transposed) with decays and strengths; tokens i before j have zeros, which stay zeros. Decays between blocks are products
// of two factors, neither above 1, from the last token of the first block on.
template <class Half>
__device__ void finish_r(uint32_t to, const Gates& gates, const LanePlace& at, int warp, int lane, float (&r)[kPart / 8][4]) {
  const int part = warp / 2, block = warp % 2, j = warp * kBlock + lane / 4;
  const float from[2] = {gates.G[j], gates.G[j + 8]}, strength[2] = {gates.beta[j], gates.beta[j + 8]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (n < block) continue;
    float2 upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      upto[i] = *reinterpret_cast<const float2*>(&gates.G[part * kPart + n * kBlock + i * 8 + lane % 4 * 2]);
    if (n == block) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          r[2 * n + i][e] *= strength[e / 2] * power2(fminf((e % 2 ? upto[i].y : upto[i].x) - from[e / 2], 0.0f));
    } else {
      const float last = gates.G[part * kPart + kBlock - 1];
      const float row[2] = {strength[0] * power2(last - from[0]), strength[1] * power2(last - from[1])};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float column[2] = {power2(upto[i].x - last), power2(upto[i].y - last)};
#pragma unroll
        for (int e = 0; e < 4; ++e) r[2 * n + i][e] *= row[e / 2] * column[e % 2];
      }
    }
  }
  store_turned<Half>(to + part * kPart * 128, at, warp, r);
}

// M's rows j with decays and strengths, rounded.
template <class Half>
__device__ void round_m(const float (&carry)[2], float (&m)[8][4], FragmentA (&rounded)[4]) {
  pin(m);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) m[i][e] *= carry[e / 2];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) rounded[pair] = operand<Half>(m[2 * pair], m[2 * pair + 1]);
  pin(m);
}

// Keys and queries of a chunk beyond the sequence become 0, whatever lies there: scores of one part are multiplied by zeros for the other.
__device__ inline void clear_tokens(unsigned char* stage, int length, int thread) {
  for (int i = length * 8 + thread; i < kChunk * 8; i += 128)
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      unsigned char* key = stage + i / (kPart * 8) * TokenStage::kPartBytes + panel * kPanel + i % (kPart * 8) * 16;
      *reinterpret_cast<uint4*>(key) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(key + TokenStage::kQueries) = uint4{0, 0, 0, 0};
    }
  fence_async();
}

// All chunks of a lane, by a warpgroup.
template <class Half>
__device__ void prepare_all(const Prefill& p, const Lane& lane_of, unsigned char* shared, uint32_t base, const Barriers& barriers,
                            int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, block = warp % 2;
  const bool has_keys = warp < 2;
  const LanePlace at(lane);
  auto& work = *reinterpret_cast<Workplace*>(shared + kWorkplace);
  const uint32_t inverse = base + kWorkplace + offsetof(Workplace, inverse),
                 scores = base + kWorkplace + offsetof(Workplace, scores);
  const uint32_t descriptor = matrix_descriptor(base),
                 scores_descriptor = descriptor + (kWorkplace + offsetof(Workplace, scores) >> 4);
  // Scores of tokens to come, and the blocks of R between parts, are never written.
  for (int i = thread; i < static_cast<int>(sizeof(work.scores)) / 16; i += 128) reinterpret_cast<uint4*>(work.scores)[i] = uint4{};
  Ring<TokenStage> tokens;
  Ring<UnitStage> units{0, 1};
  Ring<Gates> gates;
  int left = static_cast<int>(lane_of.range.length());  // tokens from the chunk on whose scores come next
  float d[kParts][kPart / 8][4];
  const auto start_chunk = [&] {
    barrier_wait(barriers.keys.full_of(tokens.slot), tokens.parity);
    if (left >= kChunk) return;  // else what lies behind is somebody else's
    clear_tokens(shared + tokens.offset(), left, thread);
    meet(kPrepareMeeting);
  };
  const auto start_products = [&](uint32_t keys) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t rows = keys + (part * TokenStage::kPartBytes >> 4);
      start_scores<Half, K>(d[part], rows, rows);
    }
  };
  if (lane_of.chunks == 0) return;
  start_chunk();
  start_products(descriptor);
  for (int c = 0; c < lane_of.chunks; ++c, units.advance(), gates.advance()) {
    const uint32_t keys = descriptor + (tokens.offset() >> 4);
    float root[kParts][2];  // rk, or scale rq, of the lane's rows
    barrier_wait(barriers.gates.full_of(gates.slot), gates.parity);
    const Gates& gate = *reinterpret_cast<const Gates*>(shared + kGates + gates.offset());
    wgmma_wait<0>();
    meet(kPrepareMeeting);  // nobody is at the chunk before any more
    if (!has_keys) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        root[part][0] = root[part][1] = p.scale;
        if (!p.args.l2_norm) continue;
        float square[2][4] = {};
        square_rows<Half, K>(base + tokens.offset() + part * TokenStage::kPartBytes + TokenStage::kQueries, block, lane, square);
        inverse_lengths(square, lane, root[part]);
        root[part][0] *= p.scale;
        root[part][1] *= p.scale;
      }
    }
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
        root[part][0] = root[part][1] = 1.0f;
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
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (n > block) continue;
          Block<Half> x;
          float s[2][4];
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              s[i][e] = n < block || i * 8 + 2 * t + e % 2 <= e / 2 * 8 + g ? d[part][2 * n + i][e] * root[part][e / 2] : 0.0f;
          x.split_of(s);
          const uint32_t to = scores + Square::offset(block * kBlock + at.across_row(), part * 4 + n * 2 + at.across_piece());
          x.store(to, to + sizeof(work.scores[0]));
        }
      }
    }
    if (has_keys) {
      __syncwarp();
      invert_tokens<Half>(work.diagonal[block], root, work.inverse[0] + (block ? Workplace::kSecond : Workplace::kFirst), lane);
      meet_inverters();
      if (block) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float n[2][4] = {{d[part][0][0], d[part][0][1], d[part][0][2], d[part][0][3]},
                                 {d[part][1][0], d[part][1][1], d[part][1][2], d[part][1][3]}};
          invert_below<Half>(inverse + part * (2 * Workplace::kLow), at, n);
        }
      }
    }
    fence_async();  // scores
    meet(kPrepareMeeting);
    BlockColumn x;
    load_column<Half>(inverse, at, warp / 2, block, x);
    float r[kPart / 8][4], m[8][4];
    const auto further = [](int ks) { return ks / 2 * TokenStage::kPartBytes + ks % 2 * kBlock * 128; };
    start_r<Half>(r, x, scores_descriptor, scores_descriptor + (sizeof(work.scores[0]) >> 4));
    start_m<Half>(m, x, keys, further);
    barrier_wait(barriers.units.empty_of(units.slot), units.parity);
    const uint32_t unit = base + kUnits + units.offset();
    // Factors: those of W from the warps that have rk, those of S q from the others.
    if (t == 0) {
      float* factors = reinterpret_cast<float*>(shared + kUnits + units.offset() + Unit<K>::kFactors);
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const int row = i / 2 * kPart + block * kBlock + i % 2 * 8 + g;
        const float decay = power2(gate.G[row]) * root[i / 2][i % 2];
        factors[has_keys ? row : kChunk + row] = decay;
      }
      if (warp < kParts && lane == 0) factors[2 * kChunk + warp] = power2(gate.G[warp * kPart + kPart - 1]);
    }
    const int j = warp * kBlock + g;
    const float last = gate.G[warp / 2 * kPart + kPart - 1];
    const float carry[2] = {gate.beta[j] * power2(last - gate.G[j]), gate.beta[j + 8] * power2(last - gate.G[j + 8])};
    wgmma_wait<1>();
    pin(r);
    finish_r<Half>(unit + Unit<K>::kR, gate, at, warp, lane, r);
    FragmentA rounded[4];
    wgmma_wait<0>();
    round_m<Half>(carry, m, rounded);
    start_m<Half>(m, x, keys + (kPanel >> 4), further);
    store_turned(unit + Unit<K>::kM, at, warp, rounded);
    // What the next chunk begins with; after the last one, for nothing.
    if (c + 1 < lane_of.chunks) {
      tokens.advance();
      left -= kChunk;
      start_chunk();
    }
    wgmma_wait<0>();
    pin(m);
    start_products(descriptor + (tokens.offset() >> 4));
    round_m<Half>(carry, m, rounded);
    store_turned(unit + Unit<K>::kM + kPanel, at, warp, rounded);
    fence_async();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(barriers.units.full_of(units.slot));
      barrier_arrive(barriers.gates.empty_of(gates.slot));
    }
  }
  wgmma_wait<0>();
}

}  // namespace weft::cuda::fused

#endif  // WEFT_HAS_WGMMA
