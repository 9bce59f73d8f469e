// A workgroup's query rows, and the tiles of decoded tokens that it multiplies them with. Params must have what rows.glsl, index.glsl and
// rotate.glsl want, and Queries `queries`. The shader defines kRows (query rows), kTokens (of a tile) as specialization constants.

shared float tile[4096 + 32];  // [kTokens][D + 1]: neither a token nor a coordinate in each thread makes bank conflicts
shared float weights[512];     // [kTokens][kRows]: scores, then weights
shared int64_t token_block[32];
shared uint token_row[32];
shared int token_position[32];  // -1: there is no such token
shared int seen_first[16], seen_end[16];  // positions that a row sees
shared float from_mean[16];               // what the mean of K adds to a row's unscaled scores

RowTile row_tile(uint64_t n, uint64_t hk, uint64_t index) {
  RowTile rows;
  const TokenRange range = tokens_of(p.queries.sequences, int64_t(n));
  rows.n = int64_t(n);
  rows.hk = int64_t(hk);
  rows.first = uint(index) * kRows;
  rows.begin = range.begin;
  rows.end = range.end;
  const uint64_t all = range.legal ? uint64_t((range.end - range.begin) * p.queries.group) : 0;
  rows.rows = uint64_t(rows.first) < all ? uint(min(all - rows.first, uint64_t(kRows))) : 0;
  return rows;
}

QueryRow query_row(RowTile rows, uint r) {
  const uint row = rows.first + r, group = uint(p.queries.group);
  return QueryRow(rows.begin + int64_t(row / group), rows.hk * p.queries.group + int64_t(row % group));
}

// Positions that the row of query token t sees.
void find_seen(RowTile rows, int64_t appended, uint r, int64_t t) {
  const int64_t position =
      p.queries.positions.there != 0 ? index_at(p.queries.positions, t) : appended - (rows.end - t);
  int64_t first = 0, end = 0x7fffffff;
  if (p.queries.causal != 0) end = position + 1;
  if (p.queries.window > 0 && p.queries.window <= 0xffffffffl) first = position - p.queries.window + 1;
  seen_first[r] = int(clamp(first, int64_t(0), int64_t(0x7fffffff)));
  seen_end[r] = int(clamp(end, int64_t(0), int64_t(0x7fffffff)));
}

// Loads and rotates the query rows to row_values. All threads call it together; it ends with a barrier.
void load_rows(RowTile rows, int64_t appended) {
  const uint D = p.sides[0].D, thread = thread_number(), team = team_number();
  const bool mean = p.sides[0].mean != 0;
  if (thread < kRows) {
    seen_first[thread] = seen_end[thread] = 0;
    from_mean[thread] = 0;
    if (thread < rows.rows) find_seen(rows, appended, thread, query_row(rows, thread).t);
  }
  if (mean) {  // in the domain in which q comes
    for (uint j = thread; j < D; j += kThreads) row_values[j] = float_at(p.sides[0].mean, rows.hk * p.sides[0].mean_head + j);
    barrier();
    if (p.queries.rotated != 0) rotate_rows(0, false, 1);
    for (uint j = thread; j < D; j += kThreads) tile[j] = row_values[j];
    barrier();
  }
  for (uint e = thread; e < kRows * D; e += kThreads) {
    const uint r = e / D;
    float value = 0;
    if (r < rows.rows) {
      const QueryRow row = query_row(rows, r);
      value = load(p.queries.q, at(p.queries.q, row.t, row.hq) + e % D);
    }
    row_values[e] = value;
  }
  barrier();
  if (mean) {
    if (team < rows.rows) {
      float sum = 0;
      for (uint j = lane_number(); j < D; j += kLanes) sum = fma(row_values[team * D + j], tile[j], sum);
      sum = sum_lanes(sum);
      if (lane_number() == 0) from_mean[team] = sum;
    }
    barrier();
  }
  if (p.queries.rotated == 0) rotate_rows(0, false, kRows);
}

// Live tokens [first, first + count) of sequence n. Between barriers.
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

// Decodes the tile's tokens to y^; tokens that do not exist become zeros. Between barriers.
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

// cap tanh(score / cap)
float softcapped(float score) {
  const float cap = p.queries.softcap;
  if (!(cap > 0.0)) return score;
  const float x = score / cap, size = abs(x);
  if (size < 0.25) {
    const float z = x * x;
    return score * (1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0)))));
  }
  const float e = exp_exact(-2.0 * size), bounded = (1.0 - e) / (1.0 + e);
  return cap * (x < 0.0 ? -bounded : bounded);
}

// Scores of the tile's tokens to `weights`, -inf where a row must not see the token. Between barriers.
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
