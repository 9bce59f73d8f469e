#!/usr/bin/env python3
"""Draws docs/pictures/*.svg: plots of the JSON files in bench/baselines/, and drawings of a hybrid layer and of the memory of sequences.

    scripts/pictures.py            writes them
    scripts/pictures.py --check    fails if one differs from what this script draws; exit status 77 without the same matplotlib
    scripts/pictures.py --png DIR  also writes PNG files, for a look
"""

import argparse
import io
import json
import os
import pathlib
import re
import sys

DEBIAN_PYTHON = "/usr/bin/python3"
try:
    import matplotlib
except ModuleNotFoundError:
    # Debian's matplotlib belongs to Debian's Python, which need not be the first in PATH.
    if os.path.exists(DEBIAN_PYTHON) and not os.path.samefile(sys.executable, DEBIAN_PYTHON) and "WEFT_PICTURES" not in os.environ:
        os.execve(DEBIAN_PYTHON, [DEBIAN_PYTHON, *sys.argv], {**os.environ, "WEFT_PICTURES": "1"})
    print("pictures.py needs matplotlib (Debian: python3-matplotlib; scripts/bootstrap.sh --with pictures)", file=sys.stderr)
    sys.exit(77)

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WEFT, WEFT_LIGHT, WEFT_PALE = "#0b6e6e", "#3fa7a0", "#d8efec"
PEER, PEER_PALE, INK, NOTE = "#8a8f98", "#eceef1", "#22262b", "#5b616a"
STATE, STATE_PALE = "#b3541e", "#fbe6d8"
plt.rcParams.update({
    "svg.hashsalt": "weft", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 11, "axes.edgecolor": "#b9bec6",
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": NOTE, "ytick.color": NOTE, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.facecolor": "white", "axes.facecolor": "white",
    "axes.grid": True, "grid.color": "#e6e8ec", "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 2, "lines.markersize": 6})


def load(name):
    return json.loads((ROOT / "bench" / "baselines" / f"{name}.json").read_text())


def short(value, _=None):
    """1024 as 1k, 2000000 as 2M: sizes of contexts are powers of two."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value // 1024:.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def thousands(value, _=None):
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def log_axes(axes, x_ticks, y_ticks, y_format=short):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(x_ticks))
    axes.yaxis.set_major_locator(FixedLocator(y_ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.yaxis.set_major_formatter(FuncFormatter(y_format))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())


def label(axes, x, y, text, color, **options):
    axes.annotate(text, (x, y), textcoords="offset points", color=color, fontsize=10, **{"xytext": (6, 0), "va": "center", **options})


def prefill():
    """Prefill of the gated delta rule beside FLA: time by tokens, and the ratio by shape."""
    rows = [r for r in load("nvidia-h200-fla")["rows"] if r["dtype"] == "bf16" and not r["kda"] and (r["K"], r["V"]) == (128, 128)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.3), gridspec_kw={"width_ratios": [1.15, 1]})
    line = sorted((r["T"], r["weft_us"] / 1e3, r["fla_us"] / 1e3) for r in rows if (r["Hk"], r["Hv"], r["N"]) == (16, 32, 1) and r["T"] >= 8192)
    tokens, weft, fla = zip(*line)
    left.plot(tokens, fla, "o-", color=PEER)
    left.plot(tokens, weft, "o-", color=WEFT)
    for x, y, z in line:
        label(left, x, z, f"{z:.2g}" if z < 10 else f"{z:.0f}", NOTE, xytext=(-7, 10), ha="center")
        label(left, x, y, f"{y:.2g}" if y < 10 else f"{y:.0f}", WEFT, xytext=(0, -13), ha="center")
    label(left, tokens[1], fla[1], "flash-linear-attention", NOTE, xytext=(-26, 16), ha="right")
    label(left, tokens[1], weft[1], "Weft", WEFT, xytext=(36, -16), ha="left", fontweight="bold")
    log_axes(left, tokens, [0.1, 0.2, 0.5, 1, 2, 5, 10], lambda v, _: f"{v:g}")
    left.set_ylim(0.12, 14)
    left.set_xlim(tokens[0] / 1.45, tokens[-1] * 1.35)
    left.set_xlabel("tokens of one sequence")
    left.set_ylabel("milliseconds")
    left.set_title("Prefill on an H200, 16/32 heads, bf16")

    shown = [(16, 32, 1, 8192), (16, 32, 1, 32768), (16, 32, 1, 131072), (16, 32, 4, 8192), (16, 32, 8, 1024), (16, 48, 1, 8192),
             (16, 64, 1, 8192), (16, 64, 1, 32768), (2, 8, 1, 8192), (2, 8, 1, 32768)]
    ratios = {(r["Hk"], r["Hv"], r["N"], r["T"]): r["ratio"] for r in rows}
    shown = [shape for shape in shown if shape in ratios]
    places = range(len(shown) - 1, -1, -1)
    values = [ratios[shape] for shape in shown]
    right.barh(places, values, color=[WEFT_LIGHT], height=0.62)
    right.axvline(1, color=PEER, linewidth=1.2)
    for place, value in zip(places, values):
        right.text(value + 0.07, place, f"{value:.1f}", va="center", fontsize=10)
    right.set_yticks(list(places), [f"{hk}/{hv}, {n} × {short(t)}" for hk, hv, n, t in shown])
    right.set_xlim(0, max(values) * 1.12)
    right.grid(axis="y", visible=False)
    right.set_xlabel("times as fast as flash-linear-attention")
    right.set_title("By heads, sequences × tokens")
    return figure


def attention():
    """One new token over a cache, by context: an H200 beside torch, and one CPU core beside its own f16."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.3))
    rows = [r for r in load("nvidia-h200-torch")["rows"] if (r["Hq"], r["Hk"], r["D"], r["N"], r["T"]) == (32, 8, 128, 1, 1)
            and r.get("layout", "tiles") == "tiles" and not r.get("paged")]
    lines = {"torch, bf16": sorted({(r["context"], r["torch_us"]) for r in rows if r["torch_us"]})}
    for recipe in ("8v4", "4v4"):
        lines[f"Weft {recipe}"] = sorted((r["context"], r["weft_us"]) for r in rows if r["recipe"] == recipe)
    cpu = [r for r in load("amd-epyc-zen4-1-thread")["rows"] if r["op"] == "compressed_attention"]
    cpu_lines = {"Weft f16": sorted((r["shape"]["context"], r["median_us"] / 1e3) for r in cpu if r["case"].startswith("decode_f16/"))}
    for recipe in ("8v4", "4v4"):
        cpu_lines[f"Weft {recipe}"] = sorted((r["shape"]["context"], r["median_us"] / 1e3) for r in cpu
                                             if r["case"].startswith(f"decode/recipe={recipe}/"))
    colors = [PEER, WEFT_LIGHT, WEFT]
    for axes, series, unit, title, ticks in ((left, lines, "microseconds", "H200, 32/8 heads of 128", [5, 10, 20, 50, 100, 200]),
                                             (right, cpu_lines, "milliseconds", "One Zen 4 core, the same heads", [0.1, 0.5, 1, 5, 10, 50])):
        for (name, points), color in zip(series.items(), colors):
            x, y = zip(*points)
            axes.plot(x, y, "o-", color=color)
            label(axes, x[-1], y[-1], name, NOTE if color == PEER else color, xytext=(8, 5 if name.endswith("8v4") else -5 if name.endswith("4v4") else 0))
        contexts = [x for x, _ in next(iter(series.values()))]
        log_axes(axes, contexts, ticks, lambda v, _: f"{v:g}")
        axes.set_xlim(contexts[0] / 1.4, contexts[-1] * (contexts[-1] / contexts[0]) ** 0.42)
        axes.set_xlabel("cached tokens")
        axes.set_ylabel(unit)
        axes.set_title(title)
    left.set_ylim(6, 200)
    right.set_ylim(0.08, 60)
    return figure


def quality():
    """Perplexity of the bundled model by bytes of KV cache per token."""
    rows = load("weft-11m-perplexity")["rows"]
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    axes.plot([r["bytes_per_token"] for r in rows if r["kv"] != "4v2"], [r["perplexity"] for r in rows if r["kv"] != "4v2"], "-", color=WEFT_PALE)
    for r in rows:
        first = r["kv"] == "f16"
        axes.plot(r["bytes_per_token"], r["perplexity"], "o", color=PEER if first else WEFT, markersize=8)
        label(axes, r["bytes_per_token"], r["perplexity"], r["kv"], NOTE if first else WEFT, xytext=(0, -14 if r["kv"] == "3v3" else 13), ha="center",
              fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({r["bytes_per_token"] for r in rows})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(225, 2500)
    axes.set_ylim(26.08, 26.74)
    axes.set_xlabel("bytes of cache per token (bits of keys v bits of values)")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title("What compressing the KV cache costs")
    return figure


def batch():
    """Decode of whole models: tokens per second by batch, and behind a long context by KV format."""
    rows = load("nvidia-h200-models")["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), gridspec_kw={"width_ratios": [1.3, 1]})
    models = {"weft-11m": "weft-11m", "random_checkpoint.py --shape 9b": "shapes of\nQwen3.5-9B"}
    for (model, name), color in zip(models.items(), (WEFT_LIGHT, WEFT)):
        points = sorted((r["batch"], r["decode_tokens_per_second"]) for r in rows
                        if r["model"] == model and r["kv"] == "8v4" and r["prompt"] == r["context"] == 512)
        x, y = zip(*points)
        left.plot(x, y, "o-", color=color)
        for a, b in points:
            label(left, a, b, f"{b:,.0f}", NOTE, xytext=(4, -12) if a > 1 else (8, -8), ha="left")
        label(left, x[-1], y[-1], name, color, xytext=(-10, 16), ha="right", fontweight="bold")
    log_axes(left, [1, 8, 32, 64], [100, 1e3, 1e4, 1e5], thousands)
    left.set_xlim(0.8, 150)
    left.set_ylim(100, 700e3)
    left.set_xlabel("sequences in a batch")
    left.set_ylabel("tokens per second, decode")
    left.set_title("H200, KV 8v4, 512 cached tokens")
    formats = ["f16", "8v4", "4v4"]
    long = {r["kv"]: r["decode_tokens_per_second"] for r in rows if r["context"] == 131072 and r["batch"] == 8}
    right.bar(formats, [long[kv] for kv in formats], color=[PEER, WEFT_LIGHT, WEFT], width=0.6)
    for place, kv in enumerate(formats):
        right.text(place, long[kv] + 15, f"{long[kv]:,.0f}", ha="center", fontsize=10)
    right.grid(axis="x", visible=False)
    right.set_ylim(0, max(long.values()) * 1.15)
    right.set_ylabel("tokens per second, decode")
    right.set_title("9B, batch 8, 131,072 cached tokens")
    return figure


# Drawings: boxes and arrows in a plane of arbitrary units.


def canvas(width, height, scale=0.1):
    figure = plt.figure(figsize=(width * scale, height * scale))
    axes = figure.add_axes([0, 0, 1, 1])
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, text, face=PEER_PALE, edge=PEER, color=INK, size=10, weight="normal", style="round"):
    shape = "round,pad=0,rounding_size=0.9" if style == "round" else "square,pad=0"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=face, edgecolor=edge, linewidth=1.2))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=color, fontweight=weight, linespacing=1.3)


def arrow(axes, start, end, color=NOTE, bend=0.0, style="-|>", dashed=False):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color=color, linewidth=1.4, shrinkA=0, shrinkB=0,
                                   linestyle=(0, (3, 2)) if dashed else "-", connectionstyle=f"arc3,rad={bend}"))


def chain(axes, y, height, items, gap=2.6):
    """Boxes from left to right with arrows between; returns the x range of each."""
    places = []
    x = items[0]
    for width, text, weft in items[1:]:
        face, edge = (WEFT_PALE, WEFT) if weft else (PEER_PALE, PEER)
        box(axes, x, y, width, height, text, face, edge, size=9.5)
        if places:
            arrow(axes, (places[-1][1], y + height / 2), (x, y + height / 2))
        places.append((x, x + width))
        x += width + gap
    return places


def layer():
    """A gated delta layer and an attention layer: which parts are Weft's ops, and what each remembers."""
    figure, axes = canvas(100, 50)
    text = lambda x, y, words, **o: axes.text(x, y, words, **{"fontsize": 10, "va": "center", **o})  # noqa: E731
    text(2, 46.6, "Gated delta layer", fontsize=12, fontweight="bold")
    text(21.5, 46.6, "three of four layers: memory of constant size", color=NOTE)
    top = chain(axes, 34.5, 8, [2, (13, "projections\nq k v, z, a, b", 0), (13, "short_conv\n4 tokens, SiLU", 1),
                                (27, "gated_delta_rule\ngates, l2 norm, prefill or decode", 1), (16, "gated_rms_norm\nwith z", 1),
                                (12, "output\nprojection", 0)], gap=3.7)
    box(axes, top[1][0] - 1.5, 26.3, 16, 4.6, "window, W − 1 rows", STATE_PALE, STATE, size=9.5)
    box(axes, top[2][0] + 5.5, 26.3, 16, 4.6, "state [Hv, V, K]", STATE_PALE, STATE, size=9.5)
    for x in (top[1][0] + 6.5, top[2][0] + 13.5):
        arrow(axes, (x, 34.4), (x, 31.0), STATE, style="<|-|>")
    axes.plot([2, 98], [23.6, 23.6], color="#dfe2e7", linewidth=1)
    text(2, 20.4, "Attention layer", fontsize=12, fontweight="bold")
    text(21.5, 20.4, "one of four layers: memory that grows with the context, compressed", color=NOTE)
    low = chain(axes, 9, 8, [2, (13, "projections\nq k v, gate", 0), (13, "q and k norm,\nrotary", 0), (13, "kv_encode\nrotate, quantise", 1),
                             (21, "compressed_attention\nover codes", 1), (11, "output gate", 0), (11, "output\nprojection", 0)], gap=2.75)
    left, right = low[2][0] + 6.5, low[3][0] + 10.5
    box(axes, left - 8, 0.9, right - left + 16, 4.6, "KV pages of 64 tokens, 2 to 8 bits per number", STATE_PALE, STATE, size=9.5)
    arrow(axes, (left, 8.9), (left, 5.6), STATE)
    arrow(axes, (right, 5.6), (right, 8.9), STATE)
    box(axes, 80, 45.2, 2.6, 2.6, "", WEFT_PALE, WEFT)
    text(83.3, 46.5, "Weft", fontsize=9.5)
    box(axes, 89.2, 45.2, 2.6, 2.6, "", STATE_PALE, STATE)
    text(92.5, 46.5, "memory", fontsize=9.5)
    return figure


def memory():
    """What two sequences remember after a fork: states and windows of their own, KV pages shared until one writes."""
    figure, axes = canvas(100, 47)
    text = lambda x, y, words, **o: axes.text(x, y, words, **{"fontsize": 10, "va": "center", **o})  # noqa: E731
    for x, words in ((15.5, "recurrent states"), (33, "convolution\nwindows"), (53, "list of KV pages")):
        text(x + 7 if words.startswith("list") else x + 6.5, 43.6, words, ha="center", color=NOTE)
    text(82, 43.6, "records for rollback", ha="center", color=NOTE)

    def sequence(y, name, entries, new):
        text(1.5, y + 3, name, fontsize=11.5, fontweight="bold")
        box(axes, 15.5, y, 13, 6, "[Hv, V, K]\nper delta layer", STATE_PALE, STATE, size=9)
        box(axes, 33, y, 13, 6, "W − 1 rows\nper delta layer", STATE_PALE, STATE, size=9)
        for i, entry in enumerate(entries):
            box(axes, 50.5 + 4.6 * i, y + 1, 4.6, 4, entry, "white", PEER, size=9, style="square", color=WEFT if entry == new else INK,
                weight="bold" if entry == new else "normal")
        box(axes, 75, y, 14, 6, "k, delta, g of\n≤ 16 tokens", "white", STATE, size=9)

    sequence(33.5, "sequence A", ["0", "1", "2", "3"], "3")
    sequence(4.5, "sequence B", ["0", "1", "2", "4"], "4")
    for i, words in enumerate(("page 0", "page 1", "page 2", "page 3", "page 4")):
        shared = i < 3
        box(axes, 33.5 + 11 * i, 18.6, 9.6, 6.8, f"{words}\n{'64 tokens' if shared else 'written by ' + 'AB'[i - 3]}", WEFT_PALE if shared else "white",
            WEFT, size=9, style="square")
    for i, page in enumerate((0, 1, 2, 3)):
        arrow(axes, (52.8 + 4.6 * i, 34.4), (38.3 + 11 * page, 25.6), WEFT)
    for i, page in enumerate((0, 1, 2, 4)):
        arrow(axes, (52.8 + 4.6 * i, 9.6), (38.3 + 11 * page, 18.4), WEFT)
    arrow(axes, (22, 33.3), (22, 10.7), STATE, dashed=True)
    note = ("fork(A, B) copies", "states and windows,", "and shares pages. A", "page that is partly", "filled is copied", "when one writes.")
    for i, line in enumerate(note):
        text(1.5, 28.2 - 2.5 * i, line, fontsize=9.5, color=STATE)
    text(15.5, 1.6, "rollback(n) cuts the list of pages, moves the window back, and replays the records that stay.", fontsize=9.5, color=NOTE)
    return figure


DRAWN = [prefill, attention, quality, batch, layer, memory]


def svg(figure):
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+\n", "\n", stream.getvalue())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--png", type=pathlib.Path)
    options = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    stale = []
    for draw in DRAWN:
        figure = draw()
        if draw not in (layer, memory):
            figure.tight_layout(w_pad=2.5)
        page, text = PICTURES / f"{draw.__name__}.svg", svg(figure)
        if options.png:
            options.png.mkdir(parents=True, exist_ok=True)
            figure.savefig(options.png / f"{draw.__name__}.png", dpi=100)
        plt.close(figure)
        before = page.read_text() if page.exists() else ""
        if options.check:
            if before and f"Matplotlib v{matplotlib.__version__}," not in before:
                print(f"pictures.py: {page.name} was drawn by another matplotlib than {matplotlib.__version__}: nothing to compare")
                sys.exit(77)
            if before != text:
                stale.append(page.name)
        else:
            page.write_text(text)
    if stale:
        sys.exit(f"pictures.py: stale: {', '.join(stale)}: run make pictures")


if __name__ == "__main__":
    main()
