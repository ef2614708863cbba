"""Captured steps, called instead of replayed: the same buffers, so the same faults would show.

Tokens are those of plain decoding, whatever is in the batch and in the buffers from steps before.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from checkpoints import hf_config
from engine_world import (
    VOCAB,
    GraftingDrafter,
    check_nothing_leaked,
    make_engine,
    make_executor,
    make_request,
    run,
    solo_texts,
    tiny_config,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.draft_tree import DraftTree, TreeTopology
from trtllm_treewy.llmapi import cuda_graph_config_from
from trtllm_treewy.model.dummy import dummy_model
from trtllm_treewy.runtime.acceptance_law import accept_by_depth
from trtllm_treewy.runtime.cuda_graphs import GraphSizes, RecordedCalls
from trtllm_treewy.runtime.decode_buffers import Arrival
from trtllm_treewy.runtime.decode_graphs import GraphOptions
from trtllm_treewy.runtime.device_decoder import DeviceDecoder
from trtllm_treewy.runtime.drafter import MtpStaticDrafter, NullDrafter
from trtllm_treewy.runtime.static_drafts import best_nodes
from trtllm_treewy.runtime.tree_policy import AutoTrees

TOPOLOGIES = {
    "chain": TreeTopology.chain(3),
    "tree": TreeTopology.from_widths((2, 2)),
    "parents": TreeTopology.from_parents([-1, 0, 0, 1, 1, 3, 2, 0]),
}
POLICIES = {
    "reconstruct": {"state_commit": "reconstruct"},
    "inputs": {"state_commit": "reconstruct", "stash": "inputs"},
    "deferred": {"state_commit": "deferred"},
    "snapshot": {"state_commit": "snapshot"},
}


@pytest.fixture(scope="module")
def model():
    """Its MTP module agrees with it often, so that drafts are accepted at every depth."""
    return agreeable(tiny_model(5))


@pytest.fixture(scope="module")
def first_jobs(model):
    jobs = random_jobs(3, 14)
    return jobs, solo_texts(model, jobs)


def agreeable(model):
    """Makes the text follow its last token for the most part, and the MTP module know how."""
    with torch.no_grad():
        for layer in [*model.model.layers, *model.mtp.layers]:
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) or (
                    name.endswith("experts.down_proj")
                ):
                    parameter.mul_(0.06)
        model.mtp.norm.weight.copy_(model.model.norm.weight)
        model.mtp.pre_fc_norm_embedding.weight.zero_()
        hidden = model.config.hidden_size
        model.mtp.fc.weight.mul_(0.05)
        model.mtp.fc.weight[:, :hidden] += torch.eye(hidden).to(model.mtp.fc.weight)
    return model


def random_jobs(seed: int, count: int):
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))], rng.randint(1, 30))
        for _ in range(count)
    ]


def graph_engine(model, topology, *, runner=None, sizes=None, options=None, policy=None, **changes):
    """An engine whose steps are captured, with a drafter of `topology`."""
    budget, interval = changes.pop("budget", 64), changes.pop("interval", None)
    prompts = changes.pop("prompts", ())
    executor = make_executor(model, max_nodes=topology.num_nodes, **changes)
    drafter = MtpStaticDrafter(executor, topology) if topology.num_nodes > 1 else NullDrafter()
    sizes = sizes or GraphSizes((1, 2, 4), tuple(sorted({1, topology.num_nodes})))
    runner = runner or RecordedCalls()
    if prompts:
        executor.make_prompt_graphs(runner, prompts, topology.num_nodes > 1).capture_all()
    graphs = executor.make_graphs(
        runner, GraphOptions(sizes, topology.depth + 1, topology, **(options or {}))
    )
    graphs.capture_all()
    decoder = DeviceDecoder(graphs, getattr(drafter, "cache", None))
    return make_engine(
        executor, drafter, budget=budget, interval=interval, decoder=decoder, policy=policy
    )


def check(engine, texts, jobs, **fields):
    requests = [make_request(i, *job, **fields) for i, job in enumerate(jobs)]
    run(engine, requests)
    for request in requests:
        assert request.error is None
        assert list(request.output_token_ids) == texts[request.request_id]
    check_nothing_leaked(engine)
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_tokens_are_those_of_plain_decoding(model, first_jobs, name, policy):
    """CASES 1, 8, 23: rows come and go, buffers hold what earlier steps left."""
    jobs, texts = first_jobs
    engine = graph_engine(model, TOPOLOGIES[name], **POLICIES[policy])
    check(engine, texts, jobs)
    stats = engine.stats
    assert stats.graph_steps
    assert not stats.graph_misses
    assert all(stats.accepted_per_depth), "every depth is accepted somewhere"


def test_without_drafts(model):
    jobs = random_jobs(4, 9)
    engine = graph_engine(model, TreeTopology.chain(0))
    check(engine, solo_texts(model, jobs), jobs)
    assert engine.stats.graph_steps > 10


@pytest.mark.parametrize("seed", range(3))
def test_drafts_on_the_device_are_those_of_the_drafter(model, seed):
    """The same trees are verified with graphs and without: acceptance is equal step by step."""
    jobs = random_jobs(20 + seed, 6)
    topology = list(TOPOLOGIES.values())[seed]
    engine = graph_engine(model, topology)
    run(engine, [make_request(i, *job) for i, job in enumerate(jobs)])
    executor = make_executor(model, max_nodes=topology.num_nodes)
    other = make_engine(executor, MtpStaticDrafter(executor, topology))
    run(other, [make_request(i, *job) for i, job in enumerate(jobs)])
    for name in ("accepted_lengths", "accepted_per_depth", "drafted_per_depth", "generated_tokens"):
        assert getattr(engine.stats, name) == getattr(other.stats, name)


def test_under_pressure_and_with_a_prefix_cache(model):
    """CASES 4, 16: preempted rows come back, saved states end a tree, prefixes start a sequence."""
    jobs = random_jobs(5, 10)
    jobs += [(jobs[0][0] + [7, 8], 12), (jobs[3][0], 20), (jobs[0][0] + [7], 9)]
    texts = solo_texts(model, jobs)
    engine = graph_engine(
        model, TOPOLOGIES["tree"], num_blocks=26, num_checkpoints=4, interval=8, max_seq_len=64
    )
    check(engine, texts, jobs)
    assert engine.stats.preemptions
    assert engine.stats.prefix_hits


def test_requests_change_between_both_ways(model):
    """Rows with and without drafts, and some that the host must sample, in one engine."""
    jobs = random_jobs(6, 12)
    texts = solo_texts(model, jobs)
    engine = graph_engine(model, TOPOLOGIES["tree"])
    plain = engine._sampler.is_plain
    rng = random.Random(1)
    engine._sampler.is_plain = lambda request: plain(request) and rng.random() < 0.7
    requests = [make_request(i, *job, speculation=i % 4 != 3) for i, job in enumerate(jobs)]
    run(engine, requests)
    assert [list(r.output_token_ids) for r in requests] == [texts[i] for i in range(len(jobs))]
    check_nothing_leaked(engine)
    assert 0 < engine.stats.graph_steps < engine.stats.steps


def test_a_step_that_is_not_captured_or_must_be_pruned_is_counted(model):
    jobs = random_jobs(7, 8)
    texts = solo_texts(model, jobs)
    sizes = GraphSizes((2,), (1, 7), padding=False)
    engine = graph_engine(model, TOPOLOGIES["tree"], sizes=sizes)
    check(engine, texts, jobs)
    assert engine.stats.graph_misses
    assert engine.stats.graph_steps
    engine = graph_engine(model, TOPOLOGIES["tree"], budget=12)
    check(engine, texts, jobs)
    stats = engine.stats
    assert min(stats.graph_misses, stats.graph_steps, stats.pruned_trees) > 0


@pytest.mark.parametrize("seed", range(2))
def test_arrivals_and_cancels_while_a_step_is_under_way(model, seed):
    """CASES 5, 28: the next step starts before the host has heard of the last one."""
    rng = random.Random(seed)
    jobs = random_jobs(30 + seed, 40)
    texts = solo_texts(model, jobs)
    name = list(TOPOLOGIES)[seed]
    engine = graph_engine(model, TOPOLOGIES[name], num_blocks=48)
    requests = [make_request(i, *job) for i, job in enumerate(jobs)]
    waiting, ahead = list(requests), 0
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            engine.add(waiting.pop(0))
        if rng.random() < 0.05:
            engine.cancel([rng.choice(requests)])
        if engine._scheduler.running and rng.random() < 0.03:
            request = rng.choice(engine._scheduler.running)
            engine.stop(request, len(request.output_token_ids) // 2, "stop")
        waiting = [request for request in waiting if not request.finished]
        engine.step()
        ahead += bool(engine._device.under_way)
    ends = set()
    for number, request in enumerate(requests):
        ends.add(request.finish_reason)
        got = list(request.output_token_ids)
        assert got == texts[number][: len(got)]
        assert request.finish_reason != "length" or got == texts[number]
    assert ends == {"length", "cancelled", "stop"}
    assert ahead > 20
    check_nothing_leaked(engine)


class Sizes:
    """A policy that asks for another number of nodes at every step."""

    def __init__(self, sizes):
        self.sizes, self.asked, self.reports = sizes, 0, []

    def limit(self, rows):
        self.asked += 1
        return self.sizes[(self.asked - 1) % len(self.sizes)]

    def observe(self, report):
        self.reports.append(report)


class Counted(RecordedCalls):
    """Counts what is replayed: the first part of the key, and the levels of drafts.

    Steps that keep the pairs of which the MTP module has not heard are "append".
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def replay(self, key):
        super().replay(key)
        name = "append" if key[0] == "step" and key[-1] else key[0]
        self.counts[(name, key[3]) if name == "draft" else name] += 1


STEP_SIZES = {"chain": (1, 2, 3, 4), "tree": (1, 3, 5, 7), "parents": (1, 2, 5, 8)}


def sized_engine(model, name, policy, **changes):
    """Its steps may have several numbers of nodes; those of chains tell no trees."""
    sizes = GraphSizes((1, 2, 4), STEP_SIZES[name])
    options = {"report_trees": name != "chain", "all_nodes": True}
    return graph_engine(
        model, TOPOLOGIES[name], policy=policy, sizes=sizes, options=options, **changes
    )


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_size_of_trees_may_change_at_every_step(model, name, commit):
    """It is settled while steps before it are under way; the policy hears of what was verified."""
    jobs = random_jobs(8, 12)
    rng = random.Random(len(name) + len(commit))
    policy = Sizes([rng.choice((1, 1, *STEP_SIZES[name])) for _ in range(97)])
    engine = sized_engine(model, name, policy, **POLICIES[commit])
    requests = [make_request(i, *job, speculation=i % 5 != 4) for i, job in enumerate(jobs)]
    ahead = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        ahead += bool(engine._device.under_way)
    texts = solo_texts(model, jobs)
    assert [list(r.output_token_ids) for r in requests] == [texts[i] for i in range(len(jobs))]
    check_nothing_leaked(engine)
    assert ahead > 20
    assert not engine.stats.graph_misses
    for report in policy.reports:
        (nodes,) = {tree.num_nodes for tree in report.trees}
        assert nodes in STEP_SIZES[name]
        for tree, path in zip(report.trees, report.paths, strict=True):
            assert all(tree.parent_ids[b] == a for a, b in pairwise(path))
            scores = tree.log_probs
            assert all(scores[n] <= scores[tree.parent_ids[n]] for n in range(1, nodes))
    assert {tree.num_nodes for r in policy.reports for tree in r.trees} == {*STEP_SIZES[name]}
    assert sum(report.whole for report in policy.reports) > 10


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_trees_of_any_size_are_those_of_the_drafter(model, name):
    """After steps without drafts too: the module has seen every token by the next draft."""
    rng = random.Random(3)
    sizes = [1] * 3 + [rng.choice((1, 1, 1, *STEP_SIZES[name])) for _ in range(60)]
    topology, stats = TOPOLOGIES[name], []
    executor = make_executor(model, max_nodes=topology.num_nodes)
    host = make_engine(executor, MtpStaticDrafter(executor, topology), policy=Sizes(sizes))
    for engine in (host, sized_engine(model, name, Sizes(sizes))):
        run(engine, [make_request(0, [3, 1, 4, 1, 5], 40)])
        found = engine.stats
        stats.append((found.steps, found.accepted_lengths, found.accepted_per_depth))
    assert sum(stats[0][2]) > 3
    # The captured steps' is one step longer: what was started before the end was heard of.
    assert [each[1:] for each in stats[1:]] == [stats[0][1:]]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(2))
def test_the_module_has_seen_every_token_whatever_the_sizes(name, seed):
    """Its rows of the cache, pair by pair, against those of a drafter on the host."""
    model, topology, rng = tiny_model(11 + seed), TOPOLOGIES[name], random.Random(seed)
    sizes = [rng.choice((1, 1, 1, 1, *STEP_SIZES[name])) for _ in range(60)]
    executor = make_executor(model, max_nodes=topology.num_nodes)
    host = make_engine(executor, MtpStaticDrafter(executor, topology), policy=Sizes(sizes))
    rows = []
    for engine in (host, sized_engine(model, name, Sizes(sizes))):
        requests = [make_request(i, [3, 1, 4, 1, 5 + i], 45) for i in range(3)]
        for request in requests:
            engine.add(request)
        while min(len(r.output_token_ids) for r in requests) < 30:
            engine.step()
        engine._hear()
        cache = engine._executor.kv_cache
        for request in requests:
            if engine._device is not None:
                engine._device.decoder.release(request)
            engine._drafter.settle(request.slot)
            places = cache.physical(torch.tensor([request.slot]), torch.arange(30)[None])[0]
            layer = len(model.config.attention_layers)
            rows.append(torch.cat([cache.k[layer][:, places], cache.v[layer][:, places]]))
    for one, other in zip(rows[:3], rows[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_steps_without_drafts_leave_the_module_alone_but_for_one_pass_over_several(model):
    runner = Counted()
    engine = sized_engine(model, "chain", Sizes([1]), runner=runner)
    run(engine, [make_request(0, [3, 1, 4], 41)])
    assert runner.counts["step"] + runner.counts["append"] >= 40
    assert runner.counts["append"] >= 30
    # A path is four nodes long, and so are pairs that wait.
    assert runner.counts["extend"] in (10, 11)
    assert not any(key[0] == "draft" for key in runner.counts)


def test_a_pass_without_drafts_asks_the_module_for_nothing(model, monkeypatch):
    """Pairs that enter alone leave keys and values: the module's experts and head have a rest."""
    engine = sized_engine(model, "chain", Sizes([1]))
    monkeypatch.setattr(model.mtp.layers[-1].mlp, "forward", None)
    monkeypatch.setattr(model.mtp.norm, "forward", None)
    jobs = [([3, 1, 4], 41), ([5, 9], 30)]
    requests = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(engine, requests)
    assert {r.finish_reason for r in requests} == {"length"}
    assert not engine.stats.executor_faults


def test_no_more_levels_are_drafted_than_a_step_has_nodes_for(model):
    runner = Counted()
    engine = sized_engine(model, "chain", Sizes([2]), runner=runner)
    run(engine, [make_request(0, [3, 1, 4], 30)])
    assert {key for key in runner.counts if key[0] == "draft"} == {("draft", 1)}
    assert not runner.counts["extend"]


# ------------------------------------------------------------------ ahead of the host


class Logged(RecordedCalls):
    """Writes down what is launched, and what torch does outside of what was captured."""

    def __init__(self):
        super().__init__()
        self.log, self.ops, self.inside = [], [], False

    def replay(self, key):
        self.log.append(key[0])
        self.inside = True
        super().replay(key)
        self.inside = False


class Operators(TorchDispatchMode):
    """Notes every operator that writes, as it would be a launch or a copy on a device."""

    def __init__(self, runner):
        super().__init__()
        self.runner = runner

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not (views or self.runner.inside):
            self.runner.ops.append(func.__name__)
        return func(*args, **(kwargs or {}))


def logged_engine(model, name, auto, law, commit):
    """Its decoder writes "heard" into the runner's log when the host reads results."""
    runner, options, policy, sizes = Logged(), {}, None, None
    if auto:
        policy = AutoTrees(STEP_SIZES[name], (1, 2, 4))
        sizes = GraphSizes((1, 2, 4), STEP_SIZES[name])
        options = {"report_trees": name != "chain", "all_nodes": True}
    if law:
        options["accept"] = accept_by_depth((0.8, 0.6, 0.5))
    engine = graph_engine(
        model, TOPOLOGIES[name], runner=runner, policy=policy, sizes=sizes, options=options,
        tokens_per_block=128, num_blocks=8, **POLICIES[commit],
    )  # fmt: skip
    decoder = engine._device.decoder
    results = decoder.results
    decoder.results = lambda requests: runner.log.append("heard") or results(requests)
    return engine, runner


@pytest.mark.parametrize("law", [False, True], ids=["greedy", "law"])
@pytest.mark.parametrize("auto", [False, True], ids=["static", "auto"])
@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("commit", ["reconstruct", "deferred", "snapshot"])
def test_a_step_is_launched_before_the_last_one_is_heard_of(model, commit, name, auto, law):
    """And the drafts in front of it. A step is two launches and one copy, but where the number of
    nodes changes, which is another copy."""
    engine, runner = logged_engine(model, name, auto, law, commit)
    for number in range(3):
        engine.add(make_request(number, [number + 1, 2], 45))
    while len(engine._scheduler.decoding) < 3:
        engine.step()
    engine.step()
    assert engine._device.under_way
    runner.log.clear()
    for _ in range(9):
        start, nodes = len(runner.log), engine._device.decoder._launched[-1].nodes
        runner.ops.clear()
        with Operators(runner):
            engine.step()
        launched = runner.log[start:]
        assert launched[0] == "step"
        assert launched[-1] == "heard"
        assert set(launched[1:-1]) <= {"draft", "extend"}
        assert len(launched) <= 3
        changed = engine._device.decoder._launched[-1].nodes != nodes
        assert runner.ops.count("copy_.default") == 1 + changed, runner.ops
        # The others are made of what the host was sent: scores of trees, new counts of nodes.
        assert {*runner.ops} <= {"copy_.default", "clone.default", "detach_.default"}
        assert len(engine._device.under_way) == 3
    assert runner.log.count("heard") == runner.log.count("step") == 9


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_step_more_than_a_sequence_has_room_for_goes_nowhere(model, name):
    """All drafts are accepted, and a sequence as long as can be is in a step beyond its end."""
    law = (1.0,) * TOPOLOGIES[name].depth
    engine = graph_engine(
        model, TOPOLOGIES[name], options={"accept": accept_by_depth(law)}, max_seq_len=32,
        scratch_rows=TOPOLOGIES[name].num_nodes,
    )  # fmt: skip
    requests = [make_request(i, [i + 1] * (5 + i), 27 - i - (i == 3)) for i in range(4)]
    for request in requests:
        engine.add(request)
    ahead = 0
    while engine.has_work:
        engine.step()
        ahead += bool(engine._device.under_way)
    assert ahead > 3
    assert engine.stats.executor_faults == 0
    assert [r.finish_reason for r in requests] == ["length"] * 4
    assert [len(r.output_token_ids) for r in requests] == [27, 26, 25, 23]
    check_nothing_leaked(engine)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_who_joins_together_is_taken_over_as_one_after_another(model, name):
    """Roots, pairs, drafts and the texts to the end; one launch for all, or one for each."""
    jobs, found = random_jobs(13, 4), []
    jobs = [(prompt[:9], 25) for prompt, _ in jobs]
    for together in (True, False):
        runner = Counted()
        engine = graph_engine(model, TOPOLOGIES[name], runner=runner)
        requests = [make_request(i, *job, speculation=i != 2) for i, job in enumerate(jobs)]
        for request in requests:
            engine.add(request)
        engine.step()
        assert all(len(r.output_token_ids) == 1 for r in requests)
        groups = [requests] if together else [[r] for r in requests]
        for group in groups:
            engine._device.decoder._adopt(group)
        assert runner.counts["adopt"] == len(groups)
        engine._device.decoder._adopt(requests)
        assert runner.counts["adopt"] == len(groups), "they are here already"
        buffers, slots = engine._executor.graphs.buffers, [r.slot for r in requests]
        tables = [buffers.tree_tokens[slots, 0].clone()]
        drafting = [r.slot for r in requests if r.speculation]
        for table in (buffers.pending_tokens, buffers.pending_hidden):
            tables.append(table[drafting, 0].clone())
        tables.append(buffers.pending_len[drafting].clone())
        while engine.has_work:
            engine.step()
        found.append((tables, [list(r.output_token_ids) for r in requests]))
        check_nothing_leaked(engine)
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    assert found[0][0][3].tolist() == [1, 1, 1]
    texts = solo_texts(model, jobs)
    assert found[0][1] == found[1][1] == [texts[i] for i in range(len(jobs))]


def test_what_is_taken_over_touches_nobody_else(model):
    engine = graph_engine(model, TOPOLOGIES["chain"])
    graphs, slots = engine._executor.graphs, engine._executor.limits.max_batch_size
    buffers = graphs.buffers
    tables = [buffers.tree_tokens, buffers.pending_tokens, buffers.pending_hidden]
    for table in [*tables, buffers.pending_len]:
        table.fill_(9)
    size = buffers.sizes.hidden
    graphs.adopt([Arrival(2, 5, torch.full((1, size), 3.0)), Arrival(0, 6)])
    assert buffers.tree_tokens[:slots, 0].tolist() == [6, 9, 5, 9]
    assert buffers.pending_tokens[:slots, 0].tolist() == [9, 9, 5, 9]
    assert buffers.pending_hidden[:slots, 0, 0].tolist() == [9.0, 9.0, 3.0, 9.0]
    assert buffers.pending_len[:slots].tolist() == [9, 9, 1, 9]
    assert all((table[:slots, 1:] == 9).all() for table in tables)


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_auto_trees_learn_from_captured_steps(model, name):
    policy = AutoTrees(STEP_SIZES[name], (1, 2, 4))
    engine = sized_engine(model, name, policy)
    jobs = random_jobs(9, 24)
    check(engine, solo_texts(model, jobs), jobs)
    assert policy.acceptance.tokens().keys() >= {*STEP_SIZES[name][:2]}
    assert policy.cost.measured(4, 1)


@pytest.mark.parametrize("keep", range(1, 9))
def test_the_best_nodes_are_those_of_prune(keep):
    for seed in range(20):
        rng = random.Random(seed)
        parents = [-1] + [rng.randrange(node) for node in range(1, 8)]
        scores = [0.0]
        for node in range(1, 8):  # ties among them
            scores.append(scores[parents[node]] - rng.choice([0.0, 0.5, 0.5, 1.0, float("inf")]))
        tokens = [rng.randrange(50) for _ in range(8)]
        want = DraftTree(tuple(tokens), tuple(parents), tuple(scores)).prune(keep)
        got = best_nodes(
            torch.tensor([tokens]), torch.tensor(parents).int(), torch.tensor([scores]), keep
        )
        assert tuple(got[0][0].tolist()) == want.token_ids
        assert tuple(got[1][0].tolist()) == want.parent_ids
        assert tuple(got[2][0].tolist()) == want.log_probs


def test_trees_from_the_host_use_the_captured_steps(model):
    """Random trees with the right continuation at random nodes, through `verify` and `commit`."""
    jobs = random_jobs(10, 12)
    texts = solo_texts(model, jobs)
    executor = make_executor(model, max_nodes=8)
    graphs = executor.make_graphs(RecordedCalls(), GraphOptions(GraphSizes((2, 4), (3, 8)), 8))
    drafter = GraftingDrafter(executor, texts, seed=2)
    drafter.engine = engine = make_engine(executor, drafter)
    seen = []
    verify = graphs.verify
    graphs.verify = lambda tree: seen.append(tree.parents.shape) or verify(tree)
    check(engine, texts, jobs)
    assert len({tuple(shape) for shape in seen}) > 4


def test_a_broken_row_ends_its_own_request(model):
    """CASES 26: logits that are not finite, in a captured step."""
    jobs = random_jobs(11, 4)
    texts = solo_texts(model, jobs)
    engine = graph_engine(model, TOPOLOGIES["tree"])
    requests = [make_request(i, prompt, 20) for i, (prompt, _) in enumerate(jobs)]
    for request in requests:
        engine.add(request)
    while not all(r.output_token_ids for r in requests):
        engine.step()
    broken = requests[2]
    engine._executor.state.state[:, broken.slot] = float("nan")
    while engine.has_work:
        engine.step()
    assert broken.finish_reason == "error"
    assert "not finite" in broken.error
    for i in (0, 1, 3):
        assert requests[i].error is None
        assert list(requests[i].output_token_ids[: len(texts[i])]) == texts[i][:20]


def test_an_error_in_a_captured_step_costs_nobody_the_text(model):
    jobs = random_jobs(12, 6)
    texts = solo_texts(model, jobs)
    engine = graph_engine(model, TOPOLOGIES["chain"])
    graphs, left = engine._executor.graphs, [1]
    replay = graphs._runner.replay

    def fails_now_and_then(key):
        if key[0] == "step" and left[0]:
            left[0] -= 1
            raise RuntimeError("no luck")
        replay(key)

    graphs._runner.replay = fails_now_and_then
    check(engine, texts, jobs)
    assert engine.stats.executor_faults == 1


def test_acceptance_by_a_law(model):
    """Accepted lengths follow the law, whatever the drafts are."""
    law = (0.8, 0.5, 0.9)
    engine = graph_engine(
        model, TOPOLOGIES["chain"], options={"accept": accept_by_depth(law)}, max_seq_len=1024,
        num_blocks=1200, max_batch_size=4,
    )  # fmt: skip
    run(engine, [make_request(i, [i + 1], 900) for i in range(4)])
    reached, total = engine.stats.accepted_per_depth, engine.stats.trees
    for depth, part in enumerate((0.8, 0.4, 0.36)):
        assert abs(reached[depth] / total - part) < 0.05


# ------------------------------------------------------------------ through the public API


@pytest.fixture
def captured(monkeypatch):
    """Makes `LLM` capture its steps on the CPU, by calls."""
    from trtllm_treewy import CudaGraphConfig, llm

    made = []
    build = llm.build_engine

    def with_graphs(settings, *args, **options):
        graphs = CudaGraphConfig(max_prompt_tokens=100)
        engine, memory = build(replace(settings, graphs=graphs), *args, **options)
        made.append(engine)
        return engine, memory

    monkeypatch.setattr(llm, "build_engine", with_graphs)
    return made


def texts_of(model, config, params, **settings):
    with LLM(
        model, dtype="float32", device="cpu", max_seq_len=256, speculative_config=config, **settings
    ) as llm:
        prompts = ["The error log", "Once upon a time", "def main():", "1 2 3"]
        return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "config",
    [
        {"draft_tree_widths": [2, 2, 2]},
        {"max_draft_len": 3, "state_commit": "deferred"},
        {"draft_tree_widths": [2, 2], "tree_policy": "auto"},
        {"use_dynamic_tree": True, "max_total_draft_tokens": 9},
        None,
    ],
)
def test_the_shipped_model_gives_the_same_texts(config, shipped_model, request):
    params = [SamplingParams(max_tokens=24 + i, ignore_eos=True) for i in range(3)]
    params.append(SamplingParams(max_tokens=20, temperature=0.8, seed=5))
    want = texts_of(shipped_model, config, params)
    engines = request.getfixturevalue("captured")
    assert texts_of(shipped_model, config, params) == want
    (engine,) = engines
    assert engine._executor.graphs is not None
    assert engine._executor.prompt_graphs.replays
    if config is None or not config.get("use_dynamic_tree"):
        assert engine.stats.graph_steps


def test_random_weights_and_a_law_need_a_config_alone(tmp_path, captured):
    """`load_format="dummy"`: any size that there is a config of."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    law = [1.0, 0.0]
    with pytest.warns(UserWarning, match="simulated_acceptance.* the texts mean nothing"):
        llm = LLM(
            tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cpu", max_seq_len=64,
            dtype="float32",
            speculative_config={"max_draft_len": 2, "simulated_acceptance": law},
        )  # fmt: skip
    with llm:
        outputs = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 12]
    stats = captured[0].stats
    # Every first draft, but where a text ends at the root, and no second one.
    assert stats.trees - 2 <= stats.accepted_per_depth[0] == stats.accepted_tokens


def test_random_weights_are_seeded_and_sane():
    config = tiny_config()
    one, same, other = (
        dummy_model(config, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (1, 1, 2)
    )
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert a.dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16)
        if a.dim() > 1 or name.endswith(("A_log", "dt_bias")):
            assert not torch.equal(a, c)
        assert a.isfinite().all()


@pytest.mark.parametrize(
    "config", [{"batch_sizes": [16, 32]}, {"batch_sizes": [4, 8], "max_batch_size": 2}]
)
def test_no_size_that_can_be_captured_is_told(shipped_model, monkeypatch, config):
    from trtllm_treewy import llm

    build = llm.build_engine
    graphs = cuda_graph_config_from(config)
    monkeypatch.setattr(
        llm,
        "build_engine",
        lambda settings, *args, **more: build(replace(settings, graphs=graphs), *args, **more),
    )
    with pytest.warns(UserWarning, match="not captured as CUDA graphs.*max_batch_size 8"):
        assert texts_of(shipped_model, None, [SamplingParams(max_tokens=2)] * 4)
