// What the tests of locks and replaced files share: a folder, and short names for a save and for a refusal.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "files/file_lock.h"
#include "files/replaced_file.h"
#include "tests/support/complaint.h"
#include "tests/support/file_faults.h"
#include "tests/support/folder.h"

namespace weft::files {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

inline void put(ReplacedFile& file, const std::string& text) { file.write(0, std::as_bytes(std::span(text))); }
inline void replace(FileLock& lock, const std::string& text) {
  ReplacedFile file(lock);
  put(file, text);
  file.commit();
}
inline void replace(const fs::path& path, const std::string& text) {
  FileLock lock(path, {.wait = 10, .on_wait = {}});
  replace(lock, text);
}
inline std::string refusal(const fs::path& path, double wait = 0) {
  const std::string said = complaint([&] { FileLock lock(path, {.wait = wait, .on_wait = {}}); });
  return said.rfind(path.native(), 0) == 0 ? said.substr(path.native().size()) : said;
}

class Replace : public testing::Test {
 protected:
  Replace() { EXPECT_EQ(::chmod(folder_.path().c_str(), 01777), 0); }  // as /tmp: everybody may write, nobody may remove
  fs::path at(const std::string& name) const { return folder_.path() / name; }
  Names names() const { return names_in(folder_.path()); }

  Folder folder_;
  fs::path file_ = folder_.path() / "x";
};

}  // namespace weft::files
