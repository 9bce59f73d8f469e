"""FLA's functions by Weft against a recurrence in float64, and FLA's own dispatch."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import pytest
import torch

import weft
import weft.fla

B, T, H, HV, K, V = 2, 50, 2, 4, 32, 16


def inputs(per_channel: bool, tokens: int = T, batch: int = B, dtype: torch.dtype = torch.float32) -> Dict[str, torch.Tensor]:
    torch.manual_seed(4)
    q, k = torch.randn(batch, tokens, H, K), torch.nn.functional.normalize(torch.randn(batch, tokens, H, K), dim=-1)
    g = -torch.rand(batch, tokens, HV, K) if per_channel else -torch.rand(batch, tokens, HV)
    x = {"q": q, "k": k, "v": torch.randn(batch, tokens, HV, V), "g": g, "beta": torch.rand(batch, tokens, HV)}
    return {name: value.to(dtype) for name, value in x.items()}


def recurrence(x: Dict[str, torch.Tensor], initial: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """The rule token by token in float64: o [B, T, HV, V] and the state [B, HV, K, V]."""
    q, k, v, g, beta = (x[name].double() for name in ("q", "k", "v", "g", "beta"))
    q, k = (each.repeat_interleave(HV // H, dim=2) for each in (q * K**-0.5, k))
    g = g if g.ndim == 4 else g[..., None]
    state = torch.zeros(len(v), HV, K, V, dtype=torch.float64) if initial is None else initial.double()
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None]
        correction = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        o[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return o, state


def check(got: Any, wanted: Any, tokens: int = T) -> None:
    """f32 arithmetic: a relative RMS of 2e-6 sqrt(T), as the library's own cases have it."""
    for mine, exact in zip(got, wanted):
        assert ((mine - exact).pow(2).mean() / exact.pow(2).mean()).sqrt() <= 2e-6 * tokens**0.5


FORMS = {
    "chunk_gated_delta_rule": False,
    "fused_recurrent_gated_delta_rule": False,
    "chunk_kda": True,
    "fused_recurrent_kda": True,
}


@pytest.fixture(params=list(FORMS))
def form(request: Any) -> Any:
    return getattr(weft.fla, request.param)


@pytest.mark.parametrize("tokens", [1, 3, T])
def test_forms(form: Any, tokens: int) -> None:
    x, initial = inputs(FORMS[form.__name__], tokens), torch.randn(B, HV, K, V)
    before = initial.clone()
    check(form(**x, initial_state=initial, output_final_state=True), recurrence(x, initial), tokens)
    assert torch.equal(initial, before)
    o, state = form(**x)
    check([o], recurrence(x)[:1], tokens)
    assert state is None


def test_state_v_first(form: Any) -> None:
    x, initial = inputs(FORMS[form.__name__]), torch.randn(B, HV, K, V)
    transposed = initial.transpose(-1, -2).contiguous()
    o, state = form(**x, initial_state=transposed, output_final_state=True, state_v_first=True)
    check((o, state.transpose(-1, -2)), recurrence(x, initial))


def test_packed_sequences(form: Any) -> None:
    x, cu_seqlens = inputs(FORMS[form.__name__], 60, 1), torch.tensor([0, 7, 7, 60])
    initial = torch.randn(3, HV, K, V)
    o, state = form(**x, initial_state=initial, output_final_state=True, cu_seqlens=cu_seqlens)
    for n, (first, last) in enumerate(((0, 7), (7, 7), (7, 60))):
        part = {name: value[:, first:last] for name, value in x.items()}
        wanted = recurrence(part, initial[n : n + 1])
        if last > first:
            check((o[:, first:last], state[n : n + 1]), wanted)
    assert torch.equal(state[1], initial[1])


def test_packed_sequences_that_end_too_late(form: Any) -> None:
    with pytest.raises(weft.Error, match="cu_seqlens ends at 90, wanted 60 tokens or fewer"):
        form(**inputs(FORMS[form.__name__], 60, 1), cu_seqlens=torch.tensor([0, 90]))


def test_gates_and_norms_in_the_kernel(form: Any) -> None:
    per_channel = FORMS[form.__name__]
    x = inputs(per_channel)
    raw = {**x, "g": torch.randn_like(x["g"]), "beta": torch.randn_like(x["beta"]), "k": x["k"] * 3}
    a_log, dt_bias = torch.randn(HV), torch.randn(HV * K if per_channel else HV)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True}
    got = form(**raw, A_log=a_log, dt_bias=dt_bias, output_final_state=True, **options)
    rate = a_log.double().exp().view(HV, *[1] * per_channel)
    decay = -rate * torch.nn.functional.softplus(raw["g"].double() + dt_bias.double().view(raw["g"].shape[2:]))
    normed = {name: raw[name].double() / (raw[name].double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k")}
    check(got, recurrence({**raw, **normed, "g": decay, "beta": 2 * raw["beta"].double().sigmoid()}))


@pytest.mark.parametrize("with_rate", [True, False])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_lower_bound(name: str, with_rate: bool) -> None:
    x = inputs(True)
    raw, a_log, dt_bias = {**x, "g": torch.randn_like(x["g"])}, torch.randn(HV), torch.randn(HV * K)
    options = {"A_log": a_log if with_rate else None, "dt_bias": dt_bias, "use_gate_in_kernel": True, "lower_bound": -5.0}
    got = getattr(weft.fla, name)(**raw, output_final_state=True, **options)
    rate = a_log.double().exp()[:, None] if with_rate else 1.0
    decay = -5.0 * torch.sigmoid(rate * (raw["g"].double() + dt_bias.double().view(HV, K)))
    check(got, recurrence({**raw, "g": decay}))


def test_decays_per_channel_and_defaults_of_the_recurrent_form() -> None:
    x, form = inputs(True), weft.fla.fused_recurrent_gated_delta_rule
    g = -torch.rand(B, T, HV)
    rest = {name: x[name] for name in ("q", "k", "v", "beta")}
    check(form(**rest, gk=x["g"], output_final_state=True), recurrence(x))
    check(form(**rest, g=g, gk=x["g"], output_final_state=True), recurrence({**x, "g": x["g"] + g[..., None]}))
    plain = {**x, "g": torch.zeros(B, T, HV), "beta": torch.ones(B, T, HV)}
    check(form(x["q"], x["k"], x["v"], output_final_state=True), recurrence(plain))


def test_bf16() -> None:
    x = inputs(False, dtype=torch.bfloat16)
    o, state = weft.fla.chunk_gated_delta_rule(**x, output_final_state=True)
    wanted, exact_state = recurrence(x)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert ((o - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt() <= 2e-3  # its own rounding
    check([state], [exact_state])


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"cp_context": object()}, "cp_context is object, wanted nothing"),
        ({"surprise": 1}, "surprise is no argument that Weft knows"),
        ({"use_gate_in_kernel": True}, "A_log is None, wanted a tensor"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is True, wanted use_beta_sigmoid_in_kernel=True"),
        ({"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens is given with a batch of 2"),
        ({"v": torch.zeros(B, T, HV, V).half()}, "q, k, v have elements of torch.float32, torch.float32, torch.float16"),
        ({"k": torch.zeros(B, T, HV, K)}, r"wanted \[B, T, H, K\] twice"),
        ({"q": torch.zeros(B, T, H, K, requires_grad=True)}, "q requires grad, and Weft computes no gradients"),
        ({"chunk_size": 7}, "chunk_size is 7, wanted one of 16, 32, 64"),
        ({"g": torch.zeros(B, T, HV, K)}, r"g is \[2, 50, 4, 32\], wanted \[2, 50, 4\]"),
        ({"g": None}, "g is None, wanted a tensor"),
        ({"beta": torch.zeros(B, T, HV, V)}, r"beta is \[2, 50, 4, 16\], wanted \[2, 50, 4\]"),
        ({"head_first": False}, "head_first is False, wanted nothing"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(H)}, r"A_log is \[2\], wanted \[4\]"),
        ({"state_v_first": True, "transpose_state_layout": True}, "transpose_state_layout is given beside state_v_first"),
        ({"initial_state": torch.zeros(1, HV, K, V)}, "initial_state holds 1 states, wanted 2, one of every sequence"),
        ({"initial_state": torch.zeros(B, HV, V, K)}, "states.in"),
    ],
)
def test_refusals(change: Dict[str, Any], sentence: str) -> None:
    given = {**inputs(False), **change}
    with pytest.raises(weft.Error, match=sentence):
        weft.fla.chunk_gated_delta_rule(**given)
    accepted, reason = weft.fla._Weft().chunk_gated_delta_rule_verifier(**given)
    assert not accepted and reason is not None


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"g": torch.zeros(B, T, HV)}, r"g is \[2, 50, 4\], wanted \[2, 50, 4, 32\]"),
        ({"chunk_size": 16}, "chunk_size is 16, wanted one of 32, 64"),
        ({"initial_state": torch.zeros(B, HV, K, V).half()}, "initial_state has elements of torch.float16, wanted float32"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "safe_gate": True}, "lower_bound is None, wanted a number from -5"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "lower_bound": 3.0}, "lower_bound is 3.0, wanted a number below 0"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -9.0}, "lower_bound is -9.0, wanted a number from -5 to below 0"),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(HV)}, r"dt_bias is \[4\], wanted \[4, 32\]"),
    ],
)
def test_refusals_of_kda(change: Dict[str, Any], sentence: str) -> None:
    given = {**inputs(True), **change}
    with pytest.raises(weft.Error, match=sentence):
        weft.fla.chunk_kda(**given)
    accepted, reason = weft.fla._Weft().chunk_kda_verifier(**given)
    assert not accepted and reason is not None


def test_raw_gates_of_the_recurrent_form() -> None:
    x, form = inputs(True), weft.fla.fused_recurrent_gated_delta_rule
    raw, a_log = torch.randn(B, T, HV), torch.randn(HV)
    rest = {name: x[name] for name in ("q", "k", "v", "beta")}
    options = {"use_gate_in_kernel": True, "A_log": a_log, "output_final_state": True}
    decay = -a_log.double().exp() * torch.nn.functional.softplus(raw.double())
    check(form(**rest, g=raw, gk=x["g"], **options), recurrence({**x, "g": x["g"] + decay[..., None]}))
    with pytest.raises(weft.Error, match="g is None, wanted raw gates with use_gate_in_kernel"):
        form(**rest, gk=x["g"], **options)


def test_initial_states_of_any_strides_and_dtype() -> None:
    x, initial = inputs(False), torch.randn(B, HV, V, K).transpose(-1, -2)
    check(weft.fla.chunk_gated_delta_rule(**x, initial_state=initial, output_final_state=True), recurrence(x, initial))
    half = initial.bfloat16()
    check(weft.fla.chunk_gated_delta_rule(**x, initial_state=half, output_final_state=True), recurrence(x, half))
    assert weft.fla._Weft().chunk_gated_delta_rule_verifier(**x, initial_state=half) == (True, None)


def test_no_tokens(form: Any) -> None:
    initial = torch.randn(B, HV, K, V)
    x = inputs(FORMS[form.__name__], 0)
    o, state = form(**x, initial_state=initial, output_final_state=True)
    assert o.shape == (B, 0, HV, V) and torch.equal(state, initial)
    assert not form(**x, output_final_state=True)[1].any()


def test_one_graph_under_compile(form: Any) -> None:
    x = inputs(FORMS[form.__name__])
    compiled = torch.compile(lambda x: form(**x, output_final_state=True), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), form(**x, output_final_state=True)):
        assert torch.equal(got, wanted)


def test_the_verifier_accepts_what_the_form_computes() -> None:
    weft_backend = weft.fla._Weft()
    assert weft_backend.chunk_gated_delta_rule_verifier(*inputs(False).values()) == (True, None)
    assert weft_backend.chunk_kda_verifier(*inputs(True).values()) == (True, None)


def test_dispatch_of_fla() -> None:
    """FLA has no kernels for the CPU, so that its functions give results there shows that they reached Weft."""
    if weft.fla.REGISTERED is None:
        pytest.skip(weft.fla.WHY_NOT)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    for function, per_channel in ((chunk_gated_delta_rule, False), (chunk_kda, True)):
        x = inputs(per_channel)
        with torch.no_grad():
            check(function(**x, output_final_state=True), recurrence(x))
