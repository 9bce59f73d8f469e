// The prefill kernel on Hopper: attention of many query rows over coded tiles or tiles of f16 or bf16, on wgmma.
//
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
template <int D>
struct Registers {
  static constexpr int kAll = 128, kProducer = D > 128 ? 40 : 64, kConsumer = D > 128 ? 216 : 192;
  static_assert(2 * kGroup * kProducer + kConsumers * kConsumer <= kThreads * kAll);
};

template <int D, bool Uncompressed>
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
  static_assert(Layout<D>::kQueriesInShared ||
                Layout<D>::kReserved + sizeof share + sizeof row_scales + 1024 + Layout<D>::kStages * Layout<D>::kTileBytes <=
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
    setmaxnreg_inc<Registers<D>::kConsumer>();
    consume<D, Uncompressed>(p, rows, at, item.split, places, share, row_scales);
  } else {
    setmaxnreg_dec<Registers<D>::kProducer>();
    const KvRole role = threadIdx.x < kConsumers + kGroup ? KvRole::k : KvRole::v;
    if constexpr (Uncompressed)
      produce_uncompressed<D>(role, p, at, all, places, share, threadIdx.x % kGroup);
    else
      produce<D>(role, p, at, all, places, share, threadIdx.x % kGroup);
  }
#endif
}

bool bits_fit(const KvFormat& format) { return format.bits <= 4 || format.bits == 8; }

}  // namespace

bool prefill_takes(const Stream& stream, const KvCache& cache) {
  const auto built = [&] {
    static const bool is = compiled_for_hopper(reinterpret_cast<const void*>(prefill_kernel<128, false>), stream.device);
    return is;
  };
  const int64_t D = cache.k.format.head_dim;
  const bool coded = (D == 64 || D == 128) && coded_tile_cache(cache) && bits_fit(cache.k.format) && bits_fit(cache.v.format);
  return facts_of(stream).major == 9 && (coded || uncompressed_tiles(cache)) && built();
}

void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan) {
  const bool uncompressed = uncompressed_tiles(cache);
  const auto side = [&](const KvSide& own) { return uncompressed ? CodedSide{side_addresses(own)} : coded_side(own, 128); };
  PrefillParams p{queries, side(cache.k), side(cache.v), plan};
  p.row_tiles = ceil_div(queries.longest * queries.group, kPrefillRows);
  p.k_bits = uncompressed ? 16 : cache.k.format.bits;
  p.v_bits = uncompressed ? 16 : cache.v.format.bits;
  p.bf16 = uncompressed && cache.k.format.passthrough == DType::bf16;
  p.k_bytes = static_cast<int>(tile_bytes(cache.k.format));
  p.v_bytes = static_cast<int>(tile_bytes(cache.v.format));
  p.unit = p.k.step * std::fabs(queries.scale) * score_unit(1.0f, queries.mask.has_softcap());
  const int64_t blocks = queries.queries.sequences.count * queries.Hk * plan.splits * p.row_tiles;
  const auto enqueue = [&]<int D, bool Uncompressed>() {
    launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(Layout<D>::shared(p)), prefill_kernel<D, Uncompressed>, p);
  };
  switch (cache.k.format.head_dim) {
    case 64: return uncompressed ? enqueue.template operator()<64, true>() : enqueue.template operator()<64, false>();
    case 128: return uncompressed ? enqueue.template operator()<128, true>() : enqueue.template operator()<128, false>();
    default: enqueue.template operator()<256, true>();
  }
}

}  // namespace weft::cuda
