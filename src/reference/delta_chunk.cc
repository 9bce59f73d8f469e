// The chunk stages of the gated delta rule in double, formula by formula, rounded only at the store.
#include <cmath>

#include "reference/delta_inputs.h"
#include "reference/table.h"

namespace weft::reference {
namespace {

struct Chunk {
  TokenRange tokens;
  int64_t row = 0;  // of its snapshot in h
};

struct ChunkedSequence {
  int64_t n = 0;  // which sequence
  std::vector<Chunk> chunks;
};

// The legal sequences cut into chunks. Bounds that overlap each other may ask for more than `rows` snapshots: such a sequence is
// inert.
std::vector<ChunkedSequence> cut(const Sequences& sequences, int64_t T, int64_t C, int64_t rows = INT64_MAX) {
  std::vector<ChunkedSequence> all;
  int64_t row = 0;
  for (int64_t n = 0; n < sequences.count; ++n) {
    const TokenRange range = tokens_of(sequences, n, T);
    const int64_t count = chunks_of(range, C), first = row;
    row += count;
    if (!range.legal || row > rows) continue;
    ChunkedSequence& sequence = all.emplace_back();
    sequence.n = n;
    for (int64_t c = 0; c < count; ++c)
      sequence.chunks.push_back({{range.begin + c * C, std::min(range.begin + (c + 1) * C, range.end)}, first + c});
  }
  return all;
}

template <class F>
void for_each_chunk(const Sequences& sequences, int64_t T, int64_t C, F&& visit) {
  for (const ChunkedSequence& sequence : cut(sequences, T, C))
    for (const Chunk& chunk : sequence.chunks) visit(chunk.tokens);
}

// Prefix sums of a chunk, one per head or one per channel.
struct Prefix {
  explicit Prefix(const Tensor& g_cumsum, TokenRange tokens) : rows(load_rows(g_cumsum, tokens)) {}
  double operator()(int64_t i, int64_t h, int64_t c) const { return rows.at(i, h)[rows.width > 1 ? c : 0]; }
  HeadRows rows;
};

// sum_c x_c y_c e^(G_i - G_j), for i >= j, where the exponent of legal gates is never positive.
double decayed_dot(const double* x, const double* y, int64_t K, const Prefix& G, int64_t i, int64_t j, int64_t h) {
  double sum = 0;
  if (G.rows.width == 1) {
    for (int64_t c = 0; c < K; ++c) sum += x[c] * y[c];
    return sum * std::exp(G(i, h, 0) - G(j, h, 0));
  }
  for (int64_t c = 0; c < K; ++c) sum += x[c] * y[c] * std::exp(G(i, h, c) - G(j, h, c));
  return sum;
}

void chunk_cumsum(const Stream&, const ChunkCumsumArgs& args) {
  for_each_chunk(args.sequences, args.g.size(0), args.chunk, [&](TokenRange tokens) {
    HeadRows sums = load_rows(args.g, tokens);
    const int64_t stride = sums.heads * sums.width;
    for (int64_t i = stride; i < tokens.length() * stride; ++i)
      sums.values[static_cast<size_t>(i)] += sums.values[static_cast<size_t>(i - stride)];
    store_rows(args.g_cumsum, sums, tokens);
  });
}

void chunk_kkt(const Stream&, const ChunkKktArgs& args) {
  const int64_t Hk = args.k.size(1), Hv = args.a.size(1), K = args.k.size(2);
  for_each_chunk(args.sequences, args.k.size(0), args.chunk, [&](TokenRange tokens) {
    const HeadRows k = load_rows(args.k, tokens), beta = load_rows(args.beta, tokens);
    const Prefix G(args.g_cumsum, tokens);
    for (int64_t i = 0; i < tokens.length(); ++i)
      for (int64_t hv = 0; hv < Hv; ++hv) {
        const int64_t hk = key_head(hv, Hv, Hk, args.head_map);
        for (int64_t j = 0; j < args.chunk; ++j)
          store(args.a, at(args.a, tokens.begin + i, hv, j),
                j < i ? *beta.at(i, hv) * decayed_dot(k.at(i, hk), k.at(j, hk), K, G, i, j, hv) : 0);
      }
  });
}

void chunk_tri_inverse(const Stream&, const ChunkTriInverseArgs& args) {
  const int64_t C = args.chunk;
  for_each_chunk(args.sequences, args.a.size(0), C, [&](TokenRange tokens) {
    const HeadRows a = load_rows(args.a, tokens);
    HeadRows x{a.heads, C, std::vector<double>(a.values.size(), 0)};
    for (int64_t h = 0; h < a.heads; ++h)
      for (int64_t i = 0; i < tokens.length(); ++i) {  // X_ij = d_ij - sum_{j <= m < i} A_im X_mj
        x.at(i, h)[i] = 1;
        for (int64_t m = 0; m < i; ++m)
          for (int64_t j = 0; j <= m; ++j) x.at(i, h)[j] -= a.at(i, h)[m] * x.at(m, h)[j];
      }
    store_rows(args.a_inv, x, tokens);
  });
}

void chunk_wu(const Stream&, const ChunkWuArgs& args) {
  const int64_t Hk = args.k.size(1), K = args.k.size(2), Hv = args.v.size(1), V = args.v.size(2);
  for_each_chunk(args.sequences, args.k.size(0), args.chunk, [&](TokenRange tokens) {
    const HeadRows k = load_rows(args.k, tokens), v = load_rows(args.v, tokens), beta = load_rows(args.beta, tokens);
    const HeadRows x = load_rows(args.a_inv, tokens);
    const Prefix G(args.g_cumsum, tokens);
    HeadRows w{Hv, K, std::vector<double>(static_cast<size_t>(tokens.length() * Hv * K), 0)};
    HeadRows u{Hv, V, std::vector<double>(static_cast<size_t>(tokens.length() * Hv * V), 0)};
    for (int64_t hv = 0; hv < Hv; ++hv) {
      const int64_t hk = key_head(hv, Hv, Hk, args.head_map);
      for (int64_t j = 0; j < tokens.length(); ++j) {
        std::vector<double> scaled(static_cast<size_t>(K));  // e^G k
        for (int64_t c = 0; c < K; ++c) scaled[static_cast<size_t>(c)] = std::exp(G(j, hv, c)) * k.at(j, hk)[c];
        for (int64_t i = j; i < tokens.length(); ++i) {
          const double factor = x.at(i, hv)[j] * *beta.at(j, hv);
          for (int64_t c = 0; c < K; ++c) w.at(i, hv)[c] += factor * scaled[static_cast<size_t>(c)];
          for (int64_t c = 0; c < V; ++c) u.at(i, hv)[c] += factor * v.at(j, hv)[c];
        }
      }
    }
    store_rows(args.w, w, tokens);
    store_rows(args.u, u, tokens);
  });
}

// One head of one chunk: vn = u - w S^T into u's rows, then S_n = e^(G_n) S + sum_i e^(G_n - G_i) vn_i k_i^T.
void advance(State& state, int64_t V, const HeadRows& k, int64_t hk, const HeadRows& w, HeadRows& vn, const Prefix& G, int64_t hv,
             int64_t n) {
  const int64_t K = k.width;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < K; ++c)
      for (int64_t v = 0; v < V; ++v) vn.at(i, hv)[v] -= w.at(i, hv)[c] * state[static_cast<size_t>(c * V + v)];
  for (int64_t c = 0; c < K; ++c) {
    double* row = state.data() + c * V;
    const double last = G(n - 1, hv, c), decay = std::exp(last);
    for (int64_t v = 0; v < V; ++v) row[v] *= decay;
    for (int64_t i = 0; i < n; ++i) {
      const double weight = std::exp(last - G(i, hv, c)) * k.at(i, hk)[c];
      for (int64_t v = 0; v < V; ++v) row[v] += weight * vn.at(i, hv)[v];
    }
  }
}

void chunk_state(const Stream&, const ChunkStateArgs& args) {
  const int64_t T = args.k.size(0), Hk = args.k.size(1), K = args.k.size(2), Hv = args.u.size(1), V = args.u.size(2);
  for (const ChunkedSequence& sequence : cut(args.sequences, T, args.chunk, args.h.size(0))) {
    std::vector<State> states(static_cast<size_t>(Hv), State(static_cast<size_t>(V * K), 0));
    for (int64_t hv = 0; hv < Hv && args.state_in.present(); ++hv)
      states[static_cast<size_t>(hv)] = load_state(args.state_in, at(args.state_in, sequence.n, hv), V, K);
    for (const Chunk& chunk : sequence.chunks) {
      const HeadRows k = load_rows(args.k, chunk.tokens), w = load_rows(args.w, chunk.tokens);
      const Prefix G(args.g_cumsum, chunk.tokens);
      HeadRows vn = load_rows(args.u, chunk.tokens);
      for (int64_t hv = 0; hv < Hv; ++hv) {
        State& state = states[static_cast<size_t>(hv)];
        store_state(args.h, at(args.h, chunk.row, hv), state, V, K);
        advance(state, V, k, key_head(hv, Hv, Hk, args.head_map), w, vn, G, hv, chunk.tokens.length());
      }
      store_rows(args.v_new, vn, chunk.tokens);
    }
    for (int64_t hv = 0; hv < Hv && args.state_out.present(); ++hv)
      store_state(args.state_out, at(args.state_out, sequence.n, hv), states[static_cast<size_t>(hv)], V, K);
  }
}

// o_i = scale (e^(G_i) S0 q_i + sum_{j<=i} e^(G_i-G_j) (q_i . k_j) vn_j), one head of one chunk.
void read_out(HeadRows& o, const State& state, const HeadRows& q, const HeadRows& k, int64_t hk, const HeadRows& vn,
              const Prefix& G, int64_t hv, int64_t n, double scale) {
  const int64_t K = k.width, V = vn.width;
  for (int64_t i = 0; i < n; ++i) {
    double* out = o.at(i, hv);
    for (int64_t c = 0; c < K; ++c) {
      const double weight = scale * std::exp(G(i, hv, c)) * q.at(i, hk)[c];
      for (int64_t v = 0; v < V; ++v) out[v] += weight * state[static_cast<size_t>(c * V + v)];
    }
    for (int64_t j = 0; j <= i; ++j) {
      const double weight = scale * decayed_dot(q.at(i, hk), k.at(j, hk), K, G, i, j, hv);
      for (int64_t v = 0; v < V; ++v) out[v] += weight * vn.at(j, hv)[v];
    }
  }
}

void chunk_output(const Stream&, const ChunkOutputArgs& args) {
  const int64_t T = args.k.size(0), Hk = args.k.size(1), K = args.k.size(2), Hv = args.v_new.size(1), V = args.v_new.size(2);
  const double scale = scale_or_default<double>(args.scale, K);
  for (const ChunkedSequence& sequence : cut(args.sequences, T, args.chunk, args.h.size(0)))
    for (const Chunk& chunk : sequence.chunks) {
      const HeadRows q = load_rows(args.q, chunk.tokens), k = load_rows(args.k, chunk.tokens),
                     vn = load_rows(args.v_new, chunk.tokens);
      const Prefix G(args.g_cumsum, chunk.tokens);
      HeadRows o{Hv, V, std::vector<double>(vn.values.size(), 0)};
      for (int64_t hv = 0; hv < Hv; ++hv)
        read_out(o, load_state(args.h, at(args.h, chunk.row, hv), V, K), q, k, key_head(hv, Hv, Hk, args.head_map), vn, G, hv,
                 chunk.tokens.length(), scale);
      store_rows(args.o, o, chunk.tokens);
    }
}

}  // namespace

OpEntry<ChunkCumsumArgs> chunk_cumsum_entry() { return entry<chunk_cumsum>(kOnlyF32); }
OpEntry<ChunkKktArgs> chunk_kkt_entry() { return entry<chunk_kkt>(kAllFloats); }
OpEntry<ChunkTriInverseArgs> chunk_tri_inverse_entry() { return entry<chunk_tri_inverse>(kOnlyF32); }
OpEntry<ChunkWuArgs> chunk_wu_entry() { return entry<chunk_wu>(kAllFloats); }
OpEntry<ChunkStateArgs> chunk_state_entry() { return entry<chunk_state>(kAllFloats); }
OpEntry<ChunkOutputArgs> chunk_output_entry() { return entry<chunk_output>(kAllFloats); }

}  // namespace weft::reference
