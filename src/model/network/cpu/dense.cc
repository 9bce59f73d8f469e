// GEMMs of dense layers, with threads over blocks of outputs: see dense.h.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/network/cpu/dense.cc"
#include "cpu/runner-inl.h"
// clang-format on
#include "model/network/cpu/dense-inl.h"

#if HWY_ONCE

#include "model/network/cpu/dense.h"

namespace weft::model {

HWY_EXPORT(dense_block);

namespace {

// Rows of x in one work item: they fit into the second-level cache.
constexpr int64_t kItemTokens = 128;
// Multiplications that make another thread worthwhile. The number is small because consecutive layers find the threads still awake.
constexpr double kOperationsPerThread = 100e3;
// Work items per thread, so that uneven items balance.
constexpr int64_t kItemsPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void dense(const Stream& stream, std::span<const DenseTask> tasks) {
  double operations = 0;
  for (const DenseTask& task : tasks)
    operations += static_cast<double>(task.M) * static_cast<double>(task.w.rows) * static_cast<double>(task.w.cols);
  const int threads =
      static_cast<int>(std::clamp(operations / kOperationsPerThread, 1.0, static_cast<double>(cpu::thread_count(stream))));
  // Columns of a work item, a multiple of kBlockRows, such that all items take about the same time.
  const double share = operations / static_cast<double>(threads * kItemsPerThread);
  const auto columns_of = [&](const DenseTask& task) {
    const double column =
        static_cast<double>(std::min(task.M, kItemTokens)) * static_cast<double>(std::max<int64_t>(1, task.w.cols));
    const auto wanted = static_cast<int64_t>(share / std::max(1.0, column));
    return std::clamp<int64_t>(wanted / kBlockRows, 1, 64) * kBlockRows;
  };
  int64_t items = 0;
  for (const DenseTask& task : tasks) items += ceil_div(task.w.rows, columns_of(task)) * ceil_div(task.M, kItemTokens);

  const auto kernel = WEFT_KERNEL(stream.isa, dense_block);
  cpu::parallel_for(threads, items, [&](int64_t i, int) {
    for (const DenseTask& task : tasks) {
      const int64_t columns = columns_of(task), across = ceil_div(task.w.rows, columns),
                    own = across * ceil_div(task.M, kItemTokens);
      if (i >= own) {
        i -= own;
        continue;
      }
      const int64_t n = i % across * columns, m = i / across * kItemTokens;
      kernel(task, {n, std::min(task.w.rows, n + columns), m, std::min(task.M, m + kItemTokens)});
      return;
    }
  });
}

}  // namespace weft::model

#endif  // HWY_ONCE
