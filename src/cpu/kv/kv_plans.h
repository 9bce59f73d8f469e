// What the cpu kernels of kv_rotate, kv_encode, kv_decode and kv_repack read, lowered from the argument structs.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "common/kv_index.h"
#include "cpu/delta/delta_params.h"
#include "cpu/kv/kv_params.h"
#include "cpu/kv/kv_rotation.h"

namespace weft::cpu {

// Means of all heads; data null: none.
struct MeanView {
  const float* data = nullptr;
  int64_t head = 0;  // stride

  const float* of(int64_t h) const { return data ? data + h * head : nullptr; }
};

inline MeanView mean_view(const KvFormat& format) {
  if (format.passthrough || !format.mean.present()) return {};
  return {static_cast<const float*>(format.mean.data), format.mean.stride(0)};
}

// Codes by a guess: p(z) = z (slope - bend |z|) of z cut off at +-most is so near to i - n / 2 at boundary i of n - 1, which lies below
// code i, that n / 2 - 1 + round(p) is the code or one less.
struct Companding {
  bool fits = false, symmetric = false;
  float most = 0, slope = 0, bend = 0;
};

// Longer tables are not searched this way.
inline constexpr int kCompandedBits = 4;

inline Companding companding_of(const KvFormat& format) {
  Companding c;
  const int n = 1 << format.bits, middle = n / 2;
  std::array<double, 256> boundary{};
  for (size_t i = 1; i < static_cast<size_t>(n); ++i)
    boundary[i] = static_cast<double>(0.5f * (format.codebook[i - 1] + format.codebook[i]));
  // Least squares over the boundaries, which are z and -z |z| in two unknowns.
  double zz = 0, zq = 0, qq = 0, zi = 0, qi = 0, most = 0;
  for (int i = 1; i < n; ++i) {
    const double z = boundary[static_cast<size_t>(i)], q = -z * std::fabs(z), wanted = i - middle;
    zz += z * z, zq += z * q, qq += q * q, zi += z * wanted, qi += q * wanted;
    most = std::max(most, std::fabs(z));
  }
  const double determinant = zz * qq - zq * zq;
  if (!(determinant > 0)) return c;
  const double slope = (zi * qq - qi * zq) / determinant, bend = (qi * zz - zi * zq) / determinant;
  const auto p = [&](double z) { return z * (slope - bend * std::fabs(z)); };
  c.most = static_cast<float>(most);
  c.slope = static_cast<float>(slope);
  c.bend = static_cast<float>(bend);
  constexpr double kNear = 0.45;  // of the half that rounding allows
  c.fits = slope > 0 && slope - 2 * bend * most > 0 && std::fabs(p(most)) < middle - 1 + kNear;
  c.symmetric = true;
  for (size_t i = 0; i < static_cast<size_t>(middle); ++i)
    c.symmetric &= format.codebook[i] == -format.codebook[static_cast<size_t>(n) - 1 - i];
  for (int i = 1; i < n; ++i) c.fits &= std::fabs(p(boundary[static_cast<size_t>(i)]) - (i - middle)) < kNear;
  return c;
}

// Codes of four bits whose levels are (n + 1/2) step: boundaries are whole numbers of half steps, so t = ceil(16 y / (half a step)) - 1
// tells them apart. Its high byte is a bucket of 16 half steps, which has one boundary at most.
struct GridSearch {
  bool fits = false, far = false;  // far: t may leave the buckets
  float unit = 0;                  // t = ceil(z unit) - 1
  // By bucket, modulo 128: 16 times the half steps from its begin to its boundary, and the code below that. Where there is none, the
  // code less 1, with a boundary at the begin.
  alignas(64) uint8_t of_bucket[128] = {};
};
inline constexpr int64_t kGridVector = 64;  // codes that are found at a time

inline GridSearch grid_search_of(const KvFormat& format) {
  GridSearch search;
  constexpr int kCodes = 16, kBuckets = 128, kPerBucket = 16;
  if (format.bits != 4 || !format.grid_step || format.head_dim != format.gain_group || format.head_dim % kGridVector != 0)
    return search;
  const float step = *format.grid_step, per_step = 1 / step;
  search.unit = 2 * kPerBucket * per_step;
  const float most = std::sqrt(static_cast<float>(format.head_dim)) * search.unit * 1.001f;
  if (!(most < 0x1p15f)) return search;
  search.far = most > 0x1p14f;
  std::array<uint8_t, kBuckets> bucket{};  // from below
  int n = 0, filled = 0;
  for (int code = 0; code < kCodes; ++code) {
    const float level = format.codebook[static_cast<size_t>(code)];
    const int below = std::exchange(n, static_cast<int>(std::floor(level * per_step)));
    if (level != (static_cast<float>(n) + 0.5f) * step || n < -128 || n > 127) return search;
    if (code == 0) continue;
    const int boundary = below + n + 1 + kBuckets / 2 * kPerBucket,
              at = boundary / kPerBucket;  // half steps from the first bucket on
    if (at < filled) return search;        // a second boundary
    std::fill(bucket.begin() + filled, bucket.begin() + at, static_cast<uint8_t>((code - 2) & (kCodes - 1)));
    bucket[static_cast<size_t>(at)] = static_cast<uint8_t>(boundary % kPerBucket * kPerBucket + code - 1);
    filled = at + 1;
  }
  std::fill(bucket.begin() + filled, bucket.end(), static_cast<uint8_t>(kCodes - 2));
  std::copy_n(bucket.begin() + kBuckets / 2, kBuckets / 2, search.of_bucket);
  std::copy_n(bucket.begin(), kBuckets / 2, search.of_bucket + kBuckets / 2);
  search.fits = true;
  return search;
}

// Rows [token][head] of a tensor into a side of a cache. Points into the KvCache it was made from.
struct EncodePlan {
  SideView side;
  RowsView x;
  MeanView mean;
  RotatePlan rotate;
  float root = 1;  // sqrt(gain_group)
  // Boundaries between levels as a search tree: node 1 is the root, 2 e and 2 e + 1 are the children of e, all below and above it.
  // Walking b steps down from the root ends at 2^b + code.
  alignas(64) float tree[256];
  // Equidistant levels: z * factor + offset is the code with a fraction, from a thousandth below to nearly one above.
  float guess_factor = 0, guess_offset = 0;
  // Levels that lie denser in the middle: see Companding.
  Companding companding;
  GridSearch grid;
};

inline EncodePlan encode_plan(const KvCache& cache, KvRole role, const Tensor& x) {
  EncodePlan plan;
  plan.side = side_view(cache, role);
  plan.x = rows_view(x);
  const KvFormat& format = *plan.side.format;
  if (format.passthrough) return plan;
  plan.mean = mean_view(format);
  plan.rotate = rotate_plan(format, false);
  plan.root = std::sqrt(static_cast<float>(format.gain_group));
  std::fill_n(plan.tree, 16, 0.0f);  // vectors begin below the root
  for (int depth = 0; depth < format.bits; ++depth)
    for (int i = 0; i < 1 << depth; ++i) {
      const auto upper = static_cast<size_t>((2 * i + 1) << (format.bits - 1 - depth));  // the first code of the upper half
      plan.tree[(1 << depth) + i] = 0.5f * (format.codebook[upper - 1] + format.codebook[upper]);
    }
  if (plan.side.affine) {
    plan.guess_factor = 1 / plan.side.affine_step;
    plan.guess_offset = 0.5f - plan.side.affine_first - 1e-3f;
  }
  if (format.bits <= kCompandedBits) plan.companding = companding_of(format);
  plan.grid = grid_search_of(format);
  return plan;
}

// Rows of a side of a cache into a tensor.
struct DecodePlan {
  SideView side;
  RowsView x;
  bool rotated = false;  // leave y^ as it is
  MeanView mean;
  RotatePlan rotate;
};

inline DecodePlan decode_plan(const KvCache& cache, KvRole role, const Tensor& x, KvDomain domain) {
  DecodePlan plan;
  plan.side = side_view(cache, role);
  plan.x = rows_view(x);
  plan.rotated = domain == KvDomain::rotated || plan.side.passthrough();
  if (plan.rotated) return plan;
  plan.mean = mean_view(*plan.side.format);
  plan.rotate = rotate_plan(*plan.side.format, true);
  return plan;
}

// Tokens of one sequence and where they live; nowhere: inert.
struct TokenPlaces {
  int64_t first = 0, count = 0;
  const KvLocation* at = nullptr;
};

}  // namespace weft::cpu
