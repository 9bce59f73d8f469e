// delta_gates, short_conv, l2_norm and gated_rms_norm in double.
#include <cmath>

#include <algorithm>

#include "common/conv_slots.h"
#include "reference/gate_math.h"
#include "reference/rows.h"
#include "reference/table.h"

namespace weft::reference {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

void delta_gates(const Stream&, const DeltaGatesArgs& args) {
  const int64_t T = args.a.size(0), Hv = args.a.size(1), K = args.a.rank == 3 ? args.a.size(2) : 1;
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < Hv; ++h) {
      const double a_log = load(args.a_log, at(args.a_log, h));
      for (int64_t c = 0; c < K; ++c)
        store(args.g, at(args.g, t, h) + c,
              log_decay(load(args.a, at(args.a, t, h) + c), a_log, load(args.dt_bias, at(args.dt_bias, h) + c)));
      if (args.b.present()) store(args.beta, at(args.beta, t, h), write_strength(load(args.b, at(args.b, t, h)), args.double_beta));
    }
}

void short_conv(const Stream&, const ShortConvArgs& args) {
  const int64_t T = args.x.size(0), C = args.x.size(1), W = args.weight.size(1);
  const int64_t L = conv_state_rows(args);
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (!range.legal) continue;
    const ConvSlots slots = conv_slots(args, n);
    if (slots.inert) {
      for (int64_t t = range.begin; t < range.end; ++t)
        for (int64_t c = 0; c < C; ++c) store(args.y, at(args.y, t, c), 0);
      continue;
    }
    const int64_t offset = slots.offset;
    for (int64_t c = 0; c < C; ++c) {
      std::vector<double> ext;  // rows of the state up to the end of the history, then x
      for (int64_t l = 0; l < offset + W - 1; ++l)
        ext.push_back(slots.in < 0 ? 0 : load(args.state_in, at(args.state_in, slots.in, l, c)));
      for (int64_t t = range.begin; t < range.end; ++t) ext.push_back(load(args.x, at(args.x, t, c)));
      for (int64_t t = range.begin; t < range.end; ++t) {
        double sum = args.bias.present() ? load(args.bias, at(args.bias, c)) : 0;
        for (int64_t m = 0; m < W; ++m)
          sum += load(args.weight, at(args.weight, c, m)) * ext[static_cast<size_t>(offset + t - range.begin + m)];
        store(args.y, at(args.y, t, c), args.activation == Activation::silu ? silu(sum) : sum);
      }
      if (slots.out < 0) continue;
      const int64_t rows = static_cast<int64_t>(ext.size());
      for (int64_t l = 0; l < L; ++l) {
        const int64_t row = rows - L + l;
        store(args.state_out, at(args.state_out, slots.out, l, c), row >= 0 ? ext[static_cast<size_t>(row)] : 0);
      }
    }
  }
}

void l2_norm(const Stream&, const L2NormArgs& args) {
  const int64_t D = args.x.size(-1);
  if (args.x.elements() == 0) return;
  const int64_t rows = args.x.elements() / D;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t rest = r, from = 0, to = 0;
    for (int i = args.x.rank - 2; i >= 0; --i) {
      from += rest % args.x.sizes[i] * args.x.strides[i];
      to += rest % args.x.sizes[i] * args.y.strides[i];
      rest /= args.x.sizes[i];
    }
    double sum = args.eps;
    for (int64_t d = 0; d < D; ++d) sum += load(args.x, from + d) * load(args.x, from + d);
    for (int64_t d = 0; d < D; ++d) store(args.y, to + d, sum == 0 ? 0 : load(args.x, from + d) / std::sqrt(sum));
  }
}

void gated_rms_norm(const Stream&, const GatedRmsNormArgs& args) {
  const int64_t T = args.x.size(0), H = args.x.size(1), D = args.x.size(2);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < H; ++h) {
      const std::vector<double> x = load_row(args.x, t, h), z = load_row(args.z, t, h), w = load_row(args.weight);
      double sum = 0;
      for (double value : x) sum += value * value;
      const double root = std::sqrt(sum / static_cast<double>(D) + args.eps);
      std::vector<double> y(x.size());
      for (size_t d = 0; d < y.size(); ++d) {
        const double gate = args.gate == Gate::silu ? silu(z[d]) : 1 / (1 + std::exp(-z[d]));
        y[d] = root == 0 ? 0 : w[d] * x[d] / root * gate;
      }
      store_row(args.y, y, t, h);
    }
}

}  // namespace

OpEntry<DeltaGatesArgs> delta_gates_entry() { return entry<delta_gates>(kAllFloats); }
OpEntry<ShortConvArgs> short_conv_entry() { return entry<short_conv>(kAllFloats); }
OpEntry<L2NormArgs> l2_norm_entry() { return entry<l2_norm>(kAllFloats); }
OpEntry<GatedRmsNormArgs> gated_rms_norm_entry() { return entry<gated_rms_norm>(kAllFloats); }

}  // namespace weft::reference
