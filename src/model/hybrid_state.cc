// The memory of a hybrid model's sequences: see weft/hybrid_state.h.
#include "weft/hybrid_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "core/check.h"
#include "model/memory.h"
#include "shared/lanes_tile.h"

namespace weft {
namespace {

using model::Block;

constexpr const char* kOp = "hybrid_state";
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxSequences = 1 << 20, kMaxLayers = 1 << 16, kMaxSize = 1 << 20;

int64_t pages_of(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// One side of a page, and the pools that hold it: codes (or whole tiles), and gains where they lie apart.
struct SideBytes {
  int64_t codes = 0, gains = 0;  // of one page and all heads
};

SideBytes side_bytes(const AttentionMemory& memory, const KvFormat& format) {
  if (memory.layout == KvLayout::tiles) return {memory.kv_heads * tile_bytes(format), 0};
  return {memory.kv_heads * kPageTokens * code_bytes(format), memory.kv_heads * kPageTokens * gain_bytes(format)};
}

int64_t page_bytes(const LayerMemory& layer) {
  const auto* memory = std::get_if<AttentionMemory>(&layer);
  if (!memory) return 0;
  const SideBytes k = side_bytes(*memory, memory->recipe.k), v = side_bytes(*memory, memory->recipe.v);
  return k.codes + k.gains + v.codes + v.gains;
}

int64_t recurrent_numbers(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? memory->value_heads * memory->value_dim * memory->key_dim : 0;
}

int64_t window_numbers(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? (memory->width - 1) * memory->channels : 0;
}

constexpr int64_t kF32 = sizeof(float);

Tensor indices(std::vector<int32_t>& values) { return dense(values.data(), DType::i32, {static_cast<int64_t>(values.size())}); }

// `count` elements of a vector of indices, element `first` on.
Tensor part(const Tensor& values, int64_t first, int64_t count) {
  Tensor t = values;
  t.data = static_cast<int32_t*>(t.data) + first * t.strides[0];
  t.sizes[0] = count;
  return t;
}

}  // namespace

AttentionMemory AttentionMemory::for_cpu(int64_t kv_heads, KvRecipe recipe) {
  AttentionMemory memory{kv_heads, std::move(recipe), KvLayout::rows, TileOrder::plain};
  if (lanes_fit(memory.recipe.k) && lanes_fit(memory.recipe.v)) {
    memory.layout = KvLayout::tiles;
    memory.tile_order = TileOrder::lanes;
  }
  return memory;
}

Status validate(const HybridPlan& plan) {
  Check check(kOp);
  check.between("plan.sequences", plan.sequences, 1, kMaxSequences).between("plan.capacity", plan.capacity, 1, kMaxTokens);
  check.between("plan.layers.size()", static_cast<int64_t>(plan.layers.size()), 1, kMaxLayers);
  for (const LayerMemory& layer : plan.layers) {
    if (!check.ok()) break;
    if (const auto* delta = std::get_if<DeltaMemory>(&layer)) {
      check.between("value_heads", delta->value_heads, 1, kMaxSize).between("channels", delta->channels, 1, kMaxSize);
      check.between("value_dim", delta->value_dim, 1, 256)
          .between("key_dim", delta->key_dim, 1, 256)
          .between("width", delta->width, 2, 8);
    } else {
      const auto& memory = std::get<AttentionMemory>(layer);
      check.between("kv_heads", memory.kv_heads, 1, kMaxSize);
      check.also(validate(memory.recipe.k, kOp, "recipe.k")).also(validate(memory.recipe.v, kOp, "recipe.v"));
      const bool lanes = memory.layout == KvLayout::tiles && memory.tile_order == TileOrder::lanes;
      check.require(!lanes || (lanes_fit(memory.recipe.k) && lanes_fit(memory.recipe.v)), "tile_order",
                    "is lanes, wanted plain for head dims that are no multiple of 32 and for byte codes");
    }
  }
  return std::move(check).status();
}

HybridBytes hybrid_bytes(const HybridPlan& plan, int64_t tokens_each) {
  HybridBytes bytes;
  for (const LayerMemory& layer : plan.layers) {
    bytes.recurrent += plan.sequences * recurrent_numbers(layer) * kF32;
    bytes.windows += plan.sequences * window_numbers(layer) * kF32;
    bytes.kv += plan.sequences * pages_of(tokens_each) * page_bytes(layer);
  }
  return bytes;
}

int64_t kv_bytes_per_token(const HybridPlan& plan) {
  int64_t bytes = 0;
  for (const LayerMemory& layer : plan.layers)
    if (const auto* memory = std::get_if<AttentionMemory>(&layer)) bytes += memory->kv_heads * bytes_per_token(memory->recipe);
  return bytes;
}

HybridBatch HybridBatch::slice(int64_t first, int64_t count) const {
  HybridBatch out = *this;
  out.sequences.cu_seqlens = part(sequences.cu_seqlens, first, count + 1);
  out.sequences.count = count;
  out.slots = part(slots, first, count);
  out.has_initial = part(has_initial, first, count);
  out.lengths = part(lengths, first, count);
  out.page_table = part(page_table, first, count);
  return out;
}

struct HybridState::Pools {
  // Memory of one layer. Attention: pools of pages, in the order codes of K, gains of K, codes of V, gains of V.
  struct Layer {
    Block recurrent, window;
    Block pages[4];
  };

  HybridPlan plan;
  bool pretended = false;
  uintptr_t cursor = Block::kPretended;
  std::vector<Layer> layers;
  int64_t allocated_pages = 0;
  std::vector<int32_t> free_pages;           // below fresh_page and in no sequence
  int64_t fresh_page = 0;                    // pages from here on were never used
  std::vector<int64_t> lengths;              // of every sequence
  std::vector<std::vector<int32_t>> tables;  // pages of every sequence, in order
  // The batch of the latest append.
  std::vector<int32_t> cu_seqlens, slots, has_initial, positions, batch_lengths, page_table;

  Pools(HybridPlan wanted, bool pretend) : plan(std::move(wanted)), pretended(pretend) {
    if (Status status = validate(plan); !status) throw Error(std::move(status));
    lengths.assign(static_cast<size_t>(plan.sequences), 0);
    tables.resize(static_cast<size_t>(plan.sequences));
    layers.resize(plan.layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i].recurrent = block(plan.sequences * recurrent_numbers(plan.layers[i]) * kF32);
      layers[i].window = block(plan.sequences * window_numbers(plan.layers[i]) * kF32);
    }
  }

  Block block(int64_t bytes) {
    return pretended ? Block::pretend(static_cast<size_t>(bytes), cursor) : Block::allocate(static_cast<size_t>(bytes));
  }

  // Makes the pools hold at least `pages`: half as many again as before, up to what the plan can ever need.
  void grow(int64_t pages) {
    if (pages <= allocated_pages) return;
    const int64_t most = plan.sequences * pages_of(plan.capacity);
    const int64_t wanted = std::max(pages, std::min(most, allocated_pages + allocated_pages / 2));
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto* memory = std::get_if<AttentionMemory>(&plan.layers[i]);
      if (!memory) continue;
      const SideBytes k = side_bytes(*memory, memory->recipe.k), v = side_bytes(*memory, memory->recipe.v);
      const int64_t bytes[4] = {k.codes, k.gains, v.codes, v.gains};
      for (int j = 0; j < 4; ++j) {
        Block larger = block(wanted * bytes[j]);
        if (!pretended && allocated_pages > 0 && bytes[j] > 0)
          std::memcpy(larger.data(), layers[i].pages[j].data(), static_cast<size_t>(allocated_pages * bytes[j]));
        layers[i].pages[j] = std::move(larger);
      }
    }
    allocated_pages = wanted;
  }

  int32_t take_page() {
    if (free_pages.empty()) return static_cast<int32_t>(fresh_page++);
    const int32_t page = free_pages.back();
    free_pages.pop_back();
    return page;
  }

  void check_sequence(int64_t sequence) const {
    if (sequence < 0 || sequence >= plan.sequences)
      throw Error(fail(Code::invalid_argument, kOp, "sequence",
                       "is " + std::to_string(sequence) + ", wanted 0 to " + std::to_string(plan.sequences - 1)));
  }

  KvSide side(const AttentionMemory& memory, const KvFormat& format, const Block& codes, const Block& gains) const {
    KvSide side;
    side.format = format;
    const int64_t Hk = memory.kv_heads;
    if (memory.layout == KvLayout::tiles) {
      side.codes = dense(codes.data(), DType::u8, {allocated_pages, Hk, 1, tile_bytes(format)});
    } else if (format.passthrough) {
      side.codes = dense(codes.data(), *format.passthrough, {allocated_pages, Hk, kPageTokens, format.head_dim});
    } else {
      side.codes = dense(codes.data(), DType::u8, {allocated_pages, Hk, kPageTokens, code_bytes(format)});
      side.gains = dense(gains.data(), format.gain_dtype, {allocated_pages, Hk, kPageTokens, format.head_dim / format.gain_group});
    }
    return side;
  }
};

HybridState::HybridState(std::unique_ptr<Pools> pools) : pools_(std::move(pools)) {}
HybridState::~HybridState() = default;
HybridState::HybridState(HybridState&&) noexcept = default;
HybridState& HybridState::operator=(HybridState&&) noexcept = default;

HybridState HybridState::create(HybridPlan plan) { return HybridState(std::make_unique<Pools>(std::move(plan), false)); }
HybridState HybridState::pretend(HybridPlan plan) { return HybridState(std::make_unique<Pools>(std::move(plan), true)); }

const HybridPlan& HybridState::plan() const { return pools_->plan; }
int64_t HybridState::sequences() const { return pools_->plan.sequences; }

int64_t HybridState::tokens(int64_t sequence) const {
  pools_->check_sequence(sequence);
  return pools_->lengths[static_cast<size_t>(sequence)];
}

HybridBytes HybridState::bytes() const {
  HybridBytes bytes;
  for (const Pools::Layer& layer : pools_->layers) {
    bytes.recurrent += static_cast<int64_t>(layer.recurrent.bytes());
    bytes.windows += static_cast<int64_t>(layer.window.bytes());
    for (const Block& pages : layer.pages) bytes.kv += static_cast<int64_t>(pages.bytes());
  }
  return bytes;
}

void HybridState::reset(int64_t sequence) {
  pools_->check_sequence(sequence);
  auto& table = pools_->tables[static_cast<size_t>(sequence)];
  pools_->free_pages.insert(pools_->free_pages.end(), table.rbegin(), table.rend());
  table.clear();
  pools_->lengths[static_cast<size_t>(sequence)] = 0;
}

void HybridState::reset() {
  for (int64_t n = 0; n < sequences(); ++n) reset(n);
}

HybridBatch HybridState::append(std::span<const SequenceTokens> parts) {
  Pools& p = *pools_;
  // First the questions, then the changes.
  std::vector<bool> seen(static_cast<size_t>(p.plan.sequences));
  int64_t tokens = 0, longest = 0, new_pages = 0, table_pages = 1;
  for (const SequenceTokens& part : parts) {
    p.check_sequence(part.sequence);
    const auto n = static_cast<size_t>(part.sequence);
    if (seen[n]) throw Error(fail(Code::invalid_argument, kOp, "sequence", "is " + std::to_string(n) + " twice, wanted once"));
    seen[n] = true;
    const int64_t room = p.plan.capacity - p.lengths[n];
    if (part.tokens < 0 || part.tokens > room)
      throw Error(fail(Code::invalid_argument, kOp, "tokens",
                       "is " + std::to_string(part.tokens) + " for sequence " + std::to_string(n) + ", wanted 0 to " +
                           std::to_string(room) + " (the capacity is " + std::to_string(p.plan.capacity) + ")"));
    const int64_t pages = pages_of(p.lengths[n] + part.tokens);
    tokens += part.tokens;
    longest = std::max(longest, part.tokens);
    new_pages += pages - pages_of(p.lengths[n]);
    table_pages = std::max(table_pages, pages);
  }
  if (tokens > kMaxTokens)
    throw Error(fail(Code::invalid_argument, kOp, "tokens", "are " + std::to_string(tokens) + " in all, wanted less than 2^31"));
  if (p.fresh_page + new_pages > kMaxTokens)
    throw Error(fail(Code::invalid_argument, kOp, "tokens",
                     "would need " + std::to_string(p.fresh_page + new_pages) + " pages of " + std::to_string(kPageTokens) +
                         ", wanted less than 2^31"));
  p.grow(p.fresh_page + std::max<int64_t>(0, new_pages - static_cast<int64_t>(p.free_pages.size())));

  const size_t count = parts.size();
  HybridBatch batch;
  batch.tokens = tokens;
  if (p.pretended) {  // sizes and addresses alone
    const auto pretend = [&](std::initializer_list<int64_t> sizes) {
      Tensor t = dense(nullptr, DType::i32, sizes);
      t.data = p.block(t.elements() * 4).data();
      return t;
    };
    const auto n = static_cast<int64_t>(count);
    for (const SequenceTokens& part : parts) p.lengths[static_cast<size_t>(part.sequence)] += part.tokens;
    p.fresh_page += new_pages;
    batch.sequences = Sequences::packed(pretend({n + 1}), n, longest);
    batch.slots = pretend({n});
    batch.has_initial = pretend({n});
    batch.positions = pretend({tokens});
    batch.lengths = pretend({n});
    batch.page_table = pretend({n, table_pages});
    return batch;
  }
  p.cu_seqlens.assign(count + 1, 0);
  p.slots.resize(count);
  p.has_initial.resize(count);
  p.batch_lengths.resize(count);
  p.positions.resize(static_cast<size_t>(tokens));
  p.page_table.assign(count * static_cast<size_t>(table_pages), -1);
  size_t row = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto n = static_cast<size_t>(parts[i].sequence);
    int64_t& length = p.lengths[n];
    p.slots[i] = static_cast<int32_t>(n);
    p.has_initial[i] = length > 0;
    for (int64_t t = 0; t < parts[i].tokens; ++t) p.positions[row++] = static_cast<int32_t>(length + t);
    length += parts[i].tokens;
    p.batch_lengths[i] = static_cast<int32_t>(length);
    p.cu_seqlens[i + 1] = static_cast<int32_t>(row);
    while (static_cast<int64_t>(p.tables[n].size()) < pages_of(length)) p.tables[n].push_back(p.take_page());
    std::copy(p.tables[n].begin(), p.tables[n].end(), p.page_table.begin() + static_cast<int64_t>(i) * table_pages);
  }

  batch.sequences = Sequences::packed(indices(p.cu_seqlens), static_cast<int64_t>(count), longest);
  batch.slots = indices(p.slots);
  batch.has_initial = indices(p.has_initial);
  batch.positions = indices(p.positions);
  batch.lengths = indices(p.batch_lengths);
  batch.page_table = dense(p.page_table.data(), DType::i32, {static_cast<int64_t>(count), table_pages});
  return batch;
}

DeltaStates HybridState::recurrent(int64_t layer, const HybridBatch& batch) const {
  const auto i = static_cast<size_t>(layer);
  const auto& memory = std::get<DeltaMemory>(pools_->plan.layers.at(i));
  DeltaStates states;
  states.in = states.out =
      dense(pools_->layers[i].recurrent.data(), DType::f32, {sequences(), memory.value_heads, memory.value_dim, memory.key_dim});
  states.in_slots = batch.slots;
  states.has_initial = batch.has_initial;
  return states;
}

Tensor HybridState::window(int64_t layer) const {
  const auto i = static_cast<size_t>(layer);
  const auto& memory = std::get<DeltaMemory>(pools_->plan.layers.at(i));
  return dense(pools_->layers[i].window.data(), DType::f32, {sequences(), memory.width - 1, memory.channels});
}

KvCache HybridState::cache(int64_t layer, const HybridBatch& batch) const {
  const auto i = static_cast<size_t>(layer);
  const auto& memory = std::get<AttentionMemory>(pools_->plan.layers.at(i));
  const Block* pages = pools_->layers[i].pages;
  KvCache cache;
  cache.k = pools_->side(memory, memory.recipe.k, pages[0], pages[1]);
  cache.v = pools_->side(memory, memory.recipe.v, pages[2], pages[3]);
  cache.layout = memory.layout;
  cache.tile_order = memory.tile_order;
  cache.kind = CacheKind::paged;
  cache.page_table = batch.page_table;
  cache.lengths = batch.lengths;
  return cache;
}

}  // namespace weft
