// A memory-mapped, read-only file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace weft::files {

// Pages are read from the file on first access. The file must not be truncated meanwhile.
class MappedFile {
 public:
  // Throws weft::Error if the path is not a readable regular file.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Does the path exist, even as a dangling link? Then opening it gives the right error message.
bool is_there(const std::filesystem::path& path);

// The contents of a small file. Throws weft::Error if it cannot be read or has more than `limit` bytes. Its reported size is not
// trusted: files in /proc report 0.
std::string read_text(const std::filesystem::path& path, uint64_t limit);

}  // namespace weft::files
