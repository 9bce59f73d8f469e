// Checks of option values that are stricter than those of CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::tools {

// Decimal digits of a number that fits 64 bits. (CLI11 wraps negative numbers around, clamps large ones and reads 010 as eight.)
// Rewrites the value: for Option::transform.
CLI::Validator whole_number();
// The same from `low` to `high`; the help text shows the range.
CLI::Validator whole_number_in(uint64_t low, uint64_t high);

// A number of bytes that fits int64_t, with or without a unit (64M, 2GiB). Rewrites the value: for Option::transform.
CLI::Validator byte_count();

// A number from `low` to `high`, without `low` itself if `above`. Never NaN, which CLI::Range accepts.
CLI::Validator number_in(double low, double high, bool above = false);

// One of a few names. The help text shows them where they fit on a line.
CLI::Validator one_of(std::vector<std::string> names);

// The name of a file or folder. An empty name would look like an option that was not given.
CLI::Validator file_name();

// A text to search for, which must be well-formed UTF-8 and not empty.
CLI::Validator text_to_find();

}  // namespace weft::tools
