#!/usr/bin/env python3
"""Times llama.cpp with and without libggml-weft.so by turns, on models of random weights, and ops of ggml beside Weft's.

    scripts/llama.sh --tests
    .venv-llama/bin/python bench/llama.py --json bench/baselines/amd-epyc-zen4-llama.json
    .venv-llama/bin/python bench/llama.py --models narrow-f32 --rounds 3

Two processes have the same model open, one of them with the plug-in. In every round each runs a prompt and some single tokens, the order
alternating. A time is the median of the rounds, a spread is that of the rounds' own ratios. With one thread it is time of the processor,
which other programs do not lengthen, with more threads it is the time that passed. The shares are those of the plain graph, and
come from a run that llama.cpp times node by node. With --quick 9B shapes are left out.
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
        """Seconds of the prompt, and the median of the single tokens."""
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


def shares(model, plugin):
    """What part of the nodes' time GATED_DELTA_NET takes, and SSM_CONV with its SILU, by phase."""
    command = [BUILD / "drive", model, BUILD / "bin", 1, "profile", TOKENS, STEPS]
    done = subprocess.run([str(part) for part in command], env=environment(plugin), capture_output=True, text=True, check=True)
    seconds = {"prompt": {}, "steps": {}}
    for line in done.stdout.splitlines():
        phase, taken, op = line.split(" ", 2)
        seconds[phase][op] = float(taken)
    part = lambda phase, op: seconds[phase].get(op, 0) / sum(seconds[phase].values())  # noqa: E731
    return {name: {"GATED_DELTA_NET": part(phase, "GATED_DELTA_NET"), "SSM_CONV": part(phase, "SSM_CONV")}
            for name, phase in (("prefill", "prompt"), ("decode", "steps"))}


def ops(rounds):
    """ggml's cpu backend beside the plug-in, op by op, as test-backend-ops times them."""
    rows = []
    for op in ("GATED_DELTA_NET", "SSM_CONV"):
        times = {}
        for _ in range(rounds):
            for who in ("CPU", "Weft"):
                env = {**environment(False), "GGML_BACKEND_PATH": str(BUILD / "weft/libggml-weft-op-tests.so")}
                done = subprocess.run([str(BUILD / "bin/test-backend-ops"), "perf", "-b", who, "-o", op], env=env, capture_output=True,
                                      text=True, check=True)
                text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
                for case, us in re.findall(rf"{op}\((.*?)\): +\d+ runs - +([0-9.]+) us/run", text):
                    times.setdefault(case, {}).setdefault(who, []).append(float(us))
        for case, found in times.items():
            if "CPU" in found and "Weft" in found:
                rows.append({"op": op, "case": case, "ggml_us": statistics.median(found["CPU"]),
                             "weft_us": statistics.median(found["Weft"])})
    return rows


def attention(rounds):
    rows = []
    for shape in ATTENTION:
        for threads in (1, 2):
            command = [BUILD / "attention", BUILD / "bin", threads, *shape, rounds * 5]
            done = subprocess.run([str(part) for part in command], env=environment(False), capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=pathlib.Path, help="where models are kept between runs")
    parser.add_argument("--json", help="write the results to this file; also times single ops and attention")
    args = parser.parse_args()
    names = args.models or [name for name in MODELS if not (args.quick and name.startswith("9b"))]
    load_before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or pathlib.Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            model = make_model(folder, *MODELS[name])
            share = {"plain": shares(model, False), "weft": shares(model, True)}
            for threads in args.threads:
                row = {"model": name, "threads": threads, **compare(model, threads, args.rounds)}
                for phase in ("prefill", "decode"):
                    row[phase]["share"] = {who: share[who][phase] for who in share}
                rows.append(row)
                print(f"{name:11} {threads} threads  " + "  ".join(map(lambda phase: in_words(phase, row[phase]), ("prefill", "decode"))),
                      flush=True)
    if not args.json:
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    found = {"device": device(), "commit": commit, "command": "bench/llama.py --json FILE",
             "versions": {"llama-cpp-python": (BUILD / "llama.cpp/.from").read_text().strip(), "ggml": ggml_version()},
             "machine": {"processors": os.cpu_count(), "load": round(load_before, 2), "load_after": round(os.getloadavg()[0], 2)},
             "tokens": TOKENS, "steps": STEPS, "rounds": args.rounds, "rows": rows, "ops": ops(3), "attention": attention(args.rounds)}
    pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
