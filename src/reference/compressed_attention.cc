// Attention over a compressed cache in double: scores, values, partials, merge, and the single call as a direct softmax.
#include <cmath>

#include <algorithm>
#include <limits>

#include "common/attention_mask.h"
#include "common/conventions.h"
#include "common/partials.h"
#include "reference/kv_rows.h"
#include "reference/rows.h"
#include "reference/table.h"

namespace weft::reference {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// The live tokens of one sequence, oldest first.
struct LiveTokens {
  struct Token {
    int64_t position;
    KvLocation at;  // does not exist on a missing page or slot: the token is then never seen
  };
  int64_t appended = 0;
  std::vector<Token> tokens;
  int64_t count() const { return static_cast<int64_t>(tokens.size()); }
};

LiveTokens live_of(const KvCache& cache, int64_t n) {
  LiveTokens live;
  live.appended = appended_tokens(cache, n);
  const int64_t count = live_tokens(cache, live.appended);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t position = live_position(cache, live.appended, j);
    live.tokens.push_back({position, locate(cache, n, position)});
  }
  return live;
}

// The rotated rows of all live tokens, [count, D]; missing rows stay zero and nothing else of the cache is read.
std::vector<double> decode_live(const KvCache& cache, const KvSide& side, const LiveTokens& live, int64_t head) {
  const size_t D = static_cast<size_t>(side.format.head_dim);
  std::vector<double> rows(live.tokens.size() * D);
  for (size_t j = 0; j < live.tokens.size(); ++j) {
    const KvLocation at = live.tokens[j].at;
    if (!at.exists()) continue;
    const std::vector<double> row = decode_rotated(cache, side, at.block, head, at.row);
    std::copy(row.begin(), row.end(), rows.begin() + static_cast<std::ptrdiff_t>(j * D));
  }
  return rows;
}

// Calls visit(t, hq, s, v) for every query row of every legal sequence: s the scores of the live tokens, -inf where masked, and v
// their rotated V rows (none unless asked for).
template <class Visit>
void for_each_query(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask, bool with_values,
                    Visit&& visit) {
  const int64_t T = queries.q.size(0), Hq = queries.q.size(1), Dk = queries.q.size(2), Hk = cache.heads(), R = Hq / Hk;
  const double scale = scale_or_default<double>(queries.scale, Dk);
  const KvFormat& format = cache.k.format;
  for (int64_t n = 0; n < queries.sequences.count; ++n) {
    const TokenRange range = tokens_of(queries.sequences, n, T);
    if (range.length() == 0) continue;
    const LiveTokens live = live_of(cache, n);
    for (int64_t hk = 0; hk < Hk; ++hk) {
      const std::vector<double> k = decode_live(cache, cache.k, live, hk);
      const std::vector<double> v = with_values ? decode_live(cache, cache.v, live, hk) : std::vector<double>{};
      std::vector<double> mean = mean_of(format, hk);  // brought into the domain in which q comes
      if (queries.domain == KvDomain::rotated) rotate(format, mean, false);
      for (int64_t t = range.begin; t < range.end; ++t) {
        const VisiblePositions seen = visible_positions(mask, query_position(queries, range, live.appended, t));
        for (int64_t hq = hk * R; hq < (hk + 1) * R; ++hq) {
          std::vector<double> q = load_row(queries.q, t, hq);
          const double from_mean = dot(q.data(), mean.data(), Dk);
          if (queries.domain == KvDomain::original) rotate(format, q, false);
          std::vector<double> s(live.tokens.size(), kNone);
          for (int64_t j = 0; j < live.count(); ++j) {
            const LiveTokens::Token& token = live.tokens[static_cast<size_t>(j)];
            if (!token.at.exists() || !seen.has(token.position)) continue;
            const double score = scale * (dot(q.data(), k.data() + j * Dk, Dk) + from_mean);
            s[static_cast<size_t>(j)] = mask.softcap ? *mask.softcap * std::tanh(score / *mask.softcap) : score;
          }
          visit(t, hq, s, v);
        }
      }
    }
  }
}

// A partial in double.
struct RowSum {
  std::vector<double> o;
  SoftmaxSum<double> sum;
};

// The partial of live tokens [begin, end). m is the largest score rounded to f32, as partials store it: with l and o taken relative
// to that very number, storing them costs no more than their own rounding.
RowSum sum_tokens(const std::vector<double>& s, const std::vector<double>& v, int64_t Dv, int64_t begin, int64_t end) {
  RowSum row{std::vector<double>(static_cast<size_t>(Dv)), {}};
  for (int64_t j = begin; j < end; ++j) {
    const double score = s[static_cast<size_t>(j)];
    row.sum.m = row.sum.m > score ? row.sum.m : score;  // a NaN score takes over
    if (std::isnan(score)) break;
  }
  if (row.sum.m == kNone) return row;
  row.sum.m = static_cast<float>(row.sum.m);
  for (int64_t j = begin; j < end; ++j) {
    if (s[static_cast<size_t>(j)] == kNone) continue;  // the row of a masked token may hold anything
    const double weight = std::exp(s[static_cast<size_t>(j)] - row.sum.m);
    row.sum.l += weight;
    for (int64_t d = 0; d < Dv; ++d) row.o[static_cast<size_t>(d)] += weight * v[static_cast<size_t>(j * Dv + d)];
  }
  return row;
}

// Enters the sink, normalises, leaves V's rotated domain if asked, and stores the row.
void finish_row(RowSum row, const KvFormat& v_format, int64_t hk, KvDomain domain, const Tensor& sinks, const Tensor& o,
                const Tensor& lse, int64_t t, int64_t hq) {
  double tokens = row.sum.l, factor = 1;  // `tokens`: the weight of real tokens, for the V mean
  if (sinks.present()) factor = row.sum.join(load(sinks, at(sinks, hq)), 1).keep;
  factor *= row.sum.inverse();
  tokens *= factor;
  for (double& value : row.o) value *= factor;
  if (domain == KvDomain::original) {
    rotate(v_format, row.o, true);
    const std::vector<double> mean = mean_of(v_format, hk);
    for (size_t d = 0; d < row.o.size(); ++d) row.o[d] += tokens * mean[d];
  }
  store_row(o, row.o, t, hq);
  if (lse.present()) store(lse, at(lse, t, hq), row.sum.log_sum());
}

void attention_scores(const Stream&, const AttentionScoresArgs& args) {
  const int64_t context = args.scores.size(2);
  for_each_query(args.queries, args.cache, args.mask, false,
                 [&](int64_t t, int64_t hq, const std::vector<double>& s, const std::vector<double>&) {
                   std::vector<double> row = s;
                   row.resize(static_cast<size_t>(context), kNone);
                   store_row(args.scores, row, t, hq);
                 });
}

void attention_values(const Stream&, const AttentionValuesArgs& args) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2), Hk = args.cache.heads(), R = Hq / Hk;
  const KvFormat& format = args.cache.v.format;
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (range.length() == 0) continue;
    const LiveTokens live = live_of(args.cache, n);
    const int64_t columns = std::min(live.count(), args.weights.size(2));
    for (int64_t hk = 0; hk < Hk; ++hk) {
      const std::vector<double> v = decode_live(args.cache, args.cache.v, live, hk), mean = mean_of(format, hk);
      for (int64_t t = range.begin; t < range.end; ++t)
        for (int64_t hq = hk * R; hq < (hk + 1) * R; ++hq) {
          std::vector<double> row(static_cast<size_t>(Dv));
          double tokens = 0;
          for (int64_t j = 0; j < columns; ++j) {
            if (!live.tokens[static_cast<size_t>(j)].at.exists()) continue;
            const double weight = load(args.weights, at(args.weights, t, hq, j));
            if (args.threshold && !(weight >= *args.threshold)) continue;
            tokens += weight;
            for (int64_t d = 0; d < Dv; ++d) row[static_cast<size_t>(d)] += weight * v[static_cast<size_t>(j * Dv + d)];
          }
          if (args.domain == KvDomain::original) {
            rotate(format, row, true);
            for (size_t d = 0; d < row.size(); ++d) row[d] += tokens * mean[d];
          }
          store_row(args.o, row, t, hq);
        }
    }
  }
}

void attention_partials(const Stream&, const AttentionPartialsArgs& args) {
  const int64_t Dv = args.cache.v.format.head_dim;
  const PartialsView out = partials_view(args.partials, args.queries.q.size(0), args.queries.q.size(1), Dv);
  for_each_query(args.queries, args.cache, args.mask, true,
                 [&](int64_t t, int64_t hq, const std::vector<double>& s, const std::vector<double>& v) {
                   int64_t begin = 0;
                   for (int64_t b = 0; b < args.partials.count; ++b) {
                     const int64_t end = begin + std::min(args.block_tokens, static_cast<int64_t>(s.size()) - begin);
                     const RowSum block = sum_tokens(s, v, Dv, begin, end);
                     out.m[out.m_at(t, hq, b)] = static_cast<float>(block.sum.m);
                     out.l[out.l_at(t, hq, b)] = static_cast<float>(block.sum.l);
                     for (int64_t j = 0; j < Dv; ++j)
                       out.o[out.o_at(t, hq, b, j)] = static_cast<float>(block.o[static_cast<size_t>(j)]);
                     begin = end;
                   }
                 });
}

void attention_merge(const Stream&, const AttentionMergeArgs& args) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2), R = Hq / args.kv_heads;
  const PartialsView in = partials_view(args.partials, T, Hq, Dv);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t hq = 0; hq < Hq; ++hq) {
      RowSum row{std::vector<double>(static_cast<size_t>(Dv)), {}};
      for (int64_t b = 0; b < args.partials.count; ++b) {
        if (in.empty(t, hq, b)) continue;
        const auto [keep, take] = row.sum.join(in.m[in.m_at(t, hq, b)], in.l[in.l_at(t, hq, b)]);
        for (int64_t j = 0; j < Dv; ++j) {
          double& value = row.o[static_cast<size_t>(j)];
          value = keep * value + take * in.o[in.o_at(t, hq, b, j)];
        }
      }
      finish_row(std::move(row), args.v_format, hq / R, args.domain, args.sinks, args.o, args.lse, t, hq);
    }
}

void compressed_attention(const Stream&, const CompressedAttentionArgs& args) {
  const int64_t Dv = args.o.size(2), R = args.o.size(1) / args.cache.heads();
  for_each_query(args.queries, args.cache, args.mask, true,
                 [&](int64_t t, int64_t hq, const std::vector<double>& s, const std::vector<double>& v) {
                   finish_row(sum_tokens(s, v, Dv, 0, static_cast<int64_t>(s.size())), args.cache.v.format, hq / R,
                              KvDomain::original, args.sinks, args.o, args.lse, t, hq);
                 });
}

}  // namespace

OpEntry<AttentionScoresArgs> attention_scores_entry() { return entry<attention_scores>(kAllFloats); }
OpEntry<AttentionValuesArgs> attention_values_entry() { return entry<attention_values>(kAllFloats); }
OpEntry<AttentionPartialsArgs> attention_partials_entry() { return entry<attention_partials>(kAllFloats); }
OpEntry<AttentionMergeArgs> attention_merge_entry() { return entry<attention_merge>(kAllFloats); }
OpEntry<CompressedAttentionArgs> compressed_attention_entry() { return entry<compressed_attention>(kAllFloats); }

}  // namespace weft::reference
