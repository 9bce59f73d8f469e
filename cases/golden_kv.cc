// Golden cases of the KV codec and of attention.
#include <algorithm>
#include <cmath>

#include "cases/builders.h"
#include "cases/golden_builders.h"
#include "cases/kv_inputs.h"

namespace weft::cases {
namespace {

// The format that options with `prefix` ("", "k_", "v_") describe: a preset, or AURA with the file's table.
KvFormat read_format(const GoldenReader& file, const std::string& prefix, const std::string& table) {
  const std::string family = file.text(prefix + "format", "");
  if (family == "passthrough") return kv_format("f32", file.shape(prefix.substr(0, 1)).back());
  const auto bits = static_cast<int>(file.number(prefix + "bits"));
  const auto d = static_cast<int64_t>(file.number(prefix + "d"));
  const uint64_t seed = file.given(prefix + "seed") ? static_cast<uint64_t>(file.number(prefix + "seed")) : 0;
  if (family == "weft1") return kv_format(std::to_string(bits), d, seed);
  if (family == "aura") return kv_format("aura-" + std::to_string(bits), d, seed);
  if (family == "tq") return kv_format("tq-4", d);
  if (family == "tq_hb") return kv_format("tqhb-" + std::to_string(bits), d);
  std::vector<float> levels;  // tables of other families are in units of a unit vector
  for (double level : file.numbers(table)) levels.push_back(static_cast<float>(level * std::sqrt(static_cast<double>(d))));
  return aura_format(bits, d, seed, levels.data());
}

KvFormat rotation_only(const GoldenReader& file, int64_t d) {
  const std::string rotation = file.text("rotation", "none");
  if (rotation == "none") return kv_format("f32", d);
  if (rotation == "tq_d1") return kv_format("tqhb-8", d);
  return kv_format("4", d, static_cast<uint64_t>(file.number("seed")));
}

// One side that holds the rows of the file: [1, 1, rows, ...].
void read_rows(const GoldenReader& file, Memory& memory, KvSide& side, bool filled) {
  const int64_t rows = file.shape("x")[0], groups = side.format.head_dim / side.format.gain_group;
  const std::string codes = file.has("words") ? "words" : "bytes";
  const std::vector<int64_t> shape{1, 1, rows, code_bytes(side.format)};
  side.codes = filled ? file.bytes(codes, shape) : memory.make(DType::u8, shape);
  side.gains = filled ? reshaped(file.floats("gains", side.format.gain_dtype), {1, 1, rows, groups})
                      : memory.make(side.format.gain_dtype, {1, 1, rows, groups});
}

// A side that the case does not use.
KvSide idle_side(Memory& memory, int64_t rows) {
  KvSide side;
  side.format = kv_format("f32", 8);
  side.codes = memory.make(DType::f32, {1, 1, rows, 8});
  return side;
}

Tensor counted(Memory& memory, int64_t rows) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < rows; ++i) all.push_back(i);
  return memory.indices(all);
}

}  // namespace

std::unique_ptr<Problem> golden_kv_rotate(const std::string& name, GoldenVariant variant) {
  auto problem = std::make_unique<OpProblem<KvRotateArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  const int64_t rows = file.shape("x")[0], d = file.shape("x")[1];
  const Tensor x = reshaped(file.floats("x"), {rows, 1, d}), y = reshaped(file.floats("y"), {rows, 1, d});
  problem->args = {variant.inverse ? y : x, memory.make(DType::f32, {rows, 1, d}), rotation_only(file, d), variant.inverse};
  problem->output(
      "y", [](KvRotateArgs& a) -> Tensor& { return a.y; }, small_op(DType::f32, 0));
  problem->golden_answer(variant.inverse ? x : y, file.tolerance());
  return problem;
}

std::unique_ptr<Problem> golden_kv_encode(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<KvEncodeArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  KvEncodeArgs& args = problem->args;
  const int64_t rows = file.shape("x")[0];
  KvSide want;
  want.format = args.cache.k.format = read_format(file, "", "table");
  read_rows(file, memory, want, true);
  read_rows(file, memory, args.cache.k, false);
  args.cache.v = idle_side(memory, rows);
  args.k = reshaped(file.floats("x"), {rows, 1, file.shape("x")[1]});
  args.positions = counted(memory, rows);
  args.sequences = Sequences::uniform(1);
  problem->exact_output("cache.k.codes", [](KvEncodeArgs& a) -> Tensor& { return a.cache.k.codes; });
  problem->golden_answer(want.codes, 0);
  problem->exact_output("cache.k.gains", [](KvEncodeArgs& a) -> Tensor& { return a.cache.k.gains; });
  problem->golden_answer(want.gains, 0);
  Tokens tokens;
  tokens.bounds = {0, rows};
  tokens.total = tokens.longest = rows;
  tokens.count = 1;
  problem->compare_as = [tokens](const Stream&, const KvEncodeArgs& got, const KvEncodeArgs& right) {
    return compare_encoded(tokens, got, &right);
  };
  return problem;
}

std::unique_ptr<Problem> golden_kv_decode(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<KvDecodeArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  KvDecodeArgs& args = problem->args;
  const int64_t rows = file.shape("x")[0], d = file.shape("x")[1];
  args.cache.k.format = read_format(file, "", "table");
  read_rows(file, memory, args.cache.k, true);
  args.cache.v = idle_side(memory, rows);
  args.positions = counted(memory, rows);
  args.sequences = Sequences::uniform(1);
  args.k = memory.make(DType::f32, {rows, 1, d});
  problem->output(
      "k", [](KvDecodeArgs& a) -> Tensor& { return a.k; }, small_op(DType::f32, 0));
  problem->golden_answer(reshaped(file.floats("x_hat"), {rows, 1, d}), file.tolerance());
  return problem;
}

// Repacks codes of one byte each into the dense bit stream.
std::unique_ptr<Problem> golden_kv_repack(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<KvRepackArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  const int64_t rows = file.shape("codes")[0], d = file.shape("codes")[1];
  KvFormat dense_format = kv_format(std::to_string(static_cast<int>(file.number("bits"))), d), byte_format = dense_format;
  byte_format.packing = Packing::byte;
  KvCache &from = problem->args.from, &to = problem->args.to;
  from.k.format = byte_format;
  to.k.format = dense_format;
  from.k.codes = memory.make(DType::u8, {1, 1, rows, d});
  const std::vector<double> codes = file.numbers("codes");
  for (size_t i = 0; i < codes.size(); ++i) set(from.k.codes, static_cast<int64_t>(i), codes[i]);
  from.k.gains = memory.make(DType::f16, {1, 1, rows, 1});
  fill(from.k.gains, 1);
  from.v = idle_side(memory, rows);
  fill(from.v.codes, 1);
  const Tensor words = file.bytes("words", {1, 1, rows, code_bytes(dense_format)});
  to.k.codes = memory.make(DType::u8, {1, 1, rows, code_bytes(dense_format)});
  to.k.gains = memory.make(DType::f16, {1, 1, rows, 1});
  to.v = idle_side(memory, rows);
  problem->exact_output("to.k.codes", [](KvRepackArgs& a) -> Tensor& { return a.to.k.codes; });
  problem->golden_answer(words, 0);
  problem->exact_output("to.k.gains", [](KvRepackArgs& a) -> Tensor& { return a.to.k.gains; });
  problem->exact_output("to.v.codes", [](KvRepackArgs& a) -> Tensor& { return a.to.v.codes; });
  return problem;
}

std::unique_ptr<Problem> golden_attention_merge(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<AttentionMergeArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  AttentionMergeArgs& args = problem->args;
  const auto B = static_cast<int64_t>(file.number("splits")), D = static_cast<int64_t>(file.number("dv"));
  const auto heads = static_cast<int64_t>(file.number("heads")), T = file.shape("o")[0] / heads;
  args.partials.count = B;
  if (file.text("layout", "") == "interleaved") {
    args.partials.layout = PartialLayout::interleaved;
    const std::vector<double> o = file.numbers("o_partials"), sm = file.numbers("sm_partials");
    args.partials.buffer = memory.make(DType::f32, {static_cast<int64_t>(o.size() + sm.size())});
    for (size_t i = 0; i < o.size() + sm.size(); ++i)
      set(args.partials.buffer, static_cast<int64_t>(i), i < o.size() ? o[i] : sm[i - o.size()]);
  } else {
    args.partials.o = reshaped(file.floats("o_partials"), {T, heads, B, D});
    args.partials.m = reshaped(file.floats("m_partials"), {T, heads, B});
    args.partials.l = reshaped(file.floats("l_partials"), {T, heads, B});
  }
  args.v_format = rotation_only(file, D);
  args.sinks = file.floats("sinks");
  args.o = memory.make(DType::f32, {T, heads, D});
  args.lse = memory.make(DType::f32, {T, heads});
  const Bar bar = attention_bar(false, false, DType::f32, 0);
  problem->output(
      "o", [](AttentionMergeArgs& a) -> Tensor& { return a.o; }, bar);
  problem->golden_answer(reshaped(file.floats("o"), {T, heads, D}), file.tolerance());
  problem->output(
      "lse", [](AttentionMergeArgs& a) -> Tensor& { return a.lse; }, bar);
  problem->golden_answer(reshaped(file.floats("lse"), {T, heads}), file.tolerance());
  return problem;
}

std::unique_ptr<Problem> golden_compressed_attention(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<CompressedAttentionArgs>>();
  Memory& memory = problem->memory();
  const GoldenReader file(name, memory);
  CompressedAttentionArgs& args = problem->args;
  args.queries.q = file.floats("q");
  args.queries.sequences = file.sequences();
  args.queries.positions = file.indices("positions");
  args.queries.scale = static_cast<float>(file.number("scale"));
  args.mask.causal = file.flag("causal");
  if (file.given("window")) args.mask.window = static_cast<int64_t>(file.number("window"));
  if (file.given("softcap")) args.mask.softcap = static_cast<float>(file.number("softcap"));
  args.sinks = file.floats("sinks");
  args.cache.lengths = file.indices("lengths");
  for (const auto& [letter, side] : {std::pair{std::string("k"), &args.cache.k}, {std::string("v"), &args.cache.v}}) {
    side->format = read_format(file, letter + "_", letter + "_table");
    side->format.mean = file.floats(letter + "_mean");
    if (side->format.passthrough) {
      side->codes = file.floats(letter);
      continue;
    }
    const std::string codes = letter + (file.has(letter + "_words") ? "_words" : "_bytes");
    const std::vector<int64_t> shape = file.shape(codes);
    side->codes = file.bytes(codes, {shape[0], shape[1], shape[2], code_bytes(side->format)});
    side->gains = reshaped(file.floats(letter + "_gains", side->format.gain_dtype),
                           {shape[0], shape[1], shape[2], side->format.head_dim / side->format.gain_group});
  }
  const std::vector<int64_t> o = file.shape("o");
  args.o = memory.make(DType::f32, {o[0], o[1], o[2]});
  args.lse = memory.make(DType::f32, {o[0], o[1]});
  const Bar bar = attention_bar(args.cache.k.format.grid_step.has_value(), false, DType::f32, 0);
  problem->output(
      "o", [](CompressedAttentionArgs& a) -> Tensor& { return a.o; }, bar);
  problem->golden_answer(file.floats("o"), file.tolerance());
  problem->output(
      "lse", [](CompressedAttentionArgs& a) -> Tensor& { return a.lse; }, bar);
  problem->golden_answer(file.floats("lse"), file.tolerance());
  return problem;
}

}  // namespace weft::cases
