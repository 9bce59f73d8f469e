"""Fixtures of the torch tests: small random models of every family."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Dict, Iterator

import pytest
import torch

torch.set_num_threads(1)

# On a machine without a GPU, transformers calls FLA's Triton kernels where FLA is installed, and fails. The unpatched models of these
# tests are to use transformers' own torch code, so FLA is hidden while the modules that look for it are imported.
_hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
sys.modules["fla"] = None  # type: ignore[assignment]
for _family in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"):
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
del sys.modules["fla"]
sys.modules.update(_hidden)

import transformers  # noqa: E402

_QWEN: Dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS: Dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_KIMI: Dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_QWEN, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_QWEN, **_EXPERTS}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI),
}


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose weights are large enough for logits to differ."""
    config_name, model_name, options = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**{**options, **changes})).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.25 if parameter.ndim < 3 else 0.15)
    return model


@pytest.fixture(params=list(FAMILIES))
def family(request: Any) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> Iterator[Any]:
    yield build(family)
