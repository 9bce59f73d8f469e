// The table of cases: every op has cases, and every case of the fast tier passes on the reference and on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "cases/options.h"
#include "cases/verify.h"

namespace weft::cases {
namespace {

TEST(CaseTable, EveryOpHasCases) {
  for (const std::string& op : op_names()) {
    const auto of = [&](auto&& test) {
      return std::count_if(all_cases().begin(), all_cases().end(), [&](const Case& c) { return c.op == op && test(c); });
    };
    EXPECT_GT(of([](const Case& c) { return c.tier == Tier::fast && c.golden.empty(); }), 3) << op;
  }
}

TEST(CaseTable, NamesAreUnique) {
  std::set<std::pair<std::string, std::string>> seen;
  for (const Case& item : all_cases()) EXPECT_TRUE(seen.insert({item.op, item.name}).second) << item.op << " " << item.name;
}

TEST(CaseTable, BenchCasesBuildAtSmallSizes) {
  for (const Case& item : all_cases()) {
    if (item.tier < Tier::bench) continue;
    const Options options(item.options);
    std::string smaller;
    for (const auto& [key, value] : options.given())
      if (const char* cap = key == "N"                                            ? "8"
                            : key == "T" || key == "context" || key == "capacity" ? "64"
                                                                                  : nullptr;
          cap && std::stoll(value) > std::stoll(cap))
        smaller += (smaller.empty() ? "" : ",") + key + "=" + cap;
    const std::unique_ptr<Problem> problem = build(item, smaller);
    EXPECT_TRUE(problem->supports({Backend::reference}) || item.options.find("lanes") != std::string::npos)
        << item.op << " " << item.name;
    EXPECT_GT(problem->work.read_bytes + problem->work.written_bytes, 0) << item.op << " " << item.name;
  }
}

// `weft check` has no cases of delta_mixer. `weft bench` compares its results before it times them; this test does the same.
TEST(CaseTable, TheMixerIsWhatItsOpsGive) {
  for (const char* options : {"T=5,N=2,Dk=16", "T=40,N=2,Dk=16,dtype=bf16", "lens=0:70:3,Dk=16,state=f16"}) {
    Checker checker(build({"delta_mixer", "shape", options, Tier::bench, ""}));
    for (Isa isa : usable_isas()) {
      Stream stream{Backend::cpu};
      stream.isa = isa;
      const Outcome outcome = checker.check(stream);
      EXPECT_EQ(outcome.verdict, Verdict::passed) << options << " on " << isa_name(isa) << ": " << outcome.why << ", error "
                                                  << outcome.error << ", bound " << outcome.bound;
    }
  }
}

TEST(CaseTable, GoldenFilesGiveCases) {
  std::set<std::string> ops;
  size_t cases = 0;
  for (const Case& item : all_cases())
    if (!item.golden.empty()) {
      ops.insert(item.op);
      ++cases;
    }
  EXPECT_GT(cases, 100u);
  EXPECT_GE(ops.size(), 20u);
  for (const char* op : {"delta_gates", "l2_norm", "gated_rms_norm", "chunk_cumsum", "chunk_kkt", "chunk_wu"})
    EXPECT_TRUE(ops.contains(op)) << op << " has no second formulation, only golden data can pin it";
}

// Reasons for which a case may be skipped.
bool known_reason(const std::string& why) { return why == kTruth || why.ends_with("does not offer this op"); }

class EveryCase : public testing::TestWithParam<std::string> {};

// Only the best instruction set is checked thoroughly. The other sets differ in their kernels alone, which one run checks.
// Sanitizer builds are slow, so they run every case once.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr Depth kBestDepth = Depth::once;
#else
constexpr Depth kBestDepth = Depth::thorough;
#endif

TEST_P(EveryCase, Passes) {
  for (const Case& item : all_cases()) {
    if (item.op != GetParam() || item.tier != Tier::fast) continue;
    Checker checker(build(item));
    const auto check = [&](const Stream& stream, Depth depth) {
      const Outcome outcome = checker.check(stream, depth);
      const std::string where = item.name + " on " + backend_name(stream.backend) + " " + isa_name(stream.isa);
      EXPECT_NE(outcome.verdict, Verdict::failed)
          << where << ": " << outcome.why << ", error " << outcome.error << ", bound " << outcome.bound;
      EXPECT_TRUE(outcome.verdict != Verdict::skipped || known_reason(outcome.why)) << where << ": " << outcome.why;
    };
    check({Backend::reference}, kBestDepth);
    Depth depth = kBestDepth;
    for (Isa isa : usable_isas()) {
      Stream stream{Backend::cpu};
      stream.isa = isa;
      check(stream, depth);
      depth = Depth::once;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, EveryCase, testing::ValuesIn(op_names()), [](const auto& op) { return op.param; });

}  // namespace
}  // namespace weft::cases
