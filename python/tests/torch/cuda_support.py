"""What the tests on a GPU share: weft with arrays of numpy that are sent to the GPU and back."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch

import weft

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the tests with numpy

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


class OnCuda:
    """The module weft, but ops compute on CUDA tensors: inputs go to the GPU before a call, and what it wrote comes back."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(weft, name)
        return functools.partial(self.call, found) if name in weft.ops.FUNCTIONS else found

    @staticmethod
    def KvRecipe(name: str, *sizes: Any, **options: Any) -> Any:
        """A recipe whose means are on the GPU."""
        moved = {key: torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value for key, value in options.items()}
        return weft.KvRecipe(name, *sizes, **moved)

    def call(self, op: Any, **given: Any) -> Any:
        sent: Dict[int, Tuple[np.ndarray, torch.Tensor]] = {}
        given.pop("backend", None)
        made = op(**self.moved(given, sent))
        torch.cuda.synchronize()
        for array, tensor in sent.values():
            if array.flags.writeable:
                np.copyto(array, tensor.cpu().numpy())
        if isinstance(made, tuple):
            return type(made)(*[each.cpu().numpy() for each in made])
        return None if made is None else made.cpu().numpy()

    def moved(self, value: Any, sent: Dict[int, Tuple[np.ndarray, torch.Tensor]]) -> Any:
        """The same with tensors in place of arrays. One array is one tensor, wherever it stands."""
        if isinstance(value, dict):
            return {name: self.moved(each, sent) for name, each in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in sent:
            sent[id(value)] = value, torch.from_numpy(np.ascontiguousarray(value)).cuda()
        return sent[id(value)][1]


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return float(((got - wanted).pow(2).sum() / wanted.pow(2).sum()).sqrt())


def normal(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Random numbers that do not depend on the device."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def delta_inputs(tokens: int = 200, dtype: torch.dtype = torch.bfloat16) -> Dict[str, Any]:
    """Keywords of gated_delta_rule_prefill, 4 key heads and 8 value heads of 64."""
    q, k, v = (normal(tokens, heads, 64, dtype=dtype, seed=seed) for seed, heads in ((2, 4), (3, 4), (4, 8)))
    gates = {"g": -normal(tokens, 8, seed=5).abs() * 0.1, "beta": normal(tokens, 8, seed=6).sigmoid()}
    return {"q": q, "k": k, "v": v, "gates": gates, "l2_norm": True, "states": {"out": torch.zeros(1, 8, 64, 64, device="cuda")}}


def on_host(given: Dict[str, Any]) -> Dict[str, Any]:
    """The same keywords with f32 tensors on the host."""
    made: Dict[str, Any] = {}
    for name, value in given.items():
        made[name] = on_host(value) if isinstance(value, dict) else value
        if isinstance(value, torch.Tensor):
            made[name] = value.cpu().float() if value.is_floating_point() else value.cpu()
    return made


