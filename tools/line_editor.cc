// Reading messages: see line_editor.h.
#include "tools/line_editor.h"

#include <dlfcn.h>
#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstring>
#include <cwchar>
#include <deque>
#include <functional>
#include <stdexcept>

#include "tools/interrupt.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

constexpr size_t kMostLine = 64 << 20;  // bytes

// Waits for a byte of standard input; returns false after an interrupt. Calls on_idle() a few times a second while it waits.
bool wait_for_input(const std::function<void()>& on_idle = {}) {
  constexpr int kOften = 250;  // milliseconds: a signal may come just before poll() begins to wait
  for (;;) {
    if (Interrupt::asked()) return false;
    pollfd wanted{STDIN_FILENO, POLLIN, 0};
    if (::poll(&wanted, 1, kOften) > 0) return true;
    if (on_idle) on_idle();
  }
}

// Bytes of standard input, read in blocks.
class PlainLines : public LineSource {
 public:
  explicit PlainLines(bool terminal) : terminal_(terminal) {}
  bool interactive() const override { return terminal_; }

  Line read(const std::string& prompt) override {
    if (terminal_) {
      show("{}", prompt);
      flush_output();
    }
    std::string line;
    for (;;) {
      if (const size_t end = read_.find('\n', at_); end != std::string::npos) {
        line.append(read_, at_, end - at_);
        at_ = end + 1;
        if (line.ends_with('\r')) line.pop_back();
        return {End::line, std::move(line)};
      }
      line.append(read_, at_);
      read_.clear();
      at_ = 0;
      if (line.size() > kMostLine) throw std::runtime_error("standard input: a line has more than 64 MiB");
      if (!wait_for_input()) return {End::interrupted, std::move(line)};
      char buffer[1 << 14];
      const ssize_t got = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got <= 0) return {line.empty() ? End::finished : End::line, std::move(line)};
      read_.assign(buffer, static_cast<size_t>(got));
    }
  }

 private:
  bool terminal_;
  std::string read_;
  size_t at_ = 0;
};

// The functions of libedit, loaded at run time, so that the command runs without it.
struct Editline {
  void* library = nullptr;
#define WEFT_EDITLINE(X) \
  X(el_init) X(el_end) X(el_gets) X(el_set) X(el_resize) X(el_source) X(history_init) X(history_end) X(history)
#define WEFT_EDITLINE_MEMBER(name) decltype(&::name) name = nullptr;
  WEFT_EDITLINE(WEFT_EDITLINE_MEMBER)
#undef WEFT_EDITLINE_MEMBER

  bool load() {
    for (const char* name : {"libedit.so.2", "libedit.so.0"})
      if (!library) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) return false;
    bool all = true;
#define WEFT_EDITLINE_FIND(name) all = (name = reinterpret_cast<decltype(&::name)>(::dlsym(library, #name))) != nullptr && all;
    WEFT_EDITLINE(WEFT_EDITLINE_FIND)
#undef WEFT_EDITLINE_FIND
#undef WEFT_EDITLINE
    return all;
  }
};

class EditedLines : public LineSource {
 public:
  explicit EditedLines(const Editline& library) : library_(library) {
    output_ = is_terminal(Channel::out) ? stdout : stderr;
    edit_ = library_.el_init("weft", stdin, output_, stderr);
    history_ = library_.history_init();
    if (!edit_ || !history_) throw std::runtime_error("libedit does not start");
    g_current = this;
    HistEvent event{};
    library_.history(history_, &event, H_SETSIZE, 1000);
    library_.history(history_, &event, H_SETUNIQUE, 1);
    library_.el_set(edit_, EL_PROMPT, &EditedLines::prompt_of);
    library_.el_set(edit_, EL_EDITOR, "emacs");
    library_.el_set(edit_, EL_SIGNAL, 0);
    library_.el_set(edit_, EL_HIST, library_.history, history_);
    library_.el_set(edit_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    library_.el_set(edit_, EL_BIND, "\\e[3~", "ed-delete-next-char", nullptr);
    library_.el_set(edit_, EL_BIND, "\\e[1;5C", "em-next-word", nullptr);
    library_.el_set(edit_, EL_BIND, "\\e[1;5D", "ed-prev-word", nullptr);
    library_.el_source(edit_, nullptr);  // reads ~/.editrc
    library_.el_set(edit_, EL_GETCFN, &EditedLines::next_of);
  }
  ~EditedLines() override {
    library_.history_end(history_);
    library_.el_end(edit_);
    g_current = nullptr;
  }
  EditedLines(const EditedLines&) = delete;
  EditedLines& operator=(const EditedLines&) = delete;

  bool interactive() const override { return true; }

  Line read(const std::string& prompt) override {
    prompt_ = prompt;
    interrupted_ = pasted_ = false;
    library_.el_resize(edit_);
    width_ = terminal_width();
    pollfd waiting{STDIN_FILENO, POLLIN, 0};
    ahead_ = ::poll(&waiting, 1, 0) > 0;
    brackets(true);
    int count = 0;
    const char* const got = library_.el_gets(edit_, &count);
    brackets(false);
    if (!got || count <= 0) {
      const bool typed = typed_;
      typed_ = false;
      if (interrupted_) return {End::interrupted, typed ? "typed" : ""};
      return {};
    }
    typed_ = false;
    std::string line(got, static_cast<size_t>(count));
    if (line.ends_with('\n')) line.pop_back();
    if (line.find_first_not_of(" \t\n") != std::string::npos) {
      HistEvent event{};
      library_.history(history_, &event, H_ENTER, line.c_str());
    }
    return {End::line, std::move(line), pasted_};
  }

 private:
  static EditedLines* g_current;  // global, because callbacks of libedit carry no pointer of the caller
  static char* prompt_of(EditLine*) { return g_current->prompt_.data(); }
  static int next_of(EditLine*, wchar_t* out) { return g_current->next(*out); }

  // Asks the terminal to mark pasted text (bracketed paste).
  void brackets(bool on) {
    if (!can_erase(output_ == stdout ? Channel::out : Channel::err)) return;
    write_raw_text(output_ == stdout ? Channel::out : Channel::err, on ? "\x1b[?2004h" : "\x1b[?2004l");
    std::fflush(output_);
  }

  // After Ctrl-Z and fg the terminal is in line mode again, and its size may have changed.
  void follow_terminal() {
    termios settings{};
    if (::tcgetattr(STDIN_FILENO, &settings) == 0 && (settings.c_lflag & ICANON) != 0) {
      library_.el_set(edit_, EL_PREP_TERM, 0);
      library_.el_set(edit_, EL_PREP_TERM, 1);
      library_.el_set(edit_, EL_REFRESH);
    }
    if (const size_t width = terminal_width(); width != width_) {
      width_ = width;
      library_.el_resize(edit_);
    }
  }

  // The next character for libedit: 1, or 0 at the end of the input, or -1 at an interrupt.
  int next(wchar_t& out) {
    for (;;) {
      if (!queue_.empty()) {
        out = queue_.front();
        queue_.pop_front();
        typed_ = true;
        return 1;
      }
      wchar_t c = 0;
      if (const int got = character(c); got <= 0) return got;
      if (c == L'\x1b') {
        read_escape();
        continue;
      }
      if (pasting_) {
        constexpr wchar_t kQuote = 0x16;  // Ctrl-V: the next character is text
        if (c == L'\r') c = L'\n';
        if (c == L'\n' || c == L'\t') {
          pasted_ = pasted_ || c == L'\n';
          queue_.insert(queue_.end(), {kQuote, c});
        } else if (c >= 0x20 && c != 0x7F) {
          queue_.push_back(c);
        }
        continue;
      }
      queue_.push_back(c);
    }
  }

  // Reads the rest of ESC [200~ and ESC [201~, which enclose pasted text. Other keys go to the queue.
  void read_escape() {
    constexpr int kSoon = 30;  // milliseconds between the bytes of one key
    std::wstring key = L"\x1b";
    constexpr std::wstring_view kBegin = L"\x1b[200~", kEnd = L"\x1b[201~";
    while (key != kBegin && key != kEnd) {
      pollfd wanted{STDIN_FILENO, POLLIN, 0};
      wchar_t c = 0;
      const bool more = (kBegin.starts_with(key) || kEnd.starts_with(key)) && ::poll(&wanted, 1, kSoon) > 0 && character(c) > 0;
      if (!more) {
        if (!pasting_) queue_.insert(queue_.end(), key.begin(), key.end());
        return;
      }
      key += c;
    }
    pasting_ = key == kBegin;
  }

  // Reads one UTF-8 character from the terminal. Drops bytes that are no UTF-8.
  int character(wchar_t& out) {
    std::mbstate_t state{};
    for (;;) {
      if (!wait_for_input([this] { follow_terminal(); })) {
        interrupted_ = true;
        errno = EINTR;
        return -1;
      }
      char byte = 0;
      const ssize_t got = ::read(STDIN_FILENO, &byte, 1);
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got <= 0) return 0;
      // A Ctrl-D that was typed before the prompt arrives as a zero byte, because the terminal was in line mode then.
      if (byte == '\0' && ahead_) byte = 4;
      ahead_ = false;
      if (byte == '\0') continue;
      const size_t used = std::mbrtowc(&out, &byte, 1, &state);
      if (used == static_cast<size_t>(-2)) continue;
      if (used == static_cast<size_t>(-1)) {
        state = {};
        continue;
      }
      return 1;
    }
  }

  Editline library_;
  EditLine* edit_ = nullptr;
  History* history_ = nullptr;
  std::FILE* output_ = nullptr;
  std::string prompt_;
  std::deque<wchar_t> queue_;
  size_t width_ = 0;
  bool ahead_ = false, interrupted_ = false, typed_ = false, pasting_ = false, pasted_ = false;
};
EditedLines* EditedLines::g_current = nullptr;

// Sets a UTF-8 locale for characters, because texts are UTF-8 in every locale.
bool use_utf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(::nl_langinfo(CODESET), "UTF-8") == 0) return true;
  return std::setlocale(LC_CTYPE, "C.UTF-8") != nullptr;
}

}  // namespace

std::unique_ptr<LineSource> standard_input_lines() {
  const bool terminal = isatty(STDIN_FILENO) != 0;
  Editline library;
  if (terminal && (can_erase(Channel::out) || can_erase(Channel::err)) && library.load() && use_utf8())
    return std::make_unique<EditedLines>(library);
  return std::make_unique<PlainLines>(terminal);
}

LineSource::Line read_message(LineSource& lines, const std::string& prompt) {
  using End = LineSource::End;
  constexpr std::string_view kBlock = "\"\"\"";
  const std::string more = "... ";
  LineSource::Line first = lines.read(prompt);
  if (first.end != End::line || first.literal) return first;
  std::string text = std::move(first.text);
  if (text.starts_with(kBlock)) {
    text.erase(0, kBlock.size());
    bool open = true;
    while ((open = !text.ends_with(kBlock))) {
      const LineSource::Line next = lines.read(more);
      if (next.end == End::interrupted) return {End::interrupted, "typed"};
      if (next.end == End::finished) break;
      text += "\n" + next.text;
    }
    if (!open) text.resize(text.size() - kBlock.size());
    if (text.starts_with('\n')) text.erase(0, 1);
    if (text.ends_with('\n')) text.pop_back();
    return {End::line, text, true};
  }
  while (text.ends_with('\\')) {
    const LineSource::Line next = lines.read(more);
    if (next.end == End::interrupted) return {End::interrupted, "typed"};
    text.back() = '\n';
    if (next.end == End::finished) break;
    text += next.text;
  }
  return {End::line, text};
}

}  // namespace weft::tools
