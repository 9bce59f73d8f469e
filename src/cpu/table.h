// The entries of the cpu backend's table. Every op declares <op>_row(); the source of an op that the cpu offers defines it, and
// table.cc enters it.
#pragma once

#include "core/backend.h"
#include "core/op_list.h"

namespace weft::cpu {

#define WEFT_DECLARE_ROW(op, Args) OpRow<Args> op##_row();
WEFT_FOR_EACH_OP(WEFT_DECLARE_ROW)
#undef WEFT_DECLARE_ROW

}  // namespace weft::cpu
