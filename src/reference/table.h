// The entries of the reference backend's table: <op>_entry() for every op, defined beside its loops.
#pragma once

#include "core/backend.h"

namespace weft::reference {

WEFT_DECLARE_ENTRIES

}  // namespace weft::reference
