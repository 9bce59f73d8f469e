// A small HTTP client for tests: raw bytes on the loopback address, every wait bounded.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

inline constexpr int kPatience = 60000;  // milliseconds; under a sanitizer everything is slow

struct HttpAnswer {
  int status = 0;  // 0: the connection ended before an answer
  std::map<std::string, std::string> fields;
  std::string body;  // without chunk headers
  nlohmann::json json() const { return nlohmann::json::parse(body, nullptr, false); }
  std::string param() const { return text("param"); }
  std::string code() const { return text("code"); }
  std::string message() const { return text("message"); }

 private:
  std::string text(const char* name) const {
    const nlohmann::json all = json();
    if (!all.is_object() || !all.contains("error")) return "no error: " + body;
    return all["error"][name].is_string() ? all["error"][name].get<std::string>() : "";
  }
};

class HttpClient {
 public:
  // `receive`: bytes of the kernel's buffer, for a client that reads slowly; 0: as usual.
  explicit HttpClient(uint16_t port, int receive = 0) {
    socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive > 0) ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive, sizeof receive);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) close();
  }
  ~HttpClient() { close(); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  HttpClient(HttpClient&& other) noexcept : socket_(std::exchange(other.socket_, -1)), buffer_(std::move(other.buffer_)) {}

  bool connected() const { return socket_ >= 0; }
  void close() {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }
  void close_sending() { ::shutdown(socket_, SHUT_WR); }

  // Sends the bytes that the server takes within the time. False: the server has closed the connection.
  bool send(std::string_view bytes, int milliseconds = kPatience) {
    while (!bytes.empty()) {
      pollfd one{socket_, POLLOUT, 0};
      if (::poll(&one, 1, milliseconds) <= 0) return false;
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }

  // Receives more bytes into the buffer. False: the stream has ended, or no byte came within the time.
  bool receive(int milliseconds = kPatience) {
    char bytes[65536];
    pollfd one{socket_, POLLIN, 0};
    if (socket_ < 0 || ::poll(&one, 1, milliseconds) <= 0) return false;
    const ssize_t got = ::recv(socket_, bytes, sizeof bytes, 0);
    if (got <= 0) {
      ended_ = true;
      return false;
    }
    buffer_.append(bytes, static_cast<size_t>(got));
    return true;
  }
  // Has the server closed the connection? Waits for it.
  bool closed(int milliseconds = kPatience) {
    while (receive(milliseconds)) {
    }
    return ended_;
  }
  const std::string& buffer() const { return buffer_; }
  // Receives until the text occurs.
  bool await(std::string_view text, int milliseconds = kPatience) {
    while (buffer_.find(text) == std::string::npos)
      if (!receive(milliseconds)) return false;
    return true;
  }

  HttpAnswer answer(bool has_body = true) {
    HttpAnswer answer;
    if (!await("\r\n\r\n")) return answer;
    const size_t end = buffer_.find("\r\n\r\n");
    const std::string head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    answer.status = std::atoi(head.c_str() + head.find(' ') + 1);
    for (size_t at = head.find("\r\n") + 2; at < head.size();) {
      const size_t stop = head.find("\r\n", at), colon = head.find(": ", at);
      answer.fields[head.substr(at, colon - at)] = head.substr(colon + 2, stop - colon - 2);
      at = stop + 2;
    }
    if (answer.status == 100) return this->answer(has_body);
    if (!has_body) return answer;
    if (answer.fields.count("Content-Length")) {
      const size_t size = std::stoul(answer.fields["Content-Length"]);
      while (buffer_.size() < size && receive()) {
      }
      answer.body = buffer_.substr(0, size);
      buffer_.erase(0, size);
    } else if (answer.fields["Transfer-Encoding"] == "chunked") {
      while (true) {
        if (!await("\r\n")) return {};
        const size_t line = buffer_.find("\r\n"), size = std::stoul(buffer_.substr(0, line), nullptr, 16);
        while (buffer_.size() < line + 4 + size)
          if (!receive()) return {};
        answer.body += buffer_.substr(line + 2, size);
        buffer_.erase(0, line + 4 + size);
        if (size == 0) break;
      }
    } else {
      while (receive()) {
      }
      answer.body = std::exchange(buffer_, "");
    }
    return answer;
  }

  // One request in the usual form, and its answer.
  HttpAnswer request(const std::string& method, const std::string& path, const std::string& body = "",
                     const std::string& fields = "Host: localhost\r\nContent-Type: application/json\r\n") {
    send(head(method, path, fields, body.size()) + body);
    return answer(method != "HEAD");
  }
  static std::string head(const std::string& method, const std::string& path, const std::string& fields, size_t bytes) {
    return method + " " + path + " HTTP/1.1\r\n" + fields +
           (method == "POST" ? "Content-Length: " + std::to_string(bytes) + "\r\n" : "") + "\r\n";
  }

 private:
  int socket_ = -1;
  bool ended_ = false;
  std::string buffer_;
};

// The events of a stream: what follows "data: ".
inline std::vector<std::string> events_of(const std::string& body) {
  std::vector<std::string> events;
  for (size_t at = 0; (at = body.find("data: ", at)) != std::string::npos;) {
    const size_t end = body.find("\n\n", at);
    events.push_back(body.substr(at + 6, end - at - 6));
    at = end;
  }
  return events;
}

inline HttpAnswer get(uint16_t port, const std::string& path) { return HttpClient(port).request("GET", path); }
inline HttpAnswer post(uint16_t port, const std::string& path, const nlohmann::json& body) {
  return HttpClient(port).request("POST", path, body.dump());
}

// Waits until `condition` holds, up to kPatience.
template <class Condition>
bool eventually(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatience);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    ::usleep(5000);
  }
  return true;
}

}  // namespace weft
