"""A checkpoint's directory to an engine's directory, all or nothing.

The engine is made in a hidden directory beside its place and moved there when it is whole, so a
failed or interrupted build leaves nothing, and an engine that is replaced stays until the end.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_treewy.binding_names import networks
from trtllm_treewy.config import ModelConfig, read_json
from trtllm_treewy.engine_config import (
    ATTENTIONS,
    CONFIG_NAME,
    KEY,
    ONNX,
    STANDARD,
    TENSORRT,
    EngineConfig,
    EngineFile,
    digest,
    digest_of,
    rank_folder,
)
from trtllm_treewy.new_directory import new_directory
from trtllm_treewy.plugin_contract import VERSION
from trtllm_treewy.rank_config import bound_config, shard_config
from trtllm_treewy.tensorrt_package import COLLECTIVES_SINCE

from .checkpoint import find_sources, resolve_dtype
from .onnx_export import export_onnx, parameter_shapes
from .profiles import BuildLimits, make_profile
from .tensorrt_builder import NetworkBuilder

TIMING_CACHE = "timing.cache"
# Of a checkpoint, what text needs.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    Attributes:
        dtype: of weights and activations; "auto" is the checkpoint's.
        state_dtype, stash_dtype: "float32" or "bfloat16".
        attention: "standard" operators, or "onnx", the Attention operator of opset 23.
        limits: the largest sizes.
        tensor_parallel_size: ranks that the model is divided over, a GPU each.

    Raises:
        ValueError: for another attention, or no number of ranks.
    """

    dtype: str = "auto"
    state_dtype: str = "float32"
    stash_dtype: str = "float32"
    attention: str = STANDARD
    limits: BuildLimits = field(default_factory=BuildLimits)
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            expected = ", ".join(ATTENTIONS)
            raise ValueError(f"attention must be one of {expected}, got {self.attention!r}")
        ranks = self.tensor_parallel_size
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"tensor_parallel_size must be an integer >= 1, got {ranks!r}")


@dataclass(frozen=True)
class BuildPlan:
    """What a build would make, from the headers of the checkpoint alone.

    Attributes:
        checkpoint, output: directories.
        kind: `onnx` or `tensorrt`.
        dtype: resolved.
        part: the config of one rank's share: the model's own for one rank.
        tensor_parallel_size: ranks. The bytes that follow are of each.
        weight_bytes: the weights, in the types of the engine, once.
        state_bytes, kv_bytes: pools of all slots and of all tokens, at run time.
        expert_bytes: scratch for the weights of the experts of a prompt's tokens.
        disk_bytes: at the peak of the build, of all ranks.
        seconds: what the stages took when the engine that is there was built.
        up_to_date: that engine is what this build would make.
    """

    checkpoint: Path
    output: Path
    kind: str
    dtype: str
    part: ModelConfig
    tensor_parallel_size: int
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    expert_bytes: int
    disk_bytes: int
    seconds: dict[str, float]
    up_to_date: bool


def build_engine_directory(
    checkpoint: str | Path,
    output: str | Path,
    options: BuildOptions,
    builder: NetworkBuilder | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Builds an engine unless the one that is there is what would be built.

    Args:
        checkpoint: a Hugging Face directory.
        output: the engine's directory: new, empty, or an engine, which is replaced.
        options: what to build.
        builder: builds the networks; without it the ONNX files themselves are the engine, for
            ONNX Runtime.
        force: build in any case.
        progress: called as `progress(stage, done, total)`.

    Returns:
        Whether anything was built.

    Raises:
        FileNotFoundError, ValueError: the checkpoint cannot be exported or divided, TensorRT
            refuses it or has no collectives, or `output` holds something that is not an engine.
        OSError: the disk is too small, or cannot be written.
    """
    plan = plan_build(checkpoint, output, options, builder)
    if plan.up_to_date and not force:
        return False
    _check_space(plan)
    with new_directory(plan.output, keep=plan.checkpoint) as folder:
        config = _build(plan, options, builder, folder, progress)
        _write_config(plan.checkpoint, folder, config)
    return True


def plan_build(
    checkpoint: str | Path,
    output: str | Path,
    options: BuildOptions,
    builder: NetworkBuilder | None = None,
) -> BuildPlan:
    """The plan of a build; nothing is written. Raises as `build_engine_directory`."""
    checkpoint, output = Path(checkpoint), Path(output)
    config = ModelConfig.from_pretrained(checkpoint)
    if EngineConfig.read(checkpoint) is not None:
        raise ValueError(f"{checkpoint} is an engine already, expected a checkpoint")
    limits = options.limits
    if limits.max_seq_len > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_len is {limits.max_seq_len}, expected at most the model's "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
    ranks = options.tensor_parallel_size
    if ranks > 1 and builder is not None and not builder.collectives:
        raise ValueError(
            f"tensor_parallel_size is {ranks}, and {builder.version} has no collectives: engines "
            f"of several ranks need {COLLECTIVES_SINCE}"
        )
    dtype = resolve_dtype(options.dtype, config)
    find_sources(checkpoint, parameter_shapes(config))
    there = _engine_at(output)
    config = shard_config(config, ranks)
    weights = sum(shape.numel() for shape in parameter_shapes(config).values()) * dtype.itemsize
    state = _itemsize(options.state_dtype)
    heads = config.linear_num_value_heads * config.linear_value_head_dim
    window = (config.linear_conv_kernel_dim - 1) * config.conv_dim * dtype.itemsize
    per_slot = heads * config.linear_key_head_dim * state + window
    tokens = limits.max_batch_size * limits.max_seq_len
    expert = 3 * config.moe_intermediate_size * config.hidden_size * dtype.itemsize
    layers = len(config.attention_layers) + config.mtp_num_hidden_layers
    kv_token = 2 * layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    # The networks of a rank leave when its engines are there.
    copies = ranks if builder is None else 1 + ranks * len(networks(config))
    return BuildPlan(
        checkpoint=checkpoint,
        output=output,
        kind=ONNX if builder is None else TENSORRT,
        dtype=str(dtype).removeprefix("torch."),
        part=config,
        tensor_parallel_size=ranks,
        weight_bytes=weights,
        state_bytes=per_slot * len(config.linear_layers) * limits.max_batch_size,
        kv_bytes=kv_token * tokens,
        expert_bytes=limits.max_num_tokens * config.num_experts_per_tok * expert,
        disk_bytes=weights * copies + (64 << 20),
        seconds=dict(there.seconds) if there else {},
        up_to_date=there is not None and _is_current(there, output, checkpoint, options, builder),
    )


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"expected float32 or bfloat16, got {name!r}")
    return int(dtype.itemsize)


def _engine_at(output: Path) -> EngineConfig | None:
    """The engine in `output`; ValueError where something else is there, which is never removed."""
    if not output.exists():
        return None
    if not output.is_dir():
        raise ValueError(f"{output} is a file, expected a directory for the engine")
    if not any(output.iterdir()):
        return None
    try:
        raw = read_json(output / CONFIG_NAME) if (output / CONFIG_NAME).is_file() else {}
    except ValueError:
        raw = {}
    if KEY not in raw:
        raise ValueError(f"{output} is not empty and holds no engine: choose another directory")
    try:
        return EngineConfig.read(output)
    except ValueError:
        return None  # of another version of this package: to be replaced


def _is_current(
    there: EngineConfig,
    output: Path,
    checkpoint: Path,
    options: BuildOptions,
    builder: NetworkBuilder | None,
) -> bool:
    if there.inputs != _inputs(checkpoint, options, builder):
        return False
    try:
        there.check_files(output, contents=False)
    except ValueError:
        return False
    return True


def _inputs(checkpoint: Path, options: BuildOptions, builder: NetworkBuilder | None) -> str:
    """Digest of what a build depends on; files by name, length and time, as they are large."""
    files: dict[str, tuple[int, int | str]] = {}
    for path in sorted(checkpoint.iterdir()):
        if path.suffix == ".safetensors" or path.name in TEXT_FILES:
            status = path.stat()
            files[path.name] = status.st_size, status.st_mtime_ns
        elif path.suffix == ".json":
            files[path.name] = path.stat().st_size, digest(path)
    made_by = [ONNX] if builder is None else [builder.version, builder.gpu, builder.plugins]
    sources = {path.name: digest(path) for path in sorted(Path(__file__).parent.glob("*.py"))}
    return digest_of([files, asdict(options), made_by, VERSION, sources])


def _check_space(plan: BuildPlan) -> None:
    place = plan.output.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < plan.disk_bytes:
        raise OSError(
            f"the build needs {plan.disk_bytes / 2**30:.1f} GiB in {place}, which has "
            f"{free / 2**30:.1f} GiB free"
        )


def _build(
    plan: BuildPlan,
    options: BuildOptions,
    builder: NetworkBuilder | None,
    folder: Path,
    progress: Progress | None,
) -> EngineConfig:
    """Fills the directory, but for its config.json."""
    seconds: dict[str, float] = {}
    scratch: dict[str, int] = {}
    if builder is not None and (plan.output / TIMING_CACHE).is_file():
        shutil.copyfile(plan.output / TIMING_CACHE, folder / TIMING_CACHE)
    for rank in range(plan.tensor_parallel_size):
        _build_rank(plan, options, builder, folder, rank, seconds, scratch, progress)
    for name in TEXT_FILES:
        if (plan.checkpoint / name).is_file():
            shutil.copyfile(plan.checkpoint / name, folder / name)
    files = {
        path.relative_to(folder).as_posix(): EngineFile(path.stat().st_size, digest(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    limits = options.limits
    return EngineConfig(
        kind=plan.kind,
        activation_dtype=plan.dtype,
        state_dtype=options.state_dtype,
        stash_dtype=options.stash_dtype,
        kv_dtype=plan.dtype,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_nodes=limits.max_nodes,
        max_num_tokens=limits.max_num_tokens,
        plugin_version=VERSION,
        plugins=builder is not None and builder.plugins,
        attention=options.attention,
        tensor_parallel_size=plan.tensor_parallel_size,
        builder="onnx" if builder is None else builder.version,
        gpu=None if builder is None else builder.gpu,
        model=digest_of(read_json(plan.checkpoint / CONFIG_NAME)),
        inputs=_inputs(plan.checkpoint, options, builder),
        files=files,
        scratch=scratch,
        seconds=seconds,
    )


def _build_rank(
    plan: BuildPlan,
    options: BuildOptions,
    builder: NetworkBuilder | None,
    folder: Path,
    rank: int,
    seconds: dict[str, float],
    scratch: dict[str, int],
    progress: Progress | None,
) -> None:
    """One rank's networks; adds to `seconds` and `scratch`."""
    ranks = plan.tensor_parallel_size
    place = folder / rank_folder(rank, ranks)
    stage = "export" if ranks == 1 else f"export of rank {rank}"
    started = time.perf_counter()
    onnx_files = export_onnx(
        plan.checkpoint,
        place,
        dtype=plan.dtype,
        state_dtype=getattr(torch, options.state_dtype),
        stash_dtype=getattr(torch, options.stash_dtype),
        attention=options.attention,
        ranks=ranks,
        rank=rank,
        progress=None if progress is None else lambda *at: progress(stage, *at),
    )
    _add_time(seconds, "export", started)
    if builder is None:
        return
    config = bound_config(ModelConfig.from_pretrained(plan.checkpoint), ranks)
    for network in networks(config):
        started = time.perf_counter()
        profile = make_profile(network, config, options.limits)
        source, target = place / f"{network}.onnx", place / f"{network}.engine"
        # The same layers on every rank: what was timed for the first serves the others.
        taken = builder.build(source, target, [profile], folder / TIMING_CACHE, progress)
        scratch[network] = max(taken, scratch.get(network, 0))
        _add_time(seconds, network, started)
    for path in onnx_files:
        path.unlink()


def _add_time(seconds: dict[str, float], stage: str, started: float) -> None:
    seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - started, 2)


def _write_config(checkpoint: Path, folder: Path, config: EngineConfig) -> None:
    """The last file: a directory without it is no engine."""
    raw: dict[str, Any] = read_json(checkpoint / CONFIG_NAME)
    text = json.dumps({**raw, KEY: config.to_dict()}, indent=2)
    with (folder / CONFIG_NAME).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
