// Lowers the arguments of prefill, decode, replay and summarize to a RecurrentCall.
#pragma once

#include "common/conventions.h"
#include "cuda/delta/recurrent.cuh"

namespace weft::cuda {

// Fills the sizes from keys, values and sequences.
inline RecurrentCall with_sizes(RecurrentCall call) {
  call.T = call.k.size(0);
  call.N = call.sequences.count;
  call.Hk = call.k.size(1);
  call.Hv = call.v.size(1);
  call.K = call.k.size(2);
  call.V = call.v.size(2);
  return call;
}

// What the ops have in common: k, v and gates; ops with outputs have q, o, states and a scale too.
template <class Args>
RecurrentCall common_recurrent_call(const Args& args) {
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
  return with_sizes(call);
}

}  // namespace weft::cuda
