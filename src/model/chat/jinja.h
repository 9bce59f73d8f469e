// Jinja programs as a tree of statements in one spelling, for recognition. No program is run.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft::model {

struct JinjaNode {
  enum class Kind { text, output, set, condition, loop, macro };
  struct Branch {
    std::string test;  // "" for else
    std::vector<JinjaNode> body;
  };
  Kind kind = Kind::text;
  // A text, or code in one spelling: no white space but one blank between words, strings in single quotes, "+" for "~", and x.name
  // for x['name'].
  std::string code;
  std::vector<Branch> branches;  // of a condition; the one branch of a loop or macro
};

// What parse_jinja() throws: "has a tag that does not end".
struct JinjaFault {
  std::string what;
};

// Parses a program under the options that transformers sets (trim_blocks, lstrip_blocks). Throws JinjaFault for a text that is no
// Jinja program, for statements other than if, for, set, macro and generation, and for more than kMaxJinjaDepth levels of blocks.
inline constexpr size_t kMaxJinjaDepth = 24;
std::vector<JinjaNode> parse_jinja(std::string_view program);

// The program as text in one spelling, for comparison with known programs.
std::string jinja_text(const std::vector<JinjaNode>& nodes);

}  // namespace weft::model
