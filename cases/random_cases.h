// Random legal calls of an op: options drawn from its grammar in the table, with sizes beyond those of the grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "cases/table.h"

namespace weft::cases {

// One alternative of every option of a grammar: "T=0|1|5,dtype=f32|bf16" gives "T=5,dtype=f32".
std::string draw_options(std::string_view grammar, Rng& rng);

// The same, where half of the sizes, dtypes and recipes come from a wider range than the grammar has. The draw may not be legal.
std::string draw_wide_options(std::string_view grammar, Rng& rng);

// One draw: a call, or why it is not legal. `by_library` tells refusals by the library, which must not refuse legal calls, from those of the
// options themselves, which may exclude each other.
struct RandomDraw {
  std::string options;
  std::unique_ptr<Problem> problem;  // null: not legal
  std::string why;
  bool by_library = false;
};
RandomDraw draw_once(const std::string& op, Rng& rng, std::string (*draw)(std::string_view grammar, Rng& rng));

// A legal call: the first draw that builds and that the reference takes. Throws std::runtime_error when the grammar hardly ever gives one.
RandomDraw draw_call(const std::string& op, Rng& rng, std::string (*draw)(std::string_view grammar, Rng& rng));

// Legal call number `index` of a seed, by draw_wide_options(). Equal arguments give equal cases on every machine. The name is
// "random/SEED/INDEX: OPTIONS".
Case random_case(const std::string& op, uint64_t seed, int64_t index);

}  // namespace weft::cases
