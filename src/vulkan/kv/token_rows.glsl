// Functions of tokens.glsl. Needs index.glsl.

struct TokenRow {
  bool there;  // false: the call has no such row
  int64_t n, t, end, head;  // end: one past the last token of the sequence
};

// Row r of this workgroup.
TokenRow token_row(uint side, uint64_t number, uint r) {
  const uint64_t first = side == 0 ? number : number - uint64_t(p.tokens.groups_k);
  const uint64_t item = first * p.tokens.rows[side] + r, token = quotient(item, uint64_t(p.tokens.heads));
  TokenRow row;
  row.head = int64_t(item - token * uint64_t(p.tokens.heads));
  row.n = int64_t(quotient(token, uint64_t(p.tokens.longest)));
  row.there = row.n < p.tokens.sequences.count;
  if (!row.there) return row;
  const TokenRange range = tokens_of(p.tokens.sequences, row.n);
  row.t = range.begin + int64_t(token) - row.n * p.tokens.longest;
  row.end = range.end;
  row.there = range.legal && row.t < range.end;
  return row;
}
