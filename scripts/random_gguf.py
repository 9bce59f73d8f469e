#!/usr/bin/env python3
"""Writes a GGUF file of a hybrid model with random weights: for tests and measurements of llama.cpp, not for texts.

    scripts/random_gguf.py --arch qwen35 --shape tiny tiny.gguf
    scripts/random_gguf.py --arch qwen35 --shape 0.8b --layers 4 --type q8_0 some.gguf

Wants the packages gguf and numpy. The file has no tokenizer. Every fourth layer is attention, the others are gated delta networks. Other
types of weights than f32 and q8_0 come from f32 with llama-quantize.
"""
import argparse
import json
import sys

try:
    import gguf
    import numpy
except ImportError:
    gguf = None  # --help does without

# width and experts of a shape; key_heads and value_heads are those of the delta networks, heads and kv_heads those of attention
SHAPES = {
    "tiny": dict(hidden=128, inner=256, heads=4, kv_heads=2, head_dim=64, key_heads=2, value_heads=4, vocab=512),
    "narrow": dict(hidden=1024, inner=2048, heads=4, kv_heads=2, head_dim=64, key_heads=16, value_heads=32, vocab=512),
    "0.8b": dict(hidden=1024, inner=3584, heads=8, kv_heads=2, head_dim=256, key_heads=16, value_heads=16, vocab=512),
    "9b": dict(hidden=4096, inner=12288, heads=16, kv_heads=4, head_dim=256, key_heads=16, value_heads=32, vocab=512),
}
DIM, WIDTH, EXPERTS, EXPERTS_USED = 128, 4, 8, 2
BLOCK = 1 << 22  # random numbers are repeated beyond so many: drawing them would take most of the time


class Writer:
    def __init__(self, path, arch, quantised):
        self.file = gguf.GGUFWriter(path, arch)
        self.quantised = quantised
        self.rng = numpy.random.default_rng(1)
        self.numbers = self.rng.standard_normal(BLOCK).astype(numpy.float32)

    def weight(self, name, *sizes, deviation=None, keep=False):
        """Normal numbers. Sizes are those of numpy: outputs first. keep: f32 whatever the type of the file."""
        count = int(numpy.prod(sizes))
        values = numpy.resize(numpy.roll(self.numbers, int(self.rng.integers(BLOCK))), count)
        values = (values * numpy.float32(deviation or sizes[-1] ** -0.5)).reshape(sizes)
        if self.quantised and not keep and len(sizes) > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            self.file.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            self.file.add_tensor(name, values)

    def ones(self, name, size):
        self.file.add_tensor(name, numpy.ones(size, numpy.float32))

    def values(self, name, values):
        self.file.add_tensor(name, values.astype(numpy.float32))


def add_tokenizer(file, path):
    """The tokenizer of a tokenizer.json, byte-level BPE as Qwen's, so that a server can turn tokens into text."""
    read = json.loads(path.read_text())
    special = {token["id"] for token in read["added_tokens"]}
    tokens = sorted(read["model"]["vocab"].items(), key=lambda entry: entry[1])
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in tokens]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list([text for text, _ in tokens])
    file.add_token_types(kinds)
    file.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in read["model"]["merges"]])
    file.add_eos_token_id(min(special))


def add_header(file, arch, s, layers, tokenizer):
    file.add_block_count(layers)
    file.add_context_length(32768)
    file.add_embedding_length(s["hidden"])
    file.add_feed_forward_length(s["inner"])
    file.add_head_count(s["heads"])
    file.add_head_count_kv(s["kv_heads"])
    file.add_key_length(s["head_dim"])
    file.add_value_length(s["head_dim"])
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(1e6)
    file.add_rope_dimension_count(s["head_dim"] // 2)
    if arch != "qwen3next":
        quarter = s["head_dim"] // 8
        file.add_rope_dimension_sections([quarter, quarter // 2, quarter // 2, 0])
    if arch != "qwen35":
        file.add_expert_count(EXPERTS)
        file.add_expert_used_count(EXPERTS_USED)
        file.add_expert_feed_forward_length(s["inner"] // 4)
        file.add_expert_shared_feed_forward_length(s["inner"] // 4)
    file.add_ssm_conv_kernel(WIDTH)
    file.add_ssm_inner_size(s["value_heads"] * DIM)
    file.add_ssm_state_size(DIM)
    file.add_ssm_time_step_rank(s["value_heads"])
    file.add_ssm_group_count(s["key_heads"])
    file.add_uint32(f"{arch}.full_attention_interval", 4)
    file.add_vocab_size(s["vocab"])
    if tokenizer:
        add_tokenizer(file, tokenizer)
    else:
        file.add_tokenizer_model("none")


def add_attention(out, at, s):
    rows = s["heads"] * s["head_dim"]
    out.weight(at + "attn_q.weight", 2 * rows, s["hidden"])
    out.weight(at + "attn_k.weight", s["kv_heads"] * s["head_dim"], s["hidden"])
    out.weight(at + "attn_v.weight", s["kv_heads"] * s["head_dim"], s["hidden"])
    out.weight(at + "attn_output.weight", s["hidden"], rows)
    out.ones(at + "attn_q_norm.weight", s["head_dim"])
    out.ones(at + "attn_k_norm.weight", s["head_dim"])


def add_delta(out, at, s, arch):
    heads, values = s["value_heads"], s["value_heads"] * DIM
    channels = 2 * s["key_heads"] * DIM + values
    out.weight(at + "attn_qkv.weight", channels, s["hidden"])
    out.weight(at + "attn_gate.weight", values, s["hidden"])
    out.weight(at + "ssm_conv1d.weight", channels, WIDTH, deviation=0.5, keep=True)
    out.weight(at + "ssm_dt.bias", heads, deviation=1.0)
    out.values(at + "ssm_a", -numpy.exp(out.rng.uniform(-4, 0, heads)))
    if arch == "qwen3next":
        out.weight(at + "ssm_ba.weight", 2 * heads, s["hidden"])
    else:
        out.weight(at + "ssm_beta.weight", heads, s["hidden"])
        out.weight(at + "ssm_alpha.weight", heads, s["hidden"])
    out.ones(at + "ssm_norm.weight", DIM)
    out.weight(at + "ssm_out.weight", s["hidden"], values)


def add_feed_forward(out, at, s, arch):
    hidden, inner = s["hidden"], s["inner"]
    if arch == "qwen35":
        out.weight(at + "ffn_gate.weight", inner, hidden)
        out.weight(at + "ffn_up.weight", inner, hidden)
        out.weight(at + "ffn_down.weight", hidden, inner)
        return
    inner //= 4
    out.weight(at + "ffn_gate_inp.weight", EXPERTS, hidden, keep=True)
    out.weight(at + "ffn_gate_exps.weight", EXPERTS, inner, hidden)
    out.weight(at + "ffn_up_exps.weight", EXPERTS, inner, hidden)
    out.weight(at + "ffn_down_exps.weight", EXPERTS, hidden, inner)
    out.weight(at + "ffn_gate_inp_shexp.weight", hidden)
    out.weight(at + "ffn_gate_shexp.weight", inner, hidden)
    out.weight(at + "ffn_up_shexp.weight", inner, hidden)
    out.weight(at + "ffn_down_shexp.weight", hidden, inner)


def write(path, arch, s, layers, kind, tokenizer=None):
    """A file of a shape as in SHAPES; `tokenizer` is a tokenizer.json of as many tokens as s["vocab"]."""
    out = Writer(path, arch, kind == "q8_0")
    add_header(out.file, arch, s, layers, tokenizer)
    out.weight("token_embd.weight", s["vocab"], s["hidden"], deviation=1.0)
    out.ones("output_norm.weight", s["hidden"])
    out.weight("output.weight", s["vocab"], s["hidden"])
    for i in range(layers):
        at = f"blk.{i}."
        out.ones(at + "attn_norm.weight", s["hidden"])
        out.ones(at + "post_attention_norm.weight", s["hidden"])
        if (i + 1) % 4 == 0:
            add_attention(out, at, s)
        else:
            add_delta(out, at, s, arch)
        add_feed_forward(out, at, s, arch)
    out.file.write_header_to_file()
    out.file.write_kv_data_to_file()
    out.file.write_tensors_to_file()
    out.file.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--arch", choices=["qwen35", "qwen35moe", "qwen3next"], default="qwen35")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", choices=["f32", "q8_0"], default="f32")
    args = parser.parse_args()
    if gguf is None:
        sys.exit("random_gguf.py: wants the packages gguf and numpy: pip install gguf")
    write(args.file, args.arch, SHAPES[args.shape], args.layers, args.type)


if __name__ == "__main__":
    main()
