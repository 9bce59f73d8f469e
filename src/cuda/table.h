// The entries of the cuda backend's table: <op>_row() for every op, defined where the op is implemented and entered in table.cc.
#pragma once

#include "core/backend.h"
#include "core/op_list.h"

namespace weft::cuda {

#define WEFT_DECLARE_ROW(op, Args) OpRow<Args> op##_row();
WEFT_FOR_EACH_OP(WEFT_DECLARE_ROW)
#undef WEFT_DECLARE_ROW

}  // namespace weft::cuda
