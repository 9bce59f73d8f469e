// The rows that a workgroup of kv_encode or kv_decode computes: heads of neighbouring tokens, of one side. Params must have
// `Side sides[2]`, a CacheIndex named `index` and a TokenRows named `tokens`.
struct TokenRows {
  Indices positions;
  Sequences sequences;
  View x[2];  // the rows of each side
  int64_t longest, heads;
  int64_t groups_k;  // workgroups of side K; the other workgroups take side V
  int64_t reserved;
  uint rows[2];  // rows of a workgroup, by side
};
