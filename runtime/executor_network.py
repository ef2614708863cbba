"""The executor over exported networks, whatever runs them: ONNX Runtime or TensorRT.

The networks read the caches and the states; what they write in place are the states of a prefill
alone. New KV rows are outputs, which go to the pools here, and so does what a commit needs. Slots,
blocks and provisional rows are those of the torch executor, so everything above it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_treewy import ops as ops  # registers torch.ops.treewy
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.binding_names import DRAFT, PREFILL, VERIFY, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.topology import valid_nodes

from .acceptance import Acceptance
from .commit_policy import PSEUDO_VALUES
from .executor import ExecutorLimits, StepOutput
from .kv_cache import KvCache
from .sequence_pools import SequencePools


class Network(Protocol):
    """One exported network, ready to run."""

    def bind(self, pools: Mapping[str, Tensor]) -> None:
        """Takes the caches and states that it runs over, by input name, once.

        Raises:
            ValueError: they are not what the network takes.
        """
        ...

    def close(self) -> None:
        """Lets go of what it runs with; nothing may be run afterwards. Safe to call twice."""
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs it over its other inputs by name (`binding_names`).

        Returns:
            Outputs, those of all layers stacked [layers, ..] under `Binding.group`. They may live
            in memory that the next run of any network of the engine writes again. What is in
            place has changed its input's memory and is not returned.
        """
        ...


@dataclass(frozen=True)
class DrafterCapacity:
    """What a drafter's network takes in one run, rows times entries.

    Attributes:
        entries: of verified tokens; a row has at most so many as well.
        nodes: of draft nodes.
    """

    entries: int
    nodes: int


def needed_networks(config: ModelConfig, limits: ExecutorLimits) -> tuple[str, ...]:
    """The networks that an executor runs: without drafts (`max_nodes` 1) no drafter's."""
    return tuple(name for name in networks(config) if name != DRAFT or limits.max_nodes > 1)


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
        parts: the networks by name, all of `needed_networks`.
        types: of the pools.
        device: where pools and networks are.
        capacity: of the drafter's network; None for any size.

    Raises:
        ValueError: a network is missing, or pools do not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        limits: ExecutorLimits,
        parts: Mapping[str, Network],
        *,
        types: PoolTypes,
        device: torch.device,
        capacity: DrafterCapacity | None = None,
    ) -> None:
        missing = [name for name in needed_networks(config, limits) if name not in parts]
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
        self._capacity = capacity
        self._rows = _CacheRows(self.kv_cache)
        self._pending: _Pending | None = None
        layers = len(config.attention_layers)
        for name, part in self._parts.items():
            if name == DRAFT:
                part.bind(self._caches(layers, config.mtp_num_hidden_layers))
            else:
                part.bind({**self._caches(0, layers), **self._states()})

    def close(self) -> None:
        """See `Executor`."""
        for part in self._parts.values():
            part.close()

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
            }
        )
        target = self._rows.at(batch.slot[packed.row][:, None], batch.positions[:, None])
        self._store(0, out, target.flatten())
        return StepOutput(out["logits"], out["hidden"].clone())

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
            }
        )
        index = torch.arange(tree.parents.shape[1], device=self.device)
        real = valid_nodes(tree.parents, tree.num_nodes)
        rows = torch.where(real, tree.context_lens.long()[:, None] + index, -1)
        self._store(0, out, self._rows.at(tree.slot, rows).flatten())
        stash = {name: value for name, value in out.items() if name in ("u", "k", "g", "conv_x")}
        self._pending = _Pending(tree, stash)
        # Callers keep hidden states, and enter some into the drafter before they read the others.
        return StepOutput(out["logits"], out["hidden"].clone())

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
        most = None if self._capacity is None else self._capacity.entries
        groups = _extensions(batch, most)
        outputs = [self._extend(batch, group, hidden) for group in groups]
        if len(groups) == 1 and list(groups[0].rows) == sorted(groups[0].rows):
            return StepOutput(*outputs[0])
        # Of a row in several parts the last counts.
        rows = [row for group in groups for row in group.rows]
        place = {row: index for index, row in enumerate(rows)}
        order = torch.tensor([place[row] for row in sorted(place)], device=self.device)
        return StepOutput(*(torch.cat(some)[order] for some in zip(*outputs, strict=True)))

    def draft_enter(self, batch: PrefillBatch, hidden: Tensor) -> None:
        self.draft_extend(batch, hidden)  # the network has one way through

    def _extend(
        self, batch: PrefillBatch, group: _Extension, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Enters some tokens of some rows; logits and hidden after the last of each."""
        device = self.device
        rows = torch.tensor(group.rows, device=device)
        slot, first = batch.slot[rows], torch.tensor(group.first, device=device)
        lengths = torch.tensor(group.lengths, device=device)
        place = torch.arange(max(group.lengths), device=device)
        real = place < lengths[:, None]
        query = batch.cu_seqlens[rows].long()[:, None] + first[:, None] + place
        query = query.clamp(max=max(batch.token_ids.shape[0] - 1, 0))
        own = (place[:, None] >= place) & real[:, None]
        before = batch.context_lens.long()[rows] + first
        pairs = zip(group.rows, group.first, strict=True)
        longest = max(batch.context_lens_host[row] + skipped for row, skipped in pairs)
        context = torch.arange(max(longest, 1), device=device) < before[:, None]
        seen = context[:, None].expand(-1, query.shape[1], -1)
        positions = before[:, None] + place
        out = self._draft(
            token_ids=batch.token_ids[query],
            positions=positions,
            hidden=hidden[query],
            kv_rows=self._rows.context(slot, longest),
            mask=torch.cat((seen, own), 2),
            logit_index=(lengths - 1)[:, None],
            target=self._rows.at(slot, torch.where(real, positions, -1)),
        )
        row = torch.arange(query.shape[0], device=device)
        return out["logits"][:, 0].clone(), out["hidden"][row, lengths - 1]

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
        most = batch if self._capacity is None else max(1, self._capacity.nodes // max(1, width))
        tensors = (token_ids, hidden, positions, slot, write_offsets, mask)
        if batch <= most:
            return self._draft_level(*tensors)
        parts = [
            self._draft_level(*(x[start : start + most] for x in tensors))
            for start in range(0, batch, most)
        ]
        return StepOutput(
            torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts])
        )

    def _draft_level(
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
        return StepOutput(out["logits"].clone(), out["hidden"].clone())

    def _draft(self, *, hidden: Tensor, target: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        if DRAFT not in self._parts:
            raise ValueError("the drafter's network was not loaded: max_nodes is 1")
        out = self._parts[DRAFT].run({**inputs, "hidden_in": hidden})
        self._store(len(self.config.attention_layers), out, target.flatten())
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
        for pool, name in ((self.kv_cache.k, "new_k"), (self.kv_cache.v, "new_v")):
            if name in out:
                new = out[name].flatten(1, -3).transpose(1, 2)
                pool[first : first + new.shape[0]].index_copy_(2, rows, new.to(pool.dtype))

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


@dataclass(frozen=True)
class _Extension:
    """Some consecutive tokens of some rows of a batch.

    Attributes:
        rows: of the batch.
        first: in each row, the first of the tokens.
        lengths: how many of each row.
    """

    rows: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]


def _extensions(batch: PrefillBatch, most: int | None) -> list[_Extension]:
    """The batch in parts of at most `most` places, padding included; rows in order of length.

    A longer row comes in several parts, in the order of its tokens.
    """
    lengths = batch.seq_lens_host
    if most is None:
        count = len(lengths)
        return [_Extension(tuple(range(count)), (0,) * count, lengths)]
    parts: list[_Extension] = []
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if lengths[row] > most:
            parts += [
                _Extension((row,), (first,), (min(most, lengths[row] - first),))
                for first in range(0, lengths[row], most)
            ]
            continue
        if group and (len(group) + 1) * lengths[row] > most:
            parts.append(_whole(group, lengths))
            group = []
        group.append(row)
    return [*parts, _whole(group, lengths)] if group else parts


def _whole(rows: Sequence[int], lengths: Sequence[int]) -> _Extension:
    return _Extension(tuple(rows), (0,) * len(rows), tuple(lengths[row] for row in rows))
