"""A differentiable chunked gated delta rule for training, in place of transformers' slow reference.

Per chunk of C tokens, with G the running sum of the log decays inside the chunk and S the incoming state [K, V]:

    A = strict_lower(beta_i exp(G_i - G_j) k_i.k_j)      X = (I + A)^-1
    [U | W] = X [beta v | beta exp(G) k]                  K~ = exp(G_C - G) k
    S'  = M S + B    with  M = exp(G_C) I - K~^T W,  B = K~^T U
    o   = exp(G) q S + lower(exp(G_i - G_j) q_i.k_j) (U - W S)

Everything but S' = M S + B is one batched product over all chunks. That recurrence is a loop with one product per
chunk, forwards and backwards. The inverse has a closed-form gradient. Both are opaque to torch.compile.
"""

import torch
import torch.nn.functional as F

CHUNK = 64


@torch.library.custom_op("weft_training::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 of the strictly lower triangles in [..., C, C], by a batched triangular solve."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True).contiguous()


@unit_lower_inverse.register_fake
def _(a):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _inverse_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return -(x.mT @ grad @ x.mT).tril(-1)


unit_lower_inverse.register_autograd(
    _inverse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


@torch.library.custom_op("weft_training::scan_states", mutates_args=())
def scan_states(m: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """States before each chunk: s[0] = 0, s[c + 1] = m[c] s[c] + b[c]; m [N, B, K, K], b [N, B, K, V]."""
    s = torch.empty_like(b)
    s[0].zero_()
    for c in range(len(b) - 1):
        torch.baddbmm(b[c], m[c], s[c], out=s[c + 1])
    return s


@scan_states.register_fake
def _(m, b):
    return torch.empty_like(b)


@torch.library.custom_op("weft_training::scan_states_backward", mutates_args=())
def scan_states_backward(m: torch.Tensor, s: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    db = torch.empty_like(s)
    dm = torch.empty_like(m)
    db[-1].zero_()  # the state after the last chunk is not used
    dm[-1].zero_()
    # The gradient of b[c] is the accumulated gradient of s[c + 1].
    for c in range(len(s) - 2, -1, -1):
        torch.baddbmm(grad[c + 1], m[c + 1].mT, db[c + 1], out=db[c])
    last = len(s) - 1
    if last:
        torch.bmm(db[:last].flatten(0, 1), s[:last].flatten(0, 1).mT, out=dm[:last].flatten(0, 1))
    return dm, db


@scan_states_backward.register_fake
def _(m, s, grad):
    return torch.empty_like(m), torch.empty_like(s)


def _scan_backward(ctx, grad):
    m, s = ctx.saved_tensors
    return scan_states_backward(m, s, grad.contiguous())


scan_states.register_autograd(
    _scan_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output)
)


def normalised(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunk_rule(q, k, v, g, beta):
    """q, k [B, T, H, K], v [B, T, H, V], g and beta [B, T, H], f32; T a multiple of CHUNK; q and k normalised here."""
    batch, tokens, heads, _ = q.shape
    count = tokens // CHUNK

    def chunks(x):  # chunk first, so that the scan reads whole slabs
        return x.reshape(batch, count, CHUNK, heads, -1).permute(1, 0, 3, 2, 4).flatten(1, 2)

    q, k, v = chunks(normalised(q) * q.shape[-1] ** -0.5), chunks(normalised(k)), chunks(v)
    beta, total = chunks(beta), chunks(g).cumsum(-2)
    end = total[..., -1:, :]
    # A ratio is the exp of a difference that is never positive; other entries are masked before exp, so nothing overflows.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = (total - total.mT).masked_fill(~lower, float("-inf")).exp()

    inverse = unit_lower_inverse((beta * ratio * (k @ k.mT)).tril(-1))
    corrected = inverse @ torch.cat((beta * v, beta * total.exp() * k), dim=-1)
    written = ((end - total).exp() * k).mT @ corrected
    b, forgotten = written.split((v.shape[-1], k.shape[-1]), dim=-1)
    u, w = corrected.split((v.shape[-1], k.shape[-1]), dim=-1)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    states = scan_states((end.exp() * eye - forgotten).contiguous(), b.contiguous())
    out = (total.exp() * q) @ states + (ratio * (q @ k.mT)) @ (u - w @ states)
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, tokens, heads, -1)


def training_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, initial_state=None,
                  output_final_state=False, **unused):
    """Replaces transformers' torch_chunk_gated_delta_rule in training."""
    assert use_qk_l2norm_in_kernel and initial_state is None and not output_final_state
    pad = -query.shape[1] % CHUNK
    with torch.autocast(query.device.type, enabled=False):
        args = [x.float() for x in (query, key, value, g, beta)]
        if pad:
            args = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) for x in args]
        out = chunk_rule(*args)[:, : query.shape[1]]
    return out.to(query.dtype), None


def training_conv(hidden_states, weight, bias=None, activation=None, **unused):
    """Replaces transformers' causal_conv1d_fn by shifted products, which torch.compile fuses."""
    assert bias is None and activation == "silu"
    tokens, taps = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states.float(), (taps - 1, 0))
    out = sum(padded[..., j : j + tokens] * weight[:, j, None].float() for j in range(taps))
    return F.silu(out).to(hidden_states.dtype)


def install(modeling):
    """Installs both functions in transformers' modeling module, which looks them up by name."""
    for name, function in (("torch_chunk_gated_delta_rule", training_rule), ("causal_conv1d_fn", training_conv)):
        assert hasattr(modeling, name), name
        setattr(modeling, name, function)
