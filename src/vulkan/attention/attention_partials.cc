// attention_scores, attention_values and attention_partials on vulkan: lowers arguments for shaders that take any cache.
#include <algorithm>

#include "common/conventions.h"
#include "vulkan/attention/attention.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

constexpr int64_t kMostRows = 16, kTileFloats = 4096;
std::vector<uint32_t> constants(const TileShape& shape) {
  return {static_cast<uint32_t>(shape.rows), static_cast<uint32_t>(shape.tokens), static_cast<uint32_t>(shape.columns)};
}
constexpr int64_t kScoreSpan = 256;  // tokens of a workgroup of attention_scores

struct NoPlan {
  size_t scratch_bytes = 0;
};

// --- attention_scores ---------------------------------------------------------------------------------------------------------

struct ScoresParams {
  SideView sides[2]{};
  CacheIndex index{};
  QueriesView queries{};
  View scores{};
  int64_t spans = 0, span = kScoreSpan;
};

TileShape scores_shape(const AttentionScoresArgs& args) {
  const Tensor& q = args.queries.q;
  return tile_shape(q.size(2), max_tokens(args.queries.sequences, q.size(0)) * q.size(1) / args.cache.heads());
}

NoPlan plan_scores(const Stream&, const AttentionScoresArgs&) { return {}; }
Choice describe_scores(const Stream&, const AttentionScoresArgs& args, const NoPlan&) {
  return describe_tiles("attention_scores", scores_shape(args));
}
void attention_scores(const Stream& stream, const AttentionScoresArgs& args, const NoPlan&, Scratch) {
  const TileShape shape = scores_shape(args);
  ScoresParams p{{side_view(args.cache, KvRole::k), side_view(args.cache, KvRole::v)},
                 cache_index(args.cache),
                 queries_view(args.queries, args.cache, args.mask),
                 view_of(args.scores),
                 ceil_div(args.scores.size(2), kScoreSpan)};
  p.queries.row_tiles = ceil_div(p.queries.longest * p.queries.group, shape.rows);
  dispatch("attention_scores", stream,
           {"attention_scores", constants_of({static_cast<uint32_t>(shape.rows), static_cast<uint32_t>(shape.tokens)}, p.sides)}, p,
           args.queries.sequences.count * p.queries.heads * p.spans * p.queries.row_tiles);
}
Status supports_scores(const Stream& stream, const AttentionScoresArgs&) { return needs_bytes(stream, "attention_scores"); }

// --- attention_values ---------------------------------------------------------------------------------------------------------

struct ValuesParams {
  SideView sides[2]{};
  CacheIndex index{};
  QueriesView queries{};
  OutputsView outputs{};
  uint32_t has_threshold = 0;
  float threshold = 0;
};

TileShape values_shape(const AttentionValuesArgs& args) {
  const int64_t rows = max_tokens(args.sequences, args.o.size(0)) * args.o.size(1) / args.cache.heads();
  return tile_shape(args.o.size(2), rows);
}

NoPlan plan_values(const Stream&, const AttentionValuesArgs&) { return {}; }
Choice describe_values(const Stream&, const AttentionValuesArgs& args, const NoPlan&) {
  return describe_tiles("attention_values", values_shape(args));
}
void attention_values(const Stream& stream, const AttentionValuesArgs& args, const NoPlan&, Scratch) {
  const TileShape shape = values_shape(args);
  ValuesParams p{{side_view(args.cache, KvRole::k), output_format(side_view(args.cache, KvRole::v), args.domain)},
                 cache_index(args.cache)};
  p.queries.q = view_of(args.weights);
  p.queries.sequences = view_of(args.sequences, args.o.size(0));
  p.queries.longest = max_tokens(args.sequences, args.o.size(0));
  p.queries.heads = args.cache.heads();
  p.queries.group = args.o.size(1) / p.queries.heads;
  p.queries.row_tiles = ceil_div(p.queries.longest * p.queries.group, shape.rows);
  p.outputs = outputs_of(args.o, {}, {});
  p.has_threshold = args.threshold.has_value();
  p.threshold = args.threshold.value_or(0.0f);
  dispatch("attention_values", stream, {"attention_values", constants_of(constants(shape), p.sides)}, p,
           args.sequences.count * p.queries.heads * p.queries.row_tiles);
}
Status supports_values(const Stream& stream, const AttentionValuesArgs&) { return needs_bytes(stream, "attention_values"); }

// --- attention_partials -------------------------------------------------------------------------------------------------------

TileShape shape_of(const PartialsCall& call) {
  return tile_shape(std::max(call.sides[0].D, call.sides[1].D), call.queries.longest * call.queries.group);
}

NoPlan plan_partials(const Stream&, const AttentionPartialsArgs&) { return {}; }
Choice describe_partials(const Stream&, const AttentionPartialsArgs& args, const NoPlan&) {
  return describe_tiles("attention_partials", shape_of(partials_call(args.queries, args.cache, args.mask)));
}
void attention_partials(const Stream& stream, const AttentionPartialsArgs& args, const NoPlan&, Scratch) {
  const Tensor& q = args.queries.q;
  PartialsCall call = partials_call(args.queries, args.cache, args.mask);
  call.out = lowered(partials_view(args.partials, q.size(0), q.size(1), args.cache.v.format.head_dim));
  call.splits.count = args.partials.count;
  call.splits.each = args.block_tokens;
  record(stream, prepare_partials("attention_partials", stream, call));
}
Status supports_partials(const Stream& stream, const AttentionPartialsArgs&) { return needs_bytes(stream, "attention_partials"); }

}  // namespace

QueriesView queries_view(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask) {
  QueriesView view;
  const int64_t T = queries.q.size(0);
  view.q = view_of(queries.q);
  view.positions = indices_of(queries.positions);
  view.sequences = view_of(queries.sequences, T);
  view.longest = max_tokens(queries.sequences, T);
  view.heads = cache.heads();
  view.group = queries.q.size(1) / view.heads;
  view.window = mask.window.value_or(0);
  view.causal = mask.causal;
  view.rotated = queries.domain == KvDomain::rotated;
  view.softcap = mask.softcap.value_or(0.0f);
  view.scale = scale_or_default(queries.scale, queries.q.size(2));
  return view;
}

std::vector<uint32_t> constants_of(std::vector<uint32_t> own, const SideView (&sides)[2]) {
  for (uint32_t constant : rotation_constants(sides)) own.push_back(constant);
  return own;
}

TileShape tile_shape(int64_t D, int64_t rows) {
  TileShape shape;
  shape.columns = ceil_div(D, kThreads);
  if (shape.columns == 3) shape.columns = 4;
  shape.rows = kMostRows / shape.columns;
  if (rows <= 4) shape.rows = 4;
  shape.tokens = 32;
  while (shape.tokens * D > kTileFloats) shape.tokens /= 2;
  return shape;
}

Choice describe_tiles(const char* op, const TileShape& shape, const std::string& more) {
  return {std::string("vulkan.") + op + ".tiles",
          "tiles of " + std::to_string(shape.tokens) + " decoded tokens, " + std::to_string(shape.rows) +
              " query rows per workgroup" + more,
          Speed::portable};
}

PartialsCall partials_call(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask) {
  return {{side_view(cache, KvRole::k), side_view(cache, KvRole::v)}, cache_index(cache), queries_view(queries, cache, mask)};
}

Step prepare_partials(const char* op, const Stream& stream, PartialsCall call) {
  const TileShape shape = shape_of(call);
  call.queries.row_tiles = ceil_div(call.queries.longest * call.queries.group, shape.rows);
  return prepare(op, stream, {"attention_partials", constants_of(constants(shape), call.sides)}, call,
                 call.queries.sequences.count * call.queries.heads * call.splits.count * call.queries.row_tiles);
}

OpEntry<AttentionScoresArgs> attention_scores_entry() {
  return entry<plan_scores, describe_scores, attention_scores>(kAllFloats, supports_scores);
}
OpEntry<AttentionValuesArgs> attention_values_entry() {
  return entry<plan_values, describe_values, attention_values>(kAllFloats, supports_values);
}
OpEntry<AttentionPartialsArgs> attention_partials_entry() {
  return entry<plan_partials, describe_partials, attention_partials>(kAllFloats, supports_partials);
}

}  // namespace weft::vulkan
