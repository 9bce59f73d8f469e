"""Times one decode step of attention over a compressed KV cache: Weft, onnxruntime's GroupQueryAttention and ggml's FLASH_ATTN_EXT.

A step of Weft and of onnxruntime appends the key and value of one token to the cache and attends over all of it; ggml's attends only
(llama.cpp appends by ops of its own, which are not timed). All caches hold the same Gaussian keys and values, each in its own format.
Steps walk through so many copies of a cache that together they are more than four times the last-level cache.
onnxruntime's caches are head-major with one scale per tensor, its fastest. ggml's are token-major as llama.cpp has them, or head-major
("by head"), which llama.cpp does not use but which suits the kernel better.
"""

import sys

try:
    import common  # before numpy, whose threads it forbids

    import ggml_peer
    import numpy as np
    import ort_peer
    import weft_c
except ImportError as error:
    raise SystemExit(f"compressed_attention.py wants what bench/peers/requirements.txt lists, which scripts/peers.sh installs: {error}") from error

ORT_FORMATS = {"f32": None, "int8": 8, "int4": 4}
GGML_FORMATS = ["f16", "q8_0", "q4_0"]
SAME = 2e-2  # against float64 over its own decoded cache; ggml rounds q to 8 bits
SMALL = 1024  # context of the error table


class Problem:
    """Queries of one token [Hq, D], keys and values [Hk, context, D]; the last of them is the token that a step appends."""

    def __init__(self, heads, kv_heads, width, context, seed=1):
        random = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.width, self.context = heads, kv_heads, width, context
        self.q = weft_c.aligned_copy(random.standard_normal((heads, width), np.float32))
        self.k, self.v = (weft_c.aligned_copy(random.standard_normal((kv_heads, context, width), np.float32)) for _ in "kv")
        self.new_k, self.new_v = (weft_c.aligned_copy(side[:, -1]) for side in (self.k, self.v))

    def attend(self, k, v):
        """The output in float64 for keys and values [Hk, context, D]."""
        q = self.q.astype(np.float64).reshape(self.kv_heads, -1, self.width)
        scores = np.einsum("hgd,htd->hgt", q, k.astype(np.float64)) * self.width**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o = np.einsum("hgt,htd->hgd", weights, v.astype(np.float64)) / weights.sum(axis=-1, keepdims=True)
        return o.reshape(self.heads, self.width)


# Each contender builds `arrays`, the memory of one cache; step(arrays, threads) gives a function that performs one on such
# memory; `o` [Hq, D] is the output of the last step and decoded() the keys and values that the cache stands for.


class WeftAttention:
    def __init__(self, problem, options, recipe):
        self.problem, self.options = problem, options
        weft = self._weft(max(options.threads))
        self.recipe = weft_c.Recipe(weft, recipe, problem.width)
        info, p = self.recipe.info, problem
        tiles = -(-p.context // weft_c.TILE_TOKENS)
        self.arrays = [weft_c.aligned((1, p.kv_heads, tiles, side.tile_bytes), np.uint8) for side in (info.k, info.v)]
        self.lengths = np.array([p.context], np.int32)
        self.positions = np.arange(p.context, dtype=np.int32)
        self.o = weft_c.aligned((1, p.heads, p.width))
        self.bytes_per_token = info.bytes_per_token
        weft.call("kv_encode", k=weft_c.view(p.k.transpose(1, 0, 2)), v=weft_c.view(p.v.transpose(1, 0, 2)),
                  positions=weft_c.view(self.positions), sequences=weft_c.one_sequence(), cache=self._cache(self.arrays))()

    def _weft(self, threads):
        return weft_c.Weft(weft_c.find_library(self.options.library), threads, self.options.isa)

    def _cache(self, arrays):
        k, v = (weft_c.Side(codes=weft_c.view(array)) for array in arrays)
        return weft_c.Cache(recipe=self.recipe.handle, k=k, v=v, layout=weft_c.LAYOUT_TILES, tile_order=weft_c.TILE_ORDER_LANES,
                            lengths=weft_c.view(self.lengths))

    def step(self, arrays, threads):
        p, weft, cache = self.problem, self._weft(threads), self._cache(arrays)
        append = weft.call("kv_encode", k=weft_c.view(p.new_k[None]), v=weft_c.view(p.new_v[None]),
                           positions=weft_c.view(self.positions[-1:]), sequences=weft_c.one_sequence(), cache=cache)
        queries = weft_c.Queries(q=weft_c.view(p.q[None]), sequences=weft_c.one_sequence())
        attend = weft.call("compressed_attention", queries=queries, cache=cache, o=weft_c.view(self.o),
                           precision=weft_c.PRECISIONS.index(self.options.precision))

        def run(keep=arrays):
            append()
            attend()

        return run

    def decoded(self):
        p = self.problem
        k, v = (weft_c.aligned((p.context, p.kv_heads, p.width)) for _ in "kv")
        self._weft(1).call("kv_decode", cache=self._cache(self.arrays), positions=weft_c.view(self.positions),
                           sequences=weft_c.one_sequence(), k=weft_c.view(k), v=weft_c.view(v))()
        return k.transpose(1, 0, 2), v.transpose(1, 0, 2)


class OrtAttention:
    def __init__(self, problem, options, format_):
        self.problem, self.bits, self.sessions = problem, ORT_FORMATS[format_], {}
        self.o = weft_c.aligned((1, 1, problem.heads * problem.width))
        sides = [problem.k, problem.v]
        if self.bits:
            self.scales = [np.array([np.abs(side).max() / (2 ** (self.bits - 1) - 1)], np.float32) for side in sides]
            sides = [self._codes(side, scale) for side, scale in zip(sides, self.scales)]
        self.arrays = [weft_c.aligned_copy(side[None]) for side in sides]
        self.bytes_per_token = sum(array.nbytes for array in self.arrays) // (problem.kv_heads * problem.context)

    def _codes(self, side, scale):
        out = weft_c.aligned((*side.shape[:2], side.shape[2] * self.bits // 8), np.uint8)
        for head, rows in zip(out, side):
            codes = np.rint(rows / scale).astype(np.int8)
            head[...] = codes.view(np.uint8) if self.bits == 8 else (codes[:, ::2] + 8) | ((codes[:, 1::2] + 8) << 4)
        return out.view(np.int8) if self.bits == 8 else out

    def step(self, arrays, threads):
        p = self.problem
        inputs = {"q": p.q.reshape(1, 1, -1), "k": p.new_k.reshape(1, 1, -1), "v": p.new_v.reshape(1, 1, -1), "past_k": arrays[0],
                  "past_v": arrays[1], "last": np.array([p.context - 1], np.int32), "total": np.array([p.context], np.int32)}
        names, attributes = list(inputs), {}
        if self.bits:
            inputs |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
            names += [""] * 5 + ["k_scale", "v_scale"]
            attributes = {"kv_cache_bit_width": self.bits, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        outputs = {"o": self.o, "present_k": arrays[0], "present_v": arrays[1]}
        if threads not in self.sessions:
            node = ort_peer.node("GroupQueryAttention", names, list(outputs), num_heads=p.heads, kv_num_heads=p.kv_heads, **attributes)
            self.sessions[threads] = ort_peer.Session([node], inputs, outputs, threads)
        return self.sessions[threads].run_on(inputs, outputs)

    def decoded(self):
        sides = [array[0] for array in self.arrays]
        if self.bits == 4:
            sides = [np.stack([side & 15, side >> 4], axis=-1).reshape(*side.shape[:2], -1).astype(np.int8) - 8 for side in sides]
        return [side.astype(np.float64) * scale for side, scale in zip(sides, self.scales)] if self.bits else sides


class GgmlAttention:
    def __init__(self, problem, options, format_, token_major):
        self.problem, self.options, self.format, self.token_major = problem, options, format_, token_major
        self.backends = {}
        self.o = weft_c.aligned((problem.heads, problem.width))
        ggml, self.arrays = self._ggml(1), []
        for side in (problem.k, problem.v):
            codes = np.stack([ggml_peer.quantized(ggml, rows, format_) for rows in side])
            self.arrays.append(weft_c.aligned_copy(codes.transpose(1, 0, 2) if token_major else codes))
        self.bytes_per_token = sum(array.shape[-1] for array in self.arrays)

    def _ggml(self, threads):
        if threads not in self.backends:
            self.backends[threads] = common.ggml_for(self.options, threads)
        return self.backends[threads]

    def step(self, arrays, threads):
        p, graph = self.problem, ggml_peer.Graph(self._ggml(threads), 1)
        graph.flash_attention(p.q, *arrays, self.format, p.context, p.kv_heads, self.token_major, self.o)
        return graph

    def decoded(self):
        sides = [array.transpose(1, 0, 2) if self.token_major else array for array in self.arrays]
        return [ggml_peer.dequantized(side, self.format) for side in sides]


def contenders(problem, options):
    """Name and builder of each; building waits until it is its turn, for some caches are large."""
    for recipe in options.recipes.split(","):
        yield f"weft {recipe}", lambda recipe=recipe: WeftAttention(problem, options, recipe)
    for format_ in ORT_FORMATS:
        yield f"onnxruntime {format_}", lambda format_=format_: OrtAttention(problem, options, format_)
    if common.ggml_for(options, 1):
        for format_ in GGML_FORMATS:
            yield f"ggml {format_}", lambda format_=format_: GgmlAttention(problem, options, format_, True)
            yield f"ggml {format_} by head", lambda format_=format_: GgmlAttention(problem, options, format_, False)


def built(problem, options):
    """The contenders that work here; where one of ours does not, says why."""
    for name, build in contenders(problem, options):
        try:
            entry = build()
            entry.step(entry.arrays, 1)
        except weft_c.WeftError as error:
            if error.code != weft_c.UNSUPPORTED:
                raise
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield name, entry


def time_steps(report, options, problem):
    entries, copies = dict(built(problem, options)), {}
    for name, entry in entries.items():
        size = sum(array.nbytes for array in entry.arrays)
        more = int(4 * options.l3_mib * 2**20 / size)
        copies[name] = [entry.arrays, *([weft_c.aligned_copy(array) for array in entry.arrays] for _ in range(more))]
    for threads in options.threads:
        runs = {name: [entry.step(arrays, threads) for arrays in copies[name]] for name, entry in entries.items()}
        times = common.race(runs, options)
        report.timed({"heads": options.heads, "context": problem.context, "threads": threads}, "ms/step", 1e-3, times)


def measure_errors(report, options, problem):
    exact = problem.attend(problem.k, problem.v)
    for name, entry in built(problem, options):
        entry.step(entry.arrays, 1)()
        o = entry.o.reshape(problem.heads, problem.width)
        kernel = common.relative_rms(o, problem.attend(*entry.decoded()))
        report.error({"context": problem.context, "who": name, "bytes/token/head": entry.bytes_per_token},
                     **{"kernel: float64, same cache": kernel, "all: float64, exact K and V": common.relative_rms(o, exact)})
        if kernel > SAME:
            sys.exit(f"{name} is {kernel:.1e} away from float64 over its own cache: not the same work")


def main():
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=common.numbers, default=[1024, 16384, 65536], help="cached tokens, e.g. 1024,65536")
    parser.add_argument("--heads", default="32/8/128", help="query heads / KV heads / head dimension")
    parser.add_argument("--recipes", default="4v4,8v4", help="Weft's KV recipes")
    parser.add_argument("--precision", default="exact_scores", choices=weft_c.PRECISIONS)
    options = parser.parse_args()
    shape = [int(part) for part in options.heads.split("/")]
    report = common.Report(options, {"onnxruntime": ort_peer.version()}, [f"weft {recipe}" for recipe in options.recipes.split(",")],
                           contenders_as_rows=True)
    measure_errors(report, options, Problem(*shape, SMALL))
    for context in options.contexts:
        time_steps(report, options, Problem(*shape, context))
    report.print()


if __name__ == "__main__":
    main()
