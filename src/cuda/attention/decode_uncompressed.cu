// Uncompressed decode kernels on the host: which kernel a cache gets, and its lowered arguments.
#include "cuda/attention/decode_uncompressed.cuh"

namespace weft::cuda {
namespace {

UncompressedSide uncompressed_side(const KvCache& cache, const KvSide& side) {
  UncompressedSide view{side_addresses(side), code_bytes(side.format)};
  if (cache.layout == KvLayout::rows) view.row = view.tile, view.tile = kTileTokens * view.row;
  return view;
}

bool aligned_to_16(const UncompressedSide& side) {
  return (reinterpret_cast<uintptr_t>(side.data) | static_cast<uintptr_t>(side.block | side.head | side.tile | side.row)) % 16 == 0;
}

// How many numbers of the cache's type a number of q is the sum of. Relative to the largest number of its row, f16 holds what bf16
// does.
int planes_of(DType query, DType cache) {
  if (cache == DType::f16) return query == DType::f32 ? 2 : 1;
  return query == DType::f32 ? 3 : query == DType::f16 ? 2 : 1;
}

}  // namespace

bool decode_uncompressed_takes(const Stream& stream, const KvCache& cache) {
  constexpr int kMostStatic = 2 << 10;  // bytes of static shared memory
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  const int64_t D = k.head_dim;
  return k.passthrough && k.passthrough == v.passthrough && *k.passthrough != DType::f32 && v.head_dim == D &&
         (D == 64 || D == 128 || D == 256) && aligned_to_16(uncompressed_side(cache, cache.k)) &&
         aligned_to_16(uncompressed_side(cache, cache.v)) &&
         facts_of(stream).shared_bytes >= UncompressedShape<__nv_bfloat16, 256>::kSharedBytes + kMostStatic;
}

void launch_decode_uncompressed(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                                const PartialsPlan& plan, int64_t most_rows) {
  const DType type = *cache.k.format.passthrough;
  const UncompressedParams p{queries,
                             uncompressed_side(cache, cache.k),
                             uncompressed_side(cache, cache.v),
                             plan,
                             ceil_div(std::min(queries.longest * queries.group, most_rows), kUncompressedRows),
                             most_rows,
                             planes_of(queries.queries.q.dtype, type)};
  const int64_t blocks = queries.queries.sequences.count * queries.Hk * plan.splits * p.row_tiles;
  const auto enqueue = [&]<class Half, int D>() {
    launch_pdl(op, stream, blocks, 32 * kUncompressedWarps, UncompressedShape<Half, D>::kSharedBytes,
               decode_uncompressed_kernel<Half, D>, p);
  };
  const auto of_size = [&]<class Half>() {
    switch (cache.k.format.head_dim) {
      case 64: return enqueue.template operator()<Half, 64>();
      case 128: return enqueue.template operator()<Half, 128>();
      default: return enqueue.template operator()<Half, 256>();
    }
  };
  type == DType::f16 ? of_size.template operator()<__half>() : of_size.template operator()<__nv_bfloat16>();
}

}  // namespace weft::cuda
