// The bundled model: logits and losses of transformers, windows of perplexity, planned bytes, refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "model/network/cpu/activations.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"
#include "weft/perplexity.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

// One thread: results do not depend on the number, and tests share their machine.
constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};

const Model& shipped() {
  static const Model model = Model::load(shipped_model());
  return model;
}
const Expected& golden() {
  static const Expected expected(golden_models() / "weft-11m.safetensors");
  return expected;
}
std::vector<int32_t> tokens(size_t count) {
  std::vector<int32_t> all = golden().get<int32_t>("tokens");
  all.resize(count);
  return all;
}

TEST(Shipped, TokensOfTheExcerpt) {
  std::ifstream in(shipped_model() / "valid-excerpt.txt");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<int32_t> ids = shipped().encode(text);
  EXPECT_EQ(shipped().decode(ids), text);
  ids.resize(2048);
  EXPECT_EQ(ids, tokens(2048));
}

TEST(Shipped, LogitsOfTransformers) {
  constexpr size_t kRows = 200, kEvery = 61, kTop = 8;
  const std::vector<int32_t> ids = tokens(kRows);
  const auto vocab = static_cast<size_t>(shipped().vocab_size());
  std::vector<float> logits(kRows * vocab);
  HybridState state = shipped().create_state("f32", 4096);
  shipped().append(kOneThread, state, {{.tokens = ids, .logits = logits.data(), .every_token = true}});

  std::vector<float> sampled, top;
  const auto top_ids = golden().get<int32_t>("top_ids");
  for (size_t t = 0; t < kRows; ++t) {
    for (size_t c = 0; c < vocab; c += kEvery) sampled.push_back(logits[t * vocab + c]);
    for (size_t i = 0; i < kTop; ++i) top.push_back(logits[t * vocab + static_cast<size_t>(top_ids[t * kTop + i])]);
  }
  // The tolerances are for logits of standard deviation 1; these have 2.4.
  EXPECT_LE(distance(sampled, golden().get<float>("logits")).max, 2.4 * kMaxLogitError);
  EXPECT_LE(distance(sampled, golden().get<float>("logits")).rms, 2.4 * kRmsLogitError);
  EXPECT_LE(distance(top, golden().get<float>("top_logits")).max, 2.4 * kMaxLogitError);
  std::vector<float> sums;
  for (size_t t = 0; t < kRows; ++t)
    sums.push_back(static_cast<float>(model::log_sum_exp(kOneThread, logits.data() + t * vocab, static_cast<int64_t>(vocab))));
  EXPECT_LE(distance(sums, golden().get<float>("log_sum_exp")).max, 2.4 * kMaxLogitError);
}

TEST(Shipped, PerplexityOfTransformers) {
  const std::vector<int32_t> ids = tokens(513);
  const auto losses = golden().get<float>("nll");
  double want = 0;
  for (size_t i = 0; i < 512; ++i) want += static_cast<double>(losses[i]) / 512;
  double before = want;
  for (const char* kv : {"f16", "8v4", "2v2"}) {
    HybridState state = shipped().create_state(kv, 2048);
    const Perplexity p = measure_perplexity(shipped(), kOneThread, state, ids, {2048, 2048});
    EXPECT_EQ(p.tokens, 512);
    EXPECT_EQ(p.fed, 512);
    if (kv == std::string("f16")) {
      EXPECT_NEAR(std::exp(p.nll) / std::exp(want), 1, 1e-3);
      EXPECT_NEAR(p.nll, want, 1e-4);
    }
    EXPECT_LT(p.nll, want + 0.2) << kv;
    EXPECT_GT(p.nll, before - 2e-3) << kv;  // fewer bits are better only by chance
    before = p.nll;
  }
}

TEST(Perplexity, WindowsAndStrides) {
  const std::vector<int32_t> ids = tokens(301);
  HybridState state = shipped().create_state("f32", 4096);
  const auto measure = [&](int64_t context, int64_t stride) {
    return measure_perplexity(shipped(), kOneThread, state, ids, {context, stride});
  };
  // By hand: each window alone, every token but the first predicted once.
  const auto by_hand = [&](int64_t context, int64_t stride) {
    const int64_t vocab = shipped().vocab_size();
    double sum = 0;
    int64_t done = 0;
    for (int64_t start = 0; done < 300; start += stride) {
      const int64_t end = std::min<int64_t>(300, start + context);
      std::vector<float> logits(static_cast<size_t>((end - start) * vocab));
      state.reset();
      shipped().append(kOneThread, state,
                       {{.tokens = std::span(ids).subspan(static_cast<size_t>(start), static_cast<size_t>(end - start)),
                         .logits = logits.data(),
                         .every_token = true}});
      for (int64_t t = std::max(start, done); t < end; ++t) {
        const float* row = logits.data() + (t - start) * vocab;
        sum += model::log_sum_exp(kOneThread, row, vocab) - static_cast<double>(row[ids[static_cast<size_t>(t + 1)]]);
      }
      done = end;
    }
    return sum / 300;
  };
  for (auto [context, stride] : {std::pair<int64_t, int64_t>{4096, 4096}, {100, 100}, {128, 50}}) {
    const Perplexity p = measure(context, stride);
    EXPECT_EQ(p.tokens, 300) << context << " " << stride;
    EXPECT_NEAR(p.nll, by_hand(context, stride), 2e-5) << context << " " << stride;  // windows may be split elsewhere
  }
  EXPECT_LT(measure(300, 300).nll, measure(10, 10).nll);
}

TEST(Perplexity, StopsWhenAsked) {
  const std::vector<int32_t> ids = tokens(301);
  HybridState state = shipped().create_state("f16", 4096);
  int calls = 0;
  const Perplexity p = measure_perplexity(shipped(), kOneThread, state, ids, {50, 50}, [&](int64_t done, int64_t all) {
    EXPECT_EQ(all, 300);
    EXPECT_EQ(done, 50 * (calls + 1));
    return ++calls < 3;
  });
  EXPECT_FALSE(p.complete);
  EXPECT_EQ(p.tokens, 150);
  EXPECT_NE(complaint([&] { measure_perplexity(shipped(), kOneThread, state, tokens(1), {50, 50}); }), "none");
  EXPECT_NE(complaint([&] { measure_perplexity(shipped(), kOneThread, state, ids, {50, 51}); }), "none");
  EXPECT_NE(complaint([&] { measure_perplexity(shipped(), kOneThread, state, ids, {0, 1}); }), "none");
}

TEST(Model, PlannedBytesAreWhatRunningTakes) {
  for (const char* kv : {"f16", "8v4"})
    for (int64_t context : {1, 600})
      for (int64_t batch : {1, 3}) {
        const HybridPlan plan = shipped().plan(kv, context, batch);
        const ModelBytes planned = shipped().bytes(kOneThread, plan, context);
        HybridState state = HybridState::create(plan);
        model::Workspace memory;
        const auto compute = model::cpu_compute(kOneThread);
        const auto& parts = model::parts_of(shipped());
        std::vector<float> logits(static_cast<size_t>(shipped().vocab_size() * batch));
        std::vector<int32_t> ids = tokens(static_cast<size_t>(context - 1));
        for (int64_t n = 0; n < batch; ++n) {
          const ModelInput prompt{n, ids, nullptr, false};
          model::append_tokens(parts.config, parts.weights, *compute, memory, state, {&prompt, 1}, nullptr);
        }
        std::vector<ModelInput> last;
        const int32_t one = 1;
        for (int64_t n = 0; n < batch; ++n) last.push_back({n, {&one, 1}, logits.data() + n * shipped().vocab_size(), false});
        model::append_tokens(parts.config, parts.weights, *compute, memory, state, last, nullptr);
        EXPECT_EQ(state.bytes().total(), planned.state.total()) << kv << " " << context << " " << batch;
        EXPECT_LE(memory.bytes(), planned.scratch) << kv << " " << context << " " << batch;
        EXPECT_GE(memory.bytes(), planned.scratch * 3 / 4) << kv << " " << context << " " << batch;
        EXPECT_EQ(planned.weights, parts.checkpoint.bytes() + parts.weights.copied_bytes);
      }
}

// Where the largest input is known, activations are planned for that size.
TEST(Model, PlannedBytesOfShortPromptsAreWhatRunningTakes) {
  struct Row {
    int64_t batch, prompt, context;
  };
  for (const Row& row : {Row{1, 40, 300}, {3, 100, 256}, {8, 20, 128}}) {
    const HybridPlan plan = shipped().plan("8v4", row.context, row.batch);
    const ModelBytes planned = shipped().bytes(kOneThread, plan, row.context, row.prompt);
    EXPECT_LT(planned.scratch, shipped().bytes(kOneThread, plan, row.context).scratch);
    HybridState state = HybridState::create(plan);
    model::Workspace memory;
    const auto compute = model::cpu_compute(kOneThread);
    const auto& parts = model::parts_of(shipped());
    std::vector<float> logits(static_cast<size_t>(shipped().vocab_size() * row.batch));
    const std::vector<int32_t> ids = tokens(static_cast<size_t>(row.prompt));
    for (int64_t done = 0, count = row.prompt; done < row.context; done += count) {
      count = std::min(count, row.context - done);
      std::vector<ModelInput> inputs;
      for (int64_t n = 0; n < row.batch; ++n)
        inputs.push_back({n, std::span(ids).first(static_cast<size_t>(count)), logits.data() + n * shipped().vocab_size(), false});
      model::append_tokens(parts.config, parts.weights, *compute, memory, state, inputs, nullptr);
    }
    EXPECT_LE(memory.bytes(), planned.scratch) << row.batch;
    EXPECT_GE(memory.bytes(), planned.scratch * 95 / 100) << row.batch;
  }
  EXPECT_EQ(complaint([&] { shipped().bytes(kOneThread, shipped().plan("8v4", 10), 10, 11); }),
            "model bytes: prompt is 11, wanted 0 to the context of 10");
  HybridPlan fewer = shipped().plan("8v4", 10), turned = fewer;
  fewer.layers.pop_back();
  std::reverse(turned.layers.begin(), turned.layers.end());
  for (const HybridPlan& plan : {fewer, turned})
    EXPECT_EQ(complaint([&] { shipped().bytes(kOneThread, plan, 10); }),
              "model bytes: plan was made for another model, wanted one of this model's create_state() or plan()");
}

TEST(Model, RefusesWithASentenceAndForgetsNothing) {
  HybridState state = shipped().create_state("8v4", 100, 2);
  const std::vector<int32_t> good = tokens(20), negative{1, -1}, beyond{1, 6144};
  shipped().append(kOneThread, state, {{.sequence = 0, .tokens = good}});
  const auto said = [&](std::vector<ModelInput> inputs) { return complaint([&] { shipped().append(kOneThread, state, inputs); }); };
  float logits = 0;
  EXPECT_EQ(said({{.sequence = 1, .tokens = negative}}), "model append: inputs hold token -1, wanted 0 to 6143");
  EXPECT_EQ(said({{.sequence = 1, .tokens = beyond}}), "model append: inputs hold token 6144, wanted 0 to 6143");
  EXPECT_EQ(said({{.sequence = 2, .tokens = good}}), "model append: inputs name sequence 2, the state holds 2");
  EXPECT_EQ(said({{.sequence = 1, .tokens = good}, {.sequence = 1, .tokens = good}}),
            "model append: inputs name sequence 1 twice, wanted once");
  EXPECT_EQ(said({{.sequence = 1, .tokens = {}, .logits = &logits}}),
            "model append: inputs want logits of sequence 1, but give it no tokens");
  const std::vector<int32_t> many = tokens(90);
  EXPECT_EQ(said({{.sequence = 1, .tokens = good}, {.sequence = 0, .tokens = many}}),
            "model append: inputs have 90 tokens for sequence 0, which has room for 80 of its capacity of 100");
  const auto streamed = [&](Stream stream) {
    return complaint([&] { shipped().append(stream, state, {{.sequence = 0, .tokens = good}}); });
  };
  EXPECT_EQ(streamed({.backend = Backend::cpu, .threads = -1}), "model append: stream has threads -1, wanted 0 or more");
  EXPECT_EQ(streamed({.backend = Backend::cpu, .device = 3}), "model append: stream has device 3, wanted 0 on backend cpu");
#ifdef __aarch64__
  const Isa absent = Isa::avx2;
#else
  const Isa absent = Isa::neon;
#endif
  EXPECT_EQ(streamed({.backend = Backend::cpu, .isa = absent}).rfind("model append: stream asks for isa", 0), 0u);
  EXPECT_EQ(state.tokens(0), 20);
  EXPECT_EQ(state.tokens(1), 0);
  const GoldenModel other("qwen3_5");
  HybridState foreign = other.loaded.create_state("f16", 100);
  EXPECT_EQ(complaint([&] { shipped().append({}, foreign, {{.tokens = good}}); }),
            "model append: state was made for another model, wanted one of this model's create_state() or plan()");
  HybridState pretended = HybridState::pretend(shipped().plan("8v4", 100));
  EXPECT_EQ(complaint([&] { shipped().append(kOneThread, pretended, {{.tokens = good}}); }),
            "model append: state is pretended and has no memory, wanted one of HybridState::create()");
  EXPECT_EQ(pretended.tokens(0), 0);
  EXPECT_NE(complaint([&] { other.loaded.encode("text"); }).find("tokenizer.json is missing"), std::string::npos);
  EXPECT_EQ(said({}), "none");
  EXPECT_EQ(said({{.sequence = 1, .tokens = {}}}), "none");
}

// A dangling link is an error, unlike a missing file.
TEST(Model, ATokenizerThatCannotBeOpenedIsRefused) {
  namespace fs = std::filesystem;
  const Folder folder;
  for (const auto& entry : fs::directory_iterator(golden_models() / "qwen3_5")) fs::copy(entry.path(), folder.path());
  const fs::path file = folder.path() / "tokenizer.json";
  EXPECT_EQ(complaint([&] { Model::load(folder.path()); }), "none");
  fs::create_symlink("tokenizer.json", file);
  EXPECT_EQ(complaint([&] { Model::load(folder.path()); }),
            file.string() + ": cannot be opened: Too many levels of symbolic links");
  fs::remove(file);
  fs::create_symlink("missing.json", file);
  EXPECT_EQ(complaint([&] { Model::load(folder.path()); }), file.string() + ": cannot be opened: No such file or directory");
}

// One model, several states, and more threads than runners that a model keeps.
TEST(Model, ServesSeveralThreadsAtOnce) {
  const auto run = [](std::vector<float>& logits) {
    const std::vector<int32_t> ids = tokens(120);
    logits.resize(static_cast<size_t>(shipped().vocab_size()));
    HybridState state = shipped().create_state("8v4", 200);
    shipped().append(kOneThread, state, {{.tokens = ids, .logits = logits.data()}});
  };
  std::vector<std::vector<float>> results(Model::Parts::kMostIdle + 4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { run(result); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  EXPECT_LE(model::parts_of(shipped()).idle.size(), Model::Parts::kMostIdle);
}

}  // namespace
