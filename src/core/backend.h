// Backend tables: what a backend defines to offer an op.
#pragma once

#include "core/op_list.h"

namespace weft {

// What `weft ops` prints of an op on a backend.
struct Limits {
  const char* dtypes = "";    // "f32 f16 bf16"
  const char* shapes = "";    // which of the legal shapes: "all", or what is left out
  Speed speed = Speed::fast;  // of an op with one kernel for every shape
};

inline constexpr Limits kAllFloats{"f32 f16 bf16", "all"};
inline constexpr Limits kOnlyF32{"f32", "all"};

// Lends scratch for a call that is about to launch: a reference to a callable, bytes -> Scratch.
class Lender {
 public:
  template <class F>
  explicit Lender(F& lend)
      : object_(&lend),
        call_([](const void* object, size_t bytes) -> Scratch { return (*static_cast<F*>(const_cast<void*>(object)))(bytes); }) {}
  Scratch operator()(size_t bytes) const { return call_(object_, bytes); }

 private:
  const void* object_;
  Scratch (*call_)(const void* object, size_t bytes);
};

// Where the tensors of a backend's calls live.
constexpr Place place_of(Backend backend) {
  return backend == Backend::cuda ? Place::cuda : backend == Backend::vulkan ? Place::vulkan : Place::host;
}

// One entry per op. An entry without `run` means that the backend does not offer the op: it is refused with a sentence.
// validate(), the stream and the place of the tensors were checked before any of these functions is called.
template <class Args>
struct OpEntry {
  Limits limits{};
  Status (*supports)(const Stream& stream, const Args& args) = nullptr;       // null: everything legal is supported
  Choice (*choose)(const Stream& stream, const Args& args) = nullptr;         // null: "<backend>.<op>"
  size_t (*scratch_bytes)(const Stream& stream, const Args& args) = nullptr;  // null: 0
  // Plans, asks for the scratch that the plan wants, launches.
  void (*run)(const Stream& stream, const Args& args, Lender lend) = nullptr;

  bool offered() const { return run != nullptr; }
};

namespace detail {
template <class F>
struct PlanFunction;
template <class P, class A>
struct PlanFunction<P (*)(const Stream&, const A&)> {
  using Plan = P;
  using Args = A;
};
template <class F>
struct LaunchFunction;
template <class A>
struct LaunchFunction<void (*)(const Stream&, const A&)> {
  using Args = A;
};
}  // namespace detail

// The entry of an op that plans once per call, from three functions:
//   Plan plan(const Stream&, const Args&)                               all decisions of a call. Has a member scratch_bytes
//   Choice describe(const Stream&, const Args&, const Plan&)            the plan in words; nullptr: one kernel for every shape
//   void launch(const Stream&, const Args&, const Plan&, Scratch)       carries it out
// choose(), scratch_bytes() and the call itself are views of that one plan. A Plan is a value and owns no memory.
template <auto plan, auto describe, auto launch>
auto entry(Limits limits, Status (*supports)(const Stream&, const typename detail::PlanFunction<decltype(plan)>::Args&) = nullptr) {
  using Args = typename detail::PlanFunction<decltype(plan)>::Args;
  OpEntry<Args> made;
  made.limits = limits;
  made.supports = supports;
  if constexpr (!std::is_same_v<decltype(describe), std::nullptr_t>)
    made.choose = [](const Stream& stream, const Args& args) { return describe(stream, args, plan(stream, args)); };
  made.scratch_bytes = [](const Stream& stream, const Args& args) -> size_t { return plan(stream, args).scratch_bytes; };
  made.run = [](const Stream& stream, const Args& args, Lender lend) {
    const auto planned = plan(stream, args);
    launch(stream, args, planned, lend(planned.scratch_bytes));
  };
  return made;
}

// The entry of an op that has nothing to plan and wants no scratch: launch(stream, args).
template <auto launch>
auto entry(Limits limits) {
  using Args = typename detail::LaunchFunction<decltype(launch)>::Args;
  OpEntry<Args> made;
  made.limits = limits;
  made.run = [](const Stream& stream, const Args& args, Lender) { launch(stream, args); };
  return made;
}

struct BackendTable {
  Place place = Place::host;
  // Are the stream's device, isa and so on there? Asked before any entry.
  Status (*check_stream)(const Stream& stream, const char* op) = nullptr;
  void (*list_devices)(std::vector<DeviceInfo>& devices) = nullptr;
#define WEFT_ENTRY(name, Args) OpEntry<Args> name{};
  WEFT_FOR_EACH_OP(WEFT_ENTRY)
#undef WEFT_ENTRY
};

// In the namespace of a backend: declares <op>_entry() for every op of the list. The backend defines each beside its kernels, or
// says WEFT_NOT_OFFERED(op, Args) in its table.cc.
#define WEFT_DECLARE_ENTRY(op, Args) OpEntry<Args> op##_entry();
#define WEFT_DECLARE_ENTRIES WEFT_FOR_EACH_OP(WEFT_DECLARE_ENTRY)
#define WEFT_NOT_OFFERED(op, Args) \
  OpEntry<Args> op##_entry() { return {}; }
// Fills `table` with them.
#define WEFT_FILL_ENTRY(op, Args) table.op = op##_entry();
#define WEFT_FILL_ENTRIES WEFT_FOR_EACH_OP(WEFT_FILL_ENTRY)

// Null when the build has no such backend.
const BackendTable* reference_backend();
const BackendTable* cpu_backend();
const BackendTable* cuda_backend();
const BackendTable* vulkan_backend();
const BackendTable* find_backend(Backend backend);

// Is the backend there, and can it compute on the stream, whatever the op? `op` begins the sentence.
Status check_stream(const Stream& stream, const char* op);

// Visits (name, limits) of every op, in list order; null limits: the table does not offer it.
template <class F>
void for_each_entry(const BackendTable& table, F&& visit) {
#define WEFT_VISIT(name, Args) visit(#name, table.name.offered() ? &table.name.limits : nullptr);
  WEFT_FOR_EACH_OP(WEFT_VISIT)
#undef WEFT_VISIT
}

}  // namespace weft
