// kv_rotate, kv_encode, kv_decode and kv_repack in double.
#include "common/kv_index.h"
#include "reference/kv_rows.h"
#include "reference/rows.h"
#include "reference/table.h"

namespace weft::reference {
namespace {

void kv_rotate(const Stream&, const KvRotateArgs& args) {
  for (int64_t t = 0; t < args.x.size(0); ++t)
    for (int64_t h = 0; h < args.x.size(1); ++h) {
      std::vector<double> row = load_row(args.x, t, h);
      rotate(args.format, row, args.inverse);
      store_row(args.y, row, t, h);
    }
}

// Calls visit(t, location) for every token of every legal sequence, in token order.
template <class Args, class Visit>
void for_each_token(const Args& args, Visit&& visit) {
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    const TokenRange range = tokens_of(args.sequences, n, args.positions.size(0));
    for (int64_t t = range.begin; t < range.end; ++t) visit(t, locate(args.cache, n, index_at(args.positions, t)));
  }
}

void kv_encode(const Stream&, const KvEncodeArgs& args) {
  for_each_token(args, [&](int64_t t, KvLocation to) {
    if (!to.exists()) return;
    for (const auto& [x, side] : {std::pair{&args.k, &args.cache.k}, {&args.v, &args.cache.v}})
      for (int64_t h = 0; x->present() && h < x->size(1); ++h)
        write_row(args.cache, *side, to.block, h, to.row, encode(side->format, h, load_row(*x, t, h)));
  });
}

void kv_decode(const Stream&, const KvDecodeArgs& args) {
  const auto decoder = args.domain == KvDomain::rotated ? decode_rotated : decode_original;
  for_each_token(args, [&](int64_t t, KvLocation from) {
    for (const auto& [x, side] : {std::pair{&args.k, &args.cache.k}, {&args.v, &args.cache.v}})
      for (int64_t h = 0; x->present() && h < x->size(1); ++h)
        store_row(*x,
                  from.exists() ? decoder(args.cache, *side, from.block, h, from.row)
                                : std::vector<double>(static_cast<size_t>(side->format.head_dim), 0.0),
                  t, h);
  });
}

void kv_repack(const Stream&, const KvRepackArgs& args) {
  for (int64_t block = 0; block < args.from.k.codes.size(0); ++block)
    for (int64_t head = 0; head < args.from.heads(); ++head)
      for (int64_t row = 0; row < args.from.capacity(); ++row)
        for (const auto& [from, to] : {std::pair{&args.from.k, &args.to.k}, {&args.from.v, &args.to.v}})
          copy_row(args.from, *from, args.to, *to, block, head, row);
}

}  // namespace

OpEntry<KvRotateArgs> kv_rotate_entry() { return entry<kv_rotate>(kAllFloats); }
OpEntry<KvEncodeArgs> kv_encode_entry() { return entry<kv_encode>(kAllFloats); }
OpEntry<KvDecodeArgs> kv_decode_entry() { return entry<kv_decode>(kAllFloats); }
OpEntry<KvRepackArgs> kv_repack_entry() { return entry<kv_repack>(kAllFloats); }

}  // namespace weft::reference
