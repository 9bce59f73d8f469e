"""Arrays of numpy, torch, CuPy, JAX and whatever speaks DLPack or __cuda_array_interface__, as weft_tensor, without copies."""

from __future__ import annotations

import contextlib
import struct
import sys
from typing import Any, ContextManager, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _dlpack
from ._dlpack import LEGACY_STREAM as LEGACY_STREAM
from ._library import ENUMS, MOST_DEVICE, STRUCTS, Error, refuse, shown, whole

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
    copied: bool = False  # the memory is a copy that DLPack made
    stream: Optional[int] = None  # the CUDA stream that __cuda_array_interface__ names: readers must follow it

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


def view(array: Any, op: str, argument: str, bits: Optional[str] = None, device: Any = None) -> View:
    """The view of an array. `bits` names the dtype that uint16 elements stand for: "bf16" where there is no ml_dtypes.

    device: the CUDA device of an array that does not say its own
    """
    if isinstance(array, np.ndarray):
        made = _of_numpy(array, op, argument, bits)
    elif _is_torch(array):
        made = _of_torch(array, op, argument, bits)
    elif hasattr(array, "__dlpack__"):
        made = _of_dlpack(array, op, argument, bits)
    elif hasattr(array, "__cuda_array_interface__"):
        made = _of_interface(array, array.__cuda_array_interface__, op, argument, bits, device)
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
    try:
        kind, device = (int(each) for each in array.__dlpack_device__())
    except Exception as error:  # the array's library may raise anything
        raise refuse(op, argument, f"cannot be shared by DLPack: {error}") from error
    if kind not in (_dlpack.CPU, _dlpack.CUDA, _dlpack.CUDA_HOST, _dlpack.CUDA_MANAGED):
        raise refuse(op, argument, f"is on DLPack device type {kind}, wanted the CPU or CUDA")
    on_cuda = kind in (_dlpack.CUDA, _dlpack.CUDA_MANAGED)
    stream = (current_stream(array, device) or LEGACY_STREAM) if on_cuda else None
    try:
        if on_cuda and library_of(array) == "jax":  # JAX does not expose its streams
            array.block_until_ready()
        held = _dlpack.Held(array, stream)
    except Exception as error:
        raise refuse(op, argument, f"cannot be shared by DLPack: {error}") from error
    read_only = held.read_only or library_of(array) == "jax"  # an array of JAX never changes
    strides = held.strides or _dense_strides(held.sizes)
    dtype = _weft_dtype(held.dtype, op, argument, bits)
    return View((array, held), held.data, held.sizes, strides, dtype, device if on_cuda else None, read_only, held.copied)


def _of_interface(array: Any, interface: Any, op: str, argument: str, bits: Optional[str], device: Any) -> View:
    if interface.get("mask") is not None:
        raise refuse(op, argument, "has a mask, wanted an array whose elements all count")
    stream = interface.get("stream")
    if stream is not None and not (isinstance(stream, int) and 0 < stream < 2**64):  # the protocol excludes the ambiguous 0
        raise refuse(op, argument, f"has stream {shown(stream)} in its __cuda_array_interface__, wanted a handle, or 1 or 2")
    device = getattr(getattr(array, "device", None), "id", device)
    if device is None:
        raise refuse(op, argument, f"is a {type(array).__name__} that does not say its device, wanted the argument device= with it")
    try:
        data, read_only = interface["data"]
        element, sizes = np.dtype(interface["typestr"]), tuple(interface["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(op, argument, f"has a __cuda_array_interface__ that cannot be read: {error!r}") from error
    given = interface.get("strides")
    strides = _in_elements(given, element.itemsize, op, argument) if given else _dense_strides(sizes)
    dtype = _weft_dtype(element.name, op, argument, bits)
    ordinal = whole(op, "device", device, 0, MOST_DEVICE)
    return View(array, data or 0, sizes, strides, dtype, ordinal, bool(read_only), stream=stream)


def current_stream(array: Any, device: int) -> int:
    """The handle of the CUDA stream that the array's library is using; 0: the default stream."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if library_of(array) == "cupy" and cupy is not None:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    if not _is_torch(array) and not hasattr(array, "__dlpack__"):  # the array's library may write it on a stream of its own
        return int(array.__cuda_array_interface__.get("stream") or 0)
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_stream(device).cuda_stream)
    return 0


def allocate(like: Any, sizes: Tuple[int, ...], dtype: str, device: Optional[int], bits: Optional[str], op: str, argument: str) -> Any:
    """A new array by the library that made `like`, on the same device."""
    try:
        return _allocated(like, sizes, dtype, device, bits, op, argument)
    except Error:
        raise
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:  # torch raises RuntimeError, numpy ValueError for huge sizes
        raise no_memory(op, argument, f"{list(sizes)} {dtype}", error) from error


def no_memory(op: str, argument: str, wanted: str, error: BaseException) -> Error:
    """The error of an allocation, for the caller to raise."""
    return Error("out_of_memory", op, argument, f"{op}: {argument} of {wanted} cannot be allocated: {error or 'out of memory'}")


def _allocated(like: Any, sizes: Tuple[int, ...], dtype: str, device: Optional[int], bits: Optional[str], op: str, argument: str) -> Any:
    library = library_of(like)
    if _is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(sizes, dtype=getattr(torch, _NUMPY_NAMES[dtype]), device=like.device)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device or 0):
            return cupy.empty(sizes, dtype=_numpy_dtype(dtype, bits, like))
    if library == "jax" and device is not None:
        return sys.modules["jax"].numpy.empty(sizes, dtype=_numpy_dtype(dtype, bits, like), device=like.device)
    if device is not None:
        raise refuse(op, argument, f"is absent, and {library} cannot allocate it for Weft; wanted an array of {list(sizes)} {dtype}")
    return np.empty(sizes, dtype=_numpy_dtype(dtype, bits, like))


def _numpy_dtype(dtype: str, bits: Optional[str], like: Any) -> Any:
    if dtype != "bf16":
        return np.dtype(_NUMPY_NAMES[dtype])
    if bits == "bf16" and str(getattr(like, "dtype", "")) != "bfloat16":
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


def to_be_awaited(array: Any) -> bool:
    """Must a call on a GPU end before the array's library uses the memory again? JAX cannot wait for streams of others."""
    return library_of(array) == "jax"


def as_returned(like: Any, made: Any) -> Any:
    """An output that was allocated by numpy for a library whose arrays never change, as an array of that library."""
    if library_of(like) == "jax" and isinstance(made, np.ndarray):
        return sys.modules["jax"].numpy.asarray(made)
    return made
