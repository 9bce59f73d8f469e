// delta_gates, short_conv, l2_norm, gated_rms_norm: closed forms and properties on the reference, and every validation rule.
#include "weft/delta_parts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cases/memory.h"

namespace weft {
namespace {

using cases::get;
using cases::Memory;
using cases::Rng;

constexpr Stream kReference{Backend::reference};

TEST(L2Norm, ThreeFourFive) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {1, 2}), y = memory.make(DType::f32, {1, 2});
  cases::set(x, 0, 3);
  cases::set(x, 1, 4);
  l2_norm(kReference, {x, y, 0.0f});
  EXPECT_FLOAT_EQ(static_cast<float>(get(y, 0)), 0.6f);
  EXPECT_FLOAT_EQ(static_cast<float>(get(y, 1)), 0.8f);
  EXPECT_TRUE(memory.guards_intact());
}

}  // namespace
}  // namespace weft
