// scalars_of: the scalar members of every argument struct with their names, as tensors_of() visits the tensors.
#pragma once

#include <string>

#include "core/op_list.h"

namespace weft::tests {

// Calls visit(name, member) for every member that is no tensor and no text. `in` is what the struct is called in its parent, with a dot.
template <class F>
void scalars_of(Sequences& a, const std::string& in, F&& visit) {
  visit(in + "count", a.count);
  visit(in + "max_tokens", a.max_tokens);
}

template <class F>
void scalars_of(DeltaStates& a, const std::string& in, F&& visit) {
  visit(in + "layout", a.layout);
}

template <class F>
void scalars_of(KvFormat& a, const std::string& in, F&& visit) {
  visit(in + "head_dim", a.head_dim);
  visit(in + "passthrough", a.passthrough);
  visit(in + "bits", a.bits);
  visit(in + "rotation", a.rotation);
  visit(in + "rotation_group", a.rotation_group);
  visit(in + "signs", a.signs);
  visit(in + "gain_group", a.gain_group);
  visit(in + "gain_rule", a.gain_rule);
  visit(in + "gain_dtype", a.gain_dtype);
  visit(in + "gain_units", a.gain_units);
  visit(in + "tiny_norm", a.tiny_norm);
  visit(in + "packing", a.packing);
  visit(in + "codebook", a.codebook);
  visit(in + "grid_step", a.grid_step);
}

template <class F>
void scalars_of(KvCache& a, const std::string& in, F&& visit) {
  scalars_of(a.k.format, in + "k.format.", visit);
  scalars_of(a.v.format, in + "v.format.", visit);
  visit(in + "layout", a.layout);
  visit(in + "tile_order", a.tile_order);
  visit(in + "kind", a.kind);
  visit(in + "pinned", a.pinned);
}

template <class F>
void scalars_of(AttentionQueries& a, const std::string& in, F&& visit) {
  scalars_of(a.sequences, in + "sequences.", visit);
  visit(in + "domain", a.domain);
  visit(in + "scale", a.scale);
}

template <class F>
void scalars_of(AttentionMask& a, const std::string& in, F&& visit) {
  visit(in + "causal", a.causal);
  visit(in + "window", a.window);
  visit(in + "softcap", a.softcap);
}

template <class F>
void scalars_of(AttentionPartials& a, const std::string& in, F&& visit) {
  visit(in + "layout", a.layout);
  visit(in + "count", a.count);
}

template <class F>
void scalars_of(DeltaGatesArgs& a, F&& visit) {
  visit("double_beta", a.double_beta);
}

template <class F>
void scalars_of(ShortConvArgs& a, F&& visit) {
  visit("activation", a.activation);
  scalars_of(a.sequences, "sequences.", visit);
}

template <class F>
void scalars_of(L2NormArgs& a, F&& visit) {
  visit("eps", a.eps);
}

template <class F>
void scalars_of(GatedRmsNormArgs& a, F&& visit) {
  visit("eps", a.eps);
  visit("gate", a.gate);
}

// The chunk stages: all have sequences and a chunk length, some a head map and a scale.
template <class Args, class F>
requires requires(Args& a) { a.chunk; }
void scalars_of(Args& a, F&& visit) {
  scalars_of(a.sequences, "sequences.", visit);
  visit("chunk", a.chunk);
  if constexpr (requires { a.head_map; }) visit("head_map", a.head_map);
  if constexpr (requires { a.scale; }) visit("scale", a.scale);
}

template <class F>
void scalars_of(GatedDeltaRulePrefillArgs& a, F&& visit) {
  visit("gates.double_beta", a.gates.double_beta);
  visit("scale", a.scale);
  visit("l2_norm", a.l2_norm);
  visit("head_map", a.head_map);
  scalars_of(a.sequences, "sequences.", visit);
  scalars_of(a.states, "states.", visit);
  visit("checkpoint_every", a.checkpoint_every);
  visit("schedule", a.schedule);
}

template <class F>
void scalars_of(GatedDeltaRuleDecodeArgs& a, F&& visit) {
  visit("gates.double_beta", a.gates.double_beta);
  visit("scale", a.scale);
  visit("l2_norm", a.l2_norm);
  visit("head_map", a.head_map);
  scalars_of(a.sequences, "sequences.", visit);
  scalars_of(a.states, "states.", visit);
}

template <class F>
void scalars_of(GatedDeltaRuleReplayArgs& a, F&& visit) {
  visit("head_map", a.head_map);
  scalars_of(a.sequences, "sequences.", visit);
  scalars_of(a.states, "states.", visit);
}

template <class F>
void scalars_of(GatedDeltaRuleSummarizeArgs& a, F&& visit) {
  visit("gates.double_beta", a.gates.double_beta);
  visit("l2_norm", a.l2_norm);
  visit("head_map", a.head_map);
  scalars_of(a.sequences, "sequences.", visit);
}

template <class F>
void scalars_of(GatedDeltaRuleComposeArgs&, F&&) {}

template <class F>
void scalars_of(GatedDeltaRuleApplyArgs& a, F&& visit) {
  scalars_of(a.states, "states.", visit);
}

template <class F>
void scalars_of(KvRotateArgs& a, F&& visit) {
  scalars_of(a.format, "format.", visit);
  visit("inverse", a.inverse);
}

template <class F>
void scalars_of(KvEncodeArgs& a, F&& visit) {
  scalars_of(a.sequences, "sequences.", visit);
  scalars_of(a.cache, "cache.", visit);
}

template <class F>
void scalars_of(KvDecodeArgs& a, F&& visit) {
  scalars_of(a.cache, "cache.", visit);
  scalars_of(a.sequences, "sequences.", visit);
  visit("domain", a.domain);
}

template <class F>
void scalars_of(KvRepackArgs& a, F&& visit) {
  scalars_of(a.from, "from.", visit);
  scalars_of(a.to, "to.", visit);
}

template <class F>
void scalars_of(AttentionScoresArgs& a, F&& visit) {
  scalars_of(a.queries, "queries.", visit);
  scalars_of(a.cache, "cache.", visit);
  scalars_of(a.mask, "mask.", visit);
}

template <class F>
void scalars_of(AttentionValuesArgs& a, F&& visit) {
  scalars_of(a.sequences, "sequences.", visit);
  scalars_of(a.cache, "cache.", visit);
  visit("threshold", a.threshold);
  visit("domain", a.domain);
}

template <class F>
void scalars_of(AttentionPartialsArgs& a, F&& visit) {
  scalars_of(a.queries, "queries.", visit);
  scalars_of(a.cache, "cache.", visit);
  scalars_of(a.mask, "mask.", visit);
  visit("block_tokens", a.block_tokens);
  scalars_of(a.partials, "partials.", visit);
}

template <class F>
void scalars_of(AttentionMergeArgs& a, F&& visit) {
  scalars_of(a.partials, "partials.", visit);
  scalars_of(a.v_format, "v_format.", visit);
  visit("domain", a.domain);
  visit("kv_heads", a.kv_heads);
}

template <class F>
void scalars_of(CompressedAttentionArgs& a, F&& visit) {
  scalars_of(a.queries, "queries.", visit);
  scalars_of(a.cache, "cache.", visit);
  scalars_of(a.mask, "mask.", visit);
  visit("precision", a.precision);
  visit("schedule", a.schedule);
}

}  // namespace weft::tests
