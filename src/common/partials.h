// Split-KV partials (o, m, l): where both layouts keep them, and the rule that merges them.
//
// Everything here is constexpr, so that CUDA code may call it too.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

#include "weft/compressed_attention.h"

namespace weft {

// Addresses of the partials of rows (t, h): both layouts are strided views, once coordinate j is split into (j / 4, j % 4).
struct PartialsView {
  float* o = nullptr;
  float* m = nullptr;
  float* l = nullptr;
  int64_t o_token = 0, o_head = 0, o_block = 0, o_four = 0;  // strides in floats
  int64_t m_token = 0, m_head = 0, m_block = 0;
  int64_t l_token = 0, l_head = 0, l_block = 0;
  float empty_m = -std::numeric_limits<float>::infinity();  // an m at or below this marks an empty block, as l = 0 does

  constexpr int64_t o_at(int64_t t, int64_t h, int64_t b, int64_t j) const {
    return t * o_token + h * o_head + b * o_block + j / 4 * o_four + j % 4;
  }
  constexpr int64_t m_at(int64_t t, int64_t h, int64_t b) const { return t * m_token + h * m_head + b * m_block; }
  constexpr int64_t l_at(int64_t t, int64_t h, int64_t b) const { return t * l_token + h * l_head + b * l_block; }
  // Does block b of the row hold no token? Its o is then not to be read.
  constexpr bool empty(int64_t t, int64_t h, int64_t b) const { return l[l_at(t, h, b)] == 0 || m[m_at(t, h, b)] <= empty_m; }
};

// `T`, `Hq` and `Dv` are those of the call; the tensors have passed validate().
inline PartialsView partials_view(const AttentionPartials& p, int64_t T, int64_t Hq, int64_t Dv) {
  PartialsView view;
  if (p.layout == PartialLayout::blocks) {
    view.o = static_cast<float*>(p.o.data);
    view.m = static_cast<float*>(p.m.data);
    view.l = static_cast<float*>(p.l.data);
    view.o_token = p.o.strides[0], view.o_head = p.o.strides[1], view.o_block = p.o.strides[2], view.o_four = 4;
    view.m_token = p.m.strides[0], view.m_head = p.m.strides[1], view.m_block = p.m.strides[2];
    view.l_token = p.l.strides[0], view.l_head = p.l.strides[1], view.l_block = p.l.strides[2];
    return view;
  }
  const int64_t B = p.count;
  const int64_t pairs = T * Hq * B;  // of l and m; none: there may be no memory either
  view.o = static_cast<float*>(p.buffer.data);
  view.l = view.o + pairs * Dv;
  view.m = view.l + (pairs > 0 ? 1 : 0);
  view.o_token = Hq * Dv * B, view.o_head = Dv * B, view.o_block = 4, view.o_four = 4 * B;
  view.m_token = view.l_token = 2 * Hq * B;
  view.m_head = view.l_head = 2 * B;
  view.m_block = view.l_block = 2;
  view.empty_m = -FLT_MAX / 2;
  return view;
}

// The (m, l) of a growing set of tokens. A single token is (score, 1), a sink (logit, 1) with o = 0.
template <class Real>
struct SoftmaxSum {
  Real m = -std::numeric_limits<Real>::infinity();
  Real l = 0;

  // Joins another set and returns how o follows: o = keep * o + take * other_o. Empty sets (l = 0 or m = -inf) change nothing,
  // which also keeps -inf - -inf from ever being formed; a NaN score stays NaN.
  struct Factors {
    Real keep, take;
  };
  constexpr Factors join(Real other_m, Real other_l) {
    constexpr Real kNone = -std::numeric_limits<Real>::infinity();
    if (other_l == 0 || other_m == kNone) return {1, 0};
    const Real top = m > other_m ? m : other_m;
    const Real keep = std::exp(m - top), take = std::exp(other_m - top);
    m = top;
    l = l * keep + other_l * take;
    return {keep, take};
  }
  // log sum e^s over the set, -inf when it is empty.
  constexpr Real log_sum() const { return l > 0 || l != l ? m + std::log(l) : -std::numeric_limits<Real>::infinity(); }
  // What o is multiplied by at the end: 1 / l, 0 for the empty set.
  constexpr Real inverse() const { return l == 0 ? 0 : 1 / l; }
};

}  // namespace weft
