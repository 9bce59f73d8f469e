// Parses tokenizer.json: see tokenizer_file.h.
#include "model/tokenizer/tokenizer_file.h"

#include <map>
#include <set>
#include <utility>

#include "files/json_walk.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "model/tokenizer/byte_spelling.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/vocabulary.h"

namespace weft::model {
namespace {

using files::Json;
using files::JsonFields;
using files::JsonPart;

// The parts of the file that may be large. They are read from the text; the rest becomes a tree.
constexpr std::string_view kVocab = "model.vocab", kMerges = "model.merges", kAdded = "added_tokens";
constexpr size_t kMaxAddedTokens = 1 << 16;
constexpr size_t kMaxMerges = 1 << 24;
constexpr size_t kMaxTokenText = 1 << 16;  // bytes of a token, as they are in the file

class Parser {
 public:
  Parser(const JsonPart& text, const std::string& file) : file_(file), tree_(without_large_parts(text, "")), root_(tree_, file) {}

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
    const Vocabulary vocab = parse_vocab();
    parse_added(vocab);
    find_bytes(vocab);
    parse_merges(vocab);
    return std::move(out_);
  }

 private:
  // An object as a tree, without the large parts, which go to large_. `path` is the prefix of its members.
  Json without_large_parts(const JsonPart& object, const std::string& path) {
    Json tree = Json::object();
    object.members([&](std::string_view key, const JsonPart& value) {
      const std::string name = path + std::string(key);
      const auto repeated = [&] { files::refuse(file_, "", "repeats the key " + files::in_quotes(key)); };
      if (name == kVocab || name == kMerges || name == kAdded) {
        if (!large_.emplace(name, value).second) repeated();
        return;
      }
      const bool holds_large = name == "model" && value.is(JsonPart::Kind::object);
      if (!holds_large) tree_bytes_ += value.text().size();
      tree_bytes_ += key.size();
      if (tree_bytes_ > files::kMaxJsonPart)
        files::refuse(file_, "",
                      "has more than " + std::to_string(files::kMaxJsonPart) +
                          " bytes beside its vocabulary, merges and added tokens, wanted at most that many");
      if (!tree.emplace(key, holds_large ? without_large_parts(value, name + ".") : value.tree(file_)).second) repeated();
    });
    return tree;
  }

  // A large part, if the file has it. It is a list or an object.
  std::optional<JsonPart> large(std::string_view name, JsonPart::Kind kind) const {
    const auto found = large_.find(name);
    if (found == large_.end() || found->second.is(JsonPart::Kind::null)) return std::nullopt;
    if (!found->second.is(kind))
      root_.fail(name,
                 "is " + files::json_text(found->second) + ", wanted " + (kind == JsonPart::Kind::list ? "a list" : "an object"));
    return found->second;
  }

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

  Vocabulary parse_vocab() {
    const std::optional<JsonPart> object = large(kVocab, JsonPart::Kind::object);
    if (!object) root_.fail(kVocab, "is missing");
    const std::optional<JsonPart> added = large(kAdded, JsonPart::Kind::list);
    const size_t added_count = added ? added->size() : 0;
    if (added_count > kMaxAddedTokens)
      root_.fail(kAdded, "has " + std::to_string(added_count) + " entries, wanted at most " + std::to_string(kMaxAddedTokens));
    out_.added.reserve(added_count);
    // Bounds ids, so that the size of the token table is proportional to the size of the file.
    limit_ = 2 * (object->size() + added_count) + 1024;
    const Vocabulary vocab(*object, limit_, kMaxTokenText, file_);
    out_.tokens.reserve(limit_, vocab.text_bytes() + (added ? added->text().size() : 0));
    std::string bytes;
    vocab.tokens([&](std::string_view text, int32_t id) {
      if (out_.tokens.has(id))
        root_.fail(kVocab, "gives id " + std::to_string(id) + " to " + files::in_quotes(text) + " and another token");
      bytes.clear();
      out_.tokens.set(id, unspell(text, bytes) ? bytes : text);
    });
    return vocab;
  }

  void parse_added(const Vocabulary& vocab) {
    const std::optional<JsonPart> list = large(kAdded, JsonPart::Kind::list);
    if (!list) return;
    std::set<std::string_view> contents;  // of out_.added, which does not grow beyond what is reserved
    list->elements([&](const JsonPart& part) {
      out_.added.push_back(added_token(vocab, part, std::string(kAdded) + "[" + std::to_string(out_.added.size()) + "]"));
      const AddedToken& token = out_.added.back();
      if (!contents.insert(token.content).second)
        root_.fail(std::string(kAdded) + "[" + std::to_string(out_.added.size() - 1) + "].content",
                   "is " + files::in_quotes(token.content) + ", which an earlier added token has");
      const std::optional<int32_t> listed = vocab.find(token.content);
      if (listed ? *listed != token.id : out_.tokens.has(token.id))
        root_.fail(
            std::string(kAdded) + "[" + std::to_string(out_.added.size() - 1) + "].id",
            "is " + std::to_string(token.id) + ", which disagrees with the vocabulary about " + files::in_quotes(token.content));
      out_.tokens.set(token.id, token.content);
    });
    for (AddedToken& token : out_.added)
      if (token.normalized && out_.nfc) token.content = to_nfc(token.content);
  }

  AddedToken added_token(const Vocabulary& vocab, const JsonPart& part, const std::string& path) const {
    if (!part.is(JsonPart::Kind::object)) root_.fail(path, "is " + files::json_text(part) + ", wanted an object");
    const Json json = part.tree(file_);
    const JsonFields fields(json, file_, path + ".");
    AddedToken token;
    token.content = fields.text("content").value_or("");
    if (token.content.empty() || token.content.size() > kMaxAddedToken)
      fields.fail("content",
                  "has " + std::to_string(token.content.size()) + " bytes, wanted 1 to " + std::to_string(kMaxAddedToken));
    if (fields.flag("single_word").value_or(false)) fields.fail("single_word", "is true, wanted false");
    token.left_strip = fields.flag("lstrip").value_or(false);
    token.right_strip = fields.flag("rstrip").value_or(false);
    token.special = fields.flag("special").value_or(false);
    token.normalized = fields.flag("normalized").value_or(!token.special);
    const Json id = fields.has("id") ? *fields.find("id") : Json();
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= limit_) vocab.refuse_id(path + ".id", files::json_text(id));
    token.id = id.get<int32_t>();
    return token;
  }

  void find_bytes(const Vocabulary& vocab) {
    out_.byte_tokens.fill(-1);
    for (size_t spelling = 0; spelling < kSpellings; ++spelling) {
      if (kByteOf[spelling] < 0) continue;
      std::string text;
      append_utf8(text, static_cast<char32_t>(spelling));
      const std::optional<int32_t> found = vocab.find(text);
      if (!found)
        root_.fail(kVocab, "has no token for byte " + std::to_string(kByteOf[spelling]) + ", wanted all 256 for a byte-level BPE");
      out_.byte_tokens[static_cast<size_t>(kByteOf[spelling])] = *found;
    }
  }

  // The two tokens of a merge: a list of two, or a text with one space. Empty for anything else.
  static std::pair<std::string, std::string> pair_of(const JsonPart& entry) {
    if (entry.text().size() > 2 * kMaxTokenText) return {};
    if (entry.is(JsonPart::Kind::string)) {
      const std::string pair = entry.string();
      const size_t space = pair.find(' ');
      if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) return {};
      return {pair.substr(0, space), pair.substr(space + 1)};
    }
    if (!entry.is(JsonPart::Kind::list)) return {};
    std::vector<std::string> texts;
    entry.elements([&](const JsonPart& text) { texts.push_back(text.is(JsonPart::Kind::string) ? text.string() : ""); });
    return texts.size() == 2 ? std::pair(texts[0], texts[1]) : std::pair<std::string, std::string>();
  }

  void parse_merges(const Vocabulary& vocab) {
    const std::optional<JsonPart> list = large(kMerges, JsonPart::Kind::list);
    const size_t count = list ? list->size() : 0;
    if (count == 0) root_.fail(kMerges, "is missing or empty, wanted at least one merge");
    if (count > kMaxMerges)
      root_.fail(kMerges, "has " + std::to_string(count) + " entries, wanted at most " + std::to_string(kMaxMerges));
    out_.merges.reserve(count);
    list->elements([&](const JsonPart& entry) {
      const auto field = [&] { return std::string(kMerges) + "[" + std::to_string(out_.merges.size()) + "]"; };
      const auto id_of = [&](const std::string& text) {
        const std::optional<int32_t> found = vocab.find(text);
        if (!found) root_.fail(field(), "needs the token " + files::in_quotes(text) + ", which the vocabulary lacks");
        return *found;
      };
      const auto [left, right] = pair_of(entry);
      if (left.empty() || right.empty()) root_.fail(field(), "is " + files::json_text(entry) + ", wanted two tokens");
      out_.merges.push_back({id_of(left), id_of(right), id_of(left + right)});
    });
  }

  const std::string& file_;
  std::map<std::string, JsonPart, std::less<>> large_;
  size_t tree_bytes_ = 0;  // of the text that tree_ is made of
  Json tree_;
  JsonFields root_;
  uint64_t limit_ = 0;  // of ids
  TokenizerFile out_;
};

}  // namespace

void TokenTable::reserve(size_t ids, size_t bytes) {
  places_.reserve(ids);
  bytes_.reserve(bytes);
}

void TokenTable::set(int32_t id, std::string_view token) {
  if (id >= size()) places_.resize(static_cast<size_t>(id) + 1);
  places_[static_cast<size_t>(id)] = {static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(token.size())};
  bytes_ += token;
}

TokenizerFile read_tokenizer_file(const std::filesystem::path& path) {
  constexpr uint64_t kMaxTokenizerBytes = 256 << 20;
  return parse_tokenizer_file(files::read_text(path, kMaxTokenizerBytes), path.native());
}

TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& file) {
  return Parser(files::check_json_object(text, file), file).parse();
}

}  // namespace weft::model
