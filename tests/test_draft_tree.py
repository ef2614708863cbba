"""Draft trees on the host: shapes, best-first growth, pruning, and the batch made of them."""

import itertools
import math
import random

import pytest
import torch

from trtllm_treewy.draft_tree import (
    DraftTree,
    DynamicTreeBuilder,
    TreeTopology,
    fit_to_budget,
    to_tree_batch,
)


def random_tree(num_nodes: int, rng: random.Random) -> DraftTree:
    parents, scores = [-1], [0.0]
    for node in range(1, num_nodes):
        parent = rng.randrange(node)
        parents.append(parent)
        scores.append(scores[parent] - rng.random() * 2)
    tokens = tuple(rng.randrange(1000) for _ in range(num_nodes))
    return DraftTree(tokens, tuple(parents), tuple(scores))


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from the root to each node: a tree's content whatever its numbering."""
    result: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parent_ids, strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


# -------------------------------------------------------------------------------- topology


def test_widths_give_levels_in_order():
    topology = TreeTopology.from_widths([3, 2])
    assert topology.parent_ids == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert topology.depths == (0, 1, 1, 1, 2, 2, 2, 2, 2, 2)
    assert topology.levels == ((0,), (1, 2, 3), (4, 5, 6, 7, 8, 9))
    assert topology.children[2] == (6, 7)
    assert TreeTopology.from_widths([3, 3, 3]).num_nodes == 40
    assert TreeTopology.from_widths([]).parent_ids == (-1,)


def test_chain():
    chain = TreeTopology.chain(3)
    assert chain.parent_ids == (-1, 0, 1, 2)
    assert (chain.num_nodes, chain.depth) == (4, 3)
    assert TreeTopology.chain(0).num_nodes == 1


def test_from_parents_accepts_any_order_that_puts_parents_first():
    topology = TreeTopology.from_parents([-1, 0, 1, 0, 2, 3])
    assert topology.depths == (0, 1, 2, 1, 3, 2)
    assert topology.levels == ((0,), (1, 3), (2, 5), (4,))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "root"),
        ([0], "node 0 is the root"),
        ([-1, 0, -1], "node 2 needs a parent"),
        ([-1, 2, 0], "node 1 needs a parent"),
        ([-1, 1], "node 1 needs a parent"),
        ([-1, 0, 7], "node 2 needs a parent"),
        ([-1, -2], "node 1 needs a parent"),
    ],
)
def test_a_wrong_topology_names_the_node(parents, message):
    with pytest.raises(ValueError, match=message):
        TreeTopology.from_parents(parents)


def test_wrong_widths_and_chains_are_refused():
    with pytest.raises(ValueError, match="level 1"):
        TreeTopology.from_widths([3, 0])
    with pytest.raises(ValueError, match="num_draft_tokens"):
        TreeTopology.chain(-1)


# ------------------------------------------------------------------------------ draft trees


def test_a_draft_tree_is_checked():
    with pytest.raises(ValueError, match="one length"):
        DraftTree((1, 2), (-1,), (0.0,))
    with pytest.raises(ValueError, match="node 1"):
        DraftTree((1, 2), (-1, 1), (0.0, -1.0))
    root = DraftTree.root_only(7)
    assert (root.num_nodes, root.depth, root.token_ids) == (1, 0, (7,))


def test_prune_keeps_the_best_nodes_and_their_ancestors():
    """CASES 25: a tree over the budget is pruned to an ancestor-closed subtree of the best."""
    rng = random.Random(1)
    for _ in range(50):
        tree = random_tree(rng.randrange(2, 60), rng)
        budget = rng.randrange(1, tree.num_nodes + 1)
        pruned = tree.prune(budget)
        best = sorted(range(tree.num_nodes), key=lambda t: (-tree.log_probs[t], t))[:budget]
        content = paths(tree)
        assert pruned.num_nodes == budget
        assert sorted(paths(pruned)) == sorted(content[node] for node in best)
        assert sorted(pruned.log_probs) == sorted(tree.log_probs[node] for node in best)


def test_prune_is_ancestor_closed_even_if_scores_are_not_monotonic():
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 1, 0), (0.0, -9.0, -1.0, -5.0))
    assert tree.prune(2).token_ids == (0, 3)
    assert tree.prune(3).token_ids == (0, 1, 3)
    with pytest.raises(ValueError, match="max_nodes"):
        tree.prune(0)


def test_prune_breaks_ties_by_index_and_ranks_nan_last():
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 0), (0.0, math.nan, -1.0, -1.0))
    assert tree.prune(2).token_ids == (0, 2)
    assert tree.prune(3).token_ids == (0, 2, 3)


def test_fit_to_budget_is_best_first_over_all_trees():
    """CASES 25: the step's token budget is shared; no sequence loses its root."""
    rng = random.Random(2)
    for _ in range(30):
        trees = [random_tree(rng.randrange(1, 20), rng) for _ in range(4)]
        total = sum(tree.num_nodes for tree in trees)
        budget = rng.randrange(4, total + 1)
        fitted = fit_to_budget(trees, budget)
        assert sum(tree.num_nodes for tree in fitted) == budget
        scores = sorted((s for tree in trees for s in tree.log_probs[1:]), reverse=True)
        kept = sorted((s for tree in fitted for s in tree.log_probs[1:]), reverse=True)
        assert kept == scores[: budget - 4]
        for before, after in zip(trees, fitted, strict=True):
            assert set(paths(after)) <= set(paths(before))


def test_fit_to_budget_needs_room_for_the_roots():
    trees = [DraftTree.root_only(1)] * 3
    assert fit_to_budget(trees, 3) == trees
    with pytest.raises(ValueError, match="3 trees"):
        fit_to_budget(trees, 2)


# ---------------------------------------------------------------------------- dynamic trees


class ToyDrafter:
    """A distribution over a small vocabulary that depends on the whole path."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

    def log_probs(self, path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed}{path}")
        logits = [rng.gauss(0, 2) for _ in range(self.vocab)]
        norm = math.log(sum(math.exp(x) for x in logits))
        return [x - norm for x in logits]

    def top(self, path: tuple[int, ...], k: int) -> list[tuple[int, float]]:
        return sorted(enumerate(self.log_probs(path)), key=lambda pair: (-pair[1], pair[0]))[:k]


def grow(drafter: ToyDrafter, max_nodes: int, max_depth: int, top_k: int) -> DraftTree:
    """Drive the builder the way a drafter does, with rows of `draft_parents` as its memory."""
    builder = DynamicTreeBuilder(5, max_nodes=max_nodes, max_depth=max_depth, top_k=top_k)
    row_paths: list[tuple[int, ...]] = []
    levels = 0
    while builder.frontier:
        levels += 1
        assert len(builder.frontier) <= top_k
        rows, tops = builder.frontier_rows, []
        for row, token in zip(rows, builder.frontier_tokens, strict=True):
            parent = builder.draft_parents[row]
            row_paths.append((*(row_paths[parent] if parent >= 0 else ()), token))
            tops.append(drafter.top(row_paths[row], top_k))
        assert len(row_paths) == len(builder.draft_parents)
        builder.expand([[t for t, _ in top] for top in tops], [[s for _, s in top] for top in tops])
    assert levels <= max_depth
    return builder.build()


def brute_force(
    drafter: ToyDrafter, max_nodes: int, max_depth: int
) -> dict[tuple[int, ...], float]:
    """Every path up to max_depth, scored, and the best max_nodes of them."""
    scores = {(5,): 0.0}
    for depth in range(1, max_depth + 1):
        for tail in itertools.product(range(drafter.vocab), repeat=depth):
            path = (5, *tail)
            scores[path] = scores[path[:-1]] + drafter.log_probs(path[:-1])[tail[-1]]
    best = sorted(scores, key=lambda path: (-scores[path], path))[:max_nodes]
    return {path: scores[path] for path in best}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_nodes", "max_depth"), [(2, 1), (5, 3), (12, 4), (25, 3), (1, 4)])
def test_dynamic_tree_equals_brute_force_best_first(seed, max_nodes, max_depth):
    drafter = ToyDrafter(4, seed)
    tree = grow(drafter, max_nodes, max_depth, top_k=max(max_nodes - 1, 1))
    expected = brute_force(drafter, max_nodes, max_depth)
    assert set(paths(tree)) == set(expected)
    for path, score in zip(paths(tree), tree.log_probs, strict=True):
        assert score == pytest.approx(expected[path], abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_tree_with_a_narrow_beam_takes_the_best_of_all_candidates(seed):
    """Against a plain two-phase search: expand the best top_k of each level, then rank all."""
    drafter, top_k, max_nodes, max_depth = ToyDrafter(7, seed), 3, 14, 5
    frontier, candidates = [((5,), 0.0)], []
    for _ in range(max_depth):
        level = [
            ((*path, token), score + step)
            for path, score in frontier
            for token, step in drafter.top(path, top_k)
        ]
        candidates += level
        frontier = sorted(level, key=lambda pair: -pair[1])[:top_k]
    best = sorted(candidates, key=lambda pair: -pair[1])[: max_nodes - 1]
    tree = grow(drafter, max_nodes, max_depth, top_k)
    assert set(paths(tree)) == {(5,), *(path for path, _ in best)}
    assert tree.depth <= max_depth


def test_dynamic_tree_ties_are_deterministic_and_impossible_tokens_are_dropped():
    builder = DynamicTreeBuilder(0, max_nodes=3, max_depth=2, top_k=2)
    builder.expand([[1, 2, 3, 4]], [[-1.0, -1.0, -1.0, -math.inf]])
    assert builder.frontier_tokens == (1, 2)
    builder.expand([[5], [6]], [[math.nan], [-math.inf]])
    assert not builder.frontier
    tree = builder.build()
    assert tree.token_ids == (0, 1, 2)
    assert tree.parent_ids == (-1, 0, 0)


def test_dynamic_tree_stops_when_no_child_can_be_in_it():
    builder = DynamicTreeBuilder(0, max_nodes=3, max_depth=9, top_k=4)
    builder.expand([[1, 2, 3]], [[-0.1, -0.2, -9.0]])
    assert builder.frontier_tokens == (1, 2)  # token 3 is beaten by two others already
    builder.expand([[4], [5]], [[-5.0], [-5.0]])
    assert builder.frontier == ()
    assert builder.build().token_ids == (0, 1, 2)


def test_dynamic_tree_without_room_or_depth_is_its_root():
    for limits in ({"max_nodes": 1, "max_depth": 3}, {"max_nodes": 9, "max_depth": 0}):
        builder = DynamicTreeBuilder(8, top_k=2, **limits)
        assert builder.frontier == ()
        assert builder.build() == DraftTree.root_only(8)


def test_dynamic_tree_refuses_wrong_input():
    for name in ("max_nodes", "top_k"):
        limits = {"max_nodes": 3, "max_depth": 3, "top_k": 3, name: 0}
        with pytest.raises(ValueError, match=name):
            DynamicTreeBuilder(0, **limits)
    builder = DynamicTreeBuilder(0, max_nodes=9, max_depth=2, top_k=2)
    with pytest.raises(ValueError, match="1 frontier"):
        builder.expand([[1], [2]], [[-1.0], [-1.0]])
    with pytest.raises(ValueError, match="candidate 0"):
        builder.expand([[1, 2]], [[-1.0]])


# ------------------------------------------------------------------------------ tree batch


def test_tree_batch_pads_nodes_and_rows():
    """CASES 6, 7: padded rows have slot -1 and no nodes; padded nodes have no parent."""
    trees = [DraftTree((9, 8, 7), (-1, 0, 0), (0.0, -1.0, -2.0)), DraftTree.root_only(4)]
    batch = to_tree_batch(trees, [3, 0], [11, 2], "cpu", pad_nodes_to=5, pad_batch_to=4)
    assert batch.token_ids.tolist() == [[9, 8, 7, 0, 0], [4, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert batch.parents.tolist() == [[-1, 0, 0, -1, -1], [-1] * 5, [-1] * 5, [-1] * 5]
    assert batch.num_nodes.tolist() == [3, 1, 0, 0]
    assert batch.slot.tolist() == [3, 0, -1, -1]
    assert batch.context_lens.tolist() == [11, 2, 0, 0]
    assert batch.max_context == 11
    assert batch.token_ids.dtype == torch.int64
    for tensor in (batch.parents, batch.num_nodes, batch.slot, batch.context_lens):
        assert tensor.dtype == torch.int32


def test_tree_batch_positions_go_by_depth():
    """CASES 13: rotary positions by depth, not by flat index."""
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 2), (0.0, -1.0, -1.0, -2.0))
    batch = to_tree_batch([tree], [0], [10], "cpu")
    assert batch.positions.tolist() == [[10, 11, 11, 12]]


@pytest.mark.parametrize(
    ("slots", "contexts", "options", "message"),
    [
        ([0], [1, 2], {}, "one length"),
        ([1, 1], [1, 2], {}, "distinct"),
        ([0, -2], [1, 2], {}, "distinct"),
        ([0, 1], [1, -1], {}, "context_lens"),
        ([0, 1], [1, 2], {"pad_nodes_to": 2}, "pad_nodes_to 2"),
        ([0, 1], [1, 2], {"pad_batch_to": 1}, "batch of 1"),
    ],
)
def test_tree_batch_refuses_wrong_input(slots, contexts, options, message):
    tree = DraftTree((1, 2, 3), (-1, 0, 1), (0.0, -1.0, -2.0))
    with pytest.raises(ValueError, match=message):
        to_tree_batch([tree, tree], slots, contexts, "cpu", **options)
    with pytest.raises(ValueError, match="0 trees"):
        to_tree_batch([], [], [], "cpu")
