"""Every op of Weft as torch.ops.weft.NAME, made from the schema: torch.compile keeps its graph whole. Inference only.

weft.torch_ops.NAME takes the keywords of weft.ops.NAME. In eager mode it does what weft.ops.NAME does; while torch.compile traces, it
calls torch.ops.weft.NAME, whose keywords are the same ones flattened: gates={"g": g} is gates_g=g. A required output that is given is
then a copy of what the op returns. backend, device, stream, isa and dtype, and outputs asked for by True, are refused while it traces.

torch.ops.weft.NAME returns the required outputs. Every other output is an argument that the op writes. A recipe is its name with the
head sizes and the seed: cache_recipe="8v4", cache_k_head_dim=128, cache_v_head_dim=128, cache_seed=0.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import ops
from ._arrays import _NUMPY_NAMES
from ._library import SCHEMA, Error, refuse
from ._members import Group, Member, tree_of
from ._sizes import Sizes
from ._torch_calls import Calls
from .kv_recipe import KvRecipe

_TYPES = {"i64": "int", "i32": "int", "f32": "float", "flag": "bool", "enum": "str"}
_RECIPE = (("k_head_dim", "int"), ("v_head_dim", "int"), ("seed", "int"))
_LIBRARY = torch.library.Library("weft", "DEF")

BOUND: Dict[str, Callable[..., Callable[..., None]]] = {}  # by op: Calls.bind()
CHECK: Dict[str, Callable[[Mapping[str, Any]], None]] = {}  # by op: Calls.check()


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
        self.tree = tree_of(entry)
        members = list(self.tree.leaves())
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
        for name in ops._WHERE:
            if name != "threads" and given.get(name) is not None:
                raise refuse(self.name, name, f"is {given[name]!r}, wanted nothing while torch.compile traces")
        flat = {"threads": given.get("threads")}
        self.flatten(self.tree, {name: value for name, value in given.items() if name not in ops._WHERE}, flat)
        return flat

    def flatten(self, group: Group, given: Mapping[str, Any], flat: Dict[str, Any]) -> None:
        """Adds the members of a group. Refuses names that the group does not have, as weft.ops does."""
        for name, value in given.items():
            member = group.find(self.name, name)
            if value is None:
                continue
            if isinstance(member, Group):
                if not isinstance(value, dict):
                    raise refuse(self.name, member.path, f"is a {type(value).__name__}, wanted a dict")
                self.flatten(member, value, flat)
            elif member.kind == "recipe":
                if value.has_means:
                    raise refuse(self.name, member.path, "has means, wanted a recipe without: torch.compile takes recipes by name")
                flat[_flat(member.path)] = value.id
                flat.update(zip(_recipe_names(member), (value.k.head_dim, value.v.head_dim, value.seed)))
            elif value is True and member.output:
                raise refuse(self.name, member.path, "is True, wanted a tensor while torch.compile traces")
            else:
                flat[_flat(member.path)] = value

    def traced(self, registered: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """The call while torch.compile traces. A required output that is given becomes a copy."""
        flat = self.flattened(given)
        targets = [flat.pop(_flat(member.path), None) for member in self.outputs]
        made = registered(**flat)
        if not self.outputs:
            return None
        results = [made] if len(self.outputs) == 1 else list(made)
        for place, (member, target) in enumerate(zip(self.outputs, targets)):
            if target is not None:
                if target.shape != results[place].shape:
                    sizes, wanted = list(target.shape), list(results[place].shape)
                    raise refuse(self.name, member.path, f"is {sizes}, wanted {wanted}")
                results[place] = target.copy_(results[place])
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, **flat: Any) -> Any:
        """The function that torch calls with real tensors."""
        outputs = self.call(**self.nested(flat))
        return None if not self.outputs else outputs if len(self.outputs) == 1 else tuple(outputs)

    def fake(self, **flat: Any) -> Any:
        """The function that torch calls with tensors that have sizes and no memory."""
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
        """An output as weft.ops allocates it: with the dtype of the first floating input, if the output may have this dtype."""
        dtypes = [getattr(torch, _NUMPY_NAMES[name]) for name in member.dtypes]
        floats = [value.dtype for value in inputs if value.is_floating_point()]
        return inputs[0].new_empty(sizes.of(member), dtype=floats[0] if floats and floats[0] in dtypes else dtypes[0])

    def refuse_grad(self, member: Member, value: torch.Tensor) -> None:
        if value.requires_grad and torch.is_grad_enabled():
            text = f"{self.name}: {member.path} requires grad, and Weft computes no gradients; use torch.no_grad()"
            raise Error("unsupported", self.name, member.path, text)

    def function(self) -> Callable[..., Any]:
        """The function of this module."""
        registered = getattr(torch.ops.weft, self.name)

        def slow(**given: Any) -> Any:
            return self.traced(registered, given) if _fake(given) else self.call(**given)

        eager = Calls(ops._Op(self.entry), slow)
        BOUND[self.name], CHECK[self.name] = eager.bind, eager.check

        def call(**given: Any) -> Any:
            if torch.compiler.is_compiling():
                return self.traced(registered, given)
            return eager(given)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = self.call.__doc__
        return call


def _fake(given: Mapping[str, Any]) -> bool:
    """Is a tensor, or one of a group, without memory?"""
    return any(_fake(value) if isinstance(value, dict) else isinstance(value, FakeTensor) for value in given.values())


def _register(op: _Op) -> Callable[..., Any]:
    _LIBRARY.define(op.signature(), tags=[torch.Tag.pt2_compliant_tag])
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(op.name, op.run, key)
    torch.library.register_fake(f"weft::{op.name}", op.fake, lib=_LIBRARY)
    return op.function()


FUNCTIONS: Dict[str, Callable[..., Any]] = {entry["op"]: _register(_Op(entry)) for entry in SCHEMA["ops"]}
globals().update(FUNCTIONS)
__all__ = ["recipe", *FUNCTIONS]
