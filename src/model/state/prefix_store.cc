// The store of checkpoints: see weft/prefix_store.h.
#include "weft/prefix_store.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/check.h"
#include "files/checksum.h"
#include "model/access.h"
#include "model/state/hybrid_pools.h"
#include "model/state/state_header.h"
#include "model/state/state_storage.h"

namespace weft {

using namespace model;

namespace {

[[noreturn]] void refuse(const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, "prefix_store", argument, what));
}

// 64 tokens (or the last ones of a checkpoint) and their page in all layers. Never changed once it is shared.
struct Page {
  std::vector<int32_t> tokens;
  Block bytes;
  int64_t holders = 0;  // checkpoints in the index that have it; under the lock of the index
  int64_t size() const { return static_cast<int64_t>(bytes.bytes() + tokens.size() * 4 + sizeof(Page)); }
};

struct Checkpoint {
  int64_t tokens = 0;
  uint64_t hash = 0;  // of the tokens
  std::vector<std::shared_ptr<Page>> pages;
  Block recurrent, history;
  // Of its own, without pages.
  int64_t size() const {
    return static_cast<int64_t>(recurrent.bytes() + history.bytes() + pages.size() * sizeof(pages[0]) + sizeof(Checkpoint));
  }
  bool begins(std::span<const int32_t> wanted) const {
    size_t at = 0;
    for (const auto& page : pages) {
      if (!std::equal(page->tokens.begin(), page->tokens.end(), wanted.begin() + static_cast<int64_t>(at))) return false;
      at += page->tokens.size();
    }
    return true;
  }
};

std::string name_of(const std::string& model) { return model.empty() ? "no model in particular" : "model " + model; }

// What makes the bytes of a page and of recurrent states mean the same: layers, formats and layouts.
uint64_t signature(const HybridPlan& plan) {
  files::Checksum sum;
  for (const LayerMemory& layer : plan.layers) {
    const LayerHeader header = layer_header(layer);
    const std::string text = layer_text(header);
    sum.add(text.data(), text.size());
    sum.add(&header.k.format, sizeof header.k.format);
    sum.add(&header.v.format, sizeof header.v.format);
    if (const auto* memory = std::get_if<AttentionMemory>(&layer)) {
      const int32_t layout[2] = {static_cast<int32_t>(memory->layout), static_cast<int32_t>(memory->tile_order)};
      sum.add(layout, sizeof layout);
    }
  }
  return sum.value();
}

// Calls f(rows, K) for every delta layer.
template <class F>
void each_state(const HybridPlan& plan, F&& f) {
  for (const LayerMemory& layer : plan.layers)
    if (const auto* memory = std::get_if<DeltaMemory>(&layer)) f(memory->value_heads * memory->value_dim, memory->key_dim);
}

}  // namespace

struct PrefixStore::Index {
  using Order = std::list<std::shared_ptr<Checkpoint>>;  // most recently used first

  PrefixStoreOptions options;
  mutable std::mutex mutex;
  uint64_t signature = 0;  // of the states inserted; 0: none yet
  std::string model;       // whose they are; empty: nobody said
  Order order;
  std::unordered_map<uint64_t, Order::iterator> by_hash;
  std::map<int64_t, int64_t> lengths;  // tokens of a checkpoint, and how many have so many
  PrefixStoreStats stats;
  double drift_squares = 0;

  // Is the memory of `plan`, whose signature is `own`, what the store is filled with? Under the lock.
  void check(const HybridPlan& plan, uint64_t own) const {
    if (signature == 0) return;
    if (plan.model != model)
      refuse("state", "is of " + name_of(plan.model) + ", the store is filled with those of " + name_of(model));
    if (signature != own) refuse("state", "has other layers, formats or layouts than those that filled the store");
  }

  // The longest checkpoint that `tokens` begins with, of at most `most` tokens; it becomes the most recently used. Under the lock.
  std::shared_ptr<Checkpoint> find(std::span<const int32_t> tokens, int64_t most) {
    std::shared_ptr<Checkpoint> best;
    files::Checksum sum;
    int64_t hashed = 0;
    for (const auto& [length, count] : lengths) {
      if (length > std::min(most, static_cast<int64_t>(tokens.size()))) break;
      sum.add(tokens.data() + hashed, static_cast<size_t>(length - hashed) * 4);
      hashed = length;
      const auto found = by_hash.find(sum.value());
      if (found == by_hash.end()) continue;
      const auto& checkpoint = *found->second;
      if (checkpoint->tokens == length && checkpoint->begins(tokens)) best = checkpoint;
    }
    if (best) {
      const auto place = by_hash.find(best->hash)->second;
      order.splice(order.begin(), order, place);
    }
    return best;
  }

  void drop(Order::iterator place) {
    const Checkpoint& checkpoint = **place;
    stats.bytes -= checkpoint.size();
    for (const auto& page : checkpoint.pages)
      if (--page->holders == 0) stats.bytes -= page->size();
    if (--lengths[checkpoint.tokens] == 0) lengths.erase(checkpoint.tokens);
    by_hash.erase(checkpoint.hash);
    order.erase(place);
    --stats.checkpoints;
  }

  // What holding a checkpoint would add.
  static int64_t cost(const Checkpoint& checkpoint) {
    int64_t bytes = checkpoint.size();
    for (const auto& page : checkpoint.pages)
      if (page->holders == 0) bytes += page->size();
    return bytes;
  }
};

PrefixStore::PrefixStore(const PrefixStoreOptions& options) : index_(std::make_unique<Index>()) {
  if (options.bytes < 0) refuse("bytes", "is " + std::to_string(options.bytes) + ", wanted at least 0");
  if (options.every < 0 || options.every % kPageTokens != 0)
    refuse("every", "is " + std::to_string(options.every) + ", wanted a multiple of " + std::to_string(kPageTokens));
  if (static_cast<int>(options.recurrent) < 0 || options.recurrent > StateStorage::int8)
    refuse("recurrent", "is " + std::to_string(static_cast<int>(options.recurrent)) + ", wanted f32, f16, bf16 or int8");
  index_->options = options;
}
PrefixStore::~PrefixStore() = default;

const PrefixStoreOptions& PrefixStore::options() const { return index_->options; }

PrefixStoreStats PrefixStore::stats() const {
  const std::lock_guard lock(index_->mutex);
  PrefixStoreStats stats = index_->stats;
  if (stats.inserted > 0) stats.drift = std::sqrt(index_->drift_squares / static_cast<double>(stats.inserted));
  return stats;
}

int64_t PrefixStore::restore(HybridState& state, int64_t sequence, std::span<const int32_t> tokens, int64_t most) {
  HybridState::Pools& p = model::pools_of(state);
  HybridState::Pools::Sequence& to = p.at(sequence);
  const uint64_t wanted = signature(p.plan);
  std::shared_ptr<Checkpoint> found;
  {
    const std::lock_guard lock(index_->mutex);
    index_->check(p.plan, wanted);
    found = index_->find(tokens, std::min(most, p.plan.capacity));
    ++(found ? index_->stats.hits : index_->stats.misses);
    if (found) index_->stats.tokens += found->tokens;
  }
  if (!found) return 0;

  // From here on without the lock: checkpoints do not change, and this one stays until it is let go. Whatever can run out of memory
  // comes before the sequence is touched; its own pages are used again.
  NewPages pages(*p.pages, static_cast<int64_t>(found->pages.size()), p.sole_pages(to));
  const Block recurrent = Block::allocate(static_cast<size_t>(p.recurrent_bytes()));
  p.settle();
  p.forget(to);
  pages.take();
  for (size_t i = 0; i < found->pages.size(); ++i) p.pages->write(pages.list()[i], found->pages[i]->bytes.data());
  const std::byte* stored = found->recurrent.data();
  auto* numbers = reinterpret_cast<float*>(recurrent.data());
  each_state(p.plan, [&](int64_t rows, int64_t size) {
    load_rows(index_->options.recurrent, rows, size, stored, numbers);
    stored += stored_bytes(index_->options.recurrent, rows, size);
    numbers += rows * size;
  });
  p.write(to, recurrent.data(), found->history.data());
  pages.hand_over(to.pages);
  to.length = found->tokens;
  return found->tokens;
}

void PrefixStore::insert(const HybridState& state, int64_t sequence, std::span<const int32_t> tokens) {
  const HybridState::Pools& p = model::pools_of(state);
  const HybridState::Pools::Sequence& from = p.at(sequence);
  if (static_cast<int64_t>(tokens.size()) != from.length)
    refuse("tokens", "are " + std::to_string(tokens.size()) + ", the sequence holds " + std::to_string(from.length));
  if (tokens.empty()) return;
  const uint64_t own = signature(p.plan);
  auto checkpoint = std::make_shared<Checkpoint>();
  checkpoint->tokens = from.length;
  checkpoint->hash = files::checksum(std::as_bytes(tokens));
  std::shared_ptr<Checkpoint> past;
  {
    const std::lock_guard lock(index_->mutex);
    index_->check(p.plan, own);
    past = index_->find(tokens, from.length);
    if (past && past->tokens == from.length) return;  // known, and now the most recently used
  }

  const StateStorage storage = index_->options.recurrent;
  int64_t bytes = 0;
  each_state(p.plan, [&](int64_t rows, int64_t size) { bytes += stored_bytes(storage, rows, size); });
  if (bytes + p.history_bytes() + static_cast<int64_t>(from.pages.size()) * p.pages->page_bytes() > index_->options.bytes) {
    const std::lock_guard lock(index_->mutex);  // too large whatever it shares: nothing is copied
    ++index_->stats.refused;
    return;
  }
  checkpoint->recurrent = Block::allocate(static_cast<size_t>(bytes));
  checkpoint->history = Block::allocate(static_cast<size_t>(p.history_bytes()));
  const Block recurrent = Block::allocate(static_cast<size_t>(p.recurrent_bytes()));
  p.read(from, recurrent.data(), checkpoint->history.data());
  Drift drift;
  std::byte* stored = checkpoint->recurrent.data();
  const auto* numbers = reinterpret_cast<const float*>(recurrent.data());
  each_state(p.plan, [&](int64_t rows, int64_t size) {
    store_rows(storage, rows, size, numbers, stored, drift);
    stored += stored_bytes(storage, rows, size);
    numbers += rows * size;
  });
  const double relative = drift.size > 0 ? std::sqrt(drift.error / drift.size) : 0;

  // Pages of the past that are still the same bytes are shared; only others are copied.
  const auto page_bytes = static_cast<size_t>(p.pages->page_bytes());
  const Block spare = past && p.plan.place != Place::host ? Block::allocate(page_bytes) : Block();
  checkpoint->pages.reserve(from.pages.size());
  for (size_t i = 0; i < from.pages.size(); ++i) {
    const auto of_page = tokens.subspan(i * kPageTokens, std::min<size_t>(kPageTokens, tokens.size() - i * kPageTokens));
    const bool known = past && i < past->pages.size() && past->pages[i]->tokens.size() == of_page.size();
    if (known && p.pages->equals(from.pages[i], past->pages[i]->bytes.data(), spare.data())) {
      checkpoint->pages.push_back(past->pages[i]);
      continue;
    }
    auto page = std::make_shared<Page>();
    page->tokens.assign(of_page.begin(), of_page.end());
    page->bytes = Block::allocate(page_bytes);
    p.pages->read(from.pages[i], page->bytes.data());
    checkpoint->pages.push_back(std::move(page));
  }

  Index::Order entry{checkpoint};
  const std::lock_guard lock(index_->mutex);
  Index& index = *index_;
  index.check(p.plan, own);  // another thread may have been the first
  int64_t alone = checkpoint->size();
  for (const auto& page : checkpoint->pages) alone += page->size();
  if (alone > index.options.bytes) {
    ++index.stats.refused;
    return;
  }
  if (index.by_hash.contains(checkpoint->hash)) return;  // another thread was faster
  while (index.stats.bytes + Index::cost(*checkpoint) > index.options.bytes) {
    index.drop(std::prev(index.order.end()));
    ++index.stats.evicted;
  }
  // What can run out of memory comes first; a length that no checkpoint has is harmless.
  if (index.signature == 0) index.model = p.plan.model;
  int64_t& of_length = index.lengths[checkpoint->tokens];
  index.by_hash.emplace(checkpoint->hash, entry.begin());
  index.order.splice(index.order.begin(), entry);
  ++of_length;
  index.stats.bytes += Index::cost(*checkpoint);
  for (const auto& page : checkpoint->pages) ++page->holders;
  index.signature = own;
  ++index.stats.checkpoints;
  ++index.stats.inserted;
  index.drift_squares += relative * relative;
  index.stats.largest_drift = std::max(index.stats.largest_drift, relative);
}

}  // namespace weft
