"""Where the weights of the torch executor come from: a checkpoint, or chance for measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .config import ModelConfig
from .export.checkpoint import load_model, load_rank, resolve_dtype
from .model import Qwen3_5ForCausalLM
from .model.dummy import dummy_model, dummy_rank
from .rank_config import shard_config
from .runtime.executor_distributed import RankGroup
from .runtime.rank_worker import make_torch_rank


@dataclass(frozen=True)
class Weights:
    """A model's weights, yet to be loaded.

    Attributes:
        directory: of the checkpoint.
        config: the model's.
        dtype: "auto", a name or a torch type.
        dummy: random ones, for which the directory is not read.
        progress: called with (tensors done, tensors in all).
    """

    directory: Path
    config: ModelConfig
    dtype: str | torch.dtype
    dummy: bool
    progress: Callable[[int, int], None] | None

    def load(self, device: torch.device) -> Qwen3_5ForCausalLM:
        """The model with its weights."""
        if self.dummy:
            return dummy_model(
                self.config, dtype=resolve_dtype(self.dtype, self.config), device=device
            )
        return load_model(
            self.directory, self.config, dtype=self.dtype, device=device, progress=self.progress
        )

    def ranks(self, devices: Sequence[torch.device]) -> Callable[[], RankGroup]:
        """What starts the ranks, each of which loads its share.

        Raises:
            ValueError: the model cannot be divided over so many.
        """
        part = shard_config(self.config, len(devices))
        if self.dummy:
            dummy = partial(dummy_rank, self.config, part, resolve_dtype(self.dtype, self.config))
            return partial(RankGroup, part, partial(make_torch_rank, dummy), devices)
        load = partial(load_rank, self.directory, self.config, self.dtype)
        first = partial(load, progress=self.progress)
        return partial(
            RankGroup,
            part,
            partial(make_torch_rank, load),
            devices,
            make_first=partial(make_torch_rank, first),
        )
