// A server with the bundled model in this process, and the requests that tests send to it.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "serve/server.h"
#include "tests/support/http_client.h"
#include "weft/generate.h"

namespace weft {

using nlohmann::json;

inline const std::filesystem::path kServedFolder = std::filesystem::path(WEFT_SOURCE_DIR) / "models/weft-11m";

inline const Model& served_model() {
  static const Model model = Model::load(kServedFolder);
  return model;
}

class ServedModel {
 public:
  explicit ServedModel(const std::function<void(serve::ServeOptions&)>& change = {}, ChatTemplate chat = ChatTemplate::plain())
      : server_(served_model(), Tokenizer::load(kServedFolder), std::move(chat), options(change)) {
    thread_ = std::thread([this] { server_.run(); });
  }
  ~ServedModel() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    server_.stop();
    thread_.join();
  }
  uint16_t port() const { return server_.port(); }
  serve::Server& server() { return server_; }
  BatcherStats stats() const { return server_.batcher().stats(); }

 private:
  static serve::ServeOptions options(const std::function<void(serve::ServeOptions&)>& change) {
    serve::ServeOptions options;
    options.port = 0;
    options.name = "weft-11m";
    options.batch.sequences = 4;
    options.batch.capacity = 1024;
    options.batch.store = 8 << 20;
    if (change) change(options);
    return options;
  }

  serve::Server server_;
  std::thread thread_;
};

// What a Generator writes after a text, greedily.
inline std::string expected(const std::string& prompt, int64_t tokens, double temperature = 0, uint64_t seed = 0) {
  GenerateOptions options = suggested_options(served_model());
  options.max_tokens = tokens;
  options.sampling.temperature = temperature;
  options.sampling.seed = seed;
  HybridState state = served_model().create_state("8v4", 1024);
  std::vector<int32_t> all = served_model().encode(prompt);
  return Generator(served_model(), options).run(state, all).text;
}

inline json completion(const std::string& prompt, int tokens) {
  return {{"prompt", prompt}, {"max_tokens", tokens}, {"temperature", 0}};
}
inline json chat(std::vector<std::string> texts, int tokens) {
  json messages = json::array();
  for (size_t i = 0; i < texts.size(); ++i) messages.push_back({{"role", i % 2 ? "assistant" : "user"}, {"content", texts[i]}});
  return {{"messages", messages}, {"max_tokens", tokens}, {"temperature", 0}};
}

// The text of a choice in a stream, and what it ended with.
struct Streamed {
  std::string text, finish;
  std::string usage;  // JSON
  bool done = false;
};
inline Streamed streamed(const std::string& body, int64_t choice = 0) {
  Streamed all;
  for (const std::string& event : events_of(body)) {
    all.done = event == "[DONE]";
    if (all.done) break;
    const json data = json::parse(event);
    if (data.contains("usage")) all.usage = data["usage"].dump();
    for (const json& one : data["choices"]) {
      if (one["index"] != choice) continue;
      all.text += one.contains("delta") ? one["delta"].value("content", "") : one["text"].get<std::string>();
      if (one["finish_reason"].is_string()) all.finish = one["finish_reason"];
    }
  }
  return all;
}

}  // namespace weft
