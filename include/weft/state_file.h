// State files: the memory of one sequence, written whole or not at all, and checked whole before anything is loaded.
//
// A file holds the tokens of the sequence, the recurrent states ([V, K] f32) and convolution windows of all delta layers, and the
// codes and gains of all attention layers in the layout `rows`, which converts exactly to and from every other layout. The file
// names its model and its KV formats, and checksums cover every byte. docs/memory.md describes the bytes.
//
// Threads: saving reads a state and loading changes it, as other uses do; calls for different states are independent. Two writers
// of one path wait for each other, and a reader gets the old file or the new one. A call uses up to four threads while it runs.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "weft/hybrid_state.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

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

// Writes a sequence. After an Error (a full disk, a missing folder, a label that is not UTF-8) or a kill, `file` is unchanged.
void save_state(const std::filesystem::path& file, const HybridState& state, int64_t sequence, const StateLabel& label);
// Throws the Error of save_state() where no file can be written at this path, and changes nothing: for a check before long work.
void check_state_path(const std::filesystem::path& file);

// Reads a file into a sequence of a state, and returns its label. The sequence changes only after the whole file was read and
// agrees with its own checksums, with `fingerprint`, with the state's plan and with a vocabulary of `vocab_size` tokens (0: of any
// size). Otherwise an Error says what differs, and the sequence is unchanged.
StateLabel load_state(const std::filesystem::path& file, HybridState& state, int64_t sequence, const std::string& fingerprint,
                      int64_t vocab_size = 0);

// Checks a file against its own checksums and describes it.
StateFileInfo read_state_file(const std::filesystem::path& file);

}  // namespace weft
#pragma GCC visibility pop
