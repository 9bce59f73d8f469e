"""The decode step of a delta layer: three calls whose C structs stay, since only a few addresses change between tokens."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from .. import torch_ops

DECODE_TOKENS = 16  # kMaxDecodeTokens


class Projected(NamedTuple):
    """What a layer's projections give, tokens packed, and its parameters."""

    mixed: torch.Tensor  # [B T, C], C = 2 Hk K + Hv V: queries, keys and values before the convolution
    z: torch.Tensor  # [B T, Hv, V]: the gate of the norm
    gates: Dict[str, torch.Tensor]  # as gated_delta_rule_prefill takes them
    heads: Tuple[int, int, int, int]  # Hk, Hv, K, V
    norm: Any  # the module whose weight and eps the gated norm takes
    gate: str  # its function: "silu" or "sigmoid"


class Step:
    """One layer's calls for one pair of states. A copy of it would hold the addresses of the original, so copies are None."""

    def __init__(self, module: Any, made: Projected, conv: torch.Tensor, state: torch.Tensor, threads: Optional[int]) -> None:
        key_heads, value_heads, key_size, value_size = made.heads
        tokens = len(made.mixed)
        self.bound_to = _identity(module, made, conv, state)
        self.size = (tokens, value_heads, value_size)
        o = made.mixed.new_empty(self.size)
        self.mixed = torch.empty_like(made.mixed)  # not in place: a forward hook may keep what the projection returned
        where = {"sequences": {"count": len(state)}, "threads": threads}
        weight = module.conv1d.weight.squeeze(1)
        parts = self.mixed.split([key_heads * key_size, key_heads * key_size, value_heads * value_size], dim=-1)
        q, k, v = (part.view(tokens, -1, size) for part, size in zip(parts, (key_size, key_size, value_size)))
        self.conv = torch_ops.BOUND["short_conv"](
            {"x": made.mixed, "weight": weight, "y": self.mixed, "state_in": conv, "state_out": conv, **where}, "x"
        )
        rule = {"q": q, "k": k, "v": v, "gates": made.gates, "o": o, "l2_norm": True, "states": {"in": state, "out": state}, **where}
        self.rule = torch_ops.BOUND["gated_delta_rule_decode"](rule, "gates.a", "gates.b", "o")
        norm = {"x": o, "z": made.z, "weight": made.norm.weight, "y": o, "eps": made.norm.variance_epsilon, "gate": made.gate}
        self.norm = torch_ops.BOUND["gated_rms_norm"]({**norm, "threads": threads}, "x", "z", "y")

    def __call__(self, made: Projected) -> torch.Tensor:
        o = made.mixed.new_empty(self.size)
        to = o.data_ptr()
        self.conv(made.mixed.data_ptr())
        self.rule(made.gates["a"].data_ptr(), made.gates["b"].data_ptr(), to)
        self.norm(to, made.z.data_ptr(), to)
        return o

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(None), ()


def _identity(module: Any, made: Projected, conv: torch.Tensor, state: torch.Tensor) -> Tuple[Any, ...]:
    """What the kept structs depend on: sizes, strides, dtypes, and the memory and versions of the tensors that stay."""
    a, b, a_log, dt_bias = (made.gates[name] for name in ("a", "b", "a_log", "dt_bias"))
    changing = (made.mixed, made.z, a, b)
    rates = getattr(module, "forget_gate", module)
    staying = (conv, state, module.conv1d.weight, made.norm.weight, rates.A_log, rates.dt_bias)
    sizes = tuple((each.shape, each.stride(), each.dtype) for each in changing)
    return (*sizes, *(each.data_ptr() for each in staying), rates.A_log._version, rates.dt_bias._version, state.shape)


def step_of(module: Any, made: Projected, conv: torch.Tensor, state: torch.Tensor, threads: Optional[int]) -> Step:
    """The layer's step, made again where the states, sizes or weights are others."""
    step = vars(module).get("_weft_step")
    if step is None or step.bound_to != _identity(module, made, conv, state):
        step = Step(module, made, conv, state, threads)
        vars(module)["_weft_step"] = step
    return step
