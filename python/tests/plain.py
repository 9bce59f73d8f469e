"""The ops in plain numpy, in float64, from the formulas of the public headers. Written apart from the library, to check it."""

import numpy as np

# ---- weft/delta_preprocess.h ----


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def delta_gates(a, b, a_log, dt_bias, double_beta=False):
    a_log = a_log[:, None] if a.ndim == 3 else a_log
    return -np.exp(a_log) * softplus(a + dt_bias), sigmoid(b) * (2 if double_beta else 1)


def short_conv(x, weight, bias, history):
    """One sequence; history is [W-1, C]. Returns y and the rows that the next call continues from."""
    width = weight.shape[1]
    extended = np.concatenate([history, x])
    y = sum(weight[:, m] * extended[m : m + len(x)] for m in range(width))
    return silu(y + bias), extended[len(extended) - (width - 1) :]


def l2_norm(x, eps=1e-6):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def gated_rms_norm(x, z, weight, gate, eps=1e-6):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gate(z)


# ---- weft/gated_delta_rule.h ----


def key_head(value_head, value_heads, key_heads, head_map="grouped"):
    return value_head // (value_heads // key_heads) if head_map == "grouped" else value_head % key_heads


def delta_rule(q, k, v, g, beta, state, scale=None, normalise=False, head_map="grouped"):
    """One sequence, token by token. state is [Hv, V, K]. Returns o, the state after every token [T, Hv, V, K], and the corrections."""
    if normalise:
        q, k = l2_norm(q), l2_norm(k)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    tokens, heads = v.shape[:2]
    o, delta, states = np.zeros_like(v), np.zeros_like(v), []
    state = state.copy()
    for t in range(tokens):
        for h in range(heads):
            hk = key_head(h, heads, k.shape[1], head_map)
            decayed = state[h] * np.exp(g[t, h])  # per head, or per channel of K
            delta[t, h] = beta[t, h] * (v[t, h] - decayed @ k[t, hk])
            state[h] = decayed + np.outer(delta[t, h], k[t, hk])
            o[t, h] = state[h] @ q[t, hk] * scale
        states.append(state.copy())
    return o, np.array(states), delta


def affine_map(k, v, g, beta):
    """One range of tokens as the map S -> S p + q, with as many key heads as value heads."""
    heads, size = k.shape[1:]
    p = np.stack([np.eye(size)] * heads)
    q = np.zeros((heads, v.shape[2], size))
    for t in range(len(k)):
        for h in range(heads):
            key = k[t, h]
            step = np.diag(np.exp(g[t, h]) * np.ones(size)) @ (np.eye(size) - beta[t, h] * np.outer(key, key))
            p[h] = p[h] @ step
            q[h] = q[h] @ step + beta[t, h] * np.outer(v[t, h], key)
    return p, q


# ---- weft/delta_chunk.h: one chunk and head, n tokens ----


def chunk_kkt(k, beta, total):
    """total is the prefix sum of g, [n]."""
    return np.tril(beta[:, None] * (k @ k.T) * np.exp(np.minimum(total[:, None] - total[None, :], 0)), -1)


def chunk_inverse(a):
    return np.linalg.inv(np.eye(len(a)) + np.tril(a, -1))


def chunk_wu(k, v, beta, total, inverse):
    return inverse @ ((beta * np.exp(total))[:, None] * k), inverse @ (beta[:, None] * v)


def chunk_state(k, w, u, total, state):
    corrected = u - w @ state.T
    left = np.exp(total[-1] - total)
    return corrected, np.exp(total[-1]) * state + (corrected * left[:, None]).T @ k


def chunk_output(q, k, corrected, state, total, scale):
    inside = np.tril((q @ k.T) * np.exp(np.minimum(total[:, None] - total[None, :], 0)))
    return scale * (np.exp(total)[:, None] * (q @ state.T) + inside @ corrected)


# ---- weft/kv_codec.h: Weft's own formats, head dims 2^k ----

GRIDS = {
    2: ([-119, -36, 35, 118], 0.01274662),
    4: ([-115, -87, -68, -53, -40, -28, -17, -6, 5, 16, 27, 39, 52, 67, 86, 114], 0.023889577),
    8: (list(range(-128, 128)), 0.0307623874),
}


def levels(bits):
    points, step = GRIDS[bits]
    return (np.array(points) + 0.5) * float(np.float32(step))


def signs(seed, size):
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    state = (z ^ (z >> 31)) | 1
    out = []
    for _ in range(size):
        state ^= (state << 13) & mask
        state ^= state >> 7
        state ^= (state << 17) & mask
        out.append(1.0 if state & 1 else -1.0)
    return np.array(out)


def rotation(seed, size):
    """y = R x."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron(hadamard, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return hadamard * signs(seed, size)[None, :] / np.sqrt(size)


def encode(rows, bits, seed):
    """Codes [..., D] and gains [..., 1] of rows [..., D]."""
    size = rows.shape[-1]
    y = rows @ rotation(seed, size).T
    norm = np.linalg.norm(y, axis=-1, keepdims=True)
    table = levels(bits)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, y * np.sqrt(size) / norm)
    chosen = table[codes]
    return codes, norm**2 / (y * chosen).sum(-1, keepdims=True)


def decode(codes, gains, bits, seed):
    return (gains * levels(bits)[codes]) @ rotation(seed, codes.shape[-1])


def unpack(rows, bits, count):
    """The codes of dense rows of bytes [..., bytes]."""
    stream = np.unpackbits(rows, axis=-1, bitorder="little")[..., : count * bits]
    return stream.reshape(*rows.shape[:-1], count, bits) @ (1 << np.arange(bits))


# ---- weft/compressed_attention.h: one sequence, keys and values [tokens, Hk, D] ----


def attention_scores(q, keys, positions, scale=None, window=None, softcap=None, causal=True):
    """[T, Hq, tokens], -inf where masked."""
    heads, kv_heads = q.shape[1], keys.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeated = np.repeat(keys, heads // kv_heads, axis=1)
    scores = scale * np.einsum("thd,jhd->thj", q, repeated)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    j = np.arange(len(keys))
    allowed = np.ones((len(q), len(keys)), bool)
    if causal:
        allowed &= j[None, :] <= positions[:, None]
    if window is not None:
        allowed &= j[None, :] + window > positions[:, None]
    return np.where(allowed[:, None, :], scores, -np.inf)


def attention(scores, values, sinks=None):
    """o and lse."""
    repeated = np.repeat(values, scores.shape[1] // values.shape[1], axis=1)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None] - top)
    return np.einsum("thj,jhd->thd", weights / total, repeated), (np.log(total) + top)[..., 0]
