// The only path from a public call to a backend: validate, check stream and place, supports, plan, scratch, launch.
#include "core/run.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/descriptions.h"

namespace weft {
namespace {

template <class Args>
Status supports_on(const Stream& stream, const Args& args, const char* op, OpEntry<Args> BackendTable::*member) {
  if (Status status = validate(args); !status) return status;
  if (Status status = check_stream(stream, op); !status) return status;
  const BackendTable& table = *find_backend(stream.backend);
  if (Status status = check_place(op, args, table.place, stream); !status) return status;
  const OpEntry<Args>& entry = table.*member;
  if (!entry.offered())
    return fail(Code::unsupported, op, "stream",
                std::string("backend ") + backend_name(stream.backend) + " does not offer this op");
  return entry.supports ? entry.supports(stream, args) : Status{};
}

template <class Args>
const OpEntry<Args>& supported_entry(const Stream& stream, const Args& args, const char* op, OpEntry<Args> BackendTable::*member) {
  if (Status status = supports_on(stream, args, op, member); !status) throw Error(std::move(status));
  return find_backend(stream.backend)->*member;
}

template <class Args>
Choice choose_on(const Stream& stream, const Args& args, const char* op, OpEntry<Args> BackendTable::*member) {
  const OpEntry<Args>& entry = supported_entry(stream, args, op, member);
  Choice choice{std::string(backend_name(stream.backend)) + "." + op, "one kernel for every shape", entry.limits.speed};
  if (entry.choose) choice = entry.choose(stream, args);
  if (stream.backend == Backend::reference) choice.speed = Speed::slow;  // loops in double
  if (choice.kernel.ends_with(".scalar")) choice.speed = std::max(choice.speed, Speed::portable);
  return choice;
}

template <class Args>
size_t scratch_bytes_on(const Stream& stream, const Args& args, const char* op, OpEntry<Args> BackendTable::*member) {
  const OpEntry<Args>& entry = supported_entry(stream, args, op, member);
  return entry.scratch_bytes ? entry.scratch_bytes(stream, args) : 0;
}

// What is lent must hold what the plan wants.
Scratch checked(Scratch scratch, size_t need, const char* op) {
  if (need == 0) return scratch;
  if (scratch.bytes < need || !scratch.data)
    throw Error(fail(Code::scratch_too_small, op, "scratch",
                     "has " + std::to_string(scratch.bytes) + " bytes, scratch_bytes() wants " + std::to_string(need)));
  if (reinterpret_cast<uintptr_t>(scratch.data) % kScratchAlignment != 0)
    throw Error(fail(Code::scratch_too_small, op, "scratch", "is not aligned to " + std::to_string(kScratchAlignment) + " bytes"));
  return scratch;
}

template <class Args, class Lend>
void run_on(const Stream& stream, const Args& args, const char* op, OpEntry<Args> BackendTable::*member, const Lend& lend) {
  const OpEntry<Args>& entry = supported_entry(stream, args, op, member);
  const auto lent = [&](size_t bytes) { return checked(lend(bytes), bytes, op); };
  entry.run(stream, args, Lender(lent));
}

}  // namespace

#define WEFT_DEFINE(name, Args)                                                                                             \
  Status supports(const Stream& stream, const Args& args) { return supports_on(stream, args, #name, &BackendTable::name); } \
  Choice choose(const Stream& stream, const Args& args) { return choose_on(stream, args, #name, &BackendTable::name); }     \
  size_t scratch_bytes(const Stream& stream, const Args& args) {                                                            \
    return scratch_bytes_on(stream, args, #name, &BackendTable::name);                                                      \
  }                                                                                                                         \
  void name(const Stream& stream, const Args& args, Scratch scratch) {                                                      \
    run_on(stream, args, #name, &BackendTable::name, [&](size_t) { return scratch; });                                      \
  }                                                                                                                         \
  void run(const Stream& stream, const Args& args, Lender lend) {                                                           \
    run_on(stream, args, #name, &BackendTable::name, [&](size_t bytes) { return bytes > 0 ? lend(bytes) : Scratch{}; });    \
  }
WEFT_FOR_EACH_OP(WEFT_DEFINE)
#undef WEFT_DEFINE

}  // namespace weft
