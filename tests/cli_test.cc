// The command `weft`, run as a process: help, exit codes, JSON, and output with and without a terminal.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/command.h"

namespace {

using nlohmann::json;
using weft::has, weft::Result, weft::slurp, weft::temporary, weft::weft, weft::weft_interrupted;

constexpr const char* kSmall = "--op l2_norm --case tokens";

// The lines of check and bench about backends that `weft devices` lists as unusable.
// Why a device is left out of what nobody named.
std::string why_left_out(const json& device) {
  if (!device["usable"]) return device["why_not"];
  return device["name"].get<std::string>() + " computes on the processor; --backend " + device["backend"].get<std::string>() +
         " uses it";
}

std::string not_usable_lines(const std::string& what) {
  std::string lines;
  const json found = json::parse(weft("devices --json").out);
  for (const json& device : found["devices"])
    if (!device["usable"] || device["software"])
      lines += what + ": " + device["backend"].get<std::string>() +
               (device["device"] > 0 ? " device " + device["device"].dump() : "") + ", " + why_left_out(device) + "\n";
  return lines;
}

TEST(Command, Version) {
  const Result r = weft("--version");
  EXPECT_EQ(r.exit, 0);
  EXPECT_EQ(r.out.rfind("weft ", 0), 0u) << r.out;
}

TEST(Command, AFolderForTemporaryFilesIsMissedOnlyWhereItIsWanted) {
  const std::string nowhere = "TMPDIR=/no/such/folder";
  EXPECT_EQ(weft("--version", nowhere).exit, 0) << weft("--version", nowhere).err;
  const Result r = weft("bench state", nowhere);
  EXPECT_EQ(r.exit, 1);
  EXPECT_TRUE(has(r.err, "no folder for temporary files (")) << r.err;
  EXPECT_TRUE(has(r.err, "name one with --folder")) << r.err;
  EXPECT_EQ(weft("bench state --folder /no/such/folder").err, "weft: --folder /no/such/folder is not a folder\n");
}

TEST(Command, HelpHasExamplesEverywhere) {
  const Result top = weft("--help");
  EXPECT_EQ(top.exit, 0);
  for (const char* name : {"devices", "ops", "check", "bench", "diff", "explain", "generate", "perplexity", "plan", "tokenize"}) {
    EXPECT_TRUE(has(top.out, std::string("  ") + name)) << name;
    const Result help = weft(std::string(name) + " --help");
    EXPECT_EQ(help.exit, 0) << name;
    EXPECT_TRUE(has(help.out, "Examples:")) << name;
    EXPECT_TRUE(has(help.out, std::string("weft ") + name)) << name;
  }
}

TEST(Command, HelpNamesEveryExitStatus) {
  const std::string help = weft("--help", "COLUMNS=1000").out;
  for (const char* part :
       {"0 success", "1 a failed check", "2 an invalid command line", "130 ended by Ctrl-C", "143 by SIGTERM", "129 by SIGHUP"})
    EXPECT_TRUE(has(help, part)) << part;
}

TEST(Command, UsageErrorsExitWithTwo) {
  for (const char* line : {"",
                           "sing",
                           "check --op no_such_op",
                           "check --backend abacus",
                           "check --isa mmx",
                           "check --case no_such_case",
                           "check --tier huge",
                           "check --frobnicate",
                           "bench --op l2_norm --shape T",
                           "bench --op l2_norm --shape Tee=3",
                           "bench --shape T=3",
                           "bench --op l2_norm --shape dtype=f64",
                           "bench --repeat 0 --op l2_norm",
                           "explain",
                           "explain --op no_such_op",
                           "diff",
                           "diff one.json",
                           "diff one.json two.json --threshold nan",
                           "--nosuch",
                           "--nosuch check",
                           "bench --op l2_norm --json -o ''",
                           "check --threads 1025",
                           "bench --json state",
                           "bench --op l2_norm state",
                           "bench --hot --cold --op l2_norm"}) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 2) << "weft " << line << "\n" << r.out << r.err;
    EXPECT_EQ(r.out, "") << line;
    EXPECT_NE(r.err, "") << line;
  }
  EXPECT_TRUE(has(weft("check --op no_such_op").err, "no_such_op"));
  EXPECT_TRUE(has(weft("check --case no_such_case").err, "no_such_case"));
  EXPECT_TRUE(has(weft("check --backend abacus").err, "abacus"));
  EXPECT_TRUE(has(weft("bench --op l2_norm --shape Tee=3").err, "unknown option Tee"));
  EXPECT_TRUE(has(weft("--nosuch").err, "there is no option '--nosuch'")) << weft("--nosuch").err;
  EXPECT_TRUE(has(weft("bench --op l2_norm state").err,
                  "--op is an option of weft bench; options of weft bench state come after the word state"));
  EXPECT_EQ(weft("-h").exit, 0);
}

TEST(Command, FilesThatCannotBeUsedExitWithOne) {
  for (const char* line :
       {"diff no_such_1.json no_such_2.json", "bench --op l2_norm --shape T=3 --json -o /no/such/directory/x.json"}) {
    const Result r = weft(line);
    EXPECT_EQ(r.exit, 1) << line << "\n" << r.err;
    EXPECT_EQ(r.out, "") << line;
    EXPECT_TRUE(has(r.err, "no_such_1.json") || has(r.err, "cannot write /no/such/directory/x.json")) << r.err;
  }
}

// Every subcommand accepts the same instruction sets.
TEST(Command, EveryIsaIsOfferedEverywhere) {
  const std::string all = "{best,scalar,avx2,avx512,avx512_vnni,neon}";
  for (const char* name : {"check", "bench", "explain", "generate", "perplexity", "plan", "speed", "bench state"})
    EXPECT_TRUE(has(weft(std::string(name) + " --help").out, all)) << name;
}

TEST(Command, HelpSaysWhatOptionsTake) {
  const std::string state = weft("bench state --help", "COLUMNS=1000").out, op = weft("explain --help", "COLUMNS=1000").out;
  EXPECT_TRUE(has(state, "  weft bench state --tokens ")) << state;
  EXPECT_FALSE(has(state, "weft bench --op")) << "examples of bench: " << state;
  EXPECT_TRUE(has(op, "The op of the call")) << op;
  EXPECT_FALSE(has(op, "Only these ops")) << op;
}

TEST(Devices, TableAndJson) {
  EXPECT_TRUE(has(weft("devices").out, "reference"));
  const json out = json::parse(weft("devices --json").out);
  EXPECT_EQ(out["schema"], 1);
  bool cpu = false;
  for (const json& d : out["devices"]) cpu |= d["backend"] == "cpu" && d["usable"].get<bool>();
  EXPECT_TRUE(cpu);
}

TEST(Ops, EveryOpOnTheReference) {
  const json out = json::parse(weft("ops --json").out);
  EXPECT_EQ(out["schema"], 1);
  EXPECT_EQ(out["ops"].size(), 25u);
  for (const json& op : out["ops"]) {
    EXPECT_TRUE(op["op"].is_string());
    EXPECT_TRUE(op["shapes"].is_string());
    ASSERT_TRUE(op["backends"].contains("reference")) << op;
    EXPECT_TRUE(op["backends"]["reference"]["dtypes"].is_string()) << op;
    EXPECT_TRUE(op["backends"]["reference"]["shapes"].is_string()) << op;
    EXPECT_TRUE(op["backends"].contains("cpu")) << op;
  }
}

TEST(Ops, Speeds) {
  const json out = json::parse(weft("ops --speed --json").out);
  for (const json& op : out["ops"]) {
    ASSERT_GT(op["backends"]["cpu"]["speed"].size(), 0u) << op;
    for (const json& one : op["backends"]["reference"]["speed"]) EXPECT_EQ(one["f32"], "slow") << op;
  }
  const Result table = weft("ops --speed");
  EXPECT_TRUE(has(table.out, "decay per channel (KDA)")) << table.out;
  EXPECT_TRUE(has(weft("explain --op l2_norm --backend cpu --shape T=4 --isa scalar").out, "speed    portable"));
}

TEST(Ops, CountsNoCasesOfABackendWithoutADevice) {
  const json ops = json::parse(weft("ops --cases --json").out)["ops"];
  const json found = json::parse(weft("devices --json").out)["devices"];
  bool missing = false;
  for (const json& device : found) {
    const json& entry = ops[0]["backends"][device["backend"].get<std::string>()];
    if (entry.is_null()) continue;  // not in this build
    EXPECT_EQ(entry["usable"], device["usable"]) << device;
    EXPECT_EQ(entry["supported"] > 0, device["usable"].get<bool>()) << device;
    missing |= !device["usable"].get<bool>();
  }
  const std::string table = weft("ops --cases").out;
  EXPECT_EQ(has(table, "(no device)"), missing) << table;
  EXPECT_TRUE(has(table, " cases)")) << table;
  EXPECT_FALSE(has(table, "(0/")) << table;
}

TEST(Ops, MarkdownIsThatOfTheReadme) {
  const std::string markdown = weft("ops --markdown").out;
  EXPECT_EQ(
      markdown.rfind("| op | legal shapes | reference | cpu | cuda | vulkan |\n|---|---|---|---|---|---|\n| `delta_gates`", 0), 0u)
      << markdown.substr(0, 200);
}

TEST(Ops, SchemaAndMembers) {
  const json schema = json::parse(weft("ops --schema").out);
  EXPECT_EQ(schema["c_abi"], 2);
  EXPECT_EQ(schema["ops"].size(), 25u);
  EXPECT_EQ(schema["ops"][0]["struct"], "weft_delta_gates_args");
  EXPECT_EQ(schema["ops"][0]["members"][1]["shapes"][0], "[T, Hv]");
  const std::string members = weft("ops --members").out;
  EXPECT_TRUE(has(members, "### `short_conv`")) << members.substr(0, 400);
  EXPECT_TRUE(has(members, "| `y` | out | `[T, C]` |")) << members.substr(0, 2000);
}

TEST(Check, JsonIsAsDocumented) {
  const Result r = weft(std::string("check --json --backend reference,cpu ") + kSmall);
  EXPECT_EQ(r.exit, 0) << r.err;
  const json out = json::parse(r.out);
  EXPECT_EQ(out["schema"], 1);
  EXPECT_EQ(out["failed"], 0);
  EXPECT_EQ(out["passed"].get<size_t>() + out["skipped"].get<size_t>(), out["rows"].size());
  EXPECT_EQ(out["rows"].size(), 6u);
  for (const json& row : out["rows"]) {
    EXPECT_EQ(row["op"], "l2_norm");
    EXPECT_TRUE(has(row["case"], "tokens"));
    EXPECT_TRUE(row["backend"] == "reference" || row["backend"] == "cpu");
    const bool skipped = row["status"] == "skipped";
    EXPECT_TRUE(skipped || row["status"] == "passed") << row;
    EXPECT_EQ(row["error"].is_null(), skipped);
    EXPECT_EQ(row["bound"].is_null(), skipped);
    EXPECT_FALSE(row["why"].get<std::string>().empty());
  }
}

TEST(Check, NamesWhatCouldNotBeChecked) {
  const json found = json::parse(weft("devices --json").out)["devices"];
  const json all = json::parse(weft(std::string("check --json ") + kSmall).out);
  size_t unusable = 0;
  for (const json& device : found) {
    if (device["usable"] && !device["software"]) continue;
    const json& told = all["not_checked"].at(unusable++);
    EXPECT_EQ(told["backend"], device["backend"]);
    EXPECT_EQ(told["why"], why_left_out(device));
  }
  EXPECT_EQ(all["not_checked"].size(), unusable);
  const Result named = weft(std::string("check --json --backend cpu ") + kSmall);  // the others were not chosen
  EXPECT_EQ(named.err, "");
  EXPECT_EQ(json::parse(named.out)["not_checked"].size(), 0u);
}

TEST(Check, GoldenCasesNeedNoPath) {
  const Result r = weft("check --backend reference --case 'golden/delta_prefill_t1*' --verbose", "cd / &&");
  EXPECT_EQ(r.exit, 0);
  EXPECT_TRUE(has(r.out, "passed gated_delta_rule_prefill golden/delta_prefill_t1 on reference")) << r.out;
}

TEST(Check, SaysHowManyWereSkippedAndWhy) {
  const Result r = weft(std::string("check --backend reference ") + kSmall);
  EXPECT_TRUE(has(r.out, "golden vectors pin it")) << r.out;
  EXPECT_TRUE(has(r.out, "passed 0, failed 0, skipped 3")) << r.out;
}

// Weft has no switch for wrong results, so the test replaces exp() of the system library.
TEST(Check, ExitsWithOneWhenACaseFails) {
  const std::string line = "check --backend reference --case golden/delta_gates";
  const std::string preload = "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD='" WEFT_WRONG_EXP "'";
  EXPECT_EQ(weft(line).exit, 0);
  const Result text = weft(line, preload);
  EXPECT_EQ(text.exit, 1) << text.out << text.err;
  EXPECT_TRUE(has(text.out, "failed delta_gates golden/delta_gates on reference error ")) << text.out;
  EXPECT_FALSE(has(text.out, "failed 0")) << text.out;
  const Result r = weft(line + " --json", preload);
  EXPECT_EQ(r.exit, 1);
  const json out = json::parse(r.out);
  EXPECT_GT(out["failed"], 0);
  EXPECT_EQ(out["complete"], true);
  for (const json& row : out["rows"]) EXPECT_EQ(row["status"] == "failed", row["error"] > row["bound"]) << row;
}

TEST(Check, QuietWithoutATerminal) {
  for (const char* environment : {"", "NO_COLOR=1", "TERM=xterm"}) {
    const Result r = weft(std::string("check ") + kSmall, environment);
    EXPECT_EQ(r.err, not_usable_lines("not checked")) << "a progress bar where nobody watches";
    EXPECT_FALSE(has(r.out, "\x1b")) << "colours where nobody watches";
  }
}

// On a terminal (made by script) there are colours, unless NO_COLOR is set.
TEST(Check, ColoursOnATerminalUnlessToldNotTo) {
  if (!weft::has_terminal()) GTEST_SKIP() << "no terminal can be made";
  const std::string line = "'" WEFT_COMMAND "' check " + std::string(kSmall) + " 2>/dev/null";
  EXPECT_TRUE(has(weft::on_terminal(line), "\x1b["));
  EXPECT_FALSE(has(weft::on_terminal(line, "TERM=xterm NO_COLOR=1"), "\x1b["));
  EXPECT_FALSE(has(weft::on_terminal(line, "TERM=dumb"), "\x1b["));
}

TEST(Check, CtrlCEndsAfterTheCaseAtHand) {
  const Result r = weft_interrupted(2, "check --backend cpu --threads 1 --tier full --json");
  EXPECT_EQ(r.exit, 130) << r.err;
  EXPECT_TRUE(has(r.err, "weft: interrupted after ")) << r.err;
  const json out = json::parse(r.out);
  EXPECT_EQ(out["complete"], false);
  EXPECT_EQ(out["passed"].get<size_t>() + out["skipped"].get<size_t>(), out["rows"].size());
}

// The progress bar is erased: only the report stays on the terminal.
TEST(Check, CtrlCTakesTheBarAway) {
  if (!weft::has_terminal()) GTEST_SKIP() << "no terminal can be made";
  const std::string seen =
      weft::on_terminal("timeout --foreground -s INT 2 '" WEFT_COMMAND "' check --backend cpu --threads 1 --tier full; echo over");
  const size_t bar = seen.rfind("\r\x1b[K["), erased = seen.rfind("\r\x1b[K");
  ASSERT_NE(bar, std::string::npos) << seen;
  EXPECT_LT(bar, erased) << seen.substr(bar);
  EXPECT_TRUE(has(seen.substr(bar), " s left")) << seen.substr(bar);
  EXPECT_TRUE(has(seen.substr(erased), "interrupted after")) << seen.substr(erased);
  EXPECT_TRUE(has(seen.substr(erased), "over")) << seen.substr(erased);
}

TEST(Explain, NamesKernelsAndRefusals) {
  const Result r = weft("explain --op gated_delta_rule_prefill --shape T=100,Hk=2,Hv=4,Dk=64");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.out, "T=100")) << r.out;
  EXPECT_TRUE(has(r.out, "kernel   reference.gated_delta_rule_prefill")) << r.out;
  EXPECT_TRUE(has(r.out, "scratch"));
  const json found = json::parse(weft("devices --json").out);
  for (const json& device : found["devices"]) {
    const Result one = weft("explain --op short_conv --backend " + device["backend"].get<std::string>());
    EXPECT_TRUE(has(one.out, device["usable"] ? "kernel" : "refused")) << one.out;
  }
}

// Options that a shape leaves open get the values of the fast kernels. With other values, the plan names the fast kernel and what
// rules it out.
TEST(Explain, ShapesTakeTheFastKernels) {
  const std::string shape = "explain --op compressed_attention --backend cpu --shape Hq=8,Hk=2,D=64,kbits=4,vbits=4,context=200";
  EXPECT_TRUE(has(weft(shape).out, "cpu.compressed_attention.integer")) << weft(shape).out;
  EXPECT_TRUE(has(weft(shape).out, "layout=tiles,order=lanes")) << weft(shape).out;
  EXPECT_TRUE(has(weft(shape + ",layout=rows").out, "not in integers, K does not lie in tiles of lanes order"));
  EXPECT_TRUE(has(weft("explain --op compressed_attention --backend cpu --shape D=40,context=20").out, "layout=rows"));
}

TEST(Bench, WritesTheFileItPromises) {
  const std::string file = temporary("bench.json");
  const Result r =
      weft("bench --op l2_norm,gated_rms_norm --case sizes --backend cpu --repeat 3 --hot --threads 1 --json -o '" + file + "'");
  EXPECT_EQ(r.exit, 0) << r.err;
  const json out = json::parse(slurp(file));
  for (const char* key : {"schema", "device", "driver", "isa", "threads", "commit", "dirty", "rows"})
    EXPECT_TRUE(out.contains(key)) << key;
  EXPECT_EQ(out["threads"], 1);
  ASSERT_GT(out["rows"].size(), 5u) << r.err;
  for (const json& row : out["rows"]) {
    for (const char* key : {"op", "case", "backend", "kernel"}) EXPECT_TRUE(row[key].is_string()) << row;
    for (const char* key : {"median_us", "mad_us", "host_us", "gbps", "gflops", "roofline_pct"})
      EXPECT_TRUE(row[key].is_number()) << row;
    EXPECT_GT(row["median_us"], 0);
    EXPECT_TRUE(row["sustained_us"].is_null()) << row;  // of cuda
    EXPECT_TRUE(row["shape"].is_object());
    EXPECT_EQ(row["runs"], 3);
  }
  EXPECT_EQ(weft("diff '" + file + "' '" + file + "'").exit, 0);
  std::remove(file.c_str());
}

// An interrupted run writes no file, because half a file would look like a whole one.
TEST(Bench, CtrlCLeavesTheFileAsItWas) {
  const std::string file = temporary("kept.json");
  for (const bool existed : {false, true}) {
    if (existed) std::ofstream(file) << "old";
    const Result r = weft_interrupted(2, "bench --backend cpu --threads 1 --json -o '" + file + "'");
    EXPECT_EQ(r.exit, 130) << r.err;
    EXPECT_TRUE(has(r.err, file + " was not written")) << r.err;
    EXPECT_EQ(std::ifstream(file).good(), existed);
    EXPECT_EQ(slurp(file), existed ? "old" : "");
  }
  std::remove(file.c_str());
}

TEST(Bench, TimesAnyShape) {
  const Result r = weft("bench --op short_conv --shape T=40,C=64,dtype=bf16 --backend cpu,reference --repeat 2");
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.out, "short_conv shape on cpu T=40,C=64,dtype=bf16")) << r.out;
  EXPECT_TRUE(has(r.out, "short_conv shape on reference")) << r.out;
}

TEST(Diff, FindsWhatGotSlower) {
  const auto write = [](const std::string& path, double median, double mad, const std::string& kernel) {
    std::ofstream(path) << json{{"schema", 1},
                                {"rows",
                                 {{{"op", "l2_norm"},
                                   {"case", "c"},
                                   {"backend", "cpu"},
                                   {"kernel", kernel},
                                   {"shape", {{"T", 1}}},
                                   {"median_us", median},
                                   {"mad_us", mad}}}}};
  };
  const std::string a = temporary("a.json"), b = temporary("b.json");
  const auto diff = [&](const std::string& more = "") { return weft("diff '" + a + "' '" + b + "' " + more); };
  write(a, 100, 1, "k");
  write(b, 130, 1, "k");
  EXPECT_EQ(diff().exit, 1);
  EXPECT_TRUE(has(diff().out, "slower 1")) << diff().out;
  EXPECT_EQ(diff("--threshold 1.5").exit, 0);
  write(b, 130, 20, "k");  // the spread explains it
  EXPECT_EQ(diff().exit, 0);
  write(b, 70, 1, "k");
  EXPECT_TRUE(has(diff().out, "faster 1"));
  EXPECT_EQ(diff().exit, 0);
  write(b, 130, 1, "another");  // another kernel for the same call: still slower, and the table names it
  EXPECT_EQ(diff().exit, 1);
  EXPECT_TRUE(has(diff().out, "now another")) << diff().out;
  json other = json::parse(std::ifstream(a));
  other["threads"] = 2;
  other["rows"][0]["shape"]["T"] = 2;
  std::ofstream(b) << other;
  EXPECT_TRUE(has(diff().out, "in one file only 2")) << diff().out;
  EXPECT_TRUE(has(diff().err, "threads was null and is 2")) << diff().err;
  std::ofstream(b) << "{\"rows\": 3}";
  EXPECT_EQ(diff().exit, 1);
  EXPECT_TRUE(has(diff().err, "is not a file of weft bench")) << diff().err;
  std::ofstream(b) << R"({"schema": 1, "rows": [{"op": "x"}]})";
  EXPECT_TRUE(has(diff().err, "has a row without"));
  std::remove(a.c_str());
  std::remove(b.c_str());
}

TEST(Diff, RefusesFilesThatMeanHarm) {
  const std::string a = temporary("a.json"), b = temporary("b.json");
  const auto diff = [&] { return weft("diff '" + a + "' '" + b + "'"); };
  const std::string lists(100000, '['), ends(100000, ']');
  std::ofstream(a) << R"({"schema": 1, "rows": [], "device": )" << lists << ends << "}";
  EXPECT_EQ(diff().exit, 1);
  EXPECT_EQ(diff().err, "weft: " + a + ": nests deeper than 32 levels\n");
  // Control characters in names and conditions do not reach the terminal.
  const auto write = [](const std::string& path, const std::string& kernel) {
    std::ofstream(path) << json{{"schema", 1},
                                {"device", kernel + "\u009b"},
                                {"rows",
                                 {{{"op", "l2\x1b[31m"},
                                   {"case", "c\x7f"},
                                   {"backend", "cpu\x1b[2J"},
                                   {"kernel", kernel},
                                   {"median_us", 1},
                                   {"mad_us", 0}}}}};
  };
  write(a, "k\x1b[1m");
  write(b, "n\x1b[1m");
  EXPECT_EQ(diff().exit, 0) << diff().err;
  EXPECT_TRUE(has(diff().out, "l2?[31m c? on cpu?[2J")) << diff().out;
  EXPECT_TRUE(has(diff().out, "(now n?[1m)")) << diff().out;
  EXPECT_TRUE(has(diff().err, "device was ")) << diff().err;
  for (const char* byte : {"\x1b", "\x7f", "\xc2\x9b"}) EXPECT_FALSE(has(diff().out + diff().err, byte));
  EXPECT_EQ(weft("diff /proc/self/fd/0 '" + b + "'", "cat '" + b + "' |", "/proc/self/fd/0").exit, 0) << "a pipe";
  EXPECT_EQ(weft("diff / '" + b + "'").err, "weft: /: is not a regular file\n");
  std::remove(a.c_str());
  std::remove(b.c_str());
}

// Forms of stdout that cannot be written to, in shell syntax; with output below and above the buffer size.
TEST(Command, OutputThatIsLostIsSaid) {
  const std::string file = temporary("fault");
  int ends[2];  // of a pipe whose read end is closed
  ASSERT_EQ(::pipe(ends), 0);
  int lost = 9;  // shell syntax has descriptors of one digit only
  while (lost > 3 && ::fcntl(lost, F_GETFD) >= 0) --lost;
  ASSERT_LT(::fcntl(lost, F_GETFD), 0) << "no descriptor of one digit is free";
  ASSERT_EQ(::dup2(ends[1], lost), lost);
  for (int end : ends) ::close(end);
  const auto expect_fault = [&](const std::string& line, const std::string& to, const std::string& why) {
    const int status = std::system(("'" WEFT_COMMAND "' " + line + " >" + to + " 2>'" + file + "' </dev/null").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1) << line << " >" << to;
    EXPECT_EQ(slurp(file), "weft: cannot write to standard output: " + why + "\n") << line << " >" << to;
  };
  for (const char* line : {"--version", "--help", "devices", "ops --json", "explain --op l2_norm", "plan",
                           "generate --quiet --max-tokens 2", "generate --quiet --stream --max-tokens 2"}) {
    if (std::ifstream("/dev/full").good()) expect_fault(line, "/dev/full", "No space left on device");
    expect_fault(line, "&-", "Bad file descriptor");
    // A reader that left is no fault.
    const int status = std::system(
        ("'" WEFT_COMMAND "' " + std::string(line) + " >&" + std::to_string(lost) + " 2>'" + file + "' </dev/null").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 0) << line;
    EXPECT_EQ(slurp(file), "") << line;
  }
  ::close(lost);
  std::remove(file.c_str());
}

}  // namespace
