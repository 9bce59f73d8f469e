// What legal arguments of the chunk stages are, and how many chunk rows they may need.
#include "weft/delta_chunk.h"

#include <algorithm>

#include "common/sequences.h"
#include "core/delta_check.h"
#include "core/op_limits.h"

namespace weft {
namespace {

constexpr const char* kLegalChunks = "chunks of 16, 32 or 64";

// h of chunk_state and chunk_output. Asked after memory(): sizes are sane then.
void check_chunk_rows(Check& check, const Tensor& h, const Sequences& sequences, int64_t chunk) {
  if (!check_matrices(check, "h", h).ok()) return;
  const int64_t wanted = max_chunks(check.dim("T"), sequences, chunk);
  check.require(h.size(0) >= wanted, "h", [&] {
    return "has " + std::to_string(h.size(0)) + " chunk rows, wanted at least max_chunks() = " + std::to_string(wanted);
  });
}

}  // namespace

int64_t max_chunks(int64_t tokens, const Sequences& sequences, int64_t chunk) {
  if (tokens <= 0 || sequences.count <= 0 || chunk <= 0) return 0;
  const int64_t longest = (std::max<int64_t>(max_tokens(sequences, tokens), 0) + chunk - 1) / chunk;
  if (!sequences.cu_seqlens.present()) return sequences.count * longest;
  // Every sequence that is not empty starts one chunk, and every `chunk` further tokens at most one more.
  const int64_t filled = std::min(sequences.count, tokens), by_tokens = filled + (tokens - filled) / chunk;
  int64_t by_length = 0;
  return __builtin_mul_overflow(sequences.count, longest, &by_length) ? by_tokens : std::min(by_tokens, by_length);
}

Status validate(const ChunkCumsumArgs& args) {
  Check check("chunk_cumsum");
  check_chunk(check, args.chunk).members(args);
  if (args.g.rank == 3) check_head_size(check, "g", "K");
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkKktArgs& args) {
  Check check("chunk_kkt");
  check_chunk(check, args.chunk).members(args);
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkTriInverseArgs& args) {
  Check check("chunk_tri_inverse");
  check_chunk(check, args.chunk).members(args);
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkWuArgs& args) {
  Check check("chunk_wu");
  check_chunk(check, args.chunk).members(args);
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkStateArgs& args) {
  Check check("chunk_state");
  check_chunk(check, args.chunk).members(args);
  check_matrices(check_matrices(check, "state_in", args.state_in), "state_out", args.state_out);
  check_chunk_rows(check.memory(args), args.h, args.sequences, args.chunk);
  return std::move(check).status();
}

Status validate(const ChunkOutputArgs& args) {
  Check check("chunk_output");
  check_chunk(check, args.chunk).members(args);
  check_chunk_rows(check.memory(args), args.h, args.sequences, args.chunk);
  return std::move(check).status();
}

std::string legal_shapes(const ChunkCumsumArgs&) { return kLegalChunks; }
std::string legal_shapes(const ChunkKktArgs&) { return legal_heads() + "; " + kLegalChunks; }
std::string legal_shapes(const ChunkTriInverseArgs&) { return kLegalChunks; }
std::string legal_shapes(const ChunkWuArgs&) { return legal_heads() + "; " + kLegalChunks; }
std::string legal_shapes(const ChunkStateArgs&) { return legal_heads() + "; " + kLegalChunks; }
std::string legal_shapes(const ChunkOutputArgs&) { return legal_heads() + "; " + kLegalChunks; }

}  // namespace weft
