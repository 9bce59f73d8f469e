// The HTTP half of the server without a model: answers, streams, and what it refuses.
#include "serve/http_server.h"

#include <gtest/gtest.h>

#include "serve/http_parser.h"
#include "tests/support/http_test_server.h"

namespace {

using namespace weft::serve;
using weft::exchange_raw, weft::HttpAnswer, weft::HttpClient, weft::kGet, weft::TestServer;

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
  const std::string host = "Host: localhost\r\n", chunked = "POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n";
  const std::vector<std::pair<std::string, int>> table = {
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 3, 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: +3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: -3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 0x3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length: 99999999999999999999\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Content-Length : 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: identity\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {chunked + "\r\n", 400},
      {chunked + "g\r\n", 400},
      {chunked + "1 \r\na\r\n0\r\n\r\n", 400},
      {chunked + "+1\r\na\r\n0\r\n\r\n", 400},
      {chunked + "1\na\r\n0\r\n\r\n", 400},
      {chunked + "1\r\nab\r\n0\r\n\r\n", 400},
      {chunked + "1\r\na\n0\r\n\r\n", 400},
      {chunked + "0\r\nX: a\n\r\n", 400},
      {chunked + "00000000000000001\r\na\r\n0\r\n\r\n", 400},
      {chunked + "400001\r\n", 413},
      {chunked + "1;" + std::string(17000, 'a'), 431},
      {chunked + "0\r\nX: " + std::string(17000, 'a'), 431},
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
      {std::string("GET /ec\0ho HTTP/1.1\r\n", 21) + host + "\r\n", 400},
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
  // The same header, one field after another: bytes that were parsed already count, too.
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

TEST(Http, TakesChunks) {
  TestServer server;
  HttpClient client(server.port());
  const std::string head = "POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n";
  client.send(head + "3\r\nabc\r\n0\r\n\r\n" + kGet);
  EXPECT_EQ(client.answer().body, "POST abc");
  EXPECT_EQ(client.answer().body, "GET ");
  // Byte by byte, with an extension and a trailer.
  const std::string bytes = head + "000A;a=\"b\"\r\n\r\n0\r\n\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\nZ:\r\n\r\n";
  for (const char byte : bytes) client.send(std::string(1, byte));
  EXPECT_EQ(client.answer().body, "POST \r\n0\r\n\r\nabcd");
  client.send("POST /size HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
  ASSERT_TRUE(client.await("100 Continue\r\n\r\n"));
  client.send("200000\r\n" + std::string(2 << 20, 'x') + "\r\n200000\r\n" + std::string(2 << 20, 'x') + "\r\n0\r\n\r\n");
  EXPECT_EQ(client.answer().body, std::to_string(kMaxBodyBytes));
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
