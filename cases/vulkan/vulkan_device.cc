// Memory, submission and timing of Vulkan devices for cases: see cases/vulkan_device.h.
#include "cases/vulkan_device.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>

#include "weft/delta_preprocess.h"
#include "weft/vulkan.h"

namespace weft::cases {
namespace {

vulkan::OpenOptions& options() {
  static vulkan::OpenOptions chosen;
  return chosen;
}

class VulkanPlacement : public Placement {
 public:
  explicit VulkanPlacement(int device) : device_(vulkan::Device::open(device, options())) {}
  Place place() const override { return Place::vulkan; }
  int device() const override { return device_.ordinal(); }
  uint8_t* allocate(size_t bytes) override { return static_cast<uint8_t*>(device_.allocate(bytes)); }
  void release(uint8_t* bytes) override { device_.release(bytes); }
  void upload(uint8_t* to, const uint8_t* from, size_t bytes) override { device_.upload(to, from, bytes); }
  void download(uint8_t* to, const uint8_t* from, size_t bytes) override { device_.download(to, from, bytes); }
  void run(const Stream& stream, const std::function<void(const Stream&)>& work) override {
    vulkan::Recorder recorder(device_);
    Stream there = stream;
    there.queue = recorder.queue();
    work(there);
    recorder.submit_and_wait();
  }
  const vulkan::Device& opened() const { return device_; }

 private:
  vulkan::Device device_;
};

VulkanPlacement* opened(int device) {
  static std::mutex mutex;
  static auto* const all =
      new std::map<int, std::unique_ptr<VulkanPlacement>>;  // drivers may be unloaded before destructors of statics
  if (device < 0 || device >= static_cast<int>(vulkan::list_devices().size())) return nullptr;
  const std::lock_guard lock(mutex);
  std::unique_ptr<VulkanPlacement>& one = (*all)[device];
  if (!one) one = std::make_unique<VulkanPlacement>(device);
  return one.get();
}

}  // namespace

Placement* vulkan_placement(int device) { return opened(device); }

void validate_vulkan(std::function<void(const std::string&)> on_message, bool staged) {
  options() = {true, std::move(on_message), staged};
}

std::vector<double> time_on_vulkan(const Stream& stream, size_t calls, int repeat,
                                   const std::function<void(const Stream& stream, size_t call)>& call) {
  using Clock = std::chrono::steady_clock;
  vulkan::Recorder recorder(opened(stream.device)->opened());
  Stream there = stream;
  there.queue = recorder.queue();
  const auto replay = [&] {
    const auto start = Clock::now();
    recorder.submit_and_wait();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  // A submission and its fence take some 50 microseconds on a GPU, so a command buffer has calls for 10 ms, or kMostCalls.
  constexpr double kSubmission = 0.01;
  constexpr size_t kMostCalls = 1024;
  size_t recorded = 0, wanted = calls;
  while (recorded < wanted) {
    for (; recorded < wanted; ++recorded) call(there, recorded);
    replay();  // builds what drivers build late
    const double part = replay() / static_cast<double>(recorded);
    if (part * static_cast<double>(recorded) >= kSubmission) break;
    const auto more = static_cast<size_t>(kSubmission / std::max(part, 1e-9));
    wanted = std::max(recorded, std::min(kMostCalls, more) / calls * calls);
    if (wanted == recorded) break;
    recorder.clear();
    recorded = 0;
  }
  constexpr double kWarm = 0.05, kLongEnough = 0.25;
  constexpr size_t kFewest = 9, kMost = 400;
  double total = 0;
  for (int i = 0; i < 2 || (total < kWarm && i < 100); ++i) total += replay();
  std::vector<double> seconds;
  total = 0;
  while (repeat > 0 ? seconds.size() < static_cast<size_t>(repeat)
                    : seconds.size() < kFewest || (total < kLongEnough && seconds.size() < kMost)) {
    const double all = replay();
    total += all;
    seconds.push_back(all / static_cast<double>(recorded));
  }
  return seconds;
}

std::string vulkan_driver(int device) {
  const vulkan::Properties& facts = vulkan::list_devices()[static_cast<size_t>(device)];
  return facts.driver + ", Vulkan " + std::to_string(facts.api_major) + "." + std::to_string(facts.api_minor);
}

double vulkan_rmw_gbps(int device) {
  constexpr int64_t kRowBytes = 512;
  // Larger than any cache of a GPU; a driver that computes on the processor is slow.
  const bool software = vulkan::list_devices()[static_cast<size_t>(device)].kind == vulkan::Kind::cpu;
  const int64_t bytes = int64_t{software ? 16 : 512} << 20;
  VulkanPlacement& there = *opened(device);
  uint8_t* data = there.allocate(bytes);
  const std::vector<uint8_t> zeros(bytes);
  there.upload(data, zeros.data(), bytes);
  Stream stream;
  stream.backend = Backend::vulkan;
  stream.device = device;
  L2NormArgs args;
  args.x = args.y = dense(static_cast<void*>(data), DType::f32, {bytes / kRowBytes, 128}, Place::vulkan, device);
  const std::vector<double> seconds = time_on_vulkan(stream, 4, 5, [&](const Stream& on, size_t) { l2_norm(on, args); });
  there.release(data);
  double best = seconds.front();
  for (double s : seconds) best = std::min(best, s);
  return 2 * static_cast<double>(bytes) / best * 1e-9;
}

}  // namespace weft::cases
