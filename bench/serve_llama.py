#!/usr/bin/env python3
"""Times the second turn of a long conversation with weft serve and with llama-server, on models of one shape with random weights.

    scripts/llama.sh --server
    .venv-llama/bin/python bench/serve_llama.py --weft build/weft --json bench/baselines/amd-epyc-zen4-serve-llama.json
    .venv-llama/bin/python bench/serve_llama.py --shape narrow --layers 4 --prompt 2000 --rounds 1

A round sends each server, in turn, a prompt of new random tokens, and then the same prompt with `--new` tokens after it. A time is that of
a whole answer of one token: reading the prompt, one step, and HTTP. Both servers get token ids, decode greedily, and may keep what they
like between the turns: Weft a session, llama-server the cache of its slot. The weights of both are random; texts mean nothing.
"""
import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import random_checkpoint  # noqa: E402
import random_gguf  # noqa: E402

TOKENIZER = ROOT / "models/weft-11m/tokenizer.json"
SHAPES = sorted(set(random_gguf.SHAPES) - {"tiny"})
MARGIN = 64  # tokens of the context beyond the prompt and the new tokens
PATIENCE = 600  # most seconds of a request


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--layers", type=int, default=8, help="every fourth one is attention; default 8")
    parser.add_argument("--type", choices=["f32", "q8_0"], default="f32", help="weights of llama-server; those of Weft are bf16")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the first turn; default 8000")
    parser.add_argument("--new", type=int, default=64, help="tokens that the second turn adds; default 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv", default="8v4", help="KV format of Weft; llama-server has f16")
    parser.add_argument("--weft", type=pathlib.Path, default=ROOT / "build/weft")
    parser.add_argument("--llama", type=pathlib.Path, default=ROOT / "build-llama/bin/llama-server")
    parser.add_argument("--json", type=pathlib.Path, help="where the result goes, beside the text")
    args = parser.parse_args(given)
    for name, least in (("layers", 4), ("prompt", 1), ("new", 1), ("rounds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}, wanted {least} or more")
    if args.layers % 4:
        parser.error(f"--layers is {args.layers}, wanted a multiple of 4")
    for program, how in ((args.weft, "make build"), (args.llama, "scripts/llama.sh --server")):
        if not os.access(program, os.X_OK):
            parser.error(f"{program} is no program; {how} builds it")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    if random_gguf.gguf is None or random_checkpoint.numpy is None:
        parser.error("the packages gguf and numpy are missing; scripts/llama.sh --server installs them in .venv-llama")
    return args


def make_models(folder, args):
    """The same shape as a checkpoint for Weft and as a GGUF file, both with the tokenizer of the bundled model."""
    shape = {**random_gguf.SHAPES[args.shape], "layers": args.layers, "vocab": len(json.loads(TOKENIZER.read_text())["model"]["vocab"])}
    checkpoint, gguf = folder / "checkpoint", folder / "model.gguf"
    random_checkpoint.write(checkpoint, shape)
    (checkpoint / "tokenizer.json").write_text(TOKENIZER.read_text())
    random_gguf.write(str(gguf), "qwen35", shape, args.layers, args.type, TOKENIZER)
    return checkpoint, gguf, shape["vocab"]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def post(port, path, body):
    """The answer, and the seconds until it was complete."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    begin = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    seconds = time.perf_counter() - begin
    connection.close()
    if reply.status != 200:
        sys.exit(f"serve_llama.py: {path} answered {reply.status}: {text[:300].decode(errors='replace')}")
    return json.loads(text), seconds


def ready(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


@contextlib.contextmanager
def running(command, port):
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + PATIENCE
            while not ready(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"serve_llama.py: {command[0]} does not serve:\n{log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


def ask_weft(port, tokens, conversation):
    answer, seconds = post(port, "/v1/completions", {"prompt": tokens, "max_tokens": 1, "temperature": 0, "session": conversation})
    return seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_llama(port, tokens, _):
    answer, seconds = post(port, "/completion", {"prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": True})
    return seconds, len(tokens) - answer["timings"]["prompt_n"]


def measure(args, servers, vocab):
    """Per server and round: milliseconds of both turns, and the tokens of the second turn that were not prefilled again."""
    draw = random.Random(1)
    rounds = {who: [] for who in servers}
    for i in range(args.rounds):
        prompt = [draw.randrange(1, vocab) for _ in range(args.prompt)]
        longer = prompt + [draw.randrange(1, vocab) for _ in range(args.new)]
        for who, (ask, port) in servers.items() if i % 2 == 0 else reversed(servers.items()):
            first, _ = ask(port, prompt, f"round-{i}")
            second, cached = ask(port, longer, f"round-{i}")
            rounds[who].append({"cold_ms": 1000 * first, "second_turn_ms": 1000 * second, "cached_tokens": cached})
    return rounds


def summary(rounds):
    medians = {name: statistics.median(one[name] for one in rounds) for name in ("cold_ms", "second_turn_ms")}
    return {**medians, "share": medians["second_turn_ms"] / medians["cold_ms"], "cached_tokens": min(one["cached_tokens"] for one in rounds),
            "rounds": rounds}


def commit():
    return os.environ.get("COMMIT") or subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main():
    args = arguments()
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    context = args.prompt + args.new + MARGIN
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, gguf, vocab = make_models(pathlib.Path(folder), args)
        ports = [free_port(), free_port()]
        weft = [args.weft, "serve", "--model", checkpoint, "--port", ports[0], "--threads", args.threads, "--kv", args.kv, "--capacity", context,
                "--max-sequences", 1, "--prefix-store", 0]
        llama = [args.llama, "--model", gguf, "--host", "127.0.0.1", "--port", ports[1], "--threads", args.threads, "--threads-batch", args.threads,
                 "--ctx-size", context, "--parallel", 1]
        with running(weft, ports[0]), running(llama, ports[1]):
            busy = os.getloadavg()[0]
            found = measure(args, {"weft": (ask_weft, ports[0]), "llama": (ask_llama, ports[1])}, vocab)
    report = {"schema": 1, "commit": commit(), "command": "bench/serve_llama.py " + " ".join(sys.argv[1:]),
              "device": cpu.group(1) if cpu else "unknown", "threads": args.threads, "load_before": busy, "shape": args.shape, "layers": args.layers,
              "llama_weights": args.type, "weft_kv": args.kv, "prompt": args.prompt, "new": args.new,
              **{who: summary(rounds) for who, rounds in found.items()}}
    for who in found:
        one = report[who]
        print(f"{who:5}: first turn {one['cold_ms']:9.1f} ms, second {one['second_turn_ms']:9.1f} ms ({100 * one['share']:.1f} %), "
              f"{one['cached_tokens']} tokens not read again")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
