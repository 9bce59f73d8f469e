// The attention kernels compiled for every target, their dispatch, and the layout of their buffers.
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

HWY_EXPORT(compute_partials);
HWY_EXPORT(compute_attention);
HWY_EXPORT(merge_query_row);
HWY_EXPORT(compute_scores);
HWY_EXPORT(compute_values);

namespace {

// Allocates aligned buffers from `data`, or with data null only counts their bytes.
class BumpAllocator {
 public:
  explicit BumpAllocator(void* data) : data_(static_cast<char*>(data)) {}
  template <class T>
  void take(T*& to, int64_t count) {
    to = data_ ? reinterpret_cast<T*>(data_ + used_) : nullptr;
    used_ += align_scratch(static_cast<size_t>(count) * sizeof(T));
  }
  size_t used() const { return used_; }

 private:
  char* data_;
  size_t used_ = 0;
};

}  // namespace

size_t lay_out_buffers(const AttentionShape& shape, void* data, AttentionBuffers& buffers) {
  const int64_t rows = (std::min(kQueryBlock, shape.max_query_rows()) + kDotRows - 1) / kDotRows * kDotRows;
  const int64_t Dk = buffer_dim(shape.Dk), Dv = buffer_dim(shape.Dv);
  BumpAllocator allocator(data);
  allocator.take(buffers.rows, 1);
  allocator.take(buffers.q, rows * Dk);
  allocator.take(buffers.s, (shape.integer ? kDotRows : rows) * kTileTokens);
  if (shape.integer) {
    allocator.take(buffers.q_operands, rows * operand_words(Dk));
    allocator.take(buffers.w_operands, rows * operand_words(kTileTokens));
    allocator.take(buffers.levels, kTileTokens * std::max(Dk, Dv));
    allocator.take(buffers.dots, kDotRows * std::max({kTileTokens, Dk, Dv}));
  } else {
    allocator.take(buffers.decoded, kTileTokens * std::max(Dk, Dv));
  }
  allocator.take(buffers.block_o, rows * Dv);
  allocator.take(buffers.o, rows * Dv);
  return allocator.used();
}

size_t attention_worker_bytes(const AttentionShape& shape) {
  AttentionBuffers buffers;
  return lay_out_buffers(shape, nullptr, buffers);
}

void run_partials(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const PartialsView& out, bool whole,
                  void* memory) {
  WEFT_KERNEL(isa, compute_partials)(call, item, out, whole, memory);
}

void run_attention(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const OutputEpilogue& epilogue,
                   void* memory) {
  WEFT_KERNEL(isa, compute_attention)(call, item, epilogue, memory);
}

void run_merge(Isa isa, const PartialsView& in, int64_t count, const OutputEpilogue& epilogue, int64_t t, int64_t h) {
  WEFT_KERNEL(isa, merge_query_row)(in, count, epilogue, t, h);
}

void run_scores(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const Tensor& scores, void* memory) {
  WEFT_KERNEL(isa, compute_scores)(call, item, scores, memory);
}

void run_values(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const AttentionValuesArgs& args,
                const OutputEpilogue& epilogue, void* memory) {
  WEFT_KERNEL(isa, compute_values)(call, item, args, epilogue, memory);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
