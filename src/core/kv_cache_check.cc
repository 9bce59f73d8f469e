// Rules of a KvCache that the codec and attention share: see kv_cache_check.h.
#include "core/kv_cache_check.h"

#include "common/lanes_tile.h"
#include "core/limits.h"

namespace weft {
namespace {

constexpr int64_t kPageMultiple = 16;

// Letters of one side; static, since Check keeps views of them.
struct SideLetters {
  const char *D, *code_bytes, *tile_bytes, *gains;
};
constexpr SideLetters kLettersK{"Dk", "code bytes of K", "tile bytes of K", "Dk / gain_group"};
constexpr SideLetters kLettersV{"Dv", "code bytes of V", "tile bytes of V", "Dv / gain_group"};

void check_side(Check& check, const char* op, const KvCache& cache, const KvSide& side, const KvSideNames& names,
                const SideLetters& letters) {
  if (!check.ok()) return;
  const KvFormat& format = side.format;
  check.also(validate(format, op, names.format));
  if (!check.ok()) return;
  check.bind(letters.D, format.head_dim);
  const bool coded = !format.passthrough;
  if (cache.layout == KvLayout::tiles) {
    if (cache.tile_order == TileOrder::lanes)
      check.require(lanes_fit(format), names.format, [&] {
        return "has head_dim " + std::to_string(format.head_dim) + " and " +
               (format.packing == Packing::byte ? "a byte per code" : "dense codes") +
               ", wanted a multiple of 32 and dense codes for tiles in lanes order";
      });
    check.bind(letters.tile_bytes, tile_bytes(format));
    check.tensor(names.codes, side.codes, {"blocks", "Hk", "tiles", letters.tile_bytes}, {DType::u8});
    if (!check.ok()) return;
    bool aligned = reinterpret_cast<uintptr_t>(side.codes.data) % kTileAlignment == 0;
    for (int i = 0; i < 3; ++i) aligned &= side.codes.size(i) <= 1 || side.codes.stride(i) % kTileAlignment == 0;
    check.require(aligned, names.codes,
                  [&] { return "has tiles that are not aligned to " + std::to_string(kTileAlignment) + " bytes"; });
  } else if (coded) {
    check.bind(letters.code_bytes, code_bytes(format));
    check.tensor(names.codes, side.codes, {"blocks", "Hk", "capacity", letters.code_bytes}, {DType::u8});
  } else {
    check.tensor(names.codes, side.codes, {"blocks", "Hk", "capacity", letters.D}, {*format.passthrough});
  }
  if (coded && cache.layout == KvLayout::rows) {
    check.bind(letters.gains, format.head_dim / format.gain_group);
    check.tensor(names.gains, side.gains, {"blocks", "Hk", "capacity", letters.gains}, {format.gain_dtype});
  } else {
    check.require(!side.gains.present(), names.gains,
                  coded ? "is given, but tiles hold their own gains" : "is given, but a passthrough side has none");
  }
  if (coded) check.optional_tensor(names.mean, format.mean, {"Hk", letters.D}, {DType::f32});
}

}  // namespace

void check_kv_storage(Check& check, const char* op, const KvCache& cache, const KvCacheNames& names) {
  check.known(names.layout, cache.layout, KvLayout::tiles).known(names.tile_order, cache.tile_order, TileOrder::lanes);
  check.known(names.kind, cache.kind, CacheKind::paged);
  check_side(check, op, cache, cache.k, names.k, kLettersK);
  check_side(check, op, cache, cache.v, names.v, kLettersV);
  if (!check.ok()) return;
  const int64_t size = cache.k.codes.size(2), unit = cache.layout == KvLayout::tiles ? kTileTokens : 1;
  check.require(size <= kMaxTokens / unit, names.k.codes,
                [&] { return "is " + shape_text(cache.k.codes) + ", wanted a capacity below 2^31 tokens"; });
  if (!check.ok()) return;
  const int64_t capacity = cache.capacity();
  if (cache.kind == CacheKind::paged)
    check.require(capacity % kPageMultiple == 0, names.k.codes, [&] {
      return "has pages of " + std::to_string(capacity) + " tokens, wanted a multiple of " + std::to_string(kPageMultiple);
    });
  const bool ring = cache.kind == CacheKind::ring;
  check.require(cache.pinned == 0 || (ring && cache.pinned > 0 && cache.pinned < capacity), names.pinned, [&] {
    return "is " + std::to_string(cache.pinned) + ", wanted " +
           (ring ? "0 to below the capacity " + std::to_string(capacity) : std::string("0, since the cache is not a ring"));
  });
}

void check_kv_sequences(Check& check, const KvCache& cache, Lengths lengths) {
  if (cache.kind == CacheKind::paged) {
    check.require(!cache.slots.present(), "cache.slots", "is given, but a paged cache finds its rows by page_table");
    check.tensor("cache.page_table", cache.page_table, {"N", "pages"}, {DType::i32});
    check.require(check.dim("pages") <= kMaxTokens, "cache.page_table",
                  [&] { return "is " + shape_text(cache.page_table) + ", wanted less than 2^31 pages"; });
  } else {
    check.require(!cache.page_table.present(), "cache.page_table", "is given, but the cache is not paged");
    check.optional_tensor("cache.slots", cache.slots, {"N"}, {DType::i32});
  }
  if (lengths == Lengths::wanted)
    check.tensor("cache.lengths", cache.lengths, {"N"}, {DType::i32});
  else
    check.optional_tensor("cache.lengths", cache.lengths, {"N"}, {DType::i32});
}

}  // namespace weft
