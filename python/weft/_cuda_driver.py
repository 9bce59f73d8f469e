"""Waits for a CUDA stream, on behalf of array libraries that cannot wait for it themselves."""

from __future__ import annotations

import ctypes
from typing import Any

from ._library import Error


def wait(op: str, device: int, queue: int) -> None:
    """Returns when the work of a stream is done. 0 is the default stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(op, driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)))
    _check(op, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    try:
        _check(op, driver.cuCtxPushCurrent_v2(context))
        try:
            _check(op, driver.cuStreamSynchronize(ctypes.c_void_p(queue)))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


def _check(op: str, code: Any) -> None:
    if code:
        raise Error("device_error", op, "stream", f"{op}: the CUDA driver reports error {code} while the call waits for its stream")
