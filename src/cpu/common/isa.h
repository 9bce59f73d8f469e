// Instruction sets of the cpu backend: which ones the machine has, and dispatch to kernels compiled for them.
#pragma once

#include "cpu/common/targets.h"  // before Highway: selects its targets

#include <hwy/highway.h>

#include <vector>

#include "weft/device.h"
#include "weft/status.h"

namespace weft::cpu {

// Instruction sets that this build contains and this machine supports, best first.
const std::vector<Isa>& available_isas();

// Resolves Isa::best to the best available set; returns any other set unchanged.
Isa resolve_isa(Isa isa);

// Refuses an instruction set that is not available.
Status check_isa(const Stream& stream, const char* op);

// The instruction set whose kernels run for `isa`, as the compiled code itself reports it.
Isa isa_of_kernels(Isa isa);

// Highway's target bits of an available instruction set.
int64_t isa_targets(Isa isa);

// Index of the targets of `isa` in Highway's dispatch tables. Call it only from the file that defines the
// table.
inline size_t table_index(Isa isa) {
  hwy::ChosenTarget chosen;
  chosen.Update(isa_targets(isa));
  return chosen.GetIndex();
}

}  // namespace weft::cpu

// The kernel `function` for an instruction set. The same file and namespace must export it with HWY_EXPORT. The choice is made per
// call, whereas HWY_DYNAMIC_DISPATCH makes it per process.
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
#define WEFT_KERNEL(isa, function) ((void)(isa), HWY_DISPATCH_TABLE(function)[0])
#else
#define WEFT_KERNEL(isa, function) HWY_DISPATCH_TABLE(function)[::weft::cpu::table_index(isa)]
#endif
