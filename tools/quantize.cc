// `weft quantize`: writes a model as a GGUF file.
#include "weft/quantize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/command.h"
#include "tools/interrupt.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/model_path.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct QuantizeFlags {
  std::string directory, file, weights = "q8_0";
  int threads = 0;
  JsonOutput output;
};

int run_quantize(const QuantizeFlags& flags) {
  flags.output.check_writable({flags.file});
  const Interrupt interrupt;
  QuantizeOptions options;
  options.weights = flags.weights;
  options.threads = flags.threads;
  constexpr int64_t kSteps = 1000;
  Progress progress(kSteps);
  options.on_progress = [&](int64_t done, int64_t all) {
    progress.show(static_cast<size_t>(done * kSteps / all), fmt::format("{} of {}", bytes_text(done), bytes_text(all)));
    return !Interrupt::asked();
  };
  check_model_path(flags.directory);
  if (std::filesystem::is_regular_file(flags.directory))
    throw std::runtime_error(flags.directory + ": is a GGUF file, wanted a folder with config.json and *.safetensors");
  const QuantizeResult result = quantize(flags.directory, flags.file, options);
  progress.clear();
  for (const std::string& warning : result.warnings) tell("weft: warning: {}\n", warning);
  if (result.stopped) {
    tell("weft: stopped; {} is as it was\n", flags.file);
    return Interrupt::exit_status();
  }
  if (flags.output.json) {
    flags.output.write(Json{{"schema", kSchema},
                            {"weights", flags.weights},
                            {"tensors", result.tensors},
                            {"bytes_before", result.bytes_before},
                            {"bytes_after", result.bytes_after}});
    return kOk;
  }
  show("{}: {} tensors, {} (the checkpoint has {})\n", flags.file, result.tensors, bytes_text(result.bytes_after),
       bytes_text(result.bytes_before));
  return kOk;
}

}  // namespace

void add_quantize(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("quantize", "Write a model as a GGUF file with weights of fewer bits");
  auto flags = std::make_shared<QuantizeFlags>();
  command->add_option("directory", flags->directory, "Folder of a model (config.json, safetensors, tokenizer.json)")->required();
  command->add_option("file", flags->file, "The GGUF file; one of that name is replaced when all is written")->required();
  command
      ->add_option("--weights", flags->weights,
                   fmt::format("Type of the matrices of layers: {}", fmt::join(quantize_types(), ", ")))
      ->capture_default_str()
      ->check(one_of(quantize_types()));
  add_threads_option(*command, flags->threads, "Worker threads");
  flags->output.add_options(*command);
  command->footer(
      "Norms, convolutions, decay rates, biases and gates of shared experts are F32. Gates of delta layers and routers keep the\n"
      "type of the checkpoint. The embedding and the head are Q8_0 where --weights has fewer than 8 bits, keep the type of the\n"
      "checkpoint with q8_0, and get the type of --weights where that is a float.\n"
      "Examples:\n"
      "  weft quantize models/weft-11m weft-11m.gguf --weights q8_0\n"
      "  weft generate --model weft-11m.gguf --prompt 'The ship'");
  command->callback([flags, &exit] { exit = run_quantize(*flags); });
}

}  // namespace weft::tools
