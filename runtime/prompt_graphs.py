"""Prompt steps as captured functions: the model over packed tokens, and the MTP module after it.

A prompt step of a few hundred tokens is about as many launches as a GPU works on in less time than
a host takes to make them. Captured for a shape (tokens, sequences), it is one. Large steps keep the
GPU busy whoever launches them, and run uncaptured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trtllm_treewy import triton_ops
from trtllm_treewy.batch import PrefillBatch
from trtllm_treewy.cuda_library import find_library
from trtllm_treewy.cuda_ops import reference_calls
from trtllm_treewy.model import FusedModel, Qwen3_5ForCausalLM

from .cuda_graphs import GraphRunner
from .prompt_buffers import PromptBuffers, PromptShape, draft_shapes, fit
from .sequence_pools import SequencePools
from .static_drafts import layers_from

# Operators whose torch reference reads lengths on the host.
HOST_BOUND = ("prefill", "prefill_conv")


class PromptGraphs:
    """The captured prompt steps of an executor, and the buffers they work on.

    Args:
        model: of the executor.
        pools: the executor's states and caches.
        first_mtp_layer: the MTP module's first layer in the KV cache.
        runner: captures and replays.
        shapes: what is captured, ascending; at least one.
        drafts: whether the MTP module runs over prompts.

    Attributes:
        replays: captured steps that were run, those of the MTP module among them.
    """

    def __init__(
        self,
        model: Qwen3_5ForCausalLM | FusedModel,
        pools: SequencePools,
        first_mtp_layer: int,
        runner: GraphRunner,
        shapes: Sequence[PromptShape],
        drafts: bool,
    ) -> None:
        self._model, self._pools, self._runner = model, pools, runner
        self._first_mtp_layer = first_mtp_layer
        self.shapes = tuple(shapes)
        self.draft_shapes = draft_shapes(shapes, pools.limits.max_batch_size) if drafts else ()
        self.buffers = PromptBuffers(
            [*self.shapes, *self.draft_shapes],
            pools.kv_cache,
            model.config.num_attention_heads,
            model.config.hidden_size,
            pools.state.shape.activation_dtype,
        )
        self.replays = 0

    @property
    def num_shapes(self) -> int:
        """Functions that `capture_all` captures."""
        return len(self.shapes) + len(self.draft_shapes)

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures every shape, the largest first, whose memory the others find in the pool.

        Nothing is captured, with a warning, where the delta rule runs in torch on a GPU, which
        reads lengths on the host. `progress` is told how many are done.
        """
        reason = self._host_bound()
        if reason is not None:
            warnings.warn(f"prompt steps are not captured as CUDA graphs: {reason}", stacklevel=2)
            return
        functions = [("prefill", self._prefill, shape) for shape in reversed(self.shapes)]
        functions += [("extend", self._extend, shape) for shape in reversed(self.draft_shapes)]
        for done, (name, function, shape) in enumerate(functions, start=1):
            self._pools.kv_cache.flush()
            self.buffers.set_inert(shape)
            self._runner.record((name, shape), torch.inference_mode()(partial(function, shape)))
            if progress is not None:
                progress(done, len(functions))

    @torch.inference_mode()
    def _host_bound(self) -> str | None:
        """Why a step cannot be captured, None where it can be; runs one of padding to see."""
        cache = self._pools.kv_cache
        if not cache.k.is_cuda:
            return None
        if not triton_ops.serves(cache.k):
            return f"attention over a cache in {cache.k.dtype} without Triton runs row by row"
        if find_library() is None:
            return "the delta rule runs in torch, without libtreewy.so"
        before = dict(reference_calls)
        self.buffers.set_inert(self.shapes[0])
        self._prefill(self.shapes[0])
        for (op, why), count in reference_calls.items():
            if op in HOST_BOUND and count > before.get((op, why), 0):
                return f"the delta rule runs in torch ({why})"
        return None

    # ---- what is captured

    def _prefill(self, shape: PromptShape) -> None:
        """The model over prompt tokens: states, cache rows, and hidden states."""
        batch = self.buffers.batch(shape)
        hidden = self._model(
            batch.token_ids,
            batch.positions,
            self._pools.state.prefill_unchecked(batch),
            self.buffers.attention(shape),
        )
        self.buffers.hidden(shape.tokens).copy_(hidden)

    def _extend(self, shape: PromptShape) -> None:
        """The MTP module over verified pairs, from hidden states to its own."""
        batch, hidden = self.buffers.batch(shape), self.buffers.hidden(shape.tokens)
        attention = layers_from(self.buffers.attention(shape), self._first_mtp_layer)
        hidden.copy_(self._model.draft(batch.token_ids, hidden, batch.positions, attention))

    # ---- replays

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> Tensor | None:
        """Runs prompt tokens; hidden states [T, hidden], None where nothing captured fits.

        Raises:
            ValueError: as the uncaptured step, before anything is written.
        """
        shape = self._fit("prefill", self.shapes, batch)
        if shape is None:
            return None
        self._pools.state.check_prefill(batch.slots)
        self._replay("prefill", shape, batch)
        # The drafter keeps them beyond the next step.
        return self.buffers.hidden(sum(batch.seq_lens_host)).clone()

    @torch.inference_mode()
    def extend(self, batch: PrefillBatch, hidden: Tensor) -> Tensor | None:
        """Enters pairs into the MTP module's cache; its output [T, hidden] until the next step.

        None where nothing captured fits.

        Raises:
            ValueError: rows that are not reserved.
        """
        shape = self._fit("extend", self.draft_shapes, batch)
        if shape is None:
            return None
        self.buffers.load_hidden(shape, hidden)
        self._replay("extend", shape, batch)
        return self.buffers.hidden(hidden.shape[0])

    def _fit(
        self, name: str, shapes: Sequence[PromptShape], batch: PrefillBatch
    ) -> PromptShape | None:
        lengths = batch.seq_lens_host
        shape = fit(shapes, sum(lengths), len(lengths))
        return shape if shape is not None and (name, shape) in self._runner else None

    def _replay(self, name: str, shape: PromptShape, batch: PrefillBatch) -> None:
        self._pools.kv_cache.check_prefill(batch)
        self._pools.kv_cache.flush()
        self.buffers.load(shape, batch)
        self._runner.replay((name, shape))
        self.replays += 1
