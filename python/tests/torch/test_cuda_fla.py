"""FLA's functions on a GPU by Weft against FLA's own kernels and float64, and FLA's dispatch."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, Dict

import pytest
import test_fla as host
import torch
from cuda_support import needs_cuda, relative_rms

import weft.fla

pytestmark = needs_cuda


def on_gpu(x: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in x.items()}


def large(per_channel: bool, tokens: int = 700, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Dict[str, Any]:
    """4 key heads and 8 value heads (KDA: 8 and 8) of 64."""
    torch.manual_seed(8)
    key_heads = 8 if per_channel else 4
    x = {name: torch.randn(batch, tokens, heads, 64, dtype=dtype) for name, heads in (("q", key_heads), ("k", key_heads), ("v", 8))}
    x["g"] = -torch.rand(batch, tokens, 8, 64) * 0.1 if per_channel else -torch.rand(batch, tokens, 8) * 0.1
    x["beta"] = torch.rand(batch, tokens, 8)
    return on_gpu({**x, "initial_state": torch.randn(batch, 8, 64, 64) * 0.1})


FORMS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("name", FORMS)
def test_forms_against_float64(name: str, tokens: int) -> None:
    x, initial = host.inputs(host.FORMS[name], tokens), torch.randn(host.B, host.HV, host.K, host.V)
    wanted = host.recurrence(x, initial)
    made = getattr(weft.fla, name)(**on_gpu(x), initial_state=initial.cuda(), output_final_state=True)
    host.check([each.cpu() for each in made], wanted, tokens)


@functools.lru_cache(maxsize=None)
def tune_nothing() -> None:
    """Triton would time every configuration of every kernel for minutes."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in vars(module).values():
                while kernel is not None and not isinstance(kernel, Autotuner):
                    kernel = getattr(kernel, "fn", None)
                if kernel is not None:
                    kernel.configs = kernel.configs[:1]


def theirs(name: str) -> Any:
    """FLA's function as its own kernels compute it."""
    if weft.fla.REGISTERED is None:
        pytest.skip(weft.fla.WHY_NOT)
    tune_nothing()
    function = getattr(importlib.import_module("fla.ops.kda" if name.endswith("kda") else "fla.ops.gated_delta_rule"), name)
    return inspect.unwrap(function) if name.startswith("chunk") else function  # those are dispatched


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms_against_kernels_of_fla(name: str, packed: bool) -> None:
    x = large(name.endswith("kda"), *((700, 1) if packed else ()))
    options: Dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 1, 64, 300, 700], device="cuda")
        x["initial_state"] = x["initial_state"].repeat(4, 1, 1, 1)
    with torch.no_grad():
        wanted = theirs(name)(**x, **options)
        got = getattr(weft.fla, name)(**x, **options)
    for mine, other in zip(got, wanted):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert relative_rms(mine, other) < 8.4e-3  # twice the bar of kernels with bf16 operands


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_dispatch(name: str, monkeypatch: Any) -> None:
    theirs(name)
    function = getattr(importlib.import_module("fla.ops.kda" if name == "chunk_kda" else "fla.ops.gated_delta_rule"), name)
    calls = []
    ours = getattr(weft.fla._Weft, name)
    monkeypatch.setattr(weft.fla._Weft, name, lambda self, *args, **kwargs: calls.append(name) or ours(self, *args, **kwargs))
    x = large(name == "chunk_kda")
    with torch.no_grad():
        o, state = function(**x, output_final_state=True, use_qk_l2norm_in_kernel=True)
    mine, final = getattr(weft.fla, name)(**x, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert calls == [name] and torch.equal(o, mine) and torch.equal(state, final)
    x["v"].requires_grad_(True)  # gradients are FLA's
    assert function(**x, use_qk_l2norm_in_kernel=True)[0].requires_grad and calls == [name]
