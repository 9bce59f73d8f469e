#!/usr/bin/env python3
"""Weft's gated delta rule beside flash-linear-attention's Triton kernels, on one CUDA device, in one process.

Both get the same tensors: bf16 q, k, v, f32 log decay and beta, l2 norm inside, f32 state in and out. Calls walk through copies of the
data that together pass the L2 cache several times; one walk is captured into a graph, and a time is the median of replays over the
calls in it. Ratios are fla / weft: more than 1 means that Weft is faster.

    pip download --no-deps flash-linear-attention fla-core -d wheels && unzip -qo 'wheels/*.whl' -d fla-folder
    python3 bench/versus_fla.py --library build-shared/libweft.so --fla fla-folder
"""

import argparse
import ctypes
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
try:
    import weft_c  # the C interface for ctypes
except ImportError as missing:
    raise SystemExit(f"versus_fla.py needs PyTorch and {missing.name}, which this Python does not have.")

K = V = 128
COLD_BYTES = 300 << 20
PREFILLS = [(16, 32, 1, 8192), (16, 32, 1, 32768), (16, 32, 4, 8192), (16, 32, 8, 1024), (16, 64, 1, 8192), (16, 48, 1, 8192),
            (2, 8, 1, 8192), (2, 8, 1, 32768)]
DECODES = [(16, 32, 1), (16, 32, 8), (16, 32, 64), (16, 32, 256)]


def import_or_stop(folder):
    """torch with a device, and FLA's two functions; or a sentence that says what is missing."""
    try:
        import torch
    except ImportError:
        raise SystemExit("versus_fla.py needs PyTorch, which this Python does not have.")
    if not torch.cuda.is_available():
        raise SystemExit("versus_fla.py needs a CUDA device, and PyTorch sees none here.")
    if folder:
        sys.path.insert(0, str(folder))
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as error:
        raise SystemExit(f"versus_fla.py needs flash-linear-attention ({error}); name its unpacked wheels with --fla.")
    return torch, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class Device:
    """Weft on the current torch stream."""

    def __init__(self, torch, library):
        self.torch, self.lib = torch, ctypes.CDLL(str(library))
        self.dtypes = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

    def view(self, tensor):
        sizes, strides = (ctypes.c_int64 * 5)(*tensor.shape), (ctypes.c_int64 * 5)(*tensor.stride())
        return weft_c.Tensor(data=tensor.data_ptr(), sizes=sizes, strides=strides, rank=tensor.dim(),
                             dtype=self.dtypes[tensor.dtype], place=1)

    def call(self, op, args_type, **members):
        """A function that enqueues op on torch's current stream."""
        args, status, wanted = args_type(**members), weft_c.Status(), ctypes.c_size_t()
        stream = weft_c.Stream(backend=2)

        def check(code):
            if code:
                raise SystemExit(f"weft: {status.message.decode()}")

        ask, function = getattr(self.lib, f"weft_{op}_scratch_bytes"), getattr(self.lib, f"weft_{op}")
        check(ask(ctypes.byref(stream), ctypes.byref(args), ctypes.byref(wanted), ctypes.byref(status)))
        scratch = self.torch.empty(max(wanted.value, 1), dtype=self.torch.uint8, device="cuda")

        def run(keep=(args, scratch)):
            stream.queue = self.torch.cuda.current_stream().cuda_stream
            check(function(ctypes.byref(stream), ctypes.byref(args), ctypes.c_void_p(scratch.data_ptr()), wanted,
                           ctypes.byref(status)))

        return run


def inputs(torch, Hk, Hv, B, T):
    def normal(*sizes):
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    return dict(q=normal(B, T, Hk, K), k=normal(B, T, Hk, K), v=normal(B, T, Hv, V),
                g=-torch.rand(B, T, Hv, device="cuda") * 0.3, beta=torch.rand(B, T, Hv, device="cuda"),
                state=torch.randn(B, Hv, V, K, device="cuda") * 0.1)


def weft_call(device, op, args_type, x, o, state_out):
    flat = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    gates = weft_c.Gates(g=device.view(flat["g"]), beta=device.view(flat["beta"]))
    states = weft_c.States(**{"in": device.view(x["state"]), "out": device.view(state_out)})
    return device.call(op, args_type, q=device.view(flat["q"]), k=device.view(flat["k"]), v=device.view(flat["v"]), gates=gates,
                       o=device.view(o.flatten(0, 1)), l2_norm=1, sequences=weft_c.Sequences(count=x["q"].shape[0]), states=states)


def fla_call(function, x):
    """FLA's grouped heads: v-head h reads k-head h // (Hv / Hk)."""
    def run():
        return function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["state"], output_final_state=True,
                        use_qk_l2norm_in_kernel=True, state_v_first=True)

    return run


def microseconds(torch, calls, replays):
    """Median time of one call: a walk through all of them as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    del kept
    return statistics.median(times[2:])


def distance(torch, a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def compare(torch, device, function, op, args_type, shape, replays):
    Hk, Hv, B, T = shape
    bytes_each = B * T * (4 * Hk * K + 4 * Hv * V) + B * Hv * K * V * 8
    sets = [inputs(torch, *shape) for _ in range(max(2, min(24, COLD_BYTES // bytes_each)))]
    outs = [torch.empty_like(x["v"]) for x in sets]
    finals = [torch.empty_like(x["state"]) for x in sets]
    ours = [weft_call(device, op, args_type, x, o, s) for x, o, s in zip(sets, outs, finals)]
    theirs = [fla_call(function, x) for x in sets]
    ours[0]()
    o, final = theirs[0]()
    error_o, error_s = distance(torch, outs[0], o), distance(torch, finals[0], final)
    if not error_o < 0.02 or not error_s < 0.02:
        raise SystemExit(f"{op} {shape}: the two differ by {error_o:.1e} (o) and {error_s:.1e} (state): not the same computation.")
    weft, fla = microseconds(torch, ours, replays), microseconds(torch, theirs, replays)
    print(f"{op[len('gated_delta_rule_'):]:8} {Hk:3}/{Hv:<3} {B:4} x {T:<6} {weft:9.1f} {fla:9.1f} {fla / weft:7.2f}"
          f"   {error_o:.1e} {error_s:.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libweft.so (default: build-shared/libweft.so)")
    parser.add_argument("--fla", type=pathlib.Path, help="folder with the unpacked wheels of flash-linear-attention and fla-core")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--only", choices=["prefill", "decode"])
    options = parser.parse_args()
    torch, chunk, recurrent = import_or_stop(options.fla)
    device = Device(torch, weft_c.find_library(options.library))
    print(f"{torch.cuda.get_device_name()}, K = V = {K}, bf16, f32 state, cold L2, graph replay, medians\n"
          f"{'op':8} {'Hk/Hv':>7} {'B x T':>13} {'weft us':>9} {'fla us':>9} {'ratio':>7}   difference of o, state")
    if options.only != "decode":
        for shape in PREFILLS:
            compare(torch, device, chunk, "gated_delta_rule_prefill", weft_c.PrefillArgs, shape, options.replays)
    if options.only != "prefill":
        for Hk, Hv, B in DECODES:
            compare(torch, device, recurrent, "gated_delta_rule_decode", weft_c.DecodeArgs, (Hk, Hv, B, 1), options.replays)


if __name__ == "__main__":
    main()
