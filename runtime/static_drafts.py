"""Drafting a fixed topology on the device alone: the trees of `MtpStaticDrafter`, captured.

What depends on the topology is worked out once, as index tensors; what depends on the step is read
from static buffers. Nothing here waits for the device or looks at its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.draft_tree import TreeTopology
from trtllm_treewy.model import (
    FusedModel,
    PackedAttentionStep,
    PackedHeads,
    Qwen3_5ForCausalLM,
    StoringStep,
)

from .decode_buffers import DecodeBuffers
from .head import best_children
from .kv_cache import KvCache
from .step_tables import Level, Pairs, children, pairs


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth: who they are, and how they come about.

    Attributes:
        nodes: who they are, and whose children.
        widest: candidates of each node above.
        source: int64 [W], of each of those with children the column of its parent in the level
            above; None where these are the columns in order.
        sees: bool [W, E], the draft's entries that each of them sees, itself included; W is 0 at
            the end.
    """

    nodes: Level
    widest: int
    source: Tensor | None
    sees: Tensor


def _levels(topology: TreeTopology, device: torch.device) -> list[_Level]:
    levels: list[_Level] = []
    above, entry_of = [0], {0: -1}
    seen: dict[int, set[int]] = {0: set()}  # entries on the path to a node, its own included
    for depth in range(1, topology.depth + 1):
        widest = max(len(topology.children[node]) for node in above)
        nodes = [kid for node in above for kid in topology.children[node]]
        pick = [
            column * widest + rank
            for column, node in enumerate(above)
            for rank in range(len(topology.children[node]))
        ]
        inner = [n for n in topology.levels[depth] if topology.children[n]]
        first = len(entry_of) - 1
        for place, node in enumerate(inner):
            entry_of[node] = first + place
            seen[node] = {*seen[topology.parent_ids[node]], first + place}
        sees = torch.zeros(len(inner), first + len(inner), dtype=torch.bool)
        for place, node in enumerate(inner):
            sees[place, sorted(seen[node])] = True
        source = [above.index(topology.parent_ids[node]) for node in inner]
        above_nodes = [topology.parent_ids[node] for node in nodes]

        def ids(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        levels.append(
            _Level(
                nodes=Level(
                    nodes=ids(nodes),
                    parents=ids(above_nodes),
                    pick=ids(pick),
                    inner=ids([pick[nodes.index(node)] for node in inner]),
                ),
                widest=widest,
                source=None if source == list(range(len(above))) else ids(source),
                sees=sees.to(device),
            )
        )
        above = inner
    return levels


def draft_entries(topology: TreeTopology) -> int:
    """Cache rows that a draft in progress takes: nodes with children, the root not among them."""
    return sum(bool(kids) for kids in topology.children[1:])


class StaticDrafts:
    """Enters verified pairs into the MTP module, and drafts below them.

    Args:
        model, kv_cache: of the executor.
        first_layer: the module's first layer in the cache.
        buffers: what is read and written.
        topology: of the trees; its nodes are the buffers' `drafts`.
    """

    def __init__(
        self,
        model: Qwen3_5ForCausalLM | FusedModel,
        kv_cache: KvCache,
        first_layer: int,
        buffers: DecodeBuffers,
        topology: TreeTopology,
    ) -> None:
        self._model, self._cache, self._buffers = model, kv_cache, buffers
        self._first_layer = first_layer
        self._levels = _levels(topology, buffers.device)
        self.topology = topology
        room, device = buffers.sizes.path, buffers.device
        # Pairs see those before them, and the last one itself; which no row is written for again.
        self._chain = torch.ones(1, room, room, dtype=torch.bool, device=device).tril()
        self._itself = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        self._nothing = torch.zeros(buffers.sizes.batch, dtype=torch.int32, device=device)

    def depth_for(self, nodes: int) -> int:
        """Levels that must be drafted below the root for trees of the best `nodes` nodes."""
        return min(nodes - 1, self.topology.depth)

    def nodes_within(self, depth: int) -> tuple[Tensor, Tensor]:
        """The nodes down to `depth`, int64 [T], and their parents among them, int32 [T]."""
        kept = sorted(n for level in self.topology.levels[: depth + 1] for n in level)
        place = {node: at for at, node in enumerate(kept)}
        parents = [place.get(self.topology.parent_ids[node], -1) for node in kept]
        device = self._buffers.device
        return (
            torch.tensor(kept, dtype=torch.int64).to(device),
            torch.tensor(parents, dtype=torch.int32).to(device),
        )

    def extend(self, batch: int, max_context: int) -> Tensor:
        """Enters the pending pairs of the rows to draft for, as a chain behind their entries.

        Pairs that are there already are written again, with the same values.

        Returns:
            The module's output [B, hidden] at each row's last pair.
        """
        waiting, step = self._waiting(batch, max_context)
        attending = self._cache.step_behind(
            self._buffers.draft_slot(batch),
            waiting.before,
            self._itself.expand(batch, -1, -1),
            max_context,
            count=self._nothing[:batch],
            ahead=True,
        )
        out = self._model.draft_last(
            waiting.tokens,
            waiting.hidden,
            waiting.positions,
            step,
            waiting.last,
            layers_from(attending, self._first_layer),
        )
        return out[:, 0]

    def enter(self, batch: int, max_context: int) -> None:
        """Enters them as `extend` does, and computes nothing that only a draft needs."""
        waiting, step = self._waiting(batch, max_context)
        self._model.draft_enter(waiting.tokens, waiting.hidden, waiting.positions, step)

    def _waiting(self, batch: int, max_context: int) -> tuple[Pairs, StoringStep]:
        """The pending pairs of the rows to draft for, and the step that enters them."""
        waiting = pairs(self._buffers, batch)
        step = self._cache.step_behind(
            self._buffers.draft_slot(batch),
            waiting.base,
            self._chain.expand(batch, -1, -1),
            max_context,
            count=waiting.count,
            ahead=True,
        )
        return waiting, layers_from(step, self._first_layer)

    def draft(self, batch: int, max_context: int, levels: int | None = None) -> None:
        """Drafts a tree for each row, into `tree_tokens` and `tree_scores`.

        Of `levels` levels below the root, all of them by default; deeper nodes mean nothing then.
        The root is there already: the token of the last pair.
        """
        buffers = self._buffers
        slot, context = buffers.draft_slot(batch), buffers.draft_context(batch)
        hidden = self.extend(batch, max_context)[:, None]
        entry = 0
        levels = len(self._levels) if levels is None else levels
        for depth, level in enumerate(self._levels[:levels], start=1):
            ids, log_probs = best_children(self._model, hidden.flatten(0, 1), level.widest)
            tokens, positions = children(buffers, batch, level.nodes, ids, log_probs, depth)
            width, entries = level.sees.shape
            if not width or depth == levels:
                break
            sees = level.sees.expand(batch, -1, -1)
            attention = layers_from(
                self._cache.step_behind(slot, context, sees, max_context, first=entry, ahead=True),
                self._first_layer,
            )
            if level.source is not None:
                hidden = hidden.index_select(1, level.source)
            hidden = self._model.draft(tokens, hidden, positions, attention)
            entry = entries


class LayersFrom:
    """An attention step whose layer 0 is a later layer of the cache (the MTP module's)."""

    def __init__(self, step: StoringStep, first: int) -> None:
        self._step, self._first = step, first

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As the step's."""
        return self._step.attend(self._first + layer, q, k, v, scale)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As the step's."""
        self._step.store(self._first + layer, k, v)


class PackedLayersFrom(LayersFrom):
    """The same of a step that takes packed heads."""

    def __init__(self, step: PackedAttentionStep, first: int) -> None:
        super().__init__(step, first)
        self._packed = step

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> Tensor:
        """As the step's."""
        return self._packed.attend_packed(self._first + layer, heads, scale)

    def store_packed(self, layer: int, heads: PackedHeads) -> None:
        """As the step's."""
        self._packed.store_packed(self._first + layer, heads)


def layers_from(step: StoringStep, first: int) -> StoringStep:
    """`step` with its layer `first` as layer 0."""
    if isinstance(step, PackedAttentionStep):
        return PackedLayersFrom(step, first)
    return LayersFrom(step, first)


def best_nodes(
    tokens: Tensor, parents: Tensor, scores: Tensor, keep: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best `keep` nodes of trees of one topology, as `DraftTree.prune` takes them.

    By log probability, ties to the lower index; a node is never better than its parent, so each
    tree stays closed under ancestors.

    Args:
        tokens, scores: [B, T].
        parents: int32 [T].
        keep: nodes that stay, at least 1.

    Returns:
        Tokens, parents int32 and scores, [B, keep] each.
    """
    size = tokens.shape[1]
    # A NaN ranks with the impossible, and the root before all others.
    rank = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    rank = torch.cat([torch.full_like(rank[:, :1], torch.inf), rank[:, 1:]], 1)
    order = rank.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    order = order.sort(1).values
    index = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(keep, device=tokens.device).expand_as(order)
    )
    above = parents.long().expand(tokens.shape[0], size).gather(1, order)
    moved = torch.where(above >= 0, index.gather(1, above.clamp(min=0)), -1)
    return tokens.gather(1, order), moved.int(), scores.gather(1, order)
