// The chunk stages in sequence on the reference: see chunk_stages.h.
#include "cases/chunk_stages.h"

namespace weft::cases {

ChunkResults run_stages(Memory& memory, const ChunkInputs& in, DType staged, Stage last) {
  constexpr Stream stream{Backend::reference};
  const int64_t T = in.k.size(0), K = in.k.size(2), Hv = in.v.size(1), V = in.v.size(2), C = in.chunk;
  ChunkResults r;
  r.g_cumsum = in.g.rank == 3 ? memory.make(DType::f32, {T, Hv, K}) : memory.make(DType::f32, {T, Hv});
  fill(r.g_cumsum, 0);  // tokens outside every sequence stay finite
  chunk_cumsum(stream, {in.g, r.g_cumsum, in.sequences, C});
  if (last == Stage::cumsum) return r;
  r.a = memory.make(DType::f32, {T, Hv, C});
  fill(r.a, 0);
  chunk_kkt(stream, {in.k, in.beta, r.g_cumsum, r.a, in.sequences, C, in.head_map});
  if (last == Stage::kkt) return r;
  r.a_inv = memory.make(DType::f32, {T, Hv, C});
  fill(r.a_inv, 0);
  chunk_tri_inverse(stream, {r.a, r.a_inv, in.sequences, C});
  if (last == Stage::inverse) return r;
  r.w = memory.make(staged, {T, Hv, K});
  r.u = memory.make(staged, {T, Hv, V});
  fill(r.w, 0);
  fill(r.u, 0);
  chunk_wu(stream, {in.k, in.v, in.beta, r.g_cumsum, r.a_inv, r.w, r.u, in.sequences, C, in.head_map});
  if (last == Stage::wu) return r;
  r.h = memory.make(staged, {max_chunks(T, in.sequences, C), Hv, V, K});
  r.v_new = memory.make(staged, {T, Hv, V});
  r.state_out = memory.make(DType::f32, {in.sequences.count, Hv, V, K});
  fill(r.v_new, 0);
  chunk_state(stream, {in.k, r.w, r.u, r.g_cumsum, in.state_in, r.h, r.v_new, r.state_out, in.sequences, C, in.head_map});
  if (last == Stage::state) return r;
  r.o = memory.make(DType::f32, {T, Hv, V});
  fill(r.o, 0);
  chunk_output(stream, {in.q, in.k, r.v_new, r.h, r.g_cumsum, r.o, in.scale, in.sequences, C, in.head_map});
  return r;
}

}  // namespace weft::cases
