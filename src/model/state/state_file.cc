// Saves and loads the state of a sequence as a file: see weft/state_file.h.
#include "weft/state_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "core/run.h"
#include "files/checksum.h"
#include "files/file_calls.h"
#include "files/file_lock.h"
#include "files/refuse.h"
#include "files/replaced_file.h"
#include "model/access.h"
#include "model/state/hybrid_pools.h"
#include "model/state/state_header.h"

namespace weft {

using namespace model;

namespace {

static_assert(std::endian::native == std::endian::little, "state files are little-endian and copied without conversion");

using files::refuse;
using Sequence = HybridState::Pools::Sequence;

// Pages converted at a time, and bytes read at a time: few enough to stay in a cache until the checksum is computed.
constexpr int64_t kPagesAtOnce = 8, kPieceBytes = 1 << 18;
// Pages per write: threads that write one file serialise in the kernel, so writes are few and large.
constexpr int64_t kPagesWritten = 8 * kPagesAtOnce;

// A buffer padded to a whole section. Its address is aligned as tiles need it.
Block aligned(int64_t bytes) { return Block::allocate(static_cast<size_t>(padded(bytes))); }

// Host memory for `pages` pages of an attention layer, in its four pools, one after another in a block.
struct PageBuffer {
  std::array<int64_t, 4> sizes;  // of a page
  Block memory;
  std::array<std::byte*, 4> pools{};

  explicit PageBuffer(const AttentionMemory& layer, int64_t pages = kPagesAtOnce) : sizes(page_pool_bytes(layer)) {
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += padded(pages * size);
    memory = aligned(bytes);
    std::byte* at = memory.data();
    for (size_t j = 0; j < 4; ++j) {
      pools[j] = at;
      at += padded(pages * sizes[j]);
    }
  }
  std::array<std::byte*, 4> at(int64_t page) const {
    std::array<std::byte*, 4> out = pools;
    for (size_t j = 0; j < 4; ++j) out[j] += page * sizes[j];
    return out;
  }
};

AttentionMemory in_rows(AttentionMemory memory) {
  memory.layout = KvLayout::rows;
  memory.tile_order = TileOrder::token_major;
  return memory;
}

// Converts pages between the layout of a state and rows, in host memory.
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
    const Stream stream{.backend = Backend::cpu,
                        .threads = 1};  // a few pages at a time: more threads would cost more than they save
    run_lending(stream, args, [this](size_t bytes) -> Scratch {
      if (scratch_.bytes() < bytes) scratch_ = Block::allocate(bytes);
      return {scratch_.data(), bytes};
    });
  }

  AttentionMemory own_, rows_;
  Block scratch_;
};

// Calls work(i) for every i < count on a few threads. If calls throw, the exception of the lowest i is rethrown when all threads
// have ended.
template <class F>
void on_threads(size_t count, F&& work) {
  constexpr size_t kMostThreads = 4;  // with more, memory bandwidth is the limit
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
    } catch (const std::exception&) {  // no more threads, or no memory for them: continue with fewer
    }
    run();
  }
  if (fault) std::rethrow_exception(fault);
}

// Sections of a layer: recurrent state and window, or codes and gains of K and V.
size_t section_count(const LayerHeader& layer) { return layer.delta ? 2 : 4; }

// The first section of every layer.
std::vector<size_t> first_sections(const StateHeader& header) {
  std::vector<size_t> first;
  size_t section = 1;  // after "ids"
  for (const LayerHeader& layer : header.layers) {
    first.push_back(section);
    section += section_count(layer);
  }
  return first;
}

// Pages of a sequence that are contiguous in the pools of one layer.
struct PageRun {
  int64_t count = 0;
  std::array<std::byte*, 4> pools{};
};
PageRun run_at(const PagePool& pool, const std::vector<int32_t>& pages, size_t first, size_t layer, int64_t limit = kPagesAtOnce) {
  PageRun run;
  const size_t most = std::min(pages.size() - first, static_cast<size_t>(std::min(limit, kPagesAtOnce)));
  size_t count = 1;
  while (count < most && pages[first + count] == pages[first] + static_cast<int32_t>(count)) ++count;
  run.count = static_cast<int64_t>(count);
  for (size_t j = 0; j < 4; ++j) run.pools[j] = pool.pool_at(pages[first], layer, j);
  return run;
}

void copy_pools(const std::array<std::byte*, 4>& to, const std::array<std::byte*, 4>& from, const PageBuffer& buffer,
                int64_t pages) {
  for (size_t j = 0; j < 4; ++j) copy_bytes(to[j], from[j], static_cast<size_t>(pages * buffer.sizes[j]));
}

// Writes a section in several calls and computes its checksum.
class SectionWriter {
 public:
  SectionWriter(files::ReplacedFile& file, StateSection& section) : file_(file), section_(section) {}
  // Adds bytes to the checksum. write() may follow later, for the bytes of several sum() calls.
  void sum(const std::byte* data, int64_t bytes) { sum_.add(data, static_cast<size_t>(bytes)); }
  void write(const std::byte* data, int64_t bytes) {
    file_.write(static_cast<uint64_t>(section_.offset + done_), {data, static_cast<size_t>(bytes)});
    done_ += bytes;
  }
  void finish() {
    const std::array<std::byte, kSectionAlignment> zeros{};
    const int64_t rest = padded(done_) - done_;
    sum(zeros.data(), rest);
    write(zeros.data(), rest);
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
  const PageBuffer rows(converter.rows(), std::min(kPagesWritten, static_cast<int64_t>(sequence.pages.size())));
  int64_t held = 0;               // pages in `rows`
  std::optional<PageBuffer> own;  // host copies of device pages, in their layout
  if (p.plan.place != Place::host && !converter.same()) own.emplace(converter.own());
  std::vector<SectionWriter> writers;
  for (StateSection& section : sections) writers.emplace_back(file, section);
  for (size_t first = 0; first < sequence.pages.size();) {
    const PageRun run = run_at(*p.pages, sequence.pages, first, layer, kPagesWritten - held);
    const std::array<std::byte*, 4> to = rows.at(held);
    if (converter.same())
      copy_pools(to, run.pools, rows, run.count);
    else if (own)
      copy_pools(own->pools, run.pools, *own, run.count);
    if (!converter.same()) converter.to_rows(own ? own->pools : run.pools, to, run.count);
    first += static_cast<size_t>(run.count);
    held += run.count;
    // Rows after the last token hold garbage, which must not reach the file.
    const int64_t filled = sequence.length - static_cast<int64_t>(first - 1) * kPageTokens;
    const bool write = held == kPagesWritten || first == sequence.pages.size();
    for (size_t j = 0; j < 4; ++j) {
      const int64_t heads = converter.own().kv_heads, row = rows.sizes[j] / (heads * kPageTokens);
      std::byte* last = to[j] + (run.count - 1) * rows.sizes[j];
      for (int64_t h = 0; h < heads && filled < kPageTokens; ++h)
        std::memset(last + (h * kPageTokens + filled) * row, 0, static_cast<size_t>((kPageTokens - filled) * row));
      writers[j].sum(to[j], run.count * rows.sizes[j]);
      if (write) writers[j].write(rows.pools[j], held * rows.sizes[j]);
    }
    if (write) held = 0;
  }
  for (SectionWriter& writer : writers) writer.finish();
}

void save_bytes(files::ReplacedFile& file, const std::byte* from, Place place, StateSection& section) {
  Block copy;
  if (place != Place::host && section.bytes > 0) {
    copy = aligned(section.bytes);
    copy_bytes(copy.data(), from, static_cast<size_t>(section.bytes));
    from = copy.data();
  }
  SectionWriter writer(file, section);
  writer.sum(from, section.bytes);
  writer.write(from, section.bytes);
  writer.finish();
}

void save_layer(files::ReplacedFile& file, const HybridState::Pools& p, const Sequence& sequence, size_t layer,
                std::span<StateSection> sections) {
  if (sections.size() == 4) return save_pages(file, p, sequence, layer, sections.first<4>());
  save_bytes(file, p.recurrent_at(layer, sequence.slot), p.plan.place, sections[0]);
  save_bytes(file, p.history_at(layer, sequence, sequence.rolled_back), p.plan.place, sections[1]);
}

// A state file opened for reading.
class StateReader {
 public:
  explicit StateReader(const std::filesystem::path& path)
      : name_(path.native()), file_(files::file_calls().open(AT_FDCWD, path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0)) {
    if (!file_) refuse(name_, "", std::string("cannot be opened: ") + std::strerror(errno));
    find_size();
  }
  explicit StateReader(const files::FileLock& lock) : name_(lock.place().path()), file_(lock.open()) { find_size(); }

  const std::string& name() const { return name_; }
  const struct stat& info() const { return info_; }  // when it was opened

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
      const ssize_t got = files::file_calls().read(*file_, to.data(), to.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse(name_, "", std::string("cannot be read: ") + std::strerror(errno));
      if (got == 0) refuse(name_, "", "was truncated while it was read");
      to = to.subspan(static_cast<size_t>(got));
      offset += got;
    }
  }

 private:
  void find_size() {
    if (files::file_calls().stat(*file_, &info_) != 0) refuse(name_, "", std::string("cannot be opened: ") + std::strerror(errno));
    if (!S_ISREG(info_.st_mode)) refuse(name_, "", "is not a regular file");
    size_ = info_.st_size;
  }

  std::string name_;
  files::Descriptor file_;
  struct stat info_ {};
  int64_t size_ = 0;
};

// Reads a section in several calls and checks its checksum at the end.
class SectionReader {
 public:
  SectionReader(const StateReader& file, const StateSection& section) : file_(file), section_(section) {}
  void read(std::byte* to, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      const std::span piece(to + at, static_cast<size_t>(std::min(kPieceBytes, bytes - at)));
      file_.read(section_.offset + done_ + at, piece);
      sum_.add(piece);
    }
    done_ += bytes;
  }
  void finish() {
    std::array<std::byte, kSectionAlignment> zeros{};
    read(zeros.data(), padded(done_) - done_);
    if (sum_.value() != section_.checksum) refuse(file_.name(), section_.name, "is damaged: its checksum does not match its bytes");
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

StateLabel read_label(const StateReader& file, const StateHeader& header, int64_t vocab_size) {
  StateLabel label{header.fingerprint, header.model, header.kv, std::vector<int32_t>(static_cast<size_t>(header.ids))};
  read_section(file, header.sections.front(), reinterpret_cast<std::byte*>(label.ids.data()));
  if (const auto bad = first_invalid_token(label.ids, vocab_size)) refuse(file.name(), "ids", "hold " + *bad);
  return label;
}

void load_pages(const StateReader& file, const HybridState::Pools& p, const NewPages& to, size_t layer,
                std::span<const StateSection, 4> sections) {
  Converter converter(std::get<AttentionMemory>(p.plan.layers[layer]));
  const bool on_host = p.plan.place == Place::host;
  PageBuffer rows(converter.rows());
  std::optional<PageBuffer> own;  // host copies of device pages, in their layout
  if (!on_host && !converter.same()) own.emplace(converter.own());
  std::vector<SectionReader> readers;
  for (const StateSection& section : sections) readers.emplace_back(file, section);
  for (size_t first = 0; first < to.list().size();) {
    // Straight into the pools where possible: no sequence owns these pages yet.
    const PageRun run = run_at(*p.pages, to.list(), first, layer);
    const auto& read_into = converter.same() && on_host ? run.pools : rows.pools;
    for (size_t j = 0; j < 4; ++j) readers[j].read(read_into[j], run.count * rows.sizes[j]);
    if (!converter.same()) converter.from_rows(rows.pools, own ? own->pools : run.pools, run.count);
    if (!on_host) copy_pools(run.pools, own ? own->pools : rows.pools, own ? *own : rows, run.count);
    first += static_cast<size_t>(run.count);
  }
  for (SectionReader& reader : readers) reader.finish();
}

// What a file must agree with.
struct Wanted {
  const std::string& fingerprint;
  int64_t vocab_size, most_ids;
};

void check_fits(const std::string& name, const StateHeader& header, const HybridPlan& plan, const Wanted& wanted) {
  const std::string& fingerprint = wanted.fingerprint;
  if (header.fingerprint != fingerprint)
    refuse(name, "",
           "was made with another model: " + files::in_quotes(header.model) + " of fingerprint " +
               files::in_quotes(header.fingerprint) + ", wanted fingerprint " + files::in_quotes(fingerprint));
  if (header.layers.size() != plan.layers.size())
    refuse(name, "layers", "are " + std::to_string(header.layers.size()) + ", the state has " + std::to_string(plan.layers.size()));
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const LayerHeader own = layer_header(plan.layers[i]), &got = header.layers[i];
    if (got == own) continue;
    const bool names = layer_text(got) == layer_text(own);
    refuse(name, "layer " + std::to_string(i),
           "is of another kind: " + layer_text(got) + (names ? " with another rotation or codebook" : "") + "; the state has " +
               layer_text(own));
  }
  if (header.tokens > plan.capacity)
    refuse(name, "tokens",
           "are " + std::to_string(header.tokens) + ", the capacity of the state is " + std::to_string(plan.capacity));
  if (header.ids > wanted.most_ids)
    refuse(name, "ids", "are " + std::to_string(header.ids) + ", wanted at most " + std::to_string(wanted.most_ids));
}

// The header of a file for this sequence; checksums are filled in while the sections are written.
StateHeader make_header(const std::string& name, const HybridState& state, int64_t sequence, const StateLabel& label) {
  const HybridState::Pools& p = model::pools_of(state);
  const Sequence& from = p.at(sequence);
  StateHeader header;
  header.fingerprint = label.fingerprint;
  header.model = label.model;
  header.kv = label.kv;
  header.tokens = from.length;
  header.ids = static_cast<int64_t>(label.ids.size());
  if (header.ids < header.tokens)
    refuse(
        name, "ids",
        "are " + std::to_string(header.ids) + ", wanted those of all " + std::to_string(header.tokens) + " tokens of the sequence");
  if (const auto bad = first_invalid_token(label.ids, 0)) refuse(name, "ids", "hold " + *bad);
  for (const LayerMemory& layer : p.plan.layers) header.layers.push_back(layer_header(layer));
  header.lay_out();
  header.check_texts(name);
  return header;
}

void write_file(files::FileLock& lock, const HybridState& state, int64_t sequence, const StateLabel& label, StateHeader header) {
  const HybridState::Pools& p = model::pools_of(state);
  const Sequence& from = p.at(sequence);
  files::ReplacedFile file(lock);
  save_bytes(file, reinterpret_cast<const std::byte*>(label.ids.data()), Place::host, header.sections.front());
  const std::vector<size_t> first = first_sections(header);
  on_threads(first.size(), [&](size_t i) {
    save_layer(file, p, from, i, std::span(header.sections).subspan(first[i], section_count(header.layers[i])));
  });
  const std::string text = header.text();
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

// Reads a file into a sequence.
StateLabel read_file(const StateReader& file, HybridState& state, int64_t sequence, const Wanted& wanted) {
  HybridState::Pools& p = model::pools_of(state);
  Sequence& to = p.at(sequence);
  const StateHeader header = file.header();
  check_fits(file.name(), header, p.plan, wanted);
  StateLabel label = read_label(file, header, wanted.vocab_size);
  NewPages pages(*p.pages, pages_of(header.tokens));
  pages.take();
  // States are read straight into the slot of an empty sequence on the host. Otherwise they are staged until the whole file is
  // checked.
  const bool straight = to.length == 0 && p.plan.place == Place::host;
  struct Staging {
    Block recurrent, history;
  };
  std::vector<Staging> staged(p.layers.size());
  const std::vector<size_t> first = first_sections(header);
  on_threads(first.size(), [&](size_t i) {
    const auto sections = std::span(header.sections).subspan(first[i], section_count(header.layers[i]));
    if (sections.size() == 4) return load_pages(file, p, pages, i, sections.first<4>());
    Staging& staging = staged[i];
    if (!straight) {
      staging.recurrent = aligned(sections[0].bytes);
      staging.history = aligned(sections[1].bytes);
    }
    read_section(file, sections[0], straight ? p.recurrent_at(i, to.slot) : staging.recurrent.data());
    read_section(file, sections[1], straight ? p.history_at(i, to, 0) : staging.history.data());
  });

  // The whole file is read and checked.
  p.commit_records();
  p.clear(to);
  pages.hand_over(to.pages);
  to.length = header.tokens;
  if (!straight && to.length > 0)
    on_threads(p.layers.size(), [&](size_t i) {
      copy_bytes(p.recurrent_at(i, to.slot), staged[i].recurrent.data(),
                 static_cast<size_t>(recurrent_numbers(p.plan.layers[i]) * kF32));
      copy_bytes(p.history_at(i, to, 0), staged[i].history.data(), static_cast<size_t>(history_numbers(p.plan.layers[i]) * kF32));
    });
  return label;
}

// Checks a file against its own checksums.
StateFileInfo describe_file(const StateReader& file) {
  const StateHeader header = file.header();
  StateFileInfo info{kStateVersion, header.file_bytes, header.tokens, read_label(file, header, 0), {}, header.sections};
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

}  // namespace

StateLock::StateLock(const std::filesystem::path& file, const StateLockOptions& options)
    : lock_(std::make_unique<files::FileLock>(file, files::LockOptions{options.wait, options.on_wait, options.proceed})) {}
StateLock::~StateLock() = default;
StateLock::StateLock(StateLock&&) noexcept = default;
StateLock& StateLock::operator=(StateLock&&) noexcept = default;

bool StateLock::exists() const { return lock_->exists(); }

void save_state(StateLock& lock, const HybridState& state, int64_t sequence, const StateLabel& label) {
  write_file(lock.file(), state, sequence, label, make_header(lock.file().place().path(), state, sequence, label));
}

void save_state(const std::filesystem::path& path, const HybridState& state, int64_t sequence, const StateLabel& label) {
  StateHeader header = make_header(path.native(), state, sequence, label);  // faults of the label come before the wait
  files::FileLock lock(path);
  write_file(lock, state, sequence, label, std::move(header));
}

void check_state_path(const std::filesystem::path& path) {
  const files::FilePlace place(path);
  const std::optional<struct stat> file = place.look();
  place.check_owner(file, files::try_new_file(place, files::random_name()).owner);
}

StateLabel load_state(StateLock& lock, HybridState& state, int64_t sequence, const std::string& fingerprint, int64_t vocab_size,
                      int64_t most_ids) {
  const StateReader file(lock.file());
  StateLabel label = read_file(file, state, sequence, {fingerprint, vocab_size, most_ids});
  lock.file().remember(file.info());
  return label;
}

StateLabel load_state(const std::filesystem::path& path, HybridState& state, int64_t sequence, const std::string& fingerprint,
                      int64_t vocab_size, int64_t most_ids) {
  return read_file(StateReader(path), state, sequence, {fingerprint, vocab_size, most_ids});
}

StateFileInfo read_state_file(const std::filesystem::path& path) { return describe_file(StateReader(path)); }

StateFileInfo read_state_file(const StateLock& lock) { return describe_file(StateReader(lock.file())); }

}  // namespace weft
