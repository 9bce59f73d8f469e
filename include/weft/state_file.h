// Files of what a sequence remembers: written whole or not at all, checked whole before anything is loaded.
//
// A file holds one sequence: its tokens, the recurrent states ([V, K] f32) and convolution windows of all delta layers, and the codes and
// gains of all attention layers as rows, which every backend and layout can take over exactly. It names the model and the formats that it
// is of, and every byte is under a checksum. docs/state.md describes the bytes.
//
// Threads: saving reads a state and loading changes it, as any other use of it; calls for different states are independent. Two writers
// of one path wait for each other, and a reader gets the old file or the new one. A call takes up to four threads while it runs.
// ABI: relink C++ callers between minor versions; weft/c.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "weft/hybrid_state.h"

namespace weft {

// What a file says beside the bytes of the sequence. Model::save fills it in, Model::restore compares it.
struct StateLabel {
  std::string fingerprint;   // of the model: Model::fingerprint()
  std::string model;         // the same for people
  std::string kv;            // the KV policy that was asked for
  std::vector<int32_t> ids;  // the tokens of the sequence; more than it holds: those are still to be appended
};

// What `weft state` prints.
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

// Writes a sequence. An Error (a full disk, a folder that does not exist, a label that is not UTF-8) or a kill leaves what `file` was
// before.
void save_state(const std::filesystem::path& file, const HybridState& state, int64_t sequence, const StateLabel& label);

// Reads a file into a sequence of a state, and returns its label. The sequence changes only when the whole file was read and fits its own
// checksums, `fingerprint`, the state's plan and a vocabulary of `vocab_size` tokens (0: of any size); otherwise an Error says what
// differs, and the sequence is as it was.
StateLabel load_state(const std::filesystem::path& file, HybridState& state, int64_t sequence, const std::string& fingerprint,
                      int64_t vocab_size = 0);

// Checks a file against itself and says what it holds.
StateFileInfo read_state_file(const std::filesystem::path& file);

}  // namespace weft
