// What a HybridState is made of: memory of recurrent states, windows, records and KV pages, and who owns which.
#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <vector>

#include "model/network/memory.h"
#include "weft/hybrid_state.h"

namespace weft {
namespace model {

inline constexpr const char* kStateOp = kHybridStateOp;
inline constexpr int64_t kF32 = sizeof(float);
inline constexpr int64_t kMaxLayerSize = 1 << 20;  // heads or channels

inline int64_t pages_of(int64_t tokens) { return tokens / kPageTokens + (tokens % kPageTokens > 0); }

// Records of a sequence lie in two halves of so many tokens, each as long as replay takes at once; one more half is where a step writes.
inline constexpr int64_t kHalfTokens = kMaxDecodeTokens, kRecordTokens = 2 * kHalfTokens;

// Bytes of one page in a layer's four pools: codes of K, gains of K, codes of V, gains of V. Nothing for a delta layer.
std::array<int64_t, 4> page_parts(const LayerMemory& layer);
int64_t page_bytes(const LayerMemory& layer);
// Numbers of one sequence in a layer; nothing for an attention layer.
int64_t recurrent_numbers(const LayerMemory& layer);
int64_t window_row(const LayerMemory& layer);       // C
int64_t history_numbers(const LayerMemory& layer);  // (W - 1) C: what is needed of a window
int64_t record_numbers(const LayerMemory& layer);   // of one token: k, delta, g

// Pages of one layer as a cache without page table: codes of K, gains of K, codes of V, gains of V in the layout of `memory`.
KvCache page_cache(const AttentionMemory& memory, const std::array<std::byte*, 4>& parts, int64_t pages, Place place = Place::host,
                   int device = 0);

// Where blocks come from: memory, or addresses that only look like it.
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

// The KV pages of all attention layers. A page number is a place in every layer's pools; it is free when nobody owns it.
class PagePool {
 public:
  PagePool(const HybridPlan& plan, std::shared_ptr<BlockSource> source);

  // Makes room for `count` more pages than are in use: half as many again as before, up to what the plan can ever need; that at once
  // on a device, where growing would need both pools at a time.
  void reserve(int64_t count);
  // Takes a page; reserve() came before.
  int32_t take();
  // Counts pages as used, of which no one will ask: for pretended states.
  void pretend(int64_t count) { fresh_ += count; }
  void share(int32_t page) { ++owners_[static_cast<size_t>(page)]; }
  void release(int32_t page);
  bool shared(int32_t page) const { return owners_[static_cast<size_t>(page)] > 1; }
  int64_t in_use() const { return fresh_ - static_cast<int64_t>(free_.size()); }
  int64_t fresh() const { return fresh_; }
  int64_t allocated() const { return allocated_; }
  int64_t bytes() const;
  const Block& part(size_t layer, size_t part) const { return blocks_[layer][part]; }
  void copy(int32_t to, int32_t from, const Stream* stream);  // see copy_bytes

  // A page as bytes, the parts of all layers one after another, each at a multiple of kTileAlignment.
  int64_t page_bytes() const { return page_bytes_; }
  void read(int32_t page, std::byte* to) const;
  void write(int32_t page, const std::byte* from);
  // Does a page hold these bytes, gaps aside? `spare` has room for one page: those of a device are read into it.
  bool equals(int32_t page, const std::byte* bytes, std::byte* spare) const;
  // One part of a page alone, without the gap behind it.
  std::byte* part_at(int32_t page, size_t layer, size_t part) const {
    return blocks_[layer][part].data() + page * sizes_[layer][part];
  }

 private:
  std::shared_ptr<BlockSource> source_;
  int64_t most_, allocated_ = 0, fresh_ = 0, page_bytes_ = 0;  // pages from fresh_ on were never used
  std::vector<std::array<int64_t, 4>> sizes_, offsets_;        // of every layer
  std::vector<std::array<Block, 4>> blocks_;
  std::vector<int32_t> free_, owners_;
};

// Pages that belong to no sequence until what they hold is complete: those not handed over are given back.
class NewPages {
 public:
  // Makes room for `count` pages, `coming` of which are in use now and will be released before take().
  NewPages(PagePool& pool, int64_t count, int64_t coming = 0);
  ~NewPages();
  NewPages(const NewPages&) = delete;
  NewPages& operator=(const NewPages&) = delete;

  void take();  // all of them; cannot fail
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
    int64_t record_column = 0;  // where the layer's numbers begin in a row of records
  };
  struct Sequence {
    int64_t length = 0;
    std::vector<int32_t> pages;
    int64_t slot = 0;      // of its recurrent state; with rollback one of n and n + sequences
    int64_t origin = 0;    // with records: the token that the first of them was of
    int64_t recorded = 0;  // records back from the last token; the other slot holds the state before them
    int64_t rollable = 0;  // of those, how many can be taken back: the window must reach so far, too
    int64_t cut = 0;       // tokens taken back that are still in the window
  };
  // Rows of the latest step's records, and whose they are.
  struct Staged {
    int64_t sequence = 0, row = 0, first = 0, tokens = 0;  // first: its place in the ring of records
  };

  Pools(HybridPlan wanted, bool pretend);
  ~Pools();

  HybridPlan plan;
  uint64_t identity = 0;
  std::shared_ptr<model::BlockSource> source;
  std::shared_ptr<model::PagePool> pages;
  std::vector<Layer> layers;
  model::Block records;  // [sequences x kRecordTokens + sequences x kHalfTokens, record_row] f32, the rows of the latest step last
  int64_t record_row = 0;
  std::vector<Sequence> sequences;
  std::vector<Staged> staged;
  // The tensors of the latest append, and of replays.
  struct Indices {
    std::vector<int32_t> cu_seqlens, slots, in_slots, out_slots, window_offsets, has_initial, positions, lengths, page_table;
  } batch;
  struct Replay {
    std::vector<int32_t> in_slots, out_slots, accepted, has_initial;  // of every half of every sequence
    model::Block placed[4];                                           // the same where the pools are, if that is a device
    model::Block scratch;
  } replay;

  // What layer `layer` keeps. Throws Error for a layer that does not exist or is of the other kind.
  const DeltaMemory& delta_at(int64_t layer) const;
  const AttentionMemory& attention_at(int64_t layer) const;

  bool records_tokens() const { return plan.rollback > 0; }
  int64_t slots() const { return plan.sequences * (records_tokens() ? 2 : 1); }
  int64_t window_rows(size_t layer) const;  // L
  Sequence& at(int64_t sequence);           // throws Error for one that does not exist
  const Sequence& at(int64_t sequence) const { return const_cast<Pools*>(this)->at(sequence); }
  int64_t other_slot(int64_t slot) const { return slot < plan.sequences ? slot + plan.sequences : slot - plan.sequences; }
  Tensor indices(std::vector<int32_t>& values) const;

  // Gives a sequence's pages back and makes it empty.
  void forget(Sequence& sequence);
  // Pages that would be free then: those that nobody else owns.
  int64_t sole_pages(const Sequence& sequence) const;
  // The sequence decodes `tokens` more, whose records the step writes at row `row`. Says whether records must be replayed first.
  bool begin_records(int64_t sequence, int64_t row, int64_t tokens);
  // Puts the records of the latest step where they belong.
  void settle(const Stream* stream = nullptr);
  // Refuses a stream that does not compute where the memory is.
  void check_stream(const Stream& stream) const;
  // Nothing is replayed; then one half of a sequence is: `accepted` records from its ring place `first` on.
  void clear_replay();
  void add_replay(int64_t sequence, int64_t first, int64_t accepted, int64_t in_slot, int64_t out_slot, bool has_initial);
  // Puts what is to be replayed where the pools are: before replay_args().
  void place_replay(const Stream* stream);
  GatedDeltaRuleReplayArgs replay_args(int64_t layer);

  std::byte* recurrent_at(size_t layer, int64_t slot) const;
  std::byte* window_at(size_t layer, int64_t sequence) const;
  std::byte* history_at(size_t layer, const Sequence& sequence, int64_t cut) const;  // the W - 1 rows of its window that count
  std::byte* record_at(int64_t row) const;
  // Recurrent states ([V, K]) and windows (W - 1 rows, oldest first) of all delta layers, one after another: out of a sequence, and into
  // one, which then has no records.
  int64_t recurrent_bytes() const;  // of one sequence
  int64_t history_bytes() const;
  void read(const Sequence& sequence, std::byte* recurrent, std::byte* history) const;
  void write(Sequence& sequence, const std::byte* recurrent, const std::byte* history);
};

}  // namespace weft
