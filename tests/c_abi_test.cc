// The C interface: layouts and versions of structs, codes and sentences, and results equal to those of the C++ calls.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "core/backend.h"
#include "weft/c.h"
#include "weft/weft.h"

extern "C" int c_decode_step(float* q, float* k, float* v, float* g, float* beta, float* state, float* o, int64_t n, int64_t hk,
                             int64_t hv, int64_t dk, int64_t dv, weft_status* status);

namespace weft {
namespace {

constexpr Stream kReference{Backend::reference};

weft_tensor view(std::vector<float>& values, const std::vector<int64_t>& sizes) {
  return weft_dense(values.data(), WEFT_F32, static_cast<int32_t>(sizes.size()), sizes.data());
}
weft_tensor view(std::vector<int32_t>& values, const std::vector<int64_t>& sizes) {
  return weft_dense(values.data(), WEFT_I32, static_cast<int32_t>(sizes.size()), sizes.data());
}
weft_tensor bytes_view(std::vector<uint8_t>& values, int32_t dtype, const std::vector<int64_t>& sizes) {
  return weft_dense(values.data(), dtype, static_cast<int32_t>(sizes.size()), sizes.data());
}

weft_stream reference_stream() {
  weft_stream stream{};
  stream.struct_size = sizeof stream;
  stream.backend = WEFT_BACKEND_REFERENCE;
  return stream;
}

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

std::vector<float> random_values(size_t count, uint64_t seed) {
  cases::Rng rng(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(rng.normal());
  return values;
}

// A small, legal call of gated_rms_norm.
struct Norm {
  std::vector<float> x = random_values(2 * 3 * 8, 1), z = random_values(2 * 3 * 8, 2), weight = random_values(8, 3);
  std::vector<float> y = std::vector<float>(2 * 3 * 8, -7.0f);
  weft_gated_rms_norm_args args = sized<weft_gated_rms_norm_args>();
  weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();

  Norm() {
    args.x = view(x, {2, 3, 8});
    args.z = view(z, {2, 3, 8});
    args.weight = view(weight, {8});
    args.y = view(y, {2, 3, 8});
  }
  weft_code run() { return weft_gated_rms_norm(&stream, &args, nullptr, 0, &status); }
  void expect_refused(const std::string& argument, const std::string& what) {
    EXPECT_EQ(run(), WEFT_INVALID_ARGUMENT);
    EXPECT_EQ(status.code, WEFT_INVALID_ARGUMENT);
    EXPECT_STREQ(status.op, "gated_rms_norm");
    EXPECT_EQ(status.argument, argument);
    EXPECT_EQ(status.message, "gated_rms_norm: " + argument + " " + what);
    for (float value : y) EXPECT_EQ(value, -7.0f);
  }
};

// A cache of one sequence made from what weft_kv_recipe_describe() says.
struct CCache {
  static constexpr int64_t kHeads = 2, kCapacity = 16;
  weft_kv_recipe* recipe = nullptr;
  weft_kv_recipe_info info = sized<weft_kv_recipe_info>();
  std::vector<uint8_t> k_codes, k_gains, v_codes, v_gains;
  std::vector<int32_t> lengths{5};
  weft_kv_cache cache{};

  explicit CCache(const char* name) {
    weft_status status = sized<weft_status>();
    weft_kv_recipe_args args = sized<weft_kv_recipe_args>();
    args.name = name;
    args.k_head_dim = args.v_head_dim = 64;
    args.seed = 3;
    EXPECT_EQ(weft_kv_recipe_create(&args, &recipe, &status), WEFT_OK) << status.message;
    EXPECT_EQ(weft_kv_recipe_describe(recipe, &info, &status), WEFT_OK) << status.message;
    cache.recipe = recipe;
    fill(info.k, cache.k, k_codes, k_gains);
    fill(info.v, cache.v, v_codes, v_gains);
    cache.lengths = view(lengths, {1});
  }
  ~CCache() { weft_kv_recipe_destroy(recipe); }
  CCache(const CCache&) = delete;
  CCache& operator=(const CCache&) = delete;

  static void fill(const weft_kv_side_info& info, weft_kv_side& side, std::vector<uint8_t>& codes, std::vector<uint8_t>& gains) {
    codes.resize(static_cast<size_t>(kHeads * kCapacity * info.code_bytes));
    gains.resize(static_cast<size_t>(kHeads * kCapacity * info.gain_bytes));
    side.codes = bytes_view(codes, info.codes_dtype, {1, kHeads, kCapacity, info.passthrough ? info.head_dim : info.code_bytes});
    if (!info.passthrough) side.gains = bytes_view(gains, info.gains_dtype, {1, kHeads, kCapacity, info.gains});
  }
};

TEST(CAbi, VersionIsTheLibrarys) {
  EXPECT_STREQ(weft_version(), version());
  EXPECT_EQ(weft_c_abi(), WEFT_C_ABI);
}

TEST(CAbi, DenseStrides) {
  const int64_t sizes[] = {2, 3, 4};
  const weft_tensor t = weft_dense(nullptr, WEFT_F16, 3, sizes);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[1], 4);
  EXPECT_EQ(t.strides[2], 1);
  const int64_t many[] = {1, 1, 1, 1, 1, 1};
  EXPECT_EQ(weft_dense(nullptr, WEFT_F16, 6, many).rank, 6);
}

TEST(CAbi, NormEqualsTheCppCall) {
  Norm norm;
  norm.args.gate = WEFT_GATE_SIGMOID;
  norm.args.has_eps = 1;
  norm.args.eps = 0.5f;
  ASSERT_EQ(norm.run(), WEFT_OK) << norm.status.message;
  EXPECT_EQ(norm.status.code, WEFT_OK);
  EXPECT_STREQ(norm.status.message, "");

  std::vector<float> y(norm.y.size());
  GatedRmsNormArgs args;
  args.x = dense(norm.x.data(), DType::f32, {2, 3, 8});
  args.z = dense(norm.z.data(), DType::f32, {2, 3, 8});
  args.weight = dense(norm.weight.data(), DType::f32, {8});
  args.y = dense(y.data(), DType::f32, {2, 3, 8});
  args.gate = Gate::sigmoid;
  args.eps = 0.5f;
  gated_rms_norm(kReference, args);
  EXPECT_EQ(norm.y, y);
}

TEST(CAbi, AbsentOptionsAreTheDefaults) {
  Norm plain, set;
  plain.args.eps = 100.0f;  // without has_eps it is not looked at
  set.args.has_eps = 1;
  set.args.eps = GatedRmsNormArgs{}.eps;
  ASSERT_EQ(plain.run(), WEFT_OK);
  ASSERT_EQ(set.run(), WEFT_OK);
  EXPECT_EQ(plain.y, set.y);
}

TEST(CAbi, ShorterStructReadsAsDefaults) {
  Norm whole, cut;
  whole.args.gate = WEFT_GATE_SILU;
  ASSERT_EQ(whole.run(), WEFT_OK);
  cut.args.struct_size = offsetof(weft_gated_rms_norm_args, has_eps);
  cut.args.has_eps = cut.args.gate = cut.args.reserved = 77;  // beyond its end: not looked at
  ASSERT_EQ(cut.run(), WEFT_OK) << cut.status.message;
  EXPECT_EQ(whole.y, cut.y);

  Norm without_y;
  without_y.args.struct_size = offsetof(weft_gated_rms_norm_args, y);
  without_y.expect_refused("y", "is absent, wanted [T=2, H=3, D=8]");
}

TEST(CAbi, BadStructSizes) {
  Norm norm;
  const auto newer = [](size_t known) {
    return "is " + std::to_string(known + 8) + ", this library knows " + std::to_string(known) + ": it is older than the caller";
  };
  norm.args.struct_size = sizeof norm.args + 8;
  norm.expect_refused("args.struct_size", newer(sizeof norm.args));
  for (size_t size : {size_t{0}, size_t{4}, sizeof norm.args - 3}) {  // nothing, less than the field itself, a cut through a member
    norm.args.struct_size = size;
    norm.expect_refused("args.struct_size", "is " + std::to_string(size) + ", wanted sizeof the struct");
  }
  norm.args.struct_size = sizeof norm.args;
  norm.stream.struct_size = sizeof norm.stream + 8;
  norm.expect_refused("stream.struct_size", newer(sizeof norm.stream));
  norm.stream.struct_size = 0;
  norm.expect_refused("stream.struct_size", "is 0, wanted sizeof the struct");
}

TEST(CAbi, ShorterStreamIsAccepted) {
  Norm norm;
  norm.stream.struct_size = offsetof(weft_stream, queue);
  norm.stream.threads = -5;  // beyond its end
  EXPECT_EQ(norm.run(), WEFT_OK) << norm.status.message;
}

TEST(CAbi, ShorterStatusGetsItsPart) {
  Norm norm;
  norm.args.x.rank = 0;
  weft_status full = sized<weft_status>();
  ASSERT_EQ(weft_gated_rms_norm(&norm.stream, &norm.args, nullptr, 0, &full), WEFT_INVALID_ARGUMENT);
  std::memset(&norm.status, 'x', sizeof norm.status);
  norm.status.struct_size = offsetof(weft_status, message) + 10;
  ASSERT_EQ(norm.run(), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(norm.status.argument, "x");
  EXPECT_EQ(std::string(norm.status.message), std::string(full.message).substr(0, 9));
  EXPECT_EQ(norm.status.message[10], 'x');

  std::memset(&norm.status, 'x', sizeof norm.status);
  norm.status.struct_size = sizeof(size_t);  // no room for anything
  EXPECT_EQ(norm.run(), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(norm.status.op[0], 'x');
  EXPECT_EQ(weft_gated_rms_norm(&norm.stream, &norm.args, nullptr, 0, nullptr), WEFT_INVALID_ARGUMENT);
}

TEST(CAbi, BadValuesAreNamed) {
  Norm norm;
  const weft_gated_rms_norm_args good = norm.args;
  const auto refused = [&](auto&& spoil, const char* argument, const char* what) {
    norm.args = good;
    spoil(norm.args);
    norm.expect_refused(argument, what);
  };
  refused([](auto& a) { a.x.dtype = 9; }, "x", "has dtype 9, wanted 0..6");
  refused([](auto& a) { a.weight.dtype = -1; }, "weight", "has dtype -1, wanted 0..6");
  refused([](auto& a) { a.x.rank = 6; }, "x", "has rank 6, wanted 0..5");
  refused([](auto& a) { a.x.rank = 260; }, "x", "has rank 260, wanted 0..5");
  refused([](auto& a) { a.z.place = 3; }, "z", "has place 3, wanted WEFT_HOST, WEFT_CUDA or WEFT_VULKAN");
  refused([](auto& a) { a.y.place = -1; }, "y", "has place -1, wanted WEFT_HOST, WEFT_CUDA or WEFT_VULKAN");
  refused([](auto& a) { a.z.device = 128; }, "z", "has device 128, wanted 0..127");
  refused([](auto& a) { a.x.device = -1; }, "x", "has device -1, wanted 0..127");
  refused([](auto& a) { a.gate = 2; }, "gate", "is 2, wanted 0..1");
  refused([](auto& a) { a.gate = -1; }, "gate", "is -1, wanted 0..1");
  refused([](auto& a) { a.has_eps = 2; }, "has_eps", "is 2, wanted 0 or 1");
  refused([](auto& a) { a.reserved = 1; }, "reserved", "is 1, wanted 0");
  refused([](auto& a) { a.y.sizes[2] = 7; }, "y", "is [2, 3, 7], wanted [T=2, H=3, D=8]");
  norm.args = good;
  norm.stream.backend = 4;
  norm.expect_refused("stream.backend", "is 4, wanted 0..3");
  norm.stream = reference_stream();
  norm.stream.isa = 99;
  norm.expect_refused("stream.isa", "is 99, wanted 0..5");
}

TEST(CAbi, NullPointers) {
  Norm norm;
  EXPECT_EQ(weft_gated_rms_norm(&norm.stream, nullptr, nullptr, 0, &norm.status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(norm.status.argument, "args");
  EXPECT_EQ(weft_gated_rms_norm_scratch_bytes(&norm.stream, &norm.args, nullptr, &norm.status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(norm.status.argument, "bytes");
  weft_kv_recipe_destroy(nullptr);
  EXPECT_EQ(weft_kv_recipe_create(nullptr, nullptr, &norm.status), WEFT_INVALID_ARGUMENT);
}

TEST(CAbi, NullRecipes) {
  CCache given("4v4");
  const weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();
  const auto refused = [&](weft_code code, const std::string& op, const std::string& argument) {
    EXPECT_EQ(code, WEFT_INVALID_ARGUMENT) << op;
    EXPECT_EQ(status.op, op);
    EXPECT_EQ(status.argument, argument);
    EXPECT_EQ(status.message, op + ": " + argument + " is null, wanted one from weft_kv_recipe_create()");
  };
  const weft_kv_encode_args encode = sized<weft_kv_encode_args>();
  refused(weft_kv_encode(&stream, &encode, nullptr, 0, &status), "kv_encode", "cache.recipe");
  const weft_kv_decode_args decode = sized<weft_kv_decode_args>();
  refused(weft_kv_decode(&stream, &decode, nullptr, 0, &status), "kv_decode", "cache.recipe");
  const weft_compressed_attention_args attend = sized<weft_compressed_attention_args>();
  refused(weft_compressed_attention(&stream, &attend, nullptr, 0, &status), "compressed_attention", "cache.recipe");
  const weft_attention_merge_args merge = sized<weft_attention_merge_args>();
  refused(weft_attention_merge(&stream, &merge, nullptr, 0, &status), "attention_merge", "recipe");
  weft_kv_repack_args repack = sized<weft_kv_repack_args>();
  refused(weft_kv_repack(&stream, &repack, nullptr, 0, &status), "kv_repack", "from.recipe");
  repack.from = given.cache;
  refused(weft_kv_repack(&stream, &repack, nullptr, 0, &status), "kv_repack", "to.recipe");
}

TEST(CAbi, BackendOutsideTheBuildIsUnsupported) {
  if (find_backend(Backend::cuda)) GTEST_SKIP() << "this build has the cuda backend";
  Norm norm;
  norm.stream.backend = WEFT_BACKEND_CUDA;
  EXPECT_EQ(norm.run(), WEFT_UNSUPPORTED);
  EXPECT_STREQ(norm.status.argument, "stream");
  EXPECT_STREQ(norm.status.message, "gated_rms_norm: stream backend cuda is not in this build");
}

TEST(CAbi, DecodeFromCEqualsCpp) {
  const int64_t n = 3, hk = 2, hv = 4, dk = 8, dv = 5;
  std::vector<float> q = random_values(n * hk * dk, 1), k = random_values(n * hk * dk, 2), v = random_values(n * hv * dv, 3);
  std::vector<float> g(n * hv, -0.25f), beta(n * hv, 0.5f), state = random_values(n * hv * dv * dk, 4), cpp_state = state;
  std::vector<float> o(n * hv * dv), cpp_o(n * hv * dv);
  weft_status status = sized<weft_status>();
  ASSERT_EQ(c_decode_step(q.data(), k.data(), v.data(), g.data(), beta.data(), state.data(), o.data(), n, hk, hv, dk, dv, &status),
            WEFT_OK)
      << status.message;

  GatedDeltaRuleDecodeArgs args;
  args.q = dense(q.data(), DType::f32, {n, hk, dk});
  args.k = dense(k.data(), DType::f32, {n, hk, dk});
  args.v = dense(v.data(), DType::f32, {n, hv, dv});
  args.gates.g = dense(g.data(), DType::f32, {n, hv});
  args.gates.beta = dense(beta.data(), DType::f32, {n, hv});
  args.o = dense(cpp_o.data(), DType::f32, {n, hv, dv});
  args.l2_norm = true;
  args.sequences = Sequences::uniform(n);
  args.states.in = args.states.out = dense(cpp_state.data(), DType::f32, {n, hv, dv, dk});
  gated_delta_rule_decode(kReference, args);
  EXPECT_EQ(o, cpp_o);
  EXPECT_EQ(state, cpp_state);
}

// Prefill with checkpoints, then replay: every nested struct of the delta family crosses the boundary.
TEST(CAbi, PrefillAndReplay) {
  const int64_t t = 64, h = 1, d = 4;
  std::vector<float> q = random_values(t * h * d, 1), k = random_values(t * h * d, 2), v = random_values(t * h * d, 3);
  std::vector<float> g(t * h, -0.1f), beta(t * h, 0.5f), o(t * h * d), state(h * d * d), checkpoint(h * d * d, -7.0f);
  const weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();
  weft_gated_delta_rule_prefill_args args = sized<weft_gated_delta_rule_prefill_args>();
  args.q = view(q, {t, h, d});
  args.k = view(k, {t, h, d});
  args.v = view(v, {t, h, d});
  args.gates.g = view(g, {t, h});
  args.gates.beta = view(beta, {t, h});
  args.o = view(o, {t, h, d});
  args.l2_norm = 1;
  args.sequences.count = 1;
  args.states.out = view(state, {1, h, d, d});
  args.checkpoints = view(checkpoint, {1, 1, h, d, d});
  args.checkpoint_every = 64;
  ASSERT_EQ(weft_gated_delta_rule_prefill(&stream, &args, nullptr, 0, &status), WEFT_OK) << status.message;
  EXPECT_EQ(state, checkpoint);

  std::vector<float> record_k(h * d, 0.5f), delta(h * d, 2.0f), record_g(h, 0.0f);
  std::vector<int32_t> accepted{1};
  weft_gated_delta_rule_replay_args replay = sized<weft_gated_delta_rule_replay_args>();
  replay.record = {view(record_k, {1, h, d}), view(delta, {1, h, d}), view(record_g, {1, h})};
  replay.accepted = view(accepted, {1});
  replay.sequences.count = 1;
  replay.states.in = replay.states.out = view(state, {1, h, d, d});
  ASSERT_EQ(weft_gated_delta_rule_replay(&stream, &replay, nullptr, 0, &status), WEFT_OK) << status.message;
  for (size_t i = 0; i < state.size(); ++i) EXPECT_EQ(state[i], static_cast<float>(checkpoint[i] + 1.0)) << i;

  replay.states.layout = 5;
  EXPECT_EQ(weft_gated_delta_rule_replay(&stream, &replay, nullptr, 0, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(status.argument, "states.layout");
}

TEST(CAbi, ConvAndGates) {
  std::vector<float> x{1, 2, 3}, weight{1, 10}, y(3), state{0};
  const weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();
  weft_short_conv_args conv = sized<weft_short_conv_args>();
  conv.x = view(x, {3, 1});
  conv.weight = view(weight, {1, 2});
  conv.y = view(y, {3, 1});
  conv.sequences.count = 1;
  conv.state_in = conv.state_out = view(state, {1, 1, 1});
  conv.activation = WEFT_ACTIVATION_NONE;
  ASSERT_EQ(weft_short_conv(&stream, &conv, nullptr, 0, &status), WEFT_OK) << status.message;
  EXPECT_EQ(y, (std::vector<float>{10, 21, 32}));
  EXPECT_EQ(state[0], 3.0f);

  std::vector<float> a{0}, b{0}, a_log{0}, dt_bias{0}, g(1), beta(1);
  weft_delta_gates_args gates = sized<weft_delta_gates_args>();
  gates.a = view(a, {1, 1});
  gates.b = view(b, {1, 1});
  gates.a_log = view(a_log, {1});
  gates.dt_bias = view(dt_bias, {1});
  gates.g = view(g, {1, 1});
  gates.beta = view(beta, {1, 1});
  gates.double_beta = 1;
  ASSERT_EQ(weft_delta_gates(&stream, &gates, nullptr, 0, &status), WEFT_OK) << status.message;
  EXPECT_FLOAT_EQ(g[0], -0.69314718f);
  EXPECT_EQ(beta[0], 1.0f);
}

TEST(CAbi, RecipesDescribeThemselves) {
  CCache coded("4v4"), plain("f16");
  const KvRecipe recipe = kv_recipe("4v4", 64, 64, 3);
  EXPECT_EQ(coded.info.id, recipe.id);
  EXPECT_EQ(coded.info.k.code_bytes, code_bytes(recipe.k));
  EXPECT_EQ(coded.info.k.gain_bytes, gain_bytes(recipe.k));
  EXPECT_EQ(coded.info.k.tile_bytes, tile_bytes(recipe.k));
  EXPECT_EQ(coded.info.bytes_per_token, bytes_per_token(recipe));
  EXPECT_EQ(coded.info.k.bits, 4);
  EXPECT_EQ(coded.info.k.codes_dtype, WEFT_U8);
  EXPECT_EQ(coded.info.k.passthrough, 0);
  EXPECT_EQ(plain.info.v.passthrough, 1);
  EXPECT_EQ(plain.info.v.bits, 16);
  EXPECT_EQ(plain.info.v.codes_dtype, WEFT_F16);
  EXPECT_EQ(plain.info.v.gains, 0);

  weft_status status = sized<weft_status>();
  weft_kv_recipe_info older = sized<weft_kv_recipe_info>();
  older.struct_size = offsetof(weft_kv_recipe_info, bytes_per_token);
  older.bytes_per_token = -7;
  EXPECT_EQ(weft_kv_recipe_describe(coded.recipe, &older, &status), WEFT_OK) << status.message;
  EXPECT_EQ(older.k.bits, 4);
  EXPECT_EQ(older.bytes_per_token, -7);
  EXPECT_EQ(weft_kv_recipe_describe(nullptr, &older, &status), WEFT_INVALID_ARGUMENT);
}

TEST(CAbi, RecipesNameTheFastestArrangement) {
  weft_status status = sized<weft_status>();
  for (const char* name : {"4v4", "f32"}) {
    const CCache cache(name);
    int32_t layout = -1, order = -1;
    ASSERT_EQ(weft_kv_recipe_arrangement(cache.recipe, nullptr, &layout, &order, &status), WEFT_OK) << status.message;
    const auto [wanted, wanted_order] = fastest_arrangement(kv_recipe(name, 64, 64, 3), Backend::cpu);
    EXPECT_EQ(layout, static_cast<int32_t>(wanted));
    EXPECT_EQ(order, static_cast<int32_t>(wanted_order));
    EXPECT_EQ(weft_kv_recipe_arrangement(cache.recipe, nullptr, &layout, nullptr, &status), WEFT_INVALID_ARGUMENT);
    EXPECT_STREQ(status.message, "kv_recipe_arrangement: tile_order is null");
  }
}

TEST(CAbi, RecipeErrors) {
  weft_status status = sized<weft_status>();
  weft_kv_recipe* recipe = nullptr;
  weft_kv_recipe_args args = sized<weft_kv_recipe_args>();
  EXPECT_EQ(weft_kv_recipe_create(&args, &recipe, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(status.argument, "name");
  args.name = "nonsense";
  args.k_head_dim = args.v_head_dim = 64;
  EXPECT_EQ(weft_kv_recipe_create(&args, &recipe, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(status.message).find("nonsense"), std::string::npos) << status.message;
  args.name = "4v4";
  std::vector<float> mean(3 * 8);
  args.k_mean = view(mean, {3, 8});
  EXPECT_EQ(weft_kv_recipe_create(&args, &recipe, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(status.argument, "k");
  EXPECT_NE(std::string(status.message).find("mean"), std::string::npos) << status.message;
  EXPECT_EQ(recipe, nullptr);
}

TEST(CAbi, EncodeDecodeRepackAttend) {
  const int64_t t = 5, hk = CCache::kHeads, hq = 4, d = 64;
  std::vector<float> k = random_values(t * hk * d, 1), v = random_values(t * hk * d, 2), q = random_values(hq * d, 3);
  std::vector<int32_t> positions{0, 1, 2, 3, 4};
  const weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();
  CCache from("4v4"), to("4v4");

  weft_kv_encode_args encode = sized<weft_kv_encode_args>();
  encode.k = view(k, {t, hk, d});
  encode.v = view(v, {t, hk, d});
  encode.positions = view(positions, {t});
  encode.sequences.count = 1;
  encode.cache = from.cache;
  ASSERT_EQ(weft_kv_encode(&stream, &encode, nullptr, 0, &status), WEFT_OK) << status.message;

  weft_kv_repack_args repack = sized<weft_kv_repack_args>();
  repack.from = from.cache;
  repack.to = to.cache;
  ASSERT_EQ(weft_kv_repack(&stream, &repack, nullptr, 0, &status), WEFT_OK) << status.message;
  EXPECT_EQ(from.k_codes, to.k_codes);
  EXPECT_EQ(from.v_gains, to.v_gains);

  std::vector<float> k_back(k.size()), v_back(v.size());
  weft_kv_decode_args decode = sized<weft_kv_decode_args>();
  decode.cache = to.cache;
  decode.positions = encode.positions;
  decode.sequences.count = 1;
  decode.k = view(k_back, {t, hk, d});
  decode.v = view(v_back, {t, hk, d});
  ASSERT_EQ(weft_kv_decode(&stream, &decode, nullptr, 0, &status), WEFT_OK) << status.message;
  double error = 0, norm = 0;
  for (size_t i = 0; i < k.size(); ++i) {
    error += (k_back[i] - k[i]) * (k_back[i] - k[i]);
    norm += k[i] * k[i];
  }
  EXPECT_LT(error, 0.02 * norm);  // 4 bits of a Gaussian leave 0.95 %

  // The same attention through C over codes, and through C++ over the decoded rows in a passthrough cache.
  std::vector<float> o(hq * d), lse(hq), cpp_o(hq * d), cpp_lse(hq);
  weft_compressed_attention_args attend = sized<weft_compressed_attention_args>();
  attend.queries.q = view(q, {1, hq, d});
  attend.queries.sequences.count = 1;
  attend.cache = to.cache;
  attend.mask.has_window = 1;
  attend.mask.window = 3;
  attend.o = view(o, {1, hq, d});
  attend.lse = view(lse, {1, hq});
  ASSERT_EQ(weft_compressed_attention(&stream, &attend, nullptr, 0, &status), WEFT_OK) << status.message;

  const KvRecipe recipe = kv_recipe("4v4", d, d, 3);
  CompressedAttentionArgs args;
  args.queries.q = dense(q.data(), DType::f32, {1, hq, d});
  args.cache.k = {recipe.k, dense(to.k_codes.data(), DType::u8, {1, hk, CCache::kCapacity, code_bytes(recipe.k)}),
                  dense(to.k_gains.data(), recipe.k.gain_dtype, {1, hk, CCache::kCapacity, d / recipe.k.gain_group})};
  args.cache.v = {recipe.v, dense(to.v_codes.data(), DType::u8, {1, hk, CCache::kCapacity, code_bytes(recipe.v)}),
                  dense(to.v_gains.data(), recipe.v.gain_dtype, {1, hk, CCache::kCapacity, d / recipe.v.gain_group})};
  args.cache.lengths = dense(to.lengths.data(), DType::i32, {1});
  args.mask.window = 3;
  args.o = dense(cpp_o.data(), DType::f32, {1, hq, d});
  args.lse = dense(cpp_lse.data(), DType::f32, {1, hq});
  compressed_attention(kReference, args);
  EXPECT_EQ(o, cpp_o);
  EXPECT_EQ(lse, cpp_lse);

  attend.mask.not_causal = 2;
  EXPECT_EQ(weft_compressed_attention(&stream, &attend, nullptr, 0, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(status.argument, "mask.not_causal");
}

TEST(CAbi, MergeOfOneBlockDividesByItsWeight) {
  CCache plain("f32");
  const int64_t d = 64;
  std::vector<float> o_part(d, 6.0f), m{0.0f}, l{2.0f}, o(d), lse(1);
  const weft_stream stream = reference_stream();
  weft_status status = sized<weft_status>();
  weft_attention_merge_args merge = sized<weft_attention_merge_args>();
  merge.partials.count = 1;
  merge.partials.o = view(o_part, {1, 1, 1, d});
  merge.partials.m = view(m, {1, 1, 1});
  merge.partials.l = view(l, {1, 1, 1});
  merge.kv_heads = 1;
  merge.o = view(o, {1, 1, d});
  merge.lse = view(lse, {1, 1});
  EXPECT_EQ(weft_attention_merge(&stream, &merge, nullptr, 0, &status), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(status.argument, "recipe");
  merge.recipe = plain.recipe;
  ASSERT_EQ(weft_attention_merge(&stream, &merge, nullptr, 0, &status), WEFT_OK) << status.message;
  for (float x : o) EXPECT_EQ(x, 3.0f);
  EXPECT_FLOAT_EQ(lse[0], 0.69314718f);
}

}  // namespace
}  // namespace weft
