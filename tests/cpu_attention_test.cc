// Attention on the cpu backend: exact integer scores, visible and invisible NaN, bits that depend neither on threads nor on splits,
// and which arithmetic runs. cases_test checks every op on every instruction set; this file covers corner cases that it leaves out.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cases/attention_inputs.h"
#include "cases/verify.h"
#include "common/kv_index.h"
#include "cpu/common/isa.h"

namespace weft {
namespace {

using cases::AttentionSetting;
using cases::Memory;
using cases::Rng;

constexpr Stream kReference{Backend::reference};
const std::string kLanes = "layout=tiles,order=lanes,";
constexpr Precision kPrecisions[] = {Precision::exact_scores, Precision::fast};

Stream cpu_with(Isa isa, int threads = 1) {
  Stream stream;
  stream.isa = isa;
  stream.threads = threads;
  return stream;
}

// Queries over a filled cache, and a call on it.
struct Scene {
  explicit Scene(const std::string& text, uint64_t seed = 5) : rng(seed) {
    cases::Options options(text);
    s = cases::make_attention(options, memory, rng);
    args.queries = s.queries;
    args.cache = s.kv.cache;
    args.mask = s.mask;
    fresh_outputs();
  }
  void fresh_outputs() {
    args.o = memory.make(DType::f32, {s.T, s.Hq, s.kv.Dv});
    args.lse = memory.make(DType::f32, {s.T, s.Hq});
  }
  // Runs into new outputs.
  void run(const Stream& stream) {
    fresh_outputs();
    cases::run_op(stream, args);
    EXPECT_TRUE(memory.guards_intact());
  }
  // o of query token t and head h.
  std::vector<double> row(int64_t t, int64_t h) const {
    std::vector<double> all = cases::values(args.o);
    const auto begin = all.begin() + (t * s.Hq + h) * s.kv.Dv;
    return {begin, begin + s.kv.Dv};
  }
  // Address of a token's f16 gain in a cache of tiles.
  uint16_t* gain(const KvSide& side, int64_t head, int64_t token) {
    auto* tile = static_cast<uint8_t*>(side.codes.data) + head * side.codes.stride(1) + token / 64 * side.codes.stride(2);
    return reinterpret_cast<uint16_t*>(tile + 64 * code_bytes(side.format)) + token % 64;
  }

  Memory memory;
  Rng rng;
  AttentionSetting s;
  CompressedAttentionArgs args;
};

bool all_nan(const std::vector<double>& values) {
  for (double x : values)
    if (!std::isnan(x)) return false;
  return true;
}
bool all_finite(const std::vector<double>& values) {
  for (double x : values)
    if (!std::isfinite(x)) return false;
  return true;
}

// ---- integer scores

// The score that integer arithmetic must give: x = round(q 16383 / max |q|), levels (n + 1/2) step,
// score = (sum x n + 1/2 sum x) unit gain with unit = max |q| / 16383 * (scale step). Each product is rounded once.
struct IntegerScores {
  IntegerScores(const Scene& scene, const KvCache& rows) : format(rows.k.format), rows_(rows), scene_(scene) {
    const float step = *format.grid_step;
    for (int i = 0; i < 1 << format.bits; ++i)
      level.push_back(static_cast<int64_t>(std::lround(static_cast<double>(format.codebook[static_cast<size_t>(i)]) / step - 0.5)));
  }
  float operator()(int64_t t, int64_t h, KvLocation at) const {
    const Tensor& q = scene_.args.queries.q;
    const int64_t D = format.head_dim, R = scene_.s.Hq / scene_.s.kv.Hk;
    std::vector<float> x(static_cast<size_t>(D));
    float top = 0;
    for (int64_t d = 0; d < D; ++d) {
      x[static_cast<size_t>(d)] = static_cast<float>(cases::get(q, t * q.stride(0) + h * q.stride(1) + d));
      top = std::max(top, std::fabs(x[static_cast<size_t>(d)]));
    }
    const cases::RowContent row = cases::row_content(rows_.k, at.block, h / R, at.row);
    const float factor = 16383.0f / top;
    int64_t dot = 0, sum = 0;
    for (size_t d = 0; d < x.size(); ++d) {
      const auto integer = static_cast<int64_t>(std::nearbyint(x[d] * factor));
      dot += integer * level[row.codes[d]];
      sum += integer;
    }
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    const float unit = top / 16383.0f * (scale * *format.grid_step);
    return (static_cast<float>(dot) + 0.5f * static_cast<float>(sum)) * unit * static_cast<float>(row.gains[0]);
  }

  const KvFormat& format;
  std::vector<int64_t> level;

 private:
  const KvCache& rows_;
  const Scene& scene_;
};

void expect_exact_scores(const std::string& options) {
  Scene scene(kLanes + "q=rotated,causal=0," + options);
  Memory own;
  const KvCache rows = cases::as_rows(own, scene.s.kv.cache);
  const IntegerScores want(scene, rows);
  const int64_t context = sequence_capacity(scene.args.cache), length = scene.s.lengths[0];
  for (Isa isa : cpu::available_isas()) {
    const Tensor scores = own.make(DType::f32, {scene.s.T, scene.s.Hq, context});
    const AttentionScoresArgs args{scene.args.queries, scene.args.cache, scene.args.mask, scores};
    EXPECT_EQ(choose(cpu_with(isa), args).kernel, std::string("cpu.attention_scores.integer.") + isa_name(isa));
    cases::run_op(cpu_with(isa), args);
    int wrong = 0;
    for (int64_t t = 0; t < scene.s.T; ++t)
      for (int64_t h = 0; h < scene.s.Hq; ++h)
        for (int64_t j = 0; j < live_tokens(rows, length); ++j) {
          const auto got = static_cast<float>(cases::get(scores, (t * scene.s.Hq + h) * context + j));
          const float expected = want(t, h, locate(rows, 0, live_position(rows, length, j)));
          if (got != expected && ++wrong < 4)
            ADD_FAILURE() << isa_name(isa) << " " << options << " row " << t << "," << h << " token " << j << ": " << got
                          << " is not " << expected;
        }
    EXPECT_EQ(wrong, 0) << isa_name(isa) << " " << options;
  }
}

TEST(IntegerScores, EqualAnIntegerReferenceBitForBit) {
  for (const char* bits : {"2", "3", "4", "5", "6", "7", "8"})
    for (const char* rest : {"D=64,context=150,Hk=2,Hq=6", "D=128,context=64,Hk=1,Hq=1,T=3", "D=96,context=70,Hk=1,Hq=9"})
      expect_exact_scores(std::string("kbits=") + bits + "," + rest);
}

TEST(IntegerScores, AreExactAtTheLargestHeadSize) {
  // 512 coordinates of the largest magnitude with the extreme levels: the sums come close to overflowing 32 bits.
  Scene scene(kLanes + "q=rotated,causal=0,kbits=8,D=512,context=64,Hk=1,Hq=4");
  cases::fill(scene.args.queries.q, 3);
  auto* codes = static_cast<uint8_t*>(scene.args.cache.k.codes.data);
  for (int64_t i = 0; i < 64 * 512; ++i) codes[i] = i % 8 < 4 ? 0 : 255;
  for (Isa isa : cpu::available_isas()) {
    const Tensor scores = scene.memory.make(DType::f32, {1, 4, 64});
    cases::run_op(cpu_with(isa), AttentionScoresArgs{scene.args.queries, scene.args.cache, scene.args.mask, scores});
    for (int64_t j = 0; j < 64; ++j) {
      const auto gain = static_cast<float>(cases::get(dense(scene.gain(scene.args.cache.k, 0, j), DType::f16, {1}), 0));
      const float step = *scene.args.cache.k.format.grid_step;
      // A token's bytes are in a lane of four: even tokens have every level at -127.5 steps, odd tokens at 127.5.
      const float dot = 512 * 16383 * (j % 2 ? 127.5f : -127.5f);
      const float unit = 3.0f / 16383.0f * (1 / std::sqrt(512.0f) * step);
      EXPECT_EQ(static_cast<float>(cases::get(scores, j)), dot * unit * gain) << isa_name(isa) << " token " << j;
    }
  }
}

TEST(IntegerScores, RingsAndPagesReadTheSameTokens) {
  expect_exact_scores("cache=ring,capacity=128,pinned=0,context=300,kbits=4,D=64,Hk=2,Hq=2");
  expect_exact_scores("cache=ring,capacity=192,pinned=70,context=500,kbits=6,D=64,Hk=1,Hq=5");
  expect_exact_scores("cache=paged,page=64,context=200,kbits=5,D=64,Hk=2,Hq=2");
}

// ---- formats, layouts, cache kinds and options that the table of cases leaves out

void expect_right(const char* op, const std::string& options) {
  cases::Checker checker(cases::build({op, "corner", options, cases::Tier::fast, ""}));
  for (Isa isa : cpu::available_isas()) {
    const cases::Outcome outcome = checker.check(cpu_with(isa, 2));
    EXPECT_EQ(outcome.verdict, cases::Verdict::passed) << op << " " << options << " " << isa_name(isa) << ": " << outcome.why << " "
                                                       << outcome.error << " beyond " << outcome.bound;
  }
}

TEST(Corners, EveryPairOfWidthsInLanes) {
  for (int k = 2; k <= 8; ++k)
    for (int v = 2; v <= 8; ++v)
      expect_right("compressed_attention",
                   kLanes + "kbits=" + std::to_string(k) + ",vbits=" + std::to_string(v) + ",D=64,context=130,Hk=1,Hq=3");
}

TEST(Corners, HeadSizesAndGroupsInLanes) {
  for (const char* rest :
       {"D=32,Hq=4", "D=96,Hq=5", "D=160,Hq=7", "D=224,Hq=2", "D=512,Hq=16", "Dk=64,Dv=96,Hq=12", "Dk=256,Dv=32,Hq=1"})
    expect_right("compressed_attention", kLanes + "kbits=4,vbits=3,context=200,Hk=1,T=2," + rest);
}

TEST(Corners, LaneTilesThatRunOnDecodedRows) {
  for (const char* rest : {"recipe=aura4v2", "recipe=f16v4", "kbits=4,vbits=bf16", "gain_group=32", "rotation=dense"})
    expect_right("compressed_attention", kLanes + "D=64,context=150,Hk=2,Hq=4,T=3," + std::string(rest));
}

TEST(Corners, RingsPagesAndMasksInLanes) {
  for (const char* rest :
       {"cache=ring,capacity=128,pinned=70,context=400,T=3", "cache=ring,capacity=192,pinned=5,context=190,window=40",
        "cache=paged,page=128,N=2,lengths=300:65,T=4,window=33", "N=3,slots=inert,context=90,kmean=1,vmean=1",
        "T=9,positions=spread,context=150,window=10", "T=70,context=700,Hk=1,Hq=2,softcap=5,sinks=1"})
    expect_right("compressed_attention", kLanes + "D=64,kbits=5,vbits=4," + std::string(rest));
}

TEST(Corners, LongSequencesSplitOverTokens) {
  for (const char* rest : {"context=3000", "context=2100,T=3,window=900", "cache=ring,capacity=1500,pinned=10,context=5000"}) {
    expect_right("compressed_attention", kLanes + "D=64,Hk=1,Hq=2," + std::string(rest));
    expect_right("compressed_attention", std::string("D=40,recipe=f16v4,Hk=1,Hq=2,") + rest);
  }
}

TEST(Corners, ManyQueriesInSeveralQueryBlocks) {
  for (const char* layout : {"layout=tiles,order=lanes,", "layout=tiles,", "layout=rows,"})
    expect_right("compressed_attention", std::string(layout) + "D=64,Hk=1,Hq=5,T=40,context=90");
}

TEST(Corners, PartialsInLanes) {
  for (const char* rest : {"block=64", "block=128,partials=interleaved", "block=50", "block=1000,T=3", "block=64,window=70"})
    expect_right("attention_partials", kLanes + "D=64,kbits=4,vbits=6,context=300,Hk=1,Hq=3," + std::string(rest));
}

TEST(Corners, ScoresAndValuesOfEveryLayout) {
  for (const char* rest : {"layout=tiles,context=150", "layout=tiles,order=lanes,context=150",
                           "layout=tiles,order=lanes,cache=ring,capacity=128,pinned=9,context=700"}) {
    expect_right("attention_scores", "D=64,T=3,softcap=4,kmean=1," + std::string(rest));
    expect_right("attention_values", "D=64,T=3,vmean=1,threshold=0.4," + std::string(rest));
  }
}

// ---- NaN

// A NaN in the gain of a token: query rows that see the token are NaN, and all others keep their bits.
void expect_nan_where_seen(const std::string& options, bool keys, Precision precision) {
  for (Isa isa : cpu::available_isas()) {
    Scene scene(options);
    scene.args.precision = precision;
    scene.run(cpu_with(isa));
    const std::vector<double> before = cases::values(scene.args.o);
    constexpr int64_t kToken = 139;  // after the positions of queries 0 and 1
    *scene.gain(keys ? scene.args.cache.k : scene.args.cache.v, 0, kToken) = 0x7e00;
    scene.run(cpu_with(isa));
    const int64_t Dv = scene.s.kv.Dv;
    for (int64_t t = 0; t < scene.s.T; ++t)
      for (int64_t h = 0; h < scene.s.Hq; ++h) {
        const std::vector<double> now = scene.row(t, h);
        const bool sees = t >= 2 && h / (scene.s.Hq / scene.s.kv.Hk) == 0;
        EXPECT_TRUE(sees ? all_nan(now) : all_finite(now)) << isa_name(isa) << " row " << t << "," << h;
        for (int64_t d = 0; d < Dv && !sees; ++d)
          EXPECT_EQ(now[static_cast<size_t>(d)], before[static_cast<size_t>((t * scene.s.Hq + h) * Dv + d)]);
      }
  }
}

TEST(Nan, IsSeenByRowsThatSeeItAndByNoOther) {
  // 142 tokens: queries 0 to 4 are at positions 137 to 141.
  const std::string queries = "D=64,context=142,T=5,Hk=2,Hq=6,kbits=4,vbits=4";
  for (bool keys : {false, true}) {
    for (Precision precision : kPrecisions) expect_nan_where_seen(kLanes + queries, keys, precision);
    expect_nan_where_seen("layout=tiles," + queries, keys, Precision::exact_scores);
  }
}

TEST(Nan, InAQueryStaysInItsRows) {
  for (const std::string& layout : {kLanes, std::string("layout=rows,")})
    for (Precision precision : kPrecisions)
      for (Isa isa : cpu::available_isas()) {
        Scene scene(layout + "D=64,context=100,T=2,Hk=1,Hq=4");
        scene.args.precision = precision;
        cases::set(scene.args.queries.q, 2 * 64 + 7, NAN);
        scene.run(cpu_with(isa));
        for (int64_t h = 0; h < 4; ++h) {
          EXPECT_TRUE(h == 2 ? all_nan(scene.row(0, h)) : all_finite(scene.row(0, h))) << isa_name(isa);
          EXPECT_TRUE(all_finite(scene.row(1, h))) << isa_name(isa);
        }
      }
}

// NaN in queries past the last sequence, then in the queries and the whole cache of sequence 1: other query rows keep their bits.
TEST(Nan, OfOtherSequencesAndPastTheEndStaysThere) {
  constexpr int64_t kEnd = 6;  // of 9 query tokens; sequence 1 owns tokens 2 to 4
  for (const std::string& format :
       {kLanes + "kbits=4,vbits=4", kLanes + "recipe=f16v4", std::string("layout=tiles,kbits=8,vbits=3"),
        std::string("layout=rows,kbits=4,vbits=4"), std::string("layout=rows,recipe=f16")})
    for (Isa isa : cpu::available_isas())
      for (int threads : {1, 3}) {
        SCOPED_TRACE(format + " " + isa_name(isa) + " threads " + std::to_string(threads));
        Scene scene(format + ",cu=0:2:5:6,T=9,lengths=1300:700:90,D=32,Hk=2,Hq=6");
        const KvCache& cache = scene.args.cache;
        ASSERT_EQ(scene.s.T, 9);
        ASSERT_FALSE(cache.slots.present());  // block n belongs to sequence n
        const auto rows = [](Tensor t, int64_t begin, int64_t end) { return cases::rows_of(t, begin, end - begin); };
        const Tensor q = scene.args.queries.q;
        cases::fill(rows(q, kEnd, 9), NAN);
        scene.run(cpu_with(isa, threads));
        const Tensor beyond = scene.args.o, beyond_lse = scene.args.lse;
        EXPECT_TRUE(all_nan(cases::values(rows(beyond, kEnd, 9))) && all_nan(cases::values(rows(beyond_lse, kEnd, 9))));
        cases::fill(rows(q, kEnd, 9), 0.5);
        scene.run(cpu_with(isa, threads));
        const Tensor clean = scene.args.o, clean_lse = scene.args.lse;
        EXPECT_TRUE(all_finite(cases::values(rows(clean, 0, kEnd))));
        EXPECT_TRUE(cases::same_bits(rows(beyond, 0, kEnd), rows(clean, 0, kEnd)));
        EXPECT_TRUE(cases::same_bits(rows(beyond_lse, 0, kEnd), rows(clean_lse, 0, kEnd)));

        cases::fill(rows(q, 2, 5), NAN);
        for (const Tensor& t : {cache.k.codes, cache.k.gains, cache.v.codes, cache.v.gains})
          if (t.present()) cases::fill_bytes(rows(t, 1, 2), 0xFF);  // NaN gains, or NaN rows in an uncompressed cache
        scene.run(cpu_with(isa, threads));
        EXPECT_TRUE(all_nan(cases::values(rows(scene.args.o, 2, 5))));
        for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{5, 6}}) {
          EXPECT_TRUE(cases::same_bits(rows(scene.args.o, begin, end), rows(clean, begin, end))) << "o from row " << begin;
          EXPECT_TRUE(cases::same_bits(rows(scene.args.lse, begin, end), rows(clean_lse, begin, end))) << "lse from row " << begin;
        }
      }
}

// ---- unusual values

// The error bounds of integer arithmetic: cases/bars.h.
double bar_of(Precision precision) { return precision == Precision::fast ? 3e-2 : 1e-3; }

TEST(Numbers, NegativeGainsAndQueriesOfZeros) {
  for (Precision precision : kPrecisions)
    for (Isa isa : cpu::available_isas()) {
      Scene scene(kLanes + "D=64,context=100,Hk=1,Hq=4,kbits=4,vbits=4");
      scene.args.precision = precision;
      for (int64_t j = 0; j < 100; j += 3) {
        *scene.gain(scene.args.cache.k, 0, j) ^= 0x8000;
        *scene.gain(scene.args.cache.v, 0, j) ^= 0x8000;
      }
      for (int64_t d = 0; d < 64; ++d) cases::set(scene.args.queries.q, d, 0);
      scene.run(cpu_with(isa));
      const Tensor o = scene.args.o, lse = scene.args.lse;
      scene.run(kReference);
      EXPECT_LE(cases::relative_rms(o, scene.args.o), bar_of(precision)) << isa_name(isa);
      EXPECT_LE(cases::relative_rms(lse, scene.args.lse), bar_of(precision)) << isa_name(isa);
    }
}

// Gains of tokens that a query row does not see do not change how its weights are rounded.
TEST(Numbers, NegativeGainsThatNobodySees) {
  for (Precision precision : kPrecisions)
    for (Isa isa : cpu::available_isas()) {
      Scene scene(kLanes + "D=64,context=100,T=4,Hk=1,Hq=1,kbits=4,vbits=4");
      scene.args.precision = precision;
      scene.run(cpu_with(isa));
      const Tensor before = scene.args.o;
      // Only query 3 sees the last token, and no query sees the slots after it.
      for (int64_t j = 99; j < 110; ++j) *scene.gain(scene.args.cache.v, 0, j) = 0xbc00;
      scene.run(cpu_with(isa));
      EXPECT_TRUE(cases::same_bits(cases::rows_of(before, 0, 3), cases::rows_of(scene.args.o, 0, 3))) << isa_name(isa);
      const Tensor o = scene.args.o;
      scene.run(kReference);
      EXPECT_LE(cases::relative_rms(o, scene.args.o), bar_of(precision)) << isa_name(isa);
    }
}

TEST(Numbers, TinyAndHugeScales) {
  for (Isa isa : cpu::available_isas()) {
    for (Precision precision : kPrecisions) {
      Scene flat(kLanes + "D=64,context=200,Hk=1,Hq=4,kbits=8,vbits=8,scale=0.0001");
      flat.args.precision = precision;
      flat.run(cpu_with(isa));
      const Tensor o = flat.args.o;
      flat.run(kReference);
      EXPECT_LE(cases::relative_rms(o, flat.args.o), bar_of(precision)) << isa_name(isa);
    }
    // Scores in the thousands: one token takes all the weight, and nothing overflows.
    Scene sharp(kLanes + "D=64,context=200,Hk=1,Hq=4,kbits=8,vbits=8,scale=1000");
    sharp.run(cpu_with(isa));
    const Tensor taken = sharp.args.o;
    sharp.run(kReference);
    EXPECT_LE(cases::relative_rms(taken, sharp.args.o), 1e-3) << isa_name(isa);
  }
}

// ---- bits

TEST(Bits, DoNotDependOnThreadsOrSplits) {
  for (const std::string& layout : {kLanes, std::string("layout=rows,recipe=f16v3,")})
    for (const char* rest : {"context=5000,Hk=1,Hq=2", "context=1300,Hk=2,Hq=4,T=3", "N=3,lengths=40:2000:700,Hk=1,Hq=1",
                             "T=70,context=600,Hk=1,Hq=2"})
      for (Isa isa : cpu::available_isas())
        for (Precision precision : {Precision::exact_scores, Precision::fast}) {
          Scene scene(layout + "D=32," + rest);
          scene.args.precision = precision;
          scene.run(cpu_with(isa, 1));
          const Tensor o = scene.args.o, lse = scene.args.lse;
          for (int threads : {2, 3, 7, 16}) {
            scene.run(cpu_with(isa, threads));
            EXPECT_TRUE(cases::same_bits(o, scene.args.o)) << rest << " " << isa_name(isa) << " " << threads;
            EXPECT_TRUE(cases::same_bits(lse, scene.args.lse)) << rest << " " << isa_name(isa) << " " << threads;
          }
        }
}

// Workers' buffers behind the partials are aligned for any number of query rows.
TEST(Bits, OfAnyNumberOfRowsSplitOverTokens) {
  for (int64_t heads : {1, 2, 3, 4, 5, 7})
    for (Isa isa : cpu::available_isas()) {
      Scene scene(kLanes + "D=128,context=1300,Hk=1,Hq=" + std::to_string(heads));
      scene.run(cpu_with(isa, 1));
      const Tensor o = scene.args.o;
      scene.run(cpu_with(isa, 2));
      EXPECT_TRUE(cases::same_bits(o, scene.args.o)) << heads << " " << isa_name(isa);
    }
}

TEST(Bits, OfASequenceDoNotDependOnItsQueriesBeingTogether) {
  // Query tokens one by one, as in decode, and five at once: query rows are then in other groups of four.
  for (const auto& [layout, precision] : {std::pair{kLanes, Precision::exact_scores}, std::pair{kLanes, Precision::fast},
                                          std::pair{std::string("layout=rows,"), Precision::exact_scores}})
    for (Isa isa : cpu::available_isas()) {
      Scene scene(layout + "D=64,context=700,T=5,Hk=1,Hq=3");
      scene.args.precision = precision;
      if (precision == Precision::fast) *scene.gain(scene.args.cache.v, 0, 697) ^= 0x8000;  // some query rows get negative weights
      scene.run(cpu_with(isa));
      const Tensor together = scene.args.o;
      for (int64_t t = 0; t < 5; ++t) {
        CompressedAttentionArgs one = scene.args;
        const auto row = [&](Tensor x) {
          x.data = static_cast<char*>(x.data) + t * x.stride(0) * dtype_bytes(x.dtype);
          x.sizes[0] = 1;
          return x;
        };
        one.queries.q = row(one.queries.q);
        one.queries.positions = scene.memory.indices({700 - 5 + t});
        one.o = scene.memory.make(DType::f32, {1, 3, 64});
        one.lse = {};
        cases::run_op(cpu_with(isa), one);
        EXPECT_TRUE(cases::same_bits(one.o, row(together))) << layout << isa_name(isa) << " query " << t;
      }
    }
}

// ---- plans

TEST(Choose, NamesTheArithmetic) {
  const Isa isa = cpu::available_isas().back();
  const auto kernel = [&](const std::string& options, Precision precision = Precision::exact_scores) {
    Scene scene(options);
    scene.args.precision = precision;
    return choose(cpu_with(isa), scene.args).kernel;
  };
  const auto named = [&](const std::string& arithmetic) { return "cpu.compressed_attention." + arithmetic + "." + isa_name(isa); };
  EXPECT_EQ(kernel(kLanes + "D=64,kbits=4,vbits=2"), named("integer"));
  EXPECT_EQ(kernel(kLanes + "D=64,kbits=4,vbits=2", Precision::fast), named("integer_fast"));
  EXPECT_EQ(kernel(kLanes + "D=64,kbits=f16,vbits=4"), named("decoded"));
  EXPECT_EQ(kernel(kLanes + "D=64,recipe=aura4v4"), named("decoded"));
  EXPECT_EQ(kernel("layout=tiles,D=64,kbits=4,vbits=4"), named("decoded"));
  EXPECT_EQ(kernel("layout=rows,D=64,kbits=4,vbits=4"), named("decoded"));
}

TEST(Choose, SaysHowTheCallIsSplit) {
  Scene few(kLanes + "D=64,context=5000,Hk=2,Hq=8");
  EXPECT_EQ(choose(cpu_with(Isa::best, 4), few.args).plan,
            "4 threads over 1 sequences x 2 kv heads x 1 blocks of up to 4 query rows x up to 10 blocks of tokens, partials merged "
            "in order");
  EXPECT_EQ(choose(cpu_with(Isa::best, 1), few.args).plan,
            "1 threads over 1 sequences x 2 kv heads x 1 blocks of up to 4 query rows, each over all its tokens");
  Scene many(kLanes + "D=64,T=40,context=100,Hk=8,Hq=16");
  EXPECT_EQ(choose(cpu_with(Isa::best, 2), many.args).plan,
            "2 threads over 1 sequences x 8 kv heads x 2 blocks of up to 64 query rows, each over all its tokens");
}

TEST(Scratch, DoesNotGrowWithManyQueriesOverLongCaches) {
  // A split over tokens would take 4096 * 8 query rows times 64 partials, so such a call is not split over tokens.
  Scene scene(kLanes + "D=64,T=4096,context=64,capacity=65536,Hk=1,Hq=8");
  EXPECT_LE(scratch_bytes(cpu_with(Isa::best, 8), scene.args), size_t{8} << 20);
}

}  // namespace
}  // namespace weft
