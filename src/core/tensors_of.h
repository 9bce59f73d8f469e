// tensors_of: the tensors of every argument struct with their names and uses, for all checks that treat them alike.
#pragma once

#include "core/op_list.h"

namespace weft {

// How an op uses a tensor. An output may not share memory with any other tensor of the call, except that it may be exactly the view
// of a tensor named in may_be.
struct Use {
  bool writes = false;
  const char* may_be[2] = {nullptr, nullptr};
};
inline constexpr Use kReads{};
inline constexpr Use kWrites{true, {nullptr, nullptr}};
constexpr Use writes_or_is(const char* a, const char* b = nullptr) { return {true, {a, b}}; }

// Calls visit(name, tensor, use) for every tensor member, absent ones included.
template <class F>
void tensors_of(const DeltaGatesArgs& a, F&& visit) {
  visit("a", a.a, kReads);
  visit("b", a.b, kReads);
  visit("a_log", a.a_log, kReads);
  visit("dt_bias", a.dt_bias, kReads);
  visit("g", a.g, kWrites);
  visit("beta", a.beta, kWrites);
}

template <class F>
void tensors_of(const ShortConvArgs& a, F&& visit) {
  visit("x", a.x, kReads);
  visit("weight", a.weight, kReads);
  visit("bias", a.bias, kReads);
  visit("y", a.y, writes_or_is("x"));
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  visit("state_in", a.state_in, kReads);
  visit("state_out", a.state_out, writes_or_is("state_in"));
  visit("state_in_slots", a.state_in_slots, kReads);
  visit("state_out_slots", a.state_out_slots, kReads);
  visit("state_offsets", a.state_offsets, kReads);
  visit("has_initial", a.has_initial, kReads);
}

template <class F>
void tensors_of(const L2NormArgs& a, F&& visit) {
  visit("x", a.x, kReads);
  visit("y", a.y, writes_or_is("x"));
}

template <class F>
void tensors_of(const GatedRmsNormArgs& a, F&& visit) {
  visit("x", a.x, kReads);
  visit("z", a.z, kReads);
  visit("weight", a.weight, kReads);
  visit("y", a.y, writes_or_is("x", "z"));
}

template <class F>
void tensors_of(const ChunkCumsumArgs& a, F&& visit) {
  visit("g", a.g, kReads);
  visit("g_cumsum", a.g_cumsum, writes_or_is("g"));
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const ChunkKktArgs& a, F&& visit) {
  visit("k", a.k, kReads);
  visit("beta", a.beta, kReads);
  visit("g_cumsum", a.g_cumsum, kReads);
  visit("a", a.a, kWrites);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const ChunkTriInverseArgs& a, F&& visit) {
  visit("a", a.a, kReads);
  visit("a_inv", a.a_inv, writes_or_is("a"));
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const ChunkWuArgs& a, F&& visit) {
  visit("k", a.k, kReads);
  visit("v", a.v, kReads);
  visit("beta", a.beta, kReads);
  visit("g_cumsum", a.g_cumsum, kReads);
  visit("a_inv", a.a_inv, kReads);
  visit("w", a.w, kWrites);
  visit("u", a.u, kWrites);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const ChunkStateArgs& a, F&& visit) {
  visit("k", a.k, kReads);
  visit("w", a.w, kReads);
  visit("u", a.u, kReads);
  visit("g_cumsum", a.g_cumsum, kReads);
  visit("state_in", a.state_in, kReads);
  visit("h", a.h, kWrites);
  visit("v_new", a.v_new, kWrites);
  visit("state_out", a.state_out, writes_or_is("state_in"));
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const ChunkOutputArgs& a, F&& visit) {
  visit("q", a.q, kReads);
  visit("k", a.k, kReads);
  visit("v_new", a.v_new, kReads);
  visit("h", a.h, kReads);
  visit("g_cumsum", a.g_cumsum, kReads);
  visit("o", a.o, kWrites);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const DeltaGateInputs& a, F&& visit) {
  visit("gates.g", a.g, kReads);
  visit("gates.alpha", a.alpha, kReads);
  visit("gates.a", a.a, kReads);
  visit("gates.a_log", a.a_log, kReads);
  visit("gates.dt_bias", a.dt_bias, kReads);
  visit("gates.beta", a.beta, kReads);
  visit("gates.b", a.b, kReads);
}

template <class F>
void tensors_of(const DeltaStates& a, F&& visit) {
  visit("states.in", a.in, kReads);
  visit("states.out", a.out, writes_or_is("states.in"));
  visit("states.in_slots", a.in_slots, kReads);
  visit("states.out_slots", a.out_slots, kReads);
  visit("states.has_initial", a.has_initial, kReads);
}

template <class F>
void tensors_of(const DeltaRecord& a, Use use, F&& visit) {
  visit("record.k", a.k, use);
  visit("record.delta", a.delta, use);
  visit("record.g", a.g, use);
}

template <class F>
void tensors_of(const GatedDeltaRulePrefillArgs& a, F&& visit) {
  visit("q", a.q, kReads);
  visit("k", a.k, kReads);
  visit("v", a.v, kReads);
  tensors_of(a.gates, visit);
  visit("o", a.o, kWrites);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  tensors_of(a.states, visit);
  visit("checkpoints", a.checkpoints, kWrites);
}

template <class F>
void tensors_of(const GatedDeltaRuleDecodeArgs& a, F&& visit) {
  visit("q", a.q, kReads);
  visit("k", a.k, kReads);
  visit("v", a.v, kReads);
  tensors_of(a.gates, visit);
  visit("o", a.o, kWrites);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  tensors_of(a.states, visit);
  tensors_of(a.record, kWrites, visit);
}

template <class F>
void tensors_of(const GatedDeltaRuleReplayArgs& a, F&& visit) {
  tensors_of(a.record, kReads, visit);
  visit("accepted", a.accepted, kReads);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  tensors_of(a.states, visit);
}

template <class F>
void tensors_of(const GatedDeltaRuleSummarizeArgs& a, F&& visit) {
  visit("k", a.k, kReads);
  visit("v", a.v, kReads);
  tensors_of(a.gates, visit);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  visit("p", a.p, kWrites);
  visit("q", a.q, kWrites);
}

template <class F>
void tensors_of(const GatedDeltaRuleComposeArgs& a, F&& visit) {
  visit("p1", a.p1, kReads);
  visit("q1", a.q1, kReads);
  visit("p2", a.p2, kReads);
  visit("q2", a.q2, kReads);
  visit("p", a.p, kWrites);
  visit("q", a.q, kWrites);
}

template <class F>
void tensors_of(const GatedDeltaRuleApplyArgs& a, F&& visit) {
  visit("p", a.p, kReads);
  visit("q", a.q, kReads);
  tensors_of(a.states, visit);
}

template <class F>
void tensors_of(const KvRotateArgs& a, F&& visit) {
  visit("x", a.x, kReads);
  visit("y", a.y, writes_or_is("x"));
  visit("format.dense_rotation", a.format.dense_rotation, kReads);
}

template <class F>
void tensors_of(const KvCache& a, Use use, F&& visit) {
  visit("cache.k.codes", a.k.codes, use);
  visit("cache.k.gains", a.k.gains, use);
  visit("cache.k.format.dense_rotation", a.k.format.dense_rotation, kReads);
  visit("cache.k.format.mean", a.k.format.mean, kReads);
  visit("cache.v.codes", a.v.codes, use);
  visit("cache.v.gains", a.v.gains, use);
  visit("cache.v.format.dense_rotation", a.v.format.dense_rotation, kReads);
  visit("cache.v.format.mean", a.v.format.mean, kReads);
  visit("cache.slots", a.slots, kReads);
  visit("cache.page_table", a.page_table, kReads);
  visit("cache.lengths", a.lengths, kReads);
}

template <class F>
void tensors_of(const KvEncodeArgs& a, F&& visit) {
  visit("k", a.k, kReads);
  visit("v", a.v, kReads);
  visit("positions", a.positions, kReads);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  tensors_of(a.cache, kWrites, visit);
}

template <class F>
void tensors_of(const KvDecodeArgs& a, F&& visit) {
  tensors_of(a.cache, kReads, visit);
  visit("positions", a.positions, kReads);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  visit("k", a.k, kWrites);
  visit("v", a.v, kWrites);
}

template <class F>
void tensors_of(const KvRepackArgs& a, F&& visit) {
  visit("from.k.codes", a.from.k.codes, kReads);
  visit("from.k.gains", a.from.k.gains, kReads);
  visit("from.v.codes", a.from.v.codes, kReads);
  visit("from.v.gains", a.from.v.gains, kReads);
  visit("to.k.codes", a.to.k.codes, kWrites);
  visit("to.k.gains", a.to.k.gains, kWrites);
  visit("to.v.codes", a.to.v.codes, kWrites);
  visit("to.v.gains", a.to.v.gains, kWrites);
}

template <class F>
void tensors_of(const AttentionQueries& a, F&& visit) {
  visit("queries.q", a.q, kReads);
  visit("queries.positions", a.positions, kReads);
  visit("queries.sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
}

template <class F>
void tensors_of(const AttentionScoresArgs& a, F&& visit) {
  tensors_of(a.queries, visit);
  tensors_of(a.cache, kReads, visit);
  visit("scores", a.scores, kWrites);
}

template <class F>
void tensors_of(const AttentionValuesArgs& a, F&& visit) {
  visit("weights", a.weights, kReads);
  visit("sequences.cu_seqlens", a.sequences.cu_seqlens, kReads);
  tensors_of(a.cache, kReads, visit);
  visit("o", a.o, kWrites);
}

template <class F>
void tensors_of(const AttentionPartials& a, Use use, F&& visit) {
  visit("partials.o", a.o, use);
  visit("partials.m", a.m, use);
  visit("partials.l", a.l, use);
  visit("partials.buffer", a.buffer, use);
}

template <class F>
void tensors_of(const AttentionPartialsArgs& a, F&& visit) {
  tensors_of(a.queries, visit);
  tensors_of(a.cache, kReads, visit);
  tensors_of(a.partials, kWrites, visit);
}

template <class F>
void tensors_of(const AttentionMergeArgs& a, F&& visit) {
  tensors_of(a.partials, kReads, visit);
  visit("v_format.dense_rotation", a.v_format.dense_rotation, kReads);
  visit("v_format.mean", a.v_format.mean, kReads);
  visit("sinks", a.sinks, kReads);
  visit("o", a.o, kWrites);
  visit("lse", a.lse, kWrites);
}

template <class F>
void tensors_of(const CompressedAttentionArgs& a, F&& visit) {
  tensors_of(a.queries, visit);
  tensors_of(a.cache, kReads, visit);
  visit("sinks", a.sinks, kReads);
  visit("counters", a.counters, kWrites);
  visit("o", a.o, kWrites);
  visit("lse", a.lse, kWrites);
}

}  // namespace weft
