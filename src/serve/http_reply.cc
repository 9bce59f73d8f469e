// Answers as bytes of HTTP: see http_reply.h.
#include "serve/http_reply.h"

#include <charconv>
#include <ctime>

namespace weft::serve {
namespace {

const char* reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Unknown";
  }
}

std::string date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[64];
  gmtime_r(&now, &parts);
  return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

}  // namespace

HttpReply reply_of(const ApiError& error) {
  HttpReply reply{.status = error.status(), .body = error.json(), .fields = {}};
  if (!error.allow.empty()) reply.fields.emplace_back("Allow", error.allow);
  if (error.status() == 401) reply.fields.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status() == 429 || error.status() == 503) reply.fields.emplace_back("Retry-After", "1");
  return reply;
}

std::string reply_head(const HttpReply& reply, HttpEnd end, size_t bytes, bool keep) {
  std::string head = "HTTP/1.1 " + std::to_string(reply.status) + " " + reason(reply.status) + "\r\nDate: " + date() +
                     "\r\nContent-Type: " + reply.type + "\r\n";
  if (end == HttpEnd::length) head += "Content-Length: " + std::to_string(bytes) + "\r\n";
  if (end == HttpEnd::chunks) head += "Transfer-Encoding: chunked\r\n";
  head += keep ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  head += "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nCross-Origin-Resource-Policy: same-origin\r\n";
  for (const auto& [name, value] : reply.fields) head += name + ": " + value + "\r\n";
  return head + "\r\n";
}

std::string chunk(std::string_view piece) {
  if (piece.empty()) return {};
  char size[16];
  const char* const end = std::to_chars(size, size + sizeof size, piece.size(), 16).ptr;
  std::string out;
  out.reserve(piece.size() + 24);
  out.append(size, static_cast<size_t>(end - size)).append("\r\n").append(piece).append("\r\n");
  return out;
}

}  // namespace weft::serve
