/// The functions that every op offers: four questions and the call.
/// @file
#pragma once

#include "weft/device.h"
#include "weft/status.h"
#include "weft/tensor.h"

/// Declares the five functions of the op `name` with the argument struct `Args`:
///
///     Status validate(args)               are the arguments consistent, whatever the backend? Names the first fault
///     Status supports(stream, args)       validate, then: can this backend compute the call, and if not, why?
///     Choice choose(stream, args)         the kernel that would run and its plan. Throws Error if not supported
///     size_t scratch_bytes(stream, args)  the bytes to lend. Throws Error if not supported
///     void name(stream, args, scratch)    the call. Throws Error; nothing was written then
///
/// The four questions are pure: they read no data and change nothing. scratch_bytes() depends on sizes, dtypes and options, never
/// on data. All five functions are thread-safe and keep no state that changes a result.
///
/// The call checks its arguments, plans once, checks the scratch and launches. No op copies to the host or synchronises, and cpu and
/// cuda never allocate memory of the device; recording on vulkan may, and builds pipelines. Reference may allocate host memory.
///
/// Alignment: weft/tensor.h, and weft/device.h for scratch; an op that wants more says so.
/// ABI: argument structs may grow at the end between minor versions. Relink C++ callers, or use weft/c.h, which is stable.
#define WEFT_OP(name, Args)                                     \
  Status validate(const Args& args);                            \
  Status supports(const Stream& stream, const Args& args);      \
  Choice choose(const Stream& stream, const Args& args);        \
  size_t scratch_bytes(const Stream& stream, const Args& args); \
  void name(const Stream& stream, const Args& args, Scratch scratch = {})
