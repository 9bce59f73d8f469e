// What a legal call of an op may have for shapes, in words: the limits that validate() enforces on every backend.
#pragma once

#include <string>

#include "core/op_list.h"

namespace weft {

// Each is defined beside validate() of the same argument struct; the arguments only pick the op.
#define WEFT_LEGAL_SHAPES(name, Args) std::string legal_shapes(const Args&);
WEFT_FOR_EACH_OP(WEFT_LEGAL_SHAPES)
#undef WEFT_LEGAL_SHAPES

}  // namespace weft
