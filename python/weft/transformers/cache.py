"""HybridCache: recurrent states in Weft's layout and compressed keys and values, as the cache of a transformers model."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from .. import torch_ops
from .._arrays import _NUMPY_NAMES
from .._library import Error, refuse
from ..kv_recipe import KvRecipe, KvSideInfo

_TILE = 64  # tokens
_OP = "HybridCache"


def _not_patched() -> Error:
    return refuse(_OP, "past_key_values", "was given to a layer that is not patched, wanted a patched model")


class DeltaLayer(LinearAttentionLayer):
    """The states of a delta layer: of the convolution [B, W - 1, C], and recurrent [B, Hv, V, K] f32. Zeros are the empty states."""

    def states(self, conv: Tuple[int, ...], recurrent: Tuple[int, ...], like: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both states, made on the first call. The caller updates them in place."""
        if not self.is_recurrent_states_initialized[0]:
            self.dtype, self.device = like.dtype, like.device
            self.conv_states[0] = like.new_zeros(conv)
            self.recurrent_states[0] = like.new_zeros(recurrent, dtype=torch.float32)
            self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        kept_conv, kept = self.conv_states[0], self.recurrent_states[0]
        if kept.shape != recurrent or kept_conv.shape != conv:
            raise refuse(_OP, "states", f"are {list(kept.shape)}, wanted {list(recurrent)}: they are of another model")
        self.has_previous_state[0] = True
        return kept_conv, kept

    @property
    def batch(self) -> Optional[int]:
        """The sequences of earlier calls; None: there were none."""
        return self.recurrent_states[0].shape[0] if self.is_recurrent_states_initialized[0] else None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence."""
        if self.is_recurrent_states_initialized[0]:
            self.reorder_cache(torch.arange(self.recurrent_states[0].shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some sequences."""
        if self.is_recurrent_states_initialized[0]:
            self.reorder_cache(torch.arange(self.recurrent_states[0].shape[0])[indices.cpu()])

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise _not_patched()

    update_recurrent_state = update_conv_state

    def activate_past_recording(self) -> None:
        raise refuse(_OP, "past_key_values", "cannot take tokens back, which assisted generation wants")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise refuse(_OP, "tokens_to_remove", f"is {tokens_to_remove}, wanted 0: recurrent states cannot take tokens back")


class Appended(NamedTuple):
    """update() returns this object in place of keys. attention() finds the layer and the new tokens in it."""

    layer: CompressedLayer
    key: torch.Tensor  # [B, Hk, T, Dk]
    value: torch.Tensor  # [B, Hk, T, Dv]

    def __getattr__(self, name: str) -> Any:
        """Raises. An attention other than Weft's takes this object for keys, and asks for their shape first."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise _not_patched()


class CompressedLayer(DynamicLayer):
    """Keys and values of an attention layer in a KV recipe. Padding on the left takes no rows: a sequence begins at its first token."""

    def __init__(self, kv: str, seed: int = 0, threads: Optional[int] = None) -> None:
        super().__init__()
        self.kv, self.seed, self.threads = kv, seed, threads
        self.reset()

    def reset(self) -> None:
        """Forgets all tokens and releases the memory."""
        self.keys = self.values = None
        self.is_initialized = False
        self.tokens = 0  # tokens of the longest sequence, padding included
        self.padding: Optional[torch.Tensor] = None  # [B] i32
        self.sizes = (0, 0, 0, 0)  # B, Hk, Dk, Dv
        self.parts: Dict[str, torch.Tensor] = {}  # k.codes, k.gains, v.codes, v.gains

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes the sizes of the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sizes = (key_states.shape[0], key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[Any, torch.Tensor]:
        """Passes the new tokens on to attention(), which stores them, because only attention() knows the padding."""
        return Appended(self, key_states, value_states), value_states

    def append(self, key: torch.Tensor, value: torch.Tensor, padding: Optional[torch.Tensor]) -> None:
        """Stores keys and values [B, Hk, T, D]. padding [B] counts the hidden tokens at the left of every sequence; see check_padding()."""
        sizes = (key.shape[0], key.shape[1], key.shape[-1], value.shape[-1])
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        if sizes != self.sizes:
            raise refuse(_OP, "key_states", f"have B, Hk, Dk, Dv {sizes}, wanted {self.sizes} as in earlier calls")
        self.padding = padding
        new = key.shape[2]
        self._reserve(self.tokens + new)
        positions = torch.arange(self.tokens, self.tokens + new, dtype=torch.int32, device=self.device).repeat(self.sizes[0])
        if self.padding is not None:
            positions -= self.padding.repeat_interleave(new)
        self.tokens += new
        torch_ops.kv_encode(
            k=_packed(key),
            v=_packed(value),
            positions=positions,
            sequences={"count": self.sizes[0]},
            cache=self._cache(),
            threads=self.threads,
        )

    def attend(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of the newest tokens, [B, Hq, T, Dk], over all that are stored: [B, T, Hq, Dv]."""
        batch, heads, new, _ = query.shape
        lengths = torch.full((batch,), self.tokens, dtype=torch.int32, device=self.device)
        if self.padding is not None:
            lengths -= self.padding
        o = torch_ops.compressed_attention(
            queries={"q": _packed(query), "sequences": {"count": batch}, "scale": scale},
            cache={**self._cache(), "lengths": lengths},
            threads=self.threads,
        )
        return o.view(batch, new, heads, self.sizes[3])

    @property
    def batch(self) -> Optional[int]:
        """The sequences of earlier calls; None: there were none."""
        return self.sizes[0] if self.is_initialized else None

    def check_padding(self, padding: Optional[torch.Tensor]) -> None:
        """Refuses padding that differs from that of earlier calls. It may grow where a sequence has only padding so far."""
        if not self.is_initialized or padding is self.padding:
            return
        none = torch.zeros(self.sizes[0], dtype=torch.int32, device=self.device)
        stored, new = (none if each is None else each for each in (self.padding, padding))
        if not ((new == stored) | ((stored == self.tokens) & (new > stored))).all():
            text = f"hides {new.tolist()} tokens at the left, wanted {stored.tolist()} as in earlier calls"
            raise refuse("attention", "attention_mask", text)

    def get_seq_length(self) -> int:
        return self.tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence n becomes a copy of sequence beam_idx[n]."""
        if not self.is_initialized:
            return
        chosen = beam_idx.to(self.device)
        self.parts = {name: part.index_select(0, chosen) for name, part in self.parts.items()}
        self.padding = None if self.padding is None else self.padding.index_select(0, chosen)
        self.sizes = (len(chosen), *self.sizes[1:])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence."""
        self.reorder_cache(torch.arange(self.sizes[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some sequences."""
        self.reorder_cache(torch.arange(self.sizes[0])[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest -tokens_to_remove tokens."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.tokens:
            raise refuse(_OP, "tokens_to_remove", f"is {tokens_to_remove}, wanted {-self.tokens} to 0")
        self.tokens += tokens_to_remove

    def offload(self) -> None:
        raise refuse(_OP, "offloading", "is True, wanted False: compressed keys and values stay on their device")

    prefetch = offload

    @property
    def bytes(self) -> int:
        """Bytes of the codes and gains that are allocated."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def _recipe(self) -> KvRecipe:
        return torch_ops.recipe(self.kv, self.sizes[2], self.sizes[3], self.seed)

    def _cache(self) -> Dict[str, Any]:
        """The cache as the ops take it."""
        recipe = self._recipe()
        sides = {side: {part: self.parts.get(f"{side}.{part}") for part in ("codes", "gains")} for side in ("k", "v")}
        tiles = {"layout": "tiles", "tile_order": "lanes"} if _lanes_fit(recipe) else {}
        return {"recipe": recipe, **sides, **tiles}

    def _reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens of every sequence, and for an eighth more where the memory must grow."""
        recipe, (batch, heads, *_) = self._recipe(), self.sizes
        tiles = _lanes_fit(recipe)
        unit = 1 if tiles else _TILE  # how many rows of parts hold 64 tokens
        held = self.parts["k.codes"].shape[2] // unit if self.parts else 0
        if tokens <= held * _TILE:
            return
        wanted = -(-tokens // _TILE)
        wanted = wanted + wanted // 8 if held else wanted
        for side, info in (("k", recipe.k), ("v", recipe.v)):
            for part, width, dtype in _parts(info, tiles):
                grown = torch.zeros((batch, heads, wanted * unit, width), dtype=dtype, device=self.device)
                if held:
                    grown[:, :, : held * unit] = self.parts[f"{side}.{part}"]
                self.parts[f"{side}.{part}"] = grown


class LatentLayer(CompressedLayer):
    """The latents of multi-head latent attention (MLA) in a recipe; both latents take the format of keys. The model expands them."""

    def __init__(self, kv: str, seed: int = 0, threads: Optional[int] = None) -> None:
        sides = re.fullmatch(r"(aura)?(\w+?)v\w+", kv)
        super().__init__(f"{sides[1] or ''}{sides[2]}v{sides[2]}" if sides else kv, seed, threads)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[Any, torch.Tensor]:
        """Stores the new latents and returns all of them, decoded. Rows of padding stay: the model masks them."""
        self.append(key_states, value_states, None)
        batch, heads, key_size, value_size = self.sizes
        rows = batch * self.tokens
        keys, values = (key_states.new_empty((rows, heads, size)) for size in (key_size, value_size))
        positions = torch.arange(self.tokens, dtype=torch.int32, device=self.device).repeat(batch)
        where = {"positions": positions, "sequences": {"count": batch}, "cache": self._cache()}
        torch_ops.kv_decode(k=keys, v=values, threads=self.threads, **where)
        return tuple(each.view(batch, self.tokens, heads, -1).transpose(1, 2) for each in (keys, values))  # type: ignore[return-value]


class HybridCache(DynamicCache):
    """The cache of a patched model. It may be copied, pickled, reordered (beam search) and passed on to further calls.

    kv is a recipe: "8v4", "4v4", "f16", "f32", ... A patched model makes this cache itself.
    """

    def __init__(self, config: Any, kv: str = "8v4", threads: Optional[int] = None) -> None:
        super().__init__(config=config)
        self.adopt(config, kv, threads)

    def adopt(self, config: Any, kv: str, threads: Optional[int]) -> None:
        """Replaces the layers of an empty DynamicCache."""
        text = config.get_text_config(decoder=True)
        kinds = {"linear_attention": lambda seed: DeltaLayer(), "full_attention": _attention_layer(text, kv, threads)}
        for kind in text.layer_types:
            if kind not in kinds:
                raise refuse(_OP, "config", f"has a layer of {kind}, wanted linear_attention and full_attention")
        self.layers = [kinds[kind](index) for index, kind in enumerate(text.layer_types)]

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Required by transformers; patched layers do not call it."""
        raise _not_patched()

    get_recurrent_state = get_conv_state

    def has_previous_state(self, layer_idx: Optional[int] = None, *args: Any, **kwargs: Any) -> bool:
        """Has a delta layer states? The layers of some versions of transformers ask about themselves; patched layers do not."""
        if layer_idx is not None:
            raise _not_patched()
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses: recurrent states cannot take tokens back."""
        for layer in self.layers:
            if isinstance(layer, DeltaLayer):  # delta layers refuse first, before an attention layer forgets tokens
                layer.crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def check(self, op: str, batch: int, padding: Optional[torch.Tensor]) -> None:
        """Refuses a call that does not continue the earlier ones, before any layer changes: the cache then stays as it was."""
        for layer in self.layers:
            if layer.batch not in (None, batch):
                raise refuse(op, "past_key_values", f"holds {layer.batch} sequences, wanted {batch}: the batch differs from earlier calls")
        for layer in self.layers:
            if type(layer) is CompressedLayer:  # all of them have the same padding; latents have none
                layer.check_padding(padding)
                break

    @property
    def bytes(self) -> int:
        """Bytes of keys and values: codes and gains."""
        return sum(layer.bytes for layer in self.layers if isinstance(layer, CompressedLayer))

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states and convolution states."""
        layers = [layer for layer in self.layers if isinstance(layer, DeltaLayer)]
        states = [state for layer in layers for state in (layer.conv_states[0], layer.recurrent_states[0]) if state is not None]
        return sum(state.numel() * state.element_size() for state in states)


def is_latent(config: Any) -> bool:
    """Does the model keep the latents of MLA in its cache?"""
    return getattr(config, "kv_lora_rank", None) is not None


def _attention_layer(config: Any, kv: str, threads: Optional[int]) -> Any:
    kind = LatentLayer if is_latent(config) else CompressedLayer
    return lambda seed: kind(kv, seed, threads)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] as tokens [B T, H, D]; a view where B is 1."""
    x = x.transpose(1, 2)
    x = x[0] if x.shape[0] == 1 else x.reshape(-1, *x.shape[2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _lanes_fit(recipe: KvRecipe) -> bool:
    """Can both sides lie as tiles in lanes order, which the fast kernels read?"""

    def fits(side: KvSideInfo) -> bool:
        return side.passthrough or (side.head_dim % 32 == 0 and side.code_bytes * 8 == side.head_dim * side.bits)

    return fits(recipe.k) and fits(recipe.v)


def _parts(side: KvSideInfo, tiles: bool) -> List[Tuple[str, int, torch.dtype]]:
    """The tensors of a side: their names, last sizes and dtypes."""
    if tiles:
        return [("codes", side.tile_bytes, torch.uint8)]
    codes = getattr(torch, _NUMPY_NAMES[side.codes_dtype])
    if side.passthrough:
        return [("codes", side.head_dim, codes)]
    return [("codes", side.code_bytes, codes), ("gains", side.gains, getattr(torch, _NUMPY_NAMES[side.gains_dtype]))]
