"""Prefix cache: KV blocks and recurrent states by their tokens; who is evicted; same tokens."""

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
    run,
    solo_texts,
    tiny_model,
)

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.runtime.drafter import MtpDynamicDrafter
from trtllm_treewy.runtime.prefix_cache import PrefixCache

BLOCK = 4


class FakePages:
    """The KV cache's accounts alone."""

    def __init__(self, num_blocks: int) -> None:
        self.count = [0] * num_blocks
        self.slots: dict[int, tuple[int, ...]] = {}
        self.held: set[int] = set()

    @property
    def free_blocks(self):
        return self.count.count(0)

    def take(self, slot: int, number: int) -> tuple[int, ...]:
        free = [b for b, count in enumerate(self.count) if not count][:number]
        assert len(free) == number
        for block in free:
            self.count[block] += 1
        self.slots[slot] = tuple(free)
        return self.slots[slot]

    def give(self, slot: int) -> None:
        for block in self.slots.pop(slot):
            self.count[block] -= 1

    def blocks(self, slot):
        return self.slots[slot]

    def refs(self, block):
        return self.count[block]

    def hold(self, block):
        self.count[block] += 1
        self.held.add(block)

    def drop(self, block):
        self.count[block] -= 1
        self.held.remove(block)

    def drop_all(self):
        for block in list(self.held):
            self.drop(block)


def tokens_of(*blocks: int) -> list[int]:
    """Four equal tokens a block."""
    return [block for block in blocks for _ in range(BLOCK)]


def make_cache(num_blocks=20, checkpoints=3):
    pages = FakePages(num_blocks)
    return PrefixCache(pages, checkpoints, BLOCK, 8), pages


def put(cache, pages, *blocks: int, drafts=False, keep=False):
    saved = []
    held = pages.take(99, len(blocks))
    assert cache.insert(tokens_of(*blocks), held, drafts, saved.append)
    if not keep:
        pages.give(99)
    return saved


def test_a_hit_is_the_deepest_state_on_the_path():
    cache, pages = make_cache()
    (first,) = put(cache, pages, 1, 2)
    (second,) = put(cache, pages, 1, 2, 3, 4)
    assert first != second
    assert pages.free_blocks == 16, "the shared blocks are kept once"
    match = cache.match([*tokens_of(1, 2, 3), 9], False)
    assert (match.prefix.num_tokens, match.prefix.checkpoint) == (8, first)
    assert match.num_shared == 12, "a third block is there, its state is not"
    match = cache.match([*tokens_of(1, 2, 3, 4), 9], False)
    assert (match.prefix.num_tokens, match.prefix.checkpoint) == (16, second)
    assert len(match.prefix.blocks) == 4
    # The last prompt token is left to run: a prompt of exactly those blocks stops one before.
    assert cache.match(tokens_of(1, 2, 3, 4), False).prefix.num_tokens == 8
    assert cache.match(tokens_of(7, 2), False).prefix is None
    assert cache.match([1, 1], False).num_shared == 0
    assert cache.match([*tokens_of(1, 2), 9], True).prefix is None, "rows of the drafter are amiss"


def test_saving_again_keeps_one_state():
    cache, pages = make_cache()
    assert put(cache, pages, 1, 2)
    assert put(cache, pages, 1, 2) == []
    assert cache.checkpoints_used == 1
    assert put(cache, pages, 1), "an inner node gets its own state"
    assert cache.checkpoints_used == 2
    assert cache.blocks_held == 2


def test_the_least_recently_used_state_goes_first():
    cache, pages = make_cache(checkpoints=3)
    for stem in (1, 2, 3):
        put(cache, pages, stem, stem)
    match = cache.match([*tokens_of(1, 1), 0], False)
    cache.pin(match)
    cache.unpin(match)
    put(cache, pages, 4, 4)
    found = [cache.match([*tokens_of(s, s), 0], False).prefix is not None for s in (1, 2, 3, 4)]
    assert found == [True, False, True, True]
    assert cache.evictions == 1
    assert cache.blocks_held == 6, "blocks that lead to no state are given back"


def test_a_pinned_state_is_not_evicted():
    cache, pages = make_cache(checkpoints=1)
    put(cache, pages, 1)
    match = cache.match([*tokens_of(1), 0], False)
    cache.pin(match)
    held = pages.take(5, 1)
    assert not cache.insert(tokens_of(2), held, False, lambda number: None)
    assert not cache.make_room(20)
    cache.unpin(match)
    assert cache.insert(tokens_of(2), held, False, lambda number: None)
    assert cache.match([*tokens_of(1), 0], False).prefix is None


def test_room_is_made_from_unused_blocks_only():
    cache, pages = make_cache(num_blocks=8, checkpoints=3)
    put(cache, pages, 1, 2, keep=True)  # a sequence runs on these
    put_again = pages.take(7, 2)
    cache.insert(tokens_of(3, 4), put_again, False, lambda number: None)
    pages.give(7)
    assert pages.free_blocks == 4
    assert not cache.make_room(7), "two blocks belong to a sequence"
    assert cache.checkpoints_used == 2, "nothing is evicted where it would not suffice"
    assert cache.make_room(6)
    assert pages.free_blocks == 6
    assert cache.match([*tokens_of(1, 2), 0], False).prefix is not None
    pages.give(99)
    assert cache.make_room(8)
    assert cache.checkpoints_used == 0


def test_a_failed_save_leaves_nothing_behind():
    cache, pages = make_cache()
    held = pages.take(0, 2)

    def failing(number):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.insert(tokens_of(1, 2), held, False, failing)
    pages.give(0)
    assert (cache.checkpoints_used, cache.blocks_held, pages.free_blocks) == (0, 0, 20)


def test_where_prompts_are_saved():
    cache, _ = make_cache()  # interval 8
    assert cache.boundaries(0, 30, 0) == (8, 16, 24, 28)
    assert cache.boundaries(8, 30, 20) == (16, 20, 24, 28)
    assert cache.boundaries(0, 4, 0) == ()
    assert cache.boundaries(0, 5, 4) == (4,)


def test_random_use_keeps_the_accounts():
    """Checkpoints and blocks add up through inserts, matches, pins and evictions."""
    rng = random.Random(1)
    cache, pages = make_cache(num_blocks=30, checkpoints=5)
    pinned = []
    for step in range(3000):
        path = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        action = rng.random()
        if action < 0.4 and (pages.free_blocks >= len(path) or cache.make_room(len(path))):
            held = pages.take(step, len(path))
            cache.insert(tokens_of(*path), held, rng.random() < 0.3, lambda number: None)
            if rng.random() < 0.9:
                pages.give(step)
        elif action < 0.6:
            pinned.append(cache.match([*tokens_of(*path), 0], False))
            cache.pin(pinned[-1])
        elif action < 0.8 and pinned:
            cache.unpin(pinned.pop())
        elif pages.slots:
            pages.give(rng.choice(list(pages.slots)))
        nodes = list(cache._nodes())
        saved = [node.checkpoint for node in nodes if node.checkpoint is not None]
        assert sorted([*saved, *cache._free]) == list(range(5))
        assert cache.blocks_held == len(nodes)
        assert all(node.children or node.checkpoint is not None for node in nodes)
        expected = [0] * 30
        for block in (*(n.block for n in nodes), *(b for s in pages.slots.values() for b in s)):
            expected[block] += 1
        assert expected == pages.count


# ------------------------------------------------------------------------------ with an engine


@pytest.fixture(scope="module")
def model():
    return tiny_model(2)


def shared_jobs(seed=0):
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(23)]
    own = [[rng.randrange(VOCAB) for _ in range(n)] for n in (9, 4, 14, 1, 6)]
    return [([*stem, *tail], 14) for tail in own]


@pytest.mark.parametrize(
    "policy",
    [
        {"state_commit": "reconstruct"},
        {"state_commit": "reconstruct", "stash": "inputs"},
        {"state_commit": "deferred"},
        {"state_commit": "snapshot"},
    ],
    ids=["reconstruct", "inputs", "deferred", "snapshot"],
)
@pytest.mark.parametrize("drafts", [True, False])
def test_case_16_cached_and_uncached_runs_give_the_same_tokens(policy, drafts, model):
    """CASE 16: prompts that share a stem, then the same prompts and their outputs again."""
    jobs = shared_jobs()
    texts = solo_texts(model, jobs)
    executor = make_executor(model, num_checkpoints=20, num_blocks=120, **policy)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter, interval=8)
    requests = []
    for i, (prompt, count) in enumerate(jobs):  # one after the other, so that each may hit
        requests.append(make_request(i, prompt, count, speculation=drafts))
        run(engine, requests[-1:])
        assert requests[-1].output_token_ids == texts[i]
    # The second prompt shares 20 tokens with the first: multiples of 8 were saved. The second one
    # leaves a state where it left the path, and the third starts there.
    assert [r.num_cached for r in requests][:3] == [0, 16, 20]
    for i, (prompt, count) in enumerate(jobs):
        turn = [*prompt, *texts[i][:7]]  # a conversation that goes on
        again = make_request(i, turn, count - 7, speculation=drafts)
        drafter.texts = {i: texts[i][7:]}
        run(engine, [again])
        assert again.output_token_ids == texts[i][7:]
        assert again.num_cached >= (len(prompt) - 1) // BLOCK * BLOCK
    assert engine.stats.prefix_hits == 9
    assert engine.stats.prefix_queries == 10
    cached = sum(r.num_cached for r in requests)
    assert engine.stats.prefix_hit_tokens > cached
    assert engine.stats.prefilled_tokens == (
        engine.stats.prefix_queried_tokens - engine.stats.prefix_hit_tokens
    )
    check_nothing_leaked(engine)


def test_case_15_a_restored_state_is_the_state_of_the_prefix(model):
    """CASE 15: state, conv window and KV rows after a hit are those of a plain prefill."""
    (prompt, _), *_ = shared_jobs(3)
    executor = make_executor(model, num_checkpoints=8, num_blocks=80, state_commit="deferred")
    engine = make_engine(executor, interval=8)
    run(engine, [make_request(0, prompt, 1)])
    first = engine._prefixes.match(prompt, True).prefix
    slot, other = 2, 0
    assert executor.try_allocate(slot, len(prompt), first)
    count = first.num_tokens
    assert executor.try_allocate(other, count)
    batch = PrefillBatch.pack(prompt[:count], [count], [other], [0], executor.device)
    hidden = executor.prefill(batch).hidden[-1]
    torch.testing.assert_close(executor.checkpoint_hidden(first.checkpoint), hidden)
    for pool in (executor.state.state, executor.state.conv_state):
        torch.testing.assert_close(pool[:, slot], pool[:, other], atol=1e-5, rtol=1e-5)
    pages = executor.kv_cache
    rows = [pages.physical(torch.tensor([s]), torch.arange(count)[None])[0] for s in (slot, other)]
    layers = slice(0, 1)  # the model's own; the MTP module's rows are the drafter's business
    for pool in (pages.k, pages.v):
        torch.testing.assert_close(pool[layers, :, rows[0]], pool[layers, :, rows[1]])
    assert rows[0][-1] != rows[1][-1]
    assert pages.blocks(slot)[: count // BLOCK - 1] == first.blocks[:-1], "shared"
    assert pages.blocks(slot)[count // BLOCK - 1] not in first.blocks, "the last one is a copy"


def test_drafts_after_a_hit_are_those_of_a_fresh_run(model):
    """The MTP module's rows come with the prefix: its trees are the same as without the cache."""
    jobs = shared_jobs(5)[:2]

    class Spy(MtpDynamicDrafter):
        def __init__(self, executor):
            super().__init__(executor, max_nodes=6, max_depth=3, top_k=2)
            self.trees = []

        def propose(self, roots, max_nodes=None):
            trees = super().propose(roots, max_nodes)
            self.trees += trees
            return trees

    seen = []
    for interval in (None, 100):
        executor = make_executor(model, num_checkpoints=8, num_blocks=80)
        spy = Spy(executor)
        engine = make_engine(executor, spy, interval=interval)
        for _ in range(2):
            for i, (prompt, count) in enumerate(jobs):
                run(engine, [make_request(i, prompt, count)])
        seen.append(spy.trees)
    assert engine.stats.prefix_hits == 2
    assert [t.token_ids for t in seen[0]] == [t.token_ids for t in seen[1]]
    for one, two in zip(*seen, strict=True):
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


def test_generated_text_is_saved_at_the_interval_through_accepted_paths(model):
    """A tree is cut where a state is to be saved, so that accepted paths stop there."""
    jobs = [([5, 6, 7], 40)]
    texts = solo_texts(model, jobs)
    executor = make_executor(model, num_checkpoints=8, num_blocks=80)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter, interval=12)
    run(engine, [make_request(0, *jobs[0])])
    assert engine.stats.accepted_tokens > 8
    text = [*jobs[0][0], *texts[0]]
    assert engine._prefixes.match(text, True).prefix.num_tokens == 36


def test_a_cache_that_is_in_the_way_is_given_up(model):
    """A sequence that needs every block runs, however much the cache holds."""
    executor = make_executor(model, num_checkpoints=4, num_blocks=12, scratch_rows=8)
    engine = make_engine(executor, interval=4)
    prompt = list(range(20))
    for count in (1, 20, 20):  # 40 + 8 rows are all there are
        request = make_request(0, prompt, count)
        run(engine, [request])
        assert request.finish_reason == "length"
    check_nothing_leaked(engine)


@pytest.mark.parametrize(
    ("checkpoints", "interval", "message"),
    [(0, 8, "num_checkpoints must be >= 1"), (1, 6, "multiple of the 4 tokens"), (1, 0, "got 0")],
)
def test_refusals(checkpoints, interval, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(FakePages(4), checkpoints, BLOCK, interval)
