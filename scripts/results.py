#!/usr/bin/env python3
"""Writes bench/RESULTS.md, and the tables between result markers in other documents, from the JSON files in bench/baselines/.

    scripts/results.py            rewrites them
    scripts/results.py --check    fails, with the difference, if one of them is stale

A document takes the table NAME of this script between the lines "<!-- results:NAME:begin -->" and "<!-- results:NAME:end -->".
"""

import difflib
import json
import re
import subprocess
import sys

from results_engines import llama, llama_attention, llama_ops, llama_short, serve_llama_sections, serve_sections
from results_text import BASELINES, ROOT, load, number, percent, plain_rules, ratio, source, span, table

RESULTS = ROOT / "bench" / "RESULTS.md"
MARKER = re.compile(r"(<!-- results:([a-z0-9_]+):begin -->\n)(.*?)(<!-- results:\2:end -->)", re.S)


def older_slow_shapes():
    """Slow calls that were timed before the sweeps; {} once the file is gone."""
    return load("nvidia-h200-slow-shapes") if (BASELINES / "nvidia-h200-slow-shapes.json").exists() else {}


# Tables by name. A function returns markdown.


def h200_prefill():
    rows = [[f"{r['Hk']}/{r['Hv']}", f"{r['K']}, {r['V']}", f"{r['N']} x {r['T'] or 'ragged'}", r["dtype"],
             "per channel" if r["kda"] else "per head", number(r["weft_us"]), number(r["fla_us"]), ratio(r["ratio"]), f"`{r['kernel']}`"]
            for r in load("nvidia-h200-fla")["rows"]]
    return table(["Hk/Hv", "K, V", "sequences x tokens", "dtype", "decay", "Weft, us:", "FLA, us:", "FLA / Weft:", "Weft's kernel"], rows)


def h200_decode():
    rows = [[f"{r['Hk']}/{r['Hv']}", str(r["N"]), r["state"], number(r["weft_us"]), number(r["fla_us"]), ratio(r["ratio"])]
            for r in load("nvidia-h200-fla-decode")["rows"]]
    return table(["Hk/Hv", "sequences:", "states", "Weft, us:", "FLA, us:", "FLA / Weft:"], rows)


def attention_shape(r):
    return (r["Hq"], r["Hk"], r["D"], r["N"], r["context"], r["T"])


def usual_caches():
    """Rows beside torch, in the layout that kernels read fastest."""
    return [r for r in load("nvidia-h200-torch")["rows"] if r.get("layout", "tiles") == "tiles" and not r.get("paged")]


def h200_attention():
    data = usual_caches()
    if any("layout" in r for r in data):
        return h200_attention_sweep()
    recipes = list(dict.fromkeys(r["recipe"] for r in data))
    coded = [name for name in recipes if name != "f16"]
    rows = []
    for shape in dict.fromkeys(map(attention_shape, data)):
        of = {r["recipe"]: r for r in data if attention_shape(r) == shape}
        hq, hk, d, n, context, t = shape
        row = [f"{hq}/{hk}, {d}", f"{n} x {context}", str(t), number(of[coded[0]]["torch_us"])]
        for name in coded:
            row += [number(of[name]["weft_us"]), ratio(of[name]["ratio"])]
        rows.append(row + ([number(of["f16"]["weft_us"]) if "f16" in of else ""] if "f16" in recipes else []))
    heads = ["Hq/Hk, D", "sequences x context", "new tokens:", "torch bf16:"]
    for name in coded:
        heads += [f"Weft {name}:", "ratio:"]
    return table(heads + (["Weft f16:"] if "f16" in recipes else []), rows)


def h200_attention_sweep():
    """A row per shape and cache."""
    rows = [[f"{r['Hq']}/{r['Hk']}, {r['D']}", f"{r['N']} x {r['context']}", str(r["T"]), r["recipe"],
             r.get("layout", "tiles") + (", paged" if r.get("paged") else ""), number(r["weft_us"]), number(r["torch_us"]), ratio(r["ratio"]),
             f"`{r['kernel']}`" if "kernel" in r else ""] for r in load("nvidia-h200-torch")["rows"]]
    return table(["Hq/Hk, D", "sequences x context", "new tokens:", "cache", "layout", "Weft, us:", "torch bf16, us:", "torch / Weft:",
                  "Weft's kernel"], rows)


def h200_attention_short():
    """Heads of 128 and 256, two recipes: for pages with less room."""
    data = [r for r in usual_caches() if r["recipe"] in ("4v4", "8v4") and r["D"] in (128, 256)]
    rows = []
    for shape in dict.fromkeys(map(attention_shape, data)):
        of = {r["recipe"]: r for r in data if attention_shape(r) == shape}
        if len(of) < 2:
            continue
        hq, hk, d, n, context, t = shape
        rows.append([f"{hq}/{hk}, {d}", f"{n} x {context}", str(t), number(of["4v4"]["torch_us"]), number(of["4v4"]["weft_us"]),
                     ratio(of["4v4"]["ratio"]), number(of["8v4"]["weft_us"]), ratio(of["8v4"]["ratio"])])
    return table(["Hq/Hk, D", "sequences x context", "new tokens:", "torch bf16, us:", "Weft 4v4, us:", "ratio:", "Weft 8v4, us:", "ratio:"], rows)


def h200_slow_prefill():
    rows = [[f"{r['Hk']}/{r['Hv']}", f"{r['K']}, {r['V']}", f"{r['N']} x {r['T']}", r["dtype"], "per channel" if r["kda"] else "per head",
             number(r["weft_us"]), number(r["fla_us"]), ratio(r["ratio"])] for r in older_slow_shapes()["prefill"]]
    return table(["Hk/Hv", "K, V", "sequences x tokens", "dtype", "decay", "Weft, us:", "FLA, us:", "FLA / Weft:"], rows)


def h200_slow_attention():
    rows = [[f"{r['Hq']}/{r['Hk']}, {r['D']}", f"{r['N']} x {r['context']}", str(r["T"]), r["recipe"], number(r["weft_us"]),
             number(r["torch_us"]), ratio(r["ratio"])] for r in older_slow_shapes()["attention"]]
    return table(["Hq/Hk, D", "sequences x context", "new tokens:", "cache", "Weft, us:", "torch bf16, us:", "torch / Weft:"], rows)


def slow_shapes():
    """The section about them."""
    if not older_slow_shapes():
        return ""
    return ("\n### Legal calls that had no fast kernel in version 0.1\n\n" + source("nvidia-h200-slow-shapes") + h200_slow_prefill() + "\n"
            + h200_slow_attention())


def speed_of_shapes():
    """How Weft's cuda kernels stand beside FLA and torch, by class of call."""
    fla, decode, torch = (load(f"nvidia-h200-{name}") for name in ("fla", "fla-decode", "torch"))
    slow = older_slow_shapes()
    prefill_key = lambda r: tuple(r[key] for key in ("Hk", "Hv", "K", "V", "N", "T", "dtype", "kda"))  # noqa: E731
    known = set(map(prefill_key, fla["rows"]))
    # Older figures of slow shapes count only until the sweeps have all kinds of calls.
    older = [] if any(r["kda"] for r in fla["rows"]) else slow.get("prefill", [])
    prefills = [r for r in fla["rows"] + [r for r in older if prefill_key(r) not in known] if r["ratio"] is not None]
    known = {(*attention_shape(r), r["recipe"]) for r in torch["rows"]}
    older = [] if any(r["T"] == 1 and r.get("layout") == "rows" for r in torch["rows"]) else slow.get("attention", [])
    attentions = torch["rows"] + [r for r in older if (*attention_shape(r), r["recipe"]) not in known]
    attentions = [r for r in attentions if r["ratio"] is not None]
    own = {"4v4", "8v4", "4v2", "3v3", "8v8", "2v2"}

    def prefill_class(r):
        if r["kda"]:
            return 1
        if r["dtype"] == "f32":
            return 2
        return 3 if r["K"] > 128 or r["K"] % 16 or r["V"] % 16 else 0

    def attention_class(r):
        if r["T"] == 1 and (r.get("layout") == "rows" or r.get("paged")):
            return 6
        if r["recipe"].startswith(("aura", "tq", "f32")):
            return 7
        coded = r["recipe"] not in ("f16", "bf16")
        if r["T"] == 1:
            return 1 if coded and r["recipe"] not in own else 2 if r["D"] not in (64, 128, 256) else 0
        if r["D"] == 64:
            return 8
        return 5 if coded and r["recipe"] not in own else 4 if coded and r["D"] == 256 else 3

    prefill_words = ["prefill, f16 or bf16, decay per head, K ≤ 128, K and V multiples of 16", "prefill, decay per channel (KDA)",
                     "prefill, f32 inputs", "prefill, K > 128, or sizes that are no multiple of 16"]
    attention_words = ["attention, one new token; 4v4, 8v4, 4v2, 3v3; D = 128, 256; tiles", "attention, one new token, pairs of bits such as 5v3 or 7v6",
                       "attention, one new token, other D", "attention, prompts over f16, bf16 and coded caches, D = 128 (f16, bf16: 256 too)",
                       "attention, prompts over coded caches, D = 256", "attention, prompts, pairs of bits such as 5v3",
                       "attention, one new token, caches in rows or paged", "attention, AURA and TQ tables, f32 sides",
                       "attention, prompts, D = 64"]
    rows = []

    def add(words, beside, measured):
        if measured:
            ratios = [r["ratio"] for r in measured]
            low, high = min(ratios), max(ratios)
            verdict = "fast" if low >= 0.95 else "slow" if high < 0.5 else "behind"
            rows.append([words, beside, span(ratios, ratio), "older kernel" if any(r.get("replaced") for r in measured) else verdict])

    add(prefill_words[0], "FLA", [r for r in prefills if prefill_class(r) == 0])
    add("decode of the rule, f32 and bf16 states", "FLA", decode["rows"])
    add(attention_words[0], "torch bf16", [r for r in attentions if attention_class(r) == 0])
    for i in (3, 4):
        add(attention_words[i], "torch bf16", [r for r in attentions if attention_class(r) == i])
    for i in (1, 2, 3):
        add(prefill_words[i], "FLA", [r for r in prefills if prefill_class(r) == i])
    for i in (1, 2, 5, 6, 7, 8):
        add(attention_words[i], "torch bf16", [r for r in attentions if attention_class(r) == i])
    bench = {r["case"]: r for r in load("nvidia-h200")["rows"] if r["op"] == "compressed_attention"}
    tiles, in_rows = bench["decode/recipe=4v4/context=16384"], bench["decode_rows/context=16384"]
    add("attention over 4v4 in `rows` layout, 16384 tokens", "Weft from `tiles`",
        [{"ratio": tiles["median_us"] / in_rows["median_us"], "replaced": in_rows["kernel"].endswith(".decode_any")}])
    return table(["call on cuda", "beside", "speed of Weft (1: the same):", "verdict"], rows)


def h200_models():
    rows = [[r["model"], r["kv"], str(r["batch"]), str(r["prompt"]), str(r["context"]), number(r["prefill_tokens_per_second"]),
             number(r["decode_tokens_per_second"]), number(1e3 * r["batch"] / r["decode_tokens_per_second"]),
             number(r["planned_bytes"] / 1e9)] for r in load("nvidia-h200-models")["rows"]]
    return table(["model", "KV", "batch:", "prompt:", "context:", "prefill, tokens/s:", "decode, tokens/s:", "ms a step:", "GB planned:"], rows)


def h200_models_short():
    names = {"weft-11m": "weft-11m", "random_checkpoint.py --shape 9b": "shapes of Qwen3.5-9B"}
    rows = [[names[r["model"]], str(r["batch"]), f"{r['prompt']:,}", number(r["prefill_tokens_per_second"]),
             number(r["decode_tokens_per_second"]), number(1e3 * r["batch"] / r["decode_tokens_per_second"])]
            for r in load("nvidia-h200-models")["rows"] if r["kv"] == "8v4" and r["model"] in names and r["context"] == r["prompt"]]
    return table(["model", "batch:", "prompt:", "prefill, tokens/s:", "decode, tokens/s:", "ms a step:"], rows)


def h200_long_context():
    rows = [r for r in load("nvidia-h200-models")["rows"] if r["context"] == 131072]
    lines = []
    for kv in ("f16", "8v4", "4v4"):
        one, eight = (next(r for r in rows if r["kv"] == kv and r["batch"] == batch) for batch in (1, 8))
        lines.append([kv, number(one["decode_tokens_per_second"]), number(eight["decode_tokens_per_second"]), number(eight["planned_bytes"] / 1e9)])
    return table(["KV", "batch 1, tokens/s:", "batch 8, tokens/s:", "memory at batch 8, GB:"], lines)


def shape_text(shape):
    words = []
    if "N" in shape or "T" in shape:
        words.append(f"{shape.get('N', 1)} x {shape.get('T', shape.get('context', 1))}")
    if "Hq" in shape:
        words.append(f"over {shape['context']}, {shape['Hq']}/{shape['Hk']} heads of {shape['D']}, {shape['recipe']} in {shape['layout']}")
    elif "Hk" in shape and "Hv" in shape:
        words.append(f"{shape['Hk']}/{shape['Hv']} heads, K {shape['Dk']}, V {shape['Dv']}")
    elif "Hk" in shape:
        words.append(f"{shape['Hk']} heads of {shape.get('D')}")
    elif "Hv" in shape:
        words.append(f"{shape['Hv']} heads")
    if "C" in shape:
        words.append(f"{shape['C']} channels")
    if "dtype" in shape:
        words.append(shape["dtype"])
    if shape.get("state") in ("f32", "f16", "bf16"):
        words.append(f"{shape['state']} states")
    return ", ".join(words).replace(", over", " over")


def h200_ops():
    rows = [[f"`{r['op']}`", r["case"], shape_text(r["shape"]), f"`{r['kernel']}`", number(r["median_us"]), number(r["mad_us"]),
             number(r["gbps"]), number(r["gflops"] / 1e3), percent(r["roofline_pct"])] for r in load("nvidia-h200")["rows"]]
    return table(["op", "case", "shape", "kernel", "median, us:", "MAD, us:", "GB/s:", "TFLOP/s:", "roofline:"], rows)


def zen4_ops():
    key = lambda r: (r["op"], r["case"])  # noqa: E731
    two, avx2 = ({key(r): r for r in load(f"amd-epyc-zen4-{name}")["rows"]} for name in ("2-threads", "avx2"))
    rows = []
    for r in load("amd-epyc-zen4-1-thread")["rows"]:
        others = [number(other[key(r)]["median_us"]) if key(r) in other else "" for other in (two, avx2)]
        rows.append([f"`{r['op']}`", r["case"], shape_text(r["shape"]), number(r["median_us"]), number(r["mad_us"]), *others,
                     number(r["gbps"]), number(r["gflops"]), percent(r["roofline_pct"])])
    return table(["op", "case", "shape", "1 thread, us:", "MAD, us:", "2 threads, us:", "AVX2, 1 thread, us:", "GB/s:", "GFLOP/s:", "roofline:"], rows)


def zen4_hot():
    cold = {r["case"]: r["median_us"] for r in load("amd-epyc-zen4-1-thread")["rows"] if r["op"] == "gated_delta_rule_decode"}
    rows = [[r["case"], shape_text(r["shape"]), number(r["median_us"]), number(cold.get(r["case"]))] for r in load("amd-epyc-zen4-hot-decode")["rows"]]
    return table(["case", "shape", "from the cache, us:", "cold, us:"], rows)


def zen4_state():
    return table(["what", "result", "detail"], [[r["name"], r["value"], r["detail"]] for r in load("amd-epyc-zen4-state")["rows"]])


def zen4_models():
    rows = [[r["model"], r["kv"], str(r["batch"]), number(r["prefill_tokens_per_second"]), number(r["decode_tokens_per_second"])]
            for r in load("amd-epyc-zen4-models")["rows"]]
    return table(["model", "KV", "batch:", "prefill, tokens/s:", "decode, tokens/s:"], rows)


def zen4_peers_rule():
    rows = []
    for r in load("amd-epyc-zen4-peers")["gated_delta_rule"]:
        medians = {who: result["median"] for who, result in r["results"].items()}
        rows.append([r["work"], r["Hk/Hv/D"], str(r["T"]), *(number(medians[who]) for who in ("weft", "onnxruntime", "ggml")),
                     *(ratio(medians[who] / medians["weft"]) for who in ("onnxruntime", "ggml"))])
    return table(["work", "Hk/Hv/D", "T:", "Weft, us a token:", "onnxruntime:", "ggml:", "onnxruntime / Weft:", "ggml / Weft:"], rows)


def zen4_peers_attention():
    data = load("amd-epyc-zen4-peers")
    steps, rows = data["compressed_attention"], []
    for error in data["errors"]:
        who = error["who"]
        medians = [step["results"][who]["median"] for step in steps]
        over = [step["results"][who]["median"] / step["results"]["weft 4v4"]["median"] for step in steps]
        rows.append([who, str(error["bytes/token/head"]), *map(number, medians), "" if who == "weft 4v4" else span(over, ratio),
                     f"{error['kernel: float64, same cache']:.1e}", f"{error['all: float64, exact K and V']:.1e}"])
    heads = ["who", "bytes per token and head:", *(f"{step['context']} tokens, ms:" for step in steps)]
    return table(heads + ["time / Weft 4v4:", "error of the kernel:", "error with the format:"], rows)


def zen4_dense():
    data = load("amd-epyc-zen4-dense")["rows"]
    shapes = list(dict.fromkeys((r["tokens"], r["outputs"], r["inputs"]) for r in data))
    rows = [[who, *(number(r["us"]) for r in data if r["who"] == who)] for who in dict.fromkeys(r["who"] for r in data)]
    return table(["tokens x outputs x inputs, us", *(f"{t} x {o} x {i}:" for t, o, i in shapes)], rows)


def perplexity():
    data = load("weft-11m-perplexity")["rows"]
    cuda = {r["kv"]: r["perplexity"] for r in load("nvidia-h200-perplexity")["rows"]}
    least = data[0]["perplexity"]
    rows = [[r["kv"], f"{r['perplexity']:.3f}", f"{100 * (r['perplexity'] / least - 1):.2f} %", str(r["bytes_per_token"]),
             f"{10**9 // r['bytes_per_token']:,}", f"{cuda[r['kv']]:.3f}" if r["kv"] in cuda else ""] for r in data]
    return table(["KV", "perplexity:", "above f16:", "bytes a token:", "tokens in 1 GB:", "on an H200:"], rows)


def headline():
    """Three figures for the README, each with its command."""
    fla, torch = load("nvidia-h200-fla"), load("nvidia-h200-torch")
    rule = next(r for r in fla["rows"] if (r["Hk"], r["Hv"], r["K"], r["V"], r["N"], r["T"], r["dtype"], r["kda"])
                == (16, 32, 128, 128, 1, 32768, "bf16", 0))
    step = next(r for r in torch["rows"] if attention_shape(r) == (32, 8, 128, 8, 32768, 1) and r["recipe"] == "4v4"
                and r.get("layout", "tiles") == "tiles" and not r.get("paged"))
    peers = load("amd-epyc-zen4-peers")["gated_delta_rule"]
    core = next(r["results"] for r in peers if (r["work"], r["Hk/Hv/D"], r["T"]) == ("prefill", "16/32/128", 8192))
    weft, ort = core["weft"]["median"], core["onnxruntime"]["median"]
    return table(["what", "Weft", "beside", "command"], [
        ["prefill of the gated delta rule, 32,768 tokens, 16/32 heads, bf16, H200", f"{number(rule['weft_us'])} us",
         f"{number(rule['fla_us'])} us, flash-linear-attention ({rule['fla_us'] / rule['weft_us']:.1f} x)", "`bench/versus_fla.py`"],
        ["attention step of 8 sequences with 32,768 cached tokens each, 32/8 heads of 128, 4-bit cache, H200", f"{number(step['weft_us'])} us",
         f"{number(step['torch_us'])} us, torch over bf16 ({step['torch_us'] / step['weft_us']:.1f} x)", "`bench/versus_torch.py`"],
        ["prefill of the same rule, f32, one Zen 4 core", f"{number(weft)} us a token",
         f"{number(ort)} us a token, onnxruntime ({ort / weft:.1f} x)", "`make peers`"]])


def duration(seconds):
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def transformers_gain():
    """A hybrid model of transformers, unpatched beside patched, on a CPU and on a GPU."""
    rows = []
    for machine, file in (("2 Zen 4 cores", "amd-epyc-zen4-transformers"), ("H200, unpatched by FLA", "nvidia-h200-transformers")):
        for row in load(file)["results"]:
            times = [duration(row["seconds"][who][part]) for part in ("delta", "whole") for who in ("unpatched", "patched")]
            gain = row["gain"]
            rows.append([machine, row["dtype"], f"{row['phase']}, {row['tokens']} tokens", *times[:2], f"{gain['delta']:.1f} x", *times[2:],
                         f"{gain['whole']:.2f} x of {row['bound']:.2f} x"])
    return table(["machine", "dtype", "work", "delta layers", "patched", "gain", "whole model", "patched", "gain of the most possible"], rows)


def transformers_cache():
    """Bytes of the cache of the same model."""
    found = load("amd-epyc-zen4-transformers")["cache"]
    return table(["kv", "tokens", "cache"], [[row["kv"], f"{row['tokens']:,}", f"{row['bytes'] / 2**20:.0f} MiB"] for row in found])


def machines():
    rows = []
    for file in sorted(BASELINES.glob("*.json")):
        data = json.loads(file.read_text())
        of = data.get("commit") or data.get("printed_in")
        roof = data.get("roofline")
        roof = f"{number(roof['gflops'])} GFLOP/s, {number(roof['read_gbps'])} GB/s read, {number(roof['rmw_gbps'])} GB/s in place" if roof else ""
        rows.append([f"[`{file.name}`](baselines/{file.name})", data["device"], data.get("driver", ""), of[:7] if of else data["version"], roof])
    return table(["file", "device", "driver", "commit or version", "measured roofline"], rows)


BENCH_CPU = "weft bench --backend cpu --threads 1 --json -o FILE    (2 threads: --threads 2; AVX2: --threads 1 --isa avx2)"
MODELS = """weft speed --backend cuda --model models/weft-11m --batch 1 8 64 --compare 8v4 f16 --json
    weft speed --backend cuda --model models/weft-11m --batch 16 --prompt 2048 --json
    weft speed --backend cuda --model models/weft-11m --batch 1 64 --exact --json
    weft speed --backend cuda --model models/weft-11m --batch 16 --prompt 2048 --exact --json
    scripts/random_checkpoint.py --shape 9b DIR
    weft speed --backend cuda --model DIR --compare 4v4 8v4 f16 --batch 1 8 32 --json
    weft speed --backend cuda --model DIR --compare 4v4 8v4 f16 --batch 1 --prompt 32768 --json
    weft speed --backend cuda --model DIR --compare 4v4 8v4 f16 --batch 1 8 --context 131072 --json"""


def results():
    peers = load("amd-epyc-zen4-peers")["commands"]
    versions = lambda name: ", ".join(f"{who} {version}" for who, version in load(name)["versions"].items())  # noqa: E731
    sections = [
        "# Measurements\n\nFor readers who want a number with its device, commit and command. `scripts/results.py` writes this page from "
        "the JSON files in `bench/baselines/` (`make results`); do not edit it. [README.md](README.md) says how Weft is measured.\n\n"
        "Shapes: 16/32 heads are Hk/Hv of the gated delta rule, 32/8 heads are Hq/Hk of attention, 4 x 8192 is 4 sequences of 8192 tokens, "
        "and 4v2 is a cache with 4 bits for keys and 2 bits for values. A ratio above 1 means that Weft is faster. Times are "
        "medians, with cold caches. MAD is the median absolute deviation.\n\n## Files\n\n" + machines(),
        "\n## NVIDIA H200\n\n### How fast each class of call is\n\nFrom the tables below. `fast`: no measured shape is behind the peer by more "
        "than 5 %. `slow`: every measured shape takes more than twice the peer's time. `behind`: between the two. "
        "`older kernel`: measured with a kernel that these calls do not choose now.\n\n" + speed_of_shapes(),
        f"\n### Prefill of the gated delta rule beside flash-linear-attention\n\n{versions('nvidia-h200-fla')}. " + source("nvidia-h200-fla")
        + h200_prefill(),
        "\n### Decode of the gated delta rule beside flash-linear-attention\n\n" + source("nvidia-h200-fla-decode") + h200_decode(),
        f"\n### Attention beside torch\n\n{versions('nvidia-h200-torch')}, microseconds. " + source("nvidia-h200-torch") + h200_attention(),
        slow_shapes(),
        "\n### Whole models\n\n" + source("nvidia-h200-models", MODELS, note=False) + h200_models(),
        "\n### Every op\n\n" + source("nvidia-h200", "weft bench --backend cuda --repeat 25 --json -o FILE") + h200_ops(),
        "\n## AMD EPYC (Zen 4), two cores of a virtual machine\n\n### Gated delta rule beside onnxruntime and ggml\n\n"
        f"{versions('amd-epyc-zen4-peers')}; one thread, f32. " + source("amd-epyc-zen4-peers", peers["gated_delta_rule"]) + zen4_peers_rule(),
        "\n### One attention step beside onnxruntime and ggml\n\n32/8 heads of 128, one thread. Errors are relative RMS against float64 at 1024 "
        "tokens. " + source("amd-epyc-zen4-peers", peers["compressed_attention"]) + zen4_peers_attention(),
        "\n### Whole models\n\n" + source("amd-epyc-zen4-models") + zen4_models(),
        "\n### A model of transformers, unpatched beside patched\n\nQwen3.5-0.8B's shapes with random weights, 24 layers, KV 8v4 where patched, "
        "two threads on the CPU. Delta layers are timed without their projections. The most possible gain of the whole model is that of delta and attention "
        "layers that take no time. " + source("amd-epyc-zen4-transformers") + source("nvidia-h200-transformers") + transformers_gain() + "\n"
        + transformers_cache(),
        "\n### llama.cpp with and without libggml-weft.so\n\nFour layers (three gated delta networks, one attention), random weights, a "
        "prompt of 512 tokens and single tokens after it. One thread: time of the processor; two: the time that passed. The share is that of "
        "`GATED_DELTA_NET` and `SSM_CONV` in the time of the plain graph with one thread. " + source("amd-epyc-zen4-llama") + llama()
        + "\nThe ops inside these graphs, f32 weights, one thread, all layers together:\n\n" + llama_ops()
        + "\n`FLASH_ATTN_EXT` over an f16 cache in llama.cpp's layout, which the plug-in leaves to ggml "
        "([why](../docs/lab/llama-cpp.md)):\n\n"
        + llama_attention(),
        "\n### The memory of sequences\n\nThe bundled model, KV 8v4. " + source("amd-epyc-zen4-state", "weft bench state --json -o FILE") + zen4_state(),
        "\n### Dense layers beside OpenBLAS\n\n" + source("amd-epyc-zen4-dense") + zen4_dense(),
        "\n### Decode from the cache\n\n"
        + source("amd-epyc-zen4-hot-decode", "weft bench --backend cpu --threads 1 --hot --op gated_delta_rule_decode --json -o FILE") + zen4_hot(),
        "\n### Every op\n\nAVX-512 with VNNI unless a column says AVX2; rates and roofline are of one thread. "
        + source("amd-epyc-zen4-1-thread", BENCH_CPU) + zen4_ops(),
        serve_sections(),
        serve_llama_sections(),
        "\n## Quality of the KV formats\n\nThe bundled model on held-out text, 20,323 tokens in windows of 2048. "
        + source("weft-11m-perplexity") + perplexity(),
    ]
    return plain_rules("".join(sections))


TABLES = {f.__name__: f for f in (headline, speed_of_shapes, h200_prefill, h200_decode, h200_attention_short, h200_models_short,
                                  h200_long_context, perplexity, zen4_state, zen4_peers_rule, zen4_peers_attention,
                                  transformers_gain, transformers_cache, llama, llama_short)}


def documents():
    """Every page that has result markers, as it should be."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    for name in filter(None, pages):
        page = ROOT / name
        text = page.read_text() if page.exists() else ""
        if "<!-- results:" not in text or page == RESULTS:
            continue

        def made(match):
            if match.group(2) not in TABLES:
                sys.exit(f"results.py: {name} asks for the table '{match.group(2)}'; there are: {', '.join(TABLES)}")
            return match.group(1) + plain_rules(TABLES[match.group(2)]()) + match.group(4)

        yield page, MARKER.sub(made, text)


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = False
    for page, text in [(RESULTS, results()), *documents()]:
        before = page.read_text() if page.exists() else ""
        if before == text:
            continue
        if check:
            stale = True
            name = str(page.relative_to(ROOT))
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), name, f"{name} from bench/baselines"))
        else:
            page.write_text(text)
    if stale:
        sys.exit("results.py: stale pages: run make results")


if __name__ == "__main__":
    main()
