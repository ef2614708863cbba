"""Random arrivals, lengths, cancels, preemptions, faults and shared prefixes: every request gives
what it gives alone, and nothing leaks (CASES 1, 3, 8, 16, 17, 25)."""

from __future__ import annotations

import random

import pytest
import torch
from engine_world import (
    VOCAB,
    GraftingDrafter,
    check_nothing_leaked,
    make_engine,
    make_executor,
    make_request,
    solo_texts,
    tiny_model,
)

from trtllm_treewy.runtime.tree_policy import AutoTrees

JOBS = 75


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def jobs():
    """Prompts that share starts with each other, of 1 to 60 tokens."""
    rng = random.Random(2)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    made = []
    for _ in range(JOBS):
        stem = rng.choice(stems)[: rng.choice([0, 7, 16, 23, 40])]
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        made.append(([*stem, *own], rng.choice([1, 2, 5, 12, 25, 40])))
    return made


@pytest.fixture(scope="module")
def texts(model, jobs):
    return solo_texts(model, jobs)


class Chaos:
    """Wraps an executor: some calls raise, and some sequences give NaN logits."""

    def __init__(self, engine, executor, rng, rate: float, poisoned: set[int]) -> None:
        self.engine, self.rng, self.rate, self.poisoned = engine, rng, rate, poisoned
        self.raised = 0
        for name in (
            "prefill", "verify", "commit", "draft", "draft_extend", "draft_enter",
            "save_checkpoint",
        ):  # fmt: skip
            setattr(executor, name, self.wrap(name, getattr(executor, name)))

    def wrap(self, name, original):
        def call(*args):
            if self.rng.random() < self.rate:
                self.raised += 1
                raise RuntimeError(f"{name} failed")
            output = original(*args)
            if name in ("prefill", "verify"):
                self.poison(args[0].slot.tolist(), output.logits)
            return output

        return call

    def poison(self, slots, logits):
        running = {r.slot: r for r in self.engine._scheduler.admitted}
        with torch.inference_mode():
            for row, slot in enumerate(slots):
                request = running.get(slot)
                if request is None or request.request_id not in self.poisoned:
                    continue
                if len(request.output_token_ids) >= 3:
                    logits[row] = torch.nan


WORLDS = {
    # name: executor, engine, how often an executor call fails
    "room": ({"num_blocks": 200}, {"budget": 64}, 0.0),
    "pressure": ({"num_blocks": 30}, {"budget": 13}, 0.0),
    "prefixes": (
        {"num_blocks": 60, "num_checkpoints": 12, "state_commit": "deferred"},
        {"budget": 40, "interval": 20, "buckets": True},
        0.0,
    ),
    "prefixes and pressure": (
        {"num_blocks": 30, "num_checkpoints": 8, "stash": "inputs"},
        {"budget": 9, "interval": 24},
        0.0,
    ),
    "one slot": (
        {"num_blocks": 32, "max_batch_size": 1, "num_checkpoints": 4, "state_commit": "snapshot"},
        {"budget": 16, "interval": 16},
        0.0,
    ),
    "faults": (
        {"num_blocks": 40, "num_checkpoints": 5},
        {"budget": 30, "interval": 8},
        0.01,
    ),
    "auto": ({"num_blocks": 80}, {"budget": 30}, 0.0),
}


def fuzz(world: str, model, jobs, texts, seed: int) -> dict[str, int]:
    sizes, options, rate = WORLDS[world]
    rng = random.Random(f"{world} {seed}")
    executor = make_executor(model, max_seq_len=110, **sizes)
    drafter = GraftingDrafter(executor, texts, seed)
    clock = iter(range(10**9))
    policy = AutoTrees((1, 2, 4, 8), (1, 2, 4)) if world == "auto" else None
    engine = make_engine(
        executor, drafter, policy=policy, clock=lambda: float(next(clock)), **options
    )
    drafter.engine = engine
    long = [number for number, (_, count) in enumerate(jobs) if count >= 12]
    poisoned = set(rng.sample(long, 4)) if rate else set()
    chaos = Chaos(engine, executor, rng, rate, poisoned) if rate else None
    requests = [
        make_request(
            i, prompt, count, speculation=rng.random() < 0.8, priority=int(rng.random() < 0.1)
        )
        for i, (prompt, count) in enumerate(jobs)
    ]
    waiting, added = rng.sample(requests, len(requests)), []
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.3:
            added.append(waiting.pop())
            engine.add(added[-1])
        alive = [request for request in added if not request.finished]
        if alive and rng.random() < 0.03:
            engine.cancel([rng.choice(alive)])
        engine.step()
        stats = engine.stats
        assert stats.steps < 20000, "no progress"
        assert stats.slots_used == stats.running <= executor.limits.max_batch_size
    for request in requests:
        output, text = request.output_token_ids, texts[request.request_id]
        assert output == text[: len(output)], f"request {request.request_id} is not its solo run"
        if request.finish_reason == "length":
            assert output == text
        elif request.finish_reason == "error":
            assert rate
            assert ("not finite" in request.error) == (
                request.request_id in poisoned and "failed" not in request.error
            )
        else:
            assert request.finish_reason == "cancelled"
    if not rate:
        assert not any(r.finish_reason == "error" for r in requests)
    else:
        assert 0 < engine.stats.executor_faults <= chaos.raised
        assert engine.stats.non_finite_logits > 0
        done = [r for r in requests if r.finish_reason == "length"]
        assert len(done) > len(requests) // 2
    ended = (stats.requests_finished, stats.requests_cancelled, stats.requests_failed)
    assert sum(ended) == stats.requests_added == len(jobs)
    assert stats.requests_cancelled > 0
    check_nothing_leaked(engine)
    return vars(stats)


@pytest.mark.parametrize("world", WORLDS)
def test_every_request_gives_its_solo_tokens(world, model, jobs, texts):
    stats = fuzz(world, model, jobs, texts, seed=0)
    assert stats["accepted_tokens"] > 50, "drafts that are never right test little"
    if "pressure" in world:
        assert stats["preemptions"] > 3
        assert stats["pruned_trees"] > 3
    if "prefixes" in world:
        assert stats["prefix_hits"] > 3
        assert stats["checkpoint_evictions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("world", WORLDS)
def test_more_of_the_same(world, seed, model, jobs, texts):
    fuzz(world, model, jobs, texts, seed)
