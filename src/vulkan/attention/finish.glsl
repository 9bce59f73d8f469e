// The end of a row: the sink, the factor of its values, and where they go. Params must have Outputs `outputs` and `Side sides[2]`.

struct Finish {
  float factor;   // multiplies the sum of weighted values
  float tokens;   // share of the tokens in all weights, the sink excluded: the factor of V's mean
  float log_sum;  // -inf for a row that saw no token and no sink
};

// For a row of query head hq with the largest score m and the sum l of weights relative to m.
Finish finish_of(int64_t hq, float m, float l) {
  float factor = 1, top = m;
  precise float sum = l;
  if (p.outputs.sinks.there != 0) {
    const float sink = float_at(p.outputs.sinks.data, hq * p.outputs.sinks.stride);
    if (sink != kMasked) {
      top = sum == 0.0 || m < sink ? sink : m;
      factor = sum == 0.0 ? 1.0 : exp_exact(m - top);
      sum = sum * factor + exp_exact(sink - top);
    }
  }
  Finish finish;
  finish.factor = sum == 0.0 ? 0.0 : factor / sum;
  finish.tokens = l * finish.factor;
  precise const float log_sum = top + log_exact(sum);
  finish.log_sum = sum == 0.0 ? kMasked : log_sum;
  return finish;
}

// Stores coordinate d of a row whose rotation is undone, and adds V's mean.
void store_output(uint side, int64_t t, int64_t hq, int64_t hk, uint d, float value, float tokens) {
  if (p.sides[side].mean != 0)
    value = fma(tokens, float_at(p.sides[side].mean, hk * p.sides[side].mean_head + d), value);
  store(p.outputs.o, at(p.outputs.o, t, hq) + d, value);
}

void store_log_sum(int64_t t, int64_t hq, float log_sum) {
  if (present(p.outputs.lse)) store(p.outputs.lse, at(p.outputs.lse, t, hq), log_sum);
}
