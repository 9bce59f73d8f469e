// A memory-mapped, read-only file: see mapped_file.h.
#include "files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "files/refuse.h"

namespace weft::files {
namespace {

// An open file and its reported size.
struct Descriptor {
  explicit Descriptor(const std::filesystem::path& path) {
    // O_NONBLOCK: opening a named pipe must not wait for a writer.
    number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (number < 0) refuse(path.native(), "", std::string("cannot be opened: ") + std::strerror(errno));
    struct stat info {};
    if (::fstat(number, &info) != 0 || !S_ISREG(info.st_mode)) {
      ::close(number);
      refuse(path.native(), "", "is not a regular file");
    }
    size = static_cast<uint64_t>(info.st_size);
  }
  ~Descriptor() { ::close(number); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number;
  uint64_t size = 0;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor file(path);
  if (file.size == 0) return;  // nothing to map
  void* data = ::mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (data == MAP_FAILED) refuse(path.native(), "", std::string("cannot be mapped: ") + std::strerror(errno));
  data_ = static_cast<const uint8_t*>(data);
  size_ = file.size;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() != std::filesystem::file_type::not_found;
}

std::string read_text(const std::filesystem::path& path, uint64_t limit) {
  const Descriptor file(path);
  if (file.size > limit)
    refuse(path.native(), "", "has " + std::to_string(file.size) + " bytes, wanted at most " + std::to_string(limit));
  std::string text(file.size + 1, '\0');  // one byte more, so that the end of the file is seen without growing
  size_t done = 0;
  for (;;) {
    if (done > limit) refuse(path.native(), "", "has more than " + std::to_string(limit) + " bytes, wanted at most that many");
    if (done == text.size()) text.resize(2 * done + 4096);
    const ssize_t got = ::read(file.number, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path.native(), "", std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace weft::files
