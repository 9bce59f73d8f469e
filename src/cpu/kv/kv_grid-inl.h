// Search of 4-bit codes on a grid, 64 at a time, for AVX-512 VBMI, which looks bytes up in a table of 128 (see GridSearch).
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_GRID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_GRID_INL_H_
#undef WEFT_CPU_KV_GRID_INL_H_
#else
#define WEFT_CPU_KV_GRID_INL_H_
#endif

#include "cpu/kv/kv_levels-inl.h"
#include "cpu/kv/kv_plans.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

// Permutations between four vectors of 16 coordinates and one vector of 64 bytes, in which byte i of lane l is coordinate 16 i + l.
struct GridBytes {
  alignas(64) uint16_t words[32];         // low 16 bits of each lane of two vectors
  alignas(64) uint8_t low[64], high[64];  // low and high bytes of two such results
  alignas(64) uint8_t in_order[64];       // to the order of coordinates
};
constexpr GridBytes grid_bytes() {
  GridBytes b{};
  for (int i = 0; i < 32; ++i) b.words[i] = static_cast<uint16_t>(i % 2 * 32 + i / 2 * 2);
  for (int i = 0; i < 64; ++i) {
    b.low[i] = static_cast<uint8_t>(i % 4 / 2 * 64 + i / 4 * 4 + i % 2 * 2);
    b.high[i] = static_cast<uint8_t>(b.low[i] + 1);
    b.in_order[i] = static_cast<uint8_t>(i % 16 * 4 + i / 16);
  }
  return b;
}
inline constexpr GridBytes kGridBytes = grid_bytes();

template <bool kClamp>
struct GridLevels : TableLevels<4> {
  __m512i buckets[2], words, low, high;
  VF origin;
  float unit;
  HWY_INLINE explicit GridLevels(const EncodePlan& plan)
      : TableLevels<4>(plan.side),
        buckets{_mm512_load_si512(plan.grid.of_bucket), _mm512_load_si512(plan.grid.of_bucket + 64)},
        words(_mm512_load_si512(kGridBytes.words)),
        low(_mm512_load_si512(kGridBytes.low)),
        high(_mm512_load_si512(kGridBytes.high)),
        origin(hn::Set(F32(), 0x1.8p23f - 1)),  // a sum in this binade is rounded to an integer
        unit(plan.grid.unit) {}

  // Codes of y[0, 64), which must be finite, in the low nibbles of bytes; high nibbles are unspecified. factor = unit * z / y.
  HWY_INLINE __m512i find(const float* y, VF factor) const {
    __m512i t[4];
    WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) t[i] = _mm512_castps_si512(
        _mm512_fmadd_round_ps(_mm512_load_ps(y + i * kLanes), factor.raw, origin.raw, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
    __m512i a = _mm512_permutex2var_epi16(t[0], words, t[1]), b = _mm512_permutex2var_epi16(t[2], words, t[3]);
    if constexpr (kClamp) {
      const __m512i least = _mm512_set1_epi16(-0x4000), most = _mm512_set1_epi16(0x3fff);
      a = _mm512_max_epi16(_mm512_min_epi16(a, most), least);
      b = _mm512_max_epi16(_mm512_min_epi16(b, most), least);
    }
    const __m512i bucket = _mm512_permutex2var_epi8(a, high, b), inside = _mm512_permutex2var_epi8(a, low, b);
    const __m512i code = _mm512_permutex2var_epi8(buckets[0], bucket, buckets[1]);
    // Compares whole half steps, in the high nibbles: setting the low nibble of `inside` makes the code in `code` irrelevant.
    const __mmask64 above = _mm512_cmpge_epu8_mask(_mm512_or_si512(inside, _mm512_set1_epi8(15)), code);
    return _mm512_mask_add_epi8(code, above, code, _mm512_set1_epi8(1));
  }
  // Levels of coordinates [16 kVector, 16 kVector + 16) of codes that find() returned.
  template <int kVector>
  HWY_INLINE VF level(__m512i codes) const {
    return of(VI{_mm512_srli_epi32(codes, 8 * kVector)});
  }
  // <y, c> as one partial sum per lane.
  HWY_INLINE VF products(const float* y, __m512i codes) const {
    const F32 d;
    VF sum = hn::Mul(hn::Load(d, y), level<0>(codes));
    sum = hn::MulAdd(hn::Load(d, y + kLanes), level<1>(codes), sum);
    sum = hn::MulAdd(hn::Load(d, y + 2 * kLanes), level<2>(codes), sum);
    return hn::MulAdd(hn::Load(d, y + 3 * kLanes), level<3>(codes), sum);
  }
  // sum + |c|^2 as one partial sum per lane.
  HWY_INLINE VF add_squares(__m512i codes, VF sum) const {
    const VF c[4] = {level<0>(codes), level<1>(codes), level<2>(codes), level<3>(codes)};
    WEFT_UNROLL for (int i = 0; i < 4; ++i) sum = hn::MulAdd(c[i], c[i], sum);
    return sum;
  }
};

// Stores codes that find() returned, a byte each, in the order of coordinates.
HWY_INLINE void store_grid_codes(__m512i codes, uint8_t* to) {
  codes = _mm512_permutexvar_epi8(_mm512_load_si512(kGridBytes.in_order), codes);
  _mm512_storeu_si512(to, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
}

template <class Levels>
constexpr bool kOnGrid = std::is_same_v<Levels, GridLevels<false>> || std::is_same_v<Levels, GridLevels<true>>;

#else
template <class Levels>
constexpr bool kOnGrid = false;
#endif

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
