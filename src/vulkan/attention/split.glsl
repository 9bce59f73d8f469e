// Which live tokens a split covers, and where its partials go. Params must have Splits `splits` and Queries `queries`.
struct Span {
  uint begin, end;
};

// Are the rows computed in one piece?
bool is_whole(RowTile rows) { return p.splits.most >= 0 && (p.splits.count == 1 || rows.end - rows.begin > p.splits.most); }

// Whole, or given tokens, or an equal share of the live ones in multiples of kTileTokens.
Span span_of(uint live, int64_t split, bool whole) {
  if (whole) return Span(0, live);
  if (p.splits.each > 0) {
    const int64_t begin = split <= int64_t(live) / p.splits.each ? split * p.splits.each : int64_t(live);
    const bool last = int64_t(live) - begin < p.splits.each;  // begin + each may overflow
    return Span(uint(begin), last ? live : uint(begin + p.splits.each));
  }
  const uint count = uint(p.splits.count), share = (live + count - 1) / count, least = uint(p.splits.least);
  const uint each = max((share + kTileTokens - 1) / kTileTokens * kTileTokens, least);
  const uint64_t begin = min(uint64_t(split) * each, uint64_t(live));
  return Span(uint(begin), uint(min(begin + each, uint64_t(live))));
}

// The token number of a row's partials.
int64_t partial_row(RowTile rows, QueryRow row) {
  return p.splits.by_sequence != 0 ? rows.n * min(p.queries.longest, p.splits.most) + row.t - rows.begin : row.t;
}
