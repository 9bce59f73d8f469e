// Formats of a compressed KV cache, and the ops that rotate, encode, decode and repack its rows.
//
// One row x (a key or a value of one token and head, D numbers) is stored as codes and gains:
//   y = R (x - mean)                                R orthogonal: none, signed Hadamard ("SRHT") or a dense matrix
//   z = y sqrt(g) / |y|  over each gain group of g  (0 where |y| <= tiny_norm)
//   code_j = number of boundaries < z_j             boundaries: midpoints of the codebook, which is in N(0,1) units
//   gain   = by gain_rule, from y and c = codebook[code]
// and decoded as  y^_j = factor(gain) * codebook[code_j],  x^ = R^T y^ + mean,  factor(gain) = gain, or gain / sqrt(g).
// A group too small to normalise (|y| <= tiny_norm) has z = 0: one code throughout, 2^(bits-1) - 1 in a symmetric table. Its gain is
// still by rule for rms and matched, and 0 for the others. Gains beyond their dtype become its largest finite number. A NaN or an infinity in a
// row makes its gain NaN, on purpose: it is to be seen, not hidden.
// Attention runs on y^ (the rotated domain): the query is rotated once, the output un-rotated once.
// A side may also be `passthrough`: x itself in f32, f16 or bf16, no rotation, no gain.
// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "weft/op.h"

namespace weft {

inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kTileTokens = 64;
inline constexpr int64_t kTileAlignment = 64;  // bytes

enum class Rotation { none, srht, dense };

// Signs of an SRHT, bit j of word j / 32 set means -1 for coordinate j. y = n^-1/2 H (s * x) over each rotation group of n
// coordinates, H = H_m (x) H_2^k for n = m 2^k, m in {1, 12, 20, 28}; the inverse is s * (n^-1/2 H^T y).
using SignBits = std::array<uint32_t, kMaxHeadDim / 32>;

// How the gain of a group follows from y and its codes' levels c (N(0,1) units), g coordinates each:
enum class GainRule {
  rms,            // |y| / sqrt(g)
  matched,        // |y| / |c|            keeps the norm; rms where c = 0
  least_squares,  // <y,c> / |c|^2        least error for these codes; 0 where c = 0
  unbiased,       // |y|^2 / <y,c>        keeps <y^, y>; 0 where <y,c> <= 0 (never with a symmetric table)
};

// What the stored number means: y^ = gain * c, or y^ = gain * c / sqrt(g) (codebooks of unit vectors: AURA; L2 norms: TQ at 256).
enum class GainUnits { normal, unit_vector };

// Codes of a row: a dense little-endian bit stream (code j owns bits [j b, (j+1) b)) padded to whole 32-bit words, or a byte each.
enum class Packing { dense, byte };

// Everything needed to read or write one side (K or V). Plain value; comparable by the functions below, not by bytes.
struct KvFormat {
  std::string id;        // versioned name for files and messages: "weft1-4", "aura-3", "tq-4", "f16", ...; ops go by the fields
  int64_t head_dim = 0;  // D: a multiple of 8, <= kMaxHeadDim
  std::optional<DType> passthrough;  // f32, f16 or bf16: the fields below are then unused
  int bits = 4;                      // 2..8
  Rotation rotation = Rotation::srht;
  int64_t rotation_group = 0;  // srht: n = 2^k, 12 2^k, 20 2^k or 28 2^k, divides head_dim
  SignBits signs{};            // srht
  uint64_t seed = 0;           // where the signs came from (informative; equal seeds of one preset give equal signs)
  Tensor dense_rotation;       // dense: [D, D] f32 row-major, y_i = sum_j R[i,j] x_j
  int64_t gain_group = 0;      // g, divides head_dim
  GainRule gain_rule = GainRule::unbiased;
  DType gain_dtype = DType::f16;  // f32, f16 or bf16
  GainUnits gain_units = GainUnits::normal;
  float tiny_norm = 1e-10f;
  Packing packing = Packing::dense;
  std::array<float, 256> codebook{};  // 2^bits ascending levels in N(0,1) units
  std::optional<float> grid_step;  // set when every level is (n + 1/2) * grid_step with n in -128..127: integer attention applies
  Tensor mean;                     // [Hk, D] f32, optional
};

// A pair of sides under one name.
struct KvRecipe {
  std::string id;  // "weft1-4v4"
  KvFormat k, v;
};

// Presets. Throw Error (op "kv_format" / "kv_recipe") for a name or head_dim they do not know; the ids they give are names too.
//   side:   "2".."8" (Weft's own), "f32" "f16" "bf16", "aura-2" "aura-3" "aura-4", "tq-4", "tqhb-5" "tqhb-6" "tqhb-8"
//   recipe: "<side>v<side>" of Weft's own and passthrough sides ("8v4", "f16v4"), "f16" (both sides), "aura4v2" (any aura pair),
//           "tq4", "tqhb5", "tqhb6", "tqhb8"
// `seed` picks the signs (Weft and AURA: usually the layer index; TQ ignores it). TQ needs head_dim 256 or 512, AURA 2^k.
KvFormat kv_format(std::string_view side, int64_t head_dim, uint64_t seed = 0);
KvRecipe kv_recipe(std::string_view name, int64_t k_head_dim, int64_t v_head_dim, uint64_t seed = 0);
// AURA at a bit width without a published table (6, 8), or any other table: `levels` in N(0,1) units, 2^bits ascending numbers. The id
// ends in "-custom" unless they are the published ones.
KvFormat aura_format(int bits, int64_t head_dim, uint64_t seed, const float* levels);
// Weft's and AURA's signs for a seed; the largest Hadamard order that divides head_dim.
SignBits srht_signs(uint64_t seed, int64_t head_dim);
int64_t largest_hadamard_order(int64_t head_dim);

// Is the format consistent? Names the first fault as argument `member` of operator `op`.
Status validate(const KvFormat& format, std::string_view op, std::string_view member);
// Do rows of one format hold the same codes, tables and gain meaning as rows of the other (so that repacking is exact)?
bool same_codes(const KvFormat& a, const KvFormat& b);

// Bytes of codes (or elements) of one row, and of its gains.
int64_t code_bytes(const KvFormat& format);
int64_t gain_bytes(const KvFormat& format);
// K + V of one token and KV head: "weft1-4v4" at D = 128 is 132.
int64_t bytes_per_token(const KvRecipe& recipe);

// rows: one row after another, what every backend reads and writes. tiles: planes of 64 tokens for speed, [64 rows of codes | 64 rows
// of gains], in a byte order of their own; a backend refuses tiles in an order it does not know, never misreads them.
enum class KvLayout { rows, tiles };
enum class TileOrder : int32_t {
  token_major = 0,  // rows in token order, then gains in token order
  lanes = 1,        // cpu: K with tokens in lanes, V interleaved by 4 tokens. Head dims that are multiples of 32, dense codes
};
// Bytes of one tile of one side and head.
int64_t tile_bytes(const KvFormat& format);

// linear: token at position p lives in row p of its slot. ring: positions below `pinned` live in their own row, position p >= pinned
// in row pinned + (p - pinned) mod (capacity - pinned). paged: row p % page of page page_table[n][p / page].
enum class CacheKind { linear, ring, paged };

struct KvSide {
  KvFormat format;
  Tensor codes;  // rows: [blocks, Hk, capacity, code_bytes] u8, passthrough: [blocks, Hk, capacity, D] of its dtype
                 // tiles: [blocks, Hk, capacity / 64, tile_bytes] u8, each tile aligned to kTileAlignment
  Tensor gains;  // rows: [blocks, Hk, capacity, D / gain_group] of gain_dtype. Absent for tiles and passthrough
};

// The caches of N sequences; every op wants both sides, also where it uses one. A block is a sequence's slot (linear, ring) or a page
// (paged); strides of blocks, heads and tokens are free, so token-major caches work in `rows`. Indices out of range are inert: nothing is
// read or written through them.
struct KvCache {
  KvSide k, v;
  KvLayout layout = KvLayout::rows;
  TileOrder tile_order = TileOrder::token_major;
  CacheKind kind = CacheKind::linear;
  int64_t pinned = 0;  // ring only
  Tensor slots;        // linear, ring: [N] i32 block of each sequence; absent: n. < 0: inert
  Tensor page_table;   // paged: [N, pages] i32, < 0: no page. Page length = capacity, a multiple of 64 in tiles, of 16 in rows
  Tensor lengths;      // [N] i32: tokens appended so far, the new ones included (a ring may have lost some). Read by attention

  int64_t heads() const { return k.codes.size(1); }
  int64_t capacity() const { return k.codes.size(2) * (layout == KvLayout::tiles ? kTileTokens : 1); }
};

// y = R x (or R^T x), rows of a [T, H, D] tensor. The mean takes no part.
struct KvRotateArgs {
  Tensor x;  // [T, H, D]
  Tensor y;  // [T, H, D], out; may be x itself
  KvFormat format;
  bool inverse = false;
};
WEFT_OP(kv_rotate, KvRotateArgs);

// Encodes the rows of new tokens into the cache; whole rows are overwritten, pad bits included, never ORed into. Where several tokens of
// a sequence fall into one row (a ring shorter than what is new), the last of them stays. Sequences must not share rows they write, nor,
// in lanes order, tiles: there tokens share bytes, of which only a token's own bits change.
struct KvEncodeArgs {
  Tensor k;          // [T, Hk, Dk], or absent: that side is left alone
  Tensor v;          // [T, Hk, Dv], or absent
  Tensor positions;  // [T] i32: position of each token in its sequence; < 0 or without a row: inert
  Sequences sequences;
  KvCache cache;
};
WEFT_OP(kv_encode, KvEncodeArgs);

enum class KvDomain { original, rotated };

// Decodes rows of the cache. Rows that do not exist give zeros.
struct KvDecodeArgs {
  KvCache cache;
  Tensor positions;  // [T] i32, position of each wanted token in its sequence
  Sequences sequences;
  KvDomain domain = KvDomain::original;  // rotated: y^, without the mean
  Tensor k;                              // [T, Hk, Dk], out, or absent
  Tensor v;                              // [T, Hk, Dv], out, or absent
};
WEFT_OP(kv_decode, KvDecodeArgs);

// Copies every row of `from` into the same row of `to`: between layouts, tile orders, packings, and formats with the same codes.
// Refused where that would not be exact. lengths, slots and page tables are not looked at: blocks map to equal blocks.
struct KvRepackArgs {
  KvCache from;
  KvCache to;  // same number of blocks, heads and capacity
};
WEFT_OP(kv_repack, KvRepackArgs);

}  // namespace weft
