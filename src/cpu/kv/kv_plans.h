// Plans of kv_encode and kv_decode on the cpu: what their kernels read, lowered from the argument structs.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "common/kv_index.h"
#include "cpu/common/rows_view.h"
#include "cpu/kv/kv_params.h"
#include "cpu/kv/kv_rotation.h"

namespace weft::cpu {

// Means of all heads. data is null where the format has no mean.
struct MeanView {
  const float* data = nullptr;
  int64_t head = 0;  // stride

  const float* of(int64_t h) const { return data ? data + h * head : nullptr; }
};

inline MeanView mean_view(const KvFormat& format) {
  if (format.passthrough || !format.mean.present()) return {};
  return {static_cast<const float*>(format.mean.data), format.mean.stride(0)};
}

// Code search by companding: p(z) = z (slope - bend |z|), with z clamped to +-most, guesses the code of z. Boundary i of the n - 1
// boundaries between n levels lies below code i. `fits` says that p is close to i - n / 2 at every boundary i. Then
// n / 2 - 1 + round(p(z)) is the code of z or one less, and one comparison decides.
struct Companding {
  bool fits = false, symmetric = false;
  float most = 0, slope = 0, bend = 0;
};

// Codes of more bits are not searched by companding.
inline constexpr int kCompandedBits = 4;

inline Companding companding_of(const KvFormat& format) {
  Companding c;
  const int n = 1 << format.bits, middle = n / 2;
  std::array<double, 256> boundary{};
  for (size_t i = 1; i < static_cast<size_t>(n); ++i)
    boundary[i] = static_cast<double>(0.5f * (format.codebook[i - 1] + format.codebook[i]));
  // Least squares over the boundaries: slope z + bend (-z |z|) ~ i - n / 2.
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
  constexpr double kNear = 0.45;  // rounding allows 0.5
  c.fits = slope > 0 && slope - 2 * bend * most > 0 && std::fabs(p(most)) < middle - 1 + kNear;
  c.symmetric = true;
  for (size_t i = 0; i < static_cast<size_t>(middle); ++i)
    c.symmetric &= format.codebook[i] == -format.codebook[static_cast<size_t>(n) - 1 - i];
  for (int i = 1; i < n; ++i) c.fits &= std::fabs(p(boundary[static_cast<size_t>(i)]) - (i - middle)) < kNear;
  return c;
}

// Code search for 4-bit codes with levels (n + 1/2) step. Every boundary is a whole number of half steps, so the integer
// t = ceil(16 z / (step / 2)) - 1 decides which side of a boundary z lies on. The high byte of t is a bucket of 16 half steps. The
// search fits only where every bucket contains at most one boundary.
struct GridSearch {
  bool fits = false, needs_clamp = false;  // needs_clamp: t may be outside of all buckets
  float unit = 0;                          // t = ceil(z unit) - 1
  // Entry by bucket, modulo 128. High nibble: half steps from the bucket's start to its boundary. Low nibble: the code below the
  // boundary. A bucket without a boundary has one at its start, and the code before its own.
  alignas(64) uint8_t of_bucket[128] = {};
};
inline constexpr int64_t kGridVector = 64;  // codes found at a time

inline GridSearch grid_search_of(const KvFormat& format) {
  GridSearch search;
  constexpr int kCodes = 16, kBuckets = 128, kPerBucket = 16;
  if (format.bits != 4 || !format.grid_step || format.head_dim != format.gain_group || format.head_dim % kGridVector != 0)
    return search;
  const float step = *format.grid_step, per_step = 1 / step;
  search.unit = 2 * kPerBucket * per_step;
  const float most = std::sqrt(static_cast<float>(format.head_dim)) * search.unit * 1.001f;
  if (!(most < 0x1p15f)) return search;
  search.needs_clamp = most > 0x1p14f;
  std::array<uint8_t, kBuckets> bucket{};  // in ascending order
  int n = 0, filled = 0;
  for (int code = 0; code < kCodes; ++code) {
    const float level = format.codebook[static_cast<size_t>(code)];
    const int below = std::exchange(n, static_cast<int>(std::floor(level * per_step)));
    if (level != (static_cast<float>(n) + 0.5f) * step || n < -128 || n > 127) return search;
    if (code == 0) continue;
    const int boundary = below + n + 1 + kBuckets / 2 * kPerBucket,
              at = boundary / kPerBucket;  // boundary: in half steps from the start of the first bucket
    if (at < filled) return search;        // a bucket with two boundaries
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

// Encodes rows [token][head] of a tensor into one side of a cache. Points into the KvCache it was made from.
struct EncodePlan {
  SideView side;
  RowsView x;
  MeanView mean;
  RotatePlan rotate;
  float root = 1;  // sqrt(gain_group)
  // Boundaries between levels as an implicit binary search tree: node 1 is the root, nodes 2 e and 2 e + 1 are the lower and upper
  // child of node e. A descent of b steps from the root ends at 2^b + code.
  alignas(64) float tree[256];
  // Equidistant levels: floor(z * guess_factor + guess_offset) is the code of z or one less. The offset is low by 0.001,
  // so that rounding cannot make the guess too high.
  float guess_factor = 0, guess_offset = 0;
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
  std::fill_n(plan.tree, 16, 0.0f);  // vector loads begin at entry 0
  for (int depth = 0; depth < format.bits; ++depth)
    for (int i = 0; i < 1 << depth; ++i) {
      const auto upper = static_cast<size_t>((2 * i + 1) << (format.bits - 1 - depth));  // the first code above the boundary
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

// Decodes cache rows of one side into a tensor.
struct DecodePlan {
  SideView side;
  RowsView x;
  bool rotated = false;  // output stays in the rotated domain, without the mean
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

// Tokens [first, first + count) of one sequence, with their cache rows. A token without a cache row is inert.
struct TokenLocations {
  int64_t first = 0, count = 0;
  const KvLocation* at = nullptr;
};

}  // namespace weft::cpu
