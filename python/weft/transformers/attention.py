"""The attention of a patched model: AttentionInterface "weft", and the mask that it takes."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .._library import refuse
from .cache import Appended, CompressedLayer

NAME = "weft"
_OP = "attention"
_RECIPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_REFUSED = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias", "cu_seq_lens_q")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Stores the new keys and values and attends over the cache. Without a cache, the new tokens are stored uncompressed for this call.

    attention_mask is what padding() made: the hidden tokens at the left of every sequence.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise refuse(_OP, name, f"is {kwargs[name]!r}, wanted None: patched models have full causal attention")
    if dropout or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise refuse(_OP, "dropout" if dropout else "is_causal", "is set, wanted causal attention without dropout")
    if attention_mask is not None and attention_mask.ndim != 1:
        raise refuse(_OP, "attention_mask", f"has {attention_mask.ndim} dimensions, wanted a mask [B, T] of padding at the left")
    if isinstance(key, Appended):
        layer, key, value = key
    else:
        layer = CompressedLayer(_recipe_of(key))
    layer.append(key, value, attention_mask)
    return layer.attend(query, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _recipe_of(key: torch.Tensor) -> str:
    if key.dtype not in _RECIPES:
        raise refuse(_OP, "key", f"has elements of {key.dtype}, wanted float32, float16 or bfloat16")
    return _RECIPES[key.dtype]


def padding(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Optional[torch.Tensor]:
    """How many tokens attention_mask hides at the left of every sequence, [B] i32, or None. Other masks are refused."""
    if mask_function is not causal_mask_function:
        raise refuse(_OP, "attention_mask", "is of packed sequences or of a custom rule, wanted a mask [B, T] of padding at the left")
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, kv_length):
        raise refuse(_OP, "attention_mask", f"is {list(attention_mask.shape)}, wanted {[batch_size, kv_length]}, earlier tokens included")
    hidden = kv_length - attention_mask.sum(dim=1, dtype=torch.int32)
    if not hidden.any():
        return None
    if not torch.equal(attention_mask, torch.arange(kv_length, device=hidden.device) >= hidden[:, None]):
        raise refuse(_OP, "attention_mask", "hides tokens in the middle or at the right, wanted padding at the left")
    return hidden


def register() -> None:
    """Makes "weft" known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding)
