// Queries, their masks and the row tiles of a call as shaders see them: the structs of attention.h. Needs kv_side.glsl.
//
// The query rows of a sequence and KV head are numbered r = i (Hq / Hk) + g, where i is the query token and g the head within the group.
// A workgroup takes up to kRows query rows, so that it decodes a key or value once for all of them.
struct Queries {
  View q;
  Indices positions;
  Sequences sequences;
  int64_t longest, heads, group;  // query tokens of the longest sequence; KV heads; query heads of a KV head
  int64_t row_tiles;              // the most row tiles of a sequence and KV head
  int64_t window;                 // 0: none
  uint causal, rotated;
  float softcap, scale;  // softcap 0: none
};

// Rows [first, first + rows) of a sequence and KV head.
struct RowTile {
  int64_t n, hk;
  uint first, rows;  // rows 0: no work
  int64_t begin, end;  // tokens of the sequence
};

struct QueryRow {
  int64_t t, hq;
};

// How the context of a call is cut: the struct of attention.h.
struct Splits {
  int64_t count;        // partials of a row
  int64_t each, least;  // tokens of a split; where each is 0, an equal share of the live tokens, at least `least`
  int64_t most;         // sequences with more query tokens are computed whole, without partials; < 0: no sequence is
  int64_t by_sequence;  // partials are numbered by sequence; 0: by token
  int64_t from_rows, to_rows;  // sequences with fewer or more query rows for a KV head are skipped
};
