#!/usr/bin/env python3
"""Weft's gated delta rule beside flash-linear-attention's Triton kernels, on one CUDA device, in one process.

Both get the same tensors: bf16 q, k, v, f32 log decay and beta, l2 norm inside, f32 state in and out; decode with bf16 states as well,
which FLA reads but writes as f32. Weft decodes in place; FLA writes states to new memory. Calls walk through copies of the data that
together pass the L2 cache several times. The walks of each library are captured into a graph; replays of the two take turns, and a time
is the median of them over the calls in one.
Ratios are fla / weft: more than 1 means that Weft is faster.

    cmake --preset shared-cuda && cmake --build --preset shared-cuda
    pip download --no-deps flash-linear-attention fla-core -d wheels && unzip -qo 'wheels/*.whl' -d fla-folder
    python3 bench/versus_fla.py --fla fla-folder
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
try:
    import torch_device
    import weft_c  # the C interface for ctypes
    from torch_device import torch, view
except ImportError as missing:
    raise SystemExit(f"versus_fla.py needs {missing.name}, which this Python does not have.")

K = V = 128
COLD_BYTES = 300 << 20
# FLA tunes its kernels for every number of heads, which takes a minute or more: those that take longest come last.
DECODES = [(16, 32, 1), (16, 32, 8), (16, 32, 64), (16, 32, 256)]
PREFILLS = [(16, 32, 1, 8192), (16, 32, 1, 32768), (16, 32, 1, 131072), (16, 32, 4, 8192), (16, 32, 8, 1024), (16, 64, 1, 8192),
            (16, 64, 1, 32768), (16, 48, 1, 8192), (2, 8, 1, 8192), (2, 8, 1, 32768)]


def fla_or_stop(folder):
    """FLA's two functions, or a sentence that says what is missing."""
    if folder:
        sys.path.insert(0, str(folder))
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as error:
        raise SystemExit(f"versus_fla.py needs flash-linear-attention ({error}); name its unpacked wheels with --fla.")
    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def inputs(Hk, Hv, B, T, state_type):
    def normal(*sizes):
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    return dict(q=normal(B, T, Hk, K), k=normal(B, T, Hk, K), v=normal(B, T, Hv, V),
                g=-torch.rand(B, T, Hv, device="cuda") * 0.3, beta=torch.rand(B, T, Hv, device="cuda"),
                state=(torch.randn(B, Hv, V, K, device="cuda") * 0.1).to(state_type))


def weft_call(weft, op, x, o, state_out):
    flat = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    gates = weft_c.Gates(g=view(flat["g"]), beta=view(flat["beta"]))
    states = weft_c.States(**{"in": view(x["state"]), "out": view(state_out)})
    return weft.call(op, q=view(flat["q"]), k=view(flat["k"]), v=view(flat["v"]), gates=gates, o=view(o.flatten(0, 1)), l2_norm=1,
                     sequences=weft_c.Sequences(count=x["q"].shape[0]), states=states)


def fla_call(function, x):
    """FLA's grouped heads: v-head h reads k-head h // (Hv / Hk)."""
    def run():
        return function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["state"], output_final_state=True,
                        use_qk_l2norm_in_kernel=True, state_v_first=True)

    return run


def distance(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def compare(weft, function, op, shape, replays, state_type):
    Hk, Hv, B, T = shape
    states = 1 if T == 1 else 2  # decode is in place
    bytes_each = B * T * (4 * Hk * K + 4 * Hv * V) + states * B * Hv * K * V * state_type.itemsize
    sets = [inputs(*shape, state_type) for _ in range(max(2, min(300, COLD_BYTES // bytes_each)))]
    outs = [torch.empty_like(x["v"]) for x in sets]
    finals = [torch.empty_like(x["state"]) for x in sets]
    theirs = [fla_call(function, x) for x in sets]
    weft_call(weft, op, sets[0], outs[0], finals[0])()
    o, final = theirs[0]()
    error_o, error_s = distance(outs[0], o), distance(finals[0], final)
    if not error_o < 0.02 or not error_s < 0.02:
        raise SystemExit(f"{op} {shape}: the two differ by {error_o:.1e} (o) and {error_s:.1e} (state): not the same computation.")
    if T == 1:
        finals = [x["state"] for x in sets]
    ours = [weft_call(weft, op, x, o, s) for x, o, s in zip(sets, outs, finals)]
    mine, fla = torch_device.medians_us([ours, theirs], replays)
    name = op[len("gated_delta_rule_"):] + (" bf16" if state_type == torch.bfloat16 else "")
    print(f"{name:11} {Hk:3}/{Hv:<3} {B:4} x {T:<6} {mine:9.1f} {fla:9.1f} {fla / mine:7.2f}"
          f"   {error_o:.1e} {error_s:.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libweft.so with the cuda backend (default: build-shared-cuda/libweft.so)")
    parser.add_argument("--fla", type=pathlib.Path, help="folder with the unpacked wheels of flash-linear-attention and fla-core")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--only", choices=["prefill", "decode"])
    options = parser.parse_args()
    torch_device.require()
    chunk, recurrent = fla_or_stop(options.fla)
    weft = torch_device.Weft(options.library)
    print(f"{torch.cuda.get_device_name()}, K = V = {K}, bf16, cold L2, graph replay, medians\n"
          f"{'op':11} {'Hk/Hv':>7} {'B x T':>13} {'weft us':>9} {'fla us':>9} {'ratio':>7}   difference of o, state")
    if options.only != "prefill":
        for state_type in (torch.float32, torch.bfloat16):
            for Hk, Hv, B in DECODES:
                compare(weft, recurrent, "gated_delta_rule_decode", (Hk, Hv, B, 1), options.replays, state_type)
    if options.only != "decode":
        for shape in PREFILLS:
            compare(weft, chunk, "gated_delta_rule_prefill", shape, options.replays, torch.float32)


if __name__ == "__main__":
    try:
        main()
    except weft_c.WeftError as error:
        raise SystemExit(f"weft: {error}") from None
