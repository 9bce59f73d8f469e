"""Compares the training rule, its gradients and the patched model with transformers' own reference."""

import argparse

import plain_transformers  # noqa: F401  before transformers
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

import delta_rule
import model as our_model


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def rule_inputs(device, batch=2, tokens=200, heads=3, width=(32, 48), alike=0.0):
    make = torch.Generator().manual_seed(1)
    shared = torch.randn(batch, 1, heads, width[0], generator=make)
    q, k = (torch.randn(batch, tokens, heads, width[0], generator=make) for _ in range(2))
    v = torch.randn(batch, tokens, heads, width[1], generator=make)
    g = -torch.rand(batch, tokens, heads, generator=make) * torch.tensor([0.01, 0.3, 20.0])[:heads]
    beta = torch.rand(batch, tokens, heads, generator=make)
    return [x.to(device).requires_grad_() for x in (q, k * (1 - alike) + shared * alike, v, g, beta)]


def check_rule(device, bar):
    reference = modeling.torch_chunk_gated_delta_rule
    for alike in (0.0, 0.9, 1.0):
        results = []
        for rule in (reference, delta_rule.training_rule):
            inputs = rule_inputs(device, alike=alike)
            out, _ = rule(*inputs, use_qk_l2norm_in_kernel=True)
            weight = torch.sin(torch.arange(out.numel(), device=device)).view_as(out)
            results.append([out] + list(torch.autograd.grad((out * weight).sum(), inputs)))
        errors = [relative(got, want) for want, got in zip(*results)]
        print(f"keys alike {alike}: out, dq, dk, dv, dg, dbeta", " ".join(f"{e:.1e}" for e in errors))
        assert max(errors) < bar, errors


def check_model(device, bar):
    config = our_model.config(vocabulary=97, hidden=64, heads=2, kv_heads=1, linear_heads=(1, 2), head=32, ffn=96)
    torch.manual_seed(3)
    model = our_model.create(config).to(device)
    ids = torch.randint(0, 97, (2, 129), device=device)
    saved = modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn
    results = []
    for ours in (False, True):
        if ours:
            delta_rule.install(modeling)
            hidden = our_model.hidden_states(model, ids[:, :-1], our_model.block)
            logits = model.lm_head(hidden)
        else:
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append([logits] + list(grads))
    modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn = saved
    names = ["logits"] + [name for name, _ in model.named_parameters()]
    errors = {name: relative(got, want) for name, want, got in zip(names, *results)}
    worst = max(errors, key=errors.get)
    print(f"model: logits {errors['logits']:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
    assert errors[worst] < bar, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bar", type=float, default=1e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    check_rule(args.device, args.bar)
    check_model(args.device, args.bar)
    print("the training rule agrees with transformers")


if __name__ == "__main__":
    main()
