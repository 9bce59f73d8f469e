"""The gated delta rule in numpy float64, written from its recurrence and from the chunk algebra; state is [V, K]."""
import numpy as np


def head_index(hk, hv, head_map):
    """Key head of every value head: grouped = hv div (Hv/Hk), tiled = hv mod Hk."""
    h = np.arange(hv)
    return h // (hv // hk) if head_map == "grouped" else h % hk


def l2(x, eps=1e-6):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def recurrent(q, k, v, g, beta, cu, state_in=None, scale=None, head_map="grouped", l2_norm=True):
    """Returns o, state_out, and the record (k normalised per key head, delta, g) token by token."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    hk, hv, kd, vd = k.shape[1], v.shape[1], k.shape[2], v.shape[2]
    scale = kd ** -0.5 if scale is None else scale
    kn, qn = (l2(k), l2(q)) if l2_norm else (k, q)
    index = head_index(hk, hv, head_map)
    n_seq = len(cu) - 1
    state = np.zeros((n_seq, hv, vd, kd)) if state_in is None else np.array(state_in, np.float64)
    o, delta = np.zeros(v.shape), np.zeros(v.shape)
    for n in range(n_seq):
        s = state[n]
        for t in range(cu[n], cu[n + 1]):
            decay = np.exp(g[t])
            s = s * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
            kt, qt = kn[t][index], scale * qn[t][index]
            delta[t] = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", s, kt))
            s = s + delta[t][:, :, None] * kt[:, None, :]
            o[t] = np.einsum("hvk,hk->hv", s, qt)
        state[n] = s
    return o, state, (kn, delta, g)


def chunked(q, k, v, g, beta, cu, chunk, state_in=None, scale=None, head_map="grouped"):
    """Every stage of the chunk algorithm (scalar gates, keys already normalised). Blocks [T, Hv, chunk], chunk innermost."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    total, hk, kd = k.shape
    hv, vd = v.shape[1:]
    scale = kd ** -0.5 if scale is None else scale
    index = head_index(hk, hv, head_map)
    lengths = np.diff(cu)
    offsets = np.concatenate([[0], np.cumsum(-(-lengths // chunk))]).astype(np.int32)
    r = {"g_cumsum": np.zeros((total, hv)), "a": np.zeros((total, hv, chunk)), "a_inv": np.zeros((total, hv, chunk)),
         "w": np.zeros((total, hv, kd)), "u": np.zeros((total, hv, vd)), "h": np.zeros((offsets[-1], hv, vd, kd)),
         "v_new": np.zeros((total, hv, vd)), "o": np.zeros((total, hv, vd)),
         "state_out": np.zeros((len(lengths), hv, vd, kd)) if state_in is None else np.array(state_in, np.float64)}
    for n, length in enumerate(lengths):
        for c in range(offsets[n + 1] - offsets[n]):
            rows = slice(cu[n] + c * chunk, min(cu[n] + (c + 1) * chunk, cu[n + 1]))
            m = rows.stop - rows.start
            for h in range(hv):
                kk, qq, vv, b = k[rows, index[h]], q[rows, index[h]], v[rows, h], beta[rows, h]
                s = r["state_out"][n, h]
                cum = np.cumsum(g[rows, h])
                lower = np.tri(m, k=-1, dtype=bool)
                gap = np.where(np.tri(m, dtype=bool), cum[:, None] - cum[None, :], -np.inf)
                a = np.where(lower, b[:, None] * (kk @ kk.T) * np.exp(gap), 0.0)
                inv = np.linalg.inv(np.eye(m) + a)
                inv = np.where(np.tri(m, dtype=bool), inv, 0.0)
                u = inv @ (b[:, None] * vv)
                w = inv @ ((b * np.exp(cum))[:, None] * kk)
                vn = u - w @ s.T
                r["h"][offsets[n] + c, h] = s
                r["o"][rows, h] = scale * (np.exp(cum)[:, None] * (qq @ s.T) + ((qq @ kk.T) * np.exp(gap)) @ vn)
                r["state_out"][n, h] = np.exp(cum[-1]) * s + (np.exp(cum[-1] - cum)[:, None] * vn).T @ kk
                r["g_cumsum"][rows, h], r["a"][rows, h, :m], r["a_inv"][rows, h, :m] = cum, a, inv
                r["w"][rows, h], r["u"][rows, h], r["v_new"][rows, h] = w, u, vn
    r["chunk_offsets"] = offsets
    return r


def affine(k, v, g, beta, cu, head_map="grouped"):
    """P, Q of every sequence with S -> S P + Q, as the ordered product of one factor per token (keys already normalised)."""
    k, v, g, beta = (np.asarray(x, np.float64) for x in (k, v, g, beta))
    hk, kd, hv, vd = k.shape[1], k.shape[2], v.shape[1], v.shape[2]
    index = head_index(hk, hv, head_map)
    p = np.tile(np.eye(kd), (len(cu) - 1, hv, 1, 1))
    q = np.zeros((len(cu) - 1, hv, vd, kd))
    for n in range(len(cu) - 1):
        for t in range(cu[n], cu[n + 1]):
            for h in range(hv):
                kt = k[t, index[h]]
                decay = np.diag(np.exp(g[t, h]) * np.ones(kd))
                factor = decay @ (np.eye(kd) - beta[t, h] * np.outer(kt, kt))
                p[n, h] = p[n, h] @ factor
                q[n, h] = q[n, h] @ factor + beta[t, h] * np.outer(v[t, h], kt)
    return p, q
