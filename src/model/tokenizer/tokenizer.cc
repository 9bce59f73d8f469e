// A byte-level BPE tokenizer: see tokenizer.h.
#include "model/tokenizer/tokenizer.h"

#include <algorithm>

#include "files/gguf.h"
#include "model/tokenizer/tokenizer_file.h"
#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

constexpr size_t kAll = SIZE_MAX;  // tokens

}  // namespace

struct Tokenizer::Tables {
  TokenizerFile file;
  std::vector<bool> special, is_added;     // by id
  std::vector<int32_t> by_bytes;           // ids that are present, sorted by their bytes
  AddedTokens in_raw_text, in_normalized;  // added tokens, by the form of the text in which they are searched
  BytePairs pairs;
  size_t longest = 1;  // bytes of a token

  explicit Tables(TokenizerFile parsed)
      : file(std::move(parsed)), special(static_cast<size_t>(file.tokens.size())), is_added(special) {
    std::vector<AddedToken> kinds[2];
    for (AddedToken& token : file.added) {
      special[static_cast<size_t>(token.id)] = token.special;
      is_added[static_cast<size_t>(token.id)] = true;
      kinds[token.normalized].push_back(std::move(token));
    }
    in_raw_text = AddedTokens(std::move(kinds[0]));
    in_normalized = AddedTokens(std::move(kinds[1]));
    for (int32_t id = 0; id < file.tokens.size(); ++id)
      if (has(id)) {
        by_bytes.push_back(id);
        longest = std::max(longest, bytes(id).size());
      }
    // Of two tokens with the same bytes, find() returns the lower id.
    std::stable_sort(by_bytes.begin(), by_bytes.end(), [&](int32_t a, int32_t b) { return bytes(a) < bytes(b); });
    pairs = BytePairs(std::move(file.merges), file.byte_tokens, file.tokens.size());
  }

  std::string_view bytes(int32_t id) const { return file.tokens.bytes(id); }
  bool has(int32_t id) const { return file.tokens.has(id); }

  std::optional<int32_t> find(std::string_view text) const {
    const auto found =
        std::lower_bound(by_bytes.begin(), by_bytes.end(), text, [&](int32_t id, std::string_view t) { return bytes(id) < t; });
    if (found == by_bytes.end() || bytes(*found) != text) return std::nullopt;
    return *found;
  }

  // Appends the added tokens of a text, and calls between(part) for the text between them, until there are more than `most` tokens.
  template <class Between>
  static void split_at_added(const AddedTokens& added, std::string_view text, size_t most, std::vector<int32_t>& ids,
                             Between&& between) {
    for (size_t at = 0; at < text.size() && ids.size() <= most;) {
      const AddedTokens::Found found = added.find(text, at);
      if (found.begin > at) between(text.substr(at, found.begin - at));
      if (found.token) ids.push_back(found.token->id);
      at = found.end;
    }
  }

  // Appends tokens until there are more than `most`. The tokens of a word have all of its bytes. A word that is longer than the tokens
  // that are left is therefore cut to the most bytes that one token more can have.
  void encode_words(std::string_view text, size_t most, std::vector<int32_t>& ids) const {
    for (size_t at = 0; at < text.size() && ids.size() <= most;) {
      const size_t end = word_end(file.split, text, at), left = most - ids.size();
      std::string_view word = text.substr(at, end - at);
      if (word.size() / longest > left) word = word.substr(0, (left + 1) * longest);
      at = end;
      if (file.ignore_merges)
        if (const std::optional<int32_t> whole = find(word)) {
          ids.push_back(*whole);
          continue;
        }
      pairs.encode(word, ids);
    }
  }

  void encode_raw_text(std::string_view text, size_t most, std::vector<int32_t>& ids) const {
    const auto words = [&](std::string_view part) { encode_words(part, most, ids); };
    if (file.nfc)
      split_at_added(in_normalized, to_nfc(text), most, ids, words);
    else
      split_at_added(in_normalized, text, most, ids, words);
  }
};

Tokenizer::Tokenizer(std::unique_ptr<const Tables> tables) : tables_(std::move(tables)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::filesystem::path& model) {
  if (files::is_gguf(model)) return from_gguf(files::open_gguf(model).fields);
  TokenizerFile parsed = read_tokenizer_file(model / "tokenizer.json");
  return Tokenizer(std::make_unique<const Tables>(std::move(parsed)));
}

Tokenizer Tokenizer::from_gguf(const files::GgufFields& fields) {
  return Tokenizer(std::make_unique<const Tables>(parse_gguf_tokenizer(fields)));
}

Tokenizer Tokenizer::parse(std::string_view json) {
  return Tokenizer(std::make_unique<const Tables>(parse_tokenizer_file(json, "tokenizer.json")));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const { return *encode(text, kAll); }

std::optional<std::vector<int32_t>> Tokenizer::encode(std::string_view text, size_t most) const {
  std::vector<int32_t> ids;
  Tables::split_at_added(tables_->in_raw_text, to_well_formed(text), most, ids,
                         [&](std::string_view part) { tables_->encode_raw_text(part, most, ids); });
  if (ids.size() > most) return std::nullopt;
  return ids;
}

std::vector<int32_t> Tokenizer::encode(std::span<const TextPart> parts) const { return *encode(parts, kAll); }

std::optional<std::vector<int32_t>> Tokenizer::encode(std::span<const TextPart> parts, size_t most) const {
  std::vector<int32_t> ids;
  std::string run;  // text since the last added token
  const auto end_run = [&] {
    tables_->encode_words(tables_->file.nfc ? to_nfc(run) : run, most, ids);
    run.clear();
  };
  for (const TextPart& part : parts) {
    if (ids.size() > most) return std::nullopt;
    const std::string text = to_well_formed(part.text);
    for (size_t at = 0; part.added && at < text.size();) {
      AddedTokens::Found found = tables_->in_raw_text.find(text, at);
      if (const AddedTokens::Found other = tables_->in_normalized.find(text, at); other.begin < found.begin) found = other;
      run += std::string_view(text).substr(at, found.begin - at);
      if (found.token) {
        end_run();
        ids.push_back(found.token->id);
      }
      at = found.end;
    }
    if (!part.added) run += text;
  }
  end_run();
  if (ids.size() > most) return std::nullopt;
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool special) const {
  std::string all;
  for (int32_t id : ids)
    if (special || !is_special(id)) all += bytes(id);
  return to_well_formed(all);
}

std::string_view Tokenizer::bytes(int32_t id) const { return tables_->has(id) ? tables_->bytes(id) : std::string_view(); }

std::optional<int32_t> Tokenizer::token_id(std::string_view text) const { return tables_->find(text); }

bool Tokenizer::is_added(int32_t id) const { return tables_->has(id) && tables_->is_added[static_cast<size_t>(id)]; }

bool Tokenizer::is_special(int32_t id) const { return tables_->has(id) && tables_->special[static_cast<size_t>(id)]; }

int32_t Tokenizer::size() const { return tables_->file.tokens.size(); }

std::string StreamDecoder::push(int32_t id) {
  if (!special_ && tokenizer_.is_special(id)) return {};
  pending_ += tokenizer_.bytes(id);
  // A character at the end may be incomplete. It began at most 3 bytes ago.
  size_t whole = pending_.size();
  for (size_t back = 1; back <= std::min<size_t>(3, pending_.size()); ++back) {
    const size_t at = pending_.size() - back;
    if ((static_cast<unsigned char>(pending_[at]) & 0xC0) == 0x80) continue;
    if (decode_utf8(pending_, at).cut_off) whole = at;
    break;
  }
  std::string text = to_well_formed(std::string_view(pending_).substr(0, whole));
  pending_.erase(0, whole);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text = to_well_formed(pending_);
  pending_.clear();
  return text;
}

}  // namespace weft::model
