/// Formats of a compressed KV cache, and the ops that rotate, encode, decode and repack its rows.
/// @file
///
/// One row x (a key or a value of one token and head, D numbers) is stored as codes and gains:
///
///     y = R (x - mean)                                R orthogonal: none, signed Hadamard ("SRHT") or a dense matrix
///     z = y sqrt(g) / |y|  over each gain group of g  0 where |y| <= tiny_norm
///     code_j = number of boundaries < z_j             boundaries: midpoints of the codebook, which is in N(0,1) units
///     gain   = by gain_rule, from y and c = codebook[code]
///
/// and decoded as
///
///     y^_j = factor(gain) * codebook[code_j],   x^ = R^T y^ + mean,   factor(gain) = gain, or gain / sqrt(g)
///
/// A group too small to normalise (|y| <= tiny_norm) has z = 0: one code throughout, 2^(bits-1) - 1 in a symmetric codebook. Its
/// gain still follows the rule for rms and matched, and is 0 for the others. Gains beyond their dtype become its largest finite
/// number. A NaN or an infinity in a row makes its gain NaN on purpose: the fault is to be seen, not hidden.
/// Attention runs on y^ (the rotated domain): the query is rotated once, and the output is rotated back once.
/// A side may also be `passthrough`: x itself in f32, f16 or bf16, with no rotation and no gain.
/// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "weft/op.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

inline constexpr int64_t kMaxHeadDim = 512;    ///< the largest D
inline constexpr int64_t kTileTokens = 64;     ///< tokens of a tile
inline constexpr int64_t kTileAlignment = 64;  ///< bytes to which a tile is aligned

/// The orthogonal matrix R of a format.
enum class Rotation {
  none,   ///< the identity
  srht,   ///< a Hadamard transform after random signs
  dense,  ///< KvFormat::dense_rotation
};

/// The signs of an SRHT: bit j % 32 of word j / 32 set means -1 for coordinate j. Over each rotation group of n coordinates,
///
///     y = n^-1/2 H (s * x),   H = H_m (x) H_2^k for n = m 2^k, m in {1, 12, 20, 28};   the inverse is s * (n^-1/2 H^T y)
using SignBits = std::array<uint32_t, kMaxHeadDim / 32>;

/// How the gain of a group of g coordinates follows from y and the levels c of its codes (N(0,1) units).
enum class GainRule {
  rms,            ///< |y| / sqrt(g)
  matched,        ///< |y| / |c|: keeps the norm; rms where c = 0
  least_squares,  ///< <y,c> / |c|^2: the least error for these codes; 0 where c = 0
  unbiased,       ///< |y|^2 / <y,c>: keeps <y^, y>; 0 where <y,c> <= 0 (never with a symmetric codebook)
};

/// What the stored gain means.
enum class GainUnits {
  normal,       ///< y^ = gain * c
  unit_vector,  ///< y^ = gain * c / sqrt(g): codebooks of unit vectors (AURA), L2 norms (TQ at 256)
};

/// How the codes of a row are packed.
enum class Packing {
  dense,  ///< a little-endian bit stream: code j owns bits [j b, (j+1) b), padded to whole 32-bit words
  byte,   ///< a byte per code
};

/// Everything needed to read or write one side (K or V) of a cache. A plain value; compare formats with same_codes(), not by bytes.
struct KvFormat {
  std::string id;  ///< a versioned name for files and messages: "weft1-4", "aura-3", "tq-4", "f16", ... Ops go by the other members
  int64_t head_dim = 0;                      ///< D: a multiple of 8 up to kMaxHeadDim
  std::optional<DType> passthrough;          ///< f32, f16 or bf16: the members below are then unused
  int bits = 4;                              ///< of a code: 2 to 8
  Rotation rotation = Rotation::srht;        ///< the matrix R
  int64_t rotation_group = 0;                ///< srht: n = 2^k, 12 2^k, 20 2^k or 28 2^k, a divisor of head_dim
  SignBits signs{};                          ///< srht: the signs s
  uint64_t seed = 0;                         ///< where the signs came from. Informative: equal seeds of a preset give equal signs
  Tensor dense_rotation;                     ///< dense: [D, D] f32 row-major, y_i = sum_j R[i,j] x_j
  int64_t gain_group = 0;                    ///< g, a divisor of head_dim
  GainRule gain_rule = GainRule::unbiased;   ///< how gains are computed
  DType gain_dtype = DType::f16;             ///< f32, f16 or bf16
  GainUnits gain_units = GainUnits::normal;  ///< what a stored gain means
  float tiny_norm = 1e-10f;                  ///< groups with |y| at or below it are not normalised
  Packing packing = Packing::dense;          ///< how codes are packed
  std::array<float, 256> codebook{};         ///< 2^bits ascending levels in N(0,1) units
  /// Set when every level is (n + 1/2) * grid_step with n in -128..127: integer attention applies.
  std::optional<float> grid_step;
  Tensor mean;  ///< [Hk, D] f32, optional: subtracted before the rotation
};

/// The formats of both sides of a cache under one name.
struct KvRecipe {
  std::string id;  ///< "weft1-4v4"
  KvFormat k;      ///< of the keys
  KvFormat v;      ///< of the values
};

/// A preset format: "2".."8" (Weft's own), "f32" "f16" "bf16", "aura-2" "aura-3" "aura-4", "tq-4", "tqhb-5" "tqhb-6" "tqhb-8", or
/// the id of one. `seed` picks the signs (Weft and AURA: usually the layer index; TQ ignores it). TQ needs head_dim 256 or 512,
/// AURA 2^k. Throws Error (op "kv_format") for a name or head_dim that no preset has.
KvFormat kv_format(std::string_view side, int64_t head_dim, uint64_t seed = 0);
/// A preset recipe: "<side>v<side>" of Weft's own and passthrough sides ("8v4", "f16v4"), "f16" (both sides), "aura4v2" (any AURA
/// pair), "tq4", "tqhb5", "tqhb6", "tqhb8", or the id of one. Throws Error (op "kv_recipe") for a name or head_dim that no preset
/// has.
KvRecipe kv_recipe(std::string_view name, int64_t k_head_dim, int64_t v_head_dim, uint64_t seed = 0);
/// AURA at a bit width without a published codebook (6, 8), or with any other codebook: `levels` are 2^bits ascending numbers in
/// N(0,1) units. The id ends in "-custom" unless the levels are the published ones.
KvFormat aura_format(int bits, int64_t head_dim, uint64_t seed, const float* levels);
/// The signs that Weft's own formats and AURA use for a seed.
SignBits srht_signs(uint64_t seed, int64_t head_dim);
/// The largest Hadamard order that divides head_dim.
int64_t largest_hadamard_order(int64_t head_dim);

/// Is the format consistent? The first fault is named as argument `member` of operator `op`.
Status validate(const KvFormat& format, std::string_view op, std::string_view member);
/// Do rows of one format hold the same codes, codebooks and gain meaning as rows of the other, so that repacking is exact?
bool same_codes(const KvFormat& a, const KvFormat& b);

/// The bytes of the codes of one row, or of its elements on a passthrough side.
int64_t code_bytes(const KvFormat& format);
/// The bytes of the gains of one row; 0 on a passthrough side.
int64_t gain_bytes(const KvFormat& format);
/// The bytes of K and V of one token and KV head: "weft1-4v4" at D = 128 is 132.
int64_t bytes_per_token(const KvRecipe& recipe);

/// How the rows of a side lie in memory.
enum class KvLayout {
  rows,   ///< one row after another: every backend reads and writes it
  tiles,  ///< planes of 64 tokens for speed, [64 rows of codes | 64 rows of gains], in a TileOrder
};
/// The byte order inside a tile. A backend refuses tiles in an order that it does not know, and never misreads them.
enum class TileOrder : int32_t {
  token_major = 0,  ///< rows in token order, then gains in token order
  lanes = 1,        ///< K with tokens in lanes, V interleaved by 4 tokens. Head dims that are multiples of 32, dense codes
};
/// The bytes of one tile of one side and head.
int64_t tile_bytes(const KvFormat& format);

/// Which row holds the token at position p.
enum class CacheKind {
  linear,  ///< row p of its slot
  ring,    ///< row p for p < pinned, else row pinned + (p - pinned) mod (capacity - pinned)
  paged,   ///< row p % page of page page_table[n][p / page]
};

/// One side (K or V) of a cache.
struct KvSide {
  KvFormat format;  ///< what the bytes mean
  /// rows: [blocks, Hk, capacity, code_bytes] u8, passthrough: [blocks, Hk, capacity, D] of its dtype.
  /// tiles: [blocks, Hk, capacity / 64, tile_bytes] u8, each tile aligned to kTileAlignment.
  Tensor codes;
  Tensor gains;  ///< rows: [blocks, Hk, capacity, D / gain_group] of gain_dtype. Absent for tiles and passthrough
};

/// The caches of N sequences. Every op wants both sides, also where it uses one. A block is the slot of a sequence (linear, ring)
/// or a page (paged). The strides of blocks, heads and tokens are free, so token-major caches work with KvLayout::rows. Indices out
/// of range are inert: nothing is read or written through them.
struct KvCache {
  KvSide k;                                       ///< the keys
  KvSide v;                                       ///< the values
  KvLayout layout = KvLayout::rows;               ///< how rows lie
  TileOrder tile_order = TileOrder::token_major;  ///< the byte order of tiles
  CacheKind kind = CacheKind::linear;             ///< which row holds a position
  int64_t pinned = 0;                             ///< ring only: the first so many tokens are kept
  Tensor slots;                                   ///< linear, ring: [N] i32, the block of each sequence; absent: n. < 0: inert
  Tensor
      page_table;  ///< paged: [N, pages] i32, < 0: no page. The page length is the capacity, a multiple of 64 (tiles) or 16 (rows)
  Tensor lengths;  ///< [N] i32: tokens appended so far, the new ones included (a ring may have lost some). Attention reads it

  /// Hk, the number of KV heads.
  int64_t heads() const { return k.codes.size(1); }
  /// The tokens that a block holds.
  int64_t capacity() const { return k.codes.size(2) * (layout == KvLayout::tiles ? kTileTokens : 1); }
};

/// Arguments of kv_rotate(): y = R x (or R^T x) for the rows of a [T, H, D] tensor. The mean is not subtracted.
struct KvRotateArgs {
  Tensor x;              ///< [T, H, D]
  Tensor y;              ///< [T, H, D], out; may be x itself
  KvFormat format;       ///< its rotation is used
  bool inverse = false;  ///< R^T in place of R
};
WEFT_OP(kv_rotate, KvRotateArgs);

/// Arguments of kv_encode(): encodes the rows of new tokens into the cache. Whole rows are overwritten, pad bits included. Where
/// several tokens of a sequence fall into one row (a ring shorter than what is new), the last of them stays. Sequences must not
/// share rows that they write. In lanes order they must not share tiles either: there tokens share bytes, of which only a token's
/// own bits change.
struct KvEncodeArgs {
  Tensor k;             ///< [T, Hk, Dk], or absent: that side is left alone
  Tensor v;             ///< [T, Hk, Dv], or absent: that side is left alone
  Tensor positions;     ///< [T] i32: the position of each token in its sequence; < 0 or without a row: inert
  Sequences sequences;  ///< how the T tokens belong to sequences
  KvCache cache;        ///< out
};
WEFT_OP(kv_encode, KvEncodeArgs);

/// Whether rows are rotated.
enum class KvDomain {
  original,  ///< x
  rotated,   ///< y = R x
};

/// Arguments of kv_decode(): decodes rows of the cache. Rows that do not exist give zeros.
struct KvDecodeArgs {
  KvCache cache;                         ///< what is decoded
  Tensor positions;                      ///< [T] i32: the position of each wanted token in its sequence
  Sequences sequences;                   ///< how the T tokens belong to sequences
  KvDomain domain = KvDomain::original;  ///< rotated: y^, without the mean
  Tensor k;                              ///< [T, Hk, Dk], out, or absent
  Tensor v;                              ///< [T, Hk, Dv], out, or absent
};
WEFT_OP(kv_decode, KvDecodeArgs);

/// Arguments of kv_repack(): copies every row of `from` into the same row of `to`, between layouts, tile orders, packings, and
/// formats with the same codes. Refused where the copy would not be exact. Block b maps to block b: lengths, slots and page tables
/// are not read.
struct KvRepackArgs {
  KvCache from;  ///< what is copied
  KvCache to;    ///< out: the same number of blocks, heads and capacity
};
WEFT_OP(kv_repack, KvRepackArgs);

}  // namespace weft
#pragma GCC visibility pop
