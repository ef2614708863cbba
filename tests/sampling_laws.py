"""A tiny target and drafter with known laws, and the test that compares samples with a law."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.runtime.sampling import (
    AcceptanceRule,
    NodeDrafts,
    SamplingRows,
    SequenceSampling,
    draft_children,
    sample_tree,
)
from trtllm_treewy.sampling_params import SamplingParams

VOCAB = 6


class Toy:
    """Logits after a token: a table for the target, and one near it for the drafter."""

    def __init__(self, seed: int, distance: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        noise = torch.randn(VOCAB, VOCAB, generator=generator)
        self.drafter = self.target + distance * noise


def law(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The distribution by the definition, in plain Python: temperature, top-k, top-p, min-p."""
    temperature = params.temperature if params.temperature is not None else 1.0
    weights = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = order[: params.top_k or len(order)]
    total, kept, mass = sum(weights[t] for t in order), [], 0.0
    for token in order:
        if mass < (1.0 if params.top_p is None else params.top_p):
            kept.append(token)
            mass += weights[token] / total
    kept = [t for t in kept if weights[t] >= (params.min_p or 0.0) * weights[order[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def joint_law(toy: Toy, first: int, length: int, params: SamplingParams) -> torch.Tensor:
    """Probability of every continuation of `first` by `length` tokens, [VOCAB ** length]."""
    after = [law(toy.target[token], params) for token in range(VOCAB)]
    probabilities = []
    for text in itertools.product(range(VOCAB), repeat=length):
        p, last = 1.0, first
        for token in text:
            p, last = p * after[last][token], token
        probabilities.append(p)
    return torch.tensor(probabilities, dtype=torch.float64)


def p_value(samples: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of int64 `samples` against a law; rare outcomes are taken together."""
    counts = torch.bincount(samples, minlength=len(probabilities)).double()
    expected = probabilities * len(samples)
    assert float(counts[probabilities == 0].sum()) == 0, "an impossible outcome"
    common = expected >= 5
    rest = (~common) & (probabilities > 0)
    if bool(rest.any()):
        counts = torch.cat([counts[common], counts[rest].sum()[None]])
        expected = torch.cat([expected[common], expected[rest].sum()[None]])
    else:
        counts, expected = counts[common], expected[common]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def rows_of(
    params: SamplingParams, count: int, rule: AcceptanceRule, *, first_seed: int = 0
) -> SamplingRows:
    """Rows that differ in their seeds alone."""
    sequences = [
        SequenceSampling(
            replace(params, seed=first_seed + index), [0], VOCAB, sequence=0, acceptance=rule
        )
        for index in range(count)
    ]
    return SamplingRows.build(sequences, [[0]] * count, "cpu")


def draft_batch(
    toy: Toy, roots: torch.Tensor, parents: list[int], rows: SamplingRows, *, drawn: bool = True
) -> tuple[TreeBatch, NodeDrafts]:
    """A tree of one shape for every root, its children drawn (or else the drafter's best)."""
    batch, nodes = len(roots), len(parents)
    tokens = roots[:, None].repeat(1, nodes)
    ids = torch.arange(VOCAB).repeat(batch, nodes, 1)
    probs = torch.zeros(batch, nodes, VOCAB)
    depth = [0] * nodes
    for node in range(nodes):
        depth[node] = depth[parents[node]] + 1 if node else 0
        kids = [child for child in range(nodes) if parents[child] == node]
        if not kids:
            continue
        logits = toy.drafter[tokens[:, node]]
        if drawn:
            children = draft_children(
                logits[:, None],
                rows,
                depth=depth[node],
                count=len(kids),
                numbers=torch.tensor([node]),
            )
            tokens[:, kids] = children.token_ids[:, 0]
            ids[:, node] = children.support_ids[:, 0]
            probs[:, node] = children.support_probs[:, 0]
        else:
            tokens[:, kids] = logits.topk(len(kids)).indices
    tree = TreeBatch(
        token_ids=tokens,
        parents=torch.tensor(parents, dtype=torch.int32).repeat(batch, 1),
        num_nodes=torch.full((batch,), nodes, dtype=torch.int32),
        slot=torch.arange(batch, dtype=torch.int32),
        context_lens=torch.ones(batch, dtype=torch.int32),
        max_context=1,
    )
    most = max(parents.count(node) for node in range(nodes))
    return tree, NodeDrafts(ids, probs, most)


def generate(
    toy: Toy,
    parents: list[int],
    params: SamplingParams,
    rule: AcceptanceRule,
    *,
    count: int,
    length: int,
    first: int = 0,
    drawn: bool = True,
) -> tuple[torch.Tensor, float]:
    """Continuations of `first` int64 [count, length], and tokens a step over the first steps."""
    base = rows_of(params, count, rule)
    text = torch.full((count, length + len(parents) + 1), first)
    lengths = torch.zeros(count, dtype=torch.int64)
    first_step = 0.0
    while int(lengths.min()) < length:
        # Rows that are done stand still: their step is computed and dropped.
        running = lengths < length
        rows = replace(base, position=lengths + 1)
        roots = text.gather(1, lengths[:, None])[:, 0]
        tree, drafts = draft_batch(toy, roots, parents, rows, drawn=drawn)
        step = sample_tree(tree, toy.target[tree.token_ids], rows, drafts=drafts)
        assert not bool(step.fault.any())
        first_step = first_step or float(step.num_tokens.double().mean())
        for column in range(step.token_ids.shape[1]):
            moves = running & (column < step.num_tokens)
            lengths = torch.where(moves, lengths + 1, lengths)
            at = lengths.clamp(max=text.shape[1] - 1)[:, None]
            token = torch.where(moves, step.token_ids[:, column], text.gather(1, at)[:, 0])
            text.scatter_(1, at, token[:, None])
    return text[:, 1 : length + 1], first_step


def number(texts: torch.Tensor) -> torch.Tensor:
    """Index of each row of `texts` in the order of `joint_law`."""
    index = torch.zeros(len(texts), dtype=torch.int64)
    for column in range(texts.shape[1]):
        index = index * VOCAB + texts[:, column]
    return index
