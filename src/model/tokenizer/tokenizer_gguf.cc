// Reads the tokenizer in the metadata of a GGUF file: see tokenizer_file.h.
#include <algorithm>
#include <cstring>

#include "files/refuse.h"
#include "model/tokenizer/byte_spelling.h"
#include "model/tokenizer/tokenizer_file.h"

namespace weft::model {
namespace {

using files::GgufFields;
using files::GgufValue;

constexpr const char *kModel = "tokenizer.ggml.model", *kPre = "tokenizer.ggml.pre", *kTokens = "tokenizer.ggml.tokens",
                     *kTypes = "tokenizer.ggml.token_type", *kMerges = "tokenizer.ggml.merges";
constexpr uint64_t kMostTokens = 1 << 24, kMostMerges = 1 << 24, kMostAdded = 1 << 16;
constexpr size_t kLongestToken = 1 << 16;

// The format's own numbers.
constexpr int64_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;

class Parser {
 public:
  explicit Parser(const GgufFields& fields) : fields_(fields) {}

  TokenizerFile parse() {
    if (const auto model = fields_.text(kModel).value_or("none"); model != "gpt2")
      fields_.fail(kModel, "is " + files::in_quotes(model) + ", wanted 'gpt2', a byte-level BPE");
    const std::string_view pre = fields_.text(kPre).value_or("");
    if (pre == "qwen2")
      out_.split = SplitPattern::qwen2;
    else if (pre == "qwen35")
      out_.split = SplitPattern::qwen3_5;
    else
      fields_.fail(kPre, "is " + files::in_quotes(pre) + ", wanted 'qwen2' or 'qwen35'");
    for (const char* key : {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"})
      if (fields_.flag(key).value_or(false)) fields_.fail(key, "is true, and Weft adds no tokens to a text; wanted false");
    out_.nfc = true;  // of all tokenizers with these patterns; the format does not say
    read_tokens();
    sort();
    find_bytes();
    read_merges();
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const char* list, uint64_t index, const std::string& what) const {
    fields_.fail(std::string(list) + "[" + std::to_string(index) + "]", what);
  }

  void read_tokens() {
    const GgufValue *tokens = fields_.texts(kTokens), *types = fields_.wholes(kTypes);
    if (!tokens) fields_.fail(kTokens, "is missing");
    if (!types) fields_.fail(kTypes, "is missing");  // without them, control tokens would be ordinary text
    if (tokens->size() > kMostTokens)
      fields_.fail(kTokens, "has " + std::to_string(tokens->size()) + " entries, wanted at most " + std::to_string(kMostTokens));
    if (types->size() != tokens->size())
      fields_.fail(kTypes, "has " + std::to_string(types->size()) + " entries, wanted one for each of " +
                               std::to_string(tokens->size()) + " tokens");
    texts_.reserve(tokens->size());
    size_t bytes = 0;
    tokens->texts([&](std::string_view text) {
      if (text.size() > kLongestToken)
        fail(kTokens, texts_.size(),
             "has " + std::to_string(text.size()) + " bytes, wanted at most " + std::to_string(kLongestToken));
      bytes += text.size();
      texts_.push_back(text.data());
    });
    if (bytes > UINT32_MAX) fields_.fail(kTokens, "has more than 2^32 bytes, wanted fewer");
    out_.tokens.reserve(texts_.size(), bytes);
    std::string spelled;
    for (size_t id = 0; id < texts_.size(); ++id) read_token(static_cast<int32_t>(id), types, spelled);
  }

  void read_token(int32_t id, const GgufValue* types, std::string& spelled) {
    const auto index = static_cast<uint64_t>(id);
    const int64_t type = types->element(index).whole().value_or(0);
    const std::string_view text = text_of(id);
    if (type == kUnused) return;  // rows of the embedding that no text gives
    if (type == kControl || type == kUserDefined) return add(id, text, type == kControl);
    if (type != kNormal)
      fail(kTypes, index, "is " + std::to_string(type) + ", wanted 1 (normal), 3 (control), 4 (user-defined) or 5 (unused)");
    spelled.clear();
    out_.tokens.set(id, unspell(text, spelled) ? spelled : text);
    sorted_.push_back(id);
  }

  void add(int32_t id, std::string_view text, bool special) {
    if (text.empty() || text.size() > kMaxAddedToken)
      fail(kTokens, static_cast<uint64_t>(id),
           "has " + std::to_string(text.size()) + " bytes, wanted 1 to " + std::to_string(kMaxAddedToken) + " for an added token");
    if (out_.added.size() == kMostAdded)
      fields_.fail(kTypes, "has more than " + std::to_string(kMostAdded) + " added tokens, wanted at most that many");
    AddedToken token;
    token.id = id;
    token.content = text;
    token.special = special;
    out_.added.push_back(std::move(token));
    out_.tokens.set(id, text);
    sorted_.push_back(id);
  }

  // The length of a text lies before it in the file.
  std::string_view text_of(int32_t id) const {
    const char* const text = texts_[static_cast<size_t>(id)];
    uint64_t size = 0;
    std::memcpy(&size, text - sizeof size, sizeof size);
    return {text, size};
  }

  void sort() {
    std::sort(sorted_.begin(), sorted_.end(), [&](int32_t a, int32_t b) { return text_of(a) < text_of(b); });
    for (size_t i = 1; i < sorted_.size(); ++i)
      if (text_of(sorted_[i]) == text_of(sorted_[i - 1]))
        fail(kTokens, static_cast<uint64_t>(std::max(sorted_[i], sorted_[i - 1])),
             "is " + files::in_quotes(text_of(sorted_[i])) + ", which an earlier token is too");
  }

  std::optional<int32_t> find(std::string_view text) const {
    const auto found =
        std::lower_bound(sorted_.begin(), sorted_.end(), text, [&](int32_t id, std::string_view t) { return text_of(id) < t; });
    if (found == sorted_.end() || text_of(*found) != text) return std::nullopt;
    return *found;
  }

  void find_bytes() {
    for (size_t spelling = 0; spelling < kSpellings; ++spelling) {
      if (kByteOf[spelling] < 0) continue;
      std::string text;
      append_utf8(text, static_cast<char32_t>(spelling));
      const std::optional<int32_t> found = find(text);
      if (!found)
        fields_.fail(kTokens,
                     "has no token for byte " + std::to_string(kByteOf[spelling]) + ", wanted all 256 for a byte-level BPE");
      out_.byte_tokens[static_cast<size_t>(kByteOf[spelling])] = *found;
    }
  }

  void read_merges() {
    const GgufValue* const merges = fields_.texts(kMerges);
    if (!merges || merges->size() == 0) fields_.fail(kMerges, "is missing or empty, wanted at least one merge");
    if (merges->size() > kMostMerges)
      fields_.fail(kMerges, "has " + std::to_string(merges->size()) + " entries, wanted at most " + std::to_string(kMostMerges));
    out_.merges.reserve(merges->size());
    std::string both;
    merges->texts([&](std::string_view pair) {
      const uint64_t index = out_.merges.size();
      const size_t space = pair.find(' ');
      if (space == std::string_view::npos || space == 0 || space + 1 == pair.size() ||
          pair.find(' ', space + 1) != std::string_view::npos || pair.size() > 2 * kLongestToken)
        fail(kMerges, index, "is " + files::in_quotes(pair) + ", wanted two tokens with a space between them");
      const auto id_of = [&](std::string_view text) {
        const std::optional<int32_t> found = find(text);
        if (!found) fail(kMerges, index, "needs the token " + files::in_quotes(text) + ", which the vocabulary lacks");
        return *found;
      };
      const std::string_view left = pair.substr(0, space), right = pair.substr(space + 1);
      both.assign(left).append(right);
      out_.merges.push_back({id_of(left), id_of(right), id_of(both)});
    });
  }

  const GgufFields& fields_;
  std::vector<const char*> texts_;  // by id, in the file
  std::vector<int32_t> sorted_;     // ids by text
  TokenizerFile out_;
};

}  // namespace

TokenizerFile parse_gguf_tokenizer(const GgufFields& fields) { return Parser(fields).parse(); }

bool has_gguf_tokenizer(const GgufFields& fields) {
  const std::string_view model = fields.text(kModel).value_or("none");
  return model != "none" && model != "no_vocab";
}

}  // namespace weft::model
