// Reading the text of files that a command line names.
#pragma once

#include <cstdint>
#include <string>

namespace weft::tools {

// The text of a regular file, a pipe (also `<(command)`) or a terminal. Throws a sentence for anything else, and for more than
// `limit` bytes. Waiting for a pipe for more than a second is said on stderr.
std::string read_text_file(const std::string& path, uint64_t limit);

// The text of a file, or of standard input for "-"; at most 1 GiB. On a terminal a hint says that `what` ("the prompt") is read and
// that Ctrl-D ends it.
std::string read_input(const std::string& file, const std::string& what);

}  // namespace weft::tools
