// `weft tokenize`: text to tokens and back with a model's tokenizer.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "tools/command.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/text_file.h"
#include "tools/validators.h"
#include "weft/printable.h"
#include "weft/tokenizer.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct TokenizeFlags {
  std::string model, file;
  std::vector<std::string> text;
  bool ids = false, decode = false;
  JsonOutput output;
};

std::string input(const TokenizeFlags& flags) {
  if (!flags.text.empty()) return fmt::format("{}", fmt::join(flags.text, " "));
  return read_input(flags.file.empty() ? "-" : flags.file, flags.decode ? "token numbers" : "the text");
}

// Numbers separated by spaces, commas and brackets, so that the output of --ids and --json is valid input.
std::vector<int32_t> parse_ids(const TokenizeFlags& flags, const std::string& text, int32_t size) {
  constexpr const char* kBetween = " \t\r\n,[]";
  std::vector<int32_t> ids;
  for (size_t at = text.find_first_not_of(kBetween); at != std::string::npos;) {
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    int32_t id = -1;
    const auto [stop, fault] = std::from_chars(text.data() + at, text.data() + end, id);
    if (fault != std::errc() || stop != text.data() + end || id < 0 || id >= size) {
      const std::string what = fmt::format("'{}' is no token, wanted numbers below {}",
                                           to_well_formed_utf8(text.substr(at, std::min<size_t>(end - at, 40))), size);
      if (!flags.text.empty()) throw UsageError("--decode: " + what);
      throw std::runtime_error((flags.file.empty() || flags.file == "-" ? "standard input" : flags.file) + ": " + what);
    }
    ids.push_back(id);
    at = text.find_first_not_of(kBetween, end);
  }
  return ids;
}

// A token's bytes on one line, as printable_text() writes them, with backslashes doubled.
std::string visible(std::string_view bytes) {
  std::string doubled;
  for (char c : bytes) doubled += c == '\\' ? std::string("\\\\") : std::string(1, c);
  return printable_text(doubled);
}

void print_tokens(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Table table({"id", "token"}, {true, false});
  for (int32_t id : ids) table.add({std::to_string(id), "'" + visible(tokenizer.bytes(id)) + "'"});
  table.show();
}

int run_tokenize(const TokenizeFlags& flags) {
  flags.output.check_writable({flags.file});
  if (flags.ids && (flags.decode || flags.output.json))
    throw UsageError(fmt::format("--ids does nothing with {}", flags.decode ? "--decode" : "--json"));
  ModelFlags chosen;
  chosen.model = flags.model;
  const Tokenizer tokenizer = Tokenizer::load(chosen.directory());
  const std::string given = input(flags);
  const std::vector<int32_t> ids = flags.decode ? parse_ids(flags, given, tokenizer.size()) : tokenizer.encode(given);
  const std::string text = flags.decode ? tokenizer.decode(ids) : given;
  if (flags.output.json) {
    Json pieces = Json::array();
    for (int32_t id : ids) pieces.push_back(to_well_formed_utf8(tokenizer.bytes(id)));
    const Json out{{"schema", kSchema}, {"tokens", ids.size()}, {"bytes", text.size()}, {"text", to_well_formed_utf8(text)},
                   {"ids", ids},        {"pieces", pieces}};
    flags.output.write(out);
    return kOk;
  }
  if (flags.decode) {
    show("{}\n", text);
  } else if (flags.ids) {
    show("{}\n", fmt::join(ids, " "));
  } else {
    print_tokens(tokenizer, ids);
  }
  tell("{} tokens, {} bytes{}\n", ids.size(), text.size(),
       ids.empty() ? ""
                   : fmt::format(", {:.2f} bytes per token", static_cast<double>(text.size()) / static_cast<double>(ids.size())));
  return kOk;
}

}  // namespace

void add_tokenize(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("tokenize", "Turn text into a model's tokens, or tokens into text");
  auto flags = std::make_shared<TokenizeFlags>();
  ModelFlags::add_model_option(*command, flags->model, " of which only tokenizer.json is read,");
  auto* file = command->add_option("--file", flags->file, "Read the text from this file; - is standard input, as without --file");
  file->check(file_name());
  // Where extra arguments are allowed, CLI11 reads a word in brackets as a list and splits it at commas. Without them it takes at
  // most as many words as are expected; the policy TakeAll accepts fewer.
  constexpr int kMostWords = 1 << 24;
  command->add_option("text", flags->text, "The text (several words are joined by spaces)")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(kMostWords, -1)
      ->allow_extra_args(false)
      ->excludes(file);
  command->add_flag("--ids", flags->ids, "Print only the token numbers, on one line");
  command->add_flag("--decode", flags->decode, "The text is token numbers; print their text");
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft tokenize 'The old house'\n"
      "  weft tokenize --model models/weft-11m --file book.txt --ids > book.ids\n"
      "  weft tokenize --model models/weft-11m --file book.ids --decode\n"
      "  echo 'The old house' | weft tokenize --model models/weft-11m --json | jq .tokens");
  command->callback([flags, &exit] { exit = run_tokenize(*flags); });
}

}  // namespace weft::tools
