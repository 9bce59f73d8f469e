// The table of cases: what tests, `weft check`, `weft bench` and the support matrix read.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cases/problem.h"

namespace weft::cases {

// fast: every test run. full: `weft check --tier full` and the slow tests. bench: shapes worth timing; summary: the few of them that
// `weft bench --summary` times; device: those that are timed on devices only, unless they are named, as a processor takes too long.
// random: no cases, but the options from which the random-argument test draws one alternative each.
enum class Tier { fast, full, bench, summary, device, random };

// A case: enough to build its Problem.
struct Case {
  std::string op;
  std::string name;     // "tokens/T=65"; golden cases are "golden/<file>"
  std::string options;  // "T=65,Hk=2"; empty for golden cases
  Tier tier = Tier::fast;
  std::string golden;  // name of the golden file, or empty
  bool fast = false;   // what the options leave open is as fast kernels want it
};

// A call described by its overrides alone.
inline Case shape_case(const std::string& op) { return {op, "shape", "", Tier::bench, "", true}; }

// Every case of the table and of the golden files, in table order, sweeps expanded.
const std::vector<Case>& all_cases();

// What legal arguments of an op are drawn from at random: "T=0|1|5,dtype=f32|bf16". Empty where the table has none.
std::string_view random_options(std::string_view op);

// Names of the ops, in list order; and with them what else has cases to time: several ops in a row.
const std::vector<std::string>& op_names();
const std::vector<std::string>& timed_names();

// Builds the problem of a case. `overrides` ("T=8192,N=4") replaces options. Throws OptionError.
std::unique_ptr<Problem> build(const Case& row, std::string_view overrides = "");

// Is `pattern` found in the name (as a substring, or as a glob when it has * or ?)?
bool matches(std::string_view pattern, std::string_view name);

}  // namespace weft::cases
