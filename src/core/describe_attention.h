// The argument structs of attention, member by member: see describe.h.
#pragma once

#include "core/describe_kv.h"
#include "weft/compressed_attention.h"

namespace weft {

template <>
struct EnumValues<PartialLayout> {
  static constexpr auto kTable = enum_table<PartialLayout>(
      "WEFT_PARTIAL_LAYOUT_", {{PartialLayout::blocks, "blocks"}, {PartialLayout::interleaved, "interleaved"}});
};
template <>
struct EnumValues<Precision> {
  static constexpr auto kTable =
      enum_table<Precision>("WEFT_PRECISION_", {{Precision::exact_scores, "exact_scores"}, {Precision::fast, "fast"}});
};

// How attention reads a cache.
inline constexpr CacheUse kReadWithLengths{.lengths = true};

template <DescribedAs<AttentionMask> A, class V>
void describe(A& a, V&& v) {
  v.scalar(WEFT_NEGATED(causal), {});
  v.scalar(WEFT_OPTION(window), {.legal = ">= 1", .fallback = "no limit", .at_least = 1});
  v.scalar(WEFT_OPTION(softcap), {.legal = "> 0", .fallback = "none", .above = 0});
}

class Check;
// The Hq heads of `queries` share the KV heads of the cache.
void check_kv_heads(Check& check, const char* queries);
// Only the tensors of the chosen layout may be there: others would be silently ignored.
void check_partial_layout(Check& check, const AttentionPartials& partials);

template <DescribedAs<AttentionQueries> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(q), {.shape = shape<"T", "Hq", "Dk">});
  v.rule([](auto& check) { check_kv_heads(check, "queries.q"); });
  v.group(WEFT_MEMBER(sequences));
  v.tensor(WEFT_MEMBER(positions), {.shape = shape<"T">, .dtypes = kI32Type, .optional = true});
  v.scalar(WEFT_OPTION(scale), {.fallback = "Dk^-1/2"});
  v.scalar(WEFT_MEMBER(domain), {});
}

template <DescribedAs<AttentionPartials> A, class V>
void describe(A& a, V&& v, Role role) {
  const bool blocks = a.layout == PartialLayout::blocks;
  v.scalar(WEFT_MEMBER(layout), {});
  v.scalar(WEFT_MEMBER(count), {.legal = ">= 1", .required = true, .at_least = 1});
  v.rule([&](auto& check) { check_partial_layout(check, a); });
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hq", "B", "Dv">, .dtypes = kF32Type, .role = role, .optional = !blocks});
  v.tensor(WEFT_MEMBER(m), {.shape = shape<"T", "Hq", "B">, .dtypes = kF32Type, .role = role, .optional = !blocks});
  v.tensor(WEFT_MEMBER(l), {.shape = shape<"T", "Hq", "B">, .dtypes = kF32Type, .role = role, .optional = !blocks});
  v.tensor(WEFT_MEMBER(buffer), {.shape = shape<"T Hq B (Dv + 2)">, .dtypes = kF32Type, .role = role, .optional = blocks});
}

template <DescribedAs<AttentionScoresArgs> A, class V>
void describe(A& a, V&& v) {
  v.group(WEFT_MEMBER(queries));
  v.group(WEFT_MEMBER(cache), kReadWithLengths);
  v.group(WEFT_MEMBER(mask));
  v.tensor(WEFT_MEMBER(scores), {.shape = shape<"T", "Hq", "context">, .role = Role::out});
}

template <DescribedAs<AttentionValuesArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(weights), {.shape = shape<"T", "Hq", "context">});
  v.rule([](auto& check) { check_kv_heads(check, "weights"); });
  v.group(WEFT_MEMBER(sequences));
  v.group(WEFT_MEMBER(cache), kReadWithLengths);
  v.scalar(WEFT_OPTION(threshold), {.fallback = "every token counts"});
  v.scalar(WEFT_MEMBER(domain), {});
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hq", "Dv">, .role = Role::out});
}

template <DescribedAs<AttentionPartialsArgs> A, class V>
void describe(A& a, V&& v) {
  v.group(WEFT_MEMBER(queries));
  v.group(WEFT_MEMBER(cache), kReadWithLengths);
  v.group(WEFT_MEMBER(mask));
  v.scalar(WEFT_MEMBER(block_tokens), {.legal = ">= 1", .required = true, .at_least = 1});
  v.group(WEFT_MEMBER(partials), Role::out);
}

template <DescribedAs<AttentionMergeArgs> A, class V>
void describe(A& a, V&& v) {
  v.recipe(InC{WEFT_IN_C(recipe)}, nullptr, &a.v_format);
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hq", "Dv">, .role = Role::out});
  v.tensor(WEFT_MEMBER(lse), {.shape = shape<"T", "Hq">, .dtypes = kF32Type, .role = Role::out, .optional = true});
  v.tensor(WEFT_MEMBER(sinks), {.shape = shape<"Hq">, .dtypes = kF32Type, .optional = true});
  v.scalar(WEFT_MEMBER(kv_heads), {.legal = "a divisor of Hq", .required = true});
  v.rule([&](auto& check) { check.head_count("o", check.dim("Hq")).divisor("kv_heads", a.kv_heads, "Hq", check.dim("Hq")); });
  v.scalar(WEFT_MEMBER(domain), {});
  v.group(WEFT_MEMBER(partials), Role::in);
  v.format(WEFT_CPP_ONLY(v_format), Role::in, Role::in);
}

template <DescribedAs<CompressedAttentionArgs> A, class V>
void describe(A& a, V&& v) {
  v.group(WEFT_MEMBER(queries));
  v.group(WEFT_MEMBER(cache), kReadWithLengths);
  v.group(WEFT_MEMBER(mask));
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hq", "Dv">, .role = Role::out});
  v.tensor(WEFT_MEMBER(lse), {.shape = shape<"T", "Hq">, .dtypes = kF32Type, .role = Role::out, .optional = true});
  v.tensor(WEFT_MEMBER(sinks), {.shape = shape<"Hq">, .dtypes = kF32Type, .optional = true});
  v.scalar(WEFT_MEMBER(precision), {});
  v.scalar(WEFT_MEMBER(schedule), {});
}

}  // namespace weft
