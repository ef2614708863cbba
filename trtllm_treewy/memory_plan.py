"""Memory that sequences take under each commit policy, computed before anything is allocated.

Per sequence, with L GDN layers, HV value heads of V x K states, HK key heads, N tree nodes, C conv
channels, and bytes(x) the size of an element of x:

- state: `L * HV * V * K * bytes(state)`; conv state: `L * (kernel - 1) * C * bytes(activation)`
- snapshot adds the state of every node: `N * state`
- reconstruct adds a stash: `L * N * (HV * V * bytes(u) + 4 * HV + C * bytes(activation))`
  (pseudo-values, a float32 log decay a head, the raw conv inputs), or, where it works from inputs,
  `L * N * (2 * HV + C) * bytes(activation)` (two raw gates a head, the raw conv inputs)
- deferred adds to the stash of pseudo-values the history of H accepted tokens that a slot keeps:
  `L * H * (HV * V * bytes(u) + HK * K * bytes(key) + 4 * HV)`, keys in 2 bytes beside 16-bit
  activations and in 4 otherwise, a 4-byte length, and what of it verification has folded:
  `L * HV * ceil(V / 64)` flags of a byte and one of 4
- KV cache: `attention layers * 2 * kv heads * head_dim * bytes(kv)` a token, and the same for the
  MTP module's own layer; it is taken in blocks of T tokens, for the sequence and for R rows that
  are not committed yet (the nodes of a tree)
- a checkpoint of the prefix cache: state and conv state, and a hidden state

Snapshot is counted without the conv inputs in the figures that compare policies, as engines that
snapshot count it; this project's snapshot policy keeps them as well, and `held`, `reserved` and
`max_sequences` count them. These three are what the runtime itself allocates by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config import ModelConfig
from .cuda_library import FOLD_ROWS
from .draft_tree import TreeTopology
from .llmapi import STATE_COMMITS

DEFAULT_DRAFT_TREE_WIDTHS = (3, 3, 3)
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 1024**2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a sequence takes; `batch_size` sequences take that many times as much.

    Attributes:
        num_nodes: nodes of the draft tree, the root included (N).
        history: accepted tokens a slot keeps under `deferred` (H).
        context_length: tokens the KV cache is counted at.
        batch_size: sequences that run at once.
        state_dtype, activation_dtype, stash_dtype: types by torch's names.
        state: the recurrent state of all GDN layers.
        conv_state: the conv windows of all GDN layers.
        snapshots: what `snapshot` adds.
        stash_kind: what `reconstruct` works from, "pseudo_values" or "inputs".
        pseudo_values, inputs: what either stash takes.
        history_pool: what `deferred` adds to the stash of pseudo-values.
        kv_cache_per_token: keys and values of one token in the model's attention layers.
        draft_kv_cache_per_token: the same in the MTP module.
        conv_inputs: raw conv inputs of a tree, part of either stash.
        tokens_per_block: tokens of a KV block (T).
        scratch_rows: KV rows of a sequence beyond its tokens (R).
        checkpoint: a state that the prefix cache keeps.
    """

    num_nodes: int
    history: int
    context_length: int
    batch_size: int
    state_dtype: str
    activation_dtype: str
    stash_dtype: str
    state: int
    conv_state: int
    snapshots: int
    stash_kind: str
    pseudo_values: int
    inputs: int
    history_pool: int
    kv_cache_per_token: int
    draft_kv_cache_per_token: int
    conv_inputs: int
    tokens_per_block: int
    scratch_rows: int
    checkpoint: int

    @property
    def kv_block(self) -> int:
        """A block of the KV cache, the MTP module's rows included."""
        return self.tokens_per_block * (self.kv_cache_per_token + self.draft_kv_cache_per_token)

    def blocks(self, num_tokens: int) -> int:
        """KV blocks of a sequence of `num_tokens`, its uncommitted rows included."""
        return -(-(num_tokens + self.scratch_rows) // self.tokens_per_block)

    def per_slot(self, policy: str) -> int:
        """What the runtime holds for a slot: state, conv state, and a history where deferred."""
        self._check_policy(policy)
        history = self.history_pool if policy == "deferred" else 0
        return self.state + self.conv_state + history

    def per_row(self, policy: str) -> int:
        """What verification leaves for the commit of a row of the running batch."""
        self._check_policy(policy)
        kept = {"deferred": self.pseudo_values, "snapshot": self.snapshots + self.conv_inputs}
        return kept.get(policy, self.stash)

    def held(self, policy: str) -> int:
        """Slot and row of a sequence: all that it holds beside KV blocks."""
        return self.per_slot(policy) + self.per_row(policy)

    def reserved(self, policy: str) -> int:
        """All that the runtime sets aside for a sequence of `context_length` tokens."""
        return self.held(policy) + self.blocks(self.context_length) * self.kv_block

    @property
    def kv_cache(self) -> int:
        """The model's keys and values at `context_length`, without the MTP module's."""
        return self.context_length * self.kv_cache_per_token

    @property
    def draft_kv_cache(self) -> int:
        """The MTP module's keys and values at `context_length`."""
        return self.context_length * self.draft_kv_cache_per_token

    @property
    def stash(self) -> int:
        """What `reconstruct` adds."""
        return self.inputs if self.stash_kind == "inputs" else self.pseudo_values

    def added(self, policy: str) -> int:
        """What verification under `policy` adds to the states of a sequence."""
        self._check_policy(policy)
        amounts = {
            "reconstruct": self.stash,
            "deferred": self.pseudo_values + self.history_pool,
            "snapshot": self.snapshots,
        }
        return amounts[policy]

    def _check_policy(self, policy: str) -> None:
        if policy not in STATE_COMMITS:
            raise ValueError(f"policy: expected one of {', '.join(STATE_COMMITS)}, got {policy!r}")

    def state_memory(self, policy: str) -> int:
        """Recurrent state, conv state and what `policy` adds: all that trees cost."""
        return self.state + self.conv_state + self.added(policy)

    def total(self, policy: str) -> int:
        """All memory of one sequence, its KV caches at `context_length` included."""
        return self.state_memory(policy) + self.kv_cache + self.draft_kv_cache

    def ratio_to_snapshot(self, policy: str) -> float:
        """State memory under `policy` as a part of that under `snapshot`."""
        snapshot = self.state_memory("snapshot")
        return self.state_memory(policy) / snapshot if snapshot else 1.0

    def max_sequences(self, memory_bytes: int) -> dict[str, int]:
        """How many sequences fit into `memory_bytes` (what the weights leave), by policy.

        Each at `context_length`, in whole KV blocks; one block more takes the writes of padding.
        """
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes: expected at least 0, got {memory_bytes}")
        room = max(0, memory_bytes - self.kv_block)
        return {policy: room // self.reserved(policy) for policy in STATE_COMMITS}

    def to_dict(self) -> dict[str, Any]:
        """Everything in bytes, per sequence, for JSON."""
        return {
            "num_nodes": self.num_nodes,
            "history": self.history,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "state_dtype": self.state_dtype,
            "activation_dtype": self.activation_dtype,
            "stash": self.stash_kind,
            "stash_dtype": self.stash_dtype,
            "state_bytes": self.state,
            "conv_state_bytes": self.conv_state,
            "kv_cache_bytes_per_token": self.kv_cache_per_token,
            "kv_cache_bytes": self.kv_cache,
            "draft_kv_cache_bytes_per_token": self.draft_kv_cache_per_token,
            "draft_kv_cache_bytes": self.draft_kv_cache,
            "policies": {
                policy: {
                    "added_bytes": self.added(policy),
                    "state_memory_bytes": self.state_memory(policy),
                    "ratio_to_snapshot": self.ratio_to_snapshot(policy),
                    "total_bytes": self.total(policy),
                    "reserved_bytes": self.reserved(policy),
                    "batch_total_bytes": self.batch_size * self.total(policy),
                }
                for policy in STATE_COMMITS
            },
        }

    def table(self) -> str:
        """The plan for people, in MiB."""
        rows: list[tuple[str, ...]] = [
            ("policy", "state", "conv state", "added", "sum", "of snapshot", "with KV cache")
        ]
        for policy in STATE_COMMITS:
            amounts = (self.state, self.conv_state, self.added(policy), self.state_memory(policy))
            ratio = f"{100 * self.ratio_to_snapshot(policy):.1f}%"
            rows.append((policy, *map(_mib, amounts), ratio, _mib(self.total(policy))))
        values = f"pseudo-values {self.stash_dtype}"
        stash = f"inputs (deferred: {values})" if self.stash_kind == "inputs" else values
        lines = [
            f"MiB per sequence: {self.num_nodes} tree nodes, state {self.state_dtype}, "
            f"activations {self.activation_dtype}, stash of {stash}, "
            f"history {self.history}",
            "",
            *_aligned(rows),
            "",
            f"KV cache at {self.context_length} tokens: {_mib(self.kv_cache)} MiB "
            f"({self.kv_cache_per_token} bytes a token)"
            + (f", MTP module {_mib(self.draft_kv_cache)} MiB" if self.draft_kv_cache else ""),
        ]
        if self.batch_size > 1:
            sums = (f"{p} {_mib(self.batch_size * self.total(p))} MiB" for p in STATE_COMMITS)
            lines.append(f"{self.batch_size} sequences with KV cache: {', '.join(sums)}")
        return "\n".join(lines)


def plan(
    config: ModelConfig,
    *,
    draft_tree_widths: Sequence[int] | None = DEFAULT_DRAFT_TREE_WIDTHS,
    num_nodes: int | None = None,
    state_dtype: str = "float32",
    activation_dtype: str = "bfloat16",
    stash: str = "pseudo_values",
    stash_dtype: str = "float32",
    context_length: int = 32768,
    batch_size: int = 1,
    history: int = 16,
    kv_dtype: str | None = None,
    tokens_per_block: int = 32,
    scratch_rows: int | None = None,
) -> MemoryPlan:
    """The memory plan of a model.

    Args:
        config: the model.
        draft_tree_widths: children per node, level by level; None or empty is no drafts.
        num_nodes: nodes of any other tree (root included), instead of `draft_tree_widths`.
        state_dtype: type of the state pool.
        activation_dtype: type of conv inputs and conv state.
        stash: what `reconstruct` works from, "pseudo_values" or "inputs".
        stash_dtype: type of the pseudo-values.
        context_length: tokens a sequence holds in the KV cache.
        batch_size: sequences that run at once.
        history: accepted tokens a slot keeps under `deferred`; raised to the longest path.
        kv_dtype: type of the KV cache, that of the activations unless given.
        tokens_per_block: tokens of a KV block.
        scratch_rows: KV rows a sequence needs beyond its tokens; the tree's nodes unless given.

    Raises:
        ValueError: a size that is not positive, or an unknown type or stash.
    """
    tree = TreeTopology.from_widths(tuple(draft_tree_widths or ()))
    nodes = tree.num_nodes if num_nodes is None else num_nodes
    depth = tree.depth if num_nodes is None else 0
    sizes = {"num_nodes": nodes, "batch_size": batch_size, "history": history}
    sizes["tokens_per_block"] = tokens_per_block
    for name, value in {**sizes, "context_length": context_length}.items():
        if value < (0 if name == "context_length" else 1):
            raise ValueError(f"{name}: expected a positive number, got {value}")
    if stash not in ("pseudo_values", "inputs"):
        raise ValueError(f"stash: expected pseudo_values or inputs, got {stash!r}")
    history = max(history, depth + 1)
    state_bytes = _size_of("state_dtype", state_dtype)
    activation_bytes = _size_of("activation_dtype", activation_dtype)
    stash_bytes = _size_of("stash_dtype", stash_dtype)
    layers, heads = len(config.linear_layers), config.linear_num_value_heads
    state = layers * config.value_dim * config.linear_key_head_dim * state_bytes
    kv_bytes = activation_bytes if kv_dtype is None else _size_of("kv_dtype", kv_dtype)
    kv_per_layer = 2 * config.num_key_value_heads * config.head_dim * kv_bytes
    window = config.linear_conv_kernel_dim - 1
    conv_inputs = config.conv_dim * activation_bytes
    key_bytes = 2 if activation_bytes == 2 else 4
    entry = config.value_dim * stash_bytes + config.key_dim * key_bytes + 4 * heads
    folded = heads * -(-config.linear_value_head_dim // FOLD_ROWS)  # flags; 8 bytes for the slot
    conv_state = layers * window * config.conv_dim * activation_bytes
    return MemoryPlan(
        num_nodes=nodes,
        history=history,
        context_length=context_length,
        batch_size=batch_size,
        state_dtype=state_dtype,
        activation_dtype=activation_dtype,
        stash_dtype=stash_dtype,
        state=state,
        conv_state=conv_state,
        snapshots=nodes * state,
        stash_kind=stash,
        pseudo_values=layers * nodes * (config.value_dim * stash_bytes + 4 * heads + conv_inputs),
        inputs=layers * nodes * (2 * heads * activation_bytes + conv_inputs),
        history_pool=layers * (history * entry + folded) + 8,
        kv_cache_per_token=len(config.attention_layers) * kv_per_layer,
        draft_kv_cache_per_token=config.mtp_num_hidden_layers * kv_per_layer,
        conv_inputs=layers * nodes * conv_inputs,
        tokens_per_block=tokens_per_block,
        scratch_rows=nodes if scratch_rows is None else scratch_rows,
        checkpoint=state + conv_state + config.hidden_size * activation_bytes,
    )


def _size_of(name: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]


def _mib(amount: int) -> str:
    return f"{amount / _MIB:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text: the first column left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
