// Chunk scans of the gated delta rule on the cpu: how a call is split into independent tasks, and how they run.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/common/parallel.h"
#include "cpu/delta/delta_params.h"
#include "weft/device.h"

namespace weft::cpu {

// How many value heads and state columns one task takes. Every split gives the same bits: heads and columns are independent.
struct ScanSplit {
  int64_t heads = 1, columns = 0;              // of a task: value heads of a key head's group, columns of the state
  int64_t all_columns = 0;                     // of the state
  int64_t head_splits = 1, column_splits = 1;  // tasks of a key head are head_splits x column_splits
  size_t bytes = 0;                            // scratch of one task
};

ScanSplit split_scans(Isa isa, const DeltaHeads& heads, int64_t columns, int64_t sequences, int threads);

void run_scan(Isa isa, const DeltaTokens& tokens, const ScanTask& task, void* memory);

// Runs `scans` scans over all key heads, as tasks. set_up(n, task) fills in the tokens and states of a task of scan n, whose heads
// and columns are set already, and returns whether to run it. Each worker has `bytes` >= split.bytes of the scratch.
template <class SetUp>
void run_scans(Isa isa, Threads threads, const DeltaTokens& tokens, const ScanSplit& split, int64_t scans, Scratch scratch,
               size_t bytes, SetUp&& set_up) {
  const DeltaHeads& heads = tokens.heads;
  const int64_t per_key_head = split.head_splits * split.column_splits;
  parallel_for(threads, scans * heads.Hk * per_key_head, [&](int64_t i, int worker) {
    const int64_t part = i % per_key_head;
    ScanTask task;
    task.hk = i / per_key_head % heads.Hk;
    task.first_head = part / split.column_splits * split.heads;
    task.last_head = std::min(task.first_head + split.heads, heads.group());
    task.column = part % split.column_splits * split.columns;
    task.columns = std::min(split.columns, split.all_columns - task.column);
    if (set_up(i / (heads.Hk * per_key_head), task))
      run_scan(isa, tokens, task, static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * bytes);
  });
}

// out = x p + y for [rows, K] matrices and p [K, K]. x and y may be absent (view.data null); x and out may be the same. `memory`
// has affine_memory_bytes() bytes.
size_t affine_memory_bytes(Isa isa);
void run_affine(Isa isa, const MatrixAt& x, const MatrixAt& p, const MatrixAt& y, const MatrixAt& out, int64_t rows, int64_t K,
                void* memory);

}  // namespace weft::cpu
