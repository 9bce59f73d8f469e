// The recurrent form of the gated delta rule, token by token in f32, for decode, replay, prefill and summarize.
#pragma once

#include "common/conventions.h"
#include "weft/gated_delta_rule.h"

namespace weft::vulkan {

// One pass over the tokens of every sequence, for each value head and row of the state.
struct RecurrentCall {
  Tensor q, k, v, o;  // q and o absent: no outputs
  DeltaGateInputs gates;
  Sequences sequences;
  DeltaStates states;
  DeltaRecord record;  // written by decode
  Tensor accepted;     // replay: v is record.delta, k is record.k, gates.g is record.g
  Tensor checkpoints;
  int64_t checkpoint_every = 0;
  Tensor p, map_q;  // summarize: p has K rows that start from the identity, map_q has V rows that start from zeros
  float scale = 1;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
};

void launch_recurrent(const char* op, const Stream& stream, const RecurrentCall& call);

// "vulkan.<op>.recurrent" and its plan.
Choice describe_recurrent(const char* op, const RecurrentCall& call);

// The call of an op: all ops have k, v and gates; ops with outputs also have q, o, states and a scale.
template <class Args>
RecurrentCall recurrent_call(const Args& args) {
  RecurrentCall call;
  call.k = args.k;
  call.v = args.v;
  call.gates = args.gates;
  call.sequences = args.sequences;
  call.l2_norm = args.l2_norm;
  call.head_map = args.head_map;
  if constexpr (requires { args.o; }) {
    call.q = args.q;
    call.o = args.o;
    call.states = args.states;
    call.scale = scale_or_default(args.scale, args.k.size(2));
  }
  return call;
}

}  // namespace weft::vulkan
