"""The operators on CUDA: `torch.ops.treewy.*` calls the kernels of `libtreewy.so`.

`register()` adds a kernel for "cuda" to each operator that has one. What the kernels do not serve
is decided beforehand by `reason_for_reference`, from types and shapes alone, and goes to the torch
reference; an error of a kernel is raised, never covered up. Nothing here waits for the device:
wrong values in device tensors leave their rows alone, and commits count them (`error_count`).

A call's checks, and all of its C structure but the addresses, depend on the tensors' shapes,
strides, types and devices alone. They are worked out once for each such signature and kept, so
that a call in a running model fills in addresses and launches.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import cuda_library as lib
from . import op_checks
from .op_inputs import Commit, History, Projections, Stash, Trees

DTYPES = {
    torch.float32: lib.FLOAT32,
    torch.bfloat16: lib.BFLOAT16,
    torch.float16: lib.FLOAT16,
}
STATE_DTYPES = (torch.float32, torch.bfloat16)

# Calls that went to the reference, by operator and reason.
reference_calls: Counter[tuple[str, str]] = Counter()

_error_counters: dict[torch.device, Tensor] = {}


# ------------------------------------------------------------------ what the kernels serve


def reason_for_reference(
    *,
    state: Tensor | None = None,
    inputs: tuple[Tensor, ...] = (),
    gates: tuple[Tensor, ...] = (),
    float32: tuple[Tensor | None, ...] = (),
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
    * `float32`: parameters, stash and histories in float32, contiguous within a slot or node;
    * at most 128 nodes in a tree, conv widths from 2 to 8.

    Float64 in any of them therefore runs the reference.
    """
    for kind, tensors in (("activations", inputs), ("gates", gates), ("conv inputs", conv)):
        types = {x.dtype for x in tensors}
        if len(types) > 1 or not types <= DTYPES.keys():
            return f"{kind} in {', '.join(sorted(map(str, types)))}"
    if any(x is not None and x.dtype != torch.float32 for x in float32):
        return "parameters, stash or history not in float32"
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


def _history_reason(history: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """The part of the rule about histories u [.., H, HV, V], k [.., H, HK, K] and g [.., H, HV]."""
    for x, inner in zip(history, (3, 3, 2), strict=True):
        heads, dim = x.shape[-2:]
        wanted = (heads * dim, dim, 1)[-inner:]
        if x.stride()[-inner:] != wanted:
            return "history that is not contiguous within a slot"
    return None


VERIFY_KEY_DIMS = (64, 128, 256)
VERIFY_MAX_HISTORY = 64


def _verify_reason(q: Tensor, state: Tensor, nodes: int, history: History | None) -> str | None:
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
        if any(x.data_ptr() % 16 or x.stride(0) % 4 for x in (history.u, history.k)):
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
    total = rows * key_dim * state_bytes + (nodes + size) * key_dim * input_bytes
    total += max(weights, 2 * nodes * (12 + 4 * words)) + (node_blocks - 1) * rows * size * 4
    total += entries * (4 * key_dim + 8) + nodes * (24 + 4 * words) + 16
    return total


@lru_cache(maxsize=16)
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may have; every GPU that is served has 99 KiB."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


# ------------------------------------------------------------------ calls

MAX_KEPT_CALLS = 512


class _Call:
    """One launcher's structure for tensors of one signature.

    Attributes:
        reason: why the torch reference serves such tensors, or None.
        copies: positions of the tensors that have to be made contiguous first.
        params: the structure, without addresses.
    """

    def __init__(self, op: str, device: torch.device) -> None:
        self.launcher = f"treewy_{op}"
        self.device = device
        self.reason: str | None = None
        self.copies: tuple[int, ...] = ()
        self.params: Any = lib.LAUNCHERS[self.launcher]()
        self._address = ctypes.addressof(self.params)
        self._places: list[tuple[Any, str]] = []
        self._errors: Any = None

    def address(self, view: Any, *names: str) -> None:
        """The next tensors' addresses go into these fields of `view`."""
        self._places += [(view, name) for name in names]

    def count_errors(self, view: Any) -> None:
        """The device's error counter goes into the field `errors` of `view`."""
        self._errors = view

    def launch(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream, the tensors in the order that `address` was given."""
        for (view, name), x in zip(self._places, tensors, strict=True):
            setattr(view, name, None if x is None else x.data_ptr())
        if self._errors is not None:
            self._errors.errors = _errors(self.device)
        library = lib.load_library()
        function, device = library.launchers[self.launcher], self.device
        if device.type != "cuda":  # the kernels played on the host, in tests
            status = function(self._address, None)
        elif device.index == torch.cuda.current_device():
            status = function(self._address, torch.cuda.current_stream(device).cuda_stream)
        else:
            with torch.cuda.device(device):
                status = function(self._address, torch.cuda.current_stream(device).cuda_stream)
        if status:
            library.check(status)


class _Kept(threading.local):
    """The calls made so far, by signature; a structure is filled by one thread alone."""

    def __init__(self) -> None:
        self.calls: dict[Any, _Call] = {}


_kept = _Kept()


def _prepare(
    op: str,
    tensors: tuple[Tensor | None, ...],
    setup: Callable[..., None],
    *options: Any,
) -> tuple[_Call, tuple[Tensor | None, ...]]:
    """The call for these tensors, set up now if there was none like it, and what to launch it on.

    `setup(call, *tensors, *options)` checks the tensors and fills the structure; it raises
    ValueError for wrong ones.
    """
    key = (
        op,
        options,
        *[
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
            for x in tensors
        ],
    )
    call = _kept.calls.get(key)
    if call is None:
        first = tensors[0]
        assert first is not None
        call = _Call(op, first.device)
        setup(call, *tensors, *options)
        if len(_kept.calls) >= MAX_KEPT_CALLS:
            _kept.calls.clear()
        _kept.calls[key] = call
    if call.reason is None and call.copies:
        copied = list(tensors)
        for position in call.copies:
            x = copied[position]
            copied[position] = None if x is None else x.contiguous()
        return _prepare(op, tuple(copied), setup, *options)
    return call, tensors


def _reference(op: str, call: _Call, tensors: tuple[Tensor | None, ...]) -> Any:
    """The torch reference of an operator."""
    from . import ops

    reference_calls[op, str(call.reason)] += 1
    return getattr(ops, op)._init_fn(*tensors)


def _copies(
    tensors: Sequence[Tensor | None], *, whole: Sequence[int], rows: Sequence[int]
) -> tuple[int, ...]:
    """Positions of tensors that are not contiguous: wholly, or in their last dimension."""
    found = []
    for position in (*whole, *rows):
        x = tensors[position]
        if x is None:
            continue
        inner = x.stride(-1) == 1 or x.shape[-1] == 1
        if not (x.is_contiguous() if position in whole else inner):
            found.append(position)
    return tuple(found)


def _errors(device: torch.device) -> int | None:
    """Address of the device's error counter.

    None while a graph is captured before anything else ran: a counter that is made then would be
    set to zero by every replay.
    """
    counter = _error_counters.get(device)
    if counter is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        counter = _error_counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter.data_ptr()


def error_count(device: torch.device | str, *, reset: bool = False) -> int:
    """Rows that commits on the device could not move since it was last reset; waits for it.

    Such a row has its slot or accepted node out of range, parents that are not in topological
    order, or a path longer than its history; its state is as it was. Counted once by each commit
    operator.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    counter = _error_counters.get(device)
    if counter is None:
        return 0
    count = int(counter)
    if reset:
        counter.zero_()
    return count


# ------------------------------------------------------------------ parts of the structures


def _set_tree(view: Any, parents: Tensor, num_slots: int) -> None:
    view.batch, view.max_nodes = parents.shape
    view.num_slots = num_slots


def _set_state(view: Any, state: Tensor, key_heads: int) -> None:
    """A pool [L, slots, HV, V, K], or one layer's [slots, HV, V, K]."""
    view.dtype = DTYPES[state.dtype]
    view.key_heads = key_heads
    view.value_heads, view.value_dim, view.key_dim = state.shape[-3:]
    view.slot_stride = state.stride(-4)
    view.layers, view.layer_stride = 1, 0
    if state.dim() == 5:
        view.layers, view.layer_stride = state.shape[0], state.stride(0)


def _set_stash(view: Any, u: Tensor, k: Tensor, g: Tensor) -> None:
    view.u_stride[:] = u.stride()[:4]
    view.k_stride[:] = k.stride()[:4]
    view.g_stride[:] = g.stride()[:3]
    view.k_dtype = DTYPES[k.dtype]
    view.k_normalized = 0


def _set_history(view: Any, u: Tensor, k: Tensor, g: Tensor) -> None:
    """Histories of all layers [L, slots, H, ...], or of one [slots, H, ...]."""
    for stride, x, inner in ((view.u_stride, u, 3), (view.k_stride, k, 3), (view.g_stride, g, 2)):
        stride[0] = x.stride(0) if x.dim() > inner + 1 else 0
        stride[1] = x.stride(-inner - 1)
    view.capacity = u.shape[-3]


def _set_weights(view: Any, weight: Tensor) -> None:
    view.dtype = DTYPES[weight.dtype]
    view.width = weight.shape[1]


def _set_packed(view: Any, slot: Tensor, tokens: int, num_slots: int) -> None:
    view.batch = slot.shape[0]
    view.tokens = tokens
    view.num_slots = num_slots


# ------------------------------------------------------------------ verification


def tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    history_u: Tensor | None = None,
    history_k: Tensor | None = None,
    history_g: Tensor | None = None,
    history_len: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.tree_verify` by one launch."""
    projections = (q, k, v, a, b, A_log, dt_bias)
    rest = (slot, parents, num_nodes, history_u, history_k, history_g, history_len)
    tensors: tuple[Tensor | None, ...] = (*projections, state, *rest)
    call, tensors = _prepare("tree_verify", tensors, _setup_verify)
    if call.reason is not None:
        result: tuple[Tensor, Tensor, Tensor] = _reference("tree_verify", call, tensors)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    u = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    g = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    call.launch((*tensors, out, u, g))
    return out, u, g


def _setup_verify(call: _Call, *tensors: Any) -> None:
    q, k, v, a, b, A_log, dt_bias, state, slot, parents, num_nodes, *histories = tensors
    inputs, trees = Projections(*tensors[:7]), Trees(slot, parents, num_nodes)
    history = History.from_optional("tree_verify", *histories)
    inputs.check("tree_verify", "batch, N", state)
    trees.check("tree_verify", (q.shape[0], q.shape[1]), state.device)
    if history is not None:
        history.check("tree_verify", state, q.shape[2])
    call.reason = (
        reason_for_reference(
            state=state,
            inputs=(q, k, v),
            gates=(a, b),
            float32=(A_log, dt_bias, *histories[:3]),
            nodes=parents.shape[1],
        )
        or (None if history is None else _history_reason((history.u, history.k, history.g)))
        or _verify_reason(q, state, parents.shape[1], history)
    )
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(5, 6, 8, 9, 10, 14), rows=(0, 1, 2, 3, 4))
    params = call.params
    _set_tree(params.tree, parents, state.shape[0])
    _set_state(params.state, state, q.shape[2])
    if history is not None:
        _set_history(params.history, history.u, history.k, history.g)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", None), ("u", None)):
        strides = v.new_empty(v.shape, device="meta").stride() if x is None else x.stride()
        getattr(params, f"{name}_stride")[:] = strides[:3]
    params.a_stride[:] = a.stride()[:2]
    params.b_stride[:] = b.stride()[:2]
    params.g_stride[:] = v.shape[1] * v.shape[2], v.shape[2]
    params.dtype, params.gate_dtype = DTYPES[q.dtype], DTYPES[a.dtype]
    params.u_dtype = lib.FLOAT32
    call.address(params, "q", "k", "v", "a", "b", "A_log", "dt_bias")
    call.address(params.state, "data")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params.history, "u", "k", "g", "length")
    call.address(params, "out", "u", "g")


# ------------------------------------------------------------------ commits


def commit(
    state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
) -> None:
    """`ops.commit` by one launch for all layers."""
    tensors = (state, slot, parents, num_nodes, accepted, u, k, g)
    call, ready = _prepare("commit", tensors, _setup_commit)
    if call.reason is not None:
        _reference("commit", call, tensors)
    else:
        call.launch(ready)


def _setup_commit(call: _Call, *tensors: Any) -> None:
    state, slot, parents, num_nodes, accepted, u, k, g = tensors
    Commit(slot, parents, num_nodes, accepted).check("commit", state.device)
    Stash(u, k, g).check("commit", state, parents.shape)
    call.reason = reason_for_reference(
        state=state, inputs=(k,), float32=(u, g), nodes=parents.shape[1]
    )
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(1, 2, 3, 4), rows=(5, 6, 7))
    _fill_commit(call, call.params, state, parents, u, k, g)


def _fill_commit(
    call: _Call, view: Any, state: Tensor, parents: Tensor, u: Tensor, k: Tensor, g: Tensor
) -> None:
    """The part that both commits share; addresses of the pool, the goal and the stash."""
    _set_tree(view.tree, parents, state.shape[1])
    _set_state(view.state, state, k.shape[3])
    _set_stash(view.stash, u, k, g)
    call.count_errors(view)
    call.address(view.state, "data")
    call.address(view.tree, "slot", "parents", "num_nodes")
    call.address(view, "accepted")
    call.address(view.stash, "u", "k", "g")


def commit_deferred(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
) -> None:
    """`ops.commit_deferred` by three launches for all layers; a path too long is not moved."""
    pools, goal = (history_u, history_k, history_g, history_len), (slot, parents, num_nodes)
    tensors = (state, *pools, *goal, accepted, u, k, g)
    call, ready = _prepare("commit_deferred", tensors, _setup_deferred)
    if call.reason is not None:
        _reference("commit_deferred", call, tensors)
    else:
        call.launch((ready[0], *ready[5:], *ready[1:5]))


def _setup_deferred(call: _Call, *tensors: Any) -> None:
    op = "commit_deferred"
    state, *pools = tensors[:5]
    slot, parents, num_nodes, accepted, u, k, g = tensors[5:]
    Commit(slot, parents, num_nodes, accepted).check(op, state.device)
    Stash(u, k, g).check(op, state, parents.shape)
    History(*pools).check(op, state, k.shape[3])
    history = pools[0], pools[1], pools[2]
    call.reason = reason_for_reference(
        state=state, inputs=(k,), float32=(u, g, *history), nodes=parents.shape[1]
    ) or _history_reason(history)
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(5, 6, 7, 8), rows=(9, 10, 11))
    _fill_commit(call, call.params.commit, state, parents, u, k, g)
    _set_history(call.params.history, *history)
    call.address(call.params.history, "u", "k", "g", "length")


def flush_history(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_g: Tensor,
    history_len: Tensor,
    slot: Tensor,
) -> None:
    """`ops.flush_history` by two launches for all layers."""
    tensors = (state, history_u, history_k, history_g, history_len, slot)
    call, ready = _prepare("flush_history", tensors, _setup_flush)
    if call.reason is not None:
        _reference("flush_history", call, tensors)
    else:
        call.launch(ready)


def _setup_flush(call: _Call, *tensors: Any) -> None:
    from . import ops

    ops._check_flush(*tensors)
    state, history_u, history_k, history_g, history_len, slot = tensors
    history = history_u, history_k, history_g
    call.reason = reason_for_reference(state=state, float32=history) or _history_reason(history)
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(5,), rows=())
    params = call.params
    params.batch, params.num_slots = slot.shape[0], state.shape[1]
    _set_state(params.state, state, history_k.shape[3])
    _set_history(params.history, *history)
    call.count_errors(params)
    call.address(params.state, "data")
    call.address(params.history, "u", "k", "g", "length")
    call.address(params, "slot")


# ------------------------------------------------------------------ convolution


def tree_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.tree_conv` by one launch."""
    tensors: tuple[Tensor | None, ...] = (x, conv_state, slot, parents, num_nodes, weight, bias)
    call, tensors = _prepare("tree_conv", tensors, _setup_tree_conv)
    if call.reason is not None:
        result: Tensor = _reference("tree_conv", call, tensors)
        return result
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.launch((*tensors, y))
    return y


def _setup_tree_conv(call: _Call, *tensors: Any) -> None:
    from . import ops

    x, conv_state, slot, parents, num_nodes, weight, bias = tensors
    ops._check_tree_conv(x, conv_state, Trees(slot, parents, num_nodes), weight, bias)
    call.reason = reason_for_reference(
        conv=(x, conv_state),
        inputs=(weight,) if bias is None else (weight, bias),
        width=weight.shape[1],
        nodes=parents.shape[1],
    )
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(2, 3, 4, 5, 6), rows=(0,))
    params = call.params
    _set_tree(params.tree, parents, conv_state.shape[0])
    _set_weights(params.weights, weight)
    params.x_stride[:] = x.stride()[:2]
    params.y_stride[:] = x.shape[1] * x.shape[2], x.shape[2]
    params.state_stride[:] = conv_state.stride()[:2]
    params.dtype, params.channels = DTYPES[x.dtype], x.shape[2]
    call.address(params, "x", "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params.weights, "weight", "bias")
    call.address(params, "y")


def conv_commit(
    conv_state: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    accepted: Tensor,
    x: Tensor,
) -> None:
    """`ops.conv_commit` by one launch for all layers."""
    tensors = (conv_state, slot, parents, num_nodes, accepted, x)
    call, ready = _prepare("conv_commit", tensors, _setup_conv_commit)
    if call.reason is not None:
        _reference("conv_commit", call, tensors)
    else:
        call.launch(ready)


def _setup_conv_commit(call: _Call, *tensors: Any) -> None:
    from . import ops

    ops._check_conv_commit(*tensors)
    conv_state, _, parents, _, _, x = tensors
    width = conv_state.shape[-2] + 1
    call.reason = reason_for_reference(conv=(x, conv_state), width=width, nodes=parents.shape[1])
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(1, 2, 3, 4), rows=(5,))
    params = call.params
    _set_tree(params.tree, parents, conv_state.shape[1])
    params.x_stride[:] = x.stride()[:3]
    params.state_stride[:] = conv_state.stride()[:3]
    params.dtype, params.width = DTYPES[x.dtype], width
    params.layers, params.channels = conv_state.shape[0], conv_state.shape[3]
    call.count_errors(params)
    call.address(params, "conv_state")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "x")


def prefill_conv(
    x: Tensor,
    conv_state: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`ops.prefill_conv` by two launches: outputs, then windows."""
    tensors: tuple[Tensor | None, ...] = (x, conv_state, slot, cu_seqlens, weight, bias)
    call, tensors = _prepare("prefill_conv", tensors, _setup_prefill_conv)
    if call.reason is not None:
        result: Tensor = _reference("prefill_conv", call, tensors)
        return result
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.launch((*tensors, y))
    return y


def _setup_prefill_conv(call: _Call, *tensors: Any) -> None:
    from . import ops

    x, conv_state, slot, cu_seqlens, weight, bias = tensors
    op_checks.expect_dims("prefill_conv", "x", x, "tokens, C")
    ops._check_conv("prefill_conv", x, conv_state, weight, bias)
    ops._check_packed("prefill_conv", slot, cu_seqlens, x.device)
    call.reason = reason_for_reference(
        conv=(x, conv_state),
        inputs=(weight,) if bias is None else (weight, bias),
        width=weight.shape[1],
    )
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(2, 3, 4, 5), rows=(0,))
    params = call.params
    _set_packed(params.packed, slot, x.shape[0], conv_state.shape[0])
    _set_weights(params.weights, weight)
    params.x_stride, params.y_stride = x.stride(0), x.shape[1]
    params.state_stride[:] = conv_state.stride()[:2]
    params.dtype, params.channels = DTYPES[x.dtype], x.shape[1]
    call.address(params, "x", "conv_state")
    call.address(params.packed, "slot", "cu_seqlens")
    call.address(params.weights, "weight", "bias")
    call.address(params, "y")


# ------------------------------------------------------------------ prefill


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """`ops.prefill` by one launch; slots and lengths are not read on the host."""
    tensors: tuple[Tensor | None, ...]
    tensors = (q, k, v, a, b, A_log, dt_bias, state, slot, cu_seqlens)
    call, tensors = _prepare("prefill", tensors, _setup_prefill)
    if call.reason is not None:
        result: Tensor = _reference("prefill", call, tensors)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    call.launch((*tensors, out))
    return out


def _setup_prefill(call: _Call, *tensors: Any) -> None:
    from . import ops

    q, k, v, a, b, A_log, dt_bias, state, slot, cu_seqlens = tensors
    Projections(*tensors[:7]).check("prefill", "tokens", state)
    ops._check_packed("prefill", slot, cu_seqlens, state.device)
    call.reason = reason_for_reference(
        state=state, inputs=(q, k, v), gates=(a, b), float32=(A_log, dt_bias)
    )
    if call.reason is not None:
        return
    call.copies = _copies(tensors, whole=(5, 6, 8, 9), rows=(0, 1, 2, 3, 4))
    params = call.params
    _set_packed(params.packed, slot, q.shape[0], state.shape[0])
    _set_state(params.state, state, q.shape[1])
    params.q_stride[:] = q.stride()[:2]
    params.k_stride[:] = k.stride()[:2]
    params.v_stride[:] = v.stride()[:2]
    params.a_stride, params.b_stride = a.stride(0), b.stride(0)
    params.out_stride[:] = v.shape[1] * v.shape[2], v.shape[2]
    params.dtype, params.gate_dtype = DTYPES[q.dtype], DTYPES[a.dtype]
    call.address(params, "q", "k", "v", "a", "b", "A_log", "dt_bias")
    call.address(params.state, "data")
    call.address(params.packed, "slot", "cu_seqlens")
    call.address(params, "out")


# ------------------------------------------------------------------ acceptance


def greedy_accept(
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `runtime.acceptance.greedy_accept` computes, by one launch.

    Args:
        token_ids, target_ids: int64 [B, N].
        slot, parents, num_nodes: int32, see `ops`; slot -1 rows accept nothing.
        max_path: columns of `path` and the longest path accepted; N where not given.

    Returns:
        accepted int32 [B], num_accepted int32 [B], path int64 [B, P] and bonus_ids int64 [B].

    Raises:
        ValueError: for wrong shapes or types, or trees of more nodes than the kernels take.
    """
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    call, ready = _prepare("greedy_accept", tensors, _setup_greedy, max_path)
    batch, device = parents.shape[0], parents.device
    columns = max(call.params.max_path, 0)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    path = torch.empty((batch, columns), dtype=torch.int64, device=device)
    bonus_ids = torch.empty(batch, dtype=torch.int64, device=device)
    call.launch((*ready, accepted, num_accepted, path, bonus_ids))
    return accepted, num_accepted, path, bonus_ids


def _setup_greedy(
    call: _Call,
    token_ids: Tensor,
    target_ids: Tensor,
    slot: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_path: int | None,
) -> None:
    op = "greedy_accept"
    op_checks.expect_dims(op, "parents", parents, "batch, N")
    shape, device = (parents.shape[0], parents.shape[1]), parents.device
    Trees(slot, parents, num_nodes).check(op, shape, device)
    for name, ids in (("token_ids", token_ids), ("target_ids", target_ids)):
        op_checks.expect(op, name, ids, "batch, N", shape, dtypes=(torch.int64,), device=device)
    tensors = (token_ids, target_ids, slot, parents, num_nodes)
    call.copies = _copies(tensors, whole=(2, 3, 4), rows=(0, 1))
    params = call.params
    _set_tree(params.tree, parents, 2**31)  # any slot but -1 is one
    params.target_stride, params.token_stride = target_ids.stride(0), token_ids.stride(0)
    params.max_path = shape[1] if max_path is None else max_path
    call.address(params, "token_ids", "target_ids")
    call.address(params.tree, "slot", "parents", "num_nodes")
    call.address(params, "accepted", "num_accepted", "path", "bonus_ids")


# ------------------------------------------------------------------ registration

KERNELS: dict[str, Callable[..., Any]] = {
    "tree_verify": tree_verify,
    "commit": commit,
    "commit_deferred": commit_deferred,
    "flush_history": flush_history,
    "tree_conv": tree_conv,
    "conv_commit": conv_commit,
    "prefill_conv": prefill_conv,
    "prefill": prefill,
}


def register() -> bool:
    """Add the kernels to the operators, if the library's file is there; called by `ops`.

    The library is loaded by the first call on a GPU, which says so if it is not usable.

    Returns:
        Whether the kernels serve CUDA tensors; if not, the torch reference does.
    """
    from . import ops

    if lib.find_library() is None:
        return False
    for name, kernel in KERNELS.items():
        getattr(ops, name).register_kernel("cuda", kernel)
    return True
