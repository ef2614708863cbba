"""Parts of the launchers' structures, filled from the tensors they describe."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .rules import DTYPES


def set_tree(view: Any, parents: Tensor, num_slots: int) -> None:
    """Trees of parents [B, N]."""
    view.batch, view.max_nodes = parents.shape
    view.num_slots = num_slots


def set_state(view: Any, state: Tensor, key_heads: int) -> None:
    """A pool [L, slots, HV, V, K], or one layer's [slots, HV, V, K]."""
    view.dtype = DTYPES[state.dtype]
    view.key_heads = key_heads
    view.value_heads, view.value_dim, view.key_dim = state.shape[-3:]
    view.slot_stride = state.stride(-4)
    view.layers, view.layer_stride = 1, 0
    if state.dim() == 5:
        view.layers, view.layer_stride = state.shape[0], state.stride(0)


def set_stash(view: Any, u: Tensor, k: Tensor, g: Tensor) -> None:
    """Stash u [L, B, N, HV, V], k [L, B, N, HK, K] raw and g [L, B, N, HV]."""
    view.u_stride[:] = u.stride()[:4]
    view.k_stride[:] = k.stride()[:4]
    view.g_stride[:] = g.stride()[:3]
    view.k_dtype = DTYPES[k.dtype]
    view.k_normalized = 0
    view.u_dtype = DTYPES[u.dtype]


def set_history(view: Any, u: Tensor, k: Tensor, g: Tensor) -> None:
    """Histories of all layers [L, slots, H, ...], or of one [slots, H, ...]."""
    for stride, x, inner in ((view.u_stride, u, 3), (view.k_stride, k, 3), (view.g_stride, g, 2)):
        stride[0] = x.stride(0) if x.dim() > inner + 1 else 0
        stride[1] = x.stride(-inner - 1)
    view.capacity = u.shape[-3]
    view.u_dtype, view.k_dtype = DTYPES[u.dtype], DTYPES[k.dtype]


def set_folds(view: Any, folded: Tensor) -> None:
    """What verification has folded of histories: [L, slots, HV, P], or of one layer."""
    view.folded_stride[0] = folded.stride(0) if folded.dim() == 4 else 0
    view.folded_stride[1] = folded.stride(-3)


def set_weights(view: Any, weight: Tensor) -> None:
    """Weights of a conv [C, width], or of all layers' [L, C, width]."""
    view.dtype = DTYPES[weight.dtype]
    view.width = weight.shape[-1]


def set_packed(view: Any, slot: Tensor, tokens: int, num_slots: int) -> None:
    """Packed prompts, `tokens` in all, a slot each."""
    view.batch = slot.shape[0]
    view.tokens = tokens
    view.num_slots = num_slots
