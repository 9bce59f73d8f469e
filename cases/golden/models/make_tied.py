"""Writes tiny Qwen3.5 checkpoints that differ in who says that the head is the embedding, with transformers' float64 logits: tied/
(see README.md)."""
import json
import shutil
import sys
from pathlib import Path

import torch

sys.modules["fla"] = None  # the plain torch path, before transformers looks for another
sys.modules["causal_conv1d"] = None
import transformers
from make_models import randomise
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

HERE = Path(__file__).parent / "tied"
SOURCE = f"transformers {transformers.__version__}, torch {torch.__version__}, float64"
TOKENS = 12
TEXT = dict(vocab_size=29, hidden_size=16, intermediate_size=12, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, max_position_embeddings=64, eos_token_id=3,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
                                 mrope_interleaved=True))
VISION = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, in_channels=1, patch_size=2, spatial_merge_size=1,
              temporal_patch_size=1, out_hidden_size=16, num_position_embeddings=4)
HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids[None], use_cache=False).logits[0]


def write_expected(directory, load, ids):
    """Logits of the directory as `load`, the class that saved it, reads it. Returns its warning about ties, or None."""
    heard = []
    log = transformers.utils.logging.get_logger("transformers.modeling_utils")
    keep, log.warning = log.warning, lambda text, *_: heard.append(text)
    model, report = load.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
    log.warning = keep
    for kind, names in report.items():
        assert not names, f"{directory.name}: {kind}: {names}"
    out = logits(model, ids)
    assert out.dtype == torch.float64
    save_file({"tokens": ids.to(torch.int32), "logits": out.contiguous()}, directory / "expected.safetensors", metadata={"source": SOURCE})
    return next((text for text in heard if "NOT tie" in text), None)


def make(directory, model, seed, ids):
    """Random weights whose logits have a deviation of 1, saved by the model's own class."""
    randomise(model, seed, torch.float32)
    model.tie_weights()
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    text.norm.weight.data = (1 + text.norm.weight.data) / logits(model, ids).std() - 1
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def change(directory, **flags):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in flags.items():
        place = config if name == "outer" or "text_config" not in config else config["text_config"]
        place["tie_word_embeddings"] = value
    path.write_text(json.dumps(config, indent=1) + "\n")


def main():
    torch.set_num_threads(1)
    ids = torch.randint(0, TEXT["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(7))
    for outer in (False, True):
        for nested in (False, True):
            directory = HERE / f"outer_{outer}_nested_{nested}".lower()
            config = Qwen3_5Config(text_config=TEXT | dict(tie_word_embeddings=nested), vision_config=VISION, tie_word_embeddings=outer)
            make(directory, Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager"), 11, ids)
            names = load_file(directory / "model.safetensors").keys()
            assert (HEAD in names) == (not outer) and EMBEDDING in names
            saved = json.loads((directory / "config.json").read_text())
            assert saved["tie_word_embeddings"] == outer and saved["text_config"]["tie_word_embeddings"] == nested
            assert write_expected(directory, Qwen3_5ForConditionalGeneration, ids) is None

    # Checkpoints that contradict themselves: a head of its own, and a flag that says otherwise.
    directory = HERE / "head_differs_nested"
    shutil.copytree(HERE / "outer_false_nested_false", directory, dirs_exist_ok=True)
    change(directory, outer=True, nested=True)
    assert write_expected(directory, Qwen3_5ForConditionalGeneration, ids) is not None
    directory = HERE / "head_differs_flat"
    make(directory, Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**TEXT), attn_implementation="eager"), 12, ids)
    change(directory, outer=True)
    assert write_expected(directory, Qwen3_5ForCausalLM, ids) is not None

    for directory in sorted(HERE.iterdir()):
        print(f"{directory.name}: {sum(f.stat().st_size for f in directory.iterdir())} bytes")


if __name__ == "__main__":
    main()
