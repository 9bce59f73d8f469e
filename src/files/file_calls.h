// The system calls that lock and replace a file. Tests record these calls and make them fail.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>

namespace weft::files {

// Every member is one system call of the same name or meaning. A failure is a negative result and errno.
class FileCalls {
 public:
  virtual ~FileCalls() = default;
  virtual int open(int folder, const char* name, int flags, mode_t mode);
  virtual int stat(int folder, const char* name, struct stat* info);  // does not follow links
  virtual int stat(int file, struct stat* info);
  virtual ssize_t read_link(int link, char* target, size_t bytes);  // of a link that was opened with O_PATH
  virtual ssize_t read(int file, void* data, size_t bytes, off_t offset);
  virtual ssize_t write(int file, const void* data, size_t bytes, off_t offset);
  virtual int truncate(int file, off_t bytes);
  virtual int change_group(int file, gid_t group);
  virtual int change_mode(int file, mode_t mode);
  virtual int start_sync(int file);  // starts writing to disk and does not wait, where the system can do that
  virtual int sync(int file);
  // Without `replace`, an existing `to` is an error (EEXIST), where the file system can tell; elsewhere it is replaced.
  virtual int rename(int folder, const char* from, const char* to, bool replace);
  virtual int unlink(int folder, const char* name);
  virtual int lock(int file);                     // exclusive, does not wait
  virtual int entropy(void* data, size_t bytes);  // random bytes
};

// The calls in use: those of the system, unless a test replaced them.
FileCalls& file_calls();
// For tests, while no other thread uses files. Null: the calls of the system.
void replace_file_calls(FileCalls* calls);

}  // namespace weft::files
