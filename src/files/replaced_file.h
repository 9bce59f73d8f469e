// A file that is written whole or not at all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace weft::files {

// Bytes go to "<path>.weft-tmp"; commit() makes them durable and puts them in the place of <path> in one step. Whatever happens before that,
// be it a kill or a full disk, leaves <path> as it was. What a kill leaves of the temporary file, the next writer takes over; two writers
// of one path wait for each other. Throws weft::Error with a sentence; then, and without commit(), the temporary file is removed, unless
// it could not be locked: it may be another writer's.
class ReplacedFile {
 public:
  explicit ReplacedFile(const std::filesystem::path& path);  // of a link: the file that it leads to, there already or not
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  void write(uint64_t offset, std::span<const std::byte> bytes);  // several threads may
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;  // with the words of errno
  void discard();

  std::filesystem::path path_, temporary_;
  int file_ = -1;
  std::atomic<uint64_t> written_ = 0;
};

}  // namespace weft::files
