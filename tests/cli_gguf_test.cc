// GGUF files on the command line: `quantize` writes one, every command that reads a model reads it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/command.h"
#include "tests/support/folder.h"

namespace weft {
namespace {

using nlohmann::json;

const std::string kShipped = WEFT_SOURCE_DIR "/models/weft-11m";

TEST(CliGguf, EveryCommandReadsWhatQuantizeWrites) {
  const Folder folder;
  const std::string file = (folder.path() / "m.gguf").string(), state = (folder.path() / "s.state").string();
  const Result made = weft("quantize '" + kShipped + "' '" + file + "' --weights q8_0");
  ASSERT_EQ(made.exit, 0) << made.err;
  EXPECT_TRUE(has(made.out, "m.gguf: 108 tensors")) << made.out;
  EXPECT_EQ(made.err, "");
  const std::string model = " -m '" + file + "' ";
  const Result text = weft("generate" + model + "--prompt 'The ship' --temperature 0 --max-tokens 12 --state '" + state + "'");
  EXPECT_EQ(text.exit, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with("The ship")) << text.out;
  EXPECT_EQ(weft("generate" + model + "--temperature 0 --max-tokens 2 --state '" + state + "'").exit, 0);
  const Result foreign = weft("generate -m '" + kShipped + "' --max-tokens 2 --state '" + state + "'");
  EXPECT_EQ(foreign.exit, 1);
  EXPECT_TRUE(has(foreign.err, "model")) << foreign.err;
  const Result tokens = weft("tokenize" + model + "--ids 'The old house'");
  EXPECT_EQ(tokens.out, weft("tokenize -m '" + kShipped + "' --ids 'The old house'").out);
  EXPECT_EQ(weft("plan" + model).exit, 0);
  EXPECT_TRUE(has(weft("plan" + model).out + weft("plan" + model).err, "q8_0"));
  const std::string some = folder.write("text", slurp(kShipped + "/valid-excerpt.txt").substr(0, 3000)).string();
  const auto perplexity = [&](const std::string& of) {
    const Result r = weft("perplexity -m '" + of + "' --json --kv f16 --file '" + some + "'");
    EXPECT_EQ(r.exit, 0) << r.err;
    return json::parse(r.out)["nll"].get<double>();
  };
  EXPECT_NEAR(perplexity(file), perplexity(kShipped), 0.01);
}

TEST(CliGguf, QuantizeRefusesInSentences) {
  const Folder folder;
  const std::string file = (folder.path() / "m.gguf").string();
  const Result type = weft("quantize '" + kShipped + "' '" + file + "' --weights q2_k");
  EXPECT_EQ(type.exit, 2);
  EXPECT_TRUE(has(type.err, "q2_k")) << type.err;
  const Result missing = weft("quantize /no/such/folder '" + file + "'");
  EXPECT_EQ(missing.exit, 1);
  EXPECT_TRUE(has(missing.err, "/no/such/folder: there is no such folder")) << missing.err;
  EXPECT_FALSE(std::filesystem::exists(file));
}

}  // namespace
}  // namespace weft
