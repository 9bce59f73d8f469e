// Presets of KV formats, and the sizes of their rows.
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "common/bit_pack.h"
#include "common/codebooks.h"
#include "common/hadamard_bits.h"
#include "core/check.h"
#include "weft/kv_codec.h"

namespace weft {
namespace {

constexpr std::string_view kOwnPrefix = "weft1-";

[[noreturn]] void refuse(const char* op, const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, op, argument, what));
}

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Levels from their positive half.
void mirror(std::span<const float> positive, float scale, KvFormat& format) {
  const size_t half = positive.size();
  for (size_t i = 0; i < half; ++i) {
    format.codebook[half + i] = positive[i] * scale;
    format.codebook[half - 1 - i] = -format.codebook[half + i];
  }
}

// Checks what every preset needs of head_dim, then starts a format.
KvFormat start(const char* op, std::string id, int64_t head_dim) {
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0)
    refuse(op, "head_dim", "is " + std::to_string(head_dim) + ", wanted a multiple of 8 from 8 to " + std::to_string(kMaxHeadDim));
  KvFormat format;
  format.id = std::move(id);
  format.head_dim = head_dim;
  return format;
}

KvFormat own_format(const char* op, int bits, int64_t head_dim, uint64_t seed) {
  KvFormat format = start(op, std::string(kOwnPrefix) + std::to_string(bits), head_dim);
  format.bits = bits;
  format.rotation_group = largest_hadamard_order(head_dim);
  format.signs = srht_signs(seed, head_dim);
  format.seed = seed;
  format.gain_group = head_dim;
  const GridTable& table = kGridTables[bits - 2];
  const int count = 1 << bits;
  for (int i = 0; i < count; ++i) {
    const int n = table.n ? table.n[i] : i - count / 2;
    format.codebook[static_cast<size_t>(i)] = (static_cast<float>(n) + 0.5f) * table.step;
  }
  format.grid_step = table.step;
  return format;
}

KvFormat passthrough_format(const char* op, DType dtype, int64_t head_dim) {
  KvFormat format = start(op, dtype_name(dtype), head_dim);
  format.passthrough = dtype;
  format.rotation = Rotation::none;
  return format;
}

// All of AURA but its table.
KvFormat aura_without_table(const char* op, int bits, int64_t head_dim, uint64_t seed) {
  KvFormat format = start(op, "aura-" + std::to_string(bits), head_dim);
  if (!is_power_of_two(head_dim)) refuse(op, "head_dim", "is " + std::to_string(head_dim) + ", AURA wants a power of two");
  format.bits = bits;
  format.rotation_group = head_dim;
  format.signs = srht_signs(seed, head_dim);
  format.seed = seed;
  format.gain_group = head_dim;
  format.gain_rule = GainRule::matched;
  format.gain_dtype = DType::f32;
  format.gain_units = GainUnits::unit_vector;
  format.tiny_norm = 1e-8f;
  return format;
}

std::span<const float> aura_table(int bits) {
  switch (bits) {
    case 2: return kAura2At128;
    case 3: return kAura3At128;
    case 4: return kAura4At128;
    default: return {};
  }
}

KvFormat published_aura(const char* op, int bits, int64_t head_dim, uint64_t seed) {
  KvFormat format = aura_without_table(op, bits, head_dim, seed);
  mirror(aura_table(bits), std::sqrt(128.0f), format);
  return format;
}

KvFormat tq_format(const char* op, std::string id, int bits, Packing packing, std::span<const float> positive, int64_t head_dim) {
  KvFormat format = start(op, std::move(id), head_dim);
  if (head_dim != 256 && head_dim != 512) refuse(op, "head_dim", "is " + std::to_string(head_dim) + ", TQ wants 256 or 512");
  format.bits = bits;
  format.rotation_group = head_dim;
  std::copy_n(kTqSigns, head_dim / 32, format.signs.begin());
  format.gain_group = 256;
  format.gain_rule = GainRule::rms;
  format.gain_dtype = DType::f32;
  // At 256 the stored number is the norm of the row, at 512 the RMS of each half.
  format.gain_units = head_dim == 256 ? GainUnits::unit_vector : GainUnits::normal;
  format.packing = packing;
  mirror(positive, 1, format);
  return format;
}

// "2".."8" as a number.
std::optional<int> digit(std::string_view text, int low, int high) {
  if (text.size() != 1 || text[0] < '0' + low || text[0] > '0' + high) return {};
  return text[0] - '0';
}

std::optional<DType> float_dtype(std::string_view text) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    if (text == dtype_name(dtype)) return dtype;
  return {};
}

bool drop_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// One of Weft's own or a passthrough side; nothing when the name is neither.
std::optional<KvFormat> own_or_passthrough(const char* op, std::string_view side, int64_t head_dim, uint64_t seed) {
  if (const auto bits = digit(side, 2, 8)) return own_format(op, *bits, head_dim, seed);
  if (const auto dtype = float_dtype(side)) return passthrough_format(op, *dtype, head_dim);
  return {};
}

// "4" of tq, "5", "6" or "8" of tqhb.
std::optional<KvFormat> tq_or_tqhb(const char* op, std::string_view name, int64_t head_dim) {
  if (name == "tq-4") return tq_format(op, std::string(name), 4, Packing::dense, kTq4, head_dim);
  if (name == "tqhb-5") return tq_format(op, std::string(name), 5, Packing::byte, kTqHb5, head_dim);
  if (name == "tqhb-6") return tq_format(op, std::string(name), 6, Packing::byte, kTqHb6, head_dim);
  if (name == "tqhb-8") return tq_format(op, std::string(name), 8, Packing::byte, kTqHb8, head_dim);
  return {};
}

}  // namespace

SignBits srht_signs(uint64_t seed, int64_t head_dim) {
  // splitmix64 spreads the seed, xorshift64 draws the bits: a low bit of 1 is +1.
  uint64_t z = seed + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  uint64_t state = (z ^ (z >> 31)) | 1;
  SignBits signs{};
  for (int64_t j = 0; j < std::min(head_dim, kMaxHeadDim); ++j) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    if ((state & 1) == 0) signs[static_cast<size_t>(j / 32)] |= 1u << (j % 32);
  }
  return signs;
}

int64_t largest_hadamard_order(int64_t head_dim) {
  for (int64_t n = head_dim; n > 1; --n)
    if (head_dim % n == 0 && hadamard_order(n).base > 0) return n;
  return 1;
}

KvFormat kv_format(std::string_view side, int64_t head_dim, uint64_t seed) {
  const char* op = "kv_format";
  std::string_view name = side;
  if (drop_prefix(name, kOwnPrefix) && digit(name, 2, 8)) return own_format(op, *digit(name, 2, 8), head_dim, seed);
  name = side;
  if (drop_prefix(name, "aura-") && digit(name, 2, 4)) return published_aura(op, *digit(name, 2, 4), head_dim, seed);
  if (auto format = own_or_passthrough(op, side, head_dim, seed)) return *std::move(format);
  if (auto format = tq_or_tqhb(op, side, head_dim)) return *std::move(format);
  refuse(op, "side", "is " + quoted(side) + ", wanted 2 to 8, f32, f16, bf16, aura-2 to aura-4, tq-4, tqhb-5, tqhb-6 or tqhb-8");
}

KvRecipe kv_recipe(std::string_view name, int64_t k_head_dim, int64_t v_head_dim, uint64_t seed) {
  const char* op = "kv_recipe";
  std::string_view rest = name;
  const bool aura = drop_prefix(rest, "aura");
  if (aura) {
    drop_prefix(rest, "-");
  } else {
    drop_prefix(rest, kOwnPrefix);
  }
  const size_t cut = rest.find('v');
  if (cut != std::string_view::npos) {
    const std::string_view k = rest.substr(0, cut), v = rest.substr(cut + 1);
    if (aura) {
      if (digit(k, 2, 4) && digit(v, 2, 4))
        return {"aura-" + std::string(rest), published_aura(op, *digit(k, 2, 4), k_head_dim, seed),
                published_aura(op, *digit(v, 2, 4), v_head_dim, seed)};
    } else if ((digit(k, 2, 8) || float_dtype(k)) && (digit(v, 2, 8) || float_dtype(v))) {
      const bool coded = digit(k, 2, 8) || digit(v, 2, 8);
      return {coded ? std::string(kOwnPrefix) + std::string(rest) : std::string(k == v ? k : rest),
              *own_or_passthrough(op, k, k_head_dim, seed), *own_or_passthrough(op, v, v_head_dim, seed)};
    }
  } else if (const auto dtype = float_dtype(name)) {
    return {std::string(name), passthrough_format(op, *dtype, k_head_dim), passthrough_format(op, *dtype, v_head_dim)};
  } else if (name.starts_with("tq")) {
    // "tqhb8" and its id "tqhb-8".
    std::string id(name);
    if (id.find('-') == std::string::npos) id.insert(id.size() - 1, "-");
    if (auto k = tq_or_tqhb(op, id, k_head_dim)) return {id, *std::move(k), *tq_or_tqhb(op, id, v_head_dim)};
  }
  refuse(op, "name",
         "is " + quoted(name) +
             ", wanted <k>v<v> with 2 to 8, f32, f16 or bf16 on each side (8v4, f16v4), f32, f16 or bf16 for both, "
             "aura<k>v<v> of 2 to 4, tq4, tqhb5, tqhb6 or tqhb8");
}

KvFormat aura_format(int bits, int64_t head_dim, uint64_t seed, const float* levels) {
  const char* op = "aura_format";
  if (bits < 2 || bits > 8) refuse(op, "bits", "is " + std::to_string(bits) + ", wanted 2 to 8");
  if (!levels) refuse(op, "levels", "is null, wanted " + std::to_string(1 << bits) + " ascending numbers");
  KvFormat format = aura_without_table(op, bits, head_dim, seed);
  std::copy_n(levels, size_t{1} << bits, format.codebook.begin());
  // Another table makes other bytes, so it may not carry the published name.
  if (aura_table(bits).empty() || format.codebook != published_aura(op, bits, head_dim, seed).codebook) format.id += "-custom";
  if (Status status = validate(format, op, "levels"); !status) throw Error(std::move(status));
  return format;
}

bool same_codes(const KvFormat& a, const KvFormat& b) {
  if (a.head_dim != b.head_dim || a.passthrough != b.passthrough) return false;
  if (a.passthrough) return true;
  if (a.bits != b.bits || a.rotation != b.rotation || a.gain_group != b.gain_group) return false;
  if (a.gain_dtype != b.gain_dtype || a.gain_units != b.gain_units || !same_view(a.mean, b.mean)) return false;
  if (a.rotation == Rotation::dense && !same_view(a.dense_rotation, b.dense_rotation)) return false;
  if (a.rotation == Rotation::srht) {
    if (a.rotation_group != b.rotation_group) return false;
    for (int64_t j = 0; j < a.head_dim; ++j)
      if (((a.signs[static_cast<size_t>(j / 32)] ^ b.signs[static_cast<size_t>(j / 32)]) >> (j % 32)) & 1) return false;
  }
  return std::equal(a.codebook.begin(), a.codebook.begin() + (1 << a.bits), b.codebook.begin());
}

int64_t code_bytes(const KvFormat& format) {
  if (format.passthrough) return format.head_dim * dtype_bytes(*format.passthrough);
  return format.packing == Packing::byte ? format.head_dim : packed_bytes(format.head_dim, format.bits);
}

int64_t gain_bytes(const KvFormat& format) {
  return format.passthrough ? 0 : format.head_dim / format.gain_group * dtype_bytes(format.gain_dtype);
}

int64_t bytes_per_token(const KvRecipe& recipe) {
  return code_bytes(recipe.k) + gain_bytes(recipe.k) + code_bytes(recipe.v) + gain_bytes(recipe.v);
}

int64_t tile_bytes(const KvFormat& format) { return kTileTokens * (code_bytes(format) + gain_bytes(format)); }

}  // namespace weft
