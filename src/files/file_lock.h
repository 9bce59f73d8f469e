// Exclusive use of a file by one writer, from reading the file to replacing it.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace weft::files {

struct LockOptions {
  double wait = 60;                              // seconds until a held lock is an Error; 0: at once
  std::function<void(int64_t process)> on_wait;  // called once, after a second of waiting; 0: the process is not known
  std::function<bool()> proceed = {};            // asked many times a second while it waits; false: an Error
};

// A file descriptor that is closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;

  explicit operator bool() const { return number_ >= 0; }
  int operator*() const { return number_; }
  void close();
  int release();

 private:
  int number_ = -1;
};

// Which file has a name, and whether it was written since.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  off_t bytes = 0;
  time_t seconds = 0;  // of the last change of its bytes
  int64_t nanoseconds = 0;

  explicit FileIdentity(const struct stat& info);
  bool operator==(const FileIdentity&) const = default;
};

// A folder and a name in it. All access goes through the open folder, so a path that is changed meanwhile cannot redirect it.
class FilePlace {
 public:
  // Links are followed, also dangling ones, if they belong to this user or to root. Another user's link is refused: it could make
  // this process replace any file of its user.
  explicit FilePlace(const std::filesystem::path& path);

  const std::string& path() const { return path_; }      // as given, for messages
  const std::string& target() const { return target_; }  // the path behind links
  const std::string& name() const { return name_; }      // of the target in the folder
  int folder() const { return *folder_; }
  bool can_sync() const { return can_sync_; }  // a folder without read permission cannot be synced
  // The file, or nothing. Refuses what is not a regular file.
  std::optional<struct stat> look() const;
  // Refuses the file if another user owns it: replacing it would take it from that user.
  void check_owner(const std::optional<struct stat>& file, uid_t owner) const;
  [[noreturn]] void fail(const char* what) const;  // appends the message of errno

 private:
  std::string path_, target_, name_;
  Descriptor folder_;
  bool can_sync_ = true;
};

// What a new file in a folder gets: found by creating an empty file and removing it, so that umask and mount options count.
struct NewFile {
  uid_t owner = 0;
  mode_t mode = 0;  // permissions
};
NewFile try_new_file(const FilePlace& place, const std::string& name, mode_t mode = 0666);

// Does the name still belong to this open file?
bool is_named(const FilePlace& place, const std::string& name, int file);

// "." and random digits: the name of a temporary file.
std::string random_name();

// The lock is a file "<name>.weft-lock" of this user with mode 0600 and flock(2) on it. It names the process and its temporary file.
// Only a lock file that Weft made is used and removed; anything else under that name is refused and left alone. A process that was
// killed leaves its lock file and its temporary file; the next holder removes both. Members throw weft::Error. A constructor that
// throws leaves nothing behind.
class FileLock {
 public:
  explicit FileLock(const std::filesystem::path& path, const LockOptions& options = {});
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  const FilePlace& place() const { return place_; }
  bool exists() const { return seen_.has_value(); }
  Descriptor open() const;  // for reading; remember() once it is read
  // The file as it is now, or nothing. Refuses a file that is not the one remembered.
  std::optional<struct stat> check_unchanged() const;
  void remember(const std::optional<struct stat>& file);  // what is there now is known

  mode_t new_mode() const { return new_file_.mode; }
  const std::string& temporary() const { return temporary_; }
  void rename_temporary();  // after EEXIST: chooses another random name

 private:
  explicit FileLock(FilePlace&& place);
  void acquire(const LockOptions& options);
  bool try_to_lock();             // false: another process, holder_, has the lock
  bool open_lock_file();          // false: it vanished
  bool remove_left_over() const;  // false: the temporary file may still be there
  void write_note() const;
  [[noreturn]] void fail_lock(const char* what) const;

  FilePlace place_;
  std::string lock_name_, lock_path_, temporary_;
  Descriptor lock_;
  bool made_ = false, held_ = false;
  int64_t holder_ = 0;
  NewFile new_file_;
  std::optional<FileIdentity> seen_;
};

}  // namespace weft::files
