// Copies of rows within a table: see move_on_stream in model/network/device.h.
#include <algorithm>

#include "cuda/runner.h"
#include "model/network/device.h"

namespace weft::model {
namespace {

constexpr const char* kOp = "model";
constexpr int kThreads = 256;
constexpr int kMost = 128;  // moves per launch

struct Moves {
  RowMove moves[kMost];
};

// A block per move, in words of 4 bytes.
__global__ void __launch_bounds__(kThreads) move_kernel(uint32_t* table, int64_t row_words, Moves all) {
  const RowMove move = all.moves[blockIdx.x];
  const uint32_t* from = table + move.from * row_words;
  uint32_t* to = table + move.to * row_words;
  for (int64_t i = threadIdx.x; i < move.count * row_words; i += kThreads) to[i] = from[i];
}

}  // namespace

void move_on_stream(const Stream& stream, void* table, size_t row_bytes, std::span<const RowMove> moves) {
  for (; !moves.empty(); moves = moves.subspan(std::min<size_t>(kMost, moves.size()))) {
    Moves some{};
    const size_t count = std::min<size_t>(kMost, moves.size());
    std::copy_n(moves.begin(), count, some.moves);
    weft::cuda::launch(kOp, stream, static_cast<int64_t>(count), kThreads, 0, move_kernel, static_cast<uint32_t*>(table),
                       static_cast<int64_t>(row_bytes / sizeof(uint32_t)), some);
  }
}

}  // namespace weft::model
