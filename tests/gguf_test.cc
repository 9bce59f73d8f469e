// GGUF files: values, tensors, parts, and a sentence for every kind of wrong file.
#include "files/gguf.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/gguf_bytes.h"

namespace weft::files {
namespace {

using Kind = GgufKind;

std::span<const uint8_t> view(const std::string& bytes) { return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}; }

std::string said(const std::string& bytes) {
  // A copy of exactly these bytes, so that AddressSanitizer sees a read past them.
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
  return complaint([&] { parse_gguf(exact, "file"); });
}
std::string said(const GgufBytes& file) { return said(file.bytes()); }

const std::string kFour(16, 'x');  // the bytes of four f32 numbers

TEST(Gguf, ValuesOfEveryKind) {
  GgufBytes file;
  file.entry("u8", Kind::u8, GgufBytes::number<uint8_t>(250)).entry("i8", Kind::i8, GgufBytes::number<int8_t>(-3));
  file.entry("u16", Kind::u16, GgufBytes::number<uint16_t>(65000)).entry("i16", Kind::i16, GgufBytes::number<int16_t>(-300));
  file.entry("i32", Kind::i32, GgufBytes::number<int32_t>(-70000)).entry("i64", Kind::i64, GgufBytes::number<int64_t>(INT64_MIN));
  file.entry("u64", Kind::u64, GgufBytes::number<uint64_t>(UINT64_MAX)).entry("f64", Kind::f64, GgufBytes::number(0.1));
  file.set("u32", 4000000000u).set("f32", 1.5f).set("yes", true).set("no", false).set("text", "four");
  file.list("texts", std::vector<std::string>{"a", "", "\xff long"}).list("ids", std::vector<int32_t>{-1, 7});
  const std::string bytes = file.bytes();
  const Gguf parsed = parse_gguf(view(bytes));
  const GgufFields& f = parsed.fields;
  EXPECT_EQ(f.whole("u8", 0, 255), 250);
  EXPECT_EQ(f.whole("i8", -9, 9), -3);
  EXPECT_EQ(f.whole("u16", 0, 70000), 65000);
  EXPECT_EQ(f.whole("i16", -1000, 0), -300);
  EXPECT_EQ(f.whole("i32", INT32_MIN, 0), -70000);
  EXPECT_EQ(f.whole("i64", INT64_MIN, 0), INT64_MIN);
  EXPECT_EQ(f.whole("u32", 0, INT64_MAX), 4000000000);
  EXPECT_EQ(f.number("f64", 0, 1), 0.1);
  EXPECT_EQ(f.number("f32", 0, 2), 1.5);
  EXPECT_EQ(f.number("u8", 0, 255), 250.0);
  EXPECT_EQ(f.flag("yes"), true);
  EXPECT_EQ(f.flag("no"), false);
  EXPECT_EQ(f.text("text"), "four");
  EXPECT_EQ(f.text("absent"), std::nullopt);
  std::vector<std::string> texts;
  f.texts("texts")->texts([&](std::string_view text) { texts.emplace_back(text); });
  EXPECT_EQ(texts, (std::vector<std::string>{"a", "", "\xff long"}));
  ASSERT_EQ(f.wholes("ids")->size(), 2u);
  EXPECT_EQ(f.wholes("ids")->element(0).whole(), -1);
  EXPECT_EQ(f.wholes("ids")->element(1).whole(), 7);
  EXPECT_EQ(complaint([&] { (void)f.whole("u64", 0, INT64_MAX); }),
            "gguf: u64 is 18446744073709551615, wanted a whole number from 0 to 9223372036854775807");
  EXPECT_EQ(complaint([&] { (void)f.whole("u8", 0, 9); }), "gguf: u8 is 250, wanted a whole number from 0 to 9");
  EXPECT_EQ(complaint([&] { (void)f.text("u8"); }), "gguf: u8 is 250, wanted a text");
  EXPECT_EQ(complaint([&] { (void)f.flag("text"); }), "gguf: text is 'four', wanted true or false");
  EXPECT_EQ(complaint([&] { (void)f.number("text", 0, 1); }).substr(0, 24), "gguf: text is 'four', wa");
  EXPECT_EQ(complaint([&] { (void)f.texts("ids"); }), "gguf: ids is a list of 2, wanted a list of texts");
  EXPECT_EQ(complaint([&] { (void)f.wholes("texts"); }), "gguf: texts is a list of 3, wanted a list of whole numbers");
}

TEST(Gguf, Tensors) {
  for (const uint32_t alignment : {8u, 32u, 128u}) {
    GgufBytes file;
    file.alignment = alignment;
    file.set("general.alignment", alignment);
    std::string blocks(2 * 3 * 18, '\0');
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<char>(i);
    file.tensor("blocks", {3, 64}, "Q4_0", blocks).tensor("numbers", {4}, "F32", kFour);
    const std::string bytes = file.bytes();
    const Gguf parsed = parse_gguf(view(bytes));
    ASSERT_EQ(parsed.tensors.size(), 2u);
    const GgufTensor& tensor = parsed.tensors.at("blocks");
    EXPECT_EQ(tensor.type->name, "Q4_0");
    EXPECT_EQ(tensor.rank, 2);
    EXPECT_EQ(tensor.sizes[0], 3);
    EXPECT_EQ(tensor.sizes[1], 64);
    ASSERT_EQ(tensor.bytes.size(), blocks.size());
    EXPECT_EQ(std::memcmp(tensor.bytes.data(), blocks.data(), blocks.size()), 0);
    EXPECT_EQ((tensor.bytes.data() - view(bytes).data()) % alignment, 0);
    EXPECT_EQ(parsed.tensors.at("numbers").bytes.size(), 16u);
  }
}

TEST(Gguf, EveryCutIsRefused) {
  GgufBytes file;
  file.set("text", "four").list("texts", std::vector<std::string>{"a", "bc"}).tensor("a", {2, 2}, "F32", kFour);
  const std::string whole = file.bytes();
  EXPECT_EQ(said(whole), "none");
  // The last 16 bytes are padding.
  for (size_t size = 0; size + 16 < whole.size(); ++size) {
    const std::string sentence = said(whole.substr(0, size));
    EXPECT_NE(sentence, "none") << size;
    EXPECT_EQ(sentence.substr(0, 5), "file:") << size;
  }
}

TEST(Gguf, WrongHeaders) {
  GgufBytes file;
  EXPECT_EQ(said(""), "file: does not begin with 'GGUF'");
  file.magic = "GGML";
  EXPECT_EQ(said(file), "file: does not begin with 'GGUF'");
  file.magic = "GGUF";
  file.version = 1;
  EXPECT_EQ(said(file), "file: has version 1, wanted 2 or 3");
  file.version = 0x03000000;
  EXPECT_EQ(said(file), "file: is big-endian, wanted a little-endian file");
  file.version = 2;
  EXPECT_EQ(said(file), "none");
  file.tensor_count = UINT64_MAX;
  EXPECT_EQ(said(file), "file: has 18446744073709551615 tensors, wanted at most 65536");
  file.tensor_count = 0;
  file.entry_count = 1 << 17;
  EXPECT_EQ(said(file), "file: has 131072 entries of metadata, wanted at most 65536");
  file.entry_count = 1;
  EXPECT_NE(said(file).find("inside its header"), std::string::npos);
}

TEST(Gguf, WrongMetadata) {
  const auto with = [](Kind kind, const std::string& value) { return said(GgufBytes().entry("a\x1b[2J", kind, value)); };
  EXPECT_EQ(with(static_cast<Kind>(13), ""), "file: a\\x1b[2J has a value of the unknown type 13");
  EXPECT_EQ(with(Kind::boolean, "\2"), "file: a\\x1b[2J has a truth value of 2, wanted 0 or 1");
  EXPECT_NE(with(Kind::text, GgufBytes::number<uint64_t>(UINT64_MAX)).find("has a text of 18446744073709551615 bytes"),
            std::string::npos);
  const auto list = [&](Kind element, uint64_t count) {
    return with(Kind::list, GgufBytes::number(static_cast<uint32_t>(element)) + GgufBytes::number(count));
  };
  EXPECT_EQ(list(Kind::list, 1), "file: a\\x1b[2J is a list of lists, wanted a list of values");
  EXPECT_NE(list(Kind::f64, uint64_t{1} << 61).find("inside its header"), std::string::npos);  // 2^64 bytes
  EXPECT_NE(list(Kind::u8, UINT64_MAX).find("inside its header"), std::string::npos);
  EXPECT_NE(list(Kind::text, UINT64_MAX).find("inside its header"), std::string::npos);
  EXPECT_EQ(said(GgufBytes().set("a", 1u).set("a", "b")), "file: a is given twice");
  const std::string long_key(1 << 17, 'k');
  EXPECT_EQ(said(GgufBytes().set(long_key, 1u)), "file: has a key of 131072 bytes, wanted at most 65535");
  EXPECT_EQ(said(GgufBytes().set("general.alignment", 24u)), "file: general.alignment is 24, wanted a power of 2");
  EXPECT_EQ(said(GgufBytes().set("general.alignment", 0u)), "file: general.alignment is 0, wanted a whole number from 8 to 65536");
  EXPECT_EQ(said(GgufBytes().set("general.alignment", "32")),
            "file: general.alignment is '32', wanted a whole number from 8 to 65536");
}

TEST(Gguf, WrongTensors) {
  const uint32_t f32 = 0, q4_0 = 2;
  const auto one = [&](const std::vector<int64_t>& sizes, uint32_t type, uint64_t offset = 0) {
    return said(GgufBytes().tensor_at("a", sizes, type, offset));
  };
  EXPECT_EQ(one({}, f32), "file: tensor a has 0 sizes, wanted 1 to 4");
  EXPECT_EQ(one({1, 1, 1, 1, 1}, f32), "file: tensor a has 5 sizes, wanted 1 to 4");
  EXPECT_EQ(one({0}, f32), "file: tensor a has a size of 0, wanted at least 1");
  EXPECT_EQ(one({-1}, f32), "file: tensor a has a size of 18446744073709551615, wanted at least 1");
  EXPECT_EQ(one({int64_t{1} << 32, int64_t{1} << 32}, f32), "file: tensor a has sizes beyond 2^63 elements");
  EXPECT_EQ(one({int64_t{1} << 62}, f32), "file: tensor a is larger than 2^64 bytes");
  EXPECT_EQ(one({1}, 5), "file: tensor a has the unknown type 5");
  EXPECT_EQ(one({2, 48}, q4_0), "file: tensor a has rows of 48, wanted a multiple of 32 for Q4_0");
  EXPECT_EQ(one({1}, f32, 4), "file: tensor a lies at 4, wanted a multiple of 32");
  EXPECT_NE(one({1}, f32, uint64_t{1} << 63).find("lies at 9223372036854775808 with 4 bytes, the data has 0"), std::string::npos);
  EXPECT_EQ(said(GgufBytes().tensor("a", {4}, "F32", kFour).tensor("a", {4}, "F32", kFour)), "file: tensor a is listed twice");
  EXPECT_EQ(said(GgufBytes().tensor("a", {4}, "F32", kFour).tensor_at("b", {1}, f32, 0)),
            "file: tensor b shares bytes with tensor 'a'");
  EXPECT_EQ(said(GgufBytes().tensor("a", {16}, "F32", kFour + kFour + kFour + kFour).tensor_at("b", {1}, f32, 32)),
            "file: tensor b shares bytes with tensor 'a'");
  GgufBytes hole;
  hole.tensor_at("a", {1}, f32, 64).tensor("b", {4}, "F32", kFour);
  EXPECT_NE(said(hole.bytes() + std::string(64, 'x')).find("tensor a lies behind bytes that no tensor owns"), std::string::npos);
  EXPECT_EQ(said(GgufBytes().tensor("a", {4}, "F32", kFour).bytes() + "x"), "file: has 17 bytes at its end that no tensor owns");
}

GgufBytes part(uint32_t number, uint32_t count, const std::string& tensor) {
  GgufBytes file;
  file.set("split.no", number).set("split.count", count).set("split.tensors.count", 2u);
  return file.tensor(tensor, {4}, "F32", kFour);
}

TEST(Gguf, Parts) {
  const Folder folder;
  const auto first = folder.write("m-00001-of-00002.gguf", part(0, 2, "a").bytes());
  const auto said = [&](const std::filesystem::path& path) {
    std::string sentence = complaint([&] { open_gguf(path); });
    const std::string where = folder.path().native() + "/";
    return sentence.starts_with(where) ? sentence.substr(where.size()) : sentence;
  };
  EXPECT_EQ(said(first), "m-00002-of-00002.gguf: cannot be opened: No such file or directory");
  const auto second = folder.write("m-00002-of-00002.gguf", part(1, 2, "b").bytes());
  GgufFiles both = open_gguf(first);
  const GgufFiles moved = std::move(both);
  ASSERT_EQ(moved.tensors.size(), 2u);
  EXPECT_EQ(moved.tensors.at("b").bytes[0], 'x');
  EXPECT_EQ(said(second), "m-00002-of-00002.gguf: is part 2 of 2, wanted the first one, m-00001-of-00002.gguf");
  const auto other = folder.write("other.gguf", part(0, 2, "a").bytes());
  EXPECT_EQ(said(other),
            "other.gguf: is part 1 of 2, wanted a name that ends in -00001-of-00002.gguf, by which the other parts are found");
  folder.write("m-00002-of-00002.gguf", part(1, 2, "a").bytes());
  EXPECT_EQ(said(first), "m-00002-of-00002.gguf: tensor a is in another part too");
  folder.write("m-00002-of-00002.gguf", part(0, 2, "b").bytes());
  EXPECT_EQ(said(first), "m-00002-of-00002.gguf: split.no is 0, wanted 1");
  folder.write("m-00002-of-00002.gguf", part(1, 3, "b").bytes());
  EXPECT_EQ(said(first), "m-00002-of-00002.gguf: split.count is 3, wanted 2 as in the first part");
  folder.write("m-00002-of-00002.gguf", part(1, 2, "b").tensor("c", {4}, "F32", kFour).bytes());
  EXPECT_EQ(said(first), "m-00001-of-00002.gguf: split.tensors.count is 2, and the parts have 3 tensors");
}

}  // namespace
}  // namespace weft::files
