// Lowers the arguments of prefill and summarize for the chunked kernels.
#pragma once

#include "common/conventions.h"
#include "cuda/common/elements.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill_staged.cuh"

namespace weft::cuda {

inline GateParams gates_of(const DeltaGateInputs& gates) {
  GateParams p;
  p.decay_form = gates.a.present() ? DecayForm::raw : gates.alpha.present() ? DecayForm::linear : DecayForm::log;
  p.decay = view_of(gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a);
  p.a_log = view_of(gates.a_log);
  p.dt_bias = view_of(gates.dt_bias);
  p.raw_strength = !gates.beta.present();
  p.strength = view_of(p.raw_strength ? gates.b : gates.beta);
  p.beta_scale = gates.double_beta ? 2.0f : 1.0f;
  return p;
}

// What the kernels read, without addresses in scratch.
template <class Args>
Prefill lowered(const Args& args) {
  Prefill p;
  p.k = view_of(args.k), p.v = view_of(args.v);
  p.gates = gates_of(args.gates);
  p.l2_norm = args.l2_norm;
  p.head_map = args.head_map;
  p.sequences = view_of(args.sequences);
  p.T = args.k.size(0), p.N = args.sequences.count;
  p.Hk = args.k.size(1), p.Hv = args.v.size(1);
  p.K = args.k.size(2), p.V = args.v.size(2);
  p.max_tokens = max_tokens(args.sequences, p.T);
  p.map = chunk_map(args.sequences, p.T, kChunk, nullptr);
  if constexpr (requires { args.o; }) {
    p.q = view_of(args.q), p.o = view_of(args.o);
    p.states = view_of(args.states);
    p.checkpoints = view_of(args.checkpoints);
    p.checkpoint_every = args.checkpoint_every;
    p.schedule = args.schedule;
    p.scale = scale_or_default(args.scale, p.K);
  }
  return p;
}

// Operands are split for f32 inputs; for keys of few channels, whose roundings do not average out; and where f16 inputs are summarized:
// p decays below the smallest f16 number.
template <class Args>
bool splits_operands(const Args& args) {
  constexpr int64_t kFewChannels = 16;
  constexpr bool kSummarizes = !requires { args.o; };
  return args.k.dtype == DType::f32 || args.k.size(2) < kFewChannels || (kSummarizes && args.k.dtype == DType::f16);
}

// The same for the staged kernels, before the scan is cut into blocks.
template <class Args>
StagedParams staged(const Args& args) {
  StagedParams s;
  s.p = lowered(args);
  s.parts = splits_operands(args) ? 2 : 1;
  s.padded = static_cast<int>(ceil_div(std::max<int64_t>(s.p.K, 1), 64) * 64);
  s.per_channel = per_channel(args.gates);
  s.fours_k = packs_of(args.k, 4);
  const DeltaGateInputs& gates = args.gates;
  s.fours_gate = packs_of(gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a, 4);
  if constexpr (requires { args.o; }) {
    s.fours_q = packs_of(args.q, 4);
    s.pairs_o = args.o.dtype != DType::f32 && packs_of(args.o, 2);
  } else {
    s.map_p = view_of(args.p), s.map_q = view_of(args.q);
    s.first_value = static_cast<int>(s.p.K);
    s.p.V += s.p.K;
  }
  return s;
}

// Sequences of at most so many tokens are faster token by token than in chunks of 64.
inline constexpr int64_t kFewTokens = 8;

// How the staged kernels run a call, or why they do not.
struct StagedCall {
  StagedParams params;
  StagedPlan scan;
  size_t map_bytes = 0, scratch_bytes = 0;  // scratch: chunk map, then prepared chunks
  const char* why_not = nullptr;
};

// any_length: also where sequences have few tokens.
template <class Args>
StagedCall plan_staged(const Stream& stream, const Args& args, bool any_length) {
  StagedCall call;
  call.params = staged(args);
  const Prefill& p = call.params.p;
  if (!any_length && p.max_tokens <= kFewTokens) {
    call.why_not = "sequences have few tokens";
    return call;
  }
  call.scan = staged_plan(stream, call.params);
  if (call.scan.stages == 0 || staged_prepare_shared(call.params) > static_cast<size_t>(facts_of(stream).shared_bytes))
    call.why_not = "the device has too little shared memory";
  call.map_bytes = chunk_map_bytes(args.sequences, p.T, kChunk);
  call.scratch_bytes = call.map_bytes + staged_chunks_bytes(call.params);
  return call;
}

inline void launch_staged(const char* op, const Stream& stream, const Sequences& sequences, const StagedCall& call,
                          Scratch scratch) {
  StagedParams s = call.params;
  s.p.map = chunk_map(sequences, s.p.T, kChunk, scratch.data);
  s.p.prepared = static_cast<char*>(scratch.data) + call.map_bytes;
  map_chunks(op, stream, s.p.map);
  launch_staged_prepare(op, stream, s);
  launch_staged_scan(op, stream, s, call.scan);
}

inline std::string staged_text(const StagedCall& call) {
  return "chunk 64: prepare in parallel, then state scan: " + std::to_string(call.scan.blocks) + " blocks of " +
         std::to_string(call.scan.groups * 16) + " state rows, " + std::to_string(call.scan.stages) + " operands in flight" +
         (call.params.parts == 2 ? ", products of split bf16" : "");
}

}  // namespace weft::cuda
