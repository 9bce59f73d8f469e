// The token mixers of a hybrid model, built from Weft's ops: gated delta layers and gated attention layers.
#include <algorithm>

#include "model/network/network.h"
#include "weft/compressed_attention.h"
#include "weft/delta_preprocess.h"
#include "weft/gated_delta_rule.h"

namespace weft::model {

void delta_layer(Step& step, int64_t layer, const DeltaWeights& weights, const std::vector<float>& norm_weight, const Tensor& x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), Hk = c.linear_key_heads, Hv = c.linear_value_heads;
  const int64_t K = c.linear_key_head_dim, V = c.linear_value_head_dim, C = c.conv_channels();
  const int64_t decoding = step.batch.decoding, prefilling = step.batch.sequences.count - decoding;
  const Tensor wide = step.memory.get(Workspace::wide, T, weights.input.outputs);
  step.project_normed(norm_weight, weights.input, x, wide);

  ShortConvArgs conv;
  conv.x = columns_of(wide, 0, C);
  conv.y = step.as(step.compute.rule_input(c, prefilling > 0), Workspace::convolved, conv.x);
  conv.weight = step.compute.weights(weights.conv);
  conv.sequences = step.batch.sequences;
  conv.state_in = conv.state_out = step.state.window(layer);
  conv.state_in_slots = step.batch.slots;
  conv.state_offsets = step.batch.window_offsets;
  conv.has_initial = step.batch.has_initial;
  step.op(conv);

  const Tensor mixed = step.memory.get(Workspace::mixed, T, Hv * V);
  // Arguments for the sequences of `batch`, whose tokens are among the first `rows` rows.
  const auto fill = [&](auto& rule, const HybridBatch& batch, int64_t rows) {
    const Tensor qkv = rows_of(conv.y, 0, rows), gates = rows_of(wide, 0, rows);
    rule.q = heads_of(qkv, 0, Hk, K, K);
    rule.k = heads_of(qkv, Hk * K, Hk, K, K);
    rule.v = heads_of(qkv, 2 * Hk * K, Hv, V, V);
    rule.gates.b = columns_of(gates, C + Hv * V, Hv);
    rule.gates.a = columns_of(gates, C + Hv * V + Hv, Hv);
    rule.gates.a_log = step.compute.numbers(weights.a_log);
    rule.gates.dt_bias = step.compute.numbers(weights.dt_bias);
    rule.o = heads_of(rows_of(mixed, 0, rows), 0, Hv, V, V);
    rule.l2_norm = true;
    rule.head_map = weights.head_map;
    rule.sequences = batch.sequences;
    rule.states = step.state.recurrent(layer, batch);
  };
  if (step.batch.replays) step.op(step.state.replay(layer));
  if (decoding > 0) {
    GatedDeltaRuleDecodeArgs decode;
    fill(decode, step.batch.slice(0, decoding), step.batch.decoded_tokens);
    decode.sequences.max_tokens = std::min(decode.sequences.max_tokens, kMaxDecodeTokens);
    decode.record = step.state.record(layer, step.batch);
    step.op(decode);
  }
  if (prefilling > 0) {
    GatedDeltaRulePrefillArgs prefill;
    fill(prefill, step.batch.slice(decoding, prefilling), T);
    prefill.schedule = step.compute.schedule();
    step.op(prefill);
  }

  const Tensor gated = step.as(step.operand(), Workspace::operand, mixed);
  GatedRmsNormArgs norm;
  norm.x = heads_of(mixed, 0, Hv, V, V);
  norm.y = heads_of(gated, 0, Hv, V, V);
  norm.z = heads_of(wide, C, Hv, V, V);
  norm.weight = step.compute.weights(weights.norm);
  norm.eps = step.eps();
  step.op(norm);

  step.project(weights.output, gated, x, true);
}

void attention_layer(Step& step, int64_t layer, const AttentionWeights& weights, const std::vector<float>& norm_weight,
                     const Tensor& x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), Hq = c.attention_heads, Hk = c.kv_heads, D = c.head_dim, half = c.rope.channels() / 2;
  const Tensor wide = step.memory.get(Workspace::wide, T, weights.input.outputs);
  step.project_normed(norm_weight, weights.input, x, wide);

  const Tensor q = heads_of(wide, 0, Hq, D, 2 * D), gate = heads_of(wide, D, Hq, D, 2 * D);
  const Tensor k = heads_of(wide, Hq * 2 * D, Hk, D, D), v = heads_of(wide, Hq * 2 * D + Hk * D, Hk, D, D);
  const Tensor cosine = step.memory.get(Workspace::cosine, T, half), sine = step.memory.get(Workspace::sine, T, half);
  step.other([&] { step.compute.norm_and_rotate({q, weights.q_norm}, {k, weights.k_norm}, step.eps(), cosine, sine); });

  // New tokens are encoded into the cache first. Then every query reads only the cache, its own token included.
  KvEncodeArgs encode;
  encode.k = k;
  encode.v = v;
  encode.positions = step.batch.positions;
  encode.sequences = step.batch.sequences;
  encode.cache = step.state.cache(layer, step.batch);
  step.op(encode);

  const Tensor mixed = step.memory.get(Workspace::mixed, T, Hq * D);
  CompressedAttentionArgs attention;
  attention.queries.q = q;
  attention.queries.positions = step.batch.positions;
  attention.queries.sequences = step.batch.sequences;
  attention.cache = encode.cache;
  attention.schedule = step.compute.schedule();
  attention.o = heads_of(mixed, 0, Hq, D, D);
  step.op(attention);

  const Tensor gated = step.as(step.operand(), Workspace::operand, mixed);
  if (step.compute.can_fuse(c, weights.output, mixed))
    return step.project_fused(weights.output, mixed, {.gate = gate, .add = true}, x);
  step.other([&] { step.compute.sigmoid_gate(attention.o, gate, heads_of(gated, 0, Hq, D, D)); });
  step.project(weights.output, gated, x, true);
}

}  // namespace weft::model
