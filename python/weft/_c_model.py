"""The structures and functions of weft/c_model.h for ctypes. python/tests compares them with the header."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np

from ._library import LIB, call, refuse
from ._library import whole as whole


class ModelOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("exact", c_int32), ("reserved", c_int32)]


class PlanOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("kv", c_char_p), ("context", c_int64), ("sequences", c_int64), ("prompt", c_int64),
                ("rollback", c_int64)]


class ModelBytes(Structure):
    _fields_ = [("struct_size", c_size_t), ("weights", c_int64), ("copies", c_int64), ("recurrent", c_int64), ("windows", c_int64),
                ("kv", c_int64), ("records", c_int64), ("scratch", c_int64), ("total", c_int64), ("bytes_per_token", c_int64),
                ("bytes_per_token_f16", c_int64)]


class StateOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("kv", c_char_p), ("capacity", c_int64), ("sequences", c_int64), ("rollback", c_int64)]


class StateLockOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("has_wait", c_int32), ("reserved", c_int32), ("wait", c_double), ("on_wait", c_void_p),
                ("user", c_void_p)]


class PrefixStoreOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("bytes", c_int64), ("every", c_int64), ("has_every", c_int32), ("recurrent", c_int32)]


class PrefixStoreStats(Structure):
    _fields_ = [("struct_size", c_size_t), ("bytes", c_int64), ("checkpoints", c_int64), ("hits", c_int64), ("misses", c_int64),
                ("tokens", c_int64), ("inserted", c_int64), ("evicted", c_int64), ("refused", c_int64), ("drift", c_double),
                ("largest_drift", c_double)]


class ModelInput(Structure):
    _fields_ = [("sequence", c_int64), ("tokens", c_void_p), ("token_count", c_int64), ("logits", c_void_p), ("best", c_void_p),
                ("every_token", c_int32), ("prompt_part", c_int32)]


class TokenLogprob(Structure):
    _fields_ = [("token", c_int32), ("logprob", c_float)]


class GeneratedToken(Structure):
    _fields_ = [("token", c_int32), ("logprob", c_float), ("text", c_void_p), ("text_bytes", c_size_t), ("top", POINTER(TokenLogprob)),
                ("top_count", c_size_t)]


TokenCallback = ctypes.CFUNCTYPE(c_int32, POINTER(GeneratedToken), c_void_p)
PromptCallback = ctypes.CFUNCTYPE(c_int32, c_int64, c_int64, c_void_p)


class GenerateOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("sequence", c_int64), ("max_tokens", c_int64), ("top_k", c_int64), ("seed", c_uint64),
                ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("repetition_penalty", c_double),
                ("presence_penalty", c_double), ("frequency_penalty", c_double), ("has_max_tokens", c_int32), ("has_top_k", c_int32),
                ("has_temperature", c_int32), ("has_top_p", c_int32), ("has_repetition_penalty", c_int32), ("has_logprobs", c_int32),
                ("logprobs", c_int32), ("has_sentence_after", c_int32), ("sentence_after", c_int64), ("draft", c_int64),
                ("stop_strings", POINTER(c_char_p)), ("stop_string_count", c_size_t), ("stop_tokens", c_void_p),
                ("stop_token_count", c_size_t), ("ignore_end_tokens", c_int32), ("no_special_text", c_int32), ("store", c_void_p), ("on_prompt", PromptCallback),
                ("on_prompt_user", c_void_p)]


class GenerateResult(Structure):
    _fields_ = [("struct_size", c_size_t), ("stop", c_int32), ("reserved", c_int32), ("stop_index", c_uint64), ("prompt_tokens", c_int64),
                ("written_tokens", c_int64), ("prefill_seconds", c_double), ("decode_seconds", c_double), ("draft_proposed", c_int64),
                ("draft_accepted", c_int64), ("steps", c_int64), ("restored_tokens", c_int64)]


STOP_REASONS = ("length", "end_token", "stop_token", "stop_string", "sentence_end", "capacity", "callback")

# What a function returns where that is no weft_code, and its parameters: p pointer or handle, n size_t, l int64_t, i int32_t.
_FUNCTIONS = {
    "model_load": (c_int32, "pppp"),
    "model_free": (None, "p"),
    "model_vocab_size": (c_int64, "p"),
    "model_max_positions": (c_int64, "p"),
    "model_is_end_token": (c_int32, "pi"),
    "model_begin_token": (c_int32, "p"),
    "model_has_tokenizer": (c_int32, "p"),
    "model_warning_count": (c_int64, "p"),
    "model_summary": (c_int32, "ppnpp"),
    "model_warning": (c_int32, "plpnpp"),
    "model_encode": (c_int32, "ppnpnpp"),
    "model_decode": (c_int32, "ppnpnpp"),
    "model_plan": (c_int32, "ppppp"),
    "model_append": (c_int32, "ppppnp"),
    "state_create": (c_int32, "ppppp"),
    "state_free": (None, "p"),
    "state_tokens": (c_int64, "pl"),
    "state_bytes": (c_int64, "p"),
    "state_reset": (c_int32, "plp"),
    "state_fork": (c_int32, "pllp"),
    "state_rollback": (c_int32, "ppllp"),
    "state_rollable": (c_int64, "pl"),
    "state_load": (c_int32, "pplppnpp"),
    "state_lock_open": (c_int32, "pppp"),
    "state_lock_close": (None, "p"),
    "state_lock_exists": (c_int32, "p"),
    "state_lock_save": (c_int32, "ppplpnp"),
    "state_lock_load": (c_int32, "ppplpnpp"),
    "prefix_store_create": (c_int32, "ppp"),
    "prefix_store_free": (None, "p"),
    "prefix_store_read_stats": (c_int32, "ppp"),
    "prefix_store_restore": (c_int32, "pplpnlpp"),
    "prefix_store_insert": (c_int32, "pplpnp"),
    "generate": (c_int32, "pppppnppppp"),
    "generate_suggest": (c_int32, "ppp"),
}
_PARAMETERS = {"p": c_void_p, "n": c_size_t, "l": c_int64, "i": c_int32}

for _name, (_returned, _letters) in _FUNCTIONS.items():
    _function = getattr(LIB, "weft_" + _name)
    _function.restype = _returned
    _function.argtypes = [_PARAMETERS[letter] for letter in _letters]


def sized(kind: Any, **members: Any) -> Any:
    """A struct with its struct_size and these members set; zeros elsewhere mean the defaults."""
    return kind(struct_size=ctypes.sizeof(kind), **members)


def text_of(function: Any, *arguments: Any) -> str:
    """The text that a function writes into a buffer."""
    count = c_size_t()
    call(function, *arguments, None, 0, ctypes.byref(count))
    buffer = ctypes.create_string_buffer(count.value + 1)
    call(function, *arguments, buffer, len(buffer), ctypes.byref(count))
    return buffer.raw[: count.value].decode("utf-8", "replace")


def token_array(op: str, argument: str, tokens: Any) -> np.ndarray:
    """Token ids as contiguous int32."""
    try:
        given = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError):
        raise refuse(op, argument, "is not one list of numbers, wanted a list of whole numbers") from None
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise refuse(op, argument, f"has {given.ndim} dimensions of {given.dtype}, wanted a list of whole numbers")
    if given.min() < -(2**31) or given.max() >= 2**31:
        raise refuse(op, argument, "holds a number that needs more than 32 bits, wanted token ids")
    return np.ascontiguousarray(given, np.int32)


def kv_name(op: str, kv: str) -> bytes:
    """The name of a KV format for C."""
    if not isinstance(kv, str) or "\0" in kv:
        raise refuse(op, "kv", f"is {kv!r}, wanted a text such as \"8v4\"")
    return kv.encode()


def number(op: str, argument: str, value: Any) -> float:
    """A number as a C double."""
    try:
        return float(value)
    except OverflowError:
        raise refuse(op, argument, "is too large for a double, wanted a number") from None
    except (TypeError, ValueError):
        raise refuse(op, argument, f"is {value!r}, wanted a number") from None


def file_name(op: str, argument: str, path: Any) -> bytes:
    """A path for C."""
    if not isinstance(path, (str, os.PathLike)):
        raise refuse(op, argument, f"is {path!r}, wanted a path")
    name = os.fsencode(path)
    if b"\0" in name:
        raise refuse(op, argument, f"is {path!r}, wanted a path without zero bytes")
    return name
