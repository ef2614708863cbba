"""Opens an engine's directory: refuses what does not fit, then makes the executor over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trtllm_treewy.binding_names import bindings
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.cuda_library import MAX_NODES
from trtllm_treewy.engine_config import (
    ONNX,
    TENSORRT,
    EngineConfig,
    EngineMismatchError,
    devices_text,
    gpu_identity,
    rank_folder,
)
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.plugin_contract import VERSION
from trtllm_treewy.rank_config import bound_config
from trtllm_treewy.tensorrt_package import (
    COLLECTIVES_SINCE,
    import_tensorrt,
    load_plugins,
    name_of,
)

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
from .process_group import ProcessGroup
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
    # The graph of one of several ranks has to be cut at its collectives.
    packages = ("onnxruntime",) if engine.tensor_parallel_size == 1 else ("onnxruntime", "onnx")
    missing = [name for name in packages if find_spec(name) is None]
    if engine.kind == ONNX and missing:
        raise EngineMismatchError(
            f"{directory} is an engine for ONNX Runtime, and the package {missing[0]} is not "
            f"installed: pip install {missing[0]}"
        )
    for rank in range(engine.tensor_parallel_size):
        if not engine.rank_files(rank):
            raise EngineMismatchError(
                f"{directory} is an engine of {engine.tensor_parallel_size} ranks, and has no "
                f"networks of rank {rank}: build it again"
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
    if engine.tensor_parallel_size > 1 and not hasattr(trt.IExecutionContext, "set_communicator"):
        raise EngineMismatchError(
            f"{directory} is an engine of {engine.tensor_parallel_size} ranks, and {name_of(trt)} "
            f"takes no communicator: that needs {COLLECTIVES_SINCE}"
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
    config = _bound(directory, engine)
    return ExecutorSource(
        make=lambda limits: open_engine(directory, limits, device, graphs=graphs),
        weights=lambda limits: _weight_bytes(engine, config, limits),
        steps=lambda limits: _step_bytes(engine, config, limits),
        max_batch_size=engine.max_batch_size,
    )


def _weight_bytes(engine: EngineConfig, config: ModelConfig, limits: ExecutorLimits) -> int:
    """Of all networks of a rank: each TensorRT engine has its own copy, ONNX files share theirs.

    Ranks are alike: rank 0's are those of each.
    """
    files = engine.rank_files(0)
    if engine.kind == ONNX:
        return sum(file.bytes for name, file in files.items() if name.endswith(".bin"))
    return sum(files[f"{name}.engine"].bytes for name in needed_networks(config, limits))


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
    group: ProcessGroup | None = None,
) -> NetworkExecutor:
    """The executor over the networks of an engine's directory, or over those of one rank.

    Args:
        directory: of an engine.
        limits: sizes of the pools, within the engine's.
        device: the CPU for an `onnx` engine, the GPU that a `tensorrt` engine was built on.
        threads: of ONNX Runtime; 0 leaves it to ONNX Runtime.
        graphs: whether a `tensorrt` engine's steps become CUDA graphs.
        group: of the ranks that an engine of several is for; tells which of them this is.

    Raises:
        ValueError: it is no engine, or does not fit (`check_engine`, `check_limits`).
    """
    directory = Path(directory)
    engine = EngineConfig.read(directory)
    if engine is None:
        raise ValueError(f"{directory} is not an engine: build one with trtllm-treewy build")
    check_engine(engine, directory, device)
    check_limits(engine, limits)
    ranks = 1 if group is None else group.ranks
    check_ranks(engine, directory, ranks)
    config, capacity = _bound(directory, engine), None
    place = directory / rank_folder(0 if group is None else group.rank, ranks)
    if engine.kind == ONNX:
        parts = _onnx_parts(place, config, limits, threads, group)
    else:
        parts = _tensorrt_parts(place, engine, config, limits, device, graphs, group)
        nodes = max(limits.max_batch_size * limits.max_nodes, widest_level(limits))
        capacity = DrafterCapacity(entries=engine.max_num_tokens, nodes=nodes)
    types = PoolTypes(
        activation=getattr(torch, engine.activation_dtype),
        state=getattr(torch, engine.state_dtype),
        kv=getattr(torch, engine.kv_dtype),
    )
    return NetworkExecutor(config, limits, parts, types=types, device=device, capacity=capacity)


def check_ranks(engine: EngineConfig, directory: Path, ranks: int) -> None:
    """Raises EngineMismatchError where an engine is for another number of ranks."""
    built = engine.tensor_parallel_size
    if built != ranks:
        raise EngineMismatchError(
            f"tensor_parallel_size is {ranks}, expected {built}: {directory} is an engine for "
            f"{devices_text(built)}; leave it out, or build with --tensor-parallel-size {ranks}"
        )


@dataclass(frozen=True)
class EngineRank:
    """Opens the networks of one rank: a `rank_worker.Make`.

    Attributes:
        directory: the engine's.
        graphs: see `open_engine`.
    """

    directory: Path
    graphs: bool

    def __call__(
        self, group: ProcessGroup, limits: ExecutorLimits, options: dict[str, Any]
    ) -> NetworkExecutor:
        """The rank's executor; the engine decides what `options` would."""
        return open_engine(
            self.directory, limits, group.device, threads=torch.get_num_threads(),
            graphs=self.graphs, group=group,
        )  # fmt: skip


def _bound(directory: Path, engine: EngineConfig) -> ModelConfig:
    """What the networks are bound with: of several ranks, one's share of the heads."""
    config = ModelConfig.from_pretrained(directory)
    return bound_config(config, engine.tensor_parallel_size)


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
    directory: Path,
    config: ModelConfig,
    limits: ExecutorLimits,
    threads: int,
    group: ProcessGroup | None,
) -> Mapping[str, Network]:
    from .network_onnx import OnnxNetwork

    network: Any = OnnxNetwork
    if group is not None:
        from .network_onnx_ranks import OnnxRankNetwork

        network = partial(OnnxRankNetwork, group=group)
    return {
        name: network(directory / f"{name}.onnx", bindings(name, config), threads=threads)
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
    group: ProcessGroup | None,
) -> Mapping[str, Network]:
    from .network_tensorrt import StepShapes, TensorRTEngines, TensorRTNetwork

    trt = import_tensorrt()
    load_plugins(trt)
    types, parts = binding_types(engine), needed_networks(config, limits)
    tokens = engine.max_num_tokens
    streams = make_streams(device)
    with streams.scope():
        communicator = None if group is None else group.communicator
        shared = TensorRTEngines(trt, streams, device, communicator)
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
