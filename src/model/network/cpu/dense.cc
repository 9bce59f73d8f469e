// Dense layers: blocks of outputs handed out to threads. See dense.h.
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

// Rows of x that one piece of work takes: they stay in the second cache.
constexpr int64_t kPieceTokens = 128;
// Multiplications that are done before another thread has begun: consecutive layers find the threads still awake.
constexpr double kOperationsPerThread = 100e3;
// Pieces that each thread should find, so that uneven ones even out.
constexpr int64_t kPiecesPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void dense(const Stream& stream, std::span<const DenseTask> tasks) {
  double operations = 0;
  for (const DenseTask& task : tasks)
    operations += static_cast<double>(task.M) * static_cast<double>(task.w.rows) * static_cast<double>(task.w.cols);
  const int threads =
      static_cast<int>(std::clamp(operations / kOperationsPerThread, 1.0, static_cast<double>(cpu::thread_count(stream))));
  // Columns of a piece, so that pieces are about equal; a multiple of the block.
  const double share = operations / static_cast<double>(threads * kPiecesPerThread);
  const auto cut = [&](const DenseTask& task) {
    const double column =
        static_cast<double>(std::min(task.M, kPieceTokens)) * static_cast<double>(std::max<int64_t>(1, task.w.cols));
    const auto wanted = static_cast<int64_t>(share / std::max(1.0, column));
    return std::clamp<int64_t>(wanted / kBlockRows, 1, 64) * kBlockRows;
  };
  int64_t pieces = 0;
  for (const DenseTask& task : tasks) pieces += ceil_div(task.w.rows, cut(task)) * ceil_div(task.M, kPieceTokens);

  const auto kernel = WEFT_KERNEL(stream.isa, dense_block);
  cpu::parallel_for(threads, pieces, [&](int64_t i, int) {
    for (const DenseTask& task : tasks) {
      const int64_t columns = cut(task), across = ceil_div(task.w.rows, columns), own = across * ceil_div(task.M, kPieceTokens);
      if (i >= own) {
        i -= own;
        continue;
      }
      const int64_t n = i % across * columns, m = i / across * kPieceTokens;
      kernel(task, {n, std::min(task.w.rows, n + columns), m, std::min(task.M, m + kPieceTokens)});
      return;
    }
  });
}

}  // namespace weft::model

#endif  // HWY_ONCE
