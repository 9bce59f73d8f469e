"""Golden vectors of the delta layer's other ops: gates, short conv, norms, chunk stages, affine maps, one whole layer."""
import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from delta_math import affine, chunked, l2, recurrent
from golden_io import agree, bf16, doubled, f32, plain, save, version
from make_delta import inputs, normalised

HF, TORCH = version("transformers"), version("torch")


def t64(x):
    return torch.from_numpy(np.ascontiguousarray(np.asarray(x, np.float64)))


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


# ---------------------------------------------------------------- gates

def gates():
    rng = np.random.default_rng(100)
    tokens, hv = 24, 4
    a, b = bf16(3 * rng.standard_normal((tokens, hv))), bf16(3 * rng.standard_normal((tokens, hv)))
    a[0], a[1], a[2], a[3] = (-30, -17, -7, 0), (19.875, 20, 20.125, 25), (88, 89, 90, 100), (-50, -60, -40, -65)
    b[0], b[1] = (-30, 30, 0, -80), (100, -8, 8, 1)
    a_log, dt_bias = f32(np.log([1e-3, 0.5, 4.0, 16.0])), f32([0.0, -6.9, -2.25, 1.0])
    x = t64(f32(a)) + t64(dt_bias)
    g = (-t64(a_log).exp() * F.softplus(x)).numpy()
    beta = t64(f32(b)).sigmoid().numpy()
    agree("g", g, -np.exp(a_log) * np.logaddexp(0, f32(a) + dt_bias), 1e-9)      # torch: softplus(x) = x above 20
    agree("beta", beta, sigmoid(f32(b)), 1e-14)
    tensors = dict(a=a, b=b, A_log=a_log, dt_bias=dt_bias)
    for double in (False, True):
        save("delta_gates" + ("_double_beta" if double else ""), "delta_gates", TORCH + " softplus, sigmoid float64", "1e-6",
             {"double_beta": double, "bf16_exact": "a,b", "elementwise": True}, tensors, dict(g=g, beta=2 * beta if double else beta))


# ---------------------------------------------------------------- short conv

def conv_numpy(x, w, bias, state, activation):
    """One sequence by the definition: ext = [state | x], tap W-1 multiplies the current token."""
    ext = np.concatenate([state, x])
    width = w.shape[1]
    y = np.array([(ext[t:t + width] * w.T).sum(0) for t in range(len(x))]).reshape(x.shape)
    y = y + (0 if bias is None else bias)
    return (y * sigmoid(y) if activation == "silu" else y), ext[len(ext) - (width - 1):]


def conv(name, seed, lengths, channels, width, bias, state, activation):
    rng = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    x, w = f32(bf16(rng.standard_normal((cu[-1], channels)))), f32(bf16(rng.standard_normal((channels, width))))
    b = f32(rng.standard_normal(channels)) if bias else None
    s = f32(bf16(rng.standard_normal((len(lengths), width - 1, channels)))) if state else None
    y, out = np.zeros(x.shape), np.zeros((len(lengths), width - 1, channels))
    act = "silu" if activation == "silu" else None
    for n in range(len(lengths)):
        rows = slice(cu[n], cu[n + 1])
        start = np.zeros((width - 1, channels)) if s is None else s[n]
        ref, out[n] = conv_numpy(x[rows], w, b, start, activation)
        y[rows] = ref
        if rows.start == rows.stop:
            continue
        tx, tb = t64(x[rows].T)[None], None if b is None else t64(b)
        if s is None:                                # the prefill function knows no state; the update function needs one
            up = plain(qwen.causal_conv1d_fn)(tx, t64(w), tb, act)
        else:
            ts = t64(start.T)[None].clone()
            up = plain(qwen.causal_conv1d_update)(tx, ts, t64(w), tb, act)
            agree(name + " state", ts[0].numpy().T, out[n], 1e-15)
        y[rows] = up[0].numpy().T
        agree(name, y[rows], ref, 1e-13)
    fn = "causal_conv1d_update" if state else "causal_conv1d_fn"
    save(name, "short_conv", "%s %s float64" % (HF, fn), "1e-6", {"activation": activation, "bf16_exact": "x,weight,state_in"},
         dict(x=x, weight=w, bias=b, state_in=s, cu_seqlens=cu), dict(y=y, state_out=out))


def convs():
    conv("short_conv_w4", 110, [9], 24, 4, False, False, "silu")
    conv("short_conv_w4_state_bias", 111, [7, 7], 16, 4, True, True, "silu")
    conv("short_conv_w4_short", 112, [2, 1, 3], 16, 4, False, True, "silu")       # fewer tokens than taps
    conv("short_conv_w4_varlen", 113, [0, 5, 1, 0, 12], 16, 4, True, True, "silu")
    conv("short_conv_w4_varlen_zero_state", 114, [3, 0, 2, 6], 16, 4, False, False, "silu")
    conv("short_conv_w2_none", 115, [1, 4], 16, 2, True, True, "none")
    conv("short_conv_w3_none", 116, [6], 40, 3, False, False, "none")


# ---------------------------------------------------------------- norms

def norms():
    rng = np.random.default_rng(120)
    x = bf16(rng.standard_normal((6, 3, 24)))
    x[0, 0], x[0, 1] = 0, bf16(1e-4 * x[0, 1])
    for name, eps in (("l2_norm", 1e-6), ("l2_norm_eps9", 9.0)):
        y = plain(qwen.l2norm)(t64(f32(x)), eps=eps).numpy()
        agree(name, y, l2(f32(x), eps), 1e-14)
        save(name, "l2_norm", HF + " l2norm float64", "1e-6", {"eps": eps, "bf16_exact": "x"}, dict(x=x), dict(y=y))
    x, z = bf16(rng.standard_normal((9, 4, 24))), bf16(4 * rng.standard_normal((9, 4, 24)))
    x[0, 0], z[0, 1, :4], w = 0, (-100, 100, -30, 0), f32(1 + 0.3 * rng.standard_normal(24))
    module = qwen.Qwen3NextRMSNormGated(24, eps=1e-6).double()
    module.weight.data = t64(w)
    up = doubled(qwen.Qwen3NextRMSNormGated.forward)(module, t64(f32(x)), t64(f32(z))).detach().numpy()
    for gate in ("silu", "sigmoid"):
        eps = 1e-6 if gate == "silu" else 1e-5
        y = w * f32(x) / np.sqrt((f32(x) ** 2).mean(-1, keepdims=True) + eps) * sigmoid(f32(z))
        y = y * f32(z) if gate == "silu" else y
        if gate == "silu":
            agree("gated_rms_norm", up, y, 1e-14)
        save("gated_rms_norm_" + gate, "gated_rms_norm",
             HF + " Qwen3NextRMSNormGated float64" if gate == "silu" else "numpy float64", "1e-6",
             {"eps": eps, "gate": gate, "bf16_exact": "x,z"}, dict(x=x, z=z, weight=w), dict(y=up if gate == "silu" else y))


# ---------------------------------------------------------------- chunk stages

def stages(name, chunk, x, head_map="grouped"):
    scale = f32(x["k"].shape[2] ** -0.5).item()
    r = chunked(x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu_seqlens"], chunk, x["state_in"], scale, head_map)
    o, s, (_, delta, _) = recurrent(x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu_seqlens"], x["state_in"], scale, head_map, False)
    agree(name + " o", r["o"], o, 1e-11)
    agree(name + " state", r["state_out"], s, 1e-11)
    agree(name + " v_new", r["v_new"], delta, 1e-10)
    save(name, "delta_chunk", "numpy float64 chunk algebra, equal to the recurrence", "1e-6",
         {"chunk": chunk, "scale": scale, "head_map": head_map, "l2_norm": False, "bf16_exact": "q,k,v"},
         {**x, "chunk_offsets": r.pop("chunk_offsets")}, r)


def chunk_stages():
    stages("delta_chunk16", 16, normalised(inputs(130, [37], 1, 2, 16, 24, state=True)))
    stages("delta_chunk16_tiled", 16, normalised(inputs(131, [33], 2, 4, 8, 16, state=True)), head_map="tiled")
    stages("delta_chunk32", 32, normalised(inputs(132, [70], 1, 2, 16, 8, state=True)))
    stages("delta_chunk64", 64, normalised(inputs(133, [100], 1, 1, 8, 16, gate=(-0.1, 0.0))))
    stages("delta_chunk64_varlen", 64, normalised(inputs(134, [65, 0, 17, 1], 1, 2, 16, 8, state=True)))
    stages("delta_chunk64_identical_beta2", 64, normalised(inputs(135, [66], 1, 1, 16, 8, gate=(-0.05, 0.0), beta=(1.0, 2.0), keys="identical")))
    stages("delta_chunk64_strong_decay", 64, normalised(inputs(136, [66], 1, 1, 16, 8, gate=(-69.0, 0.0))))


# ---------------------------------------------------------------- affine maps of token ranges

def affine_maps():
    source = "numpy float64, ordered product of one factor per token"
    for name, kw, head_map in (("", dict(gate=(-0.3, -0.001)), "grouped"), ("_tiled", dict(gate="mixed"), "tiled"),
                               ("_channel_gates", dict(channel=True, gate=(-0.5, -0.01)), "grouped")):
        x = normalised(inputs(140, [33, 0, 7], 2, 4, 16, 8, state=True, **kw))
        k, v, g, b, cu, s0 = (x[i] for i in ("k", "v", "g", "beta", "cu_seqlens", "state_in"))
        p, q = affine(k, v, g, b, cu, head_map)
        end = np.einsum("nhvk,nhkj->nhvj", s0, p) + q
        agree("affine" + name, end, recurrent(x["q"], k, v, g, b, cu, s0, 1.0, head_map, False)[1], 1e-12)
        save("delta_summarize" + name, "gated_delta_rule_summarize", source, "1e-6",
             {"head_map": head_map, "l2_norm": False, "bf16_exact": "k,v"}, dict(k=k, v=v, g=g, beta=b, cu_seqlens=cu), dict(P=p, Q=q))
    # Two neighbouring ranges of one sequence: [0, 10) then [10, 33).
    x = normalised(inputs(141, [33], 1, 2, 16, 8, state=True, gate=(-0.3, -0.001)))
    part = lambda lo, hi: affine(*(x[i][lo:hi] for i in ("k", "v", "g", "beta")), [0, hi - lo])
    (p1, q1), (p2, q2), (p, q) = part(0, 10), part(10, 33), part(0, 33)
    p1, q1, p2, q2 = map(f32, (p1, q1, p2, q2))      # the stored inputs; P, Q of the whole range differ by their rounding only
    pc, qc = p1 @ p2, q1 @ p2 + q2
    agree("compose P", pc, p, 1e-6)
    agree("compose Q", qc, q, 1e-6)
    save("delta_compose", "gated_delta_rule_compose", source, "1e-6", {}, dict(P_earlier=p1, Q_earlier=q1, P_later=p2, Q_later=q2),
         dict(P=pc, Q=qc))
    p, q = f32(p), f32(q)
    save("delta_apply", "gated_delta_rule_apply", source, "1e-6", {}, dict(P=p, Q=q, state_in=x["state_in"]),
         dict(state_out=x["state_in"] @ p + q))


# ---------------------------------------------------------------- a whole layer between its projections

def layer():
    """transformers' Qwen3-Next layer as shipped (float32): from the in-projections' results to the input of the out-projection."""
    torch.manual_seed(150)
    hk, hv, kd, vd, tokens = 2, 4, 16, 8, 70
    config = Qwen3NextConfig(hidden_size=32, linear_num_key_heads=hk, linear_num_value_heads=hv, linear_key_head_dim=kd,
                             linear_value_head_dim=vd, linear_conv_kernel_dim=4, num_hidden_layers=1, rms_norm_eps=1e-6)
    for fn in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        setattr(qwen, fn, plain(getattr(qwen, fn)))
    net = qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()
    with torch.no_grad():
        net.A_log.copy_(torch.log(torch.rand(hv) * 8 + 0.1))
        net.dt_bias.copy_(torch.randn(hv) - 3)
        net.norm.weight.copy_(1 + 0.2 * torch.randn(vd))
        seen = {}
        net.out_proj.register_forward_pre_hook(lambda m, a: seen.update(out=a[0]))
        hidden = 2 * torch.randn(1, tokens, 32)
        net(hidden)
        q, k, v, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
        qkv = torch.cat([t.reshape(tokens, -1) for t in (q, k, v)], -1)
    num = lambda t: t.detach().numpy().astype(np.float64)
    qkv, z, a, b, weight = num(qkv), num(z[0]), num(a[0]), num(b[0]), num(net.conv1d.weight[:, 0])
    a_log, dt_bias, norm = num(net.A_log), num(net.dt_bias), num(net.norm.weight)
    # The same in numpy float64.
    y, _ = conv_numpy(qkv, weight, None, np.zeros((3, qkv.shape[1])), "silu")
    q, k, v = np.split(y, [hk * kd, 2 * hk * kd], -1)
    g = -np.exp(a_log) * np.logaddexp(0, a + dt_bias)
    o, _, _ = recurrent(q.reshape(-1, hk, kd), k.reshape(-1, hk, kd), v.reshape(-1, hv, vd), g, sigmoid(b), [0, tokens])
    mine = norm * o / np.sqrt((o ** 2).mean(-1, keepdims=True) + 1e-6) * z * sigmoid(z)
    out = num(seen["out"]).reshape(tokens, hv, vd)
    agree("layer", out, mine, 2e-5)
    save("delta_layer", "delta_layer", HF + " Qwen3NextGatedDeltaNet float32", "3e-5",
         {"Hk": hk, "Hv": hv, "K": kd, "V": vd, "eps": 1e-6, "head_map": "grouped", "activation": "silu", "gate": "silu"},
         dict(qkv=qkv, z=z, a=a, b=b, A_log=a_log, dt_bias=dt_bias, conv_weight=weight, norm_weight=norm,
              cu_seqlens=np.array([0, tokens], np.int32)), dict(y=out, y_float64=mine))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gates()
    convs()
    norms()
    chunk_stages()
    affine_maps()
    layer()
