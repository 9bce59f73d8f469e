#!/usr/bin/env python3
"""Times attention over a compressed KV cache on a CUDA device beside torch's attention over the same cache in bf16, in one process.

Every row is a layer: Weft's compressed_attention over a cache that its kv_encode made of the same keys and values, and torch's
scaled_dot_product_attention (the quickest of its cuDNN and flash backends) over the uncompressed ones. Calls walk through so many copies
of the cache that the L2 is cold, captured into a graph each, whose replays take turns; times are medians. Ratios are torch / Weft.

    cmake --preset shared-cuda && cmake --build --preset shared-cuda
    python3 bench/versus_torch.py --recipes 4v4,8v4
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
try:
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libweft.so with the cuda backend (default: build-shared-cuda/libweft.so)")
    parser.add_argument("--recipes", default="4v4,8v4", help="of Weft's caches")
    parser.add_argument("--shapes", help=f"numbers of rows, 0 to {len(SHAPES) - 1}, with commas (default: all)")
    parser.add_argument("--replays", type=int, default=15)
    options = parser.parse_args()
    torch_device.require()
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
