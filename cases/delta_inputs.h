// Inputs of the delta ops from options: tokens, heads, keys, gates and states.
#pragma once

#include <string>
#include <vector>

#include "cases/memory.h"
#include "cases/options.h"
#include "weft/gated_delta_rule.h"

namespace weft::cases {

// Packed tokens. Options: T (tokens of each sequence) and N (sequences); or lens=3:0:7 (length of each sequence); or cu=0:5:3
// (cu_seqlens verbatim, legal or not, over T tokens in all). varlen=1 passes cu_seqlens for equal lengths too. cu_type=i64 widens
// cu_seqlens. poison=40 adds 40 tokens behind the last sequence.
struct Tokens {
  Sequences sequences;
  int64_t total = 0, longest = 0, count = 0;
  std::vector<int64_t> bounds;  // cu_seqlens on the host, for building and for second formulations

  int64_t begin(int64_t n) const { return bounds[static_cast<size_t>(n)]; }
  bool legal(int64_t n) const;      // else the sequence is inert
  int64_t length(int64_t n) const;  // 0 when inert
};
Tokens make_tokens(Options& options, Memory& memory, int64_t default_tokens, int64_t default_count);

// Options: Hk, Hv, Dk, Dv, dtype, map=grouped|tiled, kda=1, packed=1 (q, k, v are views of one row), l2norm=1,
//   keys=gaussian|positive|identical|alternating|onehot, gate=none|soft|medium|wide|mixed|strong|heads|resets,
//   beta=uniform|zero|one|half|two|wide, gates=log|alpha|raw (how decay and strength are given), double_beta=1.
struct DeltaInputs {
  Tokens tokens;
  int64_t Hk = 0, Hv = 0, K = 0, V = 0;
  DType dtype = DType::f32;
  HeadMap head_map = HeadMap::grouped;
  bool correlated = false;  // keys or betas that amplify rounding
  bool l2_norm = false;
  Tensor q, k, v;
  Tensor g, beta;         // f32, whichever form `gates` has
  DeltaGateInputs gates;  // what the op is given
};
DeltaInputs make_delta_inputs(Options& options, Memory& memory, Rng& rng, int64_t default_tokens, int64_t default_count);

// States. Options: state=f32|f16|bf16|none, out=inplace|separate|none, slots=plain|permuted|inert (inert: some slots are -1 or out
// of range), fresh=1 (every other sequence starts from zeros), layout=vk|kv, padded=1 (padding between slots and heads), out_type.
// Slots that no sequence owns hold NaN.
DeltaStates make_states(Options& options, Memory& memory, Rng& rng, const Tokens& tokens, int64_t Hv, int64_t V, int64_t K);

// With option poison: sets q, k, v and gates to NaN for tokens outside every sequence and for tokens of inert sequences.
void poison_others(Options& options, const DeltaInputs& in, const DeltaStates& states);

// Initial states of all sequences as dense f32 [N, Hv, V, K]; zeros for sequences that start fresh or are inert.
Tensor initial_states(Memory& memory, const DeltaStates& states, int64_t N, int64_t Hv, int64_t V, int64_t K);
// A view of the matrices of one slot, indexed [Hv, V, K] in either layout.
Tensor slot_view(const Tensor& pool, int64_t slot, StateLayout layout);

// The rows [begin, begin + count) of a tensor's first dimension.
Tensor rows_of(Tensor tensor, int64_t begin, int64_t count);

double delta_flops(const DeltaInputs& in);  // 6 K V per token and value head: read S k, write, read S q

}  // namespace weft::cases
