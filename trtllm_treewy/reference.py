"""The mathematics of tree verification on Gated DeltaNet layers, in plain torch.

This file is the truth that every operator, kernel and exported graph is compared with. It knows
no slots and no padding rows: `ops.py` adds those. Everything runs in the type it is given, so
float64 inputs give the float64 reference.

The gated delta rule (arXiv 2412.06464) of one value head, with state `S` [V, K]:

    g_t    = -exp(A_log) * softplus(a_t + dt_bias),  alpha_t = exp(g_t),  beta_t = sigmoid(b_t)
    S_t    = alpha_t S_p(t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    o_t    = S_t q_t

`p(t)` is the parent of node t in the draft tree, k and q are L2-normalised and q is scaled by
K^-1/2. TreeWY (arXiv 2608.20961) solves all nodes at once, without a state per node. With the
path log decay `G_t = sum over i <= t of g_i`, where i <= t says "i is t or an ancestor of t":

    u_t    = beta_t (v_t - alpha_t S_p(t) k_t)                             pseudo-values
    (I + B) U = R,  B[t,i] = beta_t exp(G_t - G_i) (k_t . k_i)  for i < t, else 0
                    R[t]   = beta_t (v_t - exp(G_t) S_0 k_t)
    o_t    = exp(G_t) S_0 q_t + sum over i <= t of exp(G_t - G_i) (k_i . q_t) u_i
    S_a    = exp(G_a) S_0     + sum over i <= a of exp(G_a - G_i) u_i k_i^T     commit of node a

Three rules hold throughout:

* Decays appear only as exp(G_t - G_i) with i <= t, whose exponent is at most 0. Strong decay makes
  G large (thousands), where a float32 difference has lost its digits: path sums and their
  differences are taken in float64, and what is kept per node is its own g_t, never G_t.
* What is not an ancestor is selected away, never multiplied by zero: NaN * 0 is NaN.
* Value head h reads key head h // (HV / HK); Gram matrices belong to the key head.

Shapes: B batch, N nodes, T tokens, P path length, H history length, HK/HV key/value heads,
K/V head dims, C conv channels, W conv kernel width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import topology

NORM_EPS = 1e-6
# exp() of this is zero in every float type; it keeps g finite, so that differences are defined.
MIN_LOG_DECAY = -1e4
DEFAULT_CHUNK = 64


class History(NamedTuple):
    """Accepted nodes that are not yet folded into the state (deferred commit).

    Attributes:
        u: pseudo-values [B, H, HV, V], oldest first.
        k: L2-normalised keys [B, H, HK, K].
        g: log decay of each entry itself [B, H, HV].
        length: entries in use, integer [B]; what lies beyond is never read.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    length: Tensor


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`.

    Args:
        a, b: projections [..., HV].
        A_log, dt_bias: [HV].

    Returns:
        g and beta [..., HV], in the widest type of the inputs and at least float32: gates are
        never rounded to 16 bits.
    """
    dtype = torch.promote_types(torch.promote_types(a.dtype, A_log.dtype), torch.float32)
    # Both factors stay finite, as Inf * 0 is NaN; clamp() keeps a NaN.
    largest = torch.finfo(dtype).max
    rate = -A_log.to(dtype).exp().clamp(max=largest)
    g = rate * F.softplus(a.to(dtype) + dt_bias.to(dtype)).clamp(max=largest)
    return g.clamp(min=MIN_LOG_DECAY), b.to(dtype).sigmoid()


def l2norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def normalize_qk(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """L2-normalised q and k, q also scaled by K^-1/2. Both [..., HK, K]."""
    return l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)


def repeat_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """Key heads repeated for their value heads: [..., HK, K] -> [..., HV, K]."""
    return x.repeat_interleave(num_value_heads // x.shape[-2], dim=-2)


def tree_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, node after node: the oracle, and what snapshots would store.

    Args:
        q, k: [B, N, HK, K], as `normalize_qk` returns them.
        v: [B, N, HV, V].
        g, beta: [B, N, HV].
        state: S_0 [B, HV, V, K].
        parents: integer [B, N], parents first, -1 for the root.

    Returns:
        out [B, N, HV, V] and the state after each node [B, N, HV, V, K].
    """
    batch, nodes, heads, _ = v.shape
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    alpha = _exp_decay(g)
    rows = torch.arange(batch, device=state.device)
    states = state.new_empty(batch, nodes + 1, *state.shape[1:])
    states[:, 0] = state
    outs = torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(nodes):
        before = states[rows, parents[:, t].long() + 1] * alpha[:, t, :, None, None]
        error = v[:, t] - (before * k[:, t, :, None]).sum(-1)
        after = before + (beta[:, t, :, None] * error)[..., None] * k[:, t, :, None]
        outs[:, t] = (after * q[:, t, :, None]).sum(-1)
        states[:, t + 1] = after
    return outs, states[:, 1:]


def select_sum(weights: Tensor, selected: Tensor, values: Tensor) -> Tensor:
    """`sum over i of weights[t, i] values[i]` over the selected i alone, whatever the others hold.

    A product of matrices, with two repairs where `values` is not finite: such a value counts as
    zero where it is not selected, and makes the sum NaN where it is. The sums of everyone else
    keep their bits.

    Args:
        weights: [..., T, N], zero where not selected.
        selected: bool, broadcastable to weights.
        values: [..., N, V].
    """
    # A sum that overflows sends finite values down the long way too, to the same bits.
    if values.is_cpu and math.isfinite(values.sum().item()):
        return weights @ values
    finite = values.isfinite()
    reached = selected.to(values.dtype) @ (~finite).to(values.dtype)
    total = weights @ torch.where(finite, values, 0.0)
    return torch.where(reached > 0, torch.nan, total)


def _exp_decay(log_decay: Tensor) -> Tensor:
    """`exp(log_decay)`, in float32 with zero for what is below 1e-30.

    Nothing that small survives beside a node's own value, and the subnormal products it leads to
    make matrix products on a CPU five times slower under strong decay.
    """
    decay = log_decay.exp()
    if decay.dtype == torch.float64:
        return decay
    return decay.masked_fill(decay < 1e-30, 0.0)


def pairwise_decay(g: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(G_t - G_i)` for i <= t, else 0, and `exp(G_t)`.

    Args:
        g: [B, HV, N].
        ancestors: bool [B, 1, N, N], True where column i is row t or an ancestor of it.

    Returns:
        [B, HV, N, N] and [B, HV, N], in g's type.
    """
    path_sum = torch.where(ancestors, g[:, :, None, :].double(), 0.0).sum(-1)
    between = path_sum[..., :, None] - path_sum[..., None, :]
    decay = _exp_decay(torch.where(ancestors, between, -torch.inf).to(g.dtype))
    return decay, _exp_decay(path_sum.to(g.dtype))


def later_decay(g: Tensor) -> tuple[Tensor, Tensor]:
    """Along a path: decay from after each entry to the end, and from before the first to the end.

    Args:
        g: [..., P, HV]. Entries that are not there must be 0.

    Returns:
        `exp(G_last - G_i)` [..., P, HV] and `exp(G_last)` [..., HV], in g's type.
    """
    wide = g.double()
    total = wide.sum(-2, keepdim=True)
    later = (total - wide.cumsum(-2)).clamp(max=0.0)
    return _exp_decay(later.to(g.dtype)), _exp_decay(total.squeeze(-2).to(g.dtype))


class _System(NamedTuple):
    """The triangular system of a batch of trees, heads before nodes."""

    coupling: Tensor  # B [B, HV, N, N], zero but for proper ancestors
    rhs: Tensor  # R [B, HV, N, V]
    weights: Tensor  # exp(G_t - G_i) (k_i . q_t) [B, HV, N, N], zero but for ancestors and self
    base_out: Tensor  # exp(G_t) S_0 q_t [B, HV, N, V]


def _apply_state(vectors: Tensor, state: Tensor, history: History | None) -> Tensor:
    """`S_0 x` for the vectors x [B, HK, M, K] of every key head, as [B, HV, M, V].

    With a history, S_0 = exp(g_m) S_pool + sum over i of exp(g_m - g_i) u_i k_i^T, which is
    applied term by term and never formed.
    """
    batch, key_heads, count, _ = vectors.shape
    heads, dim, key_dim = state.shape[1:]
    group = heads // key_heads
    flat = state.reshape(batch, key_heads, group * dim, key_dim)
    result = vectors @ flat.transpose(-1, -2)
    result = result.view(batch, key_heads, count, group, dim).transpose(2, 3)
    result = result.reshape(batch, heads, count, dim)
    if history is None:
        return result
    valid = _valid_entries(history)
    later, total = later_decay(torch.where(valid[..., None], history.g, 0.0))
    dots = vectors @ _select(valid, history.k).permute(0, 2, 3, 1)  # [B, HK, M, H]
    weights = dots[:, :, None] * _group(later.transpose(1, 2), key_heads)[..., None, :]
    values = _select(valid, history.u).transpose(1, 2)  # [B, HV, H, V]
    return total[..., None, None] * result + weights.flatten(1, 2) @ values


def _valid_entries(history: History) -> Tensor:
    """Bool [B, H]: entries in use."""
    index = torch.arange(history.g.shape[1], device=history.g.device)
    return index < history.length[:, None]


def _select(valid: Tensor, x: Tensor) -> Tensor:
    """Rows of x [..., P, heads, dim] where valid [..., P], zeros elsewhere."""
    return torch.where(valid[..., None, None], x, 0.0)


def _group(x: Tensor, key_heads: int) -> Tensor:
    """[B, HV, ...] -> [B, HK, HV / HK, ...]."""
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, *x.shape[2:])


def _wy_system(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    history: History | None = None,
) -> _System:
    """Everything of TreeWY up to the solve. Arguments as for `tree_wy`."""
    nodes, key_heads = q.shape[1:3]
    anc = ancestors[:, None]
    keys = k.transpose(1, 2)
    both = torch.cat((keys, q.transpose(1, 2)), 2)  # [B, HK, 2N, K]
    gram = both @ keys.transpose(-1, -2)
    base = _apply_state(both, state, history)
    decay, from_root = pairwise_decay(g.transpose(1, 2), anc)
    grouped = _group(decay, key_heads)
    step = beta.transpose(1, 2)[..., None]
    coupling = step * (grouped * gram[:, :, None, :nodes]).flatten(1, 2)
    weights = (grouped * gram[:, :, None, nodes:]).flatten(1, 2)
    from_root = from_root[..., None]
    self_only = torch.eye(nodes, dtype=torch.bool, device=q.device)
    return _System(
        coupling=torch.where(anc & ~self_only, coupling, 0.0),
        rhs=step * (v.transpose(1, 2) - from_root * base[:, :, :nodes]),
        weights=torch.where(anc, weights, 0.0),
        base_out=from_root * base[:, :, nodes:],
    )


def _substitute(
    system: _System, ancestors: Tensor, blocks: Sequence[tuple[int, int]] | None
) -> Tensor:
    """U of `(I + B) U = R` by forward substitution, [B, HV, N, V]; a bad node spoils its own."""
    nodes = system.rhs.shape[2]
    if blocks is None:
        blocks = [(t, t + 1) for t in range(nodes)]
    anc = ancestors[:, None]
    u = system.rhs.clone(memory_format=torch.contiguous_format)
    for start, stop in blocks:
        if start == 0:
            continue
        u[:, :, start:stop] -= select_sum(
            system.coupling[:, :, start:stop, :start],
            anc[:, :, start:stop, :start],
            u[:, :, :start],
        )
    return u


def tree_wy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    *,
    history: History | None = None,
    blocks: Sequence[tuple[int, int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and pseudo-values of every node of a tree, without a state per node.

    Args:
        q, k: [B, N, HK, K], as `normalize_qk` returns them.
        v: [B, N, HV, V].
        g, beta: [B, N, HV].
        state: S_0 [B, HV, V, K], or the pool's state if there is a history.
        ancestors: bool [B, N, N], ancestor or self (`topology.ancestor_mask`).
        history: accepted nodes that come after `state`.
        blocks: `topology.independent_blocks`; without it the nodes are solved one by one.

    Returns:
        out and u, both [B, N, HV, V].
    """
    system = _wy_system(q, k, v, g, beta, state, ancestors, history)
    u = _substitute(system, ancestors, blocks)
    out = system.base_out + select_sum(system.weights, ancestors[:, None], u)
    return out.transpose(1, 2).contiguous(), u.transpose(1, 2).contiguous()


def commit_path(state: Tensor, u: Tensor, k: Tensor, g: Tensor, valid: Tensor) -> Tensor:
    """State after a path: `exp(G_a) S_0 + sum over i <= a of exp(G_a - G_i) u_i k_i^T`.

    Args:
        state: S_0 [..., HV, V, K].
        u: pseudo-values along the path [..., P, HV, V], root first.
        k: L2-normalised keys along the path [..., P, HK, K].
        g: log decay of each node itself [..., P, HV].
        valid: bool [..., P] or broadcastable, the entries that belong to the path.
    """
    later, total = later_decay(torch.where(valid[..., None], g, 0.0))
    scaled = _select(valid, u) * later[..., None]
    keys = _select(valid, k).movedim(-3, -2)  # [..., HK, P, K]
    lead, (heads, dim, key_dim) = state.shape[:-3], state.shape[-3:]
    key_heads = keys.shape[-3]
    path = scaled.shape[-3]
    values = scaled.reshape(*lead, path, key_heads, heads // key_heads * dim)
    update = values.movedim(-3, -1) @ keys  # [..., HK, (HV/HK) V, K]
    update = update.reshape(*lead, heads, dim, key_dim)
    return torch.addcmul(update, total[..., None, None], state)


def path_pseudo_values(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Pseudo-values of the nodes of one path, from what the path alone holds.

    `(I + B) u = R` of `tree_wy` for a chain: node i has all entries before it as ancestors. An
    entry uses those before it alone, so what follows a path's end may hold anything.

    Args:
        k: L2-normalised keys [B, P, HK, K], root first.
        v: [B, P, HV, V].
        g, beta: [B, P, HV].
        state: S_0 [B, HV, V, K].

    Returns:
        u [B, P, HV, V].
    """
    index = torch.arange(k.shape[1], device=k.device)
    chain = (index[:, None] >= index).expand(k.shape[0], -1, -1)
    system = _wy_system(k, k, v, g, beta, state, chain)
    return _substitute(system, chain, None).transpose(1, 2).contiguous()


def fold_history(state: Tensor, history: History) -> Tensor:
    """The state with its history applied, [B, HV, V, K]."""
    return commit_path(state, history.u, history.k, history.g, _valid_entries(history))


def greedy_walk(
    token_ids: Tensor,
    target_ids: Tensor,
    parents: Tensor,
    usable: Tensor,
    ancestors: Tensor,
    columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The deepest node all of whose ancestors, and itself, are the target's choices.

    Args:
        token_ids, target_ids: int64 [B, N], the drafted tokens and the target's after each node.
        parents: integer [B, N], -1 for the root, which is node 0.
        usable: bool [B, N], nodes that may be accepted.
        ancestors: bool [B, N, N], ancestor or self.
        columns: P, the longest path accepted.

    Returns:
        accepted int32 [B] (the lowest index where several are as deep, -1 where none is usable),
        nodes of its path int32 [B], the path int64 [B, P], root first and -1 beyond, and the
        target's token after it int64 [B], or -1.
    """
    batch, n = token_ids.shape
    depth = topology.node_depth(ancestors)
    index = torch.arange(n, device=token_ids.device)
    choice = target_ids.gather(1, parents.long().clamp(min=0))
    match = (token_ids == choice) | (index == 0)
    ok = (match[:, None] | ~ancestors).all(-1) & usable & (depth < columns)
    # Deepest first, then the lowest index; the ranks of a row are distinct.
    rank = torch.where(ok, depth.long() * n + (n - 1 - index), -1)
    best = rank.argmax(1, keepdim=True)
    moves = ok.any(1)
    on_path = ancestors.gather(1, best[:, :, None].expand(-1, 1, n))[:, 0] & moves[:, None]
    column = torch.where(on_path, depth.long(), columns)
    path = torch.full((batch, columns + 1), -1, dtype=torch.int64, device=on_path.device)
    path = path.scatter_(1, column, index.expand(batch, n))[:, :columns]
    accepted = torch.where(moves, best[:, 0], -1).to(torch.int32)
    bonus = torch.where(moves, target_ids.gather(1, best)[:, 0], -1)
    return accepted, on_path.sum(1).to(torch.int32), path.contiguous(), bonus


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over token sequences: TreeWY over chunks of a chain.

    Args:
        q, k: [B, T, HK, K], as `normalize_qk` returns them.
        v: [B, T, HV, V].
        g, beta: [B, T, HV].
        state: S_0 [B, HV, V, K].
        lengths: tokens of each sequence, longest first; T for all if not given.
        chunk: tokens solved at a time.

    Returns:
        out [B, T, HV, V], zero beyond a sequence's length, and the final states [B, HV, V, K].
    """
    batch, tokens = q.shape[:2]
    lengths = [tokens] * batch if lengths is None else list(lengths)
    if len(lengths) != batch or sorted(lengths, reverse=True) != lengths:
        raise ValueError(f"lengths must be {batch} counts, longest first, got {lengths}")
    outs, finished = [], []
    for start in range(0, max(lengths, default=0), chunk):
        rows = sum(length > start for length in lengths)
        stop = min(start + chunk, lengths[0])
        finished.append(state[rows:])
        real = torch.tensor([min(n - start, stop - start) for n in lengths[:rows]])
        span = (slice(rows), slice(start, stop))
        out, state = _chunk_step(
            q[span], k[span], v[span], g[span], beta[span], state[:rows], real.to(q.device)
        )
        outs.append(F.pad(out, (0, 0, 0, 0, 0, 0, 0, batch - rows)))
    finished.append(state)
    out = torch.cat(outs, 1) if outs else v[:, :0]
    out = F.pad(out, (0, 0, 0, 0, 0, tokens - out.shape[1]))
    return out, torch.cat(finished[::-1])


def _chunk_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of `chunk_prefill`; `real` [B] counts the tokens that are there."""
    tokens = q.shape[1]
    index = torch.arange(tokens, device=q.device)
    causal = (index[:, None] >= index).expand(q.shape[0], -1, -1)
    system = _wy_system(q, k, v, g, beta, state, causal)
    # Row t of the solution uses rows before t alone, so a later NaN stays later.
    u = torch.linalg.solve_triangular(system.coupling, system.rhs, upper=False, unitriangular=True)
    out = system.base_out + select_sum(system.weights, causal[:, None], u)
    valid = index < real[:, None]
    after = commit_path(state, u.transpose(1, 2), k, g, valid)
    return _select(valid, out.transpose(1, 2)), after


def tap_rows(parents: Tensor, valid: Tensor, width: int) -> Tensor:
    """Where each node's conv taps lie, by depth along its path, oldest first.

    The rows are those of `cat(window, x)`: the window's W-1 rows, then the nodes. A node's row is
    W-1 + its index; the row before the root's is the window's newest.

    Args:
        parents: integer [B, N].
        valid: bool [B, N]; a padded node takes taps as if it were a root.
        width: W, the kernel's width.

    Returns:
        int64 [B, N, W]; the last tap is the node itself.
    """
    batch, nodes = parents.shape
    window = torch.arange(-1, width - 2, device=parents.device).clamp(min=0)
    before_node = torch.where(valid, parents, -1).long() + (width - 1)
    before = torch.cat((window.expand(batch, -1), before_node), 1)
    row = torch.arange(width - 1, width - 1 + nodes, device=parents.device).expand(batch, -1)
    taps = [row]
    for _ in range(width - 1):
        row = before.gather(1, row)
        taps.append(row)
    return torch.stack(taps[::-1], -1)


def weighted_taps(taps: Iterable[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu(bias + sum over j of weight[:, j] * taps[j])`, one tap after the other.

    Multiplied and added element by element in a fixed order, so that the same path gives the same
    bits whatever tree it lies in.

    Args:
        taps: W tensors [..., C] in float32 or float64, oldest first.
        weight: [C, W]; weight[:, W-1] is for the node itself.
        bias: [C] or None.

    Returns:
        [..., C] in the taps' type.
    """
    total = None
    for tap, column in zip(taps, weight.t().contiguous(), strict=True):
        product = tap * column.to(tap.dtype)
        total = product if total is None else total.add_(product)
    if total is None:
        raise ValueError("weight must have at least one column, got [C, 0]")
    if bias is not None:
        total = total + bias.to(total.dtype)
    return silu(total)


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`, from operations whose bits do not depend on where an element lies.

    torch's own silu rounds the last few elements of a CPU tensor differently from the others.
    """
    return x / (x.neg().exp_() + 1.0)


def tree_conv(
    x: Tensor, window: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Causal conv with SiLU along the path from the root to each node.

    Args:
        x: raw inputs [B, N, C].
        window: the W-1 raw inputs before the root, oldest first, [B, W-1, C].
        taps: `tap_rows`, [B, N, W].
        weight: [C, W]; weight[:, W-1] is for the node itself.
        bias: [C] or None.

    Returns:
        [B, N, C] in x's type; computed in float32, or float64 if x is.
    """
    batch, nodes, channels = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = torch.cat((window.to(dtype), x.to(dtype)), 1)
    first = torch.arange(batch, device=x.device)[:, None, None] * rows.shape[1]
    index = (taps + first).view(-1, taps.shape[-1])
    flat = rows.view(-1, channels)
    y = weighted_taps((flat.index_select(0, tap) for tap in index.t()), weight, bias)
    return y.view(batch, nodes, channels).to(x.dtype)


def causal_conv(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`tree_conv` of one sequence: a chain.

    Args:
        x: raw inputs [T, C].
        window: [W-1, C], the raw inputs before them.
        weight, bias: as for `tree_conv`.

    Returns:
        [T, C] in x's type, with the bits that `tree_conv` gives, and the window after the last
        token in the window's type.
    """
    tokens = x.shape[0]
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = torch.cat((window.to(dtype), x.to(dtype)))
    y = weighted_taps((rows[j : j + tokens] for j in range(weight.shape[1])), weight, bias)
    return y.to(x.dtype), rows[tokens:].to(window.dtype)


def path_conv(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`tree_conv` along one path a row, with the same bits.

    Args:
        x: raw inputs along the paths [R, P, C], root first.
        window: the W-1 raw inputs before the roots, oldest first, [R, W-1, C].
        weight, bias: as for `tree_conv`.

    Returns:
        [R, P, C] in x's type.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = torch.cat((window.to(dtype), x.to(dtype)), 1)
    taps = (rows[:, j : j + x.shape[1]] for j in range(weight.shape[1]))
    return weighted_taps(taps, weight, bias).to(x.dtype)


def conv_window(window: Tensor, x: Tensor, taps: Tensor, rows: Tensor) -> Tensor:
    """The window after a node: the last W-1 raw inputs of (old window, inputs along the path).

    Args:
        window: [R, W-1, C], oldest first.
        x: raw inputs [B, N, C].
        taps: the nodes' entries of `tap_rows`, int64 [R, W].
        rows: int64 [R], the row of x that each window belongs to.

    Returns:
        [R, W-1, C] in the window's type.
    """
    kept, newest = window.shape[1], taps[:, 1:]
    index = torch.arange(window.shape[0], device=window.device)[:, None]
    old = window[index, newest.clamp(max=kept - 1)]
    new = x[rows[:, None], (newest - kept).clamp(min=0)].to(window.dtype)
    return torch.where((newest >= kept)[..., None], new, old)
