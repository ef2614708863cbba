"""The executor over exported networks, whatever runs them: ONNX Runtime or TensorRT.

The networks read the caches and the states; what they write in place are the states of a prefill
alone. New KV rows are outputs, which go to the pools here, and so does what a commit needs. Slots,
blocks and provisional rows are those of the torch executor, so everything above it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.binding_names import DRAFT, PREFILL, VERIFY, networks, stash_tensors
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.topology import valid_nodes

from .acceptance import Acceptance
from .commit_policy import PSEUDO_VALUES
from .executor import ExecutorLimits, StepOutput
from .kv_cache import KvCache
from .sequence_pools import SequencePools


class Network(Protocol):
    """One exported network, ready to run."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs it over its inputs by name (`binding_names`).

        Outputs that are in place have changed their inputs' memory and are not returned.
        """
        ...


@dataclass(frozen=True)
class PoolTypes:
    """Types of the pools, as the networks were exported with."""

    activation: torch.dtype
    state: torch.dtype
    kv: torch.dtype


@dataclass(frozen=True)
class _Pending:
    """A verified tree and what its commit needs, by name, [layers, B, N, ..] each."""

    tree: TreeBatch
    stash: dict[str, Tensor]


class NetworkExecutor(SequencePools):
    """The `Executor` over exported networks. It owns the pools, and the networks the weights.

    Args:
        config: the model's.
        limits: sizes of the pools.
        parts: the networks by name: all of `binding_names.networks(config)`.
        types: of the pools.
        device: where pools and networks are.

    Raises:
        ValueError: a network is missing.
    """

    def __init__(
        self,
        config: ModelConfig,
        limits: ExecutorLimits,
        parts: Mapping[str, Network],
        *,
        types: PoolTypes,
        device: torch.device,
    ) -> None:
        missing = [name for name in networks(config) if name not in parts]
        if missing:
            raise ValueError(f"the engine lacks the networks {', '.join(missing)}")
        # The pools alone are wanted: what a commit needs comes out of the networks, so the
        # manager's own stash is made as small as it can be.
        super().__init__(
            config,
            limits,
            device=device,
            activation_dtype=types.activation,
            state_dtype=types.state,
            kv_dtype=types.kv,
            commit="reconstruct",
            history=None,
            stash=PSEUDO_VALUES,
            stash_dtype=None,
            max_nodes=1,
        )
        self.config = config
        self._parts = dict(parts)
        self._rows = _CacheRows(self.kv_cache)
        self._pending: _Pending | None = None

    # ---- the model

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> StepOutput:
        self.state.check_allocated(batch.slot.tolist())
        packed = _Packed.of(batch)
        out = self._parts[PREFILL].run(
            {
                "token_ids": batch.token_ids,
                "cu_seqlens": batch.cu_seqlens,
                "slot": batch.slot,
                "context_lens": batch.context_lens,
                "kv_rows": self._rows.context(batch.slot, max(batch.context_lens_host)),
                "query_index": packed.query_index,
                "packed_index": packed.packed_index,
                **self._caches(0, len(self.config.attention_layers)),
                **self._states(),
            }
        )
        target = self._rows.at(batch.slot[packed.row][:, None], batch.positions[:, None])
        self._store(0, out, target.flatten())
        return StepOutput(out["logits"], out["hidden"])

    @torch.inference_mode()
    def verify(self, tree: TreeBatch) -> StepOutput:
        if self._pending is not None:
            raise ValueError("a verified tree is pending; commit or discard it before the next")
        self._check_tree(tree)
        out = self._parts[VERIFY].run(
            {
                "token_ids": tree.token_ids,
                "parents": tree.parents,
                "num_nodes": tree.num_nodes,
                "slot": tree.slot,
                "context_lens": tree.context_lens,
                "kv_rows": self._rows.context(tree.slot, tree.max_context),
                **self._caches(0, len(self.config.attention_layers)),
                **self._states(),
            }
        )
        index = torch.arange(tree.parents.shape[1], device=self.device)
        real = valid_nodes(tree.parents, tree.num_nodes)
        rows = torch.where(real, tree.context_lens.long()[:, None] + index, -1)
        self._store(0, out, self._rows.at(tree.slot, rows).flatten())
        self._pending = _Pending(tree, self._stash(out))
        return StepOutput(out["logits"], out["hidden"])

    @torch.inference_mode()
    def commit(self, tree: TreeBatch, acceptance: Acceptance) -> None:
        if self._pending is None:
            raise ValueError("no verified tree is pending; every verify has exactly one commit")
        tree, stash = self._pending.tree, self._pending.stash
        goal = (tree.slot, tree.parents, tree.num_nodes, acceptance.accepted)
        if stash:
            torch.ops.treewy.commit(self.state.state, *goal, stash["u"], stash["k"], stash["g"])
            torch.ops.treewy.conv_commit(self.state.conv_state, *goal, stash["conv_x"])
        self.kv_cache.compact(tree.slot, acceptance.path, tree.context_lens)
        self._pending = None

    def discard(self) -> None:
        self._pending = None

    # ---- the drafter

    @torch.inference_mode()
    def draft_extend(self, batch: PrefillBatch, hidden: Tensor) -> StepOutput:
        packed = _Packed.of(batch)
        query = packed.query_index.long()
        place = torch.arange(query.shape[1], device=self.device)
        lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long()
        real = place < lengths[:, None]
        own = (place[:, None] >= place) & real[:, None]
        longest = max(batch.context_lens_host)
        context = torch.arange(max(longest, 1), device=self.device) < batch.context_lens[:, None]
        seen = context[:, None].expand(-1, query.shape[1], -1)
        positions = batch.context_lens.long()[:, None] + place
        out = self._draft(
            token_ids=batch.token_ids[query],
            positions=positions,
            hidden=hidden[query],
            kv_rows=self._rows.context(batch.slot, longest),
            mask=torch.cat((seen, own), 2),
            logit_index=(lengths - 1)[:, None],
            target=self._rows.at(batch.slot, torch.where(real, positions, -1)),
        )
        row = torch.arange(query.shape[0], device=self.device)
        return StepOutput(out["logits"][:, 0], out["hidden"][row, lengths - 1])

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
        batch, width = token_ids.shape
        kv_rows = self._rows.context(slot, mask.shape[2])
        written = write_offsets >= 0
        column = write_offsets.clamp(min=0)
        own = mask.gather(2, column[:, None].expand(-1, width, -1)) & written[:, None]
        # The rows written now are new ones to the network, and not the cache's.
        fresh = torch.zeros(batch, mask.shape[2] + 1, dtype=torch.bool, device=mask.device)
        fresh.scatter_(1, torch.where(written, write_offsets, mask.shape[2]), True)
        exists = kv_rows < self._rows.sink
        seen = mask & (~fresh[:, :-1] & exists)[:, None]
        out = self._draft(
            token_ids=token_ids,
            positions=positions,
            hidden=hidden,
            kv_rows=kv_rows,
            mask=torch.cat((seen, own & (slot >= 0)[:, None, None]), 2),
            logit_index=torch.arange(width, device=mask.device).expand(batch, -1),
            target=self._rows.at(slot, write_offsets),
        )
        return StepOutput(out["logits"], out["hidden"])

    def _draft(self, *, hidden: Tensor, target: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        first, layers = len(self.config.attention_layers), self.config.mtp_num_hidden_layers
        given = {**inputs, "hidden_in": hidden, **self._caches(first, layers)}
        out = self._parts[DRAFT].run(given)
        self._store(first, out, target.flatten())
        return out

    # ---- pools

    def _caches(self, first: int, layers: int) -> dict[str, Tensor]:
        """The caches of some layers, under the names of a network that counts from 0."""
        result = {}
        for layer in range(layers):
            result[f"k_cache.{layer}"] = self.kv_cache.k[first + layer]
            result[f"v_cache.{layer}"] = self.kv_cache.v[first + layer]
        return result

    def _states(self) -> dict[str, Tensor]:
        result = {}
        for layer in range(len(self.config.linear_layers)):
            result[f"state.{layer}"] = self.state.state[layer]
            result[f"conv_state.{layer}"] = self.state.conv_state[layer]
        return result

    def _store(self, first: int, out: Mapping[str, Tensor], rows: Tensor) -> None:
        """Puts the new rows of all layers into the cache, at physical `rows` [new rows]."""
        layer = 0
        while f"new_k.{layer}" in out:
            for pool, name in ((self.kv_cache.k, "new_k"), (self.kv_cache.v, "new_v")):
                new = out[f"{name}.{layer}"]
                new = new.reshape(-1, *new.shape[-2:]).transpose(0, 1)
                pool[first + layer].index_copy_(1, rows, new.to(pool.dtype))
            layer += 1

    def _stash(self, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layers = range(len(self.config.linear_layers))
        if not layers:
            return {}
        names = [name for name, _, _ in stash_tensors(self.config, "pseudo_values")]
        return {name: torch.stack([out[f"{name}.{layer}"] for layer in layers]) for name in names}

    # ---- checks

    def _check_tree(self, tree: TreeBatch) -> None:
        batch, nodes = tree.parents.shape
        limits = self.limits
        if batch > limits.max_batch_size or nodes > limits.max_nodes:
            raise ValueError(
                f"a tree batch of {batch} rows and {nodes} nodes exceeds max_batch_size "
                f"{limits.max_batch_size} or max_nodes {limits.max_nodes}; prune or split it"
            )
        if tree.slot.device.type == "cpu":  # reading it would wait for a GPU
            self.state.check_allocated(tree.slot.tolist())


class _CacheRows:
    """Physical rows of the KV cache's pools; what does not exist is the first row of the sink."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.sink = cache.num_blocks * cache.block_size

    def at(self, slot: Tensor, rows: Tensor) -> Tensor:
        """Physical rows int64 of `rows` [B, R] of each slot [B] (or [B, 1]); -1 is the sink."""
        cache = self._cache
        slot = slot.reshape(-1, 1).long()
        block = rows // cache.block_size
        table = cache.block_table
        exists = (slot >= 0) & (rows >= 0) & (block < table.shape[1])
        ids = table[slot.clamp(min=0), torch.where(exists, block, 0)]
        physical = ids * cache.block_size + rows % cache.block_size
        return torch.where(exists & (ids < cache.num_blocks), physical, self.sink)

    def context(self, slot: Tensor, count: int) -> Tensor:
        """The first `count` rows of each slot, at least one: int64 [B, count]."""
        rows = torch.arange(max(count, 1), device=slot.device)
        return self.at(slot, rows.expand(slot.shape[0], -1))


@dataclass(frozen=True)
class _Packed:
    """Where the tokens of a packed batch are if every sequence has a row [B, M] of its own.

    Attributes:
        row: int64 [T], the sequence of each token.
        query_index: int64 [B, M], the token at each place; padding repeats one.
        packed_index: int64 [T], the place of each token in [B * M].
    """

    row: Tensor
    query_index: Tensor
    packed_index: Tensor

    @classmethod
    def of(cls, batch: PrefillBatch) -> _Packed:
        device = batch.token_ids.device
        lengths = torch.tensor(batch.seq_lens_host)
        longest = max(1, int(lengths.max()))
        tokens = batch.token_ids.shape[0]
        start = lengths.cumsum(0) - lengths
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(tokens) - start[row]
        query = (start[:, None] + torch.arange(longest)).clamp(max=max(tokens - 1, 0))
        return cls(row.to(device), query.to(device), (row * longest + place).to(device))
