"""Golden vectors of gated_delta_rule_prefill and _decode from transformers, flash-linear-attention and numpy float64."""
import numpy as np
import torch
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda.naive import naive_recurrent_kda
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from delta_math import head_index, l2, recurrent
from golden_io import agree, bf16, doubled, f32, plain, save, version

HF, FLA = version("transformers"), version("fla-core")


# ---------------------------------------------------------------- inputs

def gaussian(rng, *shape):
    return bf16(rng.standard_normal(shape))


def inputs(seed, lengths, hk, hv, kd, vd, gate=(-2.0, -0.01), beta=(0.05, 0.95), keys="gaussian", state=False, channel=False):
    """Random tensors of one case; q, k, v are bf16 values, the rest float32."""
    rng = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu[-1])
    q, k, v = gaussian(rng, total, hk, kd), gaussian(rng, total, hk, kd), gaussian(rng, total, hv, vd)
    if keys == "identical":
        k[:] = k[:1]
    elif keys == "alternating":
        k[:] = k[:1] * np.where(np.arange(total) % 2, -1, 1)[:, None, None]
    elif keys == "positive":                       # what SiLU leaves: strongly correlated
        k = bf16(k / (1 + np.exp(-k)))
    elif keys == "one_hot":
        k = np.zeros_like(k)
        k[np.arange(total), :, np.arange(total) % kd] = 1
    shape = (total, hv, kd) if channel else (total, hv)
    if gate == "mixed":                            # free of decay, with sudden near-resets
        g = np.where(rng.random(shape) < 0.2, -30.0, 0.0)
    else:
        g = rng.uniform(*gate, shape)
    b = rng.uniform(*beta, (total, hv))
    s = rng.standard_normal((len(lengths), hv, vd, kd)) if state else None
    return dict(q=f32(q), k=f32(k), v=f32(v), g=f32(g), beta=f32(b), cu_seqlens=cu, state_in=None if s is None else f32(s))


# ---------------------------------------------------------------- upstream sources

def run_upstream(kind, x, args, dtype):
    """One of the upstream functions over a packed batch: a call per sequence, heads expanded, state transposed to [V, K]."""
    cu, hk, hv = x["cu_seqlens"], x["k"].shape[1], x["v"].shape[1]
    index = head_index(hk, hv, args["head_map"])
    up = doubled if dtype == torch.float64 else plain
    tensor = lambda a: torch.from_numpy(np.ascontiguousarray(a))[None].to(dtype)
    o = np.zeros(x["v"].shape)
    state = np.zeros((len(cu) - 1, hv, x["v"].shape[2], x["k"].shape[2])) if x["state_in"] is None else x["state_in"].copy()
    for n in range(len(cu) - 1):
        rows = slice(cu[n], cu[n + 1])
        if rows.start == rows.stop:
            continue
        q, k = x["q"][rows][:, index], x["k"][rows][:, index]
        v, g, beta = tensor(x["v"][rows]), tensor(x["g"][rows]), tensor(x["beta"][rows])
        h0 = None if x["state_in"] is None else tensor(x["state_in"][n].transpose(0, 2, 1))
        if kind.startswith("hf"):
            fn = qwen.torch_recurrent_gated_delta_rule if kind == "hf_recurrent" else qwen.torch_chunk_gated_delta_rule
            out, last = up(fn)(tensor(q), tensor(k), v, g=g, beta=beta, initial_state=h0, output_final_state=True,
                               use_qk_l2norm_in_kernel=args["l2_norm"])
        else:
            if args["l2_norm"]:                    # the naive functions expect normalised inputs
                q, k = l2(q), l2(k)
            fn = {"fla_recurrent": naive_recurrent_gated_delta_rule, "fla_chunk": naive_chunk_gated_delta_rule,
                  "fla_kda": naive_recurrent_kda}[kind]
            out, last = up(fn)(q=tensor(q), k=tensor(k), v=v, beta=beta, g=g, scale=args["scale"], initial_state=h0,
                               output_final_state=True)
        o[rows] = out[0].numpy()
        state[n] = last[0].numpy().transpose(0, 2, 1)
    return o, state


NAMES = {"hf_recurrent": HF + " torch_recurrent_gated_delta_rule", "hf_chunk": HF + " torch_chunk_gated_delta_rule",
         "fla_recurrent": FLA + " naive_recurrent_gated_delta_rule", "fla_chunk": FLA + " naive_chunk_gated_delta_rule",
         "fla_kda": FLA + " naive_recurrent_kda", "numpy": "numpy float64 recurrence"}


def case(name, x, source="hf_recurrent", op="gated_delta_rule_prefill", head_map="grouped", l2_norm=True, scale=None,
         single=False, record=False):
    """Compute with `source`, require every other applicable source to agree, and write the file."""
    kd, tokens = x["k"].shape[2], x["k"].shape[0]
    default = kd ** -0.5
    args = {"scale": default if scale is None else scale, "head_map": head_map, "l2_norm": l2_norm, "bf16_exact": "q,k,v"}
    o, s, (kn, delta, g) = recurrent(x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu_seqlens"], x["state_in"],
                                     args["scale"], head_map, l2_norm)
    channel = x["g"].ndim == 3
    others = ["fla_kda"] if channel else ["fla_recurrent"] + (["hf_recurrent", "hf_chunk"] if scale is None else [])
    bound32 = 4e-6 * np.sqrt(tokens)               # the unmodified float32 code against float64
    result = {}
    for kind in others:
        result[kind] = run_upstream(kind, x, args, torch.float64)
        for a, b, what in zip(result[kind], (o, s), ("o", "state")):
            agree(name + " " + kind + " " + what, a, b, 1e-12)
    for kind in others + ([] if channel else ["fla_chunk"]):
        result[kind + "32"] = run_upstream(kind, x, args, torch.float32)
        for a, b, what in zip(result[kind + "32"], (o, s), ("o", "state")):
            agree(name + " " + kind + " float32 " + what, a, b, bound32)
    if source != "numpy":
        o, s = result[source + ("32" if single else "")]
    label = NAMES[source] + ("" if source == "numpy" else " float32" if single else " float64")
    outputs = {"o": o, "state_out": s}
    if record:
        outputs.update(record_k=kn, record_delta=delta, record_g=g)
        label += "; record: numpy float64"
    save(name, op, label, "%.1e" % bound32 if single else "1e-6", args, x, outputs)


# ---------------------------------------------------------------- cases

def prefill():
    case("delta_prefill_t1", inputs(1, [1], 1, 1, 8, 16))
    case("delta_prefill_t5_state", inputs(2, [5], 2, 4, 16, 8, state=True))
    case("delta_prefill_t17_ratio3", inputs(3, [17], 1, 3, 32, 16))
    case("delta_prefill_t17_tiled", inputs(4, [17], 2, 4, 16, 24, state=True), head_map="tiled")
    case("delta_prefill_t64", inputs(5, [64], 2, 4, 16, 8), source="hf_chunk")
    case("delta_prefill_t65_state", inputs(6, [65], 1, 3, 24, 16, state=True), source="hf_chunk")
    case("delta_prefill_t65_k64_v48", inputs(7, [65], 1, 1, 64, 48, state=True))
    case("delta_prefill_t130_ratio4", inputs(8, [130], 2, 8, 16, 8, gate=(-0.05, -0.001)))
    case("delta_prefill_dense_batch2", inputs(9, [33, 33], 2, 4, 8, 16, state=True))
    case("delta_prefill_varlen", inputs(10, [0, 1, 17, 0, 65, 3, 0], 1, 2, 16, 8, state=True))
    case("delta_prefill_varlen_zero_state", inputs(11, [2, 0, 64, 1], 2, 4, 8, 16))
    case("delta_prefill_no_l2_scale", normalised(inputs(12, [37], 2, 4, 16, 8)), source="fla_recurrent", l2_norm=False, scale=0.375)
    case("delta_prefill_one_hot", inputs(13, [20], 1, 1, 8, 16, gate=(0.0, 0.0), beta=(1.0, 1.0), keys="one_hot"), l2_norm=False)
    case("delta_prefill_identical_keys", inputs(14, [130], 1, 2, 16, 8, gate=(-0.01, 0.0), beta=(1.0, 1.0), keys="identical"))
    case("delta_prefill_identical_keys_no_decay", inputs(15, [65], 1, 1, 16, 8, gate=(0.0, 0.0), beta=(1.0, 1.0), keys="identical"))
    case("delta_prefill_strong_decay", inputs(16, [65], 1, 2, 16, 24, gate=(-69.0, -1e-4), state=True))
    case("delta_prefill_mixed_gates", inputs(17, [130], 1, 2, 16, 8, gate="mixed", state=True))
    case("delta_prefill_beta2", inputs(18, [65], 1, 2, 24, 16, beta=(0.0, 2.0), gate=(-0.1, 0.0)))
    case("delta_prefill_beta2_correlated", inputs(19, [130], 1, 2, 16, 8, beta=(1.9, 2.0), gate=(-0.02, 0.0), keys="positive"))
    case("delta_prefill_beta2_alternating", inputs(20, [65], 1, 1, 16, 8, beta=(2.0, 2.0), gate=(-0.02, 0.0), keys="alternating"))
    case("delta_prefill_channel_gates", inputs(21, [70], 1, 2, 16, 8, channel=True, state=True), source="fla_kda")
    case("delta_prefill_channel_gates_varlen", inputs(22, [17, 0, 5], 2, 4, 8, 16, channel=True, gate=(-20.0, -1e-4)), source="fla_kda")
    # The upstream code exactly as shipped (float32 inside): a wider tolerance, no trick in the source.
    case("delta_prefill_hf_recurrent_float32", inputs(23, [64], 2, 4, 16, 8, state=True), single=True)
    case("delta_prefill_hf_chunk_float32", inputs(24, [130], 1, 2, 16, 8, state=True), source="hf_chunk", single=True)
    case("delta_prefill_fla_chunk_float32", inputs(25, [65], 1, 2, 24, 16), source="fla_chunk", single=True)


def normalised(x):
    """Keys and queries shrunk to at most unit norm and rounded to bf16, for calls without in-op normalisation."""
    return {**x, "q": f32(bf16(0.998 * l2(x["q"]))), "k": f32(bf16(0.998 * l2(x["k"])))}


def decode():
    op = "gated_delta_rule_decode"
    case("delta_decode_one_token", inputs(40, [1] * 4, 2, 4, 16, 8, state=True), op=op, record=True)
    case("delta_decode_ratio3_k64", inputs(41, [1, 1], 1, 3, 64, 16, state=True), op=op, record=True)
    case("delta_decode_verify5", inputs(42, [5, 5], 2, 4, 16, 8, state=True), op=op, record=True)
    case("delta_decode_verify16", inputs(43, [16], 1, 2, 24, 16, state=True, gate=(-20.0, -1e-4)), op=op, record=True)
    case("delta_decode_ragged", inputs(44, [3, 0, 1, 4], 2, 8, 8, 16, state=True), op=op, record=True)
    case("delta_decode_tiled", inputs(45, [2, 2], 2, 4, 16, 8, state=True), op=op, head_map="tiled", record=True)
    case("delta_decode_channel_gates", inputs(46, [1, 4], 1, 2, 16, 24, channel=True, state=True), source="fla_kda", op=op, record=True)
    case("delta_decode_beta2_identical", inputs(47, [8], 1, 2, 16, 8, beta=(2.0, 2.0), keys="identical", state=True), op=op, record=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    prefill()
    decode()
