"""The best few tokens of a vocabulary and their log probabilities, in two passes.

The first reads the logits once: a program has BLOCK tokens of a row and finds its `count` best and
the sum of exp(x - max). The second puts a row's parts together. Equal logits go by token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNT = 16
BLOCK = 4096


@triton.jit
def _take(x, ids, far):
    """The largest of x and the smallest id that has it."""
    top = tl.max(x, 0)
    place = tl.min(tl.where(x == top, ids, far), 0)
    return top, place


@triton.jit
def _partial(
    x_ptr, value_ptr, id_ptr, sum_ptr, vocab, row_stride, parts,
    COUNT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * SIZE + tl.arange(0, SIZE)
    real = ids < vocab
    x = tl.load(x_ptr + row * row_stride + ids, real, other=float("-inf")).to(tl.float32)
    place = row * parts + part
    top = tl.max(x, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x - anchor), 0))
    for k in tl.static_range(COUNT):
        value, chosen = _take(x, ids, vocab)
        tl.store(value_ptr + place * COUNT + k, value)
        tl.store(id_ptr + place * COUNT + k, chosen)
        taken = ids == chosen
        x = tl.where(taken, float("-inf"), x)
        ids = tl.where(taken, vocab, ids)


@triton.jit
def _merge(
    value_ptr, id_ptr, sum_ptr, out_id_ptr, out_score_ptr, parts, vocab,
    COUNT: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    here = part < parts
    tops = tl.load(value_ptr + (row * parts + part) * COUNT, here, other=float("-inf"))
    sums = tl.load(sum_ptr + row * parts + part, here, other=0.0)
    top = tl.max(tops, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    own = tl.where(tops == float("-inf"), 0.0, tops)
    lse = anchor + tl.log(tl.sum(sums * tl.exp(own - anchor), 0))

    index = tl.arange(0, CANDIDATES)
    known = index < parts * COUNT
    x = tl.load(value_ptr + row * parts * COUNT + index, known, other=float("-inf"))
    ids = tl.load(id_ptr + row * parts * COUNT + index, known, other=vocab)
    for k in tl.static_range(COUNT):
        value, chosen = _take(x, ids, vocab)
        tl.store(out_id_ptr + row * COUNT + k, tl.minimum(chosen, vocab - 1).to(tl.int64))
        tl.store(out_score_ptr + row * COUNT + k, value - lse)
        taken = ids == chosen
        x = tl.where(taken, float("-inf"), x)
        ids = tl.where(taken, vocab, ids)


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row.

    Args:
        logits: [R, vocab], last dimension contiguous.
        count: from 1 to MAX_COUNT, at most the vocabulary.

    Returns:
        Token ids int64 and log probabilities float32, [R, count], best first. Rows with a NaN have
        NaN among their log probabilities, and ids that are in the vocabulary all the same.
    """
    rows, vocab = logits.shape
    if not 1 <= count <= min(MAX_COUNT, vocab):
        raise ValueError(f"count must be in [1, {min(MAX_COUNT, vocab)}], got {count}")
    parts = triton.cdiv(vocab, BLOCK)
    device = logits.device
    values = torch.empty(rows, parts, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, parts, count, dtype=torch.int32, device=device)
    sums = torch.empty(rows, parts, dtype=torch.float32, device=device)
    out_ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    scores = torch.empty(rows, count, dtype=torch.float32, device=device)
    if rows:
        _partial[(rows, parts)](
            logits, values, ids, sums, vocab, logits.stride(0), parts,
            COUNT=count, SIZE=BLOCK, num_warps=8,
        )  # fmt: skip
        _merge[(rows,)](
            values, ids, sums, out_ids, scores, parts, vocab,
            COUNT=count, PARTS=triton.next_power_of_2(parts),
            CANDIDATES=triton.next_power_of_2(parts * count), num_warps=4,
        )  # fmt: skip
    return out_ids, scores
