"""Puts an engine together: limits, memory check, model, executor, drafter.

Memory is planned before anything is allocated, the weights included: the pools are first built on
torch's meta device, which gives their exact sizes and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.llmapi import KvCacheConfig, MTPDecodingConfig
from trtllm_treewy.model import Qwen3_5ForCausalLM

from .commit_policy import choose_stash
from .drafter import Drafter, MtpDynamicDrafter, MtpStaticDrafter, NullDrafter
from .engine import Engine
from .executor import Executor, ExecutorLimits
from .executor_torch import TorchExecutor, make_kv_cache, make_state_manager

# What caches may take of the memory that is free, unless the user says.
DEFAULT_MEMORY_FRACTION = 0.9
# Host-side tables have a row for each slot.
MAX_BATCH_SIZE = 1 << 16
MIB, GIB = 1 << 20, 1 << 30


class StashOptions(TypedDict):
    """What commits work from: see `commit_policy.make_policy`."""

    stash: str
    stash_dtype: torch.dtype


@dataclass(frozen=True)
class AllocationPlan:
    """Bytes that will be allocated: weights, pools of all slots with the stash, one KV block."""

    weights: int
    state: int
    kv_block: int
    report: dict[str, int]


def build_engine(
    config: ModelConfig,
    load: Callable[[], Qwen3_5ForCausalLM],
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
) -> tuple[Engine, dict[str, int]]:
    """An engine, and bytes of one sequence by name (see `LLM.memory_report`).

    Args:
        config: the model's.
        load: gives the model with its weights; called once the memory plan holds.
        speculation, cache: validated settings.
        dtype, device: activation type and place of the model that `load` gives.
        max_batch_size, max_seq_len, max_num_tokens: see `LLM`.

    Raises:
        ValueError: a limit that makes no sense, or speculation that the model cannot do.
        MemoryError: the plan does not fit; the message says what to lower.
    """
    check_speculation(speculation, config)
    limits = plan_limits(config, speculation, cache, max_batch_size, max_seq_len, max_num_tokens)
    stash = _stash_options(speculation, cache)
    plan = plan_memory(config, limits, speculation, cache, dtype, stash)
    limits = fit_to_memory(limits, plan, cache, device)
    executor = TorchExecutor(
        load(),
        limits,
        state_dtype=getattr(torch, cache.state_dtype),
        kv_dtype=_kv_dtype(cache, dtype),
        state_commit=speculation.state_commit,
        deferred_history=_history(speculation),
        **stash,
    )
    engine = Engine(executor, make_drafter(executor, speculation), max_num_tokens)
    return engine, plan.report


def check_speculation(speculation: MTPDecodingConfig, config: ModelConfig) -> None:
    """Raises ValueError where the settings ask for what this model cannot draft."""
    if not speculation.enabled:
        return
    if not config.mtp_num_hidden_layers:
        raise ValueError(
            "speculative_config asks for MTP drafts, but the model has no MTP module "
            "(mtp_num_hidden_layers is 0)"
        )
    # A dynamic tree considers as many candidates as there are; a fixed one must be filled.
    if speculation.kind == "static" and speculation.top_k > config.vocab_size:
        raise ValueError(
            f"speculative_config drafts {speculation.top_k} tokens below a node, the vocabulary "
            f"has {config.vocab_size}"
        )


def make_drafter(executor: Executor, speculation: MTPDecodingConfig) -> Drafter:
    """The drafter that the settings ask for."""
    if speculation.kind == "none":
        return NullDrafter()
    if speculation.kind == "static":
        return MtpStaticDrafter(executor, speculation.topology())
    return MtpDynamicDrafter(
        executor,
        max_nodes=speculation.max_nodes,
        max_depth=speculation.max_depth,
        top_k=speculation.top_k,
    )


def plan_limits(
    config: ModelConfig,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
) -> ExecutorLimits:
    """Sizes of pools and cache, before memory is looked at."""
    for name, value in (
        ("max_batch_size", max_batch_size),
        ("max_seq_len", max_seq_len),
        ("max_num_tokens", max_num_tokens),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if max_batch_size > MAX_BATCH_SIZE:
        raise ValueError(f"max_batch_size is {max_batch_size}, expected at most {MAX_BATCH_SIZE}")
    if max_seq_len > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_len is {max_seq_len}, expected at most the model's "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
    draft_rows = 0
    if speculation.kind == "dynamic":
        # Each level but the last runs its best top_k nodes through the module.
        draft_rows = speculation.top_k * (speculation.max_depth - 1)
    scratch = max(speculation.max_nodes, draft_rows)
    block = cache.tokens_per_block
    per_sequence = -(-(max_seq_len + scratch) // block)
    num_blocks = per_sequence * max_batch_size
    if cache.max_tokens is not None:
        num_blocks = -(-cache.max_tokens // block)
    return ExecutorLimits(
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_nodes=speculation.max_nodes,
        scratch_rows=scratch,
        num_blocks=num_blocks,
        tokens_per_block=block,
    )


def plan_memory(
    config: ModelConfig,
    limits: ExecutorLimits,
    speculation: MTPDecodingConfig,
    cache: KvCacheConfig,
    dtype: torch.dtype,
    stash: StashOptions,
) -> AllocationPlan:
    """Exact sizes of everything that will be allocated, from pools on the meta device."""
    meta = torch.device("meta")
    state = make_state_manager(
        config,
        limits,
        device=meta,
        activation_dtype=dtype,
        state_dtype=getattr(torch, cache.state_dtype),
        commit=speculation.state_commit,
        history=_history(speculation),
        **stash,
    )
    one_block = replace(limits, num_blocks=1)
    kv_cache = make_kv_cache(config, one_block, device=meta, dtype=_kv_dtype(cache, dtype))
    kv_block = kv_cache.bytes // 2  # the pool has a sink block besides
    with meta:
        parameters = Qwen3_5ForCausalLM(config).parameters()
        weights = sum(parameter.numel() for parameter in parameters) * dtype.itemsize
    report = {
        "state_bytes": state.pool_bytes // limits.max_batch_size,
        "stash_bytes": state.stash_bytes // limits.max_batch_size,
        "snapshot_bytes": state.snapshot_bytes // limits.max_batch_size,
        "kv_bytes_per_token": kv_block // limits.tokens_per_block,
    }
    return AllocationPlan(weights, state.pool_bytes + state.stash_bytes, kv_block, report)


def fit_to_memory(
    limits: ExecutorLimits, plan: AllocationPlan, cache: KvCacheConfig, device: torch.device
) -> ExecutorLimits:
    """`limits` with as many KV blocks as fit, where the user did not ask for a number of tokens.

    Raises:
        MemoryError: not even one sequence of `max_seq_len` fits beside the states, or the tokens
            that were asked for do not.
    """
    free = free_memory(device)
    fraction = cache.free_gpu_memory_fraction or DEFAULT_MEMORY_FRACTION
    if free is None or not plan.kv_block:
        return limits
    room = int(free * fraction) - plan.weights - plan.state
    rows = limits.max_seq_len + limits.scratch_rows
    least = -(-rows // limits.tokens_per_block)
    wanted = limits.num_blocks if cache.max_tokens is not None else least
    # One block more: padding is written to it.
    missing = (wanted + 1) * plan.kv_block - room
    if missing > 0:
        raise MemoryError(
            f"weights ({_size(plan.weights)}), states of max_batch_size={limits.max_batch_size} "
            f"sequences ({_size(plan.state)}) and {wanted * limits.tokens_per_block} tokens of KV "
            f"cache ({_size(wanted * plan.kv_block)}) exceed the {_size(int(free * fraction))} "
            f"that may be used on {device} ({fraction:.0%} of what is free) by {_size(missing)}; "
            f"{_advice(limits, plan, wanted, missing)}"
        )
    return replace(limits, num_blocks=min(limits.num_blocks, room // plan.kv_block - 1))


def _advice(limits: ExecutorLimits, plan: AllocationPlan, blocks: int, missing: int) -> str:
    """What to lower, and by how much, so that `missing` bytes are saved."""
    ways = []
    fewer = -(-missing // max(1, plan.state // limits.max_batch_size))
    if fewer < limits.max_batch_size:
        ways.append(f"max_batch_size by {fewer}")
    fewer_blocks = -(-missing // plan.kv_block)
    if fewer_blocks < blocks:
        tokens = fewer_blocks * limits.tokens_per_block
        ways.append(f"the KV tokens (max_seq_len, kv_cache_config.max_tokens) by {tokens}")
    if not ways:
        return "no smaller batch or sequence fits beside the weights; take a smaller dtype or model"
    return f"lower {', or '.join(ways)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device`; None where there is no telling."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_free_of_machine(), _free_of_container()) if limit is not None]
    return min(limits, default=None)


def _free_of_machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_container() -> int | None:
    """What the control group (v2) of a container leaves, if it limits memory at all."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _history(speculation: MTPDecodingConfig) -> int | None:
    """Tokens of a slot's history, at least the longest path of a tree; None where not deferred."""
    if speculation.state_commit != "deferred":
        return None
    return max(speculation.deferred_history, speculation.max_depth + 1)


def _stash_options(speculation: MTPDecodingConfig, cache: KvCacheConfig) -> StashOptions:
    """What commits work from, decided once, before anything is allocated."""
    state_dtype = getattr(torch, cache.state_dtype)
    stash_dtype = getattr(torch, speculation.stash_dtype)
    if stash_dtype == torch.bfloat16 and state_dtype != torch.bfloat16:
        raise ValueError(
            "speculative_config.stash_dtype='bfloat16' needs a bfloat16 state "
            f"(kv_cache_config.mamba_ssm_cache_dtype), which is {cache.state_dtype}"
        )
    return {"stash": choose_stash(speculation.stash), "stash_dtype": stash_dtype}


def _kv_dtype(cache: KvCacheConfig, dtype: torch.dtype) -> torch.dtype:
    return dtype if cache.dtype == "auto" else getattr(torch, cache.dtype)
