"""patch() and unpatch(): Weft computes the delta layers and the attention of a transformers model."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import transformers
from transformers.cache_utils import DynamicCache

from .. import torch_ops
from .._library import Error, refuse
from . import attention, delta
from .cache import HybridCache, LatentLayer, is_latent

# Of transformers. scripts/test_transformers_versions.sh tests every one.
VERSIONS = ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")

_OP = "transformers.patch"
_FAMILIES: Dict[str, Tuple[Any, str]] = {  # class of a delta layer: its projections, its output projection
    "Qwen3NextGatedDeltaNet": (delta.qwen3_next, "out_proj"),
    "Qwen3_5GatedDeltaNet": (delta.qwen3_5, "out_proj"),
    "Qwen3_5MoeGatedDeltaNet": (delta.qwen3_5, "out_proj"),
    "KimiLinearDeltaAttention": (delta.kimi_linear, "o_proj"),
}


class _Patch(NamedTuple):
    """What unpatch() takes back."""

    layers: List[torch.nn.Module]
    texts: List[Tuple[Any, Any, Optional[str]]]  # text model, its hook, its attention implementation where that was replaced


def patch(model: torch.nn.Module, kv: str = "8v4", threads: Optional[int] = None) -> torch.nn.Module:
    """Lets Weft compute the delta layers of a model of transformers, and keep its keys and values in the recipe kv.

    Qwen3-Next, Qwen3.5 (dense and mixture of experts) and Kimi Linear. Afterwards model.generate() and model() take the same arguments, for
    inference. threads is the number of threads on the CPU; None: the library chooses. Returns the model.
    """
    version = transformers.__version__
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", version)
    if release is None or release[1] not in VERSIONS:
        raise refuse(_OP, "transformers", f"is version {version}, wanted a release of {VERSIONS[0]} to {VERSIONS[-1]}")
    if any(hasattr(module, "_weft_patch") for module in model.modules()):
        raise refuse(_OP, "model", "is patched already, wanted unpatch(model) first")
    layers = [module for module in model.modules() if _is_delta(module)]
    texts = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel) and _holds_delta(module)]
    if not texts:
        raise refuse(_OP, "model", f"is a {type(model).__name__} without delta layers, wanted one with {', '.join(_FAMILIES)}")
    for layer in layers:
        _check_layer(layer)
    for text in texts:
        _check_recipe(text.config, kv)
        if text.config._attn_implementation == attention.NAME:
            raise refuse(_OP, "model.config", "is shared with a patched model, wanted a config of its own")
    for layer in layers:
        layer.forward = functools.partial(delta.forward, layer, *_FAMILIES[type(layer).__name__], threads)
    model._weft_patch = _Patch(layers, [_patch_text(text, kv, threads) for text in texts])  # type: ignore[assignment]
    return model


def unpatch(model: torch.nn.Module) -> torch.nn.Module:
    """Restores a patched model. Returns it."""
    if not hasattr(model, "_weft_patch"):
        raise refuse("transformers.unpatch", "model", "is not patched, wanted a model that patch() has changed")
    done: Any = model._weft_patch
    for layer in done.layers:
        del layer.forward
        vars(layer).pop("_weft_step", None)
    for text, hook, implementation in done.texts:
        hook.remove()
        if implementation is not None:
            text.set_attn_implementation(implementation)
    del model._weft_patch
    return model


def _is_delta(module: torch.nn.Module) -> bool:
    return type(module).__name__ in _FAMILIES and type(module).__module__.startswith("transformers.models.")


def _holds_delta(module: Any) -> bool:
    """Is it the innermost model with decoder layers?"""
    layers = getattr(module, "layers", None)
    return layers is not None and any(_is_delta(child) for layer in layers for child in layer.children())


def _check_layer(layer: Any) -> None:
    name = type(layer).__name__
    if layer.activation != "silu":
        raise refuse(_OP, f"{name}.activation", f"is {layer.activation!r}, wanted 'silu'")
    if "forward" in vars(layer) or hasattr(layer, "_hf_hook"):
        raise refuse(_OP, f"{name}.forward", "was replaced by another library (offloading, kernels), wanted the forward of transformers")


def _check_recipe(config: Any, kv: str) -> None:
    """Refuses a recipe that does not exist or does not fit, before anything is changed."""
    if is_latent(config):
        torch_ops.recipe(LatentLayer(kv).kv, config.kv_lora_rank, config.qk_rope_head_dim)
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    torch_ops.recipe(kv, size, size)


def _patch_text(text: Any, kv: str, threads: Optional[int]) -> Tuple[Any, Any, Optional[str]]:
    implementation = None
    if not is_latent(text.config):  # MLA expands its latents and then attends by torch
        implementation = text.config._attn_implementation
        text.set_attn_implementation(attention.NAME)
    hook = text.register_forward_pre_hook(_Before(kv, threads), with_kwargs=True)
    return text, hook, implementation


class _Before:
    """What happens before a text model computes: refusals, and its cache."""

    def __init__(self, kv: str, threads: Optional[int]) -> None:
        self.kv = kv
        self.threads = threads

    def __call__(self, module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        name = type(module).__name__
        given = dict(zip(_parameters(type(module)), args), **kwargs)
        if module.training:
            raise _unsupported(name, "training", "is True, and Weft computes no gradients; call model.eval()")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            raise _unsupported(name, "parameters", "require grad, and Weft computes no gradients; use torch.no_grad()")
        implementation = module.config._attn_implementation
        if not is_latent(module.config) and implementation != attention.NAME:
            what = f"is {implementation!r} since patch(), wanted 'weft': unpatch(model) first, and give every model a config of its own"
            raise _unsupported(name, "config._attn_implementation", what)
        if _wants(module, given, "output_attentions"):
            raise _unsupported(name, "output_attentions", "is True, wanted False: compressed attention does not return its weights")
        attention.check_options(name, given)
        cache = given["past_key_values"] = self.cache(module, given)
        given["attention_mask"] = self.masks(module, given, cache)
        return (), given

    def masks(self, module: Any, given: Dict[str, Any], cache: Optional[HybridCache]) -> Any:
        """Checks the mask and the cache of a call before any layer computes, and returns what the layers take as masks."""
        name = type(module).__name__
        inputs = _inputs(name, given)
        batch, tokens = inputs.shape[:2]
        past = 0 if cache is None else cache.get_seq_length()
        mask = _mask(name, given, batch, past + tokens)
        latent = is_latent(module.config)
        hidden = None if mask is None or latent else attention.hidden_tokens(mask.to(inputs.device, torch.bool))
        if cache is not None:
            cache.check(name, batch, hidden)
        if latent:  # transformers makes the masks
            return mask
        local = None if mask is None or hidden is None or not (hidden > past).any() else mask[:, past:].to(inputs.device)
        return {"full_attention": attention.Padding(hidden, self.threads), "linear_attention": local}

    def cache(self, module: Any, given: Dict[str, Any]) -> Optional[HybridCache]:
        """The cache of this call. An empty DynamicCache, as generate() makes it, becomes a HybridCache in place."""
        cache = given.get("past_key_values")
        if cache is None:
            return HybridCache(module.config, self.kv, self.threads) if _wants(module, given, "use_cache") else None
        if isinstance(cache, HybridCache):
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length() > 0 or getattr(cache, "offloading", False):
            held = f"is a {type(cache).__name__} of {cache.get_seq_length()} tokens"
            raise refuse(type(module).__name__, "past_key_values", f"{held}, wanted a HybridCache, an empty DynamicCache or None")
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            raise refuse(type(module).__name__, "past_key_values", "is to take tokens back (assisted generation), wanted plain generation")
        cache.__class__ = HybridCache
        cache.adopt(module.config, self.kv, self.threads)
        return cache


def _inputs(op: str, given: Dict[str, Any]) -> torch.Tensor:
    """The tokens, or their embeddings."""
    inputs = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if inputs is None or not inputs.numel():
        raise refuse(op, "input_ids", f"{'are None' if inputs is None else f'are {list(inputs.shape)}'}, wanted one token or more")
    return inputs


def _mask(op: str, given: Dict[str, Any], batch: int, tokens: int) -> Optional[torch.Tensor]:
    """The mask [B, T] of a call, or None."""
    mask = given.get("attention_mask")
    if mask is None:
        if given["past_key_values"] is None and _restarts(given.get("position_ids")):
            raise refuse(op, "position_ids", "restart inside a sequence, wanted sequences in rows of the batch: packing is not supported")
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        kind = f"has {mask.ndim} dimensions" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
        raise refuse(op, "attention_mask", f"{kind}, wanted a mask [B, T] of padding at the left")
    if mask.shape != (batch, tokens):
        raise refuse(op, "attention_mask", f"is {list(mask.shape)}, wanted {[batch, tokens]}, earlier tokens included")
    return mask


def _restarts(positions: Optional[torch.Tensor]) -> bool:
    """Do positions [B, T], or those of text in [4, B, T], not count up by one? transformers takes such sequences as packed."""
    if positions is None or (positions.ndim == 3 and len(positions) != 4):
        return False
    rows = positions[0] if positions.ndim == 3 else positions
    return bool((rows.diff(dim=-1) != 1).any())


@functools.lru_cache(maxsize=None)
def _parameters(model: Any) -> List[str]:
    return list(inspect.signature(model.forward).parameters)[1:]  # without self


def _wants(module: Any, given: Dict[str, Any], option: str) -> bool:
    """An option of a call, or of the model's configuration."""
    value = given.get(option)
    return bool(getattr(module.config, option, False) if value is None else value)


def _unsupported(op: str, argument: str, what: str) -> Error:
    return Error("unsupported", op, argument, f"{op}: {argument} {what}")
