// Exclusive use of a file by one writer: see file_lock.h.
#include "files/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "files/file_calls.h"
#include "files/refuse.h"
#include "weft/printable.h"

namespace weft::files {

namespace {

constexpr mode_t kPrivate = 0600;

// The content of a lock file, "weft-lock 0000001234 .weft-tmp-0123456789abcdef\n". Its length is constant, so one write replaces it.
constexpr std::string_view kNoteBegin = "weft-lock ", kTemporaryBegin = ".weft-tmp-";
constexpr size_t kProcessDigits = 10, kRandomDigits = 16, kTemporaryBytes = kTemporaryBegin.size() + kRandomDigits;
constexpr size_t kNoteBytes = kNoteBegin.size() + kProcessDigits + 1 + kTemporaryBytes + 1;

struct Note {
  int64_t process = 0;  // 0: none
  std::string temporary;
  bool foreign = false;  // the file is not a lock file of Weft
};

// Reads the note of a lock file, or nothing (and errno) if the file cannot be read. A note may be missing, cut or filled with zeros
// after a kill or a power failure; then it names nothing.
std::optional<Note> read_note(int file) {
  const Note foreign{.process = 0, .temporary = {}, .foreign = true};
  std::string text(kNoteBytes + 1, '\0');
  ssize_t got = 0;
  do got = file_calls().read(file, text.data(), text.size(), 0);
  while (got < 0 && errno == EINTR);
  if (got < 0) return std::nullopt;
  if (static_cast<size_t>(got) > kNoteBytes) return foreign;
  text.resize(static_cast<size_t>(got));
  if (std::all_of(text.begin(), text.end(), [](char c) { return c == '\0'; })) return Note{};
  const std::string_view all = text;
  if (!all.starts_with(kNoteBegin)) return foreign;
  if (all.size() != kNoteBytes || all.back() != '\n') return Note{};
  const std::string_view digits = all.substr(kNoteBegin.size(), kProcessDigits);
  const std::string_view name = all.substr(kNoteBegin.size() + kProcessDigits + 1, kTemporaryBytes);
  Note note;
  const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), note.process);
  if (fault != std::errc{} || end != digits.data() + digits.size() || note.process < 0 || !name.starts_with(kTemporaryBegin) ||
      name.find_first_not_of("0123456789abcdef", kTemporaryBegin.size()) != std::string_view::npos)
    return Note{};
  note.temporary = name;
  return note;
}

std::string process_text(int64_t process) { return process > 0 ? "process " + std::to_string(process) : "another process"; }

std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);  // "2.500000"
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// The argument "wait" tells programs that the file is held. The sentence does not contain the argument.
[[noreturn]] void refuse_held(const std::string& path, const std::string& what) {
  Status status;
  status.code = Code::invalid_argument;
  status.op = printable_text(path);
  status.argument = "wait";
  status.message = status.op + ": " + what + "; nothing was changed";
  throw Error(std::move(status));
}

// The path behind links. The target need not exist.
std::filesystem::path behind_links(const std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // the limit of Linux
  std::filesystem::path at = path;
  for (int i = 0; i < kMostLinks; ++i) {
    // The link is held open, so its owner and its target are those of one link.
    const Descriptor link(file_calls().open(AT_FDCWD, at.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC, 0));
    struct stat info {};
    // A link that cannot be opened is not followed, and FilePlace::look() refuses it.
    if (!link || file_calls().stat(*link, &info) != 0 || !S_ISLNK(info.st_mode)) return at;
    if (info.st_uid != ::geteuid() && info.st_uid != 0)
      refuse(path.native(), "",
             "is a link of user " + std::to_string(info.st_uid) + ", wanted a link of user " + std::to_string(::geteuid()) +
                 " or of root; give the path of its target");
    std::string target(4096, '\0');
    const ssize_t bytes = file_calls().read_link(*link, target.data(), target.size());
    if (bytes < 0 || static_cast<size_t>(bytes) == target.size())
      refuse(path.native(), "",
             std::string("is a link that cannot be followed: ") + std::strerror(bytes < 0 ? errno : ENAMETOOLONG));
    target.resize(static_cast<size_t>(bytes));
    at = at.parent_path() / target;  // an absolute target replaces the whole path
  }
  refuse(path.native(), "", std::string("is a link that cannot be followed: ") + std::strerror(ELOOP));
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    number_ = other.release();
  }
  return *this;
}

void Descriptor::close() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

int Descriptor::release() { return std::exchange(number_, -1); }

FileIdentity::FileIdentity(const struct stat& info)
    : device(info.st_dev),
      inode(info.st_ino),
      bytes(info.st_size),
      seconds(info.st_mtim.tv_sec),
      nanoseconds(info.st_mtim.tv_nsec) {}

FilePlace::FilePlace(const std::filesystem::path& path) : path_(path.native()) {
  const std::filesystem::path target = behind_links(path);
  target_ = target.native();
  name_ = target.filename().native();
  if (name_.empty() || name_ == "." || name_ == "..") refuse(path_, "", "is not a regular file");
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : std::filesystem::path(".");
  folder_ = Descriptor(file_calls().open(AT_FDCWD, folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!folder_ && errno == EACCES) {  // a folder that is writable but not readable
    can_sync_ = false;
    folder_ = Descriptor(file_calls().open(AT_FDCWD, folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
  }
  if (!folder_) fail("cannot be written");
}

std::optional<struct stat> FilePlace::look() const {
  struct stat info {};
  if (file_calls().stat(folder(), name_.c_str(), &info) != 0) {
    if (errno == ENOENT) return std::nullopt;
    fail("cannot be opened");
  }
  if (!S_ISREG(info.st_mode)) refuse(path_, "", "is not a regular file");
  return info;
}

void FilePlace::check_owner(const std::optional<struct stat>& file, uid_t owner) const {
  if (!file || file->st_uid == owner) return;
  refuse(path_, "",
         "belongs to user " + std::to_string(file->st_uid) + ", wanted a file of user " + std::to_string(owner) +
             "; copy it, and use the copy");
}

void FilePlace::fail(const char* what) const { refuse(path_, "", std::string(what) + ": " + std::strerror(errno)); }

std::string random_name() {
  uint64_t number = 0;
  if (file_calls().entropy(&number, sizeof number) != 0)
    refuse("random_name", "", std::string("getentropy failed: ") + std::strerror(errno));
  std::string name(kTemporaryBegin);
  for (size_t i = 0; i < kRandomDigits; ++i) name += "0123456789abcdef"[(number >> (4 * i)) & 15];
  return name;
}

bool is_named(const FilePlace& place, const std::string& name, int file) {
  struct stat opened {
  }, named{};
  return file_calls().stat(file, &opened) == 0 && file_calls().stat(place.folder(), name.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

NewFile try_new_file(const FilePlace& place, const std::string& name, mode_t mode) {
  const Descriptor file(
      file_calls().open(place.folder(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!file) place.fail("cannot be written");
  struct stat info {};
  const bool known = file_calls().stat(*file, &info) == 0;
  const int why = errno;
  if (file_calls().unlink(place.folder(), name.c_str()) != 0) place.fail("cannot be replaced");
  errno = why;
  if (!known) place.fail("cannot be written");
  return {info.st_uid, info.st_mode & 0777};
}

FileLock::FileLock(FilePlace&& place)
    : place_(std::move(place)), lock_name_(place_.name() + ".weft-lock"), lock_path_(place_.target() + ".weft-lock") {}

// Once the delegated constructor has run, the destructor releases the lock whatever is thrown here.
FileLock::FileLock(const std::filesystem::path& path, const LockOptions& options) : FileLock(FilePlace(path)) {
  if (!(options.wait >= 0)) refuse(place_.path(), "wait", "is " + seconds_text(options.wait) + ", wanted 0 or more");
  place_.look();  // nothing is created beside what is not a regular file
  acquire(options);
  // The note that names it would be lost with the next one.
  if (!remove_left_over()) place_.fail("cannot be written: the temporary file of a killed process cannot be removed");
  temporary_ = random_name();
  write_note();
  new_file_ = try_new_file(place_, temporary_);
  const std::optional<struct stat> file = place_.look();
  place_.check_owner(file, new_file_.owner);
  remember(file);
}

FileLock::~FileLock() {
  if (!held_) return;
  // A temporary file that cannot be removed needs the note, so that the next holder removes it.
  try {
    if (!remove_left_over()) return;
  } catch (const std::bad_alloc&) {
    return;  // the note stays
  }
  // While the lock is held, the name belongs to this lock file. Waiting processes see that it vanished, and try again.
  if (is_named(place_, lock_name_, *lock_)) file_calls().unlink(place_.folder(), lock_name_.c_str());
}

void FileLock::fail_lock(const char* what) const { refuse(lock_path_, "", std::string(what) + ": " + std::strerror(errno)); }

void FileLock::acquire(const LockOptions& options) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  constexpr double kSilent = 1;  // seconds
  constexpr auto kLongestPause = 50ms;
  const auto begin = Clock::now();
  bool told = false;
  for (std::chrono::milliseconds pause = 1ms; !try_to_lock(); pause = std::min(2 * pause, kLongestPause)) {
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    if (!told && waited >= kSilent) {
      told = true;
      if (options.on_wait) options.on_wait(holder_);
    }
    if (options.proceed && !options.proceed())
      refuse_held(place_.path(), "the wait for " + process_text(holder_) + " was interrupted");
    if (!(waited < options.wait))  // also true of a NaN
      refuse_held(place_.path(), options.wait > 0
                                     ? "is still held by " + process_text(holder_) + " after " + seconds_text(options.wait)
                                     : "is held by " + process_text(holder_));
    const auto left = std::chrono::duration<double>(options.wait - waited);
    std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(pause, left));
  }
}

bool FileLock::try_to_lock() {
  constexpr int kMostTries = 1000;
  for (int i = 0; i < kMostTries; ++i) {
    if (!open_lock_file()) continue;
    if (file_calls().lock(*lock_) == 0) {
      // The last holder may have removed this file, and another process may hold a new one.
      held_ = is_named(place_, lock_name_, *lock_);
      if (held_) return true;
      continue;
    }
    const int why = errno;
    if (why == EINTR) continue;
    const std::optional<Note> note = read_note(*lock_);
    holder_ = note ? note->process : 0;
    if (why != EWOULDBLOCK && made_) file_calls().unlink(place_.folder(), lock_name_.c_str());
    lock_.close();
    errno = why;
    if (why != EWOULDBLOCK) fail_lock("cannot be locked");
    return false;
  }
  return false;
}

bool FileLock::open_lock_file() {
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  lock_ = Descriptor(file_calls().open(place_.folder(), lock_name_.c_str(), kFlags | O_CREAT | O_EXCL, kPrivate));
  made_ = static_cast<bool>(lock_);
  if (made_) return true;
  if (errno != EEXIST) place_.fail("cannot be written");
  lock_ = Descriptor(file_calls().open(place_.folder(), lock_name_.c_str(), kFlags, 0));
  if (!lock_ && errno == ENOENT) return false;
  struct stat info {};
  const bool there =
      lock_ ? file_calls().stat(*lock_, &info) == 0 : file_calls().stat(place_.folder(), lock_name_.c_str(), &info) == 0;
  const int why = errno;
  if (there && info.st_uid != ::geteuid() && info.st_uid != try_new_file(place_, random_name()).owner)
    refuse(lock_path_, "",
           "belongs to user " + std::to_string(info.st_uid) + ", wanted a lock file of user " + std::to_string(::geteuid()) +
               "; use a folder that only this user can write");
  errno = why;
  if (!lock_ || !there) fail_lock("cannot be opened");
  // A lock file that Weft makes has one name. It has a note, or at least its mode. On a file system without modes, such as FAT, its
  // mode is the one that every new file shows.
  const bool usual = S_ISREG(info.st_mode) && info.st_nlink <= 1;
  const std::optional<Note> note = usual ? read_note(*lock_) : Note{};
  if (!note) fail_lock("cannot be read");
  const mode_t mode = info.st_mode & 0777;
  if (!usual || note->foreign ||
      (info.st_size == 0 && mode != kPrivate && mode != try_new_file(place_, random_name(), kPrivate).mode))
    refuse(lock_path_, "", "is not a lock file that Weft made; move it away");
  return true;
}

bool FileLock::remove_left_over() const {
  std::string name = temporary_;
  if (name.empty()) {  // what the last holder left
    const std::optional<Note> note = read_note(*lock_);
    if (!note) return false;
    name = note->temporary;
  }
  if (name.empty()) return true;
  struct stat info {
  }, own{};
  if (file_calls().stat(place_.folder(), name.c_str(), &info) != 0) return errno == ENOENT;
  if (file_calls().stat(*lock_, &own) != 0) return false;
  const bool ours = S_ISREG(info.st_mode) && info.st_uid == own.st_uid && info.st_nlink == 1;
  return !ours || file_calls().unlink(place_.folder(), name.c_str()) == 0;
}

void FileLock::write_note() const {
  std::string digits = std::to_string(::getpid());
  digits.insert(0, kProcessDigits - std::min(kProcessDigits, digits.size()), '0');
  const std::string note = std::string(kNoteBegin) + digits + " " + temporary_ + "\n";
  // The lock holds without its note, which is for messages and for removing what a killed process leaves.
  if (file_calls().write(*lock_, note.data(), note.size(), 0) == static_cast<ssize_t>(note.size())) return;
  const int ignored = file_calls().truncate(*lock_, 0);
  (void)ignored;
}

void FileLock::rename_temporary() {
  temporary_ = random_name();
  write_note();
}

Descriptor FileLock::open() const {
  Descriptor file(file_calls().open(place_.folder(), place_.name().c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0));
  if (!file) place_.fail("cannot be opened");
  return file;
}

std::optional<struct stat> FileLock::check_unchanged() const {
  const std::optional<struct stat> now = place_.look();
  place_.check_owner(now, new_file_.owner);
  if (now.has_value() != seen_.has_value() || (now && FileIdentity(*now) != *seen_))
    refuse(place_.path(), "",
           std::string(!now    ? "was removed"
                       : seen_ ? "was changed"
                               : "was created") +
               " by another process since it was read; nothing was saved");
  return now;
}

void FileLock::remember(const std::optional<struct stat>& file) {
  seen_.reset();
  if (file) seen_.emplace(*file);
}

}  // namespace weft::files
