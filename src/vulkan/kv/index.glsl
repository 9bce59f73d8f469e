// Where a token of a sequence lives, and which tokens are live: src/common/kv_index.h. Params must have a CacheIndex named `index`.
const int64_t kRing = 1, kPaged = 2;

// Tokens that a sequence can hold at once.
int64_t sequence_capacity() { return p.index.kind == kPaged ? p.index.page_table.sizes[1] * p.index.rows : p.index.rows; }

// Live tokens of a sequence to which `length` tokens have been appended.
int64_t live_tokens(int64_t length) { return clamp(length, int64_t(0), sequence_capacity()); }

// Tokens appended to sequence n; a linear or paged cache cannot hold more than its rows.
int64_t appended_tokens(int64_t n) {
  const int64_t length = index_at(p.index.lengths, n);
  return p.index.kind == kRing ? length : live_tokens(length);
}

// Position of live token j, oldest first.
int64_t live_position(int64_t appended, int64_t j) {
  const bool wrapped = p.index.kind == kRing && appended > p.index.rows;
  return wrapped && j >= p.index.pinned ? appended - p.index.rows + j : j;
}

// Positions are below 2^31, and so are the rows of a block.
uint ring_row(uint position) {
  const uint pinned = uint(p.index.pinned);
  return position < pinned ? position : pinned + (position - pinned) % (uint(p.index.rows) - pinned);
}

Location locate(int64_t n, int64_t position) {
  const Location nowhere = Location(int64_t(-1), 0);
  if (position < 0 || position > 0x7fffffff || p.index.rows <= 0) return nowhere;
  const uint at = uint(position), rows = uint(p.index.rows);
  Location to;
  if (p.index.kind == kPaged) {
    const uint page = at / rows;
    if (int64_t(page) >= p.index.page_table.sizes[1]) return nowhere;
    const int64_t entry = n * p.index.page_table.strides[0] + int64_t(page) * p.index.page_table.strides[1];
    to.block = int64_t(Int32(address(p.index.page_table.data, entry, 4)).value);
    to.row = at - page * rows;
  } else {
    if (p.index.kind != kRing && at >= rows) return nowhere;
    to.block = slot_of(p.index.slots, n, p.index.blocks);
    to.row = p.index.kind == kRing ? ring_row(at) : at;
  }
  return to.block >= 0 && to.block < p.index.blocks ? to : nowhere;
}
