// The plan of a hybrid model's memory: validation and bytes.
#include <algorithm>
#include <numeric>

#include "common/lanes_tile.h"
#include "core/check.h"
#include "core/limits.h"
#include "model/state/hybrid_pools.h"

namespace weft {

using namespace model;

namespace {

constexpr int64_t kMaxLayers = 1 << 16;
constexpr int64_t kMaxBytes = int64_t{1} << 60;  // of a plan: the sum of four such numbers fits into int64

// sum += sequences x count x bytes, saturating at kMaxBytes + 1.
void add_bytes(int64_t& sum, int64_t sequences, int64_t count, int64_t bytes) {
  int64_t product = 0;
  const bool too_many = __builtin_mul_overflow(count, bytes, &product) || __builtin_mul_overflow(product, sequences, &product);
  sum = too_many || product > kMaxBytes ? kMaxBytes + 1 : std::min(kMaxBytes + 1, sum + product);
}

void check_layer(Check& check, const DeltaMemory& delta, const HybridPlan& plan) {
  check.between("value_heads", delta.value_heads, 1, kMaxLayerSize).between("channels", delta.channels, 1, kMaxLayerSize);
  check.between("value_dim", delta.value_dim, 1, kMaxDeltaHeadSize).between("key_dim", delta.key_dim, 1, kMaxDeltaHeadSize);
  check.between("width", delta.width, kMinConvWidth, kMaxConvWidth);
  if (plan.rollback == 0) return;
  check.between("key_heads", delta.key_heads, 1, delta.value_heads).known("head_map", delta.head_map, HeadMap::tiled);
  check.head_count("value_heads", delta.value_heads).divisor("key_heads", delta.key_heads, "value_heads", delta.value_heads);
}

// Checks the tensors of a format (mean and dense rotation) as the ops that read them will.
void check_tensors(Check& check, const char* side, const KvFormat& format, int64_t kv_heads, const HybridPlan& plan) {
  if (format.passthrough || !check.ok()) return;
  check.require(!format.mean.present() || format.mean.size(0) == kv_heads, side, [&] {
    return "has mean " + shape_text(format.mean) + ", wanted [kv_heads=" + std::to_string(kv_heads) + ", " +
           std::to_string(format.head_dim) + "]";
  });
  for (const Tensor* t : {&format.mean, format.rotation == Rotation::dense ? &format.dense_rotation : nullptr})
    check.require(!t || !t->present() || (t->place == plan.place && (t->place == Place::host || t->device == plan.device)), side,
                  "has a mean or dense_rotation on another device than the pools of the plan");
}

void check_layer(Check& check, const AttentionMemory& memory, const HybridPlan& plan) {
  check.between("kv_heads", memory.kv_heads, 1, kMaxLayerSize);
  check.known("layout", memory.layout, KvLayout::tiles).known("tile_order", memory.tile_order, TileOrder::lanes);
  check.also(validate(memory.recipe.k, kStateOp, "recipe.k")).also(validate(memory.recipe.v, kStateOp, "recipe.v"));
  check_tensors(check, "recipe.k", memory.recipe.k, memory.kv_heads, plan);
  check_tensors(check, "recipe.v", memory.recipe.v, memory.kv_heads, plan);
  const bool lanes = memory.layout == KvLayout::tiles && memory.tile_order == TileOrder::lanes;
  check.require(!lanes || (lanes_fit(memory.recipe.k) && lanes_fit(memory.recipe.v)), "tile_order",
                "is lanes, wanted token_major for head dims that are not multiples of 32 and for byte codes");
}

}  // namespace

namespace model {

std::array<int64_t, 4> page_pool_bytes(const LayerMemory& layer) {
  const auto* memory = std::get_if<AttentionMemory>(&layer);
  if (!memory) return {};
  const auto of = [&](const KvFormat& format) {
    if (memory->layout == KvLayout::tiles) return std::pair(memory->kv_heads * tile_bytes(format), int64_t{0});
    return std::pair(memory->kv_heads * kPageTokens * code_bytes(format), memory->kv_heads * kPageTokens * gain_bytes(format));
  };
  const auto k = of(memory->recipe.k), v = of(memory->recipe.v);
  return {k.first, k.second, v.first, v.second};
}

int64_t page_bytes(const LayerMemory& layer) {
  const std::array<int64_t, 4> bytes = page_pool_bytes(layer);
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

int64_t recurrent_numbers(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? memory->value_heads * memory->value_dim * memory->key_dim : 0;
}

int64_t window_channels(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? memory->channels : 0;
}

int64_t history_numbers(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? (memory->width - 1) * memory->channels : 0;
}

int64_t record_numbers(const LayerMemory& layer) {
  const auto* memory = std::get_if<DeltaMemory>(&layer);
  return memory ? memory->key_heads * memory->key_dim + memory->value_heads * (memory->value_dim + 1) : 0;
}

}  // namespace model

AttentionMemory AttentionMemory::for_cpu(int64_t kv_heads, KvRecipe recipe) {
  AttentionMemory memory{kv_heads, std::move(recipe), KvLayout::rows, TileOrder::token_major};
  if (lanes_fit(memory.recipe.k) && lanes_fit(memory.recipe.v)) {
    memory.layout = KvLayout::tiles;
    memory.tile_order = TileOrder::lanes;
  }
  return memory;
}

Status validate(const HybridPlan& plan) {
  Check check(kStateOp);
  check.between("plan.sequences", plan.sequences, 1, kMaxSequences).between("plan.capacity", plan.capacity, 1, kMaxTokens);
  check.between("plan.rollback", plan.rollback, 0, kMaxDecodeTokens);
  check.between("plan.layers.size()", static_cast<int64_t>(plan.layers.size()), 1, kMaxLayers);
  for (const LayerMemory& layer : plan.layers) {
    if (!check.ok()) break;
    std::visit([&](const auto& memory) { check_layer(check, memory, plan); }, layer);
  }
  if (check.ok())
    check.require(hybrid_bytes(plan, plan.capacity).total() <= kMaxBytes, "plan", [&] {
      return "takes more than 2^60 bytes when all of its " + std::to_string(plan.sequences) + " sequences hold " +
             std::to_string(plan.capacity) + " tokens, wanted at most 2^60";
    });
  return std::move(check).status();
}

HybridBytes hybrid_bytes(const HybridPlan& plan, int64_t tokens_each) {
  const bool records = plan.rollback > 0;
  const int64_t pages = pages_of(plan.place == Place::host ? std::max<int64_t>(0, tokens_each) : plan.capacity);
  HybridBytes bytes;
  for (const LayerMemory& layer : plan.layers) {
    add_bytes(bytes.recurrent, plan.sequences, records ? 2 : 1, recurrent_numbers(layer) * kF32);
    add_bytes(bytes.windows, plan.sequences, 1, (history_numbers(layer) + plan.rollback * window_channels(layer)) * kF32);
    add_bytes(bytes.kv, plan.sequences, pages, page_bytes(layer));
    if (records) add_bytes(bytes.records, plan.sequences, kRecordTokens + kHalfTokens, record_numbers(layer) * kF32);
  }
  return bytes;
}

int64_t kv_bytes_per_token(const HybridPlan& plan) {
  int64_t bytes = 0;
  for (const LayerMemory& layer : plan.layers)
    if (const auto* memory = std::get_if<AttentionMemory>(&layer)) bytes += memory->kv_heads * bytes_per_token(memory->recipe);
  return bytes;
}

}  // namespace weft
