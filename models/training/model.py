"""The model: a Qwen3.5 text config of about ten million parameters, its initial weights and its training pass."""

import math

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

CONTEXT = 32768


def config(vocabulary=6144, hidden=256, layers=8, heads=4, kv_heads=2, linear_heads=(2, 4), head=128, ffn=768):
    pairs = head // 8  # a quarter of the head turns: this many angles, shared out over three axes that text sets equal
    third = pairs // 3
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        linear_num_key_heads=linear_heads[0],
        linear_num_value_heads=linear_heads[1],
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        linear_conv_kernel_dim=4,
        intermediate_size=ffn,
        max_position_embeddings=CONTEXT,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * third, third, third],
        },
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,  # a padding id would cut that row of the embedding off from its gradient
    )


@torch.no_grad()
def create(cfg):
    """transformers' model with initial weights that suit short training."""
    model = Qwen3_5ForCausalLM(cfg)
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weight.mul_((2 * cfg.num_hidden_layers) ** -0.5)
        elif name.endswith("conv1d.weight"):
            weight.uniform_(-0.5, 0.5)
        elif name.endswith("A_log"):
            weight.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            # Steps from 0.001 to 0.1, evenly in the logarithm: memories from a few tokens to about a thousand.
            step = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            weight.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def block(layer, x, angles, dropout=0.0):
    """One decoder layer, as transformers' own forward, with dropout on the two branches."""
    h = layer.input_layernorm(x)
    if hasattr(layer, "linear_attn"):
        h = layer.linear_attn(hidden_states=h)
    else:
        h, _ = layer.self_attn(hidden_states=h, position_embeddings=angles, attention_mask=None)
    x = x + F.dropout(h, dropout)
    h = layer.mlp(layer.post_attention_layernorm(x))
    return x + F.dropout(h, dropout)


def hidden_states(model, ids, run_block, dropout=0.0):
    """The final hidden states [B, T, hidden] of ids [B, T]; run_block is `block` or its compiled form."""
    inner = model.model
    x = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
    angles = inner.rotary_emb(x, positions)
    for layer in inner.layers:
        x = run_block(layer, x, angles, dropout)
    return inner.norm(x)


def token_loss(hidden, head, targets):
    """Mean cross entropy in nats."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), targets.flatten())


def export(model, directory, shard="12MB"):
    """Writes a bf16 copy that transformers loads as it is."""
    copy = Qwen3_5ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.95, eos_token_id=0, pad_token_id=0, max_new_tokens=200
    )
    copy.save_pretrained(directory, max_shard_size=shard)
