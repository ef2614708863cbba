"""Opens an engine's directory: refuses what does not fit, then makes the executor over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from trtllm_treewy.binding_names import bindings
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.cuda_library import MAX_NODES
from trtllm_treewy.engine_config import (
    ONNX,
    TENSORRT,
    EngineConfig,
    EngineMismatchError,
    gpu_identity,
)
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.plugin_contract import VERSION
from trtllm_treewy.tensorrt_package import import_tensorrt, load_plugins, name_of

from .buckets import Buckets
from .cuda_streams import CudaStreams, Streams
from .executor import ExecutorLimits, ExecutorSource
from .executor_network import (
    DrafterCapacity,
    Network,
    NetworkExecutor,
    PoolTypes,
    needed_networks,
)
from .step_buffers import (
    STASH,
    StepBuffers,
    bytes_needed,
    largest_steps,
    max_rows,
    widest_level,
)

# Set aside for execution contexts and captured graphs; an estimate.
GRAPH_BYTES = 256 << 20


def check_engine(
    engine: EngineConfig,
    directory: Path,
    device: torch.device,
    *,
    dtype: str | torch.dtype = "auto",
    state_dtype: str = "auto",
) -> None:
    """Raises EngineMismatchError where this engine cannot run here, or not as asked.

    Args:
        engine: what the directory says of itself.
        directory: the engine's; its files' lengths are checked.
        device: where it should run.
        dtype, state_dtype: what the user asked for; "auto" is what was built.
    """
    if engine.plugin_version != VERSION:
        raise EngineMismatchError(
            f"{directory} was built for version {engine.plugin_version} of the plugins, this is "
            f"version {VERSION}: build it again"
        )
    if engine.kind == TENSORRT:
        _check_gpu(engine, directory, device)
    elif device.type != "cpu":
        raise EngineMismatchError(
            f"{directory} is an engine for ONNX Runtime on the CPU, and the device is {device}: "
            "set device to cpu"
        )
    asked = str(dtype).removeprefix("torch.")
    for name, wanted, built in (
        ("dtype", asked, engine.activation_dtype),
        ("the state's type", state_dtype, engine.state_dtype),
    ):
        if wanted not in ("auto", built):
            raise EngineMismatchError(f"{directory}: {name} is {built} as built, got {wanted}")
    if engine.kind == ONNX and "bfloat16" in (engine.activation_dtype, engine.state_dtype):
        raise EngineMismatchError(
            f"{directory}: ONNX Runtime's CPU provider has no bfloat16; build it with float32"
        )
    if engine.kind == ONNX and find_spec("onnxruntime") is None:
        raise EngineMismatchError(
            f"{directory} is an engine for ONNX Runtime, and the package onnxruntime is not "
            "installed: pip install onnxruntime"
        )
    engine.check_files(directory, contents=False)


def _check_gpu(engine: EngineConfig, directory: Path, device: torch.device) -> None:
    """TensorRT's plans are for one GPU and one version of TensorRT."""
    here = gpu_identity(device)
    if here != engine.gpu:
        what = f"the device is {device}" if here is None else f"this is {here}"
        raise EngineMismatchError(
            f"{directory} is an engine for the GPU {engine.gpu}, and {what}: build it on the GPU "
            "that will run it"
        )
    try:
        trt = import_tensorrt()
    except ImportError:
        raise EngineMismatchError(
            f"{directory} was built with {engine.builder}, and the package tensorrt is not "
            "installed: pip install that version"
        ) from None
    if name_of(trt) != engine.builder:
        raise EngineMismatchError(
            f"{directory} was built with {engine.builder}, this is {name_of(trt)}: install that "
            "version, or build it again"
        )
    if not engine.plugins:
        raise EngineMismatchError(
            f"{directory} was built without the plugins, which alone update states in place: build "
            "it with --plugins"
        )


def check_limits(engine: EngineConfig, limits: ExecutorLimits) -> None:
    """Raises EngineMismatchError for limits beyond those that the engine was built with."""
    for name, wanted, built in (
        ("max_batch_size", limits.max_batch_size, engine.max_batch_size),
        ("max_seq_len", limits.max_seq_len, engine.max_seq_len),
        ("max_nodes", limits.max_nodes, engine.max_nodes),
    ):
        if wanted > built:
            raise EngineMismatchError(
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
    *,
    graphs: bool = True,
) -> ExecutorSource:
    """What makes the executor of an engine, once its limits are known (see `open_engine`).

    Raises:
        EngineMismatchError: the engine does not do what the settings ask for; checked here, before
            anything is allocated.
    """
    check_engine(engine, directory, device, dtype=dtype, state_dtype=cache.state_dtype)
    if speculation.state_commit != "reconstruct":
        raise EngineMismatchError(
            f"an engine commits by reconstruct, got state_commit={speculation.state_commit!r}"
        )
    if cache.dtype not in ("auto", engine.kv_dtype):
        raise EngineMismatchError(
            f"{directory}: the KV cache's dtype is {engine.kv_dtype} as built, got {cache.dtype}"
        )
    if speculation.kind == "dynamic" and speculation.top_k > MAX_NODES:
        raise EngineMismatchError(
            f"an engine drafts at most {MAX_NODES} nodes at once, got dynamic_tree_max_topK="
            f"{speculation.top_k}"
        )
    config = ModelConfig.from_pretrained(directory)
    return ExecutorSource(
        make=lambda limits: open_engine(directory, limits, device, graphs=graphs),
        weights=lambda limits: _weight_bytes(engine, config, limits),
        steps=lambda limits: _step_bytes(engine, config, limits),
        max_batch_size=engine.max_batch_size,
    )


def _weight_bytes(engine: EngineConfig, config: ModelConfig, limits: ExecutorLimits) -> int:
    """Of all networks: each TensorRT engine has its own copy, ONNX files share theirs."""
    if engine.kind == ONNX:
        return sum(file.bytes for name, file in engine.files.items() if name.endswith(".bin"))
    return sum(engine.files[f"{name}.engine"].bytes for name in needed_networks(config, limits))


def _step_bytes(engine: EngineConfig, config: ModelConfig, limits: ExecutorLimits) -> int:
    """Scratch, buffers and graphs of TensorRT engines; the stash is counted elsewhere."""
    if engine.kind == ONNX:
        return 0
    parts = needed_networks(config, limits)
    needed = bytes_needed(config, parts, binding_types(engine), limits, engine.max_num_tokens)
    buffers = sum(size for name, size in needed.items() if name not in STASH)
    return max(engine.scratch.get(name, 0) for name in parts) + buffers + GRAPH_BYTES


def open_engine(
    directory: str | Path,
    limits: ExecutorLimits,
    device: torch.device,
    *,
    threads: int = 0,
    graphs: bool = True,
) -> NetworkExecutor:
    """The executor over the networks of an engine's directory.

    Args:
        directory: of an engine.
        limits: sizes of the pools, within the engine's.
        device: the CPU for an `onnx` engine, the GPU that a `tensorrt` engine was built on.
        threads: of ONNX Runtime; 0 leaves it to ONNX Runtime.
        graphs: whether a `tensorrt` engine's steps become CUDA graphs.

    Raises:
        ValueError: it is no engine, or does not fit (`check_engine`, `check_limits`).
    """
    directory = Path(directory)
    engine = EngineConfig.read(directory)
    if engine is None:
        raise ValueError(f"{directory} is not an engine: build one with trtllm-treewy build")
    check_engine(engine, directory, device)
    check_limits(engine, limits)
    config = ModelConfig.from_pretrained(directory)
    capacity = None
    if engine.kind == ONNX:
        parts = _onnx_parts(directory, config, limits, threads)
    else:
        parts = _tensorrt_parts(directory, engine, config, limits, device, graphs)
        nodes = max(limits.max_batch_size * limits.max_nodes, widest_level(limits))
        capacity = DrafterCapacity(entries=engine.max_num_tokens, nodes=nodes)
    types = PoolTypes(
        activation=getattr(torch, engine.activation_dtype),
        state=getattr(torch, engine.state_dtype),
        kv=getattr(torch, engine.kv_dtype),
    )
    return NetworkExecutor(config, limits, parts, types=types, device=device, capacity=capacity)


def binding_types(engine: EngineConfig) -> dict[str, torch.dtype]:
    """torch's type of each `Binding.kind`."""
    return {
        "activation": getattr(torch, engine.activation_dtype),
        "state": getattr(torch, engine.state_dtype),
        "stash": getattr(torch, engine.stash_dtype),
        "kv": getattr(torch, engine.kv_dtype),
        "float32": torch.float32,
        "int32": torch.int32,
        "bool": torch.bool,
    }


def _onnx_parts(
    directory: Path, config: ModelConfig, limits: ExecutorLimits, threads: int
) -> Mapping[str, Network]:
    from .network_onnx import OnnxNetwork

    return {
        name: OnnxNetwork(directory / f"{name}.onnx", bindings(name, config), threads)
        for name in needed_networks(config, limits)
    }


def make_streams(device: torch.device) -> Streams:
    """Where TensorRT engines run."""
    return CudaStreams(device)


def _tensorrt_parts(
    directory: Path,
    engine: EngineConfig,
    config: ModelConfig,
    limits: ExecutorLimits,
    device: torch.device,
    graphs: bool,
) -> Mapping[str, Network]:
    from .network_tensorrt import StepShapes, TensorRTEngines, TensorRTNetwork

    trt = import_tensorrt()
    load_plugins(trt)
    types, parts = binding_types(engine), needed_networks(config, limits)
    tokens = engine.max_num_tokens
    streams = make_streams(device)
    with streams.scope():
        shared = TensorRTEngines(trt, streams, device)
        engines = {name: shared.load(directory / f"{name}.engine") for name in parts}
        shared.reserve_scratch(engines)
        buffers = StepBuffers(device, bytes_needed(config, parts, types, limits, tokens))
    shapes = StepShapes(Buckets(limits.max_batch_size, limits.max_nodes), max_rows(limits))
    return {
        name: TensorRTNetwork(
            name,
            engines[name],
            bindings(name, config),
            types,
            shared,
            buffers,
            replace(shapes, largest=largest_steps(name, limits, tokens)),
            captures=graphs,
        )
        for name in parts
    }
