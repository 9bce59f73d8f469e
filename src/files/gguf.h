// A reader of the GGUF format, versions 2 and 3, for untrusted files: metadata and a table of tensors.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/mapped_file.h"

namespace weft::files {

// Kinds of values; their numbers are those of the format.
enum class GgufKind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, list, u64, i64, f64 };

// A value of the metadata: a checked view of the file.
class GgufValue {
 public:
  GgufValue(GgufKind kind, GgufKind element, uint64_t size, const uint8_t* data)
      : kind_(kind), element_(element), size_(size), data_(data) {}

  // Each is absent for a value of another kind. whole() takes every kind of integer below 2^63; number() takes integers and floats.
  std::optional<int64_t> whole() const;
  std::optional<double> number() const;
  std::optional<bool> flag() const;
  std::optional<std::string_view> text() const;

  bool is_list() const { return kind_ == GgufKind::list; }
  bool is_list_of_texts() const { return is_list() && element_ == GgufKind::text; }
  uint64_t size() const { return size_; }  // elements of a list
  // Calls each(std::string_view) for every element of a list of texts. The 8 bytes before every view hold its length.
  template <class Each>
  void texts(Each&& each) const {
    const uint8_t* at = data_;
    for (uint64_t i = 0; i < size_; ++i) {
      const std::string_view text = text_at(at);
      each(text);
      at = reinterpret_cast<const uint8_t*>(text.data()) + text.size();
    }
  }
  // Element i < size() of a list, as a value. Not for lists of texts, whose elements have no fixed size.
  GgufValue element(uint64_t i) const;

  // A value as it appears in messages: "-3", "'abc'", "a list of 4".
  std::string description() const;

 private:
  static std::string_view text_at(const uint8_t* at);

  GgufKind kind_, element_;
  uint64_t size_;
  const uint8_t* data_;
};

// A type of tensors: `block` consecutive numbers of a row take `bytes` bytes.
struct GgufType {
  uint32_t number;
  std::string_view name;  // "Q4_K"
  int64_t block, bytes;
};
// The type of this name; null where the format has none.
const GgufType* find_gguf_type(std::string_view name);

inline constexpr size_t kMaxGgufSizes = 4;

struct GgufTensor {
  const GgufType* type = nullptr;
  int rank = 0;
  std::array<int64_t, kMaxGgufSizes> sizes{};  // rows first; each at least 1
  std::span<const uint8_t> bytes;              // a view of the file, aligned in it
};

// The parsed metadata of a file. Members refuse a value of another kind or out of range with a sentence.
class GgufFields {
 public:
  GgufFields() = default;
  explicit GgufFields(std::string file) : file_(std::move(file)) {}

  const std::string& file() const { return file_; }
  const std::map<std::string_view, GgufValue>& all() const { return values_; }
  void add(std::string_view key, const GgufValue& value);

  const GgufValue* find(std::string_view key) const;
  std::optional<int64_t> whole(std::string_view key, int64_t low, int64_t high) const;
  std::optional<double> number(std::string_view key, double low, double high) const;
  std::optional<bool> flag(std::string_view key) const;
  std::optional<std::string_view> text(std::string_view key) const;
  // The list, or null if the key is absent. texts() refuses a value that is no list of texts, wholes() one that is no list of
  // integers.
  const GgufValue* texts(std::string_view key) const;
  const GgufValue* wholes(std::string_view key) const;
  [[noreturn]] void fail(std::string_view key, const std::string& what) const;

 private:
  std::string file_;
  std::map<std::string_view, GgufValue> values_;
};

struct Gguf {
  GgufFields fields;
  std::map<std::string_view, GgufTensor> tensors;
};

// Parses a file. The result has views of `file`. Throws weft::Error, whose message begins with `name`, for counts, lengths, sizes and
// offsets that overflow or disagree, repeated names, unknown types, tensors that overlap, and bytes that no tensor owns beside the
// padding between tensors. The limits on entries and tensors bound the memory of the result by 64 MB, whatever the file holds.
inline constexpr size_t kMaxGgufEntries = 1 << 16, kMaxGgufTensors = 1 << 16;
Gguf parse_gguf(std::span<const uint8_t> file, std::string_view name = "gguf");

// A GGUF file, or all parts of a split file (NAME-00001-of-00003.gguf), mapped. Movable; moving keeps every view valid.
struct GgufFiles {
  std::vector<MappedFile> files;
  GgufFields fields;  // those of the first part
  std::map<std::string_view, GgufTensor> tensors;
};

// Throws weft::Error as parse_gguf() does, for a path that is not the first part, and for parts that are missing, disagree or
// repeat a tensor.
GgufFiles open_gguf(const std::filesystem::path& path);

// Does the file begin with the magic bytes of GGUF, or does its name end in .gguf?
bool is_gguf(const std::filesystem::path& path);

}  // namespace weft::files
