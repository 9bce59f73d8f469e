"""Patched models of transformers against unpatched ones."""

from __future__ import annotations

import copy
import io
from typing import Any, List, Tuple

import pytest
import torch
import transformers
from conftest import build

import weft
import weft.transformers
from weft.transformers import HybridCache, patch, unpatch


def prompts(batch: int = 3, tokens: int = 70) -> Tuple[torch.Tensor, torch.Tensor]:
    """A batch with padding at the left of all sequences but the last."""
    torch.manual_seed(11)
    ids, mask = torch.randint(2, 131, (batch, tokens)), torch.ones(batch, tokens, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : 9 + 17 * row] = 0
    return ids * mask, mask


def patched(model: Any, kv: str = "f32") -> Any:
    return patch(model, kv=kv, threads=1)


def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits[mask.bool()]


def in_double(model: Any) -> Any:
    """The model with double weights. transformers still computes some of it in f32, so its error is like that of f32."""
    model = copy.deepcopy(model).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model


def bar(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Four times the error that rounding to f32 makes in the unpatched model: both round alike, in another order."""
    return 4 * (logits(model, ids, mask) - logits(in_double(model), ids, mask)).abs().max().item()


@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_of_padded_batches(model: Any, use_cache: bool) -> None:
    ids, mask = prompts()
    allowed, wanted = bar(model, ids, mask), logits(in_double(model), ids, mask)
    got = logits(patched(model), ids, mask, use_cache=use_cache)
    assert (got - wanted).abs().max() <= allowed
    assert wanted.std() > 1  # so that the bar means something
    alone = logits(model, ids[:1, 9:], mask[:1, 9:], use_cache=use_cache)
    assert (got[: 70 - 9] - alone).abs().max() <= allowed


def test_a_prompt_in_parts_equals_a_prompt_at_once(model: Any) -> None:
    ids, mask = prompts()
    allowed = bar(model, ids, mask)
    wanted = logits(patched(model), ids, mask)
    cache, parts = HybridCache(model.config, "f32", threads=1), []
    with torch.no_grad():
        for first, last in ((0, 40), (40, 64), (64, 69), (69, 70)):
            positions = _positions(mask, first, last)
            out = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, position_ids=positions)
            parts.append(out.logits)
    assert cache.get_seq_length() == 70
    assert (torch.cat(parts, dim=1)[mask.bool()] - wanted).abs().max() <= allowed


def _positions(mask: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, first:last]


def first_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    differ = (a != b).nonzero()
    return int(differ[0]) if len(differ) else len(a)


def test_greedy_tokens_equal_unpatched_ones_wherever_the_gap_allows(model: Any) -> None:
    ids, mask = prompts()
    allowed = bar(model, ids, mask)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    wanted = model.generate(ids, **options)
    got = patched(model).generate(ids, **options)
    assert isinstance(got.past_key_values, HybridCache)
    reached = []
    for row in range(len(ids)):
        step = first_difference(wanted.sequences[row, 70:], got.sequences[row, 70:])
        reached.append(step)
        if step < 24:
            top = wanted.scores[step][row].topk(2).values
            assert top[0] - top[1] <= 2 * allowed, f"row {row} differs at token {step}, where the two best logits are {top}"
    assert max(reached) == 24


def test_beam_search(model: Any) -> None:
    ids, mask = prompts()
    allowed = bar(model, ids, mask)
    options = {"attention_mask": mask, "max_new_tokens": 12, "num_beams": 3, "do_sample": False, "output_scores": True}
    wanted = model.generate(ids, return_dict_in_generate=True, **options)
    got = patched(model).generate(ids, return_dict_in_generate=True, **options)
    # a score is the mean of 12 logarithms, each off by at most twice the bar of its logits
    assert (got.sequences_scores - wanted.sequences_scores).abs().max() <= 2 * allowed
    assert torch.equal(got.sequences, wanted.sequences)


def test_sampling_and_several_sequences(model: Any) -> None:
    ids, mask = prompts()
    out = patched(model, "8v4").generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=True, num_return_sequences=2)
    assert out.shape == (6, 75)


def test_bf16(family: str) -> None:
    ids, mask = prompts()
    squares = torch.zeros(2)
    for seed in range(5):  # experts that flip make the error of one model chance
        model = build(family, seed)
        exact = logits(model, ids, mask)
        half = model.to(torch.bfloat16)
        unpatched, got = logits(half, ids, mask), logits(patched(half, "bf16"), ids, mask)
        squares += torch.stack([(each.float() - exact).pow(2).mean() for each in (unpatched, got)])
    # both errors are those of bf16 weights and activations, which neither side can avoid
    assert squares[1].sqrt() <= 1.25 * squares[0].sqrt()


def test_recipes(model: Any) -> None:
    ids, mask = prompts()
    wanted = logits(model, ids, mask)
    errors = {}
    for kv in ("f32", "f16", "8v8", "6v6", "4v4", "3v3"):
        errors[kv] = (logits(patched(model, kv), ids, mask) - wanted).pow(2).mean().sqrt().item()
        unpatch(model)
    assert list(errors.values()) == sorted(errors.values()), errors  # coarser recipes err more


def test_memory_of_the_cache(model: Any) -> None:
    ids, mask = prompts(1, 128)
    held = {}
    for kv in ("f32", "f16", "8v8", "4v4"):
        with torch.no_grad():
            held[kv] = patched(model, kv)(ids, attention_mask=mask).past_key_values.bytes
        unpatch(model)
    assert held["f32"] == 2 * held["f16"]
    assert held["4v4"] < held["8v8"] < 0.6 * held["f16"]


def test_save_and_resume(model: Any) -> None:
    ids, mask = prompts()
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = patched(model, "8v4").generate(ids, attention_mask=mask, **options)
    with torch.no_grad():
        cache = model(ids[:, :69], attention_mask=mask[:, :69], position_ids=_positions(mask, 0, 69)).past_key_values
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for resumed in (copy.deepcopy(cache), loaded):
        assert resumed.get_seq_length() == 69
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=resumed, **options), wanted)
    assert cache.get_seq_length() == 69


def test_a_second_turn_with_the_cache_of_the_first(model: Any) -> None:
    ids, mask = prompts(1)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    first = patched(model).generate(ids, **options)
    longer = torch.cat([first.sequences, ids[:, :10]], dim=1)
    wanted = model.generate(longer, **options).sequences
    got = model.generate(longer, past_key_values=first.past_key_values, **options).sequences
    assert torch.equal(got, wanted)


def test_unpatch_restores(model: Any) -> None:
    ids, mask = prompts()
    before, implementation = logits(model, ids, mask), model.config._attn_implementation
    assert not torch.equal(logits(patched(model, "4v4"), ids, mask), before)
    unpatch(model)
    assert torch.equal(logits(model, ids, mask), before)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert not isinstance(model(ids).past_key_values, HybridCache)
    patched(model)  # and again
    unpatch(model)


def test_a_model_with_a_vision_tower() -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=build("qwen3_5").config.to_dict(), vision_config=vision)
    torch.manual_seed(6)
    model, (ids, mask) = transformers.Qwen3_5ForConditionalGeneration(config).eval(), prompts()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **options)
    assert torch.equal(patched(model).generate(ids, **options), wanted)
    assert model.config.vision_config._attn_implementation != "weft"
    unpatch(model)


def refusals() -> List[Any]:
    right = torch.ones(3, 70, dtype=torch.long)
    right[0, 60:] = 0
    return [
        ({"output_attentions": True}, "output_attentions is True, wanted False"),
        ({"attention_mask": torch.ones(3, 1, 70, 70, dtype=torch.bool)}, r"attention_mask has 4 dimensions, wanted a mask \[B, T\]"),
        ({"attention_mask": right}, "attention_mask hides tokens in the middle or at the right, wanted padding at the left"),
        ({"attention_mask": torch.ones(3, 60, dtype=torch.long)}, r"attention_mask is \[3, 60\], wanted \[3, 70\]"),
    ]


@pytest.mark.parametrize("case", range(len(refusals())))
def test_unsupported_calls_are_refused(case: int) -> None:
    options, sentence = refusals()[case]
    model = patched(build("qwen3_5"))
    with pytest.raises(weft.Error, match=sentence), torch.no_grad():
        model(prompts()[0], **options)


def test_training_is_refused(model: Any) -> None:
    ids, _ = prompts()
    patched(model).train()
    with pytest.raises(weft.Error, match="training is True, and Weft computes no gradients; call model.eval()"):
        model(ids)
    model.eval().requires_grad_(True)
    with pytest.raises(weft.Error, match="parameters require grad, and Weft computes no gradients; use torch.no_grad()"):
        model(ids)
    with torch.no_grad():
        model(ids)


def test_foreign_caches_are_refused(model: Any) -> None:
    ids, _ = prompts(1)
    with torch.no_grad():
        foreign = model(ids).past_key_values
        patched(model)
        with pytest.raises(weft.Error, match="past_key_values is a DynamicCache of 70 tokens, wanted a HybridCache"):
            model(ids, past_key_values=foreign)
        # transformers 5.17 makes the mask of a static cache, which is longer, before the model is called
        with pytest.raises(weft.Error, match="past_key_values is a StaticCache|attention_mask is .*, wanted"):
            model.generate(ids, max_new_tokens=2, cache_implementation="static")
        own = model(ids).past_key_values
        with pytest.raises(weft.Error, match="tokens_to_remove is -2, wanted 0: recurrent states cannot take tokens back"):
            own.crop(-2)
        with pytest.raises(weft.Error, match="the batch differs from earlier calls"):
            model(ids.repeat(2, 1), past_key_values=own)


def test_wrong_patches_are_refused(monkeypatch: Any) -> None:
    model = build("qwen3_5")
    with pytest.raises(weft.Error, match="kv_recipe"):
        patch(model, kv="9v9")
    assert not hasattr(model, "_weft_patch") and model.config._attn_implementation != "weft"
    with pytest.raises(weft.Error, match="model is not patched"):
        unpatch(model)
    patch(model)
    with pytest.raises(weft.Error, match="model is patched already"):
        patch(model)
    with pytest.raises(weft.Error, match="Linear without delta layers, wanted one with Qwen3NextGatedDeltaNet"):
        patch(torch.nn.Linear(2, 2))
    for version in ("4.57.0", "5.24.0", "5.23.0rc1", "5.23.0.dev0"):
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.raises(weft.Error, match=f"transformers is version {version}, wanted a release of 5.17 to 5.23"):
            patch(build("qwen3_5"))


def test_a_layer_compiles_into_one_graph(model: Any) -> None:
    layer = next(module for module in patched(model).modules() if type(module).__name__.endswith(("GatedDeltaNet", "DeltaAttention")))
    x = torch.randn(2, 20, 64)
    with torch.no_grad():
        wanted = layer(x)
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, wanted)


def steps(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that are decoded one by one."""
    with torch.no_grad():
        return torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])], dim=1)


def test_decode_steps_follow_caches_copies_and_weights(model: Any) -> None:
    ids, _ = prompts(1)
    patched(model, "f32")
    with torch.no_grad():
        first = model(ids[:, :20]).past_key_values
        second = model(ids[:, 20:45]).past_key_values
    kept = [copy.deepcopy(first), copy.deepcopy(second)]
    wanted = [steps(model, cache, ids[:, 50:56]) for cache in (first, second)]
    other, caches = copy.deepcopy((model, kept))  # of a model that has decoded
    for turn in range(6):  # by turns, on the model and its copy
        for each, held in ((model, kept), (other, caches)):
            for cache, logits_of in zip(held, wanted):
                assert torch.equal(steps(each, cache, ids[:, 50 + turn : 51 + turn]), logits_of[:, turn : turn + 1])
    before = steps(model, copy.deepcopy(kept[0]), ids[:, :1])
    layer = next(module for module in model.modules() if type(module).__name__.endswith(("GatedDeltaNet", "DeltaAttention")))
    with torch.no_grad():
        getattr(layer, "forget_gate", layer).A_log.add_(1)
    assert not torch.equal(steps(model, copy.deepcopy(kept[0]), ids[:, :1]), before)
