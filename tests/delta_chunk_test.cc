// The chunk stages on the reference: each stage against its formula, all stages in sequence against prefill.
#include "weft/delta_chunk.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"

namespace weft::tests {
namespace {

using cases::get;
using cases::Memory;
using cases::Rng;

// The intermediate tensors and results of the stages; they start as poison.
struct Stages {
  Tensor g_cumsum, a, a_inv, w, u, h, v_new, o, state_out;
};

Stages make_stages(DeltaProblem& p, int64_t C, DType dtype = DType::f32) {
  const DeltaOptions& o = p.options;
  const int64_t T = p.k.size(0);
  Stages s;
  s.g_cumsum = o.per_channel ? p.memory.make(DType::f32, {T, o.Hv, o.K}) : p.memory.make(DType::f32, {T, o.Hv});
  s.a = p.memory.make(DType::f32, {T, o.Hv, C});
  s.a_inv = p.memory.make(DType::f32, {T, o.Hv, C});
  s.w = p.memory.make(dtype, {T, o.Hv, o.K});
  s.u = p.memory.make(dtype, {T, o.Hv, o.V});
  s.h = p.memory.make(dtype, {max_chunks(T, p.sequences, C), o.Hv, o.V, o.K});
  s.v_new = p.memory.make(dtype, {T, o.Hv, o.V});
  s.o = p.memory.make(dtype, {T, o.Hv, o.V});
  s.state_out = p.memory.make(DType::f32, {p.sequences.count, o.Hv, o.V, o.K});
  return s;
}

ChunkStateArgs state_args(const DeltaProblem& p, const Stages& s, int64_t C) {
  ChunkStateArgs args;
  args.k = p.k;
  args.w = s.w;
  args.u = s.u;
  args.g_cumsum = s.g_cumsum;
  args.state_in = p.in;
  args.h = s.h;
  args.v_new = s.v_new;
  args.state_out = s.state_out;
  args.sequences = p.sequences;
  args.chunk = C;
  args.head_map = p.options.head_map;
  return args;
}

ChunkOutputArgs output_args(const DeltaProblem& p, const Stages& s, int64_t C) {
  ChunkOutputArgs args;
  args.q = p.q;
  args.k = p.k;
  args.v_new = s.v_new;
  args.h = s.h;
  args.g_cumsum = s.g_cumsum;
  args.o = s.o;
  args.sequences = p.sequences;
  args.chunk = C;
  args.head_map = p.options.head_map;
  return args;
}

void run_stages(const DeltaProblem& p, const Stages& s, int64_t C) {
  const HeadMap map = p.options.head_map;
  chunk_cumsum(kReference, {p.g, s.g_cumsum, p.sequences, C});
  chunk_kkt(kReference, {p.k, p.beta, s.g_cumsum, s.a, p.sequences, C, map});
  chunk_tri_inverse(kReference, {s.a, s.a_inv, p.sequences, C});
  chunk_wu(kReference, {p.k, p.v, p.beta, s.g_cumsum, s.a_inv, s.w, s.u, p.sequences, C, map});
  chunk_state(kReference, state_args(p, s, C));
  chunk_output(kReference, output_args(p, s, C));
}

double largest(const Tensor& t) {
  double most = 0;
  for (double x : cases::values(t)) most = std::max(most, std::abs(x));
  return most;
}

// All stages in sequence against prefill, for every chunk length. Stages compute in double and round their results: A, X, w, u, h,
// v_new, and o or the state. With prefill's own rounding these are eight. G is rounded relative to its size, so a factor e^(G_i -
// G_j) errs by up to 2 |G| roundings. Such factors enter A, w, the state and the output: 8 |G| roundings more.
void expect_prefill(DeltaProblem& p) {
  gated_delta_rule_prefill(kReference, p.prefill());
  for (int64_t C : {16, 32, 64}) {
    SCOPED_TRACE("C=" + std::to_string(C));
    const Stages s = make_stages(p, C);
    run_stages(p, s, C);
    const double bound = 8 * kUnit * (1 + largest(rows_of(s.g_cumsum, 0, p.tokens)));
    EXPECT_LE(cases::relative_rms(rows_of(s.o, 0, p.tokens), rows_of(p.o, 0, p.tokens)), bound);
    EXPECT_LE(cases::relative_rms(s.state_out, p.out), bound);
    for (const Tensor& t : {s.g_cumsum, s.a, s.a_inv, s.w, s.u, s.v_new, s.o})
      EXPECT_TRUE(all_nan(rows_of(t, p.tokens, t.size(0)))) << "rows past the last sequence are not written";
    EXPECT_TRUE(p.memory.guards_intact());
  }
}

TEST(ChunkPipeline, Lengths) {
  for (int64_t T : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 300}) {
    SCOPED_TRACE("T=" + std::to_string(T));
    DeltaProblem p({.lengths = {T}, .Hv = 2, .g_low = -0.1});
    expect_prefill(p);
  }
  DeltaProblem packed({.lengths = {0, 1, 63, 64, 65, 129, 0}, .Hk = 2, .Hv = 4, .g_low = -0.1, .spare_rows = 5});
  expect_prefill(packed);
}

TEST(ChunkPipeline, HeadsAndSizes) {
  const std::pair<int64_t, int64_t> sizes[] = {{32, 60}, {100, 64}, {192, 128}, {64, 256}, {256, 32}, {1, 1}};
  for (const auto& [K, V] : sizes) {
    DeltaProblem p({.lengths = {70}, .Hk = 1, .Hv = 2, .K = K, .V = V, .g_low = -0.1});
    expect_prefill(p);
  }
  for (int64_t ratio : {1, 2, 3, 4, 8})
    for (HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
      DeltaProblem p({.lengths = {40, 30}, .Hk = 2, .Hv = 2 * ratio, .g_low = -0.1, .head_map = map});
      expect_prefill(p);
    }
}

TEST(ChunkPipeline, Gates) {
  const std::pair<double, double> ranges[] = {{0, 0}, {-0.05, 0}, {-20, -1e-4}, {-69, -69}};
  for (bool per_channel : {false, true})
    for (const auto& [low, high] : ranges) {
      SCOPED_TRACE("g in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
      DeltaProblem p({.lengths = {130}, .Hk = 1, .Hv = 2, .per_channel = per_channel, .g_low = low, .g_high = high});
      expect_prefill(p);
    }
  DeltaProblem mixed({.lengths = {130}, .Hv = 2});
  fill_rows(mixed.g, 130, [](int64_t t, int64_t, int64_t) { return t % 5 == 2 ? -30 : 0; });
  expect_prefill(mixed);
  DeltaProblem beside({.lengths = {130}, .Hv = 2});
  fill_rows(beside.g, 130, [](int64_t t, int64_t h, int64_t) { return h == 0 ? -16 * std::log1p(std::exp(std::sin(t))) : 0; });
  expect_prefill(beside);
}

TEST(ChunkPipeline, Keys) {
  const std::pair<double, double> strengths[] = {{1, 1}, {0.5, 0.5}, {0, 2}};
  for (Keys keys : {Keys::gaussian, Keys::positive, Keys::same, Keys::alternating})
    for (const auto& [low, high] : strengths) {
      SCOPED_TRACE("keys " + std::to_string(static_cast<int>(keys)) + " beta to " + std::to_string(high));
      DeltaProblem p({.lengths = {130}, .K = 24, .g_low = -0.05, .beta_low = low, .beta_high = high, .keys = keys});
      expect_prefill(p);
    }
}

TEST(ChunkCumsum, RestartsAtChunksAndSequences) {
  for (int64_t C : {16, 32, 64}) {
    DeltaProblem p({.lengths = {70, 0, 1, 130}, .Hv = 3, .spare_rows = 2});
    cases::fill(rows_of(p.g, 0, 201), -0.25);  // sums of it are exact
    const Tensor sums = p.memory.make(DType::f32, {203, 3});
    chunk_cumsum(kReference, {p.g, sums, p.sequences, C});
    for (size_t n = 0; n < 4; ++n)
      for (int64_t t = p.begins[n]; t < p.begins[n + 1]; ++t)
        for (int64_t h = 0; h < 3; ++h) EXPECT_EQ(get(sums, t * 3 + h), -0.25 * static_cast<double>((t - p.begins[n]) % C + 1));
    EXPECT_TRUE(all_nan(rows_of(sums, 201, 203)));
    chunk_cumsum(kReference, {p.g, p.g, p.sequences, C});  // in place
    EXPECT_TRUE(cases::same_bits(rows_of(p.g, 0, 201), rows_of(sums, 0, 201)));
  }
}

TEST(ChunkKkt, IsStrictlyLowerWithZerosElsewhere) {
  for (bool per_channel : {false, true})
    for (HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
      const int64_t C = 16;
      DeltaProblem p({.lengths = {5, 37}, .Hk = 2, .Hv = 4, .per_channel = per_channel, .g_low = -2, .head_map = map});
      const Stages s = make_stages(p, C);
      chunk_cumsum(kReference, {p.g, s.g_cumsum, p.sequences, C});
      chunk_kkt(kReference, {p.k, p.beta, s.g_cumsum, s.a, p.sequences, C, map});
      for (size_t n = 0; n < 2; ++n)
        for (int64_t t = p.begins[n]; t < p.begins[n + 1]; ++t)
          for (int64_t h = 0; h < 4; ++h)
            for (int64_t j = 0; j < C; ++j) {
              const int64_t i = (t - p.begins[n]) % C, other = t - i + j, hk = key_head_of(p.options, h);
              double want = 0;
              for (int64_t c = 0; c < 16 && j < i; ++c) {
                double G = 0;  // the sum of the decays between the two tokens
                for (int64_t m = other + 1; m <= t; ++m)
                  G += get(p.g, m * p.g.strides[0] + h * p.g.strides[1] + (per_channel ? c : 0));
                want +=
                    get(p.beta, t * 4 + h) * get(p.k, (t * 2 + hk) * 16 + c) * get(p.k, (other * 2 + hk) * 16 + c) * std::exp(G);
              }
              const double got = get(s.a, (t * 4 + h) * C + j);
              if (j >= i)
                EXPECT_EQ(got, 0);
              else  // |A| <= 1, its own rounding and twice that of |G| <= 32
                EXPECT_NEAR(got, want, (1 + 2 * 32) * kUnit);
            }
    }
}

TEST(ChunkTriInverse, TimesItsMatrixIsTheIdentity) {
  for (int64_t C : {16, 32, 64}) {
    Memory memory;
    Rng rng(7);
    const std::vector<int64_t> bounds = {0, 1, 1, 71, 71 + C};
    const int64_t T = bounds.back(), H = 2;
    const Sequences sequences = Sequences::packed(memory.indices(bounds), 4, std::max<int64_t>(70, C));
    const Tensor a = memory.make(DType::f32, {T, H, C}), x = memory.make(DType::f32, {T, H, C});
    cases::fill_normal(a, rng, 0.1);
    // The op ignores the diagonal, the elements above it and the columns past the chunk.
    for (size_t n = 0; n < 4; ++n)
      for (int64_t t = bounds[n]; t < bounds[n + 1]; ++t)
        for (int64_t h = 0; h < H; ++h)
          for (int64_t j = (t - bounds[n]) % C; j < C; ++j) cases::set(a, (t * H + h) * C + j, NAN);
    chunk_tri_inverse(kReference, {a, x, sequences, C});
    for (size_t n = 0; n < 4; ++n)
      for (int64_t t = bounds[n]; t < bounds[n + 1]; ++t)
        for (int64_t h = 0; h < H; ++h) {
          const int64_t i = (t - bounds[n]) % C, begin = t - i;
          for (int64_t j = 0; j < C; ++j) {
            const double got = get(x, (t * H + h) * C + j);
            if (j >= i) {
              EXPECT_EQ(got, j == i ? 1 : 0);
              continue;
            }
            double sum = got, size = std::abs(got);
            for (int64_t m = j; m < i; ++m) {
              const double term = get(a, (t * H + h) * C + m) * get(x, ((begin + m) * H + h) * C + j);
              sum += term;
              size += std::abs(term);
            }
            EXPECT_NEAR(sum, 0, kUnit * size);  // every entry of X was rounded once
          }
        }
    chunk_tri_inverse(kReference, {a, a, sequences, C});  // in place
    EXPECT_TRUE(cases::same_bits(a, x));
  }
}

// Identical keys, beta = 1: A is all ones below the diagonal, its inverse is the difference operator.
TEST(ChunkTriInverse, OnesInvertToDifferences) {
  Memory memory;
  const Tensor a = memory.make(DType::f32, {64, 1, 64});
  cases::fill(a, 1);
  chunk_tri_inverse(kReference, {a, a, Sequences::uniform(1), 64});
  for (int64_t i = 0; i < 64; ++i)
    for (int64_t j = 0; j < 64; ++j) EXPECT_EQ(get(a, i * 64 + j), i == j ? 1 : i == j + 1 ? -1 : 0);
}

// With X = I, w and u are the scaled keys and values themselves.
TEST(ChunkWu, IdentityInverseScalesRows) {
  DeltaProblem p({.lengths = {20, 3}, .Hk = 1, .Hv = 2, .spare_rows = 1});
  const Stages s = make_stages(p, 16);
  chunk_cumsum(kReference, {p.g, s.g_cumsum, p.sequences, 16});
  cases::fill(s.a, 0);
  chunk_tri_inverse(kReference, {s.a, s.a_inv, p.sequences, 16});
  chunk_wu(kReference, {p.k, p.v, p.beta, s.g_cumsum, s.a_inv, s.w, s.u, p.sequences, 16});
  for (int64_t t = 0; t < 23; ++t)
    for (int64_t h = 0; h < 2; ++h) {
      const double strength = get(p.beta, t * 2 + h), decay = std::exp(get(s.g_cumsum, t * 2 + h));
      for (int64_t c = 0; c < 16; ++c)
        EXPECT_EQ(get(s.w, (t * 2 + h) * 16 + c), static_cast<float>(strength * decay * get(p.k, t * 16 + c)));
      for (int64_t c = 0; c < 8; ++c)
        EXPECT_EQ(get(s.u, (t * 2 + h) * 8 + c), static_cast<float>(strength * get(p.v, (t * 2 + h) * 8 + c)));
    }
}

TEST(ChunkState, SnapshotsAreTheEntryStates) {
  for (int64_t C : {16, 32, 64}) {
    DeltaProblem p({.lengths = {70, 0, 33, 64}, .Hv = 2, .g_low = -0.1});
    const Stages s = make_stages(p, C);
    run_stages(p, s, C);
    int64_t row = 0;
    for (size_t n = 0; n < 4; ++n)
      for (int64_t begin = p.begins[n]; begin < p.begins[n + 1]; begin += C, ++row)
        for (int64_t h = 0; h < 2; ++h) {
          const HeadResult want = p.recurrence(h, p.begins[n], begin, p.initial(static_cast<int64_t>(n), h));
          double error = 0, norm = 0;
          for (int64_t i = 0; i < 128; ++i) {
            const double truth = want.state[static_cast<size_t>(i)];
            error += std::pow(get(s.h, (row * 2 + h) * 128 + i) - truth, 2);
            norm += truth * truth;
          }
          EXPECT_LE(std::sqrt(error / norm), 2e-6 * std::sqrt(static_cast<double>(begin - p.begins[n] + 1)));
        }
    EXPECT_TRUE(all_nan(rows_of(s.h, row, s.h.size(0))));  // rows that no chunk owns
    for (double x : cases::values(s.v_new)) EXPECT_FALSE(std::isnan(x));
  }
}

// v_new is the correction of the recurrence, before any decay.
TEST(ChunkState, NewValuesAreTheCorrections) {
  DeltaProblem p({.lengths = {16}, .Hv = 2, .g_low = -2});
  GatedDeltaRuleDecodeArgs decode = p.decode();
  decode.record.k = p.memory.make(DType::f32, {16, 1, 16});
  decode.record.delta = p.memory.make(DType::f32, {16, 2, 8});
  decode.record.g = p.memory.make(DType::f32, {16, 2});
  gated_delta_rule_decode(kReference, decode);
  const Stages s = make_stages(p, 16);
  run_stages(p, s, 16);
  EXPECT_LE(cases::relative_rms(s.v_new, decode.record.delta), 2e-6 * 4);
}

TEST(ChunkState, InPlaceAndWithoutStates) {
  DeltaProblem p({.lengths = {40, 20}, .Hv = 2});
  const Stages s = make_stages(p, 32);
  run_stages(p, s, 32);
  ChunkStateArgs args = state_args(p, s, 32);
  args.state_out = p.in;
  chunk_state(kReference, args);
  EXPECT_TRUE(cases::same_bits(p.in, s.state_out));
  cases::fill(p.in, 0);
  chunk_state(kReference, args);
  const std::vector<double> from_zeros = cases::values(p.in);
  args.state_in = Tensor{};
  chunk_state(kReference, args);
  EXPECT_EQ(cases::values(p.in), from_zeros);
  args.state_out = Tensor{};
  chunk_state(kReference, args);
}

TEST(ChunkOutput, ScaleDefaultsToInverseRootOfK) {
  DeltaProblem p({.lengths = {20}});
  const Stages s = make_stages(p, 16);
  run_stages(p, s, 16);
  const std::vector<double> root = cases::values(s.o);
  ChunkOutputArgs args = output_args(p, s, 16);
  args.scale = 0.25f;
  chunk_output(kReference, args);
  EXPECT_EQ(cases::values(s.o), root);
}

TEST(ChunkStages, SixteenBitTensorsRoundOnceAtTheStore) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    DeltaProblem p({.lengths = {40}, .Hk = 1, .Hv = 2, .dtype = dtype, .g_low = -0.1});
    const Stages wide = make_stages(p, 16), narrow = make_stages(p, 16, dtype);
    run_stages(p, wide, 16);
    chunk_wu(kReference, {p.k, p.v, p.beta, wide.g_cumsum, wide.a_inv, narrow.w, narrow.u, p.sequences, 16});
    const Tensor w = p.memory.make(dtype, {40, 2, 16});
    cases::copy(wide.w, w);
    EXPECT_TRUE(cases::same_bits(narrow.w, w));
    run_stages(p, narrow, 16);
    // w, u, h, v_new and o are rounded to the type on the way: five roundings of half a unit, of 2^-8 or 2^-11.
    EXPECT_LE(cases::relative_rms(narrow.o, wide.o), 5 * (dtype == DType::bf16 ? 0x1p-9 : 0x1p-12));
  }
}

TEST(ChunkStages, DeterministicAndIndependentOfTheBatch) {
  DeltaProblem p({.lengths = {40, 70}, .Hk = 2, .Hv = 4});
  const Stages first = make_stages(p, 32), again = make_stages(p, 32);
  run_stages(p, first, 32);
  run_stages(p, again, 32);
  EXPECT_TRUE(cases::same_bits(first.o, again.o));
  EXPECT_TRUE(cases::same_bits(first.state_out, again.state_out));
  DeltaProblem other({.lengths = {40, 70, 9}, .Hk = 2, .Hv = 4});
  for (const auto& [from, to] :
       {std::pair{&p.q, &other.q}, {&p.k, &other.k}, {&p.v, &other.v}, {&p.g, &other.g}, {&p.beta, &other.beta}})
    cases::copy(*from, rows_of(*to, 0, 110));
  cases::copy(p.in, rows_of(other.in, 0, 2));
  const Stages more = make_stages(other, 32);
  run_stages(other, more, 32);
  EXPECT_TRUE(cases::same_bits(rows_of(more.o, 0, 110), first.o));
}

TEST(ChunkStages, IllegalSequencesAreInert) {
  DeltaProblem p({.lengths = {20, 20}});
  const Stages s = make_stages(p, 16);
  p.sequences = Sequences::packed(p.memory.indices({0, 41, 20, 40}), 3, 20);  // only the last is legal
  Stages t = s;
  t.h = p.memory.make(DType::f32, {max_chunks(40, p.sequences, 16), 1, 8, 16});
  t.state_out = p.memory.make(DType::f32, {3, 1, 8, 16});
  p.in = p.memory.make(DType::f32, {3, 1, 8, 16});
  cases::fill(p.in, 0);
  run_stages(p, t, 16);
  for (const Tensor& x : {t.g_cumsum, t.a, t.a_inv, t.w, t.u, t.v_new, t.o}) {
    EXPECT_TRUE(all_nan(rows_of(x, 0, 20)));
    for (double y : cases::values(rows_of(x, 20, 40))) EXPECT_FALSE(std::isnan(y));
  }
  EXPECT_TRUE(all_nan(rows_of(t.state_out, 0, 2)));
  EXPECT_FALSE(std::isnan(get(t.state_out, 2 * 128)));
  EXPECT_FALSE(std::isnan(get(t.h, 0)));  // the inert ones own no chunk rows
}

// Overlapping bounds may need more rows of h than max_chunks() gives. Sequences that do not fit are inert; nothing is overrun.
TEST(ChunkStages, OverlappingBoundsStayInsideH) {
  DeltaProblem p({.lengths = {20, 20}});
  p.sequences = Sequences::packed(p.memory.indices({0, 40, 0, 40, 0, 40}), 5, 40);
  Stages s = make_stages(p, 16);
  s.h = p.memory.make(DType::f32, {max_chunks(40, p.sequences, 16), 1, 8, 16});
  s.state_out = p.memory.make(DType::f32, {5, 1, 8, 16});
  p.in = p.memory.make(DType::f32, {5, 1, 8, 16});
  cases::fill(p.in, 0);
  run_stages(p, s, 16);
  EXPECT_TRUE(p.memory.guards_intact());
  EXPECT_FALSE(std::isnan(get(s.state_out, 0)));
  EXPECT_TRUE(all_nan(rows_of(s.state_out, 4, 5)));
}

TEST(MaxChunks, BoundsEveryPacking) {
  Memory memory;
  EXPECT_EQ(max_chunks(0, Sequences::uniform(3), 64), 0);
  EXPECT_EQ(max_chunks(0, Sequences::uniform(0), 64), 0);
  EXPECT_EQ(max_chunks(130, Sequences::uniform(1), 64), 3);
  EXPECT_EQ(max_chunks(130, Sequences::uniform(2), 64), 4);
  EXPECT_EQ(max_chunks(128, Sequences::uniform(2), 64), 2);
  const auto packed = [&](int64_t count, int64_t longest) {
    return Sequences::packed(memory.make(DType::i32, {count + 1}), count, longest);
  };
  EXPECT_EQ(max_chunks(130, packed(1, 130), 64), 3);
  EXPECT_EQ(max_chunks(130, packed(2, 130), 64), 4);  // 1 + 129, say
  EXPECT_EQ(max_chunks(130, packed(2, 64), 64), 2);   // neither can have more than one chunk
  EXPECT_EQ(max_chunks(5, packed(100, 64), 64), 5);   // five sequences of one token
  EXPECT_EQ(max_chunks(5, packed(100, 0), 64), 0);
  Rng rng(3);
  for (int trial = 0; trial < 2000; ++trial) {  // never less than a packing needs, and reached by some packing
    const int64_t N = rng.integer(1, 6), C = int64_t{16} << rng.integer(0, 2);
    int64_t T = 0, rows = 0, longest = 0;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t length = rng.integer(0, 2) * rng.integer(0, 70);
      T += length;
      rows += (length + C - 1) / C;
      longest = std::max(longest, length);
    }
    EXPECT_LE(rows, max_chunks(T, packed(N, longest), C));
    if (T >= N && T > 0) {
      EXPECT_EQ(max_chunks(T, packed(N, T), C), N - 1 + (T - (N - 1) + C - 1) / C);
    }
  }
}

}  // namespace
}  // namespace weft::tests
