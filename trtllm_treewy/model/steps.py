"""What a layer needs from its caller: the two seams between the model and everything stateful.

The model definition holds weights and arithmetic. State pools, caches, trees and commit policies
stand behind these protocols, so the same definition runs a prompt, verifies a tree under any
policy, and is traced by the exporter. Leading dimensions `...` are `[batch, N]` for a tree and
`[T]` for packed prompts. `layer` counts layers of the kind concerned from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


class GdnStep(Protocol):
    """The sequence-mixing operators of one step for the Gated DeltaNet layers."""

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Causal depthwise convolution along each node's path, SiLU fused.

        `x` [..., conv_dim], `weight` [conv_dim, kernel]; returns [..., conv_dim].
        """
        ...

    def delta_rule(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> Tensor:
        """Gated delta rule; gates and L2 norms are inside.

        `q`, `k` [..., num_k_heads, head_k_dim], `v` [..., num_v_heads, head_v_dim], `a`, `b`
        [..., num_v_heads]; returns [..., num_v_heads, head_v_dim].
        """
        ...


class AttentionStep(Protocol):
    """The attention operator of one step, with its KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Stores k and v, then attends over what each token may see.

        `q` [..., heads, head_dim], `k`, `v` [..., kv_heads, head_dim]; returns the shape of `q`.
        """
        ...


class StoringStep(AttentionStep, Protocol):
    """An attention step that can also leave it at what it stores."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v as `attend` does, and attends nothing."""
        ...


@dataclass(frozen=True)
class PackedHeads:
    """Queries, gates, keys and values as one product leaves them, before norms and positions.

    Attributes:
        packed: [..., heads * 2 * head_dim + 2 * kv_heads * head_dim or more]: query and gate of
            each head, then keys, then values.
        heads: of the queries.
        positions: int64 [...].
        frequencies: float32 [rotary_dim / 2], of the rotary position.
        q_norm, k_norm: weight [head_dim] and epsilon of the norms.
    """

    packed: Tensor
    heads: int
    positions: Tensor
    frequencies: Tensor
    q_norm: tuple[Tensor, float]
    k_norm: tuple[Tensor, float]


@runtime_checkable
class PackedAttentionStep(Protocol):
    """An attention step that takes packed heads too, and does all that lies between the products.

    See `model.fused`, which asks for it.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As that of `AttentionStep`."""
        ...

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As that of `StoringStep`."""
        ...

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> Tensor:
        """Norms, positions, `attend` and the output gate; returns [..., heads, head_dim]."""
        ...

    def store_packed(self, layer: int, heads: PackedHeads) -> None:
        """Norms, positions and `store`."""
        ...
