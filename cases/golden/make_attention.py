"""Golden vectors of compressed_attention and attention_merge: softmax attention in float64 over decoded caches."""
import numpy as np
import torch

from golden_io import agree, f32, save, version
from kv_math import Codec, rotation

IDLE = -np.finfo(np.float32).max / 2             # what an idle workgroup stores as its maximum


# ---------------------------------------------------------------- attention by its definition

def visible(pos, length, causal, window):
    """Keys a query at absolute position pos sees: all, or those up to itself, or the last `window` of those."""
    j = np.arange(length)
    keep = j <= pos if causal else np.ones(length, bool)
    return keep & (j > pos - window) if window else keep


def attend(q, k, v, cu, lengths, positions, scale, causal, window, sinks, softcap):
    tokens, hq, _ = q.shape
    o, lse = np.zeros((tokens, hq, v.shape[-1])), np.full((tokens, hq), -np.inf)
    for n in range(len(lengths)):
        for t in range(cu[n], cu[n + 1]):
            keep = visible(positions[t], lengths[n], causal, window)
            for h in range(hq):
                kv = h // (hq // k.shape[1])
                s = scale * (k[n, kv, :lengths[n]][keep] @ q[t, h])
                if softcap:
                    s = softcap * np.tanh(s / softcap)
                everything = s if sinks is None else np.append(s, sinks[h])   # a sink is a key of value 0, neither scaled nor capped
                if len(everything) == 0:
                    continue
                lse[t, h] = everything.max() + np.log(np.exp(everything - everything.max()).sum())
                o[t, h] = np.exp(s - lse[t, h]) @ v[n, kv, :lengths[n]][keep]
    return o, lse


def attend_torch(q, k, v, cu, lengths, positions, scale, causal, window, sinks):
    """The same from torch's scaled_dot_product_attention in float64; a sink is an extra zero key with a bias."""
    o, t64 = np.zeros(q.shape[:2] + (v.shape[-1],)), lambda x: torch.from_numpy(np.ascontiguousarray(x, np.float64))
    hq, hk = q.shape[1], k.shape[1]
    for n in range(len(lengths)):
        rows = slice(cu[n], cu[n + 1])
        bias = np.stack([np.where(visible(p, lengths[n], causal, window), 0.0, -np.inf) for p in positions[rows]])
        bias = np.repeat(bias[None], hq, 0)
        kk, vv = k[n, :, :lengths[n]], v[n, :, :lengths[n]]
        if sinks is not None:
            bias = np.concatenate([bias, np.broadcast_to(sinks[:, None, None], bias.shape[:2] + (1,))], -1)
            kk, vv = (np.concatenate([x, np.zeros((hk, 1, x.shape[-1]))], 1) for x in (kk, vv))
        out = torch.nn.functional.scaled_dot_product_attention(
            t64(q[rows].transpose(1, 0, 2))[None], t64(kk)[None], t64(vv)[None], attn_mask=t64(bias)[None], scale=scale, enable_gqa=True)
        o[rows] = out[0].numpy().transpose(1, 0, 2)
    return o


# ---------------------------------------------------------------- cases

def side(letter, codec, rng, n, hk, cap, d, lengths, mean):
    """Random rows of one side, stored; rows past a sequence's length hold junk that must not matter."""
    x = f32(rng.standard_normal((n, hk, cap, d)))
    live = np.arange(cap)[None, :] < np.array(lengths)[:, None]               # [n, cap]
    poison = lambda a, junk: np.where(live.reshape(n, 1, cap, *[1] * (a.ndim - 3)), a, junk).astype(a.dtype)
    if codec is None:
        return x, {letter: poison(x, 1e30)}, {letter + "_format": "passthrough", letter + "_dtype": "f32"}
    shift = 0.0 if mean is None else mean[None, :, None, :]
    codes, gains, _ = codec.encode((x - shift).reshape(-1, d))
    hat = codec.decode(codes, gains).reshape(x.shape) + shift
    stored = codec.store(codes)
    stored = stored.reshape(n, hk, cap, -1)
    gains = gains.reshape(n, hk, cap, *gains.shape[1:])
    tensors = {letter + ("_bytes" if codec.packing == "byte" else "_words"): poison(stored, np.iinfo(stored.dtype).max),
               letter + "_gains": poison(gains, 1e30), letter + "_hat": np.where(live[:, None, :, None], hat, 0.0),
               letter + "_table": f32(codec.table)}
    if mean is not None:
        tensors[letter + "_mean"] = mean
    return hat, tensors, {letter + "_" + key: value for key, value in codec.describe().items()}


def case(name, seed, d, hq, hk, lengths, queries, kcodec=None, vcodec=None, causal=True, window=None, sinks=False, softcap=None,
         mean=False, spread=1.5):
    rng = np.random.default_rng(seed)
    n, cap, cu = len(lengths), max(lengths) + 2, np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = f32(spread * rng.standard_normal((cu[-1], hq, d)))
    positions = np.concatenate([length - count + np.arange(count) for length, count in zip(lengths, queries)]).astype(np.int32)
    s = f32(2 + rng.standard_normal(hq)) if sinks else None
    means = [f32(0.5 * rng.standard_normal((hk, d))) if mean else None for _ in "kv"]
    k, kt, ka = side("k", kcodec, rng, n, hk, cap, d, lengths, means[0])
    v, vt, va = side("v", vcodec, rng, n, hk, cap, d, lengths, means[1])
    scale = f32(d ** -0.5).item()
    o, lse = attend(q, k, v, cu, lengths, positions, scale, causal, window, s, softcap)
    source = "numpy float64 over the decoded cache"
    if softcap is None and min(lengths) > 0:
        up = attend_torch(q, k, v, cu, lengths, positions, scale, causal, window, s)
        agree(name, up, o, 1e-13)
        o, source = up, version("torch") + " scaled_dot_product_attention float64; lse: numpy float64"
    # The same in the rotated domain, as an implementation would do it.
    if kcodec is not None and vcodec is not None:
        o2, _ = attend(q @ kcodec.pi.T, k @ kcodec.pi.T, v @ vcodec.pi.T, cu, lengths, positions, scale, causal, window, s, softcap)
        agree(name + " rotated", o2 @ vcodec.pi, o, 1e-12)
    args = {"scale": scale, "causal": causal, "lse_includes_sinks": True, **({"window": window} if window else {}),
            **({"softcap": softcap} if softcap else {}), **ka, **va}
    save(name, "compressed_attention", source, "1e-6" if kcodec is None and vcodec is None else "2e-6", args,
         dict(q=q, cu_seqlens=cu, lengths=np.array(lengths, np.int32), positions=positions, sinks=s, **kt, **vt), dict(o=o, lse=lse),
         infinities=min(lengths) == 0)


def attention():
    aura = lambda bits: Codec("aura", bits, 64, ("srht", 0))
    exact = lambda bits: Codec("lloyd_max", bits, 128, ("srht", 1))
    weft = lambda bits, d: Codec("weft1", bits, d, ("srht", 5))
    case("attention_aura_4v2_d64", 300, 64, 4, 2, [30], [3], aura(4), aura(2))
    case("attention_aura_4v2_d64_window_sinks", 301, 64, 4, 2, [30], [2], aura(4), aura(2), window=9, sinks=True)
    case("attention_lloyd_max_4v4_d128", 302, 128, 6, 2, [9, 5], [2, 1], exact(4), exact(4))
    case("attention_lloyd_max_3v2_d128_softcap", 303, 128, 2, 1, [17], [1], exact(3), exact(2), softcap=5.0)
    hb = Codec("tq_hb", 8, 256, ("d1",))
    case("attention_tq_hb_8_d256", 304, 256, 2, 1, [13], [1], hb, hb)
    case("attention_weft1_4v3_d64_prefill", 305, 64, 4, 2, [12, 9], [12, 4], weft(4, 64), weft(3, 64))
    case("attention_weft1_4v4_d128_mean_sinks", 306, 128, 8, 2, [15], [1], weft(4, 128), weft(4, 128), sinks=True, mean=True)
    case("attention_weft1_8v4_d80_all_options", 307, 80, 6, 2, [20], [2], weft(8, 80), weft(4, 80), window=11, sinks=True, softcap=8.0)
    case("attention_f32_k_weft1_v3_d64", 308, 64, 4, 2, [14], [1], None, weft(3, 64))
    case("attention_f32_d64", 309, 64, 4, 2, [9, 20], [3, 2])
    case("attention_f32_d64_not_causal", 310, 64, 2, 2, [9, 12], [4, 1], causal=False)
    case("attention_f32_d80_window_sinks", 311, 80, 3, 1, [24], [4], window=7, sinks=True)
    case("attention_f32_d80_all_options", 312, 80, 3, 1, [24], [4], window=7, sinks=True, softcap=6.0)
    case("attention_f32_d64_large_logits", 313, 64, 2, 1, [25], [2], spread=40.0)
    case("attention_f32_d64_empty", 314, 64, 2, 1, [0, 3], [1, 1], causal=False)      # no key: o = 0, lse = -inf


# ---------------------------------------------------------------- merging partial results

def merge(name, seed, dv, rows, splits, kind, sinks=None, idle=IDLE, tokens=40):
    """Partials (o, l, m) of a token set dealt out to `splits` groups; some groups idle, the last row with no token at all."""
    rng = np.random.default_rng(seed)
    logits, value = 6 * rng.standard_normal((rows, tokens)), rng.standard_normal((rows, tokens, dv))
    owner = rng.integers(0, splits, (rows, tokens))
    owner[1][owner[1] == 1] = 0                    # group 1 of row 1 is idle
    owner[-1] = -1                                 # the last row is fully masked
    o, s, m = np.zeros((rows, splits, dv)), np.zeros((rows, splits)), np.full((rows, splits), idle)
    for r in range(rows):
        for w in range(splits):
            mine = owner[r] == w
            if mine.any():
                m[r, w] = logits[r, mine].max()
                e = np.exp(logits[r, mine] - m[r, w])
                s[r, w], o[r, w] = e.sum(), e @ value[r, mine]
    o, s, m = f32(o), f32(s), f32(m)
    y, lse = np.zeros((rows, dv)), np.full(rows, -np.inf)
    for r in range(rows):
        live = s[r] != 0
        sink = [] if sinks is None else [sinks[r % len(sinks)]]
        if not live.any() and not sink:
            continue
        top = max([*m[r, live], *sink])
        z = (s[r, live] * np.exp(m[r, live] - top)).sum() + sum(np.exp(x - top) for x in sink)
        y[r], lse[r] = np.exp(m[r, live] - top) @ o[r, live] / z, top + np.log(z)
        seen = owner[r] >= 0                       # the attention it came from
        if seen.any():
            full = np.exp(logits[r, seen] - lse[r]) @ value[r, seen]
            agree(name, y[r], full, 1e-6)
    out = y @ rotation(kind, dv)                   # inverse = transpose; rows are vectors
    r_args = {"rotation": "none"} if kind is None else {"rotation": kind[0], "seed": kind[1]} if kind[0] == "srht" else {"rotation": "tq_d1"}
    common = dict(sinks=None if sinks is None else np.asarray(sinks))
    args = {"dv": dv, "splits": splits, "heads": rows if sinks is None else len(sinks), "lse_includes_sinks": True, **r_args}
    outputs = dict(o_rotated=y, o=out, lse=lse)
    interleaved = o.reshape(rows, splits, dv // 4, 4).transpose(0, 2, 1, 3)
    save(name, "attention_merge", "numpy float64", "1e-6", {**args, "layout": "interleaved"},
         dict(o_partials=interleaved, sm_partials=np.stack([s, m], -1), **common), outputs, infinities=True)
    if dv == 64:                                   # the same data as [row, split, d] with m and l apart
        save(name + "_rows", "attention_merge", "numpy float64", "1e-6", {**args, "layout": "rows"},
             dict(o_partials=o, m_partials=m, l_partials=s, **common), outputs, infinities=True)


def merges():
    merge("attention_merge_tq_d256", 320, 256, 3, 8, ("d1",))
    merge("attention_merge_tq_d512", 321, 512, 3, 3, ("d1",))
    merge("attention_merge_srht_d64", 322, 64, 5, 4, ("srht", 1), idle=-np.inf)
    merge("attention_merge_srht_d64_sinks", 323, 64, 4, 4, ("srht", 1), sinks=f32([3.0, -1.25]), idle=-np.inf)
    merge("attention_merge_none_d128", 324, 128, 3, 2, None, idle=-np.inf)
    merge("attention_merge_srht_d80", 325, 80, 3, 3, ("srht", 2), idle=-np.inf)


if __name__ == "__main__":
    torch.set_num_threads(1)
    attention()
    merges()
