// A store of what sequences remembered at some of their tokens, so that a prompt that begins like an earlier one need not be read again.
//
// A checkpoint is a whole memory: recurrent states, windows and KV pages after so many tokens, kept in host memory in a form of its own.
// Checkpoints of one past share the pages whose bytes are equal. A restored sequence is bit for bit the one that was inserted, unless
// recurrent states are stored in fewer bits.
//
//   weft::PrefixStore store({.bytes = 256 << 20});
//   model.prefill(stream, state, 0, tokens, logits, store);   // reads only what no earlier prompt began with
//
// Thread-safe: any number of threads restore and insert at the same time, each with a state of its own.
// ABI: relink C++ callers between minor versions; weft/c.h is the stable interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "weft/hybrid_state.h"

namespace weft {

// How recurrent states of checkpoints are stored. int8: with a scale for every row of K numbers. Windows and codes stay as they are.
enum class StateStorage { f32, f16, bf16, int8 };
const char* state_storage_name(StateStorage storage);

struct PrefixStoreOptions {
  int64_t bytes = 0;    // budget; the checkpoints least recently used go first
  int64_t every = 512;  // a prefill leaves a checkpoint at every multiple of so many tokens, a multiple of 64; 0: only at its end
  StateStorage recurrent = StateStorage::f32;
};

struct PrefixStoreStats {
  int64_t bytes = 0, checkpoints = 0;              // held now
  int64_t hits = 0, misses = 0, tokens = 0;        // of restore(), and tokens that it restored
  int64_t inserted = 0, evicted = 0, refused = 0;  // refused: a checkpoint larger than the budget
  // |stored - true| / |true| of the recurrent states of a checkpoint, without rows that are not finite: root mean square over those
  // inserted, and the largest.
  double drift = 0, largest_drift = 0;
};

class PrefixStore {
 public:
  // Throws Error (operator "prefix_store") for a negative budget, an `every` that is no multiple of 64 or a `recurrent` that is no
  // StateStorage.
  explicit PrefixStore(const PrefixStoreOptions& options);
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  const PrefixStoreOptions& options() const;
  PrefixStoreStats stats() const;

  // Makes a sequence what it was after the longest beginning of `tokens`, of at most `most` tokens, that is in the store, and returns the
  // length of that. 0: there is none, and the sequence is as it was. Throws Error for a state of another model (HybridPlan::model), or with
  // other layers, than those inserted; the sequence is then as it was, and so it is when memory runs out. The pages that it held alone
  // are used again.
  int64_t restore(HybridState& state, int64_t sequence, std::span<const int32_t> tokens, int64_t most);
  // Remembers a sequence that holds exactly `tokens`. Throws as restore() does. While it copies, what is new of the sequence exists
  // beside the budget.
  void insert(const HybridState& state, int64_t sequence, std::span<const int32_t> tokens);

 private:
  struct Index;
  std::unique_ptr<Index> index_;
};

}  // namespace weft
