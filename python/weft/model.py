"""weft.Model runs a hybrid language model; weft.plan says what that takes."""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any, Dict, Iterable, List, Literal, Optional, Sequence, Union, overload

import numpy as np

from . import _c_model as c
from ._library import FOLDER, LIB, Error, call, new_stream, refuse
from ._owner import Owner, in_call
from .generation import Completion, Generation, Run
from .state import PrefixStore, State, check_state
from .state_lock import Path

Tokens = Union[Sequence[int], np.ndarray]
_BUNDLED = FOLDER / "models" / "weft-11m"


class Model(Owner):
    """A checkpoint in the format of Hugging Face (config.json, safetensors and tokenizer.json in a folder), or a GGUF file.

    Families: Qwen3-Next, Qwen3.5 and Qwen3.6, dense and mixture of experts, text part. Immutable: any number of threads may use a model,
    each with a state of its own. A copy is the model itself, and a pickle holds its path. Weights are mapped from the files,
    so the files must not be truncated or overwritten meanwhile.

    path   the folder or the file; None: the bundled model (21 MB, English prose)
    exact  on a GPU: products and the delta rule as exact as in f32, and slower. The cpu is always that exact
    """

    def __init__(self, path: Optional[Path] = None, *, exact: bool = False) -> None:
        op = "model_load"
        if path is None and not _BUNDLED.is_dir():
            raise refuse(op, "path", "is absent, and this package has no bundled model; wanted the folder of a model")
        folder = c.file_name(op, "path", _BUNDLED if path is None else path)
        self.path = os.fsdecode(folder)
        self._again = os.path.abspath(self.path), bool(exact)  # what unpickling needs to load the model again
        options = c.sized(c.ModelOptions, exact=int(bool(exact)))
        handle = ctypes.c_void_p()
        call(LIB.weft_model_load, folder, ctypes.byref(options), ctypes.byref(handle))
        self._own(handle, LIB.weft_model_free)
        for text in self.warnings:
            warnings.warn(f"{self.path}: {text}", stacklevel=2)

    def __repr__(self) -> str:
        return f"<weft.Model {self.summary}>"

    def __copy__(self) -> Model:
        return self

    def __deepcopy__(self, memo: Any) -> Model:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _load, self._again

    @property
    def summary(self) -> str:
        """The model in words: "qwen3_5_text: 6 gated delta + 2 attention layers, 10.5 M parameters, bf16"."""
        return c.text_of(LIB.weft_model_summary, self.handle)

    @property
    def warnings(self) -> List[str]:
        """Contradictions in the files that did not prevent loading. Loading passes them to warnings.warn."""
        return [c.text_of(LIB.weft_model_warning, self.handle, i) for i in range(LIB.weft_model_warning_count(self.handle))]

    @property
    def vocab_size(self) -> int:
        return int(LIB.weft_model_vocab_size(self.handle))

    @property
    def max_positions(self) -> Optional[int]:
        """The context that the model was trained for; None: unknown."""
        return int(LIB.weft_model_max_positions(self.handle)) or None

    @property
    def begin_token(self) -> Optional[int]:
        """The token that begins a text without a prompt."""
        token = int(LIB.weft_model_begin_token(self.handle))
        return token if token >= 0 else None

    @property
    def has_tokenizer(self) -> bool:
        return bool(LIB.weft_model_has_tokenizer(self.handle))

    def is_end_token(self, token: int) -> bool:
        """Is it an end-of-text token?"""
        given = c.whole("model_is_end_token", "token", token, -(2**31), 2**31 - 1)
        return bool(LIB.weft_model_is_end_token(self.handle, given))

    def encode(self, text: str) -> List[int]:
        """The tokens of a text. The text of a special token ("<|im_end|>") becomes that token: take such texts out of untrusted input."""
        if not isinstance(text, str):
            raise refuse("model_encode", "text", f"is {text!r}, wanted a str")
        given = text.encode("utf-8", "surrogatepass")
        count = ctypes.c_size_t()
        room = len(given) + 16
        while True:
            tokens = np.empty(room, np.int32)
            call(LIB.weft_model_encode, self.handle, given, len(given), tokens.ctypes.data, room, ctypes.byref(count))
            if count.value <= room:
                return [int(token) for token in tokens[: count.value]]
            room = count.value

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens. Special tokens give their texts; ids that the tokenizer lacks give nothing."""
        ids = c.token_array("model_decode", "tokens", tokens)
        return c.text_of(LIB.weft_model_decode, self.handle, ids.ctypes.data, ids.size)

    def logits(
        self,
        tokens: Union[str, Tokens],
        *,
        every_token: bool = False,
        state: Optional[State] = None,
        sequence: int = 0,
        kv: Optional[str] = None,
        backend: Optional[str] = None,
        threads: Optional[int] = None,
    ) -> np.ndarray:
        """The logits after the last token, [vocab_size] f32, or after every token, [tokens, vocab_size].

        With a state, its sequence reads the tokens too; without one, the tokens are a text of their own.
        """
        op = "logits"
        ids = self._ids(op, "tokens", tokens)
        if state is None:
            state = self._state(max(1, ids.size), kv, backend, threads)
        else:
            self._check_state(op, state, kv, backend)
        with state._used(op, sequence):
            pending = np.array(state._ids[sequence][state._held(sequence) :], np.int32)
            given = np.concatenate((pending, ids))
            if not ids.size:
                raise refuse(op, "tokens", "are none, wanted at least one")
            out = np.empty((given.size if every_token else 1, self.vocab_size), np.float32)
            self._append(op, state, sequence, given, out, every_token, threads)
            state._ids[sequence] = [*state._ids[sequence], *ids.tolist()]
        return out[pending.size :] if every_token else out[0]

    def _append(self, op: str, state: State, sequence: int, ids: np.ndarray, out: np.ndarray, every_token: bool,
                threads: Optional[int]) -> None:
        given = c.ModelInput(sequence=sequence, tokens=ids.ctypes.data, token_count=ids.size, logits=out.ctypes.data)
        given.every_token = int(bool(every_token))
        try:
            with in_call(op, model=self):
                call(LIB.weft_model_append, self.handle, state._stream(op, threads), state.handle, ctypes.byref(given), 1)
        except Error as error:
            if error.code not in ("invalid_argument", "unsupported"):
                state._drop(sequence)
            raise

    @overload
    def generate(self, prompt: Union[str, Tokens] = ..., *, stream: Literal[True], **options: Any) -> Generation: ...

    @overload
    def generate(self, prompt: Union[str, Tokens] = ..., *, stream: Literal[False] = ..., **options: Any) -> Completion: ...

    def generate(  # type: ignore[misc]  # the overloads leave the options to this signature
        self,
        prompt: Union[str, Tokens] = "",
        *,
        stream: bool = False,
        stop: Union[str, Sequence[str], None] = (),
        stop_tokens: Optional[Sequence[int]] = (),
        max_tokens: Optional[int] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: float = 0.0,
        repetition_penalty: Optional[float] = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        logprobs: Optional[int] = None,
        draft: int = 0,
        sentence_after: Optional[int] = None,
        ignore_end_tokens: bool = False,
        special_text: bool = True,
        state: Optional[State] = None,
        sequence: int = 0,
        store: Optional[PrefixStore] = None,
        kv: Optional[str] = None,
        backend: Optional[str] = None,
        threads: Optional[int] = None,
        progress: Any = None,
    ) -> Union[Completion, Generation]:
        """Continues a text: returns it whole, or with stream=True an iterator of its pieces.

        prompt              a text or token ids. With a state, it follows what the sequence holds
        stop                a text, or texts, that end the generation; the text ends before them
        stop_tokens         tokens that end it, beside the end-of-text tokens of the model
        max_tokens          to write at most
        temperature         0: always the most probable token
        top_k, top_p, min_p keep the most probable tokens only
        repetition_penalty  divides positive logits of tokens in the prompt and the text, multiplies negative ones
        presence_penalty    is subtracted from the logits of written tokens
        frequency_penalty   the same for every time that a token was written
        seed                the same seed gives the same text
        logprobs            report the log probability of every token, and of this many most probable ones
        draft               propose up to so many tokens by n-gram look-up, and verify them in one step
        sentence_after      end at the first end of a sentence after so many tokens
        ignore_end_tokens   treat end-of-text tokens as any other
        special_text        special tokens give their texts
        state, sequence     the memory to continue; None: a new one with this kv, backend and threads
        store               restores beginnings of prompts, and keeps new ones; the whole sequence is then read again
        progress            called as progress(tokens read, all) while the prompt is read; or a class like tqdm.tqdm, or a bar of one

        None means what generation_config.json of the model suggests, or else the default of the library (weft/generate.h).
        """
        op = "generate"
        ids = self._ids(op, "prompt", prompt)
        if state is not None:
            self._check_state(op, state, kv, backend)
            state._check_sequence(op, sequence)
        if store is not None and not isinstance(store, PrefixStore):
            raise refuse(op, "store", f"is {store!r}, wanted a weft.PrefixStore")
        if not ids.size and (state is None or not state.tokens(sequence)) and self.begin_token is not None:
            ids = np.array([self.begin_token], np.int32)
        numbers = {"max_tokens": max_tokens, "top_k": top_k, "temperature": temperature, "top_p": top_p, "min_p": min_p,
                   "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
                   "frequency_penalty": frequency_penalty, "logprobs": logprobs, "sentence_after": sentence_after,
                   "draft": draft, "sequence": sequence, "ignore_end_tokens": ignore_end_tokens, "no_special_text": not special_text}
        options = c.sized(c.GenerateOptions)
        call(LIB.weft_generate_suggest, self.handle, ctypes.byref(options))
        options.seed = c.whole(op, "seed", seed, least=0, most=2**64 - 1)
        for name, value in numbers.items():
            _set(op, options, name, value)
        keep = _set_stops(op, options, stop, stop_tokens)
        options.store = None if store is None else store.handle
        if state is None:
            state = self._state(max(1, ids.size + max(0, options.max_tokens)), kv, backend, threads, options.draft)
        pieces = Generation(Run(self, state, ids, options, keep, store, threads), progress)
        if stream:
            return pieces
        for _ in pieces:
            pass
        assert pieces.result is not None
        return pieces.result

    def _ids(self, op: str, argument: str, given: Union[str, Tokens]) -> np.ndarray:
        return np.array(self.encode(given), np.int32) if isinstance(given, str) else c.token_array(op, argument, given)

    def _state(self, capacity: int, kv: Optional[str], backend: Optional[str], threads: Optional[int], rollback: int = 0) -> State:
        return State(self, capacity=capacity, kv="8v4" if kv is None else kv, backend="cpu" if backend is None else backend,
                     threads=threads, rollback=rollback)

    def _check_state(self, op: str, state: State, kv: Optional[str], backend: Optional[str]) -> None:
        check_state(op, state)
        for name, value in (("kv", kv), ("backend", backend)):
            if value is not None:
                raise refuse(op, name, f"is {value!r}, and the given state has its own; wanted none beside a state")


def _load(path: str, exact: bool) -> Model:
    return Model(path, exact=exact)


def _set(op: str, options: Any, name: str, value: Any) -> None:
    """Sets a number of the options, and its flag where it has one. None keeps the model's suggestion."""
    if value is None:
        return
    if isinstance(value, bool):
        value = int(value)
    kind = dict(options._fields_)[name]
    if kind is ctypes.c_double:
        value = c.number(op, name, value)
    else:
        bits = 8 * ctypes.sizeof(kind) - 1
        value = c.whole(op, name, value, -(2**bits), 2**bits - 1)
    setattr(options, name, value)
    if hasattr(options, "has_" + name):
        setattr(options, "has_" + name, 1)


def _set_stops(op: str, options: Any, stop: Union[str, Sequence[str], None], stop_tokens: Optional[Sequence[int]]) -> Any:
    """Sets the stop strings and tokens of the options. Returns the objects that must live as long as the options."""
    if stop is not None and not isinstance(stop, Iterable):
        raise refuse(op, "stop", f"is {stop!r}, wanted a text or a list of texts")
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise refuse(op, "stop", f"holds {text!r}, wanted texts without zero bytes")
    strings = (ctypes.c_char_p * len(texts))(*(text.encode("utf-8", "surrogatepass") for text in texts))
    tokens = c.token_array(op, "stop_tokens", () if stop_tokens is None else stop_tokens)
    options.stop_strings, options.stop_string_count = strings, len(texts)
    options.stop_tokens, options.stop_token_count = tokens.ctypes.data, tokens.size
    return strings, tokens


def plan(
    model: Union[Model, Path, None] = None,
    *,
    context: int = 4096,
    batch: int = 1,
    kv: str = "8v4",
    prompt: Optional[int] = None,
    rollback: int = 0,
    backend: str = "cpu",
    device: int = 0,
) -> Dict[str, Any]:
    """The bytes that running a model takes, known before anything is allocated. Weights and state are exact, scratch is an upper bound.

    context   tokens of every sequence
    batch     sequences
    prompt    most tokens of one input; None: as many as the context
    rollback  tokens that can be taken back

    The keys are those of `weft plan --json`, without `schema` and `available`.
    """
    op = "model_plan"
    of = model if isinstance(model, Model) else Model(model)
    options = c.sized(c.PlanOptions, kv=c.kv_name(op, kv), context=c.whole(op, "context", context, least=1))
    options.sequences = c.whole(op, "batch", batch, least=1)
    options.prompt = 0 if prompt is None else c.whole(op, "prompt", prompt, least=1)
    options.rollback = c.whole(op, "rollback", rollback)
    found = c.sized(c.ModelBytes)
    stream = new_stream(op, backend, device)
    with in_call(op, model=of):
        call(LIB.weft_model_plan, of.handle, ctypes.byref(stream), ctypes.byref(options), ctypes.byref(found))
    return {
        "context": options.context,
        "batch": options.sequences,
        "prompt": options.prompt or options.context,
        "kv": kv,
        "weights": found.weights,
        "weights_copied": found.copies,
        "recurrent_state": found.recurrent,
        "conv_state": found.windows,
        "kv_cache": found.kv,
        "records": found.records,
        "scratch": found.scratch,
        "total": found.total,
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_token_f16": found.bytes_per_token_f16,
        "backend": backend,
    }
