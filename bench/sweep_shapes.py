#!/usr/bin/env python3
"""The calls that versus_fla.py --sweep and versus_torch.py --sweep and --prompts time. Needs nothing but Python.

    python3 bench/sweep_shapes.py       prints a line per call, which cuda_speed_test reads: the op, and the options of such a case
"""

DTYPES = ["bf16", "f16", "f32"]
HEADS = [(16, 32), (16, 16), (8, 8), (2, 8), (32, 32)]  # key and value heads
SIZES = [64, 96, 100, 128, 192, 256]  # K and V
TOKENS = [1, 64, 1000, 4096, 8192, 32768]
RAGGED = [1, 64, 300, 635, 3000, 96]  # tokens of the sequences of ragged calls


def _delta(heads, sizes, sequences, tokens, dtype, kda=0):
    """tokens: of each sequence; 0: those of RAGGED."""
    return dict(Hk=heads[0], Hv=heads[1], K=sizes[0], V=sizes[1], N=sequences, T=tokens, dtype=dtype, kda=kda)


def delta():
    """Prefills. FLA tunes its kernels for every combination of heads, sizes, dtype and raggedness, so rows that share one are neighbours.

    Every value of the lists above occurs with each dtype and with a decay per channel (KDA).
    """
    rows = []
    for place, dtype in enumerate(DTYPES):
        for index, size in enumerate(SIZES):
            heads = HEADS[(index + 2 * place) % len(HEADS)]
            for tokens in (TOKENS[index], TOKENS[(index + 3) % len(TOKENS)]):
                rows.append(_delta(heads, (size, size), 1, tokens, dtype))
    for index, size in enumerate(SIZES):
        heads = HEADS[(index + 1) % len(HEADS)]
        for tokens in (TOKENS[index], TOKENS[(index + 3) % len(TOKENS)]):
            rows.append(_delta(heads, (size, size), 1, tokens, DTYPES[index % 3], 1))
    rows += [_delta((16, 16), (128, 128), len(RAGGED), 0, dtype) for dtype in DTYPES]
    rows += [_delta((16, 16), (128, 128), len(RAGGED), 0, "bf16", 1), _delta((8, 8), (100, 100), len(RAGGED), 0, "bf16"),
             _delta((8, 8), (256, 256), len(RAGGED), 0, "bf16")]
    rows += [_delta((16, 16), sizes, 1, 4096, "bf16") for sizes in ((192, 128), (64, 128), (128, 256), (256, 64))]
    rows += [_delta((16, 32), (128, 128), 1, 4096, "f32"), _delta((8, 8), (256, 256), 1, 4096, "bf16")]
    rows += [_delta((32, 32), (128, 128), sequences, tokens, "bf16", 1) for sequences, tokens in ((1, 8192), (4, 2048))]
    rows += [_delta((16, 16), (64, 64), 1, 4096, "bf16", 1)]
    rows += [_delta((16, 32), (128, 128), *shape, "bf16") for shape in ((1, 8192), (1, 32768), (1, 131072), (4, 8192), (8, 1024))]
    rows += [_delta(heads, (128, 128), 1, tokens, "bf16") for heads, tokens in (((16, 64), 8192), ((16, 64), 32768), ((16, 48), 8192),
                                                                               ((2, 8), 8192), ((2, 8), 32768))]
    seen, unique = set(), []
    for row in rows:
        if (key := tuple(row.values())) not in seen:
            seen.add(key)
            unique.append(row)
    return sorted(unique, key=tuning)


def tuning(row):
    """The properties of a row for which FLA tunes its kernels."""
    return row["Hk"], row["Hv"], row["K"], row["V"], row["dtype"], row["kda"], row["T"] == 0


HEADS_OF = {64: (32, 8), 80: (32, 8), 96: (32, 8), 128: (32, 8), 256: (16, 2), 512: (8, 2)}  # query and KV heads by head size
STANDARD = ["4v4", "8v4", "4v2", "3v3", "8v8", "2v2"]  # recipes that have kernels of their own
OTHERS = ["5v3", "6v4", "7v6"]
PLAIN = ["f16", "bf16", "f32"]


def _attention(heads, D, N, context, T, recipe, layout="tiles", paged=0):
    return dict(Hq=heads[0], Hk=heads[1], D=D, N=N, context=context, T=T, recipe=recipe, layout=layout, paged=paged)


def decode():
    """One new token over a cache."""
    rows = []
    for D, heads in HEADS_OF.items():
        some = STANDARD + OTHERS + PLAIN if D == 128 else ["4v4", "8v4", "2v2", "5v3", "7v6", *PLAIN]
        tables = ([f"aura{bits}" for bits in ("4v4", "2v2")] if D in (64, 128) else []) + (["tq4", "tqhb8"] if D in (256, 512) else [])
        kinds = [(recipe, "tiles", 0) for recipe in some + tables]
        kinds += [(recipe, "rows", 0) for recipe in ("4v4", "8v4", "5v3", "bf16", *tables)]
        kinds += [("4v4", "tiles", 1), ("8v4", "rows", 1), ("f16", "tiles", 1), ("f32v4", "tiles", 0)]
        for N in (8, 1):
            rows += [_attention(heads, D, N, 32768, 1, *kind) for kind in kinds]
    rows += [_attention((64, 8), 128, 32, 4096, 1, recipe) for recipe in ("f16", "bf16", "4v4", "8v4", "4v2", "3v3")]
    for N, context in ((1, 131072), (1, 4096)):
        rows += [_attention((32, 8), 128, N, context, 1, recipe) for recipe in ("f16", "4v4", "8v4", "4v2", "3v3")]
    rows += [_attention((16, 2), 256, 32, 32768, 1, recipe) for recipe in ("4v4", "8v4", "4v2", "3v3")]
    return rows + [_attention((32, 8), 256, 1, 32768, 1, recipe) for recipe in ("4v4", "8v4", "4v2", "3v3")]


def prompts():
    """Many new tokens, causal. The context counts them."""
    rows = []
    for heads, D in (((32, 8), 128), ((16, 2), 256), ((32, 8), 64)):
        for N, T, context in ((1, 2048, 32768), (1, 512, 131072), (1, 8192, 8192), (16, 512, 4096)):
            rows += [_attention(heads, D, N, context, T, recipe) for recipe in ("f16", "4v4", "8v4", "bf16", "5v3")]
            if N == 1 and context == 32768:
                rows += [_attention(heads, D, N, context, T, "4v4", "rows"), _attention(heads, D, N, context, T, "8v4", "tiles", 1)]
    return rows


def lanes_fit(recipe, D):
    """Can tiles lie in lanes order? As common/lanes_tile.h has it."""
    return recipe in PLAIN or (D % 32 == 0 and not recipe.startswith("tqhb"))


def options():
    """(op, options of a case) of every call. Long sequences are cut: they change how a call is split, not which kernel it takes."""
    found = []
    for row in delta():
        tokens = f"T={min(row['T'], 300)},N={min(row['N'], 2)}"
        if row["T"] == 0:
            tokens = "lens=" + ":".join(str(min(length, 300)) for length in RAGGED)
        found.append(("gated_delta_rule_prefill", f"{tokens},Hk={row['Hk']},Hv={row['Hv']},Dk={row['K']},Dv={row['V']},"
                      f"dtype={row['dtype']},kda={row['kda']},l2norm=1,out=separate"))
    for row in decode() + prompts():
        new, context = min(row["T"], 128), min(row["context"], 192)
        order = ",order=lanes" if row["layout"] == "tiles" and lanes_fit(row["recipe"], row["D"]) else ""
        paged = ",cache=paged,page=64" if row["paged"] else ""
        found.append(("compressed_attention", f"T={new},N={min(row['N'], 2)},context={context},Hq={row['Hq']},Hk={row['Hk']},"
                      f"D={row['D']},recipe={row['recipe']},layout={row['layout']}{order}{paged},dtype=bf16,lse=0"))
    return found


if __name__ == "__main__":
    for op, text in options():
        print(op, text)
