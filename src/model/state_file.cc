// Files of what a sequence remembers, saved and loaded: see weft/state_file.h.
#include "weft/state_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

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

constexpr int64_t kPagesAtOnce = 8;  // as many as stay in a cache between two looks at them

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

// Runs work(i) for every i below `count` on a few threads. Of what they throw, that of the lowest i is thrown when all have ended.
template <class F>
void on_threads(size_t count, F&& work) {
  constexpr size_t kMostThreads = 4;  // beyond that memory is the limit
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr fault;
  size_t faulty = count;
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < faulty) {
          faulty = i;
          fault = std::current_exception();
        }
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    const size_t threads = std::min({count, kMostThreads, static_cast<size_t>(std::thread::hardware_concurrency())});
    try {
      for (size_t i = 1; i < threads; ++i) helpers.emplace_back(run);
    } catch (const std::system_error&) {  // no more threads to be had: then fewer do it
    }
    run();
  }
  if (fault) std::rethrow_exception(fault);
}

// The places of attention layers and of their sections.
struct PagedLayer {
  size_t layer, section;
};
std::vector<PagedLayer> paged_layers(const StateHeader& header) {
  std::vector<PagedLayer> found;
  size_t section = 1;  // behind "ids"
  for (size_t i = 0; i < header.layers.size(); ++i) {
    if (!header.layers[i].delta) found.push_back({i, section});
    section += header.layers[i].delta ? 2 : 4;
  }
  return found;
}

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

// A file that is read piece by piece.
class StateReader {
 public:
  explicit StateReader(const std::filesystem::path& path) : name_(path.native()) {
    file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file_ < 0) refuse(name_, "", std::string("cannot be opened: ") + std::strerror(errno));
    struct stat info {};
    if (::fstat(file_, &info) != 0 || !S_ISREG(info.st_mode)) {
      ::close(file_);
      refuse(name_, "", "is not a regular file");
    }
    size_ = info.st_size;
  }
  ~StateReader() { ::close(file_); }
  StateReader(const StateReader&) = delete;
  StateReader& operator=(const StateReader&) = delete;

  const std::string& name() const { return name_; }

  StateHeader header() const {
    std::vector<std::byte> head(static_cast<size_t>(std::min(size_, kPrologueBytes)));
    read(0, head);
    const int64_t bytes = state_header_bytes(head, name_);
    head.resize(static_cast<size_t>(std::min(size_, bytes)));
    read(0, head);
    return parse_state_header(head, size_, name_);
  }

  void read(int64_t offset, std::span<std::byte> to) const {
    while (!to.empty()) {
      const ssize_t got = ::pread(file_, to.data(), to.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse(name_, "", std::string("cannot be read: ") + std::strerror(errno));
      if (got == 0) refuse(name_, "", "became shorter while it was read");
      to = to.subspan(static_cast<size_t>(got));
      offset += got;
    }
  }

 private:
  std::string name_;
  int file_ = -1;
  int64_t size_ = 0;
};

// Reads a section in pieces and compares its checksum at the end.
class SectionReader {
 public:
  SectionReader(const StateReader& file, const StateSection& section) : file_(file), section_(section) {}
  void read(std::byte* to, int64_t bytes) {
    const std::span piece(to, static_cast<size_t>(bytes));
    file_.read(section_.offset + done_, piece);
    sum_.add(piece);
    done_ += bytes;
  }
  void finish() {
    std::array<std::byte, kSectionAlignment> zeros{};
    read(zeros.data(), padded(done_) - done_);
    if (sum_.value() != section_.checksum) refuse(file_.name(), section_.name, "is damaged: its checksum does not fit its bytes");
  }

 private:
  const StateReader& file_;
  const StateSection& section_;
  int64_t done_ = 0;
  files::Checksum sum_;
};

void read_section(const StateReader& file, const StateSection& section, std::byte* to) {
  SectionReader reader(file, section);
  reader.read(to, section.bytes);
  reader.finish();
}

StateLabel read_label(const StateReader& file, const StateHeader& header) {
  StateLabel label{header.fingerprint, header.model, header.kv, std::vector<int32_t>(static_cast<size_t>(header.ids))};
  read_section(file, header.sections.front(), reinterpret_cast<std::byte*>(label.ids.data()));
  return label;
}

void load_pages(const StateReader& file, const HybridState::Pools& p, const NewPages& to, size_t layer,
                std::span<const StateSection, 4> sections) {
  Converter converter(std::get<AttentionMemory>(p.plan.layers[layer]));
  PageBuffer own(converter.own()), rows(converter.rows());
  std::vector<SectionReader> readers;
  for (const StateSection& section : sections) readers.emplace_back(file, section);
  const auto pages = static_cast<int64_t>(to.list().size());
  for (int64_t first = 0; first < pages; first += kPagesAtOnce) {
    const int64_t count = std::min(kPagesAtOnce, pages - first);
    for (size_t j = 0; j < 4; ++j) readers[j].read(rows.parts[j], count * rows.sizes[j]);
    if (!converter.same()) converter.from_rows(rows.parts, own.parts, count);
    const PageBuffer& in = converter.same() ? rows : own;
    for (int64_t i = 0; i < count; ++i)
      for (size_t j = 0; j < 4; ++j)
        copy_bytes(p.pages->part_at(to.list()[static_cast<size_t>(first + i)], layer, j), in.parts[j] + i * in.sizes[j],
                   static_cast<size_t>(in.sizes[j]));
  }
  for (SectionReader& reader : readers) reader.finish();
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
  if (header.ids < header.tokens)
    refuse(
        path.native(), "ids",
        "are " + std::to_string(header.ids) + ", wanted those of all " + std::to_string(header.tokens) + " tokens of the sequence");
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
      section += 4;
    }
  }
  const std::vector<PagedLayer> paged = paged_layers(header);
  on_threads(paged.size(), [&](size_t i) {
    save_pages(file, p, from, paged[i].layer, std::span(header.sections).subspan(paged[i].section).first<4>());
  });
  const std::string text = header.text();
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

StateLabel load_state(const std::filesystem::path& path, HybridState& state, int64_t sequence, const std::string& fingerprint) {
  HybridState::Pools& p = state.pools();
  Sequence& to = p.at(sequence);
  const StateReader file(path);
  const StateHeader header = file.header();
  check_fits(file.name(), header, p.plan, fingerprint);
  StateLabel label = read_label(file, header);
  NewPages pages(*p.pages, pages_of(header.tokens));
  pages.take();
  const Block recurrent = aligned(p.recurrent_bytes()), history = aligned(p.history_bytes());
  std::byte *states = recurrent.data(), *past = history.data();
  auto section = header.sections.begin() + 1;
  for (size_t i = 0; i < p.layers.size(); ++i) {
    if (header.layers[i].delta) {
      read_section(file, *section, states);
      states += section++->bytes;
      read_section(file, *section, past);
      past += section++->bytes;
    } else {
      section += 4;
    }
  }
  const std::vector<PagedLayer> paged = paged_layers(header);
  on_threads(paged.size(), [&](size_t i) {
    load_pages(file, p, pages, paged[i].layer, std::span(header.sections).subspan(paged[i].section).first<4>());
  });

  // Everything was read and is right.
  p.settle();
  p.forget(to);
  pages.hand_over(to.pages);
  to.length = header.tokens;
  if (to.length > 0) p.write(to, recurrent.data(), history.data());
  return label;
}

StateFileInfo read_state_file(const std::filesystem::path& path) {
  const StateReader file(path);
  const StateHeader header = file.header();
  StateFileInfo info{kStateVersion, header.file_bytes, header.tokens, read_label(file, header), {}, header.sections};
  for (const LayerHeader& layer : header.layers) info.layers.push_back(layer_text(layer));
  const Block piece = aligned(1 << 18);
  for (const StateSection& section : header.sections) {
    SectionReader reader(file, section);
    for (int64_t done = 0; done < section.bytes; done += static_cast<int64_t>(piece.bytes()))
      reader.read(piece.data(), std::min(static_cast<int64_t>(piece.bytes()), section.bytes - done));
    reader.finish();
  }
  return info;
}

}  // namespace weft
