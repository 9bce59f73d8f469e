// Parses Jinja programs: see jinja.h.
#include "model/chat/jinja.h"

#include <algorithm>

namespace weft::model {
namespace {

bool is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// A piece of a program: text, or what is between the delimiters of an output, a statement or a comment.
struct Piece {
  enum class Kind { text, output, statement, comment } kind = Kind::text;
  std::string_view code;
  bool strips_before = false, strips_after = false;  // {%- and -%}
};

class Splitter {
 public:
  explicit Splitter(std::string_view program) : rest_(program) {
    if (rest_.ends_with('\n')) rest_.remove_suffix(1);  // as Jinja does
  }

  std::vector<Piece> split() {
    std::vector<Piece> pieces;
    while (!rest_.empty()) {
      const size_t begin = next_delimiter();
      if (begin > 0) pieces.push_back({Piece::Kind::text, rest_.substr(0, begin)});
      rest_.remove_prefix(begin);
      if (!rest_.empty()) pieces.push_back(tag());
    }
    return pieces;
  }

 private:
  size_t next_delimiter() const {
    for (size_t at = 0; (at = rest_.find('{', at)) != std::string_view::npos; ++at)
      if (at + 1 < rest_.size() && (rest_[at + 1] == '{' || rest_[at + 1] == '%' || rest_[at + 1] == '#')) return at;
    return rest_.size();
  }

  Piece tag() {
    Piece piece;
    const char opens = rest_[1];
    piece.kind = opens == '{' ? Piece::Kind::output : opens == '%' ? Piece::Kind::statement : Piece::Kind::comment;
    rest_.remove_prefix(2);
    const std::string_view close = opens == '{' ? "}}" : opens == '%' ? "%}" : "#}";
    if (rest_.starts_with('-')) {
      piece.strips_before = true;
      rest_.remove_prefix(1);
    } else if (rest_.starts_with('+')) {
      throw JinjaFault{"has a tag {%+, which is not supported"};
    }
    size_t end = 0;
    char quote = 0;
    for (;; ++end) {
      if (end >= rest_.size()) throw JinjaFault{"has a tag that does not end"};
      const char c = rest_[end];
      if (piece.kind != Piece::Kind::comment) {
        if (quote != 0) {
          if (c == '\\') ++end;
          if (c == quote) quote = 0;
          continue;
        }
        if (c == '\'' || c == '"') quote = c;
      }
      if (quote == 0 && rest_.substr(end).starts_with(close)) break;
    }
    piece.code = rest_.substr(0, end);
    rest_.remove_prefix(end + 2);
    if (piece.code.ends_with('-')) {
      piece.strips_after = true;
      piece.code.remove_suffix(1);
    }
    return piece;
  }

  std::string_view rest_;
};

// The text of pieces[i], after what the tags around it strip.
std::string_view kept_text(const std::vector<Piece>& pieces, size_t i) {
  std::string_view text = pieces[i].code;
  const auto is_block = [](const Piece& piece) {
    return piece.kind == Piece::Kind::statement || piece.kind == Piece::Kind::comment;
  };
  const Piece* const before = i > 0 ? &pieces[i - 1] : nullptr;
  const Piece* const after = i + 1 < pieces.size() ? &pieces[i + 1] : nullptr;
  const bool begins_line = !before;
  if (before && before->strips_after)
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  else if (before && is_block(*before) && text.starts_with('\n'))
    text.remove_prefix(1);
  if (after && after->strips_before) {
    while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  } else if (after && is_block(*after)) {
    const size_t last = text.find_last_not_of(" \t");
    if (last == std::string_view::npos ? begins_line || pieces[i].code.find('\n') != std::string_view::npos : text[last] == '\n')
      text = text.substr(0, last == std::string_view::npos ? 0 : last + 1);
  }
  return text;
}

// Code in one spelling: see JinjaNode::code.
std::string spelled(std::string_view code) {
  std::string out;
  bool blank = false;
  for (size_t at = 0; at < code.size(); ++at) {
    const char c = code[at];
    if (is_blank(c)) {
      blank = true;
      continue;
    }
    if (c == '\'' || c == '"') {
      size_t end = at + 1;
      while (end < code.size() && code[end] != c) end += code[end] == '\\' ? 2 : 1;
      std::string inside;
      for (char one : code.substr(at + 1, std::min(end, code.size()) - at - 1)) {
        if (one == '\n')
          inside += "\\n";
        else if (one == '\'')
          inside += "\\'";
        else
          inside += one;
      }
      const bool name = out.ends_with('[') && code.substr(std::min(end + 1, code.size())).starts_with(']') && !inside.empty() &&
                        std::all_of(inside.begin(), inside.end(), is_word);
      if (name) {
        out.back() = '.';
        out += inside;
        ++end;
      } else {
        out += '\'' + inside + '\'';
      }
      at = end;
    } else {
      if (blank && is_word(c) && !out.empty() && is_word(out.back())) out += ' ';
      out += c == '~' ? '+' : c;
    }
    blank = false;
  }
  return out;
}

class Parser {
 public:
  explicit Parser(std::string_view program) : pieces_(Splitter(program).split()) {}

  std::vector<JinjaNode> parse() {
    std::vector<JinjaNode> nodes = body(0);
    if (at_ < pieces_.size()) throw JinjaFault{"has a {% " + spelled(pieces_[at_].code) + " %} without its beginning"};
    return nodes;
  }

 private:
  static std::string word_of(const std::string& code) { return code.substr(0, code.find_first_of(" ('[")); }

  // Nodes up to a statement that ends or continues the block, or to the end.
  std::vector<JinjaNode> body(size_t depth) {
    if (depth > kMaxJinjaDepth) throw JinjaFault{"nests deeper than " + std::to_string(kMaxJinjaDepth) + " blocks"};
    std::vector<JinjaNode> nodes;
    for (; at_ < pieces_.size(); ++at_) {
      const Piece& piece = pieces_[at_];
      if (piece.kind == Piece::Kind::comment) continue;
      if (piece.kind == Piece::Kind::text) {
        if (const std::string_view text = kept_text(pieces_, at_); !text.empty())
          nodes.push_back({JinjaNode::Kind::text, std::string(text), {}});
        continue;
      }
      std::string code = spelled(piece.code);
      if (piece.kind == Piece::Kind::output) {
        nodes.push_back({JinjaNode::Kind::output, std::move(code), {}});
        continue;
      }
      const std::string word = word_of(code);
      if (word == "set") {
        nodes.push_back({JinjaNode::Kind::set, std::move(code), {}});
      } else if (word == "if" || word == "for" || word == "macro") {
        nodes.push_back(block(word, code, depth));
      } else if (word == "generation" || word == "endgeneration") {
        continue;  // a generation block only marks text for training
      } else {
        return nodes;
      }
    }
    return nodes;
  }

  // Parses from the statement that begins a block up to the statement that ends it. at_ is then at that statement.
  JinjaNode block(const std::string& word, const std::string& code, size_t depth) {
    JinjaNode node{word == "if"    ? JinjaNode::Kind::condition
                   : word == "for" ? JinjaNode::Kind::loop
                                   : JinjaNode::Kind::macro,
                   {},
                   {}};
    std::string test = after_word(code, word);
    for (bool last = false;;) {
      ++at_;
      node.branches.push_back({std::move(test), body(depth + 1)});
      if (at_ >= pieces_.size()) throw JinjaFault{"has a {% " + word + " %} without its end"};
      std::string next = spelled(pieces_[at_].code);
      if (next == "end" + word) return node;
      const bool continues = word == "if" && !last && (word_of(next) == "elif" || next == "else");
      if (!continues) throw JinjaFault{"has the statement {% " + next + " %}, which is not supported"};
      last = next == "else";
      test = last ? "" : after_word(next, "elif");
    }
  }

  static std::string after_word(const std::string& code, const std::string& word) {
    std::string rest = code.substr(word.size());
    if (rest.starts_with(' ')) rest.erase(0, 1);
    return rest;
  }

  std::vector<Piece> pieces_;
  size_t at_ = 0;
};

}  // namespace

std::vector<JinjaNode> parse_jinja(std::string_view program) { return Parser(program).parse(); }

std::string jinja_text(const std::vector<JinjaNode>& nodes) {
  std::string out;
  for (const JinjaNode& node : nodes) switch (node.kind) {
      case JinjaNode::Kind::text: out += node.code; break;
      case JinjaNode::Kind::output: out += "{{" + node.code + "}}"; break;
      case JinjaNode::Kind::set: out += "{%" + node.code + "%}"; break;
      case JinjaNode::Kind::condition: {
        const char* word = "if";
        for (const JinjaNode::Branch& branch : node.branches) {
          out += branch.test.empty() ? std::string("{%else%}") : std::string("{%") + word + " " + branch.test + "%}";
          out += jinja_text(branch.body);
          word = "elif";
        }
        out += "{%endif%}";
        break;
      }
      case JinjaNode::Kind::loop:
      case JinjaNode::Kind::macro: {
        const std::string word = node.kind == JinjaNode::Kind::loop ? "for" : "macro";
        out += "{%" + word + " " + node.branches[0].test + "%}" + jinja_text(node.branches[0].body) + "{%end" + word + "%}";
        break;
      }
    }
  return out;
}

}  // namespace weft::model
