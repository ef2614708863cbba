"""Buffers of verification and commit, as a conv leaves them, and the structures that name them."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy import cuda_library

from .cases import Dims, parents_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CODES = {torch.float32: cuda_library.FLOAT32, torch.bfloat16: cuda_library.BFLOAT16}


def new_pool(
    dims: Dims, state: str, slots: int, device: str, *, layers: int = 1, seed: int = 0
) -> Tensor:
    """Random states [layers, slots, HV, V, K]."""
    shape = (layers, slots, dims.value_heads, dims.value_dim, dims.key_dim)
    gen = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(shape, dtype=DTYPES[state], device=device).normal_(0.0, 0.3, generator=gen)


def set_strides(params: object, name: str, tensor: Tensor) -> None:
    """The leading strides of a tensor, as many as the structure's field holds."""
    strides = getattr(params, name)
    strides[:] = tensor.stride()[: len(strides)]


class Trees:
    """Trees of one shape on the device.

    Attributes:
        parents: int32 [B, N].
        num_nodes: int32 [B].
    """

    def __init__(self, topology: str, nodes: int, batch: int, num_slots: int, device: str) -> None:
        self.nodes, self.batch, self.num_slots, self.device = nodes, batch, num_slots, device
        self._parents = parents_of(topology, nodes)
        parents = torch.tensor(self._parents, dtype=torch.int32)
        self.parents = parents.to(device).expand(batch, -1).contiguous()
        self.num_nodes = torch.full_like(self.parents[:, 0], nodes)

    def params(self, slot: Tensor) -> cuda_library.Tree:
        """The trees over these slots, int32 [B]."""
        return cuda_library.Tree(
            batch=self.batch,
            max_nodes=self.nodes,
            num_slots=self.num_slots,
            slot=slot.data_ptr(),
            parents=self.parents.data_ptr(),
            num_nodes=self.num_nodes.data_ptr(),
        )

    def at_depth(self, path: int) -> Tensor:
        """Of every row the first node whose path has that many nodes, int32 [B].

        Raises:
            ValueError: no path is as long.
        """
        lengths: list[int] = []
        for parent in self._parents:
            lengths.append(lengths[parent] + 1 if parent >= 0 else 1)
        if path not in lengths:
            raise ValueError(f"no path of {path} nodes, the longest has {max(lengths)}")
        return torch.full_like(self.num_nodes, lengths.index(path))


class Layer:
    """A batch of trees: projections, the pool of states, outputs, the stash of all layers.

    Projections are of one layer; only the keys, which the commit reads, are kept for every layer of
    the pool. Gates' constants are exact in bfloat16, for peers that read them so.

    Attributes:
        q, k [B, N, HK, K], v [B, N, HV, V], a, b [B, N, HV]: views of what projections and conv
            write; k is that of the first layer.
        A_log, dt_bias: float32 [HV].
        pool: [L, slots, HV, V, K].
        trees: the batch's.
        out: [B, N, HV, V].
        keys: [L, B, N, HK, K].
        u: [L, B, N, HV, V] in the stash's type, or None where none is kept.
        g: float32 [L, B, N, HV].
    """

    def __init__(
        self,
        dims: Dims,
        topology: str,
        nodes: int,
        batch: int,
        pool: Tensor,
        *,
        stash: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.dims, self.nodes, self.batch, self.pool, self.stash = dims, nodes, batch, pool, stash
        self.device = str(pool.device)
        self._gen = torch.Generator(device=pool.device).manual_seed(seed)
        heads = (dims.key_heads, dims.key_heads, dims.value_heads)
        widths = (dims.key_dim, dims.key_dim, dims.value_dim)
        qkv = self._draw(batch, nodes, dims.conv_dim)
        parts = qkv.split([h * w for h, w in zip(heads, widths, strict=True)], -1)
        shaped = [x.unflatten(-1, hw) for x, *hw in zip(parts, heads, widths, strict=True)]
        self.q, self.k, self.v = shaped
        self.a, self.b = self._draw(batch, nodes, 2 * dims.value_heads).split(dims.value_heads, -1)
        self._set_constants()
        self.trees = Trees(topology, nodes, batch, pool.shape[1], self.device)
        self._set_results()

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._gen, device=self.device).bfloat16()

    def _set_constants(self) -> None:
        a_log = torch.empty(self.dims.value_heads, device=self.device)
        self.A_log = a_log.uniform_(-3.0, 1.0, generator=self._gen).bfloat16().float()
        self.dt_bias = self._draw(self.dims.value_heads).float()

    def _set_results(self) -> None:
        dims, layers = self.dims, self.pool.shape[0]
        shape = (layers, self.batch, self.nodes, dims.value_heads)
        self.out = torch.empty(*shape[1:], dims.value_dim, dtype=torch.bfloat16, device=self.device)
        self.u = None
        if self.stash in DTYPES:
            self.u = torch.zeros(
                *shape, dims.value_dim, dtype=DTYPES[self.stash], device=self.device
            )
        self.g = torch.zeros(*shape, device=self.device)
        self.keys = self.k[None] if layers == 1 else self._draw(layers, *self.k.shape)

    def states(self, layer: int | None = None) -> cuda_library.StatePool:
        """The pool of one layer, or of all."""
        pool = self.pool if layer is None else self.pool[layer : layer + 1]
        return cuda_library.StatePool(
            data=pool.data_ptr(),
            layer_stride=pool.stride(0),
            slot_stride=pool.stride(1),
            dtype=CODES[pool.dtype],
            layers=pool.shape[0],
            key_heads=self.dims.key_heads,
            value_heads=self.dims.value_heads,
            key_dim=self.dims.key_dim,
            value_dim=self.dims.value_dim,
        )

    def verify(self, slot: Tensor, layer: int = 0, tile: int = 0) -> cuda_library.TreeVerifyParams:
        """Parameters of a verification of one layer."""
        params = cuda_library.TreeVerifyParams(
            tree=self.trees.params(slot), state=self.states(layer)
        )
        tensors = {name: getattr(self, name) for name in ("q", "v", "a", "b", "out")}
        tensors["k"] = self.keys[layer]
        if self.u is not None:  # without a stash neither is written
            tensors |= {"u": self.u[layer], "g": self.g[layer]}
        for name, tensor in tensors.items():
            setattr(params, name, tensor.data_ptr())
            set_strides(params, f"{name}_stride", tensor)
        params.A_log, params.dt_bias = self.A_log.data_ptr(), self.dt_bias.data_ptr()
        params.dtype = params.gate_dtype = CODES[torch.bfloat16]
        params.u_dtype = CODES[torch.float32 if self.u is None else self.u.dtype]
        params.tile = tile
        return params

    def stashed(self) -> cuda_library.Stash:
        """What a commit of all layers reads.

        Raises:
            ValueError: no pseudo-values are kept.
        """
        if self.u is None:
            raise ValueError("no pseudo-values are kept")
        stash = cuda_library.Stash(
            u=self.u.data_ptr(), k=self.keys.data_ptr(), g=self.g.data_ptr(), k_normalized=0
        )
        stash.k_dtype = CODES[self.keys.dtype]
        stash.u_dtype = CODES[self.u.dtype]
        for name, tensor in (("u", self.u), ("k", self.keys), ("g", self.g)):
            set_strides(stash, f"{name}_stride", tensor)
        return stash
