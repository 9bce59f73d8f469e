// Checks of option values: see validators.h.
#include "tools/validators.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "tools/suggest.h"
#include "weft/tokenizer.h"

namespace weft::tools {
namespace {

// Reads a text that is nothing but the digits of a number that fits T.
template <class T>
bool read_digits(const std::string& text, T& value) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  const char* const end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data(), end, value);
  return fault == std::errc() && stop == end;
}

}  // namespace

CLI::Validator whole_number() {
  return whole_number_in(0, std::numeric_limits<uint64_t>::max()).description("");  // any number of 64 bits: no range to show
}

CLI::Validator whole_number_in(uint64_t low, uint64_t high) {
  return {[=](std::string& text) {
            uint64_t value = 0;
            if (!read_digits(text, value) || value < low || value > high)
              return fmt::format("got '{}', wanted a whole number from {} to {}", text, low, high);
            text = std::to_string(value);  // without leading zeros, which CLI11 reads as octal
            return std::string();
          },
          fmt::format("{} to {}", low, high)};
}

CLI::Validator byte_count() {
  const CLI::AsSizeValue with_unit(true);
  return {[with_unit](std::string& text) {
            const std::string given = text;
            uint64_t number = 0;
            int64_t bytes = 0;
            const std::string digits = text.substr(0, text.find_first_not_of("0123456789"));
            try {
              if (read_digits(digits, number)) {  // leading zeros as in whole_number()
                text.replace(0, digits.size(), std::to_string(number));
                if (with_unit(text).empty() && read_digits(text, bytes)) return std::string();
              }
            } catch (const CLI::ValidationError&) {  // an unknown unit, or a product too large
            }
            return fmt::format("got '{}', wanted bytes from 0 to {}, or with a unit: 64M, 2G, 1GiB", given,
                               std::numeric_limits<int64_t>::max());
          },
          with_unit.get_description()};
}

CLI::Validator number_in(double low, double high, bool above) {
  const std::string wanted = above ? fmt::format("more than {}, at most {}", low, high) : fmt::format("{} to {}", low, high);
  return {[=](std::string& text) {
            double value = 0;
            const bool number = CLI::detail::lexical_cast(text, value);
            if (number && (above ? value > low : value >= low) && value <= high) return std::string();
            return fmt::format("got '{}', wanted a number: {}", text, wanted);
          },
          wanted};
}

CLI::Validator one_of(std::vector<std::string> names) {
  constexpr size_t kLongestShown = 60, kMostNamed = 10;
  std::string braces = fmt::format("{{{}}}", fmt::join(names, ","));
  if (braces.size() > kLongestShown) braces.clear();
  return {[names = std::move(names)](std::string& text) {
            if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
            const std::string hint = did_you_mean(text, names);
            if (names.size() > kMostNamed && !hint.empty()) return fmt::format("got '{}'{}", text, hint);
            return fmt::format("got '{}', wanted one of {}{}", text, fmt::join(names, ", "), hint);
          },
          braces};
}

CLI::Validator file_name() {
  return {[](std::string& text) { return text.empty() ? std::string("got an empty name") : std::string(); }, ""};
}

CLI::Validator text_to_find() {
  return {[](std::string& text) {
            if (text.empty()) return std::string("got an empty text");
            return to_well_formed_utf8(text) == text ? std::string() : std::string("got a text that is not UTF-8");
          },
          ""};
}

}  // namespace weft::tools
