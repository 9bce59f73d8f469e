#!/usr/bin/env python3
"""Writes a checkpoint of random bf16 weights with the shapes of a Qwen3.5 model: for measuring speed and memory, not for texts.

    scripts/random_checkpoint.py --shape 9b random-9b
    weft speed --backend cuda --model random-9b --batch 1 8 32

Wants numpy. Without tokenizer.json, so `weft speed` and `weft plan` run it, `weft generate` does not.
"""
import argparse
import json
import pathlib
import sys

try:
    import numpy
except ImportError:
    numpy = None  # --help does without

SHAPES = {
    "tiny": dict(hidden=256, layers=8, heads=4, kv_heads=2, head_dim=128, key_heads=2, value_heads=4, inner=768, vocab=6144),
    "0.8b": dict(hidden=1024, layers=24, heads=8, kv_heads=2, head_dim=256, key_heads=16, value_heads=16, inner=3584, vocab=248320),
    "9b": dict(hidden=4096, layers=32, heads=16, kv_heads=4, head_dim=256, key_heads=16, value_heads=32, inner=12288, vocab=248320),
}
LINEAR_DIM, CONV_WIDTH, SHARD_BYTES = 128, 4, 4 << 30


def tensors(s):
    """(name, sizes, deviation) of every tensor; deviation 0: zeros, as norms have them around 1."""
    hidden, inner = s["hidden"], s["inner"]
    keys, values = s["key_heads"] * LINEAR_DIM, s["value_heads"] * LINEAR_DIM
    yield "model.embed_tokens.weight", [s["vocab"], hidden], 1.0
    for i in range(s["layers"]):
        name = f"model.layers.{i}."
        yield name + "input_layernorm.weight", [hidden], 0
        if (i + 1) % 4 == 0:
            at = name + "self_attn."
            yield at + "q_proj.weight", [2 * s["heads"] * s["head_dim"], hidden], hidden**-0.5
            yield at + "k_proj.weight", [s["kv_heads"] * s["head_dim"], hidden], hidden**-0.5
            yield at + "v_proj.weight", [s["kv_heads"] * s["head_dim"], hidden], hidden**-0.5
            yield at + "o_proj.weight", [hidden, s["heads"] * s["head_dim"]], (s["heads"] * s["head_dim"]) ** -0.5
            yield at + "q_norm.weight", [s["head_dim"]], 0
            yield at + "k_norm.weight", [s["head_dim"]], 0
        else:
            at = name + "linear_attn."
            yield at + "in_proj_qkv.weight", [2 * keys + values, hidden], hidden**-0.5
            yield at + "in_proj_z.weight", [values, hidden], hidden**-0.5
            yield at + "in_proj_b.weight", [s["value_heads"], hidden], hidden**-0.5
            yield at + "in_proj_a.weight", [s["value_heads"], hidden], hidden**-0.5
            yield at + "conv1d.weight", [2 * keys + values, 1, CONV_WIDTH], 0.5
            yield at + "A_log", [s["value_heads"]], 0.5
            yield at + "dt_bias", [s["value_heads"]], 0.5
            yield at + "norm.weight", [LINEAR_DIM], 0.1
            yield at + "out_proj.weight", [hidden, values], values**-0.5
        yield name + "post_attention_layernorm.weight", [hidden], 0
        yield name + "mlp.gate_proj.weight", [inner, hidden], hidden**-0.5
        yield name + "mlp.up_proj.weight", [inner, hidden], hidden**-0.5
        yield name + "mlp.down_proj.weight", [hidden, inner], inner**-0.5
    yield "model.norm.weight", [hidden], 0
    yield "lm_head.weight", [s["vocab"], hidden], hidden**-0.5


def config(s):
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": s["vocab"], "hidden_size": s["hidden"], "intermediate_size": s["inner"], "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"],
        "linear_num_key_heads": s["key_heads"], "linear_num_value_heads": s["value_heads"],
        "linear_key_head_dim": LINEAR_DIM, "linear_value_head_dim": LINEAR_DIM, "linear_conv_kernel_dim": CONV_WIDTH,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(s["layers"])],
        "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "eos_token_id": 0,
    }


def bf16(values):
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def write_shard(path, shard, pool, random):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, sizes, _ in shard:
        count = 2 * int(numpy.prod(sizes))
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, sizes, deviation in shard:
            scaled = bf16(pool * numpy.float32(deviation))
            left = int(numpy.prod(sizes))
            while left > 0:  # pieces of the pool from random places on
                first = int(random.integers(len(scaled) // 2)) if left > 64 else 0
                piece = scaled[first : first + left]
                out.write(memoryview(piece))
                left -= len(piece)


def write(directory, shape):
    """A checkpoint of a shape as in SHAPES."""
    random = numpy.random.default_rng(1)
    pool = random.standard_normal(1 << 22, dtype=numpy.float32)
    directory.mkdir(parents=True, exist_ok=True)
    shards, size = [[]], 0
    for tensor in tensors(shape):
        count = 2 * int(numpy.prod(tensor[1]))
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += count
    index = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / name, shard, pool, random)
        index.update({tensor[0]: name for tensor in shard})
        print(f"{name}: {len(shard)} tensors", file=sys.stderr)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="9b")
    args = parser.parse_args()
    if numpy is None:
        raise SystemExit("random_checkpoint.py wants numpy, which this Python does not have.")
    write(args.directory, SHAPES[args.shape])


if __name__ == "__main__":
    main()
