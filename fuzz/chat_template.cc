// Arbitrary bytes as a chat template: a Jinja program, a tokenizer_config.json, a template file, or a streamed answer. The first byte
// says which. The result is a rendering whose parts join, or a weft::Error.
#include <cstdlib>

#include "model/chat/parts.h"
#include "weft/status.h"

namespace {

using weft::ChatMessage;
using weft::ChatRendering;
using weft::ChatSegment;

std::string text_of(const std::vector<ChatSegment>& segments) {
  std::string text;
  for (const ChatSegment& segment : segments) text += segment.text;
  return text;
}

// A rendering of two halves is the rendering of the whole.
template <class Render>
void check(const Render& render, const std::string& content) {
  const std::vector<ChatMessage> messages = {{"user", content, {}},
                                             {"assistant", "<think>" + content + "</think>x", {}},
                                             {"assistant", content, content},
                                             {"user", "y", {}},
                                             {"assistant", content, {}}};
  const std::string whole = text_of(render(messages, ChatRendering{}));
  for (size_t cut = 0; cut < messages.size(); ++cut)
    if (text_of(render(messages, ChatRendering{.count = cut})) + text_of(render(messages, ChatRendering{.first = cut})) != whole)
      std::abort();
}

// Pieces of any size give the same split.
void check_filter(std::string_view text) {
  for (const bool opened : {false, true}) {
    weft::ThinkingFilter at_once("<think>", "</think>", opened), by_bytes("<think>", "</think>", opened);
    auto wanted = at_once.push(text), rest = at_once.finish();
    std::string thinking, answer;
    for (char c : text) {
      const auto piece = by_bytes.push({&c, 1});
      thinking += piece.thinking;
      answer += piece.answer;
    }
    const auto last = by_bytes.finish();
    if (thinking + last.thinking != wanted.thinking + rest.thinking || answer + last.answer != wanted.answer + rest.answer)
      std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string content(text.substr(0, 40));
  const auto chatml = [&](std::string_view program) {
    const weft::model::ChatMl style = weft::model::recognise_chatml(program, "file");
    check([&](const auto& messages, const ChatRendering& how) { return weft::model::render_chatml(style, messages, how); },
          content);
  };
  try {
    switch (data[0] % 4) {
      case 0: chatml(text); break;
      case 1:
        if (const auto program = weft::model::config_template(text, "file")) chatml(*program);
        break;
      case 2: {
        const weft::model::AffixTemplate style = weft::model::parse_affixes(text, "file");
        check([&](const auto& messages, const ChatRendering& how) { return weft::model::render_affixes(style, messages, how); },
              content);
        break;
      }
      default: check_filter(text);
    }
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 4) != "file") std::abort();
  }
  return 0;
}
