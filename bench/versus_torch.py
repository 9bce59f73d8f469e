#!/usr/bin/env python3
"""Times attention over a compressed KV cache on a CUDA device beside torch's attention over the same cache in bf16, in one process.

Every row is a layer: Weft's compressed_attention over a cache that its kv_encode made of the same keys and values, and torch's
scaled_dot_product_attention (the quickest of its cuDNN and flash backends) over the uncompressed ones. Calls walk through so many copies
of the cache that the L2 is cold, captured into a graph each, whose replays take turns; times are medians. Ratios are torch / Weft.

--sweep and --prompts time the calls of sweep_shapes.py instead, into a JSON file: one new token over every kind of cache, and many new
tokens, causal. torch's time for many new tokens is that of the quickest of its backends without a mask and with a causal one whose last row
sees everything; its K and V are bf16.

    cmake --preset shared-cuda && cmake --build --preset shared-cuda
    python3 bench/versus_torch.py --recipes 4v4,8v4
    python3 bench/versus_torch.py --sweep --json FILE [--rows A:B]      a part is added to FILE
    python3 bench/versus_torch.py --prompts --json FILE
"""

import argparse
import pathlib
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
    raise SystemExit(f"versus_torch.py needs {missing.name}, which this Python does not have.")
if torch:  # --help does without
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

# Query heads, KV heads, head dim, sequences, context, new tokens of each.
SHAPES = [(32, 8, 128, 8, 32768, 1), (32, 8, 128, 1, 131072, 1), (32, 8, 128, 1, 32768, 1), (32, 8, 128, 1, 4096, 1),
          (64, 8, 128, 32, 4096, 1), (16, 2, 256, 32, 32768, 1), (32, 8, 256, 1, 32768, 1), (32, 8, 128, 1, 32768, 2048)]
COLD_BYTES = 260 << 20  # more than four times the L2 of a Hopper device
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


class Compressed:
    """Caches in `recipe` of keys and values [N, Hk, context, D], and the attention of q [N, T, Hq, D] over them."""

    def __init__(self, weft, name, q, k, v):
        batch, kv_heads, context, width = k.shape
        self.recipe = weft_c.Recipe(weft, name, width)
        info, tiles = self.recipe.info, -(-context // weft_c.TILE_TOKENS)
        self.bytes = batch * kv_heads * context * info.bytes_per_token
        self.sides = [torch.zeros(batch, kv_heads, tiles, side.tile_bytes, dtype=torch.uint8, device="cuda")
                      for side in (info.k, info.v)]
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.positions = torch.arange(context, dtype=torch.int32, device="cuda").repeat(batch)
        self.q, self.o = q.reshape(-1, *q.shape[2:]), torch.empty_like(q.reshape(-1, *q.shape[2:]))
        rows = [side.transpose(1, 2).reshape(batch * context, kv_heads, width) for side in (k, v)]
        self.kept = rows
        sequences = weft_c.Sequences(count=batch)
        weft.call("kv_encode", k=view(rows[0]), v=view(rows[1]), positions=view(self.positions), sequences=sequences,
                  cache=self._cache())()
        torch.cuda.synchronize()
        self.kept = None
        self.attend = weft.call("compressed_attention", queries=weft_c.Queries(q=view(self.q), sequences=sequences),
                                cache=self._cache(), o=view(self.o))

    def _cache(self):
        k, v = (weft_c.Side(codes=view(side)) for side in self.sides)
        return weft_c.Cache(recipe=self.recipe.handle, k=k, v=v, layout=weft_c.LAYOUT_TILES, tile_order=weft_c.TILE_ORDER_LANES,
                            lengths=view(self.lengths))


def torch_calls(q, caches, backend):
    def call(k, v):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return [lambda k=k, v=v: call(k, v) for k, v in caches]


# --- the sweeps

KEYS = {"Hq": 0, "Hk": 0, "D": 0, "N": 0, "context": 0, "T": 0, "recipe": "", "layout": "tiles", "paged": 0}
PAGE = 64  # tokens
ROW_SECONDS = 1.0  # seconds of measuring per row, approximately at most
CLOSE = {"f16": 0.01, "bf16": 0.01, "f32": 0.01, "8v8": 0.03}  # relative RMS to torch's output, which is rounded to bf16


class Cached:
    """A cache of keys and values [N, Hk, context, D] in any recipe and layout, and the attention of q [N, T, Hq, D] over it."""

    def __init__(self, weft, row, q, k, v):
        batch, heads, context, width = k.shape
        self.recipe, self.row = weft_c.Recipe(weft, row["recipe"], width), row
        info = self.recipe.info
        self.bytes = batch * heads * context * info.bytes_per_token
        tiles, pages = row["layout"] == "tiles", -(-context // PAGE)
        blocks, tokens = (batch * pages, PAGE) if row["paged"] else (batch, pages * PAGE)
        self.sides = [self._side(side, blocks, heads, tokens, tiles) for side in (info.k, info.v)]
        self.lanes = weft_c.TILE_ORDER_LANES if tiles and sweep_shapes.lanes_fit(row["recipe"], width) else 0
        shuffled = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
        self.table = shuffled if row["paged"] else None
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self._encode(weft, k, v)
        self.q, self.o = q.reshape(-1, *q.shape[2:]), torch.empty_like(q.reshape(-1, *q.shape[2:]))
        queries = weft_c.Queries(q=view(self.q), sequences=weft_c.Sequences(count=batch))
        self.members = dict(queries=queries, cache=self._cache(), o=view(self.o))
        self.attend = weft.call("compressed_attention", **self.members)

    def _side(self, side, blocks, heads, tokens, tiles):
        """Its tensors: codes, and gains where rows have them beside."""
        def zeros(*sizes, dtype=torch.uint8):
            return torch.zeros(blocks, heads, *sizes, dtype=dtype, device="cuda")

        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        if tiles:
            return [zeros(tokens // weft_c.TILE_TOKENS, side.tile_bytes)]
        if side.passthrough:
            return [zeros(tokens, side.head_dim, dtype=dtypes[side.codes_dtype])]
        return [zeros(tokens, side.code_bytes), zeros(tokens, side.gains, dtype=dtypes[side.gains_dtype])]

    def _encode(self, weft, k, v, at_once=8192):
        """Encodes in parts, because rows of all tokens beside the originals would take much memory."""
        batch, _, context, _ = k.shape
        for first in range(0, context, at_once):
            rows = [side[:, :, first:first + at_once].transpose(1, 2).flatten(0, 1).contiguous() for side in (k, v)]
            positions = torch.arange(first, min(first + at_once, context), dtype=torch.int32, device="cuda").repeat(batch)
            weft.call("kv_encode", k=view(rows[0]), v=view(rows[1]), positions=view(positions), sequences=weft_c.Sequences(count=batch),
                      cache=self._cache())()
        torch.cuda.synchronize()

    def _cache(self):
        k, v = (weft_c.Side(**{name: view(part) for name, part in zip(("codes", "gains"), side)}) for side in self.sides)
        members = dict(recipe=self.recipe.handle, k=k, v=v, layout=int(self.row["layout"] == "tiles"), tile_order=self.lanes,
                       lengths=view(self.lengths))
        if self.table is not None:
            members.update(kind=weft_c.CACHE_PAGED, page_table=view(self.table))
        return weft_c.Cache(**members)


def causal_calls(q, caches):
    """torch's kernels with a causal mask whose last row sees everything. cuDNN's mask is right only where the context is all new."""
    new, context = q.shape[2], caches[0][0].shape[2]
    aten = torch.ops.aten
    found = {"flash, causal": [lambda k=k, v=v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0] for k, v in caches]}
    if new == context:
        found["cudnn, causal"] = [lambda k=k, v=v: sdpa_causal(q, k, v) for k, v in caches]
    return found


def sdpa_causal(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def peers_of(shape, q, caches):
    """torch's calls by name, without those that it refuses, and the result of torch."""
    walks = {name: torch_calls(q.transpose(1, 2), caches, getattr(SDPBackend, backend)) for name, backend in BACKENDS.items()}
    if shape["T"] > 1:
        walks.update(causal_calls(q.transpose(1, 2).contiguous(), caches))
    wanted = None
    for name in list(walks):
        try:
            made = walks[name][0]()
            torch.cuda.synchronize()
        except Exception:  # a backend that does not know the shape
            del walks[name]
            continue
        if wanted is None and (shape["T"] == 1 or "causal" in name):
            wanted = made.transpose(1, 2).reshape(-1, *made.shape[1::2]).clone()
    return walks, wanted


def timed(walks):
    """Medians of walks; slow walks are repeated less often."""
    started = time.perf_counter()
    for walk in walks:
        walk[0]()
    torch.cuda.synchronize()
    once = (time.perf_counter() - started) * torch_device.LEAST_CALLS
    return torch_device.medians_us(walks, max(3, min(11, int(ROW_SECONDS / max(once, 1e-4)) - 2)))


def sweep_shape(weft, rows, file):
    """The rows of one shape: torch is timed beside each of them."""
    shape = rows[0]
    batch, context, width, new = shape["N"], shape["context"], shape["D"], shape["T"]
    plain = batch * shape["Hk"] * context * width * 4
    copies = 1 if plain > COLD_BYTES else max(2, -(-COLD_BYTES // plain))
    make = lambda *sizes: torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    caches = [tuple(make(batch, shape["Hk"], context, width) for _ in range(2)) for _ in range(copies)]
    q = make(batch, new, shape["Hq"], width)
    walks, wanted = peers_of(shape, q, caches)
    theirs = dict(zip(walks, timed(list(walks.values())))) if walks else {}
    best, failed = min(theirs, key=theirs.get, default=None), []
    for row in rows:
        cached = [Cached(weft, row, q, k, v) for k, v in caches]
        while new == 1 and len(cached) < 32 and len(cached) * cached[0].bytes < COLD_BYTES:
            cached += [Cached(weft, row, q, k, v) for k, v in caches]
        kernel, speed = weft.choose("compressed_attention", **cached[0].members)
        cached[0].attend()
        found = {**row, "weft_us": None, "torch_us": None, "ratio": None, "torch": best, "kernel": kernel, "speed": speed}
        if wanted is not None:
            difference = float((cached[0].o.float() - wanted.float()).norm() / wanted.float().norm())
            found["difference"] = round(difference, 5)
            if not difference <= CLOSE.get(row["recipe"], 2):
                failed.append(row)
        turns = [[one.attend for one in cached]] + ([walks[best]] if best else [])
        times = timed(turns)
        found["weft_us"] = round(times[0], 2)
        if best:
            found.update(torch_us=round(times[1], 2), ratio=round(times[1] / times[0], 3))
        file.add(found)
        print(*found.values(), flush=True)
        del cached, turns
    torch.cuda.empty_cache()
    return failed


def sweep(options):
    every = sweep_shapes.decode() + sweep_shapes.prompts()
    rows = sweep_shapes.decode() if options.sweep else sweep_shapes.prompts()
    rows = [rows[place] for place in report.part(options.rows, len(rows))]
    weft = torch_device.Weft(options.library)
    header = dict(device=torch.cuda.get_device_name(), driver=report.driver(torch.version.cuda), commit=options.commit or report.commit(),
                  versions={"torch": torch.__version__.partition("+")[0]}, command=report.command(),
                  note="T new tokens of each of N sequences; `context` counts them. torch_us: the quickest of torch's cuDNN and flash "
                  "backends over K and V in bf16, without a mask or with one. Weft is causal. difference: relative RMS of the outputs.")
    file, failed = report.Report(options.json, header, every, KEYS), []
    shapes = {}
    for row in rows:
        shapes.setdefault(tuple(row[name] for name in ("Hq", "Hk", "D", "N", "context", "T")), []).append(row)
    for of_shape in shapes.values():
        failed += sweep_shape(weft, of_shape, file)
    done = [row for key, row in file.rows.items() if key in {file.key(row) for row in rows}]
    print(f"== {report.summary(done)}")
    if failed:
        raise SystemExit(f"not the same computation: {failed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libweft.so with the cuda backend (default: build-shared-cuda/libweft.so)")
    parser.add_argument("--recipes", default="4v4,8v4", help="of Weft's caches")
    parser.add_argument("--shapes", help=f"numbers of rows, 0 to {len(SHAPES) - 1}, with commas (default: all)")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="one new token over the caches of sweep_shapes.py, into --json")
    parser.add_argument("--prompts", action="store_true", help="the prompts of sweep_shapes.py, into --json")
    parser.add_argument("--json", metavar="FILE", help="of --sweep and --prompts; rows that it has stay")
    parser.add_argument("--rows", metavar="A:B", help="a part of --sweep or --prompts")
    parser.add_argument("--commit", help="of the library, for --json (default: that of the working tree)")
    options = parser.parse_args()
    if options.sweep and options.prompts or (options.sweep or options.prompts) != bool(options.json):
        parser.error("--sweep and --prompts exclude each other, and want --json FILE")
    torch_device.require()
    if options.json:
        return sweep(options)
    weft = torch_device.Weft(options.library)
    recipes = options.recipes.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, weft {weft.version}; microseconds, cold L2")
    print("| heads, D | batch x context | new tokens | torch bf16 | " + " | ".join(f"weft {name} | ratio" for name in recipes) + " |")
    print("|---|---|---:|---:|" + "---:|---:|" * len(recipes))
    chosen = [SHAPES[int(row)] for row in options.shapes.split(",")] if options.shapes else SHAPES
    for heads, kv_heads, width, batch, context, new in chosen:
        plain = batch * kv_heads * context * width * 4
        copies = 1 if new > 1 else max(2, min(16, -(-COLD_BYTES // plain)))
        make = lambda *sizes: torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        caches = [(make(batch, kv_heads, context, width), make(batch, kv_heads, context, width)) for _ in range(copies)]
        q = make(batch, new, heads, width)
        walks = {}
        for name, backend in BACKENDS.items():
            walks[name] = torch_calls(q.transpose(1, 2), caches, getattr(SDPBackend, backend))
            try:
                walks[name][0]()
            except RuntimeError:
                del walks[name]  # a backend that does not know the shape
        theirs, coded = list(walks), {}
        for name in recipes:
            compressed = coded[name] = [Compressed(weft, name, q, k, v) for k, v in caches]
            while new == 1 and len(compressed) < 64 and len(compressed) * compressed[0].bytes < COLD_BYTES:
                compressed += [Compressed(weft, name, q, k, v) for k, v in caches]
            walks[name] = [one.attend for one in compressed]
        times = dict(zip(walks, torch_device.medians_us(list(walks.values()), options.replays)))
        best = min(theirs, key=times.get)
        row = f"| {heads}/{kv_heads}, {width} | {batch} x {context} | {new} | {times[best]:.1f} ({best}) |"
        row += "".join(f" {times[name]:.1f} | {times[best] / times[name]:.2f} |" for name in recipes)
        print(row, flush=True)
        del caches, walks, coded, compressed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    try:
        main()
    except weft_c.WeftError as error:
        raise SystemExit(f"weft: {error}") from None
