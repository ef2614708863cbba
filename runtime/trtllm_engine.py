"""Engines that `trtllm-build` made of our models: recognised, and checked before they are opened.

The directory: `config.json` (TensorRT-LLM's, with ours in it), `rank{r}.engine`, and where the
model has an MTP module `draft.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_treewy.config import ModelConfig, read_json
from trtllm_treewy.engine_config import EngineMismatchError
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.trtllm_bindings import EngineBinding, engine_inputs, engine_outputs
from trtllm_treewy.trtllm_config import (
    ARCHITECTURE,
    DRAFT_FILE,
    ENGINE_KEY,
    STATE_DTYPE,
    checkpoint_ranks,
    model_config,
)

from .executor import Executor, ExecutorLimits, ExecutorSource

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class TrtllmEngine:
    """What an engine's directory says of itself.

    Attributes:
        directory: the engine's.
        config: the whole model's.
        ranks: tensor parallel size; the runtime runs engines of one rank.
        dtype: of activations, and of the KV cache.
        plugin_dtype: of the conv windows.
        logits_dtype: of the logits.
        max_batch_size, max_seq_len, max_num_tokens, max_nodes: the largest that it takes.
        tokens_per_block: rows of a block of the KV cache.
        version: of the library that built it.
    """

    directory: Path
    config: ModelConfig
    ranks: int
    dtype: str
    plugin_dtype: str
    logits_dtype: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_nodes: int
    tokens_per_block: int
    version: str

    @classmethod
    def read(cls, directory: str | Path) -> TrtllmEngine | None:
        """That of a directory; None where it holds no engine of the library.

        Raises:
            ValueError: it is one, of another model, of a build without our plugins, or not
                understood.
        """
        directory = Path(directory)
        path = directory / CONFIG_NAME
        raw = read_json(path) if path.is_file() else {}
        if ENGINE_KEY not in raw:
            return None
        source = f"{path}: {ENGINE_KEY}"
        pretrained, build = _object(raw, ENGINE_KEY, path), _object(raw, "build_config", path)
        config, ranks = model_config(pretrained, source), checkpoint_ranks(pretrained, source)
        plugins = _object(build, "plugin_config", path)
        dtype = str(pretrained["dtype"])
        plugin = plugins.get("treewy_plugin", "auto")
        if plugin in (None, "disable"):
            raise ValueError(f"{path}: treewy_plugin is disable, and {ARCHITECTURE} needs it")
        draft_len = _size(build, "max_draft_len", path, least=0)
        return cls(
            directory=directory,
            config=config,
            ranks=ranks,
            dtype=dtype,
            plugin_dtype=dtype if plugin == "auto" else str(plugin),
            logits_dtype=str(pretrained.get("logits_dtype", "float32")),
            max_batch_size=_size(build, "max_batch_size", path),
            max_seq_len=_size(build, "max_seq_len", path),
            max_num_tokens=_size(build, "max_num_tokens", path),
            max_nodes=_size(plugins, "treewy_max_nodes", path)
            if "treewy_max_nodes" in plugins
            else draft_len + 1,
            tokens_per_block=_size(plugins, "tokens_per_block", path),
            version=str(raw.get("version", "unknown")),
        )

    @property
    def inputs(self) -> list[EngineBinding]:
        """Of an engine of one rank."""
        return engine_inputs(self.config, self.plugin_dtype, self.max_nodes, self.ranks)

    @property
    def outputs(self) -> list[EngineBinding]:
        """Of an engine of one rank."""
        return engine_outputs(self.config, self.dtype, self.plugin_dtype, self.logits_dtype)

    def check(
        self,
        *,
        dtype: str | torch.dtype,
        speculation: MTPDecodingConfig,
        cache: KvCacheConfig,
        device: torch.device,
    ) -> None:
        """Raises EngineMismatchError where this engine cannot run here, or not as asked."""
        where = self.directory
        if self.ranks != 1:
            raise EngineMismatchError(
                f"{where} is an engine of {self.ranks} ranks, and the runtime runs one: convert "
                "with --tp-size 1"
            )
        if device.type != "cuda":
            raise EngineMismatchError(f"{where} is an engine for a GPU, and the device is {device}")
        wanted = str(dtype).removeprefix("torch.")
        for name, asked, built in (
            ("dtype", wanted, self.dtype),
            ("the state's type", cache.state_dtype, STATE_DTYPE),
            ("the KV cache's dtype", cache.dtype, self.dtype),
        ):
            if asked not in ("auto", built):
                raise EngineMismatchError(f"{where}: {name} is {built} as built, got {asked}")
        if speculation.state_commit != "reconstruct":
            raise EngineMismatchError(
                f"an engine commits by reconstruct, got state_commit={speculation.state_commit!r}"
            )
        if cache.tokens_per_block != self.tokens_per_block:
            raise EngineMismatchError(
                f"{where} has blocks of {self.tokens_per_block} tokens, got tokens_per_block="
                f"{cache.tokens_per_block}"
            )
        self.check_files(drafts=speculation.enabled)

    def check_files(self, *, drafts: bool) -> None:
        """Raises EngineMismatchError where a file is missing; `drafts`: the MTP module's too."""
        names = [f"rank{rank}.engine" for rank in range(self.ranks)]
        for name in [*names, DRAFT_FILE] if drafts else names:
            if not (self.directory / name).is_file():
                raise EngineMismatchError(
                    f"{self.directory}: {name} is missing: build the engine again"
                )

    def weight_bytes(self, *, drafts: bool) -> int:
        """Bytes of the engine, which has its weights in it; `drafts`: and of the MTP module."""
        names = ["rank0.engine", DRAFT_FILE] if drafts else ["rank0.engine"]
        return sum((self.directory / name).stat().st_size for name in names)

    def step_bytes(self, limits: ExecutorLimits) -> int:
        """An estimate of scratch and outputs: a few activations of a step's tokens, and logits."""
        config, itemsize = self.config, getattr(torch, self.dtype).itemsize
        tokens = max(self.max_num_tokens, limits.max_batch_size * limits.max_nodes)
        inner = config.intermediate_size or (
            config.num_experts_per_tok * config.moe_intermediate_size
            + config.shared_expert_intermediate_size
        )
        widest = 4 * config.hidden_size + 3 * max(inner, config.conv_dim + config.value_dim)
        logits = 4 * limits.max_batch_size * limits.max_nodes * config.vocab_size
        return tokens * widest * itemsize + logits

    def check_limits(self, limits: ExecutorLimits) -> None:
        """Raises EngineMismatchError for limits beyond those that it was built with."""
        for name, wanted, built, flag in (
            ("max_batch_size", limits.max_batch_size, self.max_batch_size, "max_batch_size"),
            ("max_seq_len", limits.max_seq_len, self.max_seq_len, "max_seq_len"),
            ("max_nodes", limits.max_nodes, self.max_nodes, "treewy_max_nodes"),
        ):
            if wanted > built:
                raise EngineMismatchError(
                    f"{name} is {wanted}, and the engine was built for at most {built}: lower it, "
                    f"or build with --{flag} {wanted}"
                )
        rows = limits.max_batch_size * limits.max_nodes
        if rows > self.max_num_tokens:
            raise EngineMismatchError(
                f"max_batch_size times max_nodes is {rows}, and the engine was built for "
                f"{self.max_num_tokens} tokens a step: lower one, or build with --max_num_tokens "
                f"{rows}"
            )


def executor_maker(
    engine: TrtllmEngine,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    dtype: str | torch.dtype,
    device: torch.device,
) -> ExecutorSource:
    """What makes the executor of an engine, once its limits are known, and what it takes.

    Raises:
        EngineMismatchError: the engine does not do what the settings ask for; checked here,
            before anything is allocated.
    """
    engine.check(dtype=dtype, speculation=speculation, cache=cache, device=device)

    def make(limits: ExecutorLimits) -> Executor:
        from .trtllm_executor import TrtllmExecutor
        from .trtllm_network import TrtllmNetwork

        engine.check_limits(limits)
        network = TrtllmNetwork(engine.directory / "rank0.engine", engine.inputs, engine.outputs)
        return TrtllmExecutor(engine, limits, network, device)

    return ExecutorSource(
        make=make,
        weights=lambda limits: engine.weight_bytes(drafts=limits.max_nodes > 1),
        steps=engine.step_bytes,
        max_batch_size=engine.max_batch_size,
    )


def _object(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = raw.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: {key}: expected an object, got {type(value).__name__}")
    return value


def _size(raw: Mapping[str, Any], key: str, path: Path, least: int = 1) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{path}: {key}: expected an integer >= {least}, got {value!r}")
    return value
