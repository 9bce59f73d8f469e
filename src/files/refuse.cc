// Errors of file readers: see refuse.h.
#include "files/refuse.h"

namespace weft::files {
namespace {

constexpr size_t kLongest = 160;  // bytes of a string from a file in a message

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, kLongest)) out += c >= 0x20 && c < 0x7f ? c : '?';
  if (text.size() > kLongest) out += "...";
  return out;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

void refuse(std::string_view file, std::string_view field, const std::string& what) {
  Status status;
  status.code = Code::invalid_argument;
  status.op = file;
  status.argument = field;
  status.message = std::string(file) + ": " + (field.empty() ? "" : printable(field) + " ") + what;
  throw Error(std::move(status));
}

}  // namespace weft::files
