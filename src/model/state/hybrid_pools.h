// The memory of a HybridState: recurrent states, convolution windows, records and KV pages, and which sequence owns what.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <vector>

#include "model/state/memory.h"
#include "weft/hybrid_state.h"

namespace weft {
namespace model {

inline constexpr const char* kStateOp = kHybridStateOp;
inline constexpr int64_t kF32 = sizeof(float);
inline constexpr int64_t kMaxLayerSize = 1 << 20;  // heads or channels

inline int64_t pages_of(int64_t tokens) { return tokens / kPageTokens + (tokens % kPageTokens > 0); }

// The record ring of a sequence has two halves of kHalfTokens tokens: gated_delta_rule_replay takes at most that many at once.
// Besides, a step writes its records to staging rows, kHalfTokens per sequence.
inline constexpr int64_t kHalfTokens = kMaxDecodeTokens, kRecordTokens = 2 * kHalfTokens;

// Bytes of one page in each of a layer's four pools: codes of K, gains of K, codes of V, gains of V. 0 for a delta layer.
std::array<int64_t, 4> page_pool_bytes(const LayerMemory& layer);
int64_t page_bytes(const LayerMemory& layer);
// f32 numbers of one sequence in a layer; 0 for an attention layer.
int64_t recurrent_numbers(const LayerMemory& layer);
int64_t window_channels(const LayerMemory& layer);  // C
int64_t history_numbers(const LayerMemory& layer);  // (W - 1) C: the inputs that the convolution reads
int64_t record_numbers(const LayerMemory& layer);   // of one token: k, delta and g

// Pages of one layer as a KvCache without page table. `pools`: codes of K, gains of K, codes of V, gains of V, in the layout of
// `memory`.
KvCache page_cache(const AttentionMemory& memory, const std::array<std::byte*, 4>& pools, int64_t pages, Place place = Place::host,
                   int device = 0);

// Allocates blocks, or pretends to in a dry run (see model/state/memory.h).
struct BlockSource {
  bool pretended = false;
  Place place = Place::host;
  int device = 0;
  uintptr_t cursor = Block::kPretended;
  Block block(int64_t bytes) {
    if (pretended) return Block::pretend(static_cast<size_t>(bytes), cursor);
    return Block::allocate(static_cast<size_t>(bytes), place, device);
  }
  // A dense view of a block.
  Tensor view(void* data, DType dtype, std::initializer_list<int64_t> sizes) const {
    return dense(data, dtype, sizes, place, device);
  }
};

// The KV pages of all attention layers. A page number is an index into the pools of every layer. A page has an owner count and is
// free when the count is 0.
class PagePool {
 public:
  PagePool(const HybridPlan& plan, std::shared_ptr<BlockSource> source);

  // Makes sure that take() can be called `count` times. Pools grow by half, up to what the plan can ever need. On a device they are
  // allocated for the whole plan at once, because growing needs the old and the new pools at the same time.
  void reserve(int64_t count);
  // Takes a free page, with one owner. Needs a reserve() before.
  int32_t take();
  // Dry runs: counts pages as used without giving them out.
  void pretend(int64_t count) { fresh_ += count; }
  void share(int32_t page) { ++owners_[static_cast<size_t>(page)]; }
  void release(int32_t page);
  bool shared(int32_t page) const { return owners_[static_cast<size_t>(page)] > 1; }
  int64_t in_use() const { return fresh_ - static_cast<int64_t>(free_.size()); }
  int64_t fresh() const { return fresh_; }
  int64_t allocated() const { return allocated_; }
  int64_t bytes() const;
  const Block& pool(size_t layer, size_t pool) const { return blocks_[layer][pool]; }
  void copy(int32_t to, int32_t from, const Stream* stream);  // see copy_bytes

  // A page as contiguous bytes: its bytes in the pools of all layers, one after another, each aligned to kTileAlignment.
  int64_t page_bytes() const { return page_bytes_; }
  void read(int32_t page, std::byte* to) const;
  void write(int32_t page, const std::byte* from);
  // Does a page hold these bytes, padding aside? `spare` has page_bytes() bytes: pages of a device are copied there.
  bool equals(int32_t page, const std::byte* bytes, std::byte* spare) const;
  // The bytes of a page in one pool.
  std::byte* pool_at(int32_t page, size_t layer, size_t pool) const {
    return blocks_[layer][pool].data() + page * sizes_[layer][pool];
  }

 private:
  std::shared_ptr<BlockSource> source_;
  int64_t most_;           // pages that the sequences of the plan can need
  int64_t allocated_ = 0;  // pages that the pools hold
  int64_t fresh_ = 0;      // pages from this one on were never used
  int64_t page_bytes_ = 0;
  std::vector<std::array<int64_t, 4>> sizes_, offsets_;  // per layer and pool
  std::vector<std::array<Block, 4>> blocks_;
  std::vector<int32_t> free_, owners_;
};

// New pages that belong to no sequence until their contents are complete. The destructor releases pages that were not handed over.
class NewPages {
 public:
  // Reserves `count` pages. `released` of them are still in use and will be released before take().
  NewPages(PagePool& pool, int64_t count, int64_t released = 0);
  ~NewPages();
  NewPages(const NewPages&) = delete;
  NewPages& operator=(const NewPages&) = delete;

  void take();  // takes all pages; cannot fail
  const std::vector<int32_t>& list() const { return list_; }
  void hand_over(std::vector<int32_t>& pages) { pages.swap(list_); }  // `pages` is empty

 private:
  PagePool& pool_;
  int64_t count_;
  std::vector<int32_t> list_;
};

}  // namespace model

struct HybridState::Pools {
  struct Layer {
    model::Block recurrent, window;
    int64_t record_column = 0;  // first number of the layer in a row of records
  };
  struct Sequence {
    int64_t length = 0;
    std::vector<int32_t> pages;
    int64_t slot = 0;         // of its recurrent state: n, or with rollback n or n + sequences
    int64_t origin = 0;       // with records: the token of ring position 0
    int64_t recorded = 0;     // tokens with records, back from the last one; the other slot holds the state before them
    int64_t rollable = 0;     // tokens that can be rolled back: at most `recorded`, and the window must still hold their inputs
    int64_t rolled_back = 0;  // tokens rolled back whose inputs are still in the window
  };
  // Records of one sequence in the latest step, still in the staging rows.
  struct Staged {
    int64_t sequence = 0, row = 0, first = 0, tokens = 0;  // first: ring position of the first token
  };

  Pools(HybridPlan wanted, bool pretend);
  ~Pools();

  HybridPlan plan;
  uint64_t identity = 0;
  std::shared_ptr<model::BlockSource> source;
  std::shared_ptr<model::PagePool> pages;
  std::vector<Layer> layers;
  model::Block records;  // [sequences x kRecordTokens + sequences x kHalfTokens, record_row] f32: rings, then staging rows
  int64_t record_row = 0;
  std::vector<Sequence> sequences;
  std::vector<Staged> staged;
  // Host memory of the tensors of the latest append, and of replays.
  struct Indices {
    std::vector<int32_t> cu_seqlens, slots, in_slots, out_slots, window_offsets, has_initial, positions, lengths, page_table;
  } batch;
  struct Replay {
    std::vector<int32_t> in_slots, out_slots, accepted, has_initial;  // per sequence and half of its ring
    model::Block placed[4];                                           // copies of these on the device of the pools
    model::Block scratch;
  } replay;

  // The memory of layer `layer`. Throws Error for a layer that does not exist or is of the other kind.
  const DeltaMemory& delta_at(int64_t layer) const;
  const AttentionMemory& attention_at(int64_t layer) const;

  bool records_tokens() const { return plan.rollback > 0; }
  int64_t slots() const { return plan.sequences * (records_tokens() ? 2 : 1); }
  int64_t window_rows(size_t layer) const;  // L
  Sequence& at(int64_t sequence);           // throws Error for one that does not exist
  const Sequence& at(int64_t sequence) const { return const_cast<Pools*>(this)->at(sequence); }
  int64_t other_slot(int64_t slot) const { return slot < plan.sequences ? slot + plan.sequences : slot - plan.sequences; }
  Tensor indices(std::vector<int32_t>& values) const;

  // Releases the pages of a sequence and makes it empty.
  void clear(Sequence& sequence);
  // Pages of a sequence that nobody else owns: those that clear() would free.
  int64_t unshared_pages(const Sequence& sequence) const;
  // Prepares the records of `tokens` new tokens, which the step writes to staging row `row` on. Returns whether the step must
  // replay records first.
  bool begin_records(int64_t sequence, int64_t row, int64_t tokens);
  // Moves the records of the latest step from the staging rows to the rings.
  void commit_records(const Stream* stream = nullptr);
  // Throws Error for a stream of another device than that of the memory.
  void check_stream(const Stream& stream) const;
  // clear_replay() replays nothing. add_replay() adds one half of a sequence's ring: `accepted` records from ring position `first`
  // on.
  void clear_replay();
  void add_replay(int64_t sequence, int64_t first, int64_t accepted, int64_t in_slot, int64_t out_slot, bool has_initial);
  // Copies the replay arguments to the device of the pools. Call it before replay_args().
  void place_replay(const Stream* stream);
  GatedDeltaRuleReplayArgs replay_args(int64_t layer);

  std::byte* recurrent_at(size_t layer, int64_t slot) const;
  std::byte* window_at(size_t layer, int64_t sequence) const;
  std::byte* history_at(size_t layer, const Sequence& sequence,
                        int64_t rolled_back) const;  // the W - 1 rows of its window that the next step reads
  std::byte* record_at(int64_t row) const;
  // read() copies the recurrent states ([V, K]) and the histories (W - 1 rows, oldest first) of all delta layers out of a sequence,
  // one after another. write() copies them into a sequence, which then has no records.
  int64_t recurrent_bytes() const;  // of one sequence
  int64_t history_bytes() const;
  void read(const Sequence& sequence, std::byte* recurrent, std::byte* history) const;
  void write(Sequence& sequence, const std::byte* recurrent, const std::byte* history);
};

}  // namespace weft
