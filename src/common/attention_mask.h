// Which positions a query may see, and its own position: the reading of AttentionMask and AttentionQueries that all backends share.
#pragma once

#include <cstdint>
#include <limits>

#include "common/kv_index.h"
#include "weft/compressed_attention.h"

namespace weft {

// Tokens appended to sequence n; a linear or paged cache cannot hold more than its rows; a ring takes any number.
WEFT_EXEC_UNCHECKED template <class Cache>
WEFT_HOST_DEVICE int64_t appended_tokens(const Cache& cache, int64_t n) {
  const int64_t length = index_at(cache.lengths, n);
  return cache.kind == CacheKind::ring ? length : live_tokens(cache, length);
}

// Position of packed token t, which belongs to a sequence of `range` with `appended` tokens in its cache.
WEFT_EXEC_UNCHECKED template <class Queries>  // AttentionQueries, or a kernel's view of them
WEFT_HOST_DEVICE int64_t query_position(const Queries& queries, const TokenRange& range, int64_t appended, int64_t t) {
  return queries.positions.present() ? index_at(queries.positions, t) : appended - (range.end - t);
}

// Positions [first, end) that a query at `position` may see; positions are 32-bit numbers, so a wider window masks nothing.
struct VisiblePositions {
  int64_t first = 0, end = 0;
  constexpr bool has(int64_t position) const { return position >= first && position < end; }
};
constexpr VisiblePositions visible_positions(bool causal, int64_t window, int64_t position) {  // window 0: none
  VisiblePositions seen{0, std::numeric_limits<int64_t>::max()};
  if (causal) seen.end = position + 1;
  if (window > 0 && window <= std::numeric_limits<uint32_t>::max()) seen.first = position - window + 1;
  return seen;
}
constexpr VisiblePositions visible_positions(const AttentionMask& mask, int64_t position) {
  return visible_positions(mask.causal, mask.window.value_or(0), position);
}

}  // namespace weft
