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

// The text of a small file. Throws weft::Error when it cannot be read or is larger than `limit` bytes.
std::string read_text(const std::filesystem::path& path, uint64_t limit);

}  // namespace weft::files
