"""Opens an engine's directory: refuses what does not fit, then makes the executor over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import ONNX, EngineConfig
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.plugin_contract import VERSION

from .executor import ExecutorLimits
from .executor_network import Network, NetworkExecutor, PoolTypes


def check_engine(
    engine: EngineConfig,
    directory: Path,
    device: torch.device,
    *,
    dtype: str | torch.dtype = "auto",
    state_dtype: str = "auto",
) -> None:
    """Raises ValueError where this engine cannot run here, or not as asked.

    Args:
        engine: what the directory says of itself.
        directory: the engine's; its files' lengths are checked.
        device: where it should run.
        dtype, state_dtype: what the user asked for; "auto" is what was built.
    """
    if engine.plugin_version != VERSION:
        raise ValueError(
            f"{directory} was built for version {engine.plugin_version} of the plugins, this is "
            f"version {VERSION}: build it again"
        )
    if engine.kind == ONNX and device.type != "cpu":
        raise ValueError(
            f"{directory} is an engine for ONNX Runtime on the CPU, and the device is {device}: "
            "set device to cpu"
        )
    if engine.kind != ONNX:
        raise ValueError(
            f"{directory} is a {engine.kind} engine ({engine.builder}); LLM runs onnx engines in "
            "this version"
        )
    asked = str(dtype).removeprefix("torch.")
    for name, wanted, built in (
        ("dtype", asked, engine.activation_dtype),
        ("the state's type", state_dtype, engine.state_dtype),
    ):
        if wanted not in ("auto", built):
            raise ValueError(f"{directory}: {name} is {built} as built, got {wanted}")
    if engine.activation_dtype == "bfloat16" or engine.state_dtype == "bfloat16":
        raise ValueError(
            f"{directory}: ONNX Runtime's CPU provider has no bfloat16; build it with float32"
        )
    engine.check_files(directory, contents=False)


def check_limits(engine: EngineConfig, limits: ExecutorLimits) -> None:
    """Raises ValueError for limits beyond those that the engine was built with."""
    for name, wanted, built in (
        ("max_batch_size", limits.max_batch_size, engine.max_batch_size),
        ("max_seq_len", limits.max_seq_len, engine.max_seq_len),
        ("max_nodes", limits.max_nodes, engine.max_nodes),
    ):
        if wanted > built:
            raise ValueError(
                f"{name} is {wanted}, and the engine was built for at most {built}: lower it, or "
                f"build with --{name.replace('_', '-')} {wanted}"
            )


def executor_maker(
    directory: Path,
    engine: EngineConfig,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    dtype: str | torch.dtype,
    device: torch.device,
) -> Callable[[ExecutorLimits], NetworkExecutor]:
    """What makes the executor of an engine, once its limits are known (see `open_engine`).

    Raises:
        ValueError: the engine does not do what the settings ask for; checked here, before
            anything is allocated.
    """
    check_engine(engine, directory, device, dtype=dtype, state_dtype=cache.state_dtype)
    if speculation.state_commit != "reconstruct":
        raise ValueError(
            f"an engine commits by reconstruct, got state_commit={speculation.state_commit!r}"
        )
    if cache.dtype not in ("auto", engine.kv_dtype):
        raise ValueError(
            f"{directory}: the KV cache's dtype is {engine.kv_dtype} as built, got {cache.dtype}"
        )
    return lambda limits: open_engine(directory, limits, device)


def open_engine(
    directory: str | Path, limits: ExecutorLimits, device: torch.device, *, threads: int = 0
) -> NetworkExecutor:
    """The executor over the networks of an engine's directory.

    Args:
        directory: of an `onnx` engine.
        limits: sizes of the pools, within the engine's.
        device: the CPU.
        threads: of ONNX Runtime; 0 leaves it to ONNX Runtime.

    Raises:
        ImportError: there is no `onnxruntime`.
        ValueError: it is no engine, or does not fit (`check_engine`, `check_limits`).
    """
    directory = Path(directory)
    engine = EngineConfig.read(directory)
    if engine is None:
        raise ValueError(f"{directory} is not an engine: build one with trtllm-treewy build")
    check_engine(engine, directory, device)
    check_limits(engine, limits)
    from .network_onnx import OnnxNetwork

    config = ModelConfig.from_pretrained(directory)
    parts: dict[str, Network] = {
        name: OnnxNetwork(directory / f"{name}.onnx", bindings(name, config), threads)
        for name in networks(config)
    }
    types = PoolTypes(
        activation=getattr(torch, engine.activation_dtype),
        state=getattr(torch, engine.state_dtype),
        kv=getattr(torch, engine.kv_dtype),
    )
    return NetworkExecutor(config, limits, parts, types=types, device=device)
