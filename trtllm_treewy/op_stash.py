"""What commits work from: pseudo-values, or the raw inputs of the nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import op_checks, reference
from .op_checks import expect, expect_dims
from .op_inputs import STATE_LAYOUT, Writes, compute_dtype


def stash_dtype(op: str, wanted: torch.dtype | None, q: Tensor, state: Tensor) -> torch.dtype:
    """Type of the pseudo-values that verification returns.

    Raises:
        ValueError: for a type other than the one of the computation, or bfloat16 beside a
            bfloat16 state.
    """
    computed = compute_dtype(q, state)
    if wanted is None or wanted == computed:
        return computed
    if wanted == torch.bfloat16 and state.dtype == torch.bfloat16:
        return wanted
    names = [str(x).removeprefix("torch.") for x in (computed, wanted)]
    raise ValueError(
        f"treewy::{op}: u_dtype must be {names[0]}, or bfloat16 where the state is, got {names[1]}"
    )


class Stash(NamedTuple):
    """What verification left for the commit: u, raw k and g of all layers, [L, B, N, ...]."""

    u: Tensor
    k: Tensor
    g: Tensor

    def check(self, op: str, state: Tensor, shape: torch.Size) -> None:
        """Raises ValueError unless they fit the pool [L, slots, HV, V, K] and `shape` = (B, N)."""
        expect_dims(op, "state", state, f"layers, {STATE_LAYOUT}")
        expect_dims(op, "k", self.k, "layers, batch, N, HK, K")
        layers, _, heads, dim, key_dim = state.shape
        key_heads, front, device = self.k.shape[3], (layers, *shape), state.device
        op_checks.expect_groups(op, key_heads, heads)
        lead = "layers, batch, N"
        expect(op, "u", self.u, f"{lead}, HV, V", (*front, heads, dim), device=device)
        expect(op, "k", self.k, f"{lead}, HK, K", (*front, key_heads, key_dim), device=device)
        expect(op, "g", self.g, f"{lead}, HV", (*front, heads), device=device)

    def along(
        self,
        layer: int,
        rows: Tensor,
        paths: Tensor,
        dtype: torch.dtype,
        normalize: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u, k (raw if told so) and g along the paths of the rows, [R, P, ...]."""
        at = (rows[:, None], paths.clamp(min=0))
        u, k, g = (x[layer][at].to(dtype) for x in self)
        return u, reference.l2norm(k) if normalize else k, g


class InputStash(NamedTuple):
    """What the projections left for a commit from inputs, and the layers' parameters.

    Attributes:
        conv_state: windows before the roots [L, slots, W-1, C], only read.
        x: raw conv inputs [L, B, N, C], channels [q, k, v].
        a, b: raw gates [L, B, N, HV].
        weight: [L, C, W].
        bias: [L, C] or None.
        A_log, dt_bias: [L, HV].
    """

    conv_state: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    weight: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor

    def key_heads(self, op: str, state: Tensor) -> int:
        """HK, which follows from the channels: C = 2 HK K + HV V."""
        heads, dim, key_dim = state.shape[2:]
        keys = self.x.shape[-1] - heads * dim
        if keys < 2 * key_dim or keys % (2 * key_dim):
            raise ValueError(
                f"treewy::{op}: x must have 2 HK K + HV V channels for K = {key_dim} and HV V = "
                f"{heads * dim}, got {self.x.shape[-1]}"
            )
        key_heads = keys // (2 * key_dim)
        op_checks.expect_groups(op, key_heads, heads)
        return key_heads

    def check(self, op: str, state: Tensor, shape: torch.Size) -> None:
        """Raises ValueError unless they fit the pool [L, slots, HV, V, K] and `shape` = (B, N)."""
        expect_dims(op, "state", state, f"layers, {STATE_LAYOUT}")
        expect_dims(op, "x", self.x, "layers, batch, N, C")
        expect_dims(op, "conv_weight", self.weight, "layers, C, W")
        layers, slots, heads = state.shape[:3]
        self.key_heads(op, state)
        (channels, width), device = (self.x.shape[3], self.weight.shape[2]), state.device
        front, wide = (layers, *shape), op_checks.WIDE_TYPES
        expect(op, "x", self.x, "layers, batch, N, C", (*front, channels), device=device)
        for name, x in (("a", self.a), ("b", self.b)):
            expect(op, name, x, "layers, batch, N, HV", (*front, heads), device=device)
        of_conv = (layers, channels, width)
        expect(op, "conv_weight", self.weight, "layers, C, W", of_conv, device=device)
        window = (layers, slots, width - 1, channels)
        layout = "layers, slots, W-1, C"
        expect(op, "conv_state", self.conv_state, layout, window, device=device)
        if self.bias is not None:
            expect(op, "conv_bias", self.bias, "layers, C", (layers, channels), device=device)
        for name, x in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            expect(op, name, x, "layers, HV", (layers, heads), dtypes=wide, device=device)

    def along(
        self, layer: int, writes: Writes, paths: Tensor, state: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u, normalised k and g along the paths [R, P, ...] from the states [R, HV, V, K]."""
        at = (writes.rows[:, None], paths.clamp(min=0))
        heads, dim, key_dim = state.shape[1:]
        values = heads * dim
        keys = (self.x.shape[3] - values) // 2
        weight, bias = self.weight[layer, keys:], None
        if self.bias is not None:
            bias = self.bias[layer, keys:]
        window = self.conv_state[layer, :, :, keys:].index_select(0, writes.slots)
        y = reference.path_conv(self.x[layer, :, :, keys:][at], window, weight, bias)
        k, v = y.to(dtype).split((keys, values), -1)
        k = reference.l2norm(k.unflatten(-1, (keys // key_dim, key_dim)))
        gates = (x.to(dtype) for x in (self.a[layer][at], self.b[layer][at]))
        parameters = (x[layer].to(dtype) for x in (self.A_log, self.dt_bias))
        g, beta = reference.gates(*gates, *parameters)
        u = reference.path_pseudo_values(k, v.unflatten(-1, (heads, dim)), g, beta, state)
        return u, k, g
