"""The attention of a patched model: AttentionInterface "weft", and the padding that it takes in place of a mask."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Tuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .._library import refuse
from .cache import Appended, CompressedLayer

NAME = "weft"
_OP = "attention"
_RECIPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_REFUSED = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias", "cu_seq_lens_q", "seq_idx")


class Padding(NamedTuple):
    """The padding, which a patched text model passes to its attention layers as attention_mask."""

    hidden: Optional[torch.Tensor]  # [B] i32: tokens at the left of every sequence that are padding; None: no padding
    threads: Optional[int]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: Optional[float] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Stores the new keys and values and attends over the cache. Without a cache, the new tokens are stored uncompressed for this call."""
    if not isinstance(attention_mask, Padding):
        what = "is 'weft' in a model that is not patched, wanted patch(model), or a config that no patched model shares"
        raise refuse(_OP, "config._attn_implementation", what)
    if isinstance(key, Appended):
        layer, key, value = key
    else:
        layer = CompressedLayer(_recipe_of(key), threads=attention_mask.threads)
    layer.append(key, value, attention_mask.hidden)
    return layer.attend(query, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def check_options(op: str, options: Mapping[str, Any]) -> None:
    """Refuses keywords of a call that ask for more than full causal attention."""
    for name in _REFUSED:
        if options.get(name) is not None:
            raise refuse(op, name, f"is a {type(options[name]).__name__}, wanted None: patched models have full causal attention")
    if options.get("is_causal") is False:
        raise refuse(op, "is_causal", "is False, wanted True: patched models have full causal attention")


def _recipe_of(key: torch.Tensor) -> str:
    if key.dtype not in _RECIPES:
        raise refuse(_OP, "key", f"has elements of {key.dtype}, wanted float32, float16 or bfloat16")
    return _RECIPES[key.dtype]


def hidden_tokens(mask: torch.Tensor) -> Optional[torch.Tensor]:
    """How many tokens a mask [B, T] of booleans hides at the left of every sequence, [B] i32, or None. Other masks are refused."""
    tokens = mask.shape[1]
    hidden = tokens - mask.sum(dim=1, dtype=torch.int32)
    if not hidden.any():
        return None
    if not torch.equal(mask, torch.arange(tokens, device=hidden.device) >= hidden[:, None]):
        raise refuse(_OP, "attention_mask", "hides tokens in the middle or at the right, wanted padding at the left")
    return hidden


def _as_given(attention_mask: Optional[torch.Tensor] = None, **kwargs: Any) -> Optional[torch.Tensor]:
    """A patched text model makes its own masks. generate() asks for one where it makes a static cache, which the model then refuses."""
    return attention_mask


# At import, because a patched model that was pickled needs both when it is loaded.
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _as_given)
