"""transformers loads the bundled model unchanged and gives the logits that Weft is tested against
(cases/golden/models/weft-11m.safetensors). Exits with 77, which means "skipped", where torch or transformers is missing."""
import sys
from pathlib import Path

SKIPPED = 77
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "weft-11m"

sys.modules["fla"] = None  # makes transformers use its torch implementation; must precede its import
sys.modules["causal_conv1d"] = None
try:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as missing:
    print(f"skipped: {missing}; this test needs the packages of cases/golden/requirements.txt")
    sys.exit(SKIPPED)


def main():
    torch.set_num_threads(1)
    golden = safe_open(ROOT / "cases" / "golden" / "models" / "weft-11m.safetensors", "pt")
    tokens, expected = golden.get_tensor("tokens").long(), golden.get_tensor("logits")
    every = int(golden.metadata()["logits_every"])
    rows = len(expected)

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer((MODEL / "valid-excerpt.txt").read_text())["input_ids"][:rows]
    assert ids == tokens[:rows].tolist(), "the tokenizer of transformers gives other tokens"

    model, report = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager",
                                                         output_loading_info=True)
    for kind, names in report.items():
        assert not names, f"{kind}: {names}"
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens[None, :rows], use_cache=False).logits[0]
    error = (logits[:, ::every] - expected).abs().max().item()
    print(f"{rows} tokens: largest difference of a logit {error:.2e}")
    # 2.4 is the standard deviation of the logits.
    assert error <= 2.4 * 2e-4, "the logits of transformers are not those that Weft is tested against"


if __name__ == "__main__":
    main()
