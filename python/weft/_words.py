"""Docstrings of the ops: made by scripts/python_stubs.py from `weft ops --schema` and the public headers."""

from typing import Dict

WORDS: Dict[str, str] = {}
WORDS["delta_gates"] = """Decay and write strength from raw projections.

    g    = -exp(a_log) * softplus(a + dt_bias)     natural log of the decay, <= 0; softplus(x) = log1p(e^x), or x for x > 20
    beta = sigmoid(b), doubled by double_beta      a doubled beta allows negative eigenvalues

With a decay per channel (KDA), a is [T, Hv, K], dt_bias [Hv, K] and g [T, Hv, K].

Legal shapes: any.

Arguments:
    a: [T, Hv] or [T, Hv, K]
    b: [T, Hv], or absent together with beta
    a_log: [Hv] f32
    dt_bias: [Hv] or [Hv, K] f32
    g: [T, Hv] or [T, Hv, K] f32, out
    beta: [T, Hv] f32, out
    double_beta: beta = 2 sigmoid(b)
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["short_conv"] = """A causal depthwise convolution over time. For channel c of one sequence:

    ext    = [history (W-1 rows) | x]
    y[t,c] = activation(bias[c] + sum_m weight[c,m] * ext[t+m, c])      the last tap multiplies the current token

The state of a slot holds the L most recent inputs, oldest first, newest in row L-1. The history is rows offset .. offset+W-2,
with offset = L-(W-1) unless state_offsets says otherwise. To roll back r tokens, set offset = L-(W-1)-r; nothing is copied. The
call writes back the last L rows of [state rows up to the end of the history | x], with zeros where these are fewer than L.
x and state_in may have any strides, over channels too: a view of [channel][time] memory needs no copy. cuda refuses such a view.
Slots obey the rule of DeltaStates: two sequences must not share an out slot, and the out slot of a sequence must not be the in
slot of another.

Legal shapes: W 2 to 8, any C.

Arguments:
    x: [T, C], any strides
    weight: [C, W], 2 <= W <= 8
    bias: [C], optional
    y: [T, C], out; may be x itself
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    state_in: [slots, L, C], L >= W-1, any strides; absent: the history is zero
    state_out: [slots, L, C], out; absent: not written. May be state_in itself
    state_in_slots: [N] i32; absent: sequence n uses slot n. < 0 or out of range: inert (y = 0, state untouched)
    state_out_slots: [N] i32; absent: as state_in_slots. < 0 or out of range: the state of that sequence is not written
    state_offsets: [N] i32, optional: the first history row, clamped to 0 .. L-(W-1)
    has_initial: [N] i32, optional: 0 = start from zeros, whatever the slot holds
    activation: the function at the end
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["l2_norm"] = """y = x / sqrt(sum x^2 + eps) over the last dimension.

Legal shapes: any.

Arguments:
    x: [..., D], rank 1 to 5
    y: as x, out; may be x itself
    eps: >= 0
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_rms_norm"] = """y = weight * x / sqrt(mean x^2 + eps) * gate(z), over the last dimension. The norm comes before
the gate, and the weight has no offset.

Legal shapes: any.

Arguments:
    x: [T, H, D]
    z: [T, H, D], what the gate is made of
    weight: [D]
    y: [T, H, D], out; may be x or z itself
    eps: >= 0
    gate: the function of z
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_cumsum"] = """Prefix sums of g inside each chunk.

Legal shapes: chunks of 16, 32 or 64.

Arguments:
    g: [T, Hv] or [T, Hv, K] f32
    g_cumsum: as g, f32, out; may be g itself
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_kkt"] = """The matrix A of every chunk.

Legal shapes: Hv a multiple of Hk, K and V up to 256; chunks of 16, 32 or 64.

Arguments:
    k: [T, Hk, K]
    beta: [T, Hv] f32
    g_cumsum: [T, Hv] or [T, Hv, K] f32
    a: [T, Hv, C] f32, out: strictly lower triangular, 0 elsewhere
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_tri_inverse"] = """(I + A)^-1 of every strictly lower triangular chunk matrix. The result is unit lower
triangular, its upper part exactly 0.

Legal shapes: chunks of 16, 32 or 64.

Arguments:
    a: [T, Hv, C] f32; entries on and above the diagonal are ignored
    a_inv: [T, Hv, C] f32, out; may be a itself
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_wu"] = """The matrices w and u of every chunk.

The accelerated backends round beta v and beta e^G k to the dtype of k, accumulate products in f32, and round u and w once. The
reference rounds only at the store.

Legal shapes: Hv a multiple of Hk, K and V up to 256; chunks of 16, 32 or 64.

Arguments:
    k: [T, Hk, K]
    v: [T, Hv, V]
    beta: [T, Hv] f32
    g_cumsum: [T, Hv] or [T, Hv, K] f32
    a_inv: [T, Hv, C] f32, as chunk_tri_inverse leaves it: 0 above the diagonal
    w: [T, Hv, K], out
    u: [T, Hv, V], out
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_state"] = """The states at chunk entries, and the corrected values vn.

Legal shapes: Hv a multiple of Hk, K and V up to 256; chunks of 16, 32 or 64.

Arguments:
    k: [T, Hk, K]
    w: [T, Hv, K]
    u: [T, Hv, V]
    g_cumsum: [T, Hv] or [T, Hv, K] f32
    state_in: [N, Hv, V, K] f32, f16 or bf16, optional: zeros
    h: [>= max_chunks, Hv, V, K], out: the state at the entry of every chunk
    v_new: [T, Hv, V], out: vn, before the decay factor
    state_out: [N, Hv, V, K], optional, out: the final states. May be state_in itself
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["chunk_output"] = """The outputs from states at chunk entries and corrected values.

Legal shapes: Hv a multiple of Hk, K and V up to 256; chunks of 16, 32 or 64.

Arguments:
    q: [T, Hk, K]
    k: [T, Hk, K]
    v_new: [T, Hv, V]
    h: [>= max_chunks, Hv, V, K]
    g_cumsum: [T, Hv] or [T, Hv, K] f32
    o: [T, Hv, V], out
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    chunk: C: 16, 32 or 64
    scale: default K^-1/2
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_prefill"] = """The rule over any number of tokens, in chunks.

Legal shapes: Hv a multiple of Hk, K and V up to 256.

Arguments:
    q: [T, Hk, K], any strides over tokens and heads (a view into a packed [q|k|v] row is fine)
    k: [T, Hk, K], dtype of q
    v: [T, Hv, V], dtype of q
    gates: decay and write strength; a dict of g, alpha, a, a_log, dt_bias, beta, b, double_beta
    o: [T, Hv, V], out, f32, f16 or bf16
    scale: default K^-1/2
    l2_norm: normalise q and k first
    head_map: which key head a value head reads
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    states: initial and final states; a dict of in, out, in_slots, out_slots, has_initial, layout
    checkpoints: [N, >= max_tokens / every, Hv, V, K] (or K, V), optional, out: the state after every, 2 every, ... tokens.
        The matrices are dense.
    checkpoint_every: a positive multiple of kCheckpointUnit when checkpoints is present, else 0
    schedule: fastest may cut a long sequence of few heads into ranges of tokens (the plan says so). The bits then depend on
        where the call begins. invariant: prefill(a) and then prefill(b) leave the bits of prefill(a + b) where a is a
        multiple of 64 tokens.
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_decode"] = """The rule over 1 to 16 tokens per sequence, token by token. Every state is read once and
written once. The call reads the state as it is before the call, also where in and out are the same slot.

Legal shapes: Hv a multiple of Hk, K and V up to 256; up to 16 tokens a sequence.

Arguments:
    q: [T, Hk, K]
    k: [T, Hk, K], dtype of q
    v: [T, Hv, V], dtype of q
    gates: decay and write strength; a dict of g, alpha, a, a_log, dt_bias, beta, b, double_beta
    o: [T, Hv, V], out
    scale: default K^-1/2
    l2_norm: normalise q and k first
    head_map: which key head a value head reads
    sequences: at most kMaxDecodeTokens tokens each; a dict of cu_seqlens, count, max_tokens
    states: initial and final states; a dict of in, out, in_slots, out_slots, has_initial, layout
    record: optional, out: all three members or none; a dict of k, delta, g
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_replay"] = """Applies the first accepted[n] recorded tokens of each sequence to its state. The
operations and their order are those of decode, so with f32 states the result is bit-equal to having decoded only those tokens.

Legal shapes: Hv a multiple of Hk, K and V up to 256; up to 16 tokens a sequence.

Arguments:
    record: what decode recorded; a dict of k, delta, g
    accepted: [N] i32, clamped to 0 .. tokens of the sequence
    sequences: as in the recorded call; a dict of cu_seqlens, count, max_tokens
    states: in and out are required; a dict of in, out, in_slots, out_slots, has_initial, layout
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_summarize"] = """A token range as the affine map S -> S p + q, exact in real arithmetic. Each sequence
of the call is one range. The matrices of maps are dense.

Legal shapes: Hv a multiple of Hk, K and V up to 256.

Arguments:
    k: [T, Hk, K]
    v: [T, Hv, V], dtype of k
    gates: decay and write strength; a dict of g, alpha, a, a_log, dt_bias, beta, b, double_beta
    sequences: how the T tokens belong to ranges; a dict of cu_seqlens, count, max_tokens
    p: [N, Hv, K, K] f32, out
    q: [N, Hv, V, K] f32, out
    l2_norm: normalise k first
    head_map: which key head a value head reads
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_compose"] = """An earlier and a later map as one, p = p1 p2 and q = q1 p2 + q2. The outputs may not
overlap the inputs.

Legal shapes: Hv a multiple of Hk, K and V up to 256.

Arguments:
    p1: [N, Hv, K, K] f32, of the earlier range
    q1: [N, Hv, V, K] f32, of the earlier range
    p2: [N, Hv, K, K] f32, of the later range
    q2: [N, Hv, V, K] f32, of the later range
    p: [N, Hv, K, K] f32, out
    q: [N, Hv, V, K] f32, out
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["gated_delta_rule_apply"] = """S_out = S_in p + q for the states of N sequences.

Legal shapes: Hv a multiple of Hk, K and V up to 256.

Arguments:
    p: [N, Hv, K, K] f32
    q: [N, Hv, V, K] f32
    states: out is required; in absent: zeros. In and out may be the same slot; a dict of in, out, in_slots, out_slots,
        has_initial, layout
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["kv_rotate"] = """y = R x (or R^T x) for the rows of a [T, H, D] tensor. The mean is not subtracted.

Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

Arguments:
    x: [T, H, D]
    y: [T, H, D], out; may be x itself
    recipe: the formats of both sides
    side: default k
    inverse: R^T in place of R
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["kv_encode"] = """Encodes the rows of new tokens into the cache. Whole rows are overwritten, pad bits included. Where
several tokens of a sequence fall into one row (a ring shorter than what is new), the last of them stays. Sequences must not
share rows that they write. In lanes order they must not share tiles either: there tokens share bytes, of which only a token's
own bits change.

Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

Arguments:
    k: [T, Hk, Dk], or absent: that side is left alone
    v: [T, Hk, Dv], or absent: that side is left alone
    positions: [T] i32: the position of each token in its sequence; < 0 or without a row: inert
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    cache: out; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots, page_table, lengths
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["kv_decode"] = """Decodes rows of the cache. Rows that do not exist give zeros.

Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

Arguments:
    cache: what is decoded; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots, page_table, lengths
    positions: [T] i32: the position of each wanted token in its sequence
    sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
    k: [T, Hk, Dk], out, or absent
    v: [T, Hk, Dv], out, or absent
    domain: rotated: y^, without the mean
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["kv_repack"] = """Copies every row of `from` into the same row of `to`, between layouts, tile orders, packings, and
formats with the same codes. Refused where the copy would not be exact. Block b maps to block b: lengths, slots and page tables
are not read.

Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

Arguments:
    from_: what is copied; a dict of recipe, k, v, layout, tile_order, kind, pinned
    to: out: the same number of blocks, heads and capacity; a dict of recipe, k, v, layout, tile_order, kind, pinned
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["attention_scores"] = """scores[t, hq, j] = s_j; -inf where masked and for j beyond the live tokens.

Legal shapes: D a multiple of 8 up to 512, Hq a multiple of Hk; passthrough or 2 to 8 bits a side.

Arguments:
    queries: the queries; a dict of q, positions, sequences, domain, scale
    cache: its K side is read; both sides must be there; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots,
        page_table, lengths
    mask: which tokens a query may see; a dict of not_causal, window, softcap
    scores: [T, Hq, context], f32, f16 or bf16, out
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["attention_values"] = """o[t, hq] = the sum of weights[t, hq, j] v^_j over the live tokens j with a weight >= threshold.
The weights are not renormalised.

Legal shapes: D a multiple of 8 up to 512, Hq a multiple of Hk; passthrough or 2 to 8 bits a side.

Arguments:
    weights: [T, Hq, context], f32, f16 or bf16; columns beyond the live tokens are not read
    sequences: how the T queries belong to sequences; a dict of cu_seqlens, count, max_tokens
    cache: its V side is read; both sides must be there; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots,
        page_table, lengths
    threshold: absent: every token counts
    domain: of o; rotated leaves the mean of V out
    o: [T, Hq, Dv], out
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["attention_partials"] = """Block b covers the live tokens [b * block_tokens, (b + 1) * block_tokens). Every block of
every live row is written, empty ones as (0, -inf, 0).

Legal shapes: D a multiple of 8 up to 512, Hq a multiple of Hk; passthrough or 2 to 8 bits a side.

Arguments:
    queries: the queries; a dict of q, positions, sequences, domain, scale
    cache: the keys and values; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots, page_table, lengths
    mask: which tokens a query may see; a dict of not_causal, window, softcap
    block_tokens: >= 1; partials.count * block_tokens must cover the capacity of the cache
    partials: out; a dict of layout, count, o, m, l, buffer
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["attention_merge"] = """Merges the blocks of each row, adds the sink once and the mean of V, and rotates back.

Legal shapes: D a multiple of 8 up to 512.

Arguments:
    partials: what is merged; a dict of layout, count, o, m, l, buffer
    recipe: the formats of both sides
    domain: of o; rotated: o stays rotated and without the mean
    sinks: [Hq] f32, optional: a natural-log logit per head, not scaled
    kv_heads: Hk, to find the mean of a query head
    o: [T, Hq, Dv], out
    lse: [T, Hq] f32, optional, out
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
WORDS["compressed_attention"] = """Any number of queries over any cache. The op chooses its own split.

Legal shapes: D a multiple of 8 up to 512, Hq a multiple of Hk; passthrough or 2 to 8 bits a side.

Arguments:
    queries: the queries; a dict of q, positions, sequences, domain, scale
    cache: the keys and values; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots, page_table, lengths
    mask: which tokens a query may see; a dict of not_causal, window, softcap
    sinks: [Hq] f32, optional: a natural-log logit per head, not scaled
    precision: how exactly integers multiply
    schedule: what the split may depend on
    o: [T, Hq, Dv], out
    lse: [T, Hq] f32, optional, out
    threads, backend, device, stream, isa, dtype: see weft.ops
"""
