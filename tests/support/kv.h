// Caches and rows for tests of the KV codec.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "weft/kv_codec.h"

namespace weft::tests {

inline KvSide make_side(cases::Memory& memory, const KvFormat& format, int64_t blocks, int64_t heads, int64_t capacity,
                        KvLayout layout = KvLayout::rows) {
  KvSide side;
  side.format = format;
  if (layout == KvLayout::tiles) {
    side.codes = memory.make(DType::u8, {blocks, heads, capacity / kTileTokens, tile_bytes(format)});
  } else if (format.passthrough) {
    side.codes = memory.make(*format.passthrough, {blocks, heads, capacity, format.head_dim});
  } else {
    side.codes = memory.make(DType::u8, {blocks, heads, capacity, code_bytes(format)});
    side.gains = memory.make(format.gain_dtype, {blocks, heads, capacity, format.head_dim / format.gain_group});
  }
  return side;
}

inline KvCache make_cache(cases::Memory& memory, const KvFormat& k, const KvFormat& v, int64_t blocks, int64_t heads,
                          int64_t capacity, KvLayout layout = KvLayout::rows) {
  KvCache cache;
  cache.k = make_side(memory, k, blocks, heads, capacity, layout);
  cache.v = make_side(memory, v, blocks, heads, capacity, layout);
  cache.layout = layout;
  return cache;
}

// [T, 1, D] f32 with the given rows.
inline Tensor make_rows(cases::Memory& memory, const std::vector<std::vector<double>>& rows) {
  const Tensor t = memory.make(DType::f32, {static_cast<int64_t>(rows.size()), 1, static_cast<int64_t>(rows[0].size())});
  int64_t i = 0;
  for (const auto& row : rows)
    for (double value : row) cases::set(t, i++, value);
  return t;
}

// Rows encoded as tokens 0, 1, ... of one head, and what they decode to.
struct EncodedRows {
  KvCache cache;
  std::vector<std::vector<double>> rotated, original;  // decoded to f32

  const uint8_t* codes(int64_t row) const {
    return static_cast<const uint8_t*>(cache.k.codes.data) + row * code_bytes(cache.k.format);
  }
  double gain(int64_t row, int64_t group = 0) const { return cases::get(cache.k.gains, row * cache.k.gains.stride(2) + group); }
};

inline EncodedRows encode_rows(cases::Memory& memory, const KvFormat& format, const std::vector<std::vector<double>>& rows) {
  constexpr Stream kReference{Backend::reference};
  const auto T = static_cast<int64_t>(rows.size());
  EncodedRows result;
  result.cache = make_cache(memory, format, kv_format("f32", 8), 1, 1, T);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < T; ++t) positions.push_back(t);
  const Tensor at = memory.indices(positions);
  kv_encode(kReference, {make_rows(memory, rows), {}, at, Sequences::uniform(1), result.cache});
  for (KvDomain domain : {KvDomain::rotated, KvDomain::original}) {
    const Tensor out = memory.make(DType::f32, {T, 1, format.head_dim});
    kv_decode(kReference, {result.cache, at, Sequences::uniform(1), domain, out, {}});
    const std::vector<double> all = cases::values(out);
    auto& target = domain == KvDomain::rotated ? result.rotated : result.original;
    for (auto row = all.begin(); row != all.end(); row += format.head_dim) target.emplace_back(row, row + format.head_dim);
  }
  EXPECT_TRUE(memory.guards_intact());
  return result;
}

inline std::vector<double> random_row(cases::Rng& rng, int64_t d, double scale = 1) {
  std::vector<double> row(static_cast<size_t>(d));
  for (double& value : row) value = static_cast<float>(scale * rng.normal());
  return row;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
inline double norm(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }

}  // namespace weft::tests
