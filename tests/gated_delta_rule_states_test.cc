// gated_delta_rule_prefill and _decode on the reference: continuation, state pools, inert rows, and memory that must stay
// untouched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/support/delta.h"

namespace weft::tests {
namespace {

using cases::get;

// Tokens [begin, end) of a problem with one sequence.
template <class Args>
Args part(Args args, int64_t begin, int64_t end) {
  for (Tensor* t : {&args.q, &args.k, &args.v, &args.gates.g, &args.gates.beta, &args.o}) *t = rows_of(*t, begin, end);
  args.sequences = Sequences::uniform(1);
  return args;
}

// A pool with gaps between heads and slots, everything NaN.
Tensor make_gapped_pool(cases::Memory& memory, DType dtype, int64_t slots, const DeltaOptions& o) {
  const int64_t head = o.V * o.K + 3, slot = o.Hv * head + 5;
  Tensor pool =
      o.layout == StateLayout::vk ? dense(nullptr, dtype, {slots, o.Hv, o.V, o.K}) : dense(nullptr, dtype, {slots, o.Hv, o.K, o.V});
  pool.data = memory.make(dtype, {slots * slot}).data;
  pool.strides[0] = slot;
  pool.strides[1] = head;
  return pool;
}

// All bytes from the first to the last element of a view, gaps included.
std::vector<uint8_t> raw_bytes(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.rank; ++i) last += (t.size(i) - 1) * t.stride(i);
  std::vector<uint8_t> bytes(static_cast<size_t>((last + 1) * dtype_bytes(t.dtype)));
  std::memcpy(bytes.data(), t.data, bytes.size());
  return bytes;
}

TEST(Continuation, TwoCallsAreOne) {
  const int64_t T = 150;
  DeltaProblem p({.lengths = {T}, .Hk = 2, .Hv = 4, .g_low = -0.1});
  const Tensor o = p.memory.make(DType::f32, {T, 4, 8}), middle = p.memory.make(DType::f32, {1, 4, 8, 16}),
               out = p.memory.make(DType::f32, {1, 4, 8, 16});
  gated_delta_rule_prefill(kReference, p.prefill());
  for (int64_t a : {0, 1, 2, 16, 63, 64, 65, 77, 127, 128, 149, 150}) {
    GatedDeltaRulePrefillArgs first = part(p.prefill(), 0, a), second = part(p.prefill(), a, T);
    first.o = rows_of(o, 0, a);
    second.o = rows_of(o, a, T);
    first.states.out = middle;
    second.states.in = middle;
    second.states.out = out;
    gated_delta_rule_prefill(kReference, first);
    gated_delta_rule_prefill(kReference, second);
    // The middle state was rounded once, on top of the roundings of both runs.
    EXPECT_LE(cases::relative_rms(o, p.o), 2 * kFourRoundings) << "split at " << a;
    EXPECT_LE(cases::relative_rms(out, p.out), 2 * kFourRoundings) << "split at " << a;
  }
}

TEST(Continuation, InvariantScheduleKeepsTheBitsAtMultiplesOf64) {
  const int64_t T = 200;
  DeltaProblem p({.lengths = {T}, .Hv = 2, .g_low = -0.1});
  const Tensor o = p.memory.make(DType::f32, {T, 2, 8}), out = p.memory.make(DType::f32, {1, 2, 8, 16});
  GatedDeltaRulePrefillArgs whole = p.prefill();
  whole.schedule = Schedule::invariant;
  gated_delta_rule_prefill(kReference, whole);
  p.expect_recurrence(0, p.out, 0, false, 2 * kFourRoundings, 2 * kFourRoundings);
  for (int64_t a : {64, 128, 192}) {
    GatedDeltaRulePrefillArgs first = part(whole, 0, a), second = part(whole, a, T);
    first.o = rows_of(o, 0, a);
    second.o = rows_of(o, a, T);
    first.states.out = second.states.in = second.states.out = out;
    gated_delta_rule_prefill(kReference, first);
    gated_delta_rule_prefill(kReference, second);
    EXPECT_TRUE(cases::same_bits(o, p.o)) << "split at " << a;
    EXPECT_TRUE(cases::same_bits(out, p.out)) << "split at " << a;
  }
}

TEST(Continuation, PrefillAndDecodeIsPrefill) {
  for (int64_t T : {1, 2, 17, 64, 65, 128}) {
    for (int64_t last : {int64_t{1}, std::min<int64_t>(T, 16)}) {
      DeltaProblem p({.lengths = {T}, .Hk = 1, .Hv = 2});
      gated_delta_rule_prefill(kReference, p.prefill());
      const Tensor o = p.memory.make(DType::f32, {T, 2, 8}), out = p.memory.make(DType::f32, {1, 2, 8, 16});
      GatedDeltaRulePrefillArgs head = part(p.prefill(), 0, T - last);
      head.o = rows_of(o, 0, T - last);
      head.states.out = out;
      gated_delta_rule_prefill(kReference, head);
      GatedDeltaRuleDecodeArgs tail = part(p.decode(), T - last, T);
      tail.o = rows_of(o, T - last, T);
      tail.states.in = tail.states.out = out;
      gated_delta_rule_decode(kReference, tail);
      EXPECT_LE(cases::relative_rms(o, p.o), 2 * kFourRoundings) << T << " with " << last << " decoded";
      EXPECT_LE(cases::relative_rms(out, p.out), 2 * kFourRoundings) << T << " with " << last << " decoded";
    }
  }
}

// Permuted slots in larger pools with gaps. One sequence is inert because its slot is -1, another because its slot is out of range.
// All slots that no sequence reads hold NaN.
template <class Args>
void expect_pool(DeltaProblem& p, Args args) {
  const DeltaOptions& o = p.options;
  const int64_t N = p.sequences.count, slots = N + 4;
  ASSERT_EQ(N, 5);
  for (bool in_place : {false, true}) {
    const Tensor in = make_gapped_pool(p.memory, o.state_dtype, slots, o);
    const Tensor out = in_place ? in : make_gapped_pool(p.memory, o.state_dtype, slots, o);
    const std::vector<int64_t> in_slots = {3, -1, 8, 0, slots};
    const std::vector<int64_t> out_slots = in_place ? in_slots : std::vector<int64_t>{7, 2, 1, -1, 0};
    for (int64_t n : {0, 2, 3}) {
      const int64_t slot = in_slots[static_cast<size_t>(n)];
      cases::copy(rows_of(p.in, n, n + 1), rows_of(in, slot, slot + 1));
    }
    cases::fill(p.o, 7);
    args.states.in = in;
    args.states.out = out;
    args.states.in_slots = p.memory.indices(in_slots);
    args.states.out_slots = in_place ? Tensor{} : p.memory.indices(out_slots);
    const std::vector<uint8_t> before = raw_bytes(out);
    Args run = args;
    if constexpr (requires { run.record; }) {
      run.record.k = p.memory.make(DType::f32, {p.k.size(0), o.Hk, o.K});
      run.record.delta = p.memory.make(DType::f32, {p.k.size(0), o.Hv, o.V});
      run.record.g = p.memory.make(DType::f32, {p.k.size(0), o.Hv});
      gated_delta_rule_decode(kReference, run);
      for (const Tensor& t : {run.record.k, run.record.delta, run.record.g})
        for (int64_t n : {1, 4})
          EXPECT_TRUE(all_nan(rows_of(t, p.begins[static_cast<size_t>(n)], p.begins[static_cast<size_t>(n) + 1])));
    } else {
      gated_delta_rule_prefill(kReference, run);
    }
    for (int64_t n : {0, 2, 3}) {
      const int64_t slot = out_slots[static_cast<size_t>(n)];
      p.expect_recurrence(n, slot < 0 ? Tensor{} : out, slot, false, kFourRoundings, kFourRoundings);
    }
    for (int64_t n : {1, 4})
      for (double x : cases::values(rows_of(p.o, p.begins[static_cast<size_t>(n)], p.begins[static_cast<size_t>(n) + 1])))
        EXPECT_EQ(x, 0);
    // Memory outside the output slots is unchanged, gaps included.
    const std::vector<uint8_t> after = raw_bytes(out);
    std::vector<bool> written(after.size(), false);
    for (int64_t n : {0, 2, 3})
      for (int64_t h = 0; h < o.Hv && out_slots[static_cast<size_t>(n)] >= 0; ++h)
        for (int64_t i = 0; i < o.V * o.K * dtype_bytes(out.dtype); ++i)
          written[static_cast<size_t>(
              (out_slots[static_cast<size_t>(n)] * out.strides[0] + h * out.strides[1]) * dtype_bytes(out.dtype) + i)] = true;
    int64_t touched = 0;
    for (size_t i = 0; i < after.size(); ++i) touched += !written[i] && after[i] != before[i];
    EXPECT_EQ(touched, 0);
    EXPECT_TRUE(p.memory.guards_intact());
  }
}

TEST(Pool, PrefillTouchesOnlyItsSlots) {
  for (StateLayout layout : {StateLayout::vk, StateLayout::kv}) {
    DeltaProblem p({.lengths = {70, 5, 0, 3, 9}, .Hk = 1, .Hv = 2, .layout = layout, .spare_rows = 2});
    expect_pool(p, p.prefill());
  }
}

TEST(Pool, DecodeTouchesOnlyItsSlots) {
  for (StateLayout layout : {StateLayout::vk, StateLayout::kv}) {
    DeltaProblem p({.lengths = {16, 5, 0, 3, 9}, .Hk = 1, .Hv = 2, .layout = layout, .spare_rows = 2});
    expect_pool(p, p.decode());
  }
}

TEST(Pool, LayoutsAreTransposes) {
  DeltaProblem vk({.lengths = {40}, .Hv = 2}), kv({.lengths = {40}, .Hv = 2, .layout = StateLayout::kv});
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t r = 0; r < 8; ++r)
      for (int64_t c = 0; c < 16; ++c) cases::set(kv.in, (h * 16 + c) * 8 + r, state_at(vk.in, StateLayout::vk, 0, h, r, c));
  gated_delta_rule_prefill(kReference, vk.prefill());
  gated_delta_rule_prefill(kReference, kv.prefill());
  EXPECT_TRUE(cases::same_bits(vk.o, kv.o));
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t r = 0; r < 8; ++r)
      for (int64_t c = 0; c < 16; ++c)
        EXPECT_EQ(state_at(kv.out, StateLayout::kv, 0, h, r, c), state_at(vk.out, StateLayout::vk, 0, h, r, c));
}

TEST(Pool, NoInitialStateMeansZeros) {
  DeltaProblem p({.lengths = {9, 9, 9}, .Hv = 2});
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.states.has_initial = p.memory.indices({1, 0, 5});
  cases::fill(rows_of(p.in, 1, 2), NAN);  // not to be read
  gated_delta_rule_prefill(kReference, args);
  for (int64_t n : {0, 1, 2}) p.expect_recurrence(n, p.out, n, n == 1, kFourRoundings, kFourRoundings);
  args.states.in = Tensor{};
  gated_delta_rule_prefill(kReference, args);
  for (int64_t n : {0, 1, 2}) p.expect_recurrence(n, p.out, n, true, kFourRoundings, kFourRoundings);
}

// Without an input pool, a slot index still says whether the sequence is inert and where its state goes.
TEST(Pool, SlotsWithoutInputPool) {
  DeltaProblem p({.lengths = {9, 9, 9}});
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.states.in = Tensor{};
  args.states.in_slots = p.memory.indices({2, -1, 0});
  gated_delta_rule_prefill(kReference, args);
  p.expect_recurrence(0, p.out, 2, true, kFourRoundings, kFourRoundings);
  p.expect_recurrence(2, p.out, 0, true, kFourRoundings, kFourRoundings);
  for (double x : cases::values(rows_of(p.o, 9, 18))) EXPECT_EQ(x, 0);
  EXPECT_TRUE(all_nan(rows_of(p.out, 1, 2)));
}

TEST(Pool, AbsentOutputPoolWritesNoState) {
  DeltaProblem p({.lengths = {9}});
  const std::vector<double> before = cases::values(p.in);
  GatedDeltaRuleDecodeArgs args = p.decode();
  args.states.out = Tensor{};
  gated_delta_rule_decode(kReference, args);
  p.expect_recurrence(0, Tensor{}, 0, false, kFourRoundings, 0);
  EXPECT_EQ(cases::values(p.in), before);
}

// Bounds that decrease, leave the tensors or exceed max_tokens: nothing is read or written for such a sequence.
TEST(IllegalSequences, AreInert) {
  const std::vector<int64_t> bounds = {0, 8, 4, 12, 30, -1, 12, 13};  // legal: 0 (8), 2 (8), 6 (1)
  for (DType dtype : {DType::i32, DType::i64}) {
    DeltaProblem p({.lengths = {8, 4, 1}, .Hv = 2, .spare_rows = 3});
    const Tensor cu = p.memory.make(dtype, {8}), in = p.memory.make(DType::f32, {7, 2, 8, 16}),
                 out = p.memory.make(DType::f32, {7, 2, 8, 16});
    for (int64_t i = 0; i < 8; ++i) cases::set(cu, i, static_cast<double>(bounds[static_cast<size_t>(i)]));
    cases::fill(in, 0);
    GatedDeltaRulePrefillArgs args = p.prefill();
    args.sequences = Sequences::packed(cu, 7, 8);
    args.states.in = in;
    args.states.out = out;
    gated_delta_rule_prefill(kReference, args);
    for (int64_t n : {1, 3, 4, 5}) EXPECT_TRUE(all_nan(rows_of(out, n, n + 1))) << n;
    for (int64_t n : {0, 2, 6}) EXPECT_FALSE(std::isnan(cases::values(rows_of(out, n, n + 1))[0])) << n;
    EXPECT_TRUE(all_nan(rows_of(p.o, 13, 16)));
    args.sequences.max_tokens = 7;  // now 0 and 2 are too long
    cases::fill(out, NAN);
    cases::fill(p.o, NAN);
    gated_delta_rule_prefill(kReference, args);
    EXPECT_TRUE(all_nan(rows_of(out, 0, 6)));
    EXPECT_TRUE(all_nan(rows_of(p.o, 0, 12)));
    EXPECT_FALSE(std::isnan(get(out, 6 * out.strides[0])));
    EXPECT_TRUE(p.memory.guards_intact());
  }
}

}  // namespace
}  // namespace weft::tests
