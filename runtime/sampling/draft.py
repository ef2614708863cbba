"""Drawing draft tokens, and remembering what they were drawn from until verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.draft_tree import DraftTree

from .counter_rng import Purpose, gumbel, random_word
from .processors import adjust, filtered, tempered
from .rows import SamplingRows

# Tokens of a draft distribution that are kept. The rest is never drafted, so nothing is lost but
# the rare acceptance; a tree of 40 nodes would otherwise hold 40 vocabularies.
SUPPORT = 256


@dataclass(frozen=True)
class DraftChildren:
    """Children of W nodes of each row.

    Attributes:
        token_ids: int64 [batch, W, count], distinct, in the order they were drawn.
        log_probs: float32 [batch, W, count], descending: the log probability of the i-th most
            likely token, as the value of the i-th child. -inf where there are fewer tokens.
        support_ids, support_probs: int64, float32 [batch, W, K], the distribution they were drawn
            from, up to a factor; zero in rows that accept by match.
    """

    token_ids: Tensor
    log_probs: Tensor
    support_ids: Tensor
    support_probs: Tensor


@torch.inference_mode()
def draft_children(
    logits: Tensor,
    rows: SamplingRows,
    *,
    depth: int,
    count: int,
    numbers: Tensor,
    path_token_ids: Tensor | None = None,
    support: int = SUPPORT,
) -> DraftChildren:
    """Draws `count` children for each of W nodes, with the settings that the target has.

    - Rows that accept by rejection draw without replacement (Gumbel top-k: Kool et al., ICML 2019)
      from the drafter's processed distribution, cut to its `support` most likely tokens.
    - Rows that accept by match take the best of log p + G with the very noise G that the target
      will be drawn with (Daliri et al., "Coupling without communication and drafter-invariant
      speculative decoding", 2024): where drafter and target agree, so do their tokens.
    - Greedy rows take the most likely tokens.

    Under rejection a tree may be shaped by `log_probs`, which say nothing of the tokens drawn, and
    by tokens of nodes already in it; never by a child's own probability. Dropping the children that
    came out unlikely would skew the result. Children may only be dropped from the end.

    Args:
        logits: [batch, W, vocab], the drafter's after each node, any float type.
        rows: settings of each row, the root counted among its outputs.
        depth: of these nodes; 0 for the root.
        count: children of each node.
        numbers: int64 [W] or [batch, W], a number for each node that no other of its draft has.
        path_token_ids: int64 [batch, W, depth], tokens from the root's child to the node, for the
            penalties; without them the drafts' own tokens are not counted.
        support: most tokens to draw from.

    Raises:
        ValueError: logits of another shape, or more children than the vocabulary has tokens.
    """
    batch, width, vocab = logits.shape if logits.ndim == 3 else (0, 0, 0)
    if batch != len(rows) or vocab != rows.vocab_size:
        raise ValueError(
            f"drafting: logits must be [{len(rows)}, nodes, {rows.vocab_size}], got "
            f"{list(logits.shape)}"
        )
    if not 1 <= count <= vocab:
        raise ValueError(f"drafting: count must be in [1, vocabulary {vocab}], got {count}")
    flat = _node_rows(rows, width, depth, path_token_ids)
    x = tempered(adjust(logits.reshape(batch * width, vocab), flat), flat)
    # A drafter that fails drafts something; the target alone decides.
    x = x.nan_to_num(nan=0.0, neginf=-torch.inf)
    kept = filtered(x, flat) if rows.any_random else x
    kept = torch.where(flat.greedy[:, None], x, kept)
    best = x.topk(min(vocab, max(support, count)), dim=-1)
    log_probs = kept.log_softmax(-1).gather(1, best.indices)
    key = log_probs
    if rows.any_random:
        words = _words(flat, depth, numbers.expand(batch, width).reshape(-1))
        key = torch.where(flat.greedy[:, None], key, key + gumbel(words, best.indices))
    picked = _distinct(key).topk(count, dim=-1).indices
    probs = torch.where(flat.rejection[:, None], log_probs.exp(), 0.0)
    shape = (batch, width, -1)
    return DraftChildren(
        best.indices.gather(1, picked).view(shape),
        log_probs[:, :count].reshape(shape),
        best.indices.view(shape),
        probs.view(shape),
    )


def _node_rows(
    rows: SamplingRows, width: int, depth: int, path_token_ids: Tensor | None
) -> SamplingRows:
    """A row for each node, standing at the position of the node's children."""
    flat = rows.repeat(width)
    nothing = torch.full_like(flat.position, -1)
    for step in range(depth):
        token = nothing if path_token_ids is None else path_token_ids[:, :, step].reshape(-1)
        flat = flat.after(token)
    return flat


def _words(flat: SamplingRows, depth: int, numbers: Tensor) -> Tensor:
    """Random bits for each node's children.

    Draft noise is named by the root's position and the node's number, so that no two nodes of a
    draft share it, and no two drafts of a sequence.
    """
    own = random_word(flat.seed, flat.position - depth, Purpose.DRAFT, numbers)
    return torch.where(flat.rejection, own, flat.word(Purpose.TARGET))


def _distinct(key: Tensor) -> Tensor:
    """`key` with finite values for impossible tokens, below all others, the likelier first."""
    place = torch.arange(1, key.shape[1] + 1, device=key.device, dtype=key.dtype)
    return torch.where(key == -torch.inf, -1e30 * place, key)


@dataclass(frozen=True)
class NodeDrafts:
    """What the children of each node of a tree batch were drawn from.

    Attributes:
        ids, probs: int64, float32 [batch, N, K]; probabilities are zero at nodes without drafts,
            whose children are accepted by match.
        max_children: the most children that a node has.
    """

    ids: Tensor
    probs: Tensor
    max_children: int

    def check(self, parents: Tensor) -> None:
        """Raises ValueError unless this belongs to a batch of such trees."""
        if self.ids.shape != self.probs.shape or self.ids.shape[:2] != parents.shape:
            raise ValueError(
                f"drafts: ids and probs must be [{parents.shape[0]}, {parents.shape[1]}, K], got "
                f"{list(self.ids.shape)} and {list(self.probs.shape)}"
            )


class DraftRecord:
    """Distributions of one proposal, found again after its trees were pruned.

    A node is known by its entry: the root is 0, others as `name` says. Pruning renumbers nodes,
    but a node keeps its parent and its token, which no sibling has.
    """

    def __init__(self, batch: int) -> None:
        self._ids: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._entries: list[dict[tuple[int, int], int]] = [{} for _ in range(batch)]

    @property
    def width(self) -> int:
        """Entries so far, and so the number of the next one."""
        return sum(ids.shape[1] for ids in self._ids)

    def add(self, children: DraftChildren) -> None:
        """Takes the distributions of W more nodes, whose entries follow those there are."""
        self._ids.append(children.support_ids)
        self._probs.append(children.support_probs)

    def name(self, row: int, entry: int, parent_entry: int, token_id: int) -> None:
        """Says which node of `row` has an entry: the child of another that has this token."""
        self._entries[row][parent_entry, token_id] = entry

    def align(
        self,
        trees: Sequence[DraftTree],
        nodes: int,
        *,
        record_rows: Sequence[int] | None = None,
        pad_batch_to: int | None = None,
    ) -> NodeDrafts:
        """The distributions of `trees` as they are now, in a batch of `nodes` nodes a row.

        Args:
            trees: the trees of the batch, pruned or not.
            nodes: N of the tree batch.
            record_rows: row of the proposal that each tree comes from, -1 for none; by order where
                not given.
            pad_batch_to: rows of the tree batch, where there are more than trees.
        """
        sources = range(len(trees)) if record_rows is None else record_rows
        padding = (len(trees) if pad_batch_to is None else pad_batch_to) - len(trees)
        table = [
            self._entries_of(source, tree, nodes)
            for source, tree in zip(sources, trees, strict=True)
        ]
        ids, probs = torch.cat(self._ids, 1), torch.cat(self._probs, 1)
        entry = torch.tensor(table + [[-1] * nodes] * padding).to(ids.device)
        row = torch.tensor([max(source, 0) for source in sources] + [0] * padding)
        row, at = row.to(ids.device)[:, None], entry.clamp(min=0)
        most = max(max(Counter(tree.parent_ids[1:]).values(), default=0) for tree in trees)
        return NodeDrafts(
            ids[row, at], torch.where((entry >= 0)[..., None], probs[row, at], 0.0), most
        )

    def _entries_of(self, row: int, tree: DraftTree, nodes: int) -> list[int]:
        if row < 0:
            return [-1] * nodes
        entries = [0]
        for token, parent in zip(tree.token_ids[1:], tree.parent_ids[1:], strict=True):
            entries.append(self._entries[row].get((entries[parent], token), -1))
        return entries + [-1] * (nodes - len(entries))
