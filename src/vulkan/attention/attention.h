// What the attention launchers share: queries, masks, partials and outputs lowered for shaders.
#pragma once

#include <vector>

#include "common/partials.h"
#include "vulkan/common/recorder.h"
#include "vulkan/kv/kv_side.h"

namespace weft::vulkan {

// The struct Partials of partials.glsl.
struct PartialsParams {
  uint64_t o = 0, m = 0, l = 0;
  int64_t o_token = 0, o_head = 0, o_block = 0, o_four = 0;
  int64_t m_token = 0, m_head = 0, m_block = 0, l_token = 0, l_head = 0, l_block = 0;
  float empty_m = 0;
  uint32_t pad = 0;
};
inline PartialsParams lowered(const PartialsView& view) {
  const auto address = [](const float* data) { return reinterpret_cast<uint64_t>(data); };
  return {address(view.o), address(view.m), address(view.l), view.o_token, view.o_head, view.o_block, view.o_four,
          view.m_token,    view.m_head,     view.m_block,    view.l_token, view.l_head, view.l_block, view.empty_m};
}

struct OutputsView {
  View o, lse;
  Indices sinks;
};
inline OutputsView outputs_of(const Tensor& o, const Tensor& lse, const Tensor& sinks) {
  return {view_of(o), view_of(lse), indices_of(sinks)};
}

struct MergeParams {
  SideView sides[2]{};  // the first is V's format
  PartialsParams in;
  OutputsView outputs{};
  SequencesView sequences;
  int64_t splits = 0, longest = 0, Hq = 0, group = 1;
  int64_t most = INT64_MAX;  // sequences with more query tokens have no partials and are skipped
};
Step prepare_merge(const char* op, const Stream& stream, const MergeParams& params);

// The struct Splits of query.glsl.
struct SplitParams {
  int64_t count = 1, each = 0, least = 0, most = -1, by_sequence = 0, from_rows = 0, to_rows = INT64_MAX;
};

// The struct Queries of query.glsl.
struct QueriesView {
  View q;
  Indices positions;
  SequencesView sequences;
  int64_t longest = 0, heads = 1, group = 1, row_tiles = 0, window = 0;
  uint32_t causal = 1, rotated = 0;
  float softcap = 0, scale = 1;
};
QueriesView queries_view(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask);

// Sizes of the shaders that decode tiles of tokens into shared memory.
struct TileShape {
  int64_t rows = 0, tokens = 0, columns = 0;  // query rows of a workgroup, tokens of a tile, coordinates of a thread
};
// D: the largest head size that the shader reads. rows: the most query rows of a sequence and KV head.
TileShape tile_shape(int64_t D, int64_t rows);
// The specialization constants of a shader: `own`, then the constants of its sides.
std::vector<uint32_t> constants_of(std::vector<uint32_t> own, const SideView (&sides)[2]);
Choice describe_tiles(const char* op, const TileShape& shape, const std::string& more = "");

struct PartialsCall {
  SideView sides[2]{};
  CacheIndex index{};
  QueriesView queries{};
  OutputsView outputs{};
  PartialsParams out{};
  SplitParams splits{};
};
PartialsCall partials_call(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask);
// Sets queries.row_tiles by the tile shape, and prepares attention_partials.comp.
Step prepare_partials(const char* op, const Stream& stream, PartialsCall call);

// V's format as the output needs it. An output that stays rotated needs neither the rotation nor the mean. Otherwise the shader
// undoes the rotation and adds the mean.
inline SideView output_format(SideView v, KvDomain domain) {
  if (domain == KvDomain::rotated) {
    v.rotation = static_cast<uint32_t>(Rotation::none);
    v.mean = 0;
  }
  return v;
}

}  // namespace weft::vulkan
