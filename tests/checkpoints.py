"""Small random checkpoints, written by transformers, so that our loader and model meet its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.model import Qwen3_5ForCausalLM


def hf_config(*, moe: bool = False, **changes: Any) -> dict[str, Any]:
    """A genuine small config; head_k_dim and head_v_dim differ unless `changes` say otherwise."""
    kind = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    feed_forward = (
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        }
        if moe
        else {"intermediate_size": 48}
    )
    config = {
        "model_type": kind,
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        # Wider than the 0.02 of training, so that every layer matters; much wider ones amplify
        # rounding until two float32 programs disagree.
        "initializer_range": 0.1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": None,
        "dtype": "float32",
        **feed_forward,
    }
    return {**config, **changes}


def hf_model(raw: dict[str, Any], seed: int = 0) -> Any:
    """A random transformers model of `raw`, float32, eager attention."""
    import transformers

    torch.manual_seed(seed)
    moe = raw["model_type"] == "qwen3_5_moe_text"
    config_class = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    model_class = transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM
    settings = {k: v for k, v in raw.items() if k not in ("model_type", "architectures")}
    model = model_class._from_config(
        config_class(**settings), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # zero by default: every expert would tie
                parameter.normal_(0, 0.5)
            elif name.endswith("norm.weight"):  # away from the identity
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def write_checkpoint(directory: Path, raw: dict[str, Any], seed: int = 0) -> Any:
    """Writes `raw` and random weights, MTP included; returns transformers' model."""
    model = hf_model(raw, seed)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(raw))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.update(random_mtp_weights(ModelConfig.from_dict(raw), seed))
    save_file(tensors, path, metadata={"format": "pt"})
    return model


def random_mtp_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights for the `mtp.*` names of `config`, which transformers has no module for."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Qwen3_5ForCausalLM(config).named_parameters()}
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
        if name.startswith("mtp.")
    }
