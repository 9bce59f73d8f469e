// Running walks of the gated delta rule on the cpu: how a call is cut into independent pieces.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/common/parallel.h"
#include "cpu/delta/delta_params.h"
#include "weft/device.h"

namespace weft::cpu {

// How many value heads and state columns one piece takes. Any cut gives the same bits: heads and columns are independent.
struct WalkCut {
  int64_t heads = 1, columns = 0;  // of a group, of the state
  int64_t all_columns = 0;
  int64_t head_pieces = 1, column_pieces = 1;
  size_t bytes = 0;  // memory of one piece
};

WalkCut cut_walks(Isa isa, const DeltaHeads& heads, int64_t columns, int64_t sequences, int threads);

void run_walk(Isa isa, const DeltaTokens& tokens, const DeltaWalk& walk, void* memory);

// Runs every piece of `walks` walks over all key heads. set_up(n, walk) fills in tokens and states of walk n (heads and columns are
// set already) and says whether to run it. `bytes` >= cut.bytes is what each worker has of the scratch.
template <class SetUp>
void run_walks(Isa isa, int threads, const DeltaTokens& tokens, const WalkCut& cut, int64_t walks, Scratch scratch, size_t bytes,
               SetUp&& set_up) {
  const DeltaHeads& heads = tokens.heads;
  const int64_t per_key_head = cut.head_pieces * cut.column_pieces;
  parallel_for(threads, walks * heads.Hk * per_key_head, [&](int64_t i, int worker) {
    const int64_t piece = i % per_key_head;
    DeltaWalk walk;
    walk.hk = i / per_key_head % heads.Hk;
    walk.first_head = piece / cut.column_pieces * cut.heads;
    walk.last_head = std::min(walk.first_head + cut.heads, heads.group());
    walk.column = piece % cut.column_pieces * cut.columns;
    walk.columns = std::min(cut.columns, cut.all_columns - walk.column);
    if (set_up(i / (heads.Hk * per_key_head), walk))
      run_walk(isa, tokens, walk, static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * bytes);
  });
}

// out = x p + y for [rows, K] matrices and p [K, K]; x and y may be absent (view.data null), x and out the same. `memory` holds
// affine_memory_bytes.
size_t affine_memory_bytes(Isa isa);
void run_affine(Isa isa, const MatrixAt& x, const MatrixAt& p, const MatrixAt& y, const MatrixAt& out, int64_t rows, int64_t K,
                void* memory);

}  // namespace weft::cpu
