"""weft.StateLock: exclusive use of a state file from load to save."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from typing import Any, Callable, Iterator, Optional, Union

from . import _c_model as c
from ._library import LIB, Error, call, refuse
from ._owner import NoCopy

Path = Union[str, "os.PathLike[str]"]
_PAUSE = 0.05  # seconds between attempts
_SILENT = 1.0  # seconds before on_wait is called


class StateLock(NoCopy):
    """Exclusive use of a state file, so that no turn of another writer is lost between load and save.

        with weft.StateLock("story.state") as lock:
            if lock.exists:
                state.load(lock)
            model.generate("And then", state=state)
            state.save(lock)

    Until the lock is closed, other locks and State.save of this file wait, also in the same thread. Readers do not wait. A process that
    ends or is killed releases its locks. Several threads may use one lock; their calls wait for each other.

    file     need not exist, but its folder must
    wait     seconds until a file that another writer holds is a weft.Error; 0: at once
    on_wait  called once, after a second of waiting, with a sentence that names the process that holds the file
    """

    def __init__(self, file: Path, *, wait: float = 60, on_wait: Optional[Callable[[str], Any]] = None) -> None:
        op = "state_lock_open"
        name = c.file_name(op, "file", file)
        if c.number(op, "wait", wait) != wait:  # a NaN
            raise refuse(op, "wait", f"is {wait!r}, wanted seconds")
        if on_wait is not None and not callable(on_wait):
            raise refuse(op, "on_wait", f"is {on_wait!r}, wanted a function")
        begin, told = time.monotonic(), False
        while True:  # the wait is here and not in the library, so that Python handles signals
            try:
                self.handle = _open(name)
                break
            except Error as error:
                waited = time.monotonic() - begin
                if error.argument != "wait" or waited >= wait:
                    raise
                if on_wait is not None and not told and waited >= _SILENT:
                    told = True
                    on_wait(str(error))
            time.sleep(min(_PAUSE, max(0.0, wait - waited)))
        self._process, self._busy = os.getpid(), threading.Lock()
        self._close = weakref.finalize(self, _close, self.handle, self._process)

    @property
    def exists(self) -> bool:
        """Did the file exist when it was last locked, loaded or saved?"""
        with self.used("state_lock_exists") as handle:
            return bool(LIB.weft_state_lock_exists(handle))

    @contextlib.contextmanager
    def used(self, op: str) -> Iterator[ctypes.c_void_p]:
        """The handle of a lock that is not closed. Until the block ends, no other thread uses or closes it."""
        if os.getpid() != self._process:
            raise refuse(op, "lock", "belongs to the process that this one was forked from, wanted one of this process")
        with self._busy:
            if not self._close.alive:
                raise refuse(op, "lock", "is closed, wanted one that is held")
            yield self.handle

    def close(self) -> None:
        """Releases the file, once another thread that saves or loads is done."""
        if os.getpid() == self._process:
            with self._busy:
                self._close()

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _open(name: bytes) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    options = c.sized(c.StateLockOptions, has_wait=1)  # 0 seconds
    call(LIB.weft_state_lock_open, name, ctypes.byref(options), ctypes.byref(handle))
    return handle


def _close(handle: ctypes.c_void_p, process: int) -> None:
    """Releases a lock. A forked child leaves it to its parent."""
    if os.getpid() == process:
        LIB.weft_state_lock_close(handle)
