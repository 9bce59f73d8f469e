#!/usr/bin/env python3
"""Times llama.cpp with and without libggml-weft.so by turns, on models of random weights, and attention of ggml beside Weft's.

    scripts/llama.sh --tests
    .venv-llama/bin/python bench/llama.py --json bench/baselines/amd-epyc-zen4-llama.json
    .venv-llama/bin/python bench/llama.py --models narrow-f32 --rounds 3 --no-attention

Two processes have the same model open, one of them with the plug-in. In every round each runs a prompt and some single tokens, the order
alternating. A time is the median of the rounds, a spread is that of the rounds' own ratios. With one thread it is time of the processor,
which other programs do not lengthen, with more threads it is the time that passed. The times of single ops come from runs with one thread
that llama.cpp observes node by node.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build-llama"
PLUGIN = BUILD / "libggml-weft.so"
TOKENS, STEPS = 512, 16
# name: (shape of scripts/random_gguf.py, type of the weights)
MODELS = {f"{shape}-{kind}": (shape, kind) for shape in ("narrow", "0.8b", "9b") for kind in ("f32", "q8_0", "q4_k")}
ATTENTION = [(1024, 1, 32, 8, 128), (8192, 1, 32, 8, 128), (8192, 1, 16, 4, 256), (2048, 512, 16, 4, 256)]


def environment(plugin):
    clean = {name: value for name, value in os.environ.items() if name not in ("GGML_BACKEND_PATH", "GGML_WEFT_STATS")}
    return {**clean, "GGML_BACKEND_PATH": str(PLUGIN)} if plugin else clean


def make_model(folder, shape, kind):
    """The path of a model of four layers."""
    file = folder / f"{shape}-{kind}.gguf"
    if file.exists():
        return file
    source = folder / f"{shape}-{kind if kind != 'q4_k' else 'f32'}.gguf"
    if not source.exists():
        command = [sys.executable, ROOT / "scripts/random_gguf.py", "--shape", shape, "--type", source.stem.split("-")[1], source]
        subprocess.run([str(part) for part in command], check=True)
    if kind == "q4_k":
        subprocess.run([str(BUILD / "bin/llama-quantize"), "--pure", str(source), str(file), "Q4_K"], check=True, capture_output=True)
    return file


class Side:
    """A process with the model open, which measures once for every line."""

    def __init__(self, model, threads, plugin):
        command = [BUILD / "drive", model, BUILD / "bin", threads, "time", TOKENS, STEPS]
        self.process = subprocess.Popen([str(part) for part in command], env=environment(plugin), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def turn(self):
        """Seconds of the prompt, and the median seconds of single tokens."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        prompt, *steps = map(float, self.process.stdout.readline().split())
        return prompt, statistics.median(steps)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(model, threads, rounds):
    sides = {"plain": Side(model, threads, False), "weft": Side(model, threads, True)}
    turns = {"plain": [], "weft": []}
    for who in sides:
        sides[who].turn()  # touches the memory
    for i in range(rounds):
        for who in ("plain", "weft") if i % 2 == 0 else ("weft", "plain"):
            turns[who].append(sides[who].turn())
    for side in sides.values():
        side.close()
    row = {}
    for phase, at, unit in (("prefill", 0, TOKENS), ("decode", 1, 1)):
        plain, weft = ([turn[at] * 1e6 / unit for turn in turns[who]] for who in ("plain", "weft"))
        ratios = sorted(a / b for a, b in zip(plain, weft))
        row[phase] = {"plain_us": statistics.median(plain), "weft_us": statistics.median(weft),
                      "gain": statistics.median(plain) / statistics.median(weft), "round_gains": [round(r, 3) for r in ratios]}
    return row


def profile(model, plugin):
    """Microseconds a token, by phase: of the nodes of each op, and of all nodes."""
    command = [BUILD / "drive", model, BUILD / "bin", 1, "profile", TOKENS, STEPS]
    done = subprocess.run([str(part) for part in command], env=environment(plugin), capture_output=True, text=True, check=True)
    found = {"prefill": {"all": 0}, "decode": {"all": 0}}
    for line in done.stdout.splitlines():
        phase, seconds, op = line.split(" ", 2)
        name, tokens = ("prefill", TOKENS) if phase == "prompt" else ("decode", STEPS)
        us = float(seconds) * 1e6 / tokens
        found[name]["all"] += us
        if op in ("GATED_DELTA_NET", "SSM_CONV"):
            found[name][op] = us
    return found


def attention(rounds, of_threads):
    rows = []
    for shape in ATTENTION:
        for threads in of_threads:
            command = [BUILD / "attention", BUILD / "bin", threads, *shape, rounds * 5]
            done = subprocess.run([str(part) for part in command], env=environment(False), capture_output=True, text=True, check=True)
            rows.append({**json.loads(done.stdout), "load": busy()})
    return rows


def in_words(phase, found):
    gains = found["round_gains"]
    return f"{phase} {found['plain_us']:9.1f} -> {found['weft_us']:9.1f} us, gain {found['gain']:.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"


def device():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def ggml_version():
    text = (BUILD / "llama.cpp/ggml/CMakeLists.txt").read_text()
    return ".".join(re.findall(r"^set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text, re.M))


def head_commit():
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def busy():
    return round(os.getloadavg()[0], 2)


def time_model(name, args, folder):
    model = make_model(folder, *MODELS[name])
    ops = {who: profile(model, who == "weft") for who in ("plain", "weft")}
    rows = []
    for threads in args.threads:
        row = {"model": name, "threads": threads, "load": busy(), "rounds": args.rounds, "commit": head_commit(),
               **compare(model, threads, args.rounds)}
        for phase in ("prefill", "decode"):
            row[phase]["ops_us"] = {who: ops[who][phase] for who in ops}
        rows.append(row)
        print(f"{name:11} {threads} threads  " + "  ".join(in_words(phase, row[phase]) for phase in ("prefill", "decode")), flush=True)
    return rows


def merged(rows, before, *names):
    """Replaces the rows of the file that were measured again, and keeps the others. `names` are the fields that identify a row."""
    of = lambda row: tuple(row[name] for name in names)  # noqa: E731
    again = {of(row) for row in rows}
    return rows + [row for row in before if of(row) not in again]


def write(file, rows, steps):
    """Writes the results so far."""
    before = json.loads(file.read_text()) if file.exists() else {"rows": [], "attention": []}
    rows = sorted(merged(rows, before["rows"], "model", "threads"), key=lambda row: (list(MODELS).index(row["model"]), row["threads"]))
    steps = sorted(merged(steps, before["attention"], "Hq/Hk/D", "context", "queries", "threads"),
                   key=lambda row: (row["queries"], row["context"], row["Hq/Hk/D"], row["threads"]))
    found = {"device": device(), "commit": head_commit(), "command": "bench/llama.py --json FILE",
             "versions": {"llama-cpp-python": (BUILD / "llama.cpp/.from").read_text().strip(), "ggml": ggml_version()},
             "machine": {"processors": os.cpu_count(), "load": busy()}, "tokens": TOKENS, "steps": STEPS, "rows": rows,
             "attention": steps}
    file.write_text(json.dumps(found, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="none: only attention")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=pathlib.Path, help="where models are kept between runs (12 GB)")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write the results to this file; its other rows stay")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or pathlib.Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            rows += time_model(name, args, folder)
            if args.json:
                write(args.json, rows, [])
    if not args.no_attention:
        steps = attention(args.rounds, args.threads)
        if args.json:
            write(args.json, rows, steps)
        else:
            print(json.dumps(steps, indent=1))


if __name__ == "__main__":
    main()
