"""Rotations, packing and codecs of compressed KV rows in numpy float64, written from their definitions."""
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
BOOKS = json.loads((HERE / "codebooks.json").read_text())["tables"]
HADAMARD = json.loads((HERE / "hadamard_bits.json").read_text())["matrices"]
MASK = (1 << 64) - 1
D1 = {256: "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"}
D1[512] = D1[256] + "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85"


# ---------------------------------------------------------------- signs and rotations

def seed_signs(seed, d):
    """splitmix64 of the seed starts an xorshift64; each coordinate steps it and takes +1 for a set low bit."""
    z = (seed + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    state = (z ^ (z >> 31)) | 1
    signs = []
    for _ in range(d):
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        signs.append(1 if state & 1 else -1)
    return np.array(signs)


def table_signs(d):
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(D1[d]), np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(int)


def sign_bits(signs):
    """Bit j of the byte string, least significant first, is 1 where the sign is -1."""
    return np.packbits(signs < 0, bitorder="little")


def hadamard(d):
    """H_m (x) H_2^k with m in 1, 12, 20, 28; the power-of-two part in Sylvester order."""
    m = next(m for m in (1, 12, 20, 28) if d % m == 0 and (d // m) & (d // m - 1) == 0)
    h = np.ones((1, 1)) if m == 1 else np.array([[1.0 if c == "+" else -1.0 for c in row] for row in HADAMARD[str(m)]["rows"]])
    while len(h) < d:
        h = np.kron(h, [[1, 1], [1, -1]])
    return h


def rotation(kind, d):
    """The dense matrix Pi with y = Pi x. kind: None, ("srht", seed) or ("d1",)."""
    if kind is None:
        return np.eye(d)
    signs = seed_signs(kind[1], d) if kind[0] == "srht" else table_signs(d)
    return hadamard(d) * signs[None, :] / np.sqrt(d)


# ---------------------------------------------------------------- packing

def pack(codes, bits):
    """Dense little-endian bit stream: the row as one big integer, cut into 32-bit words."""
    rows = []
    for row in np.atleast_2d(codes):
        number = sum(int(c) << (j * bits) for j, c in enumerate(row))
        rows.append([(number >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))])
    return np.array(rows, np.uint32)


def unpack(words, bits, d):
    number = [sum(int(w) << (32 * i) for i, w in enumerate(row)) for row in words]
    return np.array([[(n >> (j * bits)) & ((1 << bits) - 1) for j in range(d)] for n in number])


# ---------------------------------------------------------------- tables (levels, and the factor that brings them to N(0,1) units)

def lloyd_max(bits):
    tables = json.loads((HERE / "lloyd_max.json").read_text())["tables"]
    half = next(t for t in tables if t["bits"] == bits)["levels_positive"]
    return np.array([-x for x in reversed(half)] + half)


def weft_table(bits):
    tables = json.loads((HERE / "weft_tables.json").read_text())["tables"]
    t = next(t for t in tables if t["bits"] == bits)
    return (np.array(t["n_all"]) + 0.5) * t["step"]


class Codec:
    """One side of a cache. Decoded rotated row = gain * table[code], with the table and the gain in the format's own units."""

    def __init__(self, family, bits, d, rotate):
        self.family, self.bits, self.d, self.rotate = family, bits, d, rotate
        self.groups = 2 if family.startswith("tq") and d == 512 else 1
        if family == "aura":
            self.table, self.gain, self.units = np.array(BOOKS["aura_%d_unit_d128" % bits]) * np.sqrt(128 / d), "matched", "unit_vector"
        elif family == "lloyd_max":
            self.table, self.gain, self.units = lloyd_max(bits) / np.sqrt(d), "matched", "unit_vector"
        elif family == "weft1":
            self.table, self.gain, self.units = weft_table(bits), "unbiased", "normal"
        else:
            self.table = np.array(BOOKS["tq_4" if family == "tq" else "tq_hb_%d" % bits])
            self.gain, self.units = "rms", "l2" if d == 256 else "rms_per_half"
        self.packing = "byte" if family == "tq_hb" else "dense"
        self.pi = rotation(rotate, d)

    def describe(self):
        r = {"rotation": "none"} if self.rotate is None else {"rotation": "srht", "seed": self.rotate[1]} \
            if self.rotate[0] == "srht" else {"rotation": "tq_d1"}
        return {"format": self.family, "bits": self.bits, "d": self.d, "gain": self.gain, "gain_units": self.units,
                "gain_dtype": "f16" if self.family == "weft1" else "f32", "packing": self.packing, **r}

    def encode(self, x):
        """codes, stored gains, and each row's distance (N(0,1) units) to the nearest decision boundary."""
        y = np.asarray(x, np.float64) @ self.pi.T
        rows = len(y)
        y = y.reshape(rows, self.groups, -1)
        g = y.shape[2]
        norm = np.linalg.norm(y, axis=2, keepdims=True)
        z = np.divide(y * np.sqrt(g), norm, out=np.zeros_like(y), where=norm > 1e-10)
        unit = np.sqrt(self.d) if self.units == "unit_vector" else 1.0        # table * unit is in N(0,1) units
        edges = (self.table[1:] + self.table[:-1]) / 2 * unit
        codes = (z[..., None] > edges).sum(-1)                               # strict: ties go to the lower cell
        margin = np.abs(z[..., None] - edges).min((-1, -2, -3))
        c = self.table[codes]
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.gain == "matched":
                gain = norm[..., 0] / np.linalg.norm(c, axis=2)
            elif self.gain == "unbiased":
                gain = np.where(norm[..., 0] > 0, norm[..., 0] ** 2 / (y * c).sum(2), 0.0)
                gain = gain.astype(np.float16)
            else:
                gain = norm[..., 0] if self.d == 256 else norm[..., 0] / np.sqrt(g)
        gain = gain.astype(np.float32)
        return codes.reshape(rows, -1), gain if self.groups > 1 else gain[:, 0], margin

    def rotated(self, codes, gains):
        factor = 1 / np.sqrt(self.d) if self.units == "l2" else 1.0
        gains = np.asarray(gains, np.float64).reshape(len(codes), self.groups, 1) * factor
        return (self.table[codes].reshape(len(codes), self.groups, -1) * gains).reshape(len(codes), -1)

    def decode(self, codes, gains):
        return self.rotated(codes, gains) @ self.pi

    def store(self, codes):
        return codes.astype(np.uint8) if self.packing == "byte" else pack(codes, self.bits)
