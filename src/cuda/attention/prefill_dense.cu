// The dense prefill kernel on Hopper: attention of many query rows over f16 keys and values, on TMA and wgmma.
//
// A block has a producer warpgroup, of which one thread issues TMA loads, and two consumer warpgroups of 64 query rows each.
//
// Numbers. A coded key in scratch is n + 1/2, exactly; its gain multiplies the scores, in f32. (An f16 product of the two would be the
// largest error of all: a table has few levels, and each would be rounded the same way wherever it occurs. With scores of 15 and more
// the output would be off by 1e-3.) A value in scratch is relative to a power of two: the one above the largest gain of its tile
// or, where V is not coded, 2^-15 times the one above its largest number. The weights carry the ratio of that power of two to the largest
// so far. Values and weights far below those lose bits to f16, then vanish. Queries and weights are f16: rounding changes a number by at
// most 2^-12. Sums are f32.
#include "cuda/attention/prefill_dense.h"

#include "cuda/attention/finish_row.cuh"
#include "cuda/attention/prefill_dense_consumer.cuh"
#include "cuda/attention/prefill_dense_prepare.h"
#include "cuda/common/pdl.cuh"
#include "cuda/common/tensor_map.h"

namespace weft::cuda {
namespace {

using namespace dense;

// The registers that a block starts with are divided among its warpgroups. A warpgroup that asks for more than is left hangs.
constexpr int kAllRegisters = 168, kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kAllRegisters);

template <int D, bool Coded>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_dense_kernel(const __grid_constant__ DenseParams p, const __grid_constant__ DenseMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];  // the alignment of wgmma's 128-byte swizzle
  auto& share = *reinterpret_cast<DenseShared<D>*>(shared + DenseLayout<D>::kShare);
  if (threadIdx.x == kConsumers) Barriers<D>(share).init();
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const DenseItem work(p);
  const unsigned pair = work.pair + static_cast<unsigned>(p.first_pair), heads = static_cast<unsigned>(q.Hk);
  const BlockItem item(work.row_tile, work.split, pair % heads, pair / heads);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, kDenseRows);
  if (rows.rows == 0 || rows.range.length() * q.group < p.least_rows) return;
  CacheUnits<tile_tokens(D)> at(q, item);

  if (threadIdx.x == 0) share.rows = rows;
  // What any row of the block sees, and what all see.
  if (threadIdx.x < kDenseRows) {
    const int row = static_cast<int>(threadIdx.x);
    VisibleRange mine = kSeesNothing;
    if (row < rows.rows) mine = seen_by(q, rows, at.appended, query_row(rows, q.group, row).t);
    const VisibleRange any = seen_by_any(mine, row < rows.rows), all = seen_by_all(mine, row < rows.rows);
    if (row % 32 == 0) {
      int* own = share.bounds[row / 32];
      own[0] = any.first, own[1] = any.end, own[2] = all.first, own[3] = all.end;
    }
  }
  __syncthreads();
  VisibleRange any{share.bounds[0][0], share.bounds[0][1]}, all{share.bounds[0][2], share.bounds[0][3]};
#pragma unroll
  for (int w = 1; w < 4; ++w) {
    const int(&bounds)[4] = share.bounds[w];
    any.first = min(any.first, bounds[0]), any.end = max(any.end, bounds[1]);
    all.first = max(all.first, bounds[2]), all.end = min(all.end, bounds[3]);
  }
  at.take(item, p.plan.splits, any);
  const int64_t query_row = rows.range.begin * q.group + rows.first;

  if (threadIdx.x < kConsumers) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume<D, Coded>(p, at.appended, at.first_tile, at.last_tile, p.row_scales + int64_t{item.hk} * q.T * q.group + query_row,
                      shared, share);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    const Tiles<D> tiles{p, at, all, work.pair, Coded ? first_visible_tile(q, rows.range, at.appended, tile_tokens(D)) : 0};
    if (threadIdx.x == kConsumers)
      load_tiles<D, Coded>(p, maps, tiles, query_row, shared, share);
    else if (threadIdx.x >= kConsumers + 32)
      repair_tiles<D, Coded>(p, tiles, shared, share, static_cast<int>(threadIdx.x) - kConsumers - 32);
  }
#endif
}

constexpr int64_t kMostScratch = int64_t{640} << 20;  // bytes of keys and values, unless one pair takes more
constexpr size_t kAligned = 256;

size_t aligned(int64_t bytes) { return (static_cast<size_t>(bytes) + kAligned - 1) / kAligned * kAligned; }

int64_t record_bytes(int D) {
  return D > 128 ? static_cast<int64_t>(sizeof(TileRecord<tile_tokens(256)>))
                 : static_cast<int64_t>(sizeof(TileRecord<tile_tokens(128)>));
}

// Are the tokens of a block contiguous rows that TMA can address? It takes no stride of 0.
bool rows_are_contiguous(const KvCache& cache, const KvSide& side) {
  const SideAddresses at = side_addresses(side);
  const bool apart = (cache.heads() == 1 || at.head > 0) && (blocks_of(cache) == 1 || at.block > 0);
  return apart && at.tile == kTileTokens * side.format.head_dim * 2 && at.head % 16 == 0 && at.block % 16 == 0 &&
         reinterpret_cast<uintptr_t>(at.data) % 16 == 0;
}

bool keys_on_grid(const KvCache& cache) {
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  return !k.passthrough && k.grid_step && k.gain_group == k.head_dim && k.head_dim <= 256 && v.head_dim <= 256;
}

// The largest number of tokens of a tile that always share a page and divide the tile.
int step_of(const KvCache& cache, int tile) {
  if (cache.kind != CacheKind::paged) return tile;
  for (const int step : {tile, 32})
    if (cache.capacity() % step == 0 && tile % step == 0) return step;
  return kPageUnit;
}

}  // namespace

bool prefill_dense_takes(const Stream& stream, const KvCache& cache, int64_t query_rows) {
  if (facts_of(stream).major != 9 || !tensor_map_encoder()) return false;
  static const bool built = compiled_for_hopper(reinterpret_cast<const void*>(prefill_dense_kernel<128, false>), stream.device);
  return built && (keys_on_grid(cache) || uncompressed_tiles(cache)) && query_rows > 0 && query_rows <= INT32_MAX;
}

bool prefill_dense_can_finish(const KvCache& cache) {
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  const RotateView rotate = rotate_view(v);
  return finish_fits(rotate) && v.head_dim >= k.head_dim;
}

DensePlan plan_prefill_dense(const KvCache& cache, int64_t sequences, int64_t reach, int64_t query_rows) {
  DensePlan plan;
  const int64_t most = std::max(cache.k.format.head_dim, cache.v.format.head_dim), Hk = cache.heads(), pairs = sequences * Hk;
  plan.D = most <= 64 ? 64 : most <= 128 ? 128 : 256;
  plan.tile = tile_tokens(plan.D);
  plan.direct = uncompressed_tiles(cache) && *cache.k.format.passthrough == DType::f16 && rows_are_contiguous(cache, cache.k) &&
                rows_are_contiguous(cache, cache.v);
  plan.pairs = pairs;
  plan.query_bytes = aligned(Hk * query_rows * plan.D * 2) + aligned(Hk * query_rows * static_cast<int64_t>(sizeof(float2)));
  plan.scratch_bytes = plan.query_bytes;
  const int64_t capacity_tiles = ceil_div(sequence_capacity(cache), plan.tile);
  plan.tiles = std::min(capacity_tiles, ceil_div(reach, plan.tile) + 1);  // a window may begin inside a tile
  if (!plan.direct) {
    const int64_t each = plan.tiles * (int64_t{plan.tile} * plan.D * 4 + record_bytes(plan.D));
    plan.pairs = std::clamp<int64_t>(kMostScratch / std::max<int64_t>(each, 1), 1, std::max<int64_t>(pairs, 1));
    plan.scratch_bytes +=
        2 * aligned(plan.pairs * plan.tiles * plan.tile * plan.D * 2) + aligned(plan.pairs * plan.tiles * record_bytes(plan.D));
  }
  return plan;
}

namespace {

template <int D, bool Coded>
void enqueue_dense(const char* op, const Stream& stream, const DenseParams& p, const DenseMaps& maps) {
  const int64_t blocks = int64_t{p.pairs} * p.row_tiles * p.plan.splits;
  launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(DenseLayout<D>::kBytes), prefill_dense_kernel<D, Coded>, p, maps);
}

// Maps of keys and values in the cache itself.
MatrixOfRows rows_of_cache(const KvCache& cache, const KvSide& side, int step) {
  const SideAddresses at = side_addresses(side);
  const int64_t D = side.format.head_dim;
  return {DType::f16, at.data, D, cache.capacity(), cache.heads(), blocks_of(cache), D * 2, at.head, at.block, step};
}

}  // namespace

void launch_prefill_dense(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                          const PartialsPlan& partials, const DensePlan& plan, const MergeParams& merge, void* scratch) {
  const int D = plan.D;
  const int64_t query_rows = queries.T * queries.group, Hk = queries.Hk, pairs = queries.queries.sequences.count * Hk;
  if (pairs == 0 || query_rows == 0 || queries.longest == 0) return;
  uint8_t* at = static_cast<uint8_t*>(scratch);
  const auto take = [&](int64_t bytes) {
    uint8_t* const here = at;
    at += aligned(bytes);
    return here;
  };
  DensePrepared prepared;
  prepared.queries = take(Hk * query_rows * D * 2);
  prepared.row_scales = reinterpret_cast<float2*>(take(Hk * query_rows * static_cast<int64_t>(sizeof(float2))));
  DenseParams p;
  p.queries = queries;
  p.plan = partials;
  p.merge = merge;
  p.finishes = plan.finishes;
  const int64_t element = dtype_bytes(merge.o_dtype);
  p.wide_stores = reinterpret_cast<uintptr_t>(merge.o) % static_cast<uintptr_t>(2 * element) == 0 && merge.o_token % 2 == 0 &&
                  merge.o_head % 2 == 0;
  p.row_scales = prepared.row_scales;
  p.row_tiles = static_cast<int>(ceil_div(queries.longest * queries.group, kDenseRows));
  p.least_rows = static_cast<int>(plan.least_rows);
  p.step = step_of(cache, plan.tile);
  p.page_rows = Divisor(cache.capacity());
  p.unit = key_step(cache.k.format) * std::fabs(queries.scale) * score_unit(1.0f, queries.mask.has_softcap());
  p.v_unit = value_step(cache.v.format);
  DenseMaps maps;
  maps.q = tensor_map(op, "q", {DType::f16, prepared.queries, D, query_rows, Hk, 1, D * 2, query_rows * D * 2, 0, kDenseRows});
  launch_prepare_queries(op, stream, queries, prepared, D);
  const int64_t of_pair = int64_t{plan.tiles} * plan.tile * D * 4;
  // Groups of pairs of about equal size whose keys and values fit the L2.
  const int64_t fit = std::clamp<int64_t>(facts_of(stream).l2_bytes / 3 * 2 / std::max<int64_t>(of_pair, 1), 1, plan.pairs);
  p.pairs_at_once = static_cast<int>(ceil_div(plan.pairs, ceil_div(plan.pairs, fit)));
  const auto launch = [&] {
    switch (D) {
      case 64: return plan.direct ? enqueue_dense<64, false>(op, stream, p, maps) : enqueue_dense<64, true>(op, stream, p, maps);
      case 128: return plan.direct ? enqueue_dense<128, false>(op, stream, p, maps) : enqueue_dense<128, true>(op, stream, p, maps);
      default: return plan.direct ? enqueue_dense<256, false>(op, stream, p, maps) : enqueue_dense<256, true>(op, stream, p, maps);
    }
  };
  if (plan.direct) {
    p.pairs = static_cast<int>(pairs);
    maps.k = tensor_map(op, "cache.k", rows_of_cache(cache, cache.k, p.step));
    maps.v = tensor_map(op, "cache.v", rows_of_cache(cache, cache.v, p.step));
    return launch();
  }
  const int64_t rows = plan.tiles * plan.tile;
  p.scratch_tiles = static_cast<int>(plan.tiles);
  prepared.keys = take(plan.pairs * rows * D * 2);
  prepared.values = take(plan.pairs * rows * D * 2);
  p.records = prepared.records = take(plan.pairs * plan.tiles * record_bytes(D));
  MatrixOfRows matrix{DType::f16, prepared.keys, D, rows, plan.pairs, 1, D * 2, rows * D * 2, 0, plan.tile};
  maps.k = tensor_map(op, "cache.k", matrix);
  matrix.data = prepared.values;
  maps.v = tensor_map(op, "cache.v", matrix);
  for (int64_t first = 0; first < pairs; first += plan.pairs) {
    p.first_pair = static_cast<int>(first);
    p.pairs = static_cast<int>(std::min(plan.pairs, pairs - first));
    launch_prepare_cache(op, stream, queries, cache, prepared, plan, p.first_pair, p.pairs, p.unit);
    launch();
  }
}

}  // namespace weft::cuda
