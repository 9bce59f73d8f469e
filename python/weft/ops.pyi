# Types of weft.ops: made by scripts/python_stubs.py from `weft ops --schema` and the public headers.
from typing import Any, Callable, Dict, List, Literal, Optional, TypedDict, Union

from .kv_recipe import KvRecipe

Array = Any  # of numpy, torch, CuPy, JAX, or any object with __dlpack__ or __cuda_array_interface__

FUNCTIONS: Dict[str, Callable[..., Any]]
__all__: List[str]

# Which tokens a query may see, and how scores are shaped.
AttentionMaskDict = TypedDict("AttentionMaskDict", {
    # default 0
    "not_causal": Optional[bool],
    # >= 1: the newest tokens that a query sees, itself included
    "window": Optional[int],
    # > 0: scores are bounded by softcap tanh(s / softcap)
    "softcap": Optional[float],
}, total=False)

# Decay and write strength of every token. The decay comes from exactly one of {g, alpha, a + a_log + dt_bias}, the strength from
# exactly one of {beta, b}. The raw forms are those of DeltaGatesArgs.
DeltaGateInputsDict = TypedDict("DeltaGateInputsDict", {
    # [T, Hv] or [T, Hv, K] f32: the natural log of the decay, <= 0
    "g": Optional[Array],
    # [T, Hv] or [T, Hv, K] f32: the decay itself, in [0, 1]
    "alpha": Optional[Array],
    # [T, Hv] or [T, Hv, K]
    "a": Optional[Array],
    # [Hv] f32
    "a_log": Optional[Array],
    # [Hv] or [Hv, K] f32
    "dt_bias": Optional[Array],
    # [T, Hv] f32
    "beta": Optional[Array],
    # [T, Hv]
    "b": Optional[Array],
    # with b: beta = 2 sigmoid(b)
    "double_beta": Optional[bool],
}, total=False)

# What gated_delta_rule_replay() needs of each token.
DeltaRecordDict = TypedDict("DeltaRecordDict", {
    # [T, Hk, K] f32: the key as used, normalised
    "k": Optional[Array],
    # [T, Hv, V] f32: the correction e_t
    "delta": Optional[Array],
    # [T, Hv] or [T, Hv, K] f32: the natural log of the decay
    "g": Optional[Array],
}, total=False)

# Where recurrent states live. A pool is [slots, Hv, V, K] (StateLayout::vk) or [slots, Hv, K, V] (StateLayout::kv), f32, f16 or
# bf16, with any slot and head stride; the matrix itself is dense.
# `in` and `out` may be the same memory when the out slot of every sequence is its own in slot, or a slot that no sequence of the
# call reads. Two sequences must not share an out slot. The out state of an empty sequence is its initial state. Without slot
# indices, a pool needs a slot for every sequence.
DeltaStatesDict = TypedDict("DeltaStatesDict", {
    # absent: every sequence starts from zeros
    "in": Optional[Array],
    # out; absent: final states are not written (a verify step). May be `in` itself
    "out": Optional[Array],
    # [N] i32; absent: sequence n uses slot n. < 0 or out of range: the sequence is inert (o = 0, nothing else)
    "in_slots": Optional[Array],
    # [N] i32; absent: as in_slots. < 0 or out of range: the state of that sequence is not written
    "out_slots": Optional[Array],
    # [N] i32, optional: 0 = start from zeros, whatever the slot holds
    "has_initial": Optional[Array],
    # how the matrices of both pools are stored
    "layout": Optional[Literal["vk", "kv"]],
}, total=False)

# One side (K or V) of a cache.
KvSideDict = TypedDict("KvSideDict", {
    # rows: [blocks, Hk, capacity, code_bytes] u8, passthrough: [blocks, Hk, capacity, D] of its dtype. tiles: [blocks, Hk,
    # capacity / 64, tile_bytes] u8, each tile aligned to kTileAlignment.
    "codes": Optional[Array],
    # rows: [blocks, Hk, capacity, D / gain_group] of gain_dtype. Absent for tiles and passthrough
    "gains": Optional[Array],
}, total=False)

# The caches of N sequences. Every op wants both sides, also where it uses one. A block is the slot of a sequence (linear, ring)
# or a page (paged). The strides of blocks, heads and tokens are free, so token-major caches work with KvLayout::rows. Indices out
# of range are inert: nothing is read or written through them.
KvCacheDict = TypedDict("KvCacheDict", {
    # the formats of both sides
    "recipe": Optional[KvRecipe],
    # the keys
    "k": Optional[KvSideDict],
    # the values
    "v": Optional[KvSideDict],
    # how rows lie
    "layout": Optional[Literal["rows", "tiles"]],
    # the byte order of tiles
    "tile_order": Optional[Literal["token_major", "lanes"]],
    # which row holds a position
    "kind": Optional[Literal["linear", "ring", "paged"]],
    # ring only: the first so many tokens are kept
    "pinned": Optional[int],
    # linear, ring: [N] i32, the block of each sequence; absent: n. < 0: inert
    "slots": Optional[Array],
    # paged: [N, pages] i32, < 0: no page. The page length is the capacity, a multiple of 64 (tiles) or 16 (rows)
    "page_table": Optional[Array],
    # [N] i32: tokens appended so far, the new ones included (a ring may have lost some). Attention reads it
    "lengths": Optional[Array],
}, total=False)

# Split-KV partials of every query row.
PartialsDict = TypedDict("PartialsDict", {
    # which of the tensors below are used
    "layout": Optional[Literal["blocks", "interleaved"]],
    # B, the number of blocks of each row
    "count": Optional[int],
    # blocks: [T, Hq, B, Dv] f32
    "o": Optional[Array],
    # blocks: [T, Hq, B] f32
    "m": Optional[Array],
    # blocks: [T, Hq, B] f32
    "l": Optional[Array],
    # interleaved: [T * Hq * B * (Dv + 2)] f32
    "buffer": Optional[Array],
}, total=False)

# How the T packed tokens of a call belong to sequences. Sequence n owns rows [cu_seqlens[n], cu_seqlens[n+1]) of every [T, ...]
# tensor. Without cu_seqlens, the T rows are `count` sequences of T / count tokens each.
# cu_seqlens lives where the stream computes and is never read on the host. A sequence is inert (nothing is read or written for
# it) where its bounds are negative, decreasing, beyond T, or further apart than max_tokens. Sequences must not overlap: where
# cu_seqlens makes them overlap, writes stay in bounds, but it is not defined whose result a shared row keeps.
SequencesDict = TypedDict("SequencesDict", {
    # [count + 1] i32 or i64, or absent: sequences of equal length
    "cu_seqlens": Optional[Array],
    # N, the number of sequences
    "count": Optional[int],
    # The longest sequence, at least 1 where T > 0: bounds scratch and grids. Without cu_seqlens it is ignored: T / count takes
    # its place.
    "max_tokens": Optional[int],
}, total=False)

# The queries of a call.
AttentionQueriesDict = TypedDict("AttentionQueriesDict", {
    # [T, Hq, Dk]
    "q": Optional[Array],
    # [T] i32; absent: the queries of sequence n are its last tokens, at positions lengths[n] - tokens + i
    "positions": Optional[Array],
    # how the T queries belong to sequences
    "sequences": Optional[SequencesDict],
    # rotated: the caller has already applied the rotation of K
    "domain": Optional[Literal["original", "rotated"]],
    # default Dk^-1/2
    "scale": Optional[float],
}, total=False)

def delta_gates(
    *,
    a: Optional[Array] = ...,
    b: Optional[Array] = ...,
    a_log: Optional[Array] = ...,
    dt_bias: Optional[Array] = ...,
    g: Optional[Union[Array, Literal[True]]] = ...,
    beta: Optional[Union[Array, Literal[True]]] = ...,
    double_beta: Optional[bool] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Decay and write strength from raw projections.

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
    ...

def short_conv(
    *,
    x: Optional[Array] = ...,
    weight: Optional[Array] = ...,
    bias: Optional[Array] = ...,
    y: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    state_in: Optional[Array] = ...,
    state_out: Optional[Union[Array, Literal[True]]] = ...,
    state_in_slots: Optional[Array] = ...,
    state_out_slots: Optional[Array] = ...,
    state_offsets: Optional[Array] = ...,
    has_initial: Optional[Array] = ...,
    activation: Optional[Literal["silu", "none"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""A causal depthwise convolution over time. For channel c of one sequence:

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
    ...

def l2_norm(
    *,
    x: Optional[Array] = ...,
    y: Optional[Union[Array, Literal[True]]] = ...,
    eps: Optional[float] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""y = x / sqrt(sum x^2 + eps) over the last dimension.

    Legal shapes: any.

    Arguments:
        x: [..., D], rank 1 to 5
        y: as x, out; may be x itself
        eps: >= 0
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def gated_rms_norm(
    *,
    x: Optional[Array] = ...,
    z: Optional[Array] = ...,
    weight: Optional[Array] = ...,
    y: Optional[Union[Array, Literal[True]]] = ...,
    eps: Optional[float] = ...,
    gate: Optional[Literal["silu", "sigmoid"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""y = weight * x / sqrt(mean x^2 + eps) * gate(z), over the last dimension. The norm comes before
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
    ...

def chunk_cumsum(
    *,
    g: Optional[Array] = ...,
    g_cumsum: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""Prefix sums of g inside each chunk.

    Legal shapes: chunks of 16, 32 or 64.

    Arguments:
        g: [T, Hv] or [T, Hv, K] f32
        g_cumsum: as g, f32, out; may be g itself
        sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
        chunk: C: 16, 32 or 64
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def chunk_kkt(
    *,
    k: Optional[Array] = ...,
    beta: Optional[Array] = ...,
    g_cumsum: Optional[Array] = ...,
    a: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""The matrix A of every chunk.

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
    ...

def chunk_tri_inverse(
    *,
    a: Optional[Array] = ...,
    a_inv: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""(I + A)^-1 of every strictly lower triangular chunk matrix. The result is unit lower
    triangular, its upper part exactly 0.

    Legal shapes: chunks of 16, 32 or 64.

    Arguments:
        a: [T, Hv, C] f32; entries on and above the diagonal are ignored
        a_inv: [T, Hv, C] f32, out; may be a itself
        sequences: how the T tokens belong to sequences; a dict of cu_seqlens, count, max_tokens
        chunk: C: 16, 32 or 64
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def chunk_wu(
    *,
    k: Optional[Array] = ...,
    v: Optional[Array] = ...,
    beta: Optional[Array] = ...,
    g_cumsum: Optional[Array] = ...,
    a_inv: Optional[Array] = ...,
    w: Optional[Union[Array, Literal[True]]] = ...,
    u: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""The matrices w and u of every chunk.

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
    ...

def chunk_state(
    *,
    k: Optional[Array] = ...,
    w: Optional[Array] = ...,
    u: Optional[Array] = ...,
    g_cumsum: Optional[Array] = ...,
    state_in: Optional[Array] = ...,
    h: Optional[Union[Array, Literal[True]]] = ...,
    v_new: Optional[Union[Array, Literal[True]]] = ...,
    state_out: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""The states at chunk entries, and the corrected values vn.

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
    ...

def chunk_output(
    *,
    q: Optional[Array] = ...,
    k: Optional[Array] = ...,
    v_new: Optional[Array] = ...,
    h: Optional[Array] = ...,
    g_cumsum: Optional[Array] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    sequences: Optional[SequencesDict] = ...,
    chunk: Optional[int] = ...,
    scale: Optional[float] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""The outputs from states at chunk entries and corrected values.

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
    ...

def gated_delta_rule_prefill(
    *,
    q: Optional[Array] = ...,
    k: Optional[Array] = ...,
    v: Optional[Array] = ...,
    gates: Optional[DeltaGateInputsDict] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    scale: Optional[float] = ...,
    l2_norm: Optional[bool] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    sequences: Optional[SequencesDict] = ...,
    states: Optional[DeltaStatesDict] = ...,
    checkpoints: Optional[Union[Array, Literal[True]]] = ...,
    checkpoint_every: Optional[int] = ...,
    schedule: Optional[Literal["fastest", "invariant"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""The rule over any number of tokens, in chunks.

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
    ...

def gated_delta_rule_decode(
    *,
    q: Optional[Array] = ...,
    k: Optional[Array] = ...,
    v: Optional[Array] = ...,
    gates: Optional[DeltaGateInputsDict] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    scale: Optional[float] = ...,
    l2_norm: Optional[bool] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    sequences: Optional[SequencesDict] = ...,
    states: Optional[DeltaStatesDict] = ...,
    record: Optional[DeltaRecordDict] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""The rule over 1 to 16 tokens per sequence, token by token. Every state is read once and
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
    ...

def gated_delta_rule_replay(
    *,
    record: Optional[DeltaRecordDict] = ...,
    accepted: Optional[Array] = ...,
    sequences: Optional[SequencesDict] = ...,
    states: Optional[DeltaStatesDict] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Applies the first accepted[n] recorded tokens of each sequence to its state. The
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
    ...

def gated_delta_rule_summarize(
    *,
    k: Optional[Array] = ...,
    v: Optional[Array] = ...,
    gates: Optional[DeltaGateInputsDict] = ...,
    sequences: Optional[SequencesDict] = ...,
    p: Optional[Union[Array, Literal[True]]] = ...,
    q: Optional[Union[Array, Literal[True]]] = ...,
    l2_norm: Optional[bool] = ...,
    head_map: Optional[Literal["grouped", "tiled"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""A token range as the affine map S -> S p + q, exact in real arithmetic. Each sequence
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
    ...

def gated_delta_rule_compose(
    *,
    p1: Optional[Array] = ...,
    q1: Optional[Array] = ...,
    p2: Optional[Array] = ...,
    q2: Optional[Array] = ...,
    p: Optional[Union[Array, Literal[True]]] = ...,
    q: Optional[Union[Array, Literal[True]]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""An earlier and a later map as one, p = p1 p2 and q = q1 p2 + q2. The outputs may not
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
    ...

def gated_delta_rule_apply(
    *,
    p: Optional[Array] = ...,
    q: Optional[Array] = ...,
    states: Optional[DeltaStatesDict] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""S_out = S_in p + q for the states of N sequences.

    Legal shapes: Hv a multiple of Hk, K and V up to 256.

    Arguments:
        p: [N, Hv, K, K] f32
        q: [N, Hv, V, K] f32
        states: out is required; in absent: zeros. In and out may be the same slot; a dict of in, out, in_slots, out_slots,
            has_initial, layout
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def kv_rotate(
    *,
    x: Optional[Array] = ...,
    y: Optional[Union[Array, Literal[True]]] = ...,
    recipe: Optional[KvRecipe] = ...,
    side: Optional[Literal["k", "v"]] = ...,
    inverse: Optional[bool] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""y = R x (or R^T x) for the rows of a [T, H, D] tensor. The mean is not subtracted.

    Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

    Arguments:
        x: [T, H, D]
        y: [T, H, D], out; may be x itself
        recipe: the formats of both sides
        side: default k
        inverse: R^T in place of R
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def kv_encode(
    *,
    k: Optional[Array] = ...,
    v: Optional[Array] = ...,
    positions: Optional[Array] = ...,
    sequences: Optional[SequencesDict] = ...,
    cache: Optional[KvCacheDict] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Encodes the rows of new tokens into the cache. Whole rows are overwritten, pad bits included. Where
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
    ...

def kv_decode(
    *,
    cache: Optional[KvCacheDict] = ...,
    positions: Optional[Array] = ...,
    sequences: Optional[SequencesDict] = ...,
    k: Optional[Union[Array, Literal[True]]] = ...,
    v: Optional[Union[Array, Literal[True]]] = ...,
    domain: Optional[Literal["original", "rotated"]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Decodes rows of the cache. Rows that do not exist give zeros.

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
    ...

def kv_repack(
    *,
    from_: Optional[KvCacheDict] = ...,
    to: Optional[KvCacheDict] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Copies every row of `from` into the same row of `to`, between layouts, tile orders, packings, and
    formats with the same codes. Refused where the copy would not be exact. Block b maps to block b: lengths, slots and page tables
    are not read.

    Legal shapes: D a multiple of 8 up to 512; passthrough or 2 to 8 bits.

    Arguments:
        from_: what is copied; a dict of recipe, k, v, layout, tile_order, kind, pinned
        to: out: the same number of blocks, heads and capacity; a dict of recipe, k, v, layout, tile_order, kind, pinned
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def attention_scores(
    *,
    queries: Optional[AttentionQueriesDict] = ...,
    cache: Optional[KvCacheDict] = ...,
    mask: Optional[AttentionMaskDict] = ...,
    scores: Optional[Union[Array, Literal[True]]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""scores[t, hq, j] = s_j; -inf where masked and for j beyond the live tokens.

    Legal shapes: D a multiple of 8 up to 512, Hq a multiple of Hk; passthrough or 2 to 8 bits a side.

    Arguments:
        queries: the queries; a dict of q, positions, sequences, domain, scale
        cache: its K side is read; both sides must be there; a dict of recipe, k, v, layout, tile_order, kind, pinned, slots,
            page_table, lengths
        mask: which tokens a query may see; a dict of not_causal, window, softcap
        scores: [T, Hq, context], f32, f16 or bf16, out
        threads, backend, device, stream, isa, dtype: see weft.ops
    """
    ...

def attention_values(
    *,
    weights: Optional[Array] = ...,
    sequences: Optional[SequencesDict] = ...,
    cache: Optional[KvCacheDict] = ...,
    threshold: Optional[float] = ...,
    domain: Optional[Literal["original", "rotated"]] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Array:
    r"""o[t, hq] = the sum of weights[t, hq, j] v^_j over the live tokens j with a weight >= threshold.
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
    ...

def attention_partials(
    *,
    queries: Optional[AttentionQueriesDict] = ...,
    cache: Optional[KvCacheDict] = ...,
    mask: Optional[AttentionMaskDict] = ...,
    block_tokens: Optional[int] = ...,
    partials: Optional[PartialsDict] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Block b covers the live tokens [b * block_tokens, (b + 1) * block_tokens). Every block of
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
    ...

def attention_merge(
    *,
    partials: Optional[PartialsDict] = ...,
    recipe: Optional[KvRecipe] = ...,
    domain: Optional[Literal["original", "rotated"]] = ...,
    sinks: Optional[Array] = ...,
    kv_heads: Optional[int] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    lse: Optional[Union[Array, Literal[True]]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Merges the blocks of each row, adds the sink once and the mean of V, and rotates back.

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
    ...

def compressed_attention(
    *,
    queries: Optional[AttentionQueriesDict] = ...,
    cache: Optional[KvCacheDict] = ...,
    mask: Optional[AttentionMaskDict] = ...,
    sinks: Optional[Array] = ...,
    precision: Optional[Literal["exact_scores", "fast"]] = ...,
    schedule: Optional[Literal["fastest", "invariant"]] = ...,
    o: Optional[Union[Array, Literal[True]]] = ...,
    lse: Optional[Union[Array, Literal[True]]] = ...,
    threads: Optional[int] = ...,
    backend: Optional[Literal["cpu", "reference", "cuda"]] = ...,
    device: Optional[int] = ...,
    stream: Any = ...,
    isa: Optional[str] = ...,
    dtype: Optional[Literal["bf16"]] = ...,
) -> Any:
    r"""Any number of queries over any cache. The op chooses its own split.

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
    ...
