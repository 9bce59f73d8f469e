// The server with the bundled model: every path, streams, sessions, limits of the queue, and clients that leave.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "serve/page.h"
#include "serve/server.h"
#include "serve/session_texts.h"
#include "tests/support/http_client.h"
#include "weft/generate.h"

namespace {

using namespace weft::serve;
using nlohmann::json;
using weft::eventually, weft::events_of, weft::get, weft::HttpAnswer, weft::HttpClient, weft::post;

const std::filesystem::path kFolder = std::filesystem::path(WEFT_SOURCE_DIR) / "models/weft-11m";

const weft::Model& model() {
  static const weft::Model model = weft::Model::load(kFolder);
  return model;
}

class ServedModel {
 public:
  explicit ServedModel(const std::function<void(ServeOptions&)>& change = {})
      : server_(model(), weft::Tokenizer::load(kFolder), weft::ChatTemplate::plain(), options(change)) {
    thread_ = std::thread([this] { server_.run(); });
  }
  ~ServedModel() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    server_.stop();
    thread_.join();
  }
  uint16_t port() const { return server_.port(); }
  Server& server() { return server_; }
  weft::BatcherStats stats() const { return server_.batcher().stats(); }

 private:
  static ServeOptions options(const std::function<void(ServeOptions&)>& change) {
    ServeOptions options;
    options.port = 0;
    options.name = "weft-11m";
    options.batch.sequences = 4;
    options.batch.capacity = 1024;
    options.batch.store = 8 << 20;
    if (change) change(options);
    return options;
  }

  Server server_;
  std::thread thread_;
};

// What a Generator writes after a text, greedily.
std::string expected(const std::string& prompt, int64_t tokens, double temperature = 0, uint64_t seed = 0) {
  weft::GenerateOptions options = weft::suggested_options(model());
  options.max_tokens = tokens;
  options.sampling.temperature = temperature;
  options.sampling.seed = seed;
  weft::HybridState state = model().create_state("8v4", 1024);
  std::vector<int32_t> all = model().encode(prompt);
  return weft::Generator(model(), options).run(state, all).text;
}

json completion(const std::string& prompt, int tokens) { return {{"prompt", prompt}, {"max_tokens", tokens}, {"temperature", 0}}; }
json chat(std::vector<std::string> texts, int tokens) {
  json messages = json::array();
  for (size_t i = 0; i < texts.size(); ++i) messages.push_back({{"role", i % 2 ? "assistant" : "user"}, {"content", texts[i]}});
  return {{"messages", messages}, {"max_tokens", tokens}, {"temperature", 0}};
}

// The text of a choice in a stream, and what it ended with.
struct Streamed {
  std::string text, finish;
  json usage;
  bool done = false;
};
Streamed streamed(const std::string& body, int64_t choice = 0) {
  Streamed all;
  for (const std::string& event : events_of(body)) {
    all.done = event == "[DONE]";
    if (all.done) break;
    const json data = json::parse(event);
    if (data.contains("usage")) all.usage = data["usage"];
    for (const json& one : data["choices"]) {
      if (one["index"] != choice) continue;
      all.text += one.contains("delta") ? one["delta"].value("content", "") : one["text"].get<std::string>();
      if (one["finish_reason"].is_string()) all.finish = one["finish_reason"];
    }
  }
  return all;
}

TEST(Api, Paths) {
  ServedModel served;
  const uint16_t port = served.port();
  EXPECT_EQ(get(port, "/health").json()["status"], "ok");
  const json models = get(port, "/v1/models").json();
  EXPECT_EQ(models["data"][0]["id"], "weft-11m");
  EXPECT_EQ(models["data"][0]["context_length"], 1024);
  EXPECT_EQ(models["data"][0]["chat"], false);
  EXPECT_EQ(get(port, "/v1/models/weft-11m").json()["id"], "weft-11m");
  EXPECT_EQ(get(port, "/v1/models/other").code(), "model_not_found");
  const json tokens = post(port, "/tokenize", {{"content", "The ship"}}).json();
  EXPECT_EQ(tokens["tokens"], json(model().encode("The ship")));
  EXPECT_EQ(post(port, "/detokenize", {{"tokens", tokens["tokens"]}}).json()["content"], "The ship");
  for (const char* path : {"/nothing", "/v1", "/v1/", "/v1/models/", "/v1/models/a/b", "//", "/../etc/passwd", "/%2e%2e/",
                           "/v1/completions/", "/health/"})
    EXPECT_EQ(get(port, path).status, 404) << path;
  const HttpAnswer wrong = get(port, "/v1/completions");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.fields.at("Allow"), "POST");
  EXPECT_EQ(HttpClient(port).request("OPTIONS", "/v1/completions").status, 405);
  EXPECT_EQ(HttpClient(port).request("POST", "/tokenize", "{}", "Host: localhost\r\n").status, 415);
  EXPECT_EQ(HttpClient(port).request("POST", "/tokenize", "{}", "Host: localhost\r\nContent-Type: text/plain\r\n").status, 415);
  EXPECT_EQ(HttpClient(port)
                .request("POST", "/tokenize", "{\"content\": \"a\"}",
                         "Host: localhost\r\nContent-Type: Application/JSON; charset=utf-8\r\n")
                .status,
            200);
  // A preflight of a foreign page gets no permission.
  const HttpAnswer preflight = HttpClient(port).request(
      "OPTIONS", "/v1/completions", "", "Host: localhost\r\nOrigin: http://evil.org\r\nAccess-Control-Request-Method: POST\r\n");
  EXPECT_EQ(preflight.status, 403);
  EXPECT_EQ(preflight.fields.count("Access-Control-Allow-Origin"), 0u);
}

TEST(Api, ThePageHasAPolicyWithAFreshNonce) {
  ServedModel served;
  const HttpAnswer page = get(served.port(), "/"), again = get(served.port(), "/?x=1");
  EXPECT_EQ(page.fields.at("Content-Type"), "text/html; charset=utf-8");
  const std::string policy = page.fields.at("Content-Security-Policy");
  EXPECT_NE(policy, again.fields.at("Content-Security-Policy"));
  EXPECT_NE(policy.find("default-src 'none'"), std::string::npos);
  EXPECT_EQ(policy.find("unsafe"), std::string::npos);
  EXPECT_EQ(page.body.find(kNoncePlace), std::string::npos);
  // Nothing of the page comes from elsewhere, and no style or handler stands in an attribute, where the policy forbids it.
  const std::string html(page_html());
  for (const char* part : {"src=", "@import", "url(", " style=", " onclick=", "innerHTML", "eval(", "<link rel=\"stylesheet"})
    EXPECT_EQ(html.find(part), std::string::npos) << part;
}

TEST(Api, Metrics) {
  ServedModel served;
  post(served.port(), "/v1/completions", completion("The ship", 5));
  HttpAnswer metrics;
  EXPECT_TRUE(eventually([&] {
    metrics = get(served.port(), "/metrics");
    return metrics.body.find("weft_requests_total{outcome=\"finished\"} 1\n") != std::string::npos;
  }));
  for (const char* line :
       {"weft_written_tokens_total 5\n", "weft_prompt_tokens_total 2\n", "weft_sequences_limit 4\n",
        "weft_first_token_seconds_count 1\n", "weft_memory_bytes{kind=\"kv\"} ", "weft_http_answers_total{status=\"2xx\"} "})
    EXPECT_NE(metrics.body.find(line), std::string::npos) << line << metrics.body;
  // Every sample has a type, and every line is a comment or a sample.
  for (size_t at = 0; at < metrics.body.size();) {
    const size_t end = metrics.body.find('\n', at);
    const std::string line = metrics.body.substr(at, end - at);
    EXPECT_TRUE(line.starts_with("# HELP weft_") || line.starts_with("# TYPE weft_") || line.starts_with("weft_")) << line;
    at = end + 1;
  }
}

TEST(Completions, WholeAndStreamedAreWhatAGeneratorWrites) {
  ServedModel served;
  const std::string text = expected("The ship", 20);
  const json whole = post(served.port(), "/v1/completions", completion("The ship", 20)).json();
  EXPECT_EQ(whole["choices"][0]["text"], text);
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["object"], "text_completion");
  EXPECT_EQ(whole["usage"]["prompt_tokens"], 2);
  EXPECT_EQ(whole["usage"]["completion_tokens"], 20);
  EXPECT_EQ(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  json request = completion("The ship", 20);
  request["stream"] = true;
  request["stream_options"] = {{"include_usage", true}};
  const HttpAnswer answer = post(served.port(), "/v1/completions", request);
  EXPECT_EQ(answer.fields.at("Content-Type"), "text/event-stream; charset=utf-8");
  const Streamed stream = streamed(answer.body);
  EXPECT_EQ(stream.text, text);
  EXPECT_EQ(stream.finish, "length");
  EXPECT_EQ(stream.usage, whole["usage"]);
  EXPECT_TRUE(stream.done);
}

TEST(Completions, ChoicesPromptsEchoAndSeeds) {
  ServedModel served;
  json request{{"prompt", {"The ship", "A dog"}},
               {"max_tokens", 6},
               {"temperature", 1},
               {"top_p", 1},
               {"seed", 7},
               {"n", 2},
               {"echo", true}};
  const json whole = post(served.port(), "/v1/completions", request).json();
  ASSERT_EQ(whole["choices"].size(), 4u) << whole;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(whole["choices"][i]["index"], i);
    EXPECT_TRUE(whole["choices"][i]["text"].get<std::string>().starts_with(i < 2 ? "The ship" : "A dog"));
  }
  EXPECT_NE(whole["choices"][0]["text"], whole["choices"][1]["text"]);
  EXPECT_EQ(whole["usage"]["prompt_tokens"], 4);
  request["stream"] = true;
  const std::string body = post(served.port(), "/v1/completions", request).body;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(streamed(body, i).text, whole["choices"][i]["text"]) << i;
  // Tokens as a prompt, and a prompt that is empty: the model begins a text.
  EXPECT_EQ(post(served.port(), "/v1/completions", {{"prompt", model().encode("The ship")}, {"max_tokens", 9}, {"temperature", 0}})
                .json()["choices"][0]["text"],
            expected("The ship", 9));
  EXPECT_EQ(post(served.port(), "/v1/completions", {{"prompt", ""}, {"max_tokens", 3}}).status, 200);
  // Without tokens to write, echo gives the prompt.
  EXPECT_EQ(post(served.port(), "/v1/completions", {{"prompt", "The ship"}, {"max_tokens", 0}, {"echo", true}})
                .json()["choices"][0]["text"],
            "The ship");
}

TEST(Completions, StopsAndLogprobs) {
  ServedModel served;
  const std::string text = expected("The ship", 20), stop = text.substr(8, 4);
  for (const bool stream : {false, true}) {
    json request = completion("The ship", 20);
    request["stop"] = {stop};
    request["stream"] = stream;
    const HttpAnswer answer = post(served.port(), "/v1/completions", request);
    const std::string written = stream ? streamed(answer.body).text : answer.json()["choices"][0]["text"].get<std::string>();
    EXPECT_EQ(written, text.substr(0, text.find(stop)));
    EXPECT_EQ(stream ? streamed(answer.body).finish : answer.json()["choices"][0]["finish_reason"].get<std::string>(), "stop");
  }
  json request = completion("The ship", 3);
  request["logprobs"] = 2;
  const json logprobs = post(served.port(), "/v1/completions", request).json()["choices"][0]["logprobs"];
  ASSERT_EQ(logprobs["tokens"].size(), 3u);
  EXPECT_EQ(logprobs["top_logprobs"][0].size(), 2u);
  EXPECT_LE(logprobs["token_logprobs"][0].get<double>(), 0);
  json talk = chat({"The ship"}, 3);
  talk["logprobs"] = true;
  talk["top_logprobs"] = 2;
  const json content = post(served.port(), "/v1/chat/completions", talk).json()["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 3u);
  EXPECT_EQ(content[0]["top_logprobs"][0]["token"], content[0]["token"]);
  talk["stream"] = true;
  int seen = 0;
  for (const std::string& event : events_of(post(served.port(), "/v1/chat/completions", talk).body))
    if (event != "[DONE]" && json::parse(event)["choices"][0]["logprobs"].is_object()) ++seen;
  EXPECT_EQ(seen, 3);
}

TEST(Completions, PenaltiesChangeTheText) {
  ServedModel served;
  const std::string text = expected("The ship", 40);
  for (const char* penalty : {"presence_penalty", "frequency_penalty", "repetition_penalty"}) {
    json request = completion("The ship", 40);
    request[penalty] = 2;
    EXPECT_NE(post(served.port(), "/v1/completions", request).json()["choices"][0]["text"], text) << penalty;
  }
}

TEST(Completions, RefusesWhatDoesNotFit) {
  ServedModel served;
  const HttpAnswer large = post(served.port(), "/v1/completions", {{"prompt", std::vector<int>(1024, 5)}});
  EXPECT_EQ(large.status, 400);
  EXPECT_EQ(large.code(), "context_length_exceeded");
  EXPECT_EQ(large.param(), "prompt");
  EXPECT_EQ(post(served.port(), "/v1/completions", {{"prompt", "a"}, {"model", "gpt-4"}}).status, 404);
  EXPECT_EQ(post(served.port(), "/v1/completions", {{"prompt", "a"}, {"n", 5}}).param(), "n");
  const HttpAnswer system = post(served.port(), "/v1/chat/completions", {{"messages", {{{"role", "system"}, {"content", "a"}}}}});
  EXPECT_EQ(system.status, 400);
  EXPECT_EQ(system.param(), "messages");
  // What fills the capacity ends there.
  const json full =
      post(served.port(), "/v1/completions", {{"prompt", std::vector<int>(1020, 5)}, {"max_tokens", 50}, {"temperature", 0}})
          .json();
  EXPECT_LE(full["usage"]["total_tokens"], 1024);
}

TEST(Completions, ADeadlineEndsTheText) {
  ServedModel served;
  json request = completion("The ship", 1000);
  request["max_seconds"] = 0.1;
  const json whole = post(served.port(), "/v1/completions", request).json();
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length") << whole;
  EXPECT_LT(whole["usage"]["completion_tokens"], 1000);
  request["stream"] = true;
  const Streamed stream = streamed(post(served.port(), "/v1/completions", request).body);
  EXPECT_EQ(stream.finish, "length");
  EXPECT_TRUE(stream.done);
}

TEST(Sessions, ReadOnlyWhatIsNew) {
  ServedModel served;
  json first = chat({"The ship was at sea, and the captain"}, 30);
  first["session"] = "s";
  const json one = post(served.port(), "/v1/chat/completions", first).json();
  const std::string answer = one["choices"][0]["message"]["content"];
  json second = chat({"The ship was at sea, and the captain", answer, "Then the mate"}, 10);
  second["session"] = "s";
  const json two = post(served.port(), "/v1/chat/completions", second).json();
  const int64_t prompt = two["usage"]["prompt_tokens"], cached = two["usage"]["prompt_tokens_details"]["cached_tokens"];
  EXPECT_GE(cached, one["usage"]["total_tokens"].get<int64_t>() - 1);
  EXPECT_LT(prompt - cached, 10);
  EXPECT_EQ(served.stats().sessions, 1);
  // Another conversation under the same name begins afresh; a dropped session is gone.
  json other = chat({"A dog"}, 3);
  other["session"] = "s";
  EXPECT_EQ(post(served.port(), "/v1/chat/completions", other).json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(HttpClient(served.port()).request("DELETE", "/v1/sessions/s").json()["deleted"], true);
  EXPECT_TRUE(eventually([&] { return served.stats().sessions == 0; }));
}

TEST(Sessions, RememberTokensOfTextsWithinABudget) {
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(kFolder);
  SessionTexts texts(4000);
  const std::vector<int32_t> prompt = tokenizer.encode("The ship"), written = tokenizer.encode(" was lost");
  texts.keep("a", "The ship", prompt, " was lo", written, tokenizer);  // a stop string cut the text
  const SessionTexts::Beginning found = texts.find("a", "The ship was lost");
  EXPECT_EQ(tokenizer.decode(found.tokens), std::string("The ship was lost").substr(0, found.bytes));
  EXPECT_GT(found.tokens.size(), prompt.size());
  EXPECT_EQ(texts.find("a", "The shop").bytes, 0u);
  for (int i = 0; i < 100; ++i) texts.keep("b" + std::to_string(i), std::string(100, 'x'), prompt, "", {}, tokenizer);
  EXPECT_EQ(texts.find("a", "The ship was lost").bytes, 0u);
  EXPECT_GT(texts.find("b99", std::string(100, 'x')).bytes, 0u);
}

TEST(Queue, IsFullWithARetryAfter) {
  ServedModel served([](ServeOptions& options) {
    options.batch.sequences = 1;
    options.batch.queue = 1;
    options.batch.capacity = 16384;  // more than is written while this test runs
  });
  json request = completion("The ship", 16000);
  request["stream"] = true;
  const std::string body = request.dump(),
                    head = HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n",
                                            body.size());
  HttpClient running(served.port()), waiting(served.port());
  running.send(head + body);
  ASSERT_TRUE(running.await("data: "));
  waiting.send(head + body);
  ASSERT_TRUE(eventually([&] { return served.stats().waiting == 1; }));
  const HttpAnswer refused = post(served.port(), "/v1/completions", request);
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.fields.at("Retry-After"), "1");
  EXPECT_EQ(refused.code(), "queue_full");
  EXPECT_EQ(get(served.port(), "/health").status, 200);
  // Both leave, the waiting one first; their places are free.
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
  try {
    ServedModel served([](ServeOptions& options) { options.host = "0.0.0.0"; });
    ADD_FAILURE() << "listens without a key";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("--api-key-file"), std::string::npos) << error.what();
  }
}

TEST(Stop, FinishesWhatRuns) {
  ServedModel served;
  json request = completion("The ship", 300);
  request["stream"] = true;
  HttpClient client(served.port());
  const std::string body = request.dump();
  client.send(HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n", body.size()) +
              body);
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
  json request = completion("The ship", 1000);
  request["stream"] = true;
  HttpClient client(served.port());
  const std::string body = request.dump();
  client.send(HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n", body.size()) +
              body);
  ASSERT_TRUE(client.await("data: "));
  served.server().stop();
  const std::string rest = client.answer().body;
  EXPECT_NE(rest.find("the server stopped before the end"), std::string::npos)
      << rest.substr(rest.size() - std::min<size_t>(rest.size(), 400));
}

}  // namespace
