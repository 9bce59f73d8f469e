// Legal and illegal contents of tokenizer.json, and the error messages.
#include <gtest/gtest.h>

#include "files/json_text.h"
#include "model/tokenizer/tokenizer.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"

namespace weft::model {
namespace {

using files::Json;

const std::filesystem::path kSource = WEFT_SOURCE_DIR;

const Json& original() {
  static const Json json = Json::parse(text_of(kSource / "cases/golden/models/tokenizer_qwen3_5/tokenizer.json"));
  return json;
}

// The error message for a file that differs from a good one by `change`.
std::string fault(const std::function<void(Json&)>& change) {
  Json json = original();
  change(json);
  return complaint([&] { Tokenizer::parse(json.dump()); });
}
// The same for one value; readers treat null as absent.
std::string fault(const std::string& pointer, const Json& value) {
  return fault([&](Json& json) { json[Json::json_pointer(pointer)] = value; });
}

TEST(TokenizerFile, TakesBothFormsOfMerges) {
  Json json = original();
  for (Json& merge : json["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const Tokenizer texts = Tokenizer::parse(json.dump()), pairs = Tokenizer::parse(original().dump());
  const std::string text = "All human beings are born free";
  EXPECT_LT(pairs.encode(text).size(), text.size());
  EXPECT_EQ(texts.encode(text), pairs.encode(text));
}

TEST(TokenizerFile, TakesOptionalParts) {
  for (const char* pointer :
       {"/normalizer", "/post_processor", "/decoder", "/added_tokens", "/truncation", "/padding", "/model/dropout"})
    EXPECT_EQ(fault(pointer, nullptr), "none") << pointer;
  Json json = original();
  json["normalizer"] = nullptr;
  const Tokenizer plain = Tokenizer::parse(json.dump()), nfc = Tokenizer::parse(original().dump());
  EXPECT_EQ(plain.decode(plain.encode("e\xCC\x81")), "e\xCC\x81");
  EXPECT_EQ(nfc.decode(nfc.encode("e\xCC\x81")), "\xC3\xA9");
}

// The behaviour of the `tokenizers` library.
TEST(TokenizerFile, LaterOfTwoEqualMergesCounts) {
  Json json = original();
  json["added_tokens"] = nullptr;
  Json& vocab = json["model"]["vocab"];
  vocab = {{"ab", 256}, {"bc", 257}};
  int id = 0;
  for (const auto& [text, value] : original()["model"]["vocab"].items())
    if (value < 256) vocab[text] = id++;
  const auto words = [&](const char* merges) {
    json["model"]["merges"] = Json::parse(merges);
    const Tokenizer tokenizer = Tokenizer::parse(json.dump());
    std::string all;
    for (int32_t token : tokenizer.encode("abc")) all += std::string(tokenizer.bytes(token)) + "|";
    return all;
  };
  EXPECT_EQ(words(R"([["a","b"],["b","c"]])"), "ab|c|");
  EXPECT_EQ(words(R"([["a","b"],["b","c"],["a","b"]])"), "a|bc|");
}

TEST(TokenizerFile, RefusesOtherModels) {
  EXPECT_EQ(fault("/model", nullptr), "tokenizer.json: model is missing");
  EXPECT_EQ(fault("/model", 3), "tokenizer.json: model is 3, wanted an object");
  EXPECT_EQ(fault("/model/type", "Unigram"), "tokenizer.json: model.type is 'Unigram', wanted 'BPE'");
  EXPECT_EQ(fault("/model/type", nullptr), "tokenizer.json: model.type is '', wanted 'BPE'");
  EXPECT_EQ(fault("/model/unk_token", "<unk>"), "tokenizer.json: model.unk_token is given, wanted none for a byte-level BPE");
  EXPECT_EQ(fault("/model/end_of_word_suffix", "</w>"),
            "tokenizer.json: model.end_of_word_suffix is given, wanted none for a byte-level BPE");
  EXPECT_EQ(fault("/model/byte_fallback", true), "tokenizer.json: model.byte_fallback is true, wanted false: a byte-level BPE");
  EXPECT_EQ(fault("/model/dropout", 0.1), "tokenizer.json: model.dropout is not 0, wanted 0");
  EXPECT_EQ(fault("/normalizer/type", "NFKC"), "tokenizer.json: normalizer is of type 'NFKC', wanted 'NFC'");
  EXPECT_EQ(fault("/decoder/type", "Metaspace"), "tokenizer.json: decoder is of type 'Metaspace', wanted 'ByteLevel'");
  EXPECT_EQ(fault("/post_processor/type", "TemplateProcessing"),
            "tokenizer.json: post_processor is of type 'TemplateProcessing', wanted 'ByteLevel'");
}

TEST(TokenizerFile, RefusesOtherSplits) {
  const std::string shape = "wanted a Sequence of Split and ByteLevel";
  EXPECT_EQ(fault("/pre_tokenizer", nullptr), "tokenizer.json: pre_tokenizer is missing, " + shape);
  EXPECT_EQ(fault("/pre_tokenizer/type", "Whitespace"), "tokenizer.json: pre_tokenizer is of type 'Whitespace', wanted 'Sequence'");
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers", Json::array()),
            "tokenizer.json: pre_tokenizer.pretokenizers is another list, " + shape);
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"),
            "tokenizer.json: pre_tokenizer.pretokenizers[0].pattern is '\\w+', wanted that of Qwen2 or of Qwen3.5");
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers/0/pattern", Json::object()),
            "tokenizer.json: pre_tokenizer.pretokenizers[0].pattern has no Regex");
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers/0/behavior", "Removed"),
            "tokenizer.json: pre_tokenizer.pretokenizers[0].behavior is 'Removed', wanted 'Isolated', not inverted");
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers/1/add_prefix_space", true),
            "tokenizer.json: pre_tokenizer.pretokenizers[1].add_prefix_space is true, wanted false");
  EXPECT_EQ(fault("/pre_tokenizer/pretokenizers/1/use_regex", true),
            "tokenizer.json: pre_tokenizer.pretokenizers[1].use_regex is true, wanted false");
}

TEST(TokenizerFile, RefusesBadVocabularies) {
  EXPECT_EQ(fault("/model/vocab", nullptr), "tokenizer.json: model.vocab is missing");
  EXPECT_EQ(fault("/model/vocab", Json::array()), "tokenizer.json: model.vocab is a list, wanted an object");
  EXPECT_EQ(fault("/model/vocab/!", -1),
            "tokenizer.json: model.vocab['!'] is -1, wanted an id below 3242 for a vocabulary of this size");
  EXPECT_EQ(fault("/model/vocab/!", 4000000000u),
            "tokenizer.json: model.vocab['!'] is 4000000000, wanted an id below 3242 for a vocabulary of this size");
  EXPECT_EQ(fault("/model/vocab/!", "x"),
            "tokenizer.json: model.vocab['!'] is 'x', wanted an id below 3242 for a vocabulary of this size");
  EXPECT_EQ(fault("/model/vocab/!", 1), "tokenizer.json: model.vocab gives id 1 to '\"' and another token");
  EXPECT_EQ(fault([](Json& json) { json["model"]["vocab"].erase("!"); }),
            "tokenizer.json: model.vocab has no token for byte 33, wanted all 256 for a byte-level BPE");
}

TEST(TokenizerFile, RefusesBadMerges) {
  EXPECT_EQ(fault("/model/merges", nullptr), "tokenizer.json: model.merges is missing or empty, wanted at least one merge");
  EXPECT_EQ(fault("/model/merges", Json::array()), "tokenizer.json: model.merges is missing or empty, wanted at least one merge");
  EXPECT_EQ(fault("/model/merges", "a b"), "tokenizer.json: model.merges is 'a b', wanted a list");
  EXPECT_EQ(fault("/model/merges/7", 3), "tokenizer.json: model.merges[7] is 3, wanted two tokens");
  EXPECT_EQ(fault("/model/merges/7", "ab"), "tokenizer.json: model.merges[7] is 'ab', wanted two tokens");
  EXPECT_EQ(fault("/model/merges/7", "a b c"), "tokenizer.json: model.merges[7] is 'a b c', wanted two tokens");
  EXPECT_EQ(fault("/model/merges/7", Json::array({"a", ""})), "tokenizer.json: model.merges[7] is a list, wanted two tokens");
  EXPECT_EQ(fault("/model/merges/7", "a \x1b\xC2\xA7"),  // escape sequences do not reach the terminal
            "tokenizer.json: model.merges[7] needs the token '\\x1b\xC2\xA7', which the vocabulary lacks");
  EXPECT_EQ(fault("/model/merges/7", "! \""), "tokenizer.json: model.merges[7] needs the token '!\"', which the vocabulary lacks");
}

TEST(TokenizerFile, RefusesBadAddedTokens) {
  EXPECT_EQ(fault("/added_tokens", 3), "tokenizer.json: added_tokens is 3, wanted a list");
  EXPECT_EQ(fault("/added_tokens/0", 3), "tokenizer.json: added_tokens[0] is 3, wanted an object");
  EXPECT_EQ(fault("/added_tokens/0/content", ""), "tokenizer.json: added_tokens[0].content has 0 bytes, wanted 1 to 1024");
  EXPECT_EQ(fault("/added_tokens/0/content", std::string(2000, 'x')),
            "tokenizer.json: added_tokens[0].content has 2000 bytes, wanted 1 to 1024");
  EXPECT_EQ(fault("/added_tokens/1/content", "<|endoftext|>"),
            "tokenizer.json: added_tokens[1].content is '<|endoftext|>', which an earlier added token has");
  EXPECT_EQ(fault("/added_tokens/0/single_word", true), "tokenizer.json: added_tokens[0].single_word is true, wanted false");
  EXPECT_EQ(fault("/added_tokens/0/special", 1), "tokenizer.json: added_tokens[0].special is 1, wanted true or false");
  EXPECT_EQ(fault("/added_tokens/0/id", 99999),
            "tokenizer.json: added_tokens[0].id is 99999, wanted an id below 3242 for a vocabulary of this size");
  EXPECT_EQ(fault("/added_tokens/0/id", nullptr),
            "tokenizer.json: added_tokens[0].id is null, wanted an id below 3242 for a vocabulary of this size");
  EXPECT_EQ(fault("/added_tokens/0/id", 5),
            "tokenizer.json: added_tokens[0].id is 5, which disagrees with the vocabulary about '<|endoftext|>'");
}

TEST(TokenizerFile, RefusesWhatIsNoSuchFile) {
  const Folder folder;
  EXPECT_EQ(complaint([&] { Tokenizer::load(folder.path()); }),
            (folder.path() / "tokenizer.json").string() + ": cannot be opened: No such file or directory");
  EXPECT_EQ(complaint([] { Tokenizer::parse(""); }), "tokenizer.json: is not JSON at byte 1");
  EXPECT_EQ(complaint([] { Tokenizer::parse("{}"); }), "tokenizer.json: model is missing");
  const std::string good = original().dump();
  for (size_t length : {good.size() / 3, good.size() / 2, good.size() - 1})
    EXPECT_NE(complaint([&] { Tokenizer::parse(good.substr(0, length)); }), "none") << length;
}

}  // namespace
}  // namespace weft::model
