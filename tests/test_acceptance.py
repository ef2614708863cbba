"""Greedy acceptance against a walk in plain Python."""

import random

import pytest
import torch

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.draft_tree import DraftTree, TreeTopology, to_tree_batch
from trtllm_treewy.runtime.acceptance import greedy_accept


def walk(tree: DraftTree, target: list[int], limit: int) -> list[int]:
    """Longest accepted path, the lowest last node where several are as long."""
    best: list[int] = []
    for node in range(tree.num_nodes):
        path = [node]
        while tree.parent_ids[path[0]] >= 0:
            path.insert(0, tree.parent_ids[path[0]])
        matches = all(
            tree.token_ids[t] == target[tree.parent_ids[t]] for t in path if tree.parent_ids[t] >= 0
        )
        if matches and len(best) < len(path) <= limit:
            best = path
    return best


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed):
    """CASES 9, 14: any tree and slot; a small vocabulary makes long paths and equal siblings."""
    rng = random.Random(seed)
    trees = []
    for _ in range(5):
        count = rng.randrange(1, 24)
        parents = [-1] + [rng.randrange(max(0, t - 4), t) for t in range(1, count)]
        trees.append(tree_of([rng.randrange(2) for _ in range(count)], parents))
    batch = to_tree_batch(
        trees, [7, -1, 0, 3, 5], [4, 0, 9, 1, 2], "cpu", pad_nodes_to=26, pad_batch_to=7
    )
    limit = rng.choice([26, 3])
    target = torch.randint(0, 2, batch.token_ids.shape)
    result = greedy_accept(batch, target, max_path=None if limit == 26 else limit)
    for row in range(7):
        path = []
        if row < 5 and batch.slot[row] >= 0:
            path = walk(trees[row], target[row].tolist(), limit)
        last = path[-1] if path else -1
        assert result.accepted[row] == last
        assert result.num_accepted[row] == len(path)
        assert result.path[row].tolist() == path + [-1] * (limit - len(path))
        assert result.bonus_ids[row] == (target[row, last] if path else -1)
    assert result.accepted.dtype == torch.int32
    assert result.path.dtype == torch.int64


def test_the_accepted_node_is_no_prefix():
    """CASES 9, 10: the last of three siblings and its child are accepted, not nodes 0, 1, 2."""
    tree = tree_of([5, 6, 7, 8, 1, 2, 3], [-1, 0, 0, 0, 1, 2, 3])
    target = torch.tensor([[8, 0, 0, 3, 0, 0, 99]])
    result = greedy_accept(to_tree_batch([tree], [4], [0], "cpu"), target)
    assert result.path[0, :3].tolist() == [0, 3, 6]
    assert (result.accepted.item(), result.bonus_ids.item()) == (6, 99)


def test_a_match_below_a_mismatch_is_not_accepted():
    tree = tree_of([1, 2, 3, 4], [-1, 0, 1, 2])
    target = torch.tensor([[9, 3, 4, 5]])
    result = greedy_accept(to_tree_batch([tree], [0], [0], "cpu"), target)
    assert (result.accepted.item(), result.num_accepted.item(), result.bonus_ids.item()) == (
        0,
        1,
        9,
    )


def test_equal_siblings_take_the_lowest_index_and_the_deeper_branch():
    target = torch.tensor([[6, 0, 0, 0]])
    flat = tree_of([5, 6, 6, 6], [-1, 0, 0, 0])
    assert greedy_accept(to_tree_batch([flat], [0], [0], "cpu"), target).accepted.item() == 1
    deeper = tree_of([5, 6, 6, 0], [-1, 0, 0, 2])
    assert greedy_accept(to_tree_batch([deeper], [0], [0], "cpu"), target).accepted.item() == 3


def test_padding_is_never_accepted():
    """CASES 6, 7: padded nodes hold token 0, which the target may well choose."""
    tree = tree_of([5], [-1])
    batch = to_tree_batch([tree], [2], [0], "cpu", pad_nodes_to=4, pad_batch_to=2)
    result = greedy_accept(batch, torch.zeros(2, 4, dtype=torch.int64))
    assert result.accepted.tolist() == [0, -1]
    assert result.num_accepted.tolist() == [1, 0]
    assert result.bonus_ids.tolist() == [0, -1]
    assert result.path.tolist() == [[0, -1, -1, -1], [-1] * 4]


def test_stale_metadata_behind_the_tree_is_never_accepted():
    """CASES 7: fixed buffers keep old nodes behind num_nodes; a live slot may have none."""
    parents = torch.tensor([[-1, 0, 1, 2]] * 2, dtype=torch.int32)
    context = torch.zeros(2, dtype=torch.int32)
    slot = torch.tensor([3, 1], dtype=torch.int32)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    counts = torch.tensor([2, 0], dtype=torch.int32)
    result = greedy_accept(TreeBatch(tokens, parents, counts, slot, context, 0), tokens)
    assert result.accepted.tolist() == [1, -1]
    assert result.num_accepted.tolist() == [2, 0]


def test_acceptance_does_not_wait_for_the_device():
    """CASES 28: acceptance runs on the device; on the meta device nothing can be read back."""
    topology = TreeTopology.from_widths([2, 2])
    tree = tree_of(list(range(7)), list(topology.parent_ids))
    batch = to_tree_batch([tree] * 3, [0, 1, 2], [0, 0, 0], "cpu")
    meta = TreeBatch(
        batch.token_ids.to("meta"),
        batch.parents.to("meta"),
        batch.num_nodes.to("meta"),
        batch.slot.to("meta"),
        batch.context_lens.to("meta"),
        0,
    )
    assert greedy_accept(meta, batch.token_ids.to("meta")).path.shape == (3, 7)


def test_wrong_input_is_refused():
    batch = to_tree_batch([tree_of([5, 6], [-1, 0])], [0], [0], "cpu")
    with pytest.raises(ValueError, match="target_ids"):
        greedy_accept(batch, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_path"):
        greedy_accept(batch, torch.zeros(1, 2, dtype=torch.int64), max_path=0)
