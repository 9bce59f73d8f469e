#!/usr/bin/env python3
"""Weft's gated delta rule beside flash-linear-attention's Triton kernels, on one CUDA device, in one process.

Both get the same tensors: bf16 q, k, v, f32 log decay and beta, l2 norm inside, f32 state in and out; decode with bf16 states as well,
which FLA reads but writes as f32. Weft decodes in place; FLA writes states to new memory. Calls walk through copies of the data that
together pass the L2 cache several times. The walks of each library are captured into a graph; replays of the two take turns, and a time
is the median of them over the calls in one.
Ratios are fla / weft: more than 1 means that Weft is faster.

--sweep times the prefills of sweep_shapes.py instead: with a decay per channel (KDA), in f16 and f32, ragged, of all sizes. FLA tunes its
kernels for every combination of heads, sizes and dtype. --warm N first compiles what it tries, in N processes; the tuning then takes
seconds. Tuning runs of the sweep are shorter than Triton's own (see TUNING_MS). Rows that FLA refuses have fla_us null.

    cmake --preset shared-cuda && cmake --build --preset shared-cuda
    pip download --no-deps flash-linear-attention fla-core -d wheels && unzip -qo 'wheels/*.whl' -d fla-folder
    python3 bench/versus_fla.py --fla fla-folder
    python3 bench/versus_fla.py --fla fla-folder --sweep --json FILE --warm 16 [--rows A:B]    a part is added to FILE
"""

import argparse
import pathlib
import subprocess
import sys
import time

_FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_FOLDER), str(_FOLDER / "peers")]
try:
    import report
    import sweep_shapes
    import torch_device
    import weft_c  # the C interface for ctypes
    from torch_device import torch, view
except ImportError as missing:
    raise SystemExit(f"versus_fla.py needs {missing.name}, which this Python does not have.")

K = V = 128
COLD_BYTES = 300 << 20
# FLA tunes its kernels for every number of heads, which takes a minute or more. The shapes whose tuning takes longest come last.
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


# --- the sweep

TUNING_MS = (3, 12)  # milliseconds per configuration of FLA's kernels: warm-up, measuring
BARS = {"bf16": 0.02, "f16": 0.01, "f32": 0.01}  # FLA multiplies f32 as tf32
ROW_SECONDS = 1.5  # seconds of measuring per row, approximately at most
KEYS = {name: 0 for name in ("Hk", "Hv", "K", "V", "N", "T", "dtype", "kda")}


def fla_sweep_functions():
    """FLA's two functions."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    return {0: chunk_gated_delta_rule, 1: chunk_kda}


def tune_by(measure):
    """How FLA's kernels time a configuration: measure(run, quantiles)."""
    from triton.runtime.autotuner import Autotuner

    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)  # what decorators hide
            if kernel is not None:
                kernel._do_bench = measure


def short_measure(run, quantiles):
    from triton import testing

    return testing.do_bench(run, warmup=TUNING_MS[0], rep=TUNING_MS[1], quantiles=quantiles)


def sweep_inputs(row, cu_seqlens=None):
    """Packed tokens [1, T, H, D] where the row is ragged, else [N, T, H, D]. FLA keeps what it reads of cu_seqlens, so all share one."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[row["dtype"]]
    Hk, Hv, width, depth = row["Hk"], row["Hv"], row["K"], row["V"]
    lengths = sweep_shapes.RAGGED if row["T"] == 0 else [row["T"]] * row["N"]
    B, T = (1, sum(lengths)) if row["T"] == 0 else (row["N"], row["T"])

    def normal(*sizes):
        return torch.randn(*sizes, device="cuda", dtype=dtype)

    x = dict(q=normal(B, T, Hk, width), k=normal(B, T, Hk, width), v=normal(B, T, Hv, depth),
             g=-torch.rand(B, T, Hv, *((width,) if row["kda"] else ()), device="cuda") * 0.3, beta=torch.rand(B, T, Hv, device="cuda"),
             state=torch.randn(row["N"], Hv, depth, width, device="cuda") * 0.1, cu_seqlens=None)
    if row["T"] == 0 and cu_seqlens is None:
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
    x["cu_seqlens"] = cu_seqlens
    return x


def sweep_fla_call(function, x):
    options = {} if x["cu_seqlens"] is None else {"cu_seqlens": x["cu_seqlens"]}

    def run():
        return function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["state"],
                        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True, **options)

    return run


def sweep_weft_members(row, x, o, state_out):
    flat = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    sequences = weft_c.Sequences(count=row["N"])
    if x["cu_seqlens"] is not None:
        sequences = weft_c.Sequences(cu_seqlens=view(x["cu_seqlens"]), count=row["N"], max_tokens=max(sweep_shapes.RAGGED))
    gates = weft_c.Gates(g=view(flat["g"]), beta=view(flat["beta"]))
    states = weft_c.States(**{"in": view(x["state"]), "out": view(state_out)})
    return dict(q=view(flat["q"]), k=view(flat["k"]), v=view(flat["v"]), gates=gates, o=view(o.flatten(0, 1)), l2_norm=1,
                sequences=sequences, states=states)


def sweep_row(weft, functions, row):
    """One row of the report."""
    op = "gated_delta_rule_prefill"
    first = sweep_inputs(row)
    each = sum(value.nbytes for value in first.values() if value is not None) + first["v"].nbytes + first["state"].nbytes
    sets = [first] + [sweep_inputs(row, first["cu_seqlens"]) for _ in range(max(1, min(50, COLD_BYTES // each)) - (each > COLD_BYTES))]
    outs, finals = [torch.empty_like(x["v"]) for x in sets], [torch.empty_like(x["state"]) for x in sets]
    members = [sweep_weft_members(row, x, o, s) for x, o, s in zip(sets, outs, finals)]
    kernel, speed = weft.choose(op, **members[0])
    ours, theirs = [weft.call(op, **one) for one in members], [sweep_fla_call(functions[row["kda"]], x) for x in sets]
    ours[0]()
    found = {**row, "weft_us": None, "fla_us": None, "ratio": None, "kernel": kernel, "speed": speed}
    try:
        o, final = theirs[0]()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton and FLA raise
        found["fla_refused"] = f"{type(error).__name__}: {str(error).strip()[:120]}"
        theirs = None
    else:
        found["difference"] = round(max(distance(outs[0], o), distance(finals[0], final)), 6)
    started = time.perf_counter()
    for call in [ours[0], *([theirs[0]] if theirs else [])]:
        call()
    torch.cuda.synchronize()
    once = (time.perf_counter() - started) * torch_device.LEAST_CALLS
    replays = max(3, min(15, int(ROW_SECONDS / max(once, 1e-4)) - 2))
    try:
        times = torch_device.medians_us([ours, *([theirs] if theirs else [])], replays)
    except RuntimeError as error:  # a call that cannot be captured
        if not theirs:
            raise
        found["fla_refused"] = f"in a graph: {str(error).strip()[:120]}"
        theirs = None
        torch.cuda.synchronize()
        times = torch_device.medians_us([ours], replays)
    found["weft_us"] = round(times[0], 2)
    if theirs:
        found.update(fla_us=round(times[1], 2), ratio=round(times[1] / times[0], 3))
    return found


def warm(options, places):
    """Compiles the configurations that FLA's tuning tries, in several processes."""
    base = [sys.executable, __file__, "--sweep", "--json", "-", "--fla", str(options.fla)]
    workers = [subprocess.Popen([*base, "--compile", ",".join(map(str, places[index::options.warm]))])
               for index in range(min(options.warm, len(places)))]
    for worker in workers:
        worker.wait()


def compile_rows(functions, rows):
    """Runs FLA once, every configuration of its kernels included."""
    def once(run, quantiles):
        run()
        return [1.0, 1.0, 1.0]

    tune_by(once)
    for row in rows:
        try:
            sweep_fla_call(functions[row["kda"]], sweep_inputs({**row, "T": min(row["T"], 4096)}))()
            torch.cuda.synchronize()
        except Exception as error:  # the sweep itself reports it
            print(f"compiling {row}: {str(error).strip()[:100]}", file=sys.stderr)


def sweep(options):
    functions, rows = fla_sweep_functions(), sweep_shapes.delta()
    if options.compile:
        return compile_rows(functions, [rows[int(place)] for place in options.compile.split(",")])
    tune_by(short_measure)
    places = list(report.part(options.rows, len(rows)))
    if options.warm:
        tuned = {sweep_shapes.tuning(rows[place]): place for place in places}
        warm(options, list(tuned.values()))
    import fla
    import triton

    weft = torch_device.Weft(options.library)
    header = dict(device=torch.cuda.get_device_name(), driver=report.driver(torch.version.cuda), commit=options.commit or report.commit(),
                  versions={"torch": torch.__version__.partition("+")[0], "triton": triton.__version__,
                            "flash-linear-attention": fla.__version__},
                  command=report.command(),
                  note="Prefill, l2 norm inside, f32 states. T = 0: sequences of " + ", ".join(map(str, sweep_shapes.RAGGED))
                  + " tokens. difference: the larger relative RMS of outputs and states between the two; FLA multiplies f32 as tf32.")
    file = report.Report(options.json, header, rows, KEYS)
    failed = []
    for place in places:
        found = sweep_row(weft, functions, rows[place])
        file.add(found)
        print(place, *found.values(), flush=True)
        if not found.get("difference", 0) <= BARS[found["dtype"]]:
            failed.append(place)
        torch.cuda.empty_cache()
    print(f"== of {len(rows)} rows: {report.summary(list(file.rows.values()))}")
    if failed:
        raise SystemExit(f"rows {failed}: the two differ by more than {BARS}: not the same computation.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libweft.so with the cuda backend (default: build-shared-cuda/libweft.so)")
    parser.add_argument("--fla", type=pathlib.Path, help="folder with the unpacked wheels of flash-linear-attention and fla-core")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--only", choices=["prefill", "decode"])
    parser.add_argument("--sweep", action="store_true", help="the prefills of sweep_shapes.py, into --json")
    parser.add_argument("--json", metavar="FILE", help="of --sweep; rows that it has stay")
    parser.add_argument("--rows", metavar="A:B", help="a part of --sweep")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="of --sweep: first compile FLA's kernels in N processes")
    parser.add_argument("--commit", help="of the library, for --json (default: that of the working tree)")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sweep and not options.json:
        parser.error("--sweep wants --json FILE")
    torch_device.require()
    if options.sweep:
        fla_or_stop(options.fla)
        return sweep(options)
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
