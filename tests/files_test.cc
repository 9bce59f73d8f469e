// Readers of untrusted files: JSON with limits, safetensors, mapped files.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <limits>
#include <random>

#include "core/fail.h"
#include "files/json_text.h"
#include "files/json_walk.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "files/safetensors.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "weft/printable.h"

namespace weft::files {
namespace {

// ---- JSON

std::string json_fault(const std::string& text) {
  return complaint([&] { parse_json_object(text, "f.json"); });
}

TEST(Json, ReadsAnObject) {
  const Json json = parse_json_object(R"({"a":[1,[2,{"b":-3.5}],null],"c":{"d":true,"e":"\u00e9"}})", "f.json");
  EXPECT_EQ(json, Json::parse(R"({"a":[1,[2,{"b":-3.5}],null],"c":{"d":true,"e":"é"}})"));
}

TEST(Json, RefusesWhatIsNoPlainObject) {
  EXPECT_EQ(json_fault("[1]"), "f.json: is a list, wanted a JSON object");
  EXPECT_EQ(json_fault("7"), "f.json: is 7, wanted a JSON object");
  EXPECT_EQ(json_fault(""), "f.json: is not JSON at byte 1");
  EXPECT_EQ(json_fault("{\"a\":"), "f.json: is not JSON at byte 6");
  EXPECT_EQ(json_fault("{} x"), "f.json: is not JSON at byte 4");
  EXPECT_EQ(json_fault("{\"a\":\"\xff\"}"), "f.json: is not JSON at byte 7");
  EXPECT_EQ(json_fault("{\"a\":1e999}"), "f.json: is not JSON at byte 10");
  EXPECT_EQ(json_fault("{\"a\":1,\"b\":2,\"a\":3}"), "f.json: repeats the key 'a'");
  EXPECT_EQ(json_fault("{\"a\":" + std::string(31, '[') + std::string(31, ']') + "}"), "none");
  EXPECT_EQ(json_fault("{\"a\":" + std::string(32, '[') + std::string(32, ']') + "}"), "f.json: nests deeper than 32 levels");
  EXPECT_EQ(json_fault(std::string(1 << 20, '[')), "f.json: nests deeper than 32 levels");
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_EQ(json_fault(objects), "f.json: nests deeper than 32 levels");
}

TEST(Json, TreesAreSmall) {
  const std::string text = R"({"a":")" + std::string(kMaxJsonTree, 'x') + "\"}";
  EXPECT_EQ(json_fault(text), "f.json: has a value of " + std::to_string(text.size()) + " bytes, wanted at most 1048576");
}

// ---- JSON without a tree

TEST(JsonWalk, VisitsWhatIsThere) {
  const std::string text =
      " \xEF\xBB\xBF"
      R"( { "a" : [1, "\u00e9\ud83d\ude00\"\/\n" ,{"b":[]}], "k\u0041" :{} , "":-2.5e3,"a":null,"t":true} )";
  std::vector<std::string> seen;
  const JsonPart root = check_json_object(std::string_view(text).substr(1), "f.json");
  root.members([&](std::string_view key, const JsonPart& value) { seen.push_back(std::string(key) + "=" + json_text(value)); });
  EXPECT_EQ(seen, (std::vector<std::string>{"a=a list", "kA=an object", "=-2.5e3", "a=null", "t=true"}));
  EXPECT_EQ(root.size(), 5u);
  seen.clear();
  root.members([&](std::string_view, const JsonPart& value) {
    if (value.is(JsonPart::Kind::list)) value.elements([&](const JsonPart& part) { seen.emplace_back(part.text()); });
  });
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_EQ(JsonPart(seen[0]).whole(), 1u);
  EXPECT_EQ(JsonPart(seen[1]).string(), "\xc3\xa9\xf0\x9f\x98\x80\"/\n");
  EXPECT_EQ(JsonPart(seen[2]).tree("f.json"), Json::parse(R"({"b":[]})"));
  for (const char* number : {"-1", "1.0", "1e3", "18446744073709551616"})
    EXPECT_EQ(JsonPart(number).whole(), std::nullopt) << number;
  EXPECT_EQ(JsonPart("18446744073709551615").whole(), UINT64_MAX);
}

TEST(JsonWalk, RefusesWhatATreeRefuses) {
  for (const std::string& text : {std::string("[1]"), std::string("7"), std::string(), std::string("{\"a\":"), std::string("{} x"),
                                  std::string("{\"a\":\"\xff\"}"), std::string("{\"a\":tru}"), std::string("{\"a\":01}"),
                                  std::string("{\"a\":1,}"), "{\"a\":" + std::string(31, '[') + std::string(31, ']') + "}",
                                  "{\"a\":" + std::string(32, '[') + std::string(32, ']') + "}"})
    EXPECT_EQ(complaint([&] { check_json_object(text, "f.json"); }), json_fault(text)) << text;
}

// Random texts over the characters of JSON, half of them legal texts with one byte changed: accepted exactly where nlohmann's parser
// accepts them, and then walked to the same tree.
TEST(JsonWalk, AcceptsWhatAnotherParserAccepts) {
  std::mt19937 random(1);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const std::string alphabet = "{}[]:,\"\\u0d8c1-.eE+ \n\x01\x7f\xc3\xa9\xed\xf0\x9f\x80tfnrlsa";
  const std::vector<std::string> legal = {R"({"a":[1,-0.5e-1,true,false,null,"x\u00e9\ud83d\ude00"],"b":{"c":[]}})",
                                          "{\"\xc3\xa9\":\"\xf0\x9f\x98\x80\\\\\", \"d\" : [ [ ] , { } ] }", R"({"a":0,"b":10})"};
  const std::function<Json(const JsonPart&)> rebuilt = [&](const JsonPart& part) {
    if (part.is(JsonPart::Kind::string)) return Json(part.string());
    Json out;
    if (part.is(JsonPart::Kind::list)) {
      out = Json::array();
      part.elements([&](const JsonPart& value) { out.push_back(rebuilt(value)); });
    } else if (part.is(JsonPart::Kind::object)) {
      out = Json::object();
      part.members([&](std::string_view key, const JsonPart& value) { out[std::string(key)] = rebuilt(value); });
    } else {
      out = Json::parse(part.text());
    }
    return out;
  };
  int accepted = 0;
  for (int i = 0; i < 40000; ++i) {
    std::string text;
    if (i % 2 == 0) {
      text = legal[below(legal.size())];
      for (size_t changes = 1 + below(2); changes > 0; --changes) text[below(text.size())] = alphabet[below(alphabet.size())];
    } else {
      for (size_t n = below(10); n > 0; --n) text += alphabet[below(alphabet.size())];
      text = "{\"a\":" + text + "}";
    }
    const bool good = complaint([&] { check_json_object(text, "f"); }) == "none";
    const Json tree = Json::parse(text, nullptr, false);
    ASSERT_EQ(good, tree.is_object()) << text;
    if (good) {
      ++accepted;
      ASSERT_EQ(rebuilt(check_json_object(text, "f")), tree) << text;
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Json, FieldsAreCheckedWithSentences) {
  const Json json =
      Json::parse(R"({"n":5,"neg":-1,"x":0.5,"t":"text","f":true,"o":{"i":9},"l":[],"z":null,"big":18446744073709551615})");
  const JsonFields fields(json, "f.json");
  EXPECT_EQ(fields.whole("n", 0, 5), 5);
  EXPECT_EQ(fields.whole("neg", -1, 5), -1);
  EXPECT_EQ(fields.whole("absent", 0, 5), std::nullopt);
  EXPECT_EQ(fields.whole("z", 0, 5), std::nullopt);
  EXPECT_EQ(fields.number("n", 0, 5), 5.0);
  EXPECT_EQ(fields.number("x", 0, 5), 0.5);
  EXPECT_EQ(fields.flag("f"), true);
  EXPECT_EQ(fields.text("t"), "text");
  const auto fault = [&](const auto& read) { return complaint([&] { read(); }); };
  EXPECT_EQ(fault([&] { fields.whole("n", 0, 4); }), "f.json: n is 5, wanted a whole number from 0 to 4");
  EXPECT_EQ(fault([&] { fields.whole("neg", 0, 4); }), "f.json: neg is -1, wanted a whole number from 0 to 4");
  EXPECT_EQ(fault([&] { fields.whole("x", 0, 4); }), "f.json: x is 0.5, wanted a whole number from 0 to 4");
  EXPECT_EQ(fault([&] { fields.whole("t", 0, 4); }), "f.json: t is 'text', wanted a whole number from 0 to 4");
  EXPECT_EQ(fault([&] { fields.whole("big", 0, INT64_MAX); }),
            "f.json: big is 18446744073709551615, wanted a whole number from 0 to 9223372036854775807");
  EXPECT_EQ(fault([&] { fields.number("x", 1, 1e-3); }), "f.json: x is 0.5, wanted a number from 1 to 0.001");
  EXPECT_EQ(fault([&] { fields.flag("n"); }), "f.json: n is 5, wanted true or false");
  EXPECT_EQ(fault([&] { fields.text("l"); }), "f.json: l is a list, wanted a string");
  EXPECT_EQ(fault([&] { fields.array("o"); }), "f.json: o is an object, wanted a list");
  EXPECT_EQ(fault([&] { fields.object("l"); }), "f.json: l is a list, wanted an object");
  EXPECT_EQ(fault([&] { fields.object("o")->whole("i", 0, 1); }), "f.json: o.i is 9, wanted a whole number from 0 to 1");
}

TEST(Refusal, CannotWriteOnTheTerminal) {
  EXPECT_EQ(in_quotes("a\x1b[31m\n\xc3\xa9z"), "'a\\x1b[31m\\n\xc3\xa9z'");
  EXPECT_EQ(in_quotes(std::string(1000, 'x')).size(), 165u);
  EXPECT_EQ(in_quotes(std::string(159, 'x') + "\xc3\xa9"), "'" + std::string(159, 'x') + "...'");  // not half a character
  EXPECT_EQ(complaint([] { refuse("f", "a\nb", "is bad"); }), "f: a\\nb is bad");
  EXPECT_EQ(complaint([] {
              refuse("\x1b]0;x\x07.safetensors", "",
                     "is \xe2\x80\xae"
                     "bad");
            }),
            "\\x1b]0;x\\x07.safetensors: is \\u202ebad");
  try {
    refuse("a\x1b", "b\x1b", "is bad");
  } catch (const Error& error) {
    EXPECT_EQ(error.status().op, "a\\x1b");
    EXPECT_EQ(error.status().argument, "b\\x1b");
  }
  EXPECT_EQ(fail(Code::invalid_argument, "op", "a\x9b", "is \xc2\x9b").message, "op: a\\x9b is \\u009b");
}

TEST(PrintableText, EscapesWhatControlsATerminal) {
  EXPECT_EQ(printable_text("plain, \xc3\xa9, \xe6\x97\xa5, \xf0\x9f\x98\x80 and C:\\dir"),
            "plain, \xc3\xa9, \xe6\x97\xa5, \xf0\x9f\x98\x80 and C:\\dir");
  EXPECT_EQ(printable_text(std::string_view("\0\t\r\x1b\x7f", 5)), "\\x00\\t\\r\\x1b\\x7f");
  EXPECT_EQ(printable_text("\xc2\x85\xc2\x9b"), "\\u0085\\u009b");                         // C1
  EXPECT_EQ(printable_text("\xe2\x81\xa6\xe2\x80\x8f\xd8\x9c"), "\\u2066\\u200f\\u061c");  // directions
  EXPECT_EQ(printable_text("\xf3\xa0\x81\x81"), "\\U000e0041");                            // an invisible tag
  EXPECT_EQ(printable_text("\xff\xc3(\xed\xa0\x80\xc0\xaf\xe2\x80"),
            "\\xff\\xc3(\\xed\\xa0\\x80\\xc0\\xaf\\xe2\\x80");  // not UTF-8
  const std::string once = printable_text("\x1b[2J\n\xff");
  EXPECT_EQ(printable_text(once), once);
}

// ---- safetensors

std::vector<uint8_t> safetensors(const std::string& header, size_t data_bytes) {
  const std::string file = safetensors_bytes(header, std::string(data_bytes, '\0'));
  return {file.begin(), file.end()};
}
std::string parse_fault(const std::string& header, size_t data_bytes) {
  return complaint([&] { parse_safetensors(safetensors(header, data_bytes), "f"); });
}

TEST(Safetensors, ReadsWhatIsThere) {
  std::vector<uint8_t> file = safetensors(
      R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]},"__metadata__":{"k":"v"}})",
      8);
  file[file.size() - 4] = 7;
  const SafeTensors read = parse_safetensors(file);
  EXPECT_EQ(read.metadata.at("k"), "v");
  EXPECT_EQ(read.tensors.at("a").shape, std::vector<int64_t>{2});
  EXPECT_EQ(read.tensors.at("a").bytes[4], 7);
  EXPECT_EQ(read.tensors.at("e").bytes.size(), 0u);
}

TEST(Safetensors, KnowsDTypesByTheirWholeNames) {
  EXPECT_EQ(safetensors_element_bytes("U8"), 1);
  EXPECT_EQ(safetensors_element_bytes("BF16"), 2);
  EXPECT_EQ(safetensors_element_bytes("F64"), 8);
  for (const char* wrong : {"", " ", "U8 I8", "F", "8", "F32 ", "f32"}) EXPECT_EQ(safetensors_element_bytes(wrong), 0) << wrong;
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"U8 I8","shape":[4],"data_offsets":[0,4]}})", 4),
            "f: tensor a has the unknown dtype 'U8 I8'");
  EXPECT_EQ(parse_fault(R"({"__metadata__":{"a":"","a":""}})", 0), "f (header): repeats the key 'a'");
  EXPECT_EQ(parse_fault(R"({"__metadata__":{},"__metadata__":{}})", 0), "f (header): repeats the key '__metadata__'");
}

TEST(Safetensors, RefusesTheRest) {
  const std::string a = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_EQ(complaint([] { parse_safetensors({}, "f"); }), "f: has 0 bytes, wanted at least 8");
  const std::vector<uint8_t> huge(16, 0xFF);
  EXPECT_EQ(complaint([&] { parse_safetensors(huge, "f"); }), "f: has a header of 18446744073709551615 bytes, the file has 16");
  EXPECT_EQ(parse_fault("[1]", 0), "f (header): is a list, wanted a JSON object");
  EXPECT_EQ(parse_fault("{\"a\":", 0), "f (header): is not JSON at byte 6");
  EXPECT_EQ(parse_fault(std::string(100000, '['), 0), "f (header): nests deeper than 32 levels");
  EXPECT_EQ(parse_fault(R"({"a":)" + a + R"(,"a":)" + a + "}", 4), "f (header): repeats the key 'a'");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[2]}})", 8), "f: tensor a lacks dtype, shape or data_offsets");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8),
            "f: tensor a has a dtype, shape or data_offsets of another type");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}})", 8), "f: tensor a has the unknown dtype 'X9'");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
            "f: tensor a has 8 bytes, its shape and dtype need 12");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7),
            "f: tensor a lies at 0 to 8, the data has 7 bytes");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
            "f: tensor a lies at 8 to 0, the data has 8 bytes");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
            "f: tensor a has a size or offset that is not a whole number: -2");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,8]}})", 8),
            "f: tensor a has a size or offset that is not a whole number: 1.5");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
            "f: tensor a is larger than 2^64 bytes");
  for (const char* shape : {"[4611686018427387904,2,0]", "[0,4611686018427387904,2]", "[4611686018427387904,0,2]"})
    EXPECT_EQ(parse_fault(std::string(R"({"a":{"dtype":"U8","shape":)") + shape + R"(,"data_offsets":[0,0]}})", 0),
              "f: tensor a has sizes beyond 2^63 elements");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"U8","shape":[4611686018427387904,0],"data_offsets":[0,0]}})", 0), "none");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0),
            "f: tensor a has a size or offset beyond 2^63");
  EXPECT_EQ(parse_fault(R"({"a":)" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6),
            "f: tensor b shares bytes with tensor 'a'");
  EXPECT_EQ(parse_fault(R"({"a":)" + a + R"(,"b":)" + a + "}", 4), "f: tensor b shares bytes with tensor 'a'");
  EXPECT_EQ(parse_fault(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5),
            "f: tensor a lies behind bytes that no tensor owns");
  EXPECT_EQ(parse_fault(R"({"a":)" + a + "}", 5), "f: has bytes at its end that no tensor owns");
  EXPECT_EQ(parse_fault(R"({"__metadata__":{"k":1}})", 0), "f: __metadata__.k is 1, wanted a string");
  EXPECT_EQ(parse_fault(R"({"__metadata__":[]})", 0), "f: __metadata__ is a list, wanted an object");
}

// ---- mapped files

TEST(MappedFile, IsTheBytesOfTheFile) {
  const Folder folder;
  const MappedFile file(folder.write("a", "hello"));
  EXPECT_EQ(std::string(file.bytes().begin(), file.bytes().end()), "hello");
  EXPECT_TRUE(MappedFile(folder.write("empty", "")).bytes().empty());
  EXPECT_EQ(read_text(folder.path() / "a", 5), "hello");
  EXPECT_EQ(read_text(folder.path() / "empty", 0), "");
}

// Files in /proc report size 0 but have content.
TEST(MappedFile, TextsAreReadToTheirEnd) {
  const std::filesystem::path status = "/proc/self/status";
  if (!std::filesystem::exists(status)) GTEST_SKIP() << "no /proc";
  const std::string text = read_text(status, 1 << 20);
  EXPECT_EQ(text.rfind("Name:", 0), 0u);
  EXPECT_EQ(text.back(), '\n');
  EXPECT_EQ(complaint([&] { read_text(status, 10); }), "/proc/self/status: has more than 10 bytes, wanted at most that many");
}

TEST(MappedFile, DanglingLinksExist) {
  const Folder folder;
  EXPECT_FALSE(is_there(folder.path() / "a"));
  std::filesystem::create_symlink("missing", folder.path() / "a");
  EXPECT_TRUE(is_there(folder.path() / "a"));
  EXPECT_TRUE(is_there(folder.write("b", "")));
  EXPECT_FALSE(is_there(folder.path() / "b" / "c"));
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const Folder folder;
  const std::string missing = (folder.path() / "missing").string(), pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(complaint([&] { MappedFile file(missing); }), missing + ": cannot be opened: No such file or directory");
  EXPECT_EQ(complaint([&] { MappedFile file(folder.path()); }), folder.path().string() + ": is not a regular file");
  EXPECT_EQ(complaint([&] { MappedFile file(pipe); }), pipe + ": is not a regular file");
  EXPECT_EQ(complaint([&] { read_text(folder.write("a", "hello"), 4); }),
            (folder.path() / "a").string() + ": has 5 bytes, wanted at most 4");
}

}  // namespace
}  // namespace weft::files
