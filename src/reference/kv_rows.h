// Rows of a KV cache in double: rotating, encoding, decoding, and finding their bytes in `rows` and `tiles`.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/kv_codec.h"

namespace weft::reference {

// x <- R x, or R^T x. Passthrough formats and Rotation::none leave x alone.
void rotate(const KvFormat& format, std::vector<double>& x, bool inverse);

// The mean of a head, subtracted before the rotation; zeros when the format has none.
std::vector<double> mean_of(const KvFormat& format, int64_t head);

// A row as stored: one code per coordinate and the gains as stored (in their own units and dtype), or, of a passthrough side, values.
struct KvRow {
  std::vector<uint8_t> codes;  // [D]
  std::vector<double> gains;   // [D / gain_group]
  std::vector<double> values;  // [D], passthrough
};

// x is the row itself (not rotated, mean included). Gains come back unrounded but already inside their dtype's finite range.
KvRow encode(const KvFormat& format, int64_t head, std::vector<double> x);
// The rotated row y^, without the mean (passthrough: the row itself).
std::vector<double> decode(const KvFormat& format, const KvRow& row);

// `side` is cache.k or cache.v. write overwrites every byte of the row, pad bits included.
KvRow read_row(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row);
void write_row(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row, const KvRow& content);
// The same row of another cache whose format has the same codes: gains and passthrough values go over bit by bit.
void copy_row(const KvCache& from_cache, const KvSide& from, const KvCache& to_cache, const KvSide& to, int64_t block, int64_t head,
              int64_t row);

// y^ of a row: what attention computes on.
std::vector<double> decode_rotated(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row);
// x^ = R^T y^ + mean.
std::vector<double> decode_original(const KvCache& cache, const KvSide& side, int64_t block, int64_t head, int64_t row);

}  // namespace weft::reference
