// A reader of the GGUF format for untrusted files: see gguf.h.
#include "files/gguf.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "files/refuse.h"

namespace weft::files {
namespace {

constexpr int64_t kDefaultAlignment = 32, kLeastAlignment = 8, kMostAlignment = 1 << 16;
constexpr uint64_t kMaxKey = 65535;  // bytes: the limit of the format
constexpr uint64_t kMaxName = 4096;

// By number.
constexpr std::array kTypes{GgufType{0, "F32", 1, 4},         GgufType{1, "F16", 1, 2},         GgufType{2, "Q4_0", 32, 18},
                            GgufType{3, "Q4_1", 32, 20},      GgufType{6, "Q5_0", 32, 22},      GgufType{7, "Q5_1", 32, 24},
                            GgufType{8, "Q8_0", 32, 34},      GgufType{9, "Q8_1", 32, 40},      GgufType{10, "Q2_K", 256, 84},
                            GgufType{11, "Q3_K", 256, 110},   GgufType{12, "Q4_K", 256, 144},   GgufType{13, "Q5_K", 256, 176},
                            GgufType{14, "Q6_K", 256, 210},   GgufType{15, "Q8_K", 256, 292},   GgufType{16, "IQ2_XXS", 256, 66},
                            GgufType{17, "IQ2_XS", 256, 74},  GgufType{18, "IQ3_XXS", 256, 98}, GgufType{19, "IQ1_S", 256, 50},
                            GgufType{20, "IQ4_NL", 32, 18},   GgufType{21, "IQ3_S", 256, 110},  GgufType{22, "IQ2_S", 256, 82},
                            GgufType{23, "IQ4_XS", 256, 136}, GgufType{24, "I8", 1, 1},         GgufType{25, "I16", 1, 2},
                            GgufType{26, "I32", 1, 4},        GgufType{27, "I64", 1, 8},        GgufType{28, "F64", 1, 8},
                            GgufType{29, "IQ1_M", 256, 56},   GgufType{30, "BF16", 1, 2},       GgufType{34, "TQ1_0", 256, 54},
                            GgufType{35, "TQ2_0", 256, 66},   GgufType{39, "MXFP4", 32, 17},    GgufType{40, "NVFP4", 64, 36},
                            GgufType{41, "Q1_0", 128, 18}};

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Bytes of a value of fixed size; 0 for texts and lists.
uint64_t bytes_of(GgufKind kind) {
  switch (kind) {
    case GgufKind::u8:
    case GgufKind::i8:
    case GgufKind::boolean: return 1;
    case GgufKind::u16:
    case GgufKind::i16: return 2;
    case GgufKind::u32:
    case GgufKind::i32:
    case GgufKind::f32: return 4;
    case GgufKind::u64:
    case GgufKind::i64:
    case GgufKind::f64: return 8;
    case GgufKind::text:
    case GgufKind::list: break;
  }
  return 0;
}

// The bytes of a file from a position on. Reading past the end throws.
class Cursor {
 public:
  Cursor(std::span<const uint8_t> file, std::string_view name) : file_(file), name_(name) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }
  const uint8_t* take(uint64_t bytes) {
    if (bytes > left())
      refuse(name_, "",
             "ends at byte " + std::to_string(file_.size()) + ", inside its header: it is damaged or was not downloaded whole");
    const uint8_t* const begin = file_.data() + at_;
    at_ += bytes;
    return begin;
  }
  template <class T>
  T number() {
    return load<T>(take(sizeof(T)));
  }
  std::string_view text(uint64_t most, const char* what) {
    const auto size = number<uint64_t>();
    if (size > most)
      refuse(name_, "",
             std::string("has a ") + what + " of " + std::to_string(size) + " bytes, wanted at most " + std::to_string(most));
    return {reinterpret_cast<const char*>(take(size)), size};
  }

 private:
  std::span<const uint8_t> file_;
  std::string_view name_;
  uint64_t at_ = 0;
};

class Parser {
 public:
  Parser(std::span<const uint8_t> file, std::string_view name) : file_(file), name_(name), cursor_(file, name) {
    out_.fields = GgufFields(std::string(name));
  }

  Gguf parse() {
    if (file_.size() < 4 || std::memcmp(cursor_.take(4), "GGUF", 4) != 0) refuse(name_, "", "does not begin with 'GGUF'");
    const auto version = cursor_.number<uint32_t>();
    if (version == 0x02000000 || version == 0x03000000) refuse(name_, "", "is big-endian, wanted a little-endian file");
    if (version < 2 || version > 3) refuse(name_, "", "has version " + std::to_string(version) + ", wanted 2 or 3");
    const auto tensors = cursor_.number<uint64_t>(), entries = cursor_.number<uint64_t>();
    if (tensors > kMaxGgufTensors)
      refuse(name_, "", "has " + std::to_string(tensors) + " tensors, wanted at most " + std::to_string(kMaxGgufTensors));
    if (entries > kMaxGgufEntries)
      refuse(name_, "",
             "has " + std::to_string(entries) + " entries of metadata, wanted at most " + std::to_string(kMaxGgufEntries));
    for (uint64_t i = 0; i < entries; ++i) parse_entry();
    alignment_ = out_.fields.whole("general.alignment", kLeastAlignment, kMostAlignment).value_or(kDefaultAlignment);
    if ((alignment_ & (alignment_ - 1)) != 0)
      out_.fields.fail("general.alignment", "is " + std::to_string(alignment_) + ", wanted a power of 2");
    std::vector<Placed> placed;
    placed.reserve(tensors);
    for (uint64_t i = 0; i < tensors; ++i) parse_tensor(placed);
    place(placed);
    return std::move(out_);
  }

 private:
  struct Placed {
    uint64_t offset, bytes;
    std::string_view name;
    GgufTensor* tensor;
  };

  GgufKind parse_kind(std::string_view key) {
    const auto number = cursor_.number<uint32_t>();
    if (number > static_cast<uint32_t>(GgufKind::f64))
      out_.fields.fail(key, "has a value of the unknown type " + std::to_string(number));
    return static_cast<GgufKind>(number);
  }

  void parse_entry() {
    const std::string_view key = cursor_.text(kMaxKey, "key");
    const GgufKind kind = parse_kind(key);
    GgufKind element = kind;
    uint64_t size = 1;
    if (kind == GgufKind::list) {
      element = parse_kind(key);
      size = cursor_.number<uint64_t>();
      if (element == GgufKind::list) out_.fields.fail(key, "is a list of lists, wanted a list of values");
    }
    const uint8_t* const begin = cursor_.take(0);
    if (element == GgufKind::text) {
      for (uint64_t i = 0; i < size; ++i) cursor_.text(file_.size(), "text");
    } else {
      const uint64_t each = bytes_of(element);
      if (size > cursor_.left() / each) cursor_.take(file_.size());  // throws
      cursor_.take(each * size);
    }
    if (element == GgufKind::boolean)
      for (uint64_t i = 0; i < size; ++i)
        if (begin[i] > 1) out_.fields.fail(key, "has a truth value of " + std::to_string(begin[i]) + ", wanted 0 or 1");
    out_.fields.add(key, GgufValue(kind, element, size, begin));
  }

  void parse_tensor(std::vector<Placed>& placed) {
    const std::string_view name = cursor_.text(kMaxName, "name of a tensor");
    const auto fail = [&](const std::string& what) { refuse(name_, "tensor " + std::string(name), what); };
    const auto [entry, fresh] = out_.tensors.try_emplace(name);
    if (!fresh) fail("is listed twice");
    GgufTensor& tensor = entry->second;
    const auto rank = cursor_.number<uint32_t>();
    if (rank < 1 || rank > kMaxGgufSizes)
      fail("has " + std::to_string(rank) + " sizes, wanted 1 to " + std::to_string(kMaxGgufSizes));
    tensor.rank = static_cast<int>(rank);
    uint64_t elements = 1;
    for (uint32_t i = rank; i-- > 0;) {  // the file has the innermost size first
      const auto size = cursor_.number<uint64_t>();
      if (size < 1 || size > static_cast<uint64_t>(INT64_MAX))
        fail("has a size of " + std::to_string(size) + ", wanted at least 1");
      tensor.sizes[i] = static_cast<int64_t>(size);
      if (__builtin_mul_overflow(elements, size, &elements) || elements > static_cast<uint64_t>(INT64_MAX))
        fail("has sizes beyond 2^63 elements");
    }
    const auto number = cursor_.number<uint32_t>();
    const auto* const type = std::find_if(kTypes.begin(), kTypes.end(), [&](const GgufType& t) { return t.number == number; });
    if (type == kTypes.end()) fail("has the unknown type " + std::to_string(number));
    tensor.type = type;
    const auto block = static_cast<uint64_t>(type->block);
    const auto cols = static_cast<uint64_t>(tensor.sizes[rank - 1]);
    if (cols % block != 0)
      fail("has rows of " + std::to_string(cols) + ", wanted a multiple of " + std::to_string(block) + " for " +
           std::string(type->name));
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(elements / block, static_cast<uint64_t>(type->bytes), &bytes)) fail("is larger than 2^64 bytes");
    const auto offset = cursor_.number<uint64_t>();
    if (offset % static_cast<uint64_t>(alignment_) != 0)
      fail("lies at " + std::to_string(offset) + ", wanted a multiple of " + std::to_string(alignment_));
    placed.push_back({offset, bytes, name, &tensor});
  }

  uint64_t padded(uint64_t offset) const {
    const auto step = static_cast<uint64_t>(alignment_);
    return (offset + step - 1) / step * step;
  }

  // Gives every tensor its bytes. Refuses a file where a byte of the data belongs neither to exactly one tensor nor to the padding
  // behind a tensor.
  void place(std::vector<Placed>& placed) {
    if (placed.empty()) return;
    const uint64_t begin = padded(cursor_.at());
    const uint64_t size = file_.size() > begin ? file_.size() - begin : 0;
    std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    uint64_t end = 0;
    const Placed* before = nullptr;
    for (const Placed& entry : placed) {
      const auto fail = [&](const std::string& what) { refuse(name_, "tensor " + std::string(entry.name), what); };
      if (entry.offset > size || entry.bytes > size - entry.offset)
        fail("lies at " + std::to_string(entry.offset) + " with " + std::to_string(entry.bytes) + " bytes, the data has " +
             std::to_string(size) + ": the file is damaged or was not downloaded whole");
      if (entry.offset < end) fail("shares bytes with tensor " + in_quotes(before->name));
      if (entry.offset != padded(end)) fail("lies behind bytes that no tensor owns");
      entry.tensor->bytes = file_.subspan(begin + entry.offset, entry.bytes);
      end = entry.offset + entry.bytes;
      before = &entry;
    }
    if (size > padded(end)) refuse(name_, "", "has " + std::to_string(size - end) + " bytes at its end that no tensor owns");
  }

  std::span<const uint8_t> file_;
  std::string_view name_;
  Cursor cursor_;
  int64_t alignment_ = kDefaultAlignment;
  Gguf out_;
};

}  // namespace

const GgufType* find_gguf_type(std::string_view name) {
  const auto* const found = std::find_if(kTypes.begin(), kTypes.end(), [&](const GgufType& t) { return t.name == name; });
  return found == kTypes.end() ? nullptr : found;
}

std::string_view GgufValue::text_at(const uint8_t* at) {
  return {reinterpret_cast<const char*>(at) + sizeof(uint64_t), load<uint64_t>(at)};
}

std::optional<int64_t> GgufValue::whole() const {
  switch (kind_) {
    case GgufKind::u8: return load<uint8_t>(data_);
    case GgufKind::i8: return load<int8_t>(data_);
    case GgufKind::u16: return load<uint16_t>(data_);
    case GgufKind::i16: return load<int16_t>(data_);
    case GgufKind::u32: return load<uint32_t>(data_);
    case GgufKind::i32: return load<int32_t>(data_);
    case GgufKind::i64: return load<int64_t>(data_);
    case GgufKind::u64:
      if (const auto value = load<uint64_t>(data_); value <= static_cast<uint64_t>(INT64_MAX)) return static_cast<int64_t>(value);
      return std::nullopt;
    default: return std::nullopt;
  }
}

std::optional<double> GgufValue::number() const {
  if (kind_ == GgufKind::f32) return load<float>(data_);
  if (kind_ == GgufKind::f64) return load<double>(data_);
  if (const auto value = whole()) return static_cast<double>(*value);
  return std::nullopt;
}

std::optional<bool> GgufValue::flag() const {
  if (kind_ != GgufKind::boolean) return std::nullopt;
  return *data_ != 0;
}

std::optional<std::string_view> GgufValue::text() const {
  if (kind_ != GgufKind::text) return std::nullopt;
  return text_at(data_);
}

GgufValue GgufValue::element(uint64_t i) const { return {element_, element_, 1, data_ + i * bytes_of(element_)}; }

std::string GgufValue::description() const {
  if (is_list()) return "a list of " + std::to_string(size_);
  if (const auto value = text()) return in_quotes(*value);
  if (const auto value = flag()) return *value ? "true" : "false";
  if (kind_ == GgufKind::u64) return std::to_string(load<uint64_t>(data_));
  if (const auto value = whole()) return std::to_string(*value);
  return number_text(number().value_or(0));
}

void GgufFields::add(std::string_view key, const GgufValue& value) {
  if (!values_.emplace(key, value).second) fail(key, "is given twice");
}

const GgufValue* GgufFields::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

void GgufFields::fail(std::string_view key, const std::string& what) const { refuse(file_, key, what); }

std::optional<int64_t> GgufFields::whole(std::string_view key, int64_t low, int64_t high) const {
  const GgufValue* const value = find(key);
  if (!value) return std::nullopt;
  const std::optional<int64_t> number = value->whole();
  if (!number || *number < low || *number > high)
    fail(key, "is " + value->description() + ", wanted a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return number;
}

std::optional<double> GgufFields::number(std::string_view key, double low, double high) const {
  const GgufValue* const value = find(key);
  if (!value) return std::nullopt;
  const std::optional<double> number = value->number();
  if (!number || !(*number >= low && *number <= high))
    fail(key, "is " + value->description() + ", wanted a number from " + number_text(low) + " to " + number_text(high));
  return number;
}

std::optional<bool> GgufFields::flag(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (!value) return std::nullopt;
  if (!value->flag()) fail(key, "is " + value->description() + ", wanted true or false");
  return value->flag();
}

std::optional<std::string_view> GgufFields::text(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (!value) return std::nullopt;
  if (!value->text()) fail(key, "is " + value->description() + ", wanted a text");
  return value->text();
}

const GgufValue* GgufFields::texts(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value && !value->is_list_of_texts()) fail(key, "is " + value->description() + ", wanted a list of texts");
  return value;
}

const GgufValue* GgufFields::wholes(std::string_view key) const {
  const GgufValue* const value = find(key);
  if (value && (!value->is_list() || value->is_list_of_texts() || (value->size() > 0 && !value->element(0).whole())))
    fail(key, "is " + value->description() + ", wanted a list of whole numbers");
  return value;
}

Gguf parse_gguf(std::span<const uint8_t> file, std::string_view name) { return Parser(file, name).parse(); }

bool is_gguf(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  if (path.extension() == ".gguf") return true;
  std::ifstream in(path, std::ios::binary);
  char magic[4] = {};
  return in.read(magic, sizeof magic) && std::memcmp(magic, "GGUF", sizeof magic) == 0;
}

}  // namespace weft::files
