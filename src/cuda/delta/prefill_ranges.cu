// Affine maps of token ranges for the state scan with wgmma, for calls with few heads: see Ranges in prefill.cuh.
//
// summarize_kernel: a consumer warpgroup computes 64 rows of P or Q of one range. It scans the range as prefill_scan_wgmma.cu does,
// without queries and outputs; rows of P start from the identity and have no values. Where there are more such warpgroups than
// multiprocessors, two share a block and its loads. A producer thread loads two pipelines with TMA:
//   KeyStage      keys and factors, which are needed first   full: landed, empty: S k is complete and the factors are read
//   UpdateStage   M and v                                    full: landed, empty: S += W M is complete
// compose_kernel multiplies the maps in f32.
#include <type_traits>

#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kRows = 64;       // state rows of a warpgroup
constexpr int kMostGroups = 2;  // consumer warpgroups of a block
constexpr int kMostRanges = 9;
constexpr int64_t kLeastChunks = 64;  // shorter sequences are not cut

// Pipeline stages of a chunk: keys, then factors; and M, then 64 columns of v for every warpgroup. Offsets in bytes.
template <int KP>
struct KeyStage {
  static constexpr int kCount = 4, kFactors = KP / 64 * kPanel, kBytes = kFactors + 1024;
  static constexpr int kFactorBytes = PreparedChunk<KP>::kBytes - PreparedChunk<KP>::kFactors;
  static_assert(kFactorBytes <= 1024);
};
template <int KP, int Groups>
struct UpdateStage {
  static constexpr int kCount = 4, kV = KP * kChunk * 2, kBytes = kV + Groups * kPanel;
};

template <int KP>
constexpr uint32_t kUpdateStages = KeyStage<KP>::kCount* KeyStage<KP>::kBytes;  // where the update stages begin
template <int KP, int Groups>
constexpr size_t kSummaryShared = kUpdateStages<KP> + UpdateStage<KP, Groups>::kCount* UpdateStage<KP, Groups>::kBytes + 1024;

struct RangeTensorMaps {
  CUtensorMap k, v;
};

// Blocks of `rows` rows that summarize one head of one sequence: tiles of Q and of P for all ranges but the first and the last.
__host__ __device__ inline int64_t summary_tiles(const Prefill& p, int rows) {
  return (p.ranges.count - 2) * ((p.V + rows - 1) / rows + (p.K + rows - 1) / rows);
}

#if WEFT_HAS_WGMMA

// The work of one block: a tile of rows of P or Q of one range.
struct RangeSummary {
  WorkTile work;
  float* to;      // P [K, K] or Q [V, K], dense
  bool identity;  // rows of P
  int first;      // first row of the block
  int rows;       // of the matrix
};

// Finds the block's work; false when there is none.
template <int Rows>
__device__ bool find_range(const Prefill& p, RangeSummary& s) {
  const uint32_t tiles = static_cast<uint32_t>(summary_tiles(p, Rows)), heads = static_cast<uint32_t>(p.Hv), block = blockIdx.x;
  const int v_tiles = static_cast<int>((p.V + Rows - 1) / Rows), k_tiles = static_cast<int>((p.K + Rows - 1) / Rows);
  const int tile = static_cast<int>(block % tiles) % (v_tiles + k_tiles),
            range = 1 + static_cast<int>(block % tiles) / (v_tiles + k_tiles);
  WorkTile& work = s.work;
  work.hv = block / tiles % heads;
  work.n = block / tiles / heads;
  work.hk = key_head(work.hv, p.Hv, p.Hk, p.head_map);
  work.range = tokens_of(p.sequences, work.n, p.T, p.max_tokens);
  work.first_chunk = first_chunk(p.map, work.n);
  if (!work.range.legal || work.first_chunk < 0) return false;
  work.chunks = (work.range.length() + kChunk - 1) >> 6;
  if (state_slots(p.states, work.n).inert) return false;
  s.identity = tile >= v_tiles;
  s.first = (s.identity ? tile - v_tiles : tile) * Rows;
  s.rows = static_cast<int>(s.identity ? p.K : p.V);
  const int64_t head = work.n * p.Hv + work.hv;
  s.to = s.identity ? p.ranges.transitions + (head * (p.ranges.count - 2) + range - 1) * p.K * p.K
                    : p.ranges.start_state(head, range + 1, p.V, p.K);
  work.first_v = s.identity ? 0 : s.first;
  return cut_range(p.ranges, range, work) && !work.last;  // no range starts from the end of the last one
}

// Loads the chunks of a range; by one thread.
template <int KP, int Groups>
__device__ void load_range(const Prefill& p, const RangeTensorMaps& maps, const RangeSummary& s, uint32_t base,
                           const StageBarriers& key_barriers, const StageBarriers& update_barriers) {
  using Keys = KeyStage<KP>;
  using Updates = UpdateStage<KP, Groups>;
  PipelineState<Keys> keys{0, 1};  // in the first round every stage is free
  PipelineState<Updates> updates{0, 1};
  for (int64_t c = 0; c < s.work.chunks; ++c, keys.advance(), updates.advance()) {
    const int token = static_cast<int>(s.work.range.begin + c * kChunk);
    const char* prepared = prepared_of<KP>(p, s.work, c);
    uint32_t to = base + keys.offset(), full = key_barriers.full_of(keys.index);
    mbarrier_wait(key_barriers.empty_of(keys.index), keys.parity);
    mbarrier_arrive_expect_tx(full, KP / 64 * kPanel + Keys::kFactorBytes);
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel)
      tma_load(to + panel * kPanel, maps.k, panel * 64, static_cast<int>(s.work.hk), token, full);
    tma_load_bulk(to + Keys::kFactors, prepared + PreparedChunk<KP>::kFactors, Keys::kFactorBytes, full);
    to = base + kUpdateStages<KP> + updates.offset();
    full = update_barriers.full_of(updates.index);
    mbarrier_wait(update_barriers.empty_of(updates.index), updates.parity);
    mbarrier_arrive_expect_tx(full, KP * kChunk * 2 + (s.identity ? 0 : Groups * kPanel));
    if (!s.identity)
#pragma unroll
      for (int panel = 0; panel < Groups; ++panel)
        tma_load(to + Updates::kV + panel * kPanel, maps.v, s.work.first_v + panel * kRows, static_cast<int>(s.work.hv), token,
                 full);
    tma_load_bulk(to, prepared + PreparedChunk<KP>::kM, KP * kChunk * 2, full);
  }
}

// Scans the chunks of a range and stores the warp's 16 rows of P or Q; by the consumer warpgroups.
template <class Half, int KP, int Groups>
__device__ void scan_range(const Prefill& p, const RangeSummary& s, unsigned char* shared, uint32_t base,
                           const StageBarriers& key_barriers, const StageBarriers& update_barriers) {
  using Keys = KeyStage<KP>;
  using Updates = UpdateStage<KP, Groups>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = s.first + warp * 16,
            chunks = static_cast<int>(s.work.chunks);
  float state[KP / 8][4] = {};
  FragmentA rounded[KP / 16];
  if (s.identity) {
#pragma unroll
    for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[nt][e] = first_row + lane / 4 + e / 2 * 8 == nt * 8 + lane % 4 * 2 + e % 2 ? 1.0f : 0.0f;
  }
  const LdmatrixLane at(lane);
  const uint32_t descriptor = smem_descriptor(base), values = base + kUpdateStages<KP> + Updates::kV + warp / 4 * kPanel +
                                                              Tile64::offset(at.row(), warp % 4 * 2 + at.piece());
  PipelineState<Keys> keys;
  PipelineState<Updates> updates;
  // The vote tells the compiler that all lanes of the warp agree.
  for (int c = 0; __any_sync(0xffffffffu, c < chunks); ++c, keys.advance(), updates.advance()) {
    const float* factors = reinterpret_cast<const float*>(shared + keys.offset() + Keys::kFactors);
    mbarrier_wait(key_barriers.full_of(keys.index), keys.parity);
    round_and_decay<Half, KP>(state, factors[2 * kChunk], rounded);
    pin(state);
    float u[8][4];
    start_state_reads<Half, KP>(u, rounded, descriptor + (keys.offset() >> 4));
    mbarrier_wait(update_barriers.full_of(updates.index), updates.parity);
    LaneOperands<> operands{};
    load_factors(factors, lane, operands.a);
    if (!s.identity)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) ldmatrix_trans(operands.v[pair], values + updates.offset() + pair * 16 * 128);
    wgmma_wait<0>();
    pin(u);
    FragmentA w[4];
    compute_corrections<Half>(operands, u, w);
    start_updates<Half>(state, w, descriptor + ((kUpdateStages<KP> + updates.offset()) >> 4));
    release_stage<kFactorLanes>(key_barriers.empty_of(keys.index), lane);
    wgmma_wait<0>();
    pin(state);
    release_stage<1>(update_barriers.empty_of(updates.index), lane);
  }
  store_rows_to<KP>(s.to, first_row, lane, static_cast<int>(p.K), s.rows, state);
}

#endif  // WEFT_HAS_WGMMA

// Threads of a block: consumer warpgroups and a producer warp. With two consumer warpgroups the producer is a whole warpgroup,
// which setmaxnreg needs.
template <int Groups>
constexpr int kThreads = Groups * 128 + (Groups == 2 ? 128 : 32);

template <class Half, int KP, int Groups>
__global__ void __launch_bounds__(kThreads<Groups>, 1)
    summarize_kernel(const __grid_constant__ Prefill p, const __grid_constant__ RangeTensorMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  constexpr int kKeys = KeyStage<KP>::kCount, kUpdates = UpdateStage<KP, Groups>::kCount;
  __shared__ alignas(8) uint64_t counters[2 * (kKeys + kUpdates)];
  // PDL: the previous kernel is the scan of the first range. It writes nothing that this kernel reads, and it launches this kernel
  // only after its own wait for prepare, so this kernel waits at its end. It does not launch its dependents early: their waiting
  // blocks would take the multiprocessors of working ones.
  RangeSummary s;
  if (!find_range<Groups * kRows>(p, s)) return pdl_wait();
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t first = shared_address(counters);
  const StageBarriers key_barriers{first, first + kKeys * 8},
      update_barriers{first + 2 * kKeys * 8, first + (2 * kKeys + kUpdates) * 8};
  if (threadIdx.x == 0) {
    const auto init = [](const StageBarriers& barriers, int count, int lanes) {
      for (int i = 0; i < count; ++i) {
        mbarrier_init(barriers.full_of(i), 1);
        mbarrier_init(barriers.empty_of(i), Groups * 4 * lanes);  // arrivals of every consumer warp
      }
    };
    init(key_barriers, kKeys, kFactorLanes);
    init(update_barriers, kUpdates, 1);
    fence_proxy_async();
  }
  __syncthreads();
  const uint32_t base = opaque(shared_address(shared));
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) setmaxnreg_dec<40>();
    if (threadIdx.x == Groups * 128) load_range<KP, Groups>(p, maps, s, base, key_barriers, update_barriers);
  } else {
    if constexpr (Groups == 2) setmaxnreg_inc<232>();
    scan_range<Half, KP, Groups>(p, s, shared, base, key_barriers, update_barriers);
  }
  __syncwarp();  // keeps the other lanes of the producer warp from pdl_wait while one lane loads
  pdl_wait();    // a kernel that waits for this one relies on the scan of the first range, too
#endif
}

// Eight state rows through all ranges. A thread has one column and a quarter of each sum. P of the next range is loaded during the
// sums.
constexpr int kComposeRows = 8, kQuarters = 4, kOwn = kComposeRows / kQuarters, kColumns = 128, kSlice = kColumns / kQuarters;

__global__ void __launch_bounds__(kQuarters* kColumns, 1) compose_kernel(const __grid_constant__ Prefill p) {
  __shared__ alignas(16) float x[kColumns][kComposeRows];  // state rows before the range, transposed
  __shared__ float sums[kQuarters][kComposeRows][kColumns];
  pdl_wait();
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), tiles = (V + kComposeRows - 1) / kComposeRows;
  const int column = threadIdx.x % kColumns, quarter = threadIdx.x / kColumns;
  const int first =
      static_cast<int>(blockIdx.x) % tiles * kComposeRows + quarter * kOwn;  // first of the rows that the thread stores
  const int64_t head = blockIdx.x / static_cast<unsigned>(tiles);
  const int count = p.ranges.count;
  float* start_states = p.ranges.start_state(head, 1, V, K) + int64_t{first} * K + column;
  const float* transitions = p.ranges.transitions + head * (count - 2) * K * K;
  const auto load_starts = [&](int r, float(&own)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = first + i < V && column < K ? start_states[(int64_t{r} * V + i) * K] : 0.0f;
  };
  const auto fetch = [&](int r, float(&factors)[kSlice]) {
    const float* transition = transitions + (int64_t{r - 1} * K + quarter * kSlice) * K + column;
    if (K == kColumns) {
#pragma unroll
      for (int i = 0; i < kSlice; ++i) factors[i] = transition[i * kColumns];
    } else {
#pragma unroll
      for (int i = 0; i < kSlice; ++i) factors[i] = quarter * kSlice + i < K && column < K ? transition[int64_t{i} * K] : 0.0f;
    }
  };
  const auto keep = [&](const float(&sum)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[column][quarter * kOwn + i] = sum[i];
  };
  const auto step = [&](int r, const float(&factors)[kSlice], float(&then)[kSlice]) {
    float sum[kOwn];
    load_starts(r, sum);
    if (r + 2 < count) fetch(r + 1, then);
    __syncthreads();
    float mine[kComposeRows] = {};
#pragma unroll
    for (int i = 0; i < kSlice; ++i)
#pragma unroll
      for (int four = 0; four < kComposeRows / 4; ++four) {
        const float4 rows = *reinterpret_cast<const float4*>(&x[quarter * kSlice + i][four * 4]);
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
      for (int other = 0; other < kQuarters; ++other) sum[i] += sums[other][quarter * kOwn + i][column];
      if (first + i < V && column < K) start_states[(int64_t{r} * V + i) * K] = sum[i];
    }
    keep(sum);
  };
  float even[kSlice], odd[kSlice], begin[kOwn];
  fetch(1, odd);
  load_starts(0, begin);
  keep(begin);
  for (int r = 1; r + 1 < count; r += 2) {
    step(r, odd, even);
    if (r + 2 < count) step(r + 1, even, odd);
  }
}

}  // namespace

Ranges plan_ranges(const Stream& stream, const Prefill& p) {
  Ranges ranges;
  const int64_t blocks = ceil_div(p.V, kRows) * p.Hv * p.N, chunks = ceil_div(p.max_tokens, kChunk);
  // P and Q are rounded as states are. With long keys a map can overflow f16 where the states that it is applied to do not.
  const bool bounded = p.l2_norm || p.k.dtype == DType::bf16;
  if (!bounded || p.schedule != Schedule::fastest || blocks == 0 || p.T == 0 || chunks < kLeastChunks || !can_use_wgmma(stream, p))
    return ranges;
  const int64_t at_once =
      facts_of(stream).multiprocessors / blocks;  // ranges that run at once: all but the last, then all but the first
  if (at_once < 3) return ranges;                 // the second scan of most chunks costs more than so few ranges save
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
  const RangeTensorMaps maps{token_tensor_map(p.k, p.T, p.Hk, p.K), token_tensor_map(p.v, p.T, p.Hv, p.V)};
  const int64_t heads = p.Hv * p.N, alone = (summary_tiles(p, kRows) + ceil_div(p.V, kRows)) *
                                            heads;  // and the scan of the first range runs beside them
  dispatch_types(p, [&]<class Half, int KP>() {
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
