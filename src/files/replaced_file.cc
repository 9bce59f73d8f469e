// A file that is replaced atomically: see replaced_file.h.
#include "files/replaced_file.h"

#include <fcntl.h>

#include <cerrno>

#include "files/file_calls.h"
#include "files/refuse.h"

namespace weft::files {

namespace {

constexpr uint64_t kDirtyBytes = 4 << 20;

}  // namespace

ReplacedFile::ReplacedFile(FileLock& lock) : lock_(lock), place_(lock.place()) {
  constexpr int kMostTries = 16;
  lock_.check_unchanged();  // before the work
  for (int i = 0; i < kMostTries && !file_; ++i) {
    file_ = Descriptor(
        file_calls().open(place_.folder(), lock_.temporary().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file_ && errno != EEXIST) place_.fail("cannot be written");
    if (!file_) lock_.rename_temporary();
  }
  if (!file_) refuse(place_.path(), "", "cannot be written: another process takes every name of a temporary file");
}

ReplacedFile::~ReplacedFile() {
  if (file_ && is_named(place_, lock_.temporary(), *file_)) file_calls().unlink(place_.folder(), lock_.temporary().c_str());
}

void ReplacedFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = file_calls().write(*file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = ENOSPC;
    if (done <= 0) place_.fail("cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(done));
    offset += static_cast<uint64_t>(done);
    // commit() waits for the rest and reports errors.
    const auto count = static_cast<uint64_t>(done);
    if (const uint64_t before = written_.fetch_add(count); before / kDirtyBytes != (before + count) / kDirtyBytes)
      file_calls().start_sync(*file_);
  }
}

void ReplacedFile::commit() {
  const std::optional<struct stat> old = lock_.check_unchanged();
  mode_t mode = old ? old->st_mode & 0777 : lock_.new_mode();
  struct stat own {};
  if (file_calls().stat(*file_, &own) != 0) place_.fail("cannot be written");
  // Permissions of the old group are not for another group.
  if (old && own.st_gid != old->st_gid && file_calls().change_group(*file_, old->st_gid) != 0) mode &= ~mode_t{070};
  // Some file systems refuse every change, also one to the mode that the file has.
  if ((own.st_mode & 0777) != mode && file_calls().change_mode(*file_, mode) != 0) place_.fail("cannot be written");
  if (file_calls().sync(*file_) != 0) place_.fail("cannot be written");
  if (!is_named(place_, lock_.temporary(), *file_))
    refuse(place_.path(), "", "cannot be replaced: another process moved the temporary file " + lock_.temporary());
  if (file_calls().stat(*file_, &own) != 0) place_.fail("cannot be written");
  lock_.check_unchanged();
  if (file_calls().rename(place_.folder(), lock_.temporary().c_str(), place_.name().c_str(), old.has_value()) != 0)
    place_.fail("cannot be replaced");
  file_.close();
  lock_.remember(own);
  // The rename is durable once the directory is synced.
  if (place_.can_sync() && file_calls().sync(place_.folder()) != 0 && errno != EINVAL)
    place_.fail("is replaced, but its directory could not be synced");
}

}  // namespace weft::files
