// A language model that writes to the terminal as it goes: load, encode, generate with a callback.
#include <weft/generate.h>

#include <cstdio>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  try {
    const weft::Model model = weft::Model::load(argc > 1 ? argv[1] : "models/weft-11m");
    const std::string prompt = argc > 2 ? argv[2] : "The old house stood";
    std::printf("%s\n\n%s", model.summary().c_str(), prompt.c_str());

    weft::GenerateOptions options = weft::suggested_options(model);
    options.max_tokens = 80;
    options.sentence_after = 30;  // and then to the end of the sentence
    options.sampling.seed = 1;
    const weft::Generator generator(model, options);

    weft::HybridState state = model.create_state("8v4", 4096);
    std::vector<int32_t> tokens = model.encode(prompt);
    std::string streamed;
    const weft::Generation done = generator.run(state, tokens, [&](const weft::GeneratedToken& next) {
      std::printf("%.*s", static_cast<int>(next.text.size()), next.text.data());
      std::fflush(stdout);
      streamed += next.text;
      return true;  // false would stop
    });
    std::printf("\n\n%zu tokens, %.0f tokens/s, stopped by %s\n", done.tokens.size(), done.decode.rate(),
                weft::stop_reason_name(done.stop));
    return streamed == done.text ? 0 : 1;
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
