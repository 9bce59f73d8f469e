// The HTTP half of the server without a model: what it refuses, its limits, and faults of clients.
#include "serve/http_server.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "serve/http_parser.h"
#include "tests/support/http_client.h"

namespace {

using namespace weft::serve;
using std::chrono::milliseconds;
using weft::eventually, weft::HttpAnswer, weft::HttpClient;

HttpLimits short_linger() {
  HttpLimits limits;
  limits.linger = milliseconds(200);
  return limits;
}

// A server whose paths show what the HTTP half does: /echo, /stream (pieces until the client leaves), /late, /throw, /drop.
class TestServer {
 public:
  explicit TestServer(const HttpLimits& limits = short_linger())
      : server_("127.0.0.1", 0, limits, check, [this](HttpRequest r, auto e) { answer(std::move(r), std::move(e)); }) {
    server_.answer_at_once([](const HttpRequest& request) {
      return request.path == "/quick" ? std::optional(HttpReply{.body = "quick", .fields = {}}) : std::nullopt;
    });
    thread_ = std::thread([this] { server_.run(); });
  }
  ~TestServer() {
    stop_ = true;
    server_.close();
    if (thread_.joinable()) thread_.join();
    for (std::thread& one : streams_) one.join();
  }
  uint16_t port() const { return server_.port(); }
  HttpStats stats() const { return server_.stats(); }
  HttpServer& server() { return server_; }
  void join() { thread_.join(); }
  void drop_held() {
    const std::scoped_lock guard(lock_);
    held_.clear();
  }
  std::atomic<int> left = 0, pieces = 0;
  std::atomic<int> blocked = 0;
  std::atomic<bool> written = false;
  std::atomic<bool> stop_ = false;

 private:
  static void check(const HttpRequest& head) {
    check_origin({}, head.access);
    if (head.path == "/closed") throw ApiError(403, "closed");
  }
  void answer(HttpRequest request, std::shared_ptr<Exchange> exchange) {
    if (request.path == "/echo") return exchange->reply({.body = request.method + " " + request.body, .fields = {}});
    if (request.path == "/size") return exchange->reply({.body = std::to_string(request.body.size()), .fields = {}});
    if (request.path == "/throw") throw std::runtime_error("a fault");
    if (request.path == "/drop") return;
    if (request.path == "/block") {
      ++blocked;
      while (!stop_) std::this_thread::sleep_for(milliseconds(2));
      return;
    }
    if (request.path == "/large") return exchange->reply({.body = std::string(2 << 20, 'x'), .fields = {}});
    if (request.path == "/large-beginning") {  // longer than what may be unsent, and then more pieces
      exchange->begin({.type = "text/plain", .body = std::string(1 << 20, 'x'), .fields = {}});
      for (int i = 0; i < 5; ++i) written = exchange->write("piece");
      return exchange->end();
    }
    exchange->on_leave([this] { ++left; });
    if (request.path == "/wait") {  // until the client leaves
      const std::scoped_lock guard(lock_);
      held_.push_back(exchange);
      return;
    }
    exchange->begin({.type = "text/event-stream", .body = {}, .fields = {}});
    if (request.path == "/torn") {
      exchange->write("data: a\n\n");
      return;  // dropped without an end
    }
    const std::scoped_lock guard(lock_);
    streams_.emplace_back([this, exchange, many = request.path == "/flood"] {
      const std::string piece = many ? std::string(4096, 'x') : "data: piece\n\n";
      for (int i = 0; (many || i < 5) && !stop_; ++i) {
        if (!exchange->write(piece)) return;
        ++pieces;
        if (!many) std::this_thread::sleep_for(milliseconds(2));
      }
      exchange->end();
    });
  }

  std::vector<std::thread> streams_;
  std::mutex lock_;  // workers answer
  std::vector<std::shared_ptr<Exchange>> held_;
  HttpServer server_;
  std::thread thread_;
};

HttpAnswer exchange_raw(uint16_t port, const std::string& bytes) {
  HttpClient client(port);
  client.send(bytes);
  return client.answer();
}

constexpr const char* kGet = "GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n";

TEST(Http, AnswersAndKeepsTheConnection) {
  TestServer server;
  HttpClient client(server.port());
  for (int i = 0; i < 3; ++i) {
    const HttpAnswer answer = client.request("POST", "/echo", "body" + std::to_string(i));
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, "POST body" + std::to_string(i));
    EXPECT_EQ(answer.fields.at("Connection"), "keep-alive");
    EXPECT_EQ(answer.fields.at("X-Content-Type-Options"), "nosniff");
    EXPECT_EQ(answer.fields.count("Access-Control-Allow-Origin"), 0u);
  }
  const HttpAnswer head = client.request("HEAD", "/echo");
  EXPECT_EQ(head.fields.at("Content-Length"), "5");
  EXPECT_TRUE(client.buffer().empty());
  const HttpAnswer last = client.request("GET", "/echo", "", "Host: localhost\r\nConnection: close\r\n");
  EXPECT_EQ(last.fields.at("Connection"), "close");
  EXPECT_TRUE(client.closed());
  EXPECT_EQ(server.stats().accepted, 1);
}

TEST(Http, StreamsInChunksAndToOldClientsUntilTheEnd) {
  TestServer server;
  HttpClient client(server.port());
  const HttpAnswer answer = client.request("GET", "/stream");
  EXPECT_EQ(answer.fields.at("Transfer-Encoding"), "chunked");
  EXPECT_EQ(weft::events_of(answer.body).size(), 5u);
  EXPECT_EQ(client.request("GET", "/echo").body, "GET ");
  HttpClient old(server.port());
  old.send("GET /stream HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n");
  const HttpAnswer until_end = old.answer();
  EXPECT_EQ(until_end.fields.at("Connection"), "close");
  EXPECT_EQ(weft::events_of(until_end.body).size(), 5u);
}

TEST(Http, FaultsOfHandlersAreAnswers) {
  TestServer server;
  HttpClient client(server.port());
  EXPECT_EQ(client.request("GET", "/throw").message(), "a fault");
  EXPECT_EQ(client.request("GET", "/drop").status, 500);
  EXPECT_EQ(client.request("GET", "/echo").status, 200);
  // A stream that nobody ends must not look complete.
  HttpClient torn(server.port());
  torn.send("GET /torn HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(torn.closed());
  EXPECT_EQ(torn.buffer().find("0\r\n\r\n"), std::string::npos);
}

TEST(Http, PipelinedRequestsAreAnsweredInOrder) {
  TestServer server;
  HttpClient client(server.port());
  std::string all;
  for (int i = 0; i < 20; ++i)
    all += HttpClient::head("POST", i % 2 ? "/echo" : "/stream", "Host: localhost\r\n", 2) + std::to_string(10 + i);
  client.send(all);
  for (int i = 0; i < 20; ++i) {
    const HttpAnswer answer = client.answer();
    ASSERT_EQ(answer.status, 200) << i;
    if (i % 2) EXPECT_EQ(answer.body, "POST " + std::to_string(10 + i));
  }
}

// Requests about whose end two readers could disagree, and other malformed ones, each on a connection of its own.
TEST(Http, RefusesMalformedRequests) {
  TestServer server;
  const std::string host = "Host: localhost\r\n";
  const std::vector<std::pair<std::string, int>> table = {
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 411},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3, 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: +3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: -3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 0x3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 99999999999999999999\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length : 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 411},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 411},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: identity\r\n\r\n", 411},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411},
      {"POST /echo HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 4194305\r\n\r\n", 413},
      {"POST /echo HTTP/1.1\r\n" + host + "Expect: miracles\r\nContent-Length: 1\r\n\r\n", 417},
      {"GET /echo HTTP/1.1\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\n" + host + host + "\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: evil.org\r\n\r\n", 403},
      {"GET /echo HTTP/1.1\r\n" + host + "Origin: http://evil.org\r\n\r\n", 403},
      {"GET /closed HTTP/1.1\r\n" + host + "\r\n", 403},
      {"GET http://localhost/echo HTTP/1.1\r\n" + host + "\r\n", 400},
      {"OPTIONS * HTTP/1.1\r\n" + host + "\r\n", 400},
      {"CONNECT localhost:80 HTTP/1.1\r\n" + host + "\r\n", 400},
      {"GET echo HTTP/1.1\r\n" + host + "\r\n", 400},
      {"GET  /echo HTTP/1.1\r\n" + host + "\r\n", 400},
      {"GET /echo HTTP/2.0\r\n" + host + "\r\n", 505},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
      {"GET /echo\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\nHost: localhost\n\n\r\n\r\n", 505},
      {"GET /echo HTTP/1.1\r\nHost localhost\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\n" + host + "X: a\x01\r\n\r\n", 400},
      {std::string("GET /ec\0ho HTTP/1.1\r\n", 22) + host + "\r\n", 400},
      {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400},
      {"GET /" + std::string(3000, 'a') + " HTTP/1.1\r\n" + host + "\r\n", 414},
      {"GET /echo HTTP/1.1\r\n" + host + "X: " + std::string(17000, 'a') + "\r\n\r\n", 431},
      {"GET /echo HTTP/1.1\r\n" + host + "X: " + std::string(17000, 'a'), 431},
      {std::string(20000, 'a'), 431},
  };
  for (const auto& [bytes, status] : table) {
    HttpClient client(server.port());
    client.send(bytes);
    const HttpAnswer answer = client.answer();
    EXPECT_EQ(answer.status, status) << bytes.substr(0, 200) << "\n" << answer.body;
    EXPECT_FALSE(answer.message().empty()) << bytes.substr(0, 200);
    EXPECT_TRUE(client.closed()) << bytes.substr(0, 200);
  }
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
}

TEST(Http, CountsHeaderFields) {
  TestServer server;
  const auto with_fields = [](int count) {
    std::string request = "GET /echo HTTP/1.1\r\nHost: localhost\r\n";
    for (int i = 1; i < count; ++i) request += "X-" + std::to_string(i) + ": a\r\n";
    return request + "\r\n";
  };
  EXPECT_EQ(exchange_raw(server.port(), with_fields(kMaxHeaderFields)).status, 200);
  EXPECT_EQ(exchange_raw(server.port(), with_fields(kMaxHeaderFields + 1)).status, 431);
  // The same header, one field after another: what was parsed already counts, too.
  HttpClient slow(server.port());
  slow.send("GET /echo HTTP/1.1\r\nHost: localhost\r\n");
  for (int i = 0; i < 60 && slow.send("X: " + std::string(1000, 'a') + "\r\n"); ++i) ::usleep(1000);
  EXPECT_EQ(slow.answer().status, 431);
}

TEST(Http, TakesBodiesInPiecesAndAfterContinue) {
  TestServer server;
  HttpClient client(server.port());
  client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  ASSERT_TRUE(client.await("100 Continue\r\n\r\n"));
  client.send("ab");
  EXPECT_EQ(client.answer().body, "POST ab");
  // Byte by byte, and the next request in the same piece.
  const std::string request = HttpClient::head("POST", "/echo", "Host: localhost\r\n", 3) + "xyz";
  for (size_t i = 0; i + 1 < request.size(); ++i) client.send(request.substr(i, 1));
  client.send(request.substr(request.size() - 1) + kGet);
  EXPECT_EQ(client.answer().body, "POST xyz");
  EXPECT_EQ(client.answer().body, "GET ");
}

TEST(Http, RefusesLargeBodiesAndStillAnswers) {
  TestServer server;
  HttpClient exact(server.port());
  EXPECT_EQ(exact.request("POST", "/size", std::string(kMaxBodyBytes, 'x')).body, std::to_string(kMaxBodyBytes));
  // 10 MB: the answer arrives although the client is still sending.
  HttpClient large(server.port());
  const std::string body(10 << 20, 'x');
  large.send(HttpClient::head("POST", "/size", "Host: localhost\r\n", body.size()));
  large.send(body);
  EXPECT_EQ(large.answer().status, 413);
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
}

TEST(Http, SlowRequestsEnd) {
  HttpLimits limits = short_linger();
  limits.idle = milliseconds(300);
  limits.head = milliseconds(300);
  limits.body = milliseconds(300);
  limits.linger = milliseconds(200);
  TestServer server(limits);
  HttpClient silent(server.port()), head(server.port()), body(server.port()), trickle(server.port());
  head.send("GET /echo HT");
  body.send(HttpClient::head("POST", "/echo", "Host: localhost\r\n", 10) + "abc");
  // Bytes that keep coming do not move the deadline.
  trickle.send("GET /echo HTTP/1.1\r\n");
  for (int i = 0; i < 40 && trickle.send("X-" + std::to_string(i) + ": a\r\n"); ++i) ::usleep(20000);
  EXPECT_TRUE(silent.closed());
  EXPECT_TRUE(silent.buffer().empty());
  EXPECT_EQ(head.answer().status, 408);
  EXPECT_EQ(body.answer().status, 408);
  EXPECT_EQ(trickle.answer().status, 408);
  EXPECT_TRUE(head.closed() && body.closed() && trickle.closed());
  EXPECT_TRUE(eventually([&] { return server.stats().connections == 0; }));
}

TEST(Http, NoticesWhenAClientLeaves) {
  TestServer server;
  {
    HttpClient client(server.port());
    client.send("GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_TRUE(eventually([&] { return server.stats().requests == 1; }));
    EXPECT_EQ(server.left, 0);
  }
  EXPECT_TRUE(eventually([&] { return server.left == 1; }));
  // One that closes only its own side has left, too; a short answer still reaches it.
  HttpClient half(server.port());
  half.send(kGet);
  half.close_sending();
  EXPECT_EQ(half.answer().status, 200);
  EXPECT_TRUE(half.closed());
  EXPECT_EQ(server.stats().slow, 0);
  HttpClient flood(server.port());
  flood.send("GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n");
  flood.await("xxxx");
  flood.close();
  EXPECT_TRUE(eventually([&] { return server.left == 2; }));
}

TEST(Http, SlowReadersAreCutOffAndNobodyWaits) {
  TestServer server;
  HttpClient slow(server.port(), 4096);
  slow.send("GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return server.left == 1; }));
  EXPECT_EQ(server.stats().slow, 1);
  // The kernel holds some of it, the server at most kMaxUnsentBytes.
  EXPECT_LT(server.pieces * 4096, static_cast<int>(kMaxUnsentBytes) + (2 << 20));
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
  // An answer that is whole is bounded by itself, and ends with the time for writing.
  HttpLimits limits = short_linger();
  limits.write = milliseconds(300);
  TestServer hurried(limits);
  HttpClient whole(hurried.port(), 4096);
  whole.send("GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return hurried.stats().slow == 1; }));
  EXPECT_EQ(exchange_raw(hurried.port(), "GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n").body.size(), size_t{2} << 20);
}

TEST(Http, ManyIdleConnectionsMakeRoom) {
  HttpLimits limits = short_linger();
  limits.connections = 200;
  TestServer server(limits);
  HttpClient busy(server.port());
  busy.send("GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return server.stats().requests == 1; }));
  std::vector<HttpClient> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.emplace_back(server.port());
    ASSERT_TRUE(idle.back().connected()) << i;
    if (i % 2) idle.back().send("GET /");                      // and half of them begin a request
    if (i >= 400) idle[static_cast<size_t>(i) - 400].close();  // the test has its own limit of descriptors
  }
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
  EXPECT_LE(server.stats().connections, 200);
  EXPECT_GE(server.stats().evicted, 1);
  EXPECT_EQ(server.left, 0) << "a request that is being answered was evicted";
}

TEST(Http, RefusesConnectionsWhereAllAreBusy) {
  HttpLimits limits = short_linger();
  limits.connections = 2;
  TestServer server(limits);
  HttpClient first(server.port()), second(server.port());
  for (HttpClient* one : {&first, &second}) one->send("GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return server.stats().requests == 2; }));
  EXPECT_EQ(exchange_raw(server.port(), "").status, 503);
  first.close();
  EXPECT_TRUE(eventually([&] { return exchange_raw(server.port(), kGet).status == 200; }));
}

TEST(Http, ClosesAfterThePresentAnswers) {
  TestServer server;
  HttpClient stream(server.port()), idle(server.port());
  EXPECT_EQ(idle.request("GET", "/echo").status, 200);
  stream.send("GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_TRUE(stream.await("piece"));
  server.server().close();
  EXPECT_EQ(weft::events_of(stream.answer().body).size(), 5u);
  EXPECT_TRUE(stream.closed());
  EXPECT_TRUE(idle.closed());
  EXPECT_FALSE(HttpClient(server.port()).connected());
}

TEST(Http, RefusesHeadWithoutABody) {
  TestServer server;
  HttpClient client(server.port());
  client.send("HEAD /closed HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(client.closed());
  EXPECT_TRUE(client.buffer().starts_with("HTTP/1.1 403 "));
  EXPECT_TRUE(client.buffer().ends_with("\r\n\r\n")) << client.buffer();
}

// Clients that send bodies without their end fill the room for bodies. Requests without a body are served all the same, and a refused
// body makes room at once.
TEST(Http, UnfinishedBodiesLockNobodyOut) {
  TestServer server;
  std::vector<HttpClient> clients;
  const std::string part(kMaxBodyBytes - 1, 'x');
  for (size_t i = 0; i < kMaxBodies / kMaxBodyBytes + 2; ++i) {
    clients.emplace_back(server.port());
    clients.back().send(HttpClient::head("POST", "/size", "Host: localhost\r\n", kMaxBodyBytes));
    clients.back().send(part);
  }
  EXPECT_TRUE(eventually([&] { return server.stats().answers[5] >= 1; }));
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
  EXPECT_EQ(HttpClient(server.port()).request("POST", "/size", "abc").status, 200);
  // Those that are left end as usual.
  EXPECT_TRUE(clients[0].send("x"));
  EXPECT_EQ(clients[0].answer().body, std::to_string(kMaxBodyBytes));
}

TEST(Http, ConnectionsThatLingerMakeRoom) {
  HttpLimits limits;
  limits.connections = 3;
  limits.linger = milliseconds(60000);
  TestServer server(limits);
  std::vector<HttpClient> lingering;
  for (int i = 0; i < 3; ++i) {
    lingering.emplace_back(server.port());
    lingering.back().send("GET /closed HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(lingering.back().answer().status, 403);
  }
  EXPECT_EQ(HttpClient(server.port()).request("GET", "/echo").status, 200);
}

TEST(Http, ALongBeginningOfAStreamIsNotSlow) {
  TestServer server;
  HttpClient client(server.port(), 4096);
  client.send("GET /large-beginning HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return server.written.load(); }));
  EXPECT_EQ(client.answer().body.size(), (size_t{1} << 20) + 25);
  EXPECT_EQ(server.stats().slow, 0);
}

TEST(Http, NoticesWhenAClientLeavesBehindPipelinedBytes) {
  TestServer server;
  int expected = 0;
  for (const size_t bytes : {kMaxHeaderBytes + 100, kMaxHeaderBytes + 4 * kMaxPipelined}) {
    HttpClient client(server.port());
    client.send("GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_TRUE(eventually([&] { return server.stats().requests == expected + 1; }));
    client.send(std::string(bytes, 'x'), 200);
    client.close();
    EXPECT_TRUE(eventually([&] { return server.left == expected + 1; })) << bytes;
    ++expected;
  }
  // Clients that leave are no fault of the server.
  server.drop_held();
  EXPECT_TRUE(eventually([&] { return server.stats().connections == 0; }));
  EXPECT_EQ(server.stats().answers[5], 0);
  EXPECT_EQ(server.stats().slow, 0);
}

TEST(Http, QuickAnswersDoNotWaitForWorkers) {
  TestServer server;
  HttpClient first(server.port()), second(server.port());
  for (HttpClient* one : {&first, &second}) one->send("GET /block HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return server.blocked == 2; }));
  EXPECT_EQ(exchange_raw(server.port(), "GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n").body, "quick");
  server.stop_ = true;
  EXPECT_EQ(first.answer().status, 500);
}

TEST(Http, WorkThatFailsCostsNothingElse) {
  TestServer server;
  for (int i = 0; i < 4; ++i) server.server().defer([] { throw std::bad_alloc(); });
  EXPECT_EQ(exchange_raw(server.port(), kGet).status, 200);
}

TEST(Http, ClosesAtADeadlineAndNotBeforeItIsReleased) {
  TestServer server;
  HttpClient waiting(server.port());
  waiting.send("GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return server.stats().requests == 1; }));
  server.server().hold();
  server.server().close(std::chrono::steady_clock::now() + milliseconds(200));
  EXPECT_TRUE(waiting.closed());
  EXPECT_TRUE(eventually([&] { return server.left == 1; }));
  std::atomic<bool> released = false;
  std::thread release([&] {
    std::this_thread::sleep_for(milliseconds(100));
    released = true;
    server.server().release();
  });
  server.join();
  EXPECT_TRUE(released);
  release.join();
}

TEST(Parser, StopsAfterTheHeaderAndAfterTheRequest) {
  HttpParser parser;
  const std::string head = "POST /a?b=c HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n", all = head + "xyGET";
  EXPECT_EQ(parser.parse(all), head.size());
  EXPECT_TRUE(parser.has_header() && !parser.done());
  EXPECT_EQ(parser.request().path, "/a");
  EXPECT_EQ(parser.request().query, "b=c");
  EXPECT_EQ(parser.parse(std::string_view(all).substr(head.size())), 2u);
  EXPECT_TRUE(parser.done());
  EXPECT_EQ(parser.parse("GET"), 0u);
  EXPECT_EQ(parser.take().body, "xy");
}

}  // namespace
