// What the sequences of a hybrid model remember: recurrent states and convolution windows of its gated delta layers, and the compressed
// KV pages of its attention layers, in one object.
//
// A state holds a number of sequences. Each has a slot in the pools of the delta layers and a list of pages of 64 tokens; page p is the
// same place in every attention layer, so one page table serves them all. Memory for pages grows as tokens come.
//
// One step of a model: append() says which sequences get how many tokens, finds room and answers with a HybridBatch, the tensors that
// the ops of that step want; recurrent(), window() and cache() give every layer its place. Then the ops run, layer by layer.
// A step that fails half-way leaves its sequences undefined: reset() them. Not thread-safe; different objects are independent.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "weft/gated_delta_rule.h"
#include "weft/kv_codec.h"

namespace weft {

inline constexpr int64_t kPageTokens = kTileTokens;

// What a layer keeps of a sequence. States and windows are f32, states in StateLayout::vk.
struct DeltaMemory {
  int64_t value_heads = 0, value_dim = 0, key_dim = 0;  // Hv, V, K
  int64_t channels = 0, width = 0;                      // of the convolution: C, W
};
struct AttentionMemory {
  int64_t kv_heads = 0;  // Hk
  KvRecipe recipe;
  KvLayout layout = KvLayout::rows;
  TileOrder tile_order = TileOrder::plain;

  // The layout that the cpu backend reads fastest: tiles in lanes order where both sides fit them, else rows.
  static AttentionMemory for_cpu(int64_t kv_heads, KvRecipe recipe);
};
using LayerMemory = std::variant<DeltaMemory, AttentionMemory>;

// All there is to know before anything is allocated.
struct HybridPlan {
  std::vector<LayerMemory> layers;
  int64_t sequences = 1;
  int64_t capacity = 0;  // most tokens of one sequence, 1 to 2^31 - 1
};

struct HybridBytes {
  int64_t recurrent = 0, windows = 0, kv = 0;
  int64_t total() const { return recurrent + windows + kv; }
};

// Is the plan sane? Operator "hybrid_state".
Status validate(const HybridPlan& plan);
// Exact bytes of the pools when every sequence of the plan holds so many tokens.
HybridBytes hybrid_bytes(const HybridPlan& plan, int64_t tokens_each);
// K and V of one more token in all attention layers (a page has room for kPageTokens of them).
int64_t kv_bytes_per_token(const HybridPlan& plan);

// New tokens of a sequence.
struct SequenceTokens {
  int64_t sequence = 0;
  int64_t tokens = 0;
};

// The tensors of one step, in the order of the sequences given to append(). They live in the state until its next change.
struct HybridBatch {
  int64_t tokens = 0;   // T
  Sequences sequences;  // N
  Tensor slots;         // [N] i32: pool slot of each sequence
  Tensor has_initial;   // [N] i32: 0 for a sequence that was empty before
  Tensor positions;     // [T] i32: of the new tokens
  Tensor lengths;       // [N] i32: tokens of each sequence, the new ones included
  Tensor page_table;    // [N, pages] i32

  // Sequences [first, first + count) of the batch over the same T rows: ops leave the rows of the others alone.
  HybridBatch slice(int64_t first, int64_t count) const;
};

class HybridState {
 public:
  // Throws Error for a plan that validate() refuses, std::bad_alloc when the pools do not fit.
  static HybridState create(HybridPlan plan);
  // A state without memory: its tensors have addresses that must not be followed. For scratch_bytes() of the ops before a real one.
  static HybridState pretend(HybridPlan plan);

  ~HybridState();
  HybridState(HybridState&&) noexcept;
  HybridState& operator=(HybridState&&) noexcept;

  const HybridPlan& plan() const;
  int64_t sequences() const;
  int64_t tokens(int64_t sequence) const;  // appended so far
  HybridBytes bytes() const;               // of the pools as they are allocated now
  // Forgets a sequence: its pages are free for others. Throws Error for one that does not exist.
  void reset(int64_t sequence);
  void reset();

  // Makes room for new tokens and counts them in. Throws Error (and changes nothing) for an unknown or repeated sequence, a negative
  // count, or more tokens than the capacity.
  HybridBatch append(std::span<const SequenceTokens> parts);

  // Places of layer `layer`, which must be of that kind.
  DeltaStates recurrent(int64_t layer, const HybridBatch& batch) const;  // in and out: the sequences' own slots
  Tensor window(int64_t layer) const;  // [sequences, W - 1, C] f32: short_conv's state, in and out
  KvCache cache(int64_t layer, const HybridBatch& batch) const;

 private:
  struct Pools;
  explicit HybridState(std::unique_ptr<Pools> pools);
  std::unique_ptr<Pools> pools_;
};

}  // namespace weft
