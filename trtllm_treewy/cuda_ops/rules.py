"""What the kernels serve, decided from types and shapes alone."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import cuda_library as lib
from ..op_inputs import History

DTYPES = {
    torch.float32: lib.FLOAT32,
    torch.bfloat16: lib.BFLOAT16,
    torch.float16: lib.FLOAT16,
}
STATE_DTYPES = (torch.float32, torch.bfloat16)


def reason_for_reference(
    *,
    state: Tensor | None = None,
    inputs: tuple[Tensor, ...] = (),
    gates: tuple[Tensor, ...] = (),
    float32: tuple[Tensor | None, ...] = (),
    u: Tensor | None = None,
    conv: tuple[Tensor, ...] = (),
    width: int = 4,
    nodes: int = 1,
) -> str | None:
    """Why a call is served by the torch reference, or None where a kernel serves it.

    The whole rule is here. The kernels take:

    * activations in float32, bfloat16 or float16, all `inputs` of a call in one type, both `gates`
      in one type, a conv's x and conv state (`conv`) in one type;
    * recurrent state in float32 or bfloat16, [HV, V, K] of a slot contiguous and at 16-byte
      addresses, K and V multiples of 8 and at most 256;
    * `float32`: parameters and log decays in float32, contiguous within a slot or node;
    * pseudo-values `u` in float32, or in bfloat16 beside a bfloat16 state;
    * at most 128 nodes in a tree, conv widths from 2 to 8.

    Float64 in any of them therefore runs the reference.
    """
    for kind, tensors in (("activations", inputs), ("gates", gates), ("conv inputs", conv)):
        types = {x.dtype for x in tensors}
        if len(types) > 1 or not types <= DTYPES.keys():
            return f"{kind} in {', '.join(sorted(map(str, types)))}"
    if any(x is not None and x.dtype != torch.float32 for x in float32):
        return "parameters, stash or history not in float32"
    if u is not None and u.dtype != torch.float32:
        beside = None if state is None else state.dtype
        if (u.dtype, beside) != (torch.bfloat16, torch.bfloat16):
            return f"pseudo-values in {u.dtype}"
    if nodes > lib.MAX_NODES:
        return f"more than {lib.MAX_NODES} nodes"
    if not 2 <= width <= lib.MAX_CONV_WIDTH:
        return f"conv width {width}"
    if any(x.stride(-1) != 1 for x in conv[1:]):
        return "conv state with strided channels"
    return None if state is None else _state_reason(state)


def _state_reason(state: Tensor) -> str | None:
    """The part of the rule about a pool [.., slots, HV, V, K]."""
    if state.dtype not in STATE_DTYPES:
        return f"state in {state.dtype}"
    dim, key_dim = state.shape[-2:]
    if dim % 8 or key_dim % 8 or max(dim, key_dim) > lib.MAX_HEAD_DIM:
        return f"head dims K = {key_dim}, V = {dim}"
    strides = state.stride()
    if strides[-3:] != (dim * key_dim, key_dim, 1):
        return "state that is not contiguous within a slot"
    per_vector = 16 // state.element_size()
    if any(stride % per_vector for stride in strides[:-3]) or state.data_ptr() % 16:
        return "state that is not at 16-byte addresses"
    return None


def history_reason(history: tuple[Tensor, Tensor, Tensor], state: Tensor) -> str | None:
    """The part of the rule about histories u [.., H, HV, V], k [.., H, HK, K] and g [.., H, HV].

    u in the types of pseudo-values, k in those of activations, g in float32.
    """
    u, k, _ = history
    reason = reason_for_reference(state=state, inputs=(k,), u=u)
    if reason is not None:
        return f"a history of {reason}"
    for x, inner in zip(history, (3, 3, 2), strict=True):
        heads, dim = x.shape[-2:]
        wanted = (heads * dim, dim, 1)[-inner:]
        if x.stride()[-inner:] != wanted:
            return "history that is not contiguous within a slot"
    return None


VERIFY_KEY_DIMS = (64, 128, 256)
VERIFY_MAX_HISTORY = 64


def verify_reason(q: Tensor, state: Tensor, nodes: int, history: History | None) -> str | None:
    """The part of the rule about verification, whose kernel is made for fewer shapes.

    K is 64, 128 or 256, V a multiple of 64, a history holds at most 64 entries at 16-byte
    addresses, and keys, state tile and weights of a block fit the GPU's shared memory.
    """
    dim, key_dim = state.shape[-2:]
    if key_dim not in VERIFY_KEY_DIMS or dim % 64:
        return f"head dims K = {key_dim}, V = {dim}"
    entries = 0
    if history is not None:
        entries = history.u.shape[-3]
        if entries > VERIFY_MAX_HISTORY:
            return f"history of {entries} entries"
        if history.keeps_raw_keys and history.k.dtype != q.dtype:
            return f"a history of keys in {history.k.dtype} beside {q.dtype}"
        pools = history.u, history.k
        if any(x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16 for x in pools):
            return "history that is not at 16-byte addresses"
    bytes_of_block = verify_shared_bytes(
        key_dim, nodes, entries, q.element_size(), state.element_size()
    )
    if bytes_of_block > _shared_bytes(state.device):
        return f"{nodes} nodes with K = {key_dim} in {q.dtype}, {bytes_of_block} bytes a block"
    return None


def verify_shared_bytes(
    key_dim: int, nodes: int, entries: int, input_bytes: int, state_bytes: int
) -> int:
    """Shared memory of a verify block with the smallest tile, as `verify_layout` has it in C++.

    Args:
        key_dim: K.
        nodes: N.
        entries: of a history, 0 without one.
        input_bytes, state_bytes: of an element of q and of the state.
    """
    rows, size = 64, 16  # of V, and nodes that are solved at a time
    node_blocks, history_blocks = -(-nodes // size), -(-entries // size)
    nodes, entries = node_blocks * size, history_blocks * size
    words = -(-nodes // 32)
    terms = 3 if 4 in (input_bytes, state_bytes) else 2
    weights = (history_blocks + node_blocks) * 2 * terms * 512
    queries = size * key_dim * input_bytes
    if node_blocks == 1 and not entries and weights <= queries:
        weights = 0  # in the place of the queries
    total = rows * key_dim * state_bytes + nodes * key_dim * input_bytes + queries
    total += min(node_blocks, 2) * size * rows * input_bytes + weights + 512
    total += (node_blocks - 1) * terms * rows * size * 2
    total += entries * (4 * key_dim + 8) + nodes * (36 + 4 * words)
    return total + -(-node_blocks // 4) * 16 + 16


@lru_cache(maxsize=16)
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may have; every GPU that is served has 99 KiB."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))
