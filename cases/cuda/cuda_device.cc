// Memory and timing on cuda devices for cases: see cases/cuda_device.h.
#include "cases/cuda_device.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <thread>

#include "cuda/common/device.h"

namespace weft::cases {
namespace {

constexpr const char* kWho = "cases";

class CudaPlacement : public Placement {
 public:
  explicit CudaPlacement(int device) : device_(device) {}
  Place place() const override { return Place::cuda; }
  int device() const override { return device_; }
  uint8_t* allocate(size_t bytes) override {
    const cuda::OnDevice on(device_, kWho);
    void* data = nullptr;
    cuda::check(cudaMalloc(&data, bytes > 0 ? bytes : 1), kWho, "memory");
    return static_cast<uint8_t*>(data);
  }
  void release(uint8_t* bytes) override { cudaFree(bytes); }
  // Both copies synchronise with the default stream, on which checks run: errors of kernels are reported here.
  void upload(uint8_t* to, const uint8_t* from, size_t bytes) override {
    cuda::check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), kWho, "copy to the device");
  }
  void download(uint8_t* to, const uint8_t* from, size_t bytes) override {
    cuda::check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), kWho, "copy from the device");
  }

 private:
  int device_;
};

struct Queue {
  Queue() { cuda::check(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking), kWho, "queue"); }
  ~Queue() { cudaStreamDestroy(queue); }
  cudaStream_t queue = nullptr;
};

struct Event {
  Event() { cuda::check(cudaEventCreate(&event), kWho, "event"); }
  ~Event() { cudaEventDestroy(event); }
  cudaEvent_t event = nullptr;
};

struct Graph {
  ~Graph() {
    if (run) cudaGraphExecDestroy(run);
    if (graph) cudaGraphDestroy(graph);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
};

}  // namespace

Placement* cuda_placement(int device) {
  static const std::vector<std::unique_ptr<CudaPlacement>> all = [] {
    std::vector<std::unique_ptr<CudaPlacement>> made;
    for (size_t i = 0; i < cuda::all_devices().size(); ++i) made.push_back(std::make_unique<CudaPlacement>(static_cast<int>(i)));
    return made;
  }();
  return device >= 0 && static_cast<size_t>(device) < all.size() ? all[static_cast<size_t>(device)].get() : nullptr;
}

namespace {

// A captured graph of calls, and the events around a replay.
class Replay {
 public:
  Replay(const Stream& stream, size_t calls, const std::function<void(const Stream& stream, size_t call)>& call)
      : calls_(static_cast<double>(calls)) {
    Stream there = stream;
    there.queue = own_.queue;
    for (size_t i = 0; i < calls; ++i) call(there, i);  // loads lazily loaded modules
    cuda::check(cudaStreamSynchronize(own_.queue), kWho, "warm-up");
    cuda::check(cudaStreamBeginCapture(own_.queue, cudaStreamCaptureModeThreadLocal), kWho, "capture");
    for (size_t i = 0; i < calls; ++i) call(there, i);
    cuda::check(cudaStreamEndCapture(own_.queue, &graph_.graph), kWho, "capture");
    cuda::check(cudaGraphInstantiate(&graph_.run, graph_.graph, 0), kWho, "graph");
  }
  // Seconds per call.
  double run() const {
    cuda::check(cudaEventRecord(start_.event, own_.queue), kWho, "event");
    cuda::check(cudaGraphLaunch(graph_.run, own_.queue), kWho, "graph");
    cuda::check(cudaEventRecord(stop_.event, own_.queue), kWho, "event");
    cuda::check(cudaEventSynchronize(stop_.event), kWho, "event");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, start_.event, stop_.event), kWho, "event");
    return static_cast<double>(milliseconds) * 1e-3 / calls_;
  }
  // Seconds per call of the last `count` of replays without rests, once they ran for so many seconds. The next replay is always queued
  // before one ends.
  std::vector<double> without_rests(double seconds, size_t count) const {
    using Clock = std::chrono::steady_clock;
    const Event ends[3];
    const auto record = [&](size_t i) { cuda::check(cudaEventRecord(ends[i % 3].event, own_.queue), kWho, "event"); };
    std::vector<double> last;
    const auto begin = Clock::now();
    record(0);
    for (size_t i = 1; last.size() < count; ++i) {
      cuda::check(cudaGraphLaunch(graph_.run, own_.queue), kWho, "graph");
      record(i);
      if (i == 1) continue;
      cuda::check(cudaEventSynchronize(ends[(i - 1) % 3].event), kWho, "event");
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, ends[(i - 2) % 3].event, ends[(i - 1) % 3].event), kWho, "event");
      if (std::chrono::duration<double>(Clock::now() - begin).count() >= seconds)
        last.push_back(static_cast<double>(milliseconds) * 1e-3 / calls_);
    }
    cuda::check(cudaStreamSynchronize(own_.queue), kWho, "stream");
    return last;
  }
  double rested() const {
    const double seconds = run();
    // Idle for as long as the replay took, so that its power draw does not lower the clock of the next one.
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds * calls_));
    return seconds;
  }
  double calls() const { return calls_; }

 private:
  Queue own_;
  Graph graph_;
  Event start_, stop_;
  double calls_;
};

}  // namespace

CudaTimes time_on_cuda(const Stream& stream, size_t calls, int repeat, double sustain,
                       const std::function<void(const Stream& stream, size_t call)>& call) {
  const cuda::OnDevice on(stream.device, kWho);
  cuda::check(cudaDeviceSynchronize(), kWho, "device");
  const Replay replay(stream, calls, call);
  constexpr double kWarm = 0.05, kLongEnough = 0.25;
  constexpr size_t kFewest = 9, kMost = 400;
  double total = 0;
  for (int i = 0; i < 3 || (total < kWarm && i < 200); ++i) total += replay.rested() * replay.calls();
  CudaTimes times;
  std::vector<double>& seconds = times.rested;
  total = 0;
  while (repeat > 0 ? seconds.size() < static_cast<size_t>(repeat)
                    : seconds.size() < kFewest || (total < kLongEnough && seconds.size() < kMost)) {
    seconds.push_back(replay.rested());
    total += seconds.back() * replay.calls();
  }
  if (sustain > 0) times.sustained = replay.without_rests(sustain, kFewest);
  return times;
}

void pretend_cuda_device() { cuda::pretend_device(); }
int64_t cuda_cache_bytes(int device) { return cuda::all_devices()[static_cast<size_t>(device)].l2_bytes; }
std::string cuda_driver() { return cuda::driver_text(); }

}  // namespace weft::cases
