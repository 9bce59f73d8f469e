// The gated delta rule token by token in f32, with the state in registers: what decode, replay, summarize and the general prefill run.
#pragma once

#include "cuda/common/launch.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

inline constexpr int kBlockRows = 32;  // state rows of a block

// One walk over the tokens of every sequence, for every value head and every row of its state.
struct RecurrentCall {
  Tensor q, k, v, o;  // q and o absent: no outputs
  DeltaGateInputs gates;
  Sequences sequences;
  DeltaStates states;
  DeltaRecord record;  // written by decode
  Tensor accepted;     // replay: v is record.delta, k record.k, gates.g record.g
  Tensor checkpoints;
  int64_t checkpoint_every = 0;
  Tensor p, map_q;  // summarize: the K rows of the identity come before the V rows of zeros
  float scale = 1;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  int64_t T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  int64_t each = 0;          // tokens of every sequence, when uniform
  bool packed_keys = false;  // q, k: four neighbours in one access
  bool packed_in = false, packed_out = false, packed_checkpoints = false;
};

// Fills the flags and launches.
void launch_recurrent(const char* op, const Stream& stream, const RecurrentCall& given);

// For plans: the kernel that runs a step, "token" (at most one per sequence), "stream" (rows in packs) or "step" (any shape).
const char* recurrent_kernel_name(const RecurrentCall& given);

// The same for at most one token per sequence, where takes_types() in recurrent.cu holds and this does: see recurrent_one_token.cu.
bool takes_one_token(const RecurrentCall& call);
void launch_recurrent_one_token(const char* op, const Stream& stream, const RecurrentCall& call);

// Blocks that a step takes, for plans.
int64_t recurrent_blocks(const RecurrentCall& call);

}  // namespace weft::cuda
