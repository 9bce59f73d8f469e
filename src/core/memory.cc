// Memory and OwnedKvCache: what callers may allocate with the library's help.
#include "weft/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common/lanes_tile.h"
#include "core/backend.h"
#include "core/check.h"
#include "core/kv_cache_check.h"

namespace weft {
namespace {

constexpr const char* kOp = "kv_cache";
constexpr int64_t kMaxBytes = int64_t{1} << 46;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Puts buffers one behind the other, each aligned to kScratchAlignment.
class Layout {
 public:
  // The offset of a buffer of `rows` rows.
  int64_t add(int64_t rows, int64_t row_bytes) {
    const int64_t offset = bytes_;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(rows, row_bytes, &bytes) || bytes > kMaxBytes) bytes = kMaxBytes;
    bytes_ = std::min(kMaxBytes, bytes_ + round_up(bytes, kScratchAlignment));
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Offsets of the tensors of one side.
struct SideOffsets {
  int64_t codes = 0, gains = 0;
};

SideOffsets place_side(Layout& layout, const KvFormat& format, KvLayout kind, int64_t rows) {
  SideOffsets at;
  if (kind == KvLayout::tiles) {
    at.codes = layout.add(rows / kTileTokens, tile_bytes(format));
  } else {
    at.codes = layout.add(rows, code_bytes(format));
    at.gains = layout.add(rows, gain_bytes(format));
  }
  return at;
}

KvSide make_side(const KvFormat& format, KvLayout layout, const KvCacheSize& size, std::byte* codes, std::byte* gains, Place place,
                 int device) {
  const int64_t B = size.blocks, H = size.kv_heads, n = size.capacity;
  KvSide side;
  side.format = format;
  if (layout == KvLayout::tiles) {
    side.codes = dense(codes, DType::u8, {B, H, n / kTileTokens, tile_bytes(format)}, place, device);
  } else if (format.passthrough) {
    side.codes = dense(codes, *format.passthrough, {B, H, n, format.head_dim}, place, device);
  } else {
    side.codes = dense(codes, DType::u8, {B, H, n, code_bytes(format)}, place, device);
    side.gains = dense(gains, format.gain_dtype, {B, H, n, format.head_dim / format.gain_group}, place, device);
  }
  return side;
}

void check_size(Check& check, const KvRecipe& recipe, const KvCacheSize& size) {
  check.also(validate_format(recipe.k, kOp, Path("recipe").in("k")));
  check.also(validate_format(recipe.v, kOp, Path("recipe").in("v")));
  const Path at = "size";
  check.between(at.in("kv_heads"), size.kv_heads, 1, kMaxTokens).between(at.in("capacity"), size.capacity, 1, kMaxTokens - 63);
  check.between(at.in("blocks"), size.blocks, 1, kMaxTokens).known(at.in("kind"), size.kind, CacheKind::paged);
}

}  // namespace

std::shared_ptr<void> allocate_host(size_t bytes) {
  const size_t whole = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  if (whole < bytes) throw std::bad_alloc();
  void* data = std::aligned_alloc(kScratchAlignment, whole);
  if (!data) throw std::bad_alloc();
  std::memset(data, 0, whole);
  return {data, std::free};
}

Memory::Memory(Allocate allocate) : allocate_(std::move(allocate)) {}

Scratch Memory::at_least(size_t bytes) {
  if (bytes > bytes_) {
    data_.reset();
    bytes_ = 0;
    data_ = allocate_(bytes);
    bytes_ = bytes;
  }
  return {data_.get(), bytes_};
}

KvArrangement fastest_arrangement(const KvRecipe& recipe, Backend) {
  if (lanes_fit(recipe.k) && lanes_fit(recipe.v)) return {KvLayout::tiles, TileOrder::lanes};
  return {};
}

OwnedKvCache::OwnedKvCache(const Stream& stream, const KvRecipe& recipe, const KvCacheSize& size, const Allocate& allocate) {
  Check check(kOp);
  check.also(check_stream(stream, kOp));
  check_size(check, recipe, size);
  const Place place = place_of(stream.backend);
  check.require(place == Place::host || allocate, "allocate", "is absent, wanted a function that allocates memory of the device");
  if (!check.ok()) throw Error(std::move(check).status());

  const auto [layout, tile_order] = fastest_arrangement(recipe, stream.backend);
  const bool tiles = layout == KvLayout::tiles, paged = size.kind == CacheKind::paged;
  KvCacheSize whole = size;
  whole.capacity = round_up(size.capacity, tiles ? kTileTokens : paged ? 16 : 1);
  int64_t rows = 0;
  if (__builtin_mul_overflow(whole.blocks * whole.kv_heads, whole.capacity, &rows)) rows = kMaxBytes;
  Layout memory;
  const SideOffsets k = place_side(memory, recipe.k, layout, rows), v = place_side(memory, recipe.v, layout, rows);
  bytes_ = static_cast<size_t>(memory.bytes());
  const bool counts = place == Place::host && !paged;
  const int64_t lengths = memory.add(counts ? whole.blocks : 0, sizeof(int32_t));
  check.require(memory.bytes() < kMaxBytes, "size", "takes more than 2^46 bytes");
  if (!check.ok()) throw Error(std::move(check).status());

  data_ = allocate ? allocate(static_cast<size_t>(memory.bytes())) : allocate_host(static_cast<size_t>(memory.bytes()));
  if (!data_ && memory.bytes() > 0) throw Error(fail(Code::invalid_argument, kOp, "allocate", "returned null"));
  auto* base = static_cast<std::byte*>(data_.get());
  view_.k = make_side(recipe.k, layout, whole, base + k.codes, base + k.gains, place, stream.device);
  view_.v = make_side(recipe.v, layout, whole, base + v.codes, base + v.gains, place, stream.device);
  view_.layout = layout;
  view_.tile_order = tile_order;
  view_.kind = size.kind;
  view_.pinned = size.pinned;
  if (counts) {
    lengths_ = {reinterpret_cast<int32_t*>(base + lengths), static_cast<size_t>(whole.blocks)};
    std::fill(lengths_.begin(), lengths_.end(), 0);  // the caller's allocate need not
    view_.lengths = dense(lengths_.data(), DType::i32, {whole.blocks});
  }
  check_kv_storage(check, kOp, view_, "size");  // checks pinned, and all other members again
  if (!check.ok()) throw Error(std::move(check).status());
}

}  // namespace weft
