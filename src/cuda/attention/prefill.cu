// The coded prefill kernel on Hopper: attention of some query rows over coded tiles, on wgmma.
//
// It decodes tiles in every block, which reads least of the cache. With many query rows that repeats too often: see prefill_dense.cu.
// A block has two producer warpgroups, which decode keys and values of 64 tokens to f16 in shared memory, and two consumer
// warpgroups of 64 query rows each, which multiply them.
//
// Numbers. A decoded key is n + 1/2, exactly; its gain multiplies the scores, in f32. (An f16 product of the two would be the
// largest error of all: a table has few levels, and each would be rounded the same way wherever it occurs. With scores of 15 and
// more the output would be off by 1e-3.) A value is n + 1/2 times its gain over a power of two, that of the largest gain of its
// tile. The weights carry the ratio of that power of two to the largest so far. Queries and weights are f16: rounding changes a
// number by at most 2^-12. Sums are f32.
//
// Order. Codes of a word come out of the table in an order of their own, packed_place(). Coordinates of queries take the order of
// K's codes, and rows of keys take the order of V's codes along tokens, so that no data moves.
#include "cuda/attention/prefill.h"

#include "cuda/attention/prefill_consumer.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {
namespace {

using namespace prefill;

constexpr int kThreads = kConsumers + 2 * kGroup;
// The registers that a block starts with are divided among its warpgroups. A warpgroup that asks for more than is left hangs.
constexpr int kAllRegisters = 128, kProducerRegisters = 64, kConsumerRegisters = 192;
static_assert(2 * kGroup * kProducerRegisters + kConsumers * kConsumerRegisters <= kThreads * kAllRegisters);

template <int D>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams p) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];  // the alignment of wgmma's 128-byte swizzle
  __shared__ SharedState share;
  __shared__ float row_scales[kPrefillRows][2];
  __shared__ int bounds[4][4];
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const BlockItem item(q, p.row_tiles, p.plan.splits);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, kPrefillRows);
  if (rows.rows == 0 || rows.range.length() * q.group < kPromptRows) return;
  CacheTiles at(q, item);

  // What any row of the block sees, and what all see.
  if (threadIdx.x < kPrefillRows) {
    const int row = threadIdx.x;
    VisibleRange mine = kSeesNothing;
    if (row < rows.rows) mine = seen_by(q, rows, at.appended, query_row(rows, q.group, row).t);
    const VisibleRange any = seen_by_any(mine, row < rows.rows), all = seen_by_all(mine, row < rows.rows);
    if (row % 32 == 0) {
      int* own = bounds[row / 32];
      own[0] = any.first, own[1] = any.end, own[2] = all.first, own[3] = all.end;
    }
  }
  if (threadIdx.x == kPrefillRows) {
    for (int i = 0; i < Layout<D>::kStages; ++i) {
      mbarrier_init(shared_address(share.k_full + i), kGroup);
      mbarrier_init(shared_address(share.v_full + i), kGroup);
      mbarrier_init(shared_address(share.k_empty + i), kConsumers / 32);
      mbarrier_init(shared_address(share.v_empty + i), kConsumers / 32);
    }
    fence_proxy_async();
  }
  static_assert(Layout<D>::kReserved + sizeof share + sizeof row_scales + 1024 + Layout<D>::kStages * Layout<D>::kTileBytes <=
                Layout<D>::kTableAt);
  const Layout<D> places(p, shared);
  if (threadIdx.x >= kConsumers && places.table_bytes(p) > 0)
    fill_table(p, places.table, threadIdx.x - kConsumers, kThreads - kConsumers);
  __syncthreads();
  int first_seen = bounds[0][0], end_seen = bounds[0][1];
  VisibleToAll all{bounds[0][2], bounds[0][3]};
#pragma unroll
  for (int w = 1; w < 4; ++w) {
    first_seen = min(first_seen, bounds[w][0]), end_seen = max(end_seen, bounds[w][1]);
    all.first = max(all.first, bounds[w][2]), all.end = min(all.end, bounds[w][3]);
  }
  at.take(item, p.plan.splits, {first_seen, end_seen});

  if (threadIdx.x < kConsumers) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume<D>(p, rows, at, item.split, places, share, row_scales);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    const KvRole role = threadIdx.x < kConsumers + kGroup ? KvRole::k : KvRole::v;
    produce<D>(role, p, at, all, places, share, threadIdx.x % kGroup);
  }
#endif
}

bool bits_fit(const KvFormat& format) { return format.bits <= 4 || format.bits == 8; }

}  // namespace

bool prefill_takes(const Stream& stream, const KvCache& cache) {
  const auto built = [&] {
    static const bool is = compiled_for_hopper(reinterpret_cast<const void*>(prefill_kernel<128>), stream.device);
    return is;
  };
  const int64_t D = cache.k.format.head_dim;
  const bool coded = (D == 64 || D == 128) && coded_tile_cache(cache) && bits_fit(cache.k.format) && bits_fit(cache.v.format);
  return facts_of(stream).major == 9 && coded && built();
}

void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan) {
  PrefillParams p{queries, coded_side(cache.k, 128), coded_side(cache.v, 128), plan};
  p.row_tiles = ceil_div(queries.longest * queries.group, kPrefillRows);
  p.k_bits = cache.k.format.bits;
  p.v_bits = cache.v.format.bits;
  p.k_bytes = static_cast<int>(tile_bytes(cache.k.format));
  p.v_bytes = static_cast<int>(tile_bytes(cache.v.format));
  p.unit = p.k.step * std::fabs(queries.scale) * score_unit(1.0f, queries.mask.has_softcap());
  const int64_t blocks = queries.queries.sequences.count * queries.Hk * plan.splits * p.row_tiles;
  const auto enqueue = [&]<int D>() {
    launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(Layout<D>::shared(p)), prefill_kernel<D>, p);
  };
  cache.k.format.head_dim == 64 ? enqueue.template operator()<64>() : enqueue.template operator()<128>();
}

}  // namespace weft::cuda
