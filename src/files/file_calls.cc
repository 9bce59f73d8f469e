// The system calls that lock and replace a file: see file_calls.h.
#include "files/file_calls.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

namespace weft::files {
namespace {

FileCalls g_system;
std::atomic<FileCalls*> g_calls = &g_system;

}  // namespace

int FileCalls::open(int folder, const char* name, int flags, mode_t mode) { return ::openat(folder, name, flags, mode); }
int FileCalls::stat(int folder, const char* name, struct stat* info) { return ::fstatat(folder, name, info, AT_SYMLINK_NOFOLLOW); }
int FileCalls::stat(int file, struct stat* info) { return ::fstat(file, info); }
ssize_t FileCalls::read_link(int link, char* target, size_t bytes) { return ::readlinkat(link, "", target, bytes); }
ssize_t FileCalls::read(int file, void* data, size_t bytes, off_t offset) { return ::pread(file, data, bytes, offset); }
ssize_t FileCalls::write(int file, const void* data, size_t bytes, off_t offset) { return ::pwrite(file, data, bytes, offset); }
int FileCalls::truncate(int file, off_t bytes) { return ::ftruncate(file, bytes); }
int FileCalls::change_group(int file, gid_t group) { return ::fchown(file, static_cast<uid_t>(-1), group); }
int FileCalls::change_mode(int file, mode_t mode) { return ::fchmod(file, mode); }
int FileCalls::start_sync(int file) {
#ifdef SYNC_FILE_RANGE_WRITE
  return ::sync_file_range(file, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
  (void)file;
  return 0;
#endif
}
int FileCalls::sync(int file) { return ::fsync(file); }
int FileCalls::rename(int folder, const char* from, const char* to, bool replace) {
#ifdef RENAME_NOREPLACE
  if (!replace) {
    const int done = ::renameat2(folder, from, folder, to, RENAME_NOREPLACE);
    if (done == 0 || (errno != EINVAL && errno != ENOSYS)) return done;
  }
#else
  (void)replace;
#endif
  return ::renameat(folder, from, folder, to);
}
int FileCalls::unlink(int folder, const char* name) { return ::unlinkat(folder, name, 0); }
int FileCalls::lock(int file) { return ::flock(file, LOCK_EX | LOCK_NB); }
int FileCalls::entropy(void* data, size_t bytes) { return ::getentropy(data, bytes); }

FileCalls& file_calls() { return *g_calls; }
void replace_file_calls(FileCalls* calls) { g_calls = calls ? calls : &g_system; }

}  // namespace weft::files
