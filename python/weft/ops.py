"""Every op of Weft as a function, made from the schema that the library returns.

Arguments are keyword-only and have the names of weft/c.h. A nested struct is a dict: gates={"g": g, "beta": beta}. A name that is a word
of Python takes a trailing underscore where it is a keyword: kv_repack(from_=...). Enums are texts, None means absent.

Outputs. A required output that is not given is allocated by the library of the first array where its sizes follow from the inputs. True
asks for an optional one. A function returns its required outputs and those asked for by True: one array, or a named tuple.

Every function also takes:
    threads: cpu: how many threads; absent: the library's choice. The bits of a result do not depend on it
    backend: "cpu", "reference" or "cuda"; absent: cuda for arrays on a GPU, else cpu
    device: cuda: the ordinal of the device; absent: that of the arrays
    stream: cuda: a stream of torch or CuPy, or its handle; absent: the current one of the arrays' library
    isa: cpu: the instruction set, "avx2" for example; absent: the best
    dtype: "bf16" reads uint16 elements as bf16, for numpy without ml_dtypes
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import threading
from collections import namedtuple
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from . import _arrays, _cuda_driver
from ._library import LIB, MOST_DEVICE, SCHEMA, STRUCTS, Error, call, new_stream, refuse, whole
from ._members import Group, Member, tree_of
from ._sizes import Sizes
from ._words import WORDS

_ALIGNMENT = 256  # WEFT_SCRATCH_ALIGNMENT
_MOST_KEPT = 64 << 20  # bytes of scratch that a thread keeps after a call
_WHERE = ("threads", "backend", "device", "stream", "isa", "dtype")
_STORAGE = ("codes", "gains")  # of a KV cache
_kept = threading.local()


class _Op:
    """An op of the schema."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.name: str = entry["op"]
        self.tree = tree_of(entry)
        self.struct = STRUCTS[entry["struct"]]
        self.scratch_bytes, self.function = (getattr(LIB, name) for name in entry["functions"][:2])
        self.returned = [member for member in self.tree.leaves() if member.returned]
        self.defaults = self.struct()
        self.defaults.struct_size = ctypes.sizeof(self.struct)
        for member in self.tree.leaves():
            if member.path.endswith("sequences.count"):
                member.write(self.name, 1, self.defaults)  # as in weft::Sequences


class _Call:
    """Collects the arguments of one call and writes them into a C struct."""

    def __init__(self, op: _Op, bits: Optional[str], device: Any = None) -> None:
        self.op = op
        self.device = device  # for arrays that do not name their device
        self.args = op.struct.from_buffer_copy(op.defaults)
        self.bits = bits
        self.views: List[Tuple[Member, _arrays.View]] = []
        self.numbers: List[Tuple[Member, Any]] = []
        self.wanted: List[Member] = []  # outputs to allocate
        self.outputs: Dict[str, Any] = {}
        self.own_stream = False  # the caller names a CUDA stream

    def fill(self, group: Group, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            member = group.find(self.op.name, name)
            if value is None:
                continue
            if isinstance(member, Group):
                if not isinstance(value, Mapping):
                    wanted = ", ".join(member.members)
                    raise refuse(self.op.name, member.path, f"is a {type(value).__name__}, wanted a dict of {wanted}")
                self.fill(member, value)
            elif member.kind == "tensor":
                self.tensor(member, value)
            else:
                member.write(self.op.name, value, self.args)
                self.numbers.append((member, value))

    def tensor(self, member: Member, value: Any) -> None:
        if value is True and member.output:
            self.wanted.append(member)
            return
        view = _arrays.view(value, self.op.name, member.path, self.bits, self.device)
        if member.output and view.read_only:
            raise refuse(self.op.name, member.path, "is read-only, wanted an array that can be written")
        if member.output and view.copied:
            raise refuse(self.op.name, member.path, "is shared by DLPack as a copy, wanted an array whose memory can be written")
        view.write(self.args, member.offset)
        self.views.append((member, view))
        if member.returned:
            self.outputs[member.path] = value

    def allocate(self, stream: Any) -> None:
        """Allocates the outputs that the caller did not pass. The inputs give their sizes."""
        self.wanted += [member for member in self.op.returned if member.path not in self.outputs and member not in self.wanted]
        if not self.wanted:
            return
        self.wanted.sort(key=lambda member: member.offset)
        sizes = Sizes()
        for member, view in self.views:
            sizes.bind_tensor(member, view.sizes)
        for member, value in self.numbers:
            sizes.bind_number(member, value)
        first = self.first()
        for member in self.wanted:
            made = sizes.of(member)
            if made is None or first is None:
                self.check_inputs(stream)
                shapes = " or ".join(member.shapes)
                raise refuse(self.op.name, member.path, f"is absent, and its sizes {shapes} do not follow from the inputs")
            try:
                self.outputs[member.path] = self.new_output(member, made, first)
            except Error:
                self.check_inputs(stream)
                raise

    def check_inputs(self, stream: Any) -> None:
        """Raises the library's error about another argument, where that argument is why an output cannot be made."""
        absent = [member.path for member in self.wanted]
        try:
            self.scratch_bytes(stream)
        except Error as error:
            if error.argument not in absent:
                raise

    def first(self) -> Optional[_arrays.View]:
        """The first input in the order of the C struct: new outputs follow its library and device."""
        inputs = [(member.offset, view) for member, view in self.views if not member.output]
        return min(inputs, key=lambda entry: entry[0])[1] if inputs else None

    def new_dtype(self, member: Member) -> str:
        """The dtype of the first floating input that is no storage of a cache, if the output may have this dtype; else f32."""
        inputs = [(each.offset, view.dtype) for each, view in self.views if not each.output and each.name not in _STORAGE]
        floats = [dtype for _, dtype in sorted(inputs) if dtype in ("f32", "f16", "bf16")]
        return floats[0] if floats and floats[0] in member.dtypes else member.dtypes[0]

    def new_output(self, member: Member, sizes: Tuple[int, ...], first: _arrays.View) -> Any:
        like = _owner(first)
        made = _arrays.allocate(like, sizes, self.new_dtype(member), first.device, self.bits, self.op.name, member.path)
        view = _arrays.view(made, self.op.name, member.path, self.bits, self.device)
        view.write(self.args, member.offset)
        self.views.append((member, view))
        return made

    def convert(self) -> None:
        """The written outputs. Where the inputs' library could not allocate them, they are converted to its arrays."""
        first = self.first()
        for member in self.wanted:
            if first is not None:
                self.outputs[member.path] = _arrays.as_returned(_owner(first), self.outputs[member.path])

    def stream(self, where: Mapping[str, Any]) -> Any:
        """The weft_stream of the call: on the device of its arrays, in the order of their library's current stream."""
        on_cuda = next((view for _, view in self.views if view.device is not None), None)
        backend = where["backend"] or ("cuda" if on_cuda else "cpu")
        named = None if where["device"] is None else whole(self.op.name, "device", where["device"], 0, MOST_DEVICE)
        device, queue = named or 0, _queue(self.op.name, where["stream"])
        self.own_stream = where["stream"] is not None
        if backend == "cuda" and on_cuda:
            device = (on_cuda.device or 0) if named is None else named
            queue = self.current_stream(on_cuda, device) if where["stream"] is None else queue
            self.check_streams(queue)
        return new_stream(self.op.name, backend, device, queue, where["threads"], where["isa"] or "best")

    def current_stream(self, on_cuda: _arrays.View, device: int) -> int:
        """The current CUDA stream of the arrays' library, or the stream that an array names by __cuda_array_interface__."""
        named = [view.stream for _, view in self.views if view.stream is not None]
        return named[0] if named and not hasattr(_owner(on_cuda), "__dlpack__") else _arrays.current_stream(_owner(on_cuda), device)

    def check_streams(self, queue: int) -> None:
        """Refuses arrays of different streams. One stream must order the arrays' earlier work and this call: Weft joins no two streams."""
        for member, view in self.views:
            if view.stream is not None and view.stream != (queue or _arrays.LEGACY_STREAM):
                wanted = "the same one, or an array whose __cuda_array_interface__ names none"
                raise refuse(self.op.name, member.path, f"is in use on CUDA stream {view.stream}, the call on {queue}, wanted {wanted}")

    def scratch_bytes(self, stream: Any) -> ctypes.c_size_t:
        count = ctypes.c_size_t()
        call(self.op.scratch_bytes, ctypes.byref(stream), ctypes.byref(self.args), ctypes.byref(count))
        return count

    def run(self, stream: Any) -> None:
        count = self.scratch_bytes(stream)
        lent, address = self.scratch(count.value, stream)
        call(self.op.function, ctypes.byref(stream), ctypes.byref(self.args), ctypes.c_void_p(address), count)
        if any(view.device is not None and _arrays.to_be_awaited(_owner(view)) for _, view in self.views):
            _cuda_driver.wait(self.op.name, stream.device, stream.queue or 0)
        del lent  # later work of the same stream may have it

    def scratch(self, count: int, stream: Any) -> Tuple[Any, int]:
        """Memory for one call, and its address."""
        on_cuda = next((view for _, view in self.views if view.device is not None), None)
        if not count or on_cuda is None or on_cuda.device is None:
            return self.host_scratch(count) if count else (None, 0)
        like = _owner(on_cuda)
        with _arrays.on_stream(like, on_cuda.device, stream.queue) if self.own_stream else contextlib.nullcontext():
            lent = _arrays.allocate(like, (count,), "u8", on_cuda.device, None, self.op.name, "scratch")
        return lent, _arrays.view(lent, self.op.name, "scratch").data

    def host_scratch(self, count: int) -> Tuple[Any, int]:
        try:
            return _host_scratch(count)
        except (MemoryError, OverflowError, ValueError) as error:
            raise _arrays.no_memory(self.op.name, "scratch", f"{count} bytes", error) from error


def _owner(view: _arrays.View) -> Any:
    return view.array[0] if isinstance(view.array, tuple) else view.array


def _host_scratch(count: int) -> Tuple[Any, int]:
    """This thread's scratch, which the caller holds during the call, and an aligned address in it.

    A signal handler or finalizer of the same thread may call an op, and replace what is kept, before the caller's op runs.
    """
    memory = getattr(_kept, "memory", None)
    if memory is None or len(memory) < count + _ALIGNMENT:
        memory = (ctypes.c_char * (count + _ALIGNMENT))()
        if count <= _MOST_KEPT:
            _kept.memory = memory
    start = ctypes.addressof(memory)
    return memory, start + -start % _ALIGNMENT


def _queue(op: str, stream: Any) -> int:
    """The handle of a stream: a number, an object of torch (cuda_stream) or CuPy (ptr), or one with __cuda_stream__."""
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    for name in ("cuda_stream", "ptr"):
        stream = getattr(stream, name, stream)
    return 0 if stream is None else whole(op, "stream", stream, 0, 2**64 - 1)


def _function(entry: Mapping[str, Any]) -> Callable[..., Any]:
    op = _Op(entry)

    def call_op(**given: Any) -> Any:
        where = {name: given.pop(name, None) for name in _WHERE}
        if where["dtype"] not in (None, "bf16"):
            raise refuse(op.name, "dtype", f'is {where["dtype"]!r}, wanted "bf16" or nothing')
        made = _Call(op, where["dtype"], where["device"])
        made.fill(op.tree, given)
        stream = made.stream(where)
        made.allocate(stream)
        made.run(stream)
        made.convert()
        return _returned(made)

    call_op.__name__ = call_op.__qualname__ = op.name
    call_op.__module__ = __name__
    call_op.__doc__ = WORDS.get(op.name)
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (*op.tree.keywords(), *_WHERE)]
    call_op.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call_op


_tuples: Dict[Tuple[str, ...], Any] = {}


def _returned(made: _Call) -> Any:
    if len(made.outputs) < 2:
        return next(iter(made.outputs.values()), None)
    names = tuple(member.path for member in made.op.tree.leaves() if member.path in made.outputs)
    if names not in _tuples:
        _tuples[names] = namedtuple("Outputs", [name.replace(".", "_") for name in names])
    return _tuples[names](*[made.outputs[name] for name in names])


FUNCTIONS: Dict[str, Callable[..., Any]] = {entry["op"]: _function(entry) for entry in SCHEMA["ops"]}
globals().update(FUNCTIONS)
__all__ = list(FUNCTIONS)
