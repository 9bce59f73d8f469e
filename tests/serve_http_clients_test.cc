// The HTTP half of the server without a model: clients that are slow, leave, or fill it, and its end.
#include "serve/http_server.h"

#include <gtest/gtest.h>

#include "tests/support/http_test_server.h"

namespace {

using namespace weft::serve;
using std::chrono::milliseconds;
using weft::eventually, weft::exchange_raw, weft::HttpClient, weft::kGet, weft::short_linger, weft::TestServer;

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
  // A client that closes only its own side counts as one that left. A short answer still reaches it.
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
  // The other requests end as usual.
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
}  // namespace
