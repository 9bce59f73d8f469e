"""Repeated calls of an op with tensors of torch: the C struct of the first call is kept, and only its addresses change.

Decoding calls the same ops with the same sizes for every token, and filling a struct takes longer than some of the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

import torch

from . import ops
from ._library import call, forked, refuse

_MOST = 1024  # structs that are kept for one op
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes, such as FakeTensor, may have no memory
_put_address = struct.Struct("P").pack_into
_HOST = torch.device("cpu")


class _Output(NamedTuple):
    """A tensor to allocate."""

    offset: int  # where its address stands in the struct
    sizes: Tuple[int, ...]
    dtype: torch.dtype


class _Kept(NamedTuple):
    """What calls with the same sizes, strides, dtypes and options share."""

    image: bytes  # the C struct
    offsets: List[int]  # where the addresses of the given tensors stand in it
    outputs: List[_Output]
    returned: List[int]  # where each result is: place p of the given tensors, or -1 - p of the outputs
    form: Callable[..., Any]  # the named tuple of several results
    stream: Any  # on a GPU, a call replaces its queue by torch's current stream
    device: torch.device
    scratch: int  # bytes
    recipes: List[Any]  # kept alive: the image holds their addresses


class Calls:
    """An op as a function of the keywords of weft.ops."""

    def __init__(self, op: Any, plain: Callable[..., Any]) -> None:
        self._op, self._plain = op, plain
        self._kept: Dict[Tuple[Any, ...], _Kept] = {}

    def __call__(self, given: Dict[str, Any]) -> Any:
        described: List[Any] = [forked()]
        tensors: List[torch.Tensor] = []
        if not _describe(given, described, tensors) or not _in_one_place(given, tensors):
            return self._plain(**given)
        key = tuple(described)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, given)
        return self._run(kept, tensors)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises the error that the call would raise about its arguments, and computes nothing."""
        described: List[Any] = [forked()]
        tensors: List[torch.Tensor] = []
        kept = None
        if _describe(given, described, tensors) and _in_one_place(given, tensors):
            kept = self._kept.get(tuple(described))
        if kept is not None:
            image, _made = self._filled(kept, tensors)
            arguments = (ctypes.c_char * len(image)).from_buffer(image)
            call(self._op.scratch_bytes, ctypes.byref(kept.stream), arguments, ctypes.byref(ctypes.c_size_t()))
            return
        where = {name: given.get(name) for name in ops._WHERE}
        made = ops._Call(self._op, None)
        made.fill(self._op.tree, {name: value for name, value in given.items() if name not in where})
        stream = made.stream(where)
        made.allocate(stream)
        made.scratch_bytes(stream)

    def bind(self, given: Dict[str, Any], *changing: str) -> Callable[..., None]:
        """The call with these tensors, as a function of the addresses of some: of the members `changing`. All outputs must be given."""
        described: List[Any] = [forked()]
        tensors: List[torch.Tensor] = []
        if not _describe(given, described, tensors) or not _in_one_place(given, tensors):
            raise refuse(self._op.name, "arguments", "cannot be bound, wanted tensors of torch in one place that require no grad")
        kept = self._keep(tuple(described), given)
        image = bytearray(kept.image)
        for offset, tensor in zip(kept.offsets, tensors):
            _put_address(image, offset, tensor.data_ptr())
        places = {member.path: member.offset for member in self._op.tree.leaves()}
        return functools.partial(self._run_bound, kept, bytes(image), tensors, [places[path] for path in changing])

    def _run_bound(self, kept: _Kept, image: bytes, tensors: List[torch.Tensor], offsets: List[int], *addresses: int) -> None:
        arguments = bytearray(image)  # the addresses of `tensors`, which must stay alive, are in it
        for offset, address in zip(offsets, addresses):
            _put_address(arguments, offset, address)
        self._call(kept, arguments)

    def _call(self, kept: _Kept, image: bytearray) -> None:
        stream, lent, scratch = kept.stream, None, 0
        if kept.device is not _HOST:
            stream = type(stream).from_buffer_copy(stream)
            stream.queue = torch.cuda.current_stream(kept.device).cuda_stream
            if kept.scratch:
                lent = torch.empty(kept.scratch, dtype=torch.uint8, device=kept.device)  # later work of the same stream may have it
                scratch = lent.data_ptr()
        elif kept.scratch:
            lent, scratch = ops._host_scratch(kept.scratch)
        arguments = (ctypes.c_char * len(image)).from_buffer(image)
        call(self._op.function, ctypes.byref(stream), arguments, ctypes.c_void_p(scratch), ctypes.c_size_t(kept.scratch))
        del lent  # until here, the scratch was kept alive for the call

    def _filled(self, kept: _Kept, tensors: List[torch.Tensor]) -> Tuple[bytearray, List[torch.Tensor]]:
        """The C struct with these tensors and new outputs, and the outputs."""
        image = bytearray(kept.image)
        for offset, tensor in zip(kept.offsets, tensors):
            _put_address(image, offset, tensor.data_ptr())
        made = [torch.empty(output.sizes, dtype=output.dtype, device=kept.device) for output in kept.outputs]
        for output, tensor in zip(kept.outputs, made):
            _put_address(image, output.offset, tensor.data_ptr())
        return image, made

    def _run(self, kept: _Kept, tensors: List[torch.Tensor]) -> Any:
        image, made = self._filled(kept, tensors)
        self._call(kept, image)
        results = [tensors[place] if place >= 0 else made[-1 - place] for place in kept.returned]
        return kept.form(*results) if len(results) > 1 else results[0] if results else None

    def _keep(self, key: Tuple[Any, ...], given: Mapping[str, Any]) -> _Kept:
        """Fills a struct as weft.ops does, and asks for its scratch."""
        where = {name: given.get(name) for name in ops._WHERE}
        made = ops._Call(self._op, None)
        made.fill(self._op.tree, {name: value for name, value in given.items() if name not in where})
        offsets = [member.offset for member, _ in made.views]  # in the order of _describe()
        paths = [member.path for member, _ in made.views]
        stream = made.stream(where)
        made.allocate(stream)
        new = [(member.path, member.offset, made.outputs[member.path]) for member in made.wanted]
        outputs = [_Output(offset, tuple(tensor.shape), tensor.dtype) for _, offset, tensor in new]
        places = {**{path: -1 - place for place, (path, *_) in enumerate(new)}, **{path: place for place, path in enumerate(paths)}}
        returned = [places[member.path] for member in self._op.tree.leaves() if member.path in made.outputs]
        form = type(ops._returned(made)) if len(returned) > 1 else tuple
        recipes = [value for value in key if hasattr(value, "handle")]
        scratch = made.scratch_bytes(stream).value
        on_cuda = next((view.device for _, view in made.views if view.device is not None), None)
        device = _HOST if on_cuda is None else torch.device("cuda", on_cuda)
        if len(self._kept) >= _MOST:
            self._kept.clear()
        kept = self._kept[key] = _Kept(bytes(made.args), offsets, outputs, returned, form, stream, device, scratch, recipes)
        return kept


def _describe(given: Mapping[str, Any], described: List[Any], tensors: List[torch.Tensor]) -> bool:
    """Appends everything that the struct of a call depends on. False: weft.ops must take the call, or refuse it."""
    for name, value in given.items():
        described.append(name)
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN:
                return False
            if value.layout != torch.strided or value.is_neg() or not value.dim():
                return False
            if value.requires_grad and torch.is_grad_enabled():
                return False
            tensors.append(value)
            described += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, dict):
            if not _describe(value, described, tensors):
                return False
            described.append("}")
        elif value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "handle"):
            described += (type(value), value)
        else:
            return False
    return True


def _in_one_place(given: Mapping[str, Any], tensors: List[torch.Tensor]) -> bool:
    """Are all tensors on the CPU, or all on one GPU whose current stream the call takes?"""
    device = tensors[0].device if tensors else None
    if device is None or device.type == "cpu":
        return all(tensor.device.type == "cpu" for tensor in tensors)
    named = any(given.get(name) is not None for name in ("device", "stream", "backend"))
    return device.type == "cuda" and not named and all(tensor.device == device for tensor in tensors)
