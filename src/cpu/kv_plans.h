// What the cpu kernels of kv_rotate, kv_encode, kv_decode and kv_repack read, lowered from the argument structs.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cpu/delta_params.h"
#include "cpu/kv_params.h"
#include "cpu/kv_rotation.h"
#include "shared/kv_index.h"

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
  bool fits = false;
  float most = 0, slope = 0, bend = 0;
};

// Tables longer than a vector are not searched this way.
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
  for (int i = 1; i < n; ++i) c.fits &= std::fabs(p(boundary[static_cast<size_t>(i)]) - (i - middle)) < kNear;
  return c;
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
