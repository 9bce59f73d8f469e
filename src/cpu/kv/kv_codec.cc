// kv_rotate, kv_encode, kv_decode and kv_repack on the cpu: threads over sequences, sides and heads, or over rows.
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

// Less than this many numbers are done before other threads have woken up.
constexpr int64_t kNumbersPerThread = 32768;

int workers(const Stream& stream, int64_t numbers) {
  return static_cast<int>(std::clamp<int64_t>(numbers / kNumbersPerThread, 1, thread_count(stream)));
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

int64_t rows_per_piece(int64_t D) { return std::max<int64_t>(1, kNumbersPerThread / D); }

void rotate(const Stream& stream, const KvRotateArgs& args, Scratch) {
  const RotatePlan plan = rotate_plan(args.format, args.inverse);
  const RowsView x = rows_view(args.x), y = rows_view(args.y);
  const int64_t H = args.x.size(1), rows = args.x.size(0) * H, piece = rows_per_piece(plan.D);
  const auto kernel = WEFT_KERNEL(stream.isa, rotate_rows);
  parallel_for(workers(stream, rows * plan.D), (rows + piece - 1) / piece,
               [&](int64_t i, int) { kernel(plan, x, y, H, i * piece, std::min(rows, (i + 1) * piece)); });
}

Choice rotate_choose(const Stream& stream, const KvRotateArgs& args) {
  const int64_t rows = args.x.size(0) * args.x.size(1);
  return chosen(stream, (std::string("kv_rotate.") + transform_of(args.format)).c_str(),
                workers(stream, rows * args.format.head_dim), std::to_string(rows) + " rows");
}

// ---- kv_encode, kv_decode: tokens of a sequence and head stay in order, since several may fall into one row, and tokens of a V tile
// share bytes.

// Tokens whose places are looked up together, and whose rows of all heads are read while they are in the second-level cache.
constexpr int64_t kChunkTokens = 256;

struct TokenSplit {
  int threads;
  int64_t sides, groups;  // heads of a side are split into groups
  int64_t units;
};

template <class Args>
TokenSplit split_tokens(const Stream& stream, const Args& args) {
  const int64_t N = args.sequences.count, Hk = args.cache.heads(), sides = (args.k.present() ? 1 : 0) + (args.v.present() ? 1 : 0);
  TokenSplit split{workers(stream, args.k.elements() + args.v.elements()), sides, 1, 0};
  if (split.threads > 1)
    split.groups = std::clamp<int64_t>(4 * split.threads / std::max<int64_t>(1, N * sides), 1, std::max<int64_t>(1, Hk));
  split.units = N * sides * split.groups;
  return split;
}

// Calls kernel(plan, tokens, first head, last head) for every side, group of heads and chunk of tokens.
template <class Args, class Plan, class Kernel>
void run_tokens(const Stream& stream, const Args& args, const Plan& k, const Plan& v, Kernel kernel) {
  const TokenSplit split = split_tokens(stream, args);
  const int64_t Hk = args.cache.heads();
  parallel_for(split.threads, split.units, [&](int64_t unit, int) {
    const int64_t group = unit % split.groups, side = unit / split.groups % split.sides, n = unit / split.groups / split.sides;
    const Plan& plan = side == 0 && args.k.present() ? k : v;
    const TokenRange range = tokens_of(args.sequences, n, args.positions.size(0));
    KvLocation at[kChunkTokens];
    for (int64_t t = range.begin; t < range.end; t += kChunkTokens) {
      const TokenPlaces tokens{t, std::min(kChunkTokens, range.end - t), at};
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
  int64_t pieces;  // of a block and head
  int64_t units;
};

RepackSplit split_repack(const Stream& stream, const KvRepackArgs& args) {
  const int64_t blocks = args.from.k.codes.size(0), heads = args.from.heads(), capacity = args.from.capacity();
  const int64_t D = args.from.k.format.head_dim + args.from.v.format.head_dim, pieces = (capacity + kRepackRows - 1) / kRepackRows;
  return {workers(stream, blocks * heads * capacity * D), pieces, blocks * heads * 2 * pieces};
}

void repack(const Stream& stream, const KvRepackArgs& args, Scratch) {
  const SideView from[] = {side_view(args.from, KvRole::k), side_view(args.from, KvRole::v)};
  const SideView to[] = {side_view(args.to, KvRole::k), side_view(args.to, KvRole::v)};
  const RepackSplit split = split_repack(stream, args);
  const int64_t heads = args.from.heads(), capacity = args.from.capacity();
  const auto kernel = WEFT_KERNEL(stream.isa, repack_rows);
  parallel_for(split.threads, split.units, [&](int64_t unit, int) {
    const int64_t first = unit % split.pieces * kRepackRows, rest = unit / split.pieces, side = rest % 2, head = rest / 2 % heads,
                  block = rest / 2 / heads;
    kernel(from[side], to[side], block, head, first, std::min(kRepackRows, capacity - first));
  });
}

Choice repack_choose(const Stream& stream, const KvRepackArgs& args) {
  const RepackSplit split = split_repack(stream, args);
  return chosen(stream, "kv_repack.rows", split.threads,
                std::to_string(split.units) + " ranges of up to " + std::to_string(kRepackRows) + " rows");
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
