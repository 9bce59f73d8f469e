// Files of up to 1 MB for every reader of JSON or GGUF: whatever the bytes are, reading them takes at most 64 MB and 4 times their size.
// Readers that build no tree of the whole file stay below 8 MB and 8 times its size, which a tree of 1 MB would exceed.
//
// The first byte chooses the reader. The mutator repeats pieces of an input, because large trees of small values cost the most.
#include <sanitizer/allocator_interface.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "files/checksum.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "model/checkpoint/config.h"
#include "model/checkpoint/gguf_config.h"
#include "model/checkpoint/weights.h"
#include "model/state/state_header.h"
#include "model/tokenizer/tokenizer.h"
#include "weft/status.h"

namespace {

std::atomic<int64_t> live = 0, peak = 0;  // bytes of all allocations

void on_malloc(const volatile void*, size_t bytes) {
  const int64_t now = live += static_cast<int64_t>(bytes);
  if (now > peak) peak = now;
}
void on_free(const volatile void* memory) {
  if (memory) live -= static_cast<int64_t>(__sanitizer_get_allocated_size(memory));
}

void read_safetensors(std::string_view text) {
  std::vector<uint8_t> file(8 + text.size());
  const uint64_t size = text.size();
  std::memcpy(file.data(), &size, 8);
  std::copy(text.begin(), text.end(), file.begin() + 8);
  (void)weft::files::parse_safetensors(file);
}

void read_state(std::string_view text) {
  std::vector<std::byte> file(32 + text.size());
  std::memcpy(file.data(), "weftstat\1\0\0", 11);
  const auto header = static_cast<uint32_t>(text.size());
  const auto whole = static_cast<uint64_t>(file.size());
  std::memcpy(file.data() + 12, &header, 4);
  std::memcpy(file.data() + 16, &whole, 8);
  if (!text.empty()) std::memcpy(file.data() + 32, text.data(), text.size());
  weft::files::Checksum sum;
  sum.add(std::span(file).first(24));
  sum.add(std::as_bytes(std::span(text)));
  const uint64_t value = sum.value();
  std::memcpy(file.data() + 24, &value, 8);
  (void)weft::model::parse_state_header(file, static_cast<int64_t>(file.size()), "file");
}

void read_gguf_weights(std::span<const uint8_t> bytes) {
  const std::vector<uint8_t> aligned(bytes.begin(), bytes.end());  // as a mapped file is, so that no tensor needs a copy
  weft::files::Gguf parsed = weft::files::parse_gguf(aligned);
  weft::files::GgufFiles file;
  file.fields = std::move(parsed.fields);
  file.tensors = std::move(parsed.tensors);
  const weft::model::ModelConfig config = weft::model::read_gguf_config(file);
  weft::model::Checkpoint checkpoint = weft::model::Checkpoint::from_gguf(std::move(file));
  (void)weft::model::bind_gguf_weights(checkpoint, config, 0);
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Repeats a piece of the input, with the digits in it counted upwards so that keys differ, or lets libFuzzer change bytes.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  std::minstd_rand random(seed);
  if (size < 4 || random() % 8 != 0) return LLVMFuzzerMutate(data, size, max_size);
  const size_t begin = 1 + random() % (size - 1), length = 1 + random() % std::min<size_t>(size - begin, 128);
  const std::string piece(reinterpret_cast<char*>(data) + begin, length);
  const std::string tail(reinterpret_cast<char*>(data) + begin + length, size - begin - length);
  std::string out(reinterpret_cast<char*>(data), begin);
  const size_t room = max_size - size, most = std::min<size_t>(room, size_t{1} << (random() % 21));
  for (unsigned i = 0; out.size() + length + 8 + tail.size() < begin + length + tail.size() + most; ++i)
    for (char c : piece) {
      if (c >= '0' && c <= '9')
        out += std::to_string(i);
      else
        out += c;
      if (out.size() + tail.size() + 8 > max_size) break;
    }
  out += tail;
  out.resize(std::min(out.size(), max_size));
  std::memcpy(data, out.data(), out.size());
  return out.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
  if (installed == 0) std::abort();
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const unsigned kind = static_cast<unsigned>(data[0] - '0') % 8;
  const int64_t before = live;
  peak = before;
  try {
    switch (kind) {
      case 0: read_safetensors(text); break;
      case 1: (void)weft::model::parse_config(text); break;
      case 2: (void)weft::model::parse_config(R"({"model_type":"qwen3_5"})", text); break;
      case 3: (void)weft::model::Tokenizer::parse(text); break;
      case 4: read_state(text); break;
      case 5: (void)weft::files::parse_gguf({data + 1, size - 1}); break;
      case 6: (void)weft::model::Tokenizer::from_gguf(weft::files::parse_gguf({data + 1, size - 1}).fields); break;
      case 7: read_gguf_weights({data + 1, size - 1}); break;
    }
  } catch (const weft::Error&) {
  }
  const bool walks = kind == 0 || kind == 3 || kind == 5 || kind == 6;
  const int64_t took = peak - before, allowed = (int64_t{walks ? 8 : 64} << 20) + (walks ? 8 : 4) * static_cast<int64_t>(size);
  if (took > allowed) {
    std::fprintf(stderr, "%lld bytes for an input of %zu\n", static_cast<long long>(took), size);
    std::abort();
  }
  return 0;
}
