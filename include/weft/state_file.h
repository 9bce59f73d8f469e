// State files: the memory of one sequence, written whole or not at all, and checked whole before anything is loaded.
//
// A file holds the tokens of the sequence, the recurrent states ([V, K] f32) and convolution windows of all delta layers, and the
// codes and gains of all attention layers in the layout `rows`, which converts exactly to and from every other layout. The file
// names its model and its KV formats, and checksums cover every byte. docs/memory.md describes the bytes.
//
// Threads: saving reads a state and loading changes it, as other uses do; calls for different states are independent. Two writers
// of one path wait for each other, in one process or in several. Readers take no lock: a reader gets the old file or the new one,
// whole. A call uses up to four threads while it runs.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "weft/hybrid_state.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

namespace files {
class FileLock;
}

// What a file says about its sequence. Model::save fills the label in, Model::restore compares it.
struct StateLabel {
  std::string fingerprint;   // of the model: Model::fingerprint()
  std::string model;         // the model in words
  std::string kv;            // the KV policy that the state was made with
  std::vector<int32_t> ids;  // the tokens of the sequence, followed by tokens that are still to be appended
};

// What `weft state` prints of a file.
struct StateSection {
  std::string name;  // "ids", "layer 3 codes of K"
  int64_t offset = 0, bytes = 0;
  uint64_t checksum = 0;
};
struct StateFileInfo {
  int64_t version = 0, bytes = 0, tokens = 0;
  StateLabel label;
  std::vector<std::string> layers;  // "gated delta, 4 value heads of 128 x 128, ..."
  std::vector<StateSection> sections;
};

struct StateLockOptions {
  double wait = 60;                              // seconds until a file that another writer holds is an Error; 0: at once
  std::function<void(int64_t process)> on_wait;  // called once, after a second of waiting; 0: the process is not known
  std::function<bool()> proceed = {};            // called many times a second while the lock waits; false: an Error
};

// Exclusive use of a state file from load to save, so that no turn of another writer is lost in between:
//
//   StateLock lock("story.state");
//   if (lock.exists()) tokens = model.restore(lock, state, 0);
//   ...
//   model.save(lock, state, 0, tokens);
//
// Throws Error where no file can be written at this path, where the file or the link at this path belongs to another user, and
// where another writer holds the file for longer than `wait`. Until the lock is destroyed, other locks and writers of this path
// wait, also those of the same thread. While it is held, a file "<name>.weft-lock" lies beside the state file (docs/memory.md).
class StateLock {
 public:
  explicit StateLock(const std::filesystem::path& file, const StateLockOptions& options = {});
  ~StateLock();
  StateLock(StateLock&&) noexcept;
  StateLock& operator=(StateLock&&) noexcept;

  bool exists() const;  // was there a file when it was locked, loaded or saved last?

  files::FileLock& file() const { return *lock_; }  // opaque: src/files/file_lock.h

 private:
  std::unique_ptr<files::FileLock> lock_;
};

// Writes a sequence. After an Error (a full disk, a missing folder, a label that is not UTF-8) or a kill, the file is unchanged. A
// new file has the permissions that umask leaves; a replaced one keeps its permissions. Files and links of other users are refused.
// With a lock, a file is also refused if a process without a lock changed it since it was locked, loaded or saved last. Without a
// lock, the call takes one for its duration and replaces what is there.
void save_state(StateLock& lock, const HybridState& state, int64_t sequence, const StateLabel& label);
void save_state(const std::filesystem::path& file, const HybridState& state, int64_t sequence, const StateLabel& label);
// Throws the Error of save_state() where no file can be written at this path, and changes nothing: for a check before long work.
void check_state_path(const std::filesystem::path& file);

// Reads a file into a sequence of a state, and returns its label. The sequence changes only after the whole file was read and
// agrees with its own checksums, with `fingerprint`, with the state's plan, with a vocabulary of `vocab_size` tokens (0: of any
// size) and with a list of at most `most_ids` ids. Otherwise an Error says what differs, and the sequence is unchanged.
StateLabel load_state(const std::filesystem::path& file, HybridState& state, int64_t sequence, const std::string& fingerprint,
                      int64_t vocab_size = 0, int64_t most_ids = std::numeric_limits<int64_t>::max());
StateLabel load_state(StateLock& lock, HybridState& state, int64_t sequence, const std::string& fingerprint, int64_t vocab_size = 0,
                      int64_t most_ids = std::numeric_limits<int64_t>::max());

// Checks a file against its own checksums and describes it. Of a lock, the file counts as neither loaded nor saved by that.
StateFileInfo read_state_file(const std::filesystem::path& file);
StateFileInfo read_state_file(const StateLock& lock);

}  // namespace weft
#pragma GCC visibility pop
