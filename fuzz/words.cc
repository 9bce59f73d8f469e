// Arbitrary bytes as a text: the words make up the whole text, merges equal those of a naive search, and NFC is idempotent.
#include <cstdlib>
#include <utility>

#include "model/tokenizer/byte_pairs.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/word_split.h"

namespace {

using namespace weft::model;

void require(bool condition) {
  if (!condition) std::abort();
}

constexpr size_t kNever = SIZE_MAX;

// 16 tokens; the low four bits of a byte select its token. 160 of the 256 pairs merge into a token, in a shuffled order of ranks.
struct Pairs {
  Pairs() {
    std::array<int32_t, 256> bytes{};
    for (int32_t b = 0; b < 256; ++b) bytes[static_cast<size_t>(b)] = b & 15;
    ranks.fill(kNever);
    for (int32_t i = 0; i < 160; ++i) {
      const int32_t pair = i * 167 & 255;
      ranks[static_cast<size_t>(pair)] = merges.size();
      merges.push_back({pair >> 4, pair & 15, (pair * 7 + 3) & 15});
    }
    fast = BytePairs(merges, bytes, 16);
  }
  std::vector<Merge> merges;
  std::array<size_t, 256> ranks{};  // by pair
  BytePairs fast;
};

// Merges the leftmost pair of the lowest rank until no pair merges.
std::vector<int32_t> naive_search(const Pairs& pairs, std::string_view word) {
  std::vector<int32_t> ids;
  for (char c : word) ids.push_back(static_cast<unsigned char>(c) & 15);
  for (;;) {
    size_t best = kNever, at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      if (const size_t rank = pairs.ranks[static_cast<size_t>(ids[i] * 16 + ids[i + 1])]; rank < best) best = rank, at = i;
    if (best == kNever) return ids;
    ids[at] = pairs.merges[best].merged;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Pairs pairs;
  const std::string text = to_well_formed({reinterpret_cast<const char*>(data), size});
  const std::string nfc = to_nfc(text);
  require(nfc == to_well_formed(nfc) && nfc == to_nfc(nfc));
  for (SplitPattern pattern : {SplitPattern::qwen2, SplitPattern::qwen3_5})
    for (size_t at = 0; at < nfc.size();) {
      const size_t end = word_end(pattern, nfc, at);
      require(end > at && end <= nfc.size());
      const std::string_view word = std::string_view(nfc).substr(at, end - at);
      require(word == to_well_formed(word));
      std::vector<int32_t> ids;
      pairs.fast.encode(word, ids);
      if (word.size() <= 48) require(ids == naive_search(pairs, word));
      at = end;
    }
  return 0;
}
