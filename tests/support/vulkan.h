// What the tests of the vulkan backend share: the device under the validation layers, a fixture that fails a test at their messages, and
// devices of a test's own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cases/image.h"
#include "cases/vulkan_device.h"
#include "weft/status.h"
#include "weft/vulkan.h"

namespace weft::cases {

// The first usable device, opened with validation; -1 where there is none. Messages of the layers are collected.
struct Here {
  int device = -1;
  bool listed = false;  // devices() lists a usable one, which cannot be opened without validation layers
  std::string why_not;
  std::mutex mutex;
  std::vector<std::string> messages;

  Here() {
    for (const DeviceInfo& info : devices())
      if (info.backend == Backend::vulkan) {
        if (info.usable && device < 0) device = info.device;
        listed = listed || info.usable;
        if (!info.usable) why_not = info.why_not;
      }
    if (device < 0) return;
    validate_vulkan([this](const std::string& message) { add(message); }, false);
    try {
      vulkan_placement(device);
    } catch (const Error& error) {
      device = -1;
      why_not = error.what();
    }
  }
  void add(const std::string& message) {
    const std::lock_guard lock(mutex);
    messages.push_back(message);
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex);
    return std::exchange(messages, {});
  }
};

inline Here& here() {
  static auto* const found = new Here;  // the device outlives statics, and its messages come here
  return *found;
}

inline Stream vulkan_stream() {
  Stream stream;
  stream.backend = Backend::vulkan;
  stream.device = std::max(here().device, 0);
  return stream;
}

// Skips without a device; fails a test that the layers had something to say about.
class Vulkan : public testing::Test {
 protected:
  void SetUp() override {
    if (here().device < 0) GTEST_SKIP() << "no Vulkan device to test: " << here().why_not;
    placement = &placement_of(vulkan_stream());
  }
  void TearDown() override {
    for (const std::string& message : here().take()) ADD_FAILURE() << message;
  }
  Placement* placement = nullptr;
};

// A device of its own, whose copies go through staging buffers.
class Opened {
 public:
  explicit Opened(bool staged)
      : device(vulkan::Device::open(here().device, {true, [](const std::string& message) { here().add(message); }, staged})) {}
  ~Opened() {
    for (void* address : addresses_) device.release(address);
  }
  Tensor tensor(const std::vector<float>& values, int64_t rows) {
    addresses_.push_back(device.allocate(values.size() * sizeof(float)));
    device.upload(addresses_.back(), values.data(), values.size() * sizeof(float));
    return dense(addresses_.back(), DType::f32, {rows, static_cast<int64_t>(values.size()) / rows}, Place::vulkan,
                 device.ordinal());
  }
  std::vector<float> read(const Tensor& t) const {
    std::vector<float> values(static_cast<size_t>(t.elements()));
    device.download(values.data(), t.data, values.size() * sizeof(float));
    return values;
  }
  Stream stream(const vulkan::Recorder& recorder) const {
    Stream on = vulkan_stream();
    on.queue = recorder.queue();
    return on;
  }
  vulkan::Device device;

 private:
  std::vector<void*> addresses_;
};

}  // namespace weft::cases
