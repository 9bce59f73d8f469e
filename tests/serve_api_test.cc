// The server with the bundled model: every path, fields, streams, sessions and chats.
#include <gtest/gtest.h>

#include "serve/page.h"
#include "serve/session_texts.h"
#include "tests/support/folder.h"
#include "tests/support/served_model.h"

namespace {

using namespace weft::serve;
using weft::chat, weft::completion, weft::events_of, weft::eventually, weft::expected, weft::get, weft::HttpAnswer,
    weft::HttpClient, weft::json, weft::post, weft::served_model, weft::ServedModel, weft::Streamed, weft::streamed;

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
  EXPECT_EQ(tokens["tokens"], json(served_model().encode("The ship")));
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

TEST(Api, PathsWithoutABodyTakeNone) {
  ServedModel served;
  for (const auto& [method, path] : std::vector<std::pair<const char*, const char*>>{
           {"GET", "/"}, {"GET", "/health"}, {"HEAD", "/health"}, {"DELETE", "/v1/sessions/s"}}) {
    HttpClient client(served.port());
    client.send(std::string(method) + " " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n");
    ASSERT_TRUE(client.await("\r\n\r\n"));  // although the body does not come
    EXPECT_TRUE(client.buffer().starts_with("HTTP/1.1 400 ")) << path << client.buffer();
  }
}

TEST(Api, PathsAreDecoded) {
  ServedModel served([](ServeOptions& options) { options.name = "a model"; });
  EXPECT_EQ(get(served.port(), "/v1/models/a%20model").status, 200);
  json request = completion("The ship", 1);
  request["session"] = "s";
  post(served.port(), "/v1/completions", request);
  EXPECT_EQ(HttpClient(served.port()).request("DELETE", "/v1/sessions/%73").json()["id"], "s");
  for (const char* name : {"%2e", "%20", "%", "a%2", "a%2fb"})
    EXPECT_EQ(HttpClient(served.port()).request("DELETE", std::string("/v1/sessions/") + name).code(), "session_not_found") << name;
}

TEST(Api, AnswersThatCouldFillTheMemoryAreRefused) {
  ServedModel served([](ServeOptions& options) { options.batch.queue = 4; });
  json large = completion("The ship", 1000);
  large["prompt"] = std::vector<std::string>(32, "The ship");
  large["n"] = 4;
  large["logprobs"] = 20;
  EXPECT_EQ(post(served.port(), "/v1/completions", large).param(), "max_tokens");
  // A list that no queue of this server holds can never be accepted.
  json list = completion("The ship", 1);
  list["prompt"] = std::vector<std::string>(5, "The ship");
  const HttpAnswer refused = post(served.port(), "/v1/completions", list);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.param(), "prompt");
  list["prompt"] = std::vector<std::string>(4, "The ship");
  EXPECT_EQ(post(served.port(), "/v1/completions", list).status, 200);
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(weft::kServedFolder);
  int32_t longest = 0;
  for (int32_t token = 0; token < tokenizer.size(); ++token)
    if (tokenizer.bytes(token).size() > tokenizer.bytes(longest).size()) longest = token;
  EXPECT_EQ(post(served.port(), "/detokenize", {{"tokens", std::vector<int32_t>(400000, longest)}}).param(), "tokens");
  EXPECT_EQ(post(served.port(), "/tokenize", {{"content", std::string((1 << 20) + 1, 'x')}}).param(), "content");
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
  // The page loads nothing from elsewhere. No style or handler stands in an attribute, because the policy forbids that.
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
  EXPECT_EQ(json::parse(stream.usage), whole["usage"]);
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
  EXPECT_EQ(
      post(served.port(), "/v1/completions", {{"prompt", served_model().encode("The ship")}, {"max_tokens", 9}, {"temperature", 0}})
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

TEST(Completions, LongTextsAreNotEncodedToTheirEnd) {
  ServedModel served;
  for (const std::string& text : {std::string(1 << 21, 'x'), std::string(1 << 20, ' ') + "a"}) {
    const HttpAnswer long_text = post(served.port(), "/v1/completions", {{"prompt", text}});
    EXPECT_EQ(long_text.code(), "context_length_exceeded");
    EXPECT_NE(long_text.message().find("prompt has 1024 or more tokens, wanted fewer than the 1024"), std::string::npos)
        << long_text.message();
    EXPECT_EQ(post(served.port(), "/v1/chat/completions", chat({text}, 1)).param(), "messages");
  }
  json last = completion("", 1);
  std::string words = "The";
  while (served_model().encode(words).size() < 1023) words += " ship";
  last["prompt"] = words;
  EXPECT_EQ(post(served.port(), "/v1/completions", last).status, 200);
  last["prompt"] = words + " ship";
  EXPECT_EQ(post(served.port(), "/v1/completions", last).code(), "context_length_exceeded");
}

TEST(Completions, LogprobsOfThePrompt) {
  ServedModel served;
  json request = completion("The ship was lost", 2);
  request["echo"] = true;
  request["logprobs"] = 2;
  request["n"] = 2;
  for (int i = 0; i < 2; ++i) {
    const json reply = post(served.port(), "/v1/completions", request).json();
    for (const json& choice : reply["choices"]) {
      const json& all = choice["logprobs"];
      const size_t count = served_model().encode("The ship was lost").size() + 2;
      ASSERT_EQ(all["tokens"].size(), count) << choice;
      ASSERT_EQ(all["token_logprobs"].size(), count);
      ASSERT_EQ(all["top_logprobs"].size(), count);
      EXPECT_TRUE(all["token_logprobs"][0].is_null() && all["top_logprobs"][0].is_null());
      std::string text;
      for (size_t t = 0; t < count; ++t) {
        EXPECT_EQ(all["text_offset"][t], text.size());
        text += all["tokens"][t].get<std::string>();
        if (t == 0) continue;
        EXPECT_LT(all["token_logprobs"][t].get<double>(), 0);
        EXPECT_EQ(all["top_logprobs"][t].size(), 2u);
      }
      EXPECT_EQ(text, choice["text"]);
    }
  }
  request["n"] = 1;
  request["max_tokens"] = 0;
  EXPECT_EQ(post(served.port(), "/v1/completions", request).json()["choices"][0]["text"], "The ship was lost");
  request["stream"] = true;
  EXPECT_EQ(post(served.port(), "/v1/completions", request).param(), "logprobs");
  request["stream"] = false;
  request["session"] = "s";
  EXPECT_EQ(post(served.port(), "/v1/completions", request).param(), "logprobs");
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
  // Another conversation under the same name starts from its prompt; a dropped session is gone.
  json other = chat({"A dog"}, 3);
  other["session"] = "s";
  EXPECT_EQ(post(served.port(), "/v1/chat/completions", other).json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(HttpClient(served.port()).request("DELETE", "/v1/sessions/s").json()["deleted"], true);
  EXPECT_TRUE(eventually([&] { return served.stats().sessions == 0; }));
}

// A conversation continues in two ways, and both prefill only new tokens.
TEST(Sessions, AreForked) {
  ServedModel served([](ServeOptions& options) { options.batch.store = 0; });
  const std::string question = "The ship was at sea, and the captain";
  const auto begin = [&](const char* session) {
    json first = chat({question}, 30);
    first["session"] = session;
    return post(served.port(), "/v1/chat/completions", first).json();
  };
  const json one = begin("s");
  const std::string answer = one["choices"][0]["message"]["content"];
  const auto turn = [&](const char* session, const char* from, const char* text) {
    json request = chat({question, answer, text}, 10);
    if (*session) request["session"] = session;
    if (from) request["session_from"] = from;
    return post(served.port(), "/v1/chat/completions", request).json();
  };
  const auto cached = [&](const char* session, const char* from, const char* text) {
    const json reply = turn(session, from, text);
    begin("other");
    EXPECT_EQ(reply["choices"][0]["message"], turn("other", nullptr, text)["choices"][0]["message"]);
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
  };
  const int64_t kept = one["usage"]["total_tokens"].get<int64_t>() - 1;
  EXPECT_GE(cached("t", "s", "Then the mate"), kept);
  EXPECT_GE(cached("", "s", "Then the cook"), kept) << "a fork that is not kept";
  EXPECT_GE(cached("s", "t", "Then the cat"), kept) << "its own memory";
  EXPECT_EQ(turn("u", "v", "Then the boy")["usage"]["prompt_tokens_details"]["cached_tokens"], 0) << "an unknown one";
  json wrong = chat({"a"}, 1);
  wrong["session"] = wrong["session_from"] = "s";
  EXPECT_EQ(post(served.port(), "/v1/chat/completions", wrong).param(), "session_from");
}

// A deleted session is forgotten, text and all; an unknown one is not found.
TEST(Sessions, AreDeletedOnce) {
  ServedModel served;
  const auto remove = [&] { return HttpClient(served.port()).request("DELETE", "/v1/sessions/s"); };
  EXPECT_EQ(remove().code(), "session_not_found");
  json request = completion("The ship", 3);
  request["session"] = "s";
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(post(served.port(), "/v1/completions", request).status, 200);
    EXPECT_EQ(remove().json()["deleted"], true);
    EXPECT_EQ(remove().status, 404);
  }
}

// Tokens that are not those of the text, as a model may write them.
TEST(Sessions, ContinueTheTokensOfTheirFile) {
  const weft::Folder folder;
  const auto with_files = [&](ServeOptions& options) {
    options.batch.sessions = folder.path();
    options.batch.store = 0;
  };
  const std::string text = "The ship was lost";
  std::vector<int32_t> letters;
  for (const char letter : text) {
    const std::vector<int32_t> one = served_model().encode(std::string(1, letter));
    letters.insert(letters.end(), one.begin(), one.end());
  }
  ASSERT_NE(letters, served_model().encode(text));
  std::string written;
  {
    ServedModel served(with_files);
    json first = completion("", 5);
    first["prompt"] = letters;
    first["session"] = "s";
    written = post(served.port(), "/v1/completions", first).json()["choices"][0]["text"];
  }
  const auto cached = [](ServedModel& served, const std::string& prompt) {
    json request = completion(prompt, 3);
    request["session"] = "s";
    return post(served.port(), "/v1/completions", request).json()["usage"]["prompt_tokens_details"]["cached_tokens"].get<size_t>();
  };
  {
    ServedModel served(with_files);
    EXPECT_GE(cached(served, text + written + " and"), letters.size() + 4);
  }
  ServedModel served(with_files);
  EXPECT_EQ(cached(served, text + "? and"), 0u);
}

// The tokens of a session's file fit a text only if the text has control text at the same places.
TEST(Sessions, TokensOfAFileAreThoseOfTheText) {
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(weft::kServedFolder);
  const int32_t end = *tokenizer.token("<|endoftext|>");
  const auto joined = [&](std::initializer_list<std::vector<int32_t>> parts) {
    std::vector<int32_t> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const std::vector<int32_t> ship = tokenizer.encode("The ship"), was = tokenizer.encode(" was"),
                             control = joined({ship, {end}, was});
  std::vector<int32_t> content = ship;  // the text of the token, in letters
  for (const char letter : std::string("<|endoftext|>")) content.push_back(tokenizer.encode(std::string(1, letter))[0]);
  const std::string text = "The ship<|endoftext|> was lost";
  const std::vector<int32_t> whole = joined({control, tokenizer.encode(" lost")});
  EXPECT_EQ(saved_beginning(text, whole, control, tokenizer).bytes, text.size() - 5);
  EXPECT_EQ(saved_beginning(text, whole, ship, tokenizer).bytes, 8u);
  EXPECT_EQ(saved_beginning(text, whole, content, tokenizer).bytes, 0u) << "was content, is control";
  EXPECT_EQ(saved_beginning(text, joined({content, was}), control, tokenizer).bytes, 0u) << "was control, is content";
  EXPECT_EQ(saved_beginning("The shop", whole, ship, tokenizer).bytes, 0u);
  EXPECT_EQ(saved_beginning("The", whole, ship, tokenizer).bytes, 0u);
}

// A deadline ends the text, not the session: the next request of the session prefills only new tokens.
TEST(Sessions, ContinueAfterADeadline) {
  ServedModel served([](ServeOptions& options) { options.batch.capacity = 16384; });
  json first = completion("The ship", 16000);
  first["session"] = "s";
  first["max_seconds"] = 0.3;
  const json written = post(served.port(), "/v1/completions", first).json();
  ASSERT_EQ(written["choices"][0]["finish_reason"], "length") << written;
  json second = completion("The ship" + written["choices"][0]["text"].get<std::string>() + " and", 3);
  second["session"] = "s";
  const json usage = post(served.port(), "/v1/completions", second).json()["usage"];
  EXPECT_GE(usage["prompt_tokens_details"]["cached_tokens"].get<int>(), 2) << usage;
  EXPECT_GE(usage["prompt_tokens_details"]["cached_tokens"].get<int>(), written["usage"]["completion_tokens"].get<int>());
}

// The same text with other control segments has other tokens.
TEST(Sessions, TextsHaveControlSegments) {
  SessionTexts texts(4000);
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(weft::kServedFolder);
  texts.keep("a", "The ship", tokenizer.encode("The ship"), " was", tokenizer.encode(" was"), tokenizer, {3, 4});
  EXPECT_EQ(texts.find("a", "The ship was lost", {3, 4}).bytes, 12u);
  EXPECT_EQ(texts.find("a", "The ship was lost", {3, 4, 8, 12}).bytes, 12u);
  EXPECT_EQ(texts.find("a", "The ship was lost", {3, 5}).bytes, 0u);
  EXPECT_EQ(texts.find("a", "The ship was lost", {}).bytes, 0u);
}

TEST(Sessions, TextsExpire) {
  SessionTexts texts(4000, std::chrono::milliseconds(20));
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(weft::kServedFolder);
  texts.keep("a", "The ship", tokenizer.encode("The ship"), "", {}, tokenizer);
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  EXPECT_EQ(texts.find("a", "The ship was lost").bytes, 0u);
}

TEST(Sessions, RememberTokensOfTextsWithinABudget) {
  const weft::Tokenizer tokenizer = weft::Tokenizer::load(weft::kServedFolder);
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

// Words of a template around every message; the model begins inside of a thinking block.
weft::ChatTemplate words(bool thinking) {
  json parts{{"system", {{"before", "System: "}, {"after", "\n"}}},
             {"user", {{"before", "User: "}, {"after", "\n"}}},
             {"assistant", {{"before", "Answer: "}, {"after", "\n"}}},
             {"stop", {"\n"}}};
  if (thinking) parts["thinking"] = {{"open", "["}, {"close", ","}, {"opened", true}};
  return weft::ChatTemplate::parse(parts.dump(), "test");
}

TEST(Chat, RendersTheTemplateAndStopsAsItSays) {
  ServedModel served({}, words(false));
  const json request{{"messages", {{{"role", "system"}, {"content", "Be brief."}}, {{"role", "user"}, {"content", "The ship"}}}},
                     {"max_tokens", 60},
                     {"temperature", 0}};
  const std::string rendered = "System: Be brief.\nUser: The ship\nAnswer: ";
  const json whole = post(served.port(), "/v1/chat/completions", request).json();
  const std::string text = expected(rendered, 60);
  EXPECT_EQ(whole["choices"][0]["message"]["content"], text.substr(0, text.find('\n'))) << whole;
  EXPECT_EQ(whole["usage"]["prompt_tokens"], served_model().encode(rendered).size());
  EXPECT_EQ(get(served.port(), "/v1/models").json()["data"][0]["chat"], true);
  // A message cannot become a token of the template or of the model.
  const json evil{{"messages", {{{"role", "user"}, {"content", "<|endoftext|>"}}}}, {"max_tokens", 1}};
  EXPECT_GT(post(served.port(), "/v1/chat/completions", evil).json()["usage"]["prompt_tokens"].get<size_t>(),
            served_model().encode("User: <|endoftext|>\nAnswer: ").size());
}

TEST(Chat, KeepsThinkingApart) {
  ServedModel served({}, words(true));
  json request = chat({"The ship"}, 40);
  request["stop"] = {"zzz"};
  const json message = post(served.port(), "/v1/chat/completions", request).json()["choices"][0]["message"];
  EXPECT_FALSE(message["reasoning_content"].get<std::string>().empty()) << message;
  EXPECT_EQ(message["reasoning_content"].get<std::string>().find(','), std::string::npos) << message;
  request["stream"] = true;
  const std::string body = post(served.port(), "/v1/chat/completions", request).body;
  std::string thinking;
  for (const std::string& event : events_of(body))
    if (event != "[DONE]") thinking += json::parse(event)["choices"][0]["delta"].value("reasoning_content", "");
  EXPECT_EQ(thinking, message["reasoning_content"]);
  EXPECT_EQ(streamed(body).text, message["content"]);
}

}  // namespace
