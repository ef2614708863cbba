"""Captured steps under arrivals, cancels, stops, preemptions, shared prefixes, faults, interrupts.

Steps are started before the host has heard of the last one. Every request gives what plain decoding
gives it, and the MTP module has seen what it should have: drafts made from anything else would
change no text, and be worth less.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from engine_world import (
    VOCAB,
    check_nothing_leaked,
    make_engine,
    make_executor,
    run,
    tiny_model,
)
from test_cuda_graphs import POLICIES, STEP_SIZES, TOPOLOGIES, Sizes, agreeable

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.runtime.cuda_graphs import GraphSizes, RecordedCalls
from trtllm_treewy.runtime.decode_graphs import GraphOptions
from trtllm_treewy.runtime.device_decoder import DeviceDecoder
from trtllm_treewy.runtime.drafter import MtpStaticDrafter
from trtllm_treewy.runtime.prompt_buffers import prompt_shapes
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.runtime.scheduler import BatchWait
from trtllm_treewy.sampling_params import SamplingParams

JOBS, MAX_SEQ_LEN = 24, 64


@dataclass(frozen=True)
class World:
    """An engine, what befalls it, and how often: `faults` and `interrupts` a launch.

    `few`: rows up to which a deferred commit is made at once, as on a GPU.
    """

    topology: str
    commit: str
    blocks: int
    page: int = 4
    interval: int | None = None
    sizes: bool = False
    hosted: float = 0.0
    faults: float = 0.0
    interrupts: float = 0.0
    few: int = 0
    wait: BatchWait = field(default_factory=BatchWait)


WORLDS = {
    "chain": World("chain", "deferred", 60, page=8, hosted=0.1, few=2, wait=BatchWait(4, 30)),
    "pressure": World("tree", "reconstruct", 72, page=1, hosted=0.2),
    "prefixes": World("parents", "inputs", 40, interval=8, sizes=True),
    "faults": World("tree", "deferred", 32, interval=16, faults=0.006, interrupts=0.001),
    "sizes": World("chain", "snapshot", 36, sizes=True, hosted=0.1),
}


@pytest.fixture(scope="module")
def model():
    return agreeable(tiny_model(5))


@pytest.fixture(scope="module")
def jobs():
    """Requests, many as long as can be; some end by a token, or must not before so many."""
    rng = random.Random(7)
    stems = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    made = []
    for _ in range(JOBS):
        stem = rng.choice(stems)[: rng.choice([0, 0, 8, 16, 24])]
        prompt = (*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))))
        room = MAX_SEQ_LEN - len(prompt)
        count, ends = (room if rng.random() < 0.3 else rng.randint(1, room)), rng.random() < 0.3
        params = SamplingParams(
            max_tokens=count,
            stop_token_ids=[rng.randrange(VOCAB) for _ in range(2)] if ends else None,
            min_tokens=rng.randint(1, count) if rng.random() < 0.15 else 0,
        )
        made.append((prompt, params))
    return made


@pytest.fixture(scope="module")
def wanted(model, jobs):
    """Of each its text, and keys and values of the MTP module, pair by pair."""
    executor = make_executor(
        model, max_batch_size=JOBS, num_blocks=900, max_nodes=1, scratch_rows=1
    )
    requests = [Request(i, *job, speculation=False) for i, job in enumerate(jobs)]
    run(make_engine(executor, budget=4096), requests)
    found = []
    for request in requests:
        tokens = request.token_ids
        assert executor.try_allocate(0, len(tokens))
        whole = PrefillBatch.pack(tokens, [len(tokens)], [0], [0], executor.device)
        hidden = executor.prefill(whole).hidden[:-1]
        pairs = PrefillBatch.pack(tokens[1:], [len(hidden)], [0], [0], executor.device)
        executor.draft_extend(pairs, hidden)
        found.append((list(request.output_token_ids), rows_of_module(executor, 0, len(hidden))))
        executor.free(0)
    return found


def rows_of_module(executor, slot, count):
    cache, first = executor.kv_cache, executor._first_mtp_layer
    rows = cache.host_rows(slot, 0, count)
    return torch.cat([cache.k[first:, :, rows], cache.v[first:, :, rows]], -1)


class Troubled(RecordedCalls):
    """Launches that fail before or behind their work, and interrupts."""

    def __init__(self, rng):
        super().__init__()
        self.rng, self.faults, self.interrupts, self.raised = rng, 0.0, 0.0, 0

    def replay(self, key):
        roll = self.rng.random()
        if roll >= self.faults / 2:
            super().replay(key)
        if roll < self.faults:
            self.raised += 1
            raise RuntimeError("no luck")
        if self.rng.random() < self.interrupts:
            raise KeyboardInterrupt


def build(world, model, rng):
    topology = TOPOLOGIES[world.topology]
    executor = make_executor(
        model, max_nodes=topology.num_nodes, scratch_rows=topology.num_nodes,
        max_seq_len=MAX_SEQ_LEN, num_blocks=world.blocks, tokens_per_block=world.page,
        num_checkpoints=3 if world.interval else 0, **POLICIES[world.commit],
    )  # fmt: skip
    if world.few:
        executor.state.policy.few_rows = world.few
    runner, drafter = Troubled(rng), MtpStaticDrafter(executor, topology)
    executor.make_prompt_graphs(runner, prompt_shapes(32, 4), True).capture_all()
    nodes, options, policy = (1, topology.num_nodes), {}, None
    if world.sizes:
        nodes = STEP_SIZES[world.topology]
        options = {"report_trees": world.topology != "chain", "all_nodes": True}
        policy = Sizes([rng.choice((1, 1, *nodes)) for _ in range(97)])
    sizes = GraphSizes((1, 2, 4), nodes)
    graphs = executor.make_graphs(
        runner, GraphOptions(sizes, topology.depth + 1, topology, **options)
    )
    graphs.capture_all()
    engine = make_engine(
        executor, drafter, interval=world.interval, policy=policy, batch_wait=world.wait,
        decoder=DeviceDecoder(graphs, drafter.cache),
    )  # fmt: skip
    plain = engine._sampler.is_plain
    engine._sampler.is_plain = lambda r: plain(r) and rng.random() >= world.hosted
    runner.faults, runner.interrupts = world.faults, world.interrupts
    return engine, runner


def check_module(world, engine, wanted):
    """What it has seen of every sequence, whose last pairs may wait on the device."""
    decoder, drafter = engine._device.decoder, engine._drafter
    for request in engine._scheduler.decoding:
        if not request.speculation:
            continue
        slot = request.slot
        seen = drafter.cache._length.get(slot, 0)
        if slot in decoder._pairs:
            seen = request.context_len - decoder._pairs[slot]
        there = rows_of_module(engine._executor, slot, seen)
        differ = (there - wanted[request.request_id][1][:, :, :seen]).abs().amax((0, 1, 3)) > 1e-3
        if world.interval:
            # A kept block's last row has the token behind it of whoever saved it.
            differ[world.page - 1 :: world.page] = False
        assert not differ.any(), (request, differ.nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
@pytest.mark.parametrize("name", WORLDS)
def test_every_request_gives_its_text(name, seed, model, jobs, wanted):
    """CASES 1, 3, 5, 8, 16, 28."""
    world, rng = WORLDS[name], random.Random(f"{name} {seed}")
    engine, runner = build(world, model, rng)
    requests = [
        Request(i, *job, speculation=rng.random() < 0.8, priority=int(rng.random() < 0.1))
        for i, job in enumerate(jobs)
    ]
    waiting, added, ahead = rng.sample(requests, JOBS), [], 0
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.3:
            added.append(waiting.pop())
            engine.add(added[-1])
        going = [r for r in added if not r.finished]
        if going and rng.random() < 0.02:
            engine.cancel([rng.choice(going)])
        going = [r for r in going if not r.finished and r.slot is not None and r.output_token_ids]
        if going and rng.random() < 0.02:
            request = rng.choice(going)
            engine.stop(request, rng.randint(1, len(request.output_token_ids)), "text")
        try:
            engine.step()
        except KeyboardInterrupt:
            assert world.interrupts
        ahead += bool(engine._device.under_way)
        if not world.faults:
            check_module(world, engine, wanted)
    for request in requests:
        got, (text, _) = list(request.output_token_ids), wanted[request.request_id]
        assert got == text[: len(got)]
        by_itself = request.finish_reason == "length" or request.stop_reason != "text"
        if by_itself and request.finish_reason in ("length", "stop"):
            assert got == text
        assert world.faults or request.error is None
    stats, decoder = engine.stats, engine._device.decoder
    assert stats.executor_faults <= runner.raised
    assert sum(r.finish_reason in ("length", "stop") for r in requests) > JOBS // 4
    assert min(ahead, stats.accepted_tokens) > 10
    if name == "pressure":
        assert stats.preemptions
    if world.interval:
        assert stats.prefix_hits
    for table in (decoder._pairs, decoder._unseen, decoder._drafted, decoder._rooted):
        assert not table
    check_nothing_leaked(engine)
