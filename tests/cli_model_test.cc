// The subcommands `generate`, `perplexity`, `plan` and `speed`, run as processes.
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/command.h"
#include "tests/support/folder.h"

namespace weft {
namespace {

using nlohmann::json;

const std::string kOne = " --threads 1 ";

Result generate(const std::string& arguments) { return weft("generate" + kOne + arguments); }

TEST(Generate, WritesAPassageByDefault) {
  const Result r = generate("--max-tokens 12");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_EQ(r.out.rfind("It was a dark night, and the", 0), 0u) << r.out;
  EXPECT_GT(r.out.size(), 40u);
  for (const char* part : {"prefill", "decode", "tokens/s", "dense layers", "mixers", "bytes per token", "f16 2048", "peak memory"})
    EXPECT_TRUE(has(r.err, part)) << part << " in\n" << r.err;
  EXPECT_FALSE(has(r.err + r.out, "\x1b")) << "no control characters without a terminal";
}

TEST(Generate, TheSeedDecides) {
  const std::string one = generate("--max-tokens 20 --seed 3").out;
  EXPECT_EQ(generate("--max-tokens 20 --seed 3 --stream").out, one);
  EXPECT_EQ(weft("generate --threads 3 --max-tokens 20 --seed 3").out, one);
  EXPECT_NE(generate("--max-tokens 20 --seed 4").out, one);
  EXPECT_EQ(generate("--max-tokens 20 --temperature 0").out, generate("--max-tokens 20 --seed 4 --top-k 1").out);
}

TEST(Generate, Json) {
  const Result r = generate("--prompt 'The ship' --max-tokens 5 --kv 4v4,0:f16 --json --quiet");
  ASSERT_EQ(r.exit, 0) << r.err;
  EXPECT_EQ(r.err, "");
  const json j = json::parse(r.out);
  EXPECT_EQ(j.at("prompt"), "The ship");
  EXPECT_EQ(j.at("generated_tokens"), 5);
  EXPECT_EQ(j.at("ids").size(), 5u);
  EXPECT_EQ(j.at("finish"), "length");
  EXPECT_EQ(j.at("kv"), "4v4,0:f16");
  EXPECT_EQ(j.at("bytes_per_token"), 1024 + 264);
  EXPECT_EQ(generate("--prompt 'The ship' --max-tokens 5 --kv 4v4,0:f16").out, "The ship" + j.at("text").get<std::string>() + "\n");
}

TEST(Generate, PromptsFromFilesAndEmptyOnes) {
  const Folder folder;
  const std::string file = folder.write("prompt", "The old\nhouse").string();
  EXPECT_EQ(generate("--file '" + file + "' --max-tokens 4").out,
            generate("--prompt \"$(printf 'The old\\nhouse')\" --max-tokens 4").out);
  EXPECT_EQ(weft("generate --threads 1 --file - --max-tokens 4", "", file).out,
            generate("--file '" + file + "' --max-tokens 4").out);
  EXPECT_EQ(generate("--prompt '' --max-tokens 4").exit, 0);
  EXPECT_EQ(generate("--prompt 'The' --max-tokens 0").out, "The\n");
}

TEST(Generate, ReferenceBackendWritesTheSame) {
  EXPECT_EQ(generate("--max-tokens 6 --temperature 0 --backend reference").out, generate("--max-tokens 6 --temperature 0").out);
}

TEST(Speed, OneRowForEveryBatch) {
  const Result r = weft("speed --threads 1 --batch 1 2 --prompt 20 --decode 2 --context 100 --json");
  ASSERT_EQ(r.exit, 0) << r.err;
  const json j = json::parse(r.out);
  ASSERT_EQ(j.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(j[i].at("batch"), i + 1);
    EXPECT_EQ(j[i].at("context"), 100);
    EXPECT_GT(j[i].at("prefill_tokens_per_second"), 0);
    EXPECT_GT(j[i].at("decode_tokens_per_second"), 0);
    EXPECT_GT(j[i].at("planned_bytes"), 0);
    EXPECT_EQ(j[i].at("threads"), 1);
    EXPECT_TRUE(j[i].at("dirty").is_boolean());
    for (const char* key : {"device", "driver", "isa", "commit"}) EXPECT_NE(j[i].at(key).get<std::string>(), "") << key;
  }
  EXPECT_TRUE(has(weft("speed --threads 1 --batch 1 --prompt 4 --decode 1").out, "decode tokens/s"));
  EXPECT_TRUE(has(weft("speed --threads 1 --batch 1 --prompt 4 --decode 0").out, "  -        -  ")) << "nothing was decoded";
  EXPECT_TRUE(json::parse(weft("speed --threads 1 --batch 1 --prompt 4 --decode 0 --json").out)[0]
                  .at("decode_tokens_per_second")
                  .is_null());
  EXPECT_EQ(weft("speed --batch 0").exit, 2);
}

int64_t total_memory() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE); }

bool cuda_is_usable() {
  const json found = json::parse(weft("devices --json").out);
  for (const json& device : found.at("devices"))
    if (device.at("backend") == "cuda" && device.at("usable")) return true;
  return false;
}

TEST(Backend, BestIsCudaWhereUsableAndElseTheCpu) {
  const std::string best = cuda_is_usable() ? "cuda" : "cpu", flag = " --backend best ";
  EXPECT_EQ(json::parse(generate(flag + "--max-tokens 2 --json --quiet").out).at("backend"), best);
  EXPECT_EQ(json::parse(weft("perplexity" + flag + "--max-tokens 20 --json").out).at("backend"), best);
  EXPECT_EQ(json::parse(weft("plan" + flag + "--json").out).at("backend"), best);
  EXPECT_EQ(json::parse(weft("speed" + flag + "--batch 1 --prompt 4 --decode 1 --json").out).at(0).at("backend"), best);
  EXPECT_TRUE(has(generate(flag + "--max-tokens 2").err, "on " + best + " (")) << "the statistics name it";
  EXPECT_TRUE(has(weft("perplexity" + flag + "--max-tokens 20").err, "on " + best + " ("));
  EXPECT_TRUE(has(weft("plan" + flag).out, "on " + best + " ("));
  EXPECT_EQ(json::parse(generate("--max-tokens 2 --json --quiet").out).at("backend"), "cpu") << "only where it is asked for";
}

// Where there is a GPU, cuda_model_test checks its results.
TEST(Cuda, IsRefusedWithASentenceWhereItIsNotUsable) {
  if (cuda_is_usable()) GTEST_SKIP() << "there is a device";
  for (const char* command : {"generate", "perplexity", "plan", "speed"}) {
    const Result r = weft(std::string(command) + " --backend cuda");
    EXPECT_EQ(r.exit, 2) << command;
    EXPECT_TRUE(has(r.err, "backend cuda is not usable here") || has(r.err, "not in this build")) << r.err;
  }
}

TEST(Generate, CtrlCEndsCleanly) {
  const Result r = weft_interrupted(2, "generate --threads 1 --stream --max-tokens 100000000");
  EXPECT_EQ(r.exit, 130);
  ASSERT_NE(r.out, "");
  EXPECT_EQ(r.out.back(), '\n');
  EXPECT_TRUE(has(r.err, "decode")) << "statistics of what was done: " << r.err;
}

TEST(Generate, OtherSignalsSaveTheStateToo) {
  const Folder folder;
  const std::string file = (folder.path() / "ended.state").string();
  for (const auto& [signal, status] : {std::pair("TERM", 143), std::pair("HUP", 129)}) {
    const Result r =
        weft_ended_after(60, "generate --threads 1 --kv f32 --stream --max-tokens 1073741824 --state '" + file + "'", signal);
    EXPECT_EQ(r.exit, status) << signal << r.err;
    EXPECT_GT(r.out.size(), 20u) << signal;
    EXPECT_GT(json::parse(weft("state --json '" + file + "'").out).at("tokens"), 8) << signal;
    EXPECT_TRUE(has(r.err, "tokens would take ")) << "a warning, because no machine has memory for so many: " << r.err;
  }
}

// As in `weft generate | head`: when the reader closes the pipe, the text ends and the state is saved.
TEST(Generate, AReaderThatLeavesEndsTheTextAndTheStateIsSaved) {
  const Folder folder;
  const std::string state = (folder.path() / "left.state").string(), err = (folder.path() / "err").string();
  const std::string exit = (folder.path() / "exit").string(), out = (folder.path() / "out").string();
  const std::string line = "'" WEFT_COMMAND "' generate --threads 1 --quiet --stream --max-tokens 30000 --state '" + state + "'";
  const std::string shell = "{ " + line + " 2>'" + err + "' </dev/null; echo $? >'" + exit + "'; } | head -c 20 >'" + out + "'";
  ASSERT_EQ(std::system(shell.c_str()), 0);
  EXPECT_EQ(text_of(out), "It was a dark night,");
  EXPECT_EQ(text_of(err), "");
  EXPECT_EQ(text_of(exit), "0\n");
  const json j = json::parse(weft("state --json '" + state + "'").out);
  EXPECT_GT(j.at("tokens"), 0);
  EXPECT_LT(j.at("tokens"), 30000);
}

// Where stderr cannot be written, the results on stdout are complete.
TEST(Commands, MessagesThatCannotBeWrittenTakeNoResultWithThem) {
  if (!std::ifstream("/dev/full").good()) GTEST_SKIP() << "no /dev/full";
  const Folder folder;
  const std::string out = (folder.path() / "out").string();
  const auto run = [&](const std::string& line) {
    const int status = std::system(("'" WEFT_COMMAND "' " + line + " >'" + out + "' 2>/dev/full </dev/null").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  EXPECT_EQ(run("generate --threads 1 --max-tokens 3"), 0);
  EXPECT_EQ(text_of(out), generate("--max-tokens 3").out);
  EXPECT_EQ(run("perplexity --threads 1 --max-tokens 20 --json"), 0);
  EXPECT_EQ(json::parse(text_of(out)).at("tokens"), 19);
  EXPECT_EQ(run("plan --context 0"), 2);
  EXPECT_EQ(run("plan --model /no/such/model"), 1);
}

TEST(Generate, AStateThatCannotBeSavedIsRefusedBeforeTheWork) {
  const Result r = generate("--max-tokens 3 --state /no/such/folder/x");
  EXPECT_EQ(r.exit, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_TRUE(has(r.err, "/no/such/folder/x: cannot be written: ")) << r.err;
}

TEST(Generate, NothingIsSaidOfWhatDidNotHappen) {
  const Result none = generate("--max-tokens 0");
  EXPECT_TRUE(has(none.err, "decode       0 tokens\n")) << none.err;
  const std::string few = "--max-tokens 3 --draft 2";
  EXPECT_TRUE(has(generate(few).err, "draft        0 tokens proposed\n")) << generate(few).err;
  EXPECT_TRUE(json::parse(generate(few + " --json").out).at("draft").at("speed_up").is_null());
}

TEST(Generate, HelpSaysWhatOptionsTake) {
  const std::string help = weft("generate --help", "COLUMNS=1000").out;
  EXPECT_FALSE(has(help, "TEXT ...")) << "one text after each --prompt: " << help;
  for (const char* part :
       {"Repeat the option for several texts", "prompts three to six times the time. The cpu is always that exact"})
    EXPECT_TRUE(has(help, part)) << part << " in\n" << help;
}

TEST(Generate, AStateFileContinuesTheText) {
  const Folder folder;
  const std::string file = (folder.path() / "story.state").string(), state = "--temperature 0 --state '" + file + "' ";
  const std::string whole = generate("--prompt 'The ship' --temperature 0 --max-tokens 30").out;
  const Result one = generate(state + "--prompt 'The ship' --max-tokens 12");
  ASSERT_EQ(one.exit, 0) << one.err;
  const Result two = generate(state + "--max-tokens 18");
  EXPECT_TRUE(has(two.err, "remembered")) << two.err;
  EXPECT_EQ(one.out.substr(0, one.out.size() - 1) + two.out, whole);
  const json j = json::parse(weft("state --json '" + file + "'").out);
  EXPECT_EQ(j.at("ids").size(), j.at("tokens").get<size_t>() + 1) << "the last token was written, not read";
  EXPECT_EQ(j.at("kv"), "8v4");
  const Result text = weft("state '" + file + "'");
  for (const char* part : {"all checksums match", "gated delta", "weft1-8", "1 to be appended", "layer 7 codes of V"})
    EXPECT_TRUE(has(text.out, part)) << part << " in\n" << text.out;
  // Another format, another model, damage: an error message, exit status 1, and an unchanged file.
  const std::string before = text_of(file);
  const Result other = generate(state + "--kv 4v4 --max-tokens 1");
  EXPECT_EQ(other.exit, 1);
  EXPECT_TRUE(has(other.err, "is of another kind: attention")) << other.err;
  const Result golden = generate(state + "--max-tokens 1 --model '" WEFT_SOURCE_DIR "/cases/golden/models/qwen3_5'");
  EXPECT_EQ(golden.exit, 1);
  EXPECT_EQ(text_of(file), before);
  std::string bad = before;
  bad[bad.size() / 2] ^= 1;
  folder.write("story.state", bad);
  const Result damaged = generate(state + "--max-tokens 1");
  EXPECT_EQ(damaged.exit, 1);
  EXPECT_TRUE(has(damaged.err, "is damaged")) << damaged.err;
  EXPECT_EQ(text_of(file), bad);
  EXPECT_EQ(weft("state '" + file + "'").exit, 1);
}

TEST(Generate, StopsAtAStringOrASentence) {
  const std::string text = generate("--max-tokens 60 --temperature 0").out, part = text.substr(text.size() / 2, 6);
  const Result cut = generate("--max-tokens 60 --temperature 0 --stop 'not in this text' --stop '" + part + "'");
  EXPECT_EQ(cut.exit, 0) << cut.err;
  EXPECT_EQ(cut.out, text.substr(0, text.find(part)) + "\n");
  EXPECT_EQ(json::parse(generate("--max-tokens 60 --temperature 0 --json --stop '" + part + "'").out).at("finish"), "stop");
  const json sentence = json::parse(generate("--max-tokens 200 --until-sentence 10 --json").out);
  EXPECT_EQ(sentence.at("finish"), "sentence");
  EXPECT_GE(sentence.at("generated_tokens"), 10);
  EXPECT_NE(std::string(".!?\"')").find(sentence.at("text").get<std::string>().back()), std::string::npos) << sentence.at("text");
}

TEST(Generate, SamplingOptions) {
  const auto ids = [](const std::string& how) { return json::parse(generate("--max-tokens 30 --json " + how).out).at("ids"); };
  EXPECT_EQ(ids("--min-p 1"), ids("--temperature 0")) << "the most probable token alone is left";
  EXPECT_EQ(ids("--min-p 0 --repetition-penalty 1 --presence-penalty 0 --frequency-penalty 0"), ids(""));
  const json strict = ids("--temperature 0 --presence-penalty 100");
  EXPECT_EQ(std::set<int>(strict.begin(), strict.end()).size(), strict.size()) << "no token twice";
  EXPECT_EQ(ids("--temperature 0 --frequency-penalty 100"), strict) << "every token is written once";
  EXPECT_NE(ids("--temperature 0 --frequency-penalty 1"), ids("--temperature 0 --presence-penalty 1"));
  EXPECT_NE(ids("--temperature 0 --repetition-penalty 1.5"), ids("--temperature 0"));
}

// The sampler draws once per token with and without drafts, and rejected tokens are rolled back.
TEST(Generate, DraftsDoNotChangeTheText) {
  for (const char* how : {"--temperature 0", "--seed 5"}) {
    const std::string line = std::string("--prompt 'the sea, the sea, the sea, the sea' --max-tokens 60 ") + how;
    const Result plain = generate(line), draft = generate(line + " --draft 5");
    EXPECT_EQ(draft.out, plain.out) << how;
    EXPECT_TRUE(has(draft.err, "proposed tokens accepted")) << draft.err;
  }
  const json j =
      json::parse(generate("--prompt 'the sea, the sea, the sea, the sea' --max-tokens 60 --temperature 0 --draft 5 --json").out);
  EXPECT_GT(j.at("draft").at("proposed"), 0);
  EXPECT_GE(j.at("draft").at("proposed"), j.at("draft").at("accepted"));
  EXPECT_EQ(j.at("generated_tokens"), 60);
}

TEST(Generate, APrefixStoreReadsSharedBeginningsOnce) {
  const Folder folder;
  const std::string text = text_of(std::filesystem::path(WEFT_SOURCE_DIR) / "models/weft-11m/valid-excerpt.txt").substr(0, 2500);
  const std::string a = folder.write("a", text).string();
  const std::string b =
      folder.write("b", text.substr(0, 2000) + " And now for something else, said the captain; we sail on.").string();
  const std::string line = "--temperature 0 --max-tokens 6 --json --file '" + a + "' --file '" + b + "'";
  const json plain = json::parse(generate(line).out),
             stored = json::parse(generate(line + " --prefix-store 64M --prefix-every 64").out);
  ASSERT_EQ(stored.size(), 2u);
  EXPECT_EQ(stored[0].at("restored_tokens"), 0);
  EXPECT_GT(stored[1].at("restored_tokens"), 64);
  EXPECT_EQ(stored[1].at("restored_tokens").get<int>() % 64, 0);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(stored[i].at("ids"), plain[i].at("ids")) << i;
  // A second turn begins where the first one ended.
  const Result turns = generate("--max-tokens 6 --prefix-store 64M --prefix-storage int8 --file '" + a + "' --turn ' And then'");
  EXPECT_EQ(turns.exit, 0);
  for (const char* part : {"prompt tokens restored", "recurrent states in int8, relative drift"})
    EXPECT_TRUE(has(turns.err, part)) << part << " in\n" << turns.err;
}

TEST(Perplexity, JsonHasItsKeys) {
  const Result r = weft("perplexity" + kOne + "--kv f16 --max-tokens 101 --json");
  ASSERT_EQ(r.exit, 0) << r.err;
  const json j = json::parse(r.out);
  for (const char* key : {"perplexity", "nll", "tokens", "kv", "bytes_per_token"}) EXPECT_TRUE(j.contains(key)) << key;
  EXPECT_EQ(j.at("tokens"), 100);
  EXPECT_EQ(j.at("bytes_per_token"), 2048);
  EXPECT_NEAR(j.at("perplexity").get<double>(), std::exp(j.at("nll").get<double>()), 1e-9);
}

TEST(Perplexity, ComparesFormats) {
  const Result r = weft("perplexity" + kOne + "--compare f16 8v4 2v2 --max-tokens 200 --context 64 --stride 32");
  ASSERT_EQ(r.exit, 0) << r.err;
  for (const char* part : {"perplexity", "bytes/token", "tokens in 1 GB", "tokens/s", "f16", "8v4", "2v2", "784"})
    EXPECT_TRUE(has(r.out, part)) << part << " in\n" << r.out;
  const json j = json::parse(weft("perplexity" + kOne + "--compare f16 8v4 --max-tokens 50 --json").out);
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[1].at("kv"), "8v4");
}

TEST(Perplexity, ABarWithTheTimeLeftOnATerminalThatCanErase) {
  if (!has_terminal()) GTEST_SKIP() << "no terminal can be made";
  const std::string line = "'" WEFT_COMMAND "' perplexity --threads 1 --max-tokens 101";
  const std::string seen = on_terminal(line);
  EXPECT_TRUE(has(seen, "100/100 tokens with kv 8v4, 0 s left")) << seen;
  EXPECT_FALSE(has(on_terminal(line, "TERM=dumb"), "\x1b["));
}

TEST(Plan, CountsBytes) {
  const json j = json::parse(weft("plan --context 1000 --batch 3 --kv 4v4 --json").out);
  EXPECT_EQ(j.at("recurrent_state"), 3 * 6 * 4 * 128 * 128 * 4);
  EXPECT_EQ(j.at("conv_state"), 3 * 6 * 3 * 1024 * 4);
  EXPECT_EQ(j.at("kv_cache"), 3 * 16 * 64 * 2 * 2 * 132);
  EXPECT_EQ(j.at("bytes_per_token"), 2 * 2 * 132);
  EXPECT_EQ(j.at("total").get<int64_t>(), j.at("weights").get<int64_t>() + j.at("recurrent_state").get<int64_t>() +
                                              j.at("conv_state").get<int64_t>() + j.at("kv_cache").get<int64_t>() +
                                              j.at("scratch").get<int64_t>());
  EXPECT_EQ(j.at("records"), 0);
  EXPECT_EQ(j.at("prompt"), 1000);
  const json pieces = json::parse(weft("plan --context 1000 --batch 3 --kv 4v4 --prompt 32 --json").out);
  EXPECT_EQ(pieces.at("prompt"), 32);
  EXPECT_LT(pieces.at("scratch").get<int64_t>(), j.at("scratch").get<int64_t>());
  EXPECT_EQ(pieces.at("kv_cache"), j.at("kv_cache"));
  const json r = json::parse(weft("plan --context 1000 --batch 3 --kv 4v4 --rollback 4 --json").out);
  EXPECT_EQ(r.at("recurrent_state"), 2 * j.at("recurrent_state").get<int64_t>());
  EXPECT_EQ(r.at("conv_state"), 3 * 6 * (3 + 4) * 1024 * 4);
  EXPECT_EQ(r.at("records"), 3 * 48 * 6 * (2 * 128 + 4 * 129) * 4);
  // A plan for more memory than the machine has allocates none.
  const Result huge = weft("plan --context 2000000000 --batch 2 --kv f32");
  EXPECT_EQ(huge.exit, 0) << huge.err;
  EXPECT_TRUE(has(huge.out, "TB")) << huge.out;
}

TEST(Plan, SaysWhatIsThere) {
  const json j = json::parse(weft("plan --json").out);
  EXPECT_GT(j.at("available").get<int64_t>(), 0);
  EXPECT_LE(j.at("available").get<int64_t>(), total_memory());
  EXPECT_LE(json::parse(weft("plan --json --memory 50M").out).at("available"), 50000000);
  EXPECT_EQ(json::parse(weft("plan --json --memory 1").out).at("available"), 0);
  EXPECT_TRUE(has(weft("plan").out, "available now"));
}

TEST(Memory, ALimitIsKept) {
  const Result r = weft("speed --memory 4M --prompt 512 --decode 0");
  EXPECT_EQ(r.exit, 1);
  EXPECT_TRUE(has(r.err, "weft: state and scratch want ")) << r.err;
  EXPECT_TRUE(has(r.err, " are available (--memory 4.00 MB); lower --batch, --context, --prompt or --kv")) << r.err;
  EXPECT_EQ(weft("generate --memory 1G --max-tokens 1 --prompt It").exit, 0);
  const Result prompt = weft("generate --memory 1M --max-tokens 1 --prompt It");
  EXPECT_EQ(prompt.exit, 1);
  EXPECT_EQ(prompt.out, "");
  EXPECT_TRUE(has(prompt.err, "memory: weights 21.1 MB (mapped), state 1.65 MB + 784 bytes per token; ")) << prompt.err;
  EXPECT_EQ(weft("speed --memory lots").exit, 2);
}

TEST(Memory, AStateFileIsCheckedBeforeItIsRestored) {
  if (weft("generate --memory 8M --prompt It --kv f32 --max-tokens 1").exit != 0)
    GTEST_SKIP() << "this build holds more than 8 MB without a state file";
  const Folder folder;
  std::string text;
  for (int i = 0; i < 500; ++i) text += "The ship sailed on. ";
  folder.write("long.txt", text);
  const std::string state = " --kv f32 --max-tokens 1 --state '" + (folder.path() / "a.state").string() + "'";
  ASSERT_EQ(weft("generate --file '" + (folder.path() / "long.txt").string() + "'" + state).exit, 0);
  const Result r = weft("generate --memory 8M --prompt It" + state);
  EXPECT_EQ(r.exit, 1);
  EXPECT_TRUE(has(r.err, "weft: state and scratch want ")) << r.err;
  EXPECT_FALSE(has(r.err, "tokens remembered")) << r.err;
}

TEST(Warnings, AreToldBeforeTheWork) {
  const Result r = weft("plan --model '" WEFT_SOURCE_DIR "/cases/golden/models/tied/head_differs_flat'");
  EXPECT_EQ(r.exit, 0);
  EXPECT_EQ(r.err.rfind("weft: warning: config.json says that lm_head.weight is the embedding", 0), 0u) << r.err;
  EXPECT_EQ(weft("plan --model '" WEFT_SOURCE_DIR "/cases/golden/models/tied/outer_false_nested_true'").err, "");
}

// More memory than any machine has is refused before anything is allocated.
TEST(Memory, MoreThanThereIsIsRefused) {
  const Result speed = weft("speed --batch 1048576 --prompt 16 --decode 4 --context 1000000");
  EXPECT_EQ(speed.exit, 1);
  EXPECT_TRUE(has(speed.err, "want 824 TB of memory beside the weights, and ")) << speed.err;
  EXPECT_TRUE(has(speed.err, " are available; lower --batch, --context, --prompt or --kv")) << speed.err;
  if (json::parse(weft("plan --context 16777216 --batch 3 --kv f32 --json").out).at("total") > total_memory()) {
    const Result state = weft("bench state --long 16777216 --kv f32");
    EXPECT_EQ(state.exit, 1);
    EXPECT_TRUE(has(state.err, "want 206 GB of memory beside the weights, and ")) << state.err;
    EXPECT_TRUE(has(state.err, "lower --long or --kv")) << state.err;
  }
}

TEST(Commands, BadCommandLinesExitWithTwo) {
  for (const char* line : {"generate --kv 9v9",
                           "generate --kv 8v4,5:f16",
                           "perplexity --kv 0:f16",
                           "plan --kv ''",
                           "generate --top-p 2",
                           "generate --top-p 0",
                           "generate --temperature -1",
                           "generate --temperature nan",
                           "generate --seed -1",
                           "generate --seed 18446744073709551616",
                           "generate --seed ''",
                           "generate --model ''",
                           "generate --state ''",
                           "generate --file ''",
                           "perplexity --file ''",
                           "tokenize --model '' x",
                           "generate --max-tokens -3",
                           "generate --backend abacus",
                           "plan --context 0",
                           "plan --context 99999999999999999999",
                           "plan --batch -1",
                           "plan --context 10 --prompt 11",
                           "plan --context 2147483647 --batch 1048576",
                           "plan --context 2147483647 --batch 65536",
                           "perplexity --context 4 --stride 5",
                           "perplexity --compare f16 nonsense",
                           "perplexity --kv f16 --compare f16",
                           "generate --prompt a --file b",
                           "generate --draft 16",
                           "generate --stop ''",
                           "generate --stop \"$(printf '\\377')\"",
                           "generate --min-p 1.5",
                           "generate --repetition-penalty 0",
                           "generate --presence-penalty nan",
                           "generate --frequency-penalty 101",
                           "generate --until-sentence -1",
                           "generate --state f --until-sentence 3",
                           "generate --state f --stop x",
                           "generate --prefix-store many",
                           "generate --prefix-store -1",
                           "generate --prefix-store 99999999999999999999",
                           "generate --prefix-store 9999999999G",
                           "perplexity --compare f16,4v4",
                           "speed --compare f16,4v4",
                           "generate --prefix-store 1M --prefix-every 100",
                           "generate --prefix-every 128",
                           "generate --prefix-storage int8",
                           "generate --threads 1025",
                           "generate --state f --prefix-store 1M",
                           "generate --state f --prompt a --prompt b",
                           "state"}) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 2) << line << "\n" << r.err;
    EXPECT_NE(r.err, "") << line;
    EXPECT_EQ(r.out, "") << line;
  }
}

TEST(Commands, RefusalsNameWhatWasWanted) {
  const auto err = [](const char* line) { return weft(line).err; };
  EXPECT_TRUE(has(err("generate --top-p 0"), "--top-p: got '0', wanted a number: more than 0, at most 1"));
  EXPECT_TRUE(has(err("generate --temperature nan"), "--temperature: got 'nan', wanted a number: 0 to 100"));
  EXPECT_TRUE(has(err("generate --max-tokens -3"), "--max-tokens: got '-3', wanted a whole number from 0 to 1073741824"));
  EXPECT_TRUE(has(err("plan --context 0x10"), "--context: got '0x10', wanted a whole number from 1 to 2147483647"));
  EXPECT_TRUE(has(err("check --threads 1025"), "--threads: got '1025', wanted a whole number from 0 to 1024"));
  EXPECT_TRUE(has(err("generate --seed -1"), "--seed: got '-1', wanted a whole number"));
  EXPECT_TRUE(has(err("generate --prefix-store 99999999999999999999"), "--prefix-store: got '99999999999999999999', wanted bytes"));
  for (const char* line : {"perplexity --compare f16,4v4", "speed --compare f16,4v4"}) {
    EXPECT_EQ(err(line).rfind("weft: --compare (formats between spaces): ", 0), 0u) << err(line);
    EXPECT_FALSE(has(err(line), "--kv")) << err(line);
  }
  EXPECT_TRUE(has(err("plan --kv f16,4v4"), "--kv: "));
}

TEST(Commands, EveryNumberThatFitsIsTaken) {
  const auto first = [](const std::string& seed) { return generate("--max-tokens 3 --json --quiet --seed " + seed); };
  EXPECT_EQ(json::parse(first("18446744073709551615").out).at("seed"), UINT64_MAX);
  EXPECT_EQ(json::parse(first("010").out).at("seed"), 10) << "decimal, whatever it begins with";
  EXPECT_EQ(json::parse(generate("--max-tokens 010 --json --quiet").out).at("generated_tokens"), 10);
  EXPECT_EQ(json::parse(weft("plan --context 0100 --batch 08 --json").out).at("context"), 100);
  EXPECT_EQ(json::parse(weft("speed --threads 01 --batch 01 02 --prompt 010 --decode 1 --json").out)[1].at("prompt"), 10);
  EXPECT_EQ(generate("--max-tokens 1 --quiet --turn x --prefix-store 9223372036854775807").exit, 0);
  EXPECT_TRUE(has(generate("--max-tokens 1 --turn x --prefix-store 010M").err, " of 10.0 MB"));
  EXPECT_TRUE(has(generate("--max-tokens 1 --turn x --prefix-store 2GiB").err, " of 2.15 GB"));
}

TEST(Commands, BadFilesExitWithOne) {
  const Folder folder;
  const std::filesystem::path shipped = std::filesystem::path(WEFT_SOURCE_DIR) / "models/weft-11m";
  const std::string model = " --model '" + folder.path().string() + "'";
  const auto expect_refused = [&](const std::string& line, const char* part) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 1) << line << "\n" << r.err;
    EXPECT_TRUE(has(r.err, part)) << line << "\n" << r.err;
    EXPECT_EQ(r.out, "") << line;
  };
  for (const char* command : {"generate", "perplexity --file /dev/null", "plan"}) {
    expect_refused(command + model, "config.json");
    expect_refused(std::string(command) + " --model /no/such/directory", "config.json");
  }
  folder.write("config.json", text_of(shipped / "config.json"));
  expect_refused("generate" + model, "model.safetensors");
  folder.write("model.safetensors", "not a checkpoint");
  expect_refused("generate" + model, "model.safetensors");
  expect_refused("state /no/such/file", "/no/such/file");
  expect_refused("state /dev/null", "/dev/null");
  expect_refused("perplexity --file /no/such/file", "/no/such/file");
  expect_refused("perplexity --file /dev/null", "/dev/null");
  expect_refused("generate --file /no/such/file", "/no/such/file");
}

}  // namespace
}  // namespace weft
