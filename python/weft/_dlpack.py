"""Reads a DLPack capsule with ctypes: the address, sizes, strides and dtype of an array."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Optional

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
LEGACY_STREAM = 1  # what __dlpack__ calls CUDA's default stream
_READ_ONLY, _IS_COPIED = 1, 2  # DLPACK_FLAG_BITMASK_*
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor, the capsule "dltensor"."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, the capsule "dltensor_versioned"."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Held:
    """A capsule that is read and not consumed: its own destructor releases the array when this object is gone."""

    def __init__(self, array: Any, stream: Optional[int]) -> None:
        self._capsule = _capsule(array, stream)
        self.read_only = self.copied = False
        if _is_valid(self._capsule, b"dltensor_versioned"):
            versioned = _Versioned.from_address(_pointer(self._capsule, b"dltensor_versioned"))
            if versioned.major != 1:
                raise BufferError(f"DLPack version {versioned.major}, wanted 1")
            self.read_only = bool(versioned.flags & _READ_ONLY)
            self.copied = bool(versioned.flags & _IS_COPIED)
            tensor = versioned.tensor
        else:
            if not _is_valid(self._capsule, b"dltensor"):
                raise BufferError(f"__dlpack__ returned a {type(self._capsule).__name__}, wanted an unused capsule of a tensor")
            tensor = _Managed.from_address(_pointer(self._capsule, b"dltensor")).tensor
        rank = tensor.ndim
        self.data = (tensor.data or 0) + tensor.byte_offset
        self.sizes = tuple(tensor.shape[:rank])
        self.strides = tuple(tensor.strides[:rank]) if tensor.strides else None
        kind = _KINDS.get(tensor.code, f"code{tensor.code}_")
        self.dtype = "bool" if kind == "bool" else f"{kind}{tensor.bits}"
        if tensor.lanes != 1:
            raise BufferError(f"elements of {tensor.lanes} lanes, wanted 1")


def _capsule(array: Any, stream: Optional[int]) -> Any:
    """Asks for the array itself in the version that knows read-only arrays. A library may lack either keyword."""
    options: Dict[str, Any] = {} if stream is None else {"stream": stream}
    for wanted in ({"max_version": (1, 0), "copy": False}, {"max_version": (1, 0)}):
        try:
            return array.__dlpack__(**wanted, **options)
        except TypeError:
            continue
    return array.__dlpack__(**options)
