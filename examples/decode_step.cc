// One decode step of a gated delta network: two sequences, one token each, states updated in place.
#include <weft/weft.h>

#include <cstdio>
#include <vector>

int main() {
  using weft::dense, weft::DType;
  const int64_t N = 2, Hk = 1, Hv = 2, K = 4, V = 3;
  const std::vector<float> q(N * Hk * K, 0.5f), k(N * Hk * K, 0.5f), v(N * Hv * V, 1.0f), g(N * Hv, 0.0f), beta(N * Hv, 1.0f);
  std::vector<float> o(N * Hv * V), state(N * Hv * V * K, 0.0f);

  weft::GatedDeltaRuleDecodeArgs args;
  args.q = dense(q.data(), DType::f32, {N, Hk, K});
  args.k = dense(k.data(), DType::f32, {N, Hk, K});
  args.v = dense(v.data(), DType::f32, {N, Hv, V});
  args.gates.g = dense(g.data(), DType::f32, {N, Hv});        // log decay
  args.gates.beta = dense(beta.data(), DType::f32, {N, Hv});  // write strength
  args.states.in = args.states.out = dense(state.data(), DType::f32, {N, Hv, V, K});
  args.o = dense(o.data(), DType::f32, {N, Hv, V});
  args.scale = 1.0f;
  args.sequences = weft::Sequences::uniform(N);

  const weft::Stream stream{weft::Backend::cpu};
  weft::Memory scratch;  // grows to what the largest call wants: keep one for all layers
  gated_delta_rule_decode(stream, args, scratch.at_least(scratch_bytes(stream, args)));

  // A unit key written with beta = 1 reads back its value exactly.
  std::printf("o = %g, wanted 1\n", static_cast<double>(o[0]));
  return o[0] == 1.0f ? 0 : 1;
}
