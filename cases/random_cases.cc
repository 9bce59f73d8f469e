// Random legal calls of an op: see random_cases.h.
#include "cases/random_cases.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cases/options.h"

namespace weft::cases {
namespace {

// Sizes on both sides of the block sizes of kernels, in the syntax of a grammar.
struct WideRange {
  std::string_view key, values;
};
constexpr WideRange kWide[] = {
    {"T", "0|1|2|3|5|8|15|16|17|31|33|63|64|65|100|128|129|200|257"},
    {"N", "1|2|3|4|5|9"},
    {"H", "1|2|3|5|8"},
    {"Hk", "1|2|3|4"},
    {"Hq", "1|2|3|4|6|7|8|12|16"},
    {"Hv", "1|2|3|4|6|8|12"},
    {"D", "8|16|24|48|64|72|80|96|112|128|192|256|512"},
    {"Dk", "1|4|8|16|20|32|64|100|128|192|256"},
    {"Dv", "1|4|8|16|20|32|64|100|128|192|256"},
    {"C", "1|4|20|64|130|256"},
    {"W", "1|2|3|4|5|8"},
    {"L", "3|4|5|8|16"},
    {"chunk", "16|32|64"},
    {"context", "1|2|31|63|64|65|100|127|129|200|300"},
    {"capacity", "8|16|63|64|128|320"},
    {"window", "1|2|16|64|65|100"},
    {"block", "1|8|16|64|100"},
    {"blocks", "1|2|3|8|17"},
    {"start", "-1|0|1|5|63|64|65"},
    {"dtype", "f32|f16|bf16"},
    {"recipe", "2v2|2v3|3v2|3v3|4v4|4v2|5v3|3v5|6v6|7v4|4v7|8v8|8v4|5v8|bf16|f16v4|4vf16|bf16v8|aura4v4|aura3v2"},
};

std::string one_of(std::string_view alternatives, Rng& rng) {
  for (int64_t skip = rng.integer(0, std::count(alternatives.begin(), alternatives.end(), '|')); skip > 0; --skip)
    alternatives.remove_prefix(alternatives.find('|') + 1);
  return std::string(alternatives.substr(0, alternatives.find('|')));
}

template <class Value>
std::string draw_each(std::string_view grammar, Value&& value) {
  std::string options;
  while (!grammar.empty()) {
    const size_t end = std::min(grammar.find(','), grammar.size());
    const std::string_view option = grammar.substr(0, end), key = option.substr(0, option.find('='));
    grammar.remove_prefix(std::min(end + 1, grammar.size()));
    options += (options.empty() ? "" : ",") + std::string(key) + "=" + value(key, option.substr(key.size() + 1));
  }
  return options;
}

}  // namespace

std::string draw_options(std::string_view grammar, Rng& rng) {
  return draw_each(grammar, [&](std::string_view, std::string_view alternatives) { return one_of(alternatives, rng); });
}

std::string draw_wide_options(std::string_view grammar, Rng& rng) {
  return draw_each(grammar, [&](std::string_view key, std::string_view alternatives) {
    const auto* wide = std::find_if(std::begin(kWide), std::end(kWide), [&](const WideRange& range) { return range.key == key; });
    return one_of(wide != std::end(kWide) && rng.integer(0, 1) == 1 ? wide->values : alternatives, rng);
  });
}

RandomDraw draw_once(const std::string& op, Rng& rng, std::string (*draw)(std::string_view grammar, Rng& rng)) {
  const std::string_view grammar = random_options(op);
  if (grammar.empty()) throw std::runtime_error(op + " has no options to draw arguments from: cases/list_*.cc");
  RandomDraw one{draw(grammar, rng), nullptr, "", false};
  try {
    std::unique_ptr<Problem> problem = build({op, "random", one.options, Tier::fast, ""});
    const Status status = problem->supports(kReference);
    if (status) {
      one.problem = std::move(problem);
    } else {
      one.why = status.message;
      one.by_library = true;
    }
  } catch (const OptionError& error) {
    one.why = error.what();
  } catch (const Error& error) {
    one.why = error.what();
    one.by_library = true;
  }
  return one;
}

RandomDraw draw_call(const std::string& op, Rng& rng, std::string (*draw)(std::string_view grammar, Rng& rng)) {
  for (int attempt = 0; attempt < 1000; ++attempt)
    if (RandomDraw one = draw_once(op, rng, draw); one.problem) return one;
  throw std::runtime_error(op + ": its grammar hardly ever gives legal options");
}

Case random_case(const std::string& op, uint64_t seed, int64_t index) {
  Rng rng(seed * 1000003 + static_cast<uint64_t>(index));
  const RandomDraw call = draw_call(op, rng, draw_wide_options);
  return {op,           "random/" + std::to_string(seed) + "/" + std::to_string(index) + ": " + call.options,
          call.options, Tier::random,
          "",           false,
          rng.next()};
}

}  // namespace weft::cases
