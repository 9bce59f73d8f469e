// A whole file as read-only memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace weft::files {

// Pages come from the file when they are touched. The file must not be truncated meanwhile.
class MappedFile {
 public:
  // Throws weft::Error when it is not a regular file that can be read.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Does the path name anything, be it a link that leads nowhere? Then it is to be opened, and what is wrong with it to be said.
bool is_there(const std::filesystem::path& path);

// The text of a small file. Throws weft::Error when it cannot be read or has more than `limit` bytes, whatever its size is said to be
// (files of /proc have 0).
std::string read_text(const std::filesystem::path& path, uint64_t limit);

}  // namespace weft::files
