"""Speeds up a hybrid model of transformers in three lines. Run with a folder or a hub name, or without: a small random model.

    python examples/python/speed_up_transformers.py [MODEL]
"""

import sys
import time

import torch
import transformers

if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    prompt = transformers.AutoTokenizer.from_pretrained(sys.argv[1])("Explain linear attention.", return_tensors="pt").input_ids
else:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    config = transformers.Qwen3_5TextConfig(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, **heads)
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    prompt = torch.randint(0, 1000, (1, 512))


def seconds() -> float:
    started = time.perf_counter()
    model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    return time.perf_counter() - started


# ---- the three lines ----
import weft.transformers  # noqa: E402

weft.transformers.patch(model, kv="8v4")  # delta layers by Weft, keys in 8 bits, values in 4
text = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
# -------------------------

cache = text.past_key_values
print(f"tokens: {text.sequences[0, prompt.shape[1] :].tolist()}")
print(f"cache: {cache.bytes / 1024:.0f} KiB of keys and values, {cache.state_bytes / 1024:.0f} KiB of states")
patched = seconds()
weft.transformers.unpatch(model)
try:
    print(f"patched {patched:.2f} s, unpatched {seconds():.2f} s")
except RuntimeError as error:  # FLA is installed and there is no GPU
    print(f"patched {patched:.2f} s; unpatched, transformers fails here: {error}")
