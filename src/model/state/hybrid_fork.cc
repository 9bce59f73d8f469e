// Copies of sequences: forks and snapshots, and reading and writing their states as bytes.
#include "core/check.h"
#include "model/state/hybrid_pools.h"

namespace weft {

using namespace model;

std::byte* HybridState::Pools::recurrent_at(size_t layer, int64_t slot) const {
  return layers[layer].recurrent.data() + slot * recurrent_numbers(plan.layers[layer]) * kF32;
}

std::byte* HybridState::Pools::window_at(size_t layer, int64_t sequence) const {
  return layers[layer].window.data() + sequence * window_rows(layer) * window_channels(plan.layers[layer]) * kF32;
}

std::byte* HybridState::Pools::history_at(size_t layer, const Sequence& sequence, int64_t rolled_back) const {
  return window_at(layer, &sequence - sequences.data()) +
         (plan.rollback - rolled_back) * window_channels(plan.layers[layer]) * kF32;
}

int64_t HybridState::Pools::recurrent_bytes() const {
  int64_t numbers = 0;
  for (const LayerMemory& layer : plan.layers) numbers += recurrent_numbers(layer);
  return numbers * kF32;
}

int64_t HybridState::Pools::history_bytes() const {
  int64_t numbers = 0;
  for (const LayerMemory& layer : plan.layers) numbers += history_numbers(layer);
  return numbers * kF32;
}

void HybridState::Pools::read(const Sequence& sequence, std::byte* recurrent, std::byte* history) const {
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t state = recurrent_numbers(plan.layers[i]) * kF32, past = history_numbers(plan.layers[i]) * kF32;
    copy_bytes(recurrent, recurrent_at(i, sequence.slot), static_cast<size_t>(state));
    copy_bytes(history, history_at(i, sequence, sequence.rolled_back), static_cast<size_t>(past));
    recurrent += state;
    history += past;
  }
}

void HybridState::Pools::write(Sequence& sequence, const std::byte* recurrent, const std::byte* history) {
  sequence.recorded = sequence.rollable = sequence.rolled_back = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t state = recurrent_numbers(plan.layers[i]) * kF32, past = history_numbers(plan.layers[i]) * kF32;
    copy_bytes(recurrent_at(i, sequence.slot), recurrent, static_cast<size_t>(state));
    copy_bytes(history_at(i, sequence, 0), history, static_cast<size_t>(past));
    recurrent += state;
    history += past;
  }
}

void HybridState::fork(int64_t from, int64_t to) {
  Pools& p = *pools_;
  const Pools::Sequence& source = p.at(from);
  Pools::Sequence& target = p.at(to);
  if (from == to) return;
  p.commit_records();
  Pools::Sequence copy = source;
  copy.slot = target.slot;
  p.clear(target);
  target = std::move(copy);
  for (int32_t page : target.pages) p.pages->share(page);
  for (size_t i = 0; i < p.layers.size() && target.length > 0; ++i) {
    const auto state = static_cast<size_t>(recurrent_numbers(p.plan.layers[i]) * kF32);
    copy_bytes(p.recurrent_at(i, target.slot), p.recurrent_at(i, source.slot), state);
    if (target.recorded > 0)
      copy_bytes(p.recurrent_at(i, p.other_slot(target.slot)), p.recurrent_at(i, p.other_slot(source.slot)), state);
    copy_bytes(p.window_at(i, to), p.window_at(i, from),
               static_cast<size_t>(p.window_rows(i) * window_channels(p.plan.layers[i]) * kF32));
  }
  if (target.recorded > 0)
    copy_bytes(p.record_at(to * kRecordTokens), p.record_at(from * kRecordTokens),
               static_cast<size_t>(kRecordTokens * p.record_row * kF32));
}

struct HybridSnapshot::Parts {
  int64_t tokens = 0;
  std::vector<int32_t> page_list;
  std::shared_ptr<PagePool> pages;
  Block recurrent, history;

  ~Parts() {
    for (auto page = page_list.rbegin(); page != page_list.rend(); ++page) pages->release(*page);
  }
};

HybridSnapshot::HybridSnapshot(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
HybridSnapshot::~HybridSnapshot() = default;
HybridSnapshot::HybridSnapshot(HybridSnapshot&&) noexcept = default;
HybridSnapshot& HybridSnapshot::operator=(HybridSnapshot&&) noexcept = default;

int64_t HybridSnapshot::tokens() const { return parts_->tokens; }
int64_t HybridSnapshot::bytes() const { return static_cast<int64_t>(parts_->recurrent.bytes() + parts_->history.bytes()); }

HybridSnapshot HybridState::snapshot(int64_t sequence) {
  Pools& p = *pools_;
  const Pools::Sequence& source = p.at(sequence);
  auto parts = std::make_unique<HybridSnapshot::Parts>();
  parts->tokens = source.length;
  parts->pages = p.pages;
  parts->recurrent = p.source->block(p.recurrent_bytes());
  parts->history = p.source->block(p.history_bytes());
  parts->page_list = source.pages;
  for (int32_t page : parts->page_list) p.pages->share(page);
  if (source.length > 0) p.read(source, parts->recurrent.data(), parts->history.data());
  return HybridSnapshot(std::move(parts));
}

void HybridState::restore(int64_t sequence, const HybridSnapshot& snapshot) {
  Pools& p = *pools_;
  Pools::Sequence& target = p.at(sequence);
  const HybridSnapshot::Parts& parts = *snapshot.parts_;
  if (parts.pages != p.pages)
    throw Error(
        fail(Code::invalid_argument, kStateOp, "snapshot", "was taken from another state, wanted a snapshot of this state"));
  p.commit_records();
  std::vector<int32_t> pages = parts.page_list;
  for (int32_t page : pages) p.pages->share(page);
  p.clear(target);
  target.length = parts.tokens;
  target.pages = std::move(pages);
  if (target.length > 0) p.write(target, parts.recurrent.data(), parts.history.data());
}

}  // namespace weft
