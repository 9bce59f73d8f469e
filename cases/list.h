// Entries of the table of cases: one line each.
#pragma once

#include <span>

#include "cases/table.h"

namespace weft::cases {

// One line of the table. An option whose value is a|b|c stands for one case per value, named "<name>/key=value". Comments at the
// builders describe the options and their defaults; `weft explain --op OP` prints them with their values.
struct CaseEntry {
  const char* op;
  const char* name;
  const char* options;
  Tier tier = Tier::fast;
};

std::span<const CaseEntry> delta_entries();
std::span<const CaseEntry> attention_entries();

}  // namespace weft::cases
