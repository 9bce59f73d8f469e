"""Every op of Weft as a function, made from the schema that the library returns.

Arguments are keyword-only and have the names of weft/c.h. A nested struct is a dict: gates={"g": g, "beta": beta}. A name that is a word
of Python takes a trailing underscore where it is a keyword: kv_repack(from_=...). Enums are texts, None means absent.

Outputs. A required output that is not given is allocated by the library of the first array where its sizes follow from the inputs. True
asks for an optional one. A function returns its required outputs and those asked for by True: one array, or a named tuple.

Every function also takes threads, backend, device, stream, isa (weft/device.h) and dtype="bf16", which reads uint16 as bf16.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections import namedtuple
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from . import _arrays
from ._library import LIB, SCHEMA, STRUCTS, Error, call, enum_value, new_stream, refuse
from ._members import Group, Member, tree_of
from ._sizes import Sizes

_ALIGNMENT = 256  # WEFT_SCRATCH_ALIGNMENT
_WHERE = ("threads", "backend", "device", "stream", "isa", "dtype")
_kept = threading.local()


class _Call:
    """The arguments of one call, on their way into a C struct."""

    def __init__(self, op: str, args: Any, bits: Optional[str]) -> None:
        self.op = op
        self.args = args
        self.bits = bits
        self.views: Dict[str, _arrays.View] = {}
        self.sizes = Sizes()
        self.wanted: List[Tuple[Member, Any]] = []  # outputs to allocate, with the weft_tensor of each
        self.outputs: Dict[str, Any] = {}

    def fill(self, group: Group, target: Any, given: Mapping[str, Any]) -> None:
        values = group.named(self.op, given)
        for name, member in group.members.items():
            value = values.get(name)
            if isinstance(member, Group):
                if value is not None and not isinstance(value, Mapping):
                    raise refuse(self.op, member.path, f"is a {type(value).__name__}, wanted a dict of {', '.join(member.members)}")
                self.fill(member, getattr(target, name), value or {})
            elif member.kind == "tensor":
                self.tensor(member, getattr(target, name), value)
            else:
                self.scalar(member, target, value)

    def tensor(self, member: Member, target: Any, value: Any) -> None:
        returned = member.role == "out" and not member.optional and "." not in member.path
        if value is True and member.role == "out" or value is None and returned:
            self.wanted.append((member, target))
        elif value is not None:
            view = _arrays.view(value, self.op, member.path, self.bits)
            if member.role == "out" and view.read_only:
                raise refuse(self.op, member.path, "is read-only, wanted an array that can be written")
            self.place(member, target, view)
            if returned:
                self.outputs[member.path] = value

    def place(self, member: Member, target: Any, view: _arrays.View) -> None:
        view.write(target)
        self.views[member.path] = view
        self.sizes.bind_tensor(member, view.sizes)

    def scalar(self, member: Member, target: Any, value: Any) -> None:
        if value is None:
            value = member.implied
            if value is None:
                return
        if member.kind == "recipe":
            setattr(target, member.name, _handle(self.op, member, value))
            self.sizes.bind_recipe(value)
        elif member.kind == "enum":
            setattr(target, member.name, enum_value(member.of, value, self.op, member.path))
        else:
            setattr(target, member.name, member.number(self.op, value))
            self.sizes.bind_number(member, value)
            if member.flag:
                setattr(target, member.flag, 1)

    def allocate(self) -> None:
        """The outputs that nobody gave, once the inputs have said how large they are."""
        if not self.wanted:
            return
        first = next(iter(self.views.values()), None)
        for member, target in self.wanted:
            sizes = self.sizes.of(member, self.views)
            if sizes is None or first is None:
                raise refuse(self.op, member.path, f"is absent, and its sizes {' or '.join(member.shapes)} do not follow from the inputs")
            like = _owner(first)
            dtype = first.dtype if first.dtype in member.dtypes else member.dtypes[0]
            made = _arrays.allocate(like, sizes, dtype, first.device, self.bits, self.op, member.path)
            self.place(member, target, _arrays.view(made, self.op, member.path, self.bits))
            self.outputs[member.path] = _arrays.as_returned(like, made)


def _owner(view: _arrays.View) -> Any:
    return view.array[0] if isinstance(view.array, tuple) else view.array


def _handle(op: str, member: Member, value: Any) -> int:
    handle = getattr(value, "handle", None)
    if not isinstance(handle, int):
        raise refuse(op, member.path, f"is a {type(value).__name__}, wanted a weft.KvRecipe")
    return handle


def _host_scratch(count: int) -> int:
    """An aligned address of this thread's scratch, which grows and is kept."""
    memory = getattr(_kept, "memory", None)
    if memory is None or len(memory) < count + _ALIGNMENT:
        _kept.memory = memory = ctypes.create_string_buffer(count + _ALIGNMENT)
    start = ctypes.addressof(memory)
    return start + -start % _ALIGNMENT


def _stream(made: _Call, where: Mapping[str, Any]) -> Tuple[Any, Optional[int]]:
    """The weft_stream of a call, and the CUDA device it computes on."""
    on_cuda = [view for view in made.views.values() if view.device is not None]
    device = where["device"]
    if device is None:
        device = on_cuda[0].device if on_cuda else 0
    backend = where["backend"] or ("cuda" if on_cuda else "cpu")
    queue = _queue(where["stream"])
    if backend == "cuda" and where["stream"] is None and on_cuda:
        queue = _arrays.current_stream(_owner(on_cuda[0]), device)
    stream = new_stream(made.op, backend, device, queue, where["threads"], where["isa"] or "best")
    return stream, device if backend == "cuda" else None


def _queue(stream: Any) -> int:
    """The handle of a stream: a number, or an object of torch (cuda_stream) or CuPy (ptr)."""
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    return int(stream or 0)


def _run(made: _Call, where: Mapping[str, Any], size_of: Any, function: Any) -> None:
    stream, device = _stream(made, where)
    arguments, count = ctypes.byref(made.args), ctypes.c_size_t()
    call(size_of, ctypes.byref(stream), arguments, ctypes.byref(count))
    lent, address = None, 0
    if count.value and device is None:
        address = _host_scratch(count.value)
    elif count.value:
        like = _owner(next(view for view in made.views.values() if view.device is not None))
        lent = _arrays.view(_arrays.allocate(like, (count.value,), "u8", device, None, made.op, "scratch"), made.op, "scratch")
        address = lent.data
    call(function, ctypes.byref(stream), arguments, ctypes.c_void_p(address), count)


def _function(entry: Dict[str, Any]) -> Callable[..., Any]:
    op, tree = entry["op"], tree_of(entry)
    struct = STRUCTS[entry["struct"]]
    size_of, function = (getattr(LIB, name) for name in entry["functions"])

    def call_op(**given: Any) -> Any:
        where = {name: given.pop(name, None) for name in _WHERE}
        if where["dtype"] not in (None, "bf16"):
            raise refuse(op, "dtype", f"is {where['dtype']!r}, wanted \"bf16\" or nothing")
        args = struct()
        args.struct_size = ctypes.sizeof(struct)
        made = _Call(op, args, where["dtype"])
        made.fill(tree, args, given)
        made.allocate()
        _run(made, where, size_of, function)
        return _returned(made)

    call_op.__name__ = call_op.__qualname__ = op
    call_op.__module__ = __name__
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (*tree.keywords(), *_WHERE)]
    call_op.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call_op


_tuples: Dict[Tuple[str, ...], Any] = {}


def _returned(made: _Call) -> Any:
    names = tuple(made.outputs)
    if len(names) < 2:
        return made.outputs[names[0]] if names else None
    if names not in _tuples:
        _tuples[names] = namedtuple("Outputs", [name.replace(".", "_") for name in names])
    return _tuples[names](*made.outputs.values())


FUNCTIONS: Dict[str, Callable[..., Any]] = {entry["op"]: _function(entry) for entry in SCHEMA["ops"]}
globals().update(FUNCTIONS)
__all__ = list(FUNCTIONS)
