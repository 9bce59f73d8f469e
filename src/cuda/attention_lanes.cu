// Attention over tiles in lanes order on tensor cores: the kernels that exist, and which of them a cache gets.
#include "cuda/attention_lanes.cuh"

#include <cmath>

#include "cuda/attention_lanes.h"
#include "cuda/launch.cuh"

namespace weft::cuda {
namespace {

using Launch = void (*)(const char*, const Stream&, const LanesParams&);

template <int KBits, int VBits, int D>
void launch_one(const char* op, const Stream& stream, const LanesParams& p) {
  using Shape = LanesShape<KBits, VBits, D>;
  launch(op, stream, p.queries.queries.sequences.count * p.queries.Hk * p.plan.count * p.queries.row_tiles, 32 * Shape::kWarps,
         Shape::kShared, lanes_kernel<KBits, VBits, D>, p);
}

struct Kernel {
  int k_bits, v_bits, D, warps;
  Launch launch;
};
template <int KBits, int VBits, int D>
constexpr Kernel kernel() {
  return {KBits, VBits, D, LanesShape<KBits, VBits, D>::kWarps, launch_one<KBits, VBits, D>};
}

constexpr Kernel kKernels[] = {
    kernel<4, 4, 64>(), kernel<4, 4, 128>(), kernel<4, 4, 256>(), kernel<8, 4, 64>(), kernel<8, 4, 128>(), kernel<8, 4, 256>(),
    kernel<4, 2, 64>(), kernel<4, 2, 128>(), kernel<4, 2, 256>(), kernel<8, 8, 64>(), kernel<8, 8, 128>(), kernel<8, 8, 256>(),
    kernel<2, 2, 128>(),
};

bool side_fits(const KvFormat& format) {
  return !format.passthrough && format.grid_step && format.gain_group == format.head_dim && format.gain_dtype == DType::f16;
}

// Levels of 8 bits are not looked up: they must be all of the grid.
bool whole_grid(const KvFormat& format) {
  for (int i = 0; format.bits == 8 && i < 256; ++i)
    if (std::floor(format.codebook[static_cast<size_t>(i)] / *format.grid_step) != static_cast<float>(i - 128)) return false;
  return true;
}

const Kernel* find(const KvCache& cache) {
  if (cache.layout != KvLayout::tiles || cache.tile_order != TileOrder::lanes) return nullptr;
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  if (!side_fits(k) || !side_fits(v) || !whole_grid(k) || !whole_grid(v) || k.head_dim != v.head_dim) return nullptr;
  for (const Kernel& kernel : kKernels)
    if (kernel.k_bits == k.bits && kernel.v_bits == v.bits && kernel.D == k.head_dim) return &kernel;
  return nullptr;
}

LanesSide lanes_side(const KvSide& side, int bias) {
  const KvFormat& format = side.format;
  LanesSide view;
  view.data = static_cast<const uint8_t*>(side.codes.data);
  view.block = side.codes.stride(0);
  view.head = side.codes.stride(1);
  view.tile = side.codes.stride(2);
  for (int i = 0; format.bits <= 4 && i < 1 << format.bits; ++i) {
    const int n = static_cast<int>(std::floor(format.codebook[static_cast<size_t>(i)] / *format.grid_step)) + bias;
    view.table[i / 4] |= (static_cast<uint32_t>(n) & 0xff) << (i % 4 * 8);
  }
  view.step = *format.grid_step;
  if (format.gain_units == GainUnits::unit_vector) view.step /= std::sqrt(static_cast<float>(format.gain_group));
  return view;
}

}  // namespace

bool lanes_kernel_fits(const KvCache& cache) { return find(cache) != nullptr; }
int lanes_kernel_warps(const KvCache& cache) { return find(cache)->warps; }

void launch_lanes(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache, const PartialsPlan& plan) {
  find(cache)->launch(op, stream, {queries, lanes_side(cache.k, 0), lanes_side(cache.v, 128), plan});
}

}  // namespace weft::cuda
