"""What Model.generate returns: pieces of text as they come, and the whole text with what is known about it."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, Dict, Generator, List, NamedTuple, Optional, Tuple

import numpy as np

from . import _c_model as c
from ._library import LIB, Error, call, refuse
from ._owner import NoCopy, Owner, in_call, out_of_call
from ._progress import Progress

if TYPE_CHECKING:
    from .model import Model
    from .state import PrefixStore, State


class Piece(NamedTuple):
    """A chosen token and the text that became certain with it: whole characters, nothing that could still belong to a stop string."""

    text: str  # often empty
    token: Optional[int]  # None in a last piece, which holds text that was held back
    logprob: Optional[float]  # natural logarithm, with logprobs
    top: List[Tuple[int, float]]  # the most probable tokens and their log probabilities, with logprobs

    def __str__(self) -> str:
        return self.text


class Completion(str):
    """The text of a generation, with what is known about it.

    tokens            the written token ids, without one that ended the text
    logprobs, top     of every token, with logprobs
    stop              why it ended: "length", "end_token", "stop_token", "stop_string", "sentence_end", "capacity", or "callback" where
                      the iterator was closed
    stop_index        which stop string or stop token
    prompt_tokens     that had to be read; restored_tokens of these came from a prefix store
    prefill_seconds   for the prompt
    decode_seconds    for the text
    draft_proposed    tokens; draft_accepted of these were right
    steps             of the model, after the prompt
    """

    tokens: List[int]
    logprobs: List[float]
    top: List[List[Tuple[int, float]]]
    stop: str
    stop_index: int
    prompt_tokens: int
    restored_tokens: int
    prefill_seconds: float
    decode_seconds: float
    draft_proposed: int
    draft_accepted: int
    steps: int


def _completion(pieces: List[Piece], result: Any) -> Completion:
    made = Completion("".join(piece.text for piece in pieces))
    written = [piece for piece in pieces if piece.token is not None]
    made.tokens = [piece.token for piece in written if piece.token is not None]
    made.logprobs = [piece.logprob for piece in written if piece.logprob is not None]
    made.top = [piece.top for piece in written if piece.logprob is not None]
    made.stop = c.STOP_REASONS[result.stop]
    for name in ("stop_index", "prompt_tokens", "restored_tokens", "prefill_seconds", "decode_seconds", "draft_proposed",
                 "draft_accepted", "steps"):
        setattr(made, name, getattr(result, name))
    return made


class _End(NamedTuple):
    error: Optional[BaseException]


class Run:
    """One call of weft_generate in a thread of its own.

    The thread passes every piece, and every step of the prompt, to the consumer and waits for an answer before it computes on. So it is
    never ahead: once it has stopped, the state holds the tokens that the consumer saw. The consumer only waits, and so it sees signals at
    once.
    """

    _live: "weakref.WeakSet[Run]" = weakref.WeakSet()
    _no_more = False  # True once the interpreter ends

    def __init__(self, model: Model, state: State, prompt: np.ndarray, options: Any, keep: Any, store: Optional[PrefixStore],
                 threads: Optional[int]) -> None:
        self.model, self.state, self.prompt = model, state, prompt
        self.options, self.threads = options, threads
        self.sequence = int(options.sequence)
        self._keep = keep  # kept alive: the options point to these objects
        self._owners: Dict[str, Owner] = {"model": model} if store is None else {"model": model, "store": store}
        self.result = c.sized(c.GenerateResult)
        self.items: "queue.SimpleQueue[Any]" = queue.SimpleQueue()  # pieces, progress, and an _End
        self._answers: "queue.SimpleQueue[bool]" = queue.SimpleQueue()  # True: continue
        self.ended = self.failed = False
        self._failure: Optional[BaseException] = None
        self._thread: Optional[threading.Thread] = None
        self._process = os.getpid()

    def start(self) -> None:
        self.state._begin("generate")
        self._thread = threading.Thread(target=self._work, name="weft-generate", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system refuses a thread
            self.ended = self.failed = True
            self.state._end()
            raise
        except BaseException:  # a signal; the thread has begun, and releases the state
            self.stop()
            raise
        Run._live.add(self)
        if Run._no_more:  # asked last: otherwise finish_all() sees this run
            self.finish()
            raise refuse("generate", "interpreter", "is ending, wanted one that runs")

    def next(self) -> Any:
        if os.getpid() != self._process:
            raise refuse("generate", "iterator", "belongs to the process that this one was forked from; wanted one of this process")
        return self.items.get()

    def proceed(self) -> None:
        self._answers.put(True)

    def stop(self) -> None:
        """Asks the thread to stop at its next piece or step of the prompt."""
        self._answers.put(False)

    def finish(self) -> None:
        """Stops the thread and waits for its end."""
        if self.ended or self._thread is None or os.getpid() != self._process:
            return
        self.stop()
        self._thread.join()
        self.ended = True

    def _work(self) -> None:
        error: Optional[BaseException] = None
        try:
            self._generate()
            error = self._failure
        except BaseException as raised:
            error = raised
            if isinstance(raised, Error) and raised.code not in ("invalid_argument", "unsupported"):
                self.state._drop(self.sequence)
        finally:
            self.failed = error is not None
            self.state._end()
            self.items.put(_End(error))

    def _generate(self) -> None:
        ids = self.state._ids[self.sequence]
        count = ctypes.c_size_t(len(ids) + self.prompt.size)
        # One token more than the state can hold, so that the capacity ends the text and not this limit.
        most = max(1, self.state.capacity + 2 - count.value)
        self.options.max_tokens = min(self.options.max_tokens, most)
        try:
            room = np.empty(count.value + max(0, self.options.max_tokens), np.int32)
        except (MemoryError, ValueError):
            raise refuse("generate", "max_tokens", f"is {self.options.max_tokens}, and memory does not suffice for so many") from None
        room[: len(ids)] = ids
        room[len(ids) : count.value] = self.prompt
        on_token = c.TokenCallback(self._on_token)
        self.options.on_prompt = c.PromptCallback(self._on_prompt)
        try:
            with in_call("generate", **self._owners):
                call(LIB.weft_generate, self.model.handle, self.state._stream("generate", self.threads), self.state.handle,
                     ctypes.byref(self.options), room.ctypes.data, room.size, ctypes.byref(count), on_token, None,
                     ctypes.byref(self.result))
        finally:
            self.options.on_prompt = c.PromptCallback()  # the callback held a reference to this object
        self.state._ids[self.sequence] = room[: count.value].tolist()

    def _on_token(self, given: Any, _: Any) -> int:
        try:
            token = given.contents
            text = ctypes.string_at(token.text, token.text_bytes).decode("utf-8", "replace")
            known = self.options.has_logprobs and token.token >= 0
            top = [(token.top[i].token, token.top[i].logprob) for i in range(token.top_count)]
            return self._pass(Piece(text, token.token if token.token >= 0 else None, token.logprob if known else None, top))
        except BaseException as raised:  # no exception may leave a callback of C
            self._failure = raised
            return 1

    def _on_prompt(self, done: int, everything: int, _: Any) -> int:
        return self._pass((done, everything))

    def _pass(self, item: Any) -> int:
        """Passes an item to the consumer, and waits for its answer."""
        with out_of_call(*self._owners.values()):
            self.items.put(item)
            return 0 if self._answers.get() else 1

    @staticmethod
    def finish_all() -> None:
        Run._no_more = True
        for run in list(Run._live):
            run.finish()


# Otherwise the end of the interpreter would end a thread that waits for its consumer inside of the library.
atexit.register(Run.finish_all)


def _pieces(run: Run, seen: List[Piece], progress: Progress) -> Generator[Piece, None, None]:
    run.start()
    try:
        while True:
            item = run.next()
            if isinstance(item, _End):
                if item.error is None:
                    return
                error, item = item.error, None
                try:
                    raise error.with_traceback(None)
                finally:
                    del error  # a traceback that names itself would keep the state until the garbage collector runs
            if isinstance(item, Piece):
                progress.close()
                seen.append(item)
                yield item
            else:
                progress.report(*item)
            run.proceed()
    finally:
        try:
            progress.close()
        finally:
            run.finish()


class Generation(NoCopy):
    """The pieces of a text, computed as they are asked for.

    The first piece begins the work, and raises what the library refuses. A loop that ends early, close(), a with block or dropping the
    iterator stop the computation; the state then holds the tokens of the pieces that were seen. result is there after the end, unless
    the generation failed.
    """

    def __init__(self, run: Run, progress: Any) -> None:
        self._run = run
        self._seen: List[Piece] = []
        self._iterator = _pieces(run, self._seen, Progress(progress))

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Piece:
        return next(self._iterator)

    def close(self) -> None:
        """Stops the computation, and waits until the state may be used again.

        While another thread waits for a piece, close() asks only: that thread gets at most one more piece, and then the end."""
        while inspect.getgeneratorstate(self._iterator) != inspect.GEN_RUNNING:
            try:
                return self._iterator.close()
            except ValueError as error:
                if str(error) != "generator already executing":  # another thread asked for a piece at this moment
                    raise
        self._run.stop()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(piece.text for piece in self._seen)

    @property
    def result(self) -> Optional[Completion]:
        """The whole text with its stop reason and timings. None until the text has ended or the iterator is closed, and after a
        failure."""
        return _completion(self._seen, self._run.result) if self._run.ended and not self._run.failed else None
