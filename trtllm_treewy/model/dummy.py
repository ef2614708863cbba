"""A model of any size with random weights, made where it runs: for measurements."""

from __future__ import annotations

import torch

from ..config import ModelConfig
from .collectives import SINGLE_RANK, Collectives
from .qwen3_5 import Qwen3_5ForCausalLM

# Parameters that the gates of the recurrence need unrounded.
FLOAT32_NAMES = ("A_log", "dt_bias")


def dummy_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    whole: ModelConfig | None = None,
    collectives: Collectives = SINGLE_RANK,
) -> Qwen3_5ForCausalLM:
    """The model of `config` with random weights, in eval mode and without gradients.

    Matrices are normal with deviation fan_in^-1/2, so that activations keep their size through any
    number of layers; norms are neutral, and decays lie where trained ones do.

    Args:
        config: the model's.
        dtype: of the weights; `A_log` and `dt_bias` are float32.
        device: where they are made; nothing is copied there.
        seed: of the weights; they differ between kinds of devices.
        whole: the undivided model's config, where `config` is that of one rank's share: what is not
            divided is then the same on all ranks, and what is differs.
        collectives: that rank's end of the group.
    """
    common = torch.Generator(device).manual_seed(seed)
    own = torch.Generator(device).manual_seed(seed + 1 + collectives.rank)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config, collectives)
        undivided = Qwen3_5ForCausalLM(whole or config).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        kind = torch.float32 if name.endswith(FLOAT32_NAMES) else dtype
        generator = common if parameter.shape == undivided[name].shape else own
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


def dummy_rank(
    whole: ModelConfig,
    part: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives,
) -> Qwen3_5ForCausalLM:
    """`dummy_model` of one rank's share, in the order in which a rank learns of its arguments."""
    return dummy_model(part, dtype=dtype, device=device, whole=whole, collectives=collectives)
