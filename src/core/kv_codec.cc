// What legal formats, and legal arguments of kv_rotate, kv_encode, kv_decode and kv_repack are.
#include "weft/kv_codec.h"

#include <cfloat>
#include <cmath>
#include <tuple>

#include "common/hadamard_bits.h"
#include "core/kv_cache_check.h"
#include "core/op_limits.h"

namespace weft {
namespace {

constexpr const char* kLegalBits = "; passthrough or 2 to 8 bits";

// Is every level finite and above the one before? Without branches, because every call on a cache asks this of both codebooks.
bool ascending(const float* levels, int count) {
  int good = std::isfinite(levels[0]);
  for (int i = 1; i < count; ++i) good &= static_cast<int>(levels[i] > levels[i - 1]) & static_cast<int>(levels[i] <= FLT_MAX);
  return good != 0;
}

// Can the level be (n + 1/2) * step with n in -128..127?
bool in_grid(float level, float step) { return level >= -128 * step && level < 128 * step; }

// Is a level in_grid() none of these products, up to rounding? `inverse` is 1 / step. Adding 128 makes the conversion to int the floor.
inline int off_grid(float level, float step, float inverse) {
  const float wanted = (static_cast<float>(static_cast<int>(level * inverse + 128)) - 127.5f) * step;
  return static_cast<int>(std::fabs(level - wanted) > 1e-6f * std::fabs(wanted));
}

// Of ascending levels. Without branches too.
bool all_on_grid(const float* levels, int count, float step) {
  if (!in_grid(levels[0], step) || !in_grid(levels[count - 1], step)) return false;
  const float inverse = 1 / step;
  int off = 0;
  for (int i = 0; i < count; ++i) off |= off_grid(levels[i], step, inverse);
  return off == 0;
}

// The rules of a format. The first that is broken is given to no(what), which makes the Status.
template <class No>
Status format_rules(const KvFormat& format, const No& no) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  const auto unknown = [](auto value, auto last) { return static_cast<int64_t>(value) < 0 || value > last; };
  const int64_t D = format.head_dim;
  if (D < 8 || D > kMaxHeadDim || D % 8 != 0)
    return no("has head_dim " + number(D) + ", wanted a multiple of 8 from 8 to " + number(kMaxHeadDim));
  if (format.passthrough) {
    if (kFloatTypes.has(*format.passthrough)) return {};
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
  if (!kFloatTypes.has(format.gain_dtype))
    return no(std::string("has gain_dtype ") + dtype_name(format.gain_dtype) + ", wanted f32, f16 or bf16");
  if (!std::isfinite(format.tiny_norm) || format.tiny_norm < 0)
    return no("has tiny_norm " + std::to_string(format.tiny_norm) + ", wanted a finite number >= 0");
  const float* levels = format.codebook.data();
  const int count = 1 << format.bits;
  for (int i = 0; !ascending(levels, count) && i < count; ++i) {
    if (!std::isfinite(levels[i])) return no("has a codebook whose level " + number(i) + " is not finite");
    if (i > 0 && !(levels[i] > levels[i - 1]))
      return no("has a codebook whose level " + number(i) + " is not above level " + number(i - 1));
  }
  if (format.grid_step) {
    const float step = *format.grid_step;
    if (!std::isnormal(step) || step <= 0) return no("has grid_step " + std::to_string(step) + ", wanted a finite number > 0");
    for (int i = 0; !all_on_grid(levels, count, step) && i < count; ++i)
      if (!in_grid(levels[i], step) || off_grid(levels[i], step, 1 / step))
        return no("has a grid_step, but level " + number(i) + " is not (n + 1/2) grid_step with n in -128..127");
  }
  const Tensor& mean = format.mean;
  if (mean.present() && (mean.rank != 2 || mean.size(1) != D || mean.dtype != DType::f32))
    return no(std::string("has mean ") + dtype_name(mean.dtype) + " " + shape_text(mean) + ", wanted f32 [Hk, " + number(D) + "]");
  return {};
}

// Encode and decode name the same rows: tensors k and v of tokens at positions of sequences.
template <class Args>
Status validate_rows(const char* op, const Args& args) {
  Check check(op);
  check_kv_storage(check, op, args.cache);
  check.members(args);
  check_kv_lookup(check, args.cache);
  check.require(args.k.present() || args.v.present(), "k", "and v are both absent, wanted at least one");
  return std::move(check.memory(args)).status();
}

}  // namespace

Status validate(const KvFormat& format, std::string_view op, std::string_view member) {
  return format_rules(format, [&](const std::string& what) { return fail(Code::invalid_argument, op, member, what); });
}

Status validate_format(const KvFormat& format, const char* op, const Path& member) {
  return format_rules(format, [&](const std::string& what) { return fail(Code::invalid_argument, op, member.text(), what); });
}

Status validate(const KvRotateArgs& args) {
  Check check("kv_rotate");
  check.also(validate_format(args.format, "kv_rotate", "format")).bind("D", args.format.head_dim);
  return std::move(check.members(args).memory(args)).status();
}

Status validate(const KvEncodeArgs& args) { return validate_rows("kv_encode", args); }
Status validate(const KvDecodeArgs& args) { return validate_rows("kv_decode", args); }

Status validate(const KvRepackArgs& args) {
  const KvCache &from = args.from, &to = args.to;
  Check check("kv_repack"), check_to("kv_repack");  // two, since letters as "tile bytes" differ between the caches
  check_kv_storage(check, "kv_repack", from, "from");
  check_kv_storage(check_to, "kv_repack", to, "to");
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

std::string legal_head_dim() { return "D a multiple of 8 up to " + std::to_string(kMaxHeadDim); }

std::string legal_shapes(const KvRotateArgs&) { return legal_head_dim() + kLegalBits; }
std::string legal_shapes(const KvEncodeArgs&) { return legal_head_dim() + kLegalBits; }
std::string legal_shapes(const KvDecodeArgs&) { return legal_head_dim() + kLegalBits; }
std::string legal_shapes(const KvRepackArgs&) { return legal_head_dim() + kLegalBits; }

}  // namespace weft
