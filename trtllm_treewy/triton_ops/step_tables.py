"""What a captured step reads from the tables of its sequences and writes there, one launch each.

Between the model's products a step is a few hundred bytes of bookkeeping a row, for which torch
takes a hundred launches of two microseconds. `runtime/step_tables.py` says what each of these does,
and has its twin in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a hidden state that a program copies at once.
BLOCK = 1024


@triton.jit
def _fill(
    slot_ptr, token_table, score_table, kept_ptr, own_ptr, token_ptr, parent_ptr, score_ptr,
    size, nodes, width, sink, SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    slot = tl.load(slot_ptr + b)
    row = tl.where(slot >= 0, slot, sink).to(tl.int64)
    drafted, here = n < size, n < nodes
    place = row * width + tl.load(kept_ptr + n, drafted, other=0)
    at = b * nodes + n
    tl.store(token_ptr + at, tl.load(token_table + place, drafted, other=0), here)
    tl.store(parent_ptr + at, tl.load(own_ptr + n, drafted, other=-1), here)
    tl.store(score_ptr + at, tl.load(score_table + place, drafted, other=0.0), here)


def fill(
    slot: Tensor,
    token_table: Tensor,
    score_table: Tensor,
    kept: Tensor,
    own: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
) -> None:
    """Trees from the tables, as `runtime.step_tables.fill`.

    Args:
        slot: int32 [B].
        token_table, score_table: int64 and float32 [S + 1, drafts], contiguous.
        kept, own: int64 and int32 [T], T at most N: nodes of the table, and their parents.
        tokens, parents, scores: int64, int32 and float32 [B, N], contiguous, written.
    """
    batch, nodes = tokens.shape
    _fill[(batch,)](
        slot, token_table, score_table, kept, own, tokens, parents, scores,
        kept.shape[0], nodes, token_table.shape[1], token_table.shape[0] - 1,
        SIZE=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip


@triton.jit
def _report(
    accepted_in, num_in, path_in, bonus_in, value_ptr, token_ptr, parent_ptr, score_ptr,
    accepted_ptr, num_ptr, path_ptr, bonus_ptr, result_ptr, nodes, columns, width,
    TREES: tl.constexpr, SIZE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, SIZE)
    here = c < columns
    num = tl.load(num_in + b)
    bonus = tl.load(bonus_in + b)
    tl.store(accepted_ptr + b, tl.load(accepted_in + b))
    tl.store(num_ptr + b, num)
    tl.store(bonus_ptr + b, bonus)
    node = tl.load(path_in + b * columns + c, here, other=-1)
    tl.store(path_ptr + b * columns + c, node, here)
    value = tl.load(value_ptr + b * nodes + tl.maximum(node, 0), here, other=0.0)
    broken = here & (node >= 0) & ~(tl.abs(value) < float("inf"))
    # The token after a node of the path is the next one's, and the bonus after the last.
    after = tl.load(path_in + b * columns + (c + 1) % columns, here, other=-1)
    token = tl.load(token_ptr + b * nodes + tl.maximum(after, 0), here, other=0)
    token = tl.where(c == num - 1, bonus, token)
    row = result_ptr + b * width
    tl.store(row + c, node.to(tl.int32), here)
    tl.store(row + columns + c, token.to(tl.int32), here)
    tl.store(row + 2 * columns, tl.max(broken.to(tl.int32), 0))
    if TREES:
        n = tl.arange(0, NODES)
        tree, inside = row + 2 * columns + 1, n < nodes
        tl.store(tree + n, tl.load(parent_ptr + b * nodes + n, inside, other=-1), inside)
        tl.store(tree + nodes + n, tl.load(score_ptr + b * nodes + n, inside, other=0), inside)


def report(
    chosen: tuple[Tensor, Tensor, Tensor, Tensor],
    values: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    result: Tensor,
) -> None:
    """What was accepted, to where a commit and the host find it; as `runtime.step_tables.report`.

    Args:
        chosen: accepted and num_accepted int32 [B], path int64 [B, P], bonus int64 [B].
        values: float32 [B, N], the best logit of each node.
        tree: tokens int64, parents int32 and scores float32, [B, N] each.
        kept: as `chosen`, written.
        result: int32 [B, 2 P + 1], or with another 2 N columns for the tree; written.
    """
    tokens, parents, scores = tree
    batch, nodes = tokens.shape
    columns, width = kept[2].shape[1], result.shape[1]
    _report[(batch,)](
        *(x.contiguous() for x in chosen), values.contiguous(), tokens, parents,
        scores.view(torch.int32), *kept, result, nodes, columns, width,
        TREES=width > 2 * columns + 1, SIZE=triton.next_power_of_2(columns),
        NODES=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        tl.store(target + d, tl.load(source + d, d < size), d < size)


@triton.jit
def _note(
    slot_ptr, context_ptr, token_ptr, hidden_ptr, num_ptr, path_ptr, bonus_ptr,
    token_table, hidden_table, len_table, root_table, next_slot_ptr, next_context_ptr,
    nodes, columns, room, size, width, APPEND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    count = tl.load(num_ptr + b)
    bonus = tl.load(bonus_ptr + b)
    if c == 0:
        tl.store(next_slot_ptr + b, slot.to(tl.int32))
        tl.store(next_context_ptr + b, tl.load(context_ptr + b) + count)
    if slot >= 0:
        first = 0
        if APPEND:
            first = tl.minimum(tl.load(len_table + slot), room - 1)
            tl.debug_barrier()  # other warps of this program have read it before it is written
        if c == 0:
            tl.store(len_table + slot, first + count)
            tl.store(root_table + slot * width, tl.maximum(bonus, 0))
        if c < count:
            at = slot * room + first + c
            node = tl.load(path_ptr + b * columns + c)
            token = bonus
            if c + 1 < count:
                token = tl.load(token_ptr + b * nodes + tl.load(path_ptr + b * columns + c + 1))
            tl.store(token_table + at, token)
            _copy(hidden_ptr + (b * nodes + node) * size, hidden_table + at * size, size, BLOCK)


def note(
    rows: tuple[Tensor, Tensor],
    tokens: Tensor,
    hidden: Tensor,
    accepted: tuple[Tensor, Tensor, Tensor],
    pending: tuple[Tensor, Tensor, Tensor],
    roots: Tensor,
    following: tuple[Tensor, Tensor],
    append: bool,
) -> None:
    """What is pending for the MTP module, and the next roots; as `runtime.step_tables.note`.

    Args:
        rows: slot and committed tokens before the step, int32 [B].
        tokens, hidden: [B, N] and [B, N, H], of the trees.
        accepted: number int32 [B], path int64 [B, P], bonus int64 [B].
        pending: tokens [S + 1, R], hidden [S + 1, R, H] and number [S + 1] by slot, written.
        roots: int64 [S + 1, drafts]; column 0 is written.
        following: slot and committed tokens behind the step, int32 [B], written.
        append: behind what is pending, of which there is one a row; or in its place.
    """
    batch, nodes, size = hidden.shape
    columns, room = accepted[1].shape[1], pending[0].shape[1]
    _note[(batch, columns)](
        *rows, tokens, hidden, *accepted, *pending, roots, *following, nodes, columns, room, size,
        roots.shape[1], APPEND=append, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _pairs(
    slot_ptr, context_ptr, token_table, hidden_table, len_table, token_ptr, hidden_ptr,
    position_ptr, count_ptr, base_ptr, before_ptr, last_ptr, room, size, sink, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    slot = tl.load(slot_ptr + b)
    row = tl.where(slot >= 0, slot, sink).to(tl.int64)
    context = tl.load(context_ptr + b)
    count = tl.where(slot >= 0, tl.load(len_table + row), 0)
    base = context - count
    if c == 0:
        tl.store(count_ptr + b, count)
        tl.store(base_ptr + b, base)
        tl.store(before_ptr + b, tl.maximum(context - 1, 0))
        tl.store(last_ptr + b, b * room + tl.maximum(count - 1, 0))
    at, source = b * room + c, row * room + c
    tl.store(token_ptr + at, tl.load(token_table + source))
    tl.store(position_ptr + at, (base + c).to(tl.int64))
    _copy(hidden_table + source * size, hidden_ptr + at * size, size, BLOCK)


def pairs(
    slot: Tensor, context: Tensor, pending: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pairs that the MTP module has yet to see; as `runtime.step_tables.pairs`.

    Args:
        slot, context: int32 [B].
        pending: tokens [S + 1, R], hidden [S + 1, R, H] and number [S + 1] by slot.

    Returns:
        Tokens int64 [B, R], hidden [B, R, H], positions int64 [B, R], and int32 [B] each: how many
        are real, the entries before them, the entries before the last; and int64 [B], the last
        one's place among all.
    """
    rows, room, size = pending[1].shape
    batch = slot.shape[0]
    tokens = torch.empty(batch, room, dtype=torch.int64, device=slot.device)
    hidden = torch.empty(batch, room, size, dtype=pending[1].dtype, device=slot.device)
    positions = torch.empty_like(tokens)
    count, base, before = torch.empty(3, batch, dtype=torch.int32, device=slot.device)
    last = torch.empty(batch, dtype=torch.int64, device=slot.device)
    _pairs[(batch, room)](
        slot, context, *pending, tokens, hidden, positions, count, base, before, last,
        room, size, rows - 1, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tokens, hidden, positions, count, base, before, last


@triton.jit
def _children(
    id_ptr, gain_ptr, pick_ptr, node_ptr, parent_ptr, inner_ptr, slot_ptr, context_ptr,
    token_table, score_table, token_ptr, position_ptr, candidates, nodes, inner, depth, width,
    SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    here = n < tl.where(slot >= 0, nodes, 0)
    from_row = b * candidates
    pick = tl.load(pick_ptr + n, here, other=0)
    row = slot * width
    gained = tl.load(gain_ptr + from_row + pick, here, other=0.0)
    above = tl.load(score_table + row + tl.load(parent_ptr + n, here, other=0), here, other=0.0)
    node = row + tl.load(node_ptr + n, here, other=0)
    tl.store(token_table + node, tl.load(id_ptr + from_row + pick, here, other=0), here)
    tl.store(score_table + node, (above + gained).to(tl.float32), here)
    inside = n < inner
    pick = tl.load(inner_ptr + n, inside, other=0)
    tl.store(token_ptr + b * inner + n, tl.load(id_ptr + from_row + pick, inside, other=0), inside)
    position = tl.load(context_ptr + b).to(tl.int64) + depth - 1
    tl.store(position_ptr + b * inner + n, position, inside)


def children(
    found: tuple[Tensor, Tensor],
    level: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Nodes of one level, as `runtime.step_tables.children`.

    Args:
        found: the best tokens int64 and their log probabilities after each node above, [B, K].
        level: int64 [C] each: of every node its place in `found`, its index and its parent's; and
            int64 [W], places of those that have children, W at most C.
        rows: slot and committed tokens, int32 [B].
        tables: tokens and scores by slot, [S + 1, drafts], written.
        depth: of these nodes.

    Returns:
        Tokens and positions of those that have children, int64 [B, W].
    """
    ids, gains = (x.contiguous() for x in found)
    pick, nodes, parents, inner = level
    batch, candidates = ids.shape
    width = inner.shape[0]
    tokens = torch.empty(batch, width, dtype=torch.int64, device=ids.device)
    positions = torch.empty_like(tokens)
    # Where there are none, other addresses stand for those of empty tensors.
    ends = (inner, tokens, positions) if width else (pick, ids, ids)
    _children[(batch,)](
        ids, gains, pick, nodes, parents, ends[0], *rows, *tables, *ends[1:], candidates,
        nodes.shape[0], width, depth, tables[0].shape[1],
        SIZE=triton.next_power_of_2(nodes.shape[0]), num_warps=1,
    )  # fmt: skip
    return tokens, positions
