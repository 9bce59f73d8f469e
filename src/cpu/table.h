// The entries of the cpu backend's table: <op>_entry() for every op, defined beside its kernels.
#pragma once

#include "core/backend.h"

namespace weft::cpu {

WEFT_DECLARE_ENTRIES

}  // namespace weft::cpu
