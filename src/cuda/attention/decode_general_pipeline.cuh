// The pipeline of a warp of the general decode kernel: copies pieces of keys and values into its slots ahead of time.
#pragma once

#include "cuda/attention/decode_general_params.cuh"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

__device__ inline void cp_async_wait_all_but(int pending) {
  switch (pending) {
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    case 3: return cp_async_wait<3>();
    case 4: return cp_async_wait<4>();
    default: return cp_async_wait<5>();
  }
}
static_assert(kGeneralMostSlots == 6);

// Rows of a piece to places of their own: 2^row_lanes neighbouring lanes copy a row. `alive`: rows that exist; the others become zeros.
template <int Size>
__device__ __forceinline__ void copy_rows(const GeneralSide& side, const uint8_t* from, bool last, int alive, uint32_t to,
                                          int lane) {
  const int lanes = 1 << side.row_lanes, bytes = side.copies[last] * Size;
#pragma unroll 1
  for (int row = lane >> side.row_lanes; row < kGeneralTokens; row += 32 >> side.row_lanes) {
    const bool lives = row < alive;
    const uint8_t* source = lives ? from + row * side.row : side.data;
    const uint32_t target = to + staged_row(row) * side.stride;
#pragma unroll 1
    for (int i = (lane & (lanes - 1)) * Size; i < bytes; i += lanes * Size)
      cp_async_part<Size>(target + i, source + i, lives ? Size : 0);
  }
}

// Units of 16 tokens of a warp, every kGeneralWarps-th of the item's: the pieces of a unit's keys, then those of its values. A load
// is one group of cp.async copies, empty behind the last unit.
struct GeneralPipeline {
  using Cache = CacheUnits<kGeneralTokens>;
  const GeneralParams& p;
  const Cache& cache;
  uint8_t* memory;  // the slots of the warp
  int first_unit, last_unit, live, lane;
  int next_unit, next_piece = 0, next_slot = 0, block, block_after;
  uint32_t missing = 0;  // bit i: unit i of the warp, modulo 32, has no page
  int read_slot = 0;
  // Gains pass through a register. They go to their slot with the next load, since their own load has no reason to wait for them.
  uint32_t gain_bits = 0;
  int gain_slot = -1;
  bool gain_of_values = false;

  __device__ __forceinline__ GeneralPipeline(const GeneralParams& params, const Cache& tokens, uint8_t* slots, int warp,
                                             int own_lane)
      : p(params), cache(tokens), memory(slots), lane(own_lane) {
    first_unit = cache.first_tile + warp, last_unit = cache.last_tile, live = static_cast<int>(cache.live);
    next_unit = first_unit;
    block = block_of(next_unit), block_after = block_of(next_unit + kGeneralWarps);
  }
  __device__ __forceinline__ int unit(int i) const { return first_unit + i * kGeneralWarps; }
  __device__ __forceinline__ bool exists(int i) const { return !(missing >> i % 32 & 1); }
  __device__ __forceinline__ int block_of(int unit) const {
    if (unit >= last_unit) return -1;
    return static_cast<int>(cache.paged ? cache.block_at(p.queries, p.page_units.quotient(unit)) : cache.slot);
  }
  // The unit among those of its block.
  __device__ __forceinline__ unsigned inside(int unit) const {
    auto page = static_cast<unsigned>(unit);
    return cache.paged ? p.page_units.take(page) : page;
  }
  __device__ __forceinline__ uint8_t* slot_at(int slot) const { return memory + slot * p.slot_bytes; }

  __device__ __forceinline__ void store_gains() {
    if (gain_slot < 0) return;
    const GeneralSide& side = p.sides[gain_of_values];
    if (lane < kGeneralTokens * side.gain_groups)
      reinterpret_cast<float*>(slot_at(gain_slot))[lane] = bits_to_float(gain_bits, side.gain);
    gain_slot = -1;
  }
  // Lane 16 i + j requests gain i of row j.
  __device__ __forceinline__ void load_gains(const GeneralSide& side, bool values, unsigned at, int alive) {
    const int row = lane % kGeneralTokens;
    gain_bits = 0;
    if (lane < kGeneralTokens * side.gain_groups && row < alive)
      gain_bits = load_bits(side.gains.data + block * side.gains.block + cache.hk * side.gains.head + at / 4 * side.gains.tile +
                                (at % 4 * kGeneralTokens + row) * side.gains_row,
                            side.gain, lane / kGeneralTokens);
    gain_slot = next_slot, gain_of_values = values;
  }

  // Codes in lanes order: of every plane of K the vectors of 16 tokens, of V the vectors of 16, or 32, tokens; n coordinates.
  __device__ __forceinline__ void copy_lanes(const GeneralSide& side, bool values, const uint8_t* tile, unsigned quarter, int first,
                                             int n, bool exists, uint32_t to) const {
#pragma unroll 1
    for (int plane = 0; plane < side.planes.count; ++plane) {
      const int width = side.planes.plane[plane].width;
      const uint8_t* codes = tile + side.planes.plane[plane].offset;
      if (!values) {
        const uint8_t* from = codes + first * width / 32 * (4 * kLaneVectorBytes) + quarter * kLaneVectorBytes;
#pragma unroll 1
        for (int i = lane; i < n * width / 8; i += 32)
          cp_async_part<16>(to + i * 16, exists ? from + i / 4 * (4 * kLaneVectorBytes) + i % 4 * 16 : side.data, exists ? 16 : 0);
        to += n * width * 2;
      } else {
        const int groups = width > 2 ? width / 2 : 1;
        const uint8_t* from = codes + (static_cast<int>(quarter) * width / 2) * 4 * side.D + 4 * first;
#pragma unroll 1
        for (int group = 0; group < groups; ++group, from += 4 * side.D) {
#pragma unroll 1
          for (int i = lane; i < n / 4; i += 32)
            cp_async_part<16>(to + i * 16, exists ? from + i * 16 : side.data, exists ? 16 : 0);
          to += 4 * n + 16;  // groups begin in different banks
        }
      }
    }
  }

  __device__ __forceinline__ void copy_piece(const GeneralSide& side, bool values, int piece) {
    const int alive = block >= 0 ? min(live - next_unit * kGeneralTokens, kGeneralTokens) : 0;
    const unsigned at = inside(next_unit);
    const uint8_t* from = side.data;
    if (alive > 0) from += block * side.block + cache.hk * side.head + at / 4 * side.tile;
    if (piece == 0 && side.gain_groups > 0) load_gains(side, values, at, alive);
    const uint32_t to = shared_address(slot_at(next_slot)) + kGeneralGainBytes;
    const bool last = piece == side.pieces - 1;
    if (side.lanes) {
      const int first = piece * side.piece;
      return copy_lanes(side, values, from, at % 4, first, last ? side.D - first : side.piece, alive > 0, to);
    }
    if (alive > 0) from += at % 4 * kGeneralTokens * side.row + piece * side.piece_bytes;
    if (side.adjacent) {
      const int row = static_cast<int>(side.row), existing = alive * row;
#pragma unroll 1
      for (int i = lane * 16; i < kGeneralTokens * row; i += 32 * 16) {
        const int bytes = min(max(existing - i, 0), 16);
        cp_async_part<16>(to + i, bytes > 0 ? from + i : side.data, bytes);
      }
      return;
    }
    if (side.copy == 16)
      copy_rows<16>(side, from, last, alive, to, lane);
    else if (side.copy == 8)
      copy_rows<8>(side, from, last, alive, to, lane);
    else
      copy_rows<4>(side, from, last, alive, to, lane);
  }

  __device__ __forceinline__ void load_next() {
    store_gains();
    const bool values = next_piece >= p.k().pieces;
    if (next_unit < last_unit) copy_piece(p.sides[values], values, values ? next_piece - p.k().pieces : next_piece);
    cp_async_commit();
    if (++next_slot == p.slots) next_slot = 0;
    if (next_piece == 0) {
      const uint32_t bit = 1u << ((next_unit - first_unit) / kGeneralWarps % 32);
      missing = block < 0 ? missing | bit : missing & ~bit;
    }
    if (++next_piece == p.k().pieces + p.v().pieces) {
      next_piece = 0;
      next_unit += kGeneralWarps;
      block = block_after;
      block_after = block_of(next_unit + kGeneralWarps);
    }
  }
  __device__ __forceinline__ void fill(int from, int to) {
#pragma unroll 1
    for (int i = from; i < to; ++i) load_next();
  }
  // Waits for the oldest load and returns its slot.
  __device__ __forceinline__ const uint8_t* wait_next() {
    cp_async_wait_all_but(p.slots - 1);
    __syncwarp();
    const uint8_t* at = slot_at(read_slot);
    if (++read_slot == p.slots) read_slot = 0;
    return at;
  }
  // Releases the slot that was read last.
  __device__ __forceinline__ void release() {
    __syncwarp();
    load_next();
  }
};

}  // namespace weft::cuda
