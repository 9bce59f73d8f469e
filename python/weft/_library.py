"""Loads libweft_c from this package, and turns its codes into exceptions."""

from __future__ import annotations

import ctypes
import json
import operator
import os
import pathlib
from typing import Any, Optional, Union

from . import _structs

FOLDER = pathlib.Path(__file__).resolve().parent
MOST_DEVICE = 2**31 - 1
_ABI = 2  # WEFT_C_ABI of the headers that this package is written for


class Error(RuntimeError):
    """A refusal of the library or of this package. The text is a sentence: op, argument, got, wanted.

    code is the name of a weft_code ("invalid_argument", "unsupported", "device_error", ...), op the function, argument the member.
    """

    def __init__(self, code: str, op: str, argument: str, message: str) -> None:
        RuntimeError.__init__(self, message)  # torch.compile of torch 2.11 cannot trace super() here
        self.code = code
        self.op = op
        self.argument = argument
        self.message = message

    __module__ = "weft"  # where users find it

    def __reduce__(self) -> Any:
        return Error, (self.code, self.op, self.argument, self.message)


def refuse(op: str, argument: str, what: str) -> Error:
    """The error "<op>: <argument> <what>", for the caller to raise."""
    return Error("invalid_argument", op, argument, f"{op}: {argument} {what}")


def shown(value: Any) -> str:
    """A value in a form that fits into a sentence."""
    if isinstance(value, int) and value.bit_length() >= 256:  # Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def whole(op: str, argument: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """A whole number within bounds. Without this check, ctypes would silently take the low bits of a larger number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise refuse(op, argument, f"is {shown(value)}, wanted a whole number")
    number = operator.index(value)
    if not least <= number <= most:
        raise refuse(op, argument, f"is {shown(number)}, wanted {least} to {most}")
    return number


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(FOLDER / "libweft_c.so"))
    if library.weft_c_abi() != _ABI:
        raise ImportError(f"weft: libweft_c.so has C ABI {library.weft_c_abi()}, wanted {_ABI}")
    library.weft_schema.restype = ctypes.c_char_p
    library.weft_version.restype = ctypes.c_char_p
    return library


LIB = _load()
SCHEMA = json.loads(LIB.weft_schema())
STRUCTS = _structs.structures(SCHEMA)
ENUMS = _structs.enums(SCHEMA)
VERSION: str = SCHEMA["version"]
_CODES = {value: name for name, value in ENUMS["Code"].items()}
_PROCESS = os.getpid()

Status: Any = STRUCTS["weft_status"]
Stream: Any = STRUCTS["weft_stream"]


def new(name: str) -> Any:
    """A struct of zeros, which mean the defaults, with its struct_size set."""
    made = STRUCTS[name]()
    made.struct_size = ctypes.sizeof(made)
    return made


def check(code: int, status: Any) -> None:
    """Raises the Error of a code that is not WEFT_OK."""
    if code:
        texts = (getattr(status, name).decode("utf-8", "replace") for name in ("op", "argument", "message"))
        raise Error(_CODES.get(code, str(code)), *texts)


def call(function: Any, *arguments: Any) -> None:
    """Calls a C function whose last parameter is a weft_status*, and raises its Error."""
    status = new("weft_status")
    check(function(*arguments, ctypes.byref(status)), status)


def enum_value(of: str, value: Union[str, int], op: str, argument: str) -> int:
    """The number of an enum's value, which is given by its name or its number."""
    names = ENUMS[of]
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, int) and not isinstance(value, bool) and value in names.values():
        return value
    raise refuse(op, argument, f"is {shown(value)}, wanted one of {', '.join(names)}")


def forked() -> bool:
    """Is this process a child of the one that imported the package?"""
    return os.getpid() != _PROCESS


def new_stream(
    op: str, backend: str = "cpu", device: int = 0, queue: int = 0, threads: Optional[int] = None, isa: str = "best"
) -> Any:
    """Where a call computes. The worker threads of a parent do not exist in a forked child, which therefore computes with one."""
    made = new("weft_stream")
    made.backend = enum_value("Backend", backend, op, "backend")
    made.device = whole(op, "device", device, 0, MOST_DEVICE)
    made.queue = whole(op, "stream", queue, 0, 2**64 - 1)
    count = 0 if threads is None else whole(op, "threads", threads, 0, 2**31 - 1)
    made.threads = 1 if forked() else count
    made.isa = enum_value("Isa", isa, op, "isa")
    return made
