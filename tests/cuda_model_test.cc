// The model runner on a GPU against the runner on the cpu: logits, greedy texts, perplexities, memory and refusals.
#include <gtest/gtest.h>

#include <iostream>
#include <numeric>
#include <thread>

#include "tests/support/complaint.h"
#include "tests/support/golden_model.h"
#include "tests/support/sequence_bits.h"
#include "weft/perplexity.h"
#include "weft/state_file.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

constexpr Stream kCpu{Backend::cpu, 0, nullptr, 0, Isa::best}, kCuda{Backend::cuda, 0, nullptr, 0, Isa::best};

bool has_device() {
  for (const DeviceInfo& device : devices())
    if (device.backend == Backend::cuda && device.usable) return true;
  return false;
}
#define WEFT_NEEDS_DEVICE() \
  if (!has_device()) GTEST_SKIP() << "NO CUDA DEVICE HERE: the runner on a GPU is not tested"

// Largest difference of a logit at a standard deviation of 1, with operands of 11 bits (f16).
constexpr double kMost = 2e-2;

const Model& shipped() {
  static const Model model = Model::load(shipped_model());
  return model;
}
std::vector<int32_t> tokens(size_t count) {
  std::vector<int32_t> all = Expected(golden_models() / "weft-11m.safetensors").get<int32_t>("tokens");
  all.resize(count);
  return all;
}

double deviation(const std::vector<float>& x) {
  const double n = static_cast<double>(x.size()), mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
  double squares = 0;
  for (float v : x) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / n);
}

// Logits of every token. The sequence is appended in pieces of the given lengths; the last length repeats.
std::vector<float> logits_of(const Model& model, const Stream& stream, const std::string& kv, std::span<const int32_t> ids,
                             const std::vector<size_t>& cuts) {
  const auto vocab = static_cast<size_t>(model.vocab_size());
  std::vector<float> out(ids.size() * vocab);
  HybridState state = model.create_state(kv, 4096, 1, stream);
  for (size_t at = 0, i = 0; at < ids.size(); ++i) {
    const size_t count = std::min(cuts[std::min(i, cuts.size() - 1)], ids.size() - at);
    model.append(stream, state, {{.tokens = ids.subspan(at, count), .logits = out.data() + at * vocab, .every_token = true}});
    at += count;
  }
  return out;
}

// Near a boundary of the codebook a small difference of a key or value changes its code. With exact products so few codes change
// that the bound holds.
TEST(CudaModel, ExactLogitsOfTheShippedModel) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(300);
  const Model exact = Model::load(shipped_model(), {.exact = true});
  for (const char* kv : {"f32", "f16", "8v4", "4v4"}) {
    const std::vector<float> want = logits_of(exact, kCpu, kv, ids, {300});
    const Distance d = distance(logits_of(exact, kCuda, kv, ids, {200, 1, 20, 1}), want);
    std::cout << "exact, kv " << kv << ": max " << d.max / deviation(want) << ", rms " << d.rms / deviation(want) << "\n";
    EXPECT_LE(d.max, (kv == std::string("f32") ? 1e-4 : kMost) * deviation(want)) << kv;
  }
}

TEST(CudaModel, LogitsOfTheShippedModel) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(700);
  for (const char* kv : {"f16", "8v4", "4v4"}) {
    const std::vector<float> want = logits_of(shipped(), kCpu, kv, ids, {700});
    const double unit = deviation(want);
    for (const std::vector<size_t>& cuts : {std::vector<size_t>{700}, {640, 1}, {64, 3, 20, 1, 200, 7, 1}}) {
      const Distance d = distance(logits_of(shipped(), kCuda, kv, ids, cuts), want);
      std::cout << "kv " << kv << ", " << cuts.size() << " cuts: max " << d.max / unit << ", rms " << d.rms / unit << "\n";
      // Prompts run the chunked delta rule with f16 operands, which changes some codes.
      const bool coded = kv != std::string("f16");
      EXPECT_LE(d.max, (coded ? 0.1 : 7e-3) * unit) << kv;
      EXPECT_LE(d.rms, (coded ? 5e-3 : 6e-4) * unit) << kv;
    }
  }
}

class CudaGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, CudaGolden, testing::Values("qwen3_next", "qwen3_5", "qwen3_5_moe"));

// Runs the prompts of a golden model as a ragged batch and as a mixed batch; calls check(logits, what) after each.
template <class Check>
void run_golden(const GoldenModel& golden, const Model& model, Check&& check) {
  std::vector<float> got(golden.want.size());
  HybridState state = model.create_state("f32", 4096, golden.prompts(), kCuda);
  std::vector<ModelInput> inputs;
  for (int64_t n = golden.prompts() - 1; n >= 0; --n) inputs.push_back(golden.input(n, golden.begin(n), golden.end(n), got));
  model.append(kCuda, state, inputs);
  check(got, "ragged batch");

  // In the first rounds some sequences prefill while others decode. Then all decode, in steps that repeat and are graph replays.
  state.reset();
  std::fill(got.begin(), got.end(), 0.0f);
  std::vector<int64_t> at;
  for (int64_t n = 0; n < golden.prompts(); ++n) at.push_back(golden.begin(n));
  const int64_t steps[] = {3, 1, 40, 2, 1, 17};
  for (size_t round = 0; round < 140; ++round) {
    inputs.clear();
    for (int64_t n = 0; n < golden.prompts(); ++n) {
      int64_t& from = at[static_cast<size_t>(n)];
      const int64_t count = round < 4 ? steps[(round + static_cast<size_t>(n)) % std::size(steps)] : 1;
      const int64_t to = std::min(golden.end(n), from + count);
      if (to > from) inputs.push_back(golden.input(n, from, to, got));
      from = to;
    }
    if (!inputs.empty()) model.append(kCuda, state, inputs);
  }
  check(got, "mixed batch");
}

// Exact products split each operand into two f16 halves and are as accurate as f32, so tokens go to the same experts as on the cpu.
// Steps of models this small use exact products by default.
TEST_P(CudaGolden, Logits) {
  WEFT_NEEDS_DEVICE();
  const GoldenModel golden(GetParam());
  const Model exact = Model::load(golden_models() / GetParam(), {.exact = true});
  for (const Model* model : {&exact, static_cast<const Model*>(&golden.loaded)})
    run_golden(golden, *model, [&](const std::vector<float>& got, const char* what) {
      const Distance d = distance(got, golden.want);
      std::cout << GetParam() << (model == &exact ? " exact, " : ", ") << what << ": max " << d.max << ", rms " << d.rms << "\n";
      EXPECT_LE(d.max, 5e-4) << what;
      EXPECT_LE(d.rms, 5e-5) << what;
    });
}

// Steps of many tokens use f16 operands even in this model. A token near the border between two experts may then go to the other
// expert, which changes the tokens behind it. Most tokens go to the same experts as on the cpu.
TEST(CudaModel, ExpertsWithHalfOperands) {
  WEFT_NEEDS_DEVICE();
  const GoldenModel golden("qwen3_5_moe");
  const model::ModelConfig& config = model::parts_of(golden.loaded).config;
  const auto vocab = static_cast<size_t>(golden.loaded.vocab_size());
  const int64_t exact = model::exact_tokens(config), count = exact + 500;
  ASSERT_GT(model::step_tokens(kCuda, config), count) << "one step";
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i * 31 + i * 7) % static_cast<int32_t>(vocab);
  const std::vector<float> want = logits_of(golden.loaded, kCpu, "f32", ids, {ids.size()}),
                           got = logits_of(golden.loaded, kCuda, "f32", ids, {ids.size()});
  std::vector<float> worst;  // largest difference of each token
  for (size_t i = 0; i < ids.size(); ++i) {
    float most = 0;
    for (size_t v = 0; v < vocab; ++v) {
      const float apart = std::abs(got[i * vocab + v] - want[i * vocab + v]);
      if (!(apart <= most)) most = apart;  // NaN included
    }
    ASSERT_TRUE(std::isfinite(most)) << "token " << i;
    worst.push_back(most / static_cast<float>(deviation(want)));
  }
  std::sort(worst.begin(), worst.end());
  std::cout << count << " tokens, largest difference of a logit: median " << worst[worst.size() / 2] << ", nine of ten "
            << worst[worst.size() * 9 / 10] << ", all " << worst.back() << "\n";
  EXPECT_GT(worst[worst.size() / 2], 0) << "operands are those of the cpu";
  EXPECT_LE(worst[worst.size() / 2], kMost);
}

// Greedy texts are equal until two tokens are nearer in probability than the error of the logits.
TEST(CudaModel, GreedyText) {
  WEFT_NEEDS_DEVICE();
  const auto vocab = static_cast<size_t>(shipped().vocab_size());
  for (const char* kv : {"f16", "8v4"}) {
    const std::vector<int32_t> prompt = tokens(100);
    HybridState there = shipped().create_state(kv, 400, 1, kCuda), here = shipped().create_state(kv, 400);
    std::vector<float> logits(vocab);
    std::vector<int32_t> next = prompt;
    int64_t compared = 0;
    for (; compared < 200; ++compared) {
      int32_t best = -1, same = -1;
      shipped().append(kCpu, here, {{.tokens = next, .logits = logits.data(), .best = &same}});
      shipped().append(kCuda, there, {{.tokens = next, .best = &best}});
      if (best != same) {
        EXPECT_LE(logits[static_cast<size_t>(same)] - logits[static_cast<size_t>(best)], 2 * kMost * deviation(logits)) << compared;
        break;
      }
      next = {best};
    }
    std::cout << "kv " << kv << ": " << compared << " tokens equal\n";
    EXPECT_GE(compared, 10);
  }
}

TEST(CudaModel, PerplexityOfEveryFormat) {
  WEFT_NEEDS_DEVICE();
  std::ifstream in(shipped_model() / "valid-excerpt.txt");
  const std::vector<int32_t> ids = shipped().encode(std::string{std::istreambuf_iterator<char>(in), {}});
  double f16_here = 0, f16_there = 0;
  for (const char* kv : {"f16", "8v8", "8v4", "4v4", "2v2"}) {
    const auto nll = [&](const Stream& stream) {
      HybridState state = shipped().create_state(kv, 2048, 1, stream);
      return measure_perplexity(shipped(), stream, state, ids, {2048, 2048}).nll;
    };
    const double here = nll(kCpu), there = nll(kCuda);
    if (kv == std::string("f16")) f16_here = here, f16_there = there;
    std::cout << kv << ": " << std::exp(here) << " on cpu, " << std::exp(there) << " on cuda\n";
    // At 2 bits neighbouring codes are far apart: the largest difference measured is 2.9e-4.
    EXPECT_NEAR(std::exp(there) / std::exp(here), 1, kv == std::string("2v2") ? 5e-4 : 2e-4) << kv;
    EXPECT_NEAR(there - f16_there, here - f16_here, 1e-3) << kv;
  }
}

// The same call gives the same bits, as a graph replay or not.
TEST(CudaModel, SameBits) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(300);
  const std::vector<float> once = logits_of(shipped(), kCuda, "8v4", ids, {200, 1});
  EXPECT_EQ(logits_of(shipped(), kCuda, "8v4", ids, {200, 1}), once);
}

// The memory used is the memory planned, within 5 %.
TEST(CudaModel, PlannedBytes) {
  WEFT_NEEDS_DEVICE();
  struct Run {
    const char* kv;
    int64_t batch, prompt, capacity;
  };
  for (const Run& run : {Run{"8v4", 1, 100, 4096}, {"f16", 4, 300, 2048}, {"4v4", 16, 64, 512}, {"8v4", 2, 700, 700}}) {
    const Model fresh = Model::load(shipped_model());
    const HybridPlan plan = fresh.plan(run.kv, run.capacity, run.batch, kCuda);
    const ModelBytes planned = fresh.bytes(kCuda, plan, run.capacity, run.prompt);
    const int64_t before = model::device_bytes();
    HybridState state = HybridState::create(plan);
    const std::vector<int32_t> ids = tokens(static_cast<size_t>(run.prompt));
    std::vector<int32_t> best(static_cast<size_t>(run.batch));
    const auto append = [&](size_t count) {
      std::vector<ModelInput> inputs;
      for (int64_t n = 0; n < run.batch; ++n)
        inputs.push_back({.sequence = n, .tokens = std::span(ids).first(count), .best = &best[static_cast<size_t>(n)]});
      fresh.append(kCuda, state, inputs);
    };
    append(ids.size());
    for (int i = 0; i < 3 && run.prompt < run.capacity; ++i) append(1);
    const auto used = static_cast<double>(model::device_bytes() - before), wanted = static_cast<double>(planned.total());
    std::cout << run.kv << ", " << run.batch << " prompts of " << run.prompt << ": planned " << wanted << ", used " << used << "\n";
    EXPECT_NEAR(used / wanted, 1, 0.05) << run.kv;
    EXPECT_EQ(state.bytes().total(), planned.state.total());
  }
}

// If a graph capture fails, the step still runs, and the next capture may succeed.
TEST(CudaModel, FailedCapturesAreRunWithoutAGraph) {
  WEFT_NEEDS_DEVICE();
  const Model::Parts& parts = model::parts_of(shipped());
  const auto compute = model::cuda_compute(kCuda, model::upload_weights(kCuda, parts.config, parts.weights, false), false);
  const model::Block block = model::Block::allocate(4096, Place::cuda);
  const Tensor x = dense(block.data(), DType::f32, {1, 256}, Place::cuda),
               y = dense(block.data() + 2048, DType::f32, {1, 256}, Place::cuda);
  const auto& weight = parts.weights.layers[0].mixer_norm;
  const std::vector<float> ones(256, 1.0f);
  int calls = 0;
  bool fails = false;
  const auto step = [&] {
    ++calls;
    compute->rms_norm(x, weight, 0, y);
    if (!fails) return;
    fails = false;
    model::Block::allocate(16, Place::cuda);  // not allowed while a graph is captured
  };
  model::StepKey key;
  const auto run = [&] {
    model::copy_bytes(x.data, ones.data(), 1024);
    compute->run(&key, step);
    std::vector<float> out(256);
    model::copy_bytes(out.data(), y.data, 1024);
    EXPECT_EQ(out, weight);
    const std::vector<float> none(256, 0.0f);
    model::copy_bytes(y.data, none.data(), 1024);
  };
  run();  // without a graph
  EXPECT_EQ(calls, 1);
  fails = true;
  run();  // the capture fails; then without a graph
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(compute->counts().failed_captures, 1);
  EXPECT_EQ(compute->counts().why, "model: memory is requested while a graph is captured, wanted before or after the capture");
  EXPECT_EQ(compute->counts().replayed, 0);
  run();  // captured
  EXPECT_EQ(calls, 4);
  run();  // replayed
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(compute->counts().replayed, 2);
  EXPECT_EQ(compute->counts().steps, 4);
}

// Threads with states of their own capture, replay and copy at the same time. Models and states are destroyed while work is in
// flight.
TEST(CudaModel, ThreadsSideBySide) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> prompt = tokens(100);
  const auto text = [&](bool copies) {
    const Model model = Model::load(shipped_model());
    ModelTimes times;
    HybridState state = model.create_state("8v4", 256, 2, kCuda);
    std::vector<int32_t> out, next = prompt;
    for (int i = 0; i < 40; ++i) {
      int32_t best = -1;
      model.append(kCuda, state, {{.tokens = next, .best = &best}}, &times);
      out.push_back(best);
      next = {best};
      if (copies) state.fork(0, 1);
    }
    EXPECT_EQ(times.steps, 40);
    EXPECT_EQ(times.failed_captures, 0) << times.why;
    EXPECT_GE(times.replayed, 36);
    model.append(kCuda, state, {{.tokens = prompt}});  // nothing synchronises with this step
    return out;
  };
  const std::vector<int32_t> want = text(false);
  std::vector<std::vector<int32_t>> got(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < got.size(); ++i) threads.emplace_back([&, i] { got[i] = text(i % 2 == 1); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : got) EXPECT_EQ(one, want);
}

// The state of a sequence as the bytes of a state file, which are the same for equal states.
std::string file_of(const HybridState& state, int64_t sequence, std::span<const int32_t> ids) {
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "cuda_model_test.bytes";
  shipped().save(file, state, sequence, ids, "8v4");
  std::ifstream in(file, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::filesystem::remove(file);
  return bytes;
}

// Fork, rollback and restore give the bytes of the sequence that they repeat, and the same logits for the next tokens.
TEST(CudaModel, ForkSnapshotAndRollback) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(140);
  const auto vocab = static_cast<size_t>(shipped().vocab_size());
  HybridPlan plan = shipped().plan("8v4", 256, 2, kCuda);
  plan.rollback = 8;
  HybridState state = HybridState::create(plan);
  const auto feed = [&](int64_t sequence, size_t first, size_t count) {
    std::vector<float> logits(vocab);
    shipped().append(kCuda, state,
                     {{.sequence = sequence, .tokens = std::span(ids).subspan(first, count), .logits = logits.data()}});
    return logits;
  };
  feed(0, 0, 80);
  state.fork(0, 1);
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(80)), file_of(state, 1, std::span(ids).first(80)));
  EXPECT_EQ(feed(0, 80, 1), feed(1, 80, 1));
  const std::string before = file_of(state, 1, std::span(ids).first(81));
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(81)), before);
  // Rollback of tokens appended one by one and several at a time, also where records of an earlier half are replayed.
  for (size_t i = 81; i < 85; ++i) feed(0, i, 1);
  state.rollback(kCuda, 0, 4);
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(81)), before);
  feed(0, 81, 5);
  state.rollback(kCuda, 0, 5);
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(81)), before);
  for (size_t i = 81; i < 125; ++i) EXPECT_EQ(feed(0, i, 1), feed(1, i, 1)) << i;
  feed(0, 125, 7);
  state.rollback(kCuda, 0, 7);
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(125)), file_of(state, 1, std::span(ids).first(125)));
  // Snapshot, then restore, also into the other sequence.
  const HybridSnapshot snapshot = state.snapshot(0);
  const std::string kept = file_of(state, 0, std::span(ids).first(125));
  const std::vector<float> want = feed(0, 125, 1);
  feed(0, 126, 10);
  state.restore(0, snapshot);
  state.restore(1, snapshot);
  EXPECT_EQ(file_of(state, 0, std::span(ids).first(125)), kept);
  EXPECT_EQ(feed(0, 125, 1), want);
  EXPECT_EQ(feed(1, 125, 1), want);
}

// A state saved on a device continues on the host, and the other way round. Saving it again gives the same bytes.
TEST(CudaModel, StateFilesMoveBetweenHostAndDevice) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(201);
  const std::span<const int32_t> prompt = std::span(ids).first(200), next = std::span(ids).subspan(200);
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "cuda_model_test.state";
  std::vector<float> want(static_cast<size_t>(shipped().vocab_size())), got = want;
  for (const auto& [from, to] : {std::pair{kCpu, kCuda}, {kCuda, kCpu}, {kCuda, kCuda}}) {
    HybridState first = shipped().create_state("8v4", 256, 1, from), second = shipped().create_state("8v4", 256, 1, to);
    shipped().append(from, first, {{.tokens = prompt}});
    shipped().save(file, first, 0, prompt, "8v4");
    EXPECT_EQ(shipped().restore(file, second, 0), std::vector<int32_t>(prompt.begin(), prompt.end()));
    EXPECT_EQ(bits_of(second, 0), bits_of(first, 0));
    EXPECT_EQ(file_of(second, 0, prompt), file_of(first, 0, prompt));
    shipped().append(from, first, {{.tokens = next, .logits = want.data()}});
    shipped().append(to, second, {{.tokens = next, .logits = got.data()}});
    const double most = from.backend == to.backend ? 0 : kMost * deviation(want);
    EXPECT_LE(distance(got, want).max, most);
  }
  std::filesystem::remove(file);
}

// A checkpoint of a sequence on the device is restored bit for bit, and a prompt continues from it.
TEST(CudaModel, PrefixStore) {
  WEFT_NEEDS_DEVICE();
  const std::vector<int32_t> ids = tokens(250);
  PrefixStore store({.bytes = 64 << 20, .every = 64});
  HybridState state = shipped().create_state("8v4", 256, 2, kCuda);
  std::vector<float> want(static_cast<size_t>(shipped().vocab_size())), got = want;
  EXPECT_EQ(shipped().prefill(kCuda, state, 0, ids, want.data(), store), 0);
  EXPECT_EQ(store.restore(state, 1, ids, 250), 250);
  EXPECT_EQ(file_of(state, 1, ids), file_of(state, 0, ids));
  EXPECT_EQ(shipped().prefill(kCuda, state, 1, ids, got.data(), store), 192);
  EXPECT_EQ(got, want);  // equal bits, as the prompt is cut into the same steps
}

TEST(CudaModel, RefusesWithASentence) {
  const std::vector<int32_t> ids = tokens(4);
  HybridState here = shipped().create_state("8v4", 100);
  if (!has_device()) {
    const std::string said = complaint([&] { shipped().create_state("8v4", 100, 1, kCuda); });
    EXPECT_TRUE(said.find("no device") != std::string::npos || said.find("on the cpu only") != std::string::npos) << said;
    EXPECT_NE(complaint([&] { shipped().append(kCuda, here, {{.tokens = ids}}); }), "none");
    EXPECT_NE(complaint([&] { shipped().bytes(kCuda, shipped().plan("8v4", 100, 1, kCuda), 100); }), "none");
    return;
  }
  EXPECT_EQ(complaint([&] { shipped().append(kCuda, here, {{.tokens = ids}}); }),
            "model append: state is on the host, wanted one on device 0 like the stream");
  HybridState there = shipped().create_state("8v4", 100, 1, kCuda);
  EXPECT_EQ(complaint([&] { shipped().append(kCpu, there, {{.tokens = ids}}); }),
            "model append: state is on device 0, wanted one on the host like the stream");
  const std::string said = complaint([&] { shipped().create_state("f32", 1 << 30, 64, kCuda); });
  EXPECT_NE(said.find("free of"), std::string::npos) << said;
}

}  // namespace
