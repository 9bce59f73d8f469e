// A file that is replaced atomically.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "files/file_lock.h"

namespace weft::files {

// Bytes are written to a temporary file of a random name in the same folder, which only this user can open. commit() gives it the
// permissions of the replaced file, syncs it to disk and renames it. Any failure before that, such as a kill or a full disk, leaves
// the file unchanged. Members throw weft::Error. After an error, or without commit(), the temporary file is removed.
class ReplacedFile {
 public:
  explicit ReplacedFile(FileLock& lock);  // which must live longer
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  void write(uint64_t offset, std::span<const std::byte> bytes);  // thread-safe
  void commit();                                                  // refuses if the file is not the one that the lock knows

 private:
  FileLock& lock_;
  const FilePlace& place_;
  Descriptor file_;
  std::atomic<uint64_t> written_ = 0;
};

}  // namespace weft::files
