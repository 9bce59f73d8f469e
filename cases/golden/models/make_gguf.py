"""Writes the golden checkpoints and tokenizers as GGUF files, with llama.cpp's own converter (see README.md).

    python cases/golden/models/make_gguf.py LLAMA_CPP

LLAMA_CPP is a source tree of llama.cpp with its folder `conversion`, as scripts/llama.sh unpacks it. The converter knows tokenizers by a
hash of what they do; that of these small ones is replaced by the name of their pre-tokenizer.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(1, sys.argv[1])
sys.path.insert(1, sys.argv[1] + "/gguf-py")

import gguf  # noqa: E402
from conversion import ModelBase, ModelType, get_model_class  # noqa: E402
from conversion.base import TextModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


def convert(directory, out, outtype, mtp=False, pre=None, vocab_only=False):
    """pre: the name of the pre-tokenizer; None: the file has no tokenizer."""
    hparams = ModelBase.load_hparams(directory, False)
    kind = get_model_class(hparams["architectures"][0])
    patched = {TextModel: ["get_vocab_base_pre"], kind: ["set_vocab", "no_mtp", "mtp_only"]}
    kept = [(owner, name, owner.__dict__.get(name)) for owner, names in patched.items() for name in names]
    if pre:
        TextModel.get_vocab_base_pre = lambda _self, _tokenizer: pre
    else:
        kind.set_vocab = lambda self: self._set_vocab_none()
    kind.no_mtp, kind.mtp_only = not mtp, False
    model = kind(directory, TYPES[outtype], out, eager=True, use_temp_file=False, hparams=hparams)
    model.write_vocab() if vocab_only else model.write()
    for owner, name, value in kept:
        if value is None and name in owner.__dict__:
            delattr(owner, name)
        elif value is not None:
            setattr(owner, name, value)
    print(f"{out.relative_to(ROOT)}: {out.stat().st_size} bytes")


def all_experts(directory, to):
    """qwen3_next without its dense layer, which the format cannot hold: layer 1 gets the experts of layer 0."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    first = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.mlp.")}
    tensors = {name: t for name, t in tensors.items() if not name.startswith("model.layers.1.mlp.")}
    tensors |= {name.replace("layers.0.", "layers.1."): t.clone() for name, t in first.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["mlp_only_layers"] = []
    (to / "config.json").write_text(json.dumps(config))
    return to


def in_f32(directory, to):
    """f16 weights in f32: the converter adds the 1 of norms in the type that it finds."""
    shutil.copytree(directory, to)
    save_file({name: t.float() for name, t in load_file(to / "model.safetensors").items()}, to / "model.safetensors",
              metadata={"format": "pt"})
    return to


def main():
    out = HERE / "gguf"
    out.mkdir(exist_ok=True)
    for old in out.glob("*.gguf"):
        old.unlink()
    convert(HERE / "qwen3_5", out / "qwen35.gguf", "bf16", mtp=True)  # whose config.json names a layer that the file lacks
    with tempfile.TemporaryDirectory() as folder:
        convert(in_f32(HERE / "qwen3_5_moe", Path(folder) / "moe"), out / "qwen35moe.gguf", "f16")
        convert(all_experts(HERE / "qwen3_next", Path(folder) / "model"), out / "qwen3next.gguf", "f32")
        for name, pre in (("tokenizer_qwen2", "qwen2"), ("tokenizer_qwen3_5", "qwen35")):
            directory = Path(folder) / name
            shutil.copytree(HERE / name, directory)
            config = json.loads((HERE / "qwen3_5_moe/config.json").read_text()) | {"vocab_size": 2048}
            (directory / "config.json").write_text(json.dumps(config))
            (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
            convert(directory, out / f"{name}.gguf", "f16", pre=pre, vocab_only=True)
    convert(ROOT / "models/weft-11m", out / "tokenizer_weft-11m.gguf", "bf16", pre="qwen35", vocab_only=True)


if __name__ == "__main__":
    main()
