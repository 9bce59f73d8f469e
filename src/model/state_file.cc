// Files of what a sequence remembers, saved and loaded: see weft/state_file.h.
#include "weft/state_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "files/checksum.h"
#include "files/refuse.h"
#include "files/replaced_file.h"
#include "model/hybrid_pools.h"
#include "model/state_header.h"

namespace weft {

using namespace model;

namespace {

static_assert(std::endian::native == std::endian::little, "state files are little-endian, and copied as they are");

using files::refuse;
using Sequence = HybridState::Pools::Sequence;

constexpr int64_t kPagesAtOnce = 16;  // as many as stay in a cache between two looks at them

// A buffer whose parts begin at addresses that tiles want.
Block aligned(int64_t bytes) { return Block::allocate(static_cast<size_t>(padded(bytes))); }

// The four parts of `count` pages of an attention layer, one after another in a block.
struct PageBuffer {
  std::array<int64_t, 4> sizes;  // of a page
  Block memory;
  std::array<std::byte*, 4> parts{};

  explicit PageBuffer(const AttentionMemory& layer) : sizes(page_parts(layer)) {
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += padded(kPagesAtOnce * size);
    memory = aligned(bytes);
    std::byte* at = memory.data();
    for (size_t j = 0; j < 4; ++j) {
      parts[j] = at;
      at += padded(kPagesAtOnce * sizes[j]);
    }
  }
};

AttentionMemory in_rows(AttentionMemory memory) {
  memory.layout = KvLayout::rows;
  memory.tile_order = TileOrder::plain;
  return memory;
}

// Pages between the layout of a state and rows, through host memory.
class Converter {
 public:
  explicit Converter(const AttentionMemory& memory) : own_(memory), rows_(in_rows(memory)) {}

  bool same() const { return own_.layout == KvLayout::rows; }
  void to_rows(const std::array<std::byte*, 4>& own, const std::array<std::byte*, 4>& rows, int64_t pages) {
    repack({page_cache(own_, own, pages), page_cache(rows_, rows, pages)});
  }
  void from_rows(const std::array<std::byte*, 4>& rows, const std::array<std::byte*, 4>& own, int64_t pages) {
    repack({page_cache(rows_, rows, pages), page_cache(own_, own, pages)});
  }
  const AttentionMemory& own() const { return own_; }
  const AttentionMemory& rows() const { return rows_; }

 private:
  void repack(const KvRepackArgs& args) {
    const Stream stream{.backend = Backend::cpu, .threads = 1};  // a few pages at a time: threads would cost more than they do
    const size_t bytes = scratch_bytes(stream, args);
    if (scratch_.bytes() < bytes) scratch_ = Block::allocate(bytes);
    kv_repack(stream, args, {scratch_.data(), bytes});
  }

  AttentionMemory own_, rows_;
  Block scratch_;
};

// Writes sections in pieces, keeping their checksums.
class SectionWriter {
 public:
  SectionWriter(files::ReplacedFile& file, StateSection& section) : file_(file), section_(section) {}
  void add(const std::byte* data, int64_t bytes) {
    const std::span piece(data, static_cast<size_t>(bytes));
    file_.write(static_cast<uint64_t>(section_.offset + done_), piece);
    sum_.add(piece);
    done_ += bytes;
  }
  void finish() {
    const std::array<std::byte, kSectionAlignment> zeros{};
    add(zeros.data(), padded(done_) - done_);
    section_.checksum = sum_.value();
  }

 private:
  files::ReplacedFile& file_;
  StateSection& section_;
  int64_t done_ = 0;
  files::Checksum sum_;
};

void save_pages(files::ReplacedFile& file, const HybridState::Pools& p, const Sequence& sequence, size_t layer,
                std::span<StateSection, 4> sections) {
  Converter converter(std::get<AttentionMemory>(p.plan.layers[layer]));
  PageBuffer own(converter.own()), rows(converter.rows());
  PageBuffer& out = converter.same() ? own : rows;
  std::vector<SectionWriter> writers;
  for (StateSection& section : sections) writers.emplace_back(file, section);
  const auto pages = static_cast<int64_t>(sequence.pages.size());
  for (int64_t first = 0; first < pages; first += kPagesAtOnce) {
    const int64_t count = std::min(kPagesAtOnce, pages - first);
    for (int64_t i = 0; i < count; ++i)
      for (size_t j = 0; j < 4; ++j)
        copy_bytes(own.parts[j] + i * own.sizes[j], p.pages->part_at(sequence.pages[static_cast<size_t>(first + i)], layer, j),
                   static_cast<size_t>(own.sizes[j]));
    if (!converter.same()) converter.to_rows(own.parts, rows.parts, count);
    // Rows behind the last token hold what was there before; a file does not.
    const int64_t filled = sequence.length - (first + count - 1) * kPageTokens;
    for (size_t j = 0; j < 4; ++j) {
      const int64_t heads = converter.own().kv_heads, row = out.sizes[j] / (heads * kPageTokens);
      std::byte* last = out.parts[j] + (count - 1) * out.sizes[j];
      for (int64_t h = 0; h < heads && filled < kPageTokens; ++h)
        std::memset(last + (h * kPageTokens + filled) * row, 0, static_cast<size_t>((kPageTokens - filled) * row));
      writers[j].add(out.parts[j], count * out.sizes[j]);
    }
  }
  for (SectionWriter& writer : writers) writer.finish();
}

void load_pages(std::span<const std::byte> file, HybridState::Pools& p, const Sequence& sequence, size_t layer,
                std::span<const StateSection, 4> sections) {
  Converter converter(std::get<AttentionMemory>(p.plan.layers[layer]));
  PageBuffer own(converter.own()), rows(converter.rows());
  const auto pages = static_cast<int64_t>(sequence.pages.size());
  for (int64_t first = 0; first < pages; first += kPagesAtOnce) {
    const int64_t count = std::min(kPagesAtOnce, pages - first);
    // Rows of a file lie at multiples of 64 bytes, as in memory of one's own.
    std::array<std::byte*, 4> from{};
    for (size_t j = 0; j < 4; ++j) from[j] = const_cast<std::byte*>(file.data() + sections[j].offset + first * rows.sizes[j]);
    if (!converter.same()) converter.from_rows(from, own.parts, count);
    const std::array<std::byte*, 4>& in = converter.same() ? from : own.parts;
    for (int64_t i = 0; i < count; ++i)
      for (size_t j = 0; j < 4; ++j)
        copy_bytes(p.pages->part_at(sequence.pages[static_cast<size_t>(first + i)], layer, j), in[j] + i * own.sizes[j],
                   static_cast<size_t>(own.sizes[j]));
  }
}

// A whole file in memory of its own: what was checked is what is used, whoever writes to the file meanwhile.
struct FileBytes {
  Block memory;
  std::span<const std::byte> bytes;

  explicit FileBytes(const std::filesystem::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) refuse(path.native(), "", std::string("cannot be opened: ") + std::strerror(errno));
    struct Close {
      int file;
      ~Close() { ::close(file); }
    } const close{file};
    struct stat info {};
    if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) refuse(path.native(), "", "is not a regular file");
    memory = aligned(info.st_size);
    int64_t done = 0;
    while (done < info.st_size) {
      const ssize_t got = ::pread(file, memory.data() + done, static_cast<size_t>(info.st_size - done), done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse(path.native(), "", std::string("cannot be read: ") + std::strerror(errno));
      if (got == 0) break;
      done += got;
    }
    bytes = {memory.data(), static_cast<size_t>(done)};
  }
};

std::vector<int32_t> ids_of(std::span<const std::byte> file, const StateHeader& header) {
  std::vector<int32_t> ids(static_cast<size_t>(header.ids));
  copy_bytes(ids.data(), file.data() + header.sections.front().offset, ids.size() * 4);
  return ids;
}

StateLabel label_of(std::span<const std::byte> file, const StateHeader& header) {
  return {header.fingerprint, header.model, header.kv, ids_of(file, header)};
}

void check_fits(const std::string& name, const StateHeader& header, const HybridPlan& plan, const std::string& fingerprint) {
  if (header.fingerprint != fingerprint)
    refuse(name, "",
           "was made with another model: " + files::in_quotes(header.model) + " of fingerprint " +
               files::in_quotes(header.fingerprint) + ", wanted fingerprint " + files::in_quotes(fingerprint));
  if (header.layers.size() != plan.layers.size())
    refuse(name, "layers", "are " + std::to_string(header.layers.size()) + ", the state has " + std::to_string(plan.layers.size()));
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const LayerHeader wanted = layer_header(plan.layers[i]), &got = header.layers[i];
    if (got == wanted) continue;
    const bool names = layer_text(got) == layer_text(wanted);
    refuse(name, "layer " + std::to_string(i),
           "is of another kind: " + layer_text(got) + (names ? " with another rotation or other levels" : "") + "; the state has " +
               layer_text(wanted));
  }
  if (header.tokens > plan.capacity)
    refuse(name, "tokens",
           "are " + std::to_string(header.tokens) + ", the capacity of the state is " + std::to_string(plan.capacity));
}

}  // namespace

void save_state(const std::filesystem::path& path, const HybridState& state, int64_t sequence, const StateLabel& label) {
  const HybridState::Pools& p = state.pools();
  const Sequence& from = p.at(sequence);
  StateHeader header;
  header.fingerprint = label.fingerprint;
  header.model = label.model;
  header.kv = label.kv;
  header.tokens = from.length;
  header.ids = static_cast<int64_t>(label.ids.size());
  for (const LayerMemory& layer : p.plan.layers) header.layers.push_back(layer_header(layer));
  header.lay_out();

  const Block recurrent = aligned(p.recurrent_bytes()), history = aligned(p.history_bytes());
  if (from.length > 0) p.read(from, recurrent.data(), history.data());
  files::ReplacedFile file(path);
  const auto write = [&](StateSection& section, const void* data) {
    SectionWriter writer(file, section);
    writer.add(static_cast<const std::byte*>(data), section.bytes);
    writer.finish();
  };
  auto section = header.sections.begin();
  write(*section++, label.ids.data());
  const std::byte *states = recurrent.data(), *past = history.data();
  for (size_t i = 0; i < p.layers.size(); ++i) {
    if (header.layers[i].delta) {
      write(*section, states);
      states += section++->bytes;
      write(*section, past);
      past += section++->bytes;
    } else {
      save_pages(file, p, from, i, std::span(section, section + 4).first<4>());
      section += 4;
    }
  }
  const std::string text = header.text();
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

StateLabel load_state(const std::filesystem::path& path, HybridState& state, int64_t sequence, const std::string& fingerprint) {
  HybridState::Pools& p = state.pools();
  Sequence& to = p.at(sequence);
  const FileBytes file(path);
  const StateHeader header = parse_state(file.bytes, path.native());
  check_fits(path.native(), header, p.plan, fingerprint);
  StateLabel label = label_of(file.bytes, header);
  const int64_t pages = pages_of(header.tokens);
  std::vector<int32_t> page_list;
  page_list.reserve(static_cast<size_t>(pages));
  p.pages->reserve(pages);

  p.settle();
  p.forget(to);
  for (int64_t i = 0; i < pages; ++i) page_list.push_back(p.pages->take());
  to.pages = std::move(page_list);
  to.length = header.tokens;
  if (to.length == 0) return label;
  const Block recurrent = aligned(p.recurrent_bytes()), history = aligned(p.history_bytes());
  std::byte *states = recurrent.data(), *past = history.data();
  auto section = header.sections.begin() + 1;
  const auto read = [&](std::byte*& out) {
    copy_bytes(out, file.bytes.data() + section->offset, static_cast<size_t>(section->bytes));
    out += section++->bytes;
  };
  for (size_t i = 0; i < p.layers.size(); ++i) {
    if (header.layers[i].delta) {
      read(states);
      read(past);
    } else {
      load_pages(file.bytes, p, to, i, std::span(section, section + 4).first<4>());
      section += 4;
    }
  }
  p.write(to, recurrent.data(), history.data());
  return label;
}

StateFileInfo read_state_file(const std::filesystem::path& path) {
  const FileBytes file(path);
  const StateHeader header = parse_state(file.bytes, path.native());
  StateFileInfo info{kStateVersion, header.file_bytes, header.tokens, label_of(file.bytes, header), {}, header.sections};
  for (const LayerHeader& layer : header.layers) info.layers.push_back(layer_text(layer));
  return info;
}

}  // namespace weft
