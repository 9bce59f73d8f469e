// A store of checkpoints of sequences, so that a prompt that begins like an earlier one is not computed again.
//
// A checkpoint is the whole memory of a sequence after some of its tokens: recurrent states, windows and KV pages, copied to host
// memory. Checkpoints of the same past share pages whose bytes are equal. A restored sequence has the bits of the one that was
// inserted, unless recurrent states are stored in fewer bits.
//
//   weft::PrefixStore store({.bytes = 256 << 20});
//   model.prefill(stream, state, 0, tokens, logits, store);   // computes only what follows the longest known beginning
//
// Thread-safe: any number of threads restore and insert at the same time, each with a state of its own.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "weft/hybrid_state.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

// How checkpoints store recurrent states. int8 has one scale for every K numbers. Windows and KV codes are stored unchanged.
enum class StateStorage { f32, f16, bf16, int8 };
const char* state_storage_name(StateStorage storage);

struct PrefixStoreOptions {
  int64_t bytes = 0;    // budget; the least recently used checkpoints are evicted first
  int64_t every = 512;  // a prefill inserts a checkpoint every so many tokens, a multiple of 64; 0: only at its end
  StateStorage recurrent = StateStorage::f32;
};

struct PrefixStoreStats {
  int64_t bytes = 0, checkpoints = 0;              // held now
  int64_t hits = 0, misses = 0, tokens = 0;        // calls of restore() that found something or nothing, and restored tokens
  int64_t inserted = 0, evicted = 0, refused = 0;  // refused: a checkpoint larger than the budget
  // |stored - true| / |true| of the recurrent states of a checkpoint, rows that are not finite left out: the root mean square over
  // all inserted checkpoints, and the largest.
  double drift = 0, largest_drift = 0;
};

class PrefixStore {
 public:
  // Throws Error (operator "prefix_store") for a negative budget, an `every` that is not a multiple of 64, or a `recurrent` that is
  // not a StateStorage.
  explicit PrefixStore(const PrefixStoreOptions& options);
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  const PrefixStoreOptions& options() const;
  PrefixStoreStats stats() const;

  // Finds the longest beginning of `tokens`, of at most `most` tokens, that is in the store, gives it to a sequence, and returns
  // its length. 0: there is none, and the sequence is unchanged. Throws Error for a state of another model (HybridPlan::model) or
  // with other layers than the inserted ones; then, and when memory runs out, the sequence is unchanged. Pages that the sequence
  // alone owned are reused.
  int64_t restore(HybridState& state, int64_t sequence, std::span<const int32_t> tokens, int64_t most);
  // Inserts a sequence that holds exactly `tokens`. Throws as restore() does. While it copies, the new bytes exist beside the
  // budget.
  void insert(const HybridState& state, int64_t sequence, std::span<const int32_t> tokens);

 private:
  struct Index;
  std::unique_ptr<Index> index_;
};

}  // namespace weft
#pragma GCC visibility pop
