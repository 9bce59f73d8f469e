"""Calls on a GPU: streams, graphs, torch.compile, and arrays of CuPy and JAX."""

from __future__ import annotations

import os
import threading
from typing import Any, Dict

import numpy as np
import pytest
import torch
from cuda_support import delta_inputs, needs_cuda, normal, on_host, relative_rms

import weft
import weft.torch_ops

pytestmark = needs_cuda
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory
_CYCLES = 200_000_000  # about 0.1 s of a stream
_FORMS = {"weft": weft.ops.FUNCTIONS, "torch_ops": weft.torch_ops.FUNCTIONS}


@pytest.fixture(params=list(_FORMS))
def ops(request: Any) -> Dict[str, Any]:
    return _FORMS[request.param]


def late(x: torch.Tensor) -> None:
    """Fills x in the order of the current stream, but not soon."""
    values = normal(*x.shape, seed=9)  # a copy from the host would wait for the stream
    torch.cuda._sleep(_CYCLES)
    x.copy_(values)


def wanted_of_late(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*x.shape, seed=9).double(), dim=-1)


def test_a_call_is_enqueued_on_the_current_stream(ops: Dict[str, Any]) -> None:
    x = torch.zeros(3, 64, device="cuda")
    ops["l2_norm"](x=x)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late(x)
            y = ops["l2_norm"](x=x)
            assert not stream.query()  # the call does not wait
        stream.synchronize()
        assert relative_rms(y, wanted_of_late(x)) < 2e-6


def test_a_stream_that_is_named() -> None:
    x, stream = torch.zeros(3, 64, device="cuda"), torch.cuda.Stream()
    for named in (stream, stream.cuda_stream):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late(x)
        y = weft.l2_norm(x=x, stream=named)
        stream.synchronize()
        assert relative_rms(y, wanted_of_late(x)) < 2e-6


def test_scratch_of_two_streams(ops: Dict[str, Any]) -> None:
    """Calls at once on several streams and threads have the bits of one call."""
    given = delta_inputs(3000)
    wanted = ops["gated_delta_rule_prefill"](**given)
    assert relative_rms(wanted, weft.gated_delta_rule_prefill(**on_host(given))) < 4.2e-3 + 2e-3
    torch.cuda.synchronize()
    made: Dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        states = {"out": torch.zeros(1, 8, 64, 64, device="cuda")}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                made[index] = ops["gated_delta_rule_prefill"](**{**given, "states": states})
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and all(torch.equal(each, wanted) for each in made.values())


def test_a_graph_replays_calls(ops: Dict[str, Any]) -> None:
    given = delta_inputs()
    ops["gated_delta_rule_prefill"](**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops["gated_delta_rule_prefill"](**given)
    for seed in (21, 22):
        given["v"].copy_(normal(*given["v"].shape, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, ops["gated_delta_rule_prefill"](**given))


def test_two_places_are_refused(ops: Dict[str, Any]) -> None:
    with pytest.raises(weft.Error, match="l2_norm: y"):
        ops["l2_norm"](x=normal(3, 8), y=torch.zeros(3, 8))
    with pytest.raises(weft.Error, match="l2_norm: "):
        ops["l2_norm"](x=normal(3, 8), backend="cpu")


def test_strided_views_and_dtypes(ops: Dict[str, Any]) -> None:
    packed = normal(40, 3 * 4 * 64, dtype=torch.bfloat16)
    views = [part.view(40, 4, 64) for part in packed.split(256, dim=-1)]
    gates = {"g": -normal(40, 4).abs(), "beta": normal(40, 4, seed=2).sigmoid()}
    strided, dense = (ops["gated_delta_rule_prefill"](q=q, k=k, v=v, gates=gates, l2_norm=True)
                      for q, k, v in (views, [each.contiguous() for each in views]))
    assert strided.dtype == torch.bfloat16 and torch.equal(strided, dense)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_keeps_one_graph(backend: str) -> None:
    def layer(x: Dict[str, Any], conv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([x[name].flatten(1) for name in "qkv"], dim=-1) * 0.5
        mixed = weft.torch_ops.short_conv(x=mixed, weight=x["w"], state_in=conv, state_out=conv)
        q, k, v = (part.view(x[name].shape) for part, name in zip(mixed.split([256, 256, 512], -1), "qkv"))
        states = {"in": state, "out": state}
        o = weft.torch_ops.gated_delta_rule_prefill(q=q, k=k, v=v, gates=x["gates"], l2_norm=True, states=states)
        return weft.torch_ops.gated_rms_norm(x=o, z=x["v"], weight=torch.ones(64, device="cuda")) + 1

    x = {name: value for name, value in delta_inputs(dtype=torch.float16).items() if name in ("q", "k", "v", "gates")}
    x["w"] = normal(1024, 4, dtype=torch.float16)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        conv, state = torch.zeros(1, 3, 1024, device="cuda", dtype=torch.float16), torch.zeros(1, 8, 64, 64, device="cuda")
        results.append((call(x, conv, state), state))
    for got, wanted in zip(results[1], results[0]):
        assert relative_rms(got, wanted) < 1e-3  # inductor contracts the f16 arithmetic around the ops
        assert wanted.float().std() > 0.01


@pytest.mark.parametrize("recipe", ["f16", "bf16", "8v4", "4v4", "5v3"])
def test_a_cache_on_the_gpu(recipe: str) -> None:
    k, v, q = (normal(2, tokens, heads, 128, seed=seed) for seed, tokens, heads in ((1, 300, 2), (2, 300, 2), (3, 4, 8)))
    made = []
    for arrays in ((k, v, q), tuple(each.cpu() for each in (k, v, q))):
        cache = weft.KvCache(recipe, heads=2, head_dim=128, capacity=320, batch=2, like=arrays[0])
        cache.encode(arrays[0][:, :290], arrays[1][:, :290])
        cache.encode(arrays[0][:, 290:], arrays[1][:, 290:])
        made.append((cache.attend(arrays[2]), *cache.decode()))
    assert made[0][0].device == k.device
    assert relative_rms(made[0][0], made[1][0]) < 2e-3  # each side has the bar 1e-3 of scores with 15 bits
    for got, wanted in zip(made[0][1:], made[1][1:]):
        assert relative_rms(got, wanted) < (1e-3 if recipe in ("f16", "bf16", "8v4") else 5e-3)  # codes on a boundary may differ


# CuPy


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def test_cupy(cupy: Any) -> None:
    given = delta_inputs(dtype=torch.float16)
    as_cupy = {name: cupy.asarray(given[name]) for name in "qkv"}
    gates = {name: cupy.asarray(value) for name, value in given["gates"].items()}
    out = cupy.zeros((1, 8, 64, 64), dtype=cupy.float32)
    o = weft.gated_delta_rule_prefill(**as_cupy, gates=gates, l2_norm=True, states={"out": out})
    wanted = weft.gated_delta_rule_prefill(**given)
    assert isinstance(o, cupy.ndarray) and o.dtype == np.float16
    assert torch.equal(torch.as_tensor(o, device="cuda"), wanted)
    assert torch.equal(torch.as_tensor(out, device="cuda"), given["states"]["out"])


def test_the_current_stream_of_cupy(cupy: Any) -> None:
    wait = f'extern "C" __global__ void wait() {{ for (long long t = clock64(); clock64() - t < {_CYCLES};) {{}} }}'
    x, slow, stream = cupy.zeros((3, 64), dtype=cupy.float32), cupy.RawKernel(wait, "wait"), cupy.cuda.Stream(non_blocking=True)
    source = cupy.asarray(normal(3, 64, seed=9))
    torch.cuda.synchronize()
    for turn in range(2):  # the first one compiles and allocates
        x[...] = 0
        cupy.cuda.Device().synchronize()
        with stream:
            slow((1,), (1,), ())
            x[...] = source
            y = weft.l2_norm(x=x)
            assert not turn or not stream.done
        stream.synchronize()
    assert relative_rms(torch.as_tensor(y, device="cuda"), wanted_of_late(torch.zeros(3, 64))) < 2e-6


def test_the_interface_alone(cupy: Any) -> None:
    """An array that speaks __cuda_array_interface__ and nothing else: outputs are given."""

    class Bare:
        def __init__(self, array: Any) -> None:
            self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

    x, y = cupy.random.standard_normal((5, 32), dtype=cupy.float32), cupy.zeros((5, 32), dtype=cupy.float32)
    with pytest.raises(weft.Error, match="wanted the argument device= with it"):
        weft.l2_norm(x=Bare(x), y=Bare(y))
    weft.l2_norm(x=Bare(x), y=Bare(y), device=0)
    cupy.cuda.Device().synchronize()
    assert relative_rms(torch.as_tensor(y, device="cuda"), weft.l2_norm(x=torch.as_tensor(x, device="cuda"))) == 0


def test_a_cache_of_cupy(cupy: Any) -> None:
    k, v, q = (normal(tokens, heads, 64, seed=seed) for seed, tokens, heads in ((1, 100, 2), (2, 100, 2), (3, 4, 4)))
    outs = []
    for arrays in ((k, v, q), tuple(cupy.asarray(each) for each in (k, v, q))):
        cache = weft.KvCache("8v4", heads=2, head_dim=64, capacity=128, like=arrays[0])
        cache.encode(*arrays[:2])
        outs.append(cache.attend(arrays[2]))
    assert isinstance(outs[1], cupy.ndarray) and torch.equal(torch.as_tensor(outs[1], device="cuda"), outs[0])


# JAX


@pytest.fixture
def jax() -> Any:
    made = pytest.importorskip("jax")
    if made.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")
    return made


def test_jax(jax: Any) -> None:
    given = delta_inputs()
    as_jax = {name: jax.dlpack.from_dlpack(given[name]) for name in "qkv"}
    gates = {name: jax.dlpack.from_dlpack(value) for name, value in given["gates"].items()}
    state = torch.zeros_like(given["states"]["out"])  # an array of JAX cannot be written
    o = weft.gated_delta_rule_prefill(**as_jax, gates=gates, l2_norm=True, states={"out": state})
    wanted = weft.gated_delta_rule_prefill(**given)
    assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
    assert np.array_equal(np.asarray(o.astype(jax.numpy.float32)), wanted.float().cpu().numpy())
    assert torch.equal(state, given["states"]["out"])
    with pytest.raises(weft.Error, match="is read-only"):
        weft.l2_norm(x=as_jax["q"], y=as_jax["k"])


def test_jax_before_and_after_a_call(jax: Any) -> None:
    """What JAX has not computed yet is complete before the call reads it, and JAX sees the output at once."""
    make = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: y * 1.0001, x))
    for seed in range(5):
        x = jax.random.normal(jax.random.key(seed), (512, 1024))
        y = weft.l2_norm(x=make(x))
        z = np.asarray(y * 2)
        late_x = np.asarray(make(x), np.float64)
        wanted = 2 * late_x / np.sqrt((late_x**2).sum(-1, keepdims=True) + 1e-6)
        assert np.sqrt(((z - wanted) ** 2).sum() / (wanted**2).sum()) < 2e-6


def test_a_cache_like_an_array_of_jax_is_refused(jax: Any) -> None:
    with pytest.raises(weft.Error, match="is an array of jax, wanted one of numpy, torch or CuPy"):
        weft.KvCache("8v4", heads=2, head_dim=64, capacity=128, like=jax.numpy.zeros(3))
