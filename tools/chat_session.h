// A conversation with a model: its messages, its tokens, and the state of the tokens that were prefilled.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/chat.h"
#include "weft/generate.h"

namespace weft::tools {

// The options of the command line that a ChatSession needs.
struct ChatSettings {
  GenerateOptions options;  // for every answer; the seed grows with the number of messages
  std::string kv;
  std::optional<bool> thinking;  // ChatRendering::thinking
  std::string system;
};

// How an answer came about.
struct ChatAnswer {
  Generation generation;
  bool read = true;           // false: interrupted during the prefill of the message, which is then forgotten
  bool only_thought = false;  // the text ended before its thinking did
  int64_t reread = 0;         // tokens of this answer that the next turn prefills again, because the template rewrites the answer
  GenerationPhase prompt;     // all prefill of this turn
};

// All tokens belong to one sequence of a state. The state holds the first of them; the next turn prefills the others with its
// message, so a turn prefills new tokens only. Where a template rewrites the last answer (old thinking is dropped), the session
// returns to the snapshot before that answer, and the next turn prefills the rewritten answer.
//
// Functions throw weft::Error or std::runtime_error with a sentence, and then have changed nothing.
class ChatSession {
 public:
  ChatSession(const Model& model, const Stream& stream, HybridState& state, ChatTemplate chat, ChatSettings settings);
  ~ChatSession();

  // Receives the pieces of an answer as they come; false stops the answer.
  using OnText = std::function<bool(const ThinkingFilter::Pieces& pieces, bool thinking)>;
  // Calls `before` with the tokens of the conversation, before the prefill.
  ChatAnswer say(const std::string& text, const OnText& on_text, const std::function<void(int64_t tokens)>& before,
                 const PromptCallback& on_prompt);

  void undo();                         // forgets the last message of the user and its answer
  void fork(const std::string& name);  // keeps the conversation so far under `name`
  void switch_to(const std::string& name);
  void set_system(const std::string& text);  // changes the first message; the next turn prefills everything again
  // The file stays locked until the session ends or uses another file, so that no turn of another process is lost.
  void save(const std::string& file, const StateLockOptions& options);
  // Returns the end of the conversation as text.
  std::string load(const std::string& file, const StateLockOptions& options);

  const std::string& branch() const { return name_; }
  std::vector<std::string> branches() const;  // all names in order
  std::string system() const;                 // empty: there is no system message
  int64_t tokens() const { return static_cast<int64_t>(now_.tokens.size()); }
  int64_t unread() const { return tokens() - state_.tokens(0); }
  size_t turns() const;  // messages of the user
  size_t undoable() const { return now_.undo.size(); }
  int64_t snapshot_bytes() const;  // bytes of the snapshots of undo and of other branches, without KV pages

 private:
  struct Point {                                   // a point of the conversation to return to
    std::shared_ptr<const HybridSnapshot> memory;  // null: the state was empty
    std::vector<int32_t> tokens;
    size_t messages = 0;
  };
  struct Branch {
    std::vector<ChatMessage> messages;
    std::vector<int32_t> tokens;
    std::deque<Point> undo;  // before each message of the user
    size_t unknown = 0;      // messages of a loaded file, whose texts are not known
  };
  struct Parked {
    Branch branch;
    std::shared_ptr<const HybridSnapshot> memory;
  };

  Point here();
  void go_to(const Point& point);
  std::shared_ptr<const HybridSnapshot> snapshot();
  std::vector<int32_t> encoded(ChatRendering rendering) const;
  void start_messages();
  void settle(const Generation& g, size_t written, const Point& stable, ChatAnswer& answer);
  std::string rewritten_answer(std::vector<ChatSegment>& segments) const;

  const Model& model_;
  const Stream& stream_;
  HybridState& state_;
  const ChatTemplate chat_;
  ChatSettings settings_;
  std::string name_ = "main";
  Branch now_;
  std::map<std::string, Parked> others_;
  std::optional<StateLock> lock_;  // the lock of the file `locked_`
  std::string locked_;
};

}  // namespace weft::tools
