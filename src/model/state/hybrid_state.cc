// The memory of the sequences of a hybrid model, and the tensors of a step: see weft/hybrid_state.h.
#include "weft/hybrid_state.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "core/check.h"
#include "core/limits.h"
#include "model/state/hybrid_pools.h"

namespace weft {

using namespace model;

namespace {

[[noreturn]] void refuse(const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, kStateOp, argument, what));
}

// Elements (or rows) [first, first + count) of a tensor of indices.
Tensor part(const Tensor& values, int64_t first, int64_t count) {
  if (!values.present()) return values;
  Tensor t = values;
  t.data = static_cast<int32_t*>(t.data) + first * t.strides[0];
  t.sizes[0] = count;
  return t;
}

// Sums over the parts of a legal append().
struct Request {
  int64_t tokens = 0, longest = 0, decoding = 0, decoded_tokens = 0;
  int64_t new_pages = 0, table_pages = 1;
};

// The shared page that new tokens of a sequence would be written to, or -1. It must be copied first.
int32_t page_to_copy(const HybridState::Pools& p, const HybridState::Pools::Sequence& sequence, int64_t tokens) {
  if (tokens == 0 || sequence.length % kPageTokens == 0 || sequence.pages.empty()) return -1;
  return p.pages->shared(sequence.pages.back()) ? sequence.pages.back() : -1;
}

Request check_parts(const HybridState::Pools& p, std::span<const SequenceTokens> parts) {
  Request request;
  std::vector<bool> seen(static_cast<size_t>(p.plan.sequences));
  for (const SequenceTokens& part : parts) {
    const HybridState::Pools::Sequence& sequence = p.at(part.sequence);
    const std::string name = std::to_string(part.sequence);
    if (seen[static_cast<size_t>(part.sequence)]) refuse("sequence", "is " + name + " twice, wanted once");
    seen[static_cast<size_t>(part.sequence)] = true;
    const int64_t left = p.plan.capacity - sequence.length;
    if (part.tokens < 0 || part.tokens > left)
      refuse("tokens", "is " + std::to_string(part.tokens) + " for sequence " + name + ", wanted 0 to " + std::to_string(left) +
                           " (the capacity is " + std::to_string(p.plan.capacity) + ")");
    if (part.decodes) {
      if (part.tokens > kMaxDecodeTokens)
        refuse("tokens", "is " + std::to_string(part.tokens) + " for sequence " + name + ", which decodes, wanted at most " +
                             std::to_string(kMaxDecodeTokens));
      if (&part != parts.data() && !(&part)[-1].decodes)
        refuse("decodes", "is set for sequence " + name + " after one that does not decode, wanted sequences that decode first");
      ++request.decoding;
      request.decoded_tokens += part.tokens;
    }
    const int64_t pages = pages_of(sequence.length + part.tokens);
    request.tokens += part.tokens;
    request.longest = std::max(request.longest, part.tokens);
    request.new_pages += pages - pages_of(sequence.length) + (page_to_copy(p, sequence, part.tokens) >= 0);
    request.table_pages = std::max(request.table_pages, pages);
  }
  if (request.tokens > kMaxTokens) refuse("tokens", "are " + std::to_string(request.tokens) + " in all, wanted less than 2^31");
  if (const int64_t pages = p.pages->fresh() + request.new_pages; pages > kMaxTokens)
    refuse("tokens",
           "would need " + std::to_string(pages) + " pages of " + std::to_string(kPageTokens) + ", wanted less than 2^31");
  return request;
}

template <class Memory>
const Memory& memory_at(const HybridPlan& plan, int64_t layer, const char* other) {
  const auto count = static_cast<int64_t>(plan.layers.size());
  if (layer < 0 || layer >= count) refuse("layer", "is " + std::to_string(layer) + ", wanted 0 to " + std::to_string(count - 1));
  const auto* memory = std::get_if<Memory>(&plan.layers[static_cast<size_t>(layer)]);
  if (!memory) refuse("layer", std::to_string(layer) + " is " + other);
  return *memory;
}

}  // namespace

HybridBatch HybridBatch::slice(int64_t first, int64_t count) const {
  HybridBatch out = *this;
  out.sequences.cu_seqlens = part(sequences.cu_seqlens, first, count + 1);
  out.sequences.count = count;
  out.slots = part(slots, first, count);
  out.in_slots = part(in_slots, first, count);
  out.out_slots = part(out_slots, first, count);
  out.window_offsets = part(window_offsets, first, count);
  out.has_initial = part(has_initial, first, count);
  out.lengths = part(lengths, first, count);
  out.page_table = part(page_table, first, count);
  return out;
}

HybridState::Pools::Pools(HybridPlan wanted, bool pretend) : plan(std::move(wanted)) {
  static std::atomic<uint64_t> made{0};
  identity = ++made;
  if (Status status = validate(plan); !status) throw Error(std::move(status));
  source = std::make_shared<BlockSource>();
  source->pretended = pretend;
  source->place = plan.place;
  source->device = plan.device;
  pages = std::make_shared<PagePool>(plan, source);
  sequences.resize(static_cast<size_t>(plan.sequences));
  for (int64_t n = 0; n < plan.sequences; ++n) sequences[static_cast<size_t>(n)].slot = n;
  layers.resize(plan.layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].recurrent = source->block(slots() * recurrent_numbers(plan.layers[i]) * kF32);
    layers[i].window = source->block(plan.sequences * window_rows(i) * window_channels(plan.layers[i]) * kF32);
    layers[i].record_column = record_row;
    record_row += record_numbers(plan.layers[i]);
  }
  if (records_tokens()) records = source->block(plan.sequences * (kRecordTokens + kHalfTokens) * record_row * kF32);
  if (plan.place != Place::host) pages->reserve(plan.sequences * pages_of(plan.capacity));
}

HybridState::Pools::~Pools() {
  for (Sequence& sequence : sequences) clear(sequence);
}

int64_t HybridState::Pools::window_rows(size_t layer) const {
  const auto* memory = std::get_if<DeltaMemory>(&plan.layers[layer]);
  return memory ? memory->width - 1 + plan.rollback : 0;
}

HybridState::Pools::Sequence& HybridState::Pools::at(int64_t sequence) {
  if (sequence < 0 || sequence >= plan.sequences)
    refuse("sequence", "is " + std::to_string(sequence) + ", wanted 0 to " + std::to_string(plan.sequences - 1));
  return sequences[static_cast<size_t>(sequence)];
}

const DeltaMemory& HybridState::Pools::delta_at(int64_t layer) const {
  return memory_at<DeltaMemory>(plan, layer, "attention, wanted a gated delta layer");
}

const AttentionMemory& HybridState::Pools::attention_at(int64_t layer) const {
  return memory_at<AttentionMemory>(plan, layer, "gated delta, wanted an attention layer");
}

Tensor HybridState::Pools::indices(std::vector<int32_t>& values) const {
  return dense(values.data(), DType::i32, {static_cast<int64_t>(values.size())});
}

void HybridState::Pools::clear(Sequence& sequence) {
  for (auto page = sequence.pages.rbegin(); page != sequence.pages.rend(); ++page) pages->release(*page);
  const int64_t slot = sequence.slot;
  sequence = {};
  sequence.slot = slot;
}

int64_t HybridState::Pools::unshared_pages(const Sequence& sequence) const {
  return std::ranges::count_if(sequence.pages, [&](int32_t page) { return !pages->shared(page); });
}

HybridState::HybridState(std::unique_ptr<Pools> pools) : pools_(std::move(pools)) {}
HybridState::~HybridState() = default;
HybridState::HybridState(HybridState&&) noexcept = default;
HybridState& HybridState::operator=(HybridState&&) noexcept = default;

HybridState HybridState::create(HybridPlan plan) { return HybridState(std::make_unique<Pools>(std::move(plan), false)); }
HybridState HybridState::pretend(HybridPlan plan) { return HybridState(std::make_unique<Pools>(std::move(plan), true)); }

const HybridPlan& HybridState::plan() const { return pools_->plan; }
uint64_t HybridState::identity() const { return pools_->identity; }
int64_t HybridState::sequences() const { return pools_->plan.sequences; }
int64_t HybridState::pages_in_use() const { return pools_->pages->in_use(); }
int64_t HybridState::tokens(int64_t sequence) const { return pools_->at(sequence).length; }

HybridBytes HybridState::bytes() const {
  HybridBytes bytes;
  for (const Pools::Layer& layer : pools_->layers) {
    bytes.recurrent += static_cast<int64_t>(layer.recurrent.bytes());
    bytes.windows += static_cast<int64_t>(layer.window.bytes());
  }
  bytes.kv = pools_->pages->bytes();
  bytes.records = static_cast<int64_t>(pools_->records.bytes());
  return bytes;
}

void HybridState::reset(int64_t sequence) {
  pools_->commit_records();
  pools_->clear(pools_->at(sequence));
}

void HybridState::reset() {
  for (int64_t n = 0; n < sequences(); ++n) reset(n);
}

HybridBatch HybridState::append(std::span<const SequenceTokens> parts, const Stream* stream) {
  Pools& p = *pools_;
  if (stream) p.check_stream(*stream);
  const Request request = check_parts(p, parts);
  p.pages->reserve(request.new_pages);
  p.commit_records(stream);

  const size_t count = parts.size();
  const auto N = static_cast<int64_t>(count);
  HybridBatch batch;
  batch.tokens = request.tokens;
  batch.decoding = request.decoding;
  batch.decoded_tokens = request.decoded_tokens;
  if (p.source->pretended) {  // a dry run: sizes and addresses only
    const auto pretend = [&](std::initializer_list<int64_t> sizes) {
      Tensor t = dense(nullptr, DType::i32, sizes);
      t.data = Block::pretend(static_cast<size_t>(t.elements() * 4), p.source->cursor).data();
      return t;
    };
    for (const SequenceTokens& part : parts) p.at(part.sequence).length += part.tokens;
    p.pages->pretend(request.new_pages);
    batch.sequences = Sequences::packed(pretend({N + 1}), N, request.longest);
    batch.slots = batch.in_slots = pretend({N});
    if (p.records_tokens()) batch.out_slots = batch.window_offsets = pretend({N});
    batch.has_initial = pretend({N});
    batch.positions = pretend({request.tokens});
    batch.lengths = pretend({N});
    batch.page_table = pretend({N, request.table_pages});
    return batch;
  }
  Pools::Indices& at = p.batch;
  at.cu_seqlens.assign(count + 1, 0);
  for (auto* values : {&at.slots, &at.in_slots, &at.out_slots, &at.window_offsets, &at.has_initial, &at.lengths})
    values->resize(count);
  at.positions.resize(static_cast<size_t>(request.tokens));
  at.page_table.assign(count * static_cast<size_t>(request.table_pages), -1);
  p.clear_replay();
  for (const SequenceTokens& part : parts) {  // so that no list fails to hold a page that was taken for it
    Pools::Sequence& sequence = p.at(part.sequence);
    const auto pages = static_cast<size_t>(pages_of(sequence.length + part.tokens));
    if (pages > sequence.pages.capacity()) sequence.pages.reserve(std::max(pages, 2 * sequence.pages.capacity()));
  }
  size_t row = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t n = parts[i].sequence, tokens = parts[i].tokens;
    Pools::Sequence& sequence = p.at(n);
    at.slots[i] = static_cast<int32_t>(tokens > 0 ? n : -1);  // ops skip a sequence without new tokens
    at.has_initial[i] = sequence.length > 0;
    at.window_offsets[i] = static_cast<int32_t>(p.plan.rollback - sequence.rolled_back);
    at.in_slots[i] = at.out_slots[i] = static_cast<int32_t>(tokens > 0 ? sequence.slot : -1);
    if (tokens > 0) {
      sequence.rolled_back = 0;
      if (parts[i].decodes && p.records_tokens()) {
        batch.replays |= p.begin_records(n, static_cast<int64_t>(row), tokens);
        at.out_slots[i] = static_cast<int32_t>(sequence.slot);
      } else {
        sequence.recorded = sequence.rollable = 0;
      }
    }
    if (const int32_t page = page_to_copy(p, sequence, tokens); page >= 0) {
      sequence.pages.back() = p.pages->take();
      p.pages->copy(sequence.pages.back(), page, stream);
      p.pages->release(page);
    }
    for (int64_t t = 0; t < tokens; ++t) at.positions[row++] = static_cast<int32_t>(sequence.length + t);
    sequence.length += tokens;
    at.lengths[i] = static_cast<int32_t>(sequence.length);
    at.cu_seqlens[i + 1] = static_cast<int32_t>(row);
    while (static_cast<int64_t>(sequence.pages.size()) < pages_of(sequence.length)) sequence.pages.push_back(p.pages->take());
    std::copy(sequence.pages.begin(), sequence.pages.end(), at.page_table.begin() + static_cast<int64_t>(i) * request.table_pages);
  }

  if (batch.replays) p.place_replay(stream);
  batch.sequences = Sequences::packed(p.indices(at.cu_seqlens), N, request.longest);
  batch.slots = p.indices(at.slots);
  batch.in_slots = p.indices(at.in_slots);
  if (p.records_tokens()) {
    batch.out_slots = p.indices(at.out_slots);
    batch.window_offsets = p.indices(at.window_offsets);
  }
  batch.has_initial = p.indices(at.has_initial);
  batch.positions = p.indices(at.positions);
  batch.lengths = p.indices(at.lengths);
  batch.page_table = p.indices(at.page_table);
  batch.page_table.rank = 2;
  batch.page_table.sizes = {N, request.table_pages};
  batch.page_table.strides = {request.table_pages, 1};
  return batch;
}

DeltaStates HybridState::recurrent(int64_t layer, const HybridBatch& batch) const {
  const DeltaMemory& memory = pools_->delta_at(layer);
  DeltaStates states;
  states.in = states.out = pools_->source->view(pools_->layers[static_cast<size_t>(layer)].recurrent.data(), DType::f32,
                                                {pools_->slots(), memory.value_heads, memory.value_dim, memory.key_dim});
  states.in_slots = batch.in_slots;
  states.out_slots = batch.out_slots;
  states.has_initial = batch.has_initial;
  return states;
}

Tensor HybridState::window(int64_t layer) const {
  const DeltaMemory& memory = pools_->delta_at(layer);
  const auto i = static_cast<size_t>(layer);
  return pools_->source->view(pools_->layers[i].window.data(), DType::f32, {sequences(), pools_->window_rows(i), memory.channels});
}

KvCache HybridState::cache(int64_t layer, const HybridBatch& batch) const {
  const AttentionMemory& memory = pools_->attention_at(layer);
  const auto i = static_cast<size_t>(layer);
  const PagePool& pages = *pools_->pages;
  KvCache cache =
      page_cache(memory, {pages.pool(i, 0).data(), pages.pool(i, 1).data(), pages.pool(i, 2).data(), pages.pool(i, 3).data()},
                 pages.allocated(), pools_->plan.place, pools_->plan.device);
  cache.kind = CacheKind::paged;
  cache.page_table = batch.page_table;
  cache.lengths = batch.lengths;
  return cache;
}

}  // namespace weft
