"""Calls of patched models that are refused, and what a refusal leaves behind."""

from __future__ import annotations

import copy
import io
from typing import Any, Dict, List

import pytest
import torch
from conftest import build
from test_transformers import _positions, patched, prompts

import weft
from weft.transformers import patch, unpatch
from weft.transformers.cache import CompressedLayer


def refused_steps(mask: torch.Tensor) -> Dict[str, Any]:
    """Keywords of a step after prompts(), and the sentence that refuses them."""
    longer = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], dim=1)
    middle = longer.clone()
    middle[2, 40] = 0
    return {
        "no mask": ({}, r"attention_mask hides \[0, 0, 0\] tokens at the left, wanted \[9, 26, 0\]"),
        "another mask": ({"attention_mask": longer.flip(0)}, r"attention_mask hides \[0, 26, 9\] tokens at the left, wanted \[9, 26, 0\]"),
        "a short mask": ({"attention_mask": mask}, r"attention_mask is \[3, 70\], wanted \[3, 71\], earlier tokens included"),
        "a hole": ({"attention_mask": middle}, "attention_mask hides tokens in the middle or at the right, wanted padding at the left"),
        "not causal": ({"attention_mask": longer, "is_causal": False}, "is_causal is False, wanted True"),
        "packed": ({"attention_mask": longer, "cu_seq_lens_q": torch.tensor([0, 1])}, "cu_seq_lens_q is a Tensor, wanted None"),
    }


@pytest.mark.parametrize("case", list(refused_steps(torch.ones(3, 70, dtype=torch.long))))
def test_a_refused_call_leaves_the_cache_as_it_was(case: str) -> None:
    ids, mask = prompts()
    model = patched(build("qwen3_5"))
    options, sentence = refused_steps(mask)[case]
    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
    right: Dict[str, Any] = {"attention_mask": longer, "position_ids": _positions(longer, 70, 71)}
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, position_ids=_positions(mask, 0, 70)).past_key_values
        wanted = model(ids[:, -1:], past_key_values=copy.deepcopy(cache), **right).logits
        with pytest.raises(weft.Error, match=sentence):
            model(ids[:, -1:], past_key_values=cache, **options)
        assert torch.equal(model(ids[:, -1:], past_key_values=cache, **right).logits, wanted)


def test_another_batch_leaves_the_cache_as_it_was(model: Any) -> None:
    ids, _ = prompts(1)
    with torch.no_grad():
        cache = patched(model)(ids).past_key_values
        wanted = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        with pytest.raises(weft.Error, match="past_key_values holds 1 sequences, wanted 2: the batch differs from earlier calls"):
            model(ids[:, :1].repeat(2, 1), past_key_values=cache)
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, wanted)


def test_packed_sequences_and_empty_inputs_are_refused(model: Any) -> None:
    ids, _ = prompts(1)
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    patched(model)
    with torch.no_grad():
        with pytest.raises(weft.Error, match="position_ids restart inside a sequence, wanted sequences in rows of the batch"):
            model(ids, position_ids=positions, use_cache=False)
        with pytest.raises(weft.Error, match=r"input_ids are \[1, 0\], wanted one token or more"):
            model(ids[:, :0])


def test_padding_longer_than_a_chunk_of_the_prompt(model: Any) -> None:
    ids, mask = prompts()
    options: Dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = patched(model).generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=8, **options), wanted)


def test_a_copied_or_loaded_model_stands_alone(model: Any) -> None:
    ids, mask = prompts()
    file = io.BytesIO()
    torch.save(patched(model, "8v4"), file)
    file.seek(0)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
            assert torch.equal(other(ids, attention_mask=mask).logits, wanted)
            for parameter in other.parameters():
                parameter.mul_(1.1)
            assert not torch.equal(other(ids, attention_mask=mask).logits, wanted)
            unpatch(other)
            assert not any("forward" in vars(module) or module._forward_pre_hooks for module in other.modules())
        assert torch.equal(model(ids, attention_mask=mask).logits, wanted)


def test_another_attention_after_patch_is_refused() -> None:
    ids, _ = prompts()
    model = patched(build("qwen3_5"))
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(weft.Error, match="config._attn_implementation is 'eager' since patch\\(\\), wanted 'weft'"):
        model(ids)


def test_a_config_that_two_models_share_is_refused() -> None:
    ids, _ = prompts()
    first = build("qwen3_5")
    second = type(first)(first.config).eval()
    patched(first)
    with pytest.raises(weft.Error, match="model.config is shared with a patched model, wanted a config of its own"):
        patch(second)
    with torch.no_grad(), pytest.raises(weft.Error, match="config._attn_implementation is 'weft' in a model that is not patched"):
        second(ids, use_cache=False)
    unpatch(first)
    with torch.no_grad():
        second(ids)


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
def test_a_hybrid_cache_is_refused_by_an_unpatched_model(first: str) -> None:
    ids, _ = prompts()
    kinds = [first, *{"linear_attention", "full_attention"} - {first}] * 2
    model = patched(build("qwen3_5", layer_types=kinds))
    with torch.no_grad():
        cache = model(ids).past_key_values
        unpatch(model)
        with pytest.raises(weft.Error, match="past_key_values was given to a layer that is not patched, wanted a patched model"):
            model(ids[:, :1], past_key_values=cache)


def test_crop_checks_all_layers_first() -> None:
    ids, _ = prompts()
    model = patched(build("qwen3_5", layer_types=["full_attention", "linear_attention"] * 2))
    with torch.no_grad():
        cache = model(ids).past_key_values
    with pytest.raises(weft.Error, match="recurrent states cannot take tokens back"):
        cache.crop(-2)
    assert cache.get_seq_length() == 70


@pytest.mark.parametrize("use_cache", [True, False])
def test_threads_reach_the_attention(use_cache: bool, monkeypatch: Any) -> None:
    seen: List[Any] = []
    attend = CompressedLayer.attend
    monkeypatch.setattr(CompressedLayer, "attend", lambda layer, *args: (seen.append(layer.threads), attend(layer, *args))[1])
    with torch.no_grad():
        patched(build("qwen3_5"))(prompts()[0], use_cache=use_cache)
    assert seen == [1, 1]


def test_a_forward_hook_may_keep_what_a_projection_returned() -> None:
    model = patched(build("qwen3_5"))
    kept: List[Any] = []
    projection = model.model.layers[0].linear_attn.in_proj_qkv
    projection.register_forward_hook(lambda module, args, made: kept.append((made, made.clone())))
    with torch.no_grad():
        cache = model(prompts()[0]).past_key_values
        model(prompts()[0][:, :1], past_key_values=cache)
    assert len(kept) == 2 and all(torch.equal(*each) for each in kept)
