// kv_rotate, kv_encode, kv_decode and kv_repack on the cpu: how each op is split over threads.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kv/kv_codec.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/kv/kv_codec-inl.h"

#if HWY_ONCE

#include <algorithm>
#include <string>

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/table.h"

namespace weft::cpu {

HWY_EXPORT(rotate_rows);
HWY_EXPORT(encode_tokens);
HWY_EXPORT(decode_tokens);
HWY_EXPORT(repack_rows);

namespace {

// One thread finishes fewer elements than this before another has woken up.
constexpr int64_t kElementsPerThread = 32768;

int threads_for(const Stream& stream, int64_t elements) {
  return static_cast<int>(std::clamp<int64_t>(elements / kElementsPerThread, 1, thread_count(stream)));
}

Choice chosen(Isa isa, const std::string& kernel, int threads, const std::string& over) {
  return {"cpu." + kernel + "." + isa_name(isa), std::to_string(threads) + " threads over " + over};
}

const char* transform_of(const KvFormat& format) {
  if (format.passthrough || format.rotation == Rotation::none) return "copy";
  return format.rotation == Rotation::dense ? "dense" : "fwht";
}

// ---- kv_rotate

struct RowsPlan {
  Isa isa = Isa::best;
  int threads = 1;
  int64_t rows = 0, step = 1;  // step: rows of a work item
  size_t scratch_bytes = 0;
};

RowsPlan plan_rotate(const Stream& stream, const KvRotateArgs& args) {
  RowsPlan plan;
  const int64_t D = args.format.head_dim;
  plan.isa = resolve_isa(stream.isa);
  plan.rows = args.x.size(0) * args.x.size(1);
  plan.threads = threads_for(stream, plan.rows * D);
  plan.step = std::max<int64_t>(1, kElementsPerThread / D);
  return plan;
}

void rotate(const Stream&, const KvRotateArgs& args, const RowsPlan& plan, Scratch) {
  const RotatePlan rotation = rotate_plan(args.format, args.inverse);
  const RowsView x = rows_view(args.x), y = rows_view(args.y);
  const int64_t H = args.x.size(1);
  const auto kernel = WEFT_KERNEL(plan.isa, rotate_rows);
  parallel_for(plan.threads, (plan.rows + plan.step - 1) / plan.step,
               [&](int64_t i, int) { kernel(rotation, x, y, H, i * plan.step, std::min(plan.rows, (i + 1) * plan.step)); });
}

Choice describe_rotate(const Stream&, const KvRotateArgs& args, const RowsPlan& plan) {
  return chosen(plan.isa, std::string("kv_rotate.") + transform_of(args.format), plan.threads, std::to_string(plan.rows) + " rows");
}

// ---- kv_encode, kv_decode
//
// One work item processes the tokens of a sequence, side and group of heads in order. Several tokens may map to one cache row, of
// which the last must stay, and tokens of a V tile share bytes.

// Tokens per kernel call. Their locations are looked up first, and the input rows of all heads fit in the L2 cache.
constexpr int64_t kChunkTokens = 256;

struct TokensPlan {
  Isa isa = Isa::best;
  int threads = 1;
  int64_t sides = 0, groups = 1;  // groups: of heads, per side
  int64_t items = 0;
  size_t scratch_bytes = 0;
};

template <class Args>
TokensPlan plan_tokens(const Stream& stream, const Args& args) {
  TokensPlan plan;
  const int64_t N = args.sequences.count, Hk = args.cache.heads();
  plan.isa = resolve_isa(stream.isa);
  plan.threads = threads_for(stream, args.k.elements() + args.v.elements());
  plan.sides = (args.k.present() ? 1 : 0) + (args.v.present() ? 1 : 0);
  if (plan.threads > 1)
    plan.groups = std::clamp<int64_t>(4 * plan.threads / std::max<int64_t>(1, N * plan.sides), 1, std::max<int64_t>(1, Hk));
  plan.items = N * plan.sides * plan.groups;
  return plan;
}

// Calls kernel(params of the side, tokens, first head, last head) for every sequence, side, group of heads and chunk of tokens.
template <class Args, class Params, class Kernel>
void run_tokens(const TokensPlan& plan, const Args& args, const Params& k, const Params& v, Kernel kernel) {
  const int64_t Hk = args.cache.heads();
  parallel_for(plan.threads, plan.items, [&](int64_t item, int) {
    const int64_t group = item % plan.groups, side = item / plan.groups % plan.sides, n = item / plan.groups / plan.sides;
    const Params& params = side == 0 && args.k.present() ? k : v;
    const TokenRange range = tokens_of(args.sequences, n, args.positions.size(0));
    KvLocation at[kChunkTokens];
    for (int64_t t = range.begin; t < range.end; t += kChunkTokens) {
      const TokenLocations tokens{t, std::min(kChunkTokens, range.end - t), at};
      for (int64_t i = 0; i < tokens.count; ++i) at[i] = locate(args.cache, n, index_at(args.positions, t + i));
      kernel(params, tokens, group * Hk / plan.groups, (group + 1) * Hk / plan.groups);
    }
  });
}

template <class Args>
Choice describe_tokens(const TokensPlan& plan, const Args& args, const char* op) {
  const std::string kernel = std::string(op) + "." + transform_of((args.k.present() ? args.cache.k : args.cache.v).format);
  return chosen(plan.isa, kernel, plan.threads,
                std::to_string(args.sequences.count) + " sequences x " + std::to_string(plan.sides) + " sides x " +
                    std::to_string(plan.groups) + " groups of heads, tokens in order");
}

void encode(const Stream&, const KvEncodeArgs& args, const TokensPlan& plan, Scratch) {
  const EncodePlan k = encode_plan(args.cache, KvRole::k, args.k), v = encode_plan(args.cache, KvRole::v, args.v);
  run_tokens(plan, args, k, v, WEFT_KERNEL(plan.isa, encode_tokens));
}
Choice describe_encode(const Stream&, const KvEncodeArgs& args, const TokensPlan& plan) {
  return describe_tokens(plan, args, "kv_encode");
}

void decode(const Stream&, const KvDecodeArgs& args, const TokensPlan& plan, Scratch) {
  const DecodePlan k = decode_plan(args.cache, KvRole::k, args.k, args.domain),
                   v = decode_plan(args.cache, KvRole::v, args.v, args.domain);
  run_tokens(plan, args, k, v, WEFT_KERNEL(plan.isa, decode_tokens));
}
Choice describe_decode(const Stream&, const KvDecodeArgs& args, const TokensPlan& plan) {
  return describe_tokens(plan, args, "kv_decode");
}

// ---- kv_repack

constexpr int64_t kRepackRows = 16 * kTileTokens;

struct RepackPlan {
  Isa isa = Isa::best;
  int threads = 1;
  int64_t chunks = 0;  // per block and head
  int64_t items = 0;
  size_t scratch_bytes = 0;
};

RepackPlan plan_repack(const Stream& stream, const KvRepackArgs& args) {
  RepackPlan plan;
  const int64_t blocks = args.from.k.codes.size(0), heads = args.from.heads(), capacity = args.from.capacity();
  const int64_t D = args.from.k.format.head_dim + args.from.v.format.head_dim;
  plan.isa = resolve_isa(stream.isa);
  plan.threads = threads_for(stream, blocks * heads * capacity * D);
  plan.chunks = (capacity + kRepackRows - 1) / kRepackRows;
  plan.items = blocks * heads * 2 * plan.chunks;
  return plan;
}

void repack(const Stream&, const KvRepackArgs& args, const RepackPlan& plan, Scratch) {
  const SideView from[] = {side_view(args.from, KvRole::k), side_view(args.from, KvRole::v)};
  const SideView to[] = {side_view(args.to, KvRole::k), side_view(args.to, KvRole::v)};
  const int64_t heads = args.from.heads(), capacity = args.from.capacity();
  const auto kernel = WEFT_KERNEL(plan.isa, repack_rows);
  parallel_for(plan.threads, plan.items, [&](int64_t item, int) {
    const int64_t first = item % plan.chunks * kRepackRows, rest = item / plan.chunks, side = rest % 2, head = rest / 2 % heads,
                  block = rest / 2 / heads;
    kernel(from[side], to[side], block, head, first, std::min(kRepackRows, capacity - first));
  });
}

Choice describe_repack(const Stream&, const KvRepackArgs&, const RepackPlan& plan) {
  return chosen(plan.isa, "kv_repack.rows", plan.threads,
                std::to_string(plan.items) + " ranges of up to " + std::to_string(kRepackRows) + " rows");
}

}  // namespace

OpEntry<KvRotateArgs> kv_rotate_entry() { return entry<plan_rotate, describe_rotate, rotate>(kAllFloats); }
OpEntry<KvEncodeArgs> kv_encode_entry() { return entry<plan_tokens<KvEncodeArgs>, describe_encode, encode>(kAllFloats); }
OpEntry<KvDecodeArgs> kv_decode_entry() { return entry<plan_tokens<KvDecodeArgs>, describe_decode, decode>(kAllFloats); }
OpEntry<KvRepackArgs> kv_repack_entry() { return entry<plan_repack, describe_repack, repack>(kAllFloats); }

}  // namespace weft::cpu

#endif  // HWY_ONCE
