"""The MTP drafters against a naive pass: every node's path run through the module by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from checkpoints import hf_config, write_checkpoint

from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.runtime.drafter import (
    DraftRoot,
    MtpDynamicDrafter,
    MtpStaticDrafter,
)
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_torch import TorchExecutor

LIMITS = ExecutorLimits(
    max_batch_size=4,
    max_seq_len=128,
    max_nodes=40,
    scratch_rows=40,
    num_blocks=64,
    tokens_per_block=16,
)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hf_config(), seed=2)
    executor = TorchExecutor(load_model(directory, dtype="float32"), LIMITS)
    return executor


@pytest.fixture
def sequences(executor):
    """Verified pairs of three sequences in slots 2, 0 and 3, as (slot, tokens, hidden)."""
    made = []
    for slot, length in ((2, 9), (0, 1), (3, 17)):
        assert executor.try_allocate(slot, 64)
        tokens = torch.randint(97, (length,)).tolist()
        made.append((slot, tokens, torch.randn(length, 32)))
    yield made
    for slot, _, _ in made:
        executor.free(slot)


def naive(executor, tokens, hidden, path):
    """Log probs after `path` (drafted tokens), by a fresh run of the module over everything.

    Each drafted entry's hidden state is the module's output one entry before it.
    """
    spare = 1
    hidden = hidden.clone()
    for count in range(len(path) + 1):
        assert executor.try_allocate(spare, 64)
        entries = [*tokens, *path[:count]]
        batch = PrefillBatch.pack(entries, [len(entries)], [spare], [0], executor.device)
        output = executor.draft_extend(batch, hidden)
        executor.free(spare)
        hidden = torch.cat([hidden, output.hidden])
    return torch.log_softmax(output.logits[0], -1)


def check_tree(executor, tree, tokens, hidden):
    paths = [[]]
    for node in range(1, tree.num_nodes):
        parent = tree.parent_ids[node]
        log_probs = naive(executor, tokens, hidden, paths[parent])
        token = tree.token_ids[node]
        expected = tree.log_probs[parent] + float(log_probs[token])
        assert tree.log_probs[node] == pytest.approx(expected, abs=2e-4)
        siblings = [n for n in range(node) if tree.parent_ids[n] == parent]
        better = int((log_probs > log_probs[token]).sum())
        assert better == len(siblings), "the k-th child takes the k-th best token"
        paths.append([*paths[parent], token])


def roots_of(sequences):
    return [DraftRoot(slot, tokens[-1], len(tokens)) for slot, tokens, _ in sequences]


@pytest.mark.parametrize(
    "topology",
    [
        TreeTopology.from_widths([3, 2, 2]),
        TreeTopology.chain(5),
        TreeTopology.from_parents([-1, 0, 1, 0, 2, 3, 3, 5, 0, 4]),
        TreeTopology.from_widths([4]),
    ],
    ids=["widths", "chain", "parents", "one level"],
)
def test_static_tree(topology, executor, sequences):
    drafter = MtpStaticDrafter(executor, topology)
    for slot, tokens, hidden in sequences:
        drafter.observe(slot, tokens, hidden)
    trees = drafter.propose(roots_of(sequences))
    for tree, (_, tokens, hidden) in zip(trees, sequences, strict=True):
        assert tree.parent_ids == topology.parent_ids
        check_tree(executor, tree, tokens, hidden)


def test_second_proposal_replaces_the_first_one_entries(executor, sequences):
    """Entries of a former draft are overwritten; verified pairs arrive in pieces."""
    drafter = MtpStaticDrafter(executor, TreeTopology.from_widths([2, 2, 2]))
    for slot, tokens, hidden in sequences:
        drafter.observe(slot, tokens, hidden)
    drafter.propose(roots_of(sequences))
    longer = []
    for slot, tokens, hidden in sequences:
        more, states = torch.randint(97, (3,)).tolist(), torch.randn(3, 32)
        drafter.observe(slot, more[:1], states[:1])
        drafter.observe(slot, more[1:], states[1:])
        longer.append((slot, [*tokens, *more], torch.cat([hidden, states])))
    trees = drafter.propose(roots_of(longer))
    for tree, (_, tokens, hidden) in zip(trees, longer, strict=True):
        check_tree(executor, tree, tokens, hidden)


@pytest.fixture
def sure(executor):
    """A module that is sure of its tokens, so that the best trees are deep."""
    executor.model.lm_head.weight.data.mul_(8.0)
    yield
    executor.model.lm_head.weight.data.div_(8.0)


def check_scores(executor, tree, tokens, hidden, paths):
    for node in range(1, tree.num_nodes):
        parent = tree.parent_ids[node]
        log_probs = naive(executor, tokens, hidden, list(paths[parent]))
        expected = tree.log_probs[parent] + float(log_probs[tree.token_ids[node]])
        assert tree.log_probs[node] == pytest.approx(expected, abs=1e-3)


def best_first(executor, tokens, hidden, max_nodes, max_depth, top_k):
    """The best `max_nodes - 1` paths among each node's `top_k`, by brute force."""
    found, frontier = [], [((), 0.0)]
    for _ in range(max_depth):
        level = []
        for path, score in frontier:
            log_probs = naive(executor, tokens, hidden, list(path))
            for value, token in zip(*log_probs.topk(top_k), strict=True):
                level.append(((*path, int(token)), score + float(value)))
        found += level
        frontier = sorted(level, key=lambda item: -item[1])[:top_k]
    return sorted(found, key=lambda item: -item[1])[: max_nodes - 1]


@pytest.mark.parametrize(("max_nodes", "max_depth", "top_k"), [(8, 3, 4), (12, 4, 3), (2, 2, 1)])
def test_dynamic_tree(max_nodes, max_depth, top_k, executor, sequences, sure):
    """The trees hold the most probable paths, with the module's own probabilities."""
    drafter = MtpDynamicDrafter(executor, max_nodes=max_nodes, max_depth=max_depth, top_k=top_k)
    for slot, tokens, hidden in sequences:
        drafter.observe(slot, tokens, hidden)
    trees = drafter.propose(roots_of(sequences))
    for tree, (_, tokens, hidden) in zip(trees, sequences, strict=True):
        expected = best_first(executor, tokens, hidden, max_nodes, max_depth, top_k)
        paths = {0: ()}
        for node in range(1, tree.num_nodes):
            paths[node] = (*paths[tree.parent_ids[node]], tree.token_ids[node])
        assert sorted(tree.log_probs[1:]) == pytest.approx(sorted(s for _, s in expected), abs=1e-3)
        assert set(list(paths.values())[1:]) == {path for path, _ in expected}
        check_scores(executor, tree, tokens, hidden, paths)
    assert max_depth < 3 or max(tree.depth for tree in trees) >= 3


@pytest.mark.parametrize("pieces", [[255], [256], [257], [300, 1], [1, 299, 2], [700]])
def test_more_verified_tokens_than_wait_at_once(pieces, tmp_path):
    """Long prompts enter the module before the proposal, but for the pair it starts from."""
    write_checkpoint(tmp_path, hf_config(), seed=2)
    limits = dataclasses.replace(LIMITS, max_seq_len=1024, num_blocks=256)
    executor = TorchExecutor(load_model(tmp_path, dtype="float32"), limits)
    tokens = torch.randint(97, (sum(pieces),)).tolist()
    hidden = torch.randn(len(tokens), 32)
    assert executor.try_allocate(2, 800)
    drafter = MtpStaticDrafter(executor, TreeTopology.from_widths([2, 1]))
    start = 0
    for length in pieces:
        drafter.observe(2, tokens[start : start + length], hidden[start : start + length])
        start += length
    (tree,) = drafter.propose([DraftRoot(2, tokens[-1], len(tokens))])
    assert executor.try_allocate(1, 800)
    batch = PrefillBatch.pack(tokens, [len(tokens)], [1], [0], executor.device)
    output = executor.draft_extend(batch, hidden)
    expected = torch.log_softmax(output.logits[0], -1).topk(2)
    assert list(tree.token_ids[1:3]) == expected.indices.tolist()
    assert tree.log_probs[1:3] == pytest.approx(expected.values.tolist(), abs=2e-4)


def test_sequences_settle_in_one_pass(executor, sequences, monkeypatch):
    """What prompts bring enters the module together, and none of their memory is held."""
    calls = []
    enter = executor.draft_enter
    monkeypatch.setattr(
        executor, "draft_enter", lambda batch, hidden: calls.append(batch) or enter(batch, hidden)
    )
    topology = TreeTopology.from_widths([3, 2])
    trees = []
    for settled in (False, True):
        drafter = MtpStaticDrafter(executor, topology)
        for slot, tokens, hidden in sequences:
            drafter.observe(slot, tokens, hidden)
        if settled:
            calls.clear()
            drafter.settle(*[slot for slot, _, _ in sequences])
            (batch,) = calls
            assert batch.seq_lens_host == (8, 16), "all but the newest, and none of a lone pair"
            assert batch.slots_host == (2, 3)
            held = drafter.cache._pending[3].hidden
            assert held.untyped_storage().nbytes() == 2 * 32 * 4
            drafter.settle(2, 0, 3)
            assert len(calls) == 1, "nothing is left to enter"
        trees.append(drafter.propose(roots_of(sequences)))
    for one, two in zip(*trees, strict=True):
        assert one.token_ids == two.token_ids
        assert one.log_probs == pytest.approx(two.log_probs, abs=2e-4)


def test_what_enters_is_what_a_draft_enters_and_costs_no_more_than_its_rows(executor, monkeypatch):
    """Bit for bit; neither head nor feed-forward part nor attention of the last layer runs."""
    lengths, slots, contexts = [5, 3], [2, 0], [0, 4]
    for slot in slots:
        assert executor.try_allocate(slot, 64)
    batch = PrefillBatch.pack(list(range(8)), lengths, slots, contexts, executor.device)
    hidden = torch.randn(8, 32)
    cache, rows = executor.kv_cache, []
    layer = len(executor.model.config.attention_layers)
    for enter in (executor.draft_extend, executor.draft_enter):
        for pool in (cache.k, cache.v):
            pool[layer].fill_(7.0)
        if enter == executor.draft_enter:
            for module in (executor.model.mtp.layers[-1].mlp, executor.model.mtp.norm):
                monkeypatch.setattr(module, "forward", refuse)
            monkeypatch.setattr(executor.model, "head", refuse)
            assert enter(batch, hidden) is None
        else:
            enter(batch, hidden)
        rows.append(torch.cat([cache.k[layer], cache.v[layer]]))
    assert torch.equal(*rows)
    assert (rows[0] != 7.0).any(-1).sum() == 2 * rows[0].shape[0] // 2 * sum(lengths)
    for slot in slots:
        executor.free(slot)


def refuse(*args):
    raise AssertionError("this is asked of nobody")


def test_nothing_observed(executor, sequences):
    drafter = MtpStaticDrafter(executor, TreeTopology.chain(2))
    with pytest.raises(ValueError, match="slot 2 has no verified token"):
        drafter.propose(roots_of(sequences))


def test_model_without_mtp(tmp_path):
    raw = hf_config(mtp_num_hidden_layers=0)
    write_checkpoint(tmp_path, raw)
    executor = TorchExecutor(load_model(tmp_path, dtype="float32"), LIMITS)
    with pytest.raises(ValueError, match="no MTP module"):
        executor.model.draft(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 32), None, None)
