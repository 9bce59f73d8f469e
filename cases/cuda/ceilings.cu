// Measures the peak rates of a cuda device: see cases/cuda_device.h.
#include <algorithm>

#include "cases/cuda_device.h"
#include "cuda/common/launch.cuh"

namespace weft::cases {
namespace {

constexpr int kThreads = 512, kBytes = 16;

__global__ void __launch_bounds__(kThreads) read_all(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t all = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads;
#pragma unroll 8
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += step) {
    const uint4 x = data[i];
    all ^= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (all == 0x12345678u) *sink = all;  // never true for this data, but keeps the loads
}

__global__ void __launch_bounds__(kThreads) change_all(uint4* data, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  uint4 x = data[i];
  x.x += 1;
  data[i] = x;
}

constexpr int kChains = 8;

__global__ void __launch_bounds__(kThreads) multiply_all(int rounds, float* sink) {
  float c[kChains][4] = {};
  const uint32_t a = 0x3f803f80u + (threadIdx.x << 3), b = 0x3f003f00u + threadIdx.x;
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < kChains; ++i)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                   : "r"(a), "r"(a), "r"(a), "r"(a), "r"(b), "r"(b));
  float all = 0;
  for (int i = 0; i < kChains; ++i) all += c[i][0] + c[i][3];
  if (all == -1.0f) *sink = all;
}

}  // namespace

CudaCeilings cuda_ceilings(int device) {
  Stream stream;
  stream.backend = Backend::cuda;
  stream.device = device;
  Placement& memory = *cuda_placement(device);
  const int sms = cuda::facts_of(stream).multiprocessors;
  const int64_t bytes = int64_t{2} << 30, count = bytes / kBytes;
  uint8_t* data = memory.allocate(static_cast<size_t>(bytes));
  const auto best = [&](const std::function<void(const Stream&, size_t)>& call) {
    const std::vector<double> seconds = time_on_cuda(stream, 2, 9, 0, call).rested;
    return *std::min_element(seconds.begin(), seconds.end());
  };
  CudaCeilings found;
  found.rmw_gbps =
      2e-9 * static_cast<double>(bytes) / best([&](const Stream& on, size_t) {
        cuda::launch("cases", on, cuda::ceil_div(count, kThreads), kThreads, 0, change_all, reinterpret_cast<uint4*>(data), count);
      });
  found.read_gbps = 1e-9 * static_cast<double>(bytes) / best([&](const Stream& on, size_t) {
                      cuda::launch("cases", on, int64_t{4} * sms, kThreads, 0, read_all, reinterpret_cast<const uint4*>(data),
                                   count, reinterpret_cast<uint32_t*>(data));
                    });
  constexpr int kRounds = 4096;
  const double flops = 2.0 * 16 * 8 * 16 * kChains * kRounds * (kThreads / 32) * 2 * sms;
  found.gflops = 1e-9 * flops / best([&](const Stream& on, size_t) {
                   cuda::launch("cases", on, int64_t{2} * sms, kThreads, 0, multiply_all, kRounds, reinterpret_cast<float*>(data));
                 });
  memory.release(data);
  return found;
}

}  // namespace weft::cases
