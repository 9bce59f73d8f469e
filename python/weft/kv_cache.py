"""weft.KvCache: a compressed cache of keys and values with its memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
from typing import Any, Dict, Iterator, List, Literal, Optional, Tuple, Union

import numpy as np

from . import _arrays, ops
from ._library import ENUMS, LIB, call, new_stream, refuse, shown, whole
from .kv_recipe import KvRecipe, KvSideInfo

_TILE_TOKENS = 64
_ALIGNMENT = 256  # bytes; every buffer is aligned to it
_MOST = 2**31 - _TILE_TOKENS  # lengths are int32
_LAYOUTS = ("fastest", *ENUMS["KvLayout"])


class KvCache:
    """Keys and values of one attention layer, for `batch` sequences of up to `capacity` tokens.

        cache = weft.KvCache("8v4", heads=8, head_dim=128, capacity=4096)
        cache.encode(k, v)      # k, v: [tokens, 8, 128]
        o = cache.attend(q)     # q: [tokens, 32, 128]; the queries are the last tokens

    With batch > 1, arrays have the batch as first dimension, and every call gives all sequences the same number of tokens.

    recipe    "f16", "8v8", "8v4", "4v4", ... (docs/formats.md), or a weft.KvRecipe
    head_dim  of keys and values, or a pair
    layout    "fastest", "rows" or "tiles"; tiles round the capacity up to a multiple of 64
    seed      picks the signs of the rotation; usually the number of the layer
    like      an array of torch or CuPy: the cache lies on its device, in memory of its library. None: numpy
    threads   of every call; None: the library's choice

    Strided arrays are read where they are, with one exception: batched arrays whose batch and tokens are not one dimension of constant
    stride, such as a transposed view, are copied. A cache takes one call at a time. copy() and pickle give a cache with memory of its own.
    """

    def __init__(
        self,
        recipe: Union[str, KvRecipe],
        heads: int,
        head_dim: Union[int, Tuple[int, int]],
        capacity: int,
        batch: int = 1,
        *,
        layout: Literal["fastest", "rows", "tiles"] = "fastest",
        seed: int = 0,
        like: Any = None,
        threads: Optional[int] = None,
    ) -> None:
        op = "kv_cache"
        given = {"heads": heads, "capacity": capacity, "batch": batch}
        self.heads, capacity, self.batch = (whole(op, name, value, 1, _MOST) for name, value in given.items())
        if layout not in _LAYOUTS:
            raise refuse(op, "layout", f"is {layout!r}, wanted one of {', '.join(_LAYOUTS)}")
        k_dim, v_dim = _pair(head_dim)
        self.recipe = recipe if isinstance(recipe, KvRecipe) else KvRecipe(recipe, k_dim, v_dim, seed=seed)
        if (self.recipe.k.head_dim, self.recipe.v.head_dim) != (k_dim, v_dim):
            raise refuse(op, "head_dim", f"is {shown(head_dim)}, the recipe is for {self.recipe.k.head_dim} and {self.recipe.v.head_dim}")
        self._like, self._device = _empty(like)
        self._where: Dict[str, Any] = {"threads": threads}
        self.layout, self._order = self._arrangement(layout)
        self.capacity = capacity if self.layout == "rows" else -(-capacity // _TILE_TOKENS) * _TILE_TOKENS
        self._sides = {"k": self._side(self.recipe.k), "v": self._side(self.recipe.v)}
        self._lengths = np.zeros(self.batch, np.int32)
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def _used(self, op: str) -> Iterator[None]:
        """Allows one call at a time: a second call would read lengths that do not match the memory."""
        if not self._busy.acquire(blocking=False):
            raise refuse(op, "cache", "is in use by another thread, wanted one call at a time")
        try:
            yield
        finally:
            self._busy.release()

    def __getstate__(self) -> Dict[str, Any]:
        with self._used("kv_cache"):
            return {name: value for name, value in self.__dict__.items() if name != "_busy"}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Restores a copy or a pickle into new memory, because ops need aligned memory and a shallow copy would share it."""
        self.__dict__.update(state)
        self._busy = threading.Lock()
        self._lengths = self._lengths.copy()
        old = self._sides
        self._sides = {"k": self._side(self.recipe.k), "v": self._side(self.recipe.v)}
        for name, side in self._sides.items():
            for part, array in side.items():
                array[...] = old[name][part]

    def __repr__(self) -> str:
        return (f"<weft.KvCache {self.recipe.id}: {self.batch} x {self.heads} heads, {self.lengths} of {self.capacity} tokens, "
                f"{self.layout}, {self.bytes} bytes>")

    def _arrangement(self, wanted: str) -> Tuple[str, str]:
        layout, order = ctypes.c_int32(), ctypes.c_int32()
        stream = new_stream("kv_cache", "cpu" if self._device is None else "cuda", self._device or 0, threads=self._where["threads"])
        call(LIB.weft_kv_recipe_arrangement, ctypes.c_void_p(self.recipe.handle), ctypes.byref(stream), ctypes.byref(layout),
             ctypes.byref(order))
        names = {name: {number: text for text, number in ENUMS[name].items()} for name in ("KvLayout", "TileOrder")}
        found = names["KvLayout"][layout.value]
        if wanted not in ("fastest", found):
            return wanted, "token_major"
        return found, names["TileOrder"][order.value]

    def _side(self, info: KvSideInfo) -> Dict[str, Any]:
        rows = (self.batch, self.heads, self.capacity)
        if self.layout == "tiles":
            return {"codes": self._allocate((*rows[:2], self.capacity // _TILE_TOKENS, info.tile_bytes), "u8")}
        if info.passthrough:
            return {"codes": self._allocate((*rows, info.head_dim), info.codes_dtype)}
        return {"codes": self._allocate((*rows, info.code_bytes), "u8"), "gains": self._allocate((*rows, info.gains), info.gains_dtype)}

    def _allocate(self, sizes: Tuple[int, ...], dtype: str) -> Any:
        if not isinstance(self._like, np.ndarray):
            made = _arrays.allocate(self._like, sizes, dtype, self._device, "bf16", "kv_cache", "like")
            made[...] = 0
            return made
        element = {"u8": np.uint8, "f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
        count = math.prod(sizes) * np.dtype(element).itemsize
        try:
            memory = np.zeros(count + _ALIGNMENT, np.uint8)
        except (MemoryError, OverflowError, ValueError) as error:
            raise _arrays.no_memory("kv_cache", "capacity", f"{self.capacity} tokens, {count} bytes", error) from error
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + count].view(element).reshape(sizes)

    def _numbers(self, values: np.ndarray) -> Any:
        """An int32 array on the device of the cache."""
        if isinstance(self._like, np.ndarray):
            return np.ascontiguousarray(values, np.int32)
        if _arrays.library_of(self._like) == "cupy":
            return sys.modules["cupy"].asarray(values, dtype="int32")
        return sys.modules["torch"].as_tensor(values, dtype=sys.modules["torch"].int32, device=self._like.device)

    def _struct(self) -> Any:
        lengths = self._numbers(self._lengths)
        return {"recipe": self.recipe, **self._sides, "layout": self.layout, "tile_order": self._order, "lengths": lengths}

    def _bits(self, dtype: Optional[str]) -> Dict[str, Any]:
        """Keywords of a call. numpy has a passthrough side of bf16 as uint16, which `dtype` then names bf16."""
        uint16 = isinstance(self._like, np.ndarray) and "bf16" in (self.recipe.k.codes_dtype, self.recipe.v.codes_dtype)
        return {**self._where, "dtype": "bf16" if uint16 else dtype}

    def _packed(self, op: str, argument: str, given: Any, heads: Optional[int], dim: int) -> Tuple[Any, int]:
        """[batch * tokens, heads, dim] and the tokens of each sequence."""
        if not hasattr(given, "shape") or not hasattr(given, "reshape"):
            raise refuse(op, argument, f"is a {type(given).__name__}, wanted an array of numpy, torch or CuPy")
        sizes = tuple(given.shape)
        lead = 1 if self.batch == 1 and len(sizes) == 3 else 2
        right = len(sizes) == lead + 2 and (lead == 1 or sizes[0] == self.batch)
        if not right or sizes[-1] != dim or heads not in (None, sizes[-2]):
            batch = "" if self.batch == 1 else f"{self.batch}, "
            raise refuse(op, argument, f"is {list(sizes)}, wanted [{batch}tokens, {'heads' if heads is None else heads}, {dim}]")
        return given.reshape(-1, *sizes[-2:]), sizes[lead - 1]

    @property
    def lengths(self) -> List[int]:
        """The tokens of every sequence."""
        return [int(length) for length in self._lengths]

    @property
    def bytes(self) -> int:
        """Bytes of both sides, for the whole capacity."""
        return sum(int(array.nbytes) for side in self._sides.values() for array in side.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all heads."""
        return self.recipe.bytes_per_token * self.heads

    def reset(self) -> None:
        """Empties all sequences."""
        with self._used("kv_cache"):
            self._lengths[:] = 0

    def encode(self, k: Any, v: Any, *, dtype: Optional[str] = None) -> None:
        """Appends the keys and values of new tokens, [tokens, heads, head_dim], to every sequence."""
        op = "kv_encode"
        keys, tokens = self._packed(op, "k", k, self.heads, self.recipe.k.head_dim)
        values, others = self._packed(op, "v", v, self.heads, self.recipe.v.head_dim)
        if tokens != others:
            raise refuse(op, "v", f"has {others} tokens, k has {tokens}")
        with self._used(op):
            if int(self._lengths.max()) + tokens > self.capacity:
                raise refuse(op, "k", f"has {tokens} tokens, the cache holds {int(self._lengths.max())} of {self.capacity}")
            positions = (self._lengths[:, None] + np.arange(tokens, dtype=np.int32)).reshape(-1)
            ops.kv_encode(k=keys, v=values, positions=self._numbers(positions), sequences={"count": self.batch}, cache=self._struct(),
                          **self._bits(dtype))
            self._lengths += tokens

    def decode(self, *, domain: Literal["original", "rotated"] = "original") -> Tuple[Any, Any]:
        """All keys and values as attention sees them, f32; zeros behind the end of a shorter sequence."""
        op = "kv_decode"
        with self._used(op):
            tokens = int(self._lengths.max())
            lead = (tokens,) if self.batch == 1 else (self.batch, tokens)
            k, v = (_arrays.allocate(self._like, (self.batch * tokens, self.heads, side.head_dim), "f32", self._device, None, op, name)
                    for name, side in (("k", self.recipe.k), ("v", self.recipe.v)))
            positions = np.tile(np.arange(tokens, dtype=np.int32), (self.batch, 1))
            positions[positions >= self._lengths[:, None]] = -1
            ops.kv_decode(cache=self._struct(), positions=self._numbers(positions.reshape(-1)), sequences={"count": self.batch}, k=k, v=v,
                          domain=domain, **self._bits(None))
        return k.reshape(*lead, *k.shape[1:]), v.reshape(*lead, *v.shape[1:])

    def attend(
        self,
        q: Any,
        *,
        scale: Optional[float] = None,
        causal: bool = True,
        window: Optional[int] = None,
        softcap: Optional[float] = None,
        sinks: Any = None,
        precision: Literal["exact_scores", "fast"] = "exact_scores",
        schedule: Literal["fastest", "invariant"] = "fastest",
        lse: bool = False,
        dtype: Optional[str] = None,
    ) -> Any:
        """Softmax attention of queries [tokens, query heads, head_dim], which are the last tokens of every sequence.

        scale     default head_dim ** -0.5
        window    the newest tokens that a query sees, itself included
        softcap   bounds scores by softcap * tanh(score / softcap)
        sinks     [query heads] f32: a logit per head that takes weight and gives no value
        lse       return (o, lse): also the logarithm of the denominator, [tokens, query heads] f32
        """
        op = "compressed_attention"
        packed, _ = self._packed(op, "q", q, None, self.recipe.k.head_dim)
        with self._used(op):
            made = ops.compressed_attention(
                queries={"q": packed, "sequences": {"count": self.batch}, "scale": scale},
                cache=self._struct(),
                mask={"not_causal": not causal, "window": window, "softcap": softcap},
                sinks=sinks,
                precision=precision,
                schedule=schedule,
                lse=True if lse else None,
                **self._bits(dtype),
            )
        lead = tuple(q.shape[:-2])
        return tuple(each.reshape(*lead, *each.shape[1:]) for each in made) if lse else made.reshape(*lead, *made.shape[1:])


def _pair(head_dim: Any) -> Tuple[Any, Any]:
    if not isinstance(head_dim, (tuple, list)):
        return head_dim, head_dim
    if len(head_dim) != 2:
        raise refuse("kv_cache", "head_dim", f"is {shown(head_dim)}, wanted one number, or those of keys and values")
    return head_dim[0], head_dim[1]


def _empty(like: Any) -> Tuple[Any, Optional[int]]:
    """An empty array of the library and device of `like`, so that a cache does not keep `like` itself, and the CUDA device."""
    if like is None:
        return np.empty(0, np.uint8), None
    device = _arrays.view(like, "kv_cache", "like").device
    made = _arrays.allocate(like, (0,), "u8", device, None, "kv_cache", "like")
    if _arrays.library_of(like) == "jax" or (isinstance(made, np.ndarray) and not isinstance(like, np.ndarray)):
        raise refuse("kv_cache", "like", f"is an array of {_arrays.library_of(like)}, wanted one of numpy, torch or CuPy")
    return made, device
