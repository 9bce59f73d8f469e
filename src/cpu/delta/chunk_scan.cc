// Walks of the gated delta rule, compiled for every target.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta/chunk_scan.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/delta/chunk_scan-inl.h"

#if HWY_ONCE

#include <algorithm>

#include "cpu/common/isa.h"
#include "cpu/delta/chunk_scan.h"

namespace weft::cpu {

HWY_EXPORT(delta_walk);
HWY_EXPORT(delta_walk_bytes);
HWY_EXPORT(delta_column_unit);

WalkCut cut_walks(Isa isa, const DeltaHeads& heads, int64_t columns, int64_t sequences, int threads) {
  // Value heads of a key head share its products, so whole groups are best, as long as their states stay in a second-level cache.
  constexpr int64_t kGroupStates = 8;
  const int64_t unit = WEFT_KERNEL(isa, delta_column_unit)();
  WalkCut cut;
  cut.heads = std::min(heads.group(), kGroupStates);
  cut.columns = cut.all_columns = columns;
  const auto pieces = [&] {
    cut.head_pieces = (heads.group() + cut.heads - 1) / cut.heads;
    cut.column_pieces = (columns + cut.columns - 1) / cut.columns;
    return sequences * heads.Hk * cut.head_pieces * cut.column_pieces;
  };
  // Too few pieces, or an uneven last round: cut finer.
  const auto uneven = [&] { return pieces() < 4 * threads && pieces() % threads != 0; };
  while (cut.heads > 1 && uneven()) cut.heads = (cut.heads + 1) / 2;
  while (cut.columns > unit && uneven()) cut.columns = (cut.columns / 2 + unit - 1) / unit * unit;
  pieces();
  cut.bytes = WEFT_KERNEL(isa, delta_walk_bytes)(heads, cut.heads, cut.columns);
  return cut;
}

void run_walk(Isa isa, const DeltaTokens& tokens, const DeltaWalk& walk, void* memory) {
  WEFT_KERNEL(isa, delta_walk)(tokens, walk, memory);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
