"""Writes small tokenizers and what the `tokenizers` library says about many texts: tokenizers.safetensors (see README.md)."""
import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizer_texts import FRAGMENTS, HOSTILE, PROSE

HERE = Path(__file__).parent
SHIPPED = HERE.parents[2] / "models" / "weft-11m" / "tokenizer.json"
GENERATED = 6000  # texts made of FRAGMENTS
MASK = (1 << 64) - 1

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN3_5 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
           r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train(split, vocabulary):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2,
                                  show_progress=False)
    tokenizer.train_from_iterator(PROSE + [" ".join(FRAGMENTS)], trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim", "<|fim_pad|>"]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False),
                          AddedToken("<keep>", lstrip=True, rstrip=True, normalized=False), AddedToken("<caf\u00e9>", normalized=True)])
    return tokenizer


def save(tokenizer, name, merges_as_text):
    """As compact JSON; with merges as "a b", as older files have them, or as pairs."""
    content = json.loads(tokenizer.to_str())
    if merges_as_text:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    return Tokenizer.from_file(str(path))


def splitmix64(state):
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def generated(seed):
    state, count = splitmix64(seed)
    text = ""
    for _ in range(1 + count % 40):
        state, value = splitmix64(state)
        text += FRAGMENTS[value % len(FRAGMENTS)]
    return text


def fnv1a(ids):
    """Of the ids as little-endian 32-bit numbers."""
    value = 0xCBF29CE484222325
    for byte in np.asarray(ids, dtype="<u4").tobytes():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def packed(texts):
    """Texts one after the other, and where each begins."""
    blobs = [t.encode() if isinstance(t, str) else t for t in texts]
    offsets = np.concatenate([[0], np.cumsum([len(b) for b in blobs])]).astype(np.int32)
    return np.frombuffer(b"".join(blobs), dtype=np.uint8).copy(), offsets


def classes():
    """The class of every character by the library's own regular expressions, as runs: letter, mark, number, space, other."""
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    kind = np.full(0x110000, 4, dtype=np.uint8)
    for value, pattern in enumerate((r"\p{L}", r"\p{M}", r"\p{N}", r"\s")):
        remove = pre_tokenizers.Split(Regex(pattern), behavior="removed")
        for begin in range(0, len(points), 20000):
            part = points[begin:begin + 20000]
            kept = set("".join(t for t, _ in remove.pre_tokenize_str("".join(map(chr, part)))))
            kind[[c for c in part if chr(c) not in kept]] = value
    starts = np.flatnonzero(np.diff(kind, prepend=255))
    return starts.astype(np.int32), kind[starts]


def main():
    files = {"qwen2": save(train(QWEN2, 1100), "tokenizer_qwen2", True), "qwen3_5": save(train(QWEN3_5, 1100), "tokenizer_qwen3_5", False)}
    files["shipped"] = Tokenizer.from_file(str(SHIPPED))
    whole = json.loads(files["qwen3_5"].to_str())  # with tokens that only ignore_merges can reach
    whole["model"]["ignore_merges"] = True
    whole["model"]["merges"] = whole["model"]["merges"][:400]
    files["ignore_merges"] = Tokenizer.from_str(json.dumps(whole))

    texts = PROSE + HOSTILE
    out = {}
    out["texts"], out["text_offsets"] = packed(texts)
    out["fragments"], out["fragment_offsets"] = packed(FRAGMENTS)
    out["class_starts"], out["classes"] = classes()
    made = [generated(seed) for seed in range(GENERATED)]
    rng = np.random.default_rng(7)
    for name, tokenizer in files.items():
        rows = [tokenizer.encode(t, add_special_tokens=False).ids for t in PROSE]
        out[f"{name}.ids"] = np.concatenate(rows).astype(np.uint16)
        out[f"{name}.id_offsets"] = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int32)
        out[f"{name}.hashes"] = np.array([fnv1a(tokenizer.encode(t, add_special_tokens=False).ids) for t in texts], dtype=np.uint64).view(np.int64)
        out[f"{name}.generated"] = np.array([fnv1a(tokenizer.encode(t, add_special_tokens=False).ids) for t in made], dtype=np.uint64).view(np.int64)
    # Ids in no order of any text: bytes that form no character.
    # Not <café>: the library takes the é of an added token for the spelling of a byte and decodes it to one, which is no é.
    allowed = [i for i in range(files["qwen3_5"].get_vocab_size()) if i != files["qwen3_5"].token_to_id("<caf\u00e9>")]
    random_ids = rng.choice(allowed, (150, 12)).astype(np.int32)
    out["random_ids"] = random_ids
    out["decoded"], out["decoded_offsets"] = packed([files["qwen3_5"].decode(r.tolist(), skip_special_tokens=False) for r in random_ids])
    out["decoded_plain"], out["decoded_plain_offsets"] = packed([files["qwen3_5"].decode(r.tolist(), skip_special_tokens=True) for r in random_ids])
    save_file(out, HERE / "tokenizers.safetensors", metadata={"source": f"tokenizers {tokenizers.__version__}"})
    print({k: v.shape for k, v in out.items()}, (HERE / "tokenizers.safetensors").stat().st_size)


if __name__ == "__main__":
    main()
