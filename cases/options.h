// The options of a case: "T=64,Hk=2,keys=identical" as typed values with defaults. An unknown key is an error that names the key.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/tensor.h"

namespace weft::cases {

// A key or value that the builder of an op does not understand.
class OptionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The largest number that a builder takes. Sums of such numbers, and products with small factors, fit 64 bits.
inline constexpr int64_t kLargest = int64_t{1} << 40;

// A builder asks for every option it knows, with its default. finish() reports an option that was given but not asked for.
class Options {
 public:
  Options() = default;
  explicit Options(std::string_view text);  // "key=value,key=value"; lists inside a value are separated by ':'

  void set(std::string_view key, std::string_view value);  // adds or replaces
  void merge(const Options& other);                        // other wins
  bool has(std::string_view key) const;                    // given, whatever its value
  void prefer_fast() { fast_ = true; }                     // options not given default to what fast kernels need
  bool fast() const { return fast_; }

  int64_t integer(std::string_view key, int64_t fallback, int64_t low = 0, int64_t high = kLargest);
  double real(std::string_view key, double fallback);
  bool flag(std::string_view key, bool fallback = false);  // 0 or 1
  std::string choice(std::string_view key, std::string_view fallback, std::initializer_list<std::string_view> allowed);
  std::string text(std::string_view key, std::string_view fallback);
  std::vector<int64_t> list(std::string_view key);  // "0:1:63"; empty when absent
  DType dtype(std::string_view key, DType fallback);

  // Throws OptionError for the first key that was given but never asked for.
  void finish(std::string_view op) const;
  const std::vector<std::pair<std::string, std::string>>& given() const { return given_; }
  // Every option asked for, with the value that was used, in the order of asking.
  const std::vector<std::pair<std::string, std::string>>& resolved() const { return resolved_; }

 private:
  const std::string* find(std::string_view key) const;
  std::string take(std::string_view key, const std::string& fallback);

  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::pair<std::string, std::string>> resolved_;
  bool fast_ = false;
};

}  // namespace weft::cases
