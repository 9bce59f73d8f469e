// Launches the kernel of the gated delta rule for at most one token per sequence: see recurrent_one_token.cuh.
#include "cuda/delta/recurrent_one_token.cuh"

#include "cuda/delta/recurrent.cuh"

namespace weft::cuda {
namespace {

using namespace one_token;

HeadRows rows_of(const Tensor& t) { return t.present() ? HeadRows{t.data, t.strides[0], t.strides[1]} : HeadRows{}; }

OneTokenParams lowered(const RecurrentCall& call) {
  const DeltaGateInputs& gates = call.gates;
  OneTokenParams p;
  p.in = rows_of(call.states.in);
  p.out = rows_of(call.states.out);
  p.in_slots = indices_of(call.states.in_slots);
  p.out_slots = indices_of(call.states.out_slots);
  p.has_initial = indices_of(call.states.has_initial);
  p.cu_seqlens = indices_of(call.sequences.cu_seqlens);
  p.indexed = p.in_slots.data || p.out_slots.data || p.has_initial.data || p.cu_seqlens.data;
  p.in_count = call.states.in.present() ? call.states.in.size(0) : 0;
  p.out_count = call.states.out.present() ? call.states.out.size(0) : 0;
  p.T = call.T;
  p.max_tokens = call.sequences.cu_seqlens.present() ? call.sequences.max_tokens : max_tokens(call.sequences, call.T);
  p.k = rows_of(call.k);
  p.q = rows_of(call.q);
  p.v = rows_of(call.v);
  p.o = rows_of(call.o);
  const Tensor& decay = gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a;
  const Tensor& strength = gates.beta.present() ? gates.beta : gates.b;
  p.decay = rows_of(decay);
  p.strength = rows_of(strength);
  p.a_log = static_cast<const float*>(gates.a_log.data);
  p.dt_bias = static_cast<const float*>(gates.dt_bias.data);
  p.scale = call.scale;
  p.Hv = Divisor(call.Hv);
  p.Hk = Divisor(call.Hk);
  p.group = Divisor(call.Hv / call.Hk);
  p.V = static_cast<uint32_t>(call.V);
  p.head_map = call.head_map;
  p.key = call.k.dtype;
  p.output = call.o.dtype;
  p.decay_type = decay.dtype;
  p.strength_type = strength.dtype;
  p.decay_form = gates.g.present() ? DecayForm::log : gates.alpha.present() ? DecayForm::factor : DecayForm::raw;
  p.raw_strength = !gates.beta.present();
  p.double_beta = gates.double_beta;
  p.l2_norm = call.l2_norm;
  p.record_k = rows_of(call.record.k);
  p.record_delta = rows_of(call.record.delta);
  p.record_g = rows_of(call.record.g);
  return p;
}

// A row of a 16-bit state has half the bytes of an f32 row and needs the same work on keys and gates. 16-bit states therefore take larger
// blocks where there are enough of them.
template <class State, int E, bool WideKeys>
void launch_typed(const char* op, const Stream& stream, const RecurrentCall& call, OneTokenParams p) {
  const int multiprocessors = facts_of(stream).multiprocessors;
  // Prefetching pays where all blocks start at once, because they prefetch their own rows before pdl_wait(), and where the grid has many
  // waves of blocks.
  const auto run = [&](auto kernel, int rows, int distance) {
    const int64_t blocks = ceil_div(call.V, rows) * call.Hv * call.N;
    p.row_blocks = Divisor(ceil_div(call.V, rows));
    p.prefetch_distance = static_cast<uint32_t>(blocks <= 4 * multiprocessors    ? blocks
                                                : blocks >= 24 * multiprocessors ? distance
                                                                                 : 0);
    launch_pdl(op, stream, blocks, kThreads, static_cast<size_t>(rows * kLanes) * E * sizeof(State), kernel, p);
  };
  if constexpr (sizeof(State) == 2)
    if (ceil_div(call.V, kGroups) * call.Hv * call.N > int64_t{4} * multiprocessors)
      return run(recurrent_one_token_kernel<State, E, WideKeys, 2, 2>, kGroups * 4, multiprocessors / 2);
  run(recurrent_one_token_kernel<State, E, WideKeys, 1, 1>, kGroups, 3 * multiprocessors);
}

template <class State>
void launch_state(const char* op, const Stream& stream, const RecurrentCall& call) {
  const OneTokenParams p = lowered(call);
  const bool wide = call.k.dtype == DType::f32;
  if (call.K == 64)
    return wide ? launch_typed<State, 8, true>(op, stream, call, p) : launch_typed<State, 8, false>(op, stream, call, p);
  wide ? launch_typed<State, 16, true>(op, stream, call, p) : launch_typed<State, 16, false>(op, stream, call, p);
}

const Tensor& pool_of(const RecurrentCall& call) { return call.states.in.present() ? call.states.in : call.states.out; }

}  // namespace

bool takes_one_token(const RecurrentCall& call) {
  const Tensor& pool = pool_of(call);
  const int64_t piece = pool.present() ? 16 / dtype_bytes(pool.dtype) : 4;
  return max_tokens(call.sequences, call.T) <= 1 && call.q.present() && packs_of(call.k, piece) && packs_of(call.q, piece) &&
         packs_of(call.states.in, piece) && packs_of(call.states.out, piece);
}

void launch_recurrent_one_token(const char* op, const Stream& stream, const RecurrentCall& call) {
  const Tensor& pool = pool_of(call);
  if (!pool.present() || pool.dtype == DType::f32) return launch_state<float>(op, stream, call);
  pool.dtype == DType::bf16 ? launch_state<__nv_bfloat16>(op, stream, call) : launch_state<__half>(op, stream, call);
}

}  // namespace weft::cuda
