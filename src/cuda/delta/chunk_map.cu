// Fills the map from chunks to tokens on the device: see chunk_map.cuh.
#include "cuda/delta/chunk_map.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 1024;

// One block, a thread per sequence: a prefix sum of chunk counts.
__global__ void __launch_bounds__(kThreads) map_chunks_kernel(const __grid_constant__ ChunkMap map) {
  __shared__ int64_t sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;
  for (int64_t base = 0; base < map.sequences.count; base += kThreads) {
    const int64_t n = base + threadIdx.x;
    const bool there = n < map.sequences.count;
    const TokenRange range = there ? tokens_of(map.sequences, n, map.tokens, map.each) : TokenRange{};
    const int64_t mine = chunks_of(range, map.chunk);
    int64_t upto = mine;  // inclusive prefix sum within the warp
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    int64_t first = before + upto - mine;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) first += sums[w];
      before += sums[w];
    }
    if (!there) continue;
    const bool fits = first + mine <= map.rows;
    map.first[n] = fits ? first : -1;
    for (int64_t c = 0; c < mine && first + c < map.rows; ++c) map.sequence[first + c] = fits ? static_cast<int32_t>(n) : -1;
  }
  for (int64_t row = before + threadIdx.x; row < map.rows; row += kThreads) map.sequence[row] = -1;
}

size_t aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

}  // namespace

size_t chunk_map_bytes(const Sequences& sequences, int64_t tokens, int64_t chunk) {
  if (!sequences.cu_seqlens.present()) return 0;
  return aligned(static_cast<size_t>(max_chunks(tokens, sequences, chunk)) * sizeof(int32_t)) +
         aligned(static_cast<size_t>(sequences.count) * sizeof(int64_t));
}

ChunkMap chunk_map(const Sequences& sequences, int64_t tokens, int64_t chunk, void* scratch, int64_t rows) {
  ChunkMap map;
  map.sequences = view_of(sequences);
  map.tokens = tokens;
  map.chunk = chunk;
  map.each = max_tokens(sequences, tokens);
  map.rows = max_chunks(tokens, sequences, chunk);
  if (!sequences.cu_seqlens.present()) {
    map.per_sequence = sequences.count > 0 ? ceil_div(tokens / sequences.count, chunk) : 0;
    return map;
  }
  map.sequence = static_cast<int32_t*>(scratch);
  map.first = reinterpret_cast<int64_t*>(static_cast<char*>(scratch) + aligned(static_cast<size_t>(map.rows) * sizeof(int32_t)));
  if (rows >= 0) map.rows = std::min(map.rows, rows);
  return map;
}

void map_chunks(const char* op, const Stream& stream, const ChunkMap& map) {
  if (map.sequence && map.sequences.count > 0) launch(op, stream, 1, kThreads, 0, map_chunks_kernel, map);
}

}  // namespace weft::cuda
