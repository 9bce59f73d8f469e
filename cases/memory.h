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

// Bytes of a tensor of these sizes. The sizes come from command lines: throws OptionError if one is negative, or if the tensor is
// larger than the memory of this machine.
int64_t bytes_of_sizes(std::span<const int64_t> sizes, int64_t element_bytes);

// Owns blocks of host memory. New blocks are filled with 0xFF bytes ("poison"), which are NaN in every float type. Guard bands
// before and behind each block show stray writes; guards_intact() inspects them. Data is aligned to 256 bytes plus `misalign`
// elements.
class Memory {
 public:
  Tensor make(DType dtype, std::initializer_list<int64_t> sizes, int64_t misalign = 0);
  Tensor make(DType dtype, const std::vector<int64_t>& sizes, int64_t misalign = 0);
  // A tensor with padding: the stride of every dimension but the last is `pad` elements larger than needed.
  Tensor make_padded(DType dtype, std::initializer_list<int64_t> sizes, int64_t pad);
  Tensor indices(std::initializer_list<int64_t> values);  // [n] i32
  Tensor indices(const std::vector<int64_t>& values);     // [n] i32
  void* bytes(size_t count, size_t alignment = 256);      // raw scratch, poisoned
  bool guards_intact() const;

  // A block with its guard bands: `total` bytes aligned to 256, of which [begin, begin + size) hold data.
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  struct Block {
    std::unique_ptr<uint8_t, Free> bytes;
    size_t total = 0, begin = 0, size = 0;
    // Are the guard bands unchanged in `copy`, a copy of the whole block?
    bool guards_intact(const uint8_t* copy) const;
  };
  std::span<const Block> blocks() const { return blocks_; }

 private:
  uint8_t* block(size_t size, size_t alignment, size_t shift);
  std::vector<Block> blocks_;
  int64_t held_ = 0;  // data bytes of all blocks, never more than the machine has
};

// Calls visit(offset) for every element in index order.
void for_each_offset(const Tensor& tensor, const std::function<void(int64_t)>& visit);

double get(const Tensor& tensor, int64_t offset);
void set(const Tensor& tensor, int64_t offset, double value);  // rounds to the dtype

void fill(const Tensor& tensor, double value);
// Normal and uniform numbers. Dense tensors of more than about a million elements repeat their first million, which saves time.
void fill_normal(const Tensor& tensor, Rng& rng, double scale = 1, double mean = 0);
void fill_uniform(const Tensor& tensor, Rng& rng, double low, double high);
// Scales rows over the last dimension to unit length, then rounds to the dtype.
void normalize_rows(const Tensor& tensor);
void copy(const Tensor& from, const Tensor& to);  // same sizes, converts dtypes

std::vector<double> values(const Tensor& tensor);
// |got - want| / |want| over all elements: 0 if both are 0, infinity if any element is NaN or is infinite in only one of the two.
double relative_rms(const Tensor& got, const Tensor& want);
double max_abs_difference(const Tensor& got, const Tensor& want);
bool same_bits(const Tensor& a, const Tensor& b);

}  // namespace weft::cases
