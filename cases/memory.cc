// Host memory for cases and tests: see memory.h.
#include "cases/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "cases/options.h"
#include "reference/rows.h"

namespace weft::cases {
namespace {

constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0xA5, kPoison = 0xFF;
constexpr int64_t kPeriod = 1048573;  // random numbers repeat after so many elements; a prime, so that no row length divides it

int64_t machine_bytes() {
  static const int64_t bytes = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  return bytes;
}

[[noreturn]] void refuse_sizes(std::span<const int64_t> sizes, const std::string& what) {
  std::string shape;
  for (int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  throw OptionError("a tensor of sizes [" + shape + "] " + what);
}

bool is_dense(const Tensor& t) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.sizes[static_cast<size_t>(i)] > 1 && t.strides[static_cast<size_t>(i)] != stride) return false;
    stride *= t.sizes[static_cast<size_t>(i)];
  }
  return true;
}

template <class Draw>
void fill_with(const Tensor& t, const Draw& draw) {
  if (t.elements() <= kPeriod || !is_dense(t)) {
    for_each_offset(t, [&](int64_t i) { set(t, i, draw()); });
    return;
  }
  for (int64_t i = 0; i < kPeriod; ++i) set(t, i, draw());
  auto* bytes = static_cast<uint8_t*>(t.data);
  const int64_t size = dtype_bytes(t.dtype), total = t.elements() * size;
  for (int64_t at = kPeriod * size; at < total; at += kPeriod * size)
    std::memcpy(bytes + at, bytes, static_cast<size_t>(std::min(kPeriod * size, total - at)));
}

}  // namespace

uint64_t Rng::next() {
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return state_ * 0x2545F4914F6CDD1Dull;
}

double Rng::uniform(double low, double high) { return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53; }

double Rng::normal() {
  const double u = 1 - uniform(), v = uniform();
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
}

int64_t Rng::integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
}

int64_t bytes_of_sizes(std::span<const int64_t> sizes, int64_t element_bytes) {
  // Strides treat an empty dimension as one of size 1, and they must not overflow either.
  int64_t strides = element_bytes;
  bool empty = false, fits = true;
  for (int64_t size : sizes) {
    if (size < 0) refuse_sizes(sizes, "cannot be, wanted sizes of 0 or more");
    empty |= size == 0;
    fits = fits && !__builtin_mul_overflow(strides, std::max<int64_t>(size, 1), &strides);
  }
  if (!fits || (!empty && strides > machine_bytes()))
    refuse_sizes(sizes, "takes more than the " + std::to_string(machine_bytes()) + " bytes of memory that this machine has");
  return empty ? 0 : strides;
}

uint8_t* Memory::block(size_t size, size_t alignment, size_t shift) {
  const auto bytes = static_cast<int64_t>(size);
  if (bytes > machine_bytes() - held_)
    throw OptionError("the tensors of this shape take more than the " + std::to_string(machine_bytes()) +
                      " bytes of memory that this machine has");
  held_ += bytes;
  Block& b = blocks_.emplace_back();
  const size_t unit = std::max(kGuard, alignment);
  b.begin = unit + shift;
  b.size = size;
  b.total = (b.begin + size + kGuard + unit - 1) / unit * unit;
  b.bytes.reset(static_cast<uint8_t*>(std::aligned_alloc(unit, b.total)));
  if (!b.bytes) throw std::bad_alloc();
  std::memset(b.bytes.get(), kGuardByte, b.total);
  std::memset(b.bytes.get() + b.begin, kPoison, size);
  return b.bytes.get() + b.begin;
}

Tensor Memory::make(DType dtype, std::initializer_list<int64_t> sizes, int64_t misalign) {
  return make(dtype, std::vector<int64_t>(sizes), misalign);
}

Tensor Memory::make(DType dtype, const std::vector<int64_t>& sizes, int64_t misalign) {
  const int64_t bytes = bytes_of_sizes(sizes, dtype_bytes(dtype));
  Tensor t;
  t.dtype = dtype;
  t.rank = static_cast<int8_t>(sizes.size());
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.sizes[static_cast<size_t>(i)] = sizes[static_cast<size_t>(i)];
    t.strides[static_cast<size_t>(i)] = stride;
    stride *= sizes[static_cast<size_t>(i)] > 0 ? sizes[static_cast<size_t>(i)] : 1;
  }
  t.data = block(static_cast<size_t>(bytes), 256, static_cast<size_t>(misalign * dtype_bytes(dtype)));
  return t;
}

Tensor Memory::make_padded(DType dtype, std::initializer_list<int64_t> sizes, int64_t pad) {
  std::vector<int64_t> padded(sizes);
  for (size_t i = 1; i < padded.size(); ++i) padded[i] += pad;
  bytes_of_sizes(padded, dtype_bytes(dtype));  // throws if too large; an upper bound of the bytes taken below
  Tensor t = dense(nullptr, dtype, sizes);
  int64_t stride = 1, last = 0;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[static_cast<size_t>(i)] = stride;
    last += t.sizes[static_cast<size_t>(i)] > 0 ? (t.sizes[static_cast<size_t>(i)] - 1) * stride : 0;
    stride = stride * (t.sizes[static_cast<size_t>(i)] > 0 ? t.sizes[static_cast<size_t>(i)] : 1) + pad;
  }
  t.data = block(static_cast<size_t>((last + 1) * dtype_bytes(dtype)), 256, 0);
  return t;
}

Tensor Memory::indices(std::initializer_list<int64_t> values) { return indices(std::vector<int64_t>(values)); }

Tensor Memory::indices(const std::vector<int64_t>& values) {
  Tensor t = make(DType::i32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(values[i]);
  return t;
}

void* Memory::bytes(size_t count, size_t alignment) { return block(count, alignment, 0); }

bool Memory::Block::guards_intact(const uint8_t* copy) const {
  const auto good = [](uint8_t byte) { return byte == kGuardByte; };
  return std::all_of(copy, copy + begin, good) && std::all_of(copy + begin + size, copy + total, good);
}

bool Memory::guards_intact() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [](const Block& b) { return b.guards_intact(b.bytes.get()); });
}

void for_each_offset(const Tensor& t, const std::function<void(int64_t)>& visit) {
  if (t.elements() == 0) return;
  std::array<int64_t, Tensor::kMaxRank> index{};
  int64_t offset = 0;
  for (;;) {
    visit(offset);
    int d = t.rank - 1;
    for (; d >= 0; --d) {
      const auto i = static_cast<size_t>(d);
      if (index[i] + 1 < t.sizes[i]) {  // the stride of a dimension of size 1 is never used
        ++index[i];
        offset += t.strides[i];
        break;
      }
      offset -= t.strides[i] * index[i];
      index[i] = 0;
    }
    if (d < 0) return;
  }
}

double get(const Tensor& t, int64_t offset) { return reference::load(t, offset); }

void set(const Tensor& t, int64_t offset, double value) {
  switch (t.dtype) {
    case DType::f32: static_cast<float*>(t.data)[offset] = static_cast<float>(value); break;
    case DType::f16: static_cast<uint16_t*>(t.data)[offset] = f32_to_f16(static_cast<float>(value)); break;
    case DType::bf16: static_cast<uint16_t*>(t.data)[offset] = f32_to_bf16(static_cast<float>(value)); break;
    case DType::i32: static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(value); break;
    case DType::i64: static_cast<int64_t*>(t.data)[offset] = static_cast<int64_t>(value); break;
    case DType::u32: static_cast<uint32_t*>(t.data)[offset] = static_cast<uint32_t>(value); break;
    case DType::u8: static_cast<uint8_t*>(t.data)[offset] = static_cast<uint8_t>(value); break;
  }
}

void fill(const Tensor& t, double value) {
  for_each_offset(t, [&](int64_t i) { set(t, i, value); });
}

void fill_normal(const Tensor& t, Rng& rng, double scale, double mean) {
  fill_with(t, [&] { return mean + scale * rng.normal(); });
}

void fill_uniform(const Tensor& t, Rng& rng, double low, double high) {
  fill_with(t, [&] { return rng.uniform(low, high); });
}

void normalize_rows(const Tensor& t) {
  Tensor rows = t;
  const int64_t D = t.size(-1);
  rows.sizes[static_cast<size_t>(t.rank - 1)] = D > 0 ? 1 : 0;
  for_each_offset(rows, [&](int64_t base) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += get(t, base + d) * get(t, base + d);
    const double root = sum > 0 ? 1 / std::sqrt(sum) : 0;
    for (int64_t d = 0; d < D; ++d) set(t, base + d, get(t, base + d) * root);
  });
}

std::vector<double> values(const Tensor& t) {
  std::vector<double> all;
  all.reserve(static_cast<size_t>(t.elements()));
  for_each_offset(t, [&](int64_t i) { all.push_back(get(t, i)); });
  return all;
}

void copy(const Tensor& from, const Tensor& to) {
  const std::vector<double> all = values(from);
  size_t n = 0;
  for_each_offset(to, [&](int64_t i) { set(to, i, all[n++]); });
}

double relative_rms(const Tensor& got, const Tensor& want) {
  const std::vector<double> a = values(got), b = values(want);
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) {  // equal infinities count as right
      if (std::isfinite(b[i])) norm += b[i] * b[i];
      continue;
    }
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::numeric_limits<double>::infinity();
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (error == 0) return 0;
  return norm > 0 ? std::sqrt(error / norm) : std::numeric_limits<double>::infinity();
}

double max_abs_difference(const Tensor& got, const Tensor& want) {
  const std::vector<double> a = values(got), b = values(want);
  double worst = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= worst)) worst = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
  }
  return worst;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.elements() != b.elements()) return false;
  const size_t size = static_cast<size_t>(dtype_bytes(a.dtype));
  std::vector<int64_t> offsets;
  for_each_offset(b, [&](int64_t i) { offsets.push_back(i); });
  size_t n = 0;
  bool same = true;
  for_each_offset(a, [&](int64_t i) {
    same &= std::memcmp(static_cast<const uint8_t*>(a.data) + static_cast<size_t>(i) * size,
                        static_cast<const uint8_t*>(b.data) + static_cast<size_t>(offsets[n++]) * size, size) == 0;
  });
  return same;
}

}  // namespace weft::cases
