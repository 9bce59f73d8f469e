// Coded-tile decode kernels on the host: which kernel a cache gets, and its lowered arguments.
#include "cuda/attention/decode_coded.cuh"

#include <cmath>

#include "common/grid_levels.h"
#include "common/half.h"
#include "cuda/attention/decode_coded.h"

namespace weft::cuda {
namespace {

bool side_fits(const KvFormat& format) {
  return !format.passthrough && format.grid_step && format.gain_group == format.head_dim && format.gain_dtype == DType::f16;
}

// Codes of 8 bits are used as they are, without a table.
bool whole_grid(const KvFormat& format) { return format.bits != 8 || levels_are_neighbours(format); }

// Among the kernels that the device has shared memory for, the smallest that takes `rows` query rows at once, or else the largest.
const CodedKernel* find(const Stream& stream, const KvCache& cache, int64_t rows) {
  constexpr int kMostStatic = 3 << 10;
  if (!coded_tile_cache(cache)) return nullptr;
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  const CodedKernel* found = nullptr;
  for (const auto kernels :
       {coded_kernels_8v8, coded_kernels_8v4, coded_kernels_4v4, coded_kernels_4v2, coded_kernels_3v3, coded_kernels_2v2})
    for (const CodedKernel& kernel : kernels()) {
      if (kernel.k_bits != k.bits || kernel.v_bits != v.bits || kernel.D != k.head_dim) continue;
      if (kernel.shared + kMostStatic > facts_of(stream).shared_bytes) continue;
      if (!found || (found->rows < rows ? kernel.rows > found->rows : kernel.rows >= rows && kernel.rows < found->rows))
        found = &kernel;
    }
  return found;
}

}  // namespace

bool coded_tile_cache(const KvCache& cache) {
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  return cache.layout == KvLayout::tiles && cache.tile_order == TileOrder::lanes && side_fits(k) && side_fits(v) && whole_grid(k) &&
         whole_grid(v) && k.head_dim == v.head_dim && k.rotation != Rotation::dense;
}

CodedSide coded_side(const KvSide& side, int bias) {
  const KvFormat& format = side.format;
  CodedSide view{side_addresses(side)};
  for (int i = 0; format.bits <= 4 && i < 1 << format.bits; ++i) {
    const int n = grid_point(format, i) + bias;
    view.table[i / 4] |= (static_cast<uint32_t>(n) & 0xff) << (i % 4 * 8);
    view.halves[i] = f32_to_f16(static_cast<float>(n - bias) + 0.5f);
  }
  view.step = *format.grid_step;
  if (format.gain_units == GainUnits::unit_vector) view.step /= std::sqrt(static_cast<float>(format.gain_group));
  return view;
}

CodedFit coded_fit(const Stream& stream, const KvCache& cache, int64_t rows) {
  const CodedKernel* kernel = find(stream, cache, rows);
  return kernel ? CodedFit{kernel->rows, kernel->warps, kernel->max_items} : CodedFit{};
}

int coded_cluster_room(const Stream& stream, const KvCache& cache, int64_t rows, int blocks) {
  const CodedKernel* kernel = find(stream, cache, rows);
  return cluster_room(reinterpret_cast<const void*>(kernel->kernel), stream.device, blocks, 32 * kernel->warps,
                      static_cast<size_t>(kernel->shared));
}

void launch_decode_coded(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                         const PartialsPlan& plan, const CodedLaunch& how, const MergeParams& merge) {
  const CodedKernel* kernel = find(stream, cache, how.choose_rows);
  const int64_t rows = std::min(queries.longest * queries.group, how.most_rows), row_tiles = ceil_div(rows, kernel->rows);
  const int64_t items = queries.queries.sequences.count * queries.Hk * plan.splits * row_tiles;
  if (Status status = check_grid(op, items); !status) throw Error(std::move(status));
  const CodedParams params{queries,
                           coded_side(cache.k, 0),
                           coded_side(cache.v, 128),
                           plan,
                           Divisor(row_tiles),
                           Divisor(plan.splits),
                           Divisor(queries.Hk),
                           Divisor(queries.group),
                           Divisor(queries.index.rows / kTileTokens),
                           how.most_rows,
                           static_cast<unsigned>(how.items_per_block),
                           static_cast<unsigned>(items),
                           how.finish,
                           merge};
  enqueue(op, stream,
          {.blocks = ceil_div(items, how.items_per_block),
           .threads = 32 * kernel->warps,
           .shared = static_cast<size_t>(kernel->shared),
           .cluster = how.finish == CodedFinish::cluster ? static_cast<int>(plan.splits) : 1,
           .pdl = true},
          kernel->kernel, params);
}

}  // namespace weft::cuda
