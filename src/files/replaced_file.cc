// A file that is replaced atomically: see replaced_file.h.
#include "files/replaced_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "files/refuse.h"

namespace weft::files {

namespace {

#ifdef SYNC_FILE_RANGE_WRITE
constexpr uint64_t kDirtyBytes = 4 << 20;
#endif

// Follows links: the target is replaced, not the link. The target need not exist.
std::filesystem::path behind_links(const std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // the limit of Linux
  std::filesystem::path at = path;
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code fault;
    if (!std::filesystem::is_symlink(at, fault)) return at;
    const std::filesystem::path target = std::filesystem::read_symlink(at, fault);
    if (fault) refuse(path.native(), "", "is a link that cannot be followed: " + fault.message());
    at = at.parent_path() / target;  // an absolute target replaces the whole path
  }
  refuse(path.native(), "", std::string("is a link that cannot be followed: ") + std::strerror(ELOOP));
}

}  // namespace

ReplacedFile::ReplacedFile(const std::filesystem::path& path) : path_(behind_links(path)), temporary_(path_) {
  temporary_ += ".weft-tmp";
  struct stat info {};
  const bool replaces = ::stat(path_.c_str(), &info) == 0;
  if (replaces && !S_ISREG(info.st_mode)) refuse(path_.native(), "", "is not a regular file");
  for (;;) {
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (file_ < 0) fail("cannot be written");
    // Another writer of the same path may hold the lock and rename the file that was opened here. Then open again.
    int locked = 0;
    do locked = ::flock(file_, LOCK_EX);
    while (locked != 0 && errno == EINTR);
    struct stat opened {
    }, named{};
    const bool known = locked == 0 && ::fstat(file_, &opened) == 0;
    if (known && S_ISREG(opened.st_mode) && ::stat(temporary_.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
        opened.st_dev == named.st_dev)
      break;
    const int why = errno;
    ::close(file_);
    file_ = -1;
    errno = why;
    if (locked != 0) fail("cannot be locked");
    if (known && !S_ISREG(opened.st_mode)) refuse(temporary_.native(), "", "is not a regular file");
  }
  // Keep the permissions of the old file.
  if ((replaces && ::fchmod(file_, info.st_mode & 07777) != 0) || ::ftruncate(file_, 0) != 0) {
    const int why = errno;
    discard();
    errno = why;
    fail("cannot be written");
  }
}

ReplacedFile::~ReplacedFile() { discard(); }

void ReplacedFile::discard() {
  if (file_ < 0) return;
  ::unlink(temporary_.c_str());  // while locked, so it is not another writer's file
  ::close(file_);
  file_ = -1;
}

void ReplacedFile::fail(const char* what) const { refuse(path_.native(), "", std::string(what) + ": " + std::strerror(errno)); }

void ReplacedFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(done));
    offset += static_cast<uint64_t>(done);
#ifdef SYNC_FILE_RANGE_WRITE
    // Starts writing back to disk early. commit() waits for the rest and reports errors.
    const auto count = static_cast<uint64_t>(done);
    if (const uint64_t before = written_.fetch_add(count); before / kDirtyBytes != (before + count) / kDirtyBytes)
      ::sync_file_range(file_, 0, 0, SYNC_FILE_RANGE_WRITE);
#endif
  }
}

void ReplacedFile::commit() {
  if (::fsync(file_) != 0) fail("cannot be written");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be replaced");
  ::close(file_);
  file_ = -1;
  // The rename is durable once the directory is synced.
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return;  // a directory that is writable but not readable
  const bool durable = ::fsync(opened) == 0 || errno == EINVAL;
  ::close(opened);
  if (!durable) fail("is replaced, but its directory could not be synced");
}

}  // namespace weft::files
