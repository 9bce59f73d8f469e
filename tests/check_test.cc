// Check: sentences, letters, sequences, and the rules of memory (overlap, double writes, strides, places), backends, streams and
// scratch that all ops share.
#include "core/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "core/backend.h"
#include "core/descriptions.h"

namespace weft {
namespace {

using cases::Memory;

// A view with the given strides over address `data`, for rules that never follow it.
Tensor view(uintptr_t data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
            DType dtype = DType::f32) {
  Tensor t = dense(reinterpret_cast<void*>(data), dtype, sizes);
  int i = 0;
  for (int64_t s : strides) t.strides[i++] = s;
  return t;
}

Status status_of(Check& check) { return std::move(check).status(); }

TEST(Check, FailsAsASentence) {
  const Status status = fail(Code::unsupported, "short_conv", "x", "is odd");
  EXPECT_EQ(status.message, "short_conv: x is odd");
  EXPECT_EQ(status.op, "short_conv");
  EXPECT_EQ(status.argument, "x");
  EXPECT_FALSE(status.ok());
  EXPECT_STREQ(Error(status).what(), "short_conv: x is odd");
}

TEST(Check, KeepsTheFirstFault) {
  Check check("op");
  check.require(true, "a", "never").require(false, "b", "first").require(false, "c", "second");
  check.also(fail(Code::unsupported, "op", "d", "third"));
  EXPECT_EQ(status_of(check).message, "op: b first");
}

TEST(Check, BuildsTextsOnlyForFaults) {
  Check check("op");
  int built = 0;
  const auto text = [&] { return ++built, std::string("text"); };
  check.require(true, "a", text).require(false, "b", text).require(false, "c", text);
  EXPECT_EQ(built, 1);
}

TEST(Check, LettersBindOnceAndMustAgree) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {3, 4}), y = memory.make(DType::f32, {4, 3});
  Check good("op");
  good.tensor("x", x, {.shape = shape<"T", "C">}).tensor("y", y, {.shape = shape<"C", "T">});
  EXPECT_EQ(good.dim("T"), 3);
  EXPECT_EQ(good.dim("C"), 4);
  EXPECT_EQ(good.dim("nobody"), -1);
  EXPECT_TRUE(good.ok());
  Check bad("op");
  bad.tensor("x", x, {.shape = shape<"T", "C">}).tensor("y", y, {.shape = shape<"T", "C">});
  EXPECT_EQ(status_of(bad).message, "op: y is [4, 3], wanted [T=3, C=4]");
}

TEST(Check, LettersTwiceInOneTensorMustAgree) {
  Memory memory;
  Check good("op"), bad("op");
  good.tensor("p", memory.make(DType::f32, {4, 4}), {.shape = shape<"K", "K">});
  EXPECT_TRUE(good.ok());
  bad.tensor("p", memory.make(DType::f32, {4, 5}), {.shape = shape<"K", "K">});
  EXPECT_EQ(status_of(bad).message, "op: p is [4, 5], wanted [K=4, K=4]");
}

TEST(Check, NumbersFreeSizesRanksTypesAndPresence) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {3, 4});
  const auto message = [&](const Tensor& t, const TensorRule& rule) {
    Check check("op");
    check.tensor("x", t, rule);
    return status_of(check).message;
  };
  EXPECT_EQ(message(x, {.shape = shape<"*", "4">}), "");
  EXPECT_EQ(message(x, {.shape = shape<"*", "5">}), "op: x is [3, 4], wanted [*, 5]");
  EXPECT_EQ(message(x, {.shape = shape<">= N", "5">}), "op: x is [3, 4], wanted [>= N, 5]");
  EXPECT_EQ(message(x, {.shape = shape<"...", "D">}), "");
  EXPECT_EQ(message(x, {.shape = shape<"T">}), "op: x is [3, 4], wanted [T]");
  EXPECT_EQ(message(x, {.shape = shape<"T">, .other = shape<"T", "C">, .takes_other = true}), "");
  EXPECT_EQ(message(x, {.shape = shape<"T", "C">, .other = shape<"T">, .takes_other = true}), "op: x is [3, 4], wanted [T]");
  EXPECT_EQ(message(x, {.shape = shape<"T", "C">, .dtypes = {DType::i32}}), "op: x is f32, wanted i32");
  EXPECT_EQ(message(x, {.shape = shape<"T", "C">, .dtypes = {DType::i32, DType::i64}}), "op: x is f32, wanted i32 or i64");
  EXPECT_EQ(message(x, {.shape = shape<"T", "C">, .dtypes = {DType::f16, DType::bf16, DType::i32}}),
            "op: x is f32, wanted f16, bf16 or i32");
  const Tensor like = memory.make(DType::bf16, {1});
  EXPECT_EQ(message(x, {.shape = shape<"T", "C">, .dtype_of = &like}), "op: x is f32, wanted bf16");
  EXPECT_EQ(message(Tensor{}, {.shape = shape<"T", "C">}), "op: x is absent, wanted [T, C]");
  EXPECT_EQ(message(Tensor{}, {.shape = shape<"T", "C">, .optional = true}), "");
}

TEST(Check, RunsOutOfLettersWithASentence) {
  Check check("op");
  check.bind("a", 0).bind("b", 1).bind("c", 2).bind("d", 3).bind("e", 4).bind("f", 5).bind("g", 6).bind("h", 7);
  check.bind("i", 8).bind("j", 9).bind("k", 10).bind("l", 11).bind("m", 12).bind("n", 13).bind("o", 14).bind("p", 15);
  check.bind("q", 16).bind("r", 17).bind("s", 18).bind("t", 19).bind("u", 20).bind("v", 21).bind("w", 22).bind("x", 23);
  check.bind("d", 99);  // known already: needs no room
  EXPECT_TRUE(check.ok());
  EXPECT_EQ(check.dim("d"), 3);
  check.bind("another", 1);
  EXPECT_EQ(status_of(check).message, "op: another is one letter more than the checks have room for");
}

TEST(Check, Sequences) {
  Memory memory;
  const auto message = [](const Sequences& s, int64_t tokens) {
    Check check("op");
    check.sequences("sequences", s, tokens);
    return status_of(check).message;
  };
  EXPECT_EQ(message(Sequences::uniform(3), 9), "");
  EXPECT_EQ(message(Sequences::uniform(0), 0), "");
  EXPECT_EQ(message(Sequences::uniform(5), 0), "");
  EXPECT_EQ(message(Sequences::uniform(-1), 0), "op: sequences.count is -1, wanted 0 to 1048576");
  EXPECT_EQ(message(Sequences::uniform(0), 4),
            "op: sequences.count is 0, wanted the number of sequences that the T=4 tokens belong to");
  EXPECT_EQ(message(Sequences::uniform(3), 10),
            "op: sequences.count is 3, wanted a divisor of T=10, or cu_seqlens for sequences of different lengths");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0, 3, 10}), 2, 7), 10), "");
  EXPECT_EQ(message(Sequences::packed(memory.make(DType::i64, {3}), 2, 7), 10), "");
  EXPECT_EQ(message(Sequences::packed(memory.make(DType::f32, {3}), 2, 7), 10),
            "op: sequences.cu_seqlens is f32, wanted i32 or i64");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0, 3}), 2, 7), 10), "op: sequences.cu_seqlens is [2], wanted [count + 1=3]");
  EXPECT_EQ(message(Sequences::packed(memory.make(DType::i32, {3, 1}), 2, 7), 10),
            "op: sequences.cu_seqlens is [3, 1], wanted [count + 1=3]");
  // A count of 0 or 1 that was forgotten.
  for (const char* count : {"0", "1"})
    EXPECT_EQ(message(Sequences::packed(memory.indices({0, 3, 10}), std::stoi(count), 7), 10),
              "op: sequences.count is " + std::string(count) + ", wanted 2, one less than the 3 numbers in cu_seqlens");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0}), 1, 7), 10), "op: sequences.cu_seqlens is [1], wanted [count + 1=2]");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0, 3, 10}), 2, -7), 10), "op: sequences.max_tokens is -7, wanted >= 0");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0, 3, 10}), 2, 0), 10),
            "op: sequences.max_tokens is 0, wanted the length of the longest of 2 sequences with T=10");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0, 0, 0}), 2, 0), 0), "");
  EXPECT_EQ(message(Sequences::packed(memory.indices({0}), 0, 0), 10), "");
}

TEST(Check, Numbers) {
  const auto message = [](auto&& ask) {
    Check check("op");
    ask(check);
    return status_of(check).message;
  };
  EXPECT_EQ(message([](Check& c) { c.between("n", 3, 1, 3).between("n", 1, 1, 3); }), "");
  EXPECT_EQ(message([](Check& c) { c.between("n", 4, 1, 3); }), "op: n is 4, wanted 1 to 3");
  EXPECT_EQ(message([](Check& c) { c.divisor("n", 3, "N", 6); }), "");
  for (int64_t n : {4, 0, -1})
    EXPECT_EQ(message([&](Check& c) { c.divisor("n", n, "N", 6); }),
              "op: n is " + std::to_string(n) + ", wanted a positive divisor of N=6");
}

TEST(Check, Heads) {
  constexpr int64_t kMost = 1 << 14;
  const auto query = [](int64_t count, int64_t kv) {
    Check check("op");
    check.query_heads("q", count, "cache", kv);
    return status_of(check).message;
  };
  EXPECT_EQ(query(6, 3), "");
  EXPECT_EQ(query(kMost, 1), "");
  EXPECT_EQ(query(7, 2), "op: q has 7 heads, wanted a positive multiple of the cache's 2 KV heads");
  EXPECT_EQ(query(0, 2), "op: q has 0 heads, wanted a positive multiple of the cache's 2 KV heads");
  EXPECT_EQ(query(kMost + 1, 1), "op: q has 16385 heads, wanted at most 16384");
  EXPECT_EQ(query(4, 0), "op: cache has 0 heads, wanted at least 1");
  const auto key = [](int64_t count, int64_t values) {
    Check check("op");
    check.key_heads("k", count, "v", values);
    return status_of(check).message;
  };
  EXPECT_EQ(key(3, 6), "");
  EXPECT_EQ(key(1, kMost), "");
  EXPECT_EQ(key(4, 6), "op: k has 4 heads, wanted a positive divisor of the 6 heads of v");
  EXPECT_EQ(key(0, 6), "op: k has 0 heads, wanted a positive divisor of the 6 heads of v");
  EXPECT_EQ(key(2, 0), "op: v has 0 heads, wanted at least 1");
  EXPECT_EQ(key(1, kMost + 1), "op: v has 16385 heads, wanted at most 16384");
}

// A number, an option and an enum as a description tells them.
struct Numbers {
  float eps = 0;
  std::optional<float> scale{};
  std::optional<int64_t> window{};
  Schedule schedule = Schedule::fastest;
};
template <DescribedAs<Numbers> A, class V>
void describe(A& a, V&& v) {
  v.scalar(WEFT_CPP_ONLY(eps), kAtLeast0);
  v.scalar(WEFT_CPP_ONLY(scale), {.legal = "> 0", .above = 0});
  v.scalar(WEFT_CPP_ONLY(window), kAtLeast1);
  v.scalar(WEFT_CPP_ONLY(schedule), {});
}

TEST(Check, NumbersOfADescription) {
  const auto message = [](auto&& spoil) {
    Numbers numbers;
    spoil(numbers);
    Check check("op");
    check.members(numbers);
    return status_of(check).message;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(message([](Numbers&) {}), "");
  EXPECT_EQ(message([](Numbers& n) { n.eps = -1; }), "op: eps is -1.000000, wanted >= 0");
  EXPECT_EQ(message([](Numbers& n) { n.eps = kInfinity; }), "op: eps is inf, wanted a finite number");
  EXPECT_NE(message([](Numbers& n) { n.scale = NAN; }), "");
  EXPECT_EQ(message([](Numbers& n) { n.scale = 0.0f; }), "op: scale is 0.000000, wanted > 0");
  EXPECT_EQ(message([](Numbers& n) { n.scale = 1e-30f; }), "");
  EXPECT_EQ(message([](Numbers& n) { n.window = 0; }), "op: window is 0, wanted >= 1");
  EXPECT_EQ(message([](Numbers& n) { n.schedule = static_cast<Schedule>(2); }), "op: schedule is 2, wanted 0 to 1");
  EXPECT_EQ(message([](Numbers& n) { n.schedule = static_cast<Schedule>(-1); }), "op: schedule is -1, wanted 0 to 1");
}

// Whether two views touch a common byte, by listing all bytes of both.
bool overlaps_by_listing(const Tensor& a, const Tensor& b) {
  std::set<uintptr_t> bytes;
  const auto each = [](const Tensor& t, auto&& visit) {
    cases::for_each_offset(t, [&](int64_t offset) {
      for (int64_t i = 0; i < dtype_bytes(t.dtype); ++i)
        visit(reinterpret_cast<uintptr_t>(t.data) + static_cast<uintptr_t>(offset * dtype_bytes(t.dtype) + i));
    });
  };
  bool found = false;
  each(a, [&](uintptr_t byte) { bytes.insert(byte); });
  each(b, [&](uintptr_t byte) { found |= bytes.count(byte) > 0; });
  return found;
}

TEST(MayOverlap, ApartTouchingAndEmpty) {
  EXPECT_FALSE(may_overlap(view(0x1000, {4}, {1}), view(0x1010, {4}, {1})));  // end to end
  EXPECT_FALSE(may_overlap(view(0x1010, {4}, {1}), view(0x1000, {4}, {1})));
  EXPECT_TRUE(may_overlap(view(0x1000, {4}, {1}), view(0x100c, {4}, {1})));
  EXPECT_TRUE(may_overlap(view(0x100c, {4}, {1}), view(0x1000, {4}, {1})));
  EXPECT_TRUE(may_overlap(view(0x1000, {4}, {1}), view(0x1000, {4}, {1})));
  EXPECT_FALSE(may_overlap(view(0x1000, {4}, {1}), view(0x1000, {0}, {1})));
  EXPECT_FALSE(may_overlap(view(0x1000, {4, 0}, {1, 1}), view(0x1000, {4}, {1})));
}

// Columns of one packed row, as q, k and v of a convolution's output are.
TEST(MayOverlap, ColumnsOfOneRow) {
  const Tensor q = view(0x1000, {5, 2, 8}, {40, 8, 1}), k = view(0x1040, {5, 2, 8}, {40, 8, 1}),
               v = view(0x1080, {5, 1, 8}, {40, 8, 1});
  for (const Tensor* a : {&q, &k, &v})
    for (const Tensor* b : {&q, &k, &v}) EXPECT_EQ(may_overlap(*a, *b), a == b);
  EXPECT_TRUE(may_overlap(q, view(0x103c, {5, 2, 8}, {40, 8, 1})));                               // one column too early
  EXPECT_TRUE(may_overlap(q, view(0x1040, {5, 2, 8}, {39, 8, 1})));                               // another pitch: drifts into q
  EXPECT_TRUE(may_overlap(v, view(0x1080 + 160, {4, 1, 8}, {40, 8, 1})));                         // the same columns, a row further
  EXPECT_FALSE(may_overlap(v, view(0x1000 + 160, {4, 1, 8}, {40, 8, 1})));                        // other columns, a row further
  EXPECT_FALSE(may_overlap(view(0x1000 + 160, {4, 1, 8}, {40, 8, 1}), v));                        // and the other way round
  EXPECT_FALSE(may_overlap(q, view(0x1040, {5, 4, 8}, {80, 8, 1}, DType::bf16)));                 // equal pitch in bytes
  EXPECT_TRUE(may_overlap(view(0x1000, {5, 2, 20}, {16, 8, 1}), view(0x1040, {5, 4}, {16, 1})));  // rows longer than their pitch
}

TEST(MayOverlap, NeverSaysNoWrongly) {
  cases::Rng rng(5);
  int apart = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const auto random_view = [&] {
      const int64_t inner = rng.integer(1, 4), middle = rng.integer(1, 3);
      return view(0x1000 + static_cast<uintptr_t>(4 * rng.integer(0, 30)), {rng.integer(0, 4), middle, inner},
                  {rng.integer(0, 16), rng.integer(0, 6), 1}, rng.integer(0, 1) ? DType::f32 : DType::bf16);
    };
    const Tensor a = random_view(), b = random_view();
    if (may_overlap(a, b)) continue;
    ++apart;
    EXPECT_FALSE(overlaps_by_listing(a, b)) << trial;
  }
  EXPECT_GT(apart, 1000);
}

// What an op that reads x and writes y says to the two.
std::string memory_message(const Tensor& x, const Tensor& y) {
  Check check("l2_norm");
  check.memory(L2NormArgs{x, y});
  return status_of(check).message;
}

TEST(MemoryRules, OutputsAreApartOrTheSameView) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {4, 8});
  EXPECT_EQ(memory_message(x, memory.make(DType::f32, {4, 8})), "");
  EXPECT_EQ(memory_message(x, x), "");  // y may be x itself
  Tensor shifted = x;
  shifted.sizes[0] = 3;
  shifted.data = static_cast<float*>(x.data) + 8;
  EXPECT_EQ(memory_message(x, shifted), "l2_norm: y overlaps x in memory");
  Tensor other_type = x;
  other_type.dtype = DType::bf16;
  EXPECT_EQ(memory_message(x, other_type), "l2_norm: y overlaps x in memory");
  Check check("gated_delta_rule_compose");
  const Tensor p = memory.make(DType::f32, {1, 1, 4, 4}), q = memory.make(DType::f32, {1, 1, 4, 4}),
               out = memory.make(DType::f32, {1, 1, 4, 4});
  check.memory(GatedDeltaRuleComposeArgs{p, q, p, q, p, out});  // inputs may share, an output may not be one
  EXPECT_EQ(status_of(check).message, "gated_delta_rule_compose: p overlaps p1 in memory");
}

TEST(MemoryRules, OutputsWriteEveryElementOnce) {
  const std::string twice = "l2_norm: y is an output whose strides let two indices share an element";
  const Tensor x = view(0x100000, {4, 8}, {8, 1});
  EXPECT_EQ(memory_message(x, view(0x1000, {4, 8}, {8, 1})), "");
  EXPECT_EQ(memory_message(x, view(0x1000, {4, 8}, {20, 1})), "");
  EXPECT_EQ(memory_message(x, view(0x1000, {4, 8}, {7, 1})), twice);
  EXPECT_EQ(memory_message(x, view(0x1000, {4, 8}, {0, 1})), twice);
  EXPECT_EQ(memory_message(x, view(0x1000, {1, 8}, {0, 1})), "");                               // one index: any stride
  EXPECT_EQ(memory_message(x, view(0x1000, {2, 3, 8}, {8, 16, 1})), "");                        // permuted
  EXPECT_EQ(memory_message(x, view(0x1000, {3, 3, 8}, {8, 16, 1})), twice);                     // permuted too tightly
  EXPECT_EQ(memory_message(view(0x100000, {4, 8}, {0, 1}), view(0x1000, {4, 8}, {8, 1})), "");  // inputs may broadcast
}

TEST(MemoryRules, DoubleWritesAreNeverMissed) {
  cases::Rng rng(6);
  const Tensor x = view(0x100000, {1}, {1});
  int passed = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const Tensor y =
        view(0x1000, {rng.integer(1, 3), rng.integer(1, 3), rng.integer(1, 4)}, {rng.integer(0, 14), rng.integer(0, 14), 1});
    if (!memory_message(x, y).empty()) continue;
    ++passed;
    std::set<int64_t> seen;
    cases::for_each_offset(y, [&](int64_t offset) { EXPECT_TRUE(seen.insert(offset).second) << trial; });
  }
  EXPECT_GT(passed, 1000);
}

TEST(MemoryRules, SaneSizesStridesAndAddresses) {
  const Tensor y = view(0x1000, {4, 8}, {8, 1});
  EXPECT_EQ(memory_message(view(0x100000, {4, 8}, {8, 2}), y), "l2_norm: x has stride 2 in its last dimension, wanted 1");
  EXPECT_EQ(memory_message(view(0x100000, {4, 1}, {8, 2}), y), "");  // one element: any stride
  EXPECT_EQ(memory_message(view(0x100000, {4, 8}, {-8, 1}), y), "l2_norm: x has stride -8, wanted >= 0");
  EXPECT_EQ(memory_message(view(0x100000, {-4, 8}, {8, 1}), y), "l2_norm: x is [-4, 8], sizes must not be negative");
  EXPECT_EQ(memory_message(view(0x100002, {4, 8}, {8, 1}), y), "l2_norm: x is not aligned to its element, f32");
  EXPECT_EQ(memory_message(view(0x100002, {4, 8}, {8, 1}, DType::bf16), y), "");
  EXPECT_EQ(memory_message(view(0, {4, 8}, {8, 1}), y), "l2_norm: x has no data for its shape [4, 8]");
  EXPECT_EQ(memory_message(view(0, {0, 8}, {8, 1}), y), "");  // nothing to address
  EXPECT_EQ(memory_message(view(0x100000, {int64_t{1} << 40, 8}, {int64_t{1} << 40, 1}), y),
            "l2_norm: x is [1099511627776, 8] with strides beyond 2^46 bytes");
  // Over a single element a stride takes no bytes, but kernels multiply by it.
  EXPECT_EQ(memory_message(view(0x100000, {1, 8}, {int64_t{1} << 46, 1}), y), "");
  EXPECT_EQ(memory_message(view(0x100000, {1, 8}, {(int64_t{1} << 46) + 1, 1}), y),
            "l2_norm: x has stride 70368744177665, wanted at most 2^46");
  // Neither do dimensions with a stride of 0, or beside an empty one; they are counted all the same.
  EXPECT_EQ(memory_message(view(0x100000, {int64_t{1} << 40, 64}, {0, 1}), y), "");
  EXPECT_EQ(memory_message(view(0x100000, {int64_t{1} << 40, 65}, {0, 1}), y),
            "l2_norm: x is [1099511627776, 65], more than 2^46 elements");
  EXPECT_EQ(memory_message(view(0x100000, {0, int64_t{1} << 47}, {1, 1}), y),
            "l2_norm: x is [0, 140737488355328], more than 2^46 elements");
  Tensor deep = view(0x100000, {4, 8}, {8, 1});
  deep.rank = 6;
  EXPECT_EQ(memory_message(deep, y), "l2_norm: x has rank 6, wanted 1 to 5");
  EXPECT_EQ(memory_message(dense(deep.data, DType::f32, {1, 1, 1, 1, 4, 8, 2}), y), "l2_norm: x has rank 6, wanted 1 to 5");
  EXPECT_EQ(dense(deep.data, DType::f32, {8}, Place::cuda, 256).device, -1);
  Tensor elsewhere = y;
  elsewhere.place = Place::cuda;
  EXPECT_EQ(memory_message(view(0x100000, {4, 8}, {8, 1}), elsewhere), "l2_norm: y lives elsewhere than x");
  elsewhere.place = Place::host;
  elsewhere.device = 1;
  EXPECT_EQ(memory_message(view(0x100000, {4, 8}, {8, 1}), elsewhere), "l2_norm: y lives elsewhere than x");
}

// Arguments with more tensors than any op has.
struct ManyTensors {
  std::vector<Tensor> tensors;
};
template <DescribedAs<ManyTensors> A, class V>
void describe(A& a, V&& v) {
  for (auto& t : a.tensors) v.tensor("t", t, NotInC{}, {.shape = shape<"*">});
}

TEST(MemoryRules, RunOutOfRoomWithASentence) {
  const auto message = [](size_t present) {
    ManyTensors args{std::vector<Tensor>(present, view(0x1000, {4}, {1}))};
    args.tensors.resize(present + 40);  // absent ones need no room
    Check check("op");
    check.memory(args);
    return status_of(check).message;
  };
  EXPECT_EQ(message(32), "");
  EXPECT_EQ(message(33), "op: t is one tensor more than the checks have room for");
}

TEST(Place, TensorsLiveWhereTheBackendComputes) {
  Memory memory;
  L2NormArgs args{memory.make(DType::f32, {2, 2}), memory.make(DType::f32, {2, 2})};
  EXPECT_TRUE(supports({Backend::reference}, args).ok());
  args.x.place = args.y.place = Place::cuda;
  EXPECT_EQ(supports({Backend::reference}, args).message, "l2_norm: x lives in cuda memory, backend reference wants host memory");
}

TEST(Place, TensorsLiveOnTheDeviceOfTheStream) {
  L2NormArgs args{view(0x1000, {2, 2}, {2, 1}), view(0x2000, {2, 2}, {2, 1})};
  const Stream first{Backend::cuda, 0}, second{Backend::cuda, 1};
  EXPECT_EQ(check_place("l2_norm", args, Place::cuda, first).message,
            "l2_norm: x lives in host memory, backend cuda wants cuda memory");
  args.x.place = args.y.place = Place::cuda;
  args.y.device = 1;
  EXPECT_EQ(check_place("l2_norm", args, Place::cuda, first).message, "l2_norm: y lives on device 1, the stream is on device 0");
  EXPECT_EQ(check_place("l2_norm", args, Place::cuda, second).message, "l2_norm: x lives on device 0, the stream is on device 1");
  args.x.device = 1;
  EXPECT_EQ(check_place("l2_norm", args, Place::cuda, second).message, "");
  args.y.device = 2;
  args.y.sizes[0] = 0;  // nothing in it lives anywhere
  EXPECT_EQ(check_place("l2_norm", args, Place::cuda, second).message, "");
}

// Calls `call` and gives the sentence that it throws.
template <class Call>
Status thrown(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

void expect_no_backend(Backend backend, const std::string& message) {
  Memory memory;
  const L2NormArgs args{memory.make(DType::f32, {2, 2}), memory.make(DType::f32, {2, 2})};
  const Stream stream{backend};
  for (const Status& status : {supports(stream, args), thrown([&] { choose(stream, args); }),
                               thrown([&] { (void)scratch_bytes(stream, args); }), thrown([&] { l2_norm(stream, args); })}) {
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_EQ(status.op, "l2_norm");
    EXPECT_EQ(status.argument, "stream");
    EXPECT_EQ(status.message, message);
  }
}

TEST(Backends, NumbersThatAreNoneAreRefused) {
  expect_no_backend(static_cast<Backend>(7), "l2_norm: stream backend ? is not in this build");
}

TEST(Backends, CudaOutsideTheBuildIsRefused) {
  if (find_backend(Backend::cuda)) GTEST_SKIP() << "this build has the cuda backend";
  expect_no_backend(Backend::cuda, "l2_norm: stream backend cuda is not in this build");
}

TEST(Streams, HoldWhatTheirBackendUses) {
  Memory memory;
  const L2NormArgs args{memory.make(DType::f32, {2, 2}), memory.make(DType::f32, {2, 2})};
  int queue = 0;
  for (Backend backend : {Backend::reference, Backend::cpu}) {
    const std::string name = backend_name(backend);
    const auto message = [&](auto&& spoil) {
      Stream stream{backend};
      EXPECT_TRUE(supports(stream, args).ok());
      spoil(stream);
      const Status status = supports(stream, args);
      EXPECT_EQ(status.code, Code::invalid_argument);
      EXPECT_EQ(status.argument, "stream");
      return status.message;
    };
    EXPECT_EQ(message([](Stream& s) { s.threads = -1; }), "l2_norm: stream has threads -1, wanted 0 or more");
    EXPECT_EQ(message([](Stream& s) { s.device = 1; }), "l2_norm: stream has device 1, wanted 0 on backend " + name);
    EXPECT_EQ(message([&](Stream& s) { s.queue = &queue; }),
              "l2_norm: stream has a queue, but backend " + name + " computes on the calling thread");
    if (backend == Backend::reference) {
      EXPECT_EQ(message([](Stream& s) { s.isa = Isa::scalar; }),
                "l2_norm: stream asks for isa scalar, but only the cpu backend has instruction sets");
    }
  }
}

TEST(LentScratch, IsLargeEnoughAndAligned) {
  Memory memory;
  const ChunkTriInverseArgs args{memory.make(DType::f32, {64, 1, 64}), memory.make(DType::f32, {64, 1, 64}), Sequences::uniform(1),
                                 64};
  cases::fill(args.a, 0);
  const Stream cpu{};
  const size_t need = scratch_bytes(cpu, args);
  ASSERT_GT(need, 0u);
  void* lent = memory.bytes(need + kScratchAlignment);
  const std::string wants = " bytes, scratch_bytes() wants " + std::to_string(need);
  const auto message = [&](Scratch scratch) {
    const Status status = thrown([&] { chunk_tri_inverse(cpu, args, scratch); });
    EXPECT_EQ(status.code, Code::scratch_too_small);
    EXPECT_EQ(status.argument, "scratch");
    return status.message;
  };
  EXPECT_EQ(message({}), "chunk_tri_inverse: scratch has 0" + wants);
  EXPECT_EQ(message({lent, need - 1}), "chunk_tri_inverse: scratch has " + std::to_string(need - 1) + wants);
  EXPECT_EQ(message({nullptr, need}), "chunk_tri_inverse: scratch has " + std::to_string(need) + wants);
  for (size_t shift : {size_t{1}, size_t{64}, kScratchAlignment / 2})
    EXPECT_EQ(message({static_cast<uint8_t*>(lent) + shift, need}), "chunk_tri_inverse: scratch is not aligned to 256 bytes");
  for (double x : cases::values(args.a_inv)) EXPECT_TRUE(std::isnan(x));  // refused calls write nothing
  chunk_tri_inverse(cpu, args, {lent, need});
  EXPECT_EQ(cases::get(args.a_inv, 0), 1);
}

}  // namespace
}  // namespace weft
