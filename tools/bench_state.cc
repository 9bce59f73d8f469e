// `weft bench state`: times forks, rollbacks, state files and the prefix store of a whole model.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "tools/conditions.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct BenchStateFlags {
  ModelFlags model;
  int64_t tokens = 8192, long_tokens = 32768;
  std::string folder;  // empty: the system's folder for temporary files
  JsonOutput output;
};

template <class F>
double seconds(F&& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Median of `runs` times.
template <class F>
double median(int runs, F&& work) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) times.push_back(seconds(work));
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[static_cast<size_t>(runs / 2)];
}

template <size_t n>
double median(std::array<double, n>& times) {
  std::nth_element(times.begin(), times.begin() + n / 2, times.end());
  return times[n / 2];
}

// Writes bytes to a file and makes them durable, as a state file is written: a temporary file, fsync, rename, fsync of the folder.
void write_raw(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  const std::filesystem::path temporary = path.string() + ".tmp";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  bool good = file >= 0;
  for (size_t done = 0; good && done < bytes.size();) {
    const ssize_t put = ::write(file, bytes.data() + done, bytes.size() - done);
    if (put < 0 && errno == EINTR) continue;
    good = put > 0;
    done += static_cast<size_t>(std::max<ssize_t>(put, 0));
  }
  good = good && ::fsync(file) == 0;
  const int why = errno;
  if (file >= 0) ::close(file);
  if (!good) throw std::runtime_error(fmt::format("{}: cannot be written: {}", temporary.string(), std::strerror(why)));
  std::filesystem::rename(temporary, path);
  const int folder = ::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;  // a folder that may be written but not read cannot be opened
  ::fsync(folder);
  ::close(folder);
}

// Reads a file into newly mapped memory, as a new state does.
void read_raw(const std::filesystem::path& path, size_t size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  size_t done = 0;
  while (memory != MAP_FAILED && file >= 0 && done < size) {
    const ssize_t got = ::pread(file, static_cast<char*>(memory) + done, size - done, static_cast<off_t>(done));
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  if (file >= 0) ::close(file);
  if (memory != MAP_FAILED) ::munmap(memory, size);
  if (done < size) throw std::runtime_error(path.string() + " cannot be read");
}

// Fills the memory of a dense host tensor with random bytes.
void fill_random(const Tensor& tensor, std::mt19937_64& random) {
  auto* const bytes = static_cast<std::byte*>(tensor.data);
  const auto size = static_cast<size_t>(tensor.elements() * dtype_bytes(tensor.dtype));
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(bytes + i, &value, std::min(sizeof value, size - i));
  }
}

// One line of the report: what was measured, and the bound it must keep where there is one.
struct Measurement {
  std::string name, value, detail;
  double number = 0, bound = 0;
};

class StateBench {
 public:
  // Files are written to `folder`.
  StateBench(const BenchStateFlags& flags, std::filesystem::path folder)
      : flags_(flags),
        folder_(std::move(folder)),
        stream_(flags.model.stream()),
        model_(flags.model.load()),
        logits_(static_cast<size_t>(model_.vocab_size())) {
    std::mt19937 random(1);
    while (static_cast<int64_t>(tokens_.size()) < flags.tokens + 2048)
      tokens_.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(model_.vocab_size())));
  }

  std::vector<Measurement> run() {
    require_memory();
    second_turn();
    rollback();
    fork_and_files();
    drift();
    return std::move(results_);
  }
  const Model& model() const { return model_; }
  const Stream& stream() const { return stream_; }

 private:
  std::span<const int32_t> first(int64_t count) const { return std::span(tokens_).first(static_cast<size_t>(count)); }
  HybridState state(int64_t capacity, int64_t sequences = 1, int64_t rollback = 0) const {
    HybridPlan plan = plan_memory(model_, stream_, flags_.model.kv, capacity, sequences);
    plan.rollback = rollback;
    return HybridState::create(plan);
  }

  // Checks the largest need of memory before the first measurement: either two conversations; or a long sequence, a second sequence
  // that is loaded from the file of the first, and the bytes of the file.
  void require_memory() const {
    HybridPlan plan = plan_memory(model_, stream_, flags_.model.kv, flags_.tokens + 2048, 2);
    plan.rollback = kMaxDecodeTokens;
    check_memory(model_, stream_, plan, {.tokens = plan.capacity, .lower = "--tokens or --kv"});
    plan = plan_memory(model_, stream_, flags_.model.kv, flags_.long_tokens, 3);
    check_memory(model_, stream_, plan, {.tokens = plan.capacity, .prompt = 1, .lower = "--long or --kv"});
  }

  // A conversation, an answer and a second turn. The second turn comes as a server receives it: the whole conversation.
  void second_turn() {
    constexpr int64_t kAnswer = 16, kMore = 32;
    HybridState own = state(flags_.tokens + 2048);
    const auto whole = first(flags_.tokens + kAnswer + kMore);
    const double cold = median(3, [&] {
      own.reset(0);
      model_.append(stream_, own, {{.tokens = whole, .logits = logits_.data()}});
    });
    PrefixStore store({.bytes = int64_t{1} << 40});
    const double filling = seconds([&] { model_.prefill(stream_, own, 0, first(flags_.tokens), logits_.data(), store); });
    for (int64_t i = 0; i < kAnswer; ++i)
      model_.append(stream_, own, {{.tokens = std::span(tokens_).subspan(static_cast<size_t>(flags_.tokens + i), 1)}});
    store.insert(own, 0, first(flags_.tokens + kAnswer));
    // Every turn differs from the others, so that no turn finds its own checkpoint in the store.
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      std::vector<int32_t> turn(whole.begin(), whole.end());
      turn[turn.size() - kMore] = i;
      times.push_back(seconds([&] { model_.prefill(stream_, own, 0, turn, logits_.data(), store); }));
    }
    std::nth_element(times.begin(), times.begin() + 2, times.end());
    results_.push_back(
        {fmt::format("second turn of {} tokens, first token", whole.size()), fmt::format("{:.1f} ms", 1e3 * times[2]),
         fmt::format("{:.2f} % of {:.0f} ms without the store (bound: at most 3 %)", 100 * times[2] / cold, 1e3 * cold),
         times[2] / cold, 0.03});
    const PrefixStoreStats stats = store.stats();
    results_.push_back({"first turn, filling the store", fmt::format("{:.0f} ms", 1e3 * filling),
                        fmt::format("{} checkpoints, {}", stats.checkpoints, bytes_text(stats.bytes)), filling, 0});
  }

  void rollback() {
    constexpr int64_t kBack = 4;
    HybridState own = state(flags_.tokens + 2048, 1, kMaxDecodeTokens), unrecorded = state(flags_.tokens + 2048);
    model_.append(stream_, own, {{.tokens = first(flags_.tokens)}});
    model_.append(stream_, unrecorded, {{.tokens = first(flags_.tokens)}});
    std::vector<double> steps, unrecorded_steps, rollbacks;
    for (int i = 0; i < 60; ++i) {
      const auto token = std::span(tokens_).subspan(static_cast<size_t>(flags_.tokens + i), 1);
      steps.push_back(seconds([&] { model_.append(stream_, own, {{.tokens = token, .logits = logits_.data()}}); }));
      unrecorded_steps.push_back(
          seconds([&] { model_.append(stream_, unrecorded, {{.tokens = token, .logits = logits_.data()}}); }));
      const auto draft = std::span(tokens_).subspan(static_cast<size_t>(flags_.tokens + i), kBack);
      model_.append(stream_, own, {{.tokens = draft}});
      rollbacks.push_back(seconds([&] { own.rollback(stream_, 0, kBack); }));
    }
    const auto middle = [](std::vector<double>& v) {
      std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
      return v[v.size() / 2];
    };
    const double step = middle(steps), without = middle(unrecorded_steps), back = middle(rollbacks);
    results_.push_back({fmt::format("rollback of {} tokens", kBack), fmt::format("{:.0f} us", 1e6 * back),
                        fmt::format("{:.2f} of a decode step of {:.0f} us (bound: at most 1)", back / step, 1e6 * step),
                        back / step, 1});
    results_.push_back({"decode step with records", fmt::format("{:.0f} us", 1e6 * step),
                        fmt::format("{:.0f} us without records; records and the second state take {}", 1e6 * without,
                                    bytes_text(own.bytes().total() - unrecorded.bytes().total())),
                        step / without, 0});
  }

  // A state file of a long sequence of random bytes: forks and files do not depend on the values. It is made on the host, because
  // files are the same for every backend.
  void write_random_state(const std::filesystem::path& file, std::span<const int32_t> ids) const {
    HybridState made = HybridState::create(plan_memory(model_, {}, flags_.model.kv, flags_.long_tokens));
    const HybridBatch batch = made.append(std::array{SequenceTokens{0, flags_.long_tokens}});
    std::mt19937_64 random(2);
    for (size_t i = 0; i < made.plan().layers.size(); ++i) {
      const auto layer = static_cast<int64_t>(i);
      if (std::holds_alternative<DeltaMemory>(made.plan().layers[i])) {
        fill_random(made.recurrent(layer, batch).in, random);
        fill_random(made.window(layer), random);
      } else {
        const KvCache cache = made.cache(layer, batch);
        for (const KvSide& side : {cache.k, cache.v})
          for (const Tensor& tensor : {side.codes, side.gains})
            if (tensor.present()) fill_random(tensor, random);
      }
    }
    model_.save(file, made, 0, ids, flags_.model.kv);
  }

  void fork_and_files() {
    const std::filesystem::path file = folder_ / fmt::format("weft-bench-{}.state", ::getpid());
    const std::vector<int32_t> ids(static_cast<size_t>(flags_.long_tokens), 1);
    write_random_state(file, ids);
    HybridState own = state(flags_.long_tokens, 2);
    model_.restore(file, own, 0);
    const int64_t pages = own.pages_in_use();
    const double fork = median(11, [&] { own.fork(0, 1); });
    const int64_t copied = own.pages_in_use() - pages;
    results_.push_back({fmt::format("fork of {} tokens", flags_.long_tokens), fmt::format("{:.0f} us", 1e6 * fork),
                        fmt::format("{} KV pages copied, {} shared (bound: 0 copied)", copied, pages), static_cast<double>(copied),
                        0});
    files(own, file, ids);
    std::filesystem::remove(file);
  }

  // Saving and loading, beside writing and reading the same number of bytes with system calls alone. Reads come from the page
  // cache.
  void files(const HybridState& own, const std::filesystem::path& file, std::span<const int32_t> ids) {
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(file));
    const auto size = static_cast<size_t>(bytes);
    const std::unique_ptr<std::byte[]> raw(new std::byte[size]);
    std::mt19937_64 random(3);
    fill_random(dense(raw.get(), DType::u8, {bytes}), random);
    const std::filesystem::path raw_file = folder_ / fmt::format("weft-bench-{}.raw", ::getpid());
    constexpr size_t kRounds = 15;
    std::array<double, kRounds> saves{}, writes{}, loads{}, reads{};
    for (size_t i = 0; i < kRounds; ++i) {  // alternating, because the speed of a disk varies
      writes[i] = seconds([&] { write_raw(raw_file, {raw.get(), size}); });
      saves[i] = seconds([&] { model_.save(file, own, 0, ids, flags_.model.kv); });
      reads[i] = seconds([&] { read_raw(raw_file, size); });
      loads[i] = seconds([&] {
        HybridState fresh = state(flags_.long_tokens);
        model_.restore(file, fresh, 0);
      });
    }
    std::filesystem::remove(raw_file);
    const auto add = [&](const char* name, double own_time, double raw_time, const char* what) {
      results_.push_back({fmt::format("{} of {}", name, bytes_text(bytes)), fmt::format("{:.1f} ms", 1e3 * own_time),
                          fmt::format("{:.0f} % of the rate of {} the same bytes, {:.1f} ms (bound: at least 60 %)",
                                      100 * raw_time / own_time, what, 1e3 * raw_time),
                          raw_time / own_time, 0.6});
    };
    add("save", median(saves), median(writes), "writing");
    add("load", median(loads), median(reads), "reading");
  }

  // How far checkpoints in fewer bits move the logits.
  void drift() {
    constexpr int64_t kMore = 32;
    const int64_t length = std::min<int64_t>(flags_.tokens, 2048);
    HybridState own = state(length + kMore);
    std::vector<float> want(logits_.size());
    for (StateStorage storage : {StateStorage::f32, StateStorage::f16, StateStorage::bf16, StateStorage::int8}) {
      PrefixStore store({.bytes = int64_t{1} << 40, .every = 0, .recurrent = storage});
      model_.prefill(stream_, own, 0, first(length), logits_.data(), store);
      model_.prefill(stream_, own, 0, first(length + kMore), logits_.data(), store);
      if (storage == StateStorage::f32) {
        want = logits_;
        continue;
      }
      double squares = 0;
      for (size_t i = 0; i < want.size(); ++i)
        squares += std::pow(static_cast<double>(logits_[i]) - static_cast<double>(want[i]), 2);
      const double rms = std::sqrt(squares / static_cast<double>(want.size()));
      results_.push_back(
          {fmt::format("checkpoints in {}", state_storage_name(storage)), fmt::format("{:.2g}", store.stats().drift),
           fmt::format("relative drift of recurrent states; logits {} tokens later differ by {:.2g} (rms)", kMore, rms), rms, 0});
    }
  }

  const BenchStateFlags& flags_;
  std::filesystem::path folder_;
  Stream stream_;
  Model model_;
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;
  std::vector<Measurement> results_;
};

// The folder for files. Called before the work, because it throws where there is no such folder.
std::filesystem::path folder_of(const BenchStateFlags& flags) {
  std::error_code fault;
  const std::filesystem::path folder =
      flags.folder.empty() ? std::filesystem::temp_directory_path(fault) : std::filesystem::path(flags.folder);
  if (fault)
    throw std::runtime_error(
        fmt::format("no folder for temporary files ({}): set TMPDIR, or name one with --folder", fault.message()));
  if (!std::filesystem::is_directory(folder, fault)) throw std::runtime_error("--folder " + folder.string() + " is not a folder");
  return folder;
}

int run_bench_state(const BenchStateFlags& flags) {
  flags.output.check_writable();
  StateBench bench(flags, folder_of(flags));
  const std::vector<Measurement> results = bench.run();
  if (flags.output.json) {
    Json list = Json::array();
    for (const Measurement& m : results)
      list.push_back({{"name", m.name},
                      {"value", m.value},
                      {"detail", m.detail},
                      {"number", number_or_null(m.number)},
                      {"bound", m.bound > 0 ? Json(m.bound) : Json()}});
    Json out{{"schema", kSchema}, {"model", bench.model().summary()}, {"kv", flags.model.kv}};
    out.update(conditions(bench.stream()));
    out["rows"] = std::move(list);
    flags.output.write(out);
    return kOk;
  }
  show("{}; KV {}\n\n", bench.model().summary(), flags.model.kv);
  Table table({"what", "measured", ""}, {false, true, false});
  for (const Measurement& m : results) table.add({m.name, m.value, m.detail});
  table.show();
  return kOk;
}

}  // namespace

void add_bench_state(CLI::App& bench, int& exit) {
  CLI::App* command = bench.add_subcommand("state", "Time forks, rollbacks, files and the prefix store of a whole model");
  auto flags = std::make_shared<BenchStateFlags>();
  flags->model.add_options(*command);
  command->add_option("--tokens", flags->tokens, "Tokens of the conversation")
      ->capture_default_str()
      ->transform(whole_number_in(64, int64_t{1} << 24));
  command->add_option("--long", flags->long_tokens, "Tokens of the sequence that is forked and saved")
      ->capture_default_str()
      ->transform(whole_number_in(64, int64_t{1} << 24));
  command->add_option("--folder", flags->folder, "Folder for the files; default: the system's folder for temporary files")
      ->check(file_name());
  flags->output.add_options(*command);
  command->footer(
      "Times are medians, with their bounds beside them. Tokens are random, so any model will do.\n\n"
      "Examples:\n"
      "  weft bench state                                    the bundled model\n"
      "  weft bench state --tokens 2048 --long 131072 --kv 4v4\n"
      "  weft bench state --model DIR --folder /mnt/disk     how fast states are saved there\n"
      "  weft bench state --backend cuda --json");
  command->callback([flags, &bench, &exit] {
    for (const CLI::Option* option : bench.get_options())
      if (option->count() > 0)
        throw UsageError(fmt::format("{} is an option of weft bench; options of weft bench state come after the word state",
                                     option->get_name()));
    exit = run_bench_state(*flags);
  });
}

}  // namespace weft::tools
