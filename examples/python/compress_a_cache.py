"""Compress a KV cache, and see what each format costs and loses.

    python compress_a_cache.py [--tokens 2048] [--picture error.png]

Fills caches of one attention layer with the same keys and values, and compares attention over each with attention in float64. Draws the
error against the bits of a number where matplotlib is installed and --picture names a file.
"""

# %% Keys and values of 8 heads. Real keys have directions in common, so these share a mean. Every query looks for one earlier token.
import argparse

import numpy as np

import weft

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--picture", help="file for a plot, such as error.png")
options = parser.parse_args()

HEADS, QUERY_HEADS, HEAD_DIM = 8, 32, 128
rng = np.random.default_rng(0)
mean = rng.standard_normal((1, HEADS, HEAD_DIM))
k = (mean + rng.standard_normal((options.tokens, HEADS, HEAD_DIM))).astype(np.float32)
v = rng.standard_normal((options.tokens, HEADS, HEAD_DIM)).astype(np.float32)
found = np.repeat(k[rng.integers(options.tokens - 16, size=16)], QUERY_HEADS // HEADS, axis=1)
q = (found + 0.5 * rng.standard_normal(found.shape)).astype(np.float32)


# %% Attention without a cache, in float64.
def exact_attention() -> np.ndarray:
    keys, values = (np.repeat(each.astype(np.float64), QUERY_HEADS // HEADS, axis=1) for each in (k, v))
    scores = np.einsum("thd,nhd->thn", q.astype(np.float64), keys) / np.sqrt(HEAD_DIM)
    position, token = np.arange(options.tokens - len(q), options.tokens)[:, None], np.arange(options.tokens)[None]
    scores = np.where((token <= position)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("thn,nhd->thd", weights / weights.sum(-1, keepdims=True), values)


wanted = exact_attention()


def relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# %% The same tokens in every format.
results = []
print(f"{'recipe':8} {'bits':>5} {'bytes per token':>15} {'error of K':>10} {'error of V':>10} {'error of attention':>18}")
for recipe in ("f16", "8v8", "8v4", "6v6", "5v5", "4v4", "3v3", "2v2"):
    cache = weft.KvCache(recipe, heads=HEADS, head_dim=HEAD_DIM, capacity=options.tokens)
    cache.encode(k, v)
    decoded_k, decoded_v = cache.decode()
    bits = 8 * cache.bytes_per_token / (2 * HEADS * HEAD_DIM)  # of a number, gains included
    errors = relative_error(decoded_k, k), relative_error(decoded_v, v), relative_error(cache.attend(q), wanted)
    results.append((recipe, bits, errors[2]))
    print(f"{recipe:8} {bits:5.2f} {cache.bytes_per_token:15} {errors[0]:10.2e} {errors[1]:10.2e} {errors[2]:18.2e}")


# %% A picture.
if options.picture:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so there is no picture")
    else:
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 4))
        axes.semilogy([bits for _, bits, _ in results], [error for _, _, error in results], "o")
        for recipe, bits, error in results:
            axes.annotate(recipe, (bits, error), textcoords="offset points", xytext=(6, 4))
        axes.set(xlabel="bits per number", ylabel="relative error of attention", title=f"{options.tokens} tokens, head dim {HEAD_DIM}")
        figure.savefig(options.picture, dpi=120, bbox_inches="tight")
        print(f"wrote {options.picture}")
