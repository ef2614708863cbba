"""Scheduling: the token budget, admission in order, preemption, faults, shapes."""

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

from trtllm_treewy import LLM
from trtllm_treewy.draft_tree import DraftTree, TreeTopology
from trtllm_treewy.runtime.buckets import Buckets
from trtllm_treewy.runtime.drafter import MtpStaticDrafter
from trtllm_treewy.runtime.scheduler import BatchWait, split_budget


@pytest.fixture(scope="module")
def model():
    return tiny_model(1)


def random_jobs(count: int, longest: int, tokens: int, seed: int = 0):
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))], tokens)
        for _ in range(count)
    ]


# ------------------------------------------------------------------------------- token budget


@pytest.mark.parametrize(
    ("budget", "trees", "prompts", "expected"),
    [
        (100, [8, 8], 50, (16, 50)),  # both fit
        (100, [8, 8], 500, (16, 84)),  # drafts ask for less than half
        (30, [40, 40], 5, (25, 5)),  # the prompt asks for less than half
        (30, [40, 40], 500, (16, 14)),  # each half of what the roots leave
        (31, [40, 40], 500, (16, 15)),
        (3, [40, 40], 500, (2, 1)),  # a prompt always advances
        (2, [40, 40], 0, (2, 0)),
        (7, [], 500, (0, 7)),
        (7, [1, 1], 0, (2, 0)),
    ],
)
def test_budget_is_shared(budget, trees, prompts, expected):
    nodes, prompt_tokens = split_budget(budget, trees, prompts)
    assert (nodes, prompt_tokens) == expected
    assert nodes + prompt_tokens <= budget


def test_split_never_starves_anyone():
    rng = random.Random(3)
    for _ in range(2000):
        trees = [rng.randint(1, 30) for _ in range(rng.randint(0, 6))]
        prompts = rng.randint(0, 60)
        budget = len(trees) + rng.randint(1, 50)
        nodes, given = split_budget(budget, trees, prompts)
        assert len(trees) <= nodes <= sum(trees)
        assert nodes + given <= budget
        assert (given > 0) == (prompts > 0)
        spare = budget - nodes - given
        assert spare == 0 or (nodes == sum(trees) and given == prompts), "nothing is wasted"


@pytest.mark.parametrize("budget", [6, 17, 30])
def test_case_25_prompts_and_trees_share_a_step_and_trees_are_pruned(budget, model):
    """CASE 25: beside a long prompt the trees shrink to their best nodes, and stay trees."""
    jobs = [([1, 2, 3], 30), ([4, 5], 30), ([6] * 60, 5)]
    texts = solo_texts(model, jobs)
    executor = make_executor(model, max_nodes=8, num_blocks=120)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter, budget=budget)
    steps: list[list[int]] = []
    for name, size in (("verify", lambda b: int(b.num_nodes.sum())), ("prefill", len_of)):
        original = getattr(executor, name)

        def counted(batch, original=original, size=size, name=name):
            steps[-1].append((name, size(batch)))
            return original(batch)

        setattr(executor, name, counted)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    engine.add(requests[0])
    engine.add(requests[1])
    for _ in range(200):
        if requests[2].added_at is None and len(requests[0].output_token_ids) >= 3:
            engine.add(requests[2])
        if not engine.has_work:
            break
        steps.append([])
        engine.step()
    assert all(sum(size for _, size in step) <= budget for step in steps)
    mixed = [dict(step) for step in steps if len(step) == 2]
    assert mixed, "no step ran a prompt beside trees"
    if budget < 30:
        assert engine.stats.pruned_trees > 0
    assert max(step["verify"] for step in mixed) > 2, "drafts beside the prompt"
    assert [r.output_token_ids for r in requests] == [texts[i] for i in range(3)]


def len_of(batch):
    return batch.token_ids.shape[0]


def test_case_4_rows_without_drafts_beside_rows_with_them(model):
    """CASE 4: speculation off for one request leaves the drafts of the others alone."""
    jobs = random_jobs(4, 9, 20)
    texts = solo_texts(model, jobs)
    executor = make_executor(model)
    drafter = GraftingDrafter(executor, texts, 1)
    engine = drafter.engine = make_engine(executor, drafter)
    requests = [make_request(i, p, n, speculation=i % 2 == 0) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    assert [r.output_token_ids for r in requests] == [texts[i] for i in range(4)]
    assert all(r.stats.num_drafted == 0 for r in requests[1::2])
    assert all(r.stats.num_accepted > 0 for r in requests[::2])


def test_case_1_a_step_without_drafts_after_long_acceptances(model):
    """CASE 1: the step after an accepted path starts from its end, drafts or none."""
    jobs = [([3, 1, 4], 40)]
    texts = solo_texts(model, jobs)
    executor = make_executor(model)
    lengths = []

    class Alternating(GraftingDrafter):
        def graft(self, tree, request):
            if len(lengths) % 2:
                lengths.append(0)
                return DraftTree.root_only(tree.token_ids[0])
            tokens = texts[0][len(request.output_token_ids) - 1 :][:5]
            lengths.append(len(tokens))
            count = len(tokens)
            return DraftTree(tuple(tokens), tuple(range(-1, count - 1)), (0.0,) * count)

    drafter = Alternating(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter)
    request = make_request(0, *jobs[0])
    run(engine, [request])
    assert request.output_token_ids == texts[0]
    assert engine.stats.accepted_lengths[4] > 3
    assert engine.stats.accepted_lengths[0] > 3


def test_case_17_prompts_in_chunks_of_any_size(model):
    """CASE 17: the last prompt token runs as a prompt token, whatever the chunks."""
    jobs = random_jobs(6, 40, 6, seed=5)
    texts = solo_texts(model, jobs)
    for budget in (4, 7, 11, 200):
        executor = make_executor(model, num_blocks=200)
        engine = make_engine(executor, budget=budget)
        requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
        run(engine, requests)
        assert [r.output_token_ids for r in requests] == [texts[i] for i in range(6)]
        assert engine.stats.prefilled_tokens == sum(len(p) for p, _ in jobs)


# ---------------------------------------------------------------------- admission, preemption


def test_waiting_requests_are_admitted_in_order(model):
    """The first in line is not passed by smaller ones that would fit."""
    executor = make_executor(model, num_blocks=16, scratch_rows=8)  # 64 rows
    engine = make_engine(executor)
    first = make_request(0, [1] * 30, 8)
    big = make_request(1, [2] * 40, 4)
    small = make_request(2, [3], 4)
    for request in (first, big, small):
        engine.add(request)
    engine.step()
    assert first.slot is not None
    assert big.slot is None
    assert small.slot is None, "it would fit, and waits behind the big one"
    assert (engine.stats.running, engine.stats.waiting) == (1, 2)
    while engine.has_work:
        engine.step()
    assert first.admitted_at < big.admitted_at <= small.admitted_at
    check_nothing_leaked(engine)


def test_every_slot_is_filled_where_nobody_can_grow(model):
    """Blocks for four whole sequences hold four, though none is left over when the last comes."""
    executor = make_executor(model, num_blocks=4, scratch_rows=2, tokens_per_block=16)
    engine = make_engine(executor)
    requests = [make_request(number, [number + 1] * 6, 8) for number in range(4)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (4, 0)
    run(engine, [])
    assert engine.stats.preemptions == 0
    check_nothing_leaked(engine)


def test_a_block_is_left_for_each_that_may_grow(model):
    executor = make_executor(model, num_blocks=4, scratch_rows=2, tokens_per_block=16)
    engine = make_engine(executor)
    for number in range(4):
        engine.add(make_request(number, [number + 1] * 6, 20))  # two blocks in the end
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 2)
    run(engine, [])
    assert engine.stats.preemptions == 0
    check_nothing_leaked(engine)


def test_priority_goes_before_arrival(model):
    executor = make_executor(model, max_batch_size=1)
    engine = make_engine(executor)
    requests = [make_request(i, [i + 1], 3, priority=p) for i, p in enumerate((0, 0, 5))]
    run(engine, requests)
    order = sorted(requests, key=lambda r: r.admitted_at)
    assert [r.request_id for r in order] == [2, 0, 1]


def test_the_newest_is_preempted_and_resumes_with_the_same_tokens(model):
    jobs = random_jobs(4, 12, 40, seed=7)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, num_blocks=24, scratch_rows=8)
    engine = make_engine(executor)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    assert [r.output_token_ids for r in requests] == [texts[i] for i in range(4)]
    assert requests[0].num_preemptions == 0
    assert requests[-1].num_preemptions > 0
    assert engine.stats.preemptions == sum(r.num_preemptions for r in requests)
    assert engine.stats.recomputed_tokens > 0
    ends = [r.finished_at for r in requests]
    assert ends[0] == min(ends)
    check_nothing_leaked(engine)


def test_a_request_that_can_never_fit_is_refused_at_once(model):
    """CASE 27 at run time: with the numbers, before anything is queued."""
    engine = make_engine(make_executor(model, num_blocks=10, scratch_rows=8))
    with pytest.raises(ValueError, match="50 tokens needs 58 rows of the KV cache, which has 40"):
        engine.add(make_request(0, [1] * 30, 20))
    with pytest.raises(ValueError, match="is 129, expected at most max_seq_len=128"):
        engine.add(make_request(0, [1] * 100, 29))
    assert not engine.has_work
    assert engine.stats.requests_added == 0
    just = make_request(1, [1] * 12, 20)  # 32 + 8 rows, all there are
    run(engine, [just])
    assert just.finish_reason == "length"


# ------------------------------------------------------------------------------------- faults


PLACES = ["prefill", "verify", "commit", "draft", "draft_extend", "draft_enter"]


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_one_step_costs_nobody_a_token(place, model):
    jobs = random_jobs(4, 12, 12, seed=2)
    texts = solo_texts(model, jobs)
    executor = make_executor(model)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter)
    original, calls = getattr(executor, place), []

    def failing(*args):
        calls.append(len(args))
        if len(calls) == 2:
            raise RuntimeError("boom")
        return original(*args)

    setattr(executor, place, failing)
    warm = make_request(9, [1, 2], 3)
    drafter.texts = {**texts, 9: []}
    engine.add(warm)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    assert engine.stats.executor_faults == 1
    alive = [r for r in requests if r.finish_reason == "length"]
    assert len(alive) >= 3
    assert all(r.output_token_ids == texts[r.request_id] for r in alive)
    check_nothing_leaked(engine)


@pytest.mark.parametrize("place", ["prefill", "verify", "commit"])
def test_a_request_that_always_fails_ends_alone(place, model):
    """A sequence whose steps raise takes nobody with it, and the error is told."""
    jobs = random_jobs(4, 12, 12, seed=2)
    texts = solo_texts(model, jobs)
    executor = make_executor(model)
    engine = make_engine(executor)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    original = getattr(executor, place)

    def failing(batch, *args):
        if requests[2].slot is not None and requests[2].slot in batch.slot.tolist():
            raise RuntimeError("illegal instruction")
        return original(batch, *args)

    setattr(executor, place, failing)
    run(engine, requests)
    assert requests[2].finish_reason == "error"
    assert requests[2].error == "the engine step failed: RuntimeError: illegal instruction"
    for i in (0, 1, 3):
        assert requests[i].output_token_ids == texts[i]
    assert engine.stats.requests_failed == 1
    check_nothing_leaked(engine)


def test_case_8_a_poisoned_sequence_fails_alone_and_its_slot_is_clean_again(model):
    """CASE 8: NaN in the state, KV rows and logits of one request reaches no other."""
    jobs = random_jobs(3, 12, 20, seed=3)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, max_batch_size=2)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    for request in requests:
        engine.add(request)
    while len(requests[0].output_token_ids) < 4:
        engine.step()
    executor.state.state[:, requests[0].slot] = torch.nan
    executor.state.conv_state[:, requests[0].slot] = torch.inf
    while engine.has_work:
        engine.step()
    assert requests[0].finish_reason == "error"
    assert "not finite" in requests[0].error
    assert engine.stats.non_finite_logits == 1
    for i in (1, 2):  # the last one takes over the slot
        assert requests[i].output_token_ids == texts[i]


# ----------------------------------------------------------------------------------- buckets


def test_case_5_buckets_cover_every_shape_up_to_the_limit():
    """CASE 5: every size up to the limit has a shape; beyond it is an error."""
    buckets = Buckets(37, 40)
    for rows in range(1, 38):
        for nodes in range(1, 41):
            shape = buckets.pad(rows, nodes)
            assert shape[0] >= rows
            assert shape[1] >= nodes
            assert shape[0] <= max(8, rows + 8)
    assert len(buckets.batch) * len(buckets.nodes) < 120
    for shape in ((38, 1), (1, 41)):
        with pytest.raises(ValueError, match="exceed the largest shape of 37 rows and 40 nodes"):
            buckets.pad(*shape)


def test_steps_have_bucket_shapes_and_the_same_tokens(model):
    """CASES 7, 13, 23: padded rows and nodes change nothing, whatever the topology."""
    jobs = random_jobs(7, 12, 20, seed=4)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, max_batch_size=5)
    drafter = GraftingDrafter(executor, texts, 0)
    engine = drafter.engine = make_engine(executor, drafter, buckets=True)
    shapes, topologies, verify = set(), set(), executor.verify

    def spied(batch):
        shapes.add(tuple(batch.parents.shape))
        topologies.add(tuple(batch.parents.flatten().tolist()))
        depth = batch.positions - batch.context_lens[:, None]
        assert torch.equal(depth[:, 0], torch.zeros_like(depth[:, 0]))
        assert (depth >= 0).all()
        return verify(batch)

    executor.verify = spied
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    assert [r.output_token_ids for r in requests] == [texts[i] for i in range(7)]
    assert shapes <= {(b, n) for b in (1, 2, 4, 5) for n in (1, 2, 4, 8)}
    assert len(topologies) > 2 * len(shapes), "few shapes, many topologies"


def test_statistics_of_a_run(model):
    jobs = random_jobs(5, 12, 10, seed=6)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, max_batch_size=2)
    drafter = GraftingDrafter(executor, texts, 0)
    ticks = iter(range(10**6))
    engine = make_engine(executor, drafter, clock=lambda: float(next(ticks)))
    drafter.engine = engine
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    stats = engine.stats
    assert stats.generated_tokens == 50
    assert stats.trees == sum(stats.accepted_lengths) == sum(r.stats.num_steps for r in requests)
    assert stats.accepted_tokens == sum(i * n for i, n in enumerate(stats.accepted_lengths))
    assert stats.accepted_tokens == sum(stats.accepted_per_depth)
    depths = len(stats.accepted_per_depth)
    assert depths <= len(stats.drafted_per_depth)
    pairs = zip(stats.accepted_per_depth, stats.drafted_per_depth[:depths], strict=True)
    assert all(accepted <= drafted for accepted, drafted in pairs)
    assert stats.admissions == 5
    assert stats.queue_seconds > 0
    for r in requests:
        assert r.added_at < r.admitted_at < r.first_token_at < r.finished_at


def test_a_static_tree_keeps_its_topology_through_the_engine(model):
    """The MTP drafter itself, its rows in the shared cache, under preemption."""
    jobs = random_jobs(5, 12, 25, seed=8)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, num_blocks=24)
    drafter = MtpStaticDrafter(executor, TreeTopology.from_widths([2, 2]))
    engine = make_engine(executor, drafter)
    requests = [make_request(i, p, n) for i, (p, n) in enumerate(jobs)]
    run(engine, requests)
    assert [r.output_token_ids for r in requests] == [texts[i] for i in range(5)]
    assert engine.stats.preemptions > 0
    check_nothing_leaked(engine)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_random_sampling_through_the_engine(rule, model):
    """One seed gives one text, alone or in a batch with drafts, preemptions and prefixes.

    By rejection the text depends on the drafts, so that there it is only complete.
    """
    from trtllm_treewy import SamplingParams
    from trtllm_treewy.runtime.request import Request
    from trtllm_treewy.runtime.sampling import AcceptanceRule, SamplingDynamicDrafter
    from trtllm_treewy.runtime.tree_sampler import TreeSampler

    jobs = random_jobs(6, 12, 20, seed=9)
    params = [
        SamplingParams(max_tokens=20, temperature=0.7, seed=i, repetition_penalty=1.2)
        if i % 3
        else SamplingParams(max_tokens=20, temperature=1.0, top_k=9, seed=i, logprobs=2)
        for i in range(6)
    ]

    def requests():
        return [Request(i, tuple(p), params[i]) for i, (p, _) in enumerate(jobs)]

    def sampler():
        return TreeSampler(VOCAB, torch.device("cpu"), AcceptanceRule(rule))

    solo = requests()
    for request in solo:
        run(make_engine(make_executor(model), sampler=sampler()), [request])
    executor = make_executor(model, num_blocks=26, num_checkpoints=3)
    drafter = SamplingDynamicDrafter(executor, max_nodes=8, max_depth=3, top_k=3)
    engine = make_engine(executor, drafter, interval=8, buckets=True, sampler=sampler())
    batch = requests()
    run(engine, batch)
    assert engine.stats.accepted_tokens > 0
    assert engine.stats.preemptions > 0
    for alone, shared in zip(solo, batch, strict=True):
        assert shared.finish_reason == "length"
        assert len(shared.output_token_ids) == 20
        assert len(shared.logprobs) == (20 if shared.params.logprobs else 0)
        if rule == "match":
            assert shared.output_token_ids == alone.output_token_ids
        for token, entry in zip(shared.output_token_ids, shared.logprobs, strict=False):
            assert token in entry
    check_nothing_leaked(engine)


def test_settings_that_cannot_be_carried_out_are_refused_when_added(model):
    from trtllm_treewy import SamplingParams
    from trtllm_treewy.runtime.request import Request

    engine = make_engine(make_executor(model))
    with pytest.raises(ValueError, match="logit_bias has token id 61, expected ids below"):
        engine.add(Request(0, (1,), SamplingParams(logit_bias={61: 1.0})))
    assert not engine.has_work


# ------------------------------------------------------------------------- waiting for others


def admission_steps(engine, requests, arrivals):
    """The engine step in which each request got its slot; `arrivals` are steps."""
    admitted = {}
    for step in range(500):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.add(request)
        if not engine.has_work and step > max(arrivals):
            return admitted
        engine.step()
        for request in requests:
            if request.admitted_at is not None:
                admitted.setdefault(request.request_id, step)
    raise AssertionError("work is left")


def waiting_engine(model, wait, **options):
    executor = make_executor(model, max_batch_size=8, num_blocks=200, max_seq_len=128)
    return executor, make_engine(executor, batch_wait=wait, **options)


@pytest.mark.parametrize("speculate", [False, True])
def test_requests_wait_for_others_to_start_with_them(model, speculate):
    jobs = random_jobs(5, 9, 24)
    texts = solo_texts(model, jobs)
    options = {}
    executor = make_executor(model, max_batch_size=8, num_blocks=200, max_seq_len=128)
    if speculate:
        options["drafter"] = MtpStaticDrafter(executor, TreeTopology.from_widths([2, 2]))
    engine = make_engine(executor, batch_wait=BatchWait(4, 1000), **options)
    requests = [make_request(i, prompt, count) for i, (prompt, count) in enumerate(jobs)]
    # Nobody decodes at 0; the second and the third wait for four steps since the second came.
    admitted = admission_steps(engine, requests, [0, 2, 4, 6, 6])
    assert admitted == {0: 0, 1: 6, 2: 6, 3: 6, 4: 6}
    assert {r.request_id: list(r.output_token_ids) for r in requests} == texts
    check_nothing_leaked(engine)


def test_enough_prompt_tokens_wait_for_nobody(model):
    _, engine = waiting_engine(model, BatchWait(50, 10))
    requests = [make_request(i, [1] * length, 30) for i, length in enumerate((3, 4, 4, 9, 2))]
    admitted = admission_steps(engine, requests, [0, 1, 2, 4, 6])
    # 4 and 4 are too few, with 9 they are enough; the last has nobody who decodes for 50 steps.
    assert [admitted[i] for i in range(4)] == [0, 4, 4, 4]
    assert 6 < admitted[4] <= 40


def test_waiting_ends_with_the_last_that_decodes(model):
    _, engine = waiting_engine(model, BatchWait(1000, 1000))
    requests = [make_request(0, [1, 2], 6), make_request(1, [3, 4], 2)]
    admitted = admission_steps(engine, requests, [0, 1])
    assert admitted[1] <= 8
    assert all(r.finish_reason == "length" for r in requests)


def test_a_full_batch_waits_for_nobody_longer(model):
    """Steps without a free slot do not count: what waits there could not start."""
    executor = make_executor(model, max_batch_size=1, num_blocks=200, max_seq_len=128)
    engine = make_engine(executor, batch_wait=BatchWait(3, 1000))
    requests = [make_request(i, [1, 2], 5) for i in range(3)]
    run(engine, requests)
    assert [r.finish_reason for r in requests] == ["length"] * 3


def test_a_step_counts_once_however_often_it_asks(model):
    """The device's steps go on, or are planned anew: both look for those who can start."""
    _, engine = waiting_engine(model, BatchWait(3, 1000))
    engine.add(make_request(0, [1, 2], 30))
    engine.step()
    engine.step()
    engine.add(make_request(1, [1, 2], 30))
    for _ in range(3):
        engine._scheduler.begin_step()
        assert not engine._scheduler.admit()
        assert not engine._scheduler.admit()
    engine._scheduler.begin_step()
    assert len(engine._scheduler.admit()) == 1


def test_a_high_priority_ends_the_wait_of_all_and_a_low_one_does_not(model):
    _, engine = waiting_engine(model, BatchWait(50, 1000))
    jobs = [([1, 2], 40, 0), ([3], 20, 0), ([4], 20, -1), ([5], 20, 1), ([6], 20, 0)]
    requests = [
        make_request(i, prompt, count, priority=priority)
        for i, (prompt, count, priority) in enumerate(jobs)
    ]
    admitted = admission_steps(engine, requests, [0, 2, 3, 7, 9])
    assert [admitted[i] for i in range(4)] == [0, 7, 7, 7]
    assert admitted[4] > 12


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_who_has_waited_starts_as_soon_as_there_is_memory(model, steps):
    """And does not wait once more for each time that there was none."""
    admitted = []
    for wait in (None, BatchWait(steps, 1000)):
        executor = make_executor(model, num_blocks=30)
        engine = make_engine(executor, batch_wait=wait, budget=128)
        sizes = ((4, 80), (64, 12), (64, 12))
        requests = [make_request(i, [1] * length, count) for i, (length, count) in enumerate(sizes)]
        admitted.append(admission_steps(engine, requests, [0, 0, 1]))
        check_nothing_leaked(engine)
    assert admitted[0] == admitted[1]
    assert admitted[0][2] > 11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_wait_timeout_iters": -1}, "batch_wait_timeout_iters must be an integer >= 0"),
        ({"batch_wait_timeout_iters": True}, "got True"),
        ({"batch_wait_max_tokens_ratio": 1.5}, "must be from 0 to 1, got 1.5"),
        ({"batch_wait_max_tokens_ratio": "a"}, "got 'a'"),
        ({"max_num_tokens": None}, "max_num_tokens must be an integer >= 1, got None"),
        ({"max_num_tokens": "8"}, "max_num_tokens must be an integer >= 1, got '8'"),
        ({"max_num_tokens": float("nan")}, "max_num_tokens must be an integer >= 1, got nan"),
    ],
)
def test_settings_of_the_wait_are_checked(shipped_model, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(shipped_model, **settings)
