// The table of cases, which tests, `weft check`, `weft bench` and the support matrix read.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cases/problem.h"

namespace weft::cases {

// fast: every test run. full: `weft check --tier full` and the slow tests. bench: shapes worth timing. summary: the few shapes that
// `weft bench --summary` times. device: shapes that take too long on a cpu, so that only cuda times them unless they are named.
// random: no cases, but the options from which the random-argument test draws one alternative each.
enum class Tier { fast, full, bench, summary, device, random };

// A case: enough to build its Problem.
struct Case {
  std::string op;
  std::string name;     // "tokens/T=65"; golden cases are "golden/<file>"
  std::string options;  // "T=65,Hk=2"; empty for golden cases
  Tier tier = Tier::fast;
  std::string golden;  // name of the golden file, or empty
  bool fast = false;   // options not given default to what fast kernels need
  uint64_t seed = 0;   // of the inputs, beside the name of the op
};

// A case without options: the overrides of build() describe its shape.
inline Case shape_case(const std::string& op) { return {op, "shape", "", Tier::bench, "", true}; }

// Every case of the table and of the golden files, in table order, sweeps expanded.
const std::vector<Case>& all_cases();

// What legal arguments of an op are drawn from at random: "T=0|1|5,dtype=f32|bf16". Empty where the table has none.
std::string_view random_options(std::string_view op);

// Names of the ops, in list order. timed_names() also has delta_mixer, a sequence of ops.
const std::vector<std::string>& op_names();
const std::vector<std::string>& timed_names();

// Builds the problem of a case. `overrides` ("T=8192,N=4") replaces options. Throws OptionError.
std::unique_ptr<Problem> build(const Case& item, std::string_view overrides = "");

// Does `pattern` match the name? A pattern with * or ? is a glob over the whole name, any other a substring.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace weft::cases
