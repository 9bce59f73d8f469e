// The table of cases: every op has rows, and every case of the fast tier passes on the reference and on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "cases/options.h"
#include "cases/verify.h"

namespace weft::cases {
namespace {

TEST(CaseTable, EveryOpHasRows) {
  for (const std::string& op : op_names()) {
    const auto of = [&](auto&& test) {
      return std::count_if(all_cases().begin(), all_cases().end(), [&](const Case& c) { return c.op == op && test(c); });
    };
    EXPECT_GT(of([](const Case& c) { return c.tier == Tier::fast && c.golden.empty(); }), 3) << op;
  }
}

TEST(CaseTable, NamesAreUnique) {
  std::set<std::pair<std::string, std::string>> seen;
  for (const Case& row : all_cases()) EXPECT_TRUE(seen.insert({row.op, row.name}).second) << row.op << " " << row.name;
}

TEST(CaseTable, BenchRowsBuildAsSmallTwins) {
  for (const Case& row : all_cases()) {
    if (row.tier < Tier::bench) continue;
    const Options options(row.options);
    std::string smaller;
    for (const auto& [key, value] : options.given())
      if (const char* cap = key == "N"                                            ? "8"
                            : key == "T" || key == "context" || key == "capacity" ? "64"
                                                                                  : nullptr;
          cap && std::stoll(value) > std::stoll(cap))
        smaller += (smaller.empty() ? "" : ",") + key + "=" + cap;
    const std::unique_ptr<Problem> problem = build(row, smaller);
    EXPECT_TRUE(problem->supports({Backend::reference}) || row.options.find("lanes") != std::string::npos)
        << row.op << " " << row.name;
    EXPECT_GT(problem->work.read_bytes + problem->work.written_bytes, 0) << row.op << " " << row.name;
  }
}

// Several ops in a row have cases to time, not to check; what they check before they are timed is checked here.
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
  for (const Case& row : all_cases())
    if (!row.golden.empty()) {
      ops.insert(row.op);
      ++cases;
    }
  EXPECT_GT(cases, 100u);
  EXPECT_GE(ops.size(), 20u);
  for (const char* op : {"delta_gates", "l2_norm", "gated_rms_norm", "chunk_cumsum", "chunk_kkt", "chunk_wu"})
    EXPECT_TRUE(ops.contains(op)) << op << " has no second formulation, only golden data can pin it";
}

// Reasons for which a case may say nothing about a backend.
bool known_reason(const std::string& why) { return why == kTruth || why.ends_with("does not offer this op"); }

class EveryCase : public testing::TestWithParam<std::string> {};

// What is checked thoroughly on the best instruction set is the same code on the others, except for the kernels, which one run shows.
// Sanitizers watch one run of everything; the bits are compared by the builds that are fast enough.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr Depth kBestDepth = Depth::once;
#else
constexpr Depth kBestDepth = Depth::thorough;
#endif

TEST_P(EveryCase, Passes) {
  for (const Case& row : all_cases()) {
    if (row.op != GetParam() || row.tier != Tier::fast) continue;
    Checker checker(build(row));
    const auto check = [&](const Stream& stream, Depth depth) {
      const Outcome outcome = checker.check(stream, depth);
      const std::string where = row.name + " on " + backend_name(stream.backend) + " " + isa_name(stream.isa);
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
