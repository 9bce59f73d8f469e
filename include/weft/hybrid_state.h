// The memory of the sequences of a hybrid model in one object: recurrent states and convolution windows of its gated delta layers,
// and compressed KV pages of its attention layers.
//
// A state holds a number of sequences. Each sequence has a slot in the pools of the delta layers and a list of pages of 64 tokens.
// Page p is the same place in every attention layer, so one page table serves all of them. Memory for pages grows with the tokens.
//
// One step of a model: append() says which sequences get how many tokens, finds room and returns a HybridBatch, the tensors that
// the ops of the step take. recurrent(), window() and cache() give every layer its memory. Then the ops run, layer by layer. A step
// that fails half-way leaves its sequences undefined: reset() them.
//
// Sequences can be copied: fork() gives another sequence of the state the same past, snapshot() keeps that past outside of any
// sequence. Both share KV pages by counting their owners, and copy recurrent states and windows. A shared page that is partly
// filled is copied before it is written.
//
// With plan.rollback, the last decoded tokens can be removed again. The state keeps an earlier recurrent state and the records (k,
// delta, g) of the tokens since; rollback() replays the records of the tokens that stay. The result has the bits of never having
// seen the others.
//
// Not thread-safe: a state and its snapshots belong to one thread at a time. Different states are independent.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "weft/gated_delta_rule.h"
#include "weft/kv_codec.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

namespace model {
struct Access;  // src/model/access.h
}

inline constexpr int64_t kPageTokens = kTileTokens;

// The operator that errors about plans and states name.
inline constexpr const char* kHybridStateOp = "hybrid_state";

// What a layer keeps of a sequence. Recurrent states (StateLayout::vk) and windows are f32.
struct DeltaMemory {
  int64_t value_heads = 0, value_dim = 0, key_dim = 0;  // Hv, V, K
  int64_t channels = 0, width = 0;                      // of the convolution: C, W
  int64_t key_heads = 0;                                // Hk; only plans with rollback need it, for records
  HeadMap head_map = HeadMap::grouped;                  // as key_heads
};
struct AttentionMemory {
  int64_t kv_heads = 0;  // Hk
  KvRecipe recipe;
  KvLayout layout = KvLayout::rows;
  TileOrder tile_order = TileOrder::token_major;

  // The layout that the cpu and cuda backends read fastest: tiles in lanes order where both sides allow it, else rows. Both
  // backends prefer the same layout, so the bytes of a sequence do not depend on where its state lives.
  static AttentionMemory for_cpu(int64_t kv_heads, KvRecipe recipe);
  static AttentionMemory for_cuda(int64_t kv_heads, KvRecipe recipe) { return for_cpu(kv_heads, std::move(recipe)); }
};
using LayerMemory = std::variant<DeltaMemory, AttentionMemory>;

// Everything that determines the memory of a state.
struct HybridPlan {
  std::vector<LayerMemory> layers;
  int64_t sequences = 1;
  int64_t capacity = 0;  // most tokens of one sequence, 1 to 2^31 - 1
  // Most tokens that rollback() removes, 0 to 16. With 0 nothing is recorded. With more, a sequence has two recurrent states,
  // windows have this many rows more, and there is room for the records of 48 tokens of each sequence.
  int64_t rollback = 0;
  // Where the pools are. On a device, the pages of all sequences at full capacity are allocated when the state is created.
  Place place = Place::host;
  int device = 0;  // ordinal for Place::cuda
  // Model::fingerprint() of the model that owns the memory, or empty: any. Models and prefix stores refuse the memory of another
  // model.
  std::string model;
};

struct HybridBytes {
  int64_t recurrent = 0, windows = 0, kv = 0, records = 0;
  int64_t total() const { return recurrent + windows + kv + records; }
};

// Is the plan valid, and below 2^60 bytes? Operator kHybridStateOp.
Status validate(const HybridPlan& plan);
// Exact bytes of the pools when every sequence of the plan holds `tokens_each` tokens (a negative number counts as 0; on a device
// the number does not matter). A member beyond 2^60 is 2^60 + 1. The plan's layers, sequences and rollback must be within what
// validate() accepts.
HybridBytes hybrid_bytes(const HybridPlan& plan, int64_t tokens_each);
// Bytes of K and V of one token in all attention layers. Memory is allocated in pages of kPageTokens tokens.
int64_t kv_bytes_per_token(const HybridPlan& plan);

// New tokens of a sequence, or tokens to remove from it.
struct SequenceTokens {
  int64_t sequence = 0;
  int64_t tokens = 0;
  bool decodes = false;  // the tokens (at most 16) take gated_delta_rule_decode with record(); such entries come first
};

// The tensors of one step, in the order of the sequences given to append(). They are on the host and valid until the state next
// changes. For a state on a device, the caller that runs the ops copies them there.
struct HybridBatch {
  int64_t tokens = 0;          // T
  Sequences sequences;         // N
  int64_t decoding = 0;        // sequences [0, decoding) decode
  int64_t decoded_tokens = 0;  // and have tokens [0, decoded_tokens)
  Tensor slots;                // [N] i32: the window of each sequence
  Tensor in_slots, out_slots;  // [N] i32: the recurrent state before and after; out_slots absent: the same
  Tensor window_offsets;       // [N] i32: first row of history in the window; absent: the last W - 1 rows
  Tensor has_initial;          // [N] i32: 0 for a sequence that was empty before
  Tensor positions;            // [T] i32: of the new tokens
  Tensor lengths;              // [N] i32: tokens of each sequence, the new ones included
  Tensor page_table;           // [N, pages] i32
  bool replays = false;        // run replay() of every delta layer before its decode

  // Sequences [first, first + count) of the batch over the same T tokens: ops do not touch the tokens of the other sequences.
  HybridBatch slice(int64_t first, int64_t count) const;
};

// The past of a sequence, kept outside of any sequence: see HybridState::snapshot. A snapshot may outlive its state; it then keeps
// the KV memory of the state alive.
class HybridSnapshot {
 public:
  ~HybridSnapshot();
  HybridSnapshot(HybridSnapshot&&) noexcept;
  HybridSnapshot& operator=(HybridSnapshot&&) noexcept;

  int64_t tokens() const;
  int64_t bytes() const;  // of recurrent states and windows; pages are shared with the state

 private:
  friend class HybridState;
  struct Parts;
  explicit HybridSnapshot(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

class HybridState {
 public:
  // Throws Error for a plan that validate() refuses, std::bad_alloc when the pools do not fit.
  static HybridState create(HybridPlan plan);
  // A state without memory, for scratch_bytes() of the ops before a real state exists. Its tensors have addresses that must not be
  // dereferenced.
  static HybridState pretend(HybridPlan plan);

  ~HybridState();
  HybridState(HybridState&&) noexcept;
  HybridState& operator=(HybridState&&) noexcept;

  const HybridPlan& plan() const;
  uint64_t identity() const;  // unique among all states that this process ever had
  int64_t sequences() const;
  int64_t tokens(int64_t sequence) const;  // appended so far
  HybridBytes bytes() const;               // of the pools as they are allocated now
  int64_t pages_in_use() const;            // KV pages that sequences and snapshots own; a shared page counts once
  // Empties a sequence and frees its pages. Throws Error for a sequence that does not exist.
  void reset(int64_t sequence);
  void reset();

  // Makes room for new tokens and adds them to the lengths. Throws Error (and changes nothing) for an unknown or repeated sequence,
  // a negative count, more tokens than the capacity, and for entries that decode but follow others or have more than 16 tokens. On
  // a device, records and pages may have to move first. They move in the order of `stream`, which will run the step; without a
  // stream, after all work that the device has queued.
  HybridBatch append(std::span<const SequenceTokens> parts, const Stream* stream = nullptr);

  // Sequence `to` drops its past and gets that of `from`, records included. No KV bytes are copied.
  void fork(int64_t from, int64_t to);
  // Copies the past of a sequence, without its records, and puts such a copy into any sequence of the same state. A restored
  // sequence cannot be rolled back.
  HybridSnapshot snapshot(int64_t sequence);
  void restore(int64_t sequence, const HybridSnapshot& snapshot);
  // How many tokens rollback() can remove now: the tokens decoded since the last prefill of the sequence, at most plan().rollback.
  int64_t rollable(int64_t sequence) const;
  // Removes the last tokens of sequences, on the stream that computed them. Throws Error (and changes nothing) for more than
  // rollable().
  void rollback(const Stream& stream, std::span<const SequenceTokens> parts);
  void rollback(const Stream& stream, int64_t sequence, int64_t tokens) {
    const SequenceTokens one{sequence, tokens};
    rollback(stream, std::span(&one, 1));
  }

  // The memory of layer `layer`. Throws Error for a layer that does not exist or is of the other kind.
  DeltaStates recurrent(int64_t layer, const HybridBatch& batch) const;  // in and out: the slots of the batch
  Tensor window(int64_t layer) const;  // [sequences, W - 1 + rollback, C] f32: short_conv's state, in and out
  KvCache cache(int64_t layer, const HybridBatch& batch) const;
  DeltaRecord record(int64_t layer, const HybridBatch& batch) const;  // of the tokens that decode; absent without rollback
  GatedDeltaRuleReplayArgs replay(int64_t layer) const;               // for batches with `replays`

  struct [[gnu::visibility("hidden")]] Pools;  // opaque: src/model/state/hybrid_pools.h

 private:
  friend struct model::Access;
  explicit HybridState(std::unique_ptr<Pools> pools);
  std::unique_ptr<Pools> pools_;
};

}  // namespace weft
#pragma GCC visibility pop
