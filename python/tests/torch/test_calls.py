"""Calls of patched models that are refused, and what a refusal leaves behind."""

from __future__ import annotations

import copy
from typing import Any, Dict

import pytest
import torch
from conftest import build
from test_transformers import _positions, patched, prompts

import weft


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
