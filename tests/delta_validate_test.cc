// Every validation rule of delta_preprocess.h and delta_chunk.h, broken once, with the message that refuses it.
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/rules.h"
#include "weft/delta_chunk.h"
#include "weft/delta_preprocess.h"

namespace weft::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kT = 12, kHk = 2, kHv = 4, kK = 16, kV = 8, kN = 2;

Sequences packed() { return Sequences::packed(shared_memory().indices({0, 5, kT}), kN, 7); }

constexpr auto kNoMap = static_cast<HeadMap>(2);

const std::string kUneven = "is 5, wanted a divisor of T=12, or cu_seqlens for sequences of different lengths";

TEST(DeltaValidate, DeltaGates) {
  DeltaGatesArgs legal;
  legal.a = bf16({kT, kHv});
  legal.b = bf16({kT, kHv});
  legal.a_log = f32({kHv});
  legal.dt_bias = f32({kHv});
  legal.g = f32({kT, kHv});
  legal.beta = f32({kT, kHv});
  expect_rules<DeltaGatesArgs>("delta_gates", legal,
                               {{[](auto& a) { a.a = Tensor{}; }, "a", "is absent, wanted [T, Hv]"},
                                {[](auto& a) {
                                   a.a = i32({kT, kHv});
                                 },
                                 "a", "is i32, wanted f32, f16 or bf16"},
                                {[](auto& a) {
                                   a.b = bf16({kT, 3});
                                 },
                                 "b", "is [12, 3], wanted [T=12, Hv=4]"},
                                {[](auto& a) { a.b = Tensor{}; }, "b", "is absent, but b and beta go together"},
                                {[](auto& a) { a.beta = Tensor{}; }, "beta", "is absent, but b and beta go together"},
                                {[](auto& a) {
                                   a.beta = bf16({kT, kHv});
                                 },
                                 "beta", "is bf16, wanted f32"},
                                {[](auto& a) { a.a_log = bf16({kHv}); }, "a_log", "is bf16, wanted f32"},
                                {[](auto& a) { a.a_log = f32({3}); }, "a_log", "is [3], wanted [Hv=4]"},
                                {[](auto& a) {
                                   a.dt_bias = f32({kHv, kK});
                                 },
                                 "dt_bias", "is [4, 16], wanted [Hv=4]"},
                                {[](auto& a) { a.dt_bias = Tensor{}; }, "dt_bias", "is absent, wanted [Hv=4]"},
                                {[](auto& a) {
                                   a.g = bf16({kT, kHv});
                                 },
                                 "g", "is bf16, wanted f32"},
                                {[](auto& a) {
                                   a.a = bf16({kT, kHv, kK});
                                 },
                                 "dt_bias", "is [4], wanted [Hv=4, K=16]"},
                                {[](auto& a) { a.g = a.beta; }, "g", "overlaps beta in memory"}});
}

TEST(DeltaValidate, ShortConv) {
  ShortConvArgs legal;
  legal.x = bf16({kT, 6});
  legal.weight = f32({6, 4});
  legal.bias = f32({6});
  legal.y = bf16({kT, 6});
  legal.sequences = packed();
  legal.state_in = bf16({kN, 3, 6});
  legal.state_out = bf16({kN, 3, 6});
  legal.state_in_slots = i32({kN});
  legal.state_out_slots = i32({kN});
  legal.state_offsets = i32({kN});
  legal.has_initial = i32({kN});
  expect_rules<ShortConvArgs>(
      "short_conv", legal,
      {{[](auto& a) { a.x = Tensor{}; }, "x", "is absent, wanted [T, C]"},
       {[](auto& a) {
          a.weight = f32({5, 4});
        },
        "weight", "is [5, 4], wanted [C=6, W]"},
       {[](auto& a) {
          a.weight = f32({6, 1});
        },
        "weight", "has W=1 taps, wanted 2 to 8"},
       {[](auto& a) {
          a.weight = f32({6, 9});
        },
        "weight", "has W=9 taps, wanted 2 to 8"},
       {[](auto& a) { a.bias = f32({5}); }, "bias", "is [5], wanted [C=6]"},
       {[](auto& a) {
          a.y = bf16({11, 6});
        },
        "y", "is [11, 6], wanted [T=12, C=6]"},
       {[](auto& a) { a.activation = static_cast<Activation>(2); }, "activation", "is 2, wanted 0 to 1"},
       {[](auto& a) { a.activation = static_cast<Activation>(-1); }, "activation", "is -1, wanted 0 to 1"},
       {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven},
       {[](auto& a) {
          a.state_in = bf16({kN, 3, 5});
        },
        "state_in", "is [2, 3, 5], wanted [slots, L, C=6]"},
       {[](auto& a) {
          a.state_out = bf16({kN, 4, 6});
        },
        "state_out", "is [2, 4, 6], wanted [out slots, L=3, C=6]"},
       {[](auto& a) {
          a.state_in = a.state_out = bf16({kN, 2, 6});
        },
        "state_in", "holds L=2 rows, wanted at least W - 1 = 3"},
       {[](auto& a) {
          a.state_in = {}, a.state_out = bf16({kN, 2, 6});
        },
        "state_out", "holds L=2 rows, wanted at least W - 1 = 3"},
       {[](auto& a) {
          a.state_in_slots = {}, a.state_in = bf16({1, 3, 6});
        },
        "state_in", "has 1 slots and no slot indices, wanted at least N=2"},
       {[](auto& a) {
          a.state_in_slots = a.state_out_slots = {}, a.state_out = bf16({1, 3, 6});
        },
        "state_out", "has 1 slots and no slot indices, wanted at least N=2"},
       {[](auto& a) { a.state_in_slots = i32({3}); }, "state_in_slots", "is [3], wanted [N=2]"},
       {[](auto& a) { a.state_out_slots = f32({kN}); }, "state_out_slots", "is f32, wanted i32"},
       {[](auto& a) { a.state_offsets = i32({3}); }, "state_offsets", "is [3], wanted [N=2]"},
       {[](auto& a) { a.has_initial = i32({3}); }, "has_initial", "is [3], wanted [N=2]"},
       {[](auto& a) { a.state_out = a.state_in, a.state_out.sizes[0] = 1; }, "state_out", "overlaps state_in in memory"},
       {[](auto& a) { a.y = a.x, a.y.dtype = DType::f16; }, "y", "overlaps x in memory"}});
}

TEST(DeltaValidate, Norms) {
  expect_rules<L2NormArgs>("l2_norm", {f32({3, 4}), bf16({3, 4})},
                           {{[](auto& a) { a.x = Tensor{}; }, "x", "is absent, wanted [..., D]"},
                            {[](auto& a) { a.y = Tensor{}; }, "y", "is absent, wanted [..., D]"},
                            {[](auto& a) {
                               a.x = i32({3, 4});
                             },
                             "x", "is i32, wanted f32, f16 or bf16"},
                            {[](auto& a) {
                               a.y = bf16({3, 5});
                             },
                             "y", "is [3, 5], wanted the shape of x, [3, 4]"},
                            {[](auto& a) { a.y = bf16({12}); }, "y", "is [12], wanted the shape of x, [3, 4]"},
                            {[](auto& a) { a.x.rank = a.y.rank = 100; }, "x", "has rank 100, wanted 1 to 5"},
                            {[](auto& a) { a.eps = -1; }, "eps", "is -1.000000, wanted >= 0"},
                            {[](auto& a) { a.eps = kInfinity; }, "eps", "is inf, wanted a finite number"}});
  expect_rules<GatedRmsNormArgs>("gated_rms_norm", {bf16({3, 2, 4}), bf16({3, 2, 4}), f32({4}), bf16({3, 2, 4})},
                                 {{[](auto& a) {
                                     a.x = bf16({3, 8});
                                   },
                                   "x", "is [3, 8], wanted [T, H, D]"},
                                  {[](auto& a) {
                                     a.z = bf16({3, 2, 5});
                                   },
                                   "z", "is [3, 2, 5], wanted [T=3, H=2, D=4]"},
                                  {[](auto& a) { a.weight = f32({3}); }, "weight", "is [3], wanted [D=4]"},
                                  {[](auto& a) {
                                     a.y = i32({3, 2, 4});
                                   },
                                   "y", "is i32, wanted f32, f16 or bf16"},
                                  {[](auto& a) { a.eps = -1; }, "eps", "is -1.000000, wanted >= 0"},
                                  {[](auto& a) { a.gate = static_cast<Gate>(2); }, "gate", "is 2, wanted 0 to 1"},
                                  {[](auto& a) { a.gate = static_cast<Gate>(-1); }, "gate", "is -1, wanted 0 to 1"},
                                  {[](auto& a) { a.y = a.weight; }, "y", "is [4], wanted [T=3, H=2, D=4]"}});
}

TEST(DeltaValidate, ChunkCumsum) {
  expect_rules<ChunkCumsumArgs>("chunk_cumsum", {f32({kT, kHv}), f32({kT, kHv}), packed(), 64},
                                {{[](auto& a) { a.g = Tensor{}; }, "g", "is absent, wanted [T, Hv]"},
                                 {[](auto& a) {
                                    a.g = bf16({kT, kHv});
                                  },
                                  "g", "is bf16, wanted f32"},
                                 {[](auto& a) {
                                    a.g_cumsum = f32({kT, 3});
                                  },
                                  "g_cumsum", "is [12, 3], wanted [T=12, Hv=4]"},
                                 {[](auto& a) {
                                    a.g_cumsum = f32({kT, kHv, 3});
                                  },
                                  "g_cumsum", "is [12, 4, 3], wanted [T=12, Hv=4]"},
                                 {[](auto& a) {
                                    a.g = a.g_cumsum = f32({kT, kHv, 257});
                                  },
                                  "g", "has K=257, wanted 1 to 256"},
                                 {[](auto& a) { a.chunk = 48; }, "chunk", "is 48, wanted 16, 32 or 64"},
                                 {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven}});
}

TEST(DeltaValidate, ChunkKktAndInverse) {
  expect_rules<ChunkKktArgs>("chunk_kkt", {bf16({kT, kHk, kK}), f32({kT, kHv}), f32({kT, kHv}), f32({kT, kHv, 32}), packed(), 32},
                             {{[](auto& a) {
                                 a.k = f32({kT, kHk, 257});
                               },
                               "k", "has K=257, wanted 1 to 256"},
                              {[](auto& a) {
                                 a.k = f32({kT, 3, kK});
                               },
                               "k", "has 3 heads, wanted a positive divisor of the 4 heads of beta"},
                              {[](auto& a) {
                                 a.k = f32({kT, 0, kK});
                               },
                               "k", "has 0 heads, wanted a positive divisor of the 4 heads of beta"},
                              {[](auto& a) {
                                 a.beta = bf16({kT, kHv});
                               },
                               "beta", "is bf16, wanted f32"},
                              {[](auto& a) {
                                 a.g_cumsum = f32({kT, kHv, 3});
                               },
                               "g_cumsum", "is [12, 4, 3], wanted [T=12, Hv=4, K=16]"},
                              {[](auto& a) {
                                 a.a = f32({kT, kHv, 64});
                               },
                               "a", "is [12, 4, 64], wanted [T=12, Hv=4, C=32]"},
                              {[](auto& a) { a.chunk = 8; }, "chunk", "is 8, wanted 16, 32 or 64"},
                              {[](auto& a) { a.head_map = kNoMap; }, "head_map", "is 2, wanted 0 to 1"},
                              {[](auto& a) { a.sequences.count = -1; }, "sequences.count", "is -1, wanted 0 to 1048576"}});
  expect_rules<ChunkTriInverseArgs>("chunk_tri_inverse", {f32({kT, kHv, 16}), f32({kT, kHv, 16}), packed(), 16},
                                    {{[](auto& a) { a.chunk = 0; }, "chunk", "is 0, wanted 16, 32 or 64"},
                                     {[](auto& a) {
                                        a.a = f32({kT, kHv, 32});
                                      },
                                      "a", "is [12, 4, 32], wanted [T, Hv, C=16]"},
                                     {[](auto& a) {
                                        a.a_inv = bf16({kT, kHv, 16});
                                      },
                                      "a_inv", "is bf16, wanted f32"},
                                     {[](auto& a) {
                                        a.a_inv = f32({kT, 3, 16});
                                      },
                                      "a_inv", "is [12, 3, 16], wanted [T=12, Hv=4, C=16]"},
                                     {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven}});
}

TEST(DeltaValidate, ChunkWu) {
  ChunkWuArgs legal;
  legal.k = bf16({kT, kHk, kK});
  legal.v = bf16({kT, kHv, kV});
  legal.beta = f32({kT, kHv});
  legal.g_cumsum = f32({kT, kHv});
  legal.a_inv = f32({kT, kHv, 64});
  legal.w = bf16({kT, kHv, kK});
  legal.u = bf16({kT, kHv, kV});
  legal.sequences = packed();
  expect_rules<ChunkWuArgs>("chunk_wu", legal,
                            {{[](auto& a) {
                                a.v = bf16({11, kHv, kV});
                              },
                              "v", "is [11, 4, 8], wanted [T=12, Hv, V]"},
                             {[](auto& a) {
                                a.v = a.u = bf16({kT, kHv, 300});
                              },
                              "v", "has V=300, wanted 1 to 256"},
                             {[](auto& a) {
                                a.k = bf16({kT, kHk, 0}), a.w = bf16({kT, kHv, 0});
                              },
                              "k", "has K=0, wanted 1 to 256"},
                             {[](auto& a) {
                                a.k = bf16({kT, 8, kK});
                              },
                              "k", "has 8 heads, wanted a positive divisor of the 4 heads of v"},
                             {[](auto& a) {
                                a.beta = f32({kT, 3});
                              },
                              "beta", "is [12, 3], wanted [T=12, Hv=4]"},
                             {[](auto& a) { a.g_cumsum = Tensor{}; }, "g_cumsum", "is absent, wanted [T=12, Hv=4]"},
                             {[](auto& a) {
                                a.a_inv = bf16({kT, kHv, 64});
                              },
                              "a_inv", "is bf16, wanted f32"},
                             {[](auto& a) {
                                a.w = bf16({kT, kHv, kV});
                              },
                              "w", "is [12, 4, 8], wanted [T=12, Hv=4, K=16]"},
                             {[](auto& a) { a.u = Tensor{}; }, "u", "is absent, wanted [T=12, Hv=4, V=8]"},
                             {[](auto& a) { a.u = a.v; }, "u", "overlaps v in memory"},
                             {[](auto& a) { a.head_map = kNoMap; }, "head_map", "is 2, wanted 0 to 1"},
                             {[](auto& a) { a.chunk = 65; }, "chunk", "is 65, wanted 16, 32 or 64"},
                             {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven}});
}

TEST(DeltaValidate, ChunkStateAndOutput) {
  ChunkStateArgs state;
  state.k = bf16({kT, kHk, kK});
  state.w = bf16({kT, kHv, kK});
  state.u = bf16({kT, kHv, kV});
  state.g_cumsum = f32({kT, kHv});
  state.state_in = f32({kN, kHv, kV, kK});
  state.h = bf16({2, kHv, kV, kK});
  state.v_new = bf16({kT, kHv, kV});
  state.state_out = f32({kN, kHv, kV, kK});
  state.sequences = packed();
  expect_rules<ChunkStateArgs>(
      "chunk_state", state,
      {{[](auto& a) {
          a.w = bf16({kT, kHv, kV});
        },
        "w", "is [12, 4, 8], wanted [T=12, Hv, K=16]"},
       {[](auto& a) {
          a.u = bf16({kT, 3, kV});
        },
        "u", "is [12, 3, 8], wanted [T=12, Hv=4, V]"},
       {[](auto& a) {
          a.u = bf16({kT, kHv, 257});
        },
        "u", "has V=257, wanted 1 to 256"},
       {[](auto& a) {
          a.g_cumsum = bf16({kT, kHv});
        },
        "g_cumsum", "is bf16, wanted f32"},
       {[](auto& a) {
          a.k = bf16({kT, 3, kK});
        },
        "k", "has 3 heads, wanted a positive divisor of the 4 heads of u"},
       {[](auto& a) {
          a.state_in = f32({3, kHv, kV, kK});
        },
        "state_in", "is [3, 4, 8, 16], wanted [N=2, Hv=4, V=8, K=16]"},
       {[](auto& a) {
          a.state_out = f32({kN, kHv, kK, kV});
        },
        "state_out", "is [2, 4, 16, 8], wanted [N=2, Hv=4, V=8, K=16]"},
       {[](auto& a) {
          a.state_out = i32({kN, kHv, kV, kK});
        },
        "state_out", "is i32, wanted f32, f16 or bf16"},
       {[](auto& a) { a.h = Tensor{}; }, "h", "is absent, wanted [>= max_chunks, Hv=4, V=8, K=16]"},
       {[](auto& a) {
          a.h = bf16({1, kHv, kV, kK});
        },
        "h", "has 1 chunk rows, wanted at least max_chunks() = 2"},
       {[](auto& a) {
          a.v_new = bf16({kT, kHv, kK});
        },
        "v_new", "is [12, 4, 16], wanted [T=12, Hv=4, V=8]"},
       {[](auto& a) { a.head_map = kNoMap; }, "head_map", "is 2, wanted 0 to 1"},
       {[](auto& a) { a.chunk = 24; }, "chunk", "is 24, wanted 16, 32 or 64"},
       {[](auto& a) { a.state_out = a.state_in, a.state_out.dtype = DType::bf16; }, "state_out", "overlaps state_in in memory"},
       {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven}});
  ChunkOutputArgs output;
  output.q = bf16({kT, kHk, kK});
  output.k = state.k;
  output.v_new = state.v_new;
  output.h = state.h;
  output.g_cumsum = state.g_cumsum;
  output.o = bf16({kT, kHv, kV});
  output.sequences = state.sequences;
  expect_rules<ChunkOutputArgs>("chunk_output", output,
                                {{[](auto& a) {
                                    a.k = bf16({kT, 1, kK});
                                  },
                                  "k", "is [12, 1, 16], wanted [T=12, Hk=2, K=16]"},
                                 {[](auto& a) {
                                    a.q = a.k = bf16({kT, 3, kK});
                                  },
                                  "k", "has 3 heads, wanted a positive divisor of the 4 heads of v_new"},
                                 {[](auto& a) {
                                    a.q = a.k = bf16({kT, kHk, 257});
                                  },
                                  "k", "has K=257, wanted 1 to 256"},
                                 {[](auto& a) {
                                    a.v_new = bf16({kT, kHv, 0});
                                  },
                                  "v_new", "has V=0, wanted 1 to 256"},
                                 {[](auto& a) {
                                    a.g_cumsum = f32({kT, kHv, kV});
                                  },
                                  "g_cumsum", "is [12, 4, 8], wanted [T=12, Hv=4, K=16]"},
                                 {[](auto& a) {
                                    a.h = bf16({kN, kHv, kK, kV});
                                  },
                                  "h", "is [2, 4, 16, 8], wanted [>= max_chunks, Hv=4, V=8, K=16]"},
                                 {[](auto& a) {
                                    a.h = bf16({1, kHv, kV, kK});
                                  },
                                  "h", "has 1 chunk rows, wanted at least max_chunks() = 2"},
                                 {[](auto& a) {
                                    a.o = bf16({kT, kHv, kK});
                                  },
                                  "o", "is [12, 4, 16], wanted [T=12, Hv=4, V=8]"},
                                 {[](auto& a) { a.scale = kInfinity; }, "scale", "is inf, wanted a finite number"},
                                 {[](auto& a) { a.head_map = kNoMap; }, "head_map", "is 2, wanted 0 to 1"},
                                 {[](auto& a) { a.chunk = -16; }, "chunk", "is -16, wanted 16, 32 or 64"},
                                 {[](auto& a) { a.o = a.v_new; }, "o", "overlaps v_new in memory"},
                                 {[](auto& a) { a.sequences = Sequences::uniform(5); }, "sequences.count", kUneven}});
}

}  // namespace
}  // namespace weft::tests
