// Which live tokens a split covers, and where the split stores its partials. Needs query_rows.glsl and index.glsl;
// Params must have Splits `splits`.
struct Span {
  uint begin, end;
};

// Does another shader compute the sequence?
bool is_skipped(RowTile rows) {
  const int64_t all = (rows.end - rows.begin) * p.queries.group;
  return rows.rows == 0 || all < p.splits.from_rows || all > p.splits.to_rows;
}

// Does one workgroup compute the rows over the whole context, without partials?
bool is_whole(RowTile rows) { return p.splits.most >= 0 && (p.splits.count == 1 || rows.end - rows.begin > p.splits.most); }

// The whole context; or `each` tokens; or an equal share of the live tokens, in multiples of kTileTokens.
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

// The part of a span that at least one row sees; in a ring that has overwritten tokens, the whole span. The part begins at a
// multiple of `unit` from the span's beginning, so that a row's sums do not depend on what other rows see.
Span seen_of(Span span, RowTile rows, int64_t appended, uint unit) {
  if (p.index.kind == kRing && appended > p.index.rows) return span;
  int first = 0x7fffffff, end = 0;
  for (uint r = 0; r < rows.rows; ++r)
    if (seen_first[r] < seen_end[r]) {
      first = min(first, seen_first[r]);
      end = max(end, seen_end[r]);
    }
  if (uint(first) > span.begin) span.begin += (min(uint(first), span.end) - span.begin) / unit * unit;
  span.end = min(span.end, uint(end));
  return span;
}

// The token number of a row's partials.
int64_t partial_row(RowTile rows, QueryRow row) {
  return p.splits.by_sequence != 0 ? rows.n * min(p.queries.longest, p.splits.most) + row.t - rows.begin : row.t;
}
