// Chunk scans of the gated delta rule, compiled for every target.
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

HWY_EXPORT(chunk_scan);
HWY_EXPORT(chunk_scan_bytes);
HWY_EXPORT(scan_column_unit);

ScanSplit split_scans(Isa isa, const DeltaHeads& heads, int64_t columns, int64_t sequences, int threads) {
  // Value heads share the products of their key head, so a task takes whole groups whose states fit into a second-level cache.
  constexpr int64_t kGroupStates = 8;
  const int64_t unit = WEFT_KERNEL(isa, scan_column_unit)();
  ScanSplit split;
  split.heads = std::min(heads.group(), kGroupStates);
  split.columns = split.all_columns = columns;
  const auto count_tasks = [&] {
    split.head_splits = (heads.group() + split.heads - 1) / split.heads;
    split.column_splits = (columns + split.columns - 1) / split.columns;
    return sequences * heads.Hk * split.head_splits * split.column_splits;
  };
  // With few tasks, an uneven last round leaves threads idle: split further.
  const auto uneven = [&] { return count_tasks() < 4 * threads && count_tasks() % threads != 0; };
  while (split.heads > 1 && uneven()) split.heads = (split.heads + 1) / 2;
  while (split.columns > unit && uneven()) split.columns = (split.columns / 2 + unit - 1) / unit * unit;
  count_tasks();
  split.bytes = WEFT_KERNEL(isa, chunk_scan_bytes)(heads, split.heads, split.columns);
  return split;
}

void run_scan(Isa isa, const DeltaTokens& tokens, const ScanTask& task, void* memory) {
  WEFT_KERNEL(isa, chunk_scan)(tokens, task, memory);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
