"""Random cases for the gated delta rule: trees, slots, gates at their extremes, strided inputs.

Everything is drawn from a seeded generator. `naive_step` is the recurrence written out with whole
matrices, apart from the package's code, so that the package's own oracle has one too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy import reference


@dataclass(frozen=True)
class Dims:
    """Heads and head dims of a layer, and its conv kernel's width."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


# GVA 1, 2 and 4; the key and value dims differ, so that a transposed state shows.
DIMS = (Dims(2, 2, 8, 5), Dims(2, 4, 16, 24), Dims(1, 4, 7, 3))

DECAYS = ("mild", "mixed", "strong")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randint(gen: torch.Generator, low: int, high: int) -> int:
    """A number in [low, high)."""
    return int(torch.randint(low, high, (), generator=gen))


def random_trees(
    gen: torch.Generator, batch: int, nodes: int, *, shape: str = "random", full: bool = False
) -> tuple[Tensor, Tensor]:
    """`parents` [batch, nodes] and `num_nodes`: "random", "chain", "star" or "levels" (3 each).

    Unless `full`, trees end before `nodes` and what follows holds garbage parents.
    """
    parents = torch.full((batch, nodes), -1)
    parent = {
        "random": lambda node: randint(gen, max(0, node - 6), node),
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "levels": lambda node: (node - 1) // 3,
    }[shape]
    for row in range(batch):
        for node in range(1, nodes):
            parents[row, node] = parent(node)
    num_nodes = torch.full((batch,), nodes)
    if not full:
        for row in range(batch):
            num_nodes[row] = randint(gen, 1, nodes + 1)
            parents[row, num_nodes[row] :] = randint(gen, -1, 1000)
    return parents.int(), num_nodes.int()


def random_slots(gen: torch.Generator, batch: int, slots: int, *, pads: int = 0) -> Tensor:
    """Different slots in no order, slot 0 not where row 0 is; `pads` rows of -1 among them."""
    while True:
        slot = torch.randperm(slots, generator=gen)[:batch].int()
        if batch == 1 or (slot[0] != 0 and not torch.equal(slot, slot.sort().values)):
            break
    for row in torch.randperm(batch, generator=gen)[:pads].tolist():
        slot[row] = -1
    return slot


def random_accepted(gen: torch.Generator, num_nodes: Tensor) -> Tensor:
    """A node of each tree."""
    return torch.tensor([randint(gen, 0, n) for n in num_nodes.tolist()], dtype=torch.int32)


def projections(
    gen: torch.Generator,
    dims: Dims,
    *lead: int,
    dtype: torch.dtype = torch.float64,
    decay: str = "mild",
) -> dict[str, Tensor]:
    """q, k, v as views of one buffer, as a conv leaves them, a and b as views of another.

    "mild" decays forget over tens of tokens, "strong" ones have A_log at its largest and large dt,
    so that products of decays underflow; "mixed" has both kinds side by side along a path.
    """
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    mixed = torch.randn(*lead, 2 * keys + values, generator=gen, dtype=torch.float64)
    q, k, v = mixed.to(dtype).split((keys, keys, values), -1)
    ba = torch.randn(*lead, 2 * dims.value_heads, generator=gen, dtype=torch.float64)
    b, a = (2 * ba).split(dims.value_heads, -1)
    rate = torch.empty(dims.value_heads, dtype=torch.float64)
    bias = torch.randn(dims.value_heads, generator=gen, dtype=torch.float64)
    if decay == "mild":
        rate.uniform_(0.01, 0.3, generator=gen)
    else:
        rate.uniform_(8.0, 16.0, generator=gen)
        bias += 4.0
    if decay == "mixed":
        often = torch.rand(a.shape, generator=gen, dtype=torch.float64) < 0.7
        a = torch.where(often, a - 12.0, a + 4.0)
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "q": q.unflatten(-1, (dims.key_heads, dims.key_dim)),
        "k": k.unflatten(-1, (dims.key_heads, dims.key_dim)),
        "v": v.unflatten(-1, (dims.value_heads, dims.value_dim)),
        "a": a.to(dtype),
        "b": b.to(dtype),
        "A_log": rate.log().to(wide),
        "dt_bias": bias.to(wide),
    }


def random_state(gen: torch.Generator, dims: Dims, *lead: int, dtype: torch.dtype) -> Tensor:
    shape = (*lead, dims.value_heads, dims.value_dim, dims.key_dim)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def path_of(parents: Tensor, row: int, node: int) -> list[int]:
    """Nodes from the root to `node`, walked in Python."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[row, node])
    return path[::-1]


def naive_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of one sequence: `S = alpha S (I - beta k k^T) + beta v k^T`, `o = S q`.

    State [HV, V, K]; q, k [HK, K] normalised; v [HV, V]; g, beta [HV].
    """
    heads, group = v.shape[0], v.shape[0] // k.shape[0]
    outs, states = [], []
    for h in range(heads):
        key, query = k[h // group], q[h // group]
        erase = torch.eye(len(key), dtype=key.dtype) - beta[h] * torch.outer(key, key)
        after = g[h].exp() * state[h] @ erase + beta[h] * torch.outer(v[h], key)
        outs.append(after @ query)
        states.append(after)
    return torch.stack(outs), torch.stack(states)


def expected_step(
    raw: dict[str, Tensor], state: Tensor, slot: Tensor, parents: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and states of a step of a layer by the float64 recurrence, [B, N, ...].

    `raw` as `projections` gives it, `state` of all slots; nodes that are not `real` are padding.
    """
    raw = {name: x.double() for name, x in raw.items()}
    q, k = reference.normalize_qk(raw["q"], raw["k"])
    g, beta = reference.gates(raw["a"], raw["b"], raw["A_log"], raw["dt_bias"])
    before = state[slot.clamp(min=0).long()].double()
    return reference.tree_recurrence(
        q, k, raw["v"], g, beta, before, torch.where(real, parents, -1)
    )


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error."""
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and 0 differs from -0."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))
