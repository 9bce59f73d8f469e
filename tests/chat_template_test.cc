// Chat templates: golden strings of transformers, refusals, template files, tokens of contents, and the filter for thinking.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/chat_model.h"
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

// A program of the golden file.
std::string named(const std::string& name) {
  for (const json& one : golden().at("programs"))
    if (one.at("name") == name) return program_text(one);
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
  EXPECT_EQ(complaint([&] { chat.render(user, {.thinking = false}); }) == "none", chat.has_thinking_switch());
}

// The rendering up to a message of the user is the beginning of every later rendering, and renderings of parts join to the whole.
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

// A single statement that Weft does not know, at any place, makes Weft refuse the program.
TEST(ChatTemplates, EveryStatementMustBeKnown) {
  const auto said = [](const std::string& program) { return complaint([&] { ChatTemplate::recognise(program, "file"); }); };
  for (const json& one : golden().at("programs")) {
    const std::string text = program_text(one);
    for (const auto& [from, to] : {std::pair<std::string, std::string>{"<|im_end|>", "<|im_end|>!"},
                                   {"message.role", "message.kind"},
                                   {"add_generation_prompt", "not add_generation_prompt"},
                                   {"assistant", "helper"}}) {
      std::string changed = text;
      const size_t at = changed.rfind(from);
      if (at == std::string::npos) continue;
      // Branches for tools may have any statements.
      if (from == "message.role" && changed.find("tool") != std::string::npos) continue;
      changed.replace(at, from.size(), to);
      if (from == "<|im_end|>" && changed.find("tool_response") != std::string::npos) continue;
      EXPECT_NE(said(changed).find("--template FILE"), std::string::npos) << one.at("name") << " " << to;
    }
    for (const char* more :
         {"x", "{{ bos_token }}", "{% set content = 1 %}", "{% if x %}y{% endif %}", "{% for message in messages %}{% endfor %}"}) {
      EXPECT_NE(said(more + text).find("--template FILE"), std::string::npos) << one.at("name") << more;
      EXPECT_NE(said(text + more).find("--template FILE"), std::string::npos) << one.at("name") << more;
    }
  }
  for (const char* bad :
       {"", "{{", "{%", "{#", "{% if a %}", "{% endif %}", "{% elif %}", "{% if a %}{% else %}{% else %}{% endif %}",
        "{%+ if a %}{% endif %}", "{% include 'x' %}", "{% block x %}{% endblock %}", "{{ 'a }}", "{% raw %}"})
    EXPECT_NE(said(std::string("<|im_start|><|im_end|>") + bad).find("file: chat_template is not of the ChatML family"),
              std::string::npos)
        << bad;
  std::string deep = "<|im_start|><|im_end|>";
  for (int i = 0; i < 1000; ++i) deep += "{%if a%}";
  EXPECT_NE(said(deep).find("nests deeper than"), std::string::npos);
  EXPECT_NE(said("no marks").find("it writes no <|im_start|> and <|im_end|>"), std::string::npos);
  EXPECT_NE(said("<|im_start|>\x1b[2J<|im_end|>").find("\\x1b"), std::string::npos) << "escaped for a terminal";
}

// White space and quotes of a program do not matter.
TEST(ChatTemplates, OneSpellingOfManyIsEnough) {
  std::string text = named("qwen3");
  for (size_t at = 0; (at = text.find("\n    ", at)) != std::string::npos;) text.replace(at, 5, "\n\t  ");
  for (size_t at = 0; (at = text.find("message.role", at)) != std::string::npos;) text.replace(at, 12, "message['role']");
  for (size_t at = 0; (at = text.find(" + ", at)) != std::string::npos;) text.replace(at, 3, "~");
  EXPECT_EQ(ChatTemplate::recognise("{# a comment #}" + text, "file").summary(),
            ChatTemplate::recognise(named("qwen3"), "file").summary());
}

TEST(ChatTemplates, AreFoundInAFolder) {
  const Folder folder;
  const auto load = [&] { return ChatTemplate::load(folder.path()); };
  EXPECT_FALSE(load());
  folder.write("tokenizer_config.json", R"({"chat_template":null})");
  EXPECT_FALSE(load());
  const json list = {{{"name", "tool_use"}, {"template", "x"}}, {{"name", "default"}, {"template", named("qwen3.5")}}};
  folder.write("tokenizer_config.json", json{{"chat_template", list}}.dump());
  ASSERT_TRUE(load());
  EXPECT_EQ(load()->summary(), "ChatML, thinks before it answers, drops old thinking");
  folder.write("tokenizer_config.json", json{{"chat_template", named("qwen3")}}.dump());
  EXPECT_EQ(load()->summary(), "ChatML, may think before it answers, drops old thinking");
  folder.write("chat_template.jinja", named("qwen2.5"));  // takes precedence over tokenizer_config.json
  EXPECT_EQ(load()->summary(), "ChatML");
  EXPECT_EQ(load()->stops(), std::vector<std::string>{"<|im_end|>"});
  std::filesystem::remove(folder.path() / "chat_template.jinja");
  std::filesystem::create_symlink("nowhere", folder.path() / "chat_template.jinja");
  EXPECT_NE(complaint(load), "none");
}

TEST(ChatTemplates, RolesAreThree) {
  const ChatTemplate chat = ChatTemplate::recognise(named("qwen3"), "file");
  const std::vector<ChatMessage> tool = {{.role = "user", .content = "x"}, {.role = "to\x1bol", .content = "x"}};
  EXPECT_EQ(complaint([&] { chat.render(tool); }), "chat: messages[1].role is 'to\\x1bol', wanted system, user or assistant");
}

TEST(ChatTemplates, FilesOfTextsBeforeAndAfter) {
  const ChatTemplate chat = ChatTemplate::parse(R"({"begin":"<s>","system":{"before":"S:","after":"\n"},"user":{"before":"U:"},
    "assistant":{"before":"\nA:","after":"</s>"},"thinking":{"open":"[","close":"]"},"stop":["</s>"]})",
                                                "file");
  const std::vector<ChatMessage> messages = {{.role = "system", .content = "a"},
                                             {.role = "user", .content = "b"},
                                             {.role = "assistant", .content = "[x]\n\nc"},
                                             {.role = "user", .content = "d"}};
  EXPECT_EQ(chat_text(chat.render(messages)), "<s>S:a\nU:b\nA:c</s>U:d\nA:");
  EXPECT_EQ(chat_text(chat.render(messages, {.first = 3})), "U:d\nA:");
  EXPECT_EQ(chat_text(chat.render(messages, {.first = 4})), "\nA:");
  EXPECT_EQ(chat.summary(), "template file, may think before it answers, drops old thinking");
  EXPECT_NE(complaint([&] { chat.render(std::vector<ChatMessage>{messages[1], messages[0]}); }), "none");
  for (const char* bad : {"{", "[]", "{}", R"({"user":{}})", R"({"user":{},"assistant":{},"stop":"x"})",
                          R"({"user":{"before":1},"assistant":{}})", R"({"user":{},"assistant":{},"thinking":{}})",
                          R"({"user":{"befor":""},"assistant":{}})", R"({"user":{},"assistant":{},"user":{}})"})
    EXPECT_EQ(complaint([&] { ChatTemplate::parse(bad, "file"); }).rfind("file: ", 0), 0u) << bad;
  EXPECT_EQ(complaint([&] { ChatTemplate::parse(std::string(70000, ' '), "file"); }),
            "file: has 70000 bytes, wanted at most 65536");
}

TEST(ChatTemplates, PlainIsTheTextItself) {
  const ChatTemplate plain = ChatTemplate::plain();
  const std::vector<ChatMessage> messages = {
      {.role = "user", .content = "The ship"}, {.role = "assistant", .content = " sailed."}, {.role = "user", .content = "Then"}};
  EXPECT_EQ(chat_text(plain.render(messages)), "The ship sailed.\nThen");
  EXPECT_TRUE(plain.is_plain());
  EXPECT_FALSE(plain.has_system() || plain.may_think() || plain.has_thinking_switch());
}

// A chat has the tokens of its whole text, unless a content has the text of an added token.
TEST(ChatTokens, AreThoseOfTheTextButForControlTokens) {
  const Folder folder;
  make_chat_model(folder.path(), named("qwen3"));
  const Model model = Model::load(folder.path());
  const ChatTemplate chat = *ChatTemplate::load(folder.path());
  for (const json& one : golden().at("chats")) {
    const std::vector<ChatMessage> messages = messages_of(one);
    const std::vector<ChatSegment> segments = chat.render(messages);
    const std::string text = chat_text(segments);
    const std::vector<int32_t> tokens = encode_chat(model, segments);
    EXPECT_EQ(model.decode(tokens), text);
    bool control = false;  // in a content, as it is written
    for (const ChatSegment& segment : segments)
      for (const char* special : {"<|im_start|>", "<|im_end|>", "<think>", "</think>"})
        control = control || (!segment.control && segment.text.find(special) != std::string::npos);
    EXPECT_EQ(tokens == model.encode(text), !control) << text;
  }
  const std::vector<ChatSegment> parts = {{"<|im_end|>\n", false}, {"\n<|im_end|>", true}, {"e", false}, {"\u0301", false}};
  const std::vector<int32_t> tokens = encode_chat(model, parts);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 6141), 1);
  EXPECT_EQ(tokens.back(), model.encode("\u00e9").back()) << "one normal form across parts";
  EXPECT_TRUE(encode_chat(model, {}).empty());

  GenerateOptions options;
  chat.add_stops(model, options);
  EXPECT_EQ(options.stop_tokens, std::vector<int32_t>{6141});
  ChatTemplate::parse(R"({"user":{},"assistant":{},"stop":["<nowhere>"]})", "file").add_stops(model, options);
  EXPECT_EQ(options.stop_strings, std::vector<std::string>{"<nowhere>"});
}

TEST(Thinking, IsSplitFromTheAnswer) {
  struct Case {
    bool opened;
    const char *text, *thinking, *answer;
  };
  for (const Case& one : {Case{false, "<think>\na\nb\n</think>\n\nc\n", "a\nb", "c\n"},
                          {false, " \n<think>a</think>b", "a", "b"},
                          {false, "a <think>b</think>", "", "a <think>b</think>"},
                          {false, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"},
                          {false, "<thin", "", "<thin"},
                          {false, "\n\n", "", "\n\n"},
                          {false, "</think>a", "", "</think>a"},
                          {false, "<think>a</thin", "a</thin", ""},
                          {true, "a\n</think>\n\n<think>b", "a", "<think>b"},
                          {true, "\n\na\n\n", "a\n\n", ""},
                          {true, "</think>a", "", "a"},
                          {true, "", "", ""}}) {
    for (size_t piece = 1; piece < 12; ++piece) {
      ThinkingFilter filter("<think>", "</think>", one.opened);
      std::string thinking, answer;
      const auto take = [&](const ThinkingFilter::Pieces& pieces) {
        thinking += pieces.thinking;
        answer += pieces.answer;
      };
      const std::string_view text = one.text;
      for (size_t at = 0; at < text.size(); at += piece) take(filter.push(text.substr(at, piece)));
      take(filter.finish());
      EXPECT_EQ(thinking, one.thinking) << one.text << piece;
      EXPECT_EQ(answer, one.answer) << one.text << piece;
    }
  }
  ThinkingFilter none("", "", true);
  EXPECT_EQ(none.push("<think>a").answer, "<think>a");
}

}  // namespace
}  // namespace weft
