/// Text from files, prompts and other strangers, made safe for terminals and logs.
/// @file
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// The text with everything escaped that could control a terminal or mislead a reader: control characters (`\n`, `\x1b`, `\u009b`),
/// bytes that are not UTF-8 (`\xff`), characters that change the direction of writing (`\u202e`), line and paragraph separators and
/// invisible tags. All other characters stay as they are, backslashes too. The text of every Status and Error has been through this
/// function. Applying it twice changes nothing. ASCII characters in `kept` ("\n\t") are not escaped.
std::string printable_text(std::string_view text, std::string_view kept = {});

}  // namespace weft
