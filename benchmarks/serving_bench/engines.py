"""One model, and engines over it: as many sequences as memory holds, at most those asked for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import CudaGraphConfig, KvCacheConfig
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.runtime.build import build_engine
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.engine_memory import EngineMemory
from trtllm_treewy.runtime.engine_settings import EngineSettings
from trtllm_treewy.runtime.scheduler import BatchWait

from . import ucache
from .points import Site

MAX_NUM_TOKENS = 8192


@dataclass(frozen=True)
class Ground:
    """What all engines of a run share.

    Attributes:
        config, model: the model, with its weights in place.
        memory: bytes that count as the whole memory; fractions are of these.
        most: sequences at once that an engine is built for where memory allows.
        captured: whether steps are; on a CPU they run by the same functions then, uncaptured.
        state_dtype: of the recurrent state.
        laws: of acceptance, by tree, where they are not the default ones.
        batch_wait_iters: steps that a request waits for others to start with it.
        prompt_tokens: of the largest prompt step that is captured, None for what an engine takes.
    """

    config: ModelConfig
    model: Qwen3_5ForCausalLM
    memory: int
    most: int
    state_dtype: str
    laws: Mapping[str, Sequence[float]]
    captured: bool
    batch_wait_iters: int = 0
    prompt_tokens: int | None = None

    @property
    def device(self) -> torch.device:
        return self.model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.model.embed_tokens.weight.dtype


@dataclass(frozen=True)
class Built:
    """An engine, the sequences that it holds, whether memory bounds them, and its memory."""

    engine: Engine
    slots: int
    bound_by_memory: bool
    report: Mapping[str, int]


@dataclass(frozen=True)
class PlannedSite:
    """What an engine of a site will be, before anything is allocated.

    Attributes:
        slots: sequences.
        bound_by_memory: whether memory, and not the number asked for, set them.
        weights, total: bytes of the weights, and of all.
        settings: of the engine.
    """

    slots: int
    bound_by_memory: bool
    weights: int
    total: int
    settings: EngineSettings


def plan_site(
    ground: Ground, site: Site, batch_sizes: Sequence[int], most: int | None = None
) -> PlannedSite:
    """The engine of a site, steps captured for these numbers of sequences and for all it holds.

    Slots are divided as if every sequence ended at the workload's mean length; what is left is KV
    cache. So sequences that grow longer at one time preempt each other, as in a server that is set
    up for its traffic and not for the longest request.

    Args:
        ground, site: what it is for.
        batch_sizes: that steps are captured for.
        most: sequences that the loads have at once, where they are fewer than the ground's.

    Raises:
        MemoryError: not even one sequence of the longest length fits beside the weights.
    """
    speculation = site.setting.speculation(ground.laws)
    most = min(ground.most, most or ground.most)
    settings = EngineSettings(
        config=ground.config,
        speculation=speculation,
        cache=KvCacheConfig(
            mamba_ssm_cache_dtype=ground.state_dtype,  # type: ignore[arg-type]
            free_gpu_memory_fraction=site.fraction,
        ),
        dtype=ground.dtype,
        device=ground.device,
        max_batch_size=None,
        max_seq_len=site.workload.max_len,
        max_num_tokens=max(MAX_NUM_TOKENS, 2 * most * speculation.max_nodes),
        graphs=_graphs(ground, batch_sizes, most),
    )
    fits = _fitting(ground, site, settings)
    slots = min(most, fits)
    settings = replace(settings, max_batch_size=slots, graphs=_graphs(ground, batch_sizes, slots))
    memory = EngineMemory(settings)
    budget = memory.divide(memory.sequence(), free=ground.memory)
    return PlannedSite(slots, fits < most, budget.weights, budget.total, settings)


def build_site(
    ground: Ground, site: Site, batch_sizes: Sequence[int], most: int | None = None
) -> Built:
    """The engine that `plan_site` tells of.

    Raises:
        MemoryError: it does not fit.
        ucache.PeerError: its kernels are FlashInfer's, and cannot be used.
    """
    planned = plan_site(ground, site, batch_sizes, most)
    commits: AbstractContextManager[None] = nullcontext()
    if site.setting.policy == ucache.NAME:
        ucache.check_once(ground.device, planned.settings.speculation.max_nodes)
        commits = ucache.in_place_of_deferred()
    with warnings.catch_warnings(), commits:
        warnings.simplefilter("ignore", UserWarning)  # said once for the whole run
        engine, report = build_engine(
            planned.settings,
            lambda: ground.model,
            free=ground.memory,
            batch_wait=BatchWait(ground.batch_wait_iters, MAX_NUM_TOKENS // 2),
        )
    return Built(engine, planned.slots, planned.bound_by_memory, report)


def _graphs(ground: Ground, sizes: Sequence[int], slots: int) -> CudaGraphConfig | None:
    if not ground.captured:
        return None
    batches = (*(n for n in sizes if n < slots), slots)
    if ground.prompt_tokens is None:
        return CudaGraphConfig(batch_sizes=batches)
    return CudaGraphConfig(batch_sizes=batches, max_prompt_tokens=ground.prompt_tokens)


def _fitting(ground: Ground, site: Site, settings: EngineSettings) -> int:
    """Sequences of the workload's mean length that the memory holds, the longest among them."""
    workload, memory = site.workload, EngineMemory(settings)
    sizes = memory.sequence()
    mean = replace(sizes, context_length=workload.mean_len)
    found = memory.divide(mean, free=ground.memory).num_slots
    if found * workload.mean_len >= workload.max_len:
        return found
    # So few share the KV cache that the longest one would not fit: room for it is set aside.
    longest = sizes.blocks(workload.max_len) * sizes.kv_block
    room = max(1, ground.memory - int(longest / site.fraction))
    return memory.divide(mean, free=room).num_slots


def memory_by_kind(built: Built, peak_blocks: int, peak_slots: int) -> dict[str, Any]:
    """Bytes set aside by kind, what of them was used at most, and what the device saw.

    Stash is what verification leaves for commits: snapshots of every node, or pseudo-values.
    """
    report, limits = built.report, built.engine._executor.limits
    block = limits.tokens_per_block * report["kv_bytes_per_token"]
    graphs = getattr(built.engine._executor, "graphs", None)
    found = {
        "weights": report["weights_bytes"],
        "states": built.slots * report["state_bytes"],
        "stash": built.slots * report["stash_bytes"],
        "kv_cache": (report["kv_blocks"] + 1) * block,
        "planned": report["total_bytes"],
        "used_states_and_stash": peak_slots * (report["state_bytes"] + report["stash_bytes"]),
        "used_kv_cache": peak_blocks * block,
    }
    if torch.cuda.is_available() and built.engine._executor.device.type == "cuda":
        found["graphs"] = graphs.memory_bytes if graphs is not None else 0
        found["device_peak"] = torch.cuda.max_memory_allocated()
    return found


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives the memory of engines that nobody holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
