// A hybrid language model in a few lines: load, prefill, decode, sample.
#include <weft/model.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  try {
    const weft::Model model = weft::Model::load(argc > 1 ? argv[1] : "models/weft-11m");
    std::printf("%s\n", model.summary().c_str());
    const char* prompt = argc > 2 ? argv[2] : "The old house stood";
    std::vector<int32_t> text = model.encode(prompt);

    weft::HybridState state = model.create_state("8v4", 4096);
    weft::Sampler sampler({.temperature = 0.8, .top_p = 0.95, .seed = 1});
    std::vector<float> logits(static_cast<size_t>(model.vocab_size()));
    model.append({}, state, {{.tokens = text, .logits = logits.data()}});
    for (int i = 0; i < 40; ++i) {
      text.push_back(sampler(logits));
      if (model.ends(text.back())) break;
      model.append({}, state, {{.tokens = {&text.back(), 1}, .logits = logits.data()}});
    }
    std::printf("%s\n", model.decode(text).c_str());
    return model.decode(text).rfind(prompt, 0) == 0 ? 0 : 1;
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
