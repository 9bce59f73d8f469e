"""Patched models on a GPU against unpatched ones, and HybridCache there."""

from __future__ import annotations

import copy
import io
from typing import Any, Iterator, Tuple

import pytest
import test_transformers as host
import torch
from conftest import build
from cuda_support import needs_cuda

from weft.transformers import HybridCache, unpatch

pytestmark = needs_cuda


@pytest.fixture(autouse=True)
def f32_is_f32() -> Iterator[None]:
    """cuDNN multiplies f32 with fewer bits unless told otherwise, and the convolution of unpatched models calls it."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def model(family: str) -> Any:
    return on_gpu(build(family))


def on_gpu(model: Any) -> Any:
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # grouped products on a GPU want bf16
    return model.cuda()


def prompts(*sizes: int) -> Tuple[torch.Tensor, torch.Tensor]:
    ids, mask = host.prompts(*sizes)
    return ids.cuda(), mask.cuda()


def test_logits_of_padded_batches(model: Any) -> None:
    ids, mask = prompts()
    allowed, wanted = host.bar(model, ids, mask), host.logits(host.in_double(model), ids, mask)
    got = host.logits(host.patched(model), ids, mask)
    assert got.device.type == "cuda" and (got - wanted).abs().max() <= allowed
    assert wanted.std() > 1


def test_greedy_tokens(model: Any) -> None:
    """Tokens of generate() are those of the unpatched model wherever the two best logits are further apart than rounding."""
    ids, mask = prompts()
    allowed = host.bar(model, ids, mask)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    wanted = model.generate(ids, **options)
    got = host.patched(model).generate(ids, **options)
    assert isinstance(got.past_key_values, HybridCache) and got.past_key_values.bytes > 0
    reached = [host.first_difference(wanted.sequences[row, 70:], got.sequences[row, 70:]) for row in range(len(ids))]
    for row, step in enumerate(reached):
        if step < 24:
            top = wanted.scores[step][row].topk(2).values
            assert top[0] - top[1] <= 2 * allowed, f"row {row} differs at token {step}, where the two best logits are {top}"
    assert max(reached) == 24


@pytest.mark.parametrize("kv", ["f16", "8v4", "4v4"])
def test_a_gpu_and_the_cpu_agree(kv: str) -> None:
    ids, mask = host.prompts()
    model = host.patched(build("qwen3_5"), kv)
    wanted = host.logits(model, ids, mask)
    exact = host.logits(unpatch(model), ids, mask)
    got = host.logits(host.patched(on_gpu(model), kv), ids.cuda(), mask.cuda()).cpu()
    rms = (wanted - exact).pow(2).mean().sqrt()
    assert (got - exact).pow(2).mean().sqrt() <= 1.25 * rms  # both err by the format


def test_bf16(family: str) -> None:
    ids, mask = prompts()
    squares = torch.zeros(2)
    for seed in range(5):  # experts that flip make the error of one model chance
        model = on_gpu(build(family, seed))
        exact = host.logits(model, ids, mask)
        half = model.to(torch.bfloat16)
        unpatched, got = host.logits(half, ids, mask), host.logits(host.patched(half, "bf16"), ids, mask)
        squares += torch.stack([(each.float() - exact).pow(2).mean().cpu() for each in (unpatched, got)])
    # both errors are those of bf16 weights and activations, which neither side can avoid
    assert squares[1].sqrt() <= 1.25 * squares[0].sqrt()


def test_save_reorder_and_resume(model: Any) -> None:
    ids, mask = prompts()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        cache = host.patched(model, "8v4")(
            ids[:, :69], attention_mask=mask[:, :69], position_ids=host._positions(mask, 0, 69)
        ).past_key_values
    wanted = model.generate(ids, past_key_values=copy.deepcopy(cache), **options)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    twice = copy.deepcopy(cache)
    twice.reorder_cache(torch.tensor([2, 1, 0], device="cuda"))
    twice.reorder_cache(torch.tensor([2, 1, 0], device="cuda"))
    for resumed in (torch.load(file, weights_only=False), twice):
        assert torch.equal(model.generate(ids, past_key_values=resumed, **options), wanted)
    assert cache.get_seq_length() == 69


def test_beam_search(model: Any) -> None:
    ids, mask = prompts()
    allowed = host.bar(model, ids, mask)
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 3, "do_sample": False, "output_scores": True}
    wanted = model.generate(ids, return_dict_in_generate=True, **options)
    got = host.patched(model).generate(ids, return_dict_in_generate=True, **options)
    # a score is the mean of 8 logarithms, each off by at most twice the bar of its logits
    assert (got.sequences_scores - wanted.sequences_scores).abs().max() <= 2 * allowed


def test_decode_steps_of_two_streams_and_caches(model: Any) -> None:
    ids, _ = prompts(1)
    host.patched(model, "f16")
    with torch.no_grad():
        caches = [model(ids[:, :length]).past_key_values for length in (20, 45)]
    wanted = [host.steps(model, copy.deepcopy(cache), ids[:, 50:56]) for cache in caches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made: Any = [[], []]
    for turn in range(6):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made[index].append(host.steps(model, caches[index], ids[:, 50 + turn : 51 + turn]))
    torch.cuda.synchronize()
    for got, each in zip(made, wanted):
        torch.testing.assert_close(torch.cat(got, dim=1), each, rtol=1e-4, atol=1e-4)  # cuBLAS may take another algorithm


def test_a_layer_compiles_into_one_graph(model: Any) -> None:
    layer = next(module for module in host.patched(model).modules() if type(module).__name__.endswith(("GatedDeltaNet", "DeltaAttention")))
    x = torch.randn(2, 20, 64, device="cuda")
    with torch.no_grad():
        wanted = layer(x)
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, wanted)
