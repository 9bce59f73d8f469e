// The table of cases: expands entries, builds cases, matches names.
#include "cases/table.h"

#include <algorithm>

#include "cases/builders.h"
#include "cases/golden.h"
#include "cases/list.h"

namespace weft::cases {
namespace {

// Replaces the first sweep in the options by each of its values.
void expand(const CaseEntry& entry, const std::string& name, const std::string& options, std::vector<Case>& out) {
  const size_t bar = options.find('|');
  if (bar == std::string::npos) {
    out.push_back({entry.op, name, options, entry.tier, ""});
    return;
  }
  const size_t comma = options.rfind(',', bar), begin = comma == std::string::npos ? 0 : comma + 1;
  const size_t equals = options.find('=', begin), end = std::min(options.find(',', bar), options.size());
  const std::string key = options.substr(begin, equals - begin);
  for (size_t at = equals + 1; at <= end;) {
    const size_t stop = std::min(options.find('|', at), end);
    const std::string value = options.substr(at, stop - at);
    expand(entry, name + "/" + key + "=" + value, options.substr(0, equals + 1) + value + options.substr(end), out);
    at = stop + 1;
  }
}

using Builder = std::unique_ptr<Problem> (*)(Options&, Rng&);
struct NamedBuilder {
  const char* op;
  Builder build;
};
constexpr NamedBuilder kBuilders[] = {
#define WEFT_BUILDER(name, Args) {#name, build_##name},
    WEFT_FOR_EACH_OP(WEFT_BUILDER)
#undef WEFT_BUILDER
        {kDeltaMixer, build_delta_mixer},
};

// Does glob match all of text? On a mismatch only the latest star takes more characters: any text that an earlier star could take,
// the latest one can take too.
bool glob_matches(std::string_view glob, std::string_view text) {
  constexpr size_t kNone = std::string_view::npos;
  size_t at = 0, behind_star = kNone, taken = 0;  // positions in glob; taken: end of the star's share of text
  for (size_t i = 0; i < text.size();) {
    if (at < glob.size() && glob[at] == '*') {
      behind_star = ++at;
      taken = i;
    } else if (at < glob.size() && (glob[at] == '?' || glob[at] == text[i])) {
      ++at;
      ++i;
    } else if (behind_star != kNone) {
      at = behind_star;
      i = ++taken;
    } else {
      return false;
    }
  }
  return glob.find_first_not_of('*', at) == kNone;
}

}  // namespace

const std::vector<std::string>& op_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const NamedBuilder& builder : kBuilders)
      if (builder.op != std::string_view(kDeltaMixer)) all.emplace_back(builder.op);
    return all;
  }();
  return names;
}

const std::vector<std::string>& timed_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all = op_names();
    all.emplace_back(kDeltaMixer);
    return all;
  }();
  return names;
}

std::string_view random_options(std::string_view op) {
  for (const std::span<const CaseEntry> entries : {delta_entries(), attention_entries()})
    for (const CaseEntry& entry : entries)
      if (entry.tier == Tier::random && entry.op == op) return entry.options;
  return {};
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all;
    for (const std::span<const CaseEntry> entries : {delta_entries(), attention_entries()})
      for (const CaseEntry& entry : entries)
        if (entry.tier != Tier::random) expand(entry, entry.name, entry.options, all);
    for (Case& golden : golden_cases()) all.push_back(std::move(golden));
    // Grouped by op, in the order of the list of ops.
    const auto rank = [](const Case& c) {
      return std::find(timed_names().begin(), timed_names().end(), c.op) - timed_names().begin();
    };
    std::stable_sort(all.begin(), all.end(), [&](const Case& a, const Case& b) { return rank(a) < rank(b); });
    return all;
  }();
  return cases;
}

std::unique_ptr<Problem> build(const Case& item, std::string_view overrides) {
  if (!item.golden.empty()) {
    if (!overrides.empty()) throw OptionError(item.name + " is golden data: its shape is fixed");
    return build_golden(item);
  }
  const auto builder = std::find_if(std::begin(kBuilders), std::end(kBuilders), [&](const auto& b) { return b.op == item.op; });
  if (builder == std::end(kBuilders)) throw OptionError("there is no op " + item.op);
  Options options(item.options);
  options.merge(Options(overrides));
  if (item.fast) options.prefer_fast();
  uint64_t seed = item.seed;  // with the name of the op: other numbers for each op, the same on every machine
  for (char letter : item.op) seed = seed * 131 + static_cast<uint8_t>(letter);
  Rng rng(seed);
  std::unique_ptr<Problem> problem = builder->build(options, rng);
  options.finish(item.op);
  problem->shape = options.resolved();
  return problem;
}

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.find_first_of("*?") == std::string_view::npos) return name.find(pattern) != std::string_view::npos;
  return glob_matches(pattern, name);
}

}  // namespace weft::cases
