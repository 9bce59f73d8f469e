// What values of options are taken, where the checks of CLI11 take too much.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace weft::tools {

// Decimal digits of a number that 64 bits hold; CLI11 alone wraps a negative one around, clamps a large one, reads 010 as eight.
// Rewrites the value: for Option::transform.
CLI::Validator whole_number();
// The same from `low` to `high`, which help shows.
CLI::Validator whole_number_in(uint64_t low, uint64_t high);

// Bytes, with a unit if one is given (64M, 2GiB), as many as an int64_t counts. Rewrites the value: for Option::transform.
CLI::Validator byte_count();

// A number from `low` to `high`, without `low` itself if `above`; never NaN, which passes CLI::Range.
CLI::Validator number_in(double low, double high, bool above = false);

// The name of a file or folder: an empty one would pass for an option that was not given.
CLI::Validator file_name();

}  // namespace weft::tools
