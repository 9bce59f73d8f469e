// The chunk stages as separate kernels, each for one chunk and head (chunk_state: one sequence and head).
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_DELTA_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_DELTA_CHUNK_INL_H_
#undef WEFT_CPU_DELTA_CHUNK_INL_H_
#else
#define WEFT_CPU_DELTA_CHUNK_INL_H_
#endif

#include "cpu/common/gemm-inl.h"
#include "cpu/delta/delta_chunk.h"
#include "cpu/delta/gates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int64_t kMaxChunk = 64;
constexpr int64_t kMaxSize = kMaxDeltaHeadSize;
constexpr int64_t kRow = kMaxSize + kPanel;  // numbers of the longest padded row

// Scratch of one stage: rows of a chunk as f32.
struct StageMemory {
  HWY_ALIGN float k[kMaxChunk * kRow], q[kMaxChunk * kRow], x[kMaxChunk * kRow], y[kMaxChunk * kRow];
  HWY_ALIGN float square[kMaxChunk * kMaxChunk], g[kMaxChunk * kRow], row[kRow];
  HWY_ALIGN float state[kMaxSize * kRow];
};

size_t chunk_stage_bytes() { return sizeof(StageMemory); }

// Loads the rows of one chunk of a [T, H, D] tensor, padded to `stride` with zeros, and C - count rows of zeros behind them.
HWY_INLINE void load_chunk(const RowsView& rows, const ChunkRange& c, int64_t C, int64_t h, int64_t D, int64_t stride, float* out) {
  for (int64_t i = 0; i < C; ++i) {
    float* row = out + i * stride;
    if (i < c.count) unpack_row(rows.dtype, rows.data, rows.at(c.begin + i, h), D, row);
    fill_row(row + (i < c.count ? D : 0), stride - (i < c.count ? D : 0), 0);
  }
}

HWY_INLINE void store_chunk(const float* from, int64_t stride, const ChunkRange& c, int64_t h, int64_t D, const RowsView& rows) {
  for (int64_t i = 0; i < c.count; ++i) pack_row(from + i * stride, D, rows.dtype, rows.data, rows.at(c.begin + i, h));
}

// Loads the prefix sums of one head: [C] numbers, or [C][stride] rows when per channel. Entries past the end repeat the last one.
HWY_INLINE void load_sums(const ChunkView& p, const ChunkRange& c, int64_t hv, int64_t stride, float* g) {
  const int64_t width = p.per_channel ? p.heads.K : 1, row = p.per_channel ? stride : 1;
  for (int64_t i = 0; i < p.C; ++i) {
    unpack_row(DType::f32, p.g.data, p.g.at(c.begin + HWY_MIN(i, c.count - 1), hv), width, g + i * row);
    if (p.per_channel) fill_row(g + i * row + width, stride - width, 0);
  }
}

HWY_INLINE float exp_one(float x) { return hn::GetLane(exp_nonpositive(hn::Set(F32(), x))); }

// out[i][j] = e^(G_i - G_j) (x_i . y_j) for i > j, and for i = j if `diagonal`; 0 elsewhere.
HWY_INLINE void decayed_products(const ChunkView& p, const ChunkRange& c, const float* x, const float* y, int64_t stride,
                                 const float* g, bool diagonal, float* row, float* out) {
  const F32 d;
  const int64_t C = p.C;
  fill_row(out, C * C, 0);
  if (!p.per_channel)
    for (int64_t i = 0; i < c.count; i += 4)
      for (int64_t j = 0; j <= i; j += 4) dots_4x4(x + i * stride, stride, y + j * stride, stride, stride, out + i * C + j, C);
  for (int64_t i = 0; i < c.count; ++i)
    for (int64_t j = 0; j < C; ++j) {
      if (j > i || (j == i && !diagonal)) {
        out[i * C + j] = 0;
      } else if (p.per_channel) {
        for (int64_t s = 0; s < stride; s += kLanes) {
          const VF decay = exp_nonpositive(hn::Sub(hn::LoadU(d, g + i * stride + s), hn::LoadU(d, g + j * stride + s)));
          hn::StoreU(hn::Mul(decay, hn::LoadU(d, y + j * stride + s)), d, row + s);
        }
        out[i * C + j] = dot_padded(x + i * stride, row, stride);
      } else {
        out[i * C + j] *= exp_one(g[i] - g[j]);
      }
    }
}

// Decays rows in place: x_i *= e^G_i (here) or e^(G_last - G_i) (end).
enum class DecayTo { here, end };
HWY_INLINE void decay_rows(const ChunkRange& c, const float* g, int64_t stride, int64_t g_stride, DecayTo to, bool channels,
                           float* x) {
  const F32 d;
  for (int64_t i = 0; i < c.count; ++i) {
    for (int64_t s = 0; s < stride; s += kLanes) {
      const VF here = channels ? hn::LoadU(d, g + i * g_stride + s) : hn::Set(d, g[i]);
      const VF last = channels ? hn::LoadU(d, g + (c.count - 1) * g_stride + s) : hn::Set(d, g[c.count - 1]);
      const VF decay = exp_nonpositive(to == DecayTo::here ? here : hn::Sub(last, here));
      hn::StoreU(hn::Mul(decay, hn::LoadU(d, x + i * stride + s)), d, x + i * stride + s);
    }
  }
}

void chunk_cumsum_head(const ChunkView& p, const ChunkRange& c, int64_t hv, void* memory) {
  const F32 d;
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t width = p.per_channel ? p.heads.K : 1, padded = round_up(width, kLanes);
  fill_row(m.x, padded, 0);
  for (int64_t i = 0; i < c.count; ++i) {
    unpack_row(DType::f32, p.g.data, p.g.at(c.begin + i, hv), width, m.row);
    fill_row(m.row + width, padded - width, 0);
    for (int64_t s = 0; s < padded; s += kLanes) hn::StoreU(hn::Add(hn::LoadU(d, m.x + s), hn::LoadU(d, m.row + s)), d, m.x + s);
    pack_row(m.x, width, DType::f32, p.g_out.data, p.g_out.at(c.begin + i, hv));
  }
}

void chunk_kkt_head(const ChunkView& p, const ChunkRange& c, int64_t hv, void* memory) {
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t K = p.heads.K, stride = round_up(K, kLanes);
  load_chunk(p.k, c, p.C, p.heads.key_head(hv), K, stride, m.k);
  load_sums(p, c, hv, stride, m.g);
  decayed_products(p, c, m.k, m.k, stride, m.g, false, m.row, m.square);
  for (int64_t i = 0; i < c.count; ++i) {
    const float beta = load_one(DType::f32, p.beta.data, p.beta.at(c.begin + i, hv));
    for (int64_t j = 0; j < p.C; ++j) m.square[i * p.C + j] *= beta;
  }
  store_chunk(m.square, p.C, c, hv, p.C, p.a);
}

// Forward substitution by rows: X_i = e_i - sum_{j<i} A_ij X_j.
void chunk_tri_inverse_head(const ChunkView& p, const ChunkRange& c, int64_t hv, void* memory) {
  const F32 d;
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t C = p.C;
  load_chunk(p.a, c, C, hv, C, C, m.square);
  for (int64_t i = 0; i < c.count; ++i) {
    float* x = m.x + i * C;
    fill_row(x, C, 0);
    x[i] = 1;
    for (int64_t j = 0; j < i; ++j) {
      const VF factor = hn::Set(d, m.square[i * C + j]);
      for (int64_t s = 0; s <= j; s += kLanes)
        hn::StoreU(hn::NegMulAdd(factor, hn::LoadU(d, m.x + j * C + s), hn::LoadU(d, x + s)), d, x + s);
    }
  }
  store_chunk(m.x, C, c, hv, C, p.a_inv);
}

// Rounds numbers to a 16-bit dtype and back: chunk_wu stages its operands in the input dtype.
HWY_INLINE void round_to(DType dtype, float* x, int64_t count) {
  if (dtype == DType::f32) return;
  for (int64_t i = 0; i < count; ++i) x[i] = dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(x[i])) : f16_to_f32(f32_to_f16(x[i]));
}

void chunk_wu_head(const ChunkView& p, const ChunkRange& c, int64_t hv, void* memory) {
  const F32 d;
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t K = p.heads.K, V = p.heads.V, C = p.C, k_stride = round_up(K, kLanes), v_stride = round_up(V, kLanes);
  load_chunk(p.k, c, C, p.heads.key_head(hv), K, k_stride, m.k);
  load_chunk(p.v, c, C, hv, V, v_stride, m.x);
  load_chunk(p.a_inv, c, C, hv, C, C, m.square);
  for (int64_t i = 0; i < C; ++i) fill_row(m.square + i * C + i + 1, C - i - 1, 0);  // the inverse is lower triangular
  load_sums(p, c, hv, k_stride, m.g);
  decay_rows(c, m.g, k_stride, k_stride, DecayTo::here, p.per_channel, m.k);
  for (int64_t i = 0; i < c.count; ++i) {
    const VF beta = hn::Set(d, load_one(DType::f32, p.beta.data, p.beta.at(c.begin + i, hv)));
    for (int64_t s = 0; s < k_stride; s += kLanes)
      hn::StoreU(hn::Mul(beta, hn::LoadU(d, m.k + i * k_stride + s)), d, m.k + i * k_stride + s);
    for (int64_t s = 0; s < v_stride; s += kLanes)
      hn::StoreU(hn::Mul(beta, hn::LoadU(d, m.x + i * v_stride + s)), d, m.x + i * v_stride + s);
  }
  round_to(p.k.dtype, m.k, C * k_stride);
  round_to(p.k.dtype, m.x, C * v_stride);
  const int64_t rows = round_up(c.count, kTileRows);
  multiply(m.square, C, 1, m.k, k_stride, rows, k_stride, c.count, m.y, k_stride, false);
  store_chunk(m.y, k_stride, c, hv, K, p.w);
  multiply(m.square, C, 1, m.x, v_stride, rows, v_stride, c.count, m.y, v_stride, false);
  store_chunk(m.y, v_stride, c, hv, V, p.u);
}

// Loads one [V, K] state matrix S as M = S^T, rows of `stride` numbers padded with zeros. store_matrix() is the inverse.
HWY_INLINE void load_matrix(const StateView& view, int64_t base, int64_t K, int64_t V, int64_t stride, float* rows, float* m) {
  fill_row(m, round_up(K, kTileRows) * stride, 0);
  for (int64_t v = 0; v < V; ++v) {
    unpack_row(view.dtype, view.data, base + v * K, K, rows);
    for (int64_t p = 0; p < K; ++p) m[p * stride + v] = rows[p];
  }
}

HWY_INLINE void store_matrix(const float* m, int64_t K, int64_t V, int64_t stride, float* rows, const StateView& view,
                             int64_t base) {
  for (int64_t v = 0; v < V; ++v) {
    for (int64_t p = 0; p < K; ++p) rows[p] = m[p * stride + v];
    pack_row(rows, K, view.dtype, view.data, base + v * K);
  }
}

// Scans all chunks of a sequence in order.
void chunk_state_head(const ChunkView& p, TokenRange range, int64_t first_row, int64_t hv, const StateView& in, int64_t in_slot,
                      const StateView& out, int64_t out_slot, void* memory) {
  const F32 d;
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t K = p.heads.K, V = p.heads.V, C = p.C, k_stride = round_up(K, kLanes), v_stride = round_up(V, kLanes);
  const int64_t k_rows = round_up(K, kTileRows);
  if (in_slot >= 0)
    load_matrix(in, in.at(in_slot, hv), K, V, v_stride, m.row, m.state);
  else
    fill_row(m.state, k_rows * v_stride, 0);
  for (int64_t t = range.begin, row = first_row; t < range.end; t += C, ++row) {
    const ChunkRange c{t, HWY_MIN(C, range.end - t), row};
    store_matrix(m.state, K, V, v_stride, m.row, p.h, p.h.at(row, hv));
    load_chunk(p.w, c, C, hv, K, k_stride, m.q);
    load_chunk(p.u, c, C, hv, V, v_stride, m.x);
    const int64_t rows = round_up(c.count, kTileRows);
    multiply(m.q, k_stride, 1, m.state, v_stride, rows, v_stride, K, m.y, v_stride, false);
    for (int64_t i = 0; i < c.count * v_stride; i += kLanes)
      hn::StoreU(hn::Sub(hn::LoadU(d, m.x + i), hn::LoadU(d, m.y + i)), d, m.y + i);
    store_chunk(m.y, v_stride, c, hv, V, p.v_new);
    load_chunk(p.k, c, C, p.heads.key_head(hv), K, k_stride, m.k);
    load_sums(p, c, hv, k_stride, m.g);
    if (p.per_channel)
      decay_rows(c, m.g, k_stride, k_stride, DecayTo::end, true, m.k);
    else
      decay_rows(c, m.g, v_stride, 0, DecayTo::end, false, m.y);
    for (int64_t r = 0; r < K; ++r) {
      const VF decay = hn::Set(d, exp_one(p.per_channel ? m.g[(c.count - 1) * k_stride + r] : m.g[c.count - 1]));
      for (int64_t s = 0; s < v_stride; s += kLanes)
        hn::StoreU(hn::Mul(decay, hn::LoadU(d, m.state + r * v_stride + s)), d, m.state + r * v_stride + s);
    }
    multiply(m.k, 1, k_stride, m.y, v_stride, k_rows, v_stride, c.count, m.state, v_stride, true);
  }
  if (out_slot >= 0) store_matrix(m.state, K, V, v_stride, m.row, out, out.at(out_slot, hv));
}

void chunk_output_head(const ChunkView& p, const ChunkRange& c, int64_t hv, void* memory) {
  const F32 d;
  StageMemory& m = *static_cast<StageMemory*>(memory);
  const int64_t K = p.heads.K, V = p.heads.V, C = p.C, k_stride = round_up(K, kLanes), v_stride = round_up(V, kLanes);
  const int64_t hk = p.heads.key_head(hv), rows = round_up(c.count, kTileRows);
  load_chunk(p.q, c, C, hk, K, k_stride, m.q);
  load_chunk(p.k, c, C, hk, K, k_stride, m.k);
  load_sums(p, c, hv, k_stride, m.g);
  decayed_products(p, c, m.q, m.k, k_stride, m.g, true, m.row, m.square);
  load_matrix(p.h, p.h.at(c.row, hv), K, V, v_stride, m.row, m.state);
  decay_rows(c, m.g, k_stride, k_stride, DecayTo::here, p.per_channel, m.q);
  multiply(m.q, k_stride, 1, m.state, v_stride, rows, v_stride, K, m.y, v_stride, false);
  load_chunk(p.v_new, c, C, hv, V, v_stride, m.x);
  multiply(m.square, C, 1, m.x, v_stride, rows, v_stride, c.count, m.y, v_stride, true);
  for (int64_t i = 0; i < rows * v_stride; i += kLanes) hn::StoreU(hn::Mul(hn::Set(d, p.scale), hn::LoadU(d, m.y + i)), d, m.y + i);
  store_chunk(m.y, v_stride, c, hv, V, p.o);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
