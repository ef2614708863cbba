"""The executor that runs the model with torch operators, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.model import Qwen3_5ForCausalLM, fuse

from .acceptance import Acceptance
from .commit_policy import PSEUDO_VALUES
from .cuda_graphs import GraphRunner
from .decode_graphs import DecodeGraphs, GraphOptions
from .executor import ExecutorLimits, StepOutput
from .prompt_buffers import PromptShape
from .prompt_graphs import PromptGraphs
from .sequence_pools import SequencePools
from .static_drafts import layers_from


class TorchExecutor(SequencePools):
    """The `Executor` over torch operators: owns the model, the state pools and the KV cache."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        limits: ExecutorLimits,
        *,
        state_dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        state_commit: str = "reconstruct",
        deferred_history: int | None = None,
        max_path: int | None = None,
        stash: str = PSEUDO_VALUES,
        stash_dtype: torch.dtype | None = None,
    ) -> None:
        weight = model.model.embed_tokens.weight
        self.model = model.eval()
        # What steps run: the same weights, in fewer launches.
        self._steps = fuse(self.model)
        super().__init__(
            model.config,
            limits,
            device=weight.device,
            activation_dtype=weight.dtype,
            state_dtype=state_dtype,
            kv_dtype=kv_dtype or weight.dtype,
            commit=state_commit,
            history=deferred_history,
            max_path=max_path,
            stash=stash,
            stash_dtype=stash_dtype,
        )
        # The MTP module's layers follow the model's in one cache: one block table serves both.
        self._first_mtp_layer = len(model.config.attention_layers)
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self._by_graph = False

    def make_graphs(self, runner: GraphRunner, options: GraphOptions) -> DecodeGraphs:
        """Static buffers for captured steps, which `verify` and `commit` use from then on."""
        self.graphs = DecodeGraphs(self._steps, self, self._first_mtp_layer, runner, options)
        return self.graphs

    def make_prompt_graphs(
        self, runner: GraphRunner, shapes: Sequence[PromptShape], drafts: bool
    ) -> PromptGraphs:
        """The same for prompt steps: `prefill` and, with `drafts`, `draft_extend` use them."""
        self.prompt_graphs = PromptGraphs(
            self._steps, self, self._first_mtp_layer, runner, shapes, drafts
        )
        return self.prompt_graphs

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> StepOutput:
        graphs = self.prompt_graphs
        hidden = graphs.prefill(batch) if graphs is not None else None
        if hidden is None:
            hidden = self._steps(
                batch.token_ids,
                batch.positions,
                self.state.prefill(batch),
                self.kv_cache.prefill(batch),
            )
        last = batch.cu_seqlens[1:].long() - 1
        return StepOutput(self.model.logits(hidden[last]), hidden)

    @torch.inference_mode()
    def verify(self, tree: TreeBatch) -> StepOutput:
        hidden = self.graphs.verify(tree) if self.graphs is not None else None
        self._by_graph = hidden is not None
        if hidden is None:
            hidden = self._steps(
                tree.token_ids,
                tree.positions,
                self.state.verify(tree),
                self.kv_cache.verify(tree),
            )
        return StepOutput(self.model.logits(hidden), hidden)

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        if self.graphs is not None and self._by_graph:
            self.graphs.commit(tree, acceptance)
            return
        self.state.commit(acceptance.accepted)
        self.kv_cache.compact(tree.slot, acceptance.path, tree.context_lens)

    def discard(self) -> None:
        self.state.discard()

    @torch.inference_mode()
    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        graphs = self.prompt_graphs
        out = graphs.extend(batch, hidden) if graphs is not None else None
        if out is None:
            attention = layers_from(self.kv_cache.prefill(batch), self._first_mtp_layer)
            out = self._steps.draft(batch.token_ids, hidden, batch.positions, attention)
        last = out[batch.cu_seqlens[1:].long() - 1]
        return StepOutput(self.model.logits(last), last)

    @torch.inference_mode()
    def draft_enter(self, batch: PrefillBatch, hidden: Tensor) -> None:
        # Keys and values of one layer are as few launches as a captured step of them.
        attention = layers_from(self.kv_cache.prefill(batch), self._first_mtp_layer)
        self._steps.draft_enter(batch.token_ids, hidden, batch.positions, attention)

    @torch.inference_mode()
    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot: Tensor,
        write_offsets: Tensor,
        mask: Tensor,
    ) -> StepOutput:
        step = self.kv_cache.step(slot, write_offsets, mask)
        attention = layers_from(step, self._first_mtp_layer)
        out = self._steps.draft(token_ids, hidden, positions.contiguous(), attention)
        return StepOutput(self.model.logits(out), out)
