// The options of a case: see options.h.
#include "cases/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>

namespace weft::cases {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

int64_t to_integer(std::string_view key, std::string_view value) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size())
    throw OptionError("option " + std::string(key) + " is '" + std::string(value) + "', wanted an integer");
  return number;
}

std::string joined(std::initializer_list<std::string_view> names) {
  std::string all;
  for (std::string_view name : names) all += (all.empty() ? "" : ", ") + std::string(name);
  return all;
}

}  // namespace

Options::Options(std::string_view text) {
  for (std::string_view pair : split(text, ',')) {
    const size_t equals = pair.find('=');
    if (equals == 0 || equals == std::string_view::npos || equals + 1 == pair.size())
      throw OptionError("option '" + std::string(pair) + "' is not key=value");
    const std::string_view key = pair.substr(0, equals);
    if (has(key)) throw OptionError("option " + std::string(key) + " is given twice");
    set(key, pair.substr(equals + 1));
  }
}

const std::string* Options::find(std::string_view key) const {
  for (const auto& [name, value] : given_)
    if (name == key) return &value;
  return nullptr;
}

bool Options::has(std::string_view key) const { return find(key) != nullptr; }

void Options::set(std::string_view key, std::string_view value) {
  for (auto& [name, old] : given_)
    if (name == key) {
      old = value;
      return;
    }
  given_.emplace_back(key, value);
}

void Options::merge(const Options& other) {
  for (const auto& [key, value] : other.given_) set(key, value);
}

std::string Options::take(std::string_view key, const std::string& fallback) {
  const std::string* given = find(key);
  const std::string& value = given ? *given : fallback;
  const bool known = std::any_of(resolved_.begin(), resolved_.end(), [&](const auto& entry) { return entry.first == key; });
  if (!known) resolved_.emplace_back(key, value);
  return value;
}

int64_t Options::integer(std::string_view key, int64_t fallback, int64_t low, int64_t high) {
  const int64_t value = to_integer(key, take(key, std::to_string(fallback)));
  if (value < low || value > high)
    throw OptionError("option " + std::string(key) + " is " + std::to_string(value) + ", wanted " + std::to_string(low) + " to " +
                      std::to_string(high));
  return value;
}

double Options::real(std::string_view key, double fallback) {
  char shortest[32];
  const std::string value = take(key, std::string(shortest, std::to_chars(shortest, std::end(shortest), fallback).ptr));
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (end == value.c_str() || *end != '\0' || !std::isfinite(number))
    throw OptionError("option " + std::string(key) + " is '" + value + "', wanted a number");
  return number;
}

bool Options::flag(std::string_view key, bool fallback) { return integer(key, fallback ? 1 : 0, 0, 1) == 1; }

std::string Options::choice(std::string_view key, std::string_view fallback, std::initializer_list<std::string_view> allowed) {
  const std::string value = take(key, std::string(fallback));
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    throw OptionError("option " + std::string(key) + " is '" + value + "', wanted one of " + joined(allowed));
  return value;
}

std::string Options::text(std::string_view key, std::string_view fallback) { return take(key, std::string(fallback)); }

std::vector<int64_t> Options::list(std::string_view key) {
  std::vector<int64_t> numbers;
  const std::string value = take(key, "");
  for (std::string_view part : split(value, ':')) {
    numbers.push_back(to_integer(key, part));
    if (numbers.back() < -kLargest || numbers.back() > kLargest)
      throw OptionError("option " + std::string(key) + " has " + std::string(part) + ", wanted numbers from -" +
                        std::to_string(kLargest) + " to " + std::to_string(kLargest));
  }
  return numbers;
}

DType Options::dtype(std::string_view key, DType fallback) {
  const std::string name = choice(key, dtype_name(fallback), {"f32", "f16", "bf16"});
  return name == "f32" ? DType::f32 : name == "f16" ? DType::f16 : DType::bf16;
}

void Options::finish(std::string_view op) const {
  for (const auto& [key, value] : given_) {
    const std::string& wanted = key;
    if (std::any_of(resolved_.begin(), resolved_.end(), [&](const auto& entry) { return entry.first == wanted; })) continue;
    std::string known;
    for (const auto& [name, used] : resolved_) known += (known.empty() ? "" : ", ") + name;
    throw OptionError(std::string(op) + ": unknown option " + key + "; known: " + known);
  }
}

}  // namespace weft::cases
