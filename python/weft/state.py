"""weft.State, the memory of the sequences of a model, and weft.PrefixStore, which keeps beginnings of prompts."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _c_model as c
from ._library import LIB, Error, call, forked, new_stream, refuse
from ._owner import Owner, in_call
from .state_lock import Path, StateLock

if TYPE_CHECKING:
    from .model import Model

_STORAGE = ("f32", "f16", "bf16", "int8")


class State(Owner):
    """The memory of one or more sequences: recurrent states, convolution windows and compressed KV pages (docs/memory.md).

    A state remembers the token ids of its sequences too. tokens() lists them: those that the model has read, and perhaps a last one that
    was chosen and is still to be read.

    A state belongs to one thread at a time. A call while another one, or an iterator of pieces, uses the state gets a weft.Error.

    sequences  how many sequences the state holds
    capacity   the most tokens of one sequence; memory on the host grows with the tokens, on a GPU it is allocated at once
    kv         the format of cached keys and values: "f16", "8v4", "8v4,0-1:f16"
    rollback   how many decoded tokens can be taken back, 0 to 16; drafts need as many
    """

    def __init__(
        self,
        model: Model,
        *,
        sequences: int = 1,
        capacity: int = 4096,
        kv: str = "8v4",
        rollback: int = 0,
        backend: str = "cpu",
        device: int = 0,
        threads: Optional[int] = None,
    ) -> None:
        op = "state_create"
        from .model import Model  # imported here, because weft.model imports this module

        if not isinstance(model, Model):
            raise refuse(op, "model", f"is {model!r}, wanted a weft.Model")
        self.model = model
        self.kv = kv
        self.capacity = c.whole(op, "capacity", capacity, least=1)
        self.sequences = c.whole(op, "sequences", sequences, least=1)
        self._where: Dict[str, Any] = {"backend": backend, "device": device, "threads": threads}
        options = c.sized(c.StateOptions, kv=c.kv_name(op, kv), capacity=self.capacity, sequences=self.sequences)
        options.rollback = c.whole(op, "rollback", rollback)
        handle = ctypes.c_void_p()
        with in_call(op, model=model):
            call(LIB.weft_state_create, model.handle, self._stream(op), ctypes.byref(options), ctypes.byref(handle))
        self._own(handle, LIB.weft_state_free)
        self._ids: List[List[int]] = [[] for _ in range(self.sequences)]
        self._busy = threading.Lock()

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(ids)) for ids in self._ids[:8])
        return f"<weft.State of {self.sequences} sequences with {lengths}{', ...' if self.sequences > 8 else ''} tokens, KV {self.kv}>"

    def _stream(self, op: str, threads: Optional[int] = None) -> Any:
        where = {**self._where, "threads": threads} if threads is not None else self._where
        return ctypes.byref(new_stream(op, **where))

    def _begin(self, op: str) -> None:
        if not self._busy.acquire(blocking=False):
            here = "another thread, or by an iterator of pieces that is not closed"
            raise refuse(op, "state", f"is in use by {'the process that this one was forked from' if forked() else here}")
        self._calls.append(os.getpid())

    def _end(self) -> None:
        self._calls.pop()
        self._busy.release()

    @contextlib.contextmanager
    def _used(self, op: str, *sequences: int) -> Iterator[None]:
        """Gives this thread exclusive use of the state until the block ends, and checks the numbers of sequences."""
        for sequence in sequences:
            self._check_sequence(op, sequence)
        self._begin(op)
        try:
            yield
        finally:
            self._end()

    def _check_sequence(self, op: str, sequence: int) -> None:
        if not 0 <= c.whole(op, "sequence", sequence) < self.sequences:
            raise refuse(op, "sequence", f"is {sequence}, the state holds {self.sequences}")

    def _held(self, sequence: int) -> int:
        """The number of tokens that the state holds."""
        return int(LIB.weft_state_tokens(self.handle, sequence))

    def _drop(self, sequence: int) -> None:
        """Empties a sequence that a failure left undefined."""
        call(LIB.weft_state_reset, self.handle, sequence)
        self._ids[sequence] = []

    @property
    def bytes(self) -> int:
        """Bytes that are allocated now."""
        with self._used("state_bytes"):
            return int(LIB.weft_state_bytes(self.handle))

    def tokens(self, sequence: int = 0) -> List[int]:
        """The token ids of a sequence. Those of a generation are added when it ends or its iterator is closed."""
        self._check_sequence("state_tokens", sequence)
        return list(self._ids[sequence])

    def reset(self, sequence: Optional[int] = None) -> None:
        """Empties a sequence, or all."""
        chosen = range(self.sequences) if sequence is None else (sequence,)
        with self._used("state_reset", *chosen):
            for each in chosen:
                self._drop(each)

    def fork(self, source: int, target: int) -> None:
        """Sequence `target` drops its past and gets that of `source`. KV pages are shared, so forking copies little."""
        with self._used("state_fork", source, target):
            call(LIB.weft_state_fork, self.handle, source, target)
            self._ids[target] = list(self._ids[source])

    def rollable(self, sequence: int = 0) -> int:
        """How many tokens rollback() can take back now."""
        with self._used("state_rollable", sequence):
            return self._rollable(sequence)

    def _rollable(self, sequence: int) -> int:
        return len(self._ids[sequence]) - self._held(sequence) + int(LIB.weft_state_rollable(self.handle, sequence))

    def rollback(self, tokens: int, sequence: int = 0) -> None:
        """Takes the last tokens of a sequence back. The result has the bits of never having seen them."""
        op = "state_rollback"
        with self._used(op, sequence):
            most = self._rollable(sequence)
            if not 0 <= c.whole(op, "tokens", tokens) <= most:
                raise refuse(op, "tokens", f"are {tokens}, wanted 0 to {most}, which rollable() returns")
            ids = self._ids[sequence]
            read = max(0, tokens - (len(ids) - self._held(sequence)))
            if read:
                call(LIB.weft_state_rollback, self._stream(op), self.handle, sequence, read)
            self._ids[sequence] = ids[: len(ids) - tokens]

    def save(self, file: Union[Path, StateLock], sequence: int = 0) -> None:
        """Writes a sequence and its tokens to a file: whole, or not at all. Waits up to 60 seconds for another writer."""
        op = "state_save"
        with self._used(op, sequence), contextlib.ExitStack() as stack:
            lock = file if isinstance(file, StateLock) else stack.enter_context(StateLock(file))
            ids = np.array(self._ids[sequence], np.int32)
            held = stack.enter_context(lock.used(op))
            stack.enter_context(in_call(op, model=self.model))
            call(LIB.weft_state_lock_save, self.model.handle, held, self.handle, sequence, ids.ctypes.data, ids.size)

    def load(self, file: Union[Path, StateLock], sequence: int = 0) -> List[int]:
        """Reads a file of save() into a sequence, and returns its tokens. Where the file does not fit, nothing changes."""
        op = "state_load"
        with self._used(op, sequence), contextlib.ExitStack() as stack:
            if isinstance(file, StateLock):
                held = stack.enter_context(file.used(op))
                load = functools.partial(LIB.weft_state_lock_load, self.model.handle, held, self.handle, sequence)
            else:
                load = functools.partial(LIB.weft_state_load, self.model.handle, self.handle, sequence, c.file_name(op, "file", file))
            count = ctypes.c_size_t()
            stack.enter_context(in_call(op, model=self.model))
            room = self.capacity + 1  # enough, unless several tokens of the file are not in its state yet
            while True:
                ids = np.empty(room, np.int32)
                try:
                    call(load, ids.ctypes.data, room, ctypes.byref(count))
                except Error as error:
                    if error.argument != "capacity" or count.value <= room:
                        raise
                    room = count.value
                else:
                    self._ids[sequence] = ids[: count.value].tolist()
                    return self.tokens(sequence)


def check_state(op: str, state: Any) -> None:
    if not isinstance(state, State):
        raise refuse(op, "state", f"is {state!r}, wanted a weft.State")


class PrefixStoreStats(NamedTuple):
    """The contents of a store, and counts of its events."""

    bytes: int
    checkpoints: int
    hits: int
    misses: int
    tokens: int  # tokens restored in all
    inserted: int
    evicted: int
    refused: int  # checkpoints larger than the budget
    drift: float  # error of stored recurrent states: root mean square over all checkpoints
    largest_drift: float


class PrefixStore(Owner):
    """Checkpoints of sequences in host memory, so that a prompt that begins like an earlier one is not computed again.

    Give it to Model.generate(store=...). Any number of threads may use it, each with a state of its own.

    bytes      the budget; the least recently used checkpoints are evicted first
    every      a prompt leaves a checkpoint every so many tokens, a multiple of 64; 0: only at its end
    recurrent  how recurrent states are stored: "f32", "f16", "bf16" or "int8"; all but f32 lose precision (stats().drift)
    """

    def __init__(self, bytes: int, *, every: int = 512, recurrent: str = "f32") -> None:
        op = "prefix_store_create"
        if recurrent not in _STORAGE:
            raise refuse(op, "recurrent", f"is {recurrent!r}, wanted one of {', '.join(_STORAGE)}")
        options = c.sized(c.PrefixStoreOptions, bytes=c.whole(op, "bytes", bytes), every=c.whole(op, "every", every), has_every=1)
        options.recurrent = _STORAGE.index(recurrent)
        handle = ctypes.c_void_p()
        call(LIB.weft_prefix_store_create, ctypes.byref(options), ctypes.byref(handle))
        self._own(handle, LIB.weft_prefix_store_free)

    def stats(self) -> PrefixStoreStats:
        """Counts and bytes of the store."""
        found = c.sized(c.PrefixStoreStats)
        with in_call("prefix_store_read_stats", store=self):
            call(LIB.weft_prefix_store_read_stats, self.handle, ctypes.byref(found))
        return PrefixStoreStats(*(getattr(found, name) for name in PrefixStoreStats._fields))

    def restore(self, state: State, tokens: Sequence[int], sequence: int = 0, most: Optional[int] = None) -> int:
        """Gives a sequence the longest beginning of `tokens`, of at most `most`, that the store has, and returns its length.

        0: the store has none, and the sequence is unchanged."""
        op = "prefix_store_restore"
        ids, restored = c.token_array(op, "tokens", tokens), ctypes.c_int64()
        limit = ids.size if most is None else c.whole(op, "most", most)
        check_state(op, state)
        with state._used(op, sequence), in_call(op, store=self):
            call(LIB.weft_prefix_store_restore, self.handle, state.handle, sequence, ids.ctypes.data, ids.size, limit,
                 ctypes.byref(restored))
            if restored.value:
                state._ids[sequence] = ids[: restored.value].tolist()
        return restored.value

    def insert(self, state: State, sequence: int = 0) -> None:
        """Inserts what a sequence holds."""
        op = "prefix_store_insert"
        check_state(op, state)
        with state._used(op, sequence), in_call(op, store=self):
            ids = np.array(state._ids[sequence][: state._held(sequence)], np.int32)
            call(LIB.weft_prefix_store_insert, self.handle, state.handle, sequence, ids.ctypes.data, ids.size)
