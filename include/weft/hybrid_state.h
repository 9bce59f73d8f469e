// What the sequences of a hybrid model remember: recurrent states and convolution windows of its gated delta layers, and the compressed
// KV pages of its attention layers, in one object.
//
// A state holds a number of sequences. Each has a slot in the pools of the delta layers and a list of pages of 64 tokens; page p is the
// same place in every attention layer, so one page table serves them all. Memory for pages grows as tokens come.
//
// One step of a model: append() says which sequences get how many tokens, finds room and answers with a HybridBatch, the tensors that
// the ops of that step want; recurrent(), window() and cache() give every layer its place. Then the ops run, layer by layer.
// A step that fails half-way leaves its sequences undefined: reset() them.
//
// A sequence can be copied: fork() gives another sequence of the state the same past, snapshot() keeps it aside. Both share KV pages
// by counting their owners (a shared page that is partly filled is copied before it is written) and copy recurrent states and windows.
// With plan.rollback the last tokens that were decoded can be taken back: the state keeps the records (k, delta, g) of the tokens since
// an earlier recurrent state, and rollback() replays those that stay, with the bits of never having seen the others.
// Not thread-safe, a state and its snapshots together; different states are independent.
// ABI: relink C++ callers between minor versions; weft/c.h is the stable interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
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
  int64_t key_heads = 0;                                // Hk, for records: wanted where the plan has rollback
  HeadMap head_map = HeadMap::grouped;                  // as above
};
struct AttentionMemory {
  int64_t kv_heads = 0;  // Hk
  KvRecipe recipe;
  KvLayout layout = KvLayout::rows;
  TileOrder tile_order = TileOrder::token_major;

  // The layout that the cpu and the cuda backend read fastest: tiles in lanes order where both sides fit them, else rows. So a
  // sequence's bytes are the same wherever its state lives.
  static AttentionMemory for_cpu(int64_t kv_heads, KvRecipe recipe);
  static AttentionMemory for_cuda(int64_t kv_heads, KvRecipe recipe) { return for_cpu(kv_heads, std::move(recipe)); }
};
using LayerMemory = std::variant<DeltaMemory, AttentionMemory>;

// All there is to know before anything is allocated.
struct HybridPlan {
  std::vector<LayerMemory> layers;
  int64_t sequences = 1;
  int64_t capacity = 0;  // most tokens of one sequence, 1 to 2^31 - 1
  // Most tokens that rollback() takes back, 0 to 16. With 0 nothing is recorded; with more there are two recurrent states a sequence,
  // windows are longer by so many rows, and the records of up to 48 tokens a sequence have room.
  int64_t rollback = 0;
  // Where the pools are. On a device the pages of all sequences at their capacity are taken when the state is made.
  Place place = Place::host;
  int device = 0;  // ordinal for Place::cuda
  // Whose memory it is: Model::fingerprint(), or empty where nobody says. A model and a prefix store refuse the memory of others.
  std::string model;
};

struct HybridBytes {
  int64_t recurrent = 0, windows = 0, kv = 0, records = 0;
  int64_t total() const { return recurrent + windows + kv + records; }
};

// Is the plan sane, and below 2^60 bytes? Operator "hybrid_state".
Status validate(const HybridPlan& plan);
// Exact bytes of the pools when every sequence of the plan holds so many tokens, fewer than none being none (on a device: whatever they
// hold). A member beyond 2^60 is 2^60 + 1. The plan's layers, sequences and rollback must be within what validate() accepts.
HybridBytes hybrid_bytes(const HybridPlan& plan, int64_t tokens_each);
// K and V of one more token in all attention layers (a page has room for kPageTokens of them).
int64_t kv_bytes_per_token(const HybridPlan& plan);

// New tokens of a sequence, or those to be taken back.
struct SequenceTokens {
  int64_t sequence = 0;
  int64_t tokens = 0;
  bool decodes = false;  // they go through gated_delta_rule_decode, with record(); at most 16. Such parts come first
};

// The tensors of one step, in the order of the sequences given to append(). They live in the state until its next change, on the host:
// where a state is on a device, whoever runs the ops puts them there.
struct HybridBatch {
  int64_t tokens = 0;          // T
  Sequences sequences;         // N
  int64_t decoding = 0;        // the first so many sequences decode,
  int64_t decoded_tokens = 0;  // which have the first so many rows
  Tensor slots;                // [N] i32: the window of each sequence
  Tensor in_slots, out_slots;  // [N] i32: its recurrent state before and after; out_slots absent: the same
  Tensor window_offsets;       // [N] i32: first row of history in the window; absent: the last ones
  Tensor has_initial;          // [N] i32: 0 for a sequence that was empty before
  Tensor positions;            // [T] i32: of the new tokens
  Tensor lengths;              // [N] i32: tokens of each sequence, the new ones included
  Tensor page_table;           // [N, pages] i32
  bool replays = false;        // run replay() of every delta layer before its decode

  // Sequences [first, first + count) of the batch over the same T rows: ops leave the rows of the others alone.
  HybridBatch slice(int64_t first, int64_t count) const;
};

// A sequence set aside: see HybridState::snapshot. It may outlive its state, whose KV memory it then keeps.
class HybridSnapshot {
 public:
  ~HybridSnapshot();
  HybridSnapshot(HybridSnapshot&&) noexcept;
  HybridSnapshot& operator=(HybridSnapshot&&) noexcept;

  int64_t tokens() const;
  int64_t bytes() const;  // of its own: recurrent states and windows, but no pages

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
  // A state without memory: its tensors have addresses that must not be followed. For scratch_bytes() of the ops before a real one.
  static HybridState pretend(HybridPlan plan);

  ~HybridState();
  HybridState(HybridState&&) noexcept;
  HybridState& operator=(HybridState&&) noexcept;

  const HybridPlan& plan() const;
  uint64_t identity() const;  // no other state of this process has, or had, the same
  int64_t sequences() const;
  int64_t tokens(int64_t sequence) const;  // appended so far
  HybridBytes bytes() const;               // of the pools as they are allocated now
  // Forgets a sequence: its pages are free for others. Throws Error for one that does not exist.
  void reset(int64_t sequence);
  void reset();

  // Makes room for new tokens and counts them in. Throws Error (and changes nothing) for an unknown or repeated sequence, a negative
  // count, more tokens than the capacity, or parts that decode after others or have more than 16 tokens.
  // On a device, records and pages may have to move first: in the order of the stream that will run the step, or, without one, after all
  // that the device was asked to do.
  HybridBatch append(std::span<const SequenceTokens> parts, const Stream* stream = nullptr);

  // Sequence `to` forgets what it holds and becomes what `from` is, its records included. No KV bytes are copied.
  void fork(int64_t from, int64_t to);
  // What a sequence remembers, without its records; and back, into any sequence of the same state. Nothing can be rolled back then.
  HybridSnapshot snapshot(int64_t sequence);
  void restore(int64_t sequence, const HybridSnapshot& snapshot);
  // How many tokens rollback() can take back now: of those decoded since the sequence last took in others, at most plan().rollback.
  int64_t rollable(int64_t sequence) const;
  // Takes the last tokens of sequences back, on the stream that computed them. Throws Error (and changes nothing) for more than
  // rollable().
  void rollback(const Stream& stream, std::span<const SequenceTokens> parts);
  void rollback(const Stream& stream, int64_t sequence, int64_t tokens) {
    const SequenceTokens one{sequence, tokens};
    rollback(stream, std::span(&one, 1));
  }

  // Places of layer `layer`. Throws Error for one that does not exist or is of the other kind.
  DeltaStates recurrent(int64_t layer, const HybridBatch& batch) const;  // in and out: the sequences' own slots
  Tensor window(int64_t layer) const;  // [sequences, W - 1 + rollback, C] f32: short_conv's state, in and out
  KvCache cache(int64_t layer, const HybridBatch& batch) const;
  DeltaRecord record(int64_t layer, const HybridBatch& batch) const;  // of the rows that decode; absent without rollback
  GatedDeltaRuleReplayArgs replay(int64_t layer) const;               // where the batch replays

  struct Pools;  // src/model/state/hybrid_pools.h
  Pools& pools() const { return *pools_; }

 private:
  explicit HybridState(std::unique_ptr<Pools> pools);
  std::unique_ptr<Pools> pools_;
};

}  // namespace weft
