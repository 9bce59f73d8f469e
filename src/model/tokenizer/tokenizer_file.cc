// Parses tokenizer.json: see tokenizer_file.h.
#include "model/tokenizer/tokenizer_file.h"

#include <set>

#include "files/json_text.h"
#include "files/refuse.h"
#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

using files::Json;
using files::JsonFields;

// Byte-level vocabularies spell each byte as a printable character: printable Latin-1 characters as themselves, the 68 others as
// U+0100 and up, in order.
constexpr bool prints_as_itself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}
constexpr int kSpellings = 0x100 + 68;
constexpr std::array<int16_t, kSpellings> kByteOf = [] {
  std::array<int16_t, kSpellings> bytes{};
  bytes.fill(-1);
  size_t next = 0x100;
  for (int b = 0; b < 256; ++b) bytes[prints_as_itself(b) ? static_cast<size_t>(b) : next++] = static_cast<int16_t>(b);
  return bytes;
}();

// Appends the bytes that a token of the vocabulary spells. Returns false for a text that is not such a spelling.
bool unspell(std::string_view text, std::string& bytes) {
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = decode_utf8(text, at);
    if (c.value >= kSpellings || kByteOf[c.value] < 0) return false;
    bytes += static_cast<char>(kByteOf[c.value]);
    at += c.bytes;
  }
  return true;
}

class Parser {
 public:
  Parser(const Json& json, const std::string& file) : root_(json, file) {}

  TokenizerFile parse() {
    const std::optional<JsonFields> model = root_.object("model");
    if (!model) root_.fail("model", "is missing");
    check_model(*model);
    out_.ignore_merges = model->flag("ignore_merges").value_or(false);
    parse_normalizer();
    parse_pre_tokenizer();
    // As a post-processor, ByteLevel changes only offsets. Other post-processors would add tokens.
    for (const char* part : {"post_processor", "decoder"})
      if (root_.has(part)) check_type(part, "ByteLevel");
    parse_vocab(*model);
    parse_added();
    find_bytes();
    parse_merges(*model);
    return std::move(out_);
  }

 private:
  void check_type(const char* name, const char* wanted) const {
    const std::string type = root_.object(name)->text("type").value_or("");
    if (type != wanted) root_.fail(name, "is of type " + files::in_quotes(type) + ", wanted '" + wanted + "'");
  }

  void check_model(const JsonFields& model) const {
    const std::string type = model.text("type").value_or("");
    if (type != "BPE") model.fail("type", "is " + files::in_quotes(type) + ", wanted 'BPE'");
    for (const char* name : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
      if (!model.text(name).value_or("").empty()) model.fail(name, "is given, wanted none for a byte-level BPE");
    if (model.flag("byte_fallback").value_or(false)) model.fail("byte_fallback", "is true, wanted false: a byte-level BPE");
    if (model.number("dropout", 0, 1).value_or(0) != 0) model.fail("dropout", "is not 0, wanted 0");
  }

  void parse_normalizer() {
    if (!root_.has("normalizer")) return;
    check_type("normalizer", "NFC");
    out_.nfc = true;
  }

  void parse_pre_tokenizer() {
    const std::string shape = "wanted a Sequence of Split and ByteLevel";
    if (!root_.has("pre_tokenizer")) root_.fail("pre_tokenizer", "is missing, " + shape);
    check_type("pre_tokenizer", "Sequence");
    const JsonFields sequence = *root_.object("pre_tokenizer");
    const Json* parts = sequence.array("pretokenizers");
    if (!parts || parts->size() != 2 || !(*parts)[0].is_object() || !(*parts)[1].is_object())
      sequence.fail("pretokenizers", "is another list, " + shape);
    const JsonFields split((*parts)[0], root_.file(), "pre_tokenizer.pretokenizers[0].");
    const JsonFields bytes((*parts)[1], root_.file(), "pre_tokenizer.pretokenizers[1].");
    if (split.text("type") != "Split" || bytes.text("type") != "ByteLevel")
      sequence.fail("pretokenizers", "is another list, " + shape);
    const std::optional<JsonFields> pattern = split.object("pattern");
    const std::optional<std::string> regex = pattern ? pattern->text("Regex") : std::nullopt;
    if (!regex) split.fail("pattern", "has no Regex");
    const std::optional<SplitPattern> known = split_pattern(*regex);
    if (!known) split.fail("pattern", "is " + files::in_quotes(*regex) + ", wanted that of Qwen2 or of Qwen3.5");
    out_.split = *known;
    if (split.text("behavior") != "Isolated" || split.flag("invert").value_or(false))
      split.fail("behavior", "is " + files::in_quotes(split.text("behavior").value_or("")) + ", wanted 'Isolated', not inverted");
    if (bytes.flag("add_prefix_space").value_or(true)) bytes.fail("add_prefix_space", "is true, wanted false");
    if (bytes.flag("use_regex").value_or(true)) bytes.fail("use_regex", "is true, wanted false");
  }

  void parse_vocab(const JsonFields& model) {
    if (!model.object("vocab")) model.fail("vocab", "is missing");
    vocab_ = model.find("vocab");
    // Bounds ids, so that the size of the token table is proportional to the size of the file.
    const Json* added = root_.array("added_tokens");
    limit_ = 2 * (vocab_->size() + (added ? added->size() : 0)) + 1024;
    for (const auto& [text, value] : vocab_->items()) {
      TokenizerFile::Token& token = token_at(value, "model.vocab[" + files::in_quotes(text) + "]");
      if (token.present)
        root_.fail("model.vocab", "gives id " + value.dump() + " to " + files::in_quotes(text) + " and another token");
      token.present = true;
      if (!unspell(text, token.bytes)) token.bytes = text;
    }
  }

  TokenizerFile::Token& token_at(const Json& id, const std::string& field) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= limit_)
      root_.fail(field, "is " + files::json_text(id) + ", wanted an id below " + std::to_string(limit_) +
                            " for a vocabulary of this size");
    const auto index = id.get<size_t>();
    if (index >= out_.tokens.size()) out_.tokens.resize(index + 1);
    return out_.tokens[index];
  }

  void parse_added() {
    const Json* list = root_.array("added_tokens");
    if (!list) return;
    std::set<std::string> contents;
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string path = "added_tokens[" + std::to_string(i) + "]";
      if (!(*list)[i].is_object()) root_.fail(path, "is " + files::json_text((*list)[i]) + ", wanted an object");
      const JsonFields fields((*list)[i], root_.file(), path + ".");
      AddedToken token;
      token.content = fields.text("content").value_or("");
      if (token.content.empty() || token.content.size() > kMaxAddedToken)
        fields.fail("content",
                    "has " + std::to_string(token.content.size()) + " bytes, wanted 1 to " + std::to_string(kMaxAddedToken));
      if (!contents.insert(token.content).second)
        fields.fail("content", "is " + files::in_quotes(token.content) + ", which an earlier added token has");
      if (fields.flag("single_word").value_or(false)) fields.fail("single_word", "is true, wanted false");
      token.left_strip = fields.flag("lstrip").value_or(false);
      token.right_strip = fields.flag("rstrip").value_or(false);
      token.special = fields.flag("special").value_or(false);
      token.normalized = fields.flag("normalized").value_or(!token.special);
      const Json id = fields.has("id") ? *fields.find("id") : Json();
      TokenizerFile::Token& entry = token_at(id, path + ".id");
      token.id = id.get<int32_t>();
      const auto listed = vocab_->find(token.content);
      if (listed == vocab_->end() ? entry.present : *listed != id)
        fields.fail("id", "is " + id.dump() + ", which disagrees with the vocabulary about " + files::in_quotes(token.content));
      entry.present = true;
      entry.bytes = token.content;
      if (token.normalized && out_.nfc) token.content = to_nfc(token.content);
      out_.added.push_back(std::move(token));
    }
  }

  void find_bytes() {
    out_.byte_tokens.fill(-1);
    for (size_t spelling = 0; spelling < kSpellings; ++spelling) {
      if (kByteOf[spelling] < 0) continue;
      std::string text;
      append_utf8(text, static_cast<char32_t>(spelling));
      const auto found = vocab_->find(text);
      if (found == vocab_->end())
        root_.fail("model.vocab",
                   "has no token for byte " + std::to_string(kByteOf[spelling]) + ", wanted all 256 for a byte-level BPE");
      out_.byte_tokens[static_cast<size_t>(kByteOf[spelling])] = found->get<int32_t>();
    }
  }

  void parse_merges(const JsonFields& model) {
    const Json* list = model.array("merges");
    if (!list || list->empty()) model.fail("merges", "is missing or empty, wanted at least one merge");
    out_.merges.reserve(list->size());
    for (const Json& entry : *list) {
      const size_t rank = out_.merges.size();
      std::string left, right;
      if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      } else if (entry.is_string()) {
        const std::string& pair = entry.get_ref<const std::string&>();
        const size_t space = pair.find(' ');
        if (space != std::string::npos && pair.find(' ', space + 1) == std::string::npos) {
          left = pair.substr(0, space);
          right = pair.substr(space + 1);
        }
      }
      if (left.empty() || right.empty())
        root_.fail("model.merges[" + std::to_string(rank) + "]", "is " + files::json_text(entry) + ", wanted two tokens");
      out_.merges.push_back({id_of(left, rank), id_of(right, rank), id_of(left + right, rank)});
    }
  }

  int32_t id_of(const std::string& text, size_t rank) const {
    const auto found = vocab_->find(text);
    if (found == vocab_->end())
      root_.fail("model.merges[" + std::to_string(rank) + "]",
                 "needs the token " + files::in_quotes(text) + ", which the vocabulary lacks");
    return found->get<int32_t>();
  }

  JsonFields root_;
  const Json* vocab_ = nullptr;
  uint64_t limit_ = 0;  // of ids
  TokenizerFile out_;
};

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& file) {
  const Json json = files::parse_json_object(text, file);
  return Parser(json, file).parse();
}

}  // namespace weft::model
