// Every validation rule of the KV codec, broken once, with the message that refuses it.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tests/support/kv.h"
#include "weft/kv_codec.h"

namespace weft {
namespace {

using cases::Memory;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

template <class Args>
void expect_fault(const Args& args, const std::string& message) {
  const Status status = validate(args);
  EXPECT_EQ(status.code, Code::invalid_argument) << message;
  EXPECT_EQ(status.message, message);
  EXPECT_EQ(message.find(status.op + ": " + status.argument + " "), 0u);
}

// Gives the format a dense rotation and returns that tensor, for a test to break.
Tensor& set_dense_rotation(Memory& memory, KvFormat& format) {
  format.rotation = Rotation::dense;
  return format.dense_rotation = memory.make(DType::f32, {format.head_dim, format.head_dim});
}

// ---------------------------------------------------------------- formats

struct FormatFault {
  const char* what;
  std::function<void(KvFormat&)> breaks;
};

TEST(KvValidate, Formats) {
  Memory memory;
  constexpr const char* kNoneOfTheirs = "has a gain_rule, gain_units or packing that is none of their values";
  const FormatFault faults[] = {
      {"has head_dim 0, wanted a multiple of 8 from 8 to 512", [](KvFormat& f) { f.head_dim = 0; }},
      {"has head_dim 100, wanted a multiple of 8 from 8 to 512", [](KvFormat& f) { f.head_dim = 100; }},
      {"has head_dim 520, wanted a multiple of 8 from 8 to 512", [](KvFormat& f) { f.head_dim = 520; }},
      {"has passthrough i32, wanted f32, f16 or bf16", [](KvFormat& f) { f.passthrough = DType::i32; }},
      {"has bits 1, wanted 2 to 8", [](KvFormat& f) { f.bits = 1; }},
      {"has bits 9, wanted 2 to 8", [](KvFormat& f) { f.bits = 9; }},
      {"has rotation 3, wanted none, srht or dense", [](KvFormat& f) { f.rotation = static_cast<Rotation>(3); }},
      {"has rotation -1, wanted none, srht or dense", [](KvFormat& f) { f.rotation = static_cast<Rotation>(-1); }},
      {kNoneOfTheirs, [](KvFormat& f) { f.gain_rule = static_cast<GainRule>(4); }},
      {kNoneOfTheirs, [](KvFormat& f) { f.gain_rule = static_cast<GainRule>(-1); }},
      {kNoneOfTheirs, [](KvFormat& f) { f.gain_units = static_cast<GainUnits>(2); }},
      {kNoneOfTheirs, [](KvFormat& f) { f.packing = static_cast<Packing>(2); }},
      {"has rotation_group 0, wanted 2^k, 12 2^k, 20 2^k or 28 2^k", [](KvFormat& f) { f.rotation_group = 0; }},
      {"has rotation_group 6, wanted 2^k, 12 2^k, 20 2^k or 28 2^k", [](KvFormat& f) { f.rotation_group = 6; }},
      {"has rotation_group 24, wanted a divisor of head_dim 64", [](KvFormat& f) { f.rotation_group = 24; }},
      {"has rotation_group 128, wanted a divisor of head_dim 64", [](KvFormat& f) { f.rotation_group = 128; }},
      {"has dense_rotation absent, wanted f32 [64, 64]", [](KvFormat& f) { f.rotation = Rotation::dense; }},
      {"has dense_rotation f32 [64, 32], wanted f32 [64, 64]",
       [&](KvFormat& f) {
         f.rotation = Rotation::dense;
         f.dense_rotation = memory.make(DType::f32, {64, 32});
       }},
      {"has dense_rotation f16 [64, 64], wanted f32 [64, 64]",
       [&](KvFormat& f) {
         f.rotation = Rotation::dense;
         f.dense_rotation = memory.make(DType::f16, {64, 64});
       }},
      {"has gain_group 0, wanted a divisor of head_dim 64", [](KvFormat& f) { f.gain_group = 0; }},
      {"has gain_group 24, wanted a divisor of head_dim 64", [](KvFormat& f) { f.gain_group = 24; }},
      {"has gain_dtype u8, wanted f32, f16 or bf16", [](KvFormat& f) { f.gain_dtype = DType::u8; }},
      {"has tiny_norm -1.000000, wanted a finite number >= 0", [](KvFormat& f) { f.tiny_norm = -1; }},
      {"has tiny_norm inf, wanted a finite number >= 0", [](KvFormat& f) { f.tiny_norm = kInfinity; }},
      {"has a codebook whose level 3 is not finite", [](KvFormat& f) { f.codebook[3] = kNan; }},
      {"has a codebook whose level 15 is not finite", [](KvFormat& f) { f.codebook[15] = kInfinity; }},
      {"has a codebook whose level 8 is not above level 7", [](KvFormat& f) { f.codebook[8] = f.codebook[7]; }},
      {"has a codebook whose level 2 is not above level 1", [](KvFormat& f) { f.codebook[2] = -9; }},
      {"has grid_step 0.000000, wanted a finite number > 0", [](KvFormat& f) { f.grid_step = 0.0f; }},
      {"has grid_step inf, wanted a finite number > 0", [](KvFormat& f) { f.grid_step = kInfinity; }},
      {"has a grid_step, but level 9 is not (n + 1/2) grid_step with n in -128..127", [](KvFormat& f) { f.codebook[9] *= 1.001f; }},
      {"has a grid_step, but level 0 is not (n + 1/2) grid_step with n in -128..127",
       [](KvFormat& f) { f.grid_step = *f.grid_step / 3; }},  // on the finer grid, but beyond its ends
      {"has mean f32 [2, 32], wanted f32 [Hk, 64]",
       [&](KvFormat& f) {
         f.mean = memory.make(DType::f32, {2, 32});
       }},
      {"has mean f32 [64], wanted f32 [Hk, 64]", [&](KvFormat& f) { f.mean = memory.make(DType::f32, {64}); }},
      {"has mean bf16 [2, 64], wanted f32 [Hk, 64]",
       [&](KvFormat& f) {
         f.mean = memory.make(DType::bf16, {2, 64});
       }},
  };
  for (const FormatFault& fault : faults) {
    KvFormat format = kv_format("4", 64);
    ASSERT_TRUE(validate(format, "op", "member"));
    fault.breaks(format);
    const Status status = validate(format, "op", "member");
    EXPECT_EQ(status.code, Code::invalid_argument);
    EXPECT_EQ(status.op, "op");
    EXPECT_EQ(status.argument, "member");
    EXPECT_EQ(status.message, std::string("op: member ") + fault.what);
  }
}

TEST(KvValidate, PassthroughIgnoresTheFieldsOfCodedSides) {
  KvFormat format = kv_format("f16", 64);
  format.bits = 99;
  format.gain_group = 0;
  format.codebook[0] = kNan;
  EXPECT_TRUE(validate(format, "op", "member"));
}

// ---------------------------------------------------------------- kv_rotate

TEST(KvValidate, Rotate) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {2, 3, 64});
  const KvRotateArgs good{x, memory.make(DType::bf16, {2, 3, 64}), kv_format("4", 64), false};
  EXPECT_TRUE(validate(good));
  const auto broken = [&](auto&& change, const char* message) {
    KvRotateArgs args = good;
    change(args);
    expect_fault(args, message);
  };
  broken([](KvRotateArgs& a) { a.x = {}; }, "kv_rotate: x is absent, wanted [T, H, D=64]");
  broken([](KvRotateArgs& a) { a.y = {}; }, "kv_rotate: y is absent, wanted [T=2, H=3, D=64]");
  broken([&](KvRotateArgs& a) { a.x = memory.make(DType::f32, {2, 3, 32}); }, "kv_rotate: x is [2, 3, 32], wanted [T, H, D=64]");
  broken([&](KvRotateArgs& a) { a.x = memory.make(DType::i32, {2, 3, 64}); }, "kv_rotate: x is i32, wanted f32, f16 or bf16");
  broken(
      [&](KvRotateArgs& a) {
        a.y = memory.make(DType::f32, {2, 1, 64});
      },
      "kv_rotate: y is [2, 1, 64], wanted [T=2, H=3, D=64]");
  broken([](KvRotateArgs& a) { a.format.bits = 0; }, "kv_rotate: format has bits 0, wanted 2 to 8");
  broken(
      [&](KvRotateArgs& a) {
        a.y = dense(static_cast<float*>(x.data) + 64, DType::f32, {2, 3, 64});
      },
      "kv_rotate: y overlaps x in memory");
  broken([&](KvRotateArgs& a) { set_dense_rotation(memory, a.format).strides[1] = 2; },
         "kv_rotate: format.dense_rotation has stride 2 in its last dimension, wanted 1");
  KvRotateArgs in_place = good;
  in_place.y = in_place.x;
  EXPECT_TRUE(validate(in_place));
}

// ---------------------------------------------------------------- kv_encode, kv_decode

class KvValidateCache : public testing::Test {
 protected:
  // Two sequences of three tokens, three blocks, two heads, Dk 64 at 4 bits, Dv 32 at 3 bits, 64 tokens a block.
  KvEncodeArgs good(KvLayout layout = KvLayout::rows) {
    KvEncodeArgs args;
    args.k = memory_.make(DType::f32, {6, 2, 64});
    args.v = memory_.make(DType::bf16, {6, 2, 32});
    args.positions = memory_.indices({0, 1, 2, 0, 1, 2});
    args.sequences = Sequences::uniform(2);
    args.cache = tests::make_cache(memory_, kv_format("4", 64), kv_format("3", 32), 3, 2, 64, layout);
    EXPECT_TRUE(validate(args)) << validate(args).message;
    return args;
  }
  template <class Change>
  void broken(Change&& change, const char* message, KvLayout layout = KvLayout::rows) {
    KvEncodeArgs args = good(layout);
    change(args);
    expect_fault(args, std::string("kv_encode: ") + message);
    const KvDecodeArgs decode{args.cache, args.positions, args.sequences, KvDomain::original, args.k, args.v};
    expect_fault(decode, std::string("kv_decode: ") + message);
  }
  Tensor table(int64_t rows, int64_t pages) { return memory_.make(DType::i32, {rows, pages}); }

  Memory memory_;
};

TEST_F(KvValidateCache, Tokens) {
  broken([](KvEncodeArgs& a) { a.positions = {}; }, "positions is absent, wanted [T]");
  broken([&](KvEncodeArgs& a) { a.positions = memory_.make(DType::i64, {6}); }, "positions is i64, wanted i32");
  broken([&](KvEncodeArgs& a) { a.positions = memory_.make(DType::i32, {6, 1}); }, "positions is [6, 1], wanted [T]");
  broken([&](KvEncodeArgs& a) { a.positions = memory_.make(DType::i32, {3}); }, "positions is [3], wanted [T=6]");
  broken([](KvEncodeArgs& a) { a.sequences.count = 4; },
         "sequences.count is 4, wanted a divisor of T=6, or cu_seqlens for sequences of different lengths");
  broken([](KvEncodeArgs& a) { a.k = a.v = {}; }, "k and v are both absent, wanted at least one");
  broken([&](KvEncodeArgs& a) { a.k = memory_.make(DType::f32, {6, 2, 32}); }, "k is [6, 2, 32], wanted [T=6, Hk=2, Dk=64]");
  broken([&](KvEncodeArgs& a) { a.v = memory_.make(DType::f32, {6, 3, 32}); }, "v is [6, 3, 32], wanted [T=6, Hk=2, Dv=32]");
  broken([&](KvEncodeArgs& a) { a.k = memory_.make(DType::f32, {5, 2, 64}); }, "k is [5, 2, 64], wanted [T=6, Hk=2, Dk=64]");
  broken([&](KvEncodeArgs& a) { a.v = memory_.make(DType::u8, {6, 2, 32}); }, "v is u8, wanted f32, f16 or bf16");
}

TEST_F(KvValidateCache, SidesInRows) {
  broken([](KvEncodeArgs& a) { a.cache.k.format.bits = 12; }, "cache.k.format has bits 12, wanted 2 to 8");
  broken([](KvEncodeArgs& a) { a.cache.v.format.head_dim = 3; },
         "cache.v.format has head_dim 3, wanted a multiple of 8 from 8 to 512");
  broken([](KvEncodeArgs& a) { a.cache.k.codes = {}; },
         "cache.k.codes is absent, wanted [blocks, Hk, capacity, code bytes of K=32]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.k.codes = memory_.make(DType::u8, {3, 2, 64, 24});
      },
      "cache.k.codes is [3, 2, 64, 24], wanted [blocks, Hk, capacity, code bytes of K=32]");
  broken([&](KvEncodeArgs& a) { a.cache.k.codes = memory_.make(DType::u32, {3, 2, 64, 32}); }, "cache.k.codes is u32, wanted u8");
  broken([](KvEncodeArgs& a) { a.cache.k.gains = {}; },
         "cache.k.gains is absent, wanted [blocks=3, Hk=2, capacity=64, Dk / gain_group=1]");
  broken([&](KvEncodeArgs& a) { a.cache.k.gains = memory_.make(DType::f32, {3, 2, 64, 1}); }, "cache.k.gains is f32, wanted f16");
  broken([](KvEncodeArgs& a) { a.cache.k.format.gain_group = 32; },
         "cache.k.gains is [3, 2, 64, 1], wanted [blocks=3, Hk=2, capacity=64, Dk / gain_group=2]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.codes = memory_.make(DType::u8, {3, 2, 48, 12});
      },
      "cache.v.codes is [3, 2, 48, 12], wanted [blocks=3, Hk=2, capacity=64, code bytes of V=12]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.codes = memory_.make(DType::u8, {2, 2, 64, 12});
      },
      "cache.v.codes is [2, 2, 64, 12], wanted [blocks=3, Hk=2, capacity=64, code bytes of V=12]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.gains = memory_.make(DType::f16, {3, 2, 64, 2});
      },
      "cache.v.gains is [3, 2, 64, 2], wanted [blocks=3, Hk=2, capacity=64, Dv / gain_group=1]");
  broken([](KvEncodeArgs& a) { a.cache.v.format.packing = Packing::byte; },
         "cache.v.codes is [3, 2, 64, 12], wanted [blocks=3, Hk=2, capacity=64, code bytes of V=32]");
  broken([](KvEncodeArgs& a) { a.cache.k.format = kv_format("f16", 64); }, "cache.k.codes is u8, wanted f16");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.k.format = kv_format("f16", 64);
        a.cache.k.codes = memory_.make(DType::f16, {3, 2, 64, 64});
      },
      "cache.k.gains is given, but a passthrough side has none");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.format.mean = memory_.make(DType::f32, {3, 32});
      },
      "cache.v.format.mean is [3, 32], wanted [Hk=2, Dv=32]");
  broken(
      [](KvEncodeArgs& a) {
        a.cache.k.codes.sizes[2] = a.cache.k.gains.sizes[2] = a.cache.v.codes.sizes[2] = a.cache.v.gains.sizes[2] = int64_t{1}
                                                                                                                    << 31;
      },
      "cache.k.codes is [3, 2, 2147483648, 32], wanted a capacity below 2^31 tokens");
}

TEST_F(KvValidateCache, SidesInTiles) {
  const KvLayout tiles = KvLayout::tiles;
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.k.codes = memory_.make(DType::u8, {3, 2, 1, 2048});
      },
      "cache.k.codes is [3, 2, 1, 2048], wanted [blocks, Hk, tiles, tile bytes of K=2176]", tiles);
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.codes = memory_.make(DType::u8, {3, 2, 2, 896});
      },
      "cache.v.codes is [3, 2, 2, 896], wanted [blocks=3, Hk=2, tiles=1, tile bytes of V=896]", tiles);
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.k.gains = memory_.make(DType::f16, {3, 2, 64, 1});
      },
      "cache.k.gains is given, but tiles hold their own gains", tiles);
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.k.codes = memory_.make(DType::u8, {3, 2, 1, 2176}, 32);
      },
      "cache.k.codes has tiles that are not aligned to 64 bytes", tiles);
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.v.codes = memory_.make_padded(DType::u8, {3, 2, 1, 896}, 8);
      },
      "cache.v.codes has tiles that are not aligned to 64 bytes", tiles);
}

TEST_F(KvValidateCache, PlacesOfSequences) {
  broken([&](KvEncodeArgs& a) { a.cache.slots = memory_.make(DType::i32, {3}); }, "cache.slots is [3], wanted [N=2]");
  broken([&](KvEncodeArgs& a) { a.cache.slots = memory_.make(DType::i64, {2}); }, "cache.slots is i64, wanted i32");
  broken([&](KvEncodeArgs& a) { a.cache.lengths = memory_.make(DType::i32, {3}); }, "cache.lengths is [3], wanted [N=2]");
  broken([&](KvEncodeArgs& a) { a.cache.page_table = table(2, 4); }, "cache.page_table is given, but the cache is not paged");
  broken([](KvEncodeArgs& a) { a.cache.kind = CacheKind::paged; }, "cache.page_table is absent, wanted [N=2, pages]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.kind = CacheKind::paged;
        a.cache.page_table = table(1, 4);
      },
      "cache.page_table is [1, 4], wanted [N=2, pages]");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.kind = CacheKind::paged;
        a.cache.page_table = table(2, 4);
        a.cache.slots = memory_.make(DType::i32, {2});
      },
      "cache.slots is given, but a paged cache finds its rows by page_table");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache = tests::make_cache(memory_, kv_format("4", 64), kv_format("3", 32), 3, 2, 24);
        a.cache.kind = CacheKind::paged;
        a.cache.page_table = table(2, 4);
      },
      "cache.k.codes has pages of 24 tokens, wanted a multiple of 16");
  broken(
      [&](KvEncodeArgs& a) {
        a.cache.kind = CacheKind::paged;
        a.cache.page_table = table(2, 4);
        a.cache.page_table.sizes[1] = int64_t{1} << 31;
      },
      "cache.page_table is [2, 2147483648], wanted less than 2^31 pages");
  broken([](KvEncodeArgs& a) { a.cache.pinned = 1; }, "cache.pinned is 1, wanted 0, since the cache is not a ring");
  for (int64_t pinned : {-1, 64})
    broken(
        [&](KvEncodeArgs& a) {
          a.cache.kind = CacheKind::ring;
          a.cache.pinned = pinned;
        },
        pinned < 0 ? "cache.pinned is -1, wanted 0 to below the capacity 64"
                   : "cache.pinned is 64, wanted 0 to below the capacity 64");
  KvEncodeArgs ring = good();
  ring.cache.kind = CacheKind::ring;
  ring.cache.pinned = 63;
  EXPECT_TRUE(validate(ring));
}

TEST_F(KvValidateCache, Enums) {
  broken([](KvEncodeArgs& a) { a.cache.layout = static_cast<KvLayout>(2); }, "cache.layout is 2, wanted 0 to 1");
  broken([](KvEncodeArgs& a) { a.cache.tile_order = static_cast<TileOrder>(2); }, "cache.tile_order is 2, wanted 0 to 1");
  broken([](KvEncodeArgs& a) { a.cache.kind = static_cast<CacheKind>(3); }, "cache.kind is 3, wanted 0 to 2");
  broken([](KvEncodeArgs& a) { a.cache.kind = static_cast<CacheKind>(-1); }, "cache.kind is -1, wanted 0 to 2");
  const KvEncodeArgs args = good();
  expect_fault(KvDecodeArgs{args.cache, args.positions, args.sequences, static_cast<KvDomain>(2), args.k, args.v},
               "kv_decode: domain is 2, wanted 0 to 1");
}

TEST_F(KvValidateCache, Memory) {
  KvEncodeArgs args = good();
  args.cache.v.codes.data = args.cache.k.codes.data;
  expect_fault(args, "kv_encode: cache.k.codes overlaps cache.v.codes in memory");
  args = good();
  args.cache.k.codes.strides[0] = 0;
  expect_fault(args, "kv_encode: cache.k.codes is an output whose strides let two indices share an element");
  args = good();
  KvDecodeArgs decode{args.cache, args.positions, args.sequences, KvDomain::original, args.k, args.v};
  EXPECT_TRUE(validate(decode));
  decode.k.strides[0] = 0;
  expect_fault(decode, "kv_decode: k is an output whose strides let two indices share an element");
  args = good();
  args.cache.k.codes.strides[3] = 2;
  expect_fault(args, "kv_encode: cache.k.codes has stride 2 in its last dimension, wanted 1");
  args = good();
  set_dense_rotation(memory_, args.cache.k.format).strides[1] = 2;
  expect_fault(args, "kv_encode: cache.k.format.dense_rotation has stride 2 in its last dimension, wanted 1");
  args = good();
  set_dense_rotation(memory_, args.cache.v.format).data = args.cache.k.codes.data;
  expect_fault(args, "kv_encode: cache.k.codes overlaps cache.v.format.dense_rotation in memory");
  args = good();
  args.positions.place = Place::cuda;
  EXPECT_FALSE(validate(args));
}

// ---------------------------------------------------------------- kv_repack

TEST(KvValidate, Repack) {
  Memory memory;
  const KvFormat k = kv_format("4", 64, 1), v = kv_format("f16", 32);
  const KvRepackArgs good{tests::make_cache(memory, k, v, 2, 2, 64), tests::make_cache(memory, k, v, 2, 2, 64, KvLayout::tiles)};
  EXPECT_TRUE(validate(good)) << validate(good).message;
  const auto broken = [&](const KvCache& to, const char* message) { expect_fault(KvRepackArgs{good.from, to}, message); };
  broken(tests::make_cache(memory, k, v, 3, 2, 64), "kv_repack: to.k.codes has 3 blocks, wanted 2 as from has");
  broken(tests::make_cache(memory, k, v, 2, 1, 64), "kv_repack: to.k.codes has 1 heads, wanted 2 as from has");
  broken(tests::make_cache(memory, k, v, 2, 2, 128, KvLayout::tiles),
         "kv_repack: to.k.codes has room for 128 tokens a block, wanted 64 as from has");
  broken(tests::make_cache(memory, kv_format("4", 64, 2), v, 2, 2, 64),
         "kv_repack: to.k.format is weft1-4 of head_dim 64, rows of weft1-4 of head_dim 64 would not keep their codes, levels, "
         "rotation "
         "and gains");
  broken(
      tests::make_cache(memory, k, kv_format("bf16", 32), 2, 2, 64),
      "kv_repack: to.v.format is bf16 of head_dim 32, rows of f16 of head_dim 32 would not keep their codes, levels, rotation and "
      "gains");
  broken(good.from, "kv_repack: to.k.codes overlaps from.k.codes in memory");
  KvRepackArgs args = good;
  args.from.k.gains = {};
  expect_fault(args, "kv_repack: from.k.gains is absent, wanted [blocks=2, Hk=2, capacity=64, Dk / gain_group=1]");
  args = good;
  args.to.v.format.head_dim = 0;
  expect_fault(args, "kv_repack: to.v.format has head_dim 0, wanted a multiple of 8 from 8 to 512");
  args = good;
  args.from.pinned = 1;
  expect_fault(args, "kv_repack: from.pinned is 1, wanted 0, since the cache is not a ring");
  args = good;
  args.to.pinned = 1;
  expect_fault(args, "kv_repack: to.pinned is 1, wanted 0, since the cache is not a ring");
}

TEST(KvValidate, RepackNamesEveryTensor) {
  Memory memory;
  const KvFormat k = kv_format("4", 64, 1), v = kv_format("3", 32);
  const KvRepackArgs rows{tests::make_cache(memory, k, v, 2, 2, 64), tests::make_cache(memory, k, v, 2, 2, 64)};
  EXPECT_TRUE(validate(rows)) << validate(rows).message;
  const auto broken = [&](auto&& change, const std::string& message) {
    KvRepackArgs args = rows;
    change(args);
    expect_fault(args, "kv_repack: " + message);
  };
  const std::string absent = " is absent, wanted [blocks=2, Hk=2, capacity=64, ";
  broken([](KvRepackArgs& a) { a.from.v.codes = {}; }, "from.v.codes" + absent + "code bytes of V=12]");
  broken([](KvRepackArgs& a) { a.from.v.gains = {}; }, "from.v.gains" + absent + "Dv / gain_group=1]");
  broken([](KvRepackArgs& a) { a.to.k.gains = {}; }, "to.k.gains" + absent + "Dk / gain_group=1]");
  broken([](KvRepackArgs& a) { a.to.v.codes = {}; }, "to.v.codes" + absent + "code bytes of V=12]");
  broken([](KvRepackArgs& a) { a.to.v.gains = {}; }, "to.v.gains" + absent + "Dv / gain_group=1]");
  // The memory checks see the same tensors.
  broken([](KvRepackArgs& a) { a.from.v.codes.strides[3] = 2; }, "from.v.codes has stride 2 in its last dimension, wanted 1");
  broken([](KvRepackArgs& a) { a.from.v.gains.data = nullptr; }, "from.v.gains has no data for its shape [2, 2, 64, 1]");
  broken([](KvRepackArgs& a) { a.to.k.gains = a.from.k.gains; }, "to.k.gains overlaps from.k.gains in memory");
  broken([](KvRepackArgs& a) { a.to.v.codes = a.from.v.codes; }, "to.v.codes overlaps from.v.codes in memory");
  broken([](KvRepackArgs& a) { a.to.v.gains = a.from.v.gains; }, "to.v.gains overlaps from.v.gains in memory");
  const KvCache tiles = tests::make_cache(memory, k, v, 2, 2, 64, KvLayout::tiles);
  for (const auto& [side, message] : {std::pair{&KvCache::k, "to.k.gains is given, but tiles hold their own gains"},
                                      std::pair{&KvCache::v, "to.v.gains is given, but tiles hold their own gains"}})
    broken(
        [&, side = side](KvRepackArgs& a) {
          a.to = tiles;
          (a.to.*side).gains = (rows.to.*side).gains;
        },
        message);
}

TEST(KvValidate, RepackEnums) {
  Memory memory;
  const KvFormat format = kv_format("4", 64, 1);
  const KvRepackArgs good{tests::make_cache(memory, format, format, 2, 2, 64), tests::make_cache(memory, format, format, 2, 2, 64)};
  for (const auto& [cache, name] : {std::pair{&KvRepackArgs::from, "from"}, std::pair{&KvRepackArgs::to, "to"}}) {
    const std::string begin = std::string("kv_repack: ") + name;
    KvRepackArgs args = good;
    (args.*cache).layout = static_cast<KvLayout>(2);
    expect_fault(args, begin + ".layout is 2, wanted 0 to 1");
    args = good;
    (args.*cache).tile_order = static_cast<TileOrder>(-1);
    expect_fault(args, begin + ".tile_order is -1, wanted 0 to 1");
    args = good;
    (args.*cache).kind = static_cast<CacheKind>(3);
    expect_fault(args, begin + ".kind is 3, wanted 0 to 2");
  }
}

}  // namespace
}  // namespace weft
