// What legal arguments of the chunk stages are, and how many chunk rows they may need.
#include "weft/delta_chunk.h"

#include <algorithm>

#include "common/sequences.h"
#include "core/delta_check.h"

namespace weft {
namespace {

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
  check_decay(check, "g", args.g, {DType::f32});
  check_decay(check, "g_cumsum", args.g_cumsum, {DType::f32});
  check.require(args.g.rank == args.g_cumsum.rank, "g_cumsum",
                [&] { return "is " + shape_text(args.g_cumsum) + ", wanted the shape of g, " + shape_text(args.g); });
  if (check.ok() && args.g.rank == 3) check_head_size(check, "g", "K");
  check_chunk(check, args.chunk).sequences("sequences", args.sequences, check.dim("T"));
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkKktArgs& args) {
  Check check("chunk_kkt");
  check.tensor("k", args.k, {"T", "Hk", "K"}).tensor("beta", args.beta, {"T", "Hv"}, {DType::f32});
  check_decay(check, "g_cumsum", args.g_cumsum, {DType::f32});
  check_chunk(check, args.chunk).tensor("a", args.a, {"T", "Hv", "C"}, {DType::f32});
  check_heads(check_head_size(check, "k", "K"), "k", args.head_map).sequences("sequences", args.sequences, check.dim("T"));
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkTriInverseArgs& args) {
  Check check("chunk_tri_inverse");
  check_chunk(check, args.chunk).tensor("a", args.a, {"T", "Hv", "C"}, {DType::f32});
  check.tensor("a_inv", args.a_inv, {"T", "Hv", "C"}, {DType::f32});
  check.sequences("sequences", args.sequences, check.dim("T"));
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkWuArgs& args) {
  Check check("chunk_wu");
  check.tensor("k", args.k, {"T", "Hk", "K"}).tensor("v", args.v, {"T", "Hv", "V"});
  check.tensor("beta", args.beta, {"T", "Hv"}, {DType::f32});
  check_decay(check, "g_cumsum", args.g_cumsum, {DType::f32});
  check_chunk(check, args.chunk).tensor("a_inv", args.a_inv, {"T", "Hv", "C"}, {DType::f32});
  check.tensor("w", args.w, {"T", "Hv", "K"}).tensor("u", args.u, {"T", "Hv", "V"});
  check_head_size(check_head_size(check, "k", "K"), "v", "V");
  check_heads(check, "k", args.head_map).sequences("sequences", args.sequences, check.dim("T"));
  return std::move(check.memory(args)).status();
}

Status validate(const ChunkStateArgs& args) {
  Check check("chunk_state");
  check.tensor("k", args.k, {"T", "Hk", "K"}).tensor("w", args.w, {"T", "Hv", "K"}).tensor("u", args.u, {"T", "Hv", "V"});
  check_decay(check, "g_cumsum", args.g_cumsum, {DType::f32});
  check_head_size(check_head_size(check, "k", "K"), "u", "V");
  check_heads(check, "k", args.head_map).sequences("sequences", args.sequences, check.dim("T"));
  check_chunk(check, args.chunk).optional_tensor("state_in", args.state_in, {"N", "Hv", "V", "K"});
  check.tensor("h", args.h, {"*", "Hv", "V", "K"}).tensor("v_new", args.v_new, {"T", "Hv", "V"});
  check.optional_tensor("state_out", args.state_out, {"N", "Hv", "V", "K"});
  check_matrices(check_matrices(check, "state_in", args.state_in), "state_out", args.state_out);
  check_chunk_rows(check.memory(args), args.h, args.sequences, args.chunk);
  return std::move(check).status();
}

Status validate(const ChunkOutputArgs& args) {
  Check check("chunk_output");
  check.tensor("q", args.q, {"T", "Hk", "K"}).tensor("k", args.k, {"T", "Hk", "K"}).tensor("v_new", args.v_new, {"T", "Hv", "V"});
  check_decay(check, "g_cumsum", args.g_cumsum, {DType::f32});
  check_head_size(check_head_size(check, "k", "K"), "v_new", "V");
  check_heads(check, "k", args.head_map).sequences("sequences", args.sequences, check.dim("T"));
  check_chunk(check, args.chunk).tensor("h", args.h, {"*", "Hv", "V", "K"}).tensor("o", args.o, {"T", "Hv", "V"});
  if (args.scale) check.finite("scale", *args.scale);
  check_chunk_rows(check.memory(args), args.h, args.sequences, args.chunk);
  return std::move(check).status();
}

}  // namespace weft
