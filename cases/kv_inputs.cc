// Compressed KV caches from options: see kv_inputs.h.
#include "cases/kv_inputs.h"

#include <algorithm>
#include <cmath>

#include "common/bit_pack.h"
#include "common/kv_index.h"
#include "common/lanes_tile.h"

namespace weft::cases {
namespace {

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A random orthogonal matrix: Gram-Schmidt on Gaussian rows.
Tensor orthogonal(Memory& memory, Rng& rng, int64_t D) {
  std::vector<std::vector<double>> rows(static_cast<size_t>(D), std::vector<double>(static_cast<size_t>(D)));
  const auto dot = [](const auto& a, const auto& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    for (double& x : rows[i]) x = rng.normal();
    for (size_t j = 0; j < i; ++j) {
      const double overlap = dot(rows[i], rows[j]);
      for (size_t d = 0; d < rows.size(); ++d) rows[i][d] -= overlap * rows[j][d];
    }
    const double norm = std::sqrt(dot(rows[i], rows[i]));
    for (double& x : rows[i]) x /= norm;
  }
  const Tensor t = memory.make(DType::f32, {D, D});
  for (int64_t i = 0; i < D * D; ++i) set(t, i, rows[static_cast<size_t>(i / D)][static_cast<size_t>(i % D)]);
  return t;
}

// [blocks, Hk, rows, width], with tokens before heads in memory when token_major.
Tensor make_plane(Memory& memory, DType dtype, int64_t blocks, int64_t Hk, int64_t rows, int64_t width, bool token_major) {
  if (!token_major) return memory.make(dtype, {blocks, Hk, rows, width});
  Tensor t = memory.make(dtype, {blocks, rows, Hk, width});
  std::swap(t.sizes[1], t.sizes[2]);
  std::swap(t.strides[1], t.strides[2]);
  return t;
}

void make_storage(Memory& memory, KvCache& cache, int64_t blocks, int64_t Hk, int64_t capacity, bool token_major) {
  for (KvSide* side : {&cache.k, &cache.v}) {
    const KvFormat& format = side->format;
    side->gains = {};
    if (cache.layout == KvLayout::tiles) {
      side->codes = memory.make(DType::u8, {blocks, Hk, capacity / kTileTokens, tile_bytes(format)});
    } else if (format.passthrough) {
      side->codes = make_plane(memory, *format.passthrough, blocks, Hk, capacity, format.head_dim, token_major);
    } else {
      side->codes = make_plane(memory, DType::u8, blocks, Hk, capacity, code_bytes(format), token_major);
      side->gains = make_plane(memory, format.gain_dtype, blocks, Hk, capacity, format.head_dim / format.gain_group, token_major);
    }
  }
}

int64_t row_at(const Tensor& t, int64_t block, int64_t head, int64_t row) {
  return block * t.stride(0) + head * t.stride(1) + row * t.stride(2);
}

// Fills one row of a cache in layout `rows` with random content.
void fill_row(const KvSide& side, int64_t block, int64_t head, int64_t row, Rng& rng, double factor = 1) {
  const KvFormat& format = side.format;
  const int64_t at = row_at(side.codes, block, head, row), D = format.head_dim;
  if (format.passthrough) {
    for (int64_t d = 0; d < D; ++d) set(side.codes, at + d, factor * rng.normal());
    return;
  }
  uint8_t codes[kMaxHeadDim];
  for (int64_t d = 0; d < D; d += 8) {
    uint64_t bits = rng.next();
    for (int64_t i = 0; i < 8; ++i, bits >>= 8) codes[d + i] = static_cast<uint8_t>(bits & ((1u << format.bits) - 1));
  }
  uint8_t* bytes = static_cast<uint8_t*>(side.codes.data) + at;
  if (format.packing == Packing::byte)
    std::copy(codes, codes + D, bytes);
  else
    pack_codes(codes, D, format.bits, bytes);
  const double unit = format.gain_units == GainUnits::unit_vector ? std::sqrt(static_cast<double>(format.gain_group)) : 1;
  for (int64_t g = 0; g < side.gains.size(3); ++g)
    set(side.gains, row_at(side.gains, block, head, row) + g, factor * unit * rng.uniform(0.5, 1.5));
}

}  // namespace

KvFormat make_format(Options& options, Memory& memory, Rng& rng, char side, int64_t Hk, int64_t D) {
  const std::string prefix(1, side);
  std::string name = options.text(prefix + "bits", "4");
  if (name == "16") name = "f16";
  const auto seed = static_cast<uint64_t>(options.integer("seed", 1));
  const std::string recipe = options.text("recipe", "");
  KvFormat format;
  try {
    format = recipe.empty() ? kv_format(name, D, seed)
             : side == 'k'  ? kv_recipe(recipe, D, D, seed).k
                            : kv_recipe(recipe, D, D, seed).v;
  } catch (const Error& error) {
    throw OptionError(error.what());
  }
  const std::string rotation = options.choice("rotation", "preset", {"preset", "none", "dense"});
  const std::string gain = options.choice("gain", "preset", {"preset", "rms", "matched", "least_squares", "unbiased"});
  const std::string gain_type = options.choice("gain_type", "preset", {"preset", "f32", "f16", "bf16"});
  const int64_t gain_group = options.integer("gain_group", 0, 0, kMaxHeadDim);
  const std::string packing = options.choice("packing", "preset", {"preset", "dense", "byte"});
  const bool mean = options.flag(prefix + "mean");
  if (format.passthrough) return format;
  if (rotation == "none") format.rotation = Rotation::none;
  if (rotation == "dense") {
    format.rotation = Rotation::dense;
    format.dense_rotation = orthogonal(memory, rng, D);
  }
  if (gain == "rms") format.gain_rule = GainRule::rms;
  if (gain == "matched") format.gain_rule = GainRule::matched;
  if (gain == "least_squares") format.gain_rule = GainRule::least_squares;
  if (gain == "unbiased") format.gain_rule = GainRule::unbiased;
  if (gain_type == "f32") format.gain_dtype = DType::f32;
  if (gain_type == "f16") format.gain_dtype = DType::f16;
  if (gain_type == "bf16") format.gain_dtype = DType::bf16;
  if (gain_group > 0) format.gain_group = gain_group;
  if (packing == "byte") format.packing = Packing::byte;
  if (packing == "dense") format.packing = Packing::dense;
  if (mean) {
    format.mean = memory.make(DType::f32, {Hk, D});
    fill_normal(format.mean, rng, 0.5);
  }
  return format;
}

KvSetting make_cache(Options& options, Memory& memory, Rng& rng, int64_t N, int64_t tokens) {
  KvSetting s;
  s.N = N;
  s.Hk = options.integer("Hk", 2, 1, 1024);
  s.last_v = std::ldexp(1.0, static_cast<int>(options.integer("last_v", 0, 0, 100)));
  const int64_t D = options.integer("D", 64, 8, kMaxHeadDim);
  s.Dk = options.integer("Dk", D, 8, kMaxHeadDim);
  s.Dv = options.integer("Dv", D, 8, kMaxHeadDim);
  KvCache& cache = s.cache;
  cache.k.format = make_format(options, memory, rng, 'k', s.Hk, s.Dk);
  cache.v.format = make_format(options, memory, rng, 'v', s.Hk, s.Dv);
  const std::string kind = options.choice("cache", "linear", {"linear", "ring", "paged"});
  const bool fast = options.fast() && lanes_fit(cache.k.format) && lanes_fit(cache.v.format);
  cache.layout = options.choice("layout", fast ? "tiles" : "rows", {"rows", "tiles"}) == "rows" ? KvLayout::rows : KvLayout::tiles;
  const bool fast_order = fast && cache.layout == KvLayout::tiles;
  const bool lanes = options.choice("order", fast_order ? "lanes" : "plain", {"plain", "lanes"}) == "lanes";
  const bool token_major = options.choice("major", "head", {"head", "token"}) == "token";
  const std::string slots = options.choice("slots", "plain", {"plain", "permuted", "inert"});
  const int64_t unit = cache.layout == KvLayout::tiles ? kTileTokens : 1;
  const int64_t capacity = round_up(options.integer("capacity", round_up(std::max<int64_t>(tokens, 1), 64), 1), unit);
  const int64_t page = options.integer("page", cache.layout == KvLayout::tiles ? 64 : 16, 1);
  cache.kind = kind == "linear" ? CacheKind::linear : kind == "ring" ? CacheKind::ring : CacheKind::paged;
  cache.pinned = options.integer("pinned", 0);
  if (lanes && cache.layout == KvLayout::rows) throw OptionError("option order is 'lanes', which needs layout=tiles");

  int64_t blocks = 0, rows = capacity;
  if (cache.kind == CacheKind::paged) {
    const int64_t pages = round_up(capacity, page) / page;
    rows = page;
    blocks = N * pages + 1;
    // Pages of a sequence lie scattered: logical page i of sequence n is physical page i N + n, counted from the end. Unused
    // entries of the table are -1.
    Tensor table = memory.make(DType::i32, {N, pages});
    for (int64_t n = 0; n < N; ++n)
      for (int64_t i = 0; i < pages; ++i)
        set(table, n * pages + i, i * page < tokens ? static_cast<double>(blocks - 1 - (i * N + n)) : -1);
    cache.page_table = table;
  } else {
    blocks = slots == "plain" ? N : N + 2;
    if (slots != "plain") {
      std::vector<int64_t> order;
      for (int64_t n = 0; n < N; ++n)
        order.push_back(slots == "inert" && n % 2 ? (n % 4 == 1 ? -1 : blocks + 5) : (n * (blocks - 1) + 1) % blocks);
      cache.slots = memory.indices(order);
    }
  }
  if (lanes) cache.tile_order = TileOrder::lanes;
  make_storage(memory, cache, blocks, s.Hk, rows, token_major);
  return s;
}

void fill_cache(KvSetting& setting, Memory& memory, Rng& rng, const std::vector<int64_t>& lengths) {
  KvCache& target = setting.cache;
  target.lengths = memory.indices(lengths);
  // A cache in tiles is filled as rows and then repacked.
  Memory staging;
  KvCache rows = target;
  if (target.layout == KvLayout::tiles) {
    rows.layout = KvLayout::rows;
    rows.tile_order = TileOrder::token_major;
    make_storage(staging, rows, target.k.codes.size(0), setting.Hk, target.capacity(), false);
  }
  for (int64_t n = 0; n < setting.N; ++n) {
    const int64_t length = lengths[static_cast<size_t>(n)], live = live_tokens(rows, length);
    for (int64_t j = 0; j < live; ++j) {
      const KvLocation at = locate(rows, n, live_position(rows, length, j));
      for (int64_t h = 0; at.exists() && h < setting.Hk; ++h) {
        fill_row(rows.k, at.block, h, at.row, rng);
        fill_row(rows.v, at.block, h, at.row, rng, j + 1 == live ? setting.last_v : 1);
      }
    }
  }
  if (target.layout == KvLayout::tiles) run_op(kReference, KvRepackArgs{rows, target});
}

std::vector<Tensor> storage_of(const KvCache& cache) {
  std::vector<Tensor> all;
  for (const KvSide* side : {&cache.k, &cache.v})
    for (const Tensor* t : {&side->codes, &side->gains})
      if (t->present()) all.push_back(*t);
  return all;
}

KvCache as_rows(Memory& memory, const KvCache& cache) {
  KvCache rows = cache;
  rows.layout = KvLayout::rows;
  rows.tile_order = TileOrder::token_major;
  make_storage(memory, rows, cache.k.codes.size(0), cache.heads(), cache.capacity(), false);
  run_op(kReference, KvRepackArgs{cache, rows});
  return rows;
}

RowContent row_content(const KvSide& side, int64_t block, int64_t head, int64_t row) {
  const KvFormat& format = side.format;
  const int64_t at = row_at(side.codes, block, head, row), D = format.head_dim;
  RowContent content;
  if (format.passthrough) {
    for (int64_t d = 0; d < D; ++d) content.values.push_back(get(side.codes, at + d));
    return content;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(side.codes.data) + at;
  content.codes.resize(static_cast<size_t>(D));
  if (format.packing == Packing::byte)
    std::copy(bytes, bytes + D, content.codes.begin());
  else
    unpack_codes(bytes, D, format.bits, content.codes.data());
  for (int64_t g = 0; g < side.gains.size(3); ++g)
    content.gains.push_back(get(side.gains, row_at(side.gains, block, head, row) + g));
  return content;
}

std::vector<double> decoded_row(const KvFormat& format, const RowContent& row) {
  if (format.passthrough) return row.values;
  std::vector<double> y;
  const double unit = format.gain_units == GainUnits::unit_vector ? 1 / std::sqrt(static_cast<double>(format.gain_group)) : 1;
  for (size_t d = 0; d < row.codes.size(); ++d)
    y.push_back(row.gains[d / static_cast<size_t>(format.gain_group)] * unit * static_cast<double>(format.codebook[row.codes[d]]));
  return y;
}

double cache_bytes(const KvCache& cache, double tokens) {
  double row = 0;
  for (const KvSide* side : {&cache.k, &cache.v}) row += static_cast<double>(code_bytes(side->format) + gain_bytes(side->format));
  return tokens * row * static_cast<double>(cache.heads());
}

}  // namespace weft::cases
