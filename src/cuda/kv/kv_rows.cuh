// Which rows of a cache a call encodes or decodes: its tokens, their positions and where the cache stores them.
#pragma once

#include "cuda/kv/cache_index.cuh"
#include "cuda/kv/kv_side.cuh"

namespace weft::cuda {

struct TokenRows {
  IndexView positions;
  SequencesView sequences;
  CacheIndex index;
  int64_t T = 0, longest = 0;  // longest: max_tokens()
};

template <class Args>
TokenRows token_rows(const Args& args) {
  const int64_t T = args.positions.size(0);
  return {indices_of(args.positions), view_of(args.sequences), cache_index(args.cache), T, max_tokens(args.sequences, T)};
}

}  // namespace weft::cuda
