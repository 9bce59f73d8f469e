// Who may speak to the server: see access.h.
#include "serve/access.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "files/refuse.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

constexpr std::string_view kDigits = "0123456789";
constexpr size_t kMaxPortDigits = 5, kMaxHostName = 253;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

bool is_port(std::string_view text) {
  return !text.empty() && text.size() <= kMaxPortDigits && text.find_first_not_of(kDigits) == std::string_view::npos;
}

bool is_dns_name(std::string_view text) {
  constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789-_.";
  return !text.empty() && text.size() <= kMaxHostName && text.find_first_not_of(kAlphabet) == std::string_view::npos;
}

}  // namespace

std::optional<std::string> host_name(std::string_view field) {
  std::string name = lower(field), port;
  if (name.starts_with('[')) {
    const size_t end = name.find(']');
    if (end == std::string::npos) return std::nullopt;
    const std::string rest = name.substr(end + 1);
    name = name.substr(1, end - 1);
    if (!rest.empty() && (rest[0] != ':' || !is_port(std::string_view(rest).substr(1)))) return std::nullopt;
    return is_address(name) ? std::optional(name) : std::nullopt;
  }
  if (const size_t colon = name.find(':'); colon != std::string::npos) {
    if (!is_port(std::string_view(name).substr(colon + 1))) return std::nullopt;
    name.resize(colon);
  }
  return is_dns_name(name) ? std::optional(name) : std::nullopt;
}

bool is_address(std::string_view name) {
  in6_addr ignored{};
  const std::string text(name);
  return ::inet_pton(AF_INET, text.c_str(), &ignored) == 1 || ::inet_pton(AF_INET6, text.c_str(), &ignored) == 1;
}

bool is_loopback_name(std::string_view name) {
  const std::string text(name);
  in_addr four{};
  if (::inet_pton(AF_INET, text.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
  in6_addr six{};
  if (::inet_pton(AF_INET6, text.c_str(), &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six);
  return name == "localhost";
}

void check_origin(const AccessRules& rules, const AccessFields& fields) {
  if (!fields.host) throw ApiError(400, "the field Host is missing");
  const std::optional<std::string> name = host_name(*fields.host);
  if (!name) throw ApiError(400, "Host is " + files::in_quotes(*fields.host) + ", wanted a name and perhaps a port");
  // Addresses are safe: DNS rebinding needs a name.
  const bool own = is_loopback_name(*name) || (!rules.loopback && is_address(*name)) ||
                   std::find(rules.allowed_hosts.begin(), rules.allowed_hosts.end(), *name) != rules.allowed_hosts.end();
  if (!own)
    throw ApiError(
        403, "Host is " + files::in_quotes(*fields.host) + ", which is no name of this server; weft serve --allow-host adds one",
        "", "foreign_host");
  if (!fields.origin) return;
  const std::string origin = lower(*fields.origin), host = lower(*fields.host);
  // Both schemes are accepted, because a proxy may terminate TLS before this server.
  if (origin != "http://" + host && origin != "https://" + host)
    throw ApiError(403, "Origin is " + files::in_quotes(*fields.origin) + ", and pages of other sites may not use this server", "",
                   "foreign_origin");
}

bool same_key(std::string_view wanted, std::string_view given) {
  unsigned different = wanted.size() == given.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i)
    different |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(wanted.empty() ? 0 : wanted[i % wanted.size()]);
  return different == 0;
}

void check_key(const AccessRules& rules, const AccessFields& fields) {
  if (rules.key.empty()) return;
  constexpr std::string_view kScheme = "bearer ";
  const std::string given = fields.authorization.value_or("");
  if (given.size() < kScheme.size() || lower(std::string_view(given).substr(0, kScheme.size())) != kScheme)
    throw ApiError(401, "this server wants its API key in the field Authorization: Bearer KEY", "", "missing_api_key");
  if (!same_key(rules.key, std::string_view(given).substr(kScheme.size())))
    throw ApiError(401, "the API key is wrong", "", "invalid_api_key");
}

std::string read_key_file(const std::string& file) {
  const auto fail = [&](const std::string& what) { throw std::runtime_error(file + ": " + what); };
  const int opened = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (opened < 0) fail(std::strerror(errno));
  struct stat info {};
  std::string text(kMaxKeyBytes + 2, '\0');
  const bool readable = ::fstat(opened, &info) == 0 && (S_ISREG(info.st_mode) || S_ISFIFO(info.st_mode));
  ssize_t got = -1;
  size_t size = 0;
  if (readable && ::fcntl(opened, F_SETFL, 0) == 0)  // reads of a pipe must block until its writer is done
    while (size < text.size() && (got = ::read(opened, text.data() + size, text.size() - size)) > 0)
      size += static_cast<size_t>(got);
  ::close(opened);
  if (!readable) fail("is not a regular file or a pipe");
  if (info.st_mode & (S_IRWXG | S_IRWXO)) fail("holds an API key, and others may read or write it; run chmod 600 on it");
  if (got < 0) fail("cannot be read");
  text.resize(size);
  std::string key = text.substr(0, text.find('\n'));
  if (key.ends_with('\r')) key.pop_back();
  const bool printable = std::all_of(key.begin(), key.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (key.size() < kMinKeyBytes || key.size() > kMaxKeyBytes || !printable)
    fail("has a first line of " + std::to_string(key.size()) + " bytes, wanted a key of " + std::to_string(kMinKeyBytes) + " to " +
         std::to_string(kMaxKeyBytes) + " printable ASCII characters without blanks (head -c 24 /dev/urandom | base64 makes one)");
  return key;
}

}  // namespace weft::serve
