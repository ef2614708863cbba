"""The bookkeeping of captured steps, over the static buffers: trees, acceptance, pending pairs.

Nothing here waits for the device. Each is one launch where there is a kernel for it
(`triton_ops/step_tables.py`), and torch elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy import triton_ops

from .acceptance import Acceptance
from .decode_buffers import DecodeBuffers


def fill(buffers: DecodeBuffers, batch: int, nodes: int, kept: Tensor, own: Tensor) -> None:
    """Takes the trees of one topology that were drafted last; places beyond them are blank.

    Args:
        buffers: tables by slot are read; tokens, parents and scores of the step are written.
        batch, nodes: of the step.
        kept: int64 [T], T at most `nodes`: the nodes to take.
        own: int32 [T], their parents among them.
    """
    tokens, parents = buffers.tokens(batch, nodes), buffers.parents(batch, nodes)
    scores, slot = buffers.scores(batch, nodes), buffers.slot(batch)
    if triton_ops.runs_on(slot):
        from trtllm_treewy.triton_ops import step_tables as kernels

        kernels.fill(
            slot, buffers.tree_tokens, buffers.tree_scores, kept, own, tokens, parents, scores
        )
        return
    index, size = buffers.by_slot(slot), kept.shape[0]
    for target, source, blank in (
        (tokens, buffers.tree_tokens[index].index_select(1, kept), 0),
        (parents, own.expand(batch, -1), -1),
        (scores, buffers.tree_scores[index].index_select(1, kept), 0),
    ):
        target[:, size:] = blank
        target[:, :size] = source


def report(
    buffers: DecodeBuffers,
    batch: int,
    nodes: int,
    accepted: Acceptance,
    values: Tensor,
    columns: int,
) -> None:
    """Puts accepted paths where a commit reads them, and tells the host of them.

    Args:
        buffers: the step's trees are read; acceptance and result are written.
        batch, nodes: of the step.
        accepted: as many columns as the buffers' paths have.
        values: float32 [B, N], the best logit of each node: not finite where none is of use.
        columns: of the result (`DecodeGraphs.result_columns`).
    """
    path, result = buffers.path(batch, nodes), buffers.result(batch, columns)
    tokens, parents = buffers.tokens(batch, nodes), buffers.parents(batch, nodes)
    scores = buffers.scores(batch, nodes)
    chosen = (accepted.accepted, accepted.num_accepted, accepted.path, accepted.bonus_ids)
    kept = (buffers.accepted(batch), buffers.num_accepted(batch), path, buffers.bonus(batch))
    if triton_ops.runs_on(path):
        from trtllm_treewy.triton_ops import step_tables as kernels

        kernels.report(chosen, values, (tokens, parents, scores), kept, result)
        return
    for target, source in zip(kept, chosen, strict=True):
        target.copy_(source)
    on_path = path.clamp(min=0)
    broken = ~values.isfinite().gather(1, on_path) & (path >= 0)
    emitted = _followed(path, tokens, buffers.num_accepted(batch), buffers.bonus(batch))
    parts = [path, emitted, broken.any(1, keepdim=True)]
    if columns > 2 * path.shape[1] + 1:
        parts += [parents, scores.view(torch.int32)]
    result.copy_(torch.cat(parts, 1))


def note(buffers: DecodeBuffers, batch: int, nodes: int, append: bool) -> None:
    """What a step brought, for the next one: pending pairs, roots, and the rows to draft for.

    Args:
        buffers: trees, hidden states and acceptance of the step are read; tables by slot and the
            rows to draft for are written.
        batch, nodes: of the step.
        append: in a step of roots alone, keep the pairs that are pending; otherwise the accepted
            ones are in their place.
    """
    slot, context = buffers.slot(batch), buffers.context(batch)
    following = buffers.draft_slot(batch), buffers.draft_context(batch)
    tokens, hidden = buffers.tokens(batch, nodes), buffers.hidden(batch, nodes)
    count, path = buffers.num_accepted(batch), buffers.path(batch, nodes)
    bonus, columns = buffers.bonus(batch), path.shape[1]
    pending = buffers.pending_tokens, buffers.pending_hidden, buffers.pending_len
    if triton_ops.runs_on(path):
        from trtllm_treewy.triton_ops import step_tables as kernels

        kernels.note(
            (slot, context), tokens, hidden, (count, path, bonus), pending, buffers.tree_tokens,
            following, append,
        )  # fmt: skip
        return
    index = buffers.by_slot(slot)
    new = _followed(path, tokens, count, bonus)
    states = hidden.gather(1, path.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[2]))
    if append:
        # Of rows that nobody drafts for it is never asked, however many they are.
        held = buffers.pending_len[index].clamp(max=buffers.sizes.path - 1).long()
        buffers.pending_tokens[index, held] = new[:, 0]
        buffers.pending_hidden[index, held] = states[:, 0]
        buffers.pending_len[index] = held.int() + count
    else:
        buffers.pending_tokens[index, :columns] = new
        buffers.pending_hidden[index, :columns] = states
        buffers.pending_len[index] = count
    buffers.tree_tokens[index, 0] = bonus.clamp(min=0)
    following[0].copy_(slot)
    following[1].copy_(context + count)


def _followed(path: Tensor, tokens: Tensor, count: Tensor, bonus: Tensor) -> Tensor:
    """The token after each node of the paths: the next one's, and the bonus after the last."""
    after = torch.cat([path[:, 1:], path[:, :1]], 1).clamp(min=0)
    place = torch.arange(path.shape[1], device=path.device)
    return torch.where(place == count[:, None] - 1, bonus[:, None], tokens.gather(1, after))


@dataclass(frozen=True)
class Pairs:
    """Pairs that the MTP module has yet to see, of the rows to draft for.

    Attributes:
        tokens, positions: int64 [B, P].
        hidden: [B, P, hidden].
        count: int32 [B], how many of a row are real.
        base: int32 [B], its entries before them.
        before: int32 [B], its entries before the last of them.
        last: int64 [B], that one's place among all B * P.
    """

    tokens: Tensor
    hidden: Tensor
    positions: Tensor
    count: Tensor
    base: Tensor
    before: Tensor
    last: Tensor


def pairs(buffers: DecodeBuffers, batch: int) -> Pairs:
    """The pending pairs of the rows to draft for."""
    slot, context = buffers.draft_slot(batch), buffers.draft_context(batch)
    if triton_ops.runs_on(slot):
        from trtllm_treewy.triton_ops import step_tables as kernels

        pending = buffers.pending_tokens, buffers.pending_hidden, buffers.pending_len
        return Pairs(*kernels.pairs(slot, context, pending))
    index, room = buffers.by_slot(slot), buffers.sizes.path
    count = torch.where(slot >= 0, buffers.pending_len[index], 0)
    base = context - count
    place = torch.arange(room, dtype=torch.int32, device=slot.device)
    first = room * torch.arange(batch, device=slot.device)
    return Pairs(
        buffers.pending_tokens[index],
        buffers.pending_hidden[index],
        (base[:, None] + place).long(),
        count,
        base,
        (context - 1).clamp(min=0),
        first + (count - 1).clamp(min=0),
    )


@dataclass(frozen=True)
class Level:
    """Nodes of one depth, and where their tokens are found.

    Attributes:
        nodes: int64 [C], by index in the tree.
        parents: int64 [C], their parents'.
        pick: int64 [C], place of each among the candidates of the level above, flattened.
        inner: int64 [W], that place of those with children.
    """

    nodes: Tensor
    parents: Tensor
    pick: Tensor
    inner: Tensor


def children(
    buffers: DecodeBuffers, batch: int, level: Level, ids: Tensor, gains: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Puts the nodes of a level into the tables: tokens, and log probabilities along their paths.

    Args:
        buffers: tables by slot are written.
        batch: rows to draft for.
        level: the nodes.
        ids, gains: [B * above, widest], the best tokens after each node with children above, and
            their log probabilities.
        depth: of the nodes.

    Returns:
        Tokens and positions of those that have children, int64 [B, W].
    """
    slot, context = buffers.draft_slot(batch), buffers.draft_context(batch)
    ids, gains = ids.view(batch, -1), gains.view(batch, -1)
    if triton_ops.runs_on(ids):
        from trtllm_treewy.triton_ops import step_tables as kernels

        return kernels.children(
            (ids, gains), (level.pick, level.nodes, level.parents, level.inner), (slot, context),
            (buffers.tree_tokens, buffers.tree_scores), depth,
        )  # fmt: skip
    index = buffers.by_slot(slot)[:, None]
    buffers.tree_tokens[index, level.nodes] = ids.index_select(1, level.pick)
    scores = buffers.tree_scores
    reached = scores[index, level.parents] + gains.index_select(1, level.pick)
    scores[index, level.nodes] = reached.to(scores.dtype)
    positions = (context[:, None].long() + (depth - 1)).expand(-1, level.inner.shape[0])
    return ids.index_select(1, level.inner), positions.contiguous()
