// Attention over a compressed KV cache: encode a few tokens at 4 bits, attend, and compare with an uncompressed cache.
#include <weft/weft.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 48, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64, kCapacity = 64;

std::vector<float> gaussian(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(engine);
  return values;
}

// The last token attends to all tokens through a cache in the named recipe.
std::vector<float> attend(const char* recipe_name, const weft::Stream& stream) {
  using weft::dense, weft::DType;
  const weft::KvRecipe recipe = weft::kv_recipe(recipe_name, kHeadDim, kHeadDim);
  // Allocates the layout that the backend reads fastest: here tiles of 64 tokens.
  weft::OwnedKvCache cache(stream, recipe, {.kv_heads = kKvHeads, .capacity = kCapacity});
  std::printf("%-10s in %s: %3d bytes per token and head\n", recipe.id.c_str(),
              cache.view().layout == weft::KvLayout::tiles ? "tiles" : "rows", static_cast<int>(bytes_per_token(recipe)));

  const std::vector<float> k = gaussian(kTokens * kKvHeads * kHeadDim, 1), v = gaussian(kTokens * kKvHeads * kHeadDim, 2);
  const std::vector<float> q = gaussian(kQueryHeads * kHeadDim, 3);
  std::vector<float> o(static_cast<size_t>(kQueryHeads * kHeadDim));
  std::vector<int32_t> positions(kTokens);
  for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;

  weft::Memory scratch;
  weft::KvEncodeArgs encode;
  encode.k = dense(k.data(), DType::f32, {kTokens, kKvHeads, kHeadDim});
  encode.v = dense(v.data(), DType::f32, {kTokens, kKvHeads, kHeadDim});
  encode.positions = dense(positions.data(), DType::i32, {kTokens});
  encode.cache = cache.view();
  kv_encode(stream, encode, scratch.at_least(scratch_bytes(stream, encode)));
  cache.lengths()[0] = kTokens;

  weft::CompressedAttentionArgs attention;
  attention.queries.q = dense(q.data(), DType::f32, {1, kQueryHeads, kHeadDim});
  attention.cache = cache.view();
  attention.o = dense(o.data(), DType::f32, {1, kQueryHeads, kHeadDim});
  compressed_attention(stream, attention, scratch.at_least(scratch_bytes(stream, attention)));
  return o;
}

}  // namespace

int main() {
  const weft::Stream stream{weft::Backend::cpu};
  const std::vector<float> exact = attend("f32", stream), compressed = attend("4v4", stream);
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(compressed[i] - exact[i], 2);
    norm += std::pow(exact[i], 2);
  }
  const double relative = std::sqrt(error / norm);
  std::printf("relative error of 4-bit keys and values: %.3f\n", relative);
  return relative < 0.25 ? 0 : 1;
}
