// Lowers formats and caches: see kv_side.h.
#include "vulkan/kv/kv_side.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "common/hadamard_bits.h"
#include "core/fail.h"
#include "vulkan/common/facts.h"

namespace weft::vulkan {
namespace {

float largest_finite(DType dtype) { return dtype == DType::f16 ? 65504.0f : dtype == DType::bf16 ? 0x1.FEp127f : FLT_MAX; }

void lower_rotation(const KvFormat& format, SideView& view) {
  view.rotation = static_cast<uint32_t>(format.rotation);
  if (format.rotation == Rotation::dense) {
    view.dense = reinterpret_cast<uint64_t>(format.dense_rotation.data);
    view.dense_row = format.dense_rotation.stride(0);
  } else if (format.rotation == Rotation::srht) {
    const HadamardOrder order = hadamard_order(format.rotation_group);
    view.base = static_cast<uint32_t>(order.base);
    view.run = static_cast<uint32_t>(order.sylvester);
    view.rotate_scale = 1 / std::sqrt(static_cast<float>(format.rotation_group));
    std::copy(format.signs.begin(), format.signs.end(), view.signs);
    for (uint32_t i = 0; view.base > 1 && i < view.base; ++i) view.rows[i] = order.rows[i];
  }
}

}  // namespace

SideView side_view(const KvFormat& format) {
  SideView view;
  view.D = static_cast<uint32_t>(format.head_dim);
  view.code_bytes = static_cast<uint32_t>(code_bytes(format));
  view.passthrough = format.passthrough.has_value();
  if (view.passthrough) {
    view.value = static_cast<uint32_t>(*format.passthrough);
    return view;
  }
  lower_rotation(format, view);
  view.bits = static_cast<uint32_t>(format.bits);
  view.bytes_each = format.packing == Packing::byte;
  view.gain = static_cast<uint32_t>(format.gain_dtype);
  view.gain_group = static_cast<uint32_t>(format.gain_group);
  view.gain_bytes = static_cast<uint32_t>(gain_bytes(format));
  view.rule = static_cast<uint32_t>(format.gain_rule);
  view.tiny = format.tiny_norm;
  view.most = largest_finite(format.gain_dtype);
  if (format.gain_units == GainUnits::unit_vector) {
    view.unit = std::sqrt(static_cast<float>(format.gain_group));
    view.gain_factor = 1 / view.unit;
  }
  if (format.mean.present()) {
    view.mean = reinterpret_cast<uint64_t>(format.mean.data);
    view.mean_head = format.mean.stride(0);
  }
  const LanePlanes planes = lane_planes(format.bits, format.head_dim);
  view.planes = static_cast<uint32_t>(planes.count);
  for (int i = 0; i < planes.count; ++i) {
    view.plane_offset[i] = planes.plane[i].offset;
    view.plane_width[i] = static_cast<uint32_t>(planes.plane[i].width);
    view.plane_shift[i] = static_cast<uint32_t>(planes.plane[i].shift);
  }
  std::copy_n(format.codebook.begin(), size_t{1} << format.bits, view.levels);
  return view;
}

SideView side_view(const KvCache& cache, KvRole role) {
  const KvSide& side = role == KvRole::k ? cache.k : cache.v;
  SideView view = side_view(side.format);
  view.role_v = role == KvRole::v;
  view.tiles = cache.layout == KvLayout::tiles;
  view.lanes = view.tiles && cache.tile_order == TileOrder::lanes && !view.passthrough;
  const auto strides = [](const Tensor& t, uint64_t& data, int64_t& block, int64_t& head, int64_t& row) {
    const int64_t element = dtype_bytes(t.dtype);
    data = reinterpret_cast<uint64_t>(t.data);
    block = t.stride(0) * element;
    head = t.stride(1) * element;
    row = t.stride(2) * element;
  };
  strides(side.codes, view.codes, view.codes_block, view.codes_head, view.codes_row);
  if (side.gains.present()) strides(side.gains, view.gains, view.gains_block, view.gains_head, view.gains_row);
  view.words = (view.codes | static_cast<uint64_t>(view.codes_block | view.codes_head | view.codes_row)) % 4 == 0;
  return view;
}

CacheIndex cache_index(const KvCache& cache) {
  return {static_cast<int64_t>(cache.kind), blocks_of(cache),          cache.capacity(),         cache.pinned,
          indices_of(cache.slots),          indices_of(cache.lengths), view_of(cache.page_table)};
}

std::vector<uint32_t> rotation_constants(const SideView (&sides)[2]) {
  const auto kind = [](const SideView& side) -> uint32_t {
    if (side.rotation == static_cast<uint32_t>(Rotation::none)) return 0;
    return side.rotation == static_cast<uint32_t>(Rotation::srht) && side.base == 1 ? 1 : 2;
  };
  return {kind(sides[0]), kind(sides[1]), sides[0].mean != 0};
}

Status needs_bytes(const Stream& stream, const char* op) {
  const DeviceFacts& facts = facts_of(stream);
  if (facts.storage8) return {};
  return fail(Code::unsupported, op, "stream", "is on " + facts.properties.name + ", which lacks storageBuffer8BitAccess");
}

}  // namespace weft::vulkan
