// The gated delta rule token by token: lowers calls for recurrent.comp.
#include "vulkan/delta/recurrent.h"

#include <string>

#include "vulkan/common/recorder.h"
#include "vulkan/delta/states.h"

namespace weft::vulkan {
namespace {

constexpr int64_t kThreads = 128, kRows = kThreads / kLanes;  // of a workgroup

struct GatesView {
  View g, alpha, a, a_log, dt_bias, beta, b;
  uint32_t double_beta = 0, pad = 0;
};
GatesView gates_view(const DeltaGateInputs& gates) {
  return {view_of(gates.g),       view_of(gates.alpha), view_of(gates.a), view_of(gates.a_log),
          view_of(gates.dt_bias), view_of(gates.beta),  view_of(gates.b), gates.double_beta};
}

struct RecurrentParams {
  View q, k, v, o;
  GatesView gates;
  SequencesView sequences;
  StatesView states;
  View record_k, record_delta, record_g;
  Indices accepted;
  View checkpoints, map_p, map_q;
  int64_t checkpoint_every = 0;
  int64_t Hk = 0, Hv = 0, K = 0, V = 0;
  float scale = 1;
  uint32_t l2_norm = 0, tiled_heads = 0, pad = 0;
};

RecurrentParams lowered(const RecurrentCall& call) {
  RecurrentParams p;
  p.q = view_of(call.q);
  p.k = view_of(call.k);
  p.v = view_of(call.v);
  p.o = view_of(call.o);
  p.gates = gates_view(call.gates);
  p.sequences = view_of(call.sequences, call.k.size(0));
  p.states = view_of(call.states);
  p.record_k = view_of(call.record.k);
  p.record_delta = view_of(call.record.delta);
  p.record_g = view_of(call.record.g);
  p.accepted = indices_of(call.accepted);
  p.checkpoints = view_of(call.checkpoints);
  p.map_p = view_of(call.p);
  p.map_q = view_of(call.map_q);
  p.checkpoint_every = call.checkpoint_every;
  p.Hk = call.k.size(1);
  p.Hv = call.v.size(1);
  p.K = call.k.size(2);
  p.V = call.v.size(2);
  p.scale = call.scale;
  p.l2_norm = call.l2_norm;
  p.tiled_heads = call.head_map == HeadMap::tiled;
  return p;
}

// The form of the decay, numbered as in gates.glsl: kLogDecay, kLinearDecay, kRawDecay.
uint32_t decay_form(const DeltaGateInputs& gates) { return gates.g.present() ? 0 : gates.alpha.present() ? 1 : 2; }

bool per_channel(const DeltaGateInputs& gates) { return gates.g.rank == 3 || gates.alpha.rank == 3 || gates.a.rank == 3; }

// The channels that a lane holds: those of the smallest variant of the shader that holds a row of K channels.
int channels_per_lane(int64_t K) { return K <= 8 * kLanes ? 8 : K <= 16 * kLanes ? 16 : 32; }

const char* shader_of(int channels) { return channels == 8 ? "recurrent.E8" : channels == 16 ? "recurrent.E16" : "recurrent.E32"; }

bool packed_keys(const RecurrentCall& call) { return packs_of_four(call.k) && packs_of_four(call.q); }
bool packed_states(const RecurrentCall& call, const Tensor& states) {
  return call.states.layout == StateLayout::vk && packs_of_four(states);
}

}  // namespace

void launch_recurrent(const char* op, const Stream& stream, const RecurrentCall& call) {
  const RecurrentParams p = lowered(call);
  const bool maps = call.p.present();
  const Kernel kernel{
      shader_of(channels_per_lane(p.K)),
      {per_channel(call.gates), call.accepted.present(), maps, packed_keys(call), packed_states(call, call.states.in),
       packed_states(call, call.states.out), static_cast<uint32_t>(call.k.dtype), static_cast<uint32_t>(call.states.in.dtype),
       static_cast<uint32_t>(call.states.out.dtype), decay_form(call.gates), call.gates.b.present()}};
  dispatch(op, stream, kernel, p, ceil_div(maps ? p.K + p.V : p.V, kRows) * p.Hv * call.sequences.count);
}

Choice describe_recurrent(const char* op, const RecurrentCall& call) {
  const bool packed = packed_keys(call) && packed_states(call, call.states.in) && packed_states(call, call.states.out);
  return {std::string("vulkan.") + op + ".recurrent",
          std::to_string(kLanes) + " lanes per row of a state, " + std::to_string(channels_per_lane(call.k.size(2))) +
              " channels per lane, " + (packed ? "four elements" : "one element") + " per access",
          packed ? Speed::fast : Speed::portable};
}

}  // namespace weft::vulkan
