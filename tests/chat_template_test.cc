// Chat templates: golden strings of transformers, refusals, template files, tokens of contents, and the filter for thinking.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/tokenizer/tokenizer.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "weft/chat.h"
#include "weft/status.h"

namespace weft {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

const fs::path kGolden = WEFT_SOURCE_DIR "/cases/golden/chat";

const json& golden() {
  static const json read = json::parse(text_of(kGolden / "chats.json"));
  return read;
}

std::string program_text(const json& program) {
  const std::string file = program.at("file");
  std::string text = file.empty() ? "" : text_of(kGolden / "templates" / (file + ".jinja"));
  for (const json& edit : program.at("edits")) {
    const std::string from = edit.at(0), to = edit.at(1);
    text.replace(text.find(from), from.size(), to);
  }
  return text;
}

ChatTemplate program(const std::string& name) {
  for (const json& one : golden().at("programs"))
    if (one.at("name") == name) return ChatTemplate::recognise(program_text(one), name);
  throw std::runtime_error("no program " + name);
}

std::vector<ChatMessage> messages_of(const json& chat) {
  std::vector<ChatMessage> messages;
  for (const json& one : chat) {
    messages.push_back({one.at("role"), one.at("content"), {}});
    if (one.contains("reasoning_content")) messages.back().thinking = one.at("reasoning_content").get<std::string>();
  }
  return messages;
}

using Names = testing::TestWithParam<size_t>;

TEST_P(Names, RendersAsTransformersDoes) {
  const json& one = golden().at("programs").at(GetParam());
  const ChatTemplate chat = ChatTemplate::recognise(program_text(one), "golden");
  auto wanted = one.at("rendered").begin();
  for (const json& messages : golden().at("chats")) {
    const std::vector<ChatMessage> read = messages_of(messages);
    for (int way = 0; way < 4; ++way, ++wanted) {
      ChatRendering rendering{.generation_prompt = way > 0};
      if (way > 1) rendering.thinking = way == 2;
      if (rendering.thinking && !chat.has_thinking_switch()) continue;
      if (wanted->is_null())
        EXPECT_NE(complaint([&] { chat.render(read, rendering); }), "none") << messages;
      else
        EXPECT_EQ(chat_text(chat.render(read, rendering)), wanted->get<std::string>()) << messages << way;
    }
  }
  EXPECT_EQ(wanted, one.at("rendered").end());
}

// A switch of the program is a switch of ChatTemplate, and only then.
TEST_P(Names, KnowsTheSwitchForThinking) {
  const json& one = golden().at("programs").at(GetParam());
  const ChatTemplate chat = ChatTemplate::recognise(program_text(one), "golden");
  EXPECT_EQ(chat.has_thinking_switch(), one.at("rendered").at(2) != one.at("rendered").at(3));
  const std::vector<ChatMessage> user = {{.role = "user", .content = "x"}};
  if (!chat.has_thinking_switch()) EXPECT_NE(complaint([&] { chat.render(user, {.thinking = false}); }), "none");
}

// What is written up to a message of the user is the beginning of everything later, and parts join to the whole.
TEST_P(Names, GrowsByParts) {
  const ChatTemplate chat = ChatTemplate::recognise(program_text(golden().at("programs").at(GetParam())), "golden");
  for (const json& one : golden().at("chats")) {
    const std::vector<ChatMessage> all = messages_of(one);
    if (complaint([&] { chat.render(all); }) != "none") continue;
    const std::string whole = chat_text(chat.render(all));
    for (size_t cut = 0; cut <= all.size(); ++cut) {
      const std::string a = chat_text(chat.render(all, {.count = cut})), b = chat_text(chat.render(all, {.first = cut}));
      EXPECT_EQ(cut == all.size() ? a : a + b, whole) << one << cut;
      if (cut == 0 || all[cut - 1].role != "user" || all[cut - 1].content.starts_with("<tool_response>")) continue;
      const std::string before = chat_text(chat.render(std::span(all).first(cut), {.generation_prompt = false}));
      EXPECT_EQ(whole.substr(0, before.size()), before) << one << cut;
    }
  }
}

std::string program_name(const testing::TestParamInfo<size_t>& info) {
  std::string name = golden().at("programs").at(info.param).at("name");
  std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  return name;
}
INSTANTIATE_TEST_SUITE_P(Programs, Names, testing::Range<size_t>(0, golden().at("programs").size()), program_name);

}  // namespace
}  // namespace weft
