// Trials of the KV codec on the cpu backend against the reference: formats and tokens of a cache, and caches that start as garbage.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cases/verify.h"
#include "tests/support/kv.h"

namespace weft::tests {

using cases::Memory;
using cases::Rng;

inline constexpr Stream kReference{Backend::reference};

inline Stream cpu_with(Isa isa, int threads = 1) {
  Stream stream;
  stream.isa = isa;
  stream.threads = threads;
  return stream;
}

// The formats, layout and tokens of a cache.
struct Wanted {
  KvFormat k, v;
  KvLayout layout = KvLayout::rows;
  TileOrder order = TileOrder::token_major;
  CacheKind kind = CacheKind::linear;
  int64_t Hk = 2, capacity = 128, pinned = 0;
  std::vector<int64_t> lengths = {5};  // new tokens of each sequence
  int64_t start = 0;                   // position of the first
  DType dtype = DType::f32;
};

// A rotated row in the units of the codebook, by the reference.
inline std::vector<double> normalised(const KvFormat& format, int64_t head, const std::vector<double>& x) {
  Memory memory;
  const int64_t D = format.head_dim, g = format.gain_group;
  const Tensor row = memory.make(DType::f32, {1, 1, D}), y = memory.make(DType::f32, {1, 1, D});
  for (int64_t d = 0; d < D; ++d)
    cases::set(row, d, x[static_cast<size_t>(d)] - (format.mean.present() ? cases::get(format.mean, head * D + d) : 0));
  kv_rotate(kReference, {row, y, format, false});
  std::vector<double> z = cases::values(y);
  for (size_t first = 0; first < z.size(); first += static_cast<size_t>(g)) {
    double sum = 0;
    for (size_t i = first; i < first + static_cast<size_t>(g); ++i) sum += z[i] * z[i];
    const double factor = sum > 0 ? std::sqrt(static_cast<double>(g) / sum) : 0;
    for (size_t i = first; i < first + static_cast<size_t>(g); ++i) z[i] *= factor;
  }
  return z;
}

inline double boundary(const KvFormat& format, size_t upper) {
  return static_cast<double>(0.5f * (format.codebook[upper - 1] + format.codebook[upper]));
}

// Within this distance of a boundary, f32 cannot decide which code is right.
inline constexpr double kNear = 1e-6;
inline bool near_a_boundary(const KvFormat& format, double z, double margin) {
  for (size_t i = 1; i < size_t{1} << format.bits; ++i)
    if (std::abs(z - boundary(format, i)) <= margin) return true;
  return false;
}

// Tokens and caches of a setup. Every cache starts as the same garbage, so that a stray write shows.
class Trial {
 public:
  enum class Rows { clear, any };  // clear: no coordinate near a boundary, so that codes must be equal

  Trial(const Wanted& wanted, uint64_t seed, Rows rows = Rows::clear) : setup(wanted), rng_(seed) {
    std::vector<int64_t> bounds = {0}, at;
    for (int64_t length : setup.lengths) {
      for (int64_t i = 0; i < length; ++i) at.push_back(setup.start + i);
      bounds.push_back(bounds.back() + length);
      longest_ = std::max(longest_, length);
    }
    N = static_cast<int64_t>(setup.lengths.size());
    T = bounds.back();
    sequences = Sequences::packed(memory.indices(bounds), N, longest_);
    positions = memory.indices(at);
    k = make_rows(setup.k, rows);
    v = make_rows(setup.v, rows);
  }

  KvCache fresh(const Wanted& as) {
    const int64_t page = as.kind == CacheKind::paged ? (as.layout == KvLayout::tiles ? 64 : 16) : as.capacity;
    const int64_t pages = as.capacity / page, blocks = N * pages + 1;
    KvCache cache = make_cache(memory, as.k, as.v, blocks, as.Hk, page, as.layout);
    cache.tile_order = as.order;
    cache.kind = as.kind;
    cache.pinned = as.pinned;
    std::vector<int64_t> table;  // blocks of a sequence lie scattered, counted from the end
    for (int64_t n = 0; n < N; ++n)
      for (int64_t p = 0; p < pages; ++p) table.push_back(blocks - 1 - (p * N + n));
    const Tensor indices = memory.indices(table);
    if (as.kind == CacheKind::paged) {
      cache.page_table = dense(indices.data, DType::i32, {N, pages});
    } else {
      cache.slots = indices;
    }
    for (const Tensor& t : {cache.k.codes, cache.k.gains, cache.v.codes, cache.v.gains})
      for (int64_t i = 0; i < t.elements() * dtype_bytes(t.dtype); ++i)
        static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(i * 131 + 17);
    return cache;
  }

  KvCache encode(const Stream& stream) { return encode(stream, 0, T); }
  KvCache encode(const Stream& stream, int64_t first, int64_t last) {
    KvCache cache = fresh(setup);
    encode_into(stream, cache, first, last);
    return cache;
  }
  void encode_into(const Stream& stream, const KvCache& cache, int64_t first, int64_t last) {
    KvEncodeArgs args{k, v, positions, sequences, cache};
    if (first != 0 || last != T) {  // some tokens of the only sequence
      for (Tensor* t : {&args.k, &args.v, &args.positions}) {
        t->data = static_cast<uint8_t*>(t->data) + first * t->stride(0) * dtype_bytes(t->dtype);
        t->sizes[0] = last - first;
      }
      args.sequences = Sequences::uniform(1);
    }
    EXPECT_EQ(scratch_bytes(stream, args), 0u);  // so the call below passes none
    kv_encode(stream, args);
    EXPECT_TRUE(memory.guards_intact());
  }

  Wanted setup;
  Memory memory;
  int64_t N = 0, T = 0;
  Sequences sequences;
  Tensor positions, k, v;

 private:
  Tensor make_rows(const KvFormat& format, Rows rows) {
    const int64_t D = format.head_dim;
    const Tensor x = memory.make(setup.dtype, {T, setup.Hk, D});
    for (int64_t t = 0; t < T; ++t)
      for (int64_t h = 0; h < setup.Hk; ++h)
        for (bool again = true; again;) {
          std::vector<double> row;
          const double scale = std::exp(rng_.uniform(-2, 2));
          for (int64_t d = 0; d < D; ++d) {
            cases::set(x, (t * setup.Hk + h) * D + d, scale * rng_.normal());
            row.push_back(cases::get(x, (t * setup.Hk + h) * D + d));
          }
          again = false;
          if (rows == Rows::any || format.passthrough) continue;
          for (double z : normalised(format, h, row)) again |= near_a_boundary(format, z, 1.5 * kNear);
        }
    return x;
  }

  Rng rng_;
  int64_t longest_ = 0;
};

inline bool same_bytes(const KvCache& a, const KvCache& b) {
  return cases::same_bits(a.k.codes, b.k.codes) && cases::same_bits(a.v.codes, b.v.codes) &&
         cases::same_bits(a.k.gains, b.k.gains) && cases::same_bits(a.v.gains, b.v.gains);
}

inline std::string digit(int bits) { return std::to_string(bits); }

}  // namespace weft::tests
