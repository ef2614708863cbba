"""Tree tables against walks in Python."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import generator, path_of, random_accepted, random_trees

from trtllm_treewy import topology

SHAPES = ("random", "chain", "star", "levels")


@pytest.mark.parametrize("shape", SHAPES)
def test_ancestor_mask_and_depth_follow_the_parents(shape):
    parents, num_nodes = random_trees(generator(1), 4, 33, shape=shape)
    mask = topology.ancestor_mask(parents, num_nodes)
    depth = topology.node_depth(mask)
    for row in range(4):
        for node in range(33):
            real = node < num_nodes[row]
            path = path_of(parents, row, node) if real else [node]
            assert mask[row, node].nonzero()[:, 0].tolist() == path
            assert depth[row, node] == len(path) - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_path_to_walks_from_the_accepted_node(shape):
    """Case 9: the accepted node is a tree index; its path is found through the parents."""
    gen = generator(2)
    parents, num_nodes = random_trees(gen, 5, 20, shape=shape)
    node = random_accepted(gen, num_nodes)
    node[3] = -1
    path, length = topology.path_to(parents, node, 20)
    for row in range(5):
        expected = path_of(parents, row, int(node[row]))
        assert length[row] == len(expected)
        assert path[row].tolist() == expected + [-1] * (20 - len(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_independent_blocks_hold_no_ancestor_of_their_own(shape):
    parents, num_nodes = random_trees(generator(3), 3, 40, shape=shape)
    blocks = topology.independent_blocks(parents, num_nodes)
    assert [node for start, stop in blocks for node in range(start, stop)] == list(range(40))
    mask = topology.ancestor_mask(parents, num_nodes)
    mask &= ~torch.eye(40, dtype=torch.bool)
    for start, stop in blocks:
        assert not mask[:, start:stop, start:stop].any()


def test_independent_blocks_are_the_levels_of_a_tree_in_level_order():
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]], dtype=torch.int32)
    blocks = topology.independent_blocks(parents, torch.tensor([7], dtype=torch.int32))
    assert blocks == ((0, 1), (1, 3), (3, 7))


@pytest.mark.parametrize(("batch", "nodes", "blocks"), [(0, 5, ((0, 5),)), (3, 0, ()), (0, 0, ())])
def test_independent_blocks_of_nothing(batch, nodes, blocks):
    parents = torch.zeros(batch, nodes, dtype=torch.int32)
    assert topology.independent_blocks(parents, torch.zeros(batch, dtype=torch.int32)) == blocks
