// KvFormat, KvCache and the argument structs of the KV codec, member by member: see describe.h.
#pragma once

#include "core/describe.h"
#include "weft/kv_codec.h"

namespace weft {

template <>
struct EnumValues<KvLayout> {
  static constexpr auto kTable = enum_table<KvLayout>("WEFT_KV_LAYOUT_", {{KvLayout::rows, "rows"}, {KvLayout::tiles, "tiles"}});
};
template <>
struct EnumValues<TileOrder> {
  static constexpr auto kTable =
      enum_table<TileOrder>("WEFT_TILE_ORDER_", {{TileOrder::token_major, "token_major"}, {TileOrder::lanes, "lanes"}});
};
template <>
struct EnumValues<CacheKind> {
  static constexpr auto kTable =
      enum_table<CacheKind>("WEFT_CACHE_", {{CacheKind::linear, "linear"}, {CacheKind::ring, "ring"}, {CacheKind::paged, "paged"}});
};
template <>
struct EnumValues<KvDomain> {
  static constexpr auto kTable =
      enum_table<KvDomain>("WEFT_KV_DOMAIN_", {{KvDomain::original, "original"}, {KvDomain::rotated, "rotated"}});
};

// Which format of a recipe a C call means, where the C++ call has the format itself.
enum class RecipeSide { k, v };
template <>
struct EnumValues<RecipeSide> {
  static constexpr auto kTable = enum_table<RecipeSide>("WEFT_RECIPE_SIDE_", {{RecipeSide::k, "k"}, {RecipeSide::v, "v"}});
};

// validate(KvFormat) checks all of it. A format is no part of the C interface: C calls name a recipe instead.
template <DescribedAs<KvFormat> A, class V>
void describe(A& a, V&& v, Role dense_rotation, Role mean) {
  static_assert(kMaxHeadDim == 512, "the words below");
  v.scalar(WEFT_CPP_ONLY(id), {});
  v.scalar(WEFT_CPP_ONLY(head_dim), {.legal = "a multiple of 8 up to 512"});
  v.scalar(WEFT_CPP_ONLY(passthrough), {.legal = "f32, f16 or bf16"});
  v.scalar(WEFT_CPP_ONLY(bits), {.legal = "2 to 8"});
  v.scalar(WEFT_CPP_ONLY(rotation), {});
  v.scalar(WEFT_CPP_ONLY(rotation_group), {.legal = "2^k, 12 2^k, 20 2^k or 28 2^k, a divisor of head_dim"});
  v.scalar(WEFT_CPP_ONLY(signs), {});
  v.scalar(WEFT_CPP_ONLY(seed), {});
  v.tensor(WEFT_CPP_ONLY(dense_rotation),
           {.shape = shape<"D", "D">, .dtypes = kF32Type, .role = dense_rotation, .optional = true, .special = true});
  v.scalar(WEFT_CPP_ONLY(gain_group), {.legal = "a divisor of head_dim"});
  v.scalar(WEFT_CPP_ONLY(gain_rule), {});
  v.scalar(WEFT_CPP_ONLY(gain_dtype), {.legal = "f32, f16 or bf16"});
  v.scalar(WEFT_CPP_ONLY(gain_units), {});
  v.scalar(WEFT_CPP_ONLY(tiny_norm), {.legal = ">= 0"});
  v.scalar(WEFT_CPP_ONLY(packing), {});
  v.scalar(WEFT_CPP_ONLY(codebook), {.legal = "ascending"});
  v.scalar(WEFT_CPP_ONLY(grid_step), {.legal = "> 0"});
  v.tensor(WEFT_CPP_ONLY(mean), {.shape = shape<"Hk", "D">, .dtypes = kF32Type, .role = mean, .optional = true, .special = true});
}

// What an op does with a cache.
struct CacheUse {
  Role storage = Role::in;  // codes and gains
  Role lookup = Role::in;   // slots, page table, lengths, and what the formats point to
  bool lengths = false;     // lengths are required
};

template <DescribedAs<KvSide> A, class V>
void describe(A& a, V&& v, CacheUse use) {
  v.tensor(WEFT_MEMBER(codes), {.shape = shape<"blocks", "Hk", "capacity", "code_bytes">,
                                .dtypes = {DType::u8, DType::f32, DType::f16, DType::bf16},
                                .role = use.storage,
                                .other = shape<"blocks", "Hk", "capacity / 64", "tile_bytes">,
                                .special = true});
  v.tensor(WEFT_MEMBER(gains),
           {.shape = shape<"blocks", "Hk", "capacity", "D / gain_group">, .role = use.storage, .optional = true, .special = true});
  v.format(WEFT_CPP_ONLY(format), use.lookup, use.lookup);
}

// check_kv_storage() checks codes and gains, whose shapes follow from the formats.
template <DescribedAs<KvCache> A, class V>
void describe(A& a, V&& v, CacheUse use) {
  const bool paged = a.kind == CacheKind::paged;
  v.recipe(InC{WEFT_IN_C(recipe)}, &a.k.format, &a.v.format);
  v.group(WEFT_MEMBER(k), use);
  v.group(WEFT_MEMBER(v), use);
  v.scalar(WEFT_MEMBER(layout), {});
  v.scalar(WEFT_MEMBER(tile_order), {});
  v.scalar(WEFT_MEMBER(kind), {});
  v.scalar(WEFT_MEMBER(pinned), {.legal = "0 to below the capacity in a ring, else 0"});
  v.tensor(WEFT_MEMBER(slots), {.shape = shape<"N">, .dtypes = kI32Type, .role = use.lookup, .optional = true});
  v.tensor(WEFT_MEMBER(page_table), {.shape = shape<"N", "pages">, .dtypes = kI32Type, .role = use.lookup, .optional = !paged});
  v.tensor(WEFT_MEMBER(lengths), {.shape = shape<"N">, .dtypes = kI32Type, .role = use.lookup, .optional = !use.lengths});
}

template <DescribedAs<KvRotateArgs> A, class V>
void describe(A& a, V&& v) {
  v.recipe(InC{WEFT_IN_C(recipe)}, InC{WEFT_IN_C(side)}, &a.format);
  v.tensor(WEFT_MEMBER(x), {.shape = shape<"T", "H", "D">});
  v.tensor(WEFT_MEMBER(y), {.shape = shape<"T", "H", "D">, .role = Role::out, .may_be = {&a.x}});
  v.format(WEFT_CPP_ONLY(format), Role::in, Role::unused);
  v.scalar(WEFT_MEMBER(inverse), {});
}

template <DescribedAs<KvEncodeArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(positions), {.shape = shape<"T">, .dtypes = kI32Type});
  v.group(WEFT_MEMBER(sequences));
  v.group(WEFT_MEMBER(cache), CacheUse{.storage = Role::out});
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "Dk">, .optional = true});
  v.tensor(WEFT_MEMBER(v), {.shape = shape<"T", "Hk", "Dv">, .optional = true});
}

template <DescribedAs<KvDecodeArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(positions), {.shape = shape<"T">, .dtypes = kI32Type});
  v.group(WEFT_MEMBER(sequences));
  v.group(WEFT_MEMBER(cache), CacheUse{});
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "Dk">, .role = Role::out, .optional = true});
  v.tensor(WEFT_MEMBER(v), {.shape = shape<"T", "Hk", "Dv">, .role = Role::out, .optional = true});
  v.scalar(WEFT_MEMBER(domain), {});
}

template <DescribedAs<KvRepackArgs> A, class V>
void describe(A& a, V&& v) {
  v.group(WEFT_MEMBER(from), CacheUse{.lookup = Role::unused});
  v.group(WEFT_MEMBER(to), CacheUse{.storage = Role::out, .lookup = Role::unused});
}

}  // namespace weft
