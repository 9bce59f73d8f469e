/// Memory and OwnedKvCache: aligned memory for callers that have no allocator of their own. Ops never allocate memory themselves.
/// @file
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "weft/device.h"
#include "weft/kv_codec.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// Allocates `bytes` bytes, aligned to kScratchAlignment, and returns their owner. Throws where there is no memory. For a CUDA device:
///
///     [](size_t bytes) {
///       void* data = nullptr;
///       if (cudaMalloc(&data, bytes) != cudaSuccess) throw std::bad_alloc();
///       return std::shared_ptr<void>(data, cudaFree);
///     }
using Allocate = std::function<std::shared_ptr<void>(size_t bytes)>;

/// The default Allocate: memory of the process, filled with zeros.
std::shared_ptr<void> allocate_host(size_t bytes);

/// A buffer that grows: scratch for all calls of one stream. Calls that run at the same time need a Memory each.
///
///     weft::Memory memory;
///     gated_delta_rule_decode(stream, args, memory.at_least(scratch_bytes(stream, args)));
class Memory {
 public:
  /// Holds nothing yet. `allocate` must give memory of the device that computes; the default is for the reference and cpu backends.
  explicit Memory(Allocate allocate = allocate_host);
  Memory(Memory&& other) = default;             ///< `other` may afterwards only be assigned to or destroyed
  Memory& operator=(Memory&& other) = default;  ///< `other` may afterwards only be assigned to or destroyed

  /// At least `bytes` bytes. A larger buffer replaces the old one, whose contents are lost. On cuda the old buffer is released at
  /// once, so kernels that use it must have finished: ask for the largest size first.
  Scratch at_least(size_t bytes);
  /// The bytes that it holds.
  size_t bytes() const { return bytes_; }

 private:
  Allocate allocate_;
  std::shared_ptr<void> data_;
  size_t bytes_ = 0;
};

/// How the rows of a cache lie.
struct KvArrangement {
  KvLayout layout = KvLayout::rows;               ///< rows or tiles
  TileOrder tile_order = TileOrder::token_major;  ///< of tiles
};

/// The arrangement that a backend reads fastest: tiles in lanes order where both formats allow it, else rows. It is the same for all
/// backends today.
KvArrangement fastest_arrangement(const KvRecipe& recipe, Backend backend);

/// The size of a cache.
struct KvCacheSize {
  int64_t kv_heads = 0;                ///< Hk
  int64_t capacity = 0;                ///< tokens of a block. Rounded up to a multiple of 64 in tiles, of 16 in pages of rows
  int64_t blocks = 1;                  ///< linear, ring: sequences; paged: pages
  CacheKind kind = CacheKind::linear;  ///< which row holds a position
  int64_t pinned = 0;                  ///< ring only: this many first tokens are never overwritten
};

/// A cache with its memory, in the arrangement that the backend of a stream reads fastest. Moving it keeps its addresses.
///
///     weft::OwnedKvCache cache(stream, weft::kv_recipe("4v4", 128, 128), {.kv_heads = 8, .capacity = 4096});
///     encode.cache = cache.view();
class OwnedKvCache {
 public:
  /// Throws Error (op "kv_cache") where a size or format is illegal, or where the backend computes on a device and `allocate` is
  /// absent.
  OwnedKvCache(const Stream& stream, const KvRecipe& recipe, const KvCacheSize& size, const Allocate& allocate = {});
  OwnedKvCache(OwnedKvCache&& other) = default;             ///< `other` may afterwards only be assigned to or destroyed
  OwnedKvCache& operator=(OwnedKvCache&& other) = default;  ///< `other` may afterwards only be assigned to or destroyed

  /// What ops take. Its page_table is the caller's to set. Its lengths are set where lengths() has them.
  const KvCache& view() const { return view_; }
  /// linear and ring caches in host memory: the tokens of each sequence, 0 at first, which the caller updates. Otherwise empty.
  std::span<int32_t> lengths() { return lengths_; }
  /// The bytes of both sides.
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> data_;
  std::span<int32_t> lengths_;
  size_t bytes_ = 0;
  KvCache view_;
};

}  // namespace weft
#pragma GCC visibility pop
