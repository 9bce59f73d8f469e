// The general decode kernel on the host: how it reads a cache, how it divides shared memory, and its launch.
#include "cuda/attention/decode_general.h"

#include <cmath>
#include <optional>

#include "common/grid_levels.h"
#include "common/half.h"
#include "cuda/attention/decode_general_params.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {
namespace {

int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

SideKind kind_of(const KvFormat& format, bool lanes) {
  if (format.passthrough)
    return *format.passthrough == DType::f16 ? SideKind::f16 : *format.passthrough == DType::bf16 ? SideKind::bf16 : SideKind::f32;
  if (!format.grid_step) return SideKind::split_levels;
  if (format.bits >= 7 && levels_are_neighbours(format)) return SideKind::linear;
  return !lanes && format.packing == Packing::dense && format.bits <= 4 ? SideKind::pairs : SideKind::levels;
}

// The table, and the factor that it leaves to the products.
void set_levels(const KvFormat& format, GeneralSide& side) {
  const int count = 1 << format.bits;
  if (format.grid_step) {
    for (int i = 0; i < count; ++i) side.levels[i] = f32_to_f16(static_cast<float>(grid_point(format, i)) + 0.5f);
    side.unit = *format.grid_step;
  } else {
    // The largest level becomes 2^11 or more, so that the rest of a small level is no subnormal number.
    float top = 0;
    for (int i = 0; i < count; ++i) top = std::max(top, std::fabs(format.codebook[static_cast<size_t>(i)]));
    const int exponent = top > 0 && std::isfinite(top) ? std::ilogb(top) - 11 : 0;
    for (int i = 0; i < count; ++i) {
      const float level = std::ldexp(format.codebook[static_cast<size_t>(i)], -exponent);
      const uint16_t high = f32_to_f16(level);
      side.levels[i] = high | static_cast<uint32_t>(f32_to_f16(level - f16_to_f32(high))) << 16;
    }
    side.unit = std::ldexp(1.0f, exponent);
  }
  if (format.gain_units == GainUnits::unit_vector) side.unit /= std::sqrt(static_cast<float>(format.gain_group));
}

// Where rows and gains lie.
void set_addresses(const KvCache& cache, const KvSide& own, GeneralSide& side) {
  const KvFormat& format = own.format;
  const bool tiles = cache.layout == KvLayout::tiles;
  static_cast<SideAddresses&>(side) = side_addresses(own);
  side.row = tiles ? code_bytes(format) : side.tile;
  if (!tiles) side.tile = kTileTokens * side.row;
  if (format.passthrough) return;
  side.gain = format.gain_dtype;
  side.gain_groups = static_cast<int>(format.head_dim / format.gain_group);
  if (tiles) {
    side.gains = side;
    side.gains.data += kTileTokens * code_bytes(format);
    side.gains_row = gain_bytes(format);
  } else {
    const int64_t bytes = dtype_bytes(own.gains.dtype);
    side.gains = {static_cast<const uint8_t*>(own.gains.data), own.gains.stride(0) * bytes, own.gains.stride(1) * bytes, 0};
    side.gains_row = own.gains.stride(2) * bytes;
    side.gains.tile = kTileTokens * side.gains_row;
  }
}

// Cuts rows into pieces of about `most` bytes, and says how rows lie in shared memory. Returns the bytes of a piece there.
int set_pieces(KvRole role, int row_bytes, int most, GeneralSide& side) {
  const bool values = role == KvRole::v;
  const int D = side.D;
  if (side.lanes) {
    side.piece = std::min(D, std::max(kGeneralTokens * most / (2 * side.bits) / 64, 1) * 64);
    side.pieces = (D + side.piece - 1) / side.piece;
    if (!values) return 2 * side.piece * side.bits;
    int groups = 0;
    for (int plane = 0; plane < side.planes.count; ++plane) groups += std::max(side.planes.plane[plane].width / 2, 1);
    return groups * (4 * side.piece + 16);
  }
  const int bits = side.kind == SideKind::f32 ? 32 : is_coded(side.kind) ? side.field : 16;
  const int step = side.kind == SideKind::f32 && !values ? 32 : bits % 2 == 0 ? 64 : 128;  // begins at 16 bytes
  const int limit = side.kind == SideKind::f32 && values ? 2 * most : most;
  side.piece = row_bytes <= limit ? D : std::max(limit * 8 / bits / step, 1) * step;
  side.pieces = (D + side.piece - 1) / side.piece;
  side.piece_bytes = side.pieces == 1 ? row_bytes : side.piece * bits / 8;
  const uintptr_t blocks = reinterpret_cast<uintptr_t>(side.data) | static_cast<uintptr_t>(side.block | side.head | side.tile);
  side.adjacent = side.pieces == 1 && row_bytes % 16 != 0 && row_bytes % 4 == 0 && side.row == row_bytes && blocks % 16 == 0;
  const uintptr_t all = blocks | static_cast<uintptr_t>(side.row) | static_cast<uintptr_t>(row_bytes);
  side.copy = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 0;
  const int bytes[2] = {side.piece_bytes, row_bytes - (side.pieces - 1) * side.piece_bytes};
  for (int last = 0; last < 2 && side.copy > 0; ++last) side.copies[last] = bytes[last] / side.copy;
  const int copies = side.copies[0];
  side.row_lanes = side.copy < 16 ? 4 : copies <= 2 ? 1 : copies % 8 == 0 ? 3 : 2;
  // Rows of keys an odd number of 16 bytes apart, rows of values an odd number of 32: see staged_row().
  const int longest = std::max(bytes[0], bytes[1]);
  side.stride = side.adjacent ? row_bytes
                : values      ? round_up(std::max(longest - 32, 0), 64) + 32
                              : (round_up(longest, 16) / 16 | 1) * 16;
  return kGeneralTokens * side.stride;
}

// Without pieces and tables. Nothing where the kernel does not read the side.
std::optional<GeneralSide> lowered_side(const KvCache& cache, KvRole role) {
  const KvSide& own = role == KvRole::k ? cache.k : cache.v;
  const KvFormat& format = own.format;
  GeneralSide side;
  side.D = static_cast<int>(format.head_dim);
  side.lanes = cache.layout == KvLayout::tiles && cache.tile_order == TileOrder::lanes && !format.passthrough;
  side.kind = kind_of(format, side.lanes);
  if (!format.passthrough) {
    const int64_t D = format.head_dim, group = format.gain_group;
    if (group != D && !(2 * group == D && group % 64 == 0)) return {};
    side.bits = format.bits;
    side.field = format.packing == Packing::byte ? 8 : format.bits;
    if (side.lanes) side.planes = lane_planes(format.bits, D);
    set_levels(format, side);
  }
  set_addresses(cache, own, side);
  side.copy = 16;
  set_pieces(role, static_cast<int>(code_bytes(format)), 128, side);
  if (side.copy == 0) return {};
  return side;
}

bool has_levels(const GeneralSide& side) { return side.kind == SideKind::levels || side.kind == SideKind::split_levels; }

// Divides the shared memory of a block among the kernel's parts.
void divide(const GeneralKernel& kernel, const KvCache& cache, int piece_bytes, int slots, GeneralParams& p) {
  GeneralSide &k = p.sides[0], &v = p.sides[1];
  const int keys = set_pieces(KvRole::k, static_cast<int>(code_bytes(cache.k.format)), piece_bytes, k);
  const int values = set_pieces(KvRole::v, static_cast<int>(code_bytes(cache.v.format)), piece_bytes, v);
  constexpr int kBehind = 32;  // lanes may read behind a piece
  const int planes = k.kind == SideKind::bf16 ? 3 : 2, fragment = k.kind == SideKind::f32 ? 32 : 16;
  p.slots = slots;
  p.slot_bytes = kGeneralGainBytes + round_up(std::max(keys, values), 16) + kBehind;
  const int spare = (is_coded(k.kind) ? 3 : 1) * k.D * static_cast<int>(sizeof(float));
  p.early_slots = std::max(slots - (spare + p.slot_bytes - 1) / p.slot_bytes, 0);
  p.warp_bytes = round_up(std::max(slots * p.slot_bytes, p.early_slots * p.slot_bytes + spare), 16);
  const int U = kernel.row_blocks;
  // Levels of both sides interleave. Equal pairs are stored once.
  int at = general_tables_at(U);
  const auto bytes_of = [](const GeneralSide& side) {
    return side.kind == SideKind::pairs ? (1 << 2 * side.bits) * kPairStride
           : has_levels(side)           ? (1 << side.bits) * kLevelStride
                                        : 0;
  };
  const bool interleaved = has_levels(k) && has_levels(v);
  const bool same = k.kind == SideKind::pairs && v.kind == SideKind::pairs && k.bits == v.bits &&
                    std::equal(k.levels, k.levels + (1 << k.bits), v.levels);
  k.table_at = at;
  at += interleaved ? std::max(bytes_of(k), bytes_of(v)) : bytes_of(k);
  v.table_at = interleaved || same ? k.table_at : at;
  at += interleaved || same ? 0 : bytes_of(v);
  p.queries_at = at;
  at += (k.D + 31) / 32 * planes * U * 32 * fragment;
  p.slots_at = at;
  at += kGeneralWarps * p.warp_bytes;
  const int sums = kGeneralWarps / 2 * kernel.sweeps * U * 16 * 32 * static_cast<int>(sizeof(float));
  p.shared_bytes = std::max(at, general_tables_at(U) + sums);
}

bool lower_sides(const KvCache& cache, GeneralParams& p) {
  const auto k = lowered_side(cache, KvRole::k), v = lowered_side(cache, KvRole::v);
  if (!k || !v) return false;
  p.sides[0] = *k, p.sides[1] = *v;
  return true;
}

constexpr GeneralKernel (*kKernels[])() = {general_kernel_128_1, general_kernel_128_4, general_kernel_256_1, general_kernel_256_2,
                                           general_kernel_512_1};

// Numbers that a number of q is the sum of. Relative to the largest number of its row, f16 holds what bf16 does.
int planes_of(DType query, SideKind keys) {
  if (keys == SideKind::f16) return query == DType::f32 ? 2 : 1;
  if (keys == SideKind::bf16) return query == DType::f32 ? 3 : query == DType::f16 ? 2 : 1;
  return 2;
}

}  // namespace

// Finds the largest slots that fit a multiprocessor, first for as many blocks as the kernel allows, then for one.
GeneralFit general_fit(const Stream& stream, const KvCache& cache, int64_t rows) {
  constexpr int kReserved = 1 << 10;  // shared memory of a block that it cannot use
  GeneralParams p;
  if (!lower_sides(cache, p)) return {};
  const int shared = facts_of(stream).shared_bytes;
  const auto fit = [&](int index) -> GeneralFit {
    const GeneralKernel kernel = kKernels[index]();
    for (const int fewest : {3, 2})
      for (int blocks = kernel.blocks; blocks > 0; --blocks)
        for (const int piece_bytes : {256, 128, 64, 32})
          for (int slots = kGeneralMostSlots; slots >= fewest; --slots) {
            divide(kernel, cache, piece_bytes, slots, p);
            if (p.shared_bytes <= (shared + kReserved) / blocks - kReserved)
              return {8 * kernel.row_blocks, blocks, index, piece_bytes, slots};
          }
    return {};
  };
  GeneralFit found;
  for (int index = 0; index < static_cast<int>(std::size(kKernels)); ++index) {
    const int sweeps = kKernels[index]().sweeps;
    if (64 * sweeps < p.v().D) continue;
    if (found.rows > 0 && (sweeps > kKernels[found.kernel]().sweeps || rows <= found.rows)) break;
    if (const GeneralFit own = fit(index); own.rows > 0) found = own;
  }
  return found;
}

void launch_decode_general(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                           const PartialsPlan& plan, const GeneralFit& fit, int64_t most_rows) {
  GeneralParams p;
  const GeneralKernel kernel = kKernels[fit.kernel]();
  lower_sides(cache, p);
  divide(kernel, cache, fit.piece_bytes, fit.slots, p);
  p.queries = queries;
  p.plan = plan;
  p.page_units = Divisor(queries.index.rows / kGeneralTokens);
  p.most_rows = most_rows;
  p.row_tiles = ceil_div(std::min(queries.longest * queries.group, most_rows), fit.rows);
  p.planes = planes_of(queries.queries.q.dtype, p.k().kind);
  launch_pdl(op, stream, queries.queries.sequences.count * queries.Hk * plan.splits * p.row_tiles, 32 * kGeneralWarps,
             static_cast<size_t>(p.shared_bytes), kernel.kernel, p);
}

}  // namespace weft::cuda
