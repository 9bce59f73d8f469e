// Writes and reads the header of a state file: see state_header.h.
#include "model/state/state_header.h"

#include <bit>
#include <cstring>

#include "core/limits.h"
#include "files/checksum.h"
#include "files/json_text.h"
#include "files/refuse.h"
#include "model/state/hybrid_pools.h"
#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

using files::Json;
using files::JsonFields;
using files::refuse;

constexpr std::string_view kMagic = "weftstat";
// A layer takes at most about 800 bytes of a header, unless the ids of its formats are long.
constexpr int64_t kMaxHeaderBytes = files::kMaxJsonTree, kMaxFileBytes = int64_t{1} << 50;
constexpr int64_t kMaxRowBytes = kMaxHeadDim * 4;

// The offset of the section after one at `offset`, saturating at kMaxFileBytes + 1.
int64_t after(int64_t offset, int64_t bytes) {
  return offset > kMaxFileBytes || bytes > kMaxFileBytes ? kMaxFileBytes + 1 : offset + padded(bytes);
}

template <class T>
void put(std::string& out, size_t at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out[at + i] = static_cast<char>(value >> (8 * i));
}

template <class T>
T get(std::span<const std::byte> bytes, size_t at) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(static_cast<T>(bytes[at + i]) << (8 * i));
  return value;
}

uint64_t header_checksum(std::span<const std::byte> prologue, std::span<const std::byte> header) {
  files::Checksum sum;
  sum.add(prologue.first(24));
  sum.add(header);
  return sum.value();
}

void add_tensor(files::Checksum& sum, const Tensor& t) {
  const int64_t numbers = t.elements();
  sum.add(&numbers, sizeof numbers);
  std::vector<std::byte> values(
      static_cast<size_t>(numbers * dtype_bytes(t.dtype)));  // a host copy, because the tensor may be on a device
  copy_bytes(values.data(), t.data, values.size());
  sum.add(values);
}

// Covers only what gives stored bytes their meaning. Ids and seeds are names and do not count.
uint64_t format_checksum(const KvFormat& f) {
  files::Checksum sum;
  const auto number = [&](auto value) {
    const auto wide = static_cast<int64_t>(value);
    sum.add(&wide, sizeof wide);
  };
  number(f.head_dim);
  number(f.passthrough ? static_cast<int>(*f.passthrough) : -1);
  if (f.passthrough) return sum.value();
  number(f.bits);
  number(f.rotation);
  if (f.rotation == Rotation::srht) {
    number(f.rotation_group);
    for (int64_t j = 0; j < f.head_dim; ++j) number((f.signs[static_cast<size_t>(j / 32)] >> (j % 32)) & 1);
  }
  if (f.rotation == Rotation::dense) add_tensor(sum, f.dense_rotation);
  number(f.gain_group);
  number(f.gain_dtype);
  number(f.gain_units);
  number(f.packing);
  for (int i = 0; i < 1 << f.bits; ++i) number(std::bit_cast<int32_t>(f.codebook[static_cast<size_t>(i)]));
  add_tensor(sum, f.mean);
  return sum.value();
}

SideHeader side_header(const KvFormat& format) {
  return {format.id, format.head_dim, code_bytes(format), gain_bytes(format), format_checksum(format)};
}

Json side_json(const SideHeader& side) {
  return {{"id", side.id},
          {"head_dim", side.head_dim},
          {"code_bytes", side.code_bytes},
          {"gain_bytes", side.gain_bytes},
          {"format", files::hex(side.format)}};
}

Json layer_json(const LayerHeader& layer) {
  if (layer.delta)
    return {{"kind", "delta"},          {"value_heads", layer.value_heads}, {"value_dim", layer.value_dim},
            {"key_dim", layer.key_dim}, {"channels", layer.channels},       {"width", layer.width}};
  return {{"kind", "attention"}, {"kv_heads", layer.kv_heads}, {"k", side_json(layer.k)}, {"v", side_json(layer.v)}};
}

// Readers of required fields.
int64_t whole(const JsonFields& fields, const char* name, int64_t low, int64_t high) {
  const auto value = fields.whole(name, low, high);
  if (!value) fields.fail(name, "is missing");
  return *value;
}

std::string text(const JsonFields& fields, const char* name) {
  auto value = fields.text(name);
  if (!value) fields.fail(name, "is missing");
  return *std::move(value);
}

uint64_t checksum_field(const JsonFields& fields, const char* name) {
  const std::string digits = text(fields, name);
  uint64_t value = 0;
  for (char c : digits) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0 || digits.size() != 16) fields.fail(name, "is " + files::in_quotes(digits) + ", wanted 16 hexadecimal digits");
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  if (digits.empty()) fields.fail(name, "is empty, wanted 16 hexadecimal digits");
  return value;
}

const Json& list(const JsonFields& fields, const char* name) {
  const Json* value = fields.array(name);
  if (!value) fields.fail(name, "is missing");
  return *value;
}

JsonFields entry(const Json& value, std::string_view file, const char* name, size_t i) {
  const std::string path = std::string(name) + "[" + std::to_string(i) + "]";
  if (!value.is_object()) refuse(file, path, "is " + files::json_text(value) + ", wanted an object");
  return {value, std::string(file), path + "."};
}

SideHeader read_side(const JsonFields& layer, const char* name) {
  const auto side = layer.object(name);
  if (!side) layer.fail(name, "is missing");
  return {text(*side, "id"), whole(*side, "head_dim", 1, kMaxHeadDim), whole(*side, "code_bytes", 1, kMaxRowBytes),
          whole(*side, "gain_bytes", 0, kMaxRowBytes), checksum_field(*side, "format")};
}

LayerHeader read_layer(const JsonFields& fields) {
  LayerHeader layer;
  const std::string kind = text(fields, "kind");
  if (kind != "delta" && kind != "attention") fields.fail("kind", "is " + files::in_quotes(kind) + ", wanted delta or attention");
  layer.delta = kind == "delta";
  if (layer.delta) {
    layer.value_heads = whole(fields, "value_heads", 1, kMaxLayerSize);
    layer.value_dim = whole(fields, "value_dim", 1, kMaxDeltaHeadSize);
    layer.key_dim = whole(fields, "key_dim", 1, kMaxDeltaHeadSize);
    layer.channels = whole(fields, "channels", 1, kMaxLayerSize);
    layer.width = whole(fields, "width", kMinConvWidth, kMaxConvWidth);
  } else {
    layer.kv_heads = whole(fields, "kv_heads", 1, kMaxLayerSize);
    layer.k = read_side(fields, "k");
    layer.v = read_side(fields, "v");
  }
  return layer;
}

}  // namespace

LayerHeader layer_header(const LayerMemory& layer) {
  LayerHeader header;
  if (const auto* delta = std::get_if<DeltaMemory>(&layer)) {
    header = {true, delta->value_heads, delta->value_dim, delta->key_dim, delta->channels, delta->width, 0, {}, {}};
  } else {
    const auto& memory = std::get<AttentionMemory>(layer);
    header.kv_heads = memory.kv_heads;
    header.k = side_header(memory.recipe.k);
    header.v = side_header(memory.recipe.v);
  }
  return header;
}

std::string layer_text(const LayerHeader& layer) {
  const auto n = [](int64_t value) { return std::to_string(value); };
  if (layer.delta)
    return "gated delta, " + n(layer.value_heads) + " value heads of " + n(layer.value_dim) + " x " + n(layer.key_dim) +
           ", convolution of " + n(layer.channels) + " channels x " + n(layer.width);
  return "attention, " + n(layer.kv_heads) + " KV heads of " + n(layer.k.head_dim) + ", keys " + files::printable(layer.k.id) +
         ", values " + files::printable(layer.v.id);
}

void StateHeader::lay_out() {
  sections.clear();
  const auto add = [&](std::string name, int64_t bytes) { sections.push_back({std::move(name), 0, bytes, 0}); };
  const int64_t rows = (tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
  add("ids", ids * 4);
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerHeader& layer = layers[i];
    const std::string name = "layer " + std::to_string(i) + " ";
    if (layer.delta) {
      add(name + "recurrent state", tokens > 0 ? layer.value_heads * layer.value_dim * layer.key_dim * 4 : 0);
      add(name + "window", tokens > 0 ? layer.channels * (layer.width - 1) * 4 : 0);
    } else {
      add(name + "codes of K", rows * layer.kv_heads * layer.k.code_bytes);
      add(name + "gains of K", rows * layer.kv_heads * layer.k.gain_bytes);
      add(name + "codes of V", rows * layer.kv_heads * layer.v.code_bytes);
      add(name + "gains of V", rows * layer.kv_heads * layer.v.gain_bytes);
    }
  }
  file_bytes = static_cast<int64_t>(text().size());
  for (StateSection& section : sections) {
    section.offset = file_bytes;
    file_bytes = after(file_bytes, section.bytes);
  }
}

std::string StateHeader::text() const {
  Json header{{"fingerprint", fingerprint}, {"model", model},           {"kv", kv}, {"tokens", tokens}, {"ids", ids},
              {"layers", Json::array()},    {"sections", Json::array()}};
  for (const LayerHeader& layer : layers) header["layers"].push_back(layer_json(layer));
  for (const StateSection& section : sections)
    header["sections"].push_back({{"name", section.name}, {"bytes", section.bytes}, {"xxh3", files::hex(section.checksum)}});
  std::string json = header.dump(-1, ' ', true, Json::error_handler_t::replace);
  json.resize(static_cast<size_t>(padded(kPrologueBytes + static_cast<int64_t>(json.size())) - kPrologueBytes), ' ');
  std::string out(kPrologueBytes, '\0');
  out.replace(0, kMagic.size(), kMagic);
  put(out, 8, kStateVersion);
  put(out, 12, static_cast<uint32_t>(json.size()));
  put(out, 16, static_cast<uint64_t>(file_bytes));
  put(out, 24, header_checksum(std::as_bytes(std::span(out)), std::as_bytes(std::span(json))));
  return out + json;
}

void StateHeader::check_texts(std::string_view name) const {
  const auto check = [&](const char* field, const std::string& value) {
    if (to_well_formed(value) != value) refuse(name, field, "is " + files::in_quotes(value) + ", wanted UTF-8");
  };
  check("fingerprint", fingerprint);
  check("model", model);
  check("kv", kv);
  for (const LayerHeader& layer : layers) {
    check("id of a format", layer.k.id);
    check("id of a format", layer.v.id);
  }
  if (const int64_t bytes = sections.front().offset - kPrologueBytes; bytes > kMaxHeaderBytes)
    refuse(name, "header", "would have " + std::to_string(bytes) + " bytes, wanted at most " + std::to_string(kMaxHeaderBytes));
}

std::optional<std::string> first_invalid_token(std::span<const int32_t> ids, int64_t vocab_size) {
  for (const int32_t id : ids)
    if (id < 0 || (vocab_size > 0 && id >= vocab_size))
      return std::to_string(id) + ", wanted " + (vocab_size > 0 ? "0 to " + std::to_string(vocab_size - 1) : "0 or more");
  return std::nullopt;
}

int64_t state_header_bytes(std::span<const std::byte> prologue, std::string_view name) {
  if (prologue.size() < kMagic.size() || std::memcmp(prologue.data(), kMagic.data(), kMagic.size()) != 0)
    refuse(name, "", "is not a state file: it does not begin with " + files::in_quotes(kMagic));
  if (static_cast<int64_t>(prologue.size()) < kPrologueBytes)
    refuse(name, "", "is truncated: it has " + std::to_string(prologue.size()) + " bytes, fewer than any state file");
  const auto version = get<uint32_t>(prologue, 8);
  if (version != kStateVersion)
    refuse(name, "version", "is " + std::to_string(version) + ", wanted " + std::to_string(kStateVersion));
  const int64_t bytes = get<uint32_t>(prologue, 12);
  if (bytes > kMaxHeaderBytes)
    refuse(name, "header", "has " + std::to_string(bytes) + " bytes, wanted at most " + std::to_string(kMaxHeaderBytes));
  return kPrologueBytes + bytes;
}

StateHeader parse_state_header(std::span<const std::byte> head, int64_t size, std::string_view name) {
  const auto n = [](auto value) { return std::to_string(value); };
  const int64_t header_bytes = state_header_bytes(head, name) - kPrologueBytes;
  const auto wanted = get<uint64_t>(head, 16);
  if (kPrologueBytes + header_bytes > static_cast<int64_t>(head.size()))
    refuse(name, "", "is truncated in its header: it has " + n(size) + " bytes of " + n(wanted));
  const auto header = head.subspan(kPrologueBytes, static_cast<size_t>(header_bytes));
  if (header_checksum(head, header) != get<uint64_t>(head, 24))
    refuse(name, "header", "is damaged: its checksum does not match its bytes");
  if (wanted > static_cast<uint64_t>(kMaxFileBytes))
    refuse(name, "", "claims to have " + n(wanted) + " bytes, wanted at most " + n(kMaxFileBytes));

  const Json json = files::parse_json_object({reinterpret_cast<const char*>(header.data()), header.size()}, name);
  const JsonFields fields(json, std::string(name));
  StateHeader out;
  out.fingerprint = model::text(fields, "fingerprint");
  out.model = model::text(fields, "model");
  out.kv = model::text(fields, "kv");
  out.tokens = whole(fields, "tokens", 0, kMaxTokens);
  out.ids = whole(fields, "ids", 0, kMaxTokens);
  if (out.ids < out.tokens)
    refuse(name, "ids", "are " + n(out.ids) + ", wanted at least the " + n(out.tokens) + " tokens of the sequence");
  const Json& layers = list(fields, "layers");
  for (size_t i = 0; i < layers.size(); ++i) out.layers.push_back(read_layer(entry(layers[i], name, "layers", i)));
  out.file_bytes = static_cast<int64_t>(wanted);

  // The sections must be those that follow from the layers. Only their checksums are taken from the file.
  const Json& sections = list(fields, "sections");
  StateHeader expected = out;
  expected.lay_out();
  if (sections.size() != expected.sections.size())
    refuse(name, "sections", "are " + n(sections.size()) + ", wanted " + n(expected.sections.size()) + " for these layers");
  for (size_t i = 0; i < sections.size(); ++i) {
    const JsonFields section = entry(sections[i], name, "sections", i);
    StateSection& known = expected.sections[i];
    if (const std::string title = model::text(section, "name"); title != known.name)
      section.fail("name", "is " + files::in_quotes(title) + ", wanted " + files::in_quotes(known.name));
    if (const int64_t bytes = whole(section, "bytes", 0, kMaxFileBytes); bytes != known.bytes)
      section.fail("bytes", "is " + n(bytes) + ", wanted " + n(known.bytes) + " for " + known.name);
    known.checksum = checksum_field(section, "xxh3");
  }
  int64_t offset = kPrologueBytes + header_bytes;
  for (StateSection& section : expected.sections) {
    section.offset = offset;
    offset = after(offset, section.bytes);
  }
  expected.file_bytes = offset;
  if (offset != out.file_bytes) refuse(name, "", "claims to have " + n(wanted) + " bytes, but its sections end at " + n(offset));
  for (const StateSection& section : expected.sections)
    if (section.offset + padded(section.bytes) > size)
      refuse(name, "", "is truncated in " + section.name + ": it has " + n(size) + " bytes of " + n(expected.file_bytes));
  if (size > expected.file_bytes) refuse(name, "", "has " + n(size - expected.file_bytes) + " bytes after its end");
  return expected;
}

}  // namespace weft::model
