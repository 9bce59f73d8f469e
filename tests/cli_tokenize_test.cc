// The subcommand `tokenize`, run as a process.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/command.h"
#include "tests/support/folder.h"

namespace weft {
namespace {

using nlohmann::json;

const std::string kModel = " --model '" WEFT_SOURCE_DIR "/models/weft-11m' ";

Result tokenize(const std::string& arguments, const std::string& input = "/dev/null") {
  return weft("tokenize" + kModel + arguments, "", input);
}

TEST(Tokenize, ShowsTokens) {
  const Result r = tokenize("'The old house'");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.out, "' old'")) << r.out;
  EXPECT_TRUE(has(r.out, "' house'")) << r.out;
  EXPECT_EQ(r.err, "3 tokens, 13 bytes, 4.33 bytes per token\n");
  EXPECT_EQ(tokenize("The old house").out, r.out);
  EXPECT_TRUE(has(tokenize("\"$(printf 'a\\033\\t\\\\')\"").out, "'\\x1b'"));
}

TEST(Tokenize, GoesThereAndBack) {
  const Folder folder;
  const std::string text = "It was a dark and stormy night;\n\tthe r\xC3\xA9sum\xC3\xA9 \xF0\x9F\x98\x80 fell -- 1,000 times!\r\n";
  const std::string file = folder.write("text", text).string();
  const Result ids = tokenize("--ids --file '" + file + "'");
  EXPECT_EQ(ids.exit, 0) << ids.err;
  EXPECT_EQ(tokenize("--ids", file).out, ids.out);  // standard input
  EXPECT_EQ(tokenize("--ids --file -", file).out, ids.out);
  const std::string back = folder.write("ids", ids.out).string();
  EXPECT_EQ(tokenize("--decode --file '" + back + "'").out, text + "\n");
}

TEST(Tokenize, WritesJson) {
  const Result r = tokenize("--json 'The old house'");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_EQ(r.err, "");
  const json out = json::parse(r.out);
  EXPECT_EQ(out["schema"], 1);
  EXPECT_EQ(out["tokens"], 3);
  EXPECT_EQ(out["bytes"], 13);
  EXPECT_EQ(out["text"], "The old house");
  EXPECT_EQ(out["pieces"], json({"The", " old", " house"}));
  EXPECT_EQ(json::parse(tokenize("--json --decode '" + out["ids"].dump() + "'").out), out);
  const json broken = json::parse(tokenize("--json \"$(printf 'a\\377b')\"").out);
  EXPECT_EQ(broken["text"],
            "a\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(json::parse(tokenize("--json").out)["tokens"], 0);  // nothing on standard input
}

TEST(Tokenize, BracketsAndCommasAreText) {
  const auto text_of_words = [](const std::string& words) { return json::parse(tokenize("--json " + words).out).at("text"); };
  for (const char* text : {"[hello, world]", "[]", "[,]", "[[a],[b]]", "a,b"})
    EXPECT_EQ(text_of_words("'" + std::string(text) + "'"), text);
  EXPECT_EQ(text_of_words("'[a,b]' c '[d]'"), "[a,b] c [d]");
  EXPECT_TRUE(has(weft("tokenize --help").out, "[OPTIONS] [text...]\n")) << weft("tokenize --help").out;
}

TEST(Tokenize, RefusesWithSentences) {
  const Result missing = weft("tokenize --model /no/such/model x");
  EXPECT_EQ(missing.exit, 1);
  EXPECT_EQ(missing.err,
            "weft: /no/such/model: there is no such folder, wanted a folder with config.json, *.safetensors and tokenizer.json, or "
            "a GGUF file\n");
  EXPECT_EQ(weft("tokenize 'The old house'").out, tokenize("'The old house'").out);  // the bundled model
  EXPECT_EQ(tokenize("--file a b").exit, 2);
  const Result file = tokenize("--file /no/such/file");
  EXPECT_EQ(file.exit, 1);
  EXPECT_EQ(file.err, "weft: /no/such/file: cannot be opened: No such file or directory\n");
  for (const char* ids : {"1 2 x", "6144", "99999999999999999999", "-5"}) {
    const Result r = tokenize("--decode -- '" + std::string(ids) + "'");
    EXPECT_EQ(r.exit, 2) << ids;
    EXPECT_TRUE(has(r.err, "is no token, wanted numbers below 6144")) << r.err;
  }
  const Folder folder;  // a file without tokens is not an error of the command line
  const std::string bad = folder.write("bad", "1 2 x").string();
  EXPECT_EQ(tokenize("--decode --file '" + bad + "'").exit, 1);
  EXPECT_EQ(tokenize("--decode --file '" + bad + "'").err, "weft: " + bad + ": 'x' is no token, wanted numbers below 6144\n");
  EXPECT_EQ(tokenize("--decode", bad).exit, 1);
}

}  // namespace
}  // namespace weft
