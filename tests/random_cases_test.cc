// Random legal calls: the library refuses a draw only for the reasons listed here, so that refusing a legal call by mistake is seen, and
// the cpu takes every call that the reference takes.
#include "cases/random_cases.h"

#include <gtest/gtest.h>

#include <cctype>
#include <map>
#include <set>
#include <string>

#include "cases/verify.h"

namespace weft::cases {
namespace {

constexpr int kDraws = 100;  // per op

// The sentence without the op and with # for every number, so that it names a rule and not a draw.
std::string rule_of(const std::string& sentence) {
  std::string rule;
  for (char c : sentence.substr(sentence.find(": ") + 2)) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit) rule += c;
    if (digit && (rule.empty() || rule.back() != '#')) rule += '#';
  }
  return rule;
}

// Why wide options may make a call that is not legal.
const std::set<std::string>& known_rules() {
  static const std::set<std::string> rules = {
      // head counts that do not divide
      "k has # heads, wanted a positive divisor of the # heads of beta",
      "k has # heads, wanted a positive divisor of the # heads of v",
      "kv_heads is #, wanted a positive divisor of Hq=#",
      "queries.q has # heads, wanted a positive multiple of the cache's # KV heads",
      "weights has # heads, wanted a positive multiple of the cache's # KV heads",
      // more tokens than a decode takes
      "sequences.count is #, so each sequence has # of the T=# tokens, wanted at most #",
      "sequences.max_tokens is #, wanted at most #",
      // no state to write
      "states.out is absent, wanted [out slots, Hv=#, K=#, V=#]",
      "states.out is absent, wanted [out slots, Hv=#, V=#, K=#]",
      // pinned tokens outside a ring
      "cache.pinned is #, wanted #, since the cache is not a ring",
      "from.pinned is #, wanted #, since the cache is not a ring",
      // formats that have no tiles in lanes order
      "cache.k.format has head_dim # and a byte per code, wanted a multiple of # and dense codes for tiles in lanes order",
      "cache.k.format has head_dim # and dense codes, wanted a multiple of # and dense codes for tiles in lanes order",
      "cache.v.format has head_dim # and a byte per code, wanted a multiple of # and dense codes for tiles in lanes order",
      "cache.v.format has head_dim # and dense codes, wanted a multiple of # and dense codes for tiles in lanes order",
      "to.k.format has head_dim # and a byte per code, wanted a multiple of # and dense codes for tiles in lanes order",
      "to.k.format has head_dim # and dense codes, wanted a multiple of # and dense codes for tiles in lanes order",
      "to.v.format has head_dim # and a byte per code, wanted a multiple of # and dense codes for tiles in lanes order",
      "to.v.format has head_dim # and dense codes, wanted a multiple of # and dense codes for tiles in lanes order",
      // pages of rows that are no pages of tiles
      "to.k.codes has room for # tokens a block, wanted # as from has",
      "to.v.codes has room for # tokens a block, wanted # as from has",
  };
  return rules;
}

TEST(RandomCases, AreRefusedOnlyByKnownRules) {
  std::map<std::string, std::string> unknown;  // and options that show it
  for (const std::string& op : op_names()) {
    Rng rng(11);
    for (int i = 0; i < kDraws; ++i) {
      const RandomDraw one = draw_once(op, rng, draw_wide_options);
      if (!one.by_library) continue;
      if (const std::string rule = rule_of(one.why); !known_rules().contains(rule)) unknown.emplace(rule, op + " " + one.options);
    }
  }
  for (const auto& [rule, options] : unknown) ADD_FAILURE() << "\"" << rule << "\",  // " << options;
}

TEST(RandomCases, TheCpuTakesWhatTheReferenceTakes) {
  for (const std::string& op : op_names()) {
    Rng rng(12);
    for (int i = 0; i < kDraws / 4; ++i) {
      const RandomDraw call = draw_call(op, rng, draw_wide_options);
      const Status status = call.problem->supports({Backend::cpu});
      EXPECT_TRUE(status) << call.options << ": " << status.message;
    }
  }
}

}  // namespace
}  // namespace weft::cases
