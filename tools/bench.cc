// `weft bench`: checks a case, then times it, and compares the time with the roofline of this machine.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>

#include "cases/cuda_device.h"
#include "cases/options.h"
#include "cases/verify.h"
#include "cases/vulkan_device.h"
#include "tools/command.h"
#include "tools/conditions.h"
#include "tools/interrupt.h"
#include "tools/json_output.h"
#include "tools/roofline.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct BenchFlags {
  Selection selection;
  std::string shape;
  JsonOutput output;
  int repeat = 0;
  std::optional<double> sustain;
  bool hot = false, cold = false, summary = false;
};

struct Timing {
  double median = 0, mad = 0;  // seconds
  double host = 0;             // seconds that the host spends on a call
  size_t runs = 0;
  double sustained = 0;  // median without rests; 0: not measured
};

std::string joined(const cases::Options& options) {
  std::string text;
  for (const auto& [key, value] : options.given()) text += (text.empty() ? "" : ",") + key + "=" + value;
  return text;
}

constexpr double kSustain = 1;  // seconds of --sustain unless given

// For a case with more work than this, the reference would take seconds. A smaller twin of the case is checked instead.
constexpr double kCheckedFlops = 1e9, kCheckedBytes = 1e8;

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Timing summary(const std::vector<double>& seconds) {
  Timing timing{median_of(seconds), 0, 0, seconds.size(), 0};
  std::vector<double> deviations;
  for (double s : seconds) deviations.push_back(std::abs(s - timing.median));
  timing.mad = median_of(deviations);
  return timing;
}

// Copies of the case's memory that together exceed four times the last-level cache. So every run finds its data in memory, as a
// layer of a model does. One copy when hot.
std::vector<std::unique_ptr<cases::Image>> make_images(const cases::Problem& problem, const Stream& stream, bool cold) {
  double bytes = 1;
  for (const auto& block : problem.memory().blocks()) bytes += static_cast<double>(block.total);
  const bool on_device = cases::placement_of(stream).place() != Place::host;
  // Vulkan does not report cache sizes. This is the largest cache of consumer GPUs.
  constexpr int64_t kAnyCache = int64_t{96} << 20;
  const int64_t cache = stream.backend == Backend::cuda     ? cases::cuda_cache_bytes(stream.device)
                        : stream.backend == Backend::vulkan ? kAnyCache
                                                            : last_level_cache();
  const double wanted = cold ? std::ceil(4 * static_cast<double>(cache) / bytes) : 1;
  const auto copies =
      static_cast<size_t>(std::clamp(wanted, 1.0, on_device ? 512.0 : 4096.0));  // device blocks are slow to allocate
  std::vector<std::unique_ptr<cases::Image>> images;
  for (size_t i = 0; i < copies; ++i)
    images.push_back(std::make_unique<cases::Image>(problem.memory(), cases::placement_of(stream)));
  return images;
}

// Seconds that the host spends on one call: on the cpu, checks and plan without the kernel; on a device, until the call returns.
double time_host(const cases::Problem& problem, const Stream& stream, const cases::Image& image, Scratch scratch) {
  using Clock = std::chrono::steady_clock;
  const bool on_host = cases::placement_of(stream).place() == Place::host;
  const std::function<void()> call = on_host ? problem.host_share(stream) : problem.call(stream, image, scratch);
  // On the host one call is too short for the clock. On a device a full queue would make launches wait, so calls are timed one by
  // one.
  const int batches = on_host ? 15 : 31, calls = on_host ? 100 : 1;
  std::vector<double> seconds;
  for (int i = 0; i < batches; ++i) {
    const auto start = Clock::now();
    for (int j = 0; j < calls; ++j) call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count() / calls);
  }
  return median_of(seconds);
}

Timing time_runs(const cases::Problem& problem, const Stream& stream, bool cold, int repeat, double sustain) {
  using Clock = std::chrono::steady_clock;
  const auto images = make_images(problem, stream, cold);
  cases::LentScratch lent(problem.scratch_bytes(stream), 0, cases::placement_of(stream));
  if (stream.backend == Backend::cuda) {
    constexpr size_t kFewestCalls = 8;  // calls in a graph, so that the launch of the graph weighs little
    const cases::CudaTimes times =
        cases::time_on_cuda(stream, std::max(images.size(), kFewestCalls), repeat, sustain,
                            [&](const Stream& on, size_t i) { problem.run(on, *images[i % images.size()], lent.scratch()); });
    Timing timing = summary(times.rested);
    if (!times.sustained.empty()) timing.sustained = median_of(times.sustained);
    timing.host = time_host(problem, stream, *images.front(), lent.scratch());
    return timing;
  }
  if (stream.backend == Backend::vulkan) {
    Timing timing = summary(cases::time_on_vulkan(stream, images.size(), repeat, [&](const Stream& on, size_t i) {
      problem.run(on, *images[i % images.size()], lent.scratch());
    }));
    cases::placement_of(stream).run(
        stream, [&](const Stream& on) { timing.host = time_host(problem, on, *images.front(), lent.scratch()); });
    return timing;
  }
  const auto run = [&](size_t i) {
    const auto start = Clock::now();
    problem.run(stream, *images[i % images.size()], lent.scratch());
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  size_t at = 0;
  double warm = 0;  // seconds, until clocks and thread pools have settled
  for (int i = 0; i < 3 || (warm < 0.05 && i < 100); ++i) warm += run(at++);
  std::vector<double> seconds;
  double total = 0;
  const size_t wanted = repeat > 0 ? static_cast<size_t>(repeat) : 0;
  constexpr size_t kFewest = 7, kMost = 2000;
  constexpr double kLongEnough = 0.7;
  while (wanted > 0 ? seconds.size() < wanted : seconds.size() < kFewest || (total < kLongEnough && seconds.size() < kMost)) {
    seconds.push_back(run(at++));
    total += seconds.back();
  }
  Timing timing = summary(seconds);
  timing.host = time_host(problem, stream, *images.front(), lent.scratch());
  return timing;
}

// The outcome of the case itself, or of a smaller twin that the reference computes quickly.
struct Checked {
  cases::Outcome outcome;
  bool twin = false;
};
Checked check_first(const cases::Case& one, const std::string& shape, cases::Checker& checker, const Stream& stream) {
  const cases::Problem& problem = checker.problem();
  if (problem.work.flops <= kCheckedFlops && problem.work.read_bytes + problem.work.written_bytes <= kCheckedBytes)
    return {checker.check(stream, cases::Depth::once), false};
  cases::Options smaller(shape);
  constexpr std::pair<const char*, int64_t> kCaps[] = {{"T", 130}, {"N", 2}, {"context", 1000}, {"capacity", 1024}};
  for (const auto& [key, cap] : kCaps)
    for (const auto& [name, value] : problem.shape)
      if (name == key && std::atoll(value.c_str()) > cap) smaller.set(key, std::to_string(cap));
  return {cases::Checker(cases::build(one, joined(smaller))).check(stream, cases::Depth::once), true};
}

// The options that the case or the command line set, and defaults that decide the speed.
std::string short_shape(const cases::Case& one, const cases::Problem& problem, const std::string& shape) {
  cases::Options options(one.options);
  options.merge(cases::Options(shape));
  if (one.fast)
    for (const auto& [key, value] : problem.shape)
      if (key == "layout" || key == "order" || key == "dtype") options.set(key, value);
  return joined(options);
}

std::vector<cases::Case> cases_of(const BenchFlags& flags) {
  if (flags.summary) return flags.selection.select({cases::Tier::summary});
  if (!flags.selection.pattern.empty()) {  // --case may name any case; benchmark cases take precedence
    const auto named = flags.selection.select(
        {cases::Tier::fast, cases::Tier::full, cases::Tier::bench, cases::Tier::summary, cases::Tier::device});
    std::vector<cases::Case> benchmarks;
    std::copy_if(named.begin(), named.end(), std::back_inserter(benchmarks),
                 [](const cases::Case& one) { return one.tier >= cases::Tier::bench; });
    return benchmarks.empty() ? named : benchmarks;
  }
  if (flags.shape.empty()) return flags.selection.select({cases::Tier::bench, cases::Tier::summary, cases::Tier::device});
  if (flags.selection.ops.size() != 1) throw UsageError("--shape without --case needs exactly one --op");
  return {cases::shape_case(flags.selection.ops.front())};
}

constexpr double kWideSpread = 0.1;         // spread of repeats as a share of the median; undisturbed cases stay below it
constexpr double kAbovePeak = 110;          // percent of the roofline
constexpr double kSustainedDiffers = 0.03;  // difference as a share of the rested median; smaller ones are noise

// Why a call can be faster than the peak that was measured, in a few words.
const char* why_above_peak(const std::string& kernel, bool hot) {
  if (hot) return "its data comes from caches, the roofline counts memory";
  if (kernel.find("integer") != std::string::npos) return "its products are of integers, the roofline counts f32";
  return "more than the measured peak, see below";
}

// One run of the subcommand, and its results so far.
class Bench {
 public:
  Bench(const BenchFlags& flags, size_t total) : flags_(flags), progress_(total) {}

  void run(const cases::Case& one, const Stream& stream);
  void finish(Json& out);  // moves the results into the file's JSON, and prints a summary
  bool failed() const { return wrong_ > 0 || timed_ == 0; }

 private:
  const Roofline& machine(const Stream& stream);
  const Roofline& device_ceilings(const Stream& stream);  // of the first device that is used
  const Roofline& vulkan_ceilings(const Stream& stream);  // of the stream's device
  void record(const cases::Case& one, const Stream& stream, const cases::Problem& problem, bool twin);

  const BenchFlags& flags_;
  Progress progress_;
  Json results_ = Json::array(), roofline_;
  Roofline device_;
  std::map<int, Roofline> vulkan_;  // by device
  int timed_ = 0, wrong_ = 0, skipped_ = 0;
  int varied_ = 0, above_peak_ = 0;  // results with a wide spread; results above the measured peak
};

void Bench::run(const cases::Case& one, const Stream& stream) {
  progress_.step(one.op + " " + one.name);
  cases::Checker checker(cases::build(one, flags_.shape));
  const std::string title = fmt::format("{} {} on {}", one.op, one.name, backend_name(stream.backend));
  if (const Status status = checker.problem().supports(stream); !status) {
    progress_.clear();
    if (status.code == Code::invalid_argument) throw UsageError(title + ": " + status.message);
    tell("skipped {}: {}\n", title, status.message);
    ++skipped_;
    return;
  }
  const Checked checked = check_first(one, flags_.shape, checker, stream);
  if (checked.outcome.verdict != cases::Verdict::passed) {
    progress_.clear();
    tell("{} {}{}: {} (error {}, bound {})\n", coloured(Colour::red, "wrong"), title, checked.twin ? ", a smaller twin" : "",
         checked.outcome.why, short_number(checked.outcome.error), short_number(checked.outcome.bound));
    ++wrong_;
    return;
  }
  record(one, stream, checker.problem(), checked.twin);
}

void Bench::record(const cases::Case& one, const Stream& stream, const cases::Problem& problem, bool twin) {
  const Choice choice = problem.choose(stream);
  const cases::Work& work = problem.work;
  const double best = machine(stream).seconds(work.read_bytes, work.written_bytes, work.flops);
  const Timing timing = time_runs(problem, stream, !flags_.hot, flags_.repeat, flags_.sustain.value_or(kSustain));
  const double gbps = (work.read_bytes + work.written_bytes) / timing.median * 1e-9, gflops = work.flops / timing.median * 1e-9;
  const double percent = 100 * best / timing.median;
  results_.push_back({{"op", one.op},
                      {"case", one.name},
                      {"backend", backend_name(stream.backend)},
                      {"shape", shape_json(problem)},
                      {"kernel", choice.kernel},
                      {"median_us", timing.median * 1e6},
                      {"mad_us", timing.mad * 1e6},
                      {"sustained_us", timing.sustained > 0 ? Json(timing.sustained * 1e6) : Json()},
                      {"host_us", timing.host * 1e6},
                      {"gbps", gbps},
                      {"gflops", gflops},
                      {"roofline_pct", number_or_null(percent)},
                      {"runs", timing.runs},
                      {"cold", !flags_.hot},
                      {"checked", twin ? "twin" : "itself"}});
  progress_.clear();
  const bool varied = timing.mad > kWideSpread * timing.median, above_peak = percent > kAbovePeak;
  varied_ += varied, above_peak_ += above_peak;
  const bool differs = timing.sustained > 0 && std::abs(timing.sustained - timing.median) > kSustainedDiffers * timing.median;
  // With --json, stdout is for the JSON alone.
  print_to(flags_.output.json ? Channel::err : Channel::out,
           "{} {} on {} {}\n  {}\n  {} us +- {}{}{}  {} GB/s  {} GFLOP/s  {:.0f}% of the roofline{}{}\n", one.op, one.name,
           backend_name(stream.backend), coloured(Colour::dim, short_shape(one, problem, flags_.shape)),
           coloured(Colour::dim, choice.kernel), coloured(Colour::green, short_number(timing.median * 1e6)),
           short_number(timing.mad * 1e6), varied ? fmt::format(" ({:.0f} %)", 100 * timing.mad / timing.median) : "",
           differs ? fmt::format(" rested, {} us sustained", short_number(timing.sustained * 1e6)) : "", short_number(gbps),
           short_number(gflops), percent, above_peak ? fmt::format(" ({})", why_above_peak(choice.kernel, flags_.hot)) : "",
           twin ? " (checked on a smaller twin)" : "");
  flush_output();
  ++timed_;
}

// The peak of the machine with the stream's threads; measured and printed on first use.
const Roofline& Bench::machine(const Stream& stream) {
  if (stream.backend == Backend::cuda) return device_ceilings(stream);
  if (stream.backend == Backend::vulkan) return vulkan_ceilings(stream);
  const Roofline& top = roofline(threads_of(stream));
  if (stream.backend != Backend::cpu || !roofline_.is_null()) return top;
  progress_.clear();
  tell("peak of this machine, {} threads: {} GFLOP/s ({} on one), {} GB/s read, {} GB/s read and written in place\n", top.threads,
       short_number(top.gflops), short_number(top.one_thread_gflops), short_number(top.read_gbps), short_number(top.rmw_gbps));
  roofline_ = {{"threads", top.threads},
               {"gflops", top.gflops},
               {"one_thread_gflops", top.one_thread_gflops},
               {"read_gbps", top.read_gbps},
               {"rmw_gbps", top.rmw_gbps}};
  return top;
}

const Roofline& Bench::device_ceilings(const Stream& stream) {
  if (device_.gflops > 0) return device_;
  const cases::CudaCeilings top = cases::cuda_ceilings(stream.device);
  device_.gflops = top.gflops;
  device_.read_gbps = top.read_gbps;
  device_.rmw_gbps = top.rmw_gbps;
  progress_.clear();
  tell("peak of the device: {} GFLOP/s of bf16 products, {} GB/s read, {} GB/s read and written in place\n",
       short_number(top.gflops), short_number(top.read_gbps), short_number(top.rmw_gbps));
  roofline_ = {{"gflops", top.gflops}, {"read_gbps", top.read_gbps}, {"rmw_gbps", top.rmw_gbps}};
  return device_;
}

const Roofline& Bench::vulkan_ceilings(const Stream& stream) {
  Roofline& top = vulkan_[stream.device];
  if (top.rmw_gbps > 0) return top;
  top.read_gbps = top.rmw_gbps = cases::vulkan_rmw_gbps(stream.device);
  top.gflops = INFINITY;
  progress_.clear();
  tell("peak of Vulkan device {}: {} GB/s read and written in place; products are not measured\n", stream.device,
       short_number(top.rmw_gbps));
  if (roofline_.is_null()) roofline_ = {{"rmw_gbps", top.rmw_gbps}};
  return top;
}

void Bench::finish(Json& out) {
  progress_.clear();
  tell("timed {}, wrong {}, skipped {}\n", timed_, wrong_, skipped_);
  if (varied_ > 0)
    tell(
        "weft: the repeats of {} of {} cases vary by more than {:.0f} % of the median, most often because of other work on the "
        "machine\n",
        varied_, timed_, 100 * kWideSpread);
  if (above_peak_ > 0)
    tell(
        "weft: {} of {} cases reach more than {:.0f} % of the roofline: their data came from a cache, their products are of "
        "integers, or the machine was busier while its peak was measured than while the case ran\n",
        above_peak_, timed_, kAbovePeak);
  if (!roofline_.is_null()) out["roofline"] = roofline_;
  out["rows"] = std::move(results_);
}

void warn_of_load(const MachineLoad& load, const std::vector<Stream>& streams) {
  const auto on_host = [](const Stream& stream) { return stream.backend != Backend::cuda && stream.backend != Backend::vulkan; };
  if (load.busy() && std::any_of(streams.begin(), streams.end(), on_host))
    tell(
        "weft: this machine is busy: load average {:.1f} on {} cores. Other work makes times longer and the measured peak lower; "
        "for figures to keep, repeat this when the machine is idle\n",
        load.average, load.cores);
}

int bench(const BenchFlags& flags) {
  const Interrupt interrupt;
  flags.selection.refuse_idle_options();
  const std::vector<Stream> streams = flags.selection.streams(!flags.selection.backends.empty());
  if (flags.sustain && std::none_of(streams.begin(), streams.end(), [](const Stream& s) { return s.backend == Backend::cuda; }))
    throw UsageError("--sustain does nothing without the cuda backend, and no case runs on it here");
  const std::vector<cases::Case> chosen = cases_of(flags);
  flags.output.check_writable();
  Bench bench(flags, chosen.size() * streams.size());
  const MachineLoad load = machine_load();
  warn_of_load(load, streams);
  bool complete = true;
  const bool named = !flags.selection.pattern.empty();
  for (const cases::Case& one : chosen)
    for (const Stream& stream : streams) {
      if (one.tier == cases::Tier::device && stream.backend != Backend::cuda && !named) continue;
      if (!flags.output.json && output_fault_known())
        return bench.failed() ? kFailed : kOk;  // the other results would have no reader
      complete = complete && !Interrupt::asked();
      if (complete) bench.run(one, stream);
    }
  Json out = Json::object();
  out["schema"] = kSchema;
  out.update(conditions(streams.back()));  // of the last backend, which is the fastest
  out["load"] = load.known ? Json(load.average) : Json();
  bench.finish(out);
  flags.selection.say_left_out("not timed");
  if (!complete) {
    tell("weft: interrupted{}\n", flags.output.file.empty() ? "" : "; " + flags.output.file + " was not written");
    return Interrupt::exit_status();
  }
  if (flags.output.json) flags.output.write(out, 1);
  return bench.failed() ? kFailed : kOk;
}

}  // namespace

void add_bench(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("bench", "Time cases, after checking their results");
  auto flags = std::make_shared<BenchFlags>();
  flags->selection.add_options(*command, cases::timed_names());
  command->add_option("--shape", flags->shape,
                      "Options of the call: T, N, Hq, Hk, Hv, D, Dk, Dv, context, kbits, vbits, dtype, ...; with --case they "
                      "replace those of the case");
  command->add_flag("--summary", flags->summary, "Only the most telling cases, about half a minute");
  flags->output.add_options(*command, "The results as JSON; the lines about each case then go to stderr");
  command->add_option("--repeat", flags->repeat, "Timed runs of each case; default: enough for 0.7 s (on cuda: 0.25 s)")
      ->transform(whole_number_in(1, 1000000));
  command
      ->add_option(
          "--sustain", flags->sustain,
          "On cuda, also time replays that follow this many seconds of replays without rests; printed where they differ by "
          "more than 3 %. Default: 1; 0: only rested replays")
      ->transform(number_in(0, 3600))
      ->type_name("SECONDS");
  auto* cold =
      command->add_flag("--cold", flags->cold, "Use copies of the data that exceed the caches, as layers of a model do (default)");
  command->add_flag("--hot", flags->hot, "Use the same data in every run")->excludes(cold);
  command->footer(
      "Prints the median and the median absolute deviation of single calls; rates of the bytes and operations that the formulas "
      "need, whatever a kernel does; and the percentage of the roofline, from the measured bandwidth and multiply-add rate of "
      "this machine. Ctrl-C ends the run after the current case.\n\n"
      "Examples:\n"
      "  weft bench\n"
      "  weft bench --op compressed_attention --case decode --threads 1\n"
      "  weft bench --op gated_delta_rule_prefill --shape T=2048,Hk=16,Hv=32,Dk=128,Dv=128,N=1,dtype=bf16\n"
      "  weft bench --op compressed_attention --shape Hq=32,Hk=8,D=128,kbits=4,vbits=4,context=16384\n"
      "  weft bench --op delta_mixer                         the ops of a gated delta layer, one after the other\n"
      "  weft bench --backend cpu --json -o now.json && weft diff before.json now.json\n"
      "  weft bench state                                    forks, rollbacks and state files of a whole model");
  add_bench_state(*command, exit);
  command->callback([flags, command, &exit] {
    if (command->get_subcommands().empty()) exit = bench(*flags);
  });
}

}  // namespace weft::tools
