// The path of a call: one plan, scratch that is lent once the plan is known, and checks that do not allocate.
#include "core/run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "cases/builders.h"
#include "cases/table.h"

namespace {
std::atomic<int64_t> allocations{0};
}

#if !WEFT_SANITIZED
void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace weft {
namespace {

// A backend of one op that counts what it is asked.
struct Counts {
  int plans = 0, launches = 0;
  size_t lent = 0;
} counts;

struct CountingPlan {
  size_t scratch_bytes = 0;
  int number = 0;
};
CountingPlan make_plan(const Stream& stream, const L2NormArgs&) { return {static_cast<size_t>(stream.device), ++counts.plans}; }
Choice describe_plan(const Stream&, const L2NormArgs&, const CountingPlan& plan) {
  return {"test.l2_norm", "plan " + std::to_string(plan.number)};
}
void launch(const Stream&, const L2NormArgs&, const CountingPlan& plan, Scratch scratch) {
  EXPECT_EQ(plan.number, counts.plans);
  ++counts.launches;
  counts.lent = scratch.bytes;
}

TEST(Entry, PlansOnceForEveryQuestionAndForTheCall) {
  const OpEntry<L2NormArgs> made = entry<make_plan, describe_plan, launch>(kOnlyF32);
  Stream stream;
  stream.device = 4096;  // what the plan takes for scratch
  counts = {};
  EXPECT_TRUE(made.offered());
  EXPECT_EQ(made.choose(stream, {}).plan, "plan 1");
  EXPECT_EQ(made.scratch_bytes(stream, {}), 4096u);
  EXPECT_EQ(counts.plans, 2);
  const auto lend = [](size_t bytes) { return Scratch{nullptr, bytes}; };
  made.run(stream, {}, Lender(lend));
  EXPECT_EQ(counts.plans, 3);
  EXPECT_EQ(counts.launches, 1);
  EXPECT_EQ(counts.lent, 4096u);
}

WEFT_NOT_OFFERED(l2_norm, L2NormArgs)

TEST(Entry, OfAnOpThatIsNotOffered) { EXPECT_FALSE(l2_norm_entry().offered()); }

TEST(RunLending, LendsWhatScratchBytesSays) {
  const auto problem = cases::build({"chunk_tri_inverse", "test", "T=70,Hv=2", cases::Tier::fast, ""});
  const ChunkTriInverseArgs args = dynamic_cast<const cases::OpProblem<ChunkTriInverseArgs>&>(*problem).args;
  const Stream stream;
  const size_t need = scratch_bytes(stream, args);
  ASSERT_GT(need, 0u);
  cases::Memory memory;
  size_t asked = 0;
  run_lending(stream, args, [&](size_t bytes) {
    asked = bytes;
    return Scratch{memory.bytes(bytes), bytes};
  });
  EXPECT_EQ(asked, need);
  try {
    run_lending(stream, args, [&](size_t bytes) { return Scratch{memory.bytes(bytes), bytes - 1}; });
    FAIL() << "too little scratch is not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code, Code::scratch_too_small);
  }
}

TEST(RunLending, DoesNotAskWhereNothingIsWanted) {
  cases::Memory memory;
  const L2NormArgs args{memory.make(DType::f32, {2, 4}), memory.make(DType::f32, {2, 4})};
  cases::fill(args.x, 2);
  run_lending(Stream{}, args, [](size_t) -> Scratch { throw std::logic_error("nothing is wanted"); });
  EXPECT_FLOAT_EQ(static_cast<float>(cases::get(args.y, 0)), 0.5f);
}

// What every call does before it launches: no text, no memory.
template <class Args>
void expect_no_allocation(const char* op) {
  int count = 0;
  for (const cases::Case& row : cases::all_cases()) {
    if (row.op != op || row.tier != cases::Tier::fast) continue;
    const std::unique_ptr<cases::Problem> problem = cases::build(row);
    const Args& args = dynamic_cast<const cases::OpProblem<Args>&>(*problem).args;
    const Stream stream{Backend::reference};
    const int64_t before = allocations;
    const bool good = validate(args).ok() && supports(stream, args).ok() && scratch_bytes(stream, args) == 0;
    EXPECT_EQ(allocations - before, 0) << row.op << " " << row.name;
    EXPECT_TRUE(good) << row.op << " " << row.name;
    ++count;
  }
  EXPECT_GT(count, 0) << op;
}

#define WEFT_NO_ALLOCATION(name, Args) \
  TEST(NoAllocation, name) { expect_no_allocation<Args>(#name); }
WEFT_FOR_EACH_OP(WEFT_NO_ALLOCATION)
#undef WEFT_NO_ALLOCATION

}  // namespace
}  // namespace weft
