// What legal arguments of attention_scores, attention_values, attention_partials, attention_merge and compressed_attention are.
#include "weft/compressed_attention.h"

#include <optional>

#include "common/kv_index.h"
#include "core/check.h"
#include "core/describe_attention.h"
#include "core/kv_cache_check.h"
#include "core/op_limits.h"

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

// What all ops on a cache share. The cache comes first, since it binds Hk, Dk and Dv.
template <class Args>
void check_on_cache(Check& check, const char* op, const Args& args) {
  check_kv_storage(check, op, args.cache);
  check.members(args);
  check_kv_lookup(check, args.cache);
}

std::string legal_on_cache() { return legal_head_dim() + ", Hq a multiple of Hk; passthrough or 2 to 8 bits a side"; }

void check_context(Check& check, const char* argument, const Tensor& t) {
  check.require(check.dim("context") != 0, argument, [&] { return "is " + shape_text(t) + ", wanted a context >= 1"; });
}

// The length of an interleaved buffer. Call after Check::members().
void check_buffer(Check& check, const AttentionPartials& partials) {
  if (!check.ok() || partials.layout == PartialLayout::blocks) return;
  const std::optional<int64_t> floats = product({check.dim("T"), check.dim("Hq"), partials.count, check.dim("Dv") + 2});
  check.require(floats == partials.buffer.size(0), "partials.buffer", [&] {
    return "has " + std::to_string(partials.buffer.size(0)) + " floats, wanted T Hq B (Dv + 2) = " + product_text(floats);
  });
}

// The number of blocks of each row, if it makes sense.
void bind_blocks(Check& check, const AttentionPartials& partials) {
  if (partials.count >= 1) check.bind("B", partials.count);
}

}  // namespace

void check_kv_heads(Check& check, const char* queries) {
  check.query_heads(queries, check.dim("Hq"), "cache.k.codes", check.dim("Hk"));
}

void check_partial_layout(Check& check, const AttentionPartials& partials) {
  if (partials.layout == PartialLayout::blocks) {
    check.require(!partials.buffer.present(), "partials.buffer", "is given, but layout blocks keeps partials in o, m and l");
    return;
  }
  for (const auto& [name, tensor] :
       {std::pair{"partials.o", &partials.o}, {"partials.m", &partials.m}, {"partials.l", &partials.l}})
    check.require(!tensor->present(), name, "is given, but layout interleaved keeps partials in buffer");
}

Status validate(const AttentionScoresArgs& args) {
  Check check("attention_scores");
  check_on_cache(check, "attention_scores", args);
  check_context(check, "scores", args.scores);
  return std::move(check.memory(args)).status();
}

Status validate(const AttentionValuesArgs& args) {
  Check check("attention_values");
  check_on_cache(check, "attention_values", args);
  check_context(check, "weights", args.weights);
  return std::move(check.memory(args)).status();
}

Status validate(const AttentionPartialsArgs& args) {
  Check check("attention_partials");
  bind_blocks(check, args.partials);
  check_on_cache(check, "attention_partials", args);
  check_buffer(check, args.partials);
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
  check.also(validate_format(args.v_format, "attention_merge", "v_format"));
  check.bind("Dv", args.v_format.head_dim);
  bind_blocks(check, args.partials);
  check.members(args);
  check_buffer(check, args.partials);
  check.bind("Hk", args.kv_heads);
  if (!args.v_format.passthrough)
    check.tensor("v_format.mean", args.v_format.mean, {.shape = shape<"Hk", "Dv">, .dtypes = kF32Type, .optional = true});
  return std::move(check.memory(args)).status();
}

Status validate(const CompressedAttentionArgs& args) {
  Check check("compressed_attention");
  check_on_cache(check, "compressed_attention", args);
  return std::move(check.memory(args)).status();
}

std::string legal_shapes(const AttentionScoresArgs&) { return legal_on_cache(); }
std::string legal_shapes(const AttentionValuesArgs&) { return legal_on_cache(); }
std::string legal_shapes(const AttentionPartialsArgs&) { return legal_on_cache(); }
std::string legal_shapes(const AttentionMergeArgs&) { return legal_head_dim(); }
std::string legal_shapes(const CompressedAttentionArgs&) { return legal_on_cache(); }

}  // namespace weft
