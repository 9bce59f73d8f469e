// Rules of a KvCache that the codec and attention share: see kv_cache_check.h.
#include "core/kv_cache_check.h"

#include "common/lanes_tile.h"
#include "core/limits.h"

namespace weft {
namespace {

constexpr int64_t kPageMultiple = 16;

// The shapes of one side. The letters of K and V differ, because the numbers do.
struct SideShapes {
  Letter D, code_bytes, tile_bytes, gain_count;
  const Shape *codes, *tiles, *passthrough, *gains, *mean;
};
constexpr SideShapes kShapesK{"Dk",
                              "code bytes of K",
                              "tile bytes of K",
                              "Dk / gain_group",
                              shape<"blocks", "Hk", "capacity", "code bytes of K">,
                              shape<"blocks", "Hk", "tiles", "tile bytes of K">,
                              shape<"blocks", "Hk", "capacity", "Dk">,
                              shape<"blocks", "Hk", "capacity", "Dk / gain_group">,
                              shape<"Hk", "Dk">};
constexpr SideShapes kShapesV{"Dv",
                              "code bytes of V",
                              "tile bytes of V",
                              "Dv / gain_group",
                              shape<"blocks", "Hk", "capacity", "code bytes of V">,
                              shape<"blocks", "Hk", "tiles", "tile bytes of V">,
                              shape<"blocks", "Hk", "capacity", "Dv">,
                              shape<"blocks", "Hk", "capacity", "Dv / gain_group">,
                              shape<"Hk", "Dv">};

void check_side(Check& check, const char* op, const KvCache& cache, const KvSide& side, const Path& at, const SideShapes& shapes) {
  if (!check.ok()) return;
  const KvFormat& format = side.format;
  check.also(validate_format(format, op, at.in("format")));
  if (!check.ok()) return;
  check.bind(shapes.D, format.head_dim);
  const bool coded = !format.passthrough;
  if (cache.layout == KvLayout::tiles) {
    if (cache.tile_order == TileOrder::lanes)
      check.require(lanes_fit(format), at.in("format"), [&] {
        return "has head_dim " + std::to_string(format.head_dim) + " and " +
               (format.packing == Packing::byte ? "a byte per code" : "dense codes") +
               ", wanted a multiple of 32 and dense codes for tiles in lanes order";
      });
    check.bind(shapes.tile_bytes, tile_bytes(format));
    check.tensor(at.in("codes"), side.codes, {.shape = shapes.tiles, .dtypes = {DType::u8}});
    if (!check.ok()) return;
    bool aligned = reinterpret_cast<uintptr_t>(side.codes.data) % kTileAlignment == 0;
    for (int i = 0; i < 3; ++i) aligned &= side.codes.size(i) <= 1 || side.codes.stride(i) % kTileAlignment == 0;
    check.require(aligned, at.in("codes"),
                  [&] { return "has tiles that are not aligned to " + std::to_string(kTileAlignment) + " bytes"; });
  } else if (coded) {
    check.bind(shapes.code_bytes, code_bytes(format));
    check.tensor(at.in("codes"), side.codes, {.shape = shapes.codes, .dtypes = {DType::u8}});
  } else {
    check.tensor(at.in("codes"), side.codes, {.shape = shapes.passthrough, .dtypes = {*format.passthrough}});
  }
  if (coded && cache.layout == KvLayout::rows) {
    check.bind(shapes.gain_count, format.head_dim / format.gain_group);
    check.tensor(at.in("gains"), side.gains, {.shape = shapes.gains, .dtypes = {format.gain_dtype}});
  } else {
    check.require(!side.gains.present(), at.in("gains"),
                  coded ? "is given, but tiles hold their own gains" : "is given, but a passthrough side has none");
  }
  if (coded) check.tensor(at.in("format").in("mean"), format.mean, {.shape = shapes.mean, .dtypes = kF32Type, .optional = true});
}

}  // namespace

void check_kv_storage(Check& check, const char* op, const KvCache& cache, const Path& at) {
  check.known(at.in("layout"), cache.layout, KvLayout::tiles).known(at.in("tile_order"), cache.tile_order, TileOrder::lanes);
  check.known(at.in("kind"), cache.kind, CacheKind::paged);
  check_side(check, op, cache, cache.k, at.in("k"), kShapesK);
  check_side(check, op, cache, cache.v, at.in("v"), kShapesV);
  if (!check.ok()) return;
  const int64_t size = cache.k.codes.size(2), unit = cache.layout == KvLayout::tiles ? kTileTokens : 1;
  check.require(size <= kMaxTokens / unit, at.in("k").in("codes"),
                [&] { return "is " + shape_text(cache.k.codes) + ", wanted a capacity below 2^31 tokens"; });
  if (!check.ok()) return;
  const int64_t capacity = cache.capacity();
  if (cache.kind == CacheKind::paged)
    check.require(capacity % kPageMultiple == 0, at.in("k").in("codes"), [&] {
      return "has pages of " + std::to_string(capacity) + " tokens, wanted a multiple of " + std::to_string(kPageMultiple);
    });
  const bool ring = cache.kind == CacheKind::ring;
  check.require(cache.pinned == 0 || (ring && cache.pinned > 0 && cache.pinned < capacity), at.in("pinned"), [&] {
    return "is " + std::to_string(cache.pinned) + ", wanted " +
           (ring ? "0 to below the capacity " + std::to_string(capacity) : std::string("0, since the cache is not a ring"));
  });
}

void check_kv_lookup(Check& check, const KvCache& cache) {
  if (cache.kind == CacheKind::paged) {
    check.require(!cache.slots.present(), "cache.slots", "is given, but a paged cache finds its rows by page_table");
    check.require(check.dim("pages") <= kMaxTokens, "cache.page_table",
                  [&] { return "is " + shape_text(cache.page_table) + ", wanted less than 2^31 pages"; });
  } else {
    check.require(!cache.page_table.present(), "cache.page_table", "is given, but the cache is not paged");
  }
}

}  // namespace weft
