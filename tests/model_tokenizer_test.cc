// The tokenizer against the `tokenizers` library: cases/golden/models/tokenizers.safetensors.
#include "model/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <cstring>

#include "files/json_text.h"
#include "files/mapped_file.h"
#include "files/safetensors.h"
#include "model/tokenizer/unicode.h"
#include "tests/support/folder.h"

namespace weft::model {
namespace {

const std::filesystem::path kSource = WEFT_SOURCE_DIR;
const std::filesystem::path kGolden = kSource / "cases/golden/models";

class Golden {
 public:
  Golden() : file_(kGolden / "tokenizers.safetensors"), all_(files::parse_safetensors(file_.bytes())) {}

  template <class T>
  std::vector<T> numbers(const std::string& name) const {
    const std::span<const uint8_t> bytes = all_.tensors.at(name).bytes;
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  std::vector<std::string> texts(const std::string& name, const std::string& offsets) const {
    const std::span<const uint8_t> bytes = all_.tensors.at(name).bytes;
    const std::vector<int32_t> at = numbers<int32_t>(offsets);
    std::vector<std::string> out;
    for (size_t i = 0; i + 1 < at.size(); ++i) out.emplace_back(bytes.begin() + at[i], bytes.begin() + at[i + 1]);
    return out;
  }

 private:
  files::MappedFile file_;
  files::SafeTensors all_;
};

const Golden& golden() {
  static const Golden all;
  return all;
}

// The four tokenizers of the golden file.
Tokenizer tokenizer_named(const std::string& name) {
  if (name == "shipped") return Tokenizer::load(kSource / "models/weft-11m");
  if (name != "ignore_merges") return Tokenizer::load(kGolden / ("tokenizer_" + name));
  files::Json json = files::Json::parse(text_of(kGolden / "tokenizer_qwen3_5/tokenizer.json"));
  json["model"]["ignore_merges"] = true;
  json["model"]["merges"].erase(json["model"]["merges"].begin() + 400, json["model"]["merges"].end());
  return Tokenizer::parse(json.dump());
}
const char* const kNames[] = {"qwen2", "qwen3_5", "shipped", "ignore_merges"};

int64_t hash_of(const std::vector<int32_t>& ids) {
  uint64_t value = 0xCBF29CE484222325;
  for (int32_t id : ids)
    for (int shift = 0; shift < 32; shift += 8) value = (value ^ (static_cast<uint32_t>(id) >> shift & 0xFF)) * 0x100000001B3;
  return static_cast<int64_t>(value);
}

std::string generated(uint64_t state, const std::vector<std::string>& fragments) {
  const auto next = [&] {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  };
  std::string text;
  for (uint64_t count = 1 + next() % 40; count > 0; --count) text += fragments[next() % fragments.size()];
  return text;
}

TEST(Tokenizer, ClassesOfAllCharacters) {
  const std::vector<int32_t> starts = golden().numbers<int32_t>("class_starts");
  const std::vector<uint8_t> classes = golden().numbers<uint8_t>("classes");
  int wrong = 0;
  for (size_t run = 0; run < starts.size(); ++run) {
    const int32_t end = run + 1 < starts.size() ? starts[run + 1] : 0x110000;
    for (int32_t c = starts[run]; c < end; ++c) wrong += static_cast<uint8_t>(char_class(static_cast<char32_t>(c))) != classes[run];
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Tokenizer, IdsOfProse) {
  const std::vector<std::string> texts = golden().texts("texts", "text_offsets");
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = tokenizer_named(name);
    const std::vector<uint16_t> ids = golden().numbers<uint16_t>(name + ".ids");
    const std::vector<int32_t> offsets = golden().numbers<int32_t>(name + ".id_offsets");
    ASSERT_GE(offsets.size(), 20u);
    for (size_t i = 0; i + 1 < offsets.size(); ++i)
      EXPECT_EQ(tokenizer.encode(texts[i]), std::vector<int32_t>(ids.begin() + offsets[i], ids.begin() + offsets[i + 1]))
          << name << ": " << texts[i];
  }
}

TEST(Tokenizer, IdsOfHostileTexts) {
  const std::vector<std::string> texts = golden().texts("texts", "text_offsets");
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = tokenizer_named(name);
    const std::vector<int64_t> hashes = golden().numbers<int64_t>(name + ".hashes");
    ASSERT_EQ(hashes.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i)
      EXPECT_EQ(hash_of(tokenizer.encode(texts[i])), hashes[i]) << name << ": " << texts[i].substr(0, 40);
  }
}

TEST(Tokenizer, IdsOfThousandsOfGeneratedTexts) {
  const std::vector<std::string> fragments = golden().texts("fragments", "fragment_offsets");
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = tokenizer_named(name);
    const std::vector<int64_t> hashes = golden().numbers<int64_t>(name + ".generated");
    ASSERT_EQ(hashes.size(), 6000u);
    int wrong = 0;
    for (size_t seed = 0; seed < hashes.size(); ++seed) {
      const std::string text = generated(seed, fragments);
      if (hash_of(tokenizer.encode(text)) == hashes[seed]) continue;
      if (++wrong <= 5) ADD_FAILURE() << name << " seed " << seed << ": " << text;
    }
    EXPECT_EQ(wrong, 0) << name;
  }
}

TEST(Tokenizer, DecodesAnyIds) {
  const Tokenizer tokenizer = tokenizer_named("qwen3_5");
  const std::vector<int32_t> ids = golden().numbers<int32_t>("random_ids");
  const std::vector<std::string> decoded = golden().texts("decoded", "decoded_offsets");
  const std::vector<std::string> plain = golden().texts("decoded_plain", "decoded_plain_offsets");
  for (size_t i = 0; i < decoded.size(); ++i) {
    const std::span<const int32_t> row(ids.data() + 12 * i, 12);
    EXPECT_EQ(tokenizer.decode(row), decoded[i]) << i;
    EXPECT_EQ(tokenizer.decode(row, false), plain[i]) << i;
    StreamDecoder stream(tokenizer);
    std::string all;
    for (int32_t id : row) {
      const std::string piece = stream.push(id);
      EXPECT_EQ(piece, to_well_formed(piece));
      all += piece;
    }
    EXPECT_EQ(all + stream.finish(), decoded[i]) << i;
  }
}

TEST(Tokenizer, DecodeUndoesEncodeUpToTheNormalForm) {
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = tokenizer_named(name);
    const std::vector<std::string> texts = golden().texts("texts", "text_offsets");
    for (const std::string& text : texts) {
      if (text.find("<keep>") != std::string::npos || text.find("<caf") != std::string::npos)
        continue;  // these added tokens absorb the white space around them
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), to_nfc(text)) << name;
    }
  }
}

TEST(Tokenizer, FindsTokens) {
  const Tokenizer tokenizer = tokenizer_named("shipped");
  EXPECT_EQ(tokenizer.size(), 6144);
  EXPECT_EQ(tokenizer.token_id("<|endoftext|>"), 0);
  EXPECT_TRUE(tokenizer.is_special(0));
  const std::optional<int32_t> the = tokenizer.token_id(" the");
  ASSERT_TRUE(the);
  EXPECT_EQ(tokenizer.encode(" the"), std::vector<int32_t>{*the});
  EXPECT_EQ(tokenizer.bytes(*the), " the");
  EXPECT_FALSE(tokenizer.is_special(*the));
  EXPECT_EQ(tokenizer.token_id("no such token"), std::nullopt);
  for (int32_t id : {-1, 6144, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(tokenizer.bytes(id), "");
    EXPECT_FALSE(tokenizer.is_special(id));
    EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{id, *the}), " the");
  }
}

TEST(Tokenizer, IllFormedTextBecomesReplacementCharacters) {
  const Tokenizer tokenizer = tokenizer_named("qwen3_5");
  const std::string replacement = "\xEF\xBF\xBD";
  const std::pair<std::string, int> cases[] = {
      {"\xFF", 1},         {"\xC0\x80", 2},     {"\xED\xA0\x80", 3}, {"\xF4\x90\x80\x80", 4}, {"\xE2\x82", 1},
      {"\xE2\x82\xE2", 2}, {"\xF0\x9F\x98", 1}, {"\x80\x80", 2},     {"\xF0\x80\x80", 3},     {"\xE2\x28\xA1", 0}};
  for (const auto& [bytes, count] : cases) {
    std::string wanted;
    for (int i = 0; i < count; ++i) wanted += replacement;
    if (count == 0) wanted = replacement + "(" + replacement;
    EXPECT_EQ(to_well_formed(bytes), wanted);
    EXPECT_EQ(tokenizer.encode("a" + bytes + "b"), tokenizer.encode("a" + wanted + "b"));
  }
}

TEST(StreamDecoder, HoldsBackUnfinishedCharacters) {
  const Tokenizer tokenizer = tokenizer_named("shipped");
  const auto byte = [&](const char* b) { return *tokenizer.token_id(b); };
  StreamDecoder stream(tokenizer, false);
  EXPECT_EQ(stream.push(byte("\xF0")), "");
  EXPECT_EQ(stream.push(byte("\x9F")), "");
  EXPECT_EQ(stream.push(0), "");  // special tokens give no text
  EXPECT_EQ(stream.push(byte("\x98")), "");
  EXPECT_EQ(stream.push(byte("\x80")), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream.push(byte("\xE2")), "");
  EXPECT_EQ(stream.push(byte("x")), "\xEF\xBF\xBDx");
  EXPECT_EQ(stream.push(byte("\xE2")), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(stream.push(byte("y")), "y");
}

// A limit changes no token, and is told from what is exactly as long.
TEST(Tokenizer, EncodesUpToALimit) {
  const std::vector<std::string> texts = golden().texts("texts", "text_offsets");
  for (const std::string name : kNames) {
    const Tokenizer tokenizer = tokenizer_named(name);
    for (const std::string& text : texts) {
      const std::vector<int32_t> ids = tokenizer.encode(text);
      const TextPart halves[] = {{std::string_view(text).substr(0, text.size() / 2), true},
                                 {std::string_view(text).substr(text.size() / 2), false}};
      const std::vector<int32_t> parts = tokenizer.encode(halves);
      for (const size_t less : {size_t{1}, size_t{2}, size_t{17}}) {
        if (ids.size() >= less) EXPECT_FALSE(tokenizer.encode(text, ids.size() - less)) << name << ": " << text.substr(0, 40);
        if (parts.size() >= less) EXPECT_FALSE(tokenizer.encode(halves, parts.size() - less)) << name << ": " << text.substr(0, 40);
      }
      EXPECT_EQ(tokenizer.encode(text, ids.size()), ids);
      EXPECT_EQ(tokenizer.encode(text, ids.size() + 1), ids);
      EXPECT_EQ(tokenizer.encode(halves, parts.size()), parts);
    }
  }
}

// A word of a million bytes, and a million combining marks in the worst order: quadratic time would be hours.
TEST(Tokenizer, LongWordsAreNotQuadratic) {
  const Tokenizer tokenizer = tokenizer_named("qwen3_5");
  std::string marks = "x";
  for (int i = 0; i < 100000; ++i) marks += "\xCC\x81\xCC\xA3\xCC\xB4";
  for (const std::string& text : {std::string(1000000, 'a'), std::string(1000000, ' ') + "x", std::string(1000000, '!'), marks}) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(ids), to_nfc(text));
  }
}

}  // namespace
}  // namespace weft::model
