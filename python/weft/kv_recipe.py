"""KvRecipe: the formats of both sides of a KV cache under one name."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple, Optional, Tuple

from . import _arrays
from ._library import ENUMS, LIB, call, new, refuse, shown, whole

_HEAD_DIMS = (8, 512)
_MEANS = ("k_mean", "v_mean")
_DTYPE_NAMES = {value: name for name, value in ENUMS["DType"].items()}


class KvSideInfo(NamedTuple):
    """The sizes that a caller needs to allocate one side of a cache."""

    head_dim: int
    code_bytes: int  # bytes of one row of codes, or of elements of a passthrough side
    gains: int  # gains of one row, 0 for passthrough
    gain_bytes: int  # bytes of the gains of one row
    tile_bytes: int  # bytes of 64 tokens in the tiles layout
    codes_dtype: str  # "u8", or the dtype of a passthrough side
    gains_dtype: str
    bits: int  # bits of one number: 2 to 8, or 16 or 32 for passthrough
    passthrough: bool


def _side(info: Any) -> KvSideInfo:
    values = {name: getattr(info, name) for name, *_ in info._fields_}
    values["codes_dtype"] = _DTYPE_NAMES[info.codes_dtype]
    values["gains_dtype"] = _DTYPE_NAMES[info.gains_dtype]
    values["passthrough"] = bool(info.passthrough)
    return KvSideInfo(**values)


class KvRecipe:
    """The formats of keys and values: "4v4" is 4-bit keys and 4-bit values; see docs/formats.md. Immutable.

    k_mean and v_mean, [Hk, D] f32, are subtracted before coding. The recipe keeps them alive.
    """

    def __init__(
        self,
        name: str,
        k_head_dim: int,
        v_head_dim: Optional[int] = None,
        *,
        seed: int = 0,
        k_mean: Any = None,
        v_mean: Any = None,
    ) -> None:
        op = "kv_recipe"
        if not isinstance(name, str) or "\0" in name or not name.isascii():
            raise refuse(op, "name", f'is {shown(name)}, wanted a text such as "8v4"')
        args = new("weft_kv_recipe_args")
        args.name = name.encode()
        args.k_head_dim = whole(op, "k_head_dim", k_head_dim, *_HEAD_DIMS)
        args.v_head_dim = args.k_head_dim if v_head_dim is None else whole(op, "v_head_dim", v_head_dim, *_HEAD_DIMS)
        args.seed = whole(op, "seed", seed, 0, 2**64 - 1)
        self.name = name
        self.seed: int = args.seed
        self._means = (k_mean, v_mean)
        self._views = [None if mean is None else _arrays.view(mean, op, side) for side, mean in zip(_MEANS, self._means)]
        for side, view in zip(_MEANS, self._views):
            if view is not None:
                view.write(args, getattr(type(args), side).offset)
        handle = ctypes.c_void_p()
        call(LIB.weft_kv_recipe_create, ctypes.byref(args), ctypes.byref(handle))
        self.handle: int = handle.value or 0
        weakref.finalize(self, LIB.weft_kv_recipe_destroy, handle).atexit = False
        info = new("weft_kv_recipe_info")
        call(LIB.weft_kv_recipe_describe, handle, ctypes.byref(info))
        self.id: str = info.id.decode()
        self.k = _side(info.k)
        self.v = _side(info.v)
        self.bytes_per_token: int = info.bytes_per_token

    def __copy__(self) -> KvRecipe:
        return self

    def __deepcopy__(self, memo: Any) -> KvRecipe:
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.name, self.k.head_dim, self.v.head_dim, self.seed, self._means)

    @property
    def has_means(self) -> bool:
        """Does a side subtract a mean?"""
        return any(mean is not None for mean in self._means)

    def __repr__(self) -> str:
        return f"<weft.KvRecipe {self.id}: K {self.k.head_dim}, V {self.v.head_dim}, {self.bytes_per_token} bytes per token and head>"


def _rebuilt(name: str, k_head_dim: int, v_head_dim: int, seed: int, means: Tuple[Any, Any]) -> KvRecipe:
    """A recipe from a pickle."""
    return KvRecipe(name, k_head_dim, v_head_dim, seed=seed, k_mean=means[0], v_mean=means[1])
