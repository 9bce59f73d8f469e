"""Objects that own a handle of the library: copies are refused, and so is a handle that a thread used while the process was forked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any, Iterator, List

from ._library import refuse


class NoCopy:
    """An object with a handle or a thread of its own. copy, deepcopy and pickle are refused: two objects would own one handle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise refuse("copy", name, f"cannot be copied or pickled, wanted a new {name}")


class Owner(NoCopy):
    """Owns a handle, and knows which calls use it.

    A fork copies the memory of the process as it is, but only the thread that forks. What another thread had locked or half written stays
    so in the child. The child therefore refuses such an object, and never frees it. Other objects work in the child.
    """

    handle: ctypes.c_void_p
    _calls: List[int]  # the process of every call in progress; append() and pop() are atomic

    def _own(self, handle: ctypes.c_void_p, free: Any) -> None:
        self.handle, self._calls = handle, []
        weakref.finalize(self, _free, free, handle, self._calls).atexit = False

    def _check_fork(self, op: str, argument: str) -> None:
        if _left_by_a_fork(self._calls):
            raise refuse(op, argument, "is in use by the process that this one was forked from; wanted one that was idle at the fork")


def _left_by_a_fork(calls: List[int]) -> bool:
    return any(process != os.getpid() for process in calls)


def _free(free: Any, handle: ctypes.c_void_p, calls: List[int]) -> None:
    if not _left_by_a_fork(calls):
        free(handle)


@contextlib.contextmanager
def in_call(op: str, **owners: Owner) -> Iterator[None]:
    """A call of the library uses these objects until the block ends."""
    for argument, owner in owners.items():
        owner._check_fork(op, argument)
    for owner in owners.values():
        owner._calls.append(os.getpid())
    try:
        yield
    finally:
        for owner in owners.values():
            owner._calls.pop()


@contextlib.contextmanager
def out_of_call(*owners: Owner) -> Iterator[None]:
    """Used while a callback waits inside of in_call(). The library holds no lock meanwhile, so a forked child may use the objects."""
    for owner in owners:
        owner._calls.pop()
    try:
        yield
    finally:
        for owner in owners:
            owner._calls.append(os.getpid())
