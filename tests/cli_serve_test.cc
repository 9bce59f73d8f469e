// `weft serve` as a process: its options, its signals, a busy port, and a restart after it was killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>

#include "tests/support/command.h"
#include "tests/support/folder.h"
#include "tests/support/http_client.h"

namespace {

using nlohmann::json;
using weft::get, weft::has, weft::HttpClient, weft::post, weft::Result, weft::slurp, weft::weft;

// A running server. Its first line of stdout ends with the URL.
class Served {
 public:
  explicit Served(std::vector<std::string> arguments) {
    const std::string model = std::string(WEFT_SOURCE_DIR) + "/models/weft-11m";
    arguments.insert(arguments.begin(), {WEFT_COMMAND, "serve", "--port", "0", "--model", model});
    process_ = ::fork();
    if (process_ == 0) {
      const int out = ::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600),
                err = ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      ::dup2(out, 1);
      ::dup2(err, 2);
      ::setenv("OMP_WAIT_POLICY", "passive", 1);
      std::vector<char*> words;
      for (std::string& one : arguments) words.push_back(one.data());
      words.push_back(nullptr);
      ::execv(words[0], words.data());
      ::_exit(127);
    }
    ::weft::eventually([&] { return slurp(out_).find("http://127.0.0.1:") != std::string::npos || !alive(); });
    const std::string line = slurp(out_);
    const size_t at = line.find("http://127.0.0.1:");
    if (at != std::string::npos) port_ = static_cast<uint16_t>(std::stoi(line.substr(at + std::strlen("http://127.0.0.1:"))));
  }
  ~Served() {
    if (alive()) end(SIGKILL);
    std::remove(out_.c_str());
    std::remove(err_.c_str());
  }
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;

  uint16_t port() const { return port_; }
  std::string out() const { return slurp(out_); }
  std::string err() const { return slurp(err_); }
  void signal(int number) const { ::kill(process_, number); }
  // Sends a signal and returns the exit status; -signal where that ended the process.
  int end(int number) {
    signal(number);
    return wait();
  }
  int wait() {
    ::weft::eventually([&] { return !alive(); });
    return status_;
  }

 private:
  bool alive() {
    int status = 0;
    if (process_ <= 0 || ::waitpid(process_, &status, WNOHANG) == 0) return process_ > 0;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    process_ = 0;
    return false;
  }

  static inline int count_ = 0;
  const int number_ = ++count_;
  const std::string out_ = ::weft::temporary("serve_out" + std::to_string(number_)),
                    err_ = ::weft::temporary("serve_err" + std::to_string(number_));
  pid_t process_ = 0;
  int status_ = -1000;
  uint16_t port_ = 0;
};

json in_session(const std::vector<std::string>& texts) {
  json messages = json::array();
  for (size_t i = 0; i < texts.size(); ++i) messages.push_back({{"role", i % 2 ? "assistant" : "user"}, {"content", texts[i]}});
  return {{"messages", messages}, {"max_tokens", 20}, {"temperature", 0}, {"session", "s"}};
}

TEST(Serve, SaysWhereItIsAndStopsGracefully) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Served served({"--max-sequences", "2", "--memory", "128M"});
    ASSERT_NE(served.port(), 0) << served.err();
    EXPECT_TRUE(has(served.out(), "weft-11m at http://127.0.0.1:")) << served.out();
    EXPECT_TRUE(has(served.out(), "on cpu")) << served.out();
    EXPECT_TRUE(has(served.err(), "2 sequences of up to 4096 tokens, KV 8v4; budget 128 MB")) << served.err();
    EXPECT_TRUE(has(served.err(), "no chat template")) << served.err();
    EXPECT_EQ(get(served.port(), "/health").status, 200);
    EXPECT_EQ(served.end(signal), 0) << served.err();
    EXPECT_TRUE(has(served.err(), "stopped\n"));
  }
}

TEST(Serve, ABusyPortIsASentence) {
  Served served({});
  const Result second = weft("serve --port " + std::to_string(served.port()));
  EXPECT_EQ(second.exit, 1);
  EXPECT_TRUE(has(second.err, "weft: port " + std::to_string(served.port()) + " of 127.0.0.1 is in use by another program"))
      << second.err;
}

TEST(Serve, MistakesAreSentences) {
  const ::weft::Folder folder;
  const std::string file = folder.write("key", "0123456789abcdef\n");
  ::chmod(file.c_str(), 0644);
  EXPECT_TRUE(has(weft("serve --port 0 --host 0.0.0.0").err, "name its file with --api-key-file"));
  EXPECT_TRUE(has(weft("serve --port 0 --api-key-file " + file).err, "chmod 600"));
  EXPECT_TRUE(has(weft("serve --port 0 --host no.such.host.invalid").err, "there is no address no.such.host.invalid"));
  EXPECT_TRUE(has(weft("serve --port 0 --memory 1M").err, "1"));
  EXPECT_EQ(weft("serve --port 65536").exit, 2);
  EXPECT_EQ(weft("serve --kv 9v9").exit, 2);
  for (const char* arguments : {"--port 0 --host 0.0.0.0", "--port 0 --memory 1M"})
    EXPECT_EQ(weft(std::string("serve ") + arguments).exit, 1);
}

TEST(Serve, ASecondSignalEndsWhatRuns) {
  Served served({"--capacity", "30000", "--drain", "60"});
  json request{{"prompt", "The ship"}, {"max_tokens", 29000}, {"stream", true}};
  HttpClient client(served.port());
  const std::string body = request.dump();
  client.send(HttpClient::head("POST", "/v1/completions", "Host: localhost\r\nContent-Type: application/json\r\n", body.size()) +
              body);
  ASSERT_TRUE(client.await("data: "));
  served.signal(SIGTERM);
  EXPECT_TRUE(::weft::eventually([&] { return !HttpClient(served.port()).connected(); }));
  EXPECT_EQ(served.end(SIGTERM), 0) << served.err();
}

// A session that was saved resumes in the next process; kill -9 saves nothing and loses only that.
TEST(Serve, SessionsSurviveARestart) {
  const ::weft::Folder folder;
  const std::vector<std::string> arguments = {"--sessions", folder.path().string()};
  std::string answer;
  int64_t total = 0;
  {
    Served served(arguments);
    const json one = post(served.port(), "/v1/chat/completions", in_session({"The ship was at sea, and the captain"})).json();
    answer = one["choices"][0]["message"]["content"];
    total = one["usage"]["total_tokens"];
    EXPECT_EQ(served.end(SIGTERM), 0) << served.err();
  }
  const std::vector<std::string> more = {"The ship was at sea, and the captain", answer, "Then the mate"};
  const auto cached = [&](Served& served) {
    const json two = post(served.port(), "/v1/chat/completions", in_session(more)).json();
    return two["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
  };
  {
    Served served(arguments);
    EXPECT_GE(cached(served), total - 1);
    EXPECT_EQ(served.end(SIGKILL), -SIGKILL);
  }
  Served served(arguments);
  ASSERT_NE(served.port(), 0) << served.err();
  EXPECT_GE(cached(served), 0);
  // Damaged files are refused by name.
  EXPECT_EQ(served.end(SIGTERM), 0) << served.err();
  for (const auto& file : std::filesystem::directory_iterator(folder.path()))
    if (file.path().extension() == ".state") std::filesystem::resize_file(file.path(), 100);
  Served damaged(arguments);
  const ::weft::HttpAnswer refused = post(damaged.port(), "/v1/chat/completions", in_session(more));
  EXPECT_EQ(refused.status, 400) << refused.body;
  EXPECT_EQ(refused.param(), "session") << refused.body;
  EXPECT_EQ(get(damaged.port(), "/health").status, 200);
}

}  // namespace
