// The token mixers of a hybrid model, made of Weft's ops: gated delta layers and gated attention layers.
#include "model/network.h"
#include "weft/compressed_attention.h"
#include "weft/delta_parts.h"
#include "weft/gated_delta_rule.h"

namespace weft::model {
namespace {

// Columns [first, first + heads * size) of rows as [T, heads, size], heads `head_stride` apart.
Tensor heads_of(int64_t tokens, Rows rows, int64_t first, int64_t heads, int64_t size, int64_t head_stride) {
  Tensor t = dense(rows.data + first, DType::f32, {tokens, heads, size});
  t.strides[0] = rows.stride;
  t.strides[1] = head_stride;
  return t;
}

Tensor columns_of(int64_t tokens, Rows rows, int64_t first, int64_t count) {
  Tensor t = dense(rows.data + first, DType::f32, {tokens, count});
  t.strides[0] = rows.stride;
  return t;
}

// Read-only numbers as an op's input.
Tensor constants(const std::vector<float>& values) {
  return dense(const_cast<float*>(values.data()), DType::f32, {static_cast<int64_t>(values.size())});  // NOLINT
}

}  // namespace

void delta_layer(Step& step, int64_t layer, const DeltaWeights& weights, Rows normed, Rows x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), Hk = c.linear_key_heads, Hv = c.linear_value_heads;
  const int64_t K = c.linear_key_head_dim, V = c.linear_value_head_dim, C = c.conv_channels();
  const Rows wide{step.memory.get(Workspace::wide, T * weights.input.outputs), weights.input.outputs};
  step.project(weights.input, T, normed, wide);

  ShortConvArgs conv;
  conv.x = conv.y = columns_of(T, wide, 0, C);
  conv.weight = weights.conv;
  conv.sequences = step.batch.sequences;
  conv.state_in = conv.state_out = step.state.window(layer);
  conv.state_in_slots = step.batch.slots;
  conv.state_offsets = step.batch.window_offsets;
  conv.has_initial = step.batch.has_initial;
  step.op(short_conv, conv);

  const Rows mixed{step.memory.get(Workspace::mixed, T * Hv * V), Hv * V};
  // Sequences of the step whose rows are among the first `rows`.
  const auto fill = [&](auto& rule, const HybridBatch& batch, int64_t rows) {
    rule.q = heads_of(rows, wide, 0, Hk, K, K);
    rule.k = heads_of(rows, wide, Hk * K, Hk, K, K);
    rule.v = heads_of(rows, wide, 2 * Hk * K, Hv, V, V);
    rule.gates.b = columns_of(rows, wide, C + Hv * V, Hv);
    rule.gates.a = columns_of(rows, wide, C + Hv * V + Hv, Hv);
    rule.gates.a_log = constants(weights.a_log);
    rule.gates.dt_bias = constants(weights.dt_bias);
    rule.o = heads_of(rows, mixed, 0, Hv, V, V);
    rule.l2_norm = true;
    rule.head_map = weights.head_map;
    rule.sequences = batch.sequences;
    rule.states = step.state.recurrent(layer, batch);
  };
  const int64_t decoding = step.batch.decoding;
  if (step.batch.replays) step.op(gated_delta_rule_replay, step.state.replay(layer));
  if (decoding > 0) {
    GatedDeltaRuleDecodeArgs decode;
    fill(decode, step.batch.slice(0, decoding), step.batch.decoded_tokens);
    decode.sequences.max_tokens = std::min(decode.sequences.max_tokens, kMaxDecodeTokens);
    decode.record = step.state.record(layer, step.batch);
    step.op(gated_delta_rule_decode, decode);
  }
  if (const int64_t rest = step.batch.sequences.count - decoding; rest > 0) {
    GatedDeltaRulePrefillArgs prefill;
    fill(prefill, step.batch.slice(decoding, rest), T);
    prefill.schedule = Schedule::invariant;
    step.op(gated_delta_rule_prefill, prefill);
  }

  GatedRmsNormArgs norm;
  norm.x = norm.y = heads_of(T, mixed, 0, Hv, V, V);
  norm.z = heads_of(T, wide, C, Hv, V, V);
  norm.weight = weights.norm;
  norm.eps = static_cast<float>(c.rms_norm_eps);
  step.op(gated_rms_norm, norm);

  step.project(weights.output, T, mixed, x, true);
}

void attention_layer(Step& step, int64_t layer, const AttentionWeights& weights, Rows normed, Rows x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), Hq = c.attention_heads, Hk = c.kv_heads, D = c.head_dim;
  const Rows wide{step.memory.get(Workspace::wide, T * weights.input.outputs), weights.input.outputs};
  step.project(weights.input, T, normed, wide);

  const int64_t half = c.rope.channels() / 2;
  HeadRotation rotation;
  rotation.tokens = T;
  rotation.size = D;
  rotation.eps = static_cast<float>(c.rms_norm_eps);
  rotation.cosine = step.memory.get(Workspace::cosine, T * half);
  rotation.sine = step.memory.get(Workspace::sine, T * half);
  rotation.half = half;
  step.other([&] {
    rotation.x = wide;
    rotation.heads = Hq;
    rotation.head_stride = 2 * D;
    rotation.weight = weights.q_norm.data();
    norm_and_rotate(step.stream, rotation);
    rotation.x = {wide.data + Hq * 2 * D, wide.stride};
    rotation.heads = Hk;
    rotation.head_stride = D;
    rotation.weight = weights.k_norm.data();
    norm_and_rotate(step.stream, rotation);
  });

  // New tokens go into the cache first; then every query reads the cache alone, its own token included.
  KvEncodeArgs encode;
  encode.k = heads_of(T, wide, Hq * 2 * D, Hk, D, D);
  encode.v = heads_of(T, wide, Hq * 2 * D + Hk * D, Hk, D, D);
  encode.positions = step.batch.positions;
  encode.sequences = step.batch.sequences;
  encode.cache = step.state.cache(layer, step.batch);
  step.op(kv_encode, encode);

  const Rows mixed{step.memory.get(Workspace::mixed, T * Hq * D), Hq * D};
  CompressedAttentionArgs attention;
  attention.queries.q = heads_of(T, wide, 0, Hq, D, 2 * D);
  attention.queries.positions = step.batch.positions;
  attention.queries.sequences = step.batch.sequences;
  attention.cache = encode.cache;
  attention.schedule = Schedule::invariant;
  attention.o = heads_of(T, mixed, 0, Hq, D, D);
  step.op(compressed_attention, attention);

  step.other([&] { sigmoid_gate(step.stream, T, Hq, D, mixed, D, {wide.data + D, wide.stride}, 2 * D); });
  step.project(weights.output, T, mixed, x, true);
}

}  // namespace weft::model
