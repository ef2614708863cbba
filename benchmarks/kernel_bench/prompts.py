"""Times of prefill: prompts packed one after the other, one layer a call."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_treewy import cuda_library

from .bench import Bench
from .cases import Case
from .layer import CODES, Layer, new_pool, set_strides

CALLS = 2


class Packed:
    """Prompts of one length.

    Attributes:
        tokens: of all prompts.
        cu_seqlens: int32 [B + 1].
    """

    def __init__(self, batch: int, length: int, num_slots: int, device: str) -> None:
        self.tokens, self._batch, self._num_slots = batch * length, batch, num_slots
        ends = torch.arange(batch + 1, dtype=torch.int32) * length
        self.cu_seqlens = ends.to(device)

    def params(self, slot: Tensor) -> cuda_library.Packed:
        return cuda_library.Packed(
            batch=self._batch,
            tokens=self.tokens,
            num_slots=self._num_slots,
            slot=slot.data_ptr(),
            cu_seqlens=self.cu_seqlens.data_ptr(),
        )


def time_prefill(bench: Bench, case: Case) -> float:
    """`case.nodes` tokens a prompt, into states of which a call finds others than the last."""
    pool = new_pool(bench.dims, case.state, bench.slots, bench.device)
    packed = Packed(case.batch, case.nodes, bench.slots, bench.device)
    tokens = Layer(bench.dims, "chain", packed.tokens, 1, pool, stash="none")
    drawn = bench.draw_slots(case.batch, CALLS)
    calls = []
    for slot in drawn.slot:
        params = cuda_library.PrefillParams(packed=packed.params(slot), state=tokens.states(0))
        for name in ("q", "k", "v", "a", "b", "out"):
            tensor = getattr(tokens, name)[0]
            setattr(params, name, tensor.data_ptr())
            if name in ("a", "b"):
                setattr(params, f"{name}_stride", tensor.stride(0))
            else:
                set_strides(params, f"{name}_stride", tensor)
        params.A_log, params.dt_bias = tokens.A_log.data_ptr(), tokens.dt_bias.data_ptr()
        params.dtype = params.gate_dtype = CODES[torch.bfloat16]
        calls.append(bench.call("treewy_prefill", params))
    return bench.clock.us(calls, drawn.draw)
