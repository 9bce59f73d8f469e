// Attention on cuda: numbers that are not finite reach exactly the rows that see them. Skipped where there is no device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cases/cuda_device.h"
#include "cases/problem.h"
#include "cases/table.h"
#include "weft/compressed_attention.h"

namespace weft::cases {
namespace {

using Attention = OpProblem<CompressedAttentionArgs>;

// Sets number `d` of token `token` of V, of an uncompressed cache in tiles of bf16.
void set_value(const KvCache& cache, int64_t token, int64_t d, uint16_t bits) {
  const int64_t D = cache.v.format.head_dim;
  auto* const bytes = static_cast<uint8_t*>(cache.v.codes.data) + token / kTileTokens * cache.v.codes.stride(2);
  std::memcpy(bytes + ((token % kTileTokens) * D + d) * 2, &bits, 2);
}

// A causal call of 64 tokens over 200, whose token 150 holds a NaN, with or without a softcap. `kernel`: which one it must take.
void expect_nan_in_rows_that_see_it(const std::string& options, const char* kernel, int64_t new_tokens) {
  Stream stream;
  stream.backend = Backend::cuda;
  const auto built =
      build({"compressed_attention", "test",
             options + ",recipe=bf16,layout=tiles,D=128,N=1,Hq=4,Hk=1,context=200,odtype=f32,lse=0,T=" + std::to_string(new_tokens),
             Tier::fast, ""});
  auto& problem = dynamic_cast<Attention&>(*built);
  constexpr int64_t kBad = 198;
  set_value(problem.args.cache, kBad, 5, 0x7fc0);
  EXPECT_EQ(problem.choose(stream).kernel, kernel);
  Placement& placement = placement_of(stream);
  Image image(problem.memory(), placement);
  const size_t bytes = problem.scratch_bytes(stream);
  uint8_t* lent = placement.allocate(bytes);
  problem.run(stream, image, {lent, bytes});
  image.fetch();
  placement.release(lent);
  const Tensor o = image.fetched(problem.args.o);
  for (int64_t t = 0; t < new_tokens; ++t) {
    const bool sees = 200 - new_tokens + t >= kBad;
    for (int64_t h = 0; h < 4; ++h) {
      const double x = get(o, t * o.stride(0) + h * o.stride(1) + 5);
      EXPECT_EQ(std::isnan(x), sees) << options << ", token " << t << ", head " << h << ": " << x;
    }
  }
}

TEST(CudaAttention, NaNReachesTheRowsThatSeeIt) {
  bool device = false;
  for (const DeviceInfo& info : devices())
    device |= info.backend == Backend::cuda && info.usable && info.detail.starts_with("sm_90");
  if (!device) GTEST_SKIP() << "no Hopper device here";
  for (const char* softcap : {"softcap=0", "softcap=10"}) {
    expect_nan_in_rows_that_see_it(std::string(softcap) + ",order=lanes", "cuda.compressed_attention.prefill_dense", 64);
    expect_nan_in_rows_that_see_it(std::string(softcap) + ",order=lanes", "cuda.compressed_attention.decode_uncompressed", 3);
  }
}

}  // namespace
}  // namespace weft::cases
