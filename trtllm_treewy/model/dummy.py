"""A model of any size with random weights, made where it runs: for measurements."""

from __future__ import annotations

import torch

from ..config import ModelConfig
from .qwen3_5 import Qwen3_5ForCausalLM

# Parameters that the gates of the recurrence need unrounded.
FLOAT32_NAMES = ("A_log", "dt_bias")


def dummy_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Qwen3_5ForCausalLM:
    """The model of `config` with random weights, in eval mode and without gradients.

    Matrices are normal with deviation fan_in^-1/2, so that activations keep their size through any
    number of layers; norms are neutral, and decays lie where trained ones do.

    Args:
        config: the model's.
        dtype: of the weights; `A_log` and `dt_bias` are float32.
        device: where they are made; nothing is copied there.
        seed: of the weights; they differ between kinds of devices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        kind = torch.float32 if name.endswith(FLOAT32_NAMES) else dtype
        made = torch.empty(parameter.shape, dtype=kind, device=device)
        if name.endswith("A_log"):
            made.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            made.uniform_(-6.0, 0.0, generator=generator)
        elif parameter.dim() < 2:
            made.fill_(float("linear_attn.norm" in name))
        else:
            made.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        tensors[name] = made
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
