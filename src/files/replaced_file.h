// A file that is replaced atomically.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace weft::files {

// Bytes are written to "<path>.weft-tmp". commit() syncs them to disk and renames the temporary file to <path>. Any failure before
// that, such as a kill or a full disk, leaves <path> unchanged. A temporary file left by a killed process is reused by the next
// writer. Two writers of one path wait for each other. Members throw weft::Error. After an error, or without commit(), the
// temporary file is removed, unless it could not be locked, because it may belong to another writer.
class ReplacedFile {
 public:
  explicit ReplacedFile(const std::filesystem::path& path);  // if it is a link, its target is replaced or created
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  void write(uint64_t offset, std::span<const std::byte> bytes);  // thread-safe
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;  // appends the message of errno
  void discard();

  std::filesystem::path path_, temporary_;
  int file_ = -1;
  std::atomic<uint64_t> written_ = 0;
};

}  // namespace weft::files
