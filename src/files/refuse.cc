// Errors of file readers: see refuse.h.
#include "files/refuse.h"

#include <cstdio>

#include "weft/printable.h"

namespace weft::files {
namespace {

constexpr size_t kLongest = 160;  // bytes of a string from a file in a message

}  // namespace

std::string printable(std::string_view text) {
  if (text.size() <= kLongest) return printable_text(text);
  size_t end = kLongest;  // not inside a character
  while (end > kLongest - 3 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return printable_text(text.substr(0, end)) + "...";
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

void refuse(std::string_view file, std::string_view field, const std::string& what) {
  Status status;
  status.code = Code::invalid_argument;
  status.op = printable_text(file);
  status.argument = printable(field);
  status.message = status.op + ": " + (field.empty() ? "" : status.argument + " ") + printable_text(what);
  throw Error(std::move(status));
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace weft::files
