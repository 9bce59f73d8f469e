// Opening checkpoints: one file, shards with an index, and refusals.
#include "model/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/complaint.h"
#include "tests/support/folder.h"

namespace weft::model {
namespace {

const std::filesystem::path kSource = WEFT_SOURCE_DIR;

std::string entry(const std::string& dtype, const std::string& shape, int64_t begin, int64_t end) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[)" + std::to_string(begin) + "," +
         std::to_string(end) + "]}";
}
std::string one(const std::string& name, const std::string& data = "abcd") {
  return safetensors_bytes(
      "{\"" + name + "\":" + entry("U8", "[" + std::to_string(data.size()) + "]", 0, static_cast<int64_t>(data.size())) + "}",
      data);
}

TEST(Checkpoint, OfTheShippedModel) {
  const Checkpoint checkpoint = Checkpoint::open(kSource / "models/weft-11m");
  EXPECT_EQ(checkpoint.names().size(), 108u);
  const TensorView* embedding = checkpoint.find("model.embed_tokens.weight");
  ASSERT_TRUE(embedding);
  EXPECT_EQ(embedding->dtype, DType::bf16);
  EXPECT_EQ(embedding->sizes, (std::vector<int64_t>{6144, 256}));
  EXPECT_EQ(embedding->elements(), 6144 * 256);
  EXPECT_EQ(embedding->bytes, 6144 * 256 * 2);
  EXPECT_EQ(checkpoint.find("lm_head.weight"), nullptr);
  int64_t sum = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(dtype_bytes(*tensor.dtype)), 0u) << name;
    sum += tensor.bytes;
  }
  EXPECT_EQ(sum, checkpoint.bytes());
  EXPECT_EQ(checkpoint.copied_bytes(), 0);
}

TEST(Checkpoint, OfTheGoldenModels) {
  const Checkpoint next = Checkpoint::open(kSource / "cases/golden/models/qwen3_next");
  EXPECT_TRUE(next.find("model.layers.0.mlp.experts.6.gate_proj.weight"));
  const Checkpoint dense = Checkpoint::open(kSource / "cases/golden/models/qwen3_5");
  ASSERT_TRUE(dense.find("model.language_model.layers.3.linear_attn.A_log"));
  EXPECT_EQ(dense.find("model.language_model.layers.3.linear_attn.A_log")->dtype, DType::f32);
  const Checkpoint moe = Checkpoint::open(kSource / "cases/golden/models/qwen3_5_moe");
  ASSERT_TRUE(moe.find("model.layers.7.mlp.experts.gate_up_proj"));
  EXPECT_EQ(moe.find("model.layers.7.mlp.experts.gate_up_proj")->sizes, (std::vector<int64_t>{7, 40, 32}));
  EXPECT_EQ(moe.find("model.layers.7.mlp.experts.gate_up_proj")->dtype, DType::f16);
}

TEST(Checkpoint, AlignsWhatTheFileDoesNot) {
  const Folder folder;
  const float value = 1.25f;
  std::string data = "x" + std::string(reinterpret_cast<const char*>(&value), 4);
  std::string header = R"({"b":)" + entry("U8", "[1]", 0, 1) + R"(,"f":)" + entry("F32", "[]", 1, 5) + R"(,"e":)" +
                       entry("BF16", "[3,0]", 5, 5) + "}";
  folder.write("model.safetensors", safetensors_bytes(header, data));
  Checkpoint opened = Checkpoint::open(folder.path());
  Checkpoint checkpoint = std::move(opened);
  EXPECT_EQ(checkpoint.copied_bytes(), 0) << "nothing is copied before it is wanted";
  EXPECT_EQ(complaint([&] { checkpoint.align("f", 7); }),
            "checkpoint: tensor f is not aligned in its file; copies of such tensors take 8 bytes, and 7 are available");
  EXPECT_EQ(checkpoint.copied_bytes(), 0);
  for (const char* name : {"b", "f", "f", "e"}) checkpoint.align(name, 8);
  const TensorView* f = checkpoint.find("f");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(f->data) % 4, 0u);
  EXPECT_EQ(*static_cast<const float*>(f->data), value);
  EXPECT_EQ(f->elements(), 1);
  EXPECT_NE(checkpoint.find("e")->data, nullptr);
  EXPECT_EQ(checkpoint.find("e")->elements(), 0);
  EXPECT_EQ(checkpoint.bytes(), 5);
  EXPECT_EQ(checkpoint.copied_bytes(), 8);  // f, in whole words
}

TEST(Checkpoint, KeepsTypesItHasNoNameFor) {
  const Folder folder;
  folder.write("model.safetensors", safetensors_bytes(R"({"a":)" + entry("F8_E4M3", "[2]", 0, 2) + "}", "xy"));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.find("a")->dtype, std::nullopt);
  EXPECT_EQ(checkpoint.find("a")->dtype_text, "F8_E4M3");
}

// The error message, without the folder.
std::string fault(const Folder& folder) {
  std::string text = complaint([&] { Checkpoint::open(folder.path()); });
  const std::string prefix = folder.path().string();
  for (size_t at; (at = text.find(prefix)) != std::string::npos;) text.replace(at, prefix.size(), "F");
  return text;
}

TEST(Checkpoint, NamesOfShardsCannotWriteOnTheTerminal) {
  const Folder folder;
  folder.write("model.safetensors.index.json", R"({"weight_map":{"a":"\u001b]0;x\u0007\u202e.safetensors"}})");
  EXPECT_EQ(fault(folder), "F/\\x1b]0;x\\x07\\u202e.safetensors: cannot be opened: No such file or directory");
}

TEST(Checkpoint, RefusesIndexesThatDisagree) {
  const Folder folder;
  EXPECT_EQ(fault(folder), "F: has neither model.safetensors nor model.safetensors.index.json");
  folder.write("s1.safetensors", one("a"));
  folder.write("s2.safetensors", one("b"));
  const auto with_index = [&](const std::string& text) {
    folder.write("model.safetensors.index.json", text);
    return fault(folder);
  };
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})"), "none");
  EXPECT_EQ(with_index("{"), "F/model.safetensors.index.json: is not JSON at byte 2");
  EXPECT_EQ(with_index("{}"), "F/model.safetensors.index.json: weight_map is missing, wanted the shard of every tensor");
  EXPECT_EQ(with_index(R"({"weight_map":{}})"), "F/model.safetensors.index.json: weight_map is empty");
  EXPECT_EQ(with_index(R"({"weight_map":{"a":3}})"),
            "F/model.safetensors.index.json: weight_map.a is 3, wanted the name of a file");
  EXPECT_EQ(
      with_index(R"({"weight_map":{"a":"../s1.safetensors"}})"),
      "F/model.safetensors.index.json: weight_map.a is '../s1.safetensors', wanted the name of a .safetensors file in the same "
      "directory");
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"/etc/passwd"}})"),
            "F/model.safetensors.index.json: weight_map.a is '/etc/passwd', wanted the name of a .safetensors file in the same "
            "directory");
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"s1.safetensors","b":"s3.safetensors"}})"),
            "F/s3.safetensors: cannot be opened: No such file or directory");
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"s1.safetensors","c":"s1.safetensors"}})"),
            "F/s1.safetensors: tensor c is missing, but model.safetensors.index.json lists it");
  EXPECT_EQ(with_index(R"({"weight_map":{"b":"s1.safetensors"}})"),
            "F/s1.safetensors: tensor a is not listed in model.safetensors.index.json");
  folder.write("s2.safetensors", one("a"));
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})"),
            "F/s2.safetensors: tensor a is not listed in model.safetensors.index.json");
}

TEST(Checkpoint, RefusesCorruptFiles) {
  const Folder folder;
  const std::string good = text_of(kSource / "cases/golden/models/qwen3_next/model.safetensors");
  const auto with_file = [&](const std::string& bytes) {
    folder.write("model.safetensors", bytes);
    return fault(folder);
  };
  EXPECT_EQ(with_file(good), "none");
  for (size_t length : {size_t{0}, size_t{7}, size_t{8}, size_t{100}, good.size() / 2, good.size() - 1})
    EXPECT_NE(with_file(good.substr(0, length)), "none") << length;
  EXPECT_EQ(with_file(good + "x"), "F/model.safetensors: has bytes at its end that no tensor owns");
  EXPECT_EQ(with_file(""), "F/model.safetensors: has 0 bytes, wanted at least 8");
  // Changing any byte at the beginning of the header gives an error message or another legal file, never a crash.
  for (size_t at = 0; at < 300; ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x15);
    EXPECT_FALSE(with_file(bad).empty()) << at;
  }
}

}  // namespace
}  // namespace weft::model
