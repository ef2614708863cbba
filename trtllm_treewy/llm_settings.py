"""The plain settings of an `LLM`: what is refused, and what its user is warned of."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .llmapi import CudaGraphConfig, MTPDecodingConfig

DEFAULT_GRAPHS = CudaGraphConfig()

# Settings of TensorRT-LLM's LLM, with the values that mean what this version does anyway.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "backend": (None, "pytorch"),
    "trust_remote_code": (False,),
    "tokenizer_mode": ("auto", "fast"),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "moe_expert_parallel_size": (None, 1),
    "moe_tensor_parallel_size": (None, 1),
    "enable_attention_dp": (False,),
    "disable_overlap_scheduler": (True,),
    "enable_chunked_prefill": (True,),
    "max_beam_width": (None, 1),
    "max_input_len": (None,),
    "quant_config": (None,),
    "lora_config": (None,),
    "enable_lora": (False,),
}


def refuse_others(settings: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ValueError for the first setting that asks for something this version has not.

    Args:
        settings: those that are no settings of ours.
        known: the names of ours.
    """
    for name, value in settings.items():
        if name not in _OTHERS:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"LLM has no setting {name!r}; {hint}")
        if not any(value is other or value == other for other in _OTHERS[name]):
            accepted = " or ".join(repr(other) for other in _OTHERS[name])
            raise ValueError(f"{name}={value!r} is not supported in this version, only {accepted}")


def check_load_format(load_format: Any) -> None:
    """Raises ValueError unless weights can be had in that way."""
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")


def warn_of_law(speculation: MTPDecodingConfig) -> None:
    """Warns whoever measures with drafts that are accepted at random."""
    if speculation.simulated_acceptance is not None:
        warnings.warn(
            f"acceptance is drawn from the law {speculation.simulated_acceptance} and not from "
            "the model (simulated_acceptance): the texts mean nothing",
            stacklevel=3,
        )


def check_batch_wait(iters: Any, ratio: Any) -> None:
    """Raises ValueError unless requests can wait for so long."""
    if isinstance(iters, bool) or not isinstance(iters, int) or iters < 0:
        raise ValueError(f"batch_wait_timeout_iters must be an integer >= 0, got {iters!r}")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"batch_wait_max_tokens_ratio must be from 0 to 1, got {ratio!r}")


def warn_of_graphs(graphs: CudaGraphConfig | None, device: torch.device) -> None:
    """Warns whoever asked for graphs where the settings of them have no effect."""
    if graphs is not None and graphs is not DEFAULT_GRAPHS and device.type == "cuda":
        warnings.warn(
            "cuda_graph_config has no effect here: TensorRT engines choose the steps that are "
            "captured, and those of a model over several GPUs are not",
            stacklevel=3,
        )
