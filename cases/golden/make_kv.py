"""Golden vectors of the KV codec ops: tables, packing, signs, rotation, encode and decode; asserts the published numbers."""
import json

import numpy as np

from golden_io import HERE, agree, f32, keep64, save
from kv_math import Codec, hadamard, lloyd_max, pack, rotation, seed_signs, sign_bits, table_signs, unpack

SOURCE = "numpy float64, dense matrices"


def wave(d):
    j = np.arange(d)
    return np.sin(0.37 * (j + 1)) + 0.25 * np.cos(1.9 * j)


def near(x, digits, unit=1e-7):
    assert np.abs(np.asarray(x) - np.asarray(digits)).max() < 0.51 * unit, (x, digits)


# ---------------------------------------------------------------- published numbers

def published():
    """Values printed in the format notes for x = wave(d); computed there by another program."""
    hexes = lambda words: " ".join("%08x" % w for w in words)
    assert hexes(pack(np.arange(32) % 8, 3)[0]) == "88fac688 c688fac6 fac688fa"
    for seed, text in enumerate(("99 2f 1c d9 3f 14 02 f3 ef 8c 59 9a 45 02 8d ee", "9b 4d 84 6e e9 50 a5 3f 19 a8 22 49 14 4b 6a 13",
                                 "39 c8 6a f7 35 b7 e8 2c 67 37 bc 0a 3e a4 15 0d")):
        assert sign_bits(seed_signs(seed, 128)).tobytes() == bytes.fromhex(text)
    x = wave(64)
    near(np.linalg.norm(x), 5.8656364)
    near((rotation(("srht", 0), 64) @ x / np.linalg.norm(x))[:8],
         (.0876121, -.0352818, -.1153792, -.1367843, -.1214261, .0293427, .1247432, .0014935))
    for family, bits, radius, gain, words in (
            ("aura", 4, .9130974, 6.4238888, "8d92226c 8fd20546 8acf5bc1 6c5191b5 baad2937 68b51da3 a0a4071d 1216bbe9"),
            ("lloyd_max", 4, .9471808, 6.1927313, "8b84446a 8eb41657 89af6ab2 6a6283a6 a99b4847 68a62b95 9295173b 3437a9c8"),
            ("aura", 3, .9498247, 6.1754940, "d396229d f7699f20 75986b92 62b26513 20cd72b3 24bb7482"),
            ("lloyd_max", 3, None, 6.1679365, "d396229d f7699f20 75986b92 62b26513 20cd72b3 24bb3482"),
            ("lloyd_max", 2, .9240506, 6.3477434, "bd15b916 6489ab68 6939ab25 01ae8912")):
        codec = Codec(family, bits, 64, ("srht", 0))
        codes, gains, _ = codec.encode(x[None])
        assert hexes(pack(codes, bits)[0]) == words, (family, bits)
        near(gains[0], gain, 1e-6)                                            # the gain is a float32
        assert radius is None or abs(np.linalg.norm(codec.table[codes]) - radius) < 1.1e-7   # levels of 7 digits there
    for d, first, norms, tq, tq_sum, hb, hb_sum in (
            (256, (-.0949136, .4560908, .5006043, .3086848, -.8363014, -.9490680, .6421227, 1.1281583), (11.6537206,),
             (7, 10, 10, 9, 3, 3, 11, 13, 8, 7, 6, 6, 8, 5, 8, 7), 1865,
             (123, 151, 153, 143, 85, 80, 160, 184, 130, 123, 116, 117, 132, 103, 133, 119), 32152),
            (512, (.1324342, .5892194, .1621980, .9656786, -.7985138, -.1318064, .4400141, -.3127079), (.6943768, .7605275),
             (8, 11, 8, 12, 3, 7, 10, 6, 7, 5, 4, 6, 9, 8, 9, 7), 3780,
             (135, 159, 136, 179, 85, 121, 151, 111, 121, 108, 97, 111, 145, 130, 138, 124), 64562)):
        near((rotation(("d1",), d) @ wave(d))[:8], first)
        for family, bits, head, total in (("tq", 4, tq, tq_sum), ("tq_hb", 8, hb, hb_sum)):
            codes, gains, _ = Codec(family, bits, d, ("d1",)).encode(wave(d)[None])
            assert tuple(codes[0, :16]) == head and codes.sum() == total, (family, d)
            near(gains.ravel(), norms, 2e-6 if d == 256 else 1e-7)


# ---------------------------------------------------------------- files

def tables():
    exact = {t["bits"]: t for t in json.loads((HERE / "lloyd_max.json").read_text())["tables"]}
    weft = json.loads((HERE / "weft_tables.json").read_text())["tables"]
    save("kv_tables_lloyd_max", "kv_tables", "Newton on the centroid equations, 50 digits", "1e-12", {"table": "lloyd_max"}, {},
         {**{"levels_%d" % b: keep64(lloyd_max(b)) for b in exact}, "distortion": keep64([t["D"] for t in exact.values()]),
          "bits": np.array(list(exact), np.int32)})
    save("kv_tables_weft1", "kv_tables", "exact search over the half-integer grid", "1e-12", {"table": "weft1"}, {},
         {**{"n_%d" % t["bits"]: np.array(t["n_all"], np.int32) for t in weft}, "step": np.array([t["step"] for t in weft], np.float32),
          "distortion": keep64([t["D"] for t in weft]), "bits": np.array([t["bits"] for t in weft], np.int32)})
    rows = lambda m: (hadamard(m) < 0) @ (1 << np.arange(m, dtype=np.int64))
    save("kv_hadamard_bits", "hadamard_bits", "Paley", "0", {}, {}, {"h%d" % m: rows(m).astype(np.uint32) for m in (12, 20, 28)})


def packing():
    for bits in range(2, 9):
        d = 32 if bits == 3 else 40                # 40 coordinates leave padding bits in most widths
        codes = np.stack([np.arange(d) % (1 << bits), np.full(d, (1 << bits) - 1),
                          np.random.default_rng(200 + bits).integers(0, 1 << bits, d)])
        words = pack(codes, bits)
        assert (unpack(words, bits, d) == codes).all()
        save("kv_pack_%d" % bits, "kv_pack", "numpy, row as one integer", "0", {"bits": bits, "d": d, "packing": "dense"},
             dict(codes=codes.astype(np.int32)), dict(words=words))


def signs():
    seeds = np.array([0, 1, 2, 3, 39, 12345678901234567, -1], np.int64)       # -1 is 2^64 - 1
    for d in (80, 128, 512):
        bits = np.stack([sign_bits(seed_signs(int(s) % (1 << 64), d)) for s in seeds])
        save("kv_signs_%d" % d, "kv_signs", "Python integers", "0", {"d": d}, dict(seed=seeds), dict(bits=bits))
    for d in (256, 512):
        save("kv_signs_tq_d1_%d" % d, "kv_signs", "published byte table", "0", {"d": d, "table": "tq_d1"}, {},
             dict(bits=sign_bits(table_signs(d))))


def rotations():
    for d, kind in ((64, ("srht", 0)), (128, ("srht", 1)), (80, ("srht", 2)), (96, ("srht", 3)), (112, ("srht", 4)),
                    (192, ("srht", 5)), (256, ("d1",)), (512, ("d1",))):
        pi = rotation(kind, d)
        agree("orthogonal", pi @ pi.T, np.eye(d), 1e-14)
        spike = np.zeros(d)
        spike[3 * d // 8 + 1] = 1
        x = f32(np.stack([wave(d), np.random.default_rng(d).standard_normal(d), spike]))
        signs_d = seed_signs(kind[1], d) if kind[0] == "srht" else table_signs(d)
        args = {"d": d, "rotation": "srht" if kind[0] == "srht" else "tq_d1", **({"seed": kind[1]} if kind[0] == "srht" else {})}
        save("kv_rotate_%d" % d, "kv_rotate", SOURCE, "1e-6", args, dict(x=x, sign_bits=sign_bits(signs_d)), dict(y=x @ pi.T))


def encode(codec, gaussians):
    """Rows: the wave, Gaussian rows of several sizes kept away from decision boundaries, a spike, zeros."""
    d = codec.d
    rng = np.random.default_rng(1000 * d + 10 * codec.bits + len(codec.family))
    rows = [wave(d)]
    for size in gaussians:
        while True:
            row = f32(size * rng.standard_normal(d))
            if codec.encode(row[None])[2][0] > 1e-5:
                break
        rows.append(row)
    spike = np.zeros(d)
    spike[5] = 2.5
    x = f32(np.stack(rows + [spike, np.zeros(d)]))
    codes, gains, margin = codec.encode(x)
    assert (margin[:-2] > 3e-6).all() and margin[-2] > 1e-4, (codec.describe(), margin)
    nearest = np.abs(codec.table).argmin()         # to zero; the lower of two that are equally near
    assert (codes[-1] == nearest).all() and (gains[-1] == 0).all()
    x_hat = codec.decode(codes, gains)
    if codec.gain == "matched":                    # the decoded row keeps the norm
        agree("norm", np.linalg.norm(x_hat, axis=1), np.linalg.norm(x, axis=1), 1e-6)
    if codec.gain == "unbiased":                   # <x_hat, x> = |x|^2 up to the f16 gain
        agree("projection", (x_hat * x).sum(1), (x * x).sum(1), 6e-4)
    name = "kv_encode_%s_%d_d%d" % (codec.family, codec.bits, d)
    save(name, "kv_encode", SOURCE, "1e-6", codec.describe(), dict(x=x, table=keep64(codec.table)),
         {"bytes" if codec.packing == "byte" else "words": codec.store(codes), "gains": gains, "x_hat": x_hat})


def encodes():
    for d in (64, 128):
        for family in ("aura", "lloyd_max"):
            for bits in (2, 3, 4):
                encode(Codec(family, bits, d, ("srht", 0 if d == 64 else 1)), (0.01, 1.0, 30.0))
    for d in (256, 512):
        for family, bits in (("tq", 4), ("tq_hb", 5), ("tq_hb", 6), ("tq_hb", 8)):
            encode(Codec(family, bits, d, ("d1",)), (1.0,))
    for bits in range(2, 9):
        encode(Codec("weft1", bits, 128, ("srht", bits)), (0.01, 1.0, 30.0))
    for d, bits in ((64, 4), (80, 4), (96, 3), (112, 5), (256, 4)):
        encode(Codec("weft1", bits, d, ("srht", 3)), (1.0,))


if __name__ == "__main__":
    published()
    tables()
    packing()
    signs()
    rotations()
    encodes()
