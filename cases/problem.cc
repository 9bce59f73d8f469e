// Compares the results of a run, and finds writes that the op must not make: see problem.h.
#include "cases/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace weft::cases {
namespace {

const uint8_t* element(const Tensor& t, int64_t offset) {
  return static_cast<const uint8_t*>(t.data) + offset * dtype_bytes(t.dtype);
}

std::vector<int64_t> offsets_of(const Tensor& t) {
  std::vector<int64_t> offsets;
  offsets.reserve(static_cast<size_t>(t.elements()));
  for_each_offset(t, [&](int64_t offset) { offsets.push_back(offset); });
  return offsets;
}

// Bits that the op writes of byte b of element i.
uint8_t mask_of(const Output& output, const Mask& written, size_t i, int64_t b) {
  return output.exact ? written[i * static_cast<size_t>(dtype_bytes(output.tensor.dtype)) + static_cast<size_t>(b)] : written[i];
}

bool is_poison(const Tensor& t, int64_t offset) {
  const uint8_t* bytes = element(t, offset);
  return std::all_of(bytes, bytes + dtype_bytes(t.dtype), [](uint8_t byte) { return byte == 0xFF; });
}

}  // namespace

Mask not_poison(const Tensor& t) {
  Mask mask;
  for_each_offset(t, [&](int64_t offset) { mask.push_back(is_poison(t, offset) ? 0x00 : 0xFF); });
  return mask;
}

Mask same_bits_of(const Tensor& a, const Tensor& b) {
  Mask mask;
  for_each_offset(a, [&](int64_t offset) {
    for (int64_t i = 0; i < dtype_bytes(a.dtype); ++i)
      mask.push_back(static_cast<uint8_t>(~(element(a, offset)[i] ^ element(b, offset)[i])));
  });
  return mask;
}

void fill_bytes(const Tensor& t, uint8_t byte) {
  const auto size = static_cast<size_t>(dtype_bytes(t.dtype));
  for_each_offset(t, [&](int64_t offset) { std::memset(const_cast<uint8_t*>(element(t, offset)), byte, size); });
}

Finding measure(const Output& output, double bound, const Tensor& got, const Tensor& want, const Mask& written) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Finding finding{output.name, 0, bound};
  const std::vector<int64_t> to = offsets_of(want);
  double error = 0, norm = 0;
  size_t n = 0;
  for_each_offset(got, [&](int64_t offset) {
    const size_t i = n++;
    if (output.exact) {
      bool wrong = false;
      for (int64_t byte = 0; byte < dtype_bytes(got.dtype); ++byte)
        wrong |= ((element(got, offset)[byte] ^ element(want, to[i])[byte]) & mask_of(output, written, i, byte)) != 0;
      error += wrong;
      return;
    }
    if (!written[i]) return;
    const double a = get(got, offset), b = get(want, to[i]);
    if (a == b) {  // equal infinities are right
      if (std::isfinite(b)) norm += b * b;
      return;
    }
    error += std::isfinite(a) && std::isfinite(b) ? (a - b) * (a - b) : kInfinity;
    norm += b * b;
  });
  if (output.exact)
    finding.error = error;  // elements that differ
  else if (error > 0)
    finding.error = norm > 0 && std::isfinite(error) ? std::sqrt(error / norm) : kInfinity;
  if (!finding.ok() && output.scale && std::isfinite(error))
    if (const double scale = output.scale(), terms = scale * scale * static_cast<double>(n); terms > norm)
      finding.error = std::sqrt(error / terms);
  return finding;
}

std::string check_written(const Output& output, const Tensor& got, const Mask& written) {
  const Tensor& before = output.tensor;
  const std::vector<int64_t> offsets = offsets_of(got);
  const int64_t size = dtype_bytes(got.dtype);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const uint8_t *now = element(got, offsets[i]), *then = element(before, offsets[i]);
    bool stray = false;
    for (int64_t b = 0; b < size; ++b) stray |= ((now[b] ^ then[b]) & ~mask_of(output, written, i, b)) != 0;
    if (stray) return output.name + "[" + std::to_string(i) + "] was written, the op must leave it alone";
    // For exact outputs poison may be the right answer.
    if (!output.exact && written[i] && is_poison(got, offsets[i]) && is_poison(before, offsets[i]))
      return output.name + "[" + std::to_string(i) + "] was not written";
  }
  return "";
}

std::string check_rest(const Image& result, const std::vector<Tensor>& writable) {
  if (!result.guards_intact()) return "a guard band round a tensor was written";
  const auto blocks = result.memory().blocks();
  for (size_t b = 0; b < blocks.size(); ++b) {
    // The expected block: its bytes before the run, except for the elements that may be written.
    std::vector<uint8_t> wanted(blocks[b].bytes.get(), blocks[b].bytes.get() + blocks[b].total);
    const uint8_t* base = blocks[b].bytes.get();
    for (const Tensor& out : writable) {
      const auto* data = static_cast<const uint8_t*>(out.data);
      if (data < base || data >= base + blocks[b].total) continue;
      const auto start = static_cast<size_t>(data - base);
      const int64_t size = dtype_bytes(out.dtype);
      for_each_offset(out, [&](int64_t offset) {
        const size_t at = start + static_cast<size_t>(offset * size);
        std::memcpy(wanted.data() + at, result.bytes(b) + at, static_cast<size_t>(size));
      });
    }
    if (std::memcmp(wanted.data(), result.bytes(b), wanted.size()) != 0)
      return "an input, or padding between rows, was written (block " + std::to_string(b) + " of the case)";
  }
  return "";
}

}  // namespace weft::cases
