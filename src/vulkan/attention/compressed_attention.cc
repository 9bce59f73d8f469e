// compressed_attention on vulkan: the plan of a call, that is its shader and how many splits of the context, and its launches.
#include <algorithm>

#include "vulkan/attention/attention.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

constexpr int64_t kEnough = 1024;      // workgroups that keep a device busy
constexpr int64_t kMostSplits = 128;   // of the context, under Schedule::fastest
constexpr int64_t kLeastTokens = 128;  // of one split, under Schedule::fastest
constexpr int64_t kFewTokens = 4;      // Schedule::invariant splits the context of sequences with at most this many query tokens
constexpr int64_t kInvariantSplits = 32, kInvariantTokens = 256;
constexpr int64_t kCodedRows = 32;  // decode_coded.comp takes sequences with at most this many query rows for a KV head
constexpr int64_t kFour = 4;        // decode_coded.comp computes its query rows in groups of four

// Which shaders run: decode_coded.comp (`coded`), attention_partials.comp (`tiles`). Sequences of different lengths may need both;
// each shader then skips the sequences of the other.
struct Plan {
  PartialsCall call;
  bool coded = false, tiles = true;
  int64_t split_tokens = 0;  // query tokens of the longest sequence with partials
  size_t scratch_bytes = 0;
};

// Can decode_coded.comp read the cache?
bool coded_fits(const KvCache& cache) {
  const auto side = [](const KvFormat& format) { return !format.passthrough && format.gain_group == format.head_dim; };
  const int64_t D = cache.k.format.head_dim;
  return cache.layout == KvLayout::tiles && cache.tile_order == TileOrder::lanes && side(cache.k.format) && side(cache.v.format) &&
         D == cache.v.format.head_dim && (D == 64 || D == 128 || D == 256);
}

int64_t coded_rows(const QueriesView& queries) { return queries.longest * queries.group <= kFour ? kFour : 2 * kFour; }

// Views of the partials in scratch; `rows` is N * Plan::split_tokens.
PartialsView partials_in(uint8_t* scratch, int64_t rows, int64_t Hq, int64_t splits, int64_t Dv) {
  PartialsView view;
  view.o = reinterpret_cast<float*>(scratch);
  view.m = view.o + rows * Hq * splits * Dv;
  view.l = view.m + rows * Hq * splits;
  view.o_token = Hq * splits * Dv, view.o_head = splits * Dv, view.o_block = Dv, view.o_four = 4;
  view.m_token = view.l_token = Hq * splits, view.m_head = view.l_head = splits, view.m_block = view.l_block = 1;
  return view;
}

Plan plan(const Stream&, const CompressedAttentionArgs& args) {
  Plan made{partials_call(args.queries, args.cache, args.mask)};
  const QueriesView& queries = made.call.queries;
  const int64_t rows = queries.longest * queries.group;  // the most query rows of a sequence and KV head
  made.coded = coded_fits(args.cache) && (rows <= kCodedRows || args.queries.sequences.cu_seqlens.present());
  made.tiles = !made.coded || rows > kCodedRows;
  const int64_t N = args.queries.sequences.count, capacity = sequence_capacity(args.cache), Hq = args.o.size(1),
                Dv = args.o.size(2);
  SplitParams& splits = made.call.splits;
  splits.by_sequence = 1;
  if (args.schedule == Schedule::invariant) {
    // Nothing here may depend on the batch: the shader derives a sequence's splits from its own live tokens. A smaller `count` only
    // leaves out splits without tokens.
    splits.count = std::clamp<int64_t>(ceil_div(capacity, kInvariantTokens), 1, kInvariantSplits);
    splits.least = kInvariantTokens;
    splits.most = kFewTokens;
  } else {
    const int64_t groups = std::max<int64_t>(N * queries.heads * ceil_div(queries.longest * queries.group, 16), 1);
    const int64_t most = std::clamp<int64_t>(ceil_div(capacity, kLeastTokens), 1, kMostSplits);
    splits.count = std::clamp<int64_t>(kEnough / groups, 1, most);
    splits.least = kLeastTokens;
    splits.most = queries.longest;
  }
  made.split_tokens = splits.count > 1 ? std::min(queries.longest, splits.most) : 0;
  made.scratch_bytes = static_cast<size_t>(N * made.split_tokens * Hq * splits.count * (Dv + 2)) * sizeof(float);
  return made;
}

Choice describe(const Stream&, const CompressedAttentionArgs&, const Plan& made) {
  const PartialsCall& call = made.call;
  const std::string splits = ", up to " + std::to_string(call.splits.count) + " splits of the context";
  if (made.coded)
    return {"vulkan.compressed_attention.decode_coded",
            "steps of 256 tokens, " + std::to_string(coded_rows(call.queries)) + " query rows per workgroup" + splits +
                (made.tiles ? "; longer sequences by tiles" : ""),
            Speed::fast};
  const TileShape shape = tile_shape(std::max(call.sides[0].D, call.sides[1].D), call.queries.longest * call.queries.group);
  return describe_tiles("compressed_attention", shape, splits);
}

Step prepare_coded(const char* op, const Stream& stream, PartialsCall call) {
  const int64_t rows = coded_rows(call.queries);
  call.splits.to_rows = kCodedRows;
  call.queries.row_tiles = ceil_div(std::min(call.queries.longest * call.queries.group, kCodedRows), rows);
  const Kernel kernel{
      "decode_coded",
      constants_of({call.sides[0].D, static_cast<uint32_t>(rows / kFour), call.sides[0].bits, call.sides[1].bits}, call.sides)};
  return prepare(op, stream, kernel, call,
                 call.queries.sequences.count * call.queries.heads * call.splits.count * call.queries.row_tiles);
}

Step prepare_final(const char* op, const Stream& stream, const PartialsCall& call, int64_t split_tokens, int64_t Hq) {
  MergeParams p;
  p.sides[0] = call.sides[1];
  p.in = call.out;
  p.outputs = call.outputs;
  p.sequences = call.queries.sequences;
  p.splits = call.splits.count;
  p.longest = split_tokens;
  p.Hq = Hq;
  p.group = call.queries.group;
  p.most = call.splits.most;
  return prepare_merge(op, stream, p);
}

void launch(const Stream& stream, const CompressedAttentionArgs& args, const Plan& made, Scratch scratch) {
  constexpr const char* kOp = "compressed_attention";
  const int64_t N = args.queries.sequences.count, Hq = args.o.size(1);
  PartialsCall call = made.call;
  call.outputs = outputs_of(args.o, args.lse, args.sinks);
  if (made.split_tokens > 0)
    call.out =
        lowered(partials_in(static_cast<uint8_t*>(scratch.data), N * made.split_tokens, Hq, call.splits.count, args.o.size(2)));
  std::vector<Step> steps;
  if (made.coded) steps.push_back(prepare_coded(kOp, stream, call));
  if (made.tiles) {
    if (made.coded) call.splits.from_rows = kCodedRows + 1;
    steps.push_back(prepare_partials(kOp, stream, call));
  }
  if (made.split_tokens > 0) steps.push_back(prepare_final(kOp, stream, call, made.split_tokens, Hq));
  for (const Step& step : steps) record(stream, step);
}

Status supports(const Stream& stream, const CompressedAttentionArgs&) { return needs_bytes(stream, "compressed_attention"); }

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() { return entry<plan, describe, launch>(kAllFloats, supports); }

}  // namespace weft::vulkan
