// Tiles of decoded tokens, and their scores for the query rows of a workgroup. Params must have the members that rows.glsl and
// query_rows.glsl need. The shader defines kRows (query rows of a workgroup) and kTokens (tokens of a tile) as specialization
// constants.

shared float tile[4096 + 32];  // [kTokens][D + 1]: no bank conflicts, neither across tokens nor across coordinates
shared float weights[512];     // [kTokens][kRows]: scores, then weights
shared int64_t token_block[32];
shared uint token_row[32];
shared int token_position[32];  // -1: there is no such token

#define SPARE_ROW tile
#include "vulkan/attention/query_rows.glsl"

// Finds live tokens [first, first + count) of sequence n. Call it between barriers.
void locate_tokens(int64_t n, int64_t appended, uint first, uint count) {
  const uint token = thread_number();
  if (token >= kTokens) return;
  token_position[token] = -1;
  if (token >= count) return;
  const int64_t position = live_position(appended, int64_t(first + token));
  const Location at = locate(n, position);
  token_block[token] = at.block;
  token_row[token] = at.row;
  token_position[token] = at.block >= 0 ? int(position) : -1;
}

// Decodes the tile's tokens to y^; tokens that do not exist become zeros. Call it between barriers.
void decode_tile(uint side, int64_t hk) {
  const uint D = p.sides[side].D, chunks = D / 8, stride = D + 1;
  const bool by_token = p.sides[side].lanes != 0 && p.sides[side].role_v == 0;  // neighbours in memory
  for (uint task = thread_number(); task < kTokens * chunks; task += kThreads) {
    const uint token = by_token ? task % kTokens : task / chunks, j = (by_token ? task / kTokens : task % chunks) * 8;
    float value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (token_position[token] >= 0) values_at(side, row_at(side, token_block[token], hk, token_row[token]), j, value);
    for (uint e = 0; e < 8; ++e) tile[token * stride + j + e] = value[e];
  }
}

// Writes the scores of the tile's tokens to `weights`; -inf where a row must not see the token. Call it between barriers.
void score_tile(uint rows) {
  const uint D = p.sides[0].D, token = thread_number() % kTokens, part = thread_number() / kTokens, parts = kThreads / kTokens;
  const int position = token_position[token];
  float sum[4] = {0, 0, 0, 0};
  for (uint j = 0; j < D; ++j) {
    const float k = tile[token * (D + 1) + j];
    for (uint i = 0; i < 4; ++i) {
      const uint r = part + i * parts;
      if (r < rows) sum[i] = fma(row_values[r * D + j], k, sum[i]);
    }
  }
  for (uint i = 0; i < 4; ++i) {
    const uint r = part + i * parts;
    if (r >= kRows) continue;
    const bool seen = r < rows && position >= 0 && position >= seen_first[r] && position < seen_end[r];
    weights[token * kRows + r] = seen ? softcapped(p.queries.scale * (sum[i] + from_mean[r])) : kMasked;
  }
}
