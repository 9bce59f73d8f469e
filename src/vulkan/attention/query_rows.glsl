// A workgroup's query rows: their tokens and heads, the positions that they see, and their rotated values. Params must have the
// members that rotate.glsl and index.glsl need, and Queries `queries`. The shader defines kRows, the query rows of a workgroup;
// kMeanK, whether K may have a mean; and SPARE_ROW, a shared array of D floats.

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
  const bool mean = kMeanK && p.sides[0].mean != 0;
  if (thread < kRows) {
    seen_first[thread] = seen_end[thread] = 0;
    from_mean[thread] = 0;
    if (thread < rows.rows) find_seen(rows, appended, thread, query_row(rows, thread).t);
  }
  if (mean) {  // brought into the domain of q, which may be rotated
    for (uint j = thread; j < D; j += kThreads) row_values[j] = float_at(p.sides[0].mean, rows.hk * p.sides[0].mean_head + j);
    barrier();
    if (p.queries.rotated != 0) rotate_rows(0, false, 1);
    for (uint j = thread; j < D; j += kThreads) SPARE_ROW[j] = row_values[j];
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
      for (uint j = lane_number(); j < D; j += kLanes) sum = fma(row_values[team * D + j], SPARE_ROW[j], sum);
      sum = sum_lanes(sum);
      if (lane_number() == 0) from_mean[team] = sum;
    }
    barrier();
  }
  if (p.queries.rotated == 0) rotate_rows(0, false, kRows);
}

// cap tanh(score / cap)
float softcapped(float score) {
  const float cap = p.queries.softcap;
  if (!(cap > 0.0)) return score;
  const float x = score / cap, size = abs(x);
  if (size < 0.25) {
    const float z = x * x;
    precise const float series = 1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0))));
    return score * series;
  }
  const float e = exp_exact(-2.0 * size), bounded = (1.0 - e) / (1.0 + e);
  return cap * (x < 0.0 ? -bounded : bounded);
}
