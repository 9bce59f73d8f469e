// Where a sequence's tokens lie: the one reading of Sequences, slots and lengths that all backends share.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "weft/tensor.h"

namespace weft {

// Element i of an i32 or i64 tensor, read where it lives.
WEFT_HOST_DEVICE inline int64_t index_at(const Tensor& t, int64_t i) {
  const int64_t offset = i * t.strides[0];
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[offset] : static_cast<const int32_t*>(t.data)[offset];
}

struct TokenRange {
  int64_t begin = 0, end = 0;
  bool legal = true;  // false: an inert sequence. An empty legal sequence still copies its state from in to out
  constexpr int64_t length() const { return end - begin; }
};

// Longest sequence the host may assume.
WEFT_HOST_DEVICE inline int64_t max_tokens(const Sequences& s, int64_t tokens) {
  if (s.cu_seqlens.present()) return s.max_tokens < tokens ? s.max_tokens : tokens;
  return s.count > 0 ? tokens / s.count : 0;
}

// Tokens of sequence n; empty and not legal when its bounds are illegal (the sequence is inert).
// `each` is max_tokens() of the call: kernels are given it, since divisions of 64 bits are slow on devices.
WEFT_EXEC_UNCHECKED template <class Bounds>  // Sequences, or a kernel's view of them
WEFT_HOST_DEVICE inline TokenRange tokens_of(const Bounds& s, int64_t n, int64_t tokens, int64_t each) {
  if (!s.cu_seqlens.present()) return {n * each, (n + 1) * each};
  const TokenRange range{index_at(s.cu_seqlens, n), index_at(s.cu_seqlens, n + 1)};
  const bool legal = range.begin >= 0 && range.end >= range.begin && range.end <= tokens && range.length() <= s.max_tokens;
  return legal ? range : TokenRange{0, 0, false};
}

inline TokenRange tokens_of(const Sequences& s, int64_t n, int64_t tokens) {
  return tokens_of(s, n, tokens, max_tokens(s, tokens));
}

// Slot of sequence n in a pool of `slots`, or -1 for inert.
WEFT_EXEC_UNCHECKED template <class Indices>
WEFT_HOST_DEVICE inline int64_t slot_of(const Indices& indices, int64_t n, int64_t slots) {
  const int64_t slot = indices.present() ? index_at(indices, n) : n;
  return slot >= 0 && slot < slots ? slot : -1;
}

// Chunk rows that come before each sequence: call in order n = 0, 1, ...
WEFT_HOST_DEVICE inline int64_t chunks_of(const TokenRange& range, int64_t chunk) { return (range.length() + chunk - 1) / chunk; }

}  // namespace weft
