"""The gated delta rule in standard ONNX operators: TreeWY for nodes in any order, and its commit.

`trtllm_treewy.reference` in float32, with two differences that a graph asks for. Decays between
two nodes are sums over the nodes between them, all of one sign, so that float32 is enough. The
triangular system is solved by inverting blocks of 1, 2, 4, .. nodes, which takes a fixed number of
products. What is not finite is taken out first and put back at the end into the nodes that depend
on it, so it reaches no other.

Layout: [B, HK, G, N, ..], G = HV / HK value heads of a key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .onnx_nodes import LARGEST, Nodes

NORM_EPS = 1e-6
MIN_LOG_DECAY = -1e4


@dataclass(frozen=True)
class Heads:
    """Sizes of a GDN layer: HK key heads of dim K, HV value heads of dim V."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def groups(self) -> int:
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class Inputs:
    """What the rule works on, finite; `bad_*` say where it was not.

    q, k [.., HK, N, K]; v [.., HK, G, N, V]; g, beta [.., HK, G, N, 1]; bad_q [.., HK, 1, N, 1],
    bad_kv [.., HK, G, N, 1].
    """

    q: str
    k: str
    v: str
    g: str
    beta: str
    bad_q: str
    bad_kv: str


def prepare(f: Nodes, h: Heads, qkv: str, a: str, b: str, A_log: str, dt_bias: str) -> Inputs:
    """Heads, norms and gates of projections [B, N, ..] in any float type."""
    wide = f.cast(qkv, torch.float32)
    keys, values = h.key_heads * h.key_dim, h.value_heads * h.value_dim
    q, bad_q = _key_heads(f, h, f.slice(wide, 0, keys, 2))
    k, bad_k = _key_heads(f, h, f.slice(wide, keys, 2 * keys, 2))
    v = f.reshape(f.slice(wide, 2 * keys, 2 * keys + values, 2), 0, 0, h.key_heads, h.groups, -1)
    v, bad_v = _finite_rows(f, f.transpose(v, 0, 2, 3, 1, 4))
    raw, bad_a = _gate(f, h, f.op("Add", f.cast(a, torch.float32), dt_bias))
    b, bad_b = _gate(f, h, f.cast(b, torch.float32))
    rate = f.op("Neg", f.op("Min", f.op("Exp", A_log), f.f32(LARGEST)))
    rate = f.reshape(rate, 1, h.key_heads, h.groups, 1, 1)
    g = f.op("Mul", rate, f.op("Min", f.op("Softplus", raw), f.f32(LARGEST)))
    bad = [bad_v, bad_a, bad_b]
    bad_kv = bad_k
    for more in bad:
        bad_kv = f.op("Or", bad_kv, more)
    return Inputs(
        q=f.op("Mul", _l2norm(f, q), f.f32(h.key_dim**-0.5)),
        k=_l2norm(f, k),
        v=v,
        g=f.op("Max", g, f.f32(MIN_LOG_DECAY)),
        beta=f.op("Sigmoid", b),
        bad_q=bad_q,
        bad_kv=bad_kv,
    )


def _key_heads(f: Nodes, h: Heads, x: str) -> tuple[str, str]:
    """[B, N, HK K] to [B, HK, N, K], and where a head was not finite [B, HK, 1, N, 1]."""
    x = f.transpose(f.reshape(x, 0, 0, h.key_heads, h.key_dim), 0, 2, 1, 3)
    x, bad = _finite_rows(f, x)
    return x, f.unsqueeze(bad, 2)


def _finite_rows(f: Nodes, x: str) -> tuple[str, str]:
    """x [.., D] with zeros in rows that are not finite, and those rows [.., 1]."""
    bad = f.op("Not", f.finite(f.total(f.op("Abs", x), -1, keep=True)))
    return f.where(bad, f.f32(0.0), x), bad


def _gate(f: Nodes, h: Heads, x: str) -> tuple[str, str]:
    """[B, N, HV] to [B, HK, G, N, 1] without NaN, and where there was one."""
    x = f.reshape(x, 0, 0, h.key_heads, h.groups, 1)
    x = f.transpose(x, 0, 2, 3, 1, 4)
    bad = f.op("IsNaN", x)
    return f.where(bad, f.f32(0.0), x), bad


def _l2norm(f: Nodes, x: str) -> str:
    square = f.total(f.op("Mul", x, x), -1, keep=True)
    return f.op("Div", x, f.op("Sqrt", f.op("Add", square, f.f32(NORM_EPS))))


def solve(f: Nodes, x: Inputs, base_k: str, base_q: str, ancestors: str) -> tuple[str, str, str]:
    """Outputs and pseudo-values of all nodes.

    Args:
        f: the nodes.
        x: of the nodes.
        base_k, base_q: `S_0 k` and `S_0 q` [B, HK, G, N, V].
        ancestors: bool [B, 1, 1, N, N], ancestor or self.

    Returns:
        out and u [B, HK, G, N, V], u zero where it is not finite; bad [B, HK, G, N, 1], nodes
        whose u it is not.
    """
    base_k, bad_base = _finite_rows(f, base_k)
    reach = f.cast(ancestors, torch.float32)
    index = f.count(f.size(reach, 4))
    self_only = f.op("Equal", f.unsqueeze(index, 1), f.unsqueeze(index, 0))
    proper = f.op("And", ancestors, f.op("Not", self_only))
    below = f.op("Mul", x.g, f.cast(proper, torch.float32))  # [j, i]: g_j where i < j
    between = f.op("Exp", f.op("MatMul", reach, below))  # exp of the sum over i < j <= t
    from_root = f.op("Exp", f.op("MatMul", reach, x.g))
    turned = f.transpose(x.k, 0, 1, 3, 2)
    gram_k = f.unsqueeze(f.op("MatMul", x.k, turned), 2)
    gram_q = f.unsqueeze(f.op("MatMul", x.q, turned), 2)
    coupling = f.op("Mul", x.beta, f.op("Mul", between, gram_k))
    coupling = f.where(proper, coupling, f.f32(0.0))
    rhs = f.op("Mul", x.beta, f.op("Sub", x.v, f.op("Mul", from_root, base_k)))
    u = f.op("MatMul", _inverse(f, coupling, index, self_only), rhs)
    weights = f.where(ancestors, f.op("Mul", between, gram_q), f.f32(0.0))
    out = f.op("Add", f.op("Mul", from_root, base_q), f.op("MatMul", weights, u))
    bad = f.cast(f.op("Or", x.bad_kv, bad_base), torch.float32)
    bad = f.op("Greater", f.op("MatMul", reach, bad), f.f32(0.5))
    nan = f.f32(np.nan)
    return f.where(f.op("Or", bad, x.bad_q), nan, out), u, bad


def _inverse(f: Nodes, coupling: str, index: str, self_only: str) -> str:
    """`(I + B)^-1` of a strictly lower triangular B, by blocks of 1, 2, 4, .. 128 nodes.

    Blocks of size s are inverted: then those of 2s are, as the inverse of [[P, 0], [C, Q]] is
    [[P', 0], [-Q' C P', Q']].
    """
    inverse = f.cast(self_only, torch.float32)
    for level in range(7):
        half = f.op("Div", index, f.i32(2**level))
        whole = f.op("Div", index, f.i32(2 ** (level + 1)))
        apart = f.op("Not", f.op("Equal", f.unsqueeze(half, 1), f.unsqueeze(half, 0)))
        together = f.op("Equal", f.unsqueeze(whole, 1), f.unsqueeze(whole, 0))
        corner = f.where(f.op("And", apart, together), coupling, f.f32(0.0))
        step = f.op("MatMul", f.op("MatMul", inverse, corner), inverse)
        inverse = f.op("Sub", inverse, step)
    return inverse


def apply_state(f: Nodes, h: Heads, vectors: str, state: str) -> str:
    """`S x` for x [B, HK, N, K] and S [B, HV, V, K], as [B, HK, G, N, V]."""
    flat = f.reshape(state, 0, h.key_heads, h.groups * h.value_dim, h.key_dim)
    y = f.op("MatMul", vectors, f.transpose(flat, 0, 1, 3, 2))
    return f.transpose(f.reshape(y, 0, 0, 0, h.groups, h.value_dim), 0, 1, 3, 2, 4)
