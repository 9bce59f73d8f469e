// What the cpu kernels of kv_rotate, kv_encode, kv_decode and kv_repack read, lowered from the argument structs.
#pragma once

#include <algorithm>
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
