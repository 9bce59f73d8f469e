// Rows of the table of cases: one line each.
#pragma once

#include <span>

#include "cases/table.h"

namespace weft::cases {

// An option whose value is a|b|c stands for one case per value, named "<name>/key=value". Options and their defaults are described
// at the builders; `weft explain --op OP` prints them with their values.
struct Row {
  const char* op;
  const char* name;
  const char* options;
  Tier tier = Tier::fast;
};

std::span<const Row> delta_rows();
std::span<const Row> attention_rows();

}  // namespace weft::cases
