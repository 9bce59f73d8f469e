// The golden models: a checkpoint, the logits that transformers gives for its prompts, and distances from those logits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "model/parts.h"

namespace weft::testing_support {

inline std::filesystem::path golden_models() { return std::filesystem::path(WEFT_SOURCE_DIR) / "cases/golden/models"; }
inline std::filesystem::path shipped_model() { return std::filesystem::path(WEFT_SOURCE_DIR) / "models/weft-11m"; }

// The tensors of a file of expected values.
class Expected {
 public:
  explicit Expected(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    file_ = files::parse_safetensors(bytes_, path.string());
  }
  template <class T>
  std::vector<T> get(const std::string& name) const {
    const files::SafeTensor& t = file_.tensors.at(name);
    std::vector<T> values(t.bytes.size() / sizeof(T));
    std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
    return values;
  }

 private:
  std::vector<uint8_t> bytes_;
  files::SafeTensors file_;
};

// Largest and root-mean-square difference.
struct Distance {
  double max = 0, rms = 0;
};
inline Distance distance(const std::vector<float>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  Distance d;
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) {
    const double e = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    d.max = std::isnan(e) ? INFINITY : std::max(d.max, e);
    d.rms += e * e;
  }
  d.rms = std::sqrt(d.rms / static_cast<double>(std::max<size_t>(1, want.size())));
  return d;
}

// Bounds of parity with transformers, at logits of standard deviation 1. Both sides compute in f32, so only rounding differs.
inline constexpr double kMaxLogitError = 2e-4, kRmsLogitError = 2e-5;

// A golden checkpoint with its prompts. A test may change config and weights; `logits` uses the changed ones.
struct GoldenModel {
  explicit GoldenModel(const std::string& name) : GoldenModel(name, golden_models() / name) {}
  // The prompts and logits of a golden checkpoint with the weights of another file or folder.
  GoldenModel(const std::string& name, const std::filesystem::path& model)
      : loaded(Model::load(model)),
        config(model::parts_of(loaded).config),
        weights(model::parts_of(loaded).weights),
        expected(golden_models() / name / "expected.safetensors"),
        tokens(expected.get<int32_t>("tokens")),
        starts(expected.get<int32_t>("cu_seqlens")),
        want(expected.get<float>("logits")) {}

  Model loaded;
  model::ModelConfig config;
  model::Weights weights;
  Expected expected;
  std::vector<int32_t> tokens, starts;
  std::vector<float> want;                                // [T, vocab]
  Stream stream{Backend::cpu, 0, nullptr, 1, Isa::best};  // one thread: tests share their machine

  int64_t prompts() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t begin(int64_t n) const { return starts[static_cast<size_t>(n)]; }
  int64_t end(int64_t n) const { return starts[static_cast<size_t>(n) + 1]; }

  // Tokens [first, last) of the packed prompts as an input of sequence n; their logits go to rows [first, last) of `logits`.
  ModelInput input(int64_t n, int64_t first, int64_t last, std::vector<float>& logits) const {
    return {n, std::span(tokens).subspan(static_cast<size_t>(first), static_cast<size_t>(last - first)),
            logits.data() + first * config.vocab_size, true};
  }
  void append(HybridState& state, std::vector<ModelInput> inputs, const model::Observer& observer = {}) const {
    model::Workspace memory;
    model::append_tokens(config, weights, *model::cpu_compute(stream), memory, state, inputs, nullptr, observer);
  }
  // Logits of all prompts, one prompt at a time. Each prompt is cut into several appends at the positions `cuts`, counted from its
  // start.
  std::vector<float> logits(const std::vector<int64_t>& cuts = {}, const std::string& kv = "f32") const {
    std::vector<float> out(want.size());
    HybridState state = loaded.create_state(kv, 4096);
    for (int64_t n = 0; n < prompts(); ++n) {
      state.reset(0);
      int64_t at = begin(n);
      for (int64_t cut : cuts)
        if (begin(n) + cut > at && begin(n) + cut < end(n)) {
          append(state, {input(0, at, begin(n) + cut, out)});
          at = begin(n) + cut;
        }
      append(state, {input(0, at, end(n), out)});
    }
    return out;
  }
};

// A golden model loaded once, for tests of states rather than of results.
inline const Model& one_golden_model() {
  static const Model loaded = Model::load(golden_models() / "qwen3_5");
  return loaded;
}
inline std::vector<int32_t> some_ids(size_t count, size_t salt = 0) {
  std::vector<int32_t> out;
  for (size_t i = 0; i < count; ++i)
    out.push_back(static_cast<int32_t>((i * 7919 + salt) % static_cast<size_t>(one_golden_model().vocab_size())));
  return out;
}

}  // namespace weft::testing_support
