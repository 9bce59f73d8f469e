// What legal formats, and legal arguments of kv_rotate, kv_encode, kv_decode and kv_repack are.
#include "weft/kv_codec.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "common/hadamard_bits.h"
#include "core/check.h"
#include "core/kv_cache_check.h"

namespace weft {
namespace {

bool is_float(DType dtype) { return std::find(kFloatTypes.begin(), kFloatTypes.end(), dtype) != kFloatTypes.end(); }

// First level that is not (n + 1/2) * step, n in -128..127, up to the rounding of the products; -1 when all are.
int off_grid(const KvFormat& format, float step) {
  for (int i = 0; i < 1 << format.bits; ++i) {
    const float level = format.codebook[static_cast<size_t>(i)];
    const float n = std::floor(level / step);
    const float wanted = (n + 0.5f) * step;
    if (!(n >= -128 && n <= 127) || std::fabs(level - wanted) > 1e-6f * std::fabs(wanted)) return i;
  }
  return -1;
}

constexpr KvCacheNames kFromNames{{"from.k.format", "from.k.codes", "from.k.gains", "from.k.format.mean"},
                                  {"from.v.format", "from.v.codes", "from.v.gains", "from.v.format.mean"},
                                  "from.layout",
                                  "from.tile_order",
                                  "from.kind",
                                  "from.pinned"};
constexpr KvCacheNames kToNames{{"to.k.format", "to.k.codes", "to.k.gains", "to.k.format.mean"},
                                {"to.v.format", "to.v.codes", "to.v.gains", "to.v.format.mean"},
                                "to.layout",
                                "to.tile_order",
                                "to.kind",
                                "to.pinned"};

// Encode and decode name the same rows: tensors k and v of tokens at positions of sequences.
template <class Args>
Status validate_rows(const char* op, const Args& args) {
  Check check(op);
  check.tensor("positions", args.positions, {"T"}, {DType::i32});
  check.sequences("sequences", args.sequences, check.dim("T"));
  check_kv_storage(check, op, args.cache);
  check_kv_sequences(check, args.cache, Lengths::optional);
  check.require(args.k.present() || args.v.present(), "k", "and v are both absent, wanted at least one");
  check.optional_tensor("k", args.k, {"T", "Hk", "Dk"}).optional_tensor("v", args.v, {"T", "Hk", "Dv"});
  return std::move(check.memory(args)).status();
}

}  // namespace

Status validate(const KvFormat& format, std::string_view op, std::string_view member) {
  const auto no = [&](const std::string& what) { return fail(Code::invalid_argument, op, member, what); };
  const auto number = [](int64_t n) { return std::to_string(n); };
  const auto unknown = [](auto value, auto last) { return static_cast<int64_t>(value) < 0 || value > last; };
  const int64_t D = format.head_dim;
  if (D < 8 || D > kMaxHeadDim || D % 8 != 0)
    return no("has head_dim " + number(D) + ", wanted a multiple of 8 from 8 to " + number(kMaxHeadDim));
  if (format.passthrough) {
    if (is_float(*format.passthrough)) return {};
    return no(std::string("has passthrough ") + dtype_name(*format.passthrough) + ", wanted f32, f16 or bf16");
  }
  if (format.bits < 2 || format.bits > 8) return no("has bits " + number(format.bits) + ", wanted 2 to 8");
  if (unknown(format.rotation, Rotation::dense))
    return no("has rotation " + number(static_cast<int64_t>(format.rotation)) + ", wanted none, srht or dense");
  if (unknown(format.gain_rule, GainRule::unbiased) || unknown(format.gain_units, GainUnits::unit_vector) ||
      unknown(format.packing, Packing::byte))
    return no("has a gain_rule, gain_units or packing that is none of their values");
  if (format.rotation == Rotation::srht) {
    const int64_t n = format.rotation_group;
    if (hadamard_order(n).base == 0) return no("has rotation_group " + number(n) + ", wanted 2^k, 12 2^k, 20 2^k or 28 2^k");
    if (D % n != 0) return no("has rotation_group " + number(n) + ", wanted a divisor of head_dim " + number(D));
  } else if (format.rotation == Rotation::dense) {
    const Tensor& r = format.dense_rotation;
    if (r.rank != 2 || r.size(0) != D || r.size(1) != D || r.dtype != DType::f32)
      return no("has dense_rotation " + (r.present() ? std::string(dtype_name(r.dtype)) + " " + shape_text(r) : "absent") +
                ", wanted f32 [" + number(D) + ", " + number(D) + "]");
  }
  if (format.gain_group < 1 || D % format.gain_group != 0)
    return no("has gain_group " + number(format.gain_group) + ", wanted a divisor of head_dim " + number(D));
  if (!is_float(format.gain_dtype))
    return no(std::string("has gain_dtype ") + dtype_name(format.gain_dtype) + ", wanted f32, f16 or bf16");
  if (!std::isfinite(format.tiny_norm) || format.tiny_norm < 0)
    return no("has tiny_norm " + std::to_string(format.tiny_norm) + ", wanted a finite number >= 0");
  for (int i = 0; i < 1 << format.bits; ++i) {
    const float level = format.codebook[static_cast<size_t>(i)];
    if (!std::isfinite(level)) return no("has a codebook whose level " + number(i) + " is not finite");
    if (i > 0 && !(level > format.codebook[static_cast<size_t>(i - 1)]))
      return no("has a codebook whose level " + number(i) + " is not above level " + number(i - 1));
  }
  if (format.grid_step) {
    const float step = *format.grid_step;
    if (!std::isfinite(step) || step <= 0) return no("has grid_step " + std::to_string(step) + ", wanted a finite number > 0");
    if (const int i = off_grid(format, step); i >= 0)
      return no("has a grid_step, but level " + number(i) + " is not (n + 1/2) grid_step with n in -128..127");
  }
  const Tensor& mean = format.mean;
  if (mean.present() && (mean.rank != 2 || mean.size(1) != D || mean.dtype != DType::f32))
    return no(std::string("has mean ") + dtype_name(mean.dtype) + " " + shape_text(mean) + ", wanted f32 [Hk, " + number(D) + "]");
  return {};
}

Status validate(const KvRotateArgs& args) {
  Check check("kv_rotate");
  check.also(validate(args.format, "kv_rotate", "format")).bind("D", args.format.head_dim);
  check.tensor("x", args.x, {"T", "H", "D"}).tensor("y", args.y, {"T", "H", "D"});
  return std::move(check.memory(args)).status();
}

Status validate(const KvEncodeArgs& args) { return validate_rows("kv_encode", args); }

Status validate(const KvDecodeArgs& args) {
  Check check("kv_decode");
  check.also(validate_rows("kv_decode", args)).known("domain", args.domain, KvDomain::rotated);
  return std::move(check).status();
}

Status validate(const KvRepackArgs& args) {
  const KvCache &from = args.from, &to = args.to;
  Check check("kv_repack"), check_to("kv_repack");  // two, since letters as "tile bytes" differ between the caches
  check_kv_storage(check, "kv_repack", from, kFromNames);
  check_kv_storage(check_to, "kv_repack", to, kToNames);
  check.also(std::move(check_to).status());
  if (check.ok()) {
    check.require(from.k.codes.size(0) == to.k.codes.size(0), "to.k.codes", [&] {
      return "has " + std::to_string(to.k.codes.size(0)) + " blocks, wanted " + std::to_string(from.k.codes.size(0)) +
             " as from has";
    });
    check.require(from.heads() == to.heads(), "to.k.codes", [&] {
      return "has " + std::to_string(to.heads()) + " heads, wanted " + std::to_string(from.heads()) + " as from has";
    });
    check.require(from.capacity() == to.capacity(), "to.k.codes", [&] {
      return "has room for " + std::to_string(to.capacity()) + " tokens a block, wanted " + std::to_string(from.capacity()) +
             " as from has";
    });
    for (const auto& [name, a, b] :
         {std::tuple{"to.k.format", &from.k.format, &to.k.format}, {"to.v.format", &from.v.format, &to.v.format}})
      check.require(same_codes(*a, *b), name, [&, a = a, b = b] {
        return "is " + b->id + " of head_dim " + std::to_string(b->head_dim) + ", rows of " + a->id + " of head_dim " +
               std::to_string(a->head_dim) + " would not keep their codes, levels, rotation and gains";
      });
  }
  return std::move(check.memory(args)).status();
}

}  // namespace weft
