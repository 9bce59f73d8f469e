"""The forward of patched delta layers: convolution, gated delta rule and gated norm by Weft, projections by torch."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .. import torch_ops
from .cache import DeltaLayer
from .step import DECODE_TOKENS, Projected, step_of

def _qwen_gates(module: Any, a: torch.Tensor, b: torch.Tensor) -> Dict[str, torch.Tensor]:
    packed = {"a": a.reshape(-1, module.num_v_heads), "b": b.reshape(-1, module.num_v_heads)}
    return {**packed, "a_log": module.A_log.float(), "dt_bias": module.dt_bias.float()}


def _qwen_heads(module: Any) -> Tuple[int, int, int, int]:
    return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim


def qwen3_5(module: Any, x: torch.Tensor) -> Projected:
    """Qwen3.5, dense and mixture of experts."""
    mixed, z = module.in_proj_qkv(x), module.in_proj_z(x)
    gates = _qwen_gates(module, module.in_proj_a(x), module.in_proj_b(x))
    z = z.reshape(-1, module.num_v_heads, module.head_v_dim)
    return Projected(mixed.reshape(-1, mixed.shape[-1]), z, gates, _qwen_heads(module), module.norm, "silu")


def qwen3_next(module: Any, x: torch.Tensor) -> Projected:
    """Qwen3-Next, whose projections interleave their parts by key head."""
    *qkv, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    mixed = torch.cat([part.reshape(*x.shape[:2], -1) for part in qkv], dim=-1)
    z = z.reshape(-1, module.num_v_heads, module.head_v_dim)
    return Projected(mixed.reshape(-1, mixed.shape[-1]), z, _qwen_gates(module, a, b), _qwen_heads(module), module.norm, "silu")


def kimi_linear(module: Any, x: torch.Tensor) -> Projected:
    """Kimi Linear, with a decay per channel."""
    heads, size, forget = module.num_heads, module.head_dim, module.forget_gate
    mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)
    gates = {
        "a": forget.f_b_proj(forget.f_a_proj(x)).reshape(-1, heads, size),
        "b": module.b_proj(x).reshape(-1, heads),
        "a_log": forget.A_log.float().reshape(-1),
        "dt_bias": forget.dt_bias.float().reshape(heads, size),
    }
    z = module.g_b_proj(module.g_a_proj(x)).reshape(-1, heads, size)
    return Projected(mixed.reshape(-1, mixed.shape[-1]), z, gates, (heads, heads, size, size), module.o_norm, "sigmoid")


def mix(module: Any, made: Projected, batch: int, layer: Optional[DeltaLayer], threads: Optional[int]) -> torch.Tensor:
    """The layer without its projections: [B T, Hv, V]. The states of the cache's layer are updated in place."""
    key_heads, value_heads, key_size, value_size = made.heads
    width = module.conv_kernel_size
    conv = state = None
    if layer is not None:
        recurrent = (batch, value_heads, value_size, key_size)
        conv, state = layer.states((batch, width - 1, made.mixed.shape[-1]), recurrent, made.mixed)
        if len(made.mixed) <= DECODE_TOKENS * batch and not torch.compiler.is_compiling():
            return step_of(module, made, conv, state, threads)(made)
    where = {"sequences": {"count": batch}, "threads": threads}
    weight = module.conv1d.weight.squeeze(1)
    # not in place: a forward hook may keep what the projection returned
    mixed = torch_ops.short_conv(x=made.mixed, weight=weight, state_in=conv, state_out=conv, **where)
    tokens = len(mixed)
    q, k, v = mixed.split([key_heads * key_size, key_heads * key_size, value_heads * value_size], dim=-1)
    rule = torch_ops.gated_delta_rule_prefill
    if state is not None and tokens <= DECODE_TOKENS * batch:
        rule = torch_ops.gated_delta_rule_decode
    o = rule(
        q=q.view(tokens, key_heads, key_size),
        k=k.view(tokens, key_heads, key_size),
        v=v.view(tokens, value_heads, value_size),
        gates=made.gates,
        l2_norm=True,
        states={"in": state, "out": state},
        **where,
    )
    eps = made.norm.variance_epsilon
    return torch_ops.gated_rms_norm(x=o, z=made.z, weight=made.norm.weight, y=o, eps=eps, gate=made.gate, threads=threads)


def forward(
    layer: Any,
    project: Callable[[Any, torch.Tensor], Projected],
    out: str,
    threads: Optional[int],
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a delta layer of transformers; `out` names its output projection. functools.partial binds the first four."""
    if attention_mask is not None:  # a hidden token must leave no trace in the convolution or the state
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    batch, tokens, _ = hidden_states.shape
    kept = None if cache_params is None else cache_params.layers[layer.layer_idx]
    y = mix(layer, project(layer, hidden_states), batch, kept, threads)
    return getattr(layer, out)(y.view(batch, tokens, -1))
