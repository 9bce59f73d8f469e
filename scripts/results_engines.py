"""Tables of Weft inside or beside other engines: llama.cpp, weft serve, llama-server."""

from results_text import BASELINES, load, number, percent, ratio, source, span, table


WIDTHS = {"narrow": "width 1024, 16/32 heads", "0.8b": "0.8B, 16/16 heads", "9b": "9B, 16/32 heads"}


def llama_row(row):
    """The columns that name a row of llama.cpp: model, weights, threads; "*" where the machine was busy and time that passed counts."""
    shape, weights = row["model"].split("-")
    return [WIDTHS[shape], weights, f"{row['threads']}{' *' if llama_busy(row) else ''}"]


def llama_busy(row):
    return row["threads"] > 1 and row["load"] > 2.5


def llama_share(row, phase):
    """The share of both ops of the plain graph, in percent."""
    us = row[phase]["ops_us"]["plain"]
    return 100 * (us.get("GATED_DELTA_NET", 0) + us.get("SSM_CONV", 0)) / us["all"]


def llama():
    """Whole graphs of llama.cpp with and without libggml-weft.so."""
    rows = []
    for row in load("amd-epyc-zen4-llama")["rows"]:
        of = llama_row(row)
        for phase in ("prefill", "decode"):
            found = row[phase]
            of += [number(found["plain_us"]), number(found["weft_us"]), f"{found['gain']:.2f} x", percent(llama_share(row, phase))]
        rows.append(of)
    return table(["model", "weights", "threads", "prefill, us a token:", "with Weft:", "gain:", "share of the ops:",
                  "decode, us a token:", "with Weft:", "gain:", "share of the ops:"], rows) + llama_note()


def llama_note():
    """What a busy machine did to the figures."""
    data = load("amd-epyc-zen4-llama")
    loads = [row["load"] for row in data["rows"]]
    if max(loads) <= 2.5:
        return ""
    text = (f"\nMeasured on a busy machine: the load average was {span(loads, number)} on {data['machine']['processors']} processors. "
            "Other programs lengthen the time of the processor through caches and memory, by about the same factor with and without Weft.")
    return text + (" \\*: time that passed, with threads that waited for each other.\n" if any(map(llama_busy, data["rows"])) else "\n")


def llama_short():
    """The same for the README: one line a model and thread count."""
    rows = [[*llama_row(row), *(f"{row[phase]['gain']:.2f} x" for phase in ("prefill", "decode"))]
            for row in load("amd-epyc-zen4-llama")["rows"] if not llama_busy(row)]
    return table(["four layers of", "weights", "threads", "prefill with Weft:", "decode with Weft:"], rows)


def llama_ops():
    """Single ops inside those graphs."""
    rows = []
    for row in load("amd-epyc-zen4-llama")["rows"]:
        if row["threads"] != 1 or not row["model"].endswith("f32"):
            continue
        for phase, op in (("prefill", "GATED_DELTA_NET"), ("prefill", "SSM_CONV"), ("decode", "GATED_DELTA_NET")):
            plain, weft = (row[phase]["ops_us"][who][op] for who in ("plain", "weft"))
            rows.append([WIDTHS[row["model"].split("-")[0]], phase, f"`{op}`", number(plain), number(weft), ratio(plain / weft)])
    return table(["model", "phase", "op", "ggml, us a token:", "Weft:", "ggml / Weft:"], rows)


def llama_attention():
    rows = [[row["Hq/Hk/D"], number(row["context"]), str(row["queries"]), str(row["threads"]), number(row["ggml_us"]),
             number(row["weft_us"]), ratio(row["ggml_us"] / row["weft_us"])] for row in load("amd-epyc-zen4-llama")["attention"]]
    return table(["Hq/Hk/D", "context:", "queries:", "threads:", "ggml, us:", "Weft, us:", "ggml / Weft:"], rows)


def served():
    """The files of `make load` that are committed."""
    return sorted(file.stem for file in BASELINES.glob("*-serve.json"))


def serve(name):
    """Throughput and latency of weft serve, beside weft speed at the same batch."""
    data = load(name)
    speed = {row["batch"]: row["decode_tokens_per_second"] for row in data["speed"]}
    rows = [[str(run["clients"]), number(run["tokens_per_second"]), percent(100 * run["tokens_per_second"] / speed[run["clients"]]),
             *(number(run[kind][share]) for kind, share in (("first_token_ms", "p50"), ("first_token_ms", "p99"), ("between_tokens_ms", "p50"),
                                                            ("between_tokens_ms", "p99"), ("between_tokens_ms", "max")))]
            for run in data["runs"]]
    long, turn = data["long_prompts"], data["second_turn"]["first_token_ms"]
    return table(["clients:", "tokens/s:", "of `weft speed`:", "first token, ms, p50:", "p99:", "between tokens, ms, p50:", "p99:", "longest:"], rows) + (
        f"\nBeside prompts of about 1,500 tokens, {long['clients']} clients: between tokens p99 {number(long['between_tokens_ms']['p99'])} ms, longest "
        f"{number(long['between_tokens_ms']['max'])} ms; `--max-stall-ms` was {data['max_stall_ms']}.\n"
        f"\nSecond turn of a session of about 8,000 tokens: first token after {number(turn['second_turn'])} ms, {100 * turn['second_turn'] / turn['cold']:.1f} % of "
        f"the {number(turn['cold'])} ms of the first turn.\n")


def serve_sections():
    return "".join(f"\n## weft serve: {load(name)['device']}, {load(name)['processors']} processors\n\nThe bundled model; the server has "
                   f"{load(name)['server_threads']} threads, clients have cores of their own. The load average before was {load(name)['load_before']}. "
                   + source(name) + serve(name) for name in served())


def serve_llama_sections():
    """The second turn of a conversation with weft serve and with llama-server, from files of bench/serve_llama.py."""
    text = ""
    for file in sorted(BASELINES.glob("*-serve-llama.json")):
        data = load(file.stem)
        rows = [[who, number(data[key]["cold_ms"]), number(data[key]["second_turn_ms"]), f"{100 * data[key]['share']:.1f} %", str(data[key]["cached_tokens"])]
                for who, key in (("weft serve", "weft"), ("llama-server", "llama"))]
        text += (f"\n## weft serve beside llama-server: {data['device']}, {data['threads']} threads\n\nThe second turn of a conversation of {data['prompt']} tokens, "
                 f"which adds {data['new']}; {data['layers']} layers of the shape {data['shape']}, random weights: bf16 and KV {data['weft_kv']} in Weft, "
                 f"{data['llama_weights']} and KV f16 in llama-server. Milliseconds until the first token; medians of {len(data['weft']['rounds'])} rounds. "
                 f"The load average before was {data['load_before']:.1f}. " + source(file.stem)
                 + table(["server", "first turn, ms:", "second turn, ms:", "share:", "tokens not read again:"], rows))
    return text
