// Kernels of attention, compiled for every target.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attention_kernels.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/attention/attention-inl.h"

#if HWY_ONCE

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/scratch.h"

namespace weft::cpu {

HWY_EXPORT(attention_partials_piece);
HWY_EXPORT(attention_piece);
HWY_EXPORT(attention_merge_row);
HWY_EXPORT(attention_scores_piece);
HWY_EXPORT(attention_values_piece);

namespace {

// Hands out aligned pieces of memory, or only counts.
class Carver {
 public:
  explicit Carver(void* data) : data_(static_cast<char*>(data)) {}
  template <class T>
  void take(T*& to, int64_t count) {
    to = data_ ? reinterpret_cast<T*>(data_ + used_) : nullptr;
    used_ += scratch_piece(static_cast<size_t>(count) * sizeof(T));
  }
  size_t used() const { return used_; }

 private:
  char* data_;
  size_t used_ = 0;
};

}  // namespace

size_t lay_out(const AttentionCall& call, void* data, AttentionMemory& memory) {
  const int64_t rows = (std::min(kRowBlock, call.max_rows()) + kDotRows - 1) / kDotRows * kDotRows;
  const int64_t Dk = buffer_dim(call.Dk), Dv = buffer_dim(call.Dv);
  Carver carver(data);
  carver.take(memory.rows, 1);
  carver.take(memory.q, rows * Dk);
  carver.take(memory.s, kDotRows * kTileTokens);
  if (call.integer) {
    carver.take(memory.q_operands, rows * operand_words(Dk));
    carver.take(memory.w_operands, rows * operand_words(kTileTokens));
    carver.take(memory.levels, kTileTokens * std::max(Dk, Dv));
    carver.take(memory.dots, kDotRows * std::max({kTileTokens, Dk, Dv}));
  } else {
    carver.take(memory.k, kTileTokens * Dk);
    carver.take(memory.v, kTileTokens * Dv);
  }
  carver.take(memory.block_o, rows * Dv);
  carver.take(memory.o, rows * Dv);
  return carver.used();
}

size_t attention_worker_bytes(const AttentionCall& call) {
  AttentionMemory memory;
  return lay_out(call, nullptr, memory);
}

void run_partials(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const PartialsView& out, bool whole,
                  void* memory) {
  WEFT_KERNEL(isa, attention_partials_piece)(call, piece, out, whole, memory);
}

void run_attention(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const RowFinish& finish, void* memory) {
  WEFT_KERNEL(isa, attention_piece)(call, piece, finish, memory);
}

void run_merge(Isa isa, const PartialsView& in, int64_t count, const RowFinish& finish, int64_t t, int64_t h) {
  WEFT_KERNEL(isa, attention_merge_row)(in, count, finish, t, h);
}

void run_scores(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const Tensor& scores, void* memory) {
  WEFT_KERNEL(isa, attention_scores_piece)(call, piece, scores, memory);
}

void run_values(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const AttentionValuesArgs& args,
                const RowFinish& finish, void* memory) {
  WEFT_KERNEL(isa, attention_values_piece)(call, piece, args, finish, memory);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
