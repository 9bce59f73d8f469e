// The largest sizes that a configuration may name.
#pragma once

#include <cstdint>

namespace weft::model {

// All bounds are far beyond any model. With them, 1024 layers of 4096 experts of 3 * 2^18 * 2^18 f32 weights have less than 2^62
// bytes.
inline constexpr int64_t kMaxVocab = 1 << 24;
inline constexpr int64_t kMaxHidden = 1 << 18;
inline constexpr int64_t kMaxDenseSize = 1 << 20;
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 4096;
inline constexpr int64_t kMaxExperts = 4096;
// For all layers together, because binding takes up to 250 bytes of memory per expert and per key head, however few bytes their
// weights have.
inline constexpr int64_t kMaxAllExperts = 1 << 18, kMaxAllKeyHeads = 1 << 18;
inline constexpr int64_t kMaxPositions = int64_t{1} << 40;

}  // namespace weft::model
