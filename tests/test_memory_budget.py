"""One plan before anything is allocated, and what it promises is what is admitted (CASE 27)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_world import make_request, tiny_config, tiny_model

from trtllm_treewy.llmapi import (
    STATE_COMMITS,
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
)
from trtllm_treewy.memory_plan import plan
from trtllm_treewy.runtime import build, engine_memory
from trtllm_treewy.runtime.engine_memory import EngineMemory, step_bytes, weight_bytes
from trtllm_treewy.runtime.engine_settings import EngineSettings
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.memory_budget import CHECKPOINTS_PER_SLOT, Demand, divide
from trtllm_treewy.runtime.sequence_pools import make_kv_cache, make_state_manager

CPU = torch.device("cpu")
MIB = 1 << 20
# States that weigh as much beside a context as those of a large model do.
HEAVY = tiny_config(
    linear_value_head_dim=24,
    linear_key_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


def make_settings(**changes) -> EngineSettings:
    settings = {
        "config": HEAVY,
        "speculation": MTPDecodingConfig(),
        "cache": KvCacheConfig(tokens_per_block=8),
        "dtype": torch.float32,
        "device": CPU,
        "max_seq_len": 16,
        "max_num_tokens": 8192,
    }
    return EngineSettings(**settings | changes)


def make_demand(policy="reconstruct", **changes) -> Demand:
    sizes = plan(HEAVY, draft_tree_widths=(3, 3, 3), context_length=256, activation_dtype="float32")
    return Demand(**{"plan": sizes, "policy": policy, "weights": 100_000, **changes})


@pytest.mark.parametrize("policy", STATE_COMMITS)
@pytest.mark.parametrize("stash", ["pseudo_values", "inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_planned_is_what_is_allocated(policy, stash, dtype):
    """The formulas and the pools are one truth: every pool on the meta device, to the byte."""
    if stash == "inputs" and policy != "reconstruct":
        pytest.skip("no such stash")
    speculation = MTPDecodingConfig(
        use_dynamic_tree=True,
        max_draft_len=5,
        dynamic_tree_max_topK=6,
        state_commit=policy,
        stash=stash,
    )
    cache = KvCacheConfig(tokens_per_block=8, enable_block_reuse=True)
    settings = make_settings(
        speculation=speculation, cache=cache, dtype=dtype, max_batch_size=None, max_seq_len=100
    )
    sizes = EngineMemory(settings).sequence()
    budget = divide(
        Demand(sizes, policy, weight_bytes(HEAVY, dtype), prefix_cache=True), 20 << 20, ""
    )
    limits = ExecutorLimits(
        max_batch_size=budget.num_slots,
        max_seq_len=100,
        max_nodes=sizes.num_nodes,
        scratch_rows=sizes.scratch_rows,
        num_blocks=budget.num_blocks,
        tokens_per_block=8,
        num_checkpoints=budget.num_checkpoints,
    )
    meta = torch.device("meta")
    state = make_state_manager(
        HEAVY,
        limits,
        device=meta,
        activation_dtype=dtype,
        state_dtype=torch.float32,
        commit=policy,
        history=settings.history,
        stash=stash,
        stash_dtype=torch.float32,
    )
    pages = make_kv_cache(HEAVY, limits, device=meta, dtype=dtype)
    assert state.pool_bytes == budget.slots
    assert state.stash_bytes == budget.stash
    assert pages.bytes == budget.kv_cache
    hidden = budget.num_checkpoints * HEAVY.hidden_size * dtype.itemsize
    assert state.checkpoint_bytes + hidden == budget.checkpoints
    assert budget.num_slots > 1
    assert budget.num_checkpoints > 1
    assert budget.total <= budget.available


@pytest.mark.parametrize("available", [1 << 20, 3 << 20, 10_000_000, 100_000_000])
@pytest.mark.parametrize("policy", STATE_COMMITS)
def test_a_budget_is_filled_and_never_exceeded(policy, available):
    demand = make_demand(policy)
    try:
        budget = divide(demand, available, "here")
    except MemoryError:
        assert available < demand.weights + demand.plan.reserved(policy) + demand.plan.kv_block
        return
    assert budget.total <= available
    assert budget.num_slots == demand.plan.max_sequences(available - demand.weights)[policy]
    one_more = budget.total + demand.plan.reserved(policy)
    assert one_more > available or budget.num_slots == 1024


def test_what_the_user_says_is_kept():
    budget = divide(make_demand(max_batch_size=3), 50 << 20, "")
    assert (budget.num_slots, budget.num_checkpoints) == (3, 0)
    assert budget.num_blocks == 3 * budget_blocks(256), "as many as three sequences can use"
    budget = divide(make_demand(max_batch_size=3, kv_tokens=100), 50 << 20, "")
    assert budget.num_blocks == 4
    budget = divide(make_demand(kv_tokens=1000), 20 << 20, "")
    assert budget.num_blocks == 32
    assert budget.total <= 20 << 20
    saved = divide(make_demand(prefix_cache=True, checkpoints=5), 50 << 20, "")
    assert saved.num_checkpoints == 5
    saved = divide(make_demand(prefix_cache=True, max_batch_size=4), 50 << 20, "")
    assert saved.num_checkpoints == 4 * CHECKPOINTS_PER_SLOT
    unlimited = divide(make_demand(max_batch_size=7), None, "")
    assert unlimited.num_blocks == 7 * budget_blocks(256)


def budget_blocks(tokens: int) -> int:
    return make_demand().plan.blocks(tokens)


@pytest.mark.parametrize("policy", STATE_COMMITS)
def test_case_27_the_advice_is_exact(policy):
    """CASE 27: large batch and draft length: lowering by what the message says just fits."""
    demand = make_demand(policy, max_batch_size=900)
    with pytest.raises(MemoryError, match="exceed the 9.5 MiB that may be used on x by") as caught:
        divide(demand, 10_000_000, "on x")
    fewer = int(re.search(r"max_batch_size by (\d+)", str(caught.value)).group(1))
    divide(replace(demand, max_batch_size=900 - fewer), 10_000_000, "on x")
    with pytest.raises(MemoryError):
        divide(replace(demand, max_batch_size=901 - fewer), 10_000_000, "on x")


def test_advice_names_checkpoints_and_steps():
    demand = make_demand(max_batch_size=1, prefix_cache=True, checkpoints=200, graphs=1 << 20)
    with pytest.raises(MemoryError, match=r"200 checkpoints .*logits and activations") as caught:
        divide(demand, 2 << 20, "")
    fewer = int(re.search(r"max_checkpoints by (\d+)", str(caught.value)).group(1))
    divide(replace(demand, checkpoints=200 - fewer), 2 << 20, "")
    with pytest.raises(MemoryError, match="take a smaller dtype or model"):
        divide(make_demand(max_batch_size=1), 1000, "")


# ------------------------------------------------------------------------------ as an engine


def build_with(policy: str, memory: int | None):
    speculation = MTPDecodingConfig(draft_tree_widths=(3, 3), state_commit=policy)
    cache = KvCacheConfig(memory_bytes=memory, tokens_per_block=8)
    settings = make_settings(
        speculation=speculation,
        cache=cache,
        max_batch_size=None,
        max_seq_len=24,
        max_num_tokens=1024,
    )
    return build.build_engine(settings, lambda: tiny_model(config=HEAVY))


def test_reconstruct_admits_what_the_plan_promises_and_more_than_snapshot():
    """Under the same small budget, counted as sequences that run at once."""
    most: dict[str, int] = {}
    promised: dict[str, int] = {}
    memory = weight_bytes(HEAVY, torch.float32) + 2 * MIB
    for policy in STATE_COMMITS:
        engine, report = build_with(policy, memory)
        assert report["total_bytes"] <= memory
        # 14 tokens of prompt and 10 of output: the longest sequence.
        for number in range(120):
            engine.add(make_request(number, [number % 50 + 1] * 14, 10, speculation=number < 9))
        most[policy] = 0
        while engine.has_work:
            engine.step()
            most[policy] = max(most[policy], engine.stats.running)
        assert engine.stats.requests_finished == 120
        assert engine.stats.preemptions == 0
        sizes = plan(
            HEAVY,
            draft_tree_widths=(3, 3),
            activation_dtype="float32",
            context_length=24,
            tokens_per_block=8,
        )
        promised[policy] = sizes.max_sequences(2 * MIB)[policy]
    assert most == promised
    factor = sizes.reserved("snapshot") / sizes.reserved("reconstruct")
    assert factor > 2
    assert most["reconstruct"] < 120
    assert most["reconstruct"] / most["snapshot"] >= factor * (1 - 1 / most["snapshot"])
    assert most["reconstruct"] > most["snapshot"]


def test_bytes_and_fraction_the_smaller_holds(monkeypatch):
    monkeypatch.setattr(engine_memory, "free_memory", lambda device: 4 << 20)
    small, _ = build_with("reconstruct", 1 << 20), None
    whole = build_with("reconstruct", None)
    beyond = build_with("reconstruct", 1 << 40)
    assert small[1]["total_bytes"] <= 1 << 20
    assert whole[1]["total_bytes"] <= 0.9 * (4 << 20)
    assert beyond[1] == whole[1]
    with pytest.raises(MemoryError, match=r"\(kv_cache_config.memory_bytes\)"):
        build_with("reconstruct", 1000)


def test_nothing_is_loaded_before_the_plan_holds(monkeypatch):
    monkeypatch.setattr(build, "TorchExecutor", None)
    with pytest.raises(MemoryError):
        build.build_engine(
            make_settings(
                cache=KvCacheConfig(memory_bytes=50_000),
                max_batch_size=64,
                max_seq_len=64,
                max_num_tokens=64,
            ),
            lambda: pytest.fail("weights were loaded"),
        )


def test_a_step_has_a_token_for_every_sequence():
    """As many sequences as fit are no more than that; a number that is asked for is refused."""

    def build_for(batch, max_num_tokens, load):
        settings = make_settings(max_batch_size=batch, max_num_tokens=max_num_tokens)
        return build.build_engine(settings, load)

    _, report = build_for(None, 5, lambda: tiny_model(config=HEAVY))
    assert report["max_batch_size"] == 5
    with pytest.raises(ValueError, match=r"max_num_tokens is 4, .* max_batch_size \(5\)"):
        build_for(5, 4, lambda: pytest.fail("weights were loaded"))


def test_no_more_sequences_than_will_come():
    """As many as fit, and no more than that; on a GPU what is captured is counted for so many."""
    settings = make_settings(max_batch_size=None, max_auto_batch_size=3)
    _, report = build.build_engine(settings, lambda: tiny_model(config=HEAVY))
    assert report["max_batch_size"] == 3
    small = replace(settings, cache=KvCacheConfig(memory_bytes=140_000, tokens_per_block=8))
    _, report = build.build_engine(small, lambda: tiny_model(config=HEAVY))
    assert report["max_batch_size"] == 2
    with pytest.raises(ValueError, match="max_auto_batch_size must be an integer >= 1, got 0"):
        build.build_engine(replace(settings, max_auto_batch_size=0), lambda: pytest.fail("loaded"))

    def captured(**batch):
        gpu = make_settings(device=torch.device("cuda"), graphs=CudaGraphConfig(), **batch)
        memory = EngineMemory(gpu)
        return memory.divide(memory.sequence(), free=1 << 34).graphs

    auto = captured(max_batch_size=None, max_auto_batch_size=9)
    assert auto == captured(max_batch_size=9)


def test_ranks_are_ended_whatever_fails_behind_their_start():
    ended = []
    ranks = SimpleNamespace(
        config=HEAVY, free_memory=None, start=lambda *_: None, close=lambda: ended.append(True)
    )
    with pytest.raises(AttributeError):  # what was started is no executor
        build.build_engine(
            make_settings(max_batch_size=2, max_num_tokens=16),
            lambda: pytest.fail("the ranks load"),
            make_ranks=lambda: ranks,
        )
    assert ended == [True]


def test_activations_of_a_step_and_of_graphs_are_in_the_plan():
    """A captured step has memory of its own; a prompt beside it needs `max_num_tokens`' more."""
    batch, nodes, dtype = 16, 13, torch.bfloat16
    speculation = MTPDecodingConfig(draft_tree_widths=(3, 3))

    def steps(max_num_tokens, graphs=None):
        settings = make_settings(
            speculation=speculation,
            cache=KvCacheConfig(),
            dtype=dtype,
            device=torch.device("cuda"),
            max_batch_size=batch,
            max_seq_len=64,
            max_num_tokens=max_num_tokens,
            graphs=graphs,
        )
        memory = EngineMemory(settings)
        return memory.divide(memory.sequence(), free=1 << 34).graphs

    prompts = step_bytes(HEAVY, dtype, 8192)
    assert prompts >= 8192 * HEAVY.hidden_size * 2
    assert steps(16384) - steps(8192) == prompts
    decoding = CudaGraphConfig(max_prompt_tokens=0)
    captured = steps(8192, decoding) - steps(8192)
    assert speculation.max_nodes == nodes
    assert captured > step_bytes(HEAVY, dtype, batch * nodes)
    beside = steps(8192, CudaGraphConfig()) - steps(8192, decoding)
    assert beside > step_bytes(HEAVY, dtype, CudaGraphConfig.max_prompt_tokens)
    assert steps(100, CudaGraphConfig()) - steps(100, decoding) < beside // 4
