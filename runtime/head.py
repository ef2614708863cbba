"""Tokens from hidden states without a vocabulary for each: the head in parts, then the best few.

Logits of all nodes of a large batch are gigabytes, and of most only the largest is wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.model import FusedModel, Qwen3_5ForCausalLM

# Rows whose logits exist at once.
ROWS = 512


def greedy_tokens(model: Qwen3_5ForCausalLM | FusedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token after each hidden state.

    Args:
        model: has the head.
        hidden: [R, hidden], final-normed.

    Returns:
        Token ids int64 [R], and float32 [R]: NaN or infinite where logits of the row are no use.
    """
    ids, values = [], []
    for part in hidden.split(ROWS):
        logits = model.head(part)
        if triton_ops.serves(logits):
            found = _best(logits, 1)
            ids.append(found[0][:, 0])
            values.append(found[1][:, 0])
            continue
        best = logits.max(-1)
        ids.append(best.indices)
        values.append(best.values.float())
    return _joined(ids), _joined(values)


def best_children(
    model: Qwen3_5ForCausalLM | FusedModel, hidden: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The most likely tokens after each hidden state, best first.

    Args:
        model: has the head.
        hidden: [R, hidden].
        count: tokens of each row, at most the vocabulary.

    Returns:
        Token ids int64 and log probabilities float32 (float64 stays), [R, count] each.
    """
    ids, scores = [], []
    for part in hidden.split(ROWS):
        found = _best(model.head(part), count)
        ids.append(found[0])
        scores.append(found[1])
    return _joined(ids), _joined(scores)


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other; the most common single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if triton_ops.serves(logits):
        from trtllm_treewy.triton_ops import topk

        if count <= topk.MAX_COUNT:
            return topk.best_tokens(logits, count)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    best = torch.log_softmax(wide, dim=-1).topk(count, dim=-1)
    return best.indices, best.values
