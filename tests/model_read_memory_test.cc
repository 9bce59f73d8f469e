// Reading one file takes at most 64 MB and 4 times its bytes of memory, whatever the file holds.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "files/checksum.h"
#include "files/gguf.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/config.h"
#include "model/state/state_header.h"
#include "model/tokenizer/tokenizer.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/gguf_bytes.h"
#include "weft/chat.h"
#include "weft/status.h"

namespace {

std::atomic<int64_t> live = 0, peak = 0;  // bytes of all allocations

void* allocate(size_t bytes, size_t alignment) {
  void* memory = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (!memory) throw std::bad_alloc();
  const int64_t now = live += static_cast<int64_t>(malloc_usable_size(memory));
  for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
  }
  return memory;
}

void release(void* memory) {
  if (memory) live -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// All other forms of new and delete call these, or are paired elsewhere; AddressSanitizer has its own nothrow form, which calls none.
// They are not inlined: GCC would warn that new is paired with free.
__attribute__((noinline)) void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
__attribute__((noinline)) void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { release(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { release(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }

namespace weft::model {
namespace {

constexpr size_t kBytes = 8 << 20;  // of a hostile file
constexpr int64_t kSlack = 64 << 20;

// What a reader said, after a check of the memory that it took for a file of `size` bytes.
std::string bounded(const std::string& what, size_t size, const std::function<void()>& read) {
  const int64_t before = live;
  peak = before;
  const std::string said = complaint(read);
  const int64_t took = peak - before, allowed = kSlack + 4 * static_cast<int64_t>(size);
  EXPECT_LE(took, allowed) << what << ": " << static_cast<double>(took) / static_cast<double>(size) << " times a file of " << size
                           << " bytes";
  return said;
}

// `piece` again and again between commas, up to about `bytes`.
std::string repeated(const std::string& piece, size_t bytes = kBytes) {
  std::string out = piece;
  while (out.size() < bytes)
    out += "," + out.substr(0, (bytes - out.size()) / (piece.size() + 1) * (piece.size() + 1) + piece.size());
  return out;
}

// make(0), make(1), ... between commas, up to about `bytes`, but no more than `most` of them.
std::string counted(const std::function<std::string(size_t)>& make, size_t bytes = kBytes, size_t most = SIZE_MAX) {
  std::string out;
  for (size_t i = 0; out.size() < bytes && i < most; ++i) out += (i ? "," : "") + make(i);
  return out;
}

// A short name that no other number has: digits of base 64.
std::string name_of(size_t i) {
  std::string name;
  do name += "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"[i % 64];
  while (i /= 64);
  return name;
}

const std::string kEmpty = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";

TEST(ReadMemory, OfASafetensorsHeader) {
  const Folder folder;
  const auto said = [&](const std::string& what, const std::string& header, const std::string& data = "") {
    const std::string file = safetensors_bytes(header, data);
    folder.write("model.safetensors", file);
    return bounded(what, file.size(), [&] { Checkpoint::open(folder.path()); });
  };
  EXPECT_NE(said("objects", R"({"a":[)" + repeated("{}") + "]}").find("wanted at most 131072"), std::string::npos);
  EXPECT_NE(said("texts", R"({"a":[)" + repeated(R"("")") + "]}").find("wanted at most 131072"), std::string::npos);
  EXPECT_NE(said("objects in the metadata", R"({"__metadata__":{"a":[)" + repeated("{}") + "]}}").find("wanted a string"),
            std::string::npos);
  EXPECT_NE(said("metadata", R"({"__metadata__":{)" + counted([](size_t i) { return "\"" + name_of(i) + R"(":"")"; }) + "}}")
                .find("wanted at most that many"),
            std::string::npos);
  EXPECT_NE(said("tensors", "{" + counted([](size_t i) { return "\"" + name_of(i) + "\":" + kEmpty; }, 2 * kBytes) + "}")
                .find("has more than 262144 tensors"),
            std::string::npos);
  const std::string eight = R"({"dtype":"U8","shape":[0,0,0,0,0,0,0,0],"data_offsets":[0,0]})";
  EXPECT_EQ(said("as many tensors as there may be",
                 "{" + counted([&](size_t i) { return "\"" + name_of(i) + "\":" + eight; }, SIZE_MAX, 1 << 18) + "}"),
            "none");
  EXPECT_EQ(said("a long name", "{\"\\n" + std::string(kBytes, 'x') + "\":" + kEmpty + "}"), "none");
  EXPECT_NE(said("sizes", R"({"a":{"dtype":"U8","shape":[)" + repeated("0", 1 << 16) + R"(],"data_offsets":[0,0]}})")
                .find("sizes, wanted at most 8"),
            std::string::npos);
  EXPECT_EQ(said("a tensor that lies misaligned",
                 R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[)" +
                     std::to_string(kBytes / 4) + R"(],"data_offsets":[1,)" + std::to_string(1 + kBytes) + "]}}",
                 std::string(1 + kBytes, '\0')),
            "none");
}

TEST(ReadMemory, OfAGgufFile) {
  const Folder folder;
  const auto said = [&](const std::string& what, const GgufBytes& file,
                        const std::function<void(const std::filesystem::path&)>& read) {
    const std::string bytes = file.bytes();
    const std::filesystem::path path = folder.write("m.gguf", bytes);
    return bounded(what, bytes.size(), [&] { read(path); });
  };
  const auto open = [](const std::filesystem::path& path) { Checkpoint::from_gguf(files::open_gguf(path)); };
  const auto tokenizer = [](const std::filesystem::path& path) { Tokenizer::load(path); };
  GgufBytes entries, tensors, tokens, merges;
  for (size_t i = 0; i < 1 << 16; ++i) entries.set(name_of(i), true);
  EXPECT_EQ(said("as many entries as there may be", entries, open), "none");
  for (size_t i = 0; i < 1 << 16; ++i) tensors.tensor(name_of(i), {1, 1, 1, 1}, "F32", "1234");
  EXPECT_EQ(said("as many tensors as there may be", tensors, open), "none");
  std::vector<std::string> texts;
  for (size_t i = 0; i < kBytes / 12; ++i) texts.push_back(name_of(i));
  const auto model = [](GgufBytes& file) { file.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "qwen35"); };
  model(tokens);
  tokens.list("tokenizer.ggml.tokens", texts).list("tokenizer.ggml.token_type", std::vector<int32_t>(texts.size(), 1));
  EXPECT_NE(said("tokens", tokens, tokenizer).find("has no token for byte"), std::string::npos);
  GgufBytes control;
  model(control);
  control.list("tokenizer.ggml.tokens", texts).list("tokenizer.ggml.token_type", std::vector<int32_t>(texts.size(), 3));
  EXPECT_NE(said("control tokens", control, tokenizer).find("more than 65536 added tokens"), std::string::npos);
}

TEST(ReadMemory, OfAnIndex) {
  const Folder folder;
  folder.write("a.safetensors", safetensors_bytes("{}", ""));
  const auto said = [&](const std::string& what, const std::string& text) {
    folder.write("model.safetensors.index.json", text);
    return bounded(what, text.size(), [&] { Checkpoint::open(folder.path()); });
  };
  EXPECT_NE(
      said("tensors", R"({"weight_map":{)" + counted([](size_t i) { return "\"" + name_of(i) + R"(":"a.safetensors")"; }) + "}}")
          .find("is missing, but model.safetensors.index.json lists it"),
      std::string::npos);
  EXPECT_NE(said("objects", R"({"metadata":[)" + repeated("{}") + "]}").find("weight_map is missing"), std::string::npos);
  EXPECT_NE(said("shards", R"({"weight_map":{)" + counted([](size_t i) {
                             return "\"" + name_of(i) + R"(":")" + name_of(i) + ".safetensors\"";
                           }) + "}}")
                .find("names more than 4096 shards"),
            std::string::npos);
}

TEST(ReadMemory, OfConfigurations) {
  const Folder folder;
  for (const char* piece : {"{}", R"("")", "[]", "0"}) {
    for (const size_t bytes : {(size_t{1} << 20) - 100, kBytes}) {
      const std::string text = R"({"model_type":"qwen3_5","text_config":{},"x":[)" + repeated(piece, bytes) + "]}";
      folder.write("config.json", text);
      EXPECT_EQ(bounded("config.json", text.size(), [&] { read_config(folder.path()); }) == "none", bytes < 1 << 20) << bytes;
    }
    folder.write("config.json", R"({"model_type":"qwen3_5","text_config":{}})");
    const std::string text = R"({"x":[)" + repeated(piece) + "]}";
    folder.write("generation_config.json", text);
    EXPECT_NE(bounded("generation_config.json", text.size(), [&] { read_config(folder.path()); }).find("wanted at most 1048576"),
              std::string::npos);
    std::filesystem::remove(folder.path() / "generation_config.json");
  }
}

// A tokenizer of 256 byte tokens with more in its parts.
std::string tokenizer_text(const std::string& vocab, const std::string& merges, const std::string& added, const std::string& more) {
  std::string text =
      R"({"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","behavior":"Isolated","pattern":{"Regex":)"
      R"("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},)"
      R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"added_tokens":[)" +
      added + R"(],"model":{"type":"BPE","vocab":{)";
  const auto prints = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF); };
  int other = 0x100;
  for (int b = 0; b < 256; ++b) {
    const int c = prints(b) ? b : other++;
    text += "\"";
    if (c == '"' || c == '\\') text += '\\';
    if (c < 0x80) {
      text += static_cast<char>(c);
    } else {
      text += static_cast<char>(0xC0 | c >> 6);
      text += static_cast<char>(0x80 | (c & 0x3F));
    }
    text += "\":" + std::to_string(b) + ",";
  }
  return text + R"("ab":256)" + (vocab.empty() ? "" : ",") + vocab + R"(},"merges":[)" + merges + "]}" + more + "}";
}

TEST(ReadMemory, OfATokenizer) {
  const Folder folder;
  const auto said = [&](const std::string& what, const std::string& vocab, const std::string& merges = R"("a b")",
                        const std::string& added = "", const std::string& more = "") {
    const std::string text = tokenizer_text(vocab, merges, added, more);
    folder.write("tokenizer.json", text);
    return bounded(what, text.size(), [&] { Tokenizer::load(folder.path()); });
  };
  const auto token = [](size_t i) { return "\"zz" + name_of(i) + "\":" + std::to_string(257 + i); };
  EXPECT_EQ(said("nothing", ""), "none");
  EXPECT_NE(said("objects", "", R"("a b")", "", R"(,"x":[)" + repeated("{}") + "]").find("wanted at most that many"),
            std::string::npos);
  EXPECT_NE(said("objects as merges", "", repeated("{}")).find("wanted two tokens"), std::string::npos);
  EXPECT_EQ(said("tokens", counted(token)), "none");
  EXPECT_EQ(said("escaped tokens",
                 counted([](size_t i) { return "\"\\u007a\\/" + name_of(i) + "\":" + std::to_string(257 + i); }, kBytes / 4)),
            "none");
  EXPECT_EQ(said("merges", "", repeated(R"("a b")")), "none");
  EXPECT_EQ(said("merges as lists", "", repeated(R"(["a","b"])")), "none");
  EXPECT_NE(said("added tokens", "", R"("a b")",
                 counted([](size_t i) { return R"({"id":)" + std::to_string(257 + i) + R"(,"content":")" + name_of(i) + "!\"}"; }))
                .find("wanted at most 65536"),
            std::string::npos);
  EXPECT_EQ(said("long added tokens", "", R"("a b")", counted([](size_t i) {
                   return R"({"id":)" + std::to_string(257 + i) + R"(,"content":")" + name_of(i) + std::string(1000, '!') + "\"}";
                 })),
            "none");
  EXPECT_NE(said("a long token", "\"zz" + std::string(kBytes, '!') + "\":257").find("has a token of"), std::string::npos);
  EXPECT_NE(said("a long merge", "", "\"a b" + std::string(kBytes, '!') + "\"").find("wanted two tokens"), std::string::npos);
}

TEST(ReadMemory, OfChatTemplates) {
  const Folder folder;
  const auto said = [&](const std::string& what, const std::string& text, const char* name = "tokenizer_config.json") {
    for (const char* other : {"tokenizer_config.json", "chat_template.jinja"}) std::filesystem::remove(folder.path() / other);
    folder.write(name, text);
    return bounded(what, text.size(), [&] { ChatTemplate::load(folder.path()); });
  };
  const auto config = [](const std::string& value) { return R"({"added_tokens_decoder":{},"chat_template":)" + value + "}"; };
  EXPECT_EQ(said("no template", R"({"x":[)" + repeated("{}") + "]}"), "none");
  EXPECT_EQ(said("null", config("null")), "none");
  EXPECT_NE(said("a number", config("5")).find("chat_template is 5, wanted a string"), std::string::npos);
  EXPECT_NE(said("an object", config("{}")).find("is an object, wanted a string"), std::string::npos);
  EXPECT_NE(said("twice", R"({"chat_template":"","chat_template":""})").find("is given twice"), std::string::npos);
  EXPECT_NE(said("numbers in the list", config("[" + repeated("0") + "]")).find("wanted objects with name"), std::string::npos);
  EXPECT_NE(said("objects in the list", config("[" + repeated("{}") + "]")).find("no template of the name 'default'"),
            std::string::npos);
  EXPECT_NE(said("deep", config(std::string(1 << 20, '['))).find("nests deeper than 32"), std::string::npos);
  EXPECT_NE(said("a long text", config("\"" + std::string(kBytes, 'x') + "\"")).find("wanted at most"), std::string::npos);
  EXPECT_NE(said("a long program", std::string(kBytes, '{'), "chat_template.jinja").find("wanted at most 65536"),
            std::string::npos);
  EXPECT_NE(said("a huge file", std::string(33 << 20, ' ')).find("wanted at most 33554432"), std::string::npos);
  const std::string marks = "<|im_start|><|im_end|>";
  for (const std::string piece :
       {"{{a}}", "{%if a%}", "{%if a%}{%endif%}", "{%set a%}", "{#", "{##}", "{{'", "{{'a'+'b'}}", "{%-", "\n"}) {
    std::string program = marks;
    while (program.size() + piece.size() < 65536) program += piece;
    EXPECT_NE(said(piece, program, "chat_template.jinja").find("--template FILE"), std::string::npos) << piece;
  }
}

TEST(ReadMemory, OfAStateHeader) {
  const auto said = [](const std::string& what, const std::string& header) {
    std::string file(32, '\0');
    std::memcpy(file.data(), "weftstat\1", 9);
    const auto bytes = static_cast<uint32_t>(header.size());
    const uint64_t whole = file.size() + header.size();
    std::memcpy(file.data() + 12, &bytes, 4);
    std::memcpy(file.data() + 16, &whole, 8);
    files::Checksum sum;
    sum.add(file.data(), 24);
    sum.add(header.data(), header.size());
    const uint64_t value = sum.value();
    std::memcpy(file.data() + 24, &value, 8);
    file += header;
    return bounded(what, file.size(),
                   [&] { parse_state_header(std::as_bytes(std::span(file)), static_cast<int64_t>(file.size()), "file"); });
  };
  const std::string begin = R"({"fingerprint":"f","model":"m","kv":"f16","tokens":0,"ids":0,)";
  EXPECT_NE(said("objects", R"({"x":[)" + repeated("{}") + "]}").find("wanted at most 1048576"), std::string::npos);
  EXPECT_NE(said("fewer objects", R"({"x":[)" + repeated("{}", 1000000) + "]}").find("fingerprint is missing"), std::string::npos);
  const std::string delta = R"({"kind":"delta","value_heads":1,"value_dim":1,"key_dim":1,"channels":1,"width":2})";
  EXPECT_NE(said("layers", begin + R"("layers":[)" + repeated(delta, 1000000) + R"(],"sections":[]})").find("sections are 0"),
            std::string::npos);
}

}  // namespace
}  // namespace weft::model
