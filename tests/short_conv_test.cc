// short_conv on the reference: the formula, states of every length, rollback, varlen, slots and in-place use.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"
#include "weft/delta_preprocess.h"

namespace weft::tests {
namespace {

using cases::get;
using cases::Memory;
using cases::Rng;
using cases::set;

// One sequence of T tokens with a state of L rows; inputs, weights and state are random.
struct Conv {
  Conv(int64_t T, int64_t C, int64_t W, int64_t L, DType dtype = DType::f32, uint64_t seed = 1) : rng(seed) {
    args.x = memory.make(dtype, {T, C});
    args.weight = memory.make(dtype, {C, W});
    args.bias = memory.make(dtype, {C});
    args.y = memory.make(dtype, {T, C});
    args.state_in = memory.make(dtype, {1, L, C});
    args.state_out = memory.make(dtype, {1, L, C});
    for (const Tensor& t : {args.x, args.weight, args.bias, args.state_in}) cases::fill_normal(t, rng);
  }
  Memory memory;
  Rng rng;
  ShortConvArgs args;
};

// y and the next state of channel c by the definition: ext = [rows of the state up to the history's end | x].
void expect_definition(const ShortConvArgs& args, int64_t offset) {
  const int64_t T = args.x.size(0), C = args.x.size(1), W = args.weight.size(1), L = args.state_in.size(1);
  for (int64_t c = 0; c < C; ++c) {
    std::vector<double> ext;
    for (int64_t l = 0; l < offset + W - 1; ++l) ext.push_back(get(args.state_in, l * C + c));
    for (int64_t t = 0; t < T; ++t) ext.push_back(get(args.x, t * args.x.strides[0] + c));
    for (int64_t t = 0; t < T; ++t) {
      double sum = get(args.bias, c), size = std::abs(sum);
      for (int64_t m = 0; m < W; ++m) {
        // Counted from the newest row: the last tap multiplies the current token.
        const double term =
            get(args.weight, c * W + W - 1 - m) * ext[ext.size() - static_cast<size_t>(T - t) - static_cast<size_t>(m)];
        sum += term;
        size += std::abs(term);
      }
      const double want = args.activation == Activation::silu ? sum / (1 + std::exp(-sum)) : sum;
      EXPECT_NEAR(get(args.y, t * args.y.strides[0] + c), want, kUnit * (std::abs(want) + 1e-6 * size));
    }
    for (int64_t l = 0; l < L; ++l) {
      const int64_t from_end = L - l;
      const double want = from_end <= static_cast<int64_t>(ext.size()) ? ext[ext.size() - static_cast<size_t>(from_end)] : 0;
      EXPECT_EQ(get(args.state_out, l * C + c), want) << "row " << l;
    }
  }
}

TEST(ShortConv, ByHand) {
  Conv conv(2, 1, 4, 3);
  ShortConvArgs& args = conv.args;
  args.bias = Tensor{};
  args.activation = Activation::none;
  for (int64_t m = 0; m < 4; ++m) set(args.weight, m, std::pow(10.0, static_cast<double>(3 - m)));  // 1000, 100, 10, 1
  for (int64_t l = 0; l < 3; ++l) set(args.state_in, l, static_cast<double>(l + 1));                // 1, 2, 3
  set(args.x, 0, 4);
  set(args.x, 1, 5);
  short_conv(kReference, args);
  EXPECT_EQ(get(args.y, 0), 1234);
  EXPECT_EQ(get(args.y, 1), 2345);
  for (int64_t l = 0; l < 3; ++l) EXPECT_EQ(get(args.state_out, l), static_cast<double>(l + 3));
}

TEST(ShortConv, EveryWidthAndLength) {
  for (int64_t W = 2; W <= 8; ++W)
    for (int64_t T : {0, 1, 2, 3, 6, 7, 8, 9, 33})
      for (int64_t extra : {0, 1, 5})
        for (Activation activation : {Activation::none, Activation::silu}) {
          Conv conv(T, 3, W, W - 1 + extra, DType::f32, static_cast<uint64_t>(W * 100 + T));
          conv.args.activation = activation;
          short_conv(kReference, conv.args);
          expect_definition(conv.args, extra);
          EXPECT_TRUE(conv.memory.guards_intact());
        }
}

TEST(ShortConv, WithoutStatesHistoryIsZero) {
  Conv conv(5, 2, 4, 3);
  ShortConvArgs args = conv.args;
  args.state_in = args.state_out = Tensor{};
  short_conv(kReference, args);
  cases::fill(conv.args.state_in, 0);
  const std::vector<double> y = cases::values(args.y);
  short_conv(kReference, conv.args);
  EXPECT_EQ(cases::values(args.y), y);
}

// A short sequence that starts without history has zeros before its tokens in the state.
TEST(ShortConv, ShortSequencesPadTheirStateWithZeros) {
  Conv conv(2, 1, 4, 6);
  ShortConvArgs args = conv.args;
  args.state_in = Tensor{};
  short_conv(kReference, args);
  for (int64_t l = 0; l < 4; ++l) EXPECT_EQ(get(args.state_out, l), 0);
  for (int64_t l = 4; l < 6; ++l) EXPECT_EQ(get(args.state_out, l), get(args.x, l - 4));
}

TEST(ShortConv, PiecesAreTheWhole) {
  const int64_t T = 20, C = 3, W = 4;
  Conv conv(T, C, W, W - 1);
  short_conv(kReference, conv.args);
  for (int64_t piece : {1, 2, 3, 4, 7, 10}) {
    const Tensor y = conv.memory.make(DType::f32, {T, C}), state = conv.memory.make(DType::f32, {1, W - 1, C});
    cases::copy(conv.args.state_in, state);
    for (int64_t begin = 0; begin < T; begin += piece) {
      ShortConvArgs args = conv.args;
      args.x = rows_of(conv.args.x, begin, std::min(begin + piece, T));
      args.y = rows_of(y, begin, std::min(begin + piece, T));
      args.state_in = args.state_out = state;  // in place, also where the piece is shorter than the history
      short_conv(kReference, args);
    }
    EXPECT_TRUE(cases::same_bits(y, conv.args.y)) << "pieces of " << piece;
    EXPECT_TRUE(cases::same_bits(state, conv.args.state_out)) << "pieces of " << piece;
  }
}

TEST(ShortConv, OutputMayBeTheInput) {
  Conv conv(9, 4, 4, 3);
  const Tensor x = conv.memory.make(DType::f32, {9, 4});
  cases::copy(conv.args.x, x);
  short_conv(kReference, conv.args);
  ShortConvArgs args = conv.args;
  args.x = args.y = x;
  short_conv(kReference, args);
  EXPECT_TRUE(cases::same_bits(x, conv.args.y));
}

// The state has W-1+4 rows. After a verify step of 4 tokens of which `kept` stay, the next call reads its history at offset `kept`.
TEST(ShortConv, RollbackMovesTheOffset) {
  const int64_t C = 2, W = 4, spare = 4, L = W - 1 + spare;
  for (int64_t kept = 0; kept <= 4; ++kept) {
    Conv conv(4, C, W, L);
    short_conv(kReference, conv.args);
    Conv next(3, C, W, L, DType::f32, 9);
    next.args.weight = conv.args.weight;
    next.args.bias = conv.args.bias;
    next.args.state_in = conv.args.state_out;
    next.args.state_offsets = next.memory.indices({L - (W - 1) - (4 - kept)});
    short_conv(kReference, next.args);
    expect_definition(next.args, kept);
    // The same as a continuation, without offsets, after only the kept tokens.
    ShortConvArgs prefix = conv.args, plain = next.args;
    prefix.x = rows_of(prefix.x, 0, kept);
    prefix.y = conv.memory.make(DType::f32, {kept, C});
    prefix.state_out = conv.memory.make(DType::f32, {1, L, C});
    short_conv(kReference, prefix);
    plain.state_in = prefix.state_out;
    plain.state_offsets = Tensor{};
    plain.y = conv.memory.make(DType::f32, {3, C});
    plain.state_out = conv.memory.make(DType::f32, {1, L, C});
    short_conv(kReference, plain);
    EXPECT_TRUE(cases::same_bits(plain.y, next.args.y));
    for (int64_t l = L - (W - 1); l < L; ++l)
      for (int64_t c = 0; c < C; ++c) EXPECT_EQ(get(plain.state_out, l * C + c), get(next.args.state_out, l * C + c));
  }
}

TEST(ShortConv, OffsetsAreClamped) {
  Conv conv(2, 2, 4, 5);
  for (const auto& [offset, used] : {std::pair<int64_t, int64_t>{-7, 0}, {0, 0}, {1, 1}, {2, 2}, {3, 2}, {1000, 2}}) {
    conv.args.state_offsets = conv.memory.indices({offset});
    short_conv(kReference, conv.args);
    expect_definition(conv.args, used);
  }
}

// Several packed sequences with permuted slots against one call per sequence; inert and illegal ones touch nothing.
TEST(ShortConv, PackedSequencesWithSlots) {
  const int64_t C = 3, W = 4, L = 5, slots = 8;
  Conv conv(40, C, W, L);
  const std::vector<int64_t> bounds = {0, 5, 5, 6, 20, 19, 30, 38};  // sequence 4 is illegal (20 -> 19), then 19..30 and 30..38
  const std::vector<int64_t> in_slots = {3, 0, 7, -1, 1, 2, slots}, out_slots = {4, 5, 7, 0, 1, -1, 6};
  ShortConvArgs args = conv.args;
  args.state_in = conv.memory.make(DType::f32, {slots, L, C});
  args.state_out = conv.memory.make(DType::f32, {slots, L, C});
  for (int64_t slot : {3, 0, 7, 1, 2}) cases::fill_normal(rows_of(args.state_in, slot, slot + 1), conv.rng);
  args.sequences = Sequences::packed(conv.memory.indices(bounds), 7, 40);
  args.state_in_slots = conv.memory.indices(in_slots);
  args.state_out_slots = conv.memory.indices(out_slots);
  args.has_initial = conv.memory.indices({1, 1, 0, 1, 1, 1, 1});
  short_conv(kReference, args);
  for (int64_t n : {0, 1, 2, 5}) {
    const auto i = static_cast<size_t>(n);
    ShortConvArgs one = conv.args;
    one.x = rows_of(args.x, bounds[i], bounds[i + 1]);
    one.y = conv.memory.make(DType::f32, {bounds[i + 1] - bounds[i], C});
    one.state_in = n == 2 ? Tensor{} : rows_of(args.state_in, in_slots[i], in_slots[i] + 1);
    one.state_out = conv.memory.make(DType::f32, {1, L, C});
    short_conv(kReference, one);
    EXPECT_TRUE(cases::same_bits(rows_of(args.y, bounds[i], bounds[i + 1]), one.y)) << n;
    if (out_slots[i] >= 0) {
      EXPECT_TRUE(cases::same_bits(rows_of(args.state_out, out_slots[i], out_slots[i] + 1), one.state_out)) << n;
    }
  }
  for (double y : cases::values(rows_of(args.y, 6, 19))) EXPECT_EQ(y, 0);   // slot -1, up to where sequence 5 starts
  for (double y : cases::values(rows_of(args.y, 30, 38))) EXPECT_EQ(y, 0);  // slot beyond the pool
  EXPECT_TRUE(all_nan(rows_of(args.y, 38, 40)));
  for (int64_t slot : {0, 1, 2, 3, 6}) EXPECT_TRUE(all_nan(rows_of(args.state_out, slot, slot + 1))) << slot;
  EXPECT_TRUE(conv.memory.guards_intact());
}

TEST(ShortConv, StridedRowsAndSixteenBits) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    Conv conv(12, 5, 4, 3, dtype);
    short_conv(kReference, conv.args);
    ShortConvArgs args = conv.args;
    args.x = conv.memory.make_padded(dtype, {12, 5}, 7);
    args.y = conv.memory.make_padded(DType::f32, {12, 5}, 3);
    args.state_out = conv.memory.make_padded(dtype, {1, 3, 5}, 2);
    cases::copy(conv.args.x, args.x);
    short_conv(kReference, args);
    const Tensor rounded = conv.memory.make(dtype, {12, 5});
    cases::copy(args.y, rounded);
    EXPECT_TRUE(cases::same_bits(rounded, conv.args.y));
    EXPECT_TRUE(cases::same_bits(args.state_out, conv.args.state_out));
    for (int64_t l = 0; l < 3; ++l)  // the state holds the inputs themselves
      for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(get(conv.args.state_out, l * 5 + c), get(conv.args.x, (9 + l) * 5 + c));
  }
}

}  // namespace
}  // namespace weft::tests
