"""Writes tiny random checkpoints of the three families with transformers' float32 logits and hidden states (see README.md)."""
import json
import sys
from pathlib import Path

import torch

sys.modules["fla"] = None  # the plain torch path, before transformers looks for another
sys.modules["causal_conv1d"] = None
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig,
                          Qwen3NextConfig, Qwen3NextForCausalLM)

HERE = Path(__file__).parent
LENGTHS = (1, 5, 67, 130)  # the prompts; together they are one packed, ragged batch
SOURCE = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, one sequence at a time"

# What all three share: heads that are not square, ratios of 3, head_dim that is not hidden / heads, a quarter of it rotary.
SHARED = dict(vocab_size=101, num_attention_heads=6, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
              linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
              max_position_embeddings=4096, eos_token_id=3)
EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=12)


# ---------------------------------------------------------------- weights

def randomise(model, seed, dtype):
    """Every weight random, with values that `dtype` holds exactly (A_log and dt_bias: float32). HF's own start leaves norms at 0
    and dt_bias at 1, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda p, std, mean=0.0: torch.randn(p.shape, generator=generator) * std + mean
    uniform = lambda p, low, high: torch.rand(p.shape, generator=generator) * (high - low) + low
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            value = torch.log(uniform(p, 0.3, 6.0))
        elif name.endswith("dt_bias"):
            value = uniform(p, -3.0, 1.0)
        elif name.endswith("linear_attn.norm.weight"):
            value = normal(p, 0.3, 1.0)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            value = normal(p, 0.3, 0.8)  # (1 + w) about 1.8: attention that is not flat
        elif "norm" in name:
            value = normal(p, 0.3)
        elif name.endswith("conv1d.weight"):
            value = normal(p, 0.6)
        elif name.endswith("embed_tokens.weight"):
            value = normal(p, 1.0)
        elif name.endswith(".bias"):
            value = normal(p, 0.3)
        elif name.endswith(("mlp.gate.weight", "in_proj_ba.weight", "in_proj_a.weight", "in_proj_b.weight")):
            value = normal(p, 1.5 / p.shape[-1] ** 0.5)
        else:
            value = normal(p, p.shape[-1] ** -0.5)
        p.data = value if keeps_float32(name) else value.to(dtype).float()


def keeps_float32(name):
    return name.endswith(("A_log", "dt_bias"))


def unit_logits(model, prompts, dtype):
    """Scales the final norm so that logits have a standard deviation of about 1."""
    std = torch.cat([run(model, ids)["logits"] for ids in prompts]).std()
    w = model.model.norm.weight
    w.data = ((1 + w.data) / std - 1).to(dtype).float()


# ---------------------------------------------------------------- truth

def run(model, ids):
    """Logits, the residual stream after the embedding and after every layer, and the final norm, of one sequence from an empty cache."""
    seen = {}
    keep = lambda name: lambda _module, _inputs, out: seen.__setitem__(name, (out[0] if isinstance(out, tuple) else out)[0])
    hooks = [model.model.embed_tokens.register_forward_hook(keep("embedding")), model.model.norm.register_forward_hook(keep("final"))]
    hooks += [layer.register_forward_hook(keep(f"layer.{i}")) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        seen["logits"] = model(input_ids=ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return seen


def check_routers(model, prompts):
    """No token may stand so close between two experts that float32 noise decides."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate") and not hasattr(layer.mlp, "gate_proj"):
            inputs = []
            hook = layer.mlp.register_forward_hook(lambda _m, args, _o: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
            for ids in prompts:
                run(model, ids)
            hook.remove()
            probabilities = torch.softmax(torch.cat(inputs) @ layer.mlp.gate.weight.T, -1).sort(-1, descending=True).values
            k = model.config.num_experts_per_tok
            margin = (probabilities[:, k - 1] - probabilities[:, k]).min().item()
            assert margin > 1e-5, f"a router decides by {margin}: take another seed"


def check_conditioning(directory, prompts, outputs):
    """Float32 rounding alone, as transformers does it, may move logits by a third of what a runner is allowed (2e-4)."""
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    moved = max((run(exact.eval(), ids)["logits"] - o["logits"].double()).abs().max().item() for ids, o in zip(prompts, outputs))
    assert moved < 2e-4 / 3, f"float64 gives logits that differ by {moved}: take another seed"


# ---------------------------------------------------------------- files

def write(name, model, seed, dtype, config, tensors_of, shards=1):
    """Randomises, runs and saves `model`; reads the directory back with transformers and compares."""
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    generator = torch.Generator().manual_seed(seed + 1)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    model.eval()
    randomise(model, seed, dtype)
    model.tie_weights()
    unit_logits(model, prompts, dtype)
    check_routers(model, prompts)
    outputs = [run(model, ids) for ids in prompts]

    expected = {key: torch.cat([o[key] for o in outputs]).contiguous() for key in outputs[0]}
    expected["tokens"] = torch.cat(prompts).to(torch.int32)
    expected["cu_seqlens"] = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    save_file(expected, directory / "expected.safetensors", metadata={"source": SOURCE})

    state = {k: v for k, v in model.state_dict().items() if not (model.config.tie_word_embeddings and k == "lm_head.weight")}
    tensors = {k: v.clone() if keeps_float32(k) else v.to(dtype) for k, v in tensors_of(state).items()}
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for s in range(shards):
            file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
            part = names[s * len(names) // shards:(s + 1) * len(names) // shards]
            save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    worst = max((run(again, ids)["logits"] - o["logits"]).abs().max().item() for ids, o in zip(prompts, outputs))
    assert worst == 0, f"{name}: transformers reads other logits from the directory, by {worst}"
    check_conditioning(directory, prompts, outputs)
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {size} bytes, logit std {expected['logits'].std():.3f}")


def write_without_renormalisation(name):
    """Logits of a written checkpoint when the weights of the chosen experts stay as the softmax over all experts gave them."""
    directory = HERE / name
    expected = load_file(directory / "expected.safetensors")
    bounds = expected["cu_seqlens"].tolist()
    prompts = [expected["tokens"][a:b].long() for a, b in zip(bounds, bounds[1:])]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", norm_topk_prob=False).eval()
    assert torch.equal(torch.cat([run(model, ids)["embedding"] for ids in prompts]), expected["embedding"])
    logits = torch.cat([run(model, ids)["logits"] for ids in prompts]).contiguous()
    moved = (logits - expected["logits"]).abs().max().item()
    assert moved > 0.1, f"{name}: renormalising moves logits by {moved} only"
    save_file({"logits": logits}, directory / "expected-not-renormalised.safetensors", metadata={"source": SOURCE})


def one_tensor_per_expert(state):
    """Experts as in the published Qwen3-Next checkpoints."""
    out = {}
    for name, t in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(zip(*t.chunk(2, dim=1))):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate.contiguous()
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(t):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = down.contiguous()
        else:
            out[name] = t
    return out


def published_prefix(state):
    return {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t for name, t in state.items()}


def qwen3_next():
    """float32, one file, a tensor per expert, one dense layer; config flat with the older rope fields and an interval."""
    sizes = SHARED | EXPERTS | dict(hidden_size=40, num_hidden_layers=4, intermediate_size=28, mlp_only_layers=[1], norm_topk_prob=True)
    rope = dict(rope_theta=10000.0, partial_rotary_factor=0.25)
    model = Qwen3NextForCausalLM._from_config(Qwen3NextConfig(**sizes, **rope), attn_implementation="eager")
    config = dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", full_attention_interval=4, decoder_sparse_step=1,
                  rope_scaling=None, hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, tie_word_embeddings=False, **sizes, **rope)
    write("qwen3_next", model, 15, torch.float32, config, one_tensor_per_expert)


def qwen3_5():
    """bfloat16, two shards, tied embeddings, biases; config nested as in the published checkpoints, layer_types given."""
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    sizes = SHARED | dict(hidden_size=40, num_hidden_layers=4, intermediate_size=52, layer_types=layers, attention_bias=True,
                          rms_norm_eps=1e-5)
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
    model = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True),
                                            attn_implementation="eager")
    text = dict(model_type="qwen3_5_text", attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1, hidden_act="silu",
                rope_parameters=rope, dtype="bfloat16", tie_word_embeddings=True, **sizes)
    config = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=text, image_token_id=90,
                  tie_word_embeddings=True)
    write("qwen3_5", model, 22, torch.bfloat16, config, published_prefix, shards=2)


def qwen3_5_moe():
    """float16, eight layers, fused experts, a convolution of two taps; config flat, neither layer_types nor an interval."""
    sizes = SHARED | EXPERTS | dict(hidden_size=32, num_hidden_layers=8, linear_conv_kernel_dim=2)
    rope = dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5, mrope_section=[3, 3, 2], mrope_interleaved=True)
    model = Qwen3_5MoeForCausalLM._from_config(Qwen3_5MoeTextConfig(**sizes, rope_parameters=rope), attn_implementation="eager")
    config = dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", rope_parameters=rope, dtype="float16",
                  hidden_act="silu", **sizes)
    write("qwen3_5_moe", model, 57, torch.float16, config, dict)


if __name__ == "__main__":
    torch.set_num_threads(1)
    qwen3_next()
    write_without_renormalisation("qwen3_next")
    qwen3_5()
    qwen3_5_moe()
