// Arguments of the rule's ops as what its kernels read: one lowering for prefill, decode, replay and summarize.
#pragma once

#include "common/conventions.h"
#include "cuda/delta/recurrent.cuh"

namespace weft::cuda {

// Fills what follows from keys, values and sequences.
inline DeltaStep sized(DeltaStep step) {
  step.T = step.k.size(0);
  step.N = step.sequences.count;
  step.Hk = step.k.size(1);
  step.Hv = step.v.size(1);
  step.K = step.k.size(2);
  step.V = step.v.size(2);
  return step;
}

// Ops over k, v and gates; those with outputs have q, o, states and a scale too.
template <class Args>
DeltaStep step_of(const Args& args) {
  DeltaStep step;
  step.k = args.k;
  step.v = args.v;
  step.gates = args.gates;
  step.sequences = args.sequences;
  step.l2_norm = args.l2_norm;
  step.head_map = args.head_map;
  if constexpr (requires { args.o; }) {
    step.q = args.q;
    step.o = args.o;
    step.states = args.states;
    step.scale = scale_or_default(args.scale, args.k.size(2));
  }
  return sized(step);
}

}  // namespace weft::cuda
