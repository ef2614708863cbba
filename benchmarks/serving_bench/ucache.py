"""FlashInfer's u-cache kernels as a commit policy of this executor: chains of ReplaySSM's kind.

Read in flashinfer-python 0.7.2.post1, `flashinfer/gdn_kernels/gdn_decode_bf16_wy_ucache_flush.py`:
a verification of 4 or 8 tokens in WY form over a bfloat16 state (K = V = 128, from sm_90 on) that
leaves each token's key, pseudo-value and log decay in a ring of its slot, 32 deep. What was
accepted stays there, up to 16 tokens, and is part of what later verifications start from; the one
that finds no room for its own tokens folds it into the state, in the same launch. Whoever calls
moves the ring's cursors. ReplaySSM over a float32 state, and FlashInfer's commit of raw inputs for
all layers, are for sm_100 alone.

It stands where `deferred` does, for measurements only: a fold happens in a verification, so that
one that is made twice, or dropped, spoils the state; and `materialize` does nothing, so that a
sequence must not go back to prompts in its slot. The benchmark's engines do neither on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_treewy.batch import TreeBatch
from trtllm_treewy.runtime import commit_policy
from trtllm_treewy.runtime.commit_policy import (
    CommitPolicy,
    DeferredPolicy,
    GdnInputs,
    ReconstructPolicy,
    StateShape,
    TreeInputs,
)

NAME = "flashinfer-ucache"
# Tokens of a verification, entries of a ring, and how many of them may wait to be folded.
WIDTHS, RING, WINDOW = (4, 8), 32, 16
TREES = ("3", "7")
MODULE = "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush"
# Of outputs against float64: the state, keys and pseudo-values are rounded to bfloat16 on the way.
BOUND = 3e-2
SLOTS = 5  # of the check


class PeerError(RuntimeError):
    """FlashInfer's kernels cannot be used: they are absent, or wrong."""


def load_kernel() -> Callable[..., Tensor]:
    """FlashInfer's function.

    Raises:
        PeerError: it is not there, or something that it takes is not.
    """
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # whatever goes wrong in a peer's import is its absence
        raise PeerError(f"{NAME} is absent: {type(error).__name__}: {error}") from error
    # Reads queries, keys and values where the conv wrote them, as serving with it does, in place of
    # three copies a layer; its environment variable is read at the import.
    module._STRIDED_QKV = True  # type: ignore[attr-defined]
    kernel: Callable[..., Tensor] = module.gated_delta_rule_mtp_ucache_flush
    return kernel


class UCachePolicy(CommitPolicy):
    """Accepted tokens collect in rings, which a verification folds where they are too full.

    Args:
        shape, state: as for every policy.
        stash_dtype, history_capacity, max_path: of `deferred`, in whose place it is made; not used.

    Attributes:
        width: tokens that the kernel takes of the largest trees.
    """

    name: ClassVar[str] = NAME

    def __init__(
        self,
        shape: StateShape,
        state: Tensor,
        stash_dtype: torch.dtype | None = None,
        history_capacity: int = WINDOW,
        max_path: int | None = None,
    ) -> None:
        super().__init__(shape, state)
        self._kernel = load_kernel()
        kind = shape.activation_dtype
        self._k = shape.per_slot(shape.key_heads, RING, shape.key_dim, dtype=kind)
        self._u = shape.per_slot(shape.value_heads, RING, shape.value_dim, dtype=kind)
        self._g = shape.per_slot(shape.value_heads, RING, dtype=shape.compute_dtype)
        # Of every slot; one more takes what padded rows write.
        self._length, self._base = (self._numbers(shape.slots + 1) for _ in range(2))
        # Of the rows of a step, where the kernel reads them.
        self._slot, self._lengths, self._bases = (self._numbers(shape.max_batch) for _ in range(3))
        self.width = self._width(shape.max_nodes)
        sizes = (shape.max_batch * self.width, shape.value_heads, shape.value_dim)
        # Padded rows are not written: what they hold must be finite.
        self._out = torch.zeros(sizes, dtype=kind, device=shape.device)

    def _numbers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.shape.device)

    @staticmethod
    def _width(nodes: int) -> int:
        """Tokens of the kernel that takes so many nodes.

        Raises:
            ValueError: none does.
        """
        width = next((width for width in WIDTHS if width >= nodes), None)
        if width is None:
            raise ValueError(f"{NAME} takes chains of up to {WIDTHS[-1]} nodes, got {nodes}")
        return width

    def verify(self, layer: int, tree: TreeBatch, inputs: GdnInputs) -> Tensor:
        batch, nodes = tree.parents.shape
        width = self._width(nodes)
        if layer == 0:
            index = self._index(tree)
            self._slot[:batch] = tree.slot
            self._lengths[:batch] = self._length[index]
            self._bases[:batch] = self._base[index]
        rows = {name: _rows(getattr(inputs, name), width) for name in ("q", "k", "v", "a", "b")}
        out = self._out[: batch * width].view(batch, width, *self._out.shape[1:])
        self._kernel(
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            **rows,
            initial_state_source=self.state[layer],
            initial_state_indices=self._slot[:batch],
            k_cache=self._k[layer],
            u_cache=self._u[layer],
            g_cache=self._g[layer],
            hist_len=self._lengths[:batch],
            cache_base=self._bases[:batch],
            restart_hist_on_flush=False,
            output=out,
        )
        return out if width == nodes else out[:, :nodes].contiguous()

    def commit(self, tree: TreeBatch, accepted: Tensor, inputs: TreeInputs) -> None:
        """Moves the cursors; of a chain a node's index tells how many are accepted."""
        index = self._index(tree)
        length, base = self._length[index], self._base[index]
        folded = length > WINDOW - self._width(tree.parents.shape[1])
        self._base[index] = (base + torch.where(folded, length, 0)) & (RING - 1)
        self._length[index] = torch.where(folded, 0, length) + (accepted + 1).int()

    def _index(self, tree: TreeBatch) -> Tensor:
        """Where the numbers of each row's slot are."""
        return torch.where(tree.slot >= 0, tree.slot, self.shape.slots).long()

    def clear(self, slot: int) -> None:
        for pool in (self._k, self._u, self._g):
            pool[:, slot] = 0
        self._length[slot] = 0
        self._base[slot] = 0

    def restart(self, length: int) -> None:
        """As if every slot's ring held so many tokens, whatever they are."""
        self._length.fill_(length)
        self._base.zero_()

    def held(self, slot: Tensor) -> list[int]:
        """Tokens in the rings of `slot` (int32 [B]); waits for the device."""
        found: list[int] = self._length[slot.long()].tolist()
        return found

    @property
    def pool_bytes(self) -> int:
        pools = (self._k, self._u, self._g, self._length, self._base)
        return sum(pool.numel() * pool.element_size() for pool in pools)

    def _stash(self) -> list[Tensor]:
        return [self._out]


def _rows(x: Tensor, width: int) -> Tensor:
    """`x` [B, N, ...] with `width` tokens, those added zero; sequences lie one behind another."""
    if x.shape[1] < width:
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1]))
    return x if x.stride(0) == width * x.stride(1) else x.contiguous()


@contextmanager
def in_place_of_deferred() -> Iterator[None]:
    """Engines that are built meanwhile commit by this policy where they are told `deferred`."""
    commit_policy.POLICIES[DeferredPolicy.name] = UCachePolicy
    try:
        yield
    finally:
        commit_policy.POLICIES[DeferredPolicy.name] = DeferredPolicy


# ------------------------------------------------------------------ check


@cache
def check_once(device: torch.device, nodes: int) -> float:
    """`check` of a layer of Qwen3.5-35B-A3B; the greatest error.

    Raises:
        PeerError: the kernels are absent, fail, or differ from the reference.
    """
    sizes: dict[str, Any] = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    try:
        worst = check(nodes, device, torch.bfloat16, **sizes)
    except PeerError:
        raise
    except Exception as error:  # it compiles and launches in there
        raise PeerError(f"{NAME} fails: {type(error).__name__}: {error}") from error
    if not worst <= BOUND:
        raise PeerError(
            f"{NAME} differs from the reference: relative error {worst:.1e}, {BOUND:.0e}"
        )
    return worst


def check(
    nodes: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    steps: int = 16,
) -> float:
    """Chains through several folds against the float64 reference on the CPU.

    Rows are sequences in other slots than rows, or padding; each is accepted as far as it happens
    to be: none, some or all of its nodes. One sequence joins later.

    Args:
        nodes: of every chain.
        device, dtype: of the policy that is checked, its activations and its state.
        key_heads, value_heads, key_dim, value_dim: of a layer; there are two.
        steps: verifications and commits.

    Returns:
        The greatest relative error of a step's outputs; infinite where one is not finite.
    """
    draw = torch.Generator().manual_seed(0)
    layers, heads, dims = 2, (key_heads, key_heads, value_heads), (key_dim, key_dim, value_dim)
    wide = sum(count * dim for count, dim in zip(heads, dims, strict=True))

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    state = random(layers, SLOTS, value_heads, value_dim, key_dim) * 0.3
    # A_log and dt_bias as the kernel rounds them.
    gates = [(random(value_heads), random(value_heads)) for _ in range(layers)]
    theirs = _Side(UCachePolicy, heads, dims, nodes, state, gates, device, torch.float32)
    cpu = torch.device("cpu")
    truth = _Side(ReconstructPolicy, heads, dims, nodes, state.double(), gates, cpu, torch.float64)
    worst = 0.0
    for step in range(steps):
        slot = torch.tensor([3, -1, 0, 4 if step > steps // 2 else -1], dtype=torch.int32)
        accepted = torch.randint(-1, nodes, slot.shape, generator=draw, dtype=torch.int32)
        accepted = accepted.masked_fill(slot < 0, -1)
        for side in (theirs, truth):
            side.begin(slot)
        for layer in range(layers):
            mixed, ab = random(len(slot), nodes, wide), random(len(slot), nodes, 2 * value_heads)
            found, wanted = (side.verify(layer, mixed, ab)[slot >= 0] for side in (theirs, truth))
            worst = max(worst, _error(found, wanted))
        for side in (theirs, truth):
            side.commit(accepted)
    return worst


class _Side:
    """One of two policies that are given the same; also what its commit asks for.

    Args:
        make: the policy.
        heads, dims: of queries, keys and values.
        nodes: of every chain.
        state: [layers, SLOTS, HV, V, K], in the policy's type.
        gates: A_log and dt_bias by layer.
        device, kind: where it is, and the type of its gates.
    """

    def __init__(
        self,
        make: type[CommitPolicy],
        heads: tuple[int, ...],
        dims: tuple[int, ...],
        nodes: int,
        state: Tensor,
        gates: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
        kind: torch.dtype,
    ) -> None:
        self._heads, self._dims, self._nodes, self._device = heads, dims, nodes, device
        # The same tensors in every step, as a model's are: the kernel keeps rounded copies of them.
        self._gates = [tuple(x.to(device, kind) for x in pair) for pair in gates]
        shape = StateShape(
            layers=state.shape[0],
            slots=SLOTS,
            key_heads=heads[1],
            value_heads=heads[2],
            key_dim=dims[1],
            value_dim=dims[2],
            max_batch=4,
            max_nodes=nodes,
            state_dtype=state.dtype,
            activation_dtype=state.dtype,
            device=device,
        )
        self._policy = make(shape, state.to(device, copy=True))

    def begin(self, slot: Tensor) -> None:
        """A chain for every row; in padded ones of nothing."""
        slot = slot.to(self._device)
        batch, nodes = len(slot), self._nodes
        parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=self._device)
        self._tree = TreeBatch(
            torch.zeros(batch, nodes, dtype=torch.int64, device=self._device),
            parents.repeat(batch, 1),
            torch.where(slot >= 0, nodes, 0).int(),
            slot,
            torch.zeros(batch, dtype=torch.int32, device=self._device),
            0,
        )
        self._keys: list[Tensor] = []

    def verify(self, layer: int, mixed: Tensor, ab: Tensor) -> Tensor:
        """Outputs; of what a conv and a projection leave, which all inputs are columns of."""
        kind = self._policy.state.dtype
        mixed, ab = mixed.to(self._device, kind), ab.to(self._device, kind)
        parts = mixed.split([n * dim for n, dim in zip(self._heads, self._dims, strict=True)], -1)
        q, k, v = (
            part.unflatten(-1, (count, dim))
            for part, count, dim in zip(parts, self._heads, self._dims, strict=True)
        )
        a, b = ab.chunk(2, -1)
        self._keys.append(k)
        out = self._policy.verify(layer, self._tree, GdnInputs(q, k, v, a, b, *self._gates[layer]))
        return out.double().cpu()

    def commit(self, accepted: Tensor) -> None:
        """All layers of the step."""
        self._policy.commit(self._tree, accepted.to(self._device), self)  # type: ignore[arg-type]

    def path_keys(self, accepted: Tensor) -> Tensor:
        """Raw keys [layers, B, N, HK, K] of all nodes."""
        return torch.stack(self._keys)


def _error(found: Tensor, truth: Tensor) -> float:
    error = float((found - truth).norm() / truth.norm())
    return error if error == error else float("inf")
