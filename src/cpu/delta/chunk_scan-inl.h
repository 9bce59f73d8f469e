// The chunk scan of the gated delta rule for one key head: chunk operands are prepared, states are loaded, updated and stored.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_CHUNK_SCAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_CHUNK_SCAN_INL_H_
#undef WEFT_CPU_CHUNK_SCAN_INL_H_
#else
#define WEFT_CPU_CHUNK_SCAN_INL_H_
#endif

#include "cpu/delta/delta_panel-inl.h"
#include "cpu/delta/gates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int64_t kMaxK = kMaxDeltaHeadSize;
constexpr int64_t kKeyUnit = kLanes > kTileRows ? kLanes : kTileRows;  // key rows are padded to a multiple of this

// to[c * to_stride + r] = from[r * from_stride + c]
HWY_INLINE void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  int64_t r = 0;
#if !WEFT_EMULATED
  const F32 d;
  const hn::Repartition<double, F32> dd;
  const hn::Full128<float> d4;
  HWY_ALIGN float blocks[4][kLanes];
  for (; r + 4 <= rows; r += 4) {
    const float* row = from + r * from_stride;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      const VF a = hn::LoadU(d, row + c), b = hn::LoadU(d, row + from_stride + c);
      const VF e = hn::LoadU(d, row + 2 * from_stride + c), f = hn::LoadU(d, row + 3 * from_stride + c);
      const auto ab0 = hn::BitCast(dd, hn::InterleaveLower(d, a, b)), ab1 = hn::BitCast(dd, hn::InterleaveUpper(d, a, b));
      const auto ef0 = hn::BitCast(dd, hn::InterleaveLower(d, e, f)), ef1 = hn::BitCast(dd, hn::InterleaveUpper(d, e, f));
      hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, ab0, ef0)), d, blocks[0]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, ab0, ef0)), d, blocks[1]);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, ab1, ef1)), d, blocks[2]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, ab1, ef1)), d, blocks[3]);
      for (int64_t i = 0; i < kLanes; ++i) hn::StoreU(hn::Load(d4, blocks[i % 4] + i / 4 * 4), d4, to + (c + i) * to_stride + r);
    }
    for (; c < columns; ++c)
      for (int64_t i = 0; i < 4; ++i) to[c * to_stride + r + i] = row[i * from_stride + c];
  }
#endif
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

// Loads columns [first, first + count) of one state matrix into the panels of a working state, f32 (delta_panel-inl.h). The working
// state has k_rows rows; its rows past K and its columns past the matrix are zero. store_state() is the inverse.
HWY_INLINE void load_state(const StateView& view, int64_t base, int64_t K, int64_t V, int64_t k_rows, int64_t first, int64_t count,
                           float* work) {
  HWY_ALIGN float rows[4 * kMaxK];
  for (int64_t c = 0; c < count;) {
    const int64_t width = panel_width(c, count), real = HWY_MAX(int64_t{0}, HWY_MIN(width, V - first - c));
    float* panel = work + c * k_rows;
    fill_row(panel, k_rows * width, 0);
    if (view.layout == StateLayout::kv) {
      for (int64_t p = 0; p < K; ++p) unpack_row(view.dtype, view.data, base + p * V + first + c, real, panel + p * width);
    } else if (view.dtype == DType::f32) {
      transpose(static_cast<const float*>(view.data) + base + (first + c) * K, K, real, K, panel, width);
    } else {
      for (int64_t v = 0; v < real; v += 4) {
        const int64_t some = HWY_MIN(int64_t{4}, real - v);
        for (int64_t i = 0; i < some; ++i) unpack_row(view.dtype, view.data, base + (first + c + v + i) * K, K, rows + i * kMaxK);
        transpose(rows, kMaxK, some, K, panel + v, width);
      }
    }
    c += width;
  }
}

HWY_INLINE void store_state(const float* work, int64_t k_rows, const StateView& view, int64_t base, int64_t K, int64_t V,
                            int64_t first, int64_t count) {
  HWY_ALIGN float rows[kLanes * kMaxK];
  for (int64_t c = 0; c < count;) {
    const int64_t width = panel_width(c, count), real = HWY_MAX(int64_t{0}, HWY_MIN(width, V - first - c));
    const float* panel = work + c * k_rows;
    if (view.layout == StateLayout::kv) {
      for (int64_t p = 0; p < K; ++p) pack_row(panel + p * width, real, view.dtype, view.data, base + p * V + first + c);
    } else if (view.dtype == DType::f32) {
      transpose(panel, width, K, real, static_cast<float*>(view.data) + base + (first + c) * K, K);
    } else {
      for (int64_t v = 0; v < real; v += kLanes) {
        const int64_t some = HWY_MIN(kLanes, real - v);
        transpose(panel + v, width, K, some, rows, kMaxK);
        for (int64_t i = 0; i < some; ++i) pack_row(rows + i * kMaxK, K, view.dtype, view.data, base + (first + c + v + i) * K);
      }
    }
    c += width;
  }
}

// Operands of a chunk that all value heads of a key head share.
struct KeyChunk {
  HWY_ALIGN float k[kChunk * kMaxK], q[kChunk * kMaxK];      // rows, padded to k_stride
  HWY_ALIGN float kk[kChunk * kChunk], qk[kChunk * kChunk];  // k_i . k_j and q_i . k_j; 4 x 4 blocks on and below the diagonal
};

// Operands of a chunk of one value head.
struct ValueChunk {
  HWY_ALIGN float lower[kChunk * kChunk], weights[kChunk * kChunk];
  HWY_ALIGN float beta[kChunk], read_k[kChunk], read_q[kChunk], to_end[kChunk], alpha[kChunk];
  HWY_ALIGN float decay[kMaxK];
  // Per-channel decays only: rows scaled channel by channel.
  HWY_ALIGN float k_read[kChunk * kMaxK], q_read[kChunk * kMaxK], k_write[kChunk * kMaxK], alphas[kChunk * kMaxK], bias[kMaxK];
};

// Prefetches a row of the next chunk into the second-level cache. The rows of one head lie far apart, so hardware prefetchers do
// not predict them. In the first level, rows a power of two apart would evict each other.
HWY_INLINE void prefetch_row(const RowsView& rows, int64_t t, int64_t h, int64_t first, int64_t count) {
  const char* row = static_cast<const char*>(rows.data) + (rows.at(t, h) + first) * dtype_bytes(rows.dtype);
  for (int64_t i = 0; i < count * dtype_bytes(rows.dtype); i += 64) __builtin_prefetch(row + i, 0, 2);
}

HWY_INLINE void prepare_keys(const DeltaTokens& tokens, int64_t t, int64_t count, int64_t left, int64_t hk, int64_t k_stride,
                             KeyChunk& out) {
  const int64_t K = tokens.heads.K;
  for (int64_t i = 0; i < kChunk; ++i) {
    float* k = out.k + i * k_stride;
    float* q = out.q + i * k_stride;
    if (i < count)
      load_key_row(tokens.k, t + i, hk, K, k_stride, tokens.l2_norm, k);
    else
      fill_row(k, k_stride, 0);
    if (i < count && tokens.q.data)
      load_key_row(tokens.q, t + i, hk, K, k_stride, tokens.l2_norm, q);
    else
      fill_row(q, k_stride, 0);
    if (kChunk + i < left) {
      prefetch_row(tokens.k, t + kChunk + i, hk, 0, K);
      if (tokens.q.data) prefetch_row(tokens.q, t + kChunk + i, hk, 0, K);
    }
  }
  if (tokens.gates.per_channel) return;
  for (int64_t i = 0; i < kChunk; i += 4)
    for (int64_t j = 0; j <= i; j += 4) {
      dots_4x4(out.k + i * k_stride, k_stride, out.k + j * k_stride, k_stride, k_stride, out.kk + i * kChunk + j, kChunk);
      if (tokens.q.data)
        dots_4x4(out.q + i * k_stride, k_stride, out.k + j * k_stride, k_stride, k_stride, out.qk + i * kChunk + j, kChunk);
    }
}

// Fills the operands of one value head. The decay products are running products of the decays, D_ij = D_(i-1)j alpha_i, not
// exponentials of a difference of sums. So nothing cancels, overflows or divides 0 by 0, however strong the decay is.
HWY_INLINE void prepare_values(const DeltaTokens& tokens, const KeyChunk& keys, int64_t t, int64_t count, int64_t hv,
                               int64_t k_stride, ValueChunk& out) {
  log_decays(tokens.gates, t, count, hv, out.alpha);
  fill_row(out.alpha + count, kChunk - count, 0);
  exp_all(out.alpha, kChunk);
  HWY_ALIGN float products[kChunk];
  fill_row(products, kChunk, 0);
  float gamma = 1;
  for (int64_t i = 0; i < kChunk; ++i) {
    const float alpha = out.alpha[i], beta = out.beta[i];
    for (int64_t j = 0; j < kChunk; ++j) products[j] *= alpha;
    for (int64_t j = 0; j < kChunk; ++j) out.lower[i * kChunk + j] = beta * (products[j] * keys.kk[i * kChunk + j]);
    products[i] = 1;
    for (int64_t j = 0; j < kChunk; ++j) out.weights[i * kChunk + j] = tokens.scale * (products[j] * keys.qk[i * kChunk + j]);
    gamma *= alpha;
    out.read_k[i] = beta * gamma;
    out.read_q[i] = tokens.scale * gamma;
  }
  for (int64_t i = 0; i < kChunk; ++i) out.to_end[i] = products[i];
  fill_row(out.decay, k_stride, gamma);
}

// The same with a decay per channel: the decays are multiplied into the rows before the dot products.
HWY_INLINE void prepare_values_per_channel(const DeltaTokens& tokens, const KeyChunk& keys, int64_t t, int64_t count, int64_t hv,
                                           int64_t k_stride, ValueChunk& out) {
  const F32 d;
  fill_row(out.lower, kChunk * kChunk, 0);
  fill_row(out.weights, kChunk * kChunk, 0);
  for (int64_t i = 0; i < kChunk; ++i) {
    float* alphas = out.alphas + i * k_stride;
    if (i < count)
      log_decay_row(tokens.gates, t + i, hv, tokens.heads.K, out.bias, alphas);
    else
      fill_row(alphas, k_stride, 0);
    fill_row(alphas + round_up(tokens.heads.K, kLanes), k_stride - round_up(tokens.heads.K, kLanes), 0);
    exp_all(alphas, k_stride);
    out.read_k[i] = out.beta[i];
    out.read_q[i] = tokens.scale;
    out.to_end[i] = 1;
  }
  fill_row(out.decay, k_stride, 1);
  for (int64_t i = 0; i < kChunk; ++i)
    for (int64_t p = 0; p < k_stride; p += kLanes) {
      const VF gamma = hn::Mul(hn::LoadU(d, out.decay + p), hn::LoadU(d, out.alphas + i * k_stride + p));
      hn::StoreU(gamma, d, out.decay + p);
      hn::StoreU(hn::Mul(gamma, hn::LoadU(d, keys.k + i * k_stride + p)), d, out.k_read + i * k_stride + p);
      hn::StoreU(hn::Mul(gamma, hn::LoadU(d, keys.q + i * k_stride + p)), d, out.q_read + i * k_stride + p);
    }
  for (int64_t j = 0; j < kChunk; ++j) {
    float* decayed = out.k_write + j * k_stride;  // k_j, decayed from token j to token i
    for (int64_t p = 0; p < k_stride; p += kLanes) hn::StoreU(hn::LoadU(d, keys.k + j * k_stride + p), d, decayed + p);
    out.weights[j * kChunk + j] = tokens.scale * dot_padded(keys.q + j * k_stride, decayed, k_stride);
    for (int64_t i = j + 1; i < kChunk; ++i) {
      for (int64_t p = 0; p < k_stride; p += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, decayed + p), hn::LoadU(d, out.alphas + i * k_stride + p)), d, decayed + p);
      out.lower[i * kChunk + j] = out.beta[i] * dot_padded(keys.k + i * k_stride, decayed, k_stride);
      out.weights[i * kChunk + j] = tokens.scale * dot_padded(keys.q + i * k_stride, decayed, k_stride);
    }
  }
}

// Scratch of one scan; the working states follow it.
struct ScanMemory {
  KeyChunk keys;
  ValueChunk values;
  HWY_ALIGN float rows[kChunk * (kMaxK + kPanel)];  // v of a chunk, overwritten by o
};

// Columns of a working state: `columns` rounded up to whole vectors.
HWY_INLINE int64_t work_columns(int64_t columns) { return round_up(columns, kLanes); }

size_t chunk_scan_bytes(const DeltaHeads& heads, int64_t value_heads, int64_t columns) {
  const int64_t states = value_heads * round_up(heads.K, kTileRows) * work_columns(columns);
  return static_cast<size_t>(round_up(static_cast<int64_t>(sizeof(ScanMemory)), kScratchAlignment) +
                             round_up(states * static_cast<int64_t>(sizeof(float)), kScratchAlignment));
}

// Columns may be split at multiples of this without changing any bit, since the result of a column does not depend on its panel.
int64_t scan_column_unit() { return kLanes; }

void chunk_scan(const DeltaTokens& tokens, const ScanTask& task, void* memory) {
  ScanMemory& m = *static_cast<ScanMemory*>(memory);
  float* states =
      reinterpret_cast<float*>(static_cast<char*>(memory) + round_up(static_cast<int64_t>(sizeof(ScanMemory)), kScratchAlignment));
  const DeltaHeads& heads = tokens.heads;
  const int64_t K = heads.K, V = task.identity ? K : heads.V;
  const int64_t k_rows = round_up(K, kTileRows), k_stride = round_up(K, kKeyUnit);
  const int64_t columns = work_columns(task.columns), state_size = k_rows * columns;

  for (int64_t j = task.first_head; j < task.last_head; ++j) {
    float* state = states + (j - task.first_head) * state_size;
    if (task.in_slot >= 0) {
      load_state(task.in, task.in.at(task.in_slot, heads.value_head(task.hk, j)), K, V, k_rows, task.column, columns, state);
      continue;
    }
    fill_row(state, state_size, 0);
    if (!task.identity) continue;
    for (int64_t c = 0; c < columns;) {
      const int64_t width = panel_width(c, columns);
      for (int64_t i = 0; i < width && task.column + c + i < K; ++i) state[c * k_rows + (task.column + c + i) * width + i] = 1;
      c += width;
    }
  }

  for (int64_t t = task.begin; t < task.end; t += kChunk) {
    const int64_t count = HWY_MIN(kChunk, task.end - t);
    prepare_keys(tokens, t, count, task.end - t, task.hk, k_stride, m.keys);
    for (int64_t j = task.first_head; j < task.last_head; ++j) {
      const int64_t hv = heads.value_head(task.hk, j);
      float* state = states + (j - task.first_head) * state_size;
      strengths(tokens.gates, t, count, hv, m.values.beta);
      fill_row(m.values.beta + count, kChunk - count, 0);
      const bool per_channel = tokens.gates.per_channel;
      if (per_channel)
        prepare_values_per_channel(tokens, m.keys, t, count, hv, k_stride, m.values);
      else
        prepare_values(tokens, m.keys, t, count, hv, k_stride, m.values);
      const int64_t real = HWY_MIN(task.columns, V - task.column);
      for (int64_t i = 0; i < kChunk; ++i) {
        float* row = m.rows + i * columns;
        const bool given = i < count && !task.identity;
        if (given) unpack_row(tokens.v.dtype, tokens.v.data, tokens.v.at(t + i, hv) + task.column, real, row);
        fill_row(row + (given ? real : 0), columns - (given ? real : 0), 0);
        if (!task.identity && t + kChunk + i < task.end) prefetch_row(tokens.v, t + kChunk + i, hv, task.column, real);
        if (tokens.q.data && i < count) prefetch_row(tokens.o, t + i, hv, task.column, real);
      }
      const ChunkOperands operands = {
          per_channel ? m.values.k_read : m.keys.k,
          !tokens.q.data ? nullptr
          : per_channel  ? m.values.q_read
                         : m.keys.q,
          per_channel ? m.values.k_write : m.keys.k,
          k_stride,
          k_rows,
          m.values.lower,
          m.values.weights,
          m.values.read_k,
          m.values.read_q,
          m.values.beta,
          m.values.to_end,
          m.values.decay,
      };
      for (int64_t c = 0; c < columns;) {
        const int64_t width = panel_width(c, columns);
        chunk_panel(operands, state + c * k_rows, m.rows + c, columns, width);
        c += width;
      }
      if (tokens.q.data)
        for (int64_t i = 0; i < count; ++i)
          pack_row(m.rows + i * columns, real, tokens.o.dtype, tokens.o.data, tokens.o.at(t + i, hv) + task.column);
      const int64_t done = t + count - task.sequence_begin;
      if (task.checkpoint_every > 0 && done % task.checkpoint_every == 0)
        store_state(state, k_rows, task.checkpoints, task.checkpoints.at(done / task.checkpoint_every - 1, hv), K, V, task.column,
                    columns);
    }
  }

  if (task.out_slot < 0) return;
  for (int64_t j = task.first_head; j < task.last_head; ++j)
    store_state(states + (j - task.first_head) * state_size, k_rows, task.out,
                task.out.at(task.out_slot, heads.value_head(task.hk, j)), K, V, task.column, columns);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
