"""flash-linear-attention's fused recurrent kernel: chains, float32 state, no state written.

Read in fla-core 0.6.0, `fla/ops/gated_delta_rule/fused_recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..layer import Layer
from .peer import Peer, contiguous_projections


class FlashLinearAttention(Peer):
    """`fused_recurrent_gated_delta_rule`, gates inside, states [B, HV, V, K].

    It takes the states of the batch one after the other and not by slot: a call gets another
    stretch of the pool than the call before, and the cache is flushed before a replay.
    """

    name = "fla"
    distributions = ("fla-core", "flash-linear-attention")
    state = "fp32"
    shapes = (("chain", 4), ("chain", 16))
    quick_shapes = (("chain", 16),)
    draws_slots = False

    def load(self) -> None:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        self._kernel = fused_recurrent_gated_delta_rule

    def calls(self, layer: Layer, slots: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        q, k, v, a, b = contiguous_projections(layer)
        stretches = layer.pool.shape[1] // layer.batch
        starts = [index % stretches * layer.batch for index in range(len(slots))]
        call = partial(
            self._kernel,
            q,
            k,
            v,
            g=a,
            beta=b,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        states = [layer.pool[0, start : start + layer.batch] for start in starts]
        return [partial(_output_of, call, initial_state=state) for state in states]


def _output_of(call: Callable[..., tuple[Tensor, Tensor | None]], **more: Tensor) -> Tensor:
    """Of an output and a final state, which is not asked for."""
    return call(**more)[0]
