// How readers of files say no: a weft::Error whose sentence names the file, the field, what it got and what it wanted.
#pragma once

#include <string>
#include <string_view>

#include "weft/status.h"

namespace weft::files {

// "<file>: <field> <what>"; without a field "<file>: <what>". Bytes of the texts that are no printable ASCII appear as '?', and long
// texts are cut, so that a hostile file cannot write on the terminal.
[[noreturn]] void refuse(std::string_view file, std::string_view field, const std::string& what);

// A text from a file as it may appear in such a sentence: printable ASCII, cut where it is long; and the same between quotes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);

}  // namespace weft::files
