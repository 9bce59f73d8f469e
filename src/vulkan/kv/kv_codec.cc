// kv_rotate, kv_encode, kv_decode and kv_repack on vulkan: lowers arguments for the shaders beside this file.
#include <algorithm>

#include "vulkan/common/recorder.h"
#include "vulkan/kv/kv_side.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

Choice rows_in_shared_memory(const char* op, int64_t Dk, int64_t Dv, bool tuned) {
  const auto rows = [](int64_t D) { return std::to_string(rows_per_group(D)); };
  return {std::string("vulkan.") + op + ".rows",
          rows(Dk) + (Dk == Dv ? "" : " and " + rows(Dv)) + " rows per workgroup of " + std::to_string(kThreads) + " threads",
          tuned ? Speed::fast : Speed::portable};
}

// Rotations by butterflies alone.
bool butterflies_only(const KvFormat& format) {
  return format.passthrough || format.rotation == Rotation::none ||
         (format.rotation == Rotation::srht && (format.rotation_group & (format.rotation_group - 1)) == 0);
}
bool tuned(const KvCache& cache) { return butterflies_only(cache.k.format) && butterflies_only(cache.v.format); }

// --- kv_rotate ----------------------------------------------------------------------------------------------------------------

struct RotateParams {
  SideView sides[2];
  View x, y;
  int64_t count = 0;
  uint32_t rows = 0, inverse = 0;
};

struct NoPlan {
  size_t scratch_bytes = 0;
};

NoPlan plan_rotate(const Stream&, const KvRotateArgs&) { return {}; }
Choice describe_rotate(const Stream&, const KvRotateArgs& args, const NoPlan&) {
  return rows_in_shared_memory("kv_rotate", args.format.head_dim, args.format.head_dim, butterflies_only(args.format));
}
void kv_rotate(const Stream& stream, const KvRotateArgs& args, const NoPlan&, Scratch) {
  RotateParams p;
  p.sides[0] = side_view(args.format);
  p.x = view_of(args.x);
  p.y = view_of(args.y);
  p.count = args.x.size(0) * args.x.size(1);
  p.rows = static_cast<uint32_t>(rows_per_group(args.format.head_dim));
  p.inverse = args.inverse;
  dispatch("kv_rotate", stream, {"kv_rotate"}, p, ceil_div(p.count, p.rows));
}

// --- kv_encode and kv_decode --------------------------------------------------------------------------------------------------

struct TokenRows {
  Indices positions;
  SequencesView sequences;
  View x[2];
  int64_t longest = 0, heads = 0, groups_k = 0, reserved = 0;
  uint32_t rows[2] = {};

  int64_t groups(int64_t side) const { return x[side].rank == 0 ? 0 : ceil_div(sequences.count * longest * heads, rows[side]); }
};

template <class Args>
TokenRows token_rows(const Args& args) {
  TokenRows tokens;
  const int64_t T = args.positions.size(0);
  tokens.positions = indices_of(args.positions);
  tokens.sequences = view_of(args.sequences, T);
  tokens.x[0] = view_of(args.k);
  tokens.x[1] = view_of(args.v);
  tokens.longest = max_tokens(args.sequences, T);
  tokens.heads = args.cache.heads();
  tokens.rows[0] = static_cast<uint32_t>(rows_per_group(args.cache.k.format.head_dim));
  tokens.rows[1] = static_cast<uint32_t>(rows_per_group(args.cache.v.format.head_dim));
  tokens.groups_k = tokens.groups(0);
  return tokens;
}

// The parameters of kv_encode.comp and kv_decode.comp: the same members first, then 64 bits that differ.
struct CodecParams {
  SideView sides[2];
  CacheIndex index;
  TokenRows tokens;
  uint64_t last = 0;  // encode: the address of the flags of overwritten tokens; decode: rows stay rotated
};

template <class Args>
Step prepare_codec(const char* op, const Stream& stream, const Args& args, uint64_t last) {
  const CodecParams p{
      {side_view(args.cache, KvRole::k), side_view(args.cache, KvRole::v)}, cache_index(args.cache), token_rows(args), last};
  return prepare(op, stream, {op}, p, p.tokens.groups(0) + p.tokens.groups(1));
}

struct OverwrittenParams {
  CacheIndex index;
  Indices positions;
  SequencesView sequences;
  int64_t longest = 0;
  uint64_t overwritten = 0;
};

// A sequence of one token overwrites none of its own rows, so a call of such sequences needs no flags in scratch.
NoPlan plan_encode(const Stream&, const KvEncodeArgs& args) {
  const int64_t T = args.positions.size(0);
  return {max_tokens(args.sequences, T) > 1 ? static_cast<size_t>(T) * sizeof(uint32_t) : 0};
}
Choice describe_encode(const Stream&, const KvEncodeArgs& args, const NoPlan&) {
  return rows_in_shared_memory("kv_encode", args.cache.k.format.head_dim, args.cache.v.format.head_dim, tuned(args.cache));
}
void kv_encode(const Stream& stream, const KvEncodeArgs& args, const NoPlan& plan, Scratch scratch) {
  if (plan.scratch_bytes == 0) return record(stream, prepare_codec("kv_encode", stream, args, 0));
  const auto flags = reinterpret_cast<uint64_t>(scratch.data);
  const int64_t T = args.positions.size(0), longest = max_tokens(args.sequences, T);
  const OverwrittenParams p{cache_index(args.cache), indices_of(args.positions), view_of(args.sequences, T), longest, flags};
  const Step find = prepare("kv_encode", stream, {"kv_overwritten"}, p, args.sequences.count * longest);
  const Step encode = prepare_codec("kv_encode", stream, args, flags);
  record(stream, find);
  record(stream, encode);
}
Status supports_encode(const Stream& stream, const KvEncodeArgs&) { return needs_bytes(stream, "kv_encode"); }

NoPlan plan_decode(const Stream&, const KvDecodeArgs&) { return {}; }
Choice describe_decode(const Stream&, const KvDecodeArgs& args, const NoPlan&) {
  return rows_in_shared_memory("kv_decode", args.cache.k.format.head_dim, args.cache.v.format.head_dim, tuned(args.cache));
}
void kv_decode(const Stream& stream, const KvDecodeArgs& args, const NoPlan&, Scratch) {
  record(stream, prepare_codec("kv_decode", stream, args, args.domain == KvDomain::rotated));
}
Status supports_decode(const Stream& stream, const KvDecodeArgs&) { return needs_bytes(stream, "kv_decode"); }

// --- kv_repack ----------------------------------------------------------------------------------------------------------------

struct RepackParams {
  SideView sides[2];  // from, to
  int64_t heads = 0, capacity = 0, count = 0, rows = 0;
};

NoPlan plan_repack(const Stream&, const KvRepackArgs&) { return {}; }
Choice describe_repack(const Stream&, const KvRepackArgs& args, const NoPlan&) {
  return rows_in_shared_memory("kv_repack", args.from.k.format.head_dim, args.from.v.format.head_dim, true);
}
Step prepare_repack(const Stream& stream, const KvRepackArgs& args, KvRole role) {
  RepackParams p{{side_view(args.from, role), side_view(args.to, role)}, args.from.heads(), args.from.capacity()};
  p.count = args.from.k.codes.size(0) * p.heads * p.capacity;
  p.rows = rows_per_group(p.sides[0].D);
  return prepare("kv_repack", stream, {"kv_repack"}, p, ceil_div(p.count, p.rows));
}
void kv_repack(const Stream& stream, const KvRepackArgs& args, const NoPlan&, Scratch) {
  const Step k = prepare_repack(stream, args, KvRole::k), v = prepare_repack(stream, args, KvRole::v);
  record(stream, k);
  record(stream, v);
}
Status supports_repack(const Stream& stream, const KvRepackArgs&) { return needs_bytes(stream, "kv_repack"); }

}  // namespace

OpEntry<KvRotateArgs> kv_rotate_entry() { return entry<plan_rotate, describe_rotate, kv_rotate>(kAllFloats); }
OpEntry<KvEncodeArgs> kv_encode_entry() { return entry<plan_encode, describe_encode, kv_encode>(kAllFloats, supports_encode); }
OpEntry<KvDecodeArgs> kv_decode_entry() { return entry<plan_decode, describe_decode, kv_decode>(kAllFloats, supports_decode); }
OpEntry<KvRepackArgs> kv_repack_entry() { return entry<plan_repack, describe_repack, kv_repack>(kAllFloats, supports_repack); }

}  // namespace weft::vulkan
