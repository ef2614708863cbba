"""Acceptance drawn from a law: measurements without trained weights. Texts mean nothing then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import TreeBatch, upload
from trtllm_treewy.draft_tree import DraftTree

from .acceptance import Acceptance
from .decision import Decision
from .decode_graphs import Accept
from .request import Request
from .sampling import AcceptanceRule
from .tree_sampler import TreeSampler


def accept_by_depth(probabilities: Sequence[float]) -> Accept:
    """Acceptance drawn from a law instead of the model: for measurements without trained weights.

    A draft at depth d + 1 is accepted with `probabilities[d]` given that its parent is; the path is
    the first of the tree that is as deep. Tokens are those of the drafts, so a text means nothing.
    """
    drawer = _Drawer(tuple(probabilities))

    def accept(tree: TreeBatch, target_ids: Tensor, columns: int) -> Acceptance:
        if triton_ops.runs_on(target_ids):
            return drawer(tree, target_ids, columns)
        device = target_ids.device
        law = torch.zeros(columns, device=device)
        for depth, probability in enumerate(probabilities[:columns]):
            law[depth].fill_(probability)  # an assignment would copy, which a capture refuses
        batch, nodes = tree.parents.shape
        luck = torch.rand(batch, columns, device=device) < law
        wanted = luck.int().cumprod(1).sum(1).clamp(max=columns - 1)
        index = torch.arange(nodes, device=device)
        real = (index < tree.num_nodes[:, None]) & (tree.slot >= 0)[:, None]
        depths = torch.where(real, tree.depth, -1)
        reached = torch.minimum(wanted, depths.amax(1))
        last = (depths == reached[:, None]).int().argmax(1)
        last = torch.where(reached >= 0, last, -1)
        on_path = tree.ancestors.gather(1, last.clamp(min=0)[:, None, None].expand(-1, 1, nodes))
        on_path = on_path[:, 0] & real & (last >= 0)[:, None]
        # Nodes of a path in the order of their depth, which is that of their indices.
        order = torch.where(on_path, index, nodes).sort(1).values[:, :columns]
        path = torch.where(order < nodes, order, -1)
        bonus = target_ids.gather(1, last.clamp(min=0)[:, None])[:, 0]
        return Acceptance(last.int(), on_path.sum(1).int(), path, torch.where(last >= 0, bonus, -1))

    return accept


class _Drawer:
    """The same by one launch, whose random numbers need nothing from outside of a captured step."""

    def __init__(self, probabilities: tuple[float, ...]) -> None:
        self._probabilities = probabilities
        self._seed = int(torch.randint(1 << 30, ()))
        # By device and rows: made in the calls before a capture, and there for all replays.
        self._counters: dict[tuple[torch.device, int], Tensor] = {}
        self._laws: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, tree: TreeBatch, target_ids: Tensor, columns: int) -> Acceptance:
        from trtllm_treewy.triton_ops.acceptance_law import draw

        device, rows = target_ids.device, target_ids.shape[0]
        if (device, rows) not in self._counters:
            self._counters[device, rows] = torch.zeros(rows, dtype=torch.int64, device=device)
        if (device, columns) not in self._laws:
            law = [*self._probabilities[:columns], *[0.0] * columns][:columns]
            self._laws[device, columns] = upload(torch.tensor(law), device)
        drawn = draw(
            tree.slot, tree.num_nodes, tree.depth, tree.ancestors, target_ids,
            self._laws[device, columns], self._counters[device, rows],
            (self._seed + rows) % (1 << 30), columns,
        )  # fmt: skip
        return Acceptance(*drawn)


class SimulatedSampler(TreeSampler):
    """Accepts by a law where the host decides; every request decodes greedily otherwise."""

    def __init__(
        self, vocab_size: int, device: torch.device, rule: AcceptanceRule, *, accept: Accept
    ) -> None:
        super().__init__(vocab_size, device, rule)
        self._accept = accept

    @torch.inference_mode()
    def decide(
        self,
        logits: Tensor,
        batch: TreeBatch,
        trees: Sequence[DraftTree],
        requests: Sequence[Request],
        max_path: int,
    ) -> Decision:
        """As `Sampler.decide`, whatever the drafts are worth."""
        best = logits.max(-1)
        return Decision(self._accept(batch, best.indices, max_path), ~best.values.isfinite())
