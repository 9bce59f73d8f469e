// Rows of a KV cache in double: see kv_rows.h.
#include "reference/kv_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "common/bit_pack.h"
#include "common/hadamard_bits.h"
#include "common/lanes_tile.h"
#include "core/check.h"
#include "reference/rows.h"

namespace weft::reference {
namespace {

size_t index(int64_t i) { return static_cast<size_t>(i); }

// x <- H x or H^T x for H = H_base (x) H_2^k: butterflies inside each run of 2^k, then H_base across the runs.
void hadamard(const HadamardOrder& order, double* x, bool transposed) {
  const int64_t run = order.sylvester, n = order.base * run;
  for (int64_t half = 1; half < run; half *= 2)
    for (int64_t i = 0; i < n; ++i)
      if ((i & half) == 0) {
        const double low = x[i], high = x[i + half];
        x[i] = low + high;
        x[i + half] = low - high;
      }
  if (order.base == 1) return;
  const std::vector<double> from(x, x + n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = 0;
    for (int64_t j = 0; j < order.base; ++j) {
      const uint32_t minus = transposed ? order.rows[j] >> (i / run) & 1 : order.rows[i / run] >> j & 1;
      x[i] += (minus ? -1 : 1) * from[index(j * run + i % run)];
    }
  }
}

void rotate_srht(const KvFormat& format, std::vector<double>& x, bool inverse) {
  const int64_t n = format.rotation_group;
  const auto flip = [&] {
    for (int64_t j = 0; j < format.head_dim; ++j)
      if (format.signs[index(j / 32)] >> (j % 32) & 1) x[index(j)] = -x[index(j)];
  };
  if (!inverse) flip();
  for (int64_t base = 0; base < format.head_dim; base += n) hadamard(hadamard_order(n), &x[index(base)], inverse);
  for (double& value : x) value /= std::sqrt(static_cast<double>(n));
  if (inverse) flip();
}

void rotate_dense(const Tensor& rotation, std::vector<double>& x, bool inverse) {
  std::vector<double> y(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < x.size(); ++j) y[i] += load(rotation, inverse ? at(rotation, j, i) : at(rotation, i, j)) * x[j];
  x = std::move(y);
}

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f16: return 65504;
    case DType::bf16: return 0x1.FEp127;
    default: return std::numeric_limits<float>::max();
  }
}

// The gain of one group in N(0,1) units, from y and the levels c of its codes.
double gain_of(const KvFormat& format, const double* y, const double* c, int64_t g) {
  double yy = 0, cc = 0, yc = 0;
  for (int64_t j = 0; j < g; ++j) {
    yy += y[j] * y[j];
    cc += c[j] * c[j];
    yc += y[j] * c[j];
  }
  if (!std::isfinite(yy)) return std::numeric_limits<double>::quiet_NaN();
  const double rms = std::sqrt(yy / static_cast<double>(g));
  const bool tiny = std::sqrt(yy) <= format.tiny_norm;
  switch (format.gain_rule) {
    case GainRule::rms: return rms;
    case GainRule::matched: return cc > 0 ? std::sqrt(yy / cc) : rms;
    case GainRule::least_squares: return !tiny && cc > 0 ? yc / cc : 0;
    case GainRule::unbiased: return !tiny && yc > 0 ? yy / yc : 0;
  }
  return 0;
}

// Number of boundaries below z: float midpoints, strict, so that ties stay in the lower cell and NaN is code 0.
uint8_t quantise(const KvFormat& format, double z) {
  const std::array<float, 256>& level = format.codebook;
  size_t code = 0;
  while (code + 1 < size_t{1} << format.bits && z > 0.5f * (level[code] + level[code + 1])) ++code;
  return static_cast<uint8_t>(code);
}

struct RowBytes {
  uint8_t* codes;
  uint8_t* gains;
};

RowBytes bytes_of(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  auto* codes = static_cast<uint8_t*>(side.codes.data);
  if (cache.layout == KvLayout::rows) {
    auto* gains = static_cast<uint8_t*>(side.gains.data);
    return {codes + at(side.codes, block, head, row) * dtype_bytes(side.codes.dtype),
            side.gains.present() ? gains + at(side.gains, block, head, row) * dtype_bytes(side.gains.dtype) : nullptr};
  }
  uint8_t* tile = codes + at(side.codes, block, head, row / kTileTokens);
  const int64_t in_tile = row % kTileTokens;
  return {tile + in_tile * code_bytes(side.format),
          tile + kTileTokens * code_bytes(side.format) + in_tile * gain_bytes(side.format)};
}

// In lane tiles the codes of a token share bytes with others: they are found one by one. Gains lie as in plain tiles.
struct LaneCodes {
  uint8_t* tile;
  KvRole role;
  const KvFormat& format;
  int64_t token;

  // Calls visit(byte, bit, width, shift) for every field of coordinate j.
  template <class Visit>
  void for_each_field(int64_t j, Visit&& visit) const {
    const LanePlanes planes = lane_planes(format.bits, format.head_dim);
    for (int p = 0; p < planes.count; ++p) {
      const LanePlane& plane = planes.plane[p];
      const LaneField at = lane_field(role, plane.width, format.head_dim, token, j);
      visit(tile[plane.offset + at.byte], at.bit, plane.width, plane.shift);
    }
  }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> codes(index(format.head_dim), 0);
    for (int64_t j = 0; j < format.head_dim; ++j)
      for_each_field(j, [&](uint8_t byte, int bit, int width, int shift) {
        codes[index(j)] = static_cast<uint8_t>(codes[index(j)] | ((byte >> bit) & ((1 << width) - 1)) << shift);
      });
    return codes;
  }
  void write(const std::vector<uint8_t>& codes) const {
    for (int64_t j = 0; j < format.head_dim; ++j)
      for_each_field(j, [&](uint8_t& byte, int bit, int width, int shift) {
        const int mask = (1 << width) - 1;
        byte = static_cast<uint8_t>((byte & ~(mask << bit)) | (codes[index(j)] >> shift & mask) << bit);
      });
  }
};

// Nothing unless the side's codes lie in lanes.
std::optional<LaneCodes> lane_codes(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  if (cache.layout == KvLayout::rows || cache.tile_order != TileOrder::lanes || side.format.passthrough) return {};
  uint8_t* tile = static_cast<uint8_t*>(side.codes.data) + at(side.codes, block, head, row / kTileTokens);
  return LaneCodes{tile, &side == &cache.k ? KvRole::k : KvRole::v, side.format, row % kTileTokens};
}

int64_t gain_count(const KvFormat& format) { return format.head_dim / format.gain_group; }

std::vector<uint8_t> read_codes(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  const KvFormat& format = side.format;
  if (const auto lanes = lane_codes(cache, side, block, head, row)) return lanes->read();
  const uint8_t* bytes = bytes_of(cache, side, block, head, row).codes;
  std::vector<uint8_t> codes(index(format.head_dim));
  if (format.packing == Packing::dense)
    unpack_codes(bytes, format.head_dim, format.bits, codes.data());
  else
    for (size_t j = 0; j < codes.size(); ++j) codes[j] = static_cast<uint8_t>(bytes[j] & ((1 << format.bits) - 1));
  return codes;
}

void write_codes(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row,
                 const std::vector<uint8_t>& codes) {
  const KvFormat& format = side.format;
  if (const auto lanes = lane_codes(cache, side, block, head, row)) return lanes->write(codes);
  uint8_t* bytes = bytes_of(cache, side, block, head, row).codes;
  if (format.packing == Packing::dense)
    pack_codes(codes.data(), format.head_dim, format.bits, bytes);
  else
    std::copy(codes.begin(), codes.end(), bytes);
}

}  // namespace

void rotate(const KvFormat& format, std::vector<double>& x, bool inverse) {
  if (format.passthrough || format.rotation == Rotation::none) return;
  if (format.rotation == Rotation::srht)
    rotate_srht(format, x, inverse);
  else
    rotate_dense(format.dense_rotation, x, inverse);
}

std::vector<double> mean_of(const KvFormat& format, int64_t head) {
  if (format.passthrough || !format.mean.present()) return std::vector<double>(index(format.head_dim), 0.0);
  return load_row(format.mean, head);
}

KvRow encode(const KvFormat& format, int64_t head, std::vector<double> x) {
  if (format.passthrough) return {{}, {}, std::move(x)};
  const std::vector<double> mean = mean_of(format, head);
  for (size_t j = 0; j < x.size(); ++j) x[j] -= mean[j];
  rotate(format, x, false);
  const int64_t g = format.gain_group;
  const double root = std::sqrt(static_cast<double>(g));
  KvRow row;
  std::vector<double> levels(x.size());
  for (int64_t base = 0; base < format.head_dim; base += g) {
    double sum = 0;
    for (int64_t j = 0; j < g; ++j) sum += x[index(base + j)] * x[index(base + j)];
    const double norm = std::sqrt(sum);
    for (int64_t j = 0; j < g; ++j) {
      const double z = norm <= format.tiny_norm ? 0 : x[index(base + j)] * root / norm;
      row.codes.push_back(quantise(format, z));
      levels[index(base + j)] = format.codebook[row.codes.back()];
    }
    double gain = gain_of(format, &x[index(base)], &levels[index(base)], g);
    if (format.gain_units == GainUnits::unit_vector) gain *= root;
    const double most = largest_finite(format.gain_dtype);
    row.gains.push_back(gain > most ? most : gain < -most ? -most : gain);  // NaN passes
  }
  return row;
}

std::vector<double> decode(const KvFormat& format, const KvRow& row) {
  if (format.passthrough) return row.values;
  const double root = std::sqrt(static_cast<double>(format.gain_group));
  std::vector<double> y(index(format.head_dim));
  for (int64_t j = 0; j < format.head_dim; ++j) {
    const double gain = row.gains[index(j / format.gain_group)] / (format.gain_units == GainUnits::unit_vector ? root : 1);
    y[index(j)] = gain * format.codebook[row.codes[index(j)]];
  }
  return y;
}

KvRow read_row(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  const KvFormat& format = side.format;
  const RowBytes bytes = bytes_of(cache, side, block, head, row);
  if (format.passthrough) return {{}, {}, load_row(dense(bytes.codes, *format.passthrough, {format.head_dim}))};
  return {read_codes(cache, side, block, head, row), load_row(dense(bytes.gains, format.gain_dtype, {gain_count(format)})), {}};
}

void write_row(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row, const KvRow& content) {
  const KvFormat& format = side.format;
  const RowBytes bytes = bytes_of(cache, side, block, head, row);
  if (format.passthrough) {
    store_row(dense(bytes.codes, *format.passthrough, {format.head_dim}), content.values);
    return;
  }
  write_codes(cache, side, block, head, row, content.codes);
  store_row(dense(bytes.gains, format.gain_dtype, {gain_count(format)}), content.gains);
}

void copy_row(const KvCache& from_cache, const KvSide& from, const KvCache& to_cache, const KvSide& to, int64_t block, int64_t head,
              int64_t row) {
  const RowBytes source = bytes_of(from_cache, from, block, head, row), target = bytes_of(to_cache, to, block, head, row);
  if (from.format.passthrough) {
    std::copy_n(source.codes, code_bytes(from.format), target.codes);
    return;
  }
  write_codes(to_cache, to, block, head, row, read_codes(from_cache, from, block, head, row));
  std::copy_n(source.gains, gain_bytes(from.format), target.gains);
}

std::vector<double> decode_rotated(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  return decode(side.format, read_row(cache, side, block, head, row));
}

std::vector<double> decode_original(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row) {
  std::vector<double> x = decode_rotated(cache, side, block, head, row);
  rotate(side.format, x, true);
  const std::vector<double> mean = mean_of(side.format, head);
  for (size_t j = 0; j < x.size(); ++j) x[j] += mean[j];
  return x;
}

}  // namespace weft::reference
