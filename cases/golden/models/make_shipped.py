"""Writes what transformers says, in float32, about the model that is shipped with Weft: weft-11m.safetensors (see README.md)."""
import sys
from pathlib import Path

import torch

sys.modules["fla"] = None  # the plain torch path, before transformers looks for another
sys.modules["causal_conv1d"] = None
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "models" / "weft-11m"
TOKENS = 2048  # of the excerpt, in one sequence from an empty cache
PREFIX = 200   # of those, with logits
COLUMNS = 61   # every so many logits of a row are kept; coprime to most structure of a vocabulary
TOP = 8

if __name__ == "__main__":
    torch.set_num_threads(1)
    text = (MODEL / "valid-excerpt.txt").read_text()
    ids = torch.tensor(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids[:TOKENS])
    assert len(ids) == TOKENS
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        prefix = model(input_ids=ids[None, :PREFIX], use_cache=False).logits[0]
    assert (logits[:PREFIX] - prefix).abs().max() < 1e-3  # causal
    nll = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="none")
    top = prefix.topk(TOP, -1)
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, weights upcast to float32"
    save_file({"tokens": ids.to(torch.int32), "logits": prefix[:, ::COLUMNS].contiguous(), "top_ids": top.indices.to(torch.int32),
               "top_logits": top.values, "log_sum_exp": prefix.double().logsumexp(-1).float(), "nll": nll.float()},
              HERE / "weft-11m.safetensors", metadata={"source": source, "logits_every": str(COLUMNS)})
    print(f"weft-11m: nll {nll.mean():.6f} over {len(nll)} tokens, logit std {prefix.std():.3f}")
