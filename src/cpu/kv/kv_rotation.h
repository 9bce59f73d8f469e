// RotatePlan: a rotation as the cpu kernels read it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/hadamard_bits.h"
#include "weft/kv_codec.h"

namespace weft::cpu {

// R or, for the inverse, R^T of a format. Points into the format's dense matrix, if there is one.
struct RotatePlan {
  Rotation rotation = Rotation::none;
  bool inverse = false;
  int64_t D = 0;
  int64_t run = 1, base = 1;  // srht: a rotation group is H_base (x) H_run, with run = 2^k
  const float* dense = nullptr;
  int64_t dense_row = 0;  // stride
  // srht: sign(j) / sqrt(n). Multiplies x before the transform, or after it in the inverse. 0 past D.
  alignas(64) float signs[kMaxHeadDim + 16];
  // base > 1: for coordinate j of a group, the sign bits of row j / run of H_base (of its transpose, in the inverse), first column
  // in the top bit.
  alignas(64) uint32_t mix[kMaxHeadDim + 16];
};

inline RotatePlan rotate_plan(const KvFormat& format, bool inverse) {
  RotatePlan plan;
  plan.D = format.head_dim;
  plan.inverse = inverse;
  if (format.passthrough) return plan;
  plan.rotation = format.rotation;
  if (format.rotation == Rotation::dense) {
    plan.dense = static_cast<const float*>(format.dense_rotation.data);
    plan.dense_row = format.dense_rotation.stride(0);
  } else if (format.rotation == Rotation::srht) {
    const int64_t n = format.rotation_group;
    const HadamardOrder order = hadamard_order(n);
    plan.run = order.sylvester;
    plan.base = order.base;
    const float scale = 1 / std::sqrt(static_cast<float>(n));
    for (int64_t j = 0; j < plan.D; ++j) plan.signs[j] = format.signs[static_cast<size_t>(j / 32)] >> (j % 32) & 1 ? -scale : scale;
    std::fill_n(plan.signs + plan.D, 16, 0.0f);
    std::fill_n(plan.mix + n, 16, 0u);
    for (int64_t i = 0; plan.base > 1 && i < plan.base; ++i) {
      uint32_t row = 0;
      for (int64_t j = 0; j < plan.base; ++j) row |= (inverse ? order.rows[j] >> i : order.rows[i] >> j) << 31 >> j;
      for (int64_t r = 0; r < plan.run; ++r) plan.mix[i * plan.run + r] = row;
    }
  }
  return plan;
}

}  // namespace weft::cpu
