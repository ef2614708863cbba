"""Sampling on trees has the law of plain sampling, and the test that says so has the power to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sampling_laws import (
    VOCAB,
    Toy,
    draft_batch,
    generate,
    joint_law,
    number,
    p_value,
    rows_of,
)

from trtllm_treewy.draft_tree import (
    DraftTree,
    DynamicTreeBuilder,
    TreeTopology,
    fit_to_budget,
    to_tree_batch,
)
from trtllm_treewy.runtime.sampling import (
    AcceptanceRule,
    DraftRecord,
    NodeDrafts,
    draft_children,
    rejection,
    sample_tree,
)
from trtllm_treewy.sampling_params import SamplingParams

MATCH, REJECTION = AcceptanceRule.MATCH, AcceptanceRule.REJECTION


def random_parents(seed: int) -> list[int]:
    chooser = random.Random(seed)
    parents = [-1, 0]
    while len(parents) < 9:
        parent = chooser.randrange(max(0, len(parents) - 5), len(parents))
        if parents.count(parent) < VOCAB:
            parents.append(parent)
    return parents


SHAPES = {
    "root alone": [-1],
    "chain": list(TreeTopology.chain(3).parent_ids),
    "wide": list(TreeTopology.from_widths([4]).parent_ids),
    "every token": list(TreeTopology.from_widths([VOCAB]).parent_ids),
    "widths": list(TreeTopology.from_widths([3, 2]).parent_ids),
    "random 1": random_parents(1),
    "random 2": random_parents(2),
}
SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot, top-p": SamplingParams(temperature=1.7, top_p=0.8),
    "top-k": SamplingParams(top_k=3),
    "all": SamplingParams(temperature=0.9, top_k=5, top_p=0.93, min_p=0.05),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [MATCH, REJECTION])
def test_three_tokens_have_the_law_of_plain_sampling(rule, shape, settings):
    """CASES 24: the joint law of consecutive tokens, drafts drawn with the settings in force."""
    toy, params = Toy(seed=len(shape)), SETTINGS[settings]
    texts, _ = generate(toy, SHAPES[shape], params, rule, count=6000, length=3)
    assert p_value(number(texts), joint_law(toy, 0, 3, params)) > 1e-4


@pytest.mark.parametrize("rule", [MATCH, REJECTION])
def test_first_token_with_many_samples(rule):
    toy, params = Toy(seed=5, distance=2.0), SamplingParams(temperature=1.3, top_p=0.95)
    texts, _ = generate(toy, SHAPES["widths"], params, rule, count=60000, length=1)
    assert p_value(number(texts), joint_law(toy, 0, 1, params)) > 1e-4


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("settings", SETTINGS)
def test_match_gives_the_tokens_of_plain_sampling(settings, drawn):
    """The same tokens, not only the same law, whatever the tree: numbers belong to positions."""
    toy, params = Toy(seed=3), SETTINGS[settings]
    made = [
        generate(toy, parents, params, MATCH, count=400, length=8, drawn=drawn)[0]
        for parents in SHAPES.values()
    ]
    for other in made[1:]:
        assert torch.equal(other, made[0])


def test_rejection_without_drafts_is_plain_sampling():
    toy, params = Toy(seed=3), SETTINGS["all"]
    plain, _ = generate(toy, [-1], params, MATCH, count=400, length=5)
    assert torch.equal(generate(toy, [-1], params, REJECTION, count=400, length=5)[0], plain)


@pytest.mark.parametrize("shape", [[-1, 0, 1, 2], [-1, 0, 0], [-1, 0, 0, 1, 1, 2]], ids=str)
def test_rejection_accepts_more_than_match(shape):
    """For a drafter near the target; match drafts the best tokens, as drafters for it do."""
    toy, params = Toy(seed=8, distance=0.3), SamplingParams(temperature=1.0)
    run = dict(count=4000, length=1)
    _, rejected = generate(toy, shape, params, REJECTION, **run)
    _, matched = generate(toy, shape, params, MATCH, drawn=False, **run)
    _, coupled = generate(toy, shape, params, MATCH, drawn=True, **run)
    assert rejected >= matched + 0.02
    assert coupled >= matched + 0.02, "shared noise brings drafter and target together"


def test_a_perfect_drafter_is_always_right():
    toy, params = Toy(seed=8, distance=0.0), SETTINGS["hot, top-p"]
    for rule in (MATCH, REJECTION):
        _, tokens = generate(toy, SHAPES["chain"], params, rule, count=2000, length=1)
        assert tokens == 4.0


def broken_residuals():
    """Wrong ways to go on after a rejection, each of which looks plausible."""

    def keep_target(self, where, is_child):
        self.p = torch.where(where[:, None] & is_child, 0.0, self.p)
        self._normalise_p()

    def keep_draft(self, where, is_child):
        draft = self.p
        right(self, where, is_child)
        self.p = draft

    def not_renormalised(self, where, is_child):
        self.q = torch.where(where[:, None], (self.q - self.p).clamp(min=0), self.q)
        self.p = torch.where(where[:, None] & is_child, 0.0, self.p)
        self._normalise_p()

    right = rejection._Residual.reject
    return [keep_target, keep_draft, not_renormalised]


@pytest.mark.parametrize("broken", broken_residuals(), ids=lambda function: function.__name__)
def test_a_wrong_residual_is_noticed(broken, monkeypatch):
    monkeypatch.setattr(rejection._Residual, "reject", broken)
    toy, params = Toy(seed=2), SamplingParams(temperature=1.0)
    texts, _ = generate(toy, SHAPES["widths"], params, REJECTION, count=6000, length=3)
    assert p_value(number(texts), joint_law(toy, 0, 3, params)) < 1e-6


def test_a_draft_without_temperature_is_noticed(monkeypatch):
    """CASES 24 itself: the drafter draws at one temperature and says another."""
    toy, params = Toy(seed=2), SamplingParams(temperature=0.5)
    rows = rows_of(params, 6000, REJECTION)
    tree, drafts = draft_batch(toy, torch.zeros(6000, dtype=torch.int64), [-1, 0, 0], rows)
    wrong = toy.drafter[tree.token_ids].softmax(-1).gather(2, drafts.ids)
    law = joint_law(toy, 0, 1, params)
    for probs, noticed in ((drafts.probs, False), (wrong, True)):
        step = sample_tree(
            tree, toy.target[tree.token_ids], rows, drafts=NodeDrafts(drafts.ids, probs, 2)
        )
        assert (p_value(step.token_ids[:, 0], law) < 1e-6) == noticed


def grown(toy, rows, count, *, honest):
    """Dynamic trees under one budget; dishonest ones prefer the children that came out likely."""
    builders = [DynamicTreeBuilder(0, max_nodes=8, max_depth=3, top_k=3) for _ in range(count)]
    record = DraftRecord(count)
    entries = [[] for _ in range(count)]
    for depth in range(3):
        width = max(len(builder.frontier) for builder in builders)
        if not width:
            break
        tokens = torch.zeros(count, width, dtype=torch.int64)
        first = record.width
        for row, builder in enumerate(builders):
            for column, draft_row in enumerate(builder.frontier_rows):
                parent, token = builder.draft_parents[draft_row], builder.frontier_tokens[column]
                tokens[row, column] = token
                if parent >= 0:
                    record.name(row, first + column, entries[row][parent], token)
                entries[row].append(first + column)
        children = draft_children(
            toy.drafter[tokens],
            rows,
            depth=depth,
            count=3,
            numbers=torch.arange(first, first + width),
        )
        record.add(children)
        values = children.log_probs
        if not honest:
            values = toy.drafter[tokens].log_softmax(-1).gather(2, children.token_ids)
        ids, scores = children.token_ids.tolist(), values.tolist()
        for row, builder in enumerate(builders):
            if builder.frontier:
                size = len(builder.frontier)
                builder.expand(ids[row][:size], scores[row][:size])
    return [builder.build() for builder in builders], record


@pytest.mark.parametrize("honest", [True, False])
def test_trees_shaped_and_pruned_by_the_drafter(honest):
    """CASES 25: pruning keeps the law if it looks at places in the order, not at the draws."""
    count = 5000
    toy, params = Toy(seed=2, distance=1.5), SamplingParams(temperature=2.0)
    rows = rows_of(params, count, REJECTION)
    trees, record = grown(toy, rows, count, honest=honest)
    trees = fit_to_budget(trees, count * 5)
    assert len({tree.parent_ids for tree in trees}) > 3, "shapes differ"
    batch = to_tree_batch(trees, list(range(count)), [1] * count, "cpu")
    drafts = record.align(trees, batch.parents.shape[1])
    step = sample_tree(batch, toy.target[batch.token_ids], rows, drafts=drafts)
    law = joint_law(toy, 0, 1, params)
    assert (p_value(step.token_ids[:, 0], law) > 1e-4) == honest
    # Where a second token came, it follows the law after the first.
    for token in range(VOCAB) if honest else ():
        second = step.token_ids[(step.token_ids[:, 0] == token) & (step.num_tokens > 1), 1]
        if len(second) > 200:
            assert p_value(second, joint_law(toy, token, 1, params)) > 1e-4


def test_a_record_follows_its_nodes_through_pruning():
    toy, params = Toy(seed=4), SamplingParams(temperature=1.0)
    rows = rows_of(params, 40, REJECTION)
    trees, record = grown(toy, rows, 40, honest=True)
    for kept in (trees, fit_to_budget(trees, 200)):
        picked = list(range(5, 25))
        drafts = record.align(
            [kept[i] for i in picked], 9, record_rows=[*picked[:-1], -1], pad_batch_to=22
        )
        for row, index in enumerate(picked):
            tree = kept[index]
            for node in range(tree.num_nodes):
                found = torch.zeros(VOCAB)
                found = found.scatter(0, drafts.ids[row, node], drafts.probs[row, node])
                expected = toy.drafter[tree.token_ids[node]].softmax(-1)
                known = row < len(picked) - 1 and bool(found.any())
                torch.testing.assert_close(found, expected if known else torch.zeros(VOCAB))
                assert known or row == len(picked) - 1 or node not in tree.parent_ids
        assert not bool(drafts.probs[20:].any())


def test_requests_for_drafts_that_do_not_fit():
    toy, params = Toy(seed=4), SamplingParams(temperature=1.0)
    rows = rows_of(params, 2, REJECTION)
    logits, number = toy.drafter[None, :1].repeat(2, 1, 1), torch.tensor([0])
    with pytest.raises(ValueError, match=r"count must be in \[1, vocabulary 6\], got 7"):
        draft_children(logits, rows, depth=0, count=7, numbers=number)
    with pytest.raises(ValueError, match=r"logits must be \[2, nodes, 6\]"):
        draft_children(logits[:1], rows, depth=0, count=1, numbers=number)
    tree = DraftTree((0, 1), (-1, 0), (0.0, 0.0))
    batch = to_tree_batch([tree, tree], [0, 1], [1, 1], "cpu")
    wrong = NodeDrafts(torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3, 4), 1)
    with pytest.raises(ValueError, match=r"drafts: ids and probs must be \[2, 2, K\]"):
        sample_tree(batch, toy.target[batch.token_ids], rows, drafts=wrong)


@pytest.mark.parametrize("rule", [MATCH, REJECTION])
def test_children_are_distinct_even_where_the_filter_leaves_fewer(rule):
    toy = Toy(seed=4)
    rows = rows_of(SamplingParams(top_k=2), 50, rule)
    children = draft_children(
        toy.drafter[None].repeat(50, 1, 1), rows, depth=0, count=5, numbers=torch.arange(VOCAB)
    )
    ordered = children.token_ids.sort(-1).values
    assert bool((ordered[..., 1:] != ordered[..., :-1]).all())
    best = toy.drafter.topk(5).indices.expand(50, -1, -1)
    assert torch.equal(children.token_ids[..., :2].sort(-1).values, best[..., :2].sort(-1).values)
    assert torch.equal(children.token_ids[..., 2:], best[..., 2:])
    assert bool((children.log_probs[..., 2:] == -torch.inf).all())


def test_seeds_of_the_same_request_differ_by_sequence():
    """n > 1: one seed, several texts."""
    toy, params = Toy(seed=4), SamplingParams(temperature=1.0)
    rows = rows_of(params, 300, MATCH)
    other = replace(rows, seed=rows.seed + torch.tensor([0, 0, 1]))
    tree, _ = draft_batch(toy, torch.zeros(300, dtype=torch.int64), [-1], rows)
    logits = toy.target[tree.token_ids]
    tokens = [sample_tree(tree, logits, r).token_ids[:, 0] for r in (rows, other)]
    assert 0.1 < float((tokens[0] == tokens[1]).double().mean()) < 0.7
