"""Every op on CUDA tensors against float64: the tests of numpy again, with tensors on a GPU and the cuda backend."""

from __future__ import annotations

import unittest.mock
from typing import Any

from cuda_support import OnCuda, needs_cuda
from support import ATTENTION_BAR, INTEGER_BAR

import test_delta_ops
import test_kv_ops


class _Cuda:
    """Before another test case: its module's weft computes on the GPU."""

    def setUp(self) -> None:
        for module in (test_delta_ops, test_kv_ops):
            for name, value in (("weft", OnCuda()), ("BACKENDS", ("cuda",))):
                patch = unittest.mock.patch.object(module, name, value)
                patch.start()
                self.addCleanup(patch.stop)  # type: ignore[attr-defined]
        super().setUp()  # type: ignore[misc]


@needs_cuda
class Preprocess(_Cuda, test_delta_ops.Preprocess):
    pass


@needs_cuda
class Chunks(_Cuda, test_delta_ops.Chunks):
    pass


@needs_cuda
class Rule(_Cuda, test_delta_ops.Rule):
    pass


@needs_cuda
class Codec(_Cuda, test_kv_ops.Codec):
    # of recipes alone, which lie on the host
    test_recipe = test_recipe_takes_no_number_or_name_in_part = None
    test_copies_of_a_recipe = test_recipe_keeps_the_memory_of_its_means = None


@needs_cuda
class Attention(_Cuda, test_kv_ops.Attention):
    def bar(self, recipe: str, backend: Any) -> float:
        return ATTENTION_BAR if recipe.startswith("f") else INTEGER_BAR
