// No call that bench/versus_fla.py and bench/versus_torch.py sweep takes a slow kernel on cuda. No device is needed: where there is none,
// plans are made for an H200.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "cases/cuda_device.h"
#include "cases/speed_classes.h"
#include "cases/table.h"

namespace weft::tests {
namespace {

std::string output_of(const std::string& command) {
  std::string text;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::array<char, 4096> part{};
  while (pipe && std::fgets(part.data(), part.size(), pipe.get())) text += part.data();
  return text;
}

// A device on which Hopper's kernels run, or false.
bool on_hopper(Stream& stream) {
  stream.backend = Backend::cuda;
  cases::pretend_cuda_device();
  for (const DeviceInfo& device : devices())
    if (device.backend == Backend::cuda && device.usable && device.detail.starts_with("sm_90")) {
      stream.device = device.device;
      return true;
    }
  return false;
}

TEST(CudaSpeed, NoCallOfTheSweepsIsSlow) {
  Stream stream;
  if (!on_hopper(stream)) GTEST_SKIP() << "this build has no cuda backend, or the device is not of Hopper's kind";
#ifndef WEFT_PYTHON
  GTEST_SKIP() << "no Python, which lists the calls";
#else
  std::istringstream lines(output_of(std::string(WEFT_PYTHON) + " " + WEFT_SOURCE_DIR + "/bench/sweep_shapes.py"));
  int count = 0;
  for (std::string op, options; lines >> op >> options; ++count) {
    const auto problem = cases::build(cases::shape_case(op), options);
    const Status status = problem->supports(stream);
    ASSERT_TRUE(status.ok()) << op << " " << options << ": " << status.message;
    const Choice choice = problem->choose(stream);
    EXPECT_NE(choice.speed, Speed::slow) << op << " " << options << " takes " << choice.kernel << ": " << choice.plan;
  }
  EXPECT_GT(count, 300);
#endif
}

TEST(CudaSpeed, EveryOpHasClasses) {
  std::set<std::string> ops;
  for (const cases::SpeedClass& one : cases::speed_classes()) {
    ops.insert(one.op);
    const auto speeds = cases::speeds_of(one, DType::f32, {Stream{Backend::cpu}, Stream{Backend::reference}});
    EXPECT_TRUE(speeds[0]) << one.op << ", " << one.sizes;
    EXPECT_EQ(speeds[1], Speed::slow) << one.op << ", " << one.sizes;
  }
  for (const std::string& op : cases::op_names()) EXPECT_TRUE(ops.contains(op)) << op;
}

}  // namespace
}  // namespace weft::tests
