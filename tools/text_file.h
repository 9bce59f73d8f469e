// Reading the text of files that a command line names.
#pragma once

#include <cstdint>
#include <string>

namespace weft::tools {

// The text of a regular file, or of a pipe where `pipes` allows it. Throws a sentence for anything else, and for more than `limit`
// bytes.
std::string read_text_file(const std::string& path, uint64_t limit, bool pipes = false);

// The text of a file, or of standard input for "-"; at most 1 GiB.
std::string read_input(const std::string& file);

}  // namespace weft::tools
