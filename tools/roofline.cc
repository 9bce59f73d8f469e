// The measured peak of this machine: see roofline.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/roofline.cc"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace weft::tools {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve independent chains: more than the product of latency and number of units on any known processor, and few enough for its
// registers.
double multiply_adds(int64_t rounds, double* flops) {
  const hn::ScalableTag<float> d;
  const auto m = hn::Set(d, 0.9999f), c = hn::Set(d, 1e-4f);
  auto a0 = hn::Set(d, 0.0f), a1 = hn::Set(d, 0.1f), a2 = hn::Set(d, 0.2f), a3 = hn::Set(d, 0.3f);
  auto a4 = hn::Set(d, 0.4f), a5 = hn::Set(d, 0.5f), a6 = hn::Set(d, 0.6f), a7 = hn::Set(d, 0.7f);
  auto a8 = hn::Set(d, 0.8f), a9 = hn::Set(d, 0.9f), a10 = hn::Set(d, 1.0f), a11 = hn::Set(d, 1.1f);
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, m, c), a1 = hn::MulAdd(a1, m, c), a2 = hn::MulAdd(a2, m, c), a3 = hn::MulAdd(a3, m, c);
    a4 = hn::MulAdd(a4, m, c), a5 = hn::MulAdd(a5, m, c), a6 = hn::MulAdd(a6, m, c), a7 = hn::MulAdd(a7, m, c);
    a8 = hn::MulAdd(a8, m, c), a9 = hn::MulAdd(a9, m, c), a10 = hn::MulAdd(a10, m, c), a11 = hn::MulAdd(a11, m, c);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  const auto all = hn::Add(sum, hn::Add(hn::Add(a8, a9), hn::Add(a10, a11)));
  *flops = 2.0 * 12.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
  return hn::GetLane(hn::SumOfLanes(d, all));
}

// Four streams, as in a kernel that reads several heads.
double read_all(const float* data, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d)), quarter = count / 4 / lanes * lanes;
  auto a0 = hn::Zero(d), a1 = hn::Zero(d), a2 = hn::Zero(d), a3 = hn::Zero(d);
  for (int64_t i = 0; i < quarter; i += lanes) {
    a0 = hn::Add(a0, hn::LoadU(d, data + i));
    a1 = hn::Add(a1, hn::LoadU(d, data + quarter + i));
    a2 = hn::Add(a2, hn::LoadU(d, data + 2 * quarter + i));
    a3 = hn::Add(a3, hn::LoadU(d, data + 3 * quarter + i));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a0, a1), hn::Add(a2, a3))));
}

void change_all(float* data, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto m = hn::Set(d, 0.9999f), c = hn::Set(d, 1e-4f);
  for (int64_t i = 0; i + lanes <= count; i += lanes) hn::StoreU(hn::MulAdd(hn::LoadU(d, data + i), m, c), d, data + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::tools
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tools/roofline.h"

namespace weft::tools {
namespace {

HWY_EXPORT(multiply_adds);
HWY_EXPORT(read_all);
HWY_EXPORT(change_all);

// Seconds until every thread has finished its part.
double timed(int threads, const std::function<void(int)>& part) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(part, i);
  part(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of several measurements, since the result is a peak.
double best(int passes, const std::function<double()>& measure) {
  double top = 0;
  for (int i = 0; i < passes; ++i) top = std::max(top, measure());
  return top;
}

double measure_gflops(int threads) {
  std::vector<double> sink(static_cast<size_t>(threads) * 8), flops(static_cast<size_t>(threads) * 8);  // a cache line each
  return best(4, [&] {
    const double seconds = timed(threads, [&](int i) {
      const auto mine = static_cast<size_t>(i) * 8;
      sink[mine] = HWY_DYNAMIC_DISPATCH(multiply_adds)(int64_t{8} << 20, &flops[mine]);
    });
    double all = 0;
    for (size_t i = 0; i < flops.size(); i += 8) all += flops[i];
    return all / seconds * 1e-9;
  });
}

Roofline measure(int threads) {
  Roofline found;
  found.threads = threads;
  found.gflops = measure_gflops(threads);
  found.one_thread_gflops = threads == 1 ? found.gflops : measure_gflops(1);
  std::vector<double> sink(static_cast<size_t>(threads) * 8);
  const auto memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const int64_t bytes =
      std::clamp<int64_t>(8 * last_level_cache(), int64_t{256} << 20, std::max<int64_t>(memory / 8, int64_t{64} << 20));
  const int64_t each = bytes / 4 / threads;
  const std::unique_ptr<float[]> data(new float[static_cast<size_t>(each * threads)]);
  timed(threads,
        [&](int i) { std::fill_n(data.get() + i * each, each, 1.0f); });  // each thread touches the pages of its part first
  const double total = static_cast<double>(each * threads) * 4;
  found.read_gbps = best(4, [&] {
    return total * 1e-9 / timed(threads, [&](int i) {
             sink[static_cast<size_t>(i) * 8] = HWY_DYNAMIC_DISPATCH(read_all)(data.get() + i * each, each);
           });
  });
  found.rmw_gbps = best(4, [&] {
    return 2 * total * 1e-9 / timed(threads, [&](int i) { HWY_DYNAMIC_DISPATCH(change_all)(data.get() + i * each, each); });
  });
  return found;
}

std::string first_line_of(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

double Roofline::seconds(double read_bytes, double written_bytes, double flops) const {
  // Written memory is also read, by the op or by the cache. Reads beyond the written bytes come on top.
  const double paired = 2 * written_bytes / (rmw_gbps * 1e9), alone = std::max(read_bytes - written_bytes, 0.0) / (read_gbps * 1e9);
  return std::max(paired + alone, flops / (gflops * 1e9));
}

const Roofline& roofline(int threads) {
  static std::map<int, Roofline> known;
  const auto found = known.find(threads);
  return found != known.end() ? found->second : known.emplace(threads, measure(threads)).first->second;
}

int64_t last_level_cache() {
  const std::string size = first_line_of("/sys/devices/system/cpu/cpu0/cache/index3/size");  // "32768K"
  const int64_t kib = size.empty() ? 0 : std::atoll(size.c_str());
  return kib > 0 ? kib << 10 : int64_t{32} << 20;
}

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown";
}

std::string system_name() {
  utsname name{};
  return uname(&name) == 0 ? std::string(name.sysname) + " " + name.release : "unknown";
}

}  // namespace weft::tools
#endif
