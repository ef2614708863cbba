"""Node limits of a step: pure choice, measured cost and acceptance, and the promise of `auto`."""

from __future__ import annotations

import random

import pytest

from trtllm_treewy import MTPDecodingConfig
from trtllm_treewy.draft_tree import DraftTree, fit_to_budget
from trtllm_treewy.runtime.tree_policy import (
    Acceptance,
    AutoTrees,
    FullTrees,
    StepCost,
    StepReport,
    choose_nodes,
    cut_to_depth,
)

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("cost", "tokens", "best"),
    [
        ({1: 1.0, 4: 1.1, 8: 1.4}, {1: 1.0, 4: 1.8, 8: 2.1}, 4),
        ({1: 1.0, 4: 1.1, 8: 1.2}, {1: 1.0, 4: 1.8, 8: 2.1}, 8),
        ({1: 1.0, 4: 2.0}, {1: 1.0, 4: 1.5}, 1),
        ({1: 1.0, 4: 1.0}, {1: 1.0, 4: 1.0}, 1),  # the smallest of equals
        ({1: 1.0, 4: 1.0}, {1: 1.0}, 1),  # what was never seen is no choice
    ],
)
def test_the_most_tokens_a_second(cost, tokens, best):
    assert choose_nodes(cost, tokens) == best


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    parents = [-1, *(rng.randrange(n) for n in range(1, nodes))]
    scores = [0.0]
    for node in range(1, nodes):
        scores.append(scores[parents[node]] - rng.expovariate(1.0))
    return DraftTree(tuple(range(nodes)), tuple(parents), tuple(scores))


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parent_ids[path[0]])
    return path


def test_a_large_tree_tells_what_smaller_ones_would_have_brought():
    """For every size: the accepted path within the tree that pruning to that size gives."""
    rng = random.Random(0)
    for _ in range(50):
        trees = [random_tree(rng, rng.randint(1, 16)) for _ in range(3)]
        paths = [path_to(tree, rng.randrange(tree.num_nodes)) for tree in trees]
        acceptance = Acceptance(SIZES)
        acceptance.observe(trees, paths)
        largest = max(tree.num_nodes for tree in trees)
        for size in SIZES[1:]:
            if size > largest:
                assert size not in acceptance.tokens()
                continue
            gained = 0
            for tree, path in zip(trees, paths, strict=True):
                kept = set(fit_to_budget([tree], min(size, tree.num_nodes))[0].token_ids)
                gained += sum(node in kept for node in path)
            assert acceptance.tokens()[size] == pytest.approx(gained / 3)


def test_acceptance_by_depth_follows_the_text():
    acceptance = Acceptance((1, 4))
    chain = DraftTree((0, 1, 2, 3), (-1, 0, 1, 2), (0.0, -0.1, -0.2, -0.3))
    for _ in range(80):
        acceptance.observe([chain, chain], [[0, 1, 2, 3], [0, 1]])
    assert acceptance.by_depth[4] == pytest.approx([1.0, 0.5, 0.5], abs=0.01)
    for _ in range(700):  # a row tells little
        acceptance.observe([chain], [[0]])
    assert acceptance.tokens()[4] == pytest.approx(1.0, abs=0.01)


def test_cost_lies_on_lines_and_forgets_outliers():
    cost = StepCost()
    assert cost.at(4, 1) is None
    cost.observe(4, 1, 9.0)  # the first step of a shape allocates
    cost.observe(4, 1, 1.0)
    cost.observe(4, 8, 2.0)
    assert cost.at(4, 1) == 1.0
    assert cost.at(4, 4) == pytest.approx(1.0 + 3 / 7)
    assert cost.at(4, 16) == 4.0, "in proportion beyond what was seen"
    assert cost.at(8, 1) is None, "another batch is another matter"
    for _ in range(20):
        cost.observe(4, 1, 1.0)
    cost.observe(4, 1, 1000.0)
    assert cost.at(4, 1) < 1.3


@pytest.mark.parametrize("seed", range(20))
def test_cut_to_depth_keeps_a_tree(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, 12)
    for depth in range(tree.depth + 2):
        cut = cut_to_depth(tree, depth)
        assert cut.depth == min(depth, tree.depth)
        kept = [n for n in range(12) if len(path_to(tree, n)) <= depth + 1]
        assert cut.token_ids == tuple(kept)
        for node, parent in enumerate(cut.parent_ids[1:], start=1):
            assert cut.token_ids[parent] == tree.parent_ids[cut.token_ids[node]]


class World:
    """Fake steps: what a step costs, and how likely a draft at each depth is accepted."""

    def __init__(self, cost, chance, seed=0, noise=0.0) -> None:
        self.cost, self.chance, self.noise = cost, chance, noise
        self.random = random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.limits: list[int] = []

    def run(self, policy, steps: int, rows: int = 4) -> None:
        for _ in range(steps):
            limit = policy.limit(rows)
            self.limits.append(limit)
            # A chain, so that nodes are depth: the drafter has up to 16 nodes.
            tree = DraftTree(
                tuple(range(limit)),
                tuple(range(-1, limit - 1)),
                tuple(-0.1 * d for d in range(limit)),
            )
            paths = []
            for _ in range(rows):
                length = 1
                while length < limit and self.random.random() < self.chance(length):
                    length += 1
                paths.append(list(range(length)))
            seconds = self.cost(rows, limit) * (1 + self.noise * self.random.uniform(-1, 1))
            policy.observe(StepReport(rows, seconds, [tree] * rows, paths))
            self.tokens += sum(map(len, paths))
            self.seconds += seconds

    def slowdown(self, rows: int = 4) -> float:
        """Time taken over that of plain decoding."""
        return self.seconds / (self.tokens / rows * self.cost(rows, 1))


def memory_bound(rows, nodes):
    return 1.0 + 0.01 * rows * (nodes - 1)


def compute_bound(rows, nodes):
    return 0.2 * rows * nodes + (0.5 if nodes > 1 else 0.0)


def make_policy():
    return AutoTrees(SIZES, (1, 2, 4, 8))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_auto_is_never_slower_than_plain_decoding_by_more_than_a_few_percent(cost, chance, noise):
    world, policy = World(cost, lambda depth: chance, noise=noise), make_policy()
    world.run(policy, 1500)
    assert world.slowdown() < 1.03
    tokens = {n: 1 + sum(chance**d for d in range(1, n)) for n in SIZES}
    rates = {n: tokens[n] / cost(4, n) for n in SIZES}
    best = max(rates.values())
    if best > 1.3 * rates[1]:  # where drafts pay, most of it is had
        assert world.slowdown() < 1.2 * rates[1] / best
    # Where they do not pay, they are off almost always.
    if best == rates[1] and noise == 0.0:
        assert sum(limit == 1 for limit in world.limits) > 0.9 * len(world.limits)


def test_auto_adapts_when_the_text_changes():
    """Good drafts, then useless ones, then good ones again; the good times do not pay for bad."""
    state = {"chance": 0.9}
    world, policy = World(memory_bound, lambda depth: state["chance"]), make_policy()
    world.run(policy, 400)
    assert policy.best(4) >= 8
    good = world.slowdown()
    assert good < 0.4
    state["chance"] = 0.0
    bad = World(memory_bound, lambda depth: 0.0)
    bad.run(policy, 1500)
    assert bad.slowdown() < 1.05
    assert policy.best(4) == 1
    again = World(memory_bound, lambda depth: 0.9, seed=2)
    again.run(policy, 1500)
    assert again.slowdown() < 0.6
    assert again.limits[-1] >= 8


def test_auto_stays_within_its_allowance_when_the_device_changes_under_it():
    policy = make_policy()
    World(memory_bound, lambda depth: 0.9).run(policy, 400)
    bad = World(compute_bound, lambda depth: 0.0)
    bad.run(policy, 1500)
    assert bad.slowdown() < 1.05


class Pipeline(World):
    """Steps are asked for two ahead of what is heard of, as where the device never waits."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ahead: list[int] = []

    def run(self, policy, steps: int, rows: int = 4) -> None:
        outer = self

        class Ahead:
            observe = staticmethod(policy.observe)

            @staticmethod
            def limit(rows: int) -> int:
                while len(outer.ahead) < 3:
                    outer.ahead.append(policy.limit(rows))
                return outer.ahead.pop(0)

        super().run(Ahead(), steps, rows)


@pytest.mark.parametrize("chance", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("node", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("rows", [2, 8, 40])
def test_auto_is_as_fast_as_the_better_of_a_chain_of_three_and_none(rows, node, chance):
    """Within 2%, once it has run for a while; of a fixed size what is expected of it."""

    def cost(rows, nodes):
        return 1.0 + node * (nodes - 1) * (rows / 8) ** 0.5

    policy = AutoTrees((1, 2, 4, 8), (1, 2, 4, 8, 16, 24, 32, 40))
    Pipeline(cost, lambda depth: chance, 1, 0.03).run(policy, 400, rows)
    steps = 24000 // rows
    world = Pipeline(cost, lambda depth: chance, 2, 0.03)
    world.run(policy, steps, rows)
    rate = world.tokens / rows / world.seconds
    best = max(1.0, sum(chance**d for d in range(4)) / cost(rows, 4))
    assert rate > 0.98 * best
    if best > 1.0:
        assert world.limits.count(1) < 0.05 * steps


@pytest.mark.parametrize(
    ("room", "of_eight", "of_four"), [(8, 1, 2), (40, 4, 8), (64, 8, 16), (128, 16, 16)]
)
def test_sizes_that_a_step_has_no_tokens_for_are_not_asked_for(room, of_eight, of_four):
    """They would never be measured, and be asked for again and again in place of the best."""
    policy = AutoTrees(SIZES, (1, 2, 4, 8), max_tokens=room)
    world = Pipeline(memory_bound, lambda depth: 0.9)
    world.run(policy, 300, 8)
    assert max(world.limits) == of_eight
    assert world.limits[100:].count(policy.best(8)) > 190
    world.run(policy, 300, 4)  # of fewer rows each has more
    assert max(world.limits) == of_four


def test_a_batch_like_one_that_is_known_is_not_measured_anew():
    policy = AutoTrees((1, 2, 4, 8), (8, 16, 24, 64))
    World(memory_bound, lambda depth: 0.9).run(policy, 60, 16)
    near, far = (World(memory_bound, lambda depth: 0.9) for _ in range(2))
    near.run(policy, 20, 24)
    assert 1 not in near.limits
    far.run(policy, 20, 64)
    assert far.limits[:2] == [1, 1]


def test_a_step_in_part_counts_until_a_whole_one_is_seen():
    cost = StepCost()
    for _ in range(3):
        cost.observe(4, 2, 5.0, whole=False)
    assert cost.at(4, 2) == 5.0
    cost.observe(4, 2, 8.0)
    cost.observe(4, 2, 1.0, whole=False)
    assert cost.at(4, 2) == 8.0
    assert not cost.measured(4, 2)


def test_auto_tells_batch_sizes_apart():
    """Many rows fill the device, few leave room: drafts for these only."""

    def cost(rows, nodes):
        return max(1.0, 0.3 * rows * nodes)

    policy = make_policy()
    for rows in (1, 8, 1, 8):
        World(cost, lambda depth: 0.6, seed=rows).run(policy, 400, rows)
    assert policy.best(1) in (2, 4)
    assert policy.best(8) == 1
    assert policy.best(7) == 1, "counts as the next larger batch"


def test_steps_without_drafting_rows_teach_nothing():
    policy = make_policy()
    policy.observe(StepReport(4, 1.0, [], []))
    assert policy.limit(4) == 1
    assert policy.cost.at(4, 1) is None


def test_full_trees_have_no_limit():
    policy = FullTrees()
    policy.observe(StepReport(1, 1.0, [], []))
    assert policy.limit(3) is None


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"tree_policy": "auto"}, "dynamic"),
        ({"tree_policy": "dynamic"}, "dynamic"),
        ({"tree_policy": "static"}, "static"),
        ({"tree_policy": "auto", "draft_tree_widths": (3, 2)}, "static"),
        ({"tree_policy": "auto", "max_draft_len": 4}, "static"),
        ({"tree_policy": "auto", "max_draft_len": 4, "max_total_draft_tokens": 9}, "dynamic"),
    ],
)
def test_settings(settings, kind):
    assert MTPDecodingConfig(**settings).kind == kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree_policy": "best"}, "one of static, dynamic, auto, got 'best'"),
        ({"tree_policy": "static", "use_dynamic_tree": True}, "contradicts use_dynamic_tree"),
        ({"tree_policy": "dynamic", "draft_tree_widths": (2,)}, "exclude each other"),
        ({"tree_policy": "auto", "draft_tree_widths": ()}, "needs drafts to choose from"),
    ],
)
def test_settings_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MTPDecodingConfig(**settings)


@pytest.mark.parametrize(
    ("sizes", "allowance", "message"), [((2, 4), 0.02, "must hold 1"), ((1, 2), 0.0, "above 0")]
)
def test_refusals(sizes, allowance, message):
    with pytest.raises(ValueError, match=message):
        AutoTrees(sizes, (1,), allowance)
