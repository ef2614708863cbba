"""The recurrence over prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..op_inputs import Projections
from .call import Call, call_reference, find_copies, prepare
from .fields import set_packed, set_state
from .rules import DTYPES, reason_for_reference


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
    call, tensors = prepare("prefill", tensors, _setup_prefill)
    if call.reason is not None:
        result: Tensor = call_reference("prefill", call, tensors)
        return result
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    call.launch((*tensors, out))
    return out


def _setup_prefill(call: Call, *tensors: Any) -> None:
    from .. import ops

    q, k, v, a, b, A_log, dt_bias, state, slot, cu_seqlens = tensors
    Projections(*tensors[:7]).check("prefill", "tokens", state)
    ops._check_packed("prefill", slot, cu_seqlens, state.device)
    call.reason = reason_for_reference(
        state=state, inputs=(q, k, v), gates=(a, b), float32=(A_log, dt_bias)
    )
    if call.reason is not None:
        return
    call.copies = find_copies(tensors, whole=(5, 6, 8, 9), rows=(0, 1, 2, 3, 4))
    params = call.params
    set_packed(params.packed, slot, q.shape[0], state.shape[0])
    set_state(params.state, state, q.shape[1])
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
