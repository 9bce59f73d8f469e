// Host memory for cases and tests: poisoned blocks between guard bands, random fills, and comparison in double.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/tensor.h"

namespace weft::cases {

// A small deterministic generator (xorshift64*), the same on every machine.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567ull) {}
  uint64_t next();
  double uniform(double low = 0, double high = 1);
  double normal();
  int64_t integer(int64_t low, int64_t high);  // both included

 private:
  uint64_t state_;
};

// Bytes of so many elements, a number for each dimension. Throws OptionError for sizes that are negative or make more than this machine
// has: they come from command lines.
int64_t bytes_of_sizes(std::span<const int64_t> sizes, int64_t element_bytes);

// Owns blocks of host memory. Fresh blocks are filled with 0xFF bytes, which is NaN in every float type, and stand between guard
// bands that guards_intact() inspects. Data is aligned to 256 bytes plus `misalign` elements.
class Memory {
 public:
  Tensor make(DType dtype, std::initializer_list<int64_t> sizes, int64_t misalign = 0);
  Tensor make(DType dtype, const std::vector<int64_t>& sizes, int64_t misalign = 0);
  // A view with padding: every dimension but the last gets a stride larger than dense by `pad` elements.
  Tensor make_padded(DType dtype, std::initializer_list<int64_t> sizes, int64_t pad);
  Tensor indices(std::initializer_list<int64_t> values);  // [n] i32
  Tensor indices(const std::vector<int64_t>& values);     // [n] i32
  void* bytes(size_t count, size_t alignment = 256);      // raw scratch, poisoned
  bool guards_intact() const;

  // A block with its guard bands: `total` bytes aligned to 256, of which [begin, begin + size) are lent out.
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  struct Block {
    std::unique_ptr<uint8_t, Free> bytes;
    size_t total = 0, begin = 0, size = 0;
    // Are the guard bands of `copy`, the whole block as it is somewhere else, as they were made?
    bool guards_intact(const uint8_t* copy) const;
  };
  std::span<const Block> blocks() const { return blocks_; }

 private:
  uint8_t* block(size_t size, size_t alignment, size_t shift);
  std::vector<Block> blocks_;
  int64_t held_ = 0;  // bytes of all blocks, never more than the machine has
};

// Calls visit(offset) for every element in index order.
void for_each_offset(const Tensor& tensor, const std::function<void(int64_t)>& visit);

double get(const Tensor& tensor, int64_t offset);
void set(const Tensor& tensor, int64_t offset, double value);  // rounds to the dtype

void fill(const Tensor& tensor, double value);
// Normal and uniform numbers. Dense tensors of more than a million elements repeat their first million, which is quicker to make.
void fill_normal(const Tensor& tensor, Rng& rng, double scale = 1, double mean = 0);
void fill_uniform(const Tensor& tensor, Rng& rng, double low, double high);
// Rows over the last dimension scaled to unit length (then rounded to the dtype).
void normalize_rows(const Tensor& tensor);
void copy(const Tensor& from, const Tensor& to);  // same sizes, converts dtypes

std::vector<double> values(const Tensor& tensor);
// |got - want| / |want| over all elements (0 when both are 0; infinity when anything is NaN or infinite in got but not in want).
double relative_rms(const Tensor& got, const Tensor& want);
double max_abs_difference(const Tensor& got, const Tensor& want);
bool same_bits(const Tensor& a, const Tensor& b);

}  // namespace weft::cases
