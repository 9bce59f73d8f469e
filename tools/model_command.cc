// What the subcommands that run a model share: see model_command.h.
#include "tools/model_command.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <filesystem>

#include "tools/host_memory.h"
#include "tools/model_path.h"
#include "tools/terminal.h"
#include "tools/text_file.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBundled = "models/weft-11m";
constexpr const char* kBest = "best";

Backend best_backend() {
  for (const DeviceInfo& device : devices(Backend::cuda))
    if (device.usable) return Backend::cuda;
  return Backend::cpu;
}

// "--kv: 'q4_0' is not a recipe for heads of size 128, wanted …": without the names of functions, and the value once.
std::string kv_sentence(const std::string& option, std::string text) {
  constexpr std::string_view kPolicy = "kv policy: ", kRecipe = ": kv_recipe: name is ";
  if (text.starts_with(kPolicy)) text.erase(0, kPolicy.size());
  const size_t recipe = text.find(kRecipe), quote = text.find('\'');
  if (recipe == std::string::npos || quote == std::string::npos) return option + ": " + text;
  const size_t wanted = text.find(", wanted ", recipe);
  text.erase(recipe, wanted == std::string::npos ? wanted : wanted - recipe);
  // Names of other programs, such as q4_0 or fp8, hold the number of bits.
  const size_t digit = text.find_first_of("2345678", quote), end = text.find('\'', quote + 1);
  const std::string bits = digit < end ? std::string(1, text[digit]) : "";
  const bool f16 = text.substr(quote, end - quote).find("16") != std::string::npos;
  if (f16 || !bits.empty()) text += fmt::format("; did you mean {}?", f16 ? "f16" : bits + "v" + bits);
  return option + ": " + text;
}

}  // namespace

void ModelFlags::add_model_option(CLI::App& command, std::string& model, const std::string& what) {
  command.add_option("-m,--model", model, "A model: a folder" + what + " or a GGUF file; default: the bundled model")
      ->check(file_name());
}

void ModelFlags::add_options(CLI::App& command, bool with_kv) {
  add_model_option(command, model, " (config.json, safetensors, tokenizer.json)");
  if (with_kv)
    command
        .add_option(
            "--kv", kv,
            "Format of cached keys and values: f16, 8v8, 8v4, 4v4, ... (bits of keys v bits of values), with exceptions for "
            "attention layers: 8v4,0-1:f16")
        ->capture_default_str();
  command
      .add_option("--memory", memory,
                  "Most memory that the command may take (500M, 8G), mapped weights not counted; default: what is available. With "
                  "--backend cuda: memory of the device")
      ->transform(byte_count())
      ->each([](const std::string& bytes) { limit_memory(std::stoll(bytes)); });
  add_threads_option(command, threads, "Worker threads");
  add_isa_option(command, isa);
  std::vector<std::string> backends = backend_names();
  std::erase(backends, backend_name(Backend::vulkan));  // which offers ops, no models yet
  backends.emplace_back(kBest);
  command
      .add_option("--backend", backend,
                  "Backend: cpu; cuda, a GPU; best, cuda where weft devices finds it usable and else cpu; reference, the mixers as "
                  "their specification computes them")
      ->capture_default_str()
      ->check(one_of(backends));
  command.add_flag("--exact", exact,
                   "With --backend cuda: dense layers and delta rule as exact as in f32. Large GEMMs then take twice the time, "
                   "prompts three to six times the time. The cpu is always that exact");
}

std::string ModelFlags::directory() const {
  if (!model.empty()) {
    check_model_path(model);
    return model;
  }
  std::error_code ignored;
  const fs::path self = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  // Beside the build directory, where `cmake --install` puts it, or in the current directory.
  for (const fs::path& candidate : {self / ".." / kBundled, self / ".." / "share" / "weft" / kBundled, fs::path(kBundled)})
    if (fs::exists(candidate / "config.json", ignored)) return candidate.lexically_normal().string();
  throw UsageError(fmt::format("the bundled model ({}) was not found; name one with --model", kBundled));
}

ModelOptions ModelFlags::options() const {
  ModelOptions chosen;
  chosen.exact = exact;
  chosen.most_copied_bytes = available_memory().value_or(INT64_MAX);
  return chosen;
}

Model ModelFlags::load() const {
  Model loaded = Model::load(directory(), options());
  for (const std::string& warning : loaded.warnings()) tell("weft: warning: {}\n", warning);
  return loaded;
}

ChatTemplate ModelFlags::chat_template(const std::string& file) const {
  constexpr uint64_t kMostBytes = 1 << 20;  // parse() wants less
  if (!file.empty()) return ChatTemplate::parse(read_text_file(file, kMostBytes), file);
  std::optional<ChatTemplate> found = ChatTemplate::load(directory());
  return found ? *std::move(found) : ChatTemplate::plain();
}

Stream ModelFlags::stream() const {
  if (exact && backend != backend_name(Backend::cuda) && backend != kBest)
    throw UsageError(fmt::format("--exact does nothing with --backend {}, which is always that exact; use it with cuda", backend));
  if (isa != isa_name(Isa::best) && backend != backend_name(Backend::cpu) && backend != kBest)
    throw UsageError(fmt::format("--isa does nothing with --backend {}; use it with cpu", backend));
  Selection selection;
  selection.backends = {backend == kBest ? backend_name(best_backend()) : backend};
  selection.threads = threads;
  selection.isa = isa;
  Stream stream = selection.streams(true).front();
  stream.threads = threads;  // set for backend reference, too: dense layers run on the cpu
  return stream;
}

HybridPlan plan_memory(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences,
                       const std::string& option) {
  try {
    return model.plan(kv, capacity, sequences, stream);
  } catch (const Error& error) {
    if (error.status().op == "kv policy") throw UsageError(kv_sentence(option, error.what()));
    if (error.status().op == kHybridStateOp && error.status().argument == "plan") throw UsageError(error.what());  // 2^60 bytes
    throw;
  }
}

std::vector<std::string> kv_policies(const Model& model, const Stream& stream, const std::string& kv,
                                     const std::vector<std::string>& compare) {
  if (compare.empty()) {
    plan_memory(model, stream, kv, 1);
    return {kv};
  }
  for (const std::string& policy : compare) plan_memory(model, stream, policy, 1, 1, "--compare (formats between spaces)");
  return compare;
}

void check_memory(const Model& model, const Stream& stream, const HybridPlan& plan, const MemoryNeed& need) {
  if (stream.backend == Backend::cuda) {
    if (model.on_device(stream)) return;  // the weights are already part of the used memory
    const int64_t wanted = model.bytes(stream, plan, plan.capacity, need.prompt).total();
    const GpuMemory memory = gpu_memory(stream.device);
    if (const auto limit = memory_limit(); limit && wanted > *limit)
      throw std::runtime_error(fmt::format("the model and its state want {} of device memory, and --memory allows {}; lower {}",
                                           bytes_text(wanted), bytes_text(*limit), need.lower));
    if (wanted > memory.free)
      throw std::runtime_error(fmt::format(
          "device {} has {} free of {}, the model and its state want {}; lower {} (weft plan --backend cuda shows more)",
          stream.device, bytes_text(memory.free), bytes_text(memory.total), bytes_text(wanted), need.lower));
    return;
  }
  const std::optional<int64_t> available = available_memory();
  if (!available) return;
  // Counting the scratch takes memory that grows with the state, so it is not counted for a state that is far too large.
  int64_t wanted = hybrid_bytes(plan, need.tokens).total() - need.held;
  if (wanted <= *available) wanted += model.bytes(stream, plan, need.tokens, need.prompt).scratch;
  if (wanted > *available)
    throw std::runtime_error(fmt::format(
        "state and scratch want {} of memory beside the weights, and {} are available{}; lower {} (weft plan shows more)",
        bytes_text(wanted), bytes_text(*available),
        memory_limit() ? fmt::format(" (--memory {})", bytes_text(*memory_limit())) : "", need.lower));
}

std::optional<int64_t> memory_for(const Stream& stream) {
  if (stream.backend != Backend::cuda) return available_memory();
  for (const DeviceInfo& device : devices(Backend::cuda))
    if (device.device == stream.device && device.usable) return gpu_memory(stream.device).free;
  return std::nullopt;
}

std::string memory_text(const Model& model, const Stream& stream, const std::string& kv) {
  const HybridPlan plan = plan_memory(model, stream, kv, 1);
  const HybridBytes state = hybrid_bytes(plan, 0);
  const bool device = stream.backend == Backend::cuda;
  std::string text =
      fmt::format("memory: weights {} ({}), state {} + {} per token", bytes_text(model.weight_bytes(stream)),
                  device ? "on the device" : "mapped", bytes_text(state.total()), bytes_text(kv_bytes_per_token(plan)));
  if (const auto available = memory_for(stream)) text += fmt::format("; {} available", bytes_text(*available));
  return text;
}

StateLockOptions wait_for_state(const std::string& file, double seconds, std::function<bool()> proceed) {
  StateLockOptions options;
  options.wait = seconds;
  options.on_wait = [file](int64_t process) {
    tell("weft: waiting for {}, which holds {}\n", process > 0 ? fmt::format("process {}", process) : "another process", file);
  };
  options.proceed = std::move(proceed);
  return options;
}

HybridState make_state(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences,
                       int64_t rollback, const MemoryNeed& need) {
  HybridPlan plan = plan_memory(model, stream, kv, capacity, sequences);
  plan.rollback = rollback;
  check_memory(model, stream, plan, need);
  return HybridState::create(std::move(plan));
}

int64_t f16_bytes_per_token(const Model& model) { return kv_bytes_per_token(model.plan("f16", 1)); }

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

std::string where_text(const Stream& stream) {
  for (const DeviceInfo& device : devices(stream.backend))
    if (device.device == stream.device && device.name != backend_name(stream.backend))
      return fmt::format("on {} ({})", backend_name(stream.backend), device.name);
  return fmt::format("on {}", backend_name(stream.backend));
}

std::string peak_text(const Stream& stream) {
  const std::string host = "peak memory " + bytes_text(peak_memory_bytes());
  return stream.backend == Backend::cuda ? host + ", of the device " + bytes_text(gpu_memory(stream.device).peak) : host;
}

std::string bytes_text(int64_t bytes) {
  const char* units[] = {"bytes", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(units)) value /= 1000, ++unit;
  return unit == 0 ? fmt::format("{} bytes", bytes)
                   : fmt::format("{:.{}f} {}", value,
                                 value < 10    ? 2
                                 : value < 100 ? 1
                                               : 0,
                                 units[unit]);
}

std::string times_text(const Stream& stream, const ModelTimes& times, double seconds) {
  if (stream.backend == Backend::cuda) {
    std::string text = fmt::format(": {} of {} steps replayed", times.replayed, times.steps);
    if (times.failed_captures > 0) text += fmt::format(", {} not captured ({})", times.failed_captures, times.why);
    return text;
  }
  const auto share = [&](double part) { return seconds > 0 ? 100 * part / seconds : 0; };
  return fmt::format(": dense layers {:.0f} %, mixers {:.0f} %, the rest {:.0f} %", share(times.dense), share(times.mixers),
                     share(seconds - times.dense - times.mixers));
}

}  // namespace weft::tools
