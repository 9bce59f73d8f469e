"""Every op of Weft as torch.ops.weft.NAME, made from the schema: torch.compile keeps its graph whole. Inference only.

weft.torch_ops.NAME takes the keywords of weft.ops.NAME. In eager mode it does what weft.ops.NAME does; while torch.compile traces, it
calls torch.ops.weft.NAME, whose keywords are the same ones flattened: gates={"g": g} is gates_g=g. A required output that is given is
written in eager mode only: use what the function returns.

torch.ops.weft.NAME returns the required outputs. Every other output is an argument that the op writes. A recipe is its name with the
head sizes and the seed: cache_recipe="8v4", cache_k_head_dim=128, cache_v_head_dim=128, cache_seed=0.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch

from . import ops
from ._arrays import _NUMPY_NAMES
from ._library import SCHEMA, Error, refuse
from ._members import Member, tree_of
from ._sizes import Sizes
from ._torch_calls import Calls
from .kv_recipe import KvRecipe

_TYPES = {"i64": "int", "i32": "int", "f32": "float", "flag": "bool", "enum": "str"}
_RECIPE = (("k_head_dim", "int"), ("v_head_dim", "int"), ("seed", "int"))
_LIBRARY = torch.library.Library("weft", "DEF")

BOUND: Dict[str, Callable[..., Callable[..., None]]] = {}  # by op: Calls.bind()


@functools.lru_cache(maxsize=1024)
def recipe(name: str, k_head_dim: int, v_head_dim: int, seed: int = 0) -> KvRecipe:
    """The recipe of these words. Equal words give the same object."""
    return KvRecipe(name, k_head_dim, v_head_dim, seed=seed)


def _flat(path: str) -> str:
    return path.replace(".", "_")


def _recipe_names(member: Member) -> Tuple[str, ...]:
    """The flat names of a recipe's numbers: "cache_k_head_dim", ..."""
    before = _flat(member.path)[: -len("recipe")]
    return tuple(before + name for name, _ in _RECIPE)


def _declared(member: Member, alias: str) -> str:
    """An argument of the op's signature in torch."""
    name = _flat(member.path)
    if member.kind == "recipe":
        return ", ".join([f"str {name}", *(f"int {each}" for each in _recipe_names(member))])
    kind = _TYPES.get(member.kind, "Tensor")
    if member.output:
        kind += f"({alias}!)"
    absent = member.optional or member.path.endswith("sequences.count")
    return f"{kind}? {name}=None" if absent else f"{kind} {name}"


class _Op:
    """One op: how its keywords are flattened, and what torch calls."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry
        self.name: str = entry["op"]
        members = list(tree_of(entry).leaves())
        self.outputs = [member for member in members if member.returned]
        self.arguments = [member for member in members if not member.returned]
        self.call: Callable[..., Any] = ops.FUNCTIONS[self.name]

    def signature(self) -> str:
        declared = [_declared(member, f"a{index}") for index, member in enumerate(self.arguments)]
        required = [each for each in declared if not each.endswith("=None")]
        optional = [each for each in declared if each.endswith("=None")]
        results = ", ".join("Tensor" for _ in self.outputs)
        return f"{self.name}(*, {', '.join(required + optional)}, int? threads=None) -> ({results})"

    def nested(self, flat: Mapping[str, Any]) -> Dict[str, Any]:
        """Flattened keywords as weft.ops takes them."""
        given: Dict[str, Any] = {"threads": flat.get("threads")}
        for member in self.arguments:
            value = flat.get(_flat(member.path))
            if value is None:
                continue
            if member.kind == "recipe":
                value = recipe(value, *(flat[name] for name in _recipe_names(member)))
            *groups, name = member.path.split(".")
            target = given
            for group in groups:
                target = target.setdefault(group, {})
            target[name] = value
        return given

    def flattened(self, given: Mapping[str, Any]) -> Dict[str, Any]:
        """Keywords of weft.ops, flattened."""
        flat = {"threads": given.get("threads")}
        for member in self.arguments:
            value: Any = given
            for name in member.path.split("."):
                value = None if value is None else value.get(name, value.get(name + "_"))
            if value is None:
                continue
            flat[_flat(member.path)] = value
            if member.kind == "recipe":
                if value.has_means:
                    raise refuse(self.name, member.path, "has means, wanted a recipe without: torch.compile takes recipes by name")
                flat[_flat(member.path)] = value.id
                flat.update(zip(_recipe_names(member), (value.k.head_dim, value.v.head_dim, value.seed)))
        return flat

    def run(self, **flat: Any) -> Any:
        """What torch calls with real tensors."""
        outputs = self.call(**self.nested(flat))
        return None if not self.outputs else outputs if len(self.outputs) == 1 else tuple(outputs)

    def fake(self, **flat: Any) -> Any:
        """What torch calls with tensors that have sizes and no memory."""
        sizes, inputs = Sizes(), []
        for member in self.arguments:
            value = flat.get(_flat(member.path))
            if value is None:
                continue
            if member.kind == "tensor":
                self.refuse_grad(member, value)
                sizes.bind_tensor(member, tuple(value.shape))
                inputs += [] if member.output or member.name in ops._STORAGE else [value]
            else:
                recipe_of = member.kind == "recipe"
                sizes.bind_number(member, recipe(value, *(flat[name] for name in _recipe_names(member))) if recipe_of else value)
        made = [self.empty(member, sizes, inputs) for member in self.outputs]
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    def empty(self, member: Member, sizes: Sizes, inputs: List[torch.Tensor]) -> torch.Tensor:
        """An output as weft.ops allocates it: with the dtype of the first floating input, where it may have that."""
        dtypes = [getattr(torch, _NUMPY_NAMES[name]) for name in member.dtypes]
        first = next(value for value in inputs if value.is_floating_point())
        return first.new_empty(sizes.of(member), dtype=first.dtype if first.dtype in dtypes else dtypes[0])

    def refuse_grad(self, member: Member, value: torch.Tensor) -> None:
        if value.requires_grad and torch.is_grad_enabled():
            text = f"{self.name}: {member.path} requires grad, and Weft computes no gradients; use torch.no_grad()"
            raise Error("unsupported", self.name, member.path, text)

    def function(self) -> Callable[..., Any]:
        """The function of this module."""
        registered, eager = getattr(torch.ops.weft, self.name), Calls(ops._Op(self.entry), self.call)
        BOUND[self.name] = eager.bind

        def call(**given: Any) -> Any:
            if torch.compiler.is_compiling():
                return registered(**self.flattened(given))
            return eager(given)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = self.call.__doc__
        return call


def _register(op: _Op) -> Callable[..., Any]:
    _LIBRARY.define(op.signature(), tags=[torch.Tag.pt2_compliant_tag])
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(op.name, op.run, key)
    torch.library.register_fake(f"weft::{op.name}", op.fake, lib=_LIBRARY)
    return op.function()


FUNCTIONS: Dict[str, Callable[..., Any]] = {entry["op"]: _register(_Op(entry)) for entry in SCHEMA["ops"]}
globals().update(FUNCTIONS)
__all__ = ["recipe", *FUNCTIONS]
