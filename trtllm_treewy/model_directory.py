"""What a model's directory holds: a checkpoint, an engine of ours, or one of `trtllm-build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .config import ModelConfig
from .engine_config import ONNX, EngineConfig, devices_text
from .llmapi import KvCacheConfig, MTPDecodingConfig
from .rank_config import shard_config
from .runtime.engine_files import EngineRank, check_ranks, executor_maker
from .runtime.executor import ExecutorSource
from .runtime.executor_distributed import RankGroup
from .runtime.trtllm_engine import TrtllmEngine
from .runtime.trtllm_engine import executor_maker as trtllm_executor_maker
from .weights import Weights


@dataclass(frozen=True)
class ModelDirectory:
    """A directory, and the limits of the engine in it; those of a checkpoint are the model's.

    Attributes:
        path: the directory.
        built: an engine of `trtllm-treewy build`, None for none.
        trtllm: an engine of `trtllm-build`, None for none.
    """

    path: Path
    built: EngineConfig | None
    trtllm: TrtllmEngine | None

    @classmethod
    def read(cls, path: Path) -> ModelDirectory:
        """What is there.

        Raises:
            ValueError: an engine's description is not usable.
        """
        return cls(path, EngineConfig.read(path), TrtllmEngine.read(path))

    @property
    def is_engine(self) -> bool:
        """Whether it is no checkpoint."""
        return self.built is not None or self.trtllm is not None

    @property
    def for_cpu(self) -> bool:
        """Whether it is an engine for ONNX Runtime."""
        return self.built is not None and self.built.kind == ONNX

    def ranks(self, asked: int, load_format: str) -> int:
        """Devices that the model runs on: those of the engine, for which 1 stands, or `asked`.

        Raises:
            EngineMismatchError, ValueError: the engine has other ones, or weights of its own.
        """
        if self.built is not None:
            if asked != 1:
                check_ranks(self.built, self.path, asked)
            asked = self.built.tensor_parallel_size
        if self.trtllm is not None:
            self._refuse("tensor_parallel_size", asked, 1)
        if self.is_engine:
            self._refuse("load_format", load_format, "auto", asked)
        return asked

    def max_seq_len(self, config: ModelConfig) -> int:
        """The longest sequence."""
        limited = self.built or self.trtllm
        return limited.max_seq_len if limited else config.max_position_embeddings

    def max_num_tokens(self, asked: int) -> int:
        """Tokens of a step: `asked`, or fewer where the engine was built for fewer."""
        limited = self.built or self.trtllm
        return min(asked, limited.max_num_tokens) if limited else asked

    def dtype(self, asked: str | torch.dtype) -> str | torch.dtype:
        """Type of the activations: the engine's, or `asked`."""
        if self.trtllm is not None:
            return self.trtllm.dtype
        return self.built.activation_dtype if self.built is not None else asked

    def source(
        self,
        speculation: MTPDecodingConfig,
        cache: KvCacheConfig,
        dtype: str | torch.dtype,
        device: torch.device,
        *,
        graphs: bool,
    ) -> ExecutorSource | None:
        """What makes the executor of the engine; None for a checkpoint.

        Raises:
            EngineMismatchError: the engine does not do what the settings ask for.
        """
        if self.trtllm is not None:
            return trtllm_executor_maker(self.trtllm, speculation, cache, dtype, device)
        if self.built is None:
            return None
        return executor_maker(
            self.path, self.built, speculation, cache, dtype, device, graphs=graphs
        )

    def ranks_maker(
        self, weights: Weights, devices: Sequence[torch.device], *, graphs: bool
    ) -> Callable[[], RankGroup] | None:
        """What starts the ranks on several devices; None for one.

        Raises:
            ValueError: the model cannot be divided over so many.
        """
        if len(devices) == 1:
            return None
        if self.built is None:
            return weights.ranks(devices)
        make = EngineRank(self.path.absolute(), graphs)
        return partial(RankGroup, shard_config(weights.config, len(devices)), make, devices)

    def _refuse(self, name: str, value: Any, only: Any, ranks: int = 1) -> None:
        """Raises ValueError unless a setting has the one value that it can have for an engine."""
        if value != only:
            raise ValueError(
                f"{name} is {value!r}, expected {only!r}: {self.path} is an engine for "
                f"{devices_text(ranks)}, with its weights in it; give the checkpoint that it was "
                "built from"
            )
