"""Writes blocks of every GGUF weight type and their values as the package gguf widens them (see README.md).

Per type: random blocks with scales as weights have them, then blocks whose scales are zero, subnormal, large and negative. What the
package can quantise is also quantised from weights: `T.weights` and `T.quantised`.
"""
import importlib.metadata
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "weight_blocks.safetensors"
TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
# Offsets of the f16 numbers in a block.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
SPECIAL = np.array([0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504.0, -65504.0, 1.0], np.float16)


def random_blocks(name, rng):
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    count = len(SPECIAL) * (2 if numbers == 32 else 1) + 4
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = (rng.standard_normal(count) * 0.01).astype(np.float16)
        scales[:len(SPECIAL)] = np.roll(SPECIAL, at)  # a scale and a minimum differ
        blocks[:, at:at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def weights(rng):
    """Rows of 256: as weights are, zeros, one outlier, ties between two codes, a scale below f16, one sign."""
    rows = rng.standard_normal((12, 256)).astype(np.float32) * np.float32(0.02)
    rows[1] = 0
    rows[2, 77] = 3
    rows[3] = rng.integers(-16, 17, 256) / np.float32(16)
    rows[4] *= np.float32(1e-30)
    rows[5] = abs(rows[5])
    rows[6] = -abs(rows[6])
    rows[7] = rng.integers(-254, 255, 256).astype(np.float32) / 2
    rows[8] *= np.float32(1e-6)
    rows[9] *= np.float32(1e4)
    return rows


def main():
    rng = np.random.default_rng(20)
    out = {"weights": weights(rng)}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        blocks = np.frombuffer(rng.bytes(2048), np.uint8) if name in ("F16", "BF16") else random_blocks(name, rng)
        if name == "F16":  # every class of numbers but NaN, whose payload numpy may change
            halves = blocks.view(np.uint16).copy()
            halves[(halves & 0x7c00) == 0x7c00] &= 0xfc00
            blocks = halves.view(np.uint8)
        if name == "BF16":
            halves = blocks.view(np.uint16).copy()
            halves[(halves & 0x7f80) == 0x7f80] &= 0xff80
            blocks = halves.view(np.uint8)
        values = dequantize(blocks, kind)
        out[name + ".blocks"] = blocks.reshape(-1)
        out[name + ".values"] = np.ascontiguousarray(values.reshape(-1)).view(np.uint32)
        try:
            out[name + ".quantised"] = quantize(out["weights"], kind).view(np.uint8).reshape(-1)
        except NotImplementedError:
            pass
    save_file(out, OUT, metadata={"source": "gguf " + importlib.metadata.version("gguf")})
    print(OUT.stat().st_size, "bytes:", sorted(out))


if __name__ == "__main__":
    main()
