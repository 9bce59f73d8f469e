// Help that fits the terminal, and a sentence for every invalid command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace weft::tools {

// Breaks the lines of a help text at `width` columns. Descriptions and comments continue in their own column, and examples continue
// behind a backslash, so that they can still be copied. `description`: the column where descriptions of options begin.
std::string wrapped(std::string_view help, size_t width, size_t description);

// Refuses values of flags, such as --json=false. Call it when all commands have been added.
void refuse_values_of_flags(CLI::App& app);

// What `weft` prints without a command.
std::string short_help(const CLI::App& app);

// The names of all commands of an application.
std::vector<std::string> command_names(const CLI::App& app);

// A sentence for an error of CLI11. `arguments` are those of the command line, in the order typed.
std::string sentence_of(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& arguments);

}  // namespace weft::tools
