"""torch.ops.weft: the same results as weft.ops, one graph under torch.compile, and no gradients."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import weft
import weft.torch_ops

T, HK, HV, K, V = 40, 2, 4, 16, 8


def delta_inputs(dtype: torch.dtype = torch.float32) -> Dict[str, torch.Tensor]:
    torch.manual_seed(1)
    sizes = {"q": (T, HK, K), "k": (T, HK, K), "v": (T, HV, V), "a": (T, HV), "b": (T, HV), "a_log": (HV,), "dt_bias": (HV,)}
    made = {name: torch.randn(size) for name, size in sizes.items()}
    return {name: value if name in ("a_log", "dt_bias") else value.to(dtype) for name, value in made.items()}


def layer(x: Dict[str, torch.Tensor], conv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A delta layer with torch before, between and after Weft's ops."""
    mixed = torch.cat([x[name].reshape(T, -1) for name in ("q", "k", "v")], dim=-1) * 0.5
    mixed = weft.torch_ops.short_conv(x=mixed, weight=x["w"], state_in=conv, state_out=conv, threads=1)
    q, k, v = (part.reshape(T, -1, x[name].shape[-1]) for part, name in zip(mixed.split([HK * K, HK * K, HV * V], -1), "qkv"))
    gates = {name: x[name] for name in ("a", "b", "a_log", "dt_bias")}
    states = {"in": state, "out": state}
    o = weft.torch_ops.gated_delta_rule_prefill(q=q, k=k, v=v, gates=gates, l2_norm=True, states=states, threads=1)
    return weft.torch_ops.gated_rms_norm(x=o, z=x["v"], weight=torch.ones(V), threads=1) + 1


def states() -> Tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(1, 3, 2 * HK * K + HV * V), torch.randn(1, HV, V, K)


def test_every_op_is_registered() -> None:
    assert set(weft.torch_ops.FUNCTIONS) == set(weft.ops.FUNCTIONS)
    for name in weft.ops.FUNCTIONS:
        assert hasattr(torch.ops.weft, name), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_keeps_one_graph(backend: str) -> None:
    x = {**delta_inputs(), "w": torch.randn(2 * HK * K + HV * V, 4)}
    (conv, state), (compiled_conv, compiled_state) = states(), states()
    wanted = layer(x, conv, state)
    got = torch.compile(layer, fullgraph=True, backend=backend)(x, compiled_conv, compiled_state)
    # inductor contracts torch's own multiply and add around the ops: a few units in the last place of numbers of size 8
    torch.testing.assert_close(got, wanted, rtol=0, atol=8 * 4 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(compiled_state, state, rtol=0, atol=4 * 4 * torch.finfo(torch.float32).eps)
    assert torch.equal(compiled_conv, conv) or backend == "inductor"
    assert not torch.equal(state, states()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fake_outputs_have_the_sizes_and_dtypes_of_real_ones(dtype: torch.dtype) -> None:
    x = delta_inputs(dtype)
    given: Dict[str, Any] = {f"gates_{name}": x[name] for name in ("a", "b", "a_log", "dt_bias")}
    state = torch.zeros(1, HV, V, K)
    given.update(q=x["q"], k=x["k"], v=x["v"], states_out=state, l2_norm=True)
    torch.library.opcheck(torch.ops.weft.gated_delta_rule_prefill.default, (), given)
    torch.library.opcheck(torch.ops.weft.l2_norm.default, (), {"x": x["q"]})
    rows = {"a": x["a"], "b": x["b"], "a_log": x["a_log"], "dt_bias": x["dt_bias"], "beta": torch.empty(T, HV)}
    torch.library.opcheck(torch.ops.weft.delta_gates.default, (), rows)
    assert torch.ops.weft.gated_delta_rule_prefill(**given).dtype == dtype


def test_dynamic_sizes_do_not_break_the_graph() -> None:
    compiled = torch.compile(lambda x: weft.torch_ops.l2_norm(x=x * 2, threads=1), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        x = torch.randn(rows, 24)
        assert torch.equal(compiled(x), weft.ops.l2_norm(x=x * 2))


def test_a_cache_is_written_and_read_under_its_flat_names() -> None:
    torch.manual_seed(3)
    recipe = weft.KvRecipe("8v4", 32, seed=5)
    k, v, q = torch.randn(10, 2, 32), torch.randn(10, 2, 32), torch.randn(10, 4, 32)
    parts = {}
    for side, info in (("k", recipe.k), ("v", recipe.v)):
        parts[side] = {"codes": torch.zeros(1, 2, 64, info.code_bytes, dtype=torch.uint8), "gains": torch.zeros(1, 2, 64, 1).half()}
    positions, lengths = torch.arange(10, dtype=torch.int32), torch.tensor([10], dtype=torch.int32)

    def step(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, parts: Any) -> torch.Tensor:
        cache = {"recipe": recipe, **parts}
        weft.torch_ops.kv_encode(k=k, v=v, positions=positions, cache=cache, threads=1)
        return weft.torch_ops.compressed_attention(queries={"q": q}, cache={**cache, "lengths": lengths}, threads=1)

    wanted = step(k, v, q, parts)
    empty = {side: {name: torch.zeros_like(part) for name, part in each.items()} for side, each in parts.items()}
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, q, empty)
    assert torch.equal(got, wanted)
    assert torch.equal(empty["k"]["codes"], parts["k"]["codes"]) and parts["k"]["codes"].any()


@pytest.mark.parametrize("how", ["eager", "torch.ops", "compiled"])
def test_gradients_are_refused(how: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    calls: Dict[str, Any] = {
        "eager": lambda x: weft.torch_ops.l2_norm(x=x),
        "torch.ops": lambda x: torch.ops.weft.l2_norm(x=x),
        "compiled": torch.compile(lambda x: weft.torch_ops.l2_norm(x=x * 1), fullgraph=True, backend="aot_eager"),
    }
    with pytest.raises(Exception, match="l2_norm: x requires grad, and Weft computes no gradients; use torch.no_grad()"):
        calls[how](x)
    with torch.no_grad():
        assert torch.equal(calls[how](x), weft.ops.l2_norm(x=x))


def test_a_recipe_with_means_is_refused_while_compiling() -> None:
    recipe = weft.KvRecipe("8v4", 32, k_mean=torch.zeros(2, 32))
    compiled = torch.compile(lambda x: weft.torch_ops.kv_rotate(x=x, recipe=recipe), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="kv_rotate: recipe has means"):
        compiled(torch.randn(3, 2, 32))


def compiled(call: Any) -> Any:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def test_a_given_output_is_written_while_compiling() -> None:
    x, y = torch.randn(3, 24), torch.zeros(3, 24)
    wanted = weft.ops.l2_norm(x=x)
    assert torch.equal(compiled(lambda x, y: weft.torch_ops.l2_norm(x=x, y=y))(x, y), wanted)
    assert torch.equal(y, wanted)
    recipe, codes = weft.KvRecipe("f16", 32), torch.randn(1, 2, 64, 32).half()
    positions, k, v = torch.arange(10, dtype=torch.int32), torch.zeros(10, 2, 32), torch.zeros(10, 2, 32)
    cache = {"recipe": recipe, "k": {"codes": codes}, "v": {"codes": codes * 2}}
    compiled(lambda k, v: weft.torch_ops.kv_decode(k=k, v=v, positions=positions, cache=cache))(k, v)
    assert torch.equal(k, codes[0, :, :10].transpose(0, 1).float()) and torch.equal(v, 2 * k)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"epss": 3.0}, "l2_norm: epss is no argument, wanted one of x, y, eps"),
        ({"backend": "nonsense"}, "l2_norm: backend is 'nonsense', wanted nothing while torch.compile traces"),
        ({"isa": "avx2"}, "l2_norm: isa is 'avx2', wanted nothing while torch.compile traces"),
        ({"y": torch.zeros(3, 23)}, r"l2_norm: y is \[3, 23\], wanted \[3, 24\]"),
        ({"y": True}, "l2_norm: y is True, wanted a tensor while torch.compile traces"),
    ],
)
def test_keywords_are_checked_while_compiling(given: Dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        compiled(lambda x: weft.torch_ops.l2_norm(x=x, **given))(torch.randn(3, 24))


def test_keywords_of_groups_are_checked_while_compiling() -> None:
    x = delta_inputs()
    call = compiled(lambda q, k, v, g: weft.torch_ops.gated_delta_rule_prefill(q=q, k=k, v=v, gates={"g": g, "betta": g}))
    with pytest.raises(Exception, match="gated_delta_rule_prefill: gates.betta is no argument, wanted one of"):
        call(x["q"], x["k"], x["v"], x["a"])


def test_fake_tensors_outside_of_compile() -> None:
    with FakeTensorMode():
        made = weft.torch_ops.l2_norm(x=torch.empty(3, 24, dtype=torch.bfloat16))
    assert isinstance(made, FakeTensor) and made.shape == (3, 24) and made.dtype == torch.bfloat16


def test_repeated_calls_check_the_memory_again() -> None:
    memory, apart = torch.randn(4 * 24), torch.zeros(3, 24)
    x = memory[:72].view(3, 24)
    wanted = weft.ops.l2_norm(x=x)
    assert torch.equal(weft.torch_ops.l2_norm(x=x, y=apart), wanted)
    with pytest.raises(weft.Error, match="overlaps"):  # of the same sizes and strides
        weft.torch_ops.l2_norm(x=x, y=memory[24:].view(3, 24))
    assert torch.equal(weft.torch_ops.l2_norm(x=x, y=x), wanted)  # in place
