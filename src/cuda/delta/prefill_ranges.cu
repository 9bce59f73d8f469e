// Ranges of tokens for the pass by warpgroup products, when there are few heads: see Ranges in prefill.cuh.
//
// A warpgroup summarizes 64 rows of one range as the pass walks through it, without queries and outputs: rows of P begin as the identity
// and have no values. Where there are more of them than multiprocessors, two share a block and what it copies. Maps are multiplied in f32.
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kRows = 64;       // of a warpgroup
constexpr int kMostGroups = 2;  // warpgroups of a block
constexpr int kMostRanges = 9;
constexpr int64_t kLeastChunks = 64;  // of a sequence that is worth cutting

// What comes of a chunk, in two rings: keys, then factors, which are needed first; M, then 64 columns of v for every warpgroup. Offsets in
// bytes.
template <int KP>
struct KeyStage {
  static constexpr int kCount = 4, kFactors = KP / 64 * kPanel, kBytes = kFactors + 1024;
  static constexpr int kFactorBytes = Unit<KP>::kBytes - Unit<KP>::kFactors;
  static_assert(kFactorBytes <= 1024);
};
template <int KP, int Groups>
struct MapStage {
  static constexpr int kCount = 4, kV = KP * kChunk * 2, kBytes = kV + Groups * kPanel;
};

template <int KP>
constexpr uint32_t kMapStages = KeyStage<KP>::kCount* KeyStage<KP>::kBytes;  // where they begin
template <int KP, int Groups>
constexpr size_t kSummaryShared = kMapStages<KP> + MapStage<KP, Groups>::kCount* MapStage<KP, Groups>::kBytes + 1024;

struct SummaryMaps {
  CUtensorMap k, v;
};

// Blocks of so many rows that summarize one head of one sequence: tiles of V and tiles of K for all ranges but first and last.
__host__ __device__ inline int64_t summary_tiles(const Prefill& p, int rows) {
  return (p.ranges.count - 2) * ((p.V + rows - 1) / rows + (p.K + rows - 1) / rows);
}

#if WEFT_HAS_WGMMA

struct Summary {
  Lane at;
  float* to;        // a dense matrix
  bool identity;    // rows of P
  int first, rows;  // first row of the block, rows of the matrix
};

template <int Rows>
__device__ bool find_summary(const Prefill& p, Summary& s) {
  const uint32_t tiles = static_cast<uint32_t>(summary_tiles(p, Rows)), heads = static_cast<uint32_t>(p.Hv), block = blockIdx.x;
  const int v_tiles = static_cast<int>((p.V + Rows - 1) / Rows), k_tiles = static_cast<int>((p.K + Rows - 1) / Rows);
  const int tile = static_cast<int>(block % tiles) % (v_tiles + k_tiles),
            range = 1 + static_cast<int>(block % tiles) / (v_tiles + k_tiles);
  Lane& at = s.at;
  at.hv = block / tiles % heads;
  at.n = block / tiles / heads;
  at.hk = key_head(at.hv, p.Hv, p.Hk, p.args.head_map);
  at.range = tokens_of(p.args.sequences, at.n, p.T, p.each);
  at.first_chunk = first_chunk(p.map, at.n);
  if (!at.range.legal || at.first_chunk < 0) return false;
  at.chunks = (at.range.length() + kChunk - 1) >> 6;
  if (state_slots(p.args.states, at.n).inert) return false;
  s.identity = tile >= v_tiles;
  s.first = (s.identity ? tile - v_tiles : tile) * Rows;
  s.rows = static_cast<int>(s.identity ? p.K : p.V);
  const int64_t head = at.n * p.Hv + at.hv;
  s.to = s.identity ? p.ranges.maps + (head * (p.ranges.count - 2) + range - 1) * p.K * p.K
                    : p.ranges.start_of(head, range + 1, p.V, p.K);
  at.first_v = s.identity ? 0 : s.first;
  return cut_range(p.ranges, range, at) && !at.last;  // nobody begins where the last one ends
}

template <int KP, int Groups>
__device__ void copy_summary(const Prefill& p, const SummaryMaps& maps, const Summary& s, uint32_t base,
                             const StageBarriers& of_keys, const StageBarriers& of_maps) {
  using Keys = KeyStage<KP>;
  using Maps = MapStage<KP, Groups>;
  Ring<Keys> keys{0, 1};  // the first round finds every stage free
  Ring<Maps> products{0, 1};
  for (int64_t c = 0; c < s.at.chunks; ++c, keys.advance(), products.advance()) {
    const int token = static_cast<int>(s.at.range.begin + c * kChunk);
    const char* unit = unit_of<KP>(p, s.at, c);
    uint32_t to = base + keys.offset(), full = of_keys.full_of(keys.slot);
    mbarrier_wait(of_keys.empty_of(keys.slot), keys.parity);
    mbarrier_arrive_expect_tx(full, KP / 64 * kPanel + Keys::kFactorBytes);
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel)
      tma_load(to + panel * kPanel, maps.k, panel * 64, static_cast<int>(s.at.hk), token, full);
    tma_load_bulk(to + Keys::kFactors, unit + Unit<KP>::kFactors, Keys::kFactorBytes, full);
    to = base + kMapStages<KP> + products.offset();
    full = of_maps.full_of(products.slot);
    mbarrier_wait(of_maps.empty_of(products.slot), products.parity);
    mbarrier_arrive_expect_tx(full, KP * kChunk * 2 + (s.identity ? 0 : Groups * kPanel));
    if (!s.identity)
#pragma unroll
      for (int panel = 0; panel < Groups; ++panel)
        tma_load(to + Maps::kV + panel * kPanel, maps.v, s.at.first_v + panel * kRows, static_cast<int>(s.at.hv), token, full);
    tma_load_bulk(to, unit + Unit<KP>::kM, KP * kChunk * 2, full);
  }
}

template <class Half, int KP, int Groups>
__device__ void walk_summary(const Prefill& p, const Summary& s, unsigned char* shared, uint32_t base, const StageBarriers& of_keys,
                             const StageBarriers& of_maps) {
  using Keys = KeyStage<KP>;
  using Maps = MapStage<KP, Groups>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = s.first + warp * 16,
            chunks = static_cast<int>(s.at.chunks);
  float state[KP / 8][4] = {};
  FragmentA rounded[KP / 16];
  if (s.identity) {
#pragma unroll
    for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[nt][e] = first_row + lane / 4 + e / 2 * 8 == nt * 8 + lane % 4 * 2 + e % 2 ? 1.0f : 0.0f;
  }
  const LdmatrixLane place(lane);
  const uint32_t descriptor = smem_descriptor(base), values = base + kMapStages<KP> + Maps::kV + warp / 4 * kPanel +
                                                              Tile<kChunk>::offset(place.row(), warp % 4 * 2 + place.piece());
  Ring<Keys> keys;
  Ring<Maps> products;
  // By a vote, so that the compiler knows that all lanes take the same turns.
  for (int c = 0; __any_sync(0xffffffffu, c < chunks); ++c, keys.advance(), products.advance()) {
    const float* factors = reinterpret_cast<const float*>(shared + keys.offset() + Keys::kFactors);
    mbarrier_wait(of_keys.full_of(keys.slot), keys.parity);
    round_and_decay<Half, KP>(state, factors[2 * kChunk], rounded);
    pin(state);
    float u[8][4];
    start_reads<Half, KP>(u, rounded, descriptor + (keys.offset() >> 4));
    mbarrier_wait(of_maps.full_of(products.slot), products.parity);
    LaneOperands<> given{};
    load_factors(factors, lane, given.a);
    if (!s.identity)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) ldmatrix_trans(given.v[pair], values + products.offset() + pair * 16 * 128);
    wgmma_wait<0>();
    pin(u);
    FragmentA w[4];
    corrections<Half>(given, u, w);
    start_writes<Half>(state, w, descriptor + ((kMapStages<KP> + products.offset()) >> 4));
    leave_stage<kFactorLanes>(of_keys.empty_of(keys.slot), lane);
    wgmma_wait<0>();
    pin(state);
    leave_stage<1>(of_maps.empty_of(products.slot), lane);
  }
  store_rows_to<KP>(s.to, first_row, lane, static_cast<int>(p.K), s.rows, state);
}

#endif  // WEFT_HAS_WGMMA

// Threads of a block: warpgroups, and a warp that copies; a whole warpgroup where they share registers unevenly.
template <int Groups>
constexpr int kThreads = Groups * 128 + (Groups == 2 ? 128 : 32);

template <class Half, int KP, int Groups>
__global__ void __launch_bounds__(kThreads<Groups>, 1)
    summarize_kernel(const __grid_constant__ Prefill p, const __grid_constant__ SummaryMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  constexpr int kKeys = KeyStage<KP>::kCount, kMaps = MapStage<KP, Groups>::kCount;
  __shared__ alignas(8) uint64_t counters[2 * (kKeys + kMaps)];
  // The kernel before is the pass through the first range, which writes nothing that is read here, and lets this one start only when it
  // has itself waited for the chunks to be prepared.
  // Kernels behind are not released: their blocks, waiting, would have the room of those that work.
  Summary s;
  if (!find_summary<Groups * kRows>(p, s)) return pdl_wait();
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t first = shared_address(counters);
  const StageBarriers of_keys{first, first + kKeys * 8}, of_maps{first + 2 * kKeys * 8, first + (2 * kKeys + kMaps) * 8};
  if (threadIdx.x == 0) {
    const auto init = [](const StageBarriers& barriers, int count, int lanes) {
      for (int i = 0; i < count; ++i) {
        mbarrier_init(barriers.full_of(i), 1);
        mbarrier_init(barriers.empty_of(i), Groups * 4 * lanes);  // of every warp
      }
    };
    init(of_keys, kKeys, kFactorLanes);
    init(of_maps, kMaps, 1);
    fence_proxy_async();
  }
  __syncthreads();
  const uint32_t base = kept(shared_address(shared));
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) setmaxnreg_dec<40>();
    if (threadIdx.x == Groups * 128) copy_summary<KP, Groups>(p, maps, s, base, of_keys, of_maps);
  } else {
    if constexpr (Groups == 2) setmaxnreg_inc<232>();
    walk_summary<Half, KP, Groups>(p, s, shared, base, of_keys, of_maps);
  }
  __syncwarp();  // the lanes that do not copy would make the one that does wait with them
  pdl_wait();    // whoever waits for this one relies on that pass, too
#endif
}

// Eight rows of a state through all ranges: a thread has a column and a quarter of the sum. Maps are read a range ahead, beside the sums.
constexpr int kComposeRows = 8, kQuarters = 4, kOwn = kComposeRows / kQuarters, kColumns = 128, kPart = kColumns / kQuarters;

__global__ void __launch_bounds__(kQuarters* kColumns, 1) compose_kernel(const __grid_constant__ Prefill p) {
  __shared__ alignas(16) float x[kColumns][kComposeRows];  // columns of the rows
  __shared__ float sums[kQuarters][kComposeRows][kColumns];
  pdl_wait();
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), tiles = (V + kComposeRows - 1) / kComposeRows;
  const int column = threadIdx.x % kColumns, quarter = threadIdx.x / kColumns;
  const int first =
      static_cast<int>(blockIdx.x) % tiles * kComposeRows + quarter * kOwn;  // of the rows that are this thread's in the end
  const int64_t head = blockIdx.x / static_cast<unsigned>(tiles);
  const int count = p.ranges.count;
  float* starts = p.ranges.start_of(head, 1, V, K) + int64_t{first} * K + column;
  const float* maps = p.ranges.maps + head * (count - 2) * K * K;
  const auto load_starts = [&](int r, float(&own)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = first + i < V && column < K ? starts[(int64_t{r} * V + i) * K] : 0.0f;
  };
  const auto fetch = [&](int r, float(&factors)[kPart]) {
    const float* map = maps + (int64_t{r - 1} * K + quarter * kPart) * K + column;
    if (K == kColumns) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) factors[i] = map[i * kColumns];
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) factors[i] = quarter * kPart + i < K && column < K ? map[int64_t{i} * K] : 0.0f;
    }
  };
  const auto keep = [&](const float(&sum)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[column][quarter * kOwn + i] = sum[i];
  };
  const auto step = [&](int r, const float(&factors)[kPart], float(&then)[kPart]) {
    float sum[kOwn];
    load_starts(r, sum);
    if (r + 2 < count) fetch(r + 1, then);
    __syncthreads();
    float mine[kComposeRows] = {};
#pragma unroll
    for (int i = 0; i < kPart; ++i)
#pragma unroll
      for (int four = 0; four < kComposeRows / 4; ++four) {
        const float4 rows = *reinterpret_cast<const float4*>(&x[quarter * kPart + i][four * 4]);
        mine[four * 4] = fmaf(rows.x, factors[i], mine[four * 4]);
        mine[four * 4 + 1] = fmaf(rows.y, factors[i], mine[four * 4 + 1]);
        mine[four * 4 + 2] = fmaf(rows.z, factors[i], mine[four * 4 + 2]);
        mine[four * 4 + 3] = fmaf(rows.w, factors[i], mine[four * 4 + 3]);
      }
#pragma unroll
    for (int i = 0; i < kComposeRows; ++i) sums[quarter][i][column] = mine[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int part = 0; part < kQuarters; ++part) sum[i] += sums[part][quarter * kOwn + i][column];
      if (first + i < V && column < K) starts[(int64_t{r} * V + i) * K] = sum[i];
    }
    keep(sum);
  };
  float even[kPart], odd[kPart], begin[kOwn];
  fetch(1, odd);
  load_starts(0, begin);
  keep(begin);
  for (int r = 1; r + 1 < count; r += 2) {
    step(r, odd, even);
    if (r + 2 < count) step(r + 1, even, odd);
  }
}

}  // namespace

Ranges ranges_of(const Stream& stream, const Prefill& p) {
  Ranges ranges;
  const int64_t blocks = ceil_div(p.V, kRows) * p.Hv * p.N, chunks = ceil_div(p.each, kChunk);
  // Maps are rounded as states are. Long keys can make a map overflow f16 where the states that it meets do not.
  const bool bounded = p.args.l2_norm || p.args.k.dtype == DType::bf16;
  if (!bounded || p.args.schedule != Schedule::fastest || blocks == 0 || p.T == 0 || chunks < kLeastChunks ||
      !takes_wgmma(stream, p))
    return ranges;
  const int64_t at_once = facts_of(stream).multiprocessors / blocks;  // all but the last, then all but the first
  if (at_once < 3) return ranges;                                     // few walk through most chunks twice for less than that saves
  const int64_t count = std::min<int64_t>(kMostRanges, at_once + 1);
  ranges.chunks = ceil_div(chunks, count);
  ranges.count = ranges.end = static_cast<int>(ceil_div(chunks, ranges.chunks));
  return ranges;
}

size_t range_bytes(const Prefill& p, const Ranges& ranges) {
  if (ranges.count == 1) return 0;
  const int64_t floats = p.N * p.Hv * ((ranges.count - 1) * p.V * p.K + (ranges.count - 2) * p.K * p.K);
  return static_cast<size_t>(ceil_div(floats * 4, kScratchAlignment)) * kScratchAlignment;
}

void launch_ranges(const Stream& stream, const Prefill& p) {
  const SummaryMaps maps{token_map(p.args.k), token_map(p.args.v)};
  const int64_t heads = p.Hv * p.N, alone = (summary_tiles(p, kRows) + ceil_div(p.V, kRows)) * heads;  // beside the first range
  for_types(p, [&]<class Half, int KP>() {
    const auto run = [&]<int Groups>(std::integral_constant<int, Groups>) {
      launch_pdl(kOp, stream, summary_tiles(p, Groups * kRows) * heads, kThreads<Groups>, kSummaryShared<KP, Groups>,
                 summarize_kernel<Half, KP, Groups>, p, maps);
    };
    if (alone <= facts_of(stream).multiprocessors)
      run(std::integral_constant<int, 1>{});
    else
      run(std::integral_constant<int, kMostGroups>{});
  });
  launch_pdl(kOp, stream, ceil_div(p.V, kComposeRows) * p.Hv * p.N, kQuarters * kColumns, 0, compose_kernel, p);
}

}  // namespace weft::cuda
