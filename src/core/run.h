// run_lending: a call that asks for its scratch once the plan is made, for callers that keep scratch of their own.
#pragma once

#include "core/backend.h"

namespace weft {

#define WEFT_RUN(name, Args) void run(const Stream& stream, const Args& args, Lender lend);
WEFT_FOR_EACH_OP(WEFT_RUN)
#undef WEFT_RUN

// Performs the op of `args`: validates and plans once, then lend(bytes) must give a Scratch of at least so many bytes, aligned to
// kScratchAlignment. With 0 bytes it is not asked.
template <class Args, class Lend>
void run_lending(const Stream& stream, const Args& args, Lend&& lend) {
  run(stream, args, Lender(lend));
}

}  // namespace weft
