// Inputs of the delta ops: see delta_inputs.h.
#include "cases/delta_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "common/state_slots.h"
#include "core/limits.h"
#include "weft/delta_preprocess.h"

namespace weft::cases {
namespace {

Tensor index_tensor(Memory& memory, const std::vector<int64_t>& values, bool wide) {
  if (!wide) return memory.indices(values);
  const Tensor t = memory.make(DType::i64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(t.data));
  return t;
}

void copy_first_token(const Tensor& t, bool alternate) {
  for (int64_t i = 1; i < t.size(0); ++i)
    for (int64_t h = 0; h < t.size(1); ++h)
      for (int64_t d = 0; d < t.size(2); ++d) {
        const double value = get(t, h * t.stride(1) + d);
        set(t, i * t.stride(0) + h * t.stride(1) + d, alternate && i % 2 ? -value : value);
      }
}

void fill_keys(const Tensor& k, const std::string& kind, Rng& rng, bool normalise) {
  fill_normal(k, rng);
  if (kind == "positive")  // SiLU of Gaussian numbers: any two keys correlate
    for_each_offset(k, [&](int64_t i) { set(k, i, get(k, i) / (1 + std::exp(-get(k, i)))); });
  if (kind == "onehot") {
    fill(k, 0);
    for (int64_t t = 0; t < k.size(0); ++t)
      for (int64_t h = 0; h < k.size(1); ++h) set(k, t * k.stride(0) + h * k.stride(1) + t % k.size(2), 1);
  }
  if (kind == "identical" || kind == "alternating") copy_first_token(k, kind == "alternating");
  if (normalise) normalize_rows(k);
}

constexpr double kReset = -120;  // a log decay whose decay is 0 in f32

// Natural-log decay of one token and head.
double draw_gate(const std::string& kind, int64_t head, Rng& rng) {
  if (kind == "none") return 0;
  if (kind == "soft") return rng.uniform(-0.05, 0);
  if (kind == "medium") return rng.uniform(-2, -0.01);
  if (kind == "wide") return rng.uniform(-20, -1e-4);
  if (kind == "mixed") return rng.uniform() < 0.2 ? -30 : 0;  // no decay, with sudden resets
  if (kind == "strong") return -69;
  if (kind == "resets") return rng.uniform() < 0.1 ? kReset : rng.uniform(-0.5, 0);
  return head % 2 ? 0 : rng.uniform(-21, 0);  // "heads": A = 16 in even heads, A = 0 in odd ones
}

double draw_beta(const std::string& kind, Rng& rng) {
  if (kind == "zero") return 0;
  if (kind == "one") return 1;
  if (kind == "half") return 0.5;
  if (kind == "two") return 2;
  if (kind == "wide") return rng.uniform(0, 2);
  return rng.uniform(0.05, 0.95);
}

void make_gates(DeltaInputs& in, Options& options, Memory& memory, Rng& rng) {
  const int64_t T = in.tokens.total;
  const bool per_channel = options.flag("kda");
  const std::string gate =
      options.choice("gate", "medium", {"none", "soft", "medium", "wide", "mixed", "strong", "heads", "resets"});
  const std::string beta = options.choice("beta", "uniform", {"uniform", "zero", "one", "half", "two", "wide"});
  const std::string form = options.choice("gates", "log", {"log", "alpha", "raw"});
  in.gates.double_beta = options.flag("double_beta") && form == "raw";
  const std::vector<int64_t> sizes = per_channel ? std::vector<int64_t>{T, in.Hv, in.K} : std::vector<int64_t>{T, in.Hv};
  in.g = memory.make(DType::f32, sizes);
  in.beta = memory.make(DType::f32, {T, in.Hv});
  const int64_t channels = per_channel ? in.K : 1;
  if (form == "raw") {
    in.gates.a = memory.make(in.dtype, sizes);
    in.gates.b = memory.make(in.dtype, {T, in.Hv});
    in.gates.a_log = memory.make(DType::f32, {in.Hv});
    in.gates.dt_bias = per_channel ? memory.make(DType::f32, {in.Hv, in.K}) : memory.make(DType::f32, {in.Hv});
    fill_normal(in.gates.a, rng, 2);
    fill_normal(in.gates.b, rng);
    for_each_offset(in.gates.a_log, [&](int64_t i) { set(in.gates.a_log, i, std::log(rng.uniform(0.1, 16))); });
    fill_uniform(in.gates.dt_bias, rng, -6, -1);
    delta_gates({Backend::reference},
                {in.gates.a, in.gates.b, in.gates.a_log, in.gates.dt_bias, in.g, in.beta, in.gates.double_beta});
    return;
  }
  int64_t at = 0;
  for_each_offset(in.g, [&](int64_t i) { set(in.g, i, draw_gate(gate, at++ / channels % in.Hv, rng)); });
  for_each_offset(in.beta, [&](int64_t i) { set(in.beta, i, draw_beta(beta, rng)); });
  in.correlated |= beta == "two" || beta == "wide";
  in.gates.beta = in.beta;
  if (form == "log") {
    in.gates.g = in.g;
    return;
  }
  in.gates.alpha = memory.make(DType::f32, sizes);
  for_each_offset(in.g, [&](int64_t i) { set(in.gates.alpha, i, std::exp(get(in.g, i))); });
  for_each_offset(in.g,
                  [&](int64_t i) { set(in.g, i, std::max(std::log(get(in.gates.alpha, i)), kReset)); });  // of the rounded alpha
}

}  // namespace

bool Tokens::legal(int64_t n) const {
  const int64_t low = bounds[static_cast<size_t>(n)], high = bounds[static_cast<size_t>(n + 1)];
  return low >= 0 && high >= low && high <= total && high - low <= longest;
}

int64_t Tokens::length(int64_t n) const {
  return legal(n) ? bounds[static_cast<size_t>(n + 1)] - bounds[static_cast<size_t>(n)] : 0;
}

Tokens make_tokens(Options& options, Memory& memory, int64_t default_tokens, int64_t default_count) {
  Tokens tokens;
  const std::vector<int64_t> lens = options.list("lens"), cu = options.list("cu");
  const int64_t T = options.integer("T", lens.empty() ? default_tokens : *std::max_element(lens.begin(), lens.end()));
  const int64_t N = options.integer("N", lens.empty() ? default_count : static_cast<int64_t>(lens.size()), 0, kMaxSequences);
  const bool wide = options.choice("cu_type", "i32", {"i32", "i64"}) == "i64";
  const bool packed = options.flag("varlen") || !lens.empty() || !cu.empty();
  tokens.bounds = cu;
  if (cu.empty()) {
    tokens.bounds.push_back(0);
    for (int64_t n = 0; n < (lens.empty() ? N : static_cast<int64_t>(lens.size())); ++n)
      tokens.bounds.push_back(tokens.bounds.back() + (lens.empty() ? T : lens[static_cast<size_t>(n)]));
  }
  tokens.count = static_cast<int64_t>(tokens.bounds.size()) - 1;
  tokens.total = cu.empty() ? tokens.bounds.back() + options.integer("poison", 0) : T;
  bytes_of_sizes(std::array{tokens.total}, sizeof(int64_t));  // throws if too large: builders keep an int64 per token
  tokens.longest = T;
  tokens.sequences = packed ? Sequences::packed(index_tensor(memory, tokens.bounds, wide), tokens.count, tokens.longest)
                            : Sequences::uniform(tokens.count);
  return tokens;
}

DeltaInputs make_delta_inputs(Options& options, Memory& memory, Rng& rng, int64_t default_tokens, int64_t default_count) {
  DeltaInputs in;
  in.tokens = make_tokens(options, memory, default_tokens, default_count);
  in.Hk = options.integer("Hk", 1, 1, 4096);
  in.Hv = options.integer("Hv", 2, 1, 4096);
  in.K = options.integer("Dk", 32, 1, 256);
  in.V = options.integer("Dv", in.K, 1, 256);
  in.dtype = options.dtype("dtype", DType::f32);
  in.head_map = options.choice("map", "grouped", {"grouped", "tiled"}) == "grouped" ? HeadMap::grouped : HeadMap::tiled;
  in.l2_norm = options.flag("l2norm");
  const std::string keys = options.choice("keys", "gaussian", {"gaussian", "positive", "identical", "alternating", "onehot"});
  in.correlated = keys != "gaussian" && keys != "onehot";
  const int64_t T = in.tokens.total;
  if (options.flag("packed")) {
    const int64_t row = 2 * in.Hk * in.K + in.Hv * in.V;
    const Tensor all = memory.make(in.dtype, {T, row});
    const auto view = [&](int64_t first, int64_t heads, int64_t size) {
      Tensor t = dense(static_cast<uint8_t*>(all.data) + first * dtype_bytes(in.dtype), in.dtype, {T, heads, size});
      t.strides[0] = row;
      return t;
    };
    in.q = view(0, in.Hk, in.K);
    in.k = view(in.Hk * in.K, in.Hk, in.K);
    in.v = view(2 * in.Hk * in.K, in.Hv, in.V);
  } else {
    in.q = memory.make(in.dtype, {T, in.Hk, in.K});
    in.k = memory.make(in.dtype, {T, in.Hk, in.K});
    in.v = memory.make(in.dtype, {T, in.Hv, in.V});
  }
  fill_normal(in.q, rng);
  if (!in.l2_norm) normalize_rows(in.q);
  fill_keys(in.k, keys, rng, !in.l2_norm);
  fill_normal(in.v, rng);
  make_gates(in, options, memory, rng);
  return in;
}

DeltaStates make_states(Options& options, Memory& memory, Rng& rng, const Tokens& tokens, int64_t Hv, int64_t V, int64_t K) {
  DeltaStates states;
  const int64_t N = tokens.count;
  const std::string type = options.choice("state", "f32", {"f32", "f16", "bf16", "none"});
  const std::string out = options.choice("out", type == "none" ? "separate" : "inplace", {"inplace", "separate", "none"});
  const std::string slots = options.choice("slots", "plain", {"plain", "permuted", "inert"});
  states.layout = options.choice("layout", "vk", {"vk", "kv"}) == "vk" ? StateLayout::vk : StateLayout::kv;
  const bool padded = options.flag("padded"), fresh = options.flag("fresh");
  const DType in_type = type == "f16" ? DType::f16 : type == "bf16" ? DType::bf16 : DType::f32;
  const DType out_type = options.dtype("out_type", in_type);

  // Sequence n owns slot order[n]. No sequence owns the other slots of the pool.
  const int64_t pool = slots == "plain" ? N : N + 2;
  std::vector<int64_t> order;
  for (int64_t n = 0; n < N; ++n) order.push_back(slots == "plain" ? n : (n * (pool - 1) + 1) % pool);
  const int64_t rows = states.layout == StateLayout::vk ? V : K, columns = states.layout == StateLayout::vk ? K : V;
  const auto make_pool = [&](DType dtype) {
    if (!padded) return memory.make(dtype, {pool, Hv, rows, columns});
    // Padding separates heads and slots; each matrix is dense.
    Tensor wide = memory.make(dtype, {pool, Hv + 1, rows * columns + 24});
    Tensor t = wide;
    t.rank = 4;
    t.sizes = {pool, Hv, rows, columns};
    t.strides = {wide.strides[0], wide.strides[1], columns, 1};
    return t;
  };
  if (type != "none") {
    states.in = make_pool(in_type);
    if (slots == "plain" && !padded)
      fill_normal(states.in, rng, 0.5);
    else
      for (int64_t slot : order) fill_normal(slot_view(states.in, slot, StateLayout::vk), rng, 0.5);
  }
  if (out == "inplace") states.out = states.in;
  if (out == "separate") states.out = make_pool(out_type);
  if (slots != "plain") {
    std::vector<int64_t> in_slots = order, out_slots = order;
    if (slots == "inert")
      for (int64_t n = 0; n < N; ++n) {
        if (n % 4 == 1) in_slots[static_cast<size_t>(n)] = out_slots[static_cast<size_t>(n)] = -1;
        if (n % 4 == 3) in_slots[static_cast<size_t>(n)] = out_slots[static_cast<size_t>(n)] = pool + 7;
        if (n % 4 == 2) out_slots[static_cast<size_t>(n)] = -1;  // computes o, but stores no state
      }
    states.in_slots = memory.indices(in_slots);
    if (states.out.present()) states.out_slots = memory.indices(out_slots);
  }
  if (fresh) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < N; ++n) flags.push_back(n % 2);
    states.has_initial = memory.indices(flags);
  }
  return states;
}

void poison_others(Options& options, const DeltaInputs& in, const DeltaStates& states) {
  if (options.integer("poison", 0) == 0) return;
  std::vector<bool> read(static_cast<size_t>(in.tokens.total));
  for (int64_t n = 0; n < in.tokens.count; ++n)
    if (!state_slots(states, n).inert) {
      const auto first = read.begin() + in.tokens.begin(n);
      std::fill(first, first + in.tokens.length(n), true);
    }
  for (const Tensor& t : {in.q, in.k, in.v, in.gates.g, in.gates.alpha, in.gates.a, in.gates.beta, in.gates.b})
    for (int64_t i = 0; t.present() && i < in.tokens.total; ++i)
      if (!read[static_cast<size_t>(i)]) fill(rows_of(t, i, 1), std::numeric_limits<double>::quiet_NaN());
}

Tensor slot_view(const Tensor& pool, int64_t slot, StateLayout layout) {
  Tensor t = rows_of(pool, slot, 1);
  t.rank = 3;
  for (size_t i = 0; i < 3; ++i) {
    t.sizes[i] = pool.sizes[i + 1];
    t.strides[i] = pool.strides[i + 1];
  }
  if (layout == StateLayout::kv) {
    std::swap(t.sizes[1], t.sizes[2]);
    std::swap(t.strides[1], t.strides[2]);
  }
  return t;
}

Tensor initial_states(Memory& memory, const DeltaStates& states, int64_t N, int64_t Hv, int64_t V, int64_t K) {
  const Tensor all = memory.make(DType::f32, {N, Hv, V, K});
  fill(all, 0);
  for (int64_t n = 0; n < N; ++n) {
    if (const int64_t slot = state_slots(states, n).in; slot >= 0)
      copy(slot_view(states.in, slot, states.layout), slot_view(all, n, StateLayout::vk));
  }
  return all;
}

Tensor rows_of(Tensor tensor, int64_t begin, int64_t count) {
  tensor.data = static_cast<uint8_t*>(tensor.data) + begin * tensor.strides[0] * dtype_bytes(tensor.dtype);
  tensor.sizes[0] = count;
  return tensor;
}

double delta_flops(const DeltaInputs& in) {
  return 6.0 * static_cast<double>(in.K * in.V) * static_cast<double>(in.tokens.total * in.Hv);
}

}  // namespace weft::cases
