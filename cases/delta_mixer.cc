// Cases of a whole gated delta mixer: convolution, gated delta rule, gated norm, one after the other.
#include <algorithm>
#include <string>

#include "cases/builders.h"
#include "cases/delta_inputs.h"

namespace weft::cases {
namespace {

// The ops of one layer between its dense projections. Each op reads what the op before it wrote, in the same memory.
struct MixerArgs {
  ShortConvArgs conv;
  GatedDeltaRulePrefillArgs prefill;
  GatedDeltaRuleDecodeArgs decode;
  GatedRmsNormArgs norm;
  bool decodes = false;  // at most kMaxDecodeTokens per sequence

  // Calls visit(args) for each op in order.
  template <class Visit>
  void each(const Visit& visit) const {
    visit(conv);
    decodes ? visit(decode) : visit(prefill);
    visit(norm);
  }
};

class MixerProblem : public Problem {
 public:
  MixerArgs args;
  // Results of the layer, which are compared; and intermediate tensors, which may be written but are not compared.
  std::vector<Output> outputs;
  std::vector<Tensor> between;

  const char* op() const override { return kDeltaMixer; }
  bool golden() const override { return false; }
  Status supports(const Stream& stream) const override {
    Status status;
    args.each([&](const auto& one) {
      if (status.ok()) status = weft::supports(stream, relabelled(one, stream));
    });
    return status;
  }
  Choice choose(const Stream& stream) const override {
    Choice all;
    args.each([&](const auto& one) {
      const Choice choice = weft::choose(stream, relabelled(one, stream));
      all.kernel += (all.kernel.empty() ? "" : " + ") + choice.kernel;
      all.plan += (all.plan.empty() ? "" : "; ") + choice.plan;
    });
    return all;
  }
  size_t scratch_bytes(const Stream& stream) const override {
    size_t most = 0;
    args.each([&](const auto& one) { most = std::max(most, weft::scratch_bytes(stream, relabelled(one, stream))); });
    return most;
  }
  std::function<void()> host_share(const Stream& stream) const override {
    return [stream, there = mapped_args([&](const auto& one) { return relabelled(one, stream); })] {
      there.each([&](const auto& one) { (void)weft::scratch_bytes(stream, one); });
    };
  }
  std::function<void()> call(const Stream& stream, const Image& image, Scratch scratch) const override {
    const auto place = [&](const Tensor& tensor) { return tensor.present() ? image.at(tensor) : tensor; };
    return [stream, scratch, there = mapped_args([&](const auto& one) { return mapped(one, place); })] {
      there.each([&](const auto& one) { launch(stream, one, scratch); });
    };
  }
  void run(const Stream& stream, const Image& image, Scratch scratch) const override { call(stream, image, scratch)(); }

  void prepare() override {
    if (right_) return;
    right_ = std::make_unique<Image>(memory_, host_placement());
    Memory lent;
    const size_t bytes = scratch_bytes(kReference);
    run(kReference, *right_, {lent.bytes(bytes), bytes});
  }
  Findings compare(const Stream& stream, const Image& result) const override {
    Findings findings;
    for (const Output& output : outputs)
      findings.push_back({output.name, relative_rms(result.fetched(output.tensor), right_->at(output.tensor)),
                          stream.backend == Backend::cuda ? output.bar.tensor_core : output.bar.f32});
    return findings;
  }
  std::string misbehaviour(const Image& result) const override {
    std::vector<Tensor> writable = between;
    for (const Output& output : outputs) writable.push_back(output.tensor);
    return check_rest(result, writable);
  }
  // The ops have their own cases, with laws and second formulations.
  std::optional<Findings> second_formulation(const Image&) const override { return std::nullopt; }
  Findings laws(const Stream&) const override { return {}; }

 private:
  // The arguments of every op, each changed by map(args).
  template <class Map>
  MixerArgs mapped_args(const Map& map) const {
    return {map(args.conv), map(args.prefill), map(args.decode), map(args.norm), args.decodes};
  }

  std::unique_ptr<Image> right_;
};

}  // namespace

// Options: T, N, Hk, Hv, Dk, Dv, W, dtype (of everything but the recurrent state), state (f32, f16, bf16).
std::unique_ptr<Problem> build_delta_mixer(Options& options, Rng& rng) {
  auto problem = std::make_unique<MixerProblem>();
  Memory& memory = problem->memory();
  MixerArgs& args = problem->args;
  const Tokens tokens = make_tokens(options, memory, 33, 1);
  const int64_t Hk = options.integer("Hk", 2, 1), Hv = options.integer("Hv", 4, 1), K = options.integer("Dk", 32, 1, 256);
  const int64_t V = options.integer("Dv", K, 1, 256), W = options.integer("W", 4, 2, 8), T = tokens.total, N = tokens.count;
  const int64_t C = 2 * Hk * K + Hv * V;
  const DType dtype = options.dtype("dtype", DType::f32), state_type = options.dtype("state", DType::f32);
  args.decodes = tokens.longest <= kMaxDecodeTokens;

  // A row of the input projection: [q | k | v | z | b | a].
  const Tensor wide = memory.make(dtype, {T, C + Hv * V + 2 * Hv});
  fill_normal(wide, rng);
  const auto columns = [](Tensor t, int64_t first, int64_t count) {
    t.data = static_cast<uint8_t*>(t.data) + first * dtype_bytes(t.dtype);
    t.sizes[1] = count;
    return t;
  };
  const auto heads = [&](const Tensor& t, int64_t first, int64_t count, int64_t size) {
    Tensor view = columns(t, first, count);
    view.rank = 3;
    view.strides[1] = size;
    view.sizes[2] = size;
    view.strides[2] = 1;
    return view;
  };

  ShortConvArgs& conv = args.conv;
  conv.x = columns(wide, 0, C);
  conv.y = memory.make(dtype, {T, C});
  conv.weight = memory.make(dtype, {C, W});
  fill_normal(conv.weight, rng, 0.5);
  conv.sequences = tokens.sequences;
  conv.state_in = conv.state_out = memory.make(dtype, {N, W - 1, C});
  fill_normal(conv.state_in, rng);

  const Tensor o = memory.make(dtype, {T, Hv, V});
  const auto fill_rule = [&](auto& rule) {
    rule.q = heads(conv.y, 0, Hk, K);
    rule.k = heads(conv.y, Hk * K, Hk, K);
    rule.v = heads(conv.y, 2 * Hk * K, Hv, V);
    rule.gates.b = columns(wide, C + Hv * V, Hv);
    rule.gates.a = columns(wide, C + Hv * V + Hv, Hv);
    rule.gates.a_log = memory.make(DType::f32, {Hv});
    rule.gates.dt_bias = memory.make(DType::f32, {Hv});
    fill_uniform(rule.gates.a_log, rng, -2, 2.8);
    fill_uniform(rule.gates.dt_bias, rng, -6, -1);
    rule.o = o;
    rule.l2_norm = true;
    rule.sequences = tokens.sequences;
    rule.states.in = rule.states.out = memory.make(state_type, {N, Hv, V, K});
    fill_normal(rule.states.in, rng, 0.5);
    return rule.states.out;
  };
  const Tensor states = args.decodes ? fill_rule(args.decode) : fill_rule(args.prefill);

  GatedRmsNormArgs& norm = args.norm;
  norm.x = o;
  norm.z = heads(wide, C, Hv, V);
  norm.weight = memory.make(dtype, {V});
  fill_normal(norm.weight, rng, 0.2, 1);
  norm.y = memory.make(dtype, {T, Hv, V});

  // An op may round a 16-bit result differently from the reference, and the next op reads that result: the bars add. SiLU makes
  // keys correlate.
  const Bar of_conv = small_op(dtype, conv.y.elements()), of_norm = small_op(dtype, norm.y.elements());
  const auto after_conv = [&](Staged what, const Tensor& t) {
    const Bar rule = delta_bar(what, dtype, t.dtype, tokens.longest, true, t.elements(), !args.decodes);
    return Bar{of_conv.f32 + rule.f32, of_conv.tensor_core + rule.tensor_core};
  };
  const Bar of_o = after_conv(Staged::output, o);
  problem->outputs = {{"y", norm.y, Bar{of_o.f32 + of_norm.f32, of_o.tensor_core + of_norm.tensor_core}},
                      {"states.out", states, after_conv(Staged::state, states)},
                      {"state_out", conv.state_out, Bar{0, 0}}};
  problem->between = {conv.y, o};

  // Intermediate tensors do not count: a fused kernel need not write them.
  Work& work = problem->work;
  for (const Tensor& t : {wide, conv.weight, conv.state_in, states, norm.weight}) work.read_bytes += bytes_of(t);
  for (const Tensor& t : {conv.state_out, states, norm.y}) work.written_bytes += bytes_of(t);
  work.flops = 2.0 * static_cast<double>(W * T * C) + 6.0 * static_cast<double>(K * V) * static_cast<double>(T * Hv) +
               8.0 * static_cast<double>(T * Hv * V);
  return problem;
}

}  // namespace weft::cases
