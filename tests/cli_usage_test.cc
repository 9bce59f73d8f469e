// What people meet first: errors in one style, piped prompts, mistakes with models, --json with -o, readers that leave.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tests/support/command.h"
#include "tests/support/folder.h"

namespace weft {
namespace {

using nlohmann::json;

const std::string kShipped = WEFT_SOURCE_DIR "/models/weft-11m";

Result generate(const std::string& arguments, const std::string& input = "/dev/null") {
  return weft("generate --threads 1 --quiet " + arguments, "", input);
}

// Runs a script of bash in which $WEFT is the command.
Result bash(const std::string& script) {
  const Folder folder;
  const std::string file = folder.write("script", script).string(), out = (folder.path() / "out").string();
  const int status = std::system(("WEFT='" WEFT_COMMAND "' bash '" + file + "' >'" + out + "' </dev/null").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text_of(out), ""};
}

TEST(Usage, ErrorsAreSentencesInOneStyle) {
  const std::pair<const char*, const char*> cases[] = {
      {"gen", "there is no command 'gen'; did you mean generate?"},
      {"genrate", "there is no command 'genrate'; did you mean generate?"},
      {"sing", "there is no command 'sing'; weft --help lists all commands"},
      {"--verson", "there is no option '--verson' before a command; did you mean --version?"},
      {"generate hello", "generate takes no argument 'hello'; did you mean --prompt 'hello'?"},
      {"generate --threads 1 zebra apple", "generate takes no arguments 'zebra' 'apple'; did you mean --prompt 'zebra apple'?"},
      {"plan zebra apple", "plan takes no arguments 'zebra' 'apple'; weft plan --help shows what there is"},
      {"generate --promt x", "generate has no option --promt; did you mean --prompt?"},
      {"generate --max_tokens 3", "generate has no option --max_tokens; did you mean --max-tokens?"},
      {"generate --temp 0", "generate has no option --temp; did you mean --temperature?"},
      {"generate --nonsense", "generate has no option --nonsense; weft generate --help shows what there is"},
      {"bench --json x.json", "bench takes no argument 'x.json'; did you mean --json -o x.json?"},
      {"check --backend cdua", "--backend: got 'cdua', wanted one of reference, cpu, cuda, vulkan; did you mean cuda?"},
      {"check --op l2norm", "--op: got 'l2norm'; did you mean l2_norm?"},
      {"check --tier quick", "--tier: got 'quick', wanted one of fast, full"},
      {"generate --seed", "--seed needs a value"},
      {"devices --json=false", "--json takes no value"},
      {"generate --quiet=0", "--quiet takes no value"},
      {"generate --seed 'a excludes b'", "--seed: got 'a excludes b', wanted a whole number from 0 to 18446744073709551615"},
      {"generate --seed 1 --seed 2", "--seed is given 2 times, wanted once"},
      {"generate --prompt a --file b", "--prompt and --file exclude each other, wanted one of them"},
      {"generate --prefix-every 64", "--prefix-every does nothing without --prefix-store"},
      {"plan -o x", "--output does nothing without --json"},
      {"explain", "explain needs --op; weft explain --help shows examples"},
      {"diff a", "diff needs the argument 'new'; weft diff --help shows examples"},
      {"generate --kv q4_0",
       "--kv: 'q4_0' is not a recipe for heads of size 128, wanted <k>v<v> with 2 to 8, f32, f16 or bf16 on each side (8v4, "
       "f16v4), f32, f16 or bf16 for both, "
       "aura<k>v<v> of 2 to 4, tq4, tqhb5, tqhb6 or tqhb8; did you mean 4v4?"},
      {"diff a b --threshold abc", "--threshold: got 'abc', wanted a number: 1 to 1000"},
  };
  for (const auto& [line, sentence] : cases) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 2) << line;
    EXPECT_EQ(r.out, "") << line;
    EXPECT_EQ(r.err, "weft: " + std::string(sentence) + "\n") << line;
  }
}

TEST(Usage, WithoutACommandThereIsShortHelp) {
  const Result r = weft("");
  EXPECT_EQ(r.exit, 2);
  EXPECT_EQ(r.out, "");
  for (const char* part : {"weft generate -p", "weft --help", "Commands: devices, ops, check,"})
    EXPECT_TRUE(has(r.err, part)) << r.err;
  EXPECT_LT(std::count(r.err.begin(), r.err.end(), '\n'), 15);
  EXPECT_EQ(weft("help generate").out, weft("generate --help").out);
  EXPECT_EQ(weft("help").out, weft("--help").out);
}

TEST(Usage, ShortOptions) {
  EXPECT_EQ(generate("-m '" + kShipped + "' -p 'The ship' -n 3").out,
            generate("--model '" + kShipped + "' --prompt 'The ship' --max-tokens 3").out);
  EXPECT_EQ(json::parse(weft("perplexity -n 20 --json").out).at("tokens"), 19);
}

TEST(Usage, OptionsThatDoNothingAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"generate --exact", "--exact"},
      {"plan --exact --backend reference", "--exact"},
      {"generate --isa scalar --backend reference", "--isa"},
      {"check --backend reference --threads 2", "--threads"},
      {"bench --backend reference --isa scalar", "--isa"},
      {"explain --op l2_norm --backend reference --threads 2", "--threads"},
      {"generate --temperature 0 --top-p 0.5", "--top-p"},
      {"generate --temperature 0 --top-k 5", "--top-k"},
      {"generate --temperature 0 --min-p 0.1", "--min-p"},
      {"generate --temperature 0 --seed 3", "--seed"},
      {"generate --until-sentence 200", "--until-sentence"},
      {"generate --prefix-store 64M", "--prefix-store"},
      {"generate --json --stream", "--stream"},
      {"generate --json --echo", "--echo"},
      {"check --json --verbose", "--verbose"},
      {"perplexity --context 0 --stride 5", "--stride"},
      {"speed --prompt 100 --context 50", "--context"},
      {"tokenize --ids --json x", "--ids"},
      {"tokenize --ids --decode 1", "--ids"},
      {"devices -o x", "--output"},
  };
  for (const auto& [line, option] : cases) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 2) << line;
    EXPECT_EQ(r.out, "") << line;
    EXPECT_EQ(r.err.rfind("weft: " + std::string(option), 0), 0u) << line << ": " << r.err;
    EXPECT_TRUE(has(r.err, "does nothing")) << line << ": " << r.err;
  }
  for (const char* line : {"ops --schema --cases", "ops --members --cases", "ops --members --markdown", "ops --json --markdown"})
    EXPECT_EQ(weft(line).exit, 2) << line;
  EXPECT_EQ(weft("plan --exact --backend best --json").exit, 0) << "which backend that is depends on the machine";
}

TEST(Prompt, PipedTextIsThePrompt) {
  const Folder folder;
  const std::string wanted = generate("-n 4 -p 'The ship'").out;
  EXPECT_EQ(generate("-n 4", folder.write("exact", "The ship").string()).out, wanted);
  EXPECT_EQ(generate("-n 4", folder.write("line", "The ship\n").string()).out, wanted) << "as echo writes it";
  EXPECT_EQ(generate("-n 4", folder.write("dos", "The ship\r\n").string()).out, wanted);
  EXPECT_EQ(generate("-n 4 --file -", folder.write("line", "The ship\n").string()).out, wanted);
  const std::string two = generate("-n 4", folder.write("two", "The ship\n\n").string()).out;
  EXPECT_EQ(two.rfind("The ship\n", 0), 0u) << "only one line feed is left out: " << two;
  EXPECT_EQ(bash("echo 'The ship' | $WEFT generate --threads 1 --quiet -n 4").out, wanted);
  EXPECT_EQ(generate("-n 4 -p 'The ship'", folder.write("other", "other").string()).out, wanted) << "--prompt wins";
}

TEST(Prompt, NothingPipedMeansTheDefaultPrompt) {
  const std::string wanted = generate("-n 2 -p 'It was a dark night, and the'").out;
  EXPECT_EQ(generate("-n 2").out, wanted);
  EXPECT_EQ(bash("$WEFT generate --threads 1 --quiet -n 2 <&-").out, wanted) << "closed standard input";
  EXPECT_EQ(bash("$WEFT generate --threads 1 --quiet -n 2 0>/dev/null").out, wanted) << "as nohup leaves it";
  EXPECT_EQ(bash("true | $WEFT generate --threads 1 --quiet -n 2").out, wanted);
}

TEST(Prompt, PipedTextContinuesAState) {
  const Folder folder;
  const std::string state = " --temperature 0 --state '" + (folder.path() / "s").string() + "' ";
  ASSERT_EQ(generate("-n 3 -p 'The ship'" + state).exit, 0);
  const Result next = generate("-n 3" + state, folder.write("next", " sailed").string());
  EXPECT_EQ(next.out.rfind(" sailed", 0), 0u) << next.out << next.err;
}

TEST(Prompt, PipesAreFiles) {
  const std::string wanted = generate("-n 4 -p 'The ship'").out;
  const Result substituted = bash("$WEFT generate --threads 1 --quiet -n 4 --file <(printf 'The ship')");
  EXPECT_EQ(substituted.out, wanted);
  EXPECT_EQ(bash("$WEFT tokenize --ids --file <(printf 'The old house') 2>/dev/null").out,
            weft("tokenize --ids 'The old house'").out);
  EXPECT_EQ(bash("$WEFT generate --threads 1 --quiet -n 4 --file /dev/stdin < <(printf 'The ship')").out, wanted);
  EXPECT_EQ(bash("$WEFT generate --threads 1 --quiet -n 4 --file <(echo 'The ship')").out, wanted) << "without the last line feed";
  const Folder folder;
  const std::string pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(bash("{ sleep 0.3; printf 'The '; sleep 0.2; printf 'ship'; } >'" + pipe +
                 "' & $WEFT generate --threads 1 --quiet -n 4 --file '" + pipe + "'; wait")
                .out,
            wanted);
  EXPECT_EQ(bash("$WEFT tokenize --ids --file <(true) 2>/dev/null").out, "\n") << "an empty pipe ends at once";
}

// Standard input that stays open and silent, as under some schedulers.
TEST(Prompt, WaitingForAPipeIsSaid) {
  const Folder folder;
  const std::string pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int kept = ::open(pipe.c_str(), O_RDWR);
  ASSERT_GE(kept, 0);
  // Ends the command when the sentence is there.
  const auto says = [&](const std::string& arguments, const std::string& sentence) {
    const std::string err = "'" + (folder.path() / "err").string() + "'";
    return bash("timeout 60 $WEFT generate --threads 1 -n 1 " + arguments + " 2>" + err + " & for i in {1..600}; do grep -qsF '" +
                sentence + "' " + err + " && break; sleep 0.1; done; kill $!; wait; cat " + err)
        .out;
  };
  const std::string standard = "weft: reading the prompt from standard input until its end (Ctrl-D)\n",
                    named = "weft: waiting for text from " + pipe + "\n";
  EXPECT_EQ(says("<'" + pipe + "'", standard.substr(0, standard.size() - 1)), standard);
  EXPECT_EQ(says("--file '" + pipe + "'", named.substr(0, named.size() - 1)), named);
  EXPECT_EQ(weft("generate --threads 1 --quiet -n 1 -p x", "timeout 60", pipe).exit, 0) << "it is read only where it is the prompt";
  ::close(kept);
}

TEST(Prompt, LongOnesAreRepeatedOnlyWhenAsked) {
  const Folder folder;
  std::string text;
  while (text.size() < 3000) text += "The ship sailed on. \xC3\xA9";
  const auto first_characters = [&](size_t count) {
    size_t at = 0;
    for (; at < text.size() && count > 0; --count) do
        ++at;
      while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
    return text.substr(0, at);
  };
  const std::string allowed = first_characters(2000), longer = first_characters(2001);
  EXPECT_EQ(generate("-n 2 --file '" + folder.write("a", allowed).string() + "'").out.rfind(allowed, 0), 0u);
  const std::string file = folder.write("b", longer).string();
  const Result r = weft("generate --threads 1 -n 2 --file '" + file + "'");
  EXPECT_LT(r.out.size(), 100u) << r.out;
  EXPECT_TRUE(has(r.err, "weft: the prompt has more than 2000 characters and is not repeated; --echo repeats it\n")) << r.err;
  EXPECT_EQ(generate("-n 2 --echo --file '" + file + "'").out, longer + r.out);
  EXPECT_EQ(json::parse(generate("-n 2 --json --file '" + file + "'").out).at("prompt"), longer);
}

TEST(Models, FirstMistakesGetASentenceThatHelps) {
  const Folder folder;
  const auto expect_refused = [&](const std::string& model, const std::vector<std::string>& parts) {
    for (const char* command : {"generate", "plan", "perplexity", "speed", "tokenize x", "bench state"}) {
      const Result r = weft(std::string(command) + " -m '" + model + "'");
      EXPECT_EQ(r.exit, 1) << command << r.err;
      EXPECT_EQ(r.out, "") << command;
      for (const std::string& part : parts) EXPECT_TRUE(has(r.err, part)) << command << ": " << r.err;
    }
  };
  expect_refused("https://huggingface.co/Qwen/Qwen3.5-0.8B", {"hf download Qwen/Qwen3.5-0.8B --local-dir Qwen3.5-0.8B"});
  expect_refused("Qwen/Qwen3.5-0.8B", {"hf download Qwen/Qwen3.5-0.8B --local-dir Qwen3.5-0.8B", "then --model Qwen3.5-0.8B"});
  expect_refused("/no/such/folder", {"/no/such/folder: there is no such folder, wanted a folder with config.json"});
  expect_refused(kShipped + "/config.json", {"config.json: is a file, wanted a folder", "did you mean --model " + kShipped + "?"});
  expect_refused(folder.write("model-q4.gguf", "GGUF\3").string(), {"model-q4.gguf: ends at byte 5, inside its header"});
  expect_refused(folder.path().string(),
                 {"this folder has no config.json, but a GGUF file", "--model " + folder.path().string() + "/model-q4.gguf"});
  const Folder cloned;
  for (const char* name : {"config.json", "tokenizer.json"}) cloned.write(name, text_of(kShipped + "/" + name));
  cloned.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 21076256\n");
  const Folder partly;  // a file that Weft does not read
  partly.write("consolidated.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_FALSE(has(weft("plan -m '" + partly.path().string() + "'").err, "LFS"));
  expect_refused(cloned.path().string(), {"model.safetensors: is a Git LFS pointer, not the file itself",
                                          "git -C " + cloned.path().string() + " lfs pull"});
}

TEST(Check, RandomCalls) {
  const std::string line = "check --op l2_norm,kv_rotate --random 3 ";
  const Result r = weft(line + "--seed 5 --backend cpu --json");
  ASSERT_EQ(r.exit, 0) << r.err;
  EXPECT_EQ(json::parse(r.out).at("passed"), 6);
  EXPECT_EQ(json::parse(weft(line + "--seed 5 --backend cpu --json").out).at("rows"), json::parse(r.out).at("rows"));
  EXPECT_NE(json::parse(weft(line + "--seed 6 --backend cpu --json").out).at("rows"), json::parse(r.out).at("rows"));
  for (const char* bad : {"--seed -1", "--seed 99999999999999999999", "--backend reference", "--tier full"})
    EXPECT_EQ(weft(line + bad).exit, 2) << bad;
  EXPECT_EQ(weft("check --seed 2").exit, 2);
}

TEST(Json, OutputsOverwriteNoInput) {
  const Folder folder;
  const std::string state = (folder.path() / "a.state").string(), prompt = (folder.path() / "p.txt").string();
  ASSERT_EQ(generate("-n 2 --state '" + state + "'").exit, 0);
  const std::string before = text_of(state);
  for (const std::string& name : {state, (folder.path() / "." / "a.state").string(), state + ".weft-lock"}) {
    const Result r = weft("generate -p hello -n 2 --state '" + state + "' --json -o '" + name + "'");
    EXPECT_EQ(r.exit, 2) << name << r.err;
    EXPECT_TRUE(has(r.err, "weft: -o " + name + " would overwrite ")) << r.err;
  }
  EXPECT_EQ(text_of(state), before);
  EXPECT_FALSE(std::filesystem::exists(state + ".weft-lock"));
  folder.write("p.txt", "The ship");
  std::filesystem::create_hard_link(prompt, folder.path() / "q.txt");
  for (const std::string& line : {std::string("tokenize"), std::string("generate -n 1"), std::string("perplexity")}) {
    const Result r = weft(line + " --file '" + prompt + "' --json -o '" + (folder.path() / "q.txt").string() + "'");
    EXPECT_EQ(r.exit, 2) << line << r.err;
  }
  EXPECT_EQ(text_of(prompt), "The ship");
}

TEST(Json, IsTheSameEverywhere) {
  const Folder folder;
  const std::string state = (folder.path() / "s.state").string(), report = (folder.path() / "bench.json").string();
  ASSERT_EQ(generate("-n 1 --state '" + state + "'").exit, 0);
  const Result timed = weft("bench --op l2_norm --shape T=3 --backend cpu --repeat 2 --threads 1 --json");
  ASSERT_EQ(timed.exit, 0) << timed.err;
  EXPECT_EQ(json::parse(timed.out).at("rows").size(), 1u);
  EXPECT_TRUE(json::parse(timed.out).at("load").is_number());
  EXPECT_TRUE(has(timed.err, "l2_norm shape on cpu")) << "lines for people go to stderr";
  folder.write("bench.json", timed.out);
  const std::string file = (folder.path() / "out.json").string();
  for (const std::string& line :
       {std::string("devices"), std::string("ops"), std::string("ops --schema"), std::string("plan"), std::string("tokenize x"),
        "state '" + state + "'", std::string("explain --op l2_norm"), "diff '" + report + "' '" + report + "'",
        std::string("check --backend reference --op l2_norm --case tokens")}) {
    const Result out = weft(line + " --json"), written = weft(line + " --json -o '" + file + "'");
    EXPECT_EQ(out.exit, 0) << line << out.err;
    EXPECT_EQ(written.exit, 0) << line << written.err;
    EXPECT_EQ(written.out, "") << line;
    json there = json::parse(text_of(file)), here = json::parse(out.out);
    there.erase("available"), here.erase("available");  // of `plan`: free memory changes from call to call
    EXPECT_EQ(there, here) << line;
    EXPECT_EQ(text_of(file).back(), '\n') << line;
    EXPECT_EQ(json::parse(out.out).at("schema"), 1) << line;
    std::filesystem::remove(file);
    const Result refused = weft(line + " --json --output /no/such/folder/x");
    EXPECT_EQ(refused.exit, 1) << line;
    EXPECT_EQ(refused.err, "weft: cannot write /no/such/folder/x: No such file or directory\n") << line;
  }
  for (const char* line : {"generate --threads 1 -n 1", "perplexity -n 20", "speed --threads 1 --batch 1 --prompt 4 --decode 1"}) {
    const Result r = weft(std::string(line) + " --json -o '" + file + "'");
    EXPECT_EQ(r.out, "") << line;
    EXPECT_TRUE(json::accept(text_of(file))) << line;
  }
}

TEST(Json, ExplainAndDiff) {
  const json explained = json::parse(weft("explain --op short_conv --shape T=40,C=64 --json").out);
  EXPECT_EQ(explained.at("op"), "short_conv");
  EXPECT_EQ(explained.at("shape").at("T"), 40);
  for (const json& backend : explained.at("backends")) {
    EXPECT_EQ(backend.at("refused").is_null(), backend.at("kernel").is_string()) << backend;
    EXPECT_EQ(backend.at("refused").is_null(), backend.at("scratch_bytes").is_number()) << backend;
  }
  const Folder folder;
  const auto report = [&](const char* name, double median, int threads) {
    const json row{{"op", "l2_norm"}, {"case", "c"}, {"backend", "cpu"}, {"kernel", name}, {"median_us", median}, {"mad_us", 1}};
    json only = row;
    only["case"] = name;
    return folder.write(name, json{{"schema", 1}, {"threads", threads}, {"rows", {row, only}}}.dump()).string();
  };
  const std::string before = report("old", 100, 1), after = report("new", 130, 2);
  const Result r = weft("diff --json '" + before + "' '" + after + "'");
  EXPECT_EQ(r.exit, 1) << "slower";
  const json compared = json::parse(r.out);
  EXPECT_EQ(compared.at("slower"), 1);
  EXPECT_EQ(compared.at("single"), 2);
  EXPECT_EQ(compared.at("conditions"), json::parse(R"([{"field": "threads", "old": 1, "new": 2}])"));
  EXPECT_EQ(compared.at("rows").size(), 3u);
  for (const json& row : compared.at("rows"))
    if (row.at("verdict") == "slower") {
      EXPECT_EQ(row.at("case"), "l2_norm c on cpu");
      EXPECT_DOUBLE_EQ(row.at("ratio"), 1.3);
      EXPECT_EQ(row.at("new_kernel"), "new");
    }
}

TEST(Output, AReaderThatHasSeenEnoughIsNoError) {
  for (const char* line : {"ops --json", "ops", "--help", "generate --threads 1 --quiet --stream -n 3000",
                           "check --backend reference --op l2_norm --verbose",
                           "bench --op l2_norm --shape T=3 --repeat 1 --threads 1 --backend cpu,reference"}) {
    const Result r =
        bash(std::string("{ $WEFT ") + line + " 2>&3 | head -c 1 >/dev/null; } 3>&1 | grep -e write -e Broken; $WEFT " + line +
             " 2>/dev/null | head -c 1 >/dev/null; echo ${PIPESTATUS[0]}");
    EXPECT_EQ(r.out, "0\n") << line << ": silent, and a success";
  }
  // A failed check stays failed.
  EXPECT_EQ(bash("$WEFT diff /no/such/file /no/such/file 2>/dev/null | head -c 0; echo ${PIPESTATUS[0]}").out, "1\n");
}

TEST(Bench, NamesABusyMachine) {
  const std::string line = "bench --op l2_norm --shape T=3 --backend cpu --repeat 3 --threads 1 --json";
  const Result r = weft(line, "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD='" WEFT_BUSY_MACHINE "'");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.err, "weft: this machine is busy: load average 1000.0 on ")) << r.err;
  EXPECT_EQ(json::parse(r.out).at("load"), 1000);
}

TEST(Bench, NamesRepeatsThatVary) {
  for (const char* shape : {"T=1", "T=16", "T=256"}) {
    const Result r = weft("bench --op l2_norm --hot --backend cpu --threads 1 --repeat 5 --json --shape " + std::string(shape));
    ASSERT_EQ(r.exit, 0) << r.err;
    const json row = json::parse(r.out).at("rows").at(0);
    const bool wide = row.at("mad_us").get<double>() > 0.1 * row.at("median_us").get<double>();
    EXPECT_EQ(wide, has(r.err, "weft: the repeats of 1 of 1 cases vary by more than 10 % of the median")) << row << r.err;
  }
}

// Data that stays in a cache is read faster than the memory that the roofline counts.
TEST(Bench, ExplainsSharesAboveThePeak) {
  const Result r =
      weft("bench --op gated_delta_rule_decode --shape T=1,N=1,Hk=8,Hv=16,Dk=64,Dv=64 --hot --backend cpu --threads 1 --json");
  ASSERT_EQ(r.exit, 0) << r.err;
  const double percent = json::parse(r.out).at("rows").at(0).at("roofline_pct");
  EXPECT_EQ(percent > 110, has(r.err, "its data comes from caches, the roofline counts memory")) << percent << r.err;
  EXPECT_EQ(percent > 110, has(r.err, "weft: 1 of 1 cases reach more than 110 % of the roofline: ")) << percent << r.err;
  if (percent <= 110) GTEST_SKIP() << "this machine reaches only " << percent << " % of the roofline";
}

}  // namespace
}  // namespace weft
