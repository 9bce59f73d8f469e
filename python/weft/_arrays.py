"""Arrays of numpy, torch, CuPy, JAX and whatever speaks DLPack or __cuda_array_interface__, as weft_tensor, without copies."""

from __future__ import annotations

import contextlib
import struct
import sys
from typing import Any, ContextManager, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _dlpack
from ._library import ENUMS, STRUCTS, Error, refuse

_DTYPE = ENUMS["DType"]
_PLACE = ENUMS["Place"]
_MAX_RANK = 5
_TENSOR = struct.Struct(f"P{_MAX_RANK}q{_MAX_RANK}qiiii")
assert [field[0] for field in STRUCTS["weft_tensor"]._fields_] == ["data", "sizes", "strides", "rank", "dtype", "place", "device"]
_REST = [(0,) * (_MAX_RANK - rank) for rank in range(_MAX_RANK + 1)]
_NUMPY_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64", "u8": "uint8", "u32": "uint32"}
_WEFT_NAMES = {numpy_name: name for name, numpy_name in _NUMPY_NAMES.items()}
_WEFT_NAMES["bool"] = "u8"


class View(NamedTuple):
    """An array as Weft sees it. Strides count elements."""

    array: Any  # kept alive for the duration of a call
    data: int
    sizes: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: str
    device: Optional[int]  # the ordinal of a CUDA device; None: the host
    read_only: bool

    def write(self, args: Any, offset: int) -> None:
        """Writes a weft_tensor into the bytes of a C struct."""
        rank = len(self.sizes)
        rest = _REST[rank]
        place, device = (0, 0) if self.device is None else (_PLACE["cuda"], self.device)
        _TENSOR.pack_into(
            args, offset, self.data, *self.sizes, *rest, *self.strides, *rest, rank, _DTYPE[self.dtype], place, device
        )


def library_of(array: Any) -> str:
    """"numpy", "torch", "cupy", "jax", ...: the top package of the array's type."""
    name = type(array).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def view(array: Any, op: str, argument: str, bits: Optional[str] = None) -> View:
    """The view of an array. `bits` names the dtype that uint16 elements stand for: "bf16" where there is no ml_dtypes."""
    if isinstance(array, np.ndarray):
        made = _of_numpy(array, op, argument, bits)
    elif _is_torch(array):
        made = _of_torch(array, op, argument, bits)
    elif hasattr(array, "__dlpack__"):
        made = _of_dlpack(array, op, argument, bits)
    elif hasattr(array, "__cuda_array_interface__"):
        made = _of_interface(array, array.__cuda_array_interface__, op, argument, bits)
    else:
        raise refuse(op, argument, f"is a {type(array).__name__}, wanted an array of numpy, or one with __dlpack__")
    if not 1 <= len(made.sizes) <= _MAX_RANK:
        raise refuse(op, argument, f"has {len(made.sizes)} dimensions, wanted 1 to {_MAX_RANK}")
    return made


def _weft_dtype(name: str, op: str, argument: str, bits: Optional[str]) -> str:
    if name == "uint16" and bits == "bf16":
        return "bf16"
    dtype = _WEFT_NAMES.get(name)
    if dtype is None:
        hint = '; pass dtype="bf16" where uint16 holds bf16' if name == "uint16" else ""
        raise refuse(op, argument, f"has elements of {name}, wanted one of {', '.join(_NUMPY_NAMES.values())}{hint}")
    return dtype


def _in_elements(strides: Sequence[int], size: int, op: str, argument: str) -> Tuple[int, ...]:
    counted = tuple([stride // size for stride in strides])
    if [count * size for count in counted] != list(strides):
        raise refuse(op, argument, f"has strides of {tuple(strides)} bytes, wanted multiples of its elements' {size} bytes")
    return counted


def _dense_strides(sizes: Sequence[int]) -> Tuple[int, ...]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(sizes[dim], 1)
    return tuple(strides)


_NATIVE = {np.dtype(numpy_name): name for name, numpy_name in _NUMPY_NAMES.items() if name != "bf16"}


def _of_numpy(array: np.ndarray, op: str, argument: str, bits: Optional[str]) -> View:
    dtype = _NATIVE.get(array.dtype)
    if dtype is None:
        if not array.dtype.isnative:
            raise refuse(op, argument, f"has elements of {array.dtype.str}, in the byte order of another machine, wanted native order")
        dtype = _weft_dtype(array.dtype.name, op, argument, bits)
    strides = _in_elements(array.strides, array.itemsize, op, argument)
    data = array.__array_interface__["data"][0]
    return View(array, data, array.shape, strides, dtype, None, not array.flags.writeable)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _of_torch(array: Any, op: str, argument: str, bits: Optional[str]) -> View:
    torch = sys.modules["torch"]
    if array.requires_grad and torch.is_grad_enabled():
        raise Error("unsupported", op, argument, f"{op}: {argument} requires grad, and Weft computes no gradients; use torch.no_grad()")
    if array.layout != torch.strided or array.is_conj() or array.is_neg():
        raise refuse(op, argument, "is a sparse, conjugated or negated view, wanted a plain strided tensor")
    kind = array.device.type
    if kind not in ("cpu", "cuda"):
        raise refuse(op, argument, f"is on device {array.device}, wanted cpu or cuda")
    device = (array.device.index or 0) if kind == "cuda" else None
    dtype = _weft_dtype(str(array.dtype)[6:], op, argument, bits)
    return View(array, array.data_ptr(), tuple(array.shape), array.stride(), dtype, device, False)


def _of_dlpack(array: Any, op: str, argument: str, bits: Optional[str]) -> View:
    kind, device = array.__dlpack_device__()
    if kind not in (_dlpack.CPU, _dlpack.CUDA, _dlpack.CUDA_HOST, _dlpack.CUDA_MANAGED):
        raise refuse(op, argument, f"is on DLPack device type {int(kind)}, wanted the CPU or CUDA")
    on_cuda = kind in (_dlpack.CUDA, _dlpack.CUDA_MANAGED)
    stream = (current_stream(array, device) or _dlpack.LEGACY_STREAM) if on_cuda else None
    try:
        held = _dlpack.Held(array, stream)
    except (BufferError, RuntimeError, TypeError) as error:
        raise refuse(op, argument, f"cannot be shared by DLPack: {error}") from error
    read_only = held.read_only or library_of(array) == "jax"  # an array of JAX never changes
    strides = held.strides or _dense_strides(held.sizes)
    dtype = _weft_dtype(held.dtype, op, argument, bits)
    return View((array, held), held.data, held.sizes, strides, dtype, int(device) if on_cuda else None, read_only)


def _of_interface(array: Any, interface: Any, op: str, argument: str, bits: Optional[str]) -> View:
    data, read_only = interface["data"]
    element = np.dtype(interface["typestr"])
    sizes = tuple(interface["shape"])
    given = interface.get("strides")
    strides = _in_elements(given, element.itemsize, op, argument) if given else _dense_strides(sizes)
    device = getattr(getattr(array, "device", None), "id", 0)
    dtype = _weft_dtype(element.name, op, argument, bits)
    return View(array, data or 0, sizes, strides, dtype, int(device), bool(read_only))


def current_stream(array: Any, device: int) -> int:
    """The handle of the CUDA stream that the array's library is using; 0: the default stream."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if library_of(array) == "cupy" and cupy is not None:
        return int(cupy.cuda.get_current_stream().ptr)
    if not _is_torch(array) and not hasattr(array, "__dlpack__"):  # its library may write it on a stream of its own
        return int(array.__cuda_array_interface__.get("stream") or 0)
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_stream(device).cuda_stream)
    return 0


def allocate(like: Any, sizes: Tuple[int, ...], dtype: str, device: Optional[int], bits: Optional[str], op: str, argument: str) -> Any:
    """A new array by the library that made `like`, on the same device."""
    library = library_of(like)
    if _is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(sizes, dtype=getattr(torch, _NUMPY_NAMES[dtype]), device=like.device)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device or 0):
            return cupy.empty(sizes, dtype=_numpy_dtype(dtype, bits))
    if device is not None:
        raise refuse(op, argument, f"is absent, and {library} cannot allocate it for Weft; wanted an array of {list(sizes)} {dtype}")
    return np.empty(sizes, dtype=_numpy_dtype(dtype, bits))


def _numpy_dtype(dtype: str, bits: Optional[str]) -> Any:
    if dtype != "bf16":
        return np.dtype(_NUMPY_NAMES[dtype])
    if bits == "bf16":
        return np.dtype(np.uint16)
    import ml_dtypes  # the input is of this type, so the package is there

    return np.dtype(ml_dtypes.bfloat16)


def on_stream(like: Any, device: int, queue: int) -> ContextManager[Any]:
    """Makes a stream the current one of the array's library, whose allocator then gives memory to work of that stream only."""
    made: ContextManager[Any] = contextlib.nullcontext()
    if _is_torch(like):
        torch = sys.modules["torch"]
        made = torch.cuda.stream(torch.cuda.ExternalStream(queue, device=device))
    elif library_of(like) == "cupy":
        made = sys.modules["cupy"].cuda.ExternalStream(queue, device)
    return made


def as_returned(like: Any, made: Any) -> Any:
    """An output that was allocated by numpy for a library whose arrays never change, as an array of that library."""
    if library_of(like) == "jax" and isinstance(made, np.ndarray):
        return sys.modules["jax"].numpy.asarray(made)
    return made
