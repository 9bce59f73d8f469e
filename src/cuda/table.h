// The entries of the cuda backend's table: <op>_entry() for every op, defined beside its kernels.
#pragma once

#include "core/backend.h"

namespace weft::cuda {

WEFT_DECLARE_ENTRIES

}  // namespace weft::cuda
