// The four questions and the one call that every op offers.
#pragma once

#include "weft/device.h"
#include "weft/status.h"
#include "weft/tensor.h"

// For an op `name` with argument struct `Args` this declares
//   Status validate(args)               pure: are the arguments consistent, whatever the backend? Names the first fault.
//   Status supports(stream, args)       pure: validate, then: can this backend compute it, and if not, why?
//   Choice choose(stream, args)         pure: the kernel that would run and its plan. Throws Error if not supported.
//   size_t scratch_bytes(stream, args)  pure: bytes to lend. Depends on sizes, dtypes and options, never on data.
//   void name(stream, args, scratch)    validate -> backend -> supports -> scratch -> launch. Throws Error; writes nothing then.
// All five are thread-safe and keep no state that changes a result. Ops on cpu and cuda never allocate memory of the device, never
// copy to the host and never synchronise. The reference backend, being the specification, may allocate host memory for its working
// rows. Alignment: weft/tensor.h, and weft/device.h for scratch; an op that wants more says so.
// ABI: argument structs may grow at the end between minor versions; relink C++ callers, or use weft/c.h, which is stable.
#define WEFT_OP(name, Args)                                     \
  Status validate(const Args& args);                            \
  Status supports(const Stream& stream, const Args& args);      \
  Choice choose(const Stream& stream, const Args& args);        \
  size_t scratch_bytes(const Stream& stream, const Args& args); \
  void name(const Stream& stream, const Args& args, Scratch scratch = {})
