// What `weft generate` reports of its runs: JSON on stdout, or statistics on stderr.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "weft/generate.h"
#include "weft/prefix_store.h"

namespace weft::tools {

// The options of the command that its reports show.
struct GenerationReport {
  Stream stream;
  std::string kv;
  uint64_t seed = 0;
  bool drafts = false, stores = false;  // with --draft, with --prefix-store
};

// The object of docs/json.md. `bytes` is the size of one token in all KV caches.
nlohmann::ordered_json generation_json(const Generation& g, const GenerationReport& report, const std::string& prompt,
                                       int64_t bytes);

// Lines on stderr: tokens and rates of prefill and decode, and what the prefix store holds.
void print_phases(const Generation& g, const GenerationReport& report);
void print_store(const PrefixStore& store);

}  // namespace weft::tools
