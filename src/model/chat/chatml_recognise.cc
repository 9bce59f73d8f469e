// Recognises the Jinja programs of the ChatML family: every statement that runs without tools and media must be a known one.
#include <algorithm>
#include <array>

#include "files/refuse.h"
#include "model/chat/jinja.h"
#include "model/chat/parts.h"

namespace weft::model {
namespace {

using Nodes = std::vector<JinjaNode>;
using Kind = JinjaNode::Kind;

bool one_of(std::string_view text, std::initializer_list<std::string_view> known) {
  return std::find(known.begin(), known.end(), text) != known.end();
}

// Tests that fail in every chat of Weft: there are messages, no tools, no calls of tools, and contents are texts.
bool never(std::string_view test) {
  constexpr std::string_view kCalls =
      "message.role=='assistant'and message.tool_calls is defined and message.tool_calls is iterable and "
      "message.tool_calls|length>0";
  return test == kCalls ||
         one_of(test, {"tools", "tools and tools is iterable and tools is not mapping", "tools is iterable and tools|length>0",
                       "tools is defined and tools", "not tools is defined", "not messages", "message.tool_calls",
                       "message.tool_calls is defined and message.tool_calls",
                       "message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping",
                       "message.role=='tool'"});
}
// Removes a half of a test that always holds in Weft, because contents are texts.
std::string without_known(std::string test) {
  constexpr std::string_view kKnown = "message.content is string and ";
  for (size_t at = 0; (at = test.find(kKnown, at)) != std::string::npos;) test.erase(at, kKnown.size());
  return test;
}
bool always(std::string_view test) { return one_of(test, {"message.content is string", "content is string"}); }

// Joins literals: 'a'+'b' becomes 'ab'. No literal holds the three characters '+', because quotes inside of a literal are escaped.
std::string joined(std::string code) {
  for (size_t at = 0; (at = code.find("'+'", at)) != std::string::npos;) code.erase(at, 3);
  return code;
}

// Can two outputs be joined, because the code is only a sum? A sum has no filters and no "if" outside of literals.
bool concatenates(std::string_view code) {
  bool quoted = false;
  for (size_t at = 0; at < code.size(); ++at) {
    if (code[at] == '\'') quoted = !quoted;
    if (quoted && code[at] == '\\') ++at;
    if (!quoted && (code[at] == '|' || code.substr(at).starts_with(" if "))) return false;
  }
  return !code.starts_with("raise_exception(");
}

void add_output(Nodes& out, std::string code) {
  if (code.starts_with("raise_exception(")) code = "raise_exception()";
  if (!out.empty() && out.back().kind == Kind::output && concatenates(out.back().code) && concatenates(code))
    out.back().code = joined(out.back().code + "+" + code);
  else
    out.push_back({Kind::output, joined(std::move(code)), {}});
}

// The program without branches that never run in Weft.
Nodes reduced(const Nodes& nodes) {
  Nodes out;
  const auto append = [&](Nodes more) {
    for (JinjaNode& node : more)
      if (node.kind == Kind::output)
        add_output(out, std::move(node.code));
      else
        out.push_back(std::move(node));
  };
  for (const JinjaNode& node : nodes) {
    if (node.kind == Kind::output) {
      add_output(out, node.code);
    } else if (node.kind == Kind::loop || node.kind == Kind::macro) {
      out.push_back({node.kind, {}, {{node.branches[0].test, reduced(node.branches[0].body)}}});
    } else if (node.kind == Kind::condition) {
      JinjaNode left{Kind::condition, {}, {}};
      for (const JinjaNode::Branch& branch : node.branches) {
        if (never(branch.test)) continue;
        const bool last = always(branch.test);
        left.branches.push_back({last ? std::string() : without_known(branch.test), reduced(branch.body)});
        if (last) break;
      }
      if (!left.branches.empty() && left.branches.back().test.empty() && left.branches.back().body.empty())
        left.branches.pop_back();
      if (left.branches.empty()) continue;
      if (left.branches[0].test.empty())
        append(std::move(left.branches[0].body));
      else
        out.push_back(std::move(left));
    } else {
      out.push_back(node);
    }
  }
  return out;
}

class Recogniser {
 public:
  Recogniser(std::string_view program, std::string_view file) : file_(file) {
    if (program.find("<|im_start|>") == std::string_view::npos || program.find("<|im_end|>") == std::string_view::npos)
      refuse("it writes no <|im_start|> and <|im_end|>");
    try {
      nodes_ = reduced(parse_jinja(program));
    } catch (const JinjaFault& fault) {
      refuse("it " + fault.what);
    }
  }

  ChatMl recognise() {
    for (const JinjaNode& node : nodes_) {
      if (prompt_) refuse_node(node);  // no statement may follow the prompt for an answer
      if (node.kind == Kind::macro)
        macro(node);
      else if (node.kind == Kind::loop && one_of(node.branches[0].test, {"message in messages", "message in loop_messages"}))
        messages(node.branches[0].body);
      else if (node.kind == Kind::condition && node.branches[0].test == "add_generation_prompt" && node.branches.size() == 1)
        generation(node);
      else if (!before_messages(jinja_text({node})))
        refuse_node(node);
    }
    if (!prompt_) refuse("it has no prompt of generation");
    if (!user_ || !first_system_) refuse("it does not write all messages of a chat");
    if (style_.assistant >= AssistantForm::query && style_.assistant != AssistantForm::kept && !query_)
      refuse("it does not find the last query");
    return style_;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    files::refuse(file_, "chat_template",
                  "is not of the ChatML family that Weft knows (" + why +
                      "); describe it in a file of texts before and after messages, and name that with --template FILE");
  }
  [[noreturn]] void refuse_node(const JinjaNode& node) const { refuse("it has " + files::in_quotes(jinja_text({node}))); }

  void macro(const JinjaNode& node) {
    const std::string_view name = node.branches[0].test;
    if (name.starts_with("render_content(") && jinja_text(node.branches[0].body) == "{{content}}") renders_ = true;
  }

  // The first system message, the text in place of a missing system message, and the search for the last query.
  bool before_messages(const std::string& text) {
    constexpr std::string_view kDefault =
        R"({%if messages[0].role=='system'%}{{'<|im_start|>system\n'+messages[0].content+'<|im_end|>\n'}})";
    constexpr std::string_view kElse = R"({%else%}{{'<|im_start|>system\n)", kElseEnd = R"(<|im_end|>\n'}}{%endif%})";
    if (one_of(text, {"{%set image_count=namespace(value=0)%}", "{%set video_count=namespace(value=0)%}",
                      "{%set ns=namespace(multi_step_tool=true,last_query_index=messages|length-1)%}"}))
      return true;
    if (text.starts_with(kDefault)) {
      std::string_view rest = std::string_view(text).substr(kDefault.size());
      first_system_ = true;
      if (rest == "{%endif%}") return true;
      if (!rest.starts_with(kElse) || !rest.ends_with(kElseEnd) || rest.size() < kElse.size() + kElseEnd.size()) return false;
      return default_system(rest.substr(kElse.size(), rest.size() - kElse.size() - kElseEnd.size()));
    }
    if (text == R"({%if messages[0].role=='system'%}{%set content=render_content(messages[0].content,false,true)|trim%})"
                R"({{'<|im_start|>system\n'+content+'<|im_end|>\n'}}{%endif%})") {
      trims_system_ = renders_;
      return first_system_ = renders_;
    }
    if (one_of(text,
               {R"({%if messages[0].role=='system'%}{%set system_message=messages[0].content%}{%set loop_messages=messages[1:]%})"
                R"({%else%}{%set loop_messages=messages%}{%endif%})",
                R"({%if system_message is defined%}{{'<|im_end|>\n'}}{%endif%})"}))
      return true;
    if (text == R"({%if system_message is defined%}{{'<|im_start|>system\n'+system_message}}{%endif%})")
      return first_system_ = true;
    if (text ==
        "{%for message in messages[::-1]%}{%set index=(messages|length-1)-loop.index0%}"
        "{%if ns.multi_step_tool and message.role=='user'and not(message.content.startswith('<tool_response>')and "
        "message.content.endswith('</tool_response>'))%}{%set ns.multi_step_tool=false%}{%set ns.last_query_index=index%}"
        "{%endif%}{%endfor%}")
      return query_ = true;
    if (text ==
        "{%for message in messages[::-1]%}{%set index=(messages|length-1)-loop.index0%}"
        "{%if ns.multi_step_tool and message.role=='user'%}{%set content=render_content(message.content,false)|trim%}"
        "{%if not(content.startswith('<tool_response>')and content.endswith('</tool_response>'))%}"
        "{%set ns.multi_step_tool=false%}{%set ns.last_query_index=index%}{%endif%}{%endif%}{%endfor%}")
      return query_ = renders_;
    if (text == "{%if ns.multi_step_tool%}{{raise_exception()}}{%endif%}") return style_.needs_query = query_;
    return false;
  }

  // Reads a literal that has no escapes but line feeds.
  bool default_system(std::string_view literal) {
    for (size_t at = 0; at < literal.size(); ++at) {
      if (literal[at] == '\'' || (literal[at] == '\\' && literal.substr(at, 2) != "\\n")) return false;
      if (literal[at] == '\\') ++at;
      style_.default_system += literal[at] == 'n' && at > 0 && literal[at - 1] == '\\' ? '\n' : literal[at];
    }
    return true;
  }

  // Does the output write a whole message, with its role and its content unchanged?
  static bool is_whole(const std::string& text) {
    return one_of(text, {R"({{'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>\n'}})",
                         R"({{'<|im_start|>'+message.role+'\n'+content+'<|im_end|>\n'}})"});
  }

  void messages(const Nodes& body) {
    if (user_ || assistant_) refuse("it writes the messages twice");
    for (const JinjaNode& node : body) {
      const std::string text = jinja_text({node});
      if (text == "{%set content=message.content%}") continue;
      if (text == "{%set content=render_content(message.content,true)|trim%}" && renders_) {
        style_.trims = true;
      } else if (is_whole(text)) {
        user_ = assistant_ = first_system_ = true;
      } else if (text == R"({%if loop.first and messages[0].role!='system'%}{{'<|im_start|>system\nYou are a helpful )"
                         R"(assistant.<|im_end|>\n'}}{%endif%})") {
        style_.default_system = "You are a helpful assistant.";
      } else if (node.kind == Kind::condition && !user_) {
        style_.later_system = false;
        for (const JinjaNode::Branch& branch : node.branches) role(branch, node);
      } else {
        refuse_node(node);
      }
    }
    if (!user_ || !assistant_) refuse("it does not write all messages of a chat");
    if (trims_system_ != style_.trims) refuse("it trims some messages only");
  }

  // One branch of the test for the role of a message.
  void role(const JinjaNode::Branch& branch, const JinjaNode& node) {
    const std::string body = jinja_text(branch.body), user = "(message.role=='user')or(message.role=='system'and not loop.first)";
    const std::string& test = branch.test;
    if (test == "message.role=='system'" && body == "{%if not loop.first%}{{raise_exception()}}{%endif%}") return;
    if (test.empty() && user_ && assistant_ && (body == "{{raise_exception()}}" || is_whole(body))) return;
    if (is_whole(body) && !user_) {
      if (test == "message.role=='user'") {
        user_ = true;
        return;
      }
      const bool all = test == "message.role=='user'or message.role=='system'or message.role=='assistant'";
      if (all || test == user || test == user + "or(message.role=='assistant'and not message.tool_calls)") {
        user_ = style_.later_system = true;
        assistant_ = test != user;
        return;
      }
    }
    if (one_of(test, {"message.role=='assistant'", "message.role=='assistant'and not message.tool_calls"})) {
      if (assistant_) return;  // the branch for calls of tools
      assistant_ = true;
      if (is_whole(body)) return;
      if (body == R"({%set content=message.content%}{%if not loop.last%}{%set content=message.content.split('</think>')[-1])"
                  R"(.lstrip('\n')%}{%endif%}{{'<|im_start|>'+message.role+'\n'+content+'<|im_end|>\n'}})") {
        style_.assistant = AssistantForm::last;
        return;
      }
      if (thinking_assistant(body)) return;
    }
    refuse_node(node);
  }

  // Recognises how the program finds thinking, and then how it writes thinking.
  bool thinking_assistant(std::string_view body) {
    constexpr std::string_view kOwn =
        "{%set content=message.content%}{%set reasoning_content=''%}"
        "{%if message.reasoning_content is defined and message.reasoning_content is not none%}"
        "{%set reasoning_content=message.reasoning_content%}{%else%}{%if '</think>'in message.content%}"
        R"({%set content=message.content.split('</think>')[-1].lstrip('\n')%})"
        R"({%set reasoning_content=message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1])"
        R"(.lstrip('\n')%}{%endif%}{%endif%})";
    constexpr std::string_view kShared =
        "{%set reasoning_content=''%}{%if message.reasoning_content is string%}"
        "{%set reasoning_content=message.reasoning_content%}{%else%}{%if '</think>'in content%}"
        R"({%set reasoning_content=content.split('</think>')[0].rstrip('\n').split('<think>')[-1])"
        R"(.lstrip('\n')%}{%set content=content.split('</think>')[-1].lstrip('\n')%}{%endif%}{%endif%})";
    constexpr std::string_view kField =
        "{%set reasoning_content=''%}{%if message.reasoning_content is string%}"
        "{%set reasoning_content=message.reasoning_content%}{%endif%}";
    constexpr std::string_view kQuery =
        R"({%if loop.index0>ns.last_query_index%}{%if loop.last or(not loop.last and reasoning_content)%})"
        R"({{'<|im_start|>'+message.role+'\n<think>\n'+reasoning_content.strip('\n')+'\n</think>\n\n'+content.lstrip('\n')}})"
        R"({%else%}{{'<|im_start|>'+message.role+'\n'+content}}{%endif%}{%else%}{{'<|im_start|>'+message.role+'\n'+content}})"
        R"({%endif%}{{'<|im_end|>\n'}})";
    constexpr std::string_view kTrimmed = "{%set reasoning_content=reasoning_content|trim%}{%if ";
    constexpr std::string_view kBlock =
        R"(%}{{'<|im_start|>'+message.role+'\n<think>\n'+reasoning_content+'\n</think>\n\n'+content}})"
        R"({%else%}{{'<|im_start|>'+message.role+'\n'+content}}{%endif%}{{'<|im_end|>\n'}})";
    std::string_view rest = body;
    for (std::string_view way : {kOwn, kShared, kField}) {
      if (!rest.starts_with(way)) continue;
      rest.remove_prefix(way.size());
      style_.splits = way != kField;
      break;
    }
    if (rest.size() == body.size()) return false;
    if (rest == kQuery) {
      style_.assistant = AssistantForm::query;
      return true;
    }
    if (!rest.starts_with(kTrimmed) || !rest.ends_with(kBlock) || rest.size() < kTrimmed.size() + kBlock.size() || !renders_)
      return false;
    const std::string_view test = rest.substr(kTrimmed.size(), rest.size() - kTrimmed.size() - kBlock.size());
    if (one_of(test, {"loop.index0>ns.last_query_index",
                      "(preserve_thinking is defined and preserve_thinking is true)or(loop.index0>ns.last_query_index)"}))
      style_.assistant = AssistantForm::always;
    else if (test == "preserve_thinking is undefined or preserve_thinking is true or loop.index0>ns.last_query_index")
      style_.assistant = AssistantForm::kept;
    else
      return false;
    return true;
  }

  void generation(const JinjaNode& node) {
    const std::string body = jinja_text(node.branches[0].body), open = "<think>\n", none = "<think>\n\n</think>\n\n";
    const std::string plain = R"({{'<|im_start|>assistant\n'}})", off = R"({{'<think>\n\n</think>\n\n'}})",
                      on = R"({{'<think>\n'}})", opened = R"({{'<|im_start|>assistant\n<think>\n'}})";
    const auto set = [&](const std::string& absent, const std::string& with, const std::string& without) {
      style_.prompt = absent;
      style_.prompt_on = with;
      style_.prompt_off = without;
      prompt_ = true;
    };
    const std::string unless = "{%if enable_thinking is defined and enable_thinking is false%}" + off;
    if (body == plain) set("", "", "");
    if (body == opened) set(open, open, open);
    if (body == plain + unless + "{%endif%}") set("", "", none);
    if (body == plain + unless + "{%else%}" + on + "{%endif%}") set(open, open, none);
    if (body == plain + "{%if enable_thinking is defined and enable_thinking is true%}" + on + "{%else%}" + off + "{%endif%}")
      set(none, open, none);
    if (body == opened + "{%if not enable_thinking%}{{'</think>'}}{%endif%}") set(open + "</think>", open, open + "</think>");
    if (!prompt_) refuse_node(node);
  }

  std::string_view file_;
  Nodes nodes_;
  ChatMl style_;
  bool renders_ = false, trims_system_ = false;  // has the macro for contents; trims the first system message
  bool first_system_ = false, user_ = false, assistant_ = false, query_ = false, prompt_ = false;
};

}  // namespace

ChatMl recognise_chatml(std::string_view jinja, std::string_view file) { return Recogniser(jinja, file).recognise(); }

}  // namespace weft::model
