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

int workers(const Stream& stream, int64_t elements) {
  return static_cast<int>(std::clamp<int64_t>(elements / kElementsPerThread, 1, thread_count(stream)));
}

Choice chosen(const Stream& stream, const char* kernel, int threads, const std::string& over) {
  return {std::string("cpu.") + kernel + "." + isa_name(resolve_isa(stream.isa)),
          std::to_string(threads) + " threads over " + over};
}

const char* transform_of(const KvFormat& format) {
  if (format.passthrough || format.rotation == Rotation::none) return "copy";
  return format.rotation == Rotation::dense ? "dense" : "fwht";
}

// ---- kv_rotate

int64_t rows_per_item(int64_t D) { return std::max<int64_t>(1, kElementsPerThread / D); }

void rotate(const Stream& stream, const KvRotateArgs& args, Scratch) {
  const RotatePlan plan = rotate_plan(args.format, args.inverse);
  const RowsView x = rows_view(args.x), y = rows_view(args.y);
  const int64_t H = args.x.size(1), rows = args.x.size(0) * H, chunk = rows_per_item(plan.D);
  const auto kernel = WEFT_KERNEL(stream.isa, rotate_rows);
  parallel_for(workers(stream, rows * plan.D), (rows + chunk - 1) / chunk,
               [&](int64_t i, int) { kernel(plan, x, y, H, i * chunk, std::min(rows, (i + 1) * chunk)); });
}

Choice rotate_choose(const Stream& stream, const KvRotateArgs& args) {
  const int64_t rows = args.x.size(0) * args.x.size(1);
  return chosen(stream, (std::string("kv_rotate.") + transform_of(args.format)).c_str(),
                workers(stream, rows * args.format.head_dim), std::to_string(rows) + " rows");
}

// ---- kv_encode, kv_decode
//
// One work item processes the tokens of a sequence, side and group of heads in order. Several tokens may map to one cache row, of
// which the last must stay, and tokens of a V tile share bytes.

// Tokens per kernel call. Their locations are looked up first, and the input rows of all heads fit in the L2 cache.
constexpr int64_t kChunkTokens = 256;

struct TokenSplit {
  int threads;
  int64_t sides, groups;  // groups: of heads, per side
  int64_t items;
};

template <class Args>
TokenSplit split_tokens(const Stream& stream, const Args& args) {
  const int64_t N = args.sequences.count, Hk = args.cache.heads(), sides = (args.k.present() ? 1 : 0) + (args.v.present() ? 1 : 0);
  TokenSplit split{workers(stream, args.k.elements() + args.v.elements()), sides, 1, 0};
  if (split.threads > 1)
    split.groups = std::clamp<int64_t>(4 * split.threads / std::max<int64_t>(1, N * sides), 1, std::max<int64_t>(1, Hk));
  split.items = N * sides * split.groups;
  return split;
}

// Calls kernel(plan, tokens, first head, last head) for every sequence, side, group of heads and chunk of tokens.
template <class Args, class Plan, class Kernel>
void run_tokens(const Stream& stream, const Args& args, const Plan& k, const Plan& v, Kernel kernel) {
  const TokenSplit split = split_tokens(stream, args);
  const int64_t Hk = args.cache.heads();
  parallel_for(split.threads, split.items, [&](int64_t item, int) {
    const int64_t group = item % split.groups, side = item / split.groups % split.sides, n = item / split.groups / split.sides;
    const Plan& plan = side == 0 && args.k.present() ? k : v;
    const TokenRange range = tokens_of(args.sequences, n, args.positions.size(0));
    KvLocation at[kChunkTokens];
    for (int64_t t = range.begin; t < range.end; t += kChunkTokens) {
      const TokenLocations tokens{t, std::min(kChunkTokens, range.end - t), at};
      for (int64_t i = 0; i < tokens.count; ++i) at[i] = locate(args.cache, n, index_at(args.positions, t + i));
      kernel(plan, tokens, group * Hk / split.groups, (group + 1) * Hk / split.groups);
    }
  });
}

template <class Args>
Choice choose_tokens(const Stream& stream, const Args& args, const char* op) {
  const TokenSplit split = split_tokens(stream, args);
  const std::string kernel = std::string(op) + "." + transform_of((args.k.present() ? args.cache.k : args.cache.v).format);
  return chosen(stream, kernel.c_str(), split.threads,
                std::to_string(args.sequences.count) + " sequences x " + std::to_string(split.sides) + " sides x " +
                    std::to_string(split.groups) + " groups of heads, tokens in order");
}

void encode(const Stream& stream, const KvEncodeArgs& args, Scratch) {
  const EncodePlan k = encode_plan(args.cache, KvRole::k, args.k), v = encode_plan(args.cache, KvRole::v, args.v);
  run_tokens(stream, args, k, v, WEFT_KERNEL(stream.isa, encode_tokens));
}

void decode(const Stream& stream, const KvDecodeArgs& args, Scratch) {
  const DecodePlan k = decode_plan(args.cache, KvRole::k, args.k, args.domain),
                   v = decode_plan(args.cache, KvRole::v, args.v, args.domain);
  run_tokens(stream, args, k, v, WEFT_KERNEL(stream.isa, decode_tokens));
}

// ---- kv_repack

constexpr int64_t kRepackRows = 16 * kTileTokens;

struct RepackSplit {
  int threads;
  int64_t chunks;  // per block and head
  int64_t items;
};

RepackSplit split_repack(const Stream& stream, const KvRepackArgs& args) {
  const int64_t blocks = args.from.k.codes.size(0), heads = args.from.heads(), capacity = args.from.capacity();
  const int64_t D = args.from.k.format.head_dim + args.from.v.format.head_dim, chunks = (capacity + kRepackRows - 1) / kRepackRows;
  return {workers(stream, blocks * heads * capacity * D), chunks, blocks * heads * 2 * chunks};
}

void repack(const Stream& stream, const KvRepackArgs& args, Scratch) {
  const SideView from[] = {side_view(args.from, KvRole::k), side_view(args.from, KvRole::v)};
  const SideView to[] = {side_view(args.to, KvRole::k), side_view(args.to, KvRole::v)};
  const RepackSplit split = split_repack(stream, args);
  const int64_t heads = args.from.heads(), capacity = args.from.capacity();
  const auto kernel = WEFT_KERNEL(stream.isa, repack_rows);
  parallel_for(split.threads, split.items, [&](int64_t item, int) {
    const int64_t first = item % split.chunks * kRepackRows, rest = item / split.chunks, side = rest % 2, head = rest / 2 % heads,
                  block = rest / 2 / heads;
    kernel(from[side], to[side], block, head, first, std::min(kRepackRows, capacity - first));
  });
}

Choice repack_choose(const Stream& stream, const KvRepackArgs& args) {
  const RepackSplit split = split_repack(stream, args);
  return chosen(stream, "kv_repack.rows", split.threads,
                std::to_string(split.items) + " ranges of up to " + std::to_string(kRepackRows) + " rows");
}

}  // namespace

OpEntry<KvRotateArgs> kv_rotate_entry() { return {rotate, kAllFloats, nullptr, rotate_choose, nullptr}; }

OpEntry<KvEncodeArgs> kv_encode_entry() {
  return {encode, kAllFloats, nullptr,
          [](const Stream& stream, const KvEncodeArgs& args) { return choose_tokens(stream, args, "kv_encode"); }, nullptr};
}

OpEntry<KvDecodeArgs> kv_decode_entry() {
  return {decode, kAllFloats, nullptr,
          [](const Stream& stream, const KvDecodeArgs& args) { return choose_tokens(stream, args, "kv_decode"); }, nullptr};
}

OpEntry<KvRepackArgs> kv_repack_entry() { return {repack, kAllFloats, nullptr, repack_choose, nullptr}; }

}  // namespace weft::cpu

#endif  // HWY_ONCE
