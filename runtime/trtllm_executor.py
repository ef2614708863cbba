"""The executor over an engine of `trtllm-build`, with the MTP module in torch.

Attention is the library's plugin, which writes keys and values into its own paged pool, rows of a
tree at the places behind the context: so this executor owns that pool and moves accepted rows
together. It has the same blocks as the MTP module's cache, and one block table serves both. States
and windows are updated in place by our plugins, as in the other executors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.trtllm_bindings import HOST, PERF_KNOBS
from trtllm_treewy.trtllm_config import DRAFT_FILE

from .acceptance import Acceptance
from .commit_policy import PSEUDO_VALUES
from .executor import ExecutorLimits, StepOutput
from .prefix_cache import CachedPrefix
from .sequence_pools import SequencePools
from .trtllm_engine import TrtllmEngine

STASH = ("conv_x", "k", "u", "g")
_PROMPT, _TREE = 0, 1


class EngineNetwork(Protocol):
    """An engine of one rank, ready to run."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs it over all its inputs by name (`trtllm_bindings`), each where it belongs.

        Outputs that are in place have changed their inputs' memory and are not returned.
        """
        ...


@dataclass(frozen=True)
class _Pending:
    """A verified tree and what its commit needs, [layers, B, N, ..] each."""

    tree: TreeBatch
    stash: dict[str, Tensor]


class AttentionPool:
    """Keys and values of the attention layers as the library's plugin keeps them.

    Attributes:
        data: [blocks + 1, layers, 2, kv_heads, tokens_per_block, head_dim]; the last block takes
            what must go nowhere.
    """

    def __init__(
        self, config: ModelConfig, limits: ExecutorLimits, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.block_size = len(config.attention_layers), limits.tokens_per_block
        sizes = (config.num_key_value_heads, self.block_size, config.head_dim)
        self.data = torch.zeros(
            limits.num_blocks + 1, self.layers, 2, *sizes, dtype=dtype, device=device
        )

    def offsets(self, blocks: Tensor) -> Tensor:
        """The plugin's numbers int32 [1, R, 2, n] of blocks [R, n]: of their keys and values."""
        first = blocks * (2 * self.layers)
        return torch.stack([first, first + 1], dim=1)[None].to(torch.int32)

    def copy_block(self, source: int, target: int) -> None:
        """Copies all rows of a block."""
        self.data[target] = self.data[source]

    def compact(self, blocks: Tensor, path: Tensor, context: Tensor) -> None:
        """Moves the rows of accepted nodes behind the context, in order.

        Args:
            blocks: int64 [R, n], of each row's sequence; the last block where there is none.
            path: int64 [R, P], accepted nodes in order, -1 beyond them.
            context: int64 [R], rows before the tree.
        """
        real = path >= 0
        place = torch.arange(path.shape[1], device=path.device)
        source = context[:, None] + torch.where(real, path, 0)
        target = context[:, None] + torch.where(real, place, 0)
        sink = self.data.shape[0] - 1
        at = [blocks.gather(1, rows // self.block_size) for rows in (source, target)]
        taken = self.data[at[0].flatten(), :, :, :, (source % self.block_size).flatten()]
        goal = torch.where(real, at[1], sink)
        self.data[goal.flatten(), :, :, :, (target % self.block_size).flatten()] = taken


class TrtllmExecutor(SequencePools):
    """The `Executor` over an engine of TensorRT-LLM. It owns the pools.

    Args:
        engine: what its directory says.
        limits: sizes of the pools, within the engine's.
        network: the engine, ready to run.
        device: where it is.

    Raises:
        ValueError: the MTP module's file is not that of the model.
    """

    def __init__(
        self,
        engine: TrtllmEngine,
        limits: ExecutorLimits,
        network: EngineNetwork,
        device: torch.device,
    ) -> None:
        self.config, dtype = engine.config, getattr(torch, engine.dtype)
        super().__init__(
            self.config,
            limits,
            device=device,
            activation_dtype=getattr(torch, engine.plugin_dtype),
            state_dtype=torch.float32,
            kv_dtype=dtype,
            commit="reconstruct",
            history=None,
            stash=PSEUDO_VALUES,
            stash_dtype=None,
            max_nodes=1,  # what a commit needs comes out of the engine
            kv_layers=self.config.mtp_num_hidden_layers,
        )
        self.attention = AttentionPool(self.config, limits, dtype, device)
        self._engine, self._network = engine, network
        self._module: Qwen3_5ForCausalLM | None = None
        if self.config.mtp_num_hidden_layers and limits.max_nodes > 1:
            self._module = load_drafter(engine.directory, self.config, dtype, device)
        self._pending: _Pending | None = None

    def try_allocate(self, slot: int, num_tokens: int, prefix: CachedPrefix | None = None) -> bool:
        if not super().try_allocate(slot, num_tokens, prefix):
            return False
        if prefix is not None and prefix.blocks:  # its last block is the sequence's own
            own = self.kv_cache.blocks(slot)[len(prefix.blocks) - 1]
            self.attention.copy_block(prefix.blocks[-1], own)
        return True

    # ---- the model

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> StepOutput:
        self.state.check_allocated(batch.slot.tolist())
        lengths = torch.tensor(batch.seq_lens_host)
        totals = lengths + torch.tensor(batch.context_lens_host)
        none = torch.zeros(0, dtype=torch.int32)
        out = self._run(
            _Requests(batch.slot, _PROMPT, totals, lengths, totals),
            {
                "input_ids": batch.token_ids,
                "position_ids": batch.positions,
                "last_token_ids": batch.cu_seqlens[1:],
                "treewy_context_slot": batch.slot,
                "treewy_cu_seqlens": batch.cu_seqlens,
                "treewy_slot": none,
                "treewy_parents": none.reshape(0, 1),
                "treewy_num_nodes": none,
                "spec_decoding_generation_lengths": none,
                "spec_decoding_position_offsets": none.reshape(0, 1),
                "spec_decoding_packed_mask": none.reshape(0, 1),
                "spec_decoding_use": torch.zeros(1),
            },
        )
        return StepOutput(out["logits"].float(), out["treewy_hidden_states"])

    @torch.inference_mode()
    def verify(self, tree: TreeBatch) -> StepOutput:
        if self._pending is not None:
            raise ValueError("a verified tree is pending; commit or discard it before the next")
        rows, nodes = tree.parents.shape
        if rows > self.limits.max_batch_size or nodes > self.limits.max_nodes:
            raise ValueError(
                f"a tree batch of {rows} rows and {nodes} nodes exceeds max_batch_size "
                f"{self.limits.max_batch_size} or max_nodes {self.limits.max_nodes}"
            )
        context = torch.where(tree.slot >= 0, tree.context_lens, 0).cpu()
        none = torch.zeros(0, dtype=torch.int32)
        out = self._run(
            _Requests(tree.slot, _TREE, context + nodes, torch.ones(rows), context),
            {
                "input_ids": tree.token_ids.flatten(),
                "position_ids": tree.positions.flatten(),
                "last_token_ids": torch.arange(1, rows * nodes + 1),
                "treewy_context_slot": none,
                "treewy_cu_seqlens": torch.zeros(1),
                "treewy_slot": tree.slot,
                "treewy_parents": tree.parents,
                "treewy_num_nodes": tree.num_nodes,
                "spec_decoding_generation_lengths": torch.full((rows,), nodes),
                "spec_decoding_position_offsets": tree.depth,
                "spec_decoding_packed_mask": packed_mask(tree.ancestors),
                "spec_decoding_use": torch.ones(1),
            },
        )
        layers = self.config.linear_layers
        stash = {
            name: torch.stack([out[f"treewy_{name}_{layer}"] for layer in layers])
            for name in STASH
            if layers
        }
        self._pending = _Pending(tree, stash)
        shape = rows, nodes
        hidden = out["treewy_hidden_states"].unflatten(0, shape)
        return StepOutput(out["logits"].float().unflatten(0, shape), hidden)

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        if self._pending is None:
            raise ValueError("no verified tree is pending; every verify has exactly one commit")
        tree, stash = self._pending.tree, self._pending.stash
        goal = (tree.slot, tree.parents, tree.num_nodes, acceptance.accepted)
        if stash:
            torch.ops.treewy.commit(self.state.state, *goal, stash["u"], stash["k"], stash["g"])
            torch.ops.treewy.conv_commit(self.state.conv_state, *goal, stash["conv_x"])
        path = torch.where(tree.slot[:, None] >= 0, acceptance.path.long(), -1)
        self.attention.compact(self._blocks(tree.slot), path, tree.context_lens.long())
        self._pending = None

    def discard(self) -> None:
        self._pending = None

    # ---- the drafter

    @torch.inference_mode()
    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        module = self._drafter()
        out = module.draft(batch.token_ids, hidden, batch.positions, self.kv_cache.prefill(batch))
        last = out[batch.cu_seqlens[1:].long() - 1]
        return StepOutput(module.logits(last), last)

    @torch.inference_mode()
    def draft_enter(self, batch: PrefillBatch, hidden: Tensor) -> None:
        attention = self.kv_cache.prefill(batch)
        self._drafter().draft_enter(batch.token_ids, hidden, batch.positions, attention)

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
        module = self._drafter()
        out = module.draft(token_ids, hidden, positions, step)
        return StepOutput(module.logits(out), out)

    def _drafter(self) -> Qwen3_5ForCausalLM:
        if self._module is None:
            raise ValueError("the model has no MTP module, or max_nodes is 1: it cannot draft")
        return self._module

    # ---- the engine's inputs

    def _blocks(self, slot: Tensor) -> Tensor:
        """Blocks int64 [R, n] of each slot [R]; of a padded row all are the last one."""
        table = self.kv_cache.block_table
        real = (slot >= 0)[:, None].to(table.device)
        return torch.where(real, table[slot.long().clamp(min=0)], self.kv_cache.num_blocks)

    def _run(self, requests: _Requests, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the engine: these inputs, those of attention, and the pools."""
        count = len(requests.totals)
        engine = self._engine
        # The drafter may need more rows than the engine was built for; attention does not.
        most = -(-(engine.max_seq_len + engine.max_nodes - 1) // self.attention.block_size)
        offsets = self.attention.offsets(self._blocks(requests.slot)[:, :most])
        layers = self.attention.layers
        longest = self.limits.max_seq_len + self.limits.scratch_rows
        mapping = torch.stack([torch.zeros(layers), torch.arange(layers)], dim=1)
        feeds = {
            **given,
            "sequence_length": requests.totals,
            "context_lengths": requests.prompts,
            "host_context_lengths": requests.prompts,
            "host_request_types": torch.full((count,), requests.kind),
            "host_past_key_value_lengths": requests.past,
            "kv_cache_block_offsets": offsets,
            "host_kv_cache_block_offsets": offsets,
            "host_kv_cache_pool_pointers": torch.tensor([[self.attention.data.data_ptr(), 0]]),
            "host_kv_cache_pool_mapping": mapping,
            "cache_indirection": torch.zeros(count, 1, engine.max_seq_len),
            "host_max_attention_window_sizes": torch.full((layers,), longest),
            "host_sink_token_length": torch.zeros(1),
            "host_runtime_perf_knobs": torch.full((PERF_KNOBS,), -1),
            "host_context_progress": torch.zeros(1),
        }
        for index, layer in enumerate(self.config.linear_layers):
            feeds[f"past_conv_state_{layer}"] = self.state.conv_state[index]
            feeds[f"past_rnn_state_{layer}"] = self.state.state[index]
        inputs = {}
        for binding in engine.inputs:
            place = torch.device("cpu") if binding.place == HOST else self.device
            # Pools have their type and place already, and stay the very tensors that they are.
            dtype = getattr(torch, binding.dtype)
            inputs[binding.name] = feeds[binding.name].to(place, dtype).contiguous()
        return self._network.run(inputs)


@dataclass(frozen=True)
class _Requests:
    """The requests of a step, all of one kind.

    Attributes:
        slot: int32 [R].
        kind: 0 prompts, 1 trees.
        totals: tokens in the cache after the step, on the host.
        prompts: tokens of each prompt in this step.
        past: what the library calls past lengths: of a prompt its total, of a tree its context.
    """

    slot: Tensor
    kind: int
    totals: Tensor
    prompts: Tensor
    past: Tensor


def packed_mask(ancestors: Tensor) -> Tensor:
    """What each node sees: int32 [B * N, ceil(N / 32)], node j as bit j % 32 of word j // 32.

    Args:
        ancestors: bool [B, N, N], ancestor or self; a node that sees nothing (padding) sees
            itself, so that its softmax has a term.
    """
    rows, nodes, _ = ancestors.shape
    words = -(-nodes // 32)
    sees = ancestors | torch.eye(nodes, dtype=torch.bool, device=ancestors.device)
    padded = torch.nn.functional.pad(sees, (0, words * 32 - nodes))
    bits = padded.reshape(rows * nodes, words, 32).long() << torch.arange(
        32, device=ancestors.device
    )
    value = bits.sum(-1)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32)


def load_drafter(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Qwen3_5ForCausalLM:
    """The model with its MTP module, embedding and head alone; the rest has no memory.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
    """
    path = directory / DRAFT_FILE
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    others = ("model.layers.", "model.norm.")
    wanted = {name for name in model.state_dict() if not name.startswith(others)}
    try:
        tensors = load_file(path)
    except Exception as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
    if tensors.keys() != wanted:
        odd = ", ".join(sorted(tensors.keys() ^ wanted)[:8])
        raise ValueError(f"{path}: missing or unknown: {odd}")
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    return model.eval().requires_grad_(False)
