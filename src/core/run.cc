// The only path from a public call to a backend: validate, find the backend, supports, scratch, launch.
#include <cstdint>
#include <string>

#include "core/backend.h"
#include "core/check.h"

namespace weft {
namespace {

template <class Args>
Status supports_on(const Stream& stream, const Args& args, const char* op, OpRow<Args> BackendTable::*row) {
  if (Status status = validate(args); !status) return status;
  if (Status status = check_stream(stream, op); !status) return status;
  const BackendTable& table = *find_backend(stream.backend);
  if (Status status = check_place(op, args, table.place, stream); !status) return status;
  const OpRow<Args>& entry = table.*row;
  if (!entry.launch)
    return fail(Code::unsupported, op, "stream",
                std::string("backend ") + backend_name(stream.backend) + " does not offer this op");
  return entry.supports ? entry.supports(stream, args) : Status{};
}

template <class Args>
const OpRow<Args>& supported_row(const Stream& stream, const Args& args, const char* op, OpRow<Args> BackendTable::*row) {
  if (Status status = supports_on(stream, args, op, row); !status) throw Error(std::move(status));
  return find_backend(stream.backend)->*row;
}

template <class Args>
Choice choose_on(const Stream& stream, const Args& args, const char* op, OpRow<Args> BackendTable::*row) {
  const OpRow<Args>& entry = supported_row(stream, args, op, row);
  if (entry.choose) return entry.choose(stream, args);
  return {std::string(backend_name(stream.backend)) + "." + op, "one kernel for every shape"};
}

template <class Args>
size_t scratch_bytes_on(const Stream& stream, const Args& args, const char* op, OpRow<Args> BackendTable::*row) {
  const OpRow<Args>& entry = supported_row(stream, args, op, row);
  return entry.scratch_bytes ? entry.scratch_bytes(stream, args) : 0;
}

template <class Args>
void run_on(const Stream& stream, const Args& args, Scratch scratch, const char* op, OpRow<Args> BackendTable::*row) {
  const OpRow<Args>& entry = supported_row(stream, args, op, row);
  const size_t need = entry.scratch_bytes ? entry.scratch_bytes(stream, args) : 0;
  if (need > 0) {
    if (scratch.bytes < need || !scratch.data)
      throw Error(fail(Code::scratch_too_small, op, "scratch",
                       "has " + std::to_string(scratch.bytes) + " bytes, scratch_bytes() wants " + std::to_string(need)));
    if (reinterpret_cast<uintptr_t>(scratch.data) % kScratchAlignment != 0)
      throw Error(
          fail(Code::scratch_too_small, op, "scratch", "is not aligned to " + std::to_string(kScratchAlignment) + " bytes"));
  }
  entry.launch(stream, args, scratch);
}

}  // namespace

#define WEFT_DEFINE(name, Args)                                                                                             \
  Status supports(const Stream& stream, const Args& args) { return supports_on(stream, args, #name, &BackendTable::name); } \
  Choice choose(const Stream& stream, const Args& args) { return choose_on(stream, args, #name, &BackendTable::name); }     \
  size_t scratch_bytes(const Stream& stream, const Args& args) {                                                            \
    return scratch_bytes_on(stream, args, #name, &BackendTable::name);                                                      \
  }                                                                                                                         \
  void name(const Stream& stream, const Args& args, Scratch scratch) { run_on(stream, args, scratch, #name, &BackendTable::name); }
WEFT_FOR_EACH_OP(WEFT_DEFINE)
#undef WEFT_DEFINE

}  // namespace weft
