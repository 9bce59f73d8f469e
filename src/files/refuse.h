// Errors of file readers: a weft::Error that names the file, the field, what was found and what was wanted.
#pragma once

#include <string>
#include <string_view>

#include "weft/status.h"

namespace weft::files {

// Throws an Error with the message "<file>: <field> <what>", or "<file>: <what>" without a field. All three are escaped by
// printable_text() (weft/printable.h), so that a hostile file cannot control the terminal, and a long field is truncated.
[[noreturn]] void refuse(std::string_view file, std::string_view field, const std::string& what);

// A string from a file, escaped and truncated for a message; in_quotes() also adds quotes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);
std::string number_text(double value);  // "0.5", "1e-12"

}  // namespace weft::files
