// Attention over a compressed KV cache: encode a few tokens at 4 bits, attend, and compare with an uncompressed cache.
#include <weft/weft.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 48, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64, kCapacity = 64;

// Memory with the alignment that scratch needs.
struct alignas(weft::kScratchAlignment) Block {
  std::byte bytes[weft::kScratchAlignment];
};
using Blocks = std::vector<Block>;
Blocks blocks(size_t bytes) { return Blocks(bytes / sizeof(Block) + 1); }

std::vector<float> gaussian(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(engine);
  return values;
}

// One side of a cache of one sequence, in rows, or in tiles of 64 tokens, which attention reads fastest.
struct Side {
  Blocks memory, gains;
  weft::KvSide view;

  Side(const weft::KvFormat& format, weft::KvLayout layout) {
    using weft::dense, weft::DType;
    view.format = format;
    if (layout == weft::KvLayout::tiles) {
      const int64_t tiles = kCapacity / weft::kTileTokens, bytes = tile_bytes(format);
      memory = blocks(static_cast<size_t>(kKvHeads * tiles * bytes));
      view.codes = dense(memory.data(), DType::u8, {1, kKvHeads, tiles, bytes});
      return;
    }
    memory = blocks(static_cast<size_t>(kKvHeads * kCapacity * code_bytes(format)));
    if (format.passthrough) {
      view.codes = dense(memory.data(), *format.passthrough, {1, kKvHeads, kCapacity, kHeadDim});
      return;
    }
    gains = blocks(static_cast<size_t>(kKvHeads * kCapacity * gain_bytes(format)));
    view.codes = dense(memory.data(), DType::u8, {1, kKvHeads, kCapacity, code_bytes(format)});
    view.gains = dense(gains.data(), format.gain_dtype, {1, kKvHeads, kCapacity, kHeadDim / format.gain_group});
  }
};

// The last token attends to all tokens through a cache in the named recipe and layout.
std::vector<float> attend(const char* recipe_name, weft::KvLayout layout, const weft::Stream& stream) {
  const weft::KvRecipe recipe = weft::kv_recipe(recipe_name, kHeadDim, kHeadDim);
  std::printf("%-10s in %s: %3d bytes per token and head\n", recipe.id.c_str(), layout == weft::KvLayout::tiles ? "tiles" : "rows",
              static_cast<int>(bytes_per_token(recipe)));

  std::vector<float> k = gaussian(kTokens * kKvHeads * kHeadDim, 1), v = gaussian(kTokens * kKvHeads * kHeadDim, 2);
  std::vector<float> q = gaussian(kQueryHeads * kHeadDim, 3), o(static_cast<size_t>(kQueryHeads * kHeadDim));
  std::vector<int32_t> positions(kTokens), lengths{kTokens};
  for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;

  Side k_side(recipe.k, layout), v_side(recipe.v, layout);
  weft::KvCache cache;
  cache.layout = layout;
  cache.tile_order = weft::TileOrder::lanes;  // ignored in rows
  cache.k = k_side.view;
  cache.v = v_side.view;
  cache.lengths = weft::dense(lengths.data(), weft::DType::i32, {1});

  weft::KvEncodeArgs encode;
  encode.k = weft::dense(k.data(), weft::DType::f32, {kTokens, kKvHeads, kHeadDim});
  encode.v = weft::dense(v.data(), weft::DType::f32, {kTokens, kKvHeads, kHeadDim});
  encode.positions = weft::dense(positions.data(), weft::DType::i32, {kTokens});
  encode.cache = cache;
  Blocks scratch = blocks(scratch_bytes(stream, encode));
  kv_encode(stream, encode, {scratch.data(), scratch.size() * sizeof(Block)});

  weft::CompressedAttentionArgs attention;
  attention.queries.q = weft::dense(q.data(), weft::DType::f32, {1, kQueryHeads, kHeadDim});
  attention.cache = cache;
  attention.o = weft::dense(o.data(), weft::DType::f32, {1, kQueryHeads, kHeadDim});
  scratch = blocks(scratch_bytes(stream, attention));
  compressed_attention(stream, attention, {scratch.data(), scratch.size() * sizeof(Block)});
  return o;
}

}  // namespace

int main() {
  const weft::Stream stream{weft::Backend::cpu};
  const std::vector<float> exact = attend("f32", weft::KvLayout::rows, stream);
  bool near = true;
  for (const weft::KvLayout layout : {weft::KvLayout::rows, weft::KvLayout::tiles}) {
    const std::vector<float> compressed = attend("4v4", layout, stream);
    double error = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      error += std::pow(compressed[i] - exact[i], 2);
      norm += std::pow(exact[i], 2);
    }
    const double relative = std::sqrt(error / norm);
    std::printf("relative error of 4-bit keys and values: %.3f\n", relative);
    near = near && relative < 0.25;
  }
  return near ? 0 : 1;
}
