// Errors of file readers: a weft::Error that names the file, the field, what was found and what was wanted.
#pragma once

#include <string>
#include <string_view>

#include "weft/status.h"

namespace weft::files {

// Throws an Error with the message "<file>: <field> <what>", or "<file>: <what>" without a field. In the field, bytes that are not
// printable ASCII are replaced by '?', and long strings are truncated, so that a hostile file cannot control the terminal.
[[noreturn]] void refuse(std::string_view file, std::string_view field, const std::string& what);

// A string from a file, made safe for messages in the same way; in_quotes() also adds quotes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);

}  // namespace weft::files
