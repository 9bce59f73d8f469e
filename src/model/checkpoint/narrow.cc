// Quantises numbers to the types of stored weights: see narrow.h. Compiled without contraction of a * b + c, which would change bits.
#include "model/checkpoint/narrow.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "common/blocks_256.h"
#include "common/blocks_32.h"
#include "common/half.h"

namespace weft::model {
namespace {

void put_f16(float value, uint8_t* to) {
  const uint16_t bits = f32_to_f16(value);
  std::memcpy(to, &bits, sizeof bits);
}

// 1 / d, or 0 where 1 / d is not finite.
float inverse(float d) {
  const float inverse = 1 / d;
  return d == 0 || !std::isfinite(inverse) ? 0 : inverse;
}

uint8_t code_of(float value, int most) { return static_cast<uint8_t>(std::clamp(static_cast<int>(value), 0, most)); }

void put_q8_0(const float* x, uint8_t* to) {
  float most = 0;
  for (int i = 0; i < 32; ++i) most = std::max(most, std::abs(x[i]));
  const float d = most / 127, id = inverse(d);
  put_f16(d, to);
  for (int i = 0; i < 32; ++i) to[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(x[i] * id)));
}

// Codes 0 to 2 * zero - 1 of multiples of d around the code `zero`; the largest number gets code 0.
float symmetric_codes(const float* x, int zero, uint8_t* codes) {
  const float* const most = std::max_element(x, x + 32, [](float a, float b) { return std::abs(a) < std::abs(b); });
  const float d = *most / static_cast<float>(-zero), id = inverse(d);
  for (int i = 0; i < 32; ++i) codes[i] = code_of(x[i] * id + (static_cast<float>(zero) + 0.5f), 2 * zero - 1);
  return d;
}

// Codes 0 to `most` of multiples of d above the smallest number.
float offset_codes(const float* x, int most, uint8_t* codes, float& smallest) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  smallest = *low;
  const float d = (*high - *low) / static_cast<float>(most), id = inverse(d);
  for (int i = 0; i < 32; ++i) codes[i] = code_of((x[i] - *low) * id + 0.5f, most);
  return d;
}

void pack_halves(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}
void pack_fifth_bits(const uint8_t* codes, uint8_t* to) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(codes[i] >> 4) << i;
  std::memcpy(to, &bits, sizeof bits);
}

void put_q4_0(const float* x, uint8_t* to) {
  uint8_t codes[32];
  put_f16(symmetric_codes(x, 8, codes), to);
  pack_halves(codes, to + 2);
}
void put_q5_0(const float* x, uint8_t* to) {
  uint8_t codes[32];
  put_f16(symmetric_codes(x, 16, codes), to);
  pack_fifth_bits(codes, to + 2);
  pack_halves(codes, to + 6);
}
void put_q4_1(const float* x, uint8_t* to) {
  uint8_t codes[32];
  float smallest = 0;
  put_f16(offset_codes(x, 15, codes, smallest), to);
  put_f16(smallest, to + 2);
  pack_halves(codes, to + 4);
}
void put_q5_1(const float* x, uint8_t* to) {
  uint8_t codes[32];
  float smallest = 0;
  put_f16(offset_codes(x, 31, codes, smallest), to);
  put_f16(smallest, to + 2);
  pack_fifth_bits(codes, to + 4);
  pack_halves(codes, to + 8);
}

// A group of numbers as scale * code - minimum.
struct Group {
  float scale = 0, minimum = 0;
};

// Codes for a given scale and minimum, and the squared error.
float fit_codes(const float* x, int count, Group group, int low, int high, int* codes) {
  const float id = inverse(group.scale);
  float error = 0;
  for (int i = 0; i < count; ++i) {
    const float code = std::clamp((x[i] + group.minimum) * id, static_cast<float>(low), static_cast<float>(high));
    codes[i] = static_cast<int>(std::lround(code));
    const float left = group.scale * static_cast<float>(codes[i]) - group.minimum - x[i];
    error += left * left;
  }
  return error;
}

// The scale, and the minimum >= 0, with the least squared error for given codes.
Group least_squares(const float* x, int count, const int* codes) {
  double sum_c = 0, sum_cc = 0, sum_x = 0, sum_cx = 0;
  for (int i = 0; i < count; ++i) {
    const double c = codes[i], v = static_cast<double>(x[i]);
    sum_c += c, sum_cc += c * c, sum_x += v, sum_cx += c * v;
  }
  const double n = count, determinant = n * sum_cc - sum_c * sum_c;
  if (determinant > 0) {
    const double scale = (n * sum_cx - sum_c * sum_x) / determinant, minimum = (sum_c * scale - sum_x) / n;
    if (minimum >= 0 && scale >= 0) return {static_cast<float>(scale), static_cast<float>(minimum)};
  }
  return {sum_cc > 0 ? static_cast<float>(std::max(0.0, sum_cx / sum_cc)) : 0.0f, 0};
}

// Tries scales around the scale that covers all numbers, and refines each by least squares.
Group search_affine(const float* x, int count, int most) {
  const float low = std::min(0.0f, *std::min_element(x, x + count)), high = std::max(0.0f, *std::max_element(x, x + count));
  Group best{(high - low) / static_cast<float>(most), -low};
  int codes[32];
  float least = fit_codes(x, count, best, 0, most, codes);
  for (int step = -8; step <= 8; ++step) {
    Group trial{(high - low) / (static_cast<float>(most) + 0.1f * static_cast<float>(step)), -low};
    for (int round = 0; round < 2; ++round) {
      fit_codes(x, count, trial, 0, most, codes);
      trial = least_squares(x, count, codes);
      const float error = fit_codes(x, count, trial, 0, most, codes);
      if (error < least) least = error, best = trial;
    }
  }
  return best;
}

// The same search without a minimum: signed codes from -half to half - 1, and a scale of either sign.
float search_symmetric(const float* x, int count, int half) {
  const float extreme = *std::max_element(x, x + count, [](float a, float b) { return std::abs(a) < std::abs(b); });
  int codes[16];
  float best = extreme / static_cast<float>(-half);
  float least = fit_codes(x, count, {best, 0}, -half, half - 1, codes);
  for (int step = -8; step <= 8; ++step) {
    float trial = extreme / -(static_cast<float>(half) + 0.1f * static_cast<float>(step));
    fit_codes(x, count, {trial, 0}, -half, half - 1, codes);
    double squares = 0, products = 0;
    for (int i = 0; i < count; ++i) squares += codes[i] * codes[i], products += codes[i] * static_cast<double>(x[i]);
    if (squares == 0) continue;
    trial = static_cast<float>(products / squares);
    const float error = fit_codes(x, count, {trial, 0}, -half, half - 1, codes);
    if (error < least) least = error, best = trial;
  }
  return best;
}

// Scales and minima of eight groups in 6 bits, as GroupScales unpacks them.
void pack_scales(const uint8_t* scale, const uint8_t* minimum, uint8_t* to) {
  for (int i = 0; i < 4; ++i) {
    to[i] = static_cast<uint8_t>(scale[i] | (scale[i + 4] >> 4) << 6);
    to[i + 4] = static_cast<uint8_t>(minimum[i] | (minimum[i + 4] >> 4) << 6);
    to[i + 8] = static_cast<uint8_t>((scale[i + 4] & 15) | (minimum[i + 4] & 15) << 4);
  }
}

// Writes the header of Q4_K or Q5_K and gives the codes of all 256 numbers.
void put_affine_header(const float* x, int most, uint8_t* to, int* codes) {
  Group groups[8];
  float largest_scale = 0, largest_minimum = 0;
  for (int g = 0; g < 8; ++g) {
    groups[g] = search_affine(x + 32 * g, 32, most);
    largest_scale = std::max(largest_scale, groups[g].scale);
    largest_minimum = std::max(largest_minimum, groups[g].minimum);
  }
  put_f16(largest_scale / 63, to);
  put_f16(largest_minimum / 63, to + 2);
  const float d = block_f16(to), dmin = block_f16(to + 2);
  uint8_t scale[8], minimum[8];
  for (int g = 0; g < 8; ++g) {
    scale[g] = code_of(groups[g].scale * inverse(d) + 0.5f, 63);
    minimum[g] = code_of(groups[g].minimum * inverse(dmin) + 0.5f, 63);
    const Group stored{d * static_cast<float>(scale[g]), dmin * static_cast<float>(minimum[g])};
    fit_codes(x + 32 * g, 32, stored, 0, most, codes + 32 * g);
  }
  pack_scales(scale, minimum, to + 4);
}

void put_q4_k(const float* x, uint8_t* to) {
  int codes[256];
  put_affine_header(x, 15, to, codes);
  for (int pair = 0; pair < 4; ++pair)
    for (int i = 0; i < 32; ++i)
      to[16 + 32 * pair + i] = static_cast<uint8_t>(codes[64 * pair + i] | codes[64 * pair + 32 + i] << 4);
}

void put_q5_k(const float* x, uint8_t* to) {
  int codes[256];
  put_affine_header(x, 31, to, codes);
  std::memset(to + 16, 0, 32);
  for (int group = 0; group < 8; ++group)
    for (int i = 0; i < 32; ++i) to[16 + i] = static_cast<uint8_t>(to[16 + i] | (codes[32 * group + i] >> 4) << group);
  for (int pair = 0; pair < 4; ++pair)
    for (int i = 0; i < 32; ++i)
      to[48 + 32 * pair + i] = static_cast<uint8_t>((codes[64 * pair + i] & 15) | (codes[64 * pair + 32 + i] & 15) << 4);
}

void put_q6_k(const float* x, uint8_t* to) {
  float scales[16], extreme = 0;
  for (int g = 0; g < 16; ++g) {
    scales[g] = search_symmetric(x + 16 * g, 16, 32);
    if (std::abs(scales[g]) > std::abs(extreme)) extreme = scales[g];
  }
  put_f16(extreme / -128, to + 208);
  const float d = block_f16(to + 208);
  std::memset(to, 0, 192);
  for (int g = 0; g < 16; ++g) {
    const int scale = std::clamp(static_cast<int>(std::lround(scales[g] * inverse(d))), -128, 127);
    to[192 + g] = static_cast<uint8_t>(static_cast<int8_t>(scale));
    int codes[16];
    fit_codes(x + 16 * g, 16, {d * static_cast<float>(scale), 0}, -32, 31, codes);
    const int half = g / 8, quarter = g % 8 / 2;
    for (int i = 0; i < 16; ++i) {
      const int code = codes[i] + 32, column = 16 * (g % 2) + i;
      uint8_t &low = to[64 * half + 32 * (quarter & 1) + column], &high = to[128 + 32 * half + column];
      low = static_cast<uint8_t>(low | (code & 15) << (quarter & 2 ? 4 : 0));
      high = static_cast<uint8_t>(high | (code >> 4) << (2 * quarter));
    }
  }
}

template <void (*put)(const float*, uint8_t*)>
void narrow_blocks(WeightType type, const float* from, int64_t count, uint8_t* to) {
  const WeightLayout layout = weight_layout(type);
  for (int64_t i = 0; i < count; i += layout.block, to += layout.bytes) put(from + i, to);
}

template <uint16_t (*round)(float)>
void narrow_halves(const float* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = round(from[i]);
    std::memcpy(to + 2 * i, &bits, sizeof bits);
  }
}

}  // namespace

void narrow(WeightType type, const float* from, int64_t count, void* to) {
  auto* const bytes = static_cast<uint8_t*>(to);
  switch (type) {
    case WeightType::f32: std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float)); return;
    case WeightType::f16: return narrow_halves<f32_to_f16>(from, count, bytes);
    case WeightType::bf16: return narrow_halves<f32_to_bf16>(from, count, bytes);
    case WeightType::q8_0: return narrow_blocks<put_q8_0>(type, from, count, bytes);
    case WeightType::q4_0: return narrow_blocks<put_q4_0>(type, from, count, bytes);
    case WeightType::q4_1: return narrow_blocks<put_q4_1>(type, from, count, bytes);
    case WeightType::q5_0: return narrow_blocks<put_q5_0>(type, from, count, bytes);
    case WeightType::q5_1: return narrow_blocks<put_q5_1>(type, from, count, bytes);
    case WeightType::q4_k: return narrow_blocks<put_q4_k>(type, from, count, bytes);
    case WeightType::q5_k: return narrow_blocks<put_q5_k>(type, from, count, bytes);
    case WeightType::q6_k: return narrow_blocks<put_q6_k>(type, from, count, bytes);
  }
}

}  // namespace weft::model
