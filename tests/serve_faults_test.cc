// The server with the bundled model: a full queue, clients that leave, keys, and stopping.
#include <gtest/gtest.h>

#include "tests/support/complaint.h"
#include "tests/support/served_model.h"

namespace {

using namespace weft::serve;
using weft::completion, weft::eventually, weft::expected, weft::get, weft::HttpAnswer, weft::HttpClient, weft::json, weft::post,
    weft::ServedModel, weft::Streamed, weft::streamed;

// Asks for a stream.
void ask_stream(HttpClient& client, const std::string& prompt, int tokens) {
  json request = completion(prompt, tokens);
  request["stream"] = true;
  const std::string body = request.dump();
  client.send(HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n", body.size()) +
              body);
}

TEST(Queue, IsFullWithARetryAfter) {
  ServedModel served([](ServeOptions& options) {
    options.batch.sequences = 1;
    options.batch.queue = 1;
    options.batch.capacity = 16384;  // more tokens than are written while this test runs
  });
  HttpClient running(served.port()), waiting(served.port());
  ask_stream(running, "The ship", 16000);
  ASSERT_TRUE(running.await("data: "));
  ask_stream(waiting, "The ship", 16000);
  ASSERT_TRUE(eventually([&] { return served.stats().waiting == 1; }));
  const HttpAnswer refused = post(served.port(), "/v1/completions", completion("The ship", 3));
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.fields.at("Retry-After"), "1");
  EXPECT_EQ(refused.code(), "queue_full");
  EXPECT_EQ(get(served.port(), "/health").status, 200);
  // Both clients leave, the waiting one first. Their places are free again.
  waiting.close();
  running.close();
  EXPECT_TRUE(eventually([&] { return served.stats().cancelled == 2; }));
  EXPECT_EQ(post(served.port(), "/v1/completions", completion("The ship", 3)).status, 200);
}

TEST(Faults, NobodyNoticesClientsThatLeave) {
  ServedModel served;
  const std::string text = expected("The ship", 60);
  json many = completion("A dog", 800);
  many["stream"] = true;
  many["n"] = 2;
  const std::string body = many.dump();
  std::thread leavers([&] {
    for (int i = 0; i < 12; ++i) {
      HttpClient client(served.port(), i % 2 ? 0 : 4096);
      client.send(
          HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n", body.size()) +
          body.substr(0, i % 3 ? body.size() : 9));
      if (i % 3) client.await("data: ");
    }
  });
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(post(served.port(), "/v1/completions", completion("The ship", 60)).json()["choices"][0]["text"], text);
  leavers.join();
  EXPECT_TRUE(eventually([&] { return served.stats().running == 0 && served.stats().waiting == 0; }));
  EXPECT_TRUE(eventually([&] { return served.server().http_stats().connections == 0; }));
}

TEST(Faults, AKeyIsWantedWhereverItMatters) {
  ServedModel served([](ServeOptions& options) { options.key = "0123456789abcdef"; });
  for (const char* path : {"/", "/health"}) EXPECT_EQ(get(served.port(), path).status, 200) << path;
  for (const char* path : {"/metrics", "/v1/models", "/nothing"}) EXPECT_EQ(get(served.port(), path).status, 401) << path;
  const HttpAnswer missing = post(served.port(), "/tokenize", {{"content", "a"}});
  EXPECT_EQ(missing.status, 401);
  EXPECT_EQ(missing.fields.at("WWW-Authenticate"), "Bearer");
  EXPECT_EQ(HttpClient(served.port())
                .request("GET", "/v1/models", "", "Host: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n")
                .status,
            200);
}

TEST(Faults, WithoutAKeyOnlyTheLoopbackAddress) {
  const auto said = [](const std::function<void(ServeOptions&)>& change) {
    return weft::complaint([&] { ServedModel served(change); });
  };
  EXPECT_NE(said([](ServeOptions& options) { options.host = "0.0.0.0"; }).find("--api-key-file"), std::string::npos);
  const auto behind = [](const char* name) {
    return [name](ServeOptions& options) { options.allowed_hosts = {"localhost", name}; };
  };
  for (const char* name : {"weft.example.org", "192.168.1.7", "localhost.example.org"})
    EXPECT_NE(said(behind(name)).find(std::string("--allow-host ") + name), std::string::npos) << name;
  EXPECT_EQ(said(behind("127.0.0.2")), "none");
}

TEST(Faults, NamesThatNobodyCouldUse) {
  for (const char* host : {"https://weft.example.org", "weft.example.org:443", "a b", ""})
    EXPECT_THROW(ServedModel([&](ServeOptions& options) { options.allowed_hosts = {host}; }), std::runtime_error) << host;
  for (const char* name : {"", "a\nb", "\xff"})
    EXPECT_THROW(ServedModel([&](ServeOptions& options) { options.name = name; }), std::runtime_error) << name;
  ServedModel served([](ServeOptions& options) {
    options.allowed_hosts = {"Weft.Example.ORG"};
    options.key = "0123456789abcdef";
  });
  EXPECT_EQ(HttpClient(served.port()).request("GET", "/health", "", "Host: weft.example.org\r\n").status, 200);
}

// The worker that makes /metrics may be late while the server is destroyed.
TEST(Stop, WithMetricsUnderWay) {
  for (int i = 0; i < 5; ++i) {
    std::vector<HttpClient> clients;
    ServedModel served;
    for (int j = 0; j < 8; ++j) {
      clients.emplace_back(served.port());
      clients.back().send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
    for (int j = 0; j < 3; ++j) served.server().stop();  // the third one aborts
    served.stop();
  }
}

// A second stop ends requests at once and blocks nobody.
TEST(Stop, ASecondOneEndsRequests) {
  ServedModel served([](ServeOptions& options) { options.batch.capacity = 16384; });
  HttpClient client(served.port());
  ask_stream(client, "The ship", 16000);
  ASSERT_TRUE(client.await("data: "));
  served.server().stop();
  served.server().stop();
  EXPECT_NE(client.answer().body.find("the server stopped before the end"), std::string::npos);
  served.stop();
}

TEST(Stop, FinishesWhatRuns) {
  ServedModel served;
  HttpClient client(served.port());
  ask_stream(client, "The ship", 300);
  ASSERT_TRUE(client.await("data: "));
  served.server().stop();
  const Streamed stream = streamed(client.answer().body);
  EXPECT_EQ(stream.text, expected("The ship", 300));
  EXPECT_TRUE(stream.done);
  served.stop();
  EXPECT_FALSE(HttpClient(served.port()).connected());
}

TEST(Stop, EndsWhatTakesTooLong) {
  ServedModel served([](ServeOptions& options) { options.drain = std::chrono::milliseconds(50); });
  HttpClient client(served.port());
  ask_stream(client, "The ship", 1000);
  ASSERT_TRUE(client.await("data: "));
  served.server().stop();
  const std::string rest = client.answer().body;
  EXPECT_NE(rest.find("the server stopped before the end"), std::string::npos)
      << rest.substr(rest.size() - std::min<size_t>(rest.size(), 400));
}

}  // namespace
