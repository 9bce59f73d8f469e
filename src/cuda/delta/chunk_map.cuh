// The map from chunks to tokens. It is computed on the device, where the lengths of packed sequences are known.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/views.cuh"
#include "weft/delta_chunk.h"

namespace weft::cuda {

// The chunks of a call, numbered in order of sequences. For packed sequences map_chunks() fills `sequence` and `first`.
struct ChunkMap {
  SequencesView sequences;
  int64_t tokens = 0, chunk = 0;
  int64_t each = 0;             // tokens of every sequence, when uniform
  int64_t rows = 0;             // upper bound of the number of chunks
  int64_t per_sequence = 0;     // chunks of every sequence, when uniform
  int32_t* sequence = nullptr;  // [rows] packed: the sequence of a chunk, -1 beyond the last chunk
  int64_t* first = nullptr;     // [N] packed: the first chunk of a sequence, -1 when its chunks do not fit
};

struct Chunk {
  int64_t n = -1;     // sequence; -1: no chunk
  int64_t index = 0;  // within its sequence
  int64_t begin = 0, end = 0;
  __device__ int length() const { return static_cast<int>(end - begin); }
};

// First chunk of sequence n.
__device__ inline int64_t first_chunk(const ChunkMap& map, int64_t n) { return map.sequence ? map.first[n] : n * map.per_sequence; }

__device__ inline Chunk chunk_at(const ChunkMap& map, int64_t row) {
  Chunk found;
  const int64_t n =
      map.sequence ? int64_t{map.sequence[row]} : int64_t{static_cast<uint32_t>(row) / static_cast<uint32_t>(map.per_sequence)};
  if (n < 0) return found;
  const TokenRange range = tokens_of(map.sequences, n, map.tokens, map.each);
  found.n = n;
  found.index = row - first_chunk(map, n);
  found.begin = range.begin + found.index * map.chunk;
  found.end = min(found.begin + map.chunk, range.end);
  return found;
}

// The scratch bytes of a map, a multiple of kScratchAlignment, and a map whose arrays are at the front of `scratch`.
size_t chunk_map_bytes(const Sequences& sequences, int64_t tokens, int64_t chunk);
ChunkMap chunk_map(const Sequences& sequences, int64_t tokens, int64_t chunk, void* scratch, int64_t rows = -1);

// Enqueues the kernel that fills the map; uniform sequences need none.
void map_chunks(const char* op, const Stream& stream, const ChunkMap& map);

}  // namespace weft::cuda
