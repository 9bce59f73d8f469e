// Second formulations of the gated delta rule: see delta_laws.h.
#include "cases/delta_laws.h"

#include <algorithm>

#include "cases/chunk_stages.h"
#include "common/state_slots.h"

namespace weft::cases {

Tensor normalised(Memory& memory, const Tensor& x, bool l2_norm) {
  if (!l2_norm) return x;
  const Tensor y = memory.make(DType::f32, {x.size(0), x.size(1), x.size(2)});
  run_op(kReference, L2NormArgs{x, y, 1e-6f});
  return y;
}

Finding compare_states(const char* name, const DeltaStates& states, const Tensor& want, double bound,
                       const std::function<bool(int64_t)>& writes) {
  double worst = 0;
  for (int64_t n = 0; n < want.size(0); ++n)
    if (const int64_t slot = state_slots(states, n).out; slot >= 0 && writes(n))
      worst = std::max(worst, relative_rms(slot_view(states.out, slot, states.layout), slot_view(want, n, StateLayout::vk)));
  return {name, worst, bound};
}

Findings by_chunk_stages(const DeltaInputs& in, const DeltaStates& given, std::optional<float> scale, const Tensor& o,
                         const DeltaStates& result, double o_bound, double state_bound) {
  Memory memory;
  ChunkInputs chunk{normalised(memory, in.q, in.l2_norm),
                    normalised(memory, in.k, in.l2_norm),
                    in.v,
                    in.g,
                    in.beta,
                    {},
                    in.tokens.sequences,
                    in.head_map,
                    scale,
                    64};
  chunk.state_in = initial_states(memory, given, in.tokens.count, in.Hv, in.V, in.K);
  const ChunkResults stages = run_stages(memory, chunk, DType::f32, Stage::output);
  double worst = 0;
  for (int64_t n = 0; n < in.tokens.count; ++n) {
    const int64_t rows = in.tokens.length(n);
    if (rows == 0) continue;
    const Tensor mine = rows_of(stages.o, in.tokens.begin(n), rows);
    if (state_slots(given, n).inert) fill(mine, 0);
    worst = std::max(worst, relative_rms(rows_of(o, in.tokens.begin(n), rows), mine));
  }
  Findings findings{{"o, by chunk stages", worst, o_bound}};
  if (result.out.present())
    findings.push_back(compare_states("states.out, by chunk stages", result, stages.state_out, state_bound,
                                      [&](int64_t n) { return in.tokens.legal(n); }));
  return findings;
}

}  // namespace weft::cases
