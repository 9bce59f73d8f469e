// Help and sentences about command lines: see usage.h.
#include "tools/usage.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/suggest.h"

namespace weft::tools {
namespace {

// One line in pieces of at most `width` columns. The pieces after the first align with the last column of the line, which begins
// after two spaces or more. After an option whose name ends right before its description, they begin at `description`.
std::string wrapped_line(std::string_view line, size_t width, bool examples, size_t description) {
  if (line.size() <= width) return std::string(line) + "\n";
  const size_t indent = std::min(line.find_first_not_of(' '), line.size());
  const bool example = examples && indent > 0;
  size_t column = indent;  // where the rest continues
  if (const size_t gap = line.rfind("  "); gap != std::string_view::npos && gap > indent)
    column = gap + 2;
  else if (line.starts_with("  -") && line.size() > description && line[description - 1] == ' ')
    column = description;
  const bool hangs = column > indent;
  if (hangs && example) {  // the comment of an example goes below it
    const std::string_view command = line.substr(0, line.find_last_not_of(' ', column - 1) + 1);
    return wrapped_line(command, width, true, description) +
           wrapped_line(std::string(indent + 4, ' ') + std::string(line.substr(column)), width, false, description);
  }
  if (column > width * 3 / 5) column = indent + 4;
  if (!hangs && (example || line.starts_with("  -"))) column = indent + 4;
  const std::string_view behind = example ? " \\" : "";
  std::string out;
  std::string rest(line);
  while (rest.size() > width) {
    const size_t room = width - behind.size(), text = std::min(rest.find_first_not_of(' '), rest.size());
    size_t end = rest.rfind(' ', room);
    if (end == std::string::npos || end <= text) {  // a list without spaces
      end = rest.rfind(',', room - 1);
      end = end == std::string::npos || end <= text ? rest.find(' ', room) : end + 1;
      if (end == std::string::npos) break;
    }
    const size_t last = rest.find_last_not_of(' ', end - 1);
    out += rest.substr(0, last + 1) + std::string(behind) + "\n";
    rest = std::string(column, ' ') + rest.substr(std::min(rest.find_first_not_of(' ', end), rest.size()));
  }
  return out + rest + "\n";
}

// The command that was chosen, with the words that choose it.
const CLI::App* chosen_command(const CLI::App& app, std::string& words) {
  const CLI::App* command = &app;
  for (words.clear(); !command->get_subcommands().empty(); words += (words.empty() ? "" : " ") + command->get_name())
    command = command->get_subcommands().front();
  return command;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::string extras_sentence(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> left = app.remaining(true), words;
  for (const std::string& argument : arguments)  // in the order typed
    if (const auto found = std::find(left.begin(), left.end(), argument); found != left.end()) {
      words.push_back(argument);
      left.erase(found);
    }
  words.insert(words.end(), left.begin(), left.end());  // words that are only parts of an argument
  std::string name;
  const CLI::App* command = chosen_command(app, name);
  const std::string help = fmt::format("; weft {}{}--help shows what there is", name, name.empty() ? "" : " ");
  for (const std::string& word : words)
    if (word.size() > 1 && word[0] == '-' && word != "--") {
      const std::string option = word.substr(0, word.find('='));
      return fmt::format("{} has no option {}{}", name, option, did_you_mean(option, option_names(*command), help));
    }
  std::string joined, quoted;
  for (const std::string& word : words) {
    joined += (joined.empty() ? "" : " ") + word;
    quoted += " '" + word + "'";
  }
  const bool report = words.size() == 1 && words[0].ends_with(".json") && command->get_option_no_throw("--output");
  const std::string hint = report               ? fmt::format("; did you mean --json -o {}?", words[0])
                           : name == "generate" ? fmt::format("; did you mean --prompt '{}'?", joined)
                                                : help;
  return fmt::format("{} takes no {}{}{}", name, words.size() > 1 ? "arguments" : "argument", quoted, hint);
}

// The words before and after `between`; false where the text has no such part.
bool split(const std::string& text, const std::string& between, std::string& before, std::string& after) {
  const size_t at = text.find(between);
  if (at == std::string::npos) return false;
  before = text.substr(0, at);
  after = text.substr(at + between.size());
  return true;
}

}  // namespace

std::string wrapped(std::string_view help, size_t width, size_t description) {
  std::string out;
  bool examples = false;
  while (!help.empty()) {
    const size_t end = std::min(help.find('\n'), help.size());
    std::string_view line = help.substr(0, end);
    line = line.substr(0, line.find_last_not_of(' ') + 1);
    out += wrapped_line(line, width, examples, description);
    examples = line == "Examples:" || (examples && line.starts_with(' '));
    help.remove_prefix(std::min(end + 1, help.size()));
  }
  return out;
}

void refuse_values_of_flags(CLI::App& app) {
  for (CLI::Option* option : app.get_options([](const CLI::Option* o) { return o->get_expected_max() == 0; }))
    option->disable_flag_override();
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) refuse_values_of_flags(*command);
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) names.push_back(command->get_name());
  return names;
}

std::string short_help(const CLI::App& app) {
  std::string names;
  for (const std::string& name : command_names(app)) names += (names.empty() ? "" : ", ") + name;
  return "weft runs, measures and checks hybrid language models and their token mixers.\n"
         "\n"
         "  weft generate -p 'The ship'     the bundled model continues a text\n"
         "  weft generate -m DIR            a model in a folder of Hugging Face files\n"
         "  weft devices                    what this machine can use\n"
         "  weft --help                     all commands with examples\n"
         "\n"
         "Commands: " +
         names + ".\n";
}

std::string sentence_of(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& arguments) {
  const std::string text = error.what();
  std::string name, first, second;
  chosen_command(app, name);
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) return extras_sentence(app, arguments);
  // Each kind has its own text around the names of options, and only a ValidationError holds what was typed.
  if (dynamic_cast<const CLI::RequiredError*>(&error) && split(text, " is required", first, second))
    return fmt::format("{} needs {}; weft {} --help shows examples", name,
                       first.starts_with('-') ? first : fmt::format("the argument '{}'", first), name);
  if (dynamic_cast<const CLI::ExcludesError*>(&error) && split(text, " excludes ", first, second))
    return fmt::format("{} and {} exclude each other, wanted one of them", first, second);
  if (dynamic_cast<const CLI::RequiresError*>(&error) && split(text, " requires ", first, second))
    return fmt::format("{} does nothing without {}", first, second);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error)) {
    if (split(text, " was given a disallowed", first, second))  // CLI11 names the flag without its dashes
      return (first.size() > 1 ? "--" : "-") + first + " takes no value";
    if (split(text, " but received ", first, second))
      return fmt::format("{} is given {} times, wanted once", first.substr(0, first.find(':')), second);
    if (split(text, ": ", first, second)) return first + " needs a value";
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error)) {
    if (split(text, "Could not convert: ", second, first) && split(std::string(first), " = ", first, second))
      return fmt::format("{}: got '{}', wanted a number", first, second);
    if (split(text, ": ", first, second)) return first + " takes no value";
  }
  return text;
}

}  // namespace weft::tools
