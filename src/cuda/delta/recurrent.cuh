// The recurrent form of the gated delta rule, token by token in f32: decode and replay use it. So do prefill and summarize for few tokens and
// where a device has too little shared memory, and summarize for f32 inputs with decays per channel.
#pragma once

#include "cuda/common/launch.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

// One pass over the tokens of every sequence, value head and row of its state.
struct RecurrentCall {
  Tensor q, k, v, o;  // q and o absent: no outputs
  DeltaGateInputs gates;
  Sequences sequences;
  DeltaStates states;
  DeltaRecord record;  // written by decode
  Tensor accepted;     // replay: v is record.delta, k is record.k, gates.g is record.g
  Tensor checkpoints;
  int64_t checkpoint_every = 0;
  Tensor p, map_q;  // summarize: K rows that start from the identity, then V rows that start from zeros
  float scale = 1;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  int64_t T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
};

// Chooses a kernel and launches it.
void launch_recurrent(const char* op, const Stream& stream, const RecurrentCall& call);

// The kernel that launch_recurrent() chooses: "recurrent_one" (at most one token per sequence), "stream" (vector accesses, persistent
// blocks) or "recurrent" (any shape).
const char* recurrent_kernel_name(const RecurrentCall& call);

// The kernel for at most one token per sequence, in recurrent_one_token.cu. It supports calls that the stream kernels support and for which
// takes_one_token() holds.
bool takes_one_token(const RecurrentCall& call);
void launch_recurrent_one_token(const char* op, const Stream& stream, const RecurrentCall& call);

// The blocks of a call's grid, for plans.
int64_t recurrent_blocks(const RecurrentCall& call);

}  // namespace weft::cuda
