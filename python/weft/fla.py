"""Weft behind flash-linear-attention (FLA): a backend of its dispatch, and its functions on tensors of the CPU, where FLA has none.

`import weft.fla` registers the backend "weft" for chunk_gated_delta_rule and chunk_kda with FLA 0.5.2 or 0.6. REGISTERED is then FLA's
version, else None, and WHY_NOT the reason. The functions here have FLA's signatures and work without FLA. Inference only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import torch_ops
from ._library import Error

VERSIONS = ("0.5.2", "0.6")  # supported versions of FLA: a release, or all releases of a series

Pair = Tuple[torch.Tensor, Optional[torch.Tensor]]

_DECODE_TOKENS = 16  # kMaxDecodeTokens
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TENSORS = ("q", "k", "v", "g", "gk", "beta", "initial_state", "A_log", "dt_bias")
_REFUSED = ("gv", "cp_context", "return_intermediate_states", "use_graph", "head_first")
_IGNORED = ("chunk_size", "cu_seqlens_cpu", "chunk_indices", "disable_recompute", "safe_gate", "max_num_seqs")  # no result depends on them
_CHUNKS = {"chunk_gated_delta_rule": (16, 32, 64), "chunk_kda": (32, 64)}  # chunk sizes that FLA takes
_FURTHER = {*_IGNORED, *_REFUSED, "use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout"}  # keywords besides a signature's


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    cu_seqlens_cpu: Optional[torch.Tensor] = None,
    chunk_indices: Optional[torch.Tensor] = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Pair:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV]; (o, final state)."""
    given = dict(
        q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices, cp_context=cp_context, kwargs=kwargs,
    )
    return _delta("chunk_gated_delta_rule", given)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    cu_seqlens_cpu: Optional[torch.Tensor] = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: Optional[int] = None,
    **kwargs: Any,
) -> Pair:
    """fla.ops.kda.chunk_kda: as chunk_gated_delta_rule, with g [B, T, HV, K]."""
    given = dict(
        q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate,
        lower_bound=lower_bound, disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
        use_graph=use_graph, max_num_seqs=max_num_seqs, kwargs=kwargs,
    )
    return _delta("chunk_kda", given)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: Optional[torch.Tensor] = None,
    gk: Optional[torch.Tensor] = None,
    gv: Optional[torch.Tensor] = None,
    beta: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Pair:
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule. gk [B, T, HV, K] is a decay per channel; gv is refused."""
    given = dict(
        q=q, k=k, v=v, g=g, gk=gk, gv=gv, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, kwargs=kwargs,
    )
    return _delta("fused_recurrent_gated_delta_rule", given)


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Pair:
    """fla.ops.kda.fused_recurrent_kda."""
    given = dict(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        kwargs=kwargs,
    )
    return _delta("fused_recurrent_kda", given)


def _delta(op: str, given: Dict[str, Any]) -> Pair:
    given = _merged(given)
    reason = _why_not(op, given)
    if reason is not None:
        raise Error("unsupported", op, reason.split()[0], f"{op}: {reason}")
    batch, tokens, _, key_size = given["q"].shape
    value_heads, value_size = given["v"].shape[2:]
    first, count = _v_first(given), _sequences(given)
    out = None
    if given["output_final_state"]:
        sizes = (value_size, key_size) if first else (key_size, value_size)
        out = given["q"].new_empty((count, value_heads, *sizes), dtype=torch.float32)
    if not batch * tokens:
        if out is not None:
            out.copy_(torch.zeros_like(out) if given["initial_state"] is None else given["initial_state"])
        return torch.empty_like(given["v"]), out
    rule, arguments = _arguments(given, out)
    return getattr(torch_ops, rule)(**arguments).view(batch, tokens, value_heads, value_size), out


def _v_first(given: Dict[str, Any]) -> bool:
    return bool(given["state_v_first"] or given.get("transpose_state_layout"))


def _sequences(given: Dict[str, Any]) -> int:
    return given["q"].shape[0] if given["cu_seqlens"] is None else len(given["cu_seqlens"]) - 1


def _arguments(given: Dict[str, Any], out: Optional[torch.Tensor]) -> Tuple[str, Dict[str, Any]]:
    """The op that computes a call, and its arguments."""
    cu_seqlens, initial, tokens = given["cu_seqlens"], given["initial_state"], given["q"].shape[1]
    longest = tokens if cu_seqlens is None else _longest(cu_seqlens, given.get("cu_seqlens_cpu"), tokens)
    return "gated_delta_rule_decode" if longest <= _DECODE_TOKENS else "gated_delta_rule_prefill", {
        "q": _packed(given["q"]),
        "k": _packed(given["k"]),
        "v": _packed(given["v"]),
        "gates": {**_decay(given), **_strength(given)},
        "scale": given["scale"],
        "l2_norm": given["use_qk_l2norm_in_kernel"],
        "sequences": {"cu_seqlens": cu_seqlens, "count": _sequences(given), "max_tokens": None if cu_seqlens is None else max(longest, 1)},
        "states": {
            "in": None if initial is None else initial.float().contiguous(),
            "out": out,
            "layout": "vk" if _v_first(given) else "kv",
        },
    }


def _merged(given: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of a function by name, further keywords included."""
    given = dict(given)
    return {**given.pop("kwargs"), **given}


def _longest(cu_seqlens: torch.Tensor, on_host: Optional[torch.Tensor], tokens: int) -> int:
    """The number of tokens of the longest sequence. Where only the device knows it, the number of all tokens is the bound."""
    lengths = on_host if on_host is not None else cu_seqlens
    return int(lengths.diff().max()) if lengths.device.type == "cpu" and len(lengths) > 1 else tokens


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] as tokens [B T, ...]."""
    x = x.reshape(-1, *x.shape[2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _decay(given: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """The decay in a form that the rule takes: its logarithm, or the raw values that it is made of."""
    g, per_channel, v = given.get("g"), given.get("gk"), given["v"]
    if given.get("use_gate_in_kernel"):
        a_log, bias, bound = (given.get(name) for name in ("A_log", "dt_bias", "lower_bound"))
        bias = torch.zeros(g.shape[2:], device=g.device) if bias is None else bias.float().reshape(g.shape[2:])
        if per_channel is not None:
            decay = -a_log.float().exp().reshape(-1) * torch.nn.functional.softplus(g.float() + bias)
            return {"g": _packed(per_channel.float() + decay[..., None])}
        if bound is None:
            return {"a": _packed(g), "a_log": a_log.float().reshape(-1), "dt_bias": bias}
        rate = 1.0 if a_log is None else a_log.float().exp().reshape(-1, *[1] * (g.ndim - 3))
        return {"g": _packed(bound * torch.sigmoid(rate * (g.float() + bias)))}
    if g is None and per_channel is None:
        return {"g": torch.zeros((v.shape[0] * v.shape[1], v.shape[2]), device=v.device)}
    if per_channel is None:
        return {"g": _packed(g.float())}
    return {"g": _packed(per_channel.float() if g is None else per_channel.float() + g.float()[..., None])}


def _strength(given: Dict[str, Any]) -> Dict[str, Any]:
    beta, v = given.get("beta"), given["v"]
    if beta is None:
        beta = torch.ones(v.shape[:3], device=v.device)
    if given["use_beta_sigmoid_in_kernel"]:
        return {"b": _packed(beta), "double_beta": given["allow_neg_eigval"]}
    return {"beta": _packed(beta.float())}


def _why_not(op: str, given: Dict[str, Any]) -> Optional[str]:
    """Why Weft cannot compute the call, as "<argument> ...", or None."""
    known = _SIGNATURES[op].parameters
    for name, value in given.items():
        if name not in known and name not in _FURTHER:
            return f"{name} is no argument that Weft knows"
        if name in _REFUSED and value is not None and (value is not False or name == "head_first"):
            return f"{name} is {type(value).__name__ if not isinstance(value, bool) else value}, wanted nothing"
    for name in _TENSORS:
        if torch.is_grad_enabled() and getattr(given.get(name), "requires_grad", False):
            return f"{name} requires grad, and Weft computes no gradients; use torch.no_grad()"
    return _why_not_tensors(op, given)


def _why_not_tensors(op: str, given: Dict[str, Any]) -> Optional[str]:
    q, k, v = given["q"], given["k"], given["v"]
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % max(q.shape[2], 1):
        return f"q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}, wanted [B, T, H, K] twice and [B, T, HV, V]"
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k, v have elements of {q.dtype}, {k.dtype}, {v.dtype}, wanted one of float32, float16, bfloat16 for all"
    initial, count = given["initial_state"], _sequences(given)
    if given["cu_seqlens"] is not None and q.shape[0] != 1:
        return f"cu_seqlens is given with a batch of {q.shape[0]}, wanted packed sequences in a batch of 1"
    offsets = given["cu_seqlens"]
    if offsets is not None and offsets.device.type == "cpu" and not torch.compiler.is_compiling() and int(offsets[-1]) > q.shape[1]:
        return f"cu_seqlens ends at {int(offsets[-1])}, wanted {q.shape[1]} tokens or fewer"
    if initial is not None and len(initial) != count:
        return f"initial_state holds {len(initial)} states, wanted {count}, one of every sequence"
    if initial is not None and initial.dtype != torch.float32 and (op.endswith("kda") or initial.dtype not in _DTYPES):
        return f"initial_state has elements of {initial.dtype}, wanted float32"
    return _why_not_gates(op, given) or _why_not_options(op, given) or (None if q.device.type == "cpu" else _why_not_device(q.device))


def _why_not_gates(op: str, given: Dict[str, Any]) -> Optional[str]:
    """Why the gates do not fit, or None. FLA takes a decay per channel in chunk_kda and as gk, else one per head."""
    heads, channels = given["v"].shape[:3], (*given["v"].shape[:3], given["q"].shape[3])
    per_channel = op.endswith("kda")
    wanted = {"g": channels if per_channel else heads, "gk": channels, "beta": heads}
    for name, sizes in wanted.items():
        value = given.get(name)
        if value is None and name != "gk" and op != "fused_recurrent_gated_delta_rule":
            return f"{name} is None, wanted a tensor {list(sizes)}"
        if value is not None and value.shape != sizes:
            return f"{name} is {list(value.shape)}, wanted {list(sizes)}"
    if not given.get("use_gate_in_kernel"):
        return None
    a_log, bias, bound = (given.get(name) for name in ("A_log", "dt_bias", "lower_bound"))
    if given["g"] is None:
        return "g is None, wanted raw gates with use_gate_in_kernel"
    if a_log is None and bound is None:
        return "A_log is None, wanted a tensor [HV] with use_gate_in_kernel"
    if a_log is not None and a_log.numel() != heads[2]:
        return f"A_log is {list(a_log.shape)}, wanted {[heads[2]]}"
    if bias is not None and bias.numel() != given["g"][0, :1].numel():
        return f"dt_bias is {list(bias.shape)}, wanted {list(given['g'].shape[2:])}"
    return None


def _why_not_options(op: str, given: Dict[str, Any]) -> Optional[str]:
    bound = given.get("lower_bound")
    if given["allow_neg_eigval"] and not given["use_beta_sigmoid_in_kernel"]:
        return "allow_neg_eigval is True, wanted use_beta_sigmoid_in_kernel=True with it"
    if "transpose_state_layout" in given and given["state_v_first"]:
        return "transpose_state_layout is given beside state_v_first, wanted one of them"
    if op in _CHUNKS and given.get("chunk_size", 64) not in _CHUNKS[op]:
        return f"chunk_size is {given['chunk_size']}, wanted one of {', '.join(map(str, _CHUNKS[op]))}"
    if not given.get("use_gate_in_kernel"):
        return None
    if given.get("safe_gate") and bound is None:
        return "lower_bound is None, wanted a number from -5 to below 0 with safe_gate"
    if bound is not None and (bound >= 0 or (given.get("safe_gate") and bound < -5)):
        return f"lower_bound is {bound}, wanted a number {'from -5 to ' if given.get('safe_gate') else ''}below 0"
    return None


@functools.lru_cache(maxsize=None)
def _why_not_device(device: torch.device) -> Optional[str]:
    """Asks the library once per device whether it computes there."""
    try:
        torch_ops.l2_norm(x=torch.ones(8, device=device))
    except Error as error:
        return f"q is on {device}: {error}"
    return None


def _refused_by_the_op(given: Dict[str, Any]) -> Optional[str]:
    """The library's own sentence about a call, without computing it, or None."""
    try:
        rule, arguments = _arguments(given, None)
        torch_ops.CHECK[rule](arguments)
    except Error as error:
        return str(error)
    return None


_FORMS = (chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule, fused_recurrent_kda)
_SIGNATURES = {form.__name__: inspect.signature(form) for form in _FORMS}


class _Weft:
    """The backend that FLA's dispatch asks and calls."""

    backend_type = "weft"
    priority = 2  # FlashQLA and FlashKDA have 3, the lower comes first

    def _verify(self, op: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[bool, Optional[str]]:
        bound = _SIGNATURES[op].bind(*args, **kwargs)
        bound.apply_defaults()
        given = _merged(bound.arguments)
        reason = _why_not(op, given)
        if reason is None and given["q"].numel() and not torch.compiler.is_compiling():
            reason = _refused_by_the_op(given)
        return reason is None, reason

    def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> Tuple[bool, Optional[str]]:
        return self._verify("chunk_gated_delta_rule", args, kwargs)

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Pair:
        return chunk_gated_delta_rule(*args, **kwargs)

    def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> Tuple[bool, Optional[str]]:
        return self._verify("chunk_kda", args, kwargs)

    def chunk_kda(self, *args: Any, **kwargs: Any) -> Pair:
        return chunk_kda(*args, **kwargs)


def _register_series_0_6() -> None:
    backends = importlib.import_module("fla.backends")
    made = type("Weft", (_Weft, backends.BaseBackend), {})
    backends.register("gated_delta_rule")(made)
    backends.register(importlib.import_module("fla.ops.kda").chunk_kda)(made)


def _register_0_5_2() -> None:
    backends = importlib.import_module("fla.ops.backends")
    made = type("Weft", (_Weft, backends.BaseBackend), {})
    for operation in ("gated_delta_rule", "kda"):
        importlib.import_module(f"fla.ops.{operation}")
        backends.BackendRegistry.ensure_initialized(operation)
        backends.BackendRegistry._registries[operation].register(made())


def _register() -> Tuple[Optional[str], str]:
    """Registers with the installed FLA. Returns its version; or None, and the reason."""
    try:
        version = str(importlib.import_module("fla").__version__)
    except ImportError as error:
        return None, f"FLA cannot be imported: {error}"
    series = ".".join(version.split(".")[:2])
    if version not in VERSIONS and series not in VERSIONS:
        warnings.warn(f"weft.fla: FLA is version {version}, wanted {' or '.join(VERSIONS)}; not registered", stacklevel=3)
        return None, f"FLA is version {version}, wanted {' or '.join(VERSIONS)}"
    try:
        _register_0_5_2() if version == "0.5.2" else _register_series_0_6()
    except Exception as error:  # Triton raises various errors where it cannot import FLA's kernels
        return None, f"FLA's ops cannot be imported: {error}"
    return version, ""


REGISTERED, WHY_NOT = _register()

__all__: List[str] = [
    "REGISTERED",
    "VERSIONS",
    "WHY_NOT",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]
