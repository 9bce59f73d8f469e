// What legal arguments of attention_scores, attention_values, attention_partials, attention_merge and compressed_attention are.
#include "weft/compressed_attention.h"

#include <optional>

#include "common/kv_index.h"
#include "core/check.h"
#include "core/kv_cache_check.h"

namespace weft {
namespace {

// The product, or nothing when it is beyond int64 (views with a stride of 0 may have any size).
std::optional<int64_t> product(std::initializer_list<int64_t> factors) {
  int64_t all = 1;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(all, factor, &all)) return {};
  return all;
}

std::string product_text(const std::optional<int64_t>& all) { return all ? std::to_string(*all) : "more than 2^63"; }

// The queries of a call on `cache`: binds T, Hq and N, after the cache has bound Dk and Hk.
void check_queries(Check& check, const AttentionQueries& queries, const KvCache& cache) {
  check.tensor("queries.q", queries.q, {"T", "Hq", "Dk"});
  if (check.ok()) check.head_ratio("cache.k.codes", check.dim("Hq"), check.dim("Hk"));
  check.sequences("queries.sequences", queries.sequences, check.dim("T"));
  check.optional_tensor("queries.positions", queries.positions, {"T"}, {DType::i32});
  if (queries.scale) check.finite("queries.scale", *queries.scale);
  check.known("queries.domain", queries.domain, KvDomain::rotated);
  check_kv_sequences(check, cache, Lengths::wanted);
}

void check_mask(Check& check, const AttentionMask& mask) {
  if (mask.window)
    check.require(*mask.window >= 1, "mask.window", [&] { return "is " + std::to_string(*mask.window) + ", wanted >= 1"; });
  if (mask.softcap)
    check.finite("mask.softcap", *mask.softcap).require(*mask.softcap > 0, "mask.softcap", [&] {
      return "is " + std::to_string(*mask.softcap) + ", wanted > 0";
    });
}

// T, Hq and Dv must be bound. Only the tensors of the chosen layout may be there: others would be silently ignored.
void check_partials(Check& check, const AttentionPartials& partials) {
  check.known("partials.layout", partials.layout, PartialLayout::interleaved);
  check.require(partials.count >= 1, "partials.count", [&] { return "is " + std::to_string(partials.count) + ", wanted >= 1"; });
  if (!check.ok()) return;
  check.bind("B", partials.count);
  if (partials.layout == PartialLayout::blocks) {
    check.tensor("partials.o", partials.o, {"T", "Hq", "B", "Dv"}, {DType::f32});
    check.tensor("partials.m", partials.m, {"T", "Hq", "B"}, {DType::f32});
    check.tensor("partials.l", partials.l, {"T", "Hq", "B"}, {DType::f32});
    check.require(!partials.buffer.present(), "partials.buffer", "is given, but layout blocks keeps partials in o, m and l");
    return;
  }
  check.tensor("partials.buffer", partials.buffer, {"T Hq B (Dv + 2)"}, {DType::f32});
  if (!check.ok()) return;
  const std::optional<int64_t> floats = product({check.dim("T"), check.dim("Hq"), partials.count, check.dim("Dv") + 2});
  check.require(floats == partials.buffer.size(0), "partials.buffer", [&] {
    return "has " + std::to_string(partials.buffer.size(0)) + " floats, wanted T Hq B (Dv + 2) = " + product_text(floats);
  });
  for (const auto& [name, tensor] :
       {std::pair{"partials.o", &partials.o}, {"partials.m", &partials.m}, {"partials.l", &partials.l}})
    check.require(!tensor->present(), name, "is given, but layout interleaved keeps partials in buffer");
}

// o, lse and sinks of the two ops that finish rows.
void check_outputs(Check& check, const Tensor& o, const Tensor& lse, const Tensor& sinks) {
  check.tensor("o", o, {"T", "Hq", "Dv"});
  check.optional_tensor("lse", lse, {"T", "Hq"}, {DType::f32});
  check.optional_tensor("sinks", sinks, {"Hq"}, {DType::f32});
}

}  // namespace

Status validate(const AttentionScoresArgs& args) {
  Check check("attention_scores");
  check_kv_storage(check, "attention_scores", args.cache);
  check_queries(check, args.queries, args.cache);
  check_mask(check, args.mask);
  check.tensor("scores", args.scores, {"T", "Hq", "context"});
  check.require(check.dim("context") != 0, "scores", [&] { return "is " + shape_text(args.scores) + ", wanted a context >= 1"; });
  return std::move(check.memory(args)).status();
}

Status validate(const AttentionValuesArgs& args) {
  Check check("attention_values");
  check_kv_storage(check, "attention_values", args.cache);
  check.tensor("weights", args.weights, {"T", "Hq", "context"});
  check.require(check.dim("context") != 0, "weights", [&] { return "is " + shape_text(args.weights) + ", wanted a context >= 1"; });
  if (check.ok()) check.head_ratio("cache.v.codes", check.dim("Hq"), check.dim("Hk"));
  check.sequences("sequences", args.sequences, check.dim("T"));
  check_kv_sequences(check, args.cache, Lengths::wanted);
  if (args.threshold) check.finite("threshold", *args.threshold);
  check.known("domain", args.domain, KvDomain::rotated);
  check.tensor("o", args.o, {"T", "Hq", "Dv"});
  return std::move(check.memory(args)).status();
}

Status validate(const AttentionPartialsArgs& args) {
  Check check("attention_partials");
  check_kv_storage(check, "attention_partials", args.cache);
  check_queries(check, args.queries, args.cache);
  check_mask(check, args.mask);
  check.require(args.block_tokens >= 1, "block_tokens",
                [&] { return "is " + std::to_string(args.block_tokens) + ", wanted >= 1"; });
  check_partials(check, args.partials);
  if (check.ok()) {
    const int64_t tokens = sequence_capacity(args.cache), whole = tokens / args.block_tokens;
    const int64_t needed = whole + (whole * args.block_tokens < tokens);
    check.require(args.partials.count >= needed, "partials.count", [&] {
      return "is " + std::to_string(args.partials.count) + ", wanted at least " + std::to_string(needed) + " blocks of " +
             std::to_string(args.block_tokens) + " to cover the " + std::to_string(tokens) + " tokens that a sequence may hold";
    });
  }
  return std::move(check.memory(args)).status();
}

Status validate(const AttentionMergeArgs& args) {
  Check check("attention_merge");
  check.also(validate(args.v_format, "attention_merge", "v_format"));
  if (check.ok()) check.bind("Dv", args.v_format.head_dim).bind("Hk", args.kv_heads);
  check_outputs(check, args.o, args.lse, args.sinks);
  if (check.ok()) check.head_ratio("kv_heads", check.dim("Hq"), args.kv_heads);
  check.known("domain", args.domain, KvDomain::rotated);
  check_partials(check, args.partials);
  if (!args.v_format.passthrough) check.optional_tensor("v_format.mean", args.v_format.mean, {"Hk", "Dv"}, {DType::f32});
  return std::move(check.memory(args)).status();
}

Status validate(const CompressedAttentionArgs& args) {
  Check check("compressed_attention");
  check_kv_storage(check, "compressed_attention", args.cache);
  check_queries(check, args.queries, args.cache);
  check_mask(check, args.mask);
  check_outputs(check, args.o, args.lse, args.sinks);
  check.known("precision", args.precision, Precision::fast).known("schedule", args.schedule, Schedule::invariant);
  check.optional_tensor("counters", args.counters, {"counters"}, {DType::i32});
  if (check.ok() && args.counters.present()) {
    const std::optional<int64_t> rows = product({check.dim("T"), check.dim("Hq")});
    check.require(rows && args.counters.size(0) >= *rows, "counters", [&] {
      return "has " + std::to_string(args.counters.size(0)) + " elements, wanted at least T Hq = " + product_text(rows);
    });
  }
  return std::move(check.memory(args)).status();
}

}  // namespace weft
