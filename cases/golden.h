// Golden cases: the files of cases/golden/data, embedded in the program, which pin the reference.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cases/table.h"

namespace weft::cases {

// A file as embedded.
struct GoldenFile {
  const char* name;  // "delta_prefill_t1"
  std::span<const uint8_t> bytes;
};
std::span<const GoldenFile> golden_files();
const GoldenFile& golden_file(const std::string& name);  // throws std::runtime_error

// One case per op that a file has results for, named "golden/<file>". Files that hold no op's results (tables, signs) give no case.
std::vector<Case> golden_cases();
std::unique_ptr<Problem> build_golden(const Case& item);

}  // namespace weft::cases
