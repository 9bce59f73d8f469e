"""Times a random hybrid model of transformers, unpatched beside patched by Weft, and sizes its cache.

    python bench/python_transformers.py --json FILE
    PYTHONPATH=fla-folder python bench/python_transformers.py --device cuda --dtypes bf16 --repeat 5 --json FILE

The model has the shapes of Qwen3.5-0.8B and random weights. Every repetition runs unpatched and patched by turns: a prompt, then greedy
tokens one by one. "delta" is the time inside the delta layers without their projections, "attention" that inside the attention layers
without theirs; forward hooks measure both, on a GPU by events of the stream, so that waits for the host count. "bound" is the gain of the
whole model if delta and attention took no time (Amdahl), from the unpatched profile.

On a GPU, unpatched delta layers run flash-linear-attention's (FLA) kernels where transformers finds that package, else torch. "unpatched"
in the report says which.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List

import torch

if not torch.cuda.is_available():
    sys.modules["fla"] = None  # type: ignore[assignment]  # without a GPU, transformers would call FLA's Triton kernels and fail
import transformers  # noqa: E402

import weft  # noqa: E402
import weft.transformers  # noqa: E402
from weft.transformers.cache import CompressedLayer  # noqa: E402

SHAPES: Dict[str, Any] = {  # Qwen3.5-0.8B
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Profile:
    """Seconds inside the mixers of a model, without their projections."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self.seconds = {"delta": 0.0, "attention": 0.0}
        self.events: Any = _Events(self.seconds) if device == "cuda" else None
        for module in model.modules():
            kind = {"Qwen3_5GatedDeltaNet": "delta", "Qwen3_5Attention": "attention"}.get(type(module).__name__)
            if kind:
                self._time(module, kind, 1)
                for child in module.children():
                    if isinstance(child, torch.nn.Linear):
                        self._time(child, kind, -1)

    def _time(self, module: torch.nn.Module, kind: str, sign: int) -> None:
        started: List[Any] = []

        def before(*_: Any) -> None:
            started.append(self.events.mark() if self.events else time.perf_counter())

        def after(*_: Any) -> None:
            if self.events:
                self.events.spans.append((kind, sign, started.pop(), self.events.mark()))
            else:
                self.seconds[kind] += sign * (time.perf_counter() - started.pop())

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def take(self) -> Dict[str, float]:
        if self.events:
            self.events.collect()
        taken = dict(self.seconds)
        self.seconds.update(delta=0.0, attention=0.0)
        return taken


class _Events:
    """Spans between events of the current CUDA stream. Events are made once, because making one takes time."""

    def __init__(self, seconds: Dict[str, float]) -> None:
        self.seconds = seconds
        self.spans: List[Any] = []
        self.idle: List[Any] = []
        self.used: List[Any] = []

    def mark(self) -> Any:
        event = self.idle.pop() if self.idle else torch.cuda.Event(enable_timing=True)
        event.record()
        self.used.append(event)
        return event

    def collect(self) -> None:
        torch.cuda.synchronize()
        for kind, sign, begin, end in self.spans:
            self.seconds[kind] += sign * begin.elapsed_time(end) / 1e3
        self.idle += self.used
        self.spans, self.used = [], []


def build(layers: int, vocabulary: int, dtype: torch.dtype, device: str) -> Any:
    """A random model: every fourth layer attends, as in the original."""
    torch.manual_seed(0)
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)]
    config = transformers.Qwen3_5TextConfig(**{**SHAPES, "vocab_size": vocabulary}, num_hidden_layers=layers, layer_types=kinds)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.Qwen3_5ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model.to(device)


def timed(run: Any, profile: Profile) -> Dict[str, float]:
    profile.take()
    started = time.perf_counter()
    run()
    if profile.events:
        torch.cuda.synchronize()
    return {"whole": time.perf_counter() - started, **profile.take()}


def once(model: Any, profile: Profile, prompt: torch.Tensor, tokens: int) -> Dict[str, Dict[str, float]]:
    """Seconds of a prompt, and of `tokens` greedy tokens after it."""
    kept: Dict[str, Any] = {}

    def step(ids: torch.Tensor) -> None:
        out = model(ids, past_key_values=kept.get("cache"), use_cache=True, logits_to_keep=1)
        kept.update(cache=out.past_key_values, next=out.logits[:, -1:].argmax(-1))

    def decode() -> None:
        for _ in range(tokens):
            step(kept["next"])

    with torch.no_grad():
        return {"prompt": timed(lambda: step(prompt), profile), "decode": timed(decode, profile)}


def compare(model: Any, dtype: str, options: argparse.Namespace) -> List[Dict[str, Any]]:
    profile = Profile(model, options.device)
    prompt = torch.randint(0, model.config.vocab_size, (options.batch, options.prompt), device=options.device)
    runs: Dict[str, List[Any]] = {"unpatched": [], "patched": []}
    for repetition in range(options.repeat + 1):
        for name, done in runs.items():
            if name == "patched":
                weft.transformers.patch(model, kv=options.kv, threads=options.threads)
            warm = repetition == 0
            short = warm and options.device == "cpu"  # on a GPU, FLA tunes its kernels for the sizes of the first run
            seconds = once(model, profile, prompt[:, :64] if short else prompt, 2 if short else options.decode)
            if not warm:
                done.append(seconds)
                print(f"{dtype} {name}: {json.dumps(seconds)}", file=sys.stderr)
            if name == "patched":
                weft.transformers.unpatch(model)
    return [summary(dtype, phase, runs, options) for phase in ("prompt", "decode")]


def summary(dtype: str, phase: str, runs: Dict[str, List[Any]], options: argparse.Namespace) -> Dict[str, Any]:
    seconds = {
        name: {part: statistics.median(run[phase][part] for run in done) for part in ("whole", "delta", "attention")}
        for name, done in runs.items()
    }
    plain, fast = seconds["unpatched"], seconds["patched"]
    return {
        "dtype": dtype,
        "phase": phase,
        "sequences": options.batch,
        "tokens": options.prompt if phase == "prompt" else options.decode,
        "seconds": seconds,
        "runs": {name: [run[phase] for run in done] for name, done in runs.items()},
        "gain": {part: plain[part] / fast[part] for part in plain},
        "bound": plain["whole"] / (plain["whole"] - plain["delta"] - plain["attention"]),
    }


def unpatched_kernels() -> str:
    """"fla" where transformers found its functions, else "torch"."""
    modeling = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"]
    seen, waiting = set(), [modeling.torch_chunk_gated_delta_rule]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or not callable(found):
            continue
        seen.add(id(found))
        if (getattr(found, "__module__", "") or "").startswith("fla."):
            return "fla"
        waiting += [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
        waiting += [getattr(found, name) for name in ("__wrapped__", "__func__") if hasattr(found, name)]
    return "torch"


def cache_bytes(layers: int, tokens: int, device: str) -> List[Dict[str, Any]]:
    """Per KV format, the bytes that the attention layers of the model keep for `tokens` tokens."""
    heads, size = SHAPES["num_key_value_heads"], SHAPES["head_dim"]
    rows = torch.randn(1, heads, tokens, size, device=device)
    made = []
    for kv in ("f16", "8v4", "4v4"):
        layer = CompressedLayer(kv)
        layer.append(rows, rows, None)
        made.append({"kv": kv, "tokens": tokens, "bytes": layer.bytes * (layers // 4)})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, metavar="FILE", help="where the results go")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=1, metavar="SEQUENCES")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=SHAPES["vocab_size"])
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--cache", type=int, default=32768, metavar="TOKENS")
    parser.add_argument("--repeat", type=int, default=2, help="after a warm-up")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--kv", default="8v4")
    parser.add_argument("--threads", type=int, default=None, help="of torch and Weft; default: their own choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results: List[Dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        results += compare(build(options.layers, options.vocabulary, DTYPES[dtype], options.device), dtype, options)
    report = {
        "command": " ".join(["python", *sys.argv]).replace(options.json, "FILE"),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else cpu_name(),
        "weft": weft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fla": getattr(sys.modules.get("fla"), "__version__", None),
        "unpatched": unpatched_kernels(),
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]},
        "model": {**SHAPES, "vocab_size": options.vocabulary, "num_hidden_layers": options.layers, "weights": "random", "kv": options.kv},
        "results": results,
        "cache": cache_bytes(options.layers, options.cache, options.device),
    }
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    show(report)


def commit() -> str:
    """The commit of the working tree, with "-dirty" where tracked files differ from it."""
    described = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(described, capture_output=True, text=True, cwd=os.path.dirname(__file__) or ".").stdout.strip()


def cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(report: Dict[str, Any]) -> None:
    print(f"{report['device']}, unpatched delta layers by {report['unpatched']}\n")
    print("| dtype | phase | delta layers | attention | whole model | bound of the whole model |\n|---|---|---|---|---|---|")
    for row in report["results"]:
        gain = row["gain"]
        columns = (f"{gain[part]:.2f} x" for part in ("delta", "attention", "whole"))
        print(f"| {row['dtype']} | {row['phase']}, {row['tokens']} tokens | {' | '.join(columns)} | {row['bound']:.2f} x |")
    print("\n| kv | tokens | cache |\n|---|---|---|")
    for row in report["cache"]:
        print(f"| {row['kv']} | {row['tokens']} | {row['bytes'] / 2**20:.0f} MiB |")


if __name__ == "__main__":
    main()
