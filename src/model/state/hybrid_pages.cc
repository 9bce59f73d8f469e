// The KV pages of a HybridState: allocation, sharing, release and copies.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "model/state/hybrid_pools.h"

namespace weft::model {
namespace {

// Asks for huge pages of 2 MB, with which filling a new pool takes half the time. The call may fail without harm.
void advise_huge_pages([[maybe_unused]] const Block& block) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = 2 << 20;
  const auto data = reinterpret_cast<uintptr_t>(block.data());
  const uintptr_t begin = (data + kHuge - 1) / kHuge * kHuge, end = (data + block.bytes()) / kHuge * kHuge;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

PagePool::PagePool(const HybridPlan& plan, std::shared_ptr<BlockSource> source)
    : source_(std::move(source)), most_(plan.sequences * pages_of(plan.capacity)), blocks_(plan.layers.size()) {
  for (const LayerMemory& layer : plan.layers) {
    sizes_.push_back(page_pool_bytes(layer));
    offsets_.emplace_back();
    for (size_t j = 0; j < 4; ++j) {
      offsets_.back()[j] = page_bytes_;
      page_bytes_ += (sizes_.back()[j] + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
    }
  }
}

void PagePool::reserve(int64_t count) {
  const int64_t pages = fresh_ + std::max<int64_t>(0, count - static_cast<int64_t>(free_.size()));
  if (pages <= allocated_) return;
  // Grow by half, up to what the sequences can need. Snapshots may hold pages beyond that.
  int64_t grown = allocated_ + allocated_ / 2;
  if (pages <= most_) grown = source_->place == Place::host ? std::min(most_, grown) : most_;
  const int64_t wanted = std::max(pages, grown);
  owners_.reserve(static_cast<size_t>(wanted));  // so that take() and release() do not allocate
  free_.reserve(static_cast<size_t>(wanted));
  for (size_t i = 0; i < blocks_.size(); ++i)
    for (size_t j = 0; j < 4; ++j) {
      if (sizes_[i][j] == 0) continue;
      Block larger = source_->block(wanted * sizes_[i][j]);
      if (!source_->pretended && source_->place == Place::host) advise_huge_pages(larger);
      if (!source_->pretended && fresh_ > 0)
        copy_bytes(larger.data(), blocks_[i][j].data(), static_cast<size_t>(fresh_ * sizes_[i][j]));
      blocks_[i][j] = std::move(larger);
    }
  allocated_ = wanted;
}

int32_t PagePool::take() {
  int32_t page = 0;
  if (free_.empty()) {
    owners_.push_back(0);
    page = static_cast<int32_t>(fresh_++);
  } else {
    page = free_.back();
    free_.pop_back();
  }
  owners_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::release(int32_t page) {
  if (--owners_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

int64_t PagePool::bytes() const {
  int64_t bytes = 0;
  for (const auto& pools : blocks_)
    for (const Block& block : pools) bytes += static_cast<int64_t>(block.bytes());
  return bytes;
}

void PagePool::copy(int32_t to, int32_t from, const Stream* stream) {
  for (size_t i = 0; i < blocks_.size(); ++i)
    for (size_t j = 0; j < 4; ++j) copy_bytes(stream, pool_at(to, i, j), pool_at(from, i, j), static_cast<size_t>(sizes_[i][j]));
}

void PagePool::read(int32_t page, std::byte* to) const {
  for (size_t i = 0; i < blocks_.size(); ++i)
    for (size_t j = 0; j < 4; ++j) copy_bytes(to + offsets_[i][j], pool_at(page, i, j), static_cast<size_t>(sizes_[i][j]));
}

void PagePool::write(int32_t page, const std::byte* from) {
  for (size_t i = 0; i < blocks_.size(); ++i)
    for (size_t j = 0; j < 4; ++j) copy_bytes(pool_at(page, i, j), from + offsets_[i][j], static_cast<size_t>(sizes_[i][j]));
}

bool PagePool::equals(int32_t page, const std::byte* bytes, std::byte* spare) const {
  for (size_t i = 0; i < blocks_.size(); ++i)
    for (size_t j = 0; j < 4; ++j) {
      const auto size = static_cast<size_t>(sizes_[i][j]);
      if (size == 0) continue;
      const std::byte* own = pool_at(page, i, j);
      if (source_->place != Place::host) {
        copy_bytes(spare, own, size);
        own = spare;
      }
      if (std::memcmp(own, bytes + offsets_[i][j], size) != 0) return false;
    }
  return true;
}

NewPages::NewPages(PagePool& pool, int64_t count, int64_t released) : pool_(pool), count_(count) {
  list_.reserve(static_cast<size_t>(count));
  pool.reserve(std::max<int64_t>(0, count - released));
}

NewPages::~NewPages() {
  for (auto page = list_.rbegin(); page != list_.rend(); ++page) pool_.release(*page);
}

void NewPages::take() {
  for (int64_t i = 0; i < count_; ++i) list_.push_back(pool_.take());
}

KvCache page_cache(const AttentionMemory& memory, const std::array<std::byte*, 4>& pools, int64_t pages, Place place, int device) {
  const int64_t Hk = memory.kv_heads;
  const auto view = [&](std::byte* data, DType dtype, std::initializer_list<int64_t> sizes) {
    return dense(data, dtype, sizes, place, device);
  };
  const auto side_of = [&](const KvFormat& format, std::byte* codes, std::byte* gains) {
    KvSide side;
    side.format = format;
    if (memory.layout == KvLayout::tiles) {
      side.codes = view(codes, DType::u8, {pages, Hk, 1, tile_bytes(format)});
    } else if (format.passthrough) {
      side.codes = view(codes, *format.passthrough, {pages, Hk, kPageTokens, format.head_dim});
    } else {
      side.codes = view(codes, DType::u8, {pages, Hk, kPageTokens, code_bytes(format)});
      side.gains = view(gains, format.gain_dtype, {pages, Hk, kPageTokens, format.head_dim / format.gain_group});
    }
    return side;
  };
  KvCache cache;
  cache.k = side_of(memory.recipe.k, pools[0], pools[1]);
  cache.v = side_of(memory.recipe.v, pools[2], pools[3]);
  cache.layout = memory.layout;
  cache.tile_order = memory.tile_order;
  return cache;
}

}  // namespace weft::model
