"""Memory that captured prompt steps read and write: its addresses never change.

A shape has room for T tokens and S sequences. The tokens that a batch leaves belong to one sequence
more, of slot -1, whose rows are inert; the sequences that it leaves are empty. All that a step
needs comes in one upload, packed in the front of a buffer that all shapes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import PrefillBatch, carve, packed_bytes, positions_of, upload_into
from trtllm_treewy.model import StoringStep

from .attention_steps import PagedPrefill, PrefillAttention, PromptPlan
from .buckets import bucket_sizes
from .kv_cache import KvCache

if TYPE_CHECKING:
    from trtllm_treewy.triton_ops.prefill_attention import Tiles

# Tokens and sequences that steps are captured for. A padded token costs what any other does; an
# empty sequence next to nothing, but kernels divide their work by how many there may be.
TOKEN_STEPS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SEQUENCE_STEPS = (1, 4, 16, 64)
# A shape for S sequences has at least so many tokens for each.
LEAST_MEAN_TOKENS = 16


@dataclass(frozen=True, order=True)
class PromptShape:
    """Room for `tokens` tokens of `sequences` sequences."""

    tokens: int
    sequences: int


def prompt_shapes(max_tokens: int, max_batch: int) -> tuple[PromptShape, ...]:
    """The shapes for prompt steps of at most so many tokens and sequences, ascending."""
    if max_tokens < 1:
        return ()
    return tuple(
        PromptShape(tokens, sequences)
        for tokens in bucket_sizes(max_tokens, TOKEN_STEPS)
        for sequences in sorted(
            {
                min(step, max_batch)
                for step in SEQUENCE_STEPS
                if step * LEAST_MEAN_TOKENS <= tokens or step == 1
            }
        )
    )


def draft_shapes(shapes: Sequence[PromptShape], max_batch: int) -> tuple[PromptShape, ...]:
    """Those of the MTP module, whose work does not depend on how many sequences there are."""
    return tuple(PromptShape(tokens, max_batch) for tokens in sorted({s.tokens for s in shapes}))


def fit(shapes: Sequence[PromptShape], tokens: int, sequences: int) -> PromptShape | None:
    """The first of `shapes` that has room; None where none has, and for no tokens at all."""
    if not tokens:
        return None
    rooms = (s for s in shapes if s.tokens >= tokens and s.sequences >= sequences)
    return next(rooms, None)


@dataclass(frozen=True)
class _Place:
    """Where a shape's numbers lie, and how its attention is launched.

    Attributes:
        tiles: sizes of attention; None where torch attends, sequence by sequence.
        tokens, positions, target: int64 [T]: ids, rotary positions, physical rows of the cache.
        starts, slot, context: int32 [S + 2] and [S + 1] each, as in `PrefillBatch`.
        listed: int32 [tiles, 4], as many tiles of attention as there can be: each sequence may have
            one partly filled.
    """

    tiles: Tiles | None
    tokens: Tensor
    positions: Tensor
    target: Tensor
    starts: Tensor
    slot: Tensor
    context: Tensor
    listed: Tensor


class PromptBuffers:
    """The buffers of all captured prompt steps of an executor.

    Args:
        shapes: that there must be room for.
        cache: the executor's.
        heads, hidden: query heads of an attention layer, and size of a hidden state.
        dtype: of hidden states.
    """

    def __init__(
        self,
        shapes: Sequence[PromptShape],
        cache: KvCache,
        heads: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._cache, self._groups = cache, heads // cache.num_kv_heads
        device = cache.k.device
        plans = {shape: self._plan(shape) for shape in shapes}
        size = max(packed_bytes(parts) for parts, _ in plans.values())
        numbers = torch.zeros(size, dtype=torch.uint8, device=device)
        self._numbers = numbers
        self._places = {
            shape: _Place(tiles, *carve(numbers, parts)) for shape, (parts, tiles) in plans.items()
        }
        tokens = max(shape.tokens for shape in shapes)
        self._hidden = torch.zeros(tokens, hidden, dtype=dtype, device=device)

    def _plan(self, shape: PromptShape) -> tuple[list[Tensor], Tiles | None]:
        """What an upload is made of, by shape and type, and the sizes of attention."""
        tokens, rows, tiles, listed = shape.tokens, shape.sequences + 1, None, 0
        if triton_ops.serves(self._cache.k):
            # As for sequences of equal length.
            each = max(1, tokens // shape.sequences)
            tiles = self._cache.choose_tiles([each] * shape.sequences, self._groups)
            listed = tokens // tiles.tokens(self._groups) + rows
        i32, i64 = torch.int32, torch.int64
        sizes = [(i64, (tokens,))] * 3 + [(i32, (rows + 1,)), (i32, (rows,)), (i32, (rows,))]
        parts = [torch.empty(size, dtype=dtype, device="meta") for dtype, size in sizes]
        return [*parts, torch.empty(listed, 4, dtype=i32, device="meta")], tiles

    # ---- views

    def batch(self, shape: PromptShape) -> PrefillBatch:
        """The step's batch, as views; numbers on the host are known on the CPU alone."""
        at = self._places[shape]
        batch = PrefillBatch(at.tokens, at.starts, at.slot, at.context, (), ())
        if not at.tokens.is_cuda:
            lengths = tuple(stop - start for start, stop in pairwise(at.starts.tolist()))
            batch = replace(
                batch,
                seq_lens_host=lengths,
                context_lens_host=tuple(at.context.tolist()),
                slots_host=tuple(at.slot.tolist()),
            )
        vars(batch)["positions"] = at.positions
        return batch

    def attention(self, shape: PromptShape) -> StoringStep:
        """Attention of the step over what the buffers hold."""
        at = self._places[shape]
        if at.tiles is None:
            return PrefillAttention(self._cache, self.batch(shape))
        plan = PromptPlan(at.tiles, at.listed, at.target)
        return PagedPrefill(self._cache, lambda groups: plan)

    def hidden(self, tokens: int) -> Tensor:
        """[tokens, hidden]: of the model behind its step, and of the MTP module before and behind.

        Each step writes over the last one's.
        """
        return self._hidden[:tokens]

    # ---- from the host

    def set_inert(self, shape: PromptShape) -> None:
        """Makes every token padding, so that a step changes nothing."""
        self.load(shape, PrefillBatch.pack([], [], [], [], self._numbers.device))

    def load(self, shape: PromptShape, batch: PrefillBatch) -> None:
        """Brings a batch, which the shape has room for."""
        total = sum(batch.seq_lens_host)
        empty = shape.sequences - len(batch.seq_lens_host)
        lengths = [*batch.seq_lens_host, *[0] * empty, shape.tokens - total]
        contexts = [*batch.context_lens_host, *[0] * (empty + 1)]
        slots = [*batch.slots, *[-1] * (empty + 1)]
        place = self._places[shape]
        parts = [
            torch.zeros(shape.tokens, dtype=torch.int64),
            positions_of(contexts, lengths),
            self._cache.rows_of(slots, contexts, lengths),
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor([[0, 0, 0, -1]], dtype=torch.int32).repeat(len(place.listed), 1),
        ]
        if place.tiles is not None:
            from trtllm_treewy.triton_ops.prefill_attention import list_tiles

            tokens = place.tiles.tokens(self._groups)
            real = list_tiles(lengths, contexts, slots, tokens)
            parts[-1][: len(real)] = real
        upload_into(parts, self._numbers)
        place.tokens[:total] = batch.token_ids

    def load_hidden(self, shape: PromptShape, hidden: Tensor) -> None:
        """Brings hidden states [T, hidden] of a batch; those of padding are zero."""
        self._hidden[: hidden.shape[0]] = hidden
        self._hidden[hidden.shape[0] : shape.tokens].zero_()
