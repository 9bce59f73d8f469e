// Instruction sets of the cpu backend: which the machine has, and calling a kernel compiled for one of them.
#pragma once

#include "cpu/common/targets.h"  // first: decides what Highway builds

#include <hwy/highway.h>

#include <vector>

#include "weft/device.h"
#include "weft/status.h"

namespace weft::cpu {

// Instruction sets that this build holds and this machine runs, best first.
const std::vector<Isa>& available_isas();

// What `isa` means here: `best` resolved, others as they are.
Isa resolve_isa(Isa isa);

// Refuses an instruction set that is not available.
Status check_isa(const Stream& stream, const char* op);

// The instruction set whose kernels really run for `isa`, asked of the compiled code itself.
Isa isa_of_kernels(Isa isa);

// Highway's target bits that an (available) instruction set stands for.
int64_t isa_targets(Isa isa);

// Index of those targets in the dispatch tables of the including file, which must be the one that defines the tables.
inline size_t table_index(Isa isa) {
  hwy::ChosenTarget chosen;
  chosen.Update(isa_targets(isa));
  return chosen.GetIndex();
}

}  // namespace weft::cpu

// The kernel `function`, exported with HWY_EXPORT in this file and namespace, for an instruction set. Unlike HWY_DYNAMIC_DISPATCH the
// choice is per call, not per process.
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
#define WEFT_KERNEL(isa, function) ((void)(isa), HWY_DISPATCH_TABLE(function)[0])
#else
#define WEFT_KERNEL(isa, function) HWY_DISPATCH_TABLE(function)[::weft::cpu::table_index(isa)]
#endif
