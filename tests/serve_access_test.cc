// Who may speak to the server: Host, Origin, keys and key files.
#include "serve/access.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/folder.h"

namespace {

using namespace weft::serve;

// The status that a Host and an Origin get; 0: they pass.
int status(const AccessRules& rules, std::optional<std::string> host, std::optional<std::string> origin = {}) {
  try {
    check_origin(rules, {std::move(host), std::move(origin), {}});
    return 0;
  } catch (const ApiError& error) {
    return error.status();
  }
}

TEST(Host, OnLoopbackOnlyItsNames) {
  const AccessRules rules;
  for (const char* host : {"localhost", "LocalHost:8080", "127.0.0.1", "127.0.0.1:1", "127.9.9.9:80", "[::1]", "[::1]:8080"})
    EXPECT_EQ(status(rules, host), 0) << host;
  for (const char* host : {"example.org", "localhost.example.org", "evil-localhost", "10.0.0.1", "[::2]:80", "0.0.0.0", "127.1",
                           "2130706433", "localhost.", "[::ffff:127.0.0.1]"})
    EXPECT_EQ(status(rules, host), 403) << host;
  for (const char* host :
       {"", ":80", "localhost:", "localhost:80:80", "localhost:x", "localhost:123456", "a b", "localhost@evil.org", "localhost/x",
        "[::1", "[::1]x", "[localhost]", "::1", "http://localhost", "localhost,evil.org", "\xff"})
    EXPECT_EQ(status(rules, host), 400) << host;
  EXPECT_EQ(status(rules, std::nullopt), 400);
}

TEST(Host, ElsewhereAddressesAndAllowedNames) {
  const AccessRules rules{.loopback = false, .allowed_hosts = {"weft.example.org"}, .key = {}};
  for (const char* host : {"localhost", "10.0.0.1:80", "[2001:db8::1]", "weft.example.org:443", "WEFT.example.org"})
    EXPECT_EQ(status(rules, host), 0) << host;
  for (const char* host : {"example.org", "x.weft.example.org"}) EXPECT_EQ(status(rules, host), 403) << host;
}

TEST(Origin, MustBeTheHost) {
  const AccessRules rules;
  EXPECT_EQ(status(rules, "localhost:8080", "http://localhost:8080"), 0);
  EXPECT_EQ(status(rules, "LOCALHOST:8080", "http://localhost:8080"), 0);
  EXPECT_EQ(status(rules, "localhost", "https://localhost"), 0);
  for (const char* origin :
       {"null", "", "http://localhost", "http://localhost:3000", "http://evil.org", "http://localhost:8080.evil.org",
        "http://localhost:8080/", "file://", "ftp://localhost:8080", "http://127.0.0.1:8080"})
    EXPECT_EQ(status(rules, "localhost:8080", origin), 403) << origin;
}

TEST(Key, IsComparedWhole) {
  EXPECT_TRUE(same_key("secret", "secret"));
  for (const char* given : {"", "secre", "secret1", "Secret", "secretsecret", "terces"})
    EXPECT_FALSE(same_key("secret", given)) << given;
  EXPECT_FALSE(same_key("", "x"));
  const AccessRules rules{.loopback = true, .allowed_hosts = {}, .key = "0123456789abcdef"};
  const auto code = [&](std::optional<std::string> authorization) -> std::string {
    try {
      check_key(rules, {{}, {}, std::move(authorization)});
      return "";
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status(), 401);
      return error.code();
    }
  };
  EXPECT_EQ(code("Bearer 0123456789abcdef"), "");
  EXPECT_EQ(code("bearer 0123456789abcdef"), "");
  EXPECT_EQ(code(std::nullopt), "missing_api_key");
  EXPECT_EQ(code("0123456789abcdef"), "missing_api_key");
  EXPECT_EQ(code("Basic 0123456789abcdef"), "missing_api_key");
  EXPECT_EQ(code("Bearer "), "invalid_api_key");
  EXPECT_EQ(code("Bearer 0123456789abcdef "), "invalid_api_key");
  EXPECT_EQ(code("Bearer  0123456789abcdef"), "invalid_api_key");
}

TEST(KeyFile, IsPrivateAndOneKey) {
  const weft::Folder folder;
  const auto key = [&](const std::string& text, mode_t mode = 0600) -> std::string {
    const std::string file = folder.write("key", text);
    ::chmod(file.c_str(), mode);
    try {
      return read_key_file(file);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_EQ(key("0123456789abcdef"), "0123456789abcdef");
  EXPECT_EQ(key("0123456789abcdef\r\nmore\n"), "0123456789abcdef");
  EXPECT_TRUE(has(key("0123456789abcdef", 0640), "chmod 600"));
  EXPECT_TRUE(has(key("0123456789abcdef", 0604), "chmod 600"));
  EXPECT_TRUE(has(key("short\n"), "has a first line of 5 bytes"));
  EXPECT_TRUE(has(key("0123456789 abcdef\n"), "without blanks"));
  EXPECT_TRUE(has(key(std::string(600, 'a')), "wanted a key of 16 to 512"));
  EXPECT_TRUE(has(key(""), "has a first line of 0 bytes"));
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ASSERT_EQ(::write(pipe[1], "0123456789abcdef\n", 17), 17);
  ::close(pipe[1]);
  EXPECT_EQ(read_key_file("/dev/fd/" + std::to_string(pipe[0])), "0123456789abcdef")
      << "weft serve --api-key-file <(pass show weft)";
  ::close(pipe[0]);
  EXPECT_THROW(read_key_file(folder.path() / "none"), std::runtime_error);
  EXPECT_THROW(read_key_file(folder.path()), std::runtime_error);
}

}  // namespace
