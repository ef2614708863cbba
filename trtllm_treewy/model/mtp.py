"""The multi-token prediction module: drafts the token after the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .norm import RMSNorm
from .rotary import rotary_tables
from .steps import AttentionStep, StoringStep


class MultiTokenPredictor(nn.Module):
    """`norm(layers(fc([pre_fc_norm_embedding(e), pre_fc_norm_hidden(h)])))`.

    The entry of position t takes e, the embedding of token t+1, and h, the final-normed hidden
    state of position t, and yields a hidden state whose logits are of token t+2. A deeper draft
    feeds the module its own output as h, the drafted token as e, and position t+1. Attention runs
    over the module's own KV cache.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.rotary_dim, self.rope_theta = config.rotary_dim, config.rope_theta
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        """`embedded`, `hidden` [..., hidden], `positions` int64 [...] to [..., hidden]."""
        x, rotary = self._first_input(embedded, hidden, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, index, None, attention)
        return self.norm(x)

    def enter(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: StoringStep
    ) -> None:
        """Leaves in the cache what `forward` leaves there, and computes nothing else.

        Of the last layer these are keys and values, which need neither its attention nor its
        feed-forward part.
        """
        self._enter(embedded, hidden, positions, attention)

    def last(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: StoringStep,
        last: Tensor,
        attending: AttentionStep,
    ) -> Tensor:
        """Enters tokens, and gives what `forward` gives for some of them.

        Args:
            embedded, hidden, positions, attention: as for `forward`.
            last: int64 [B], places of those tokens among all.
            attending: the step of these alone, [B, 1], whose rows are in the cache already.

        Returns:
            [B, 1, hidden].
        """
        x = self._enter(embedded, hidden, positions, attention).flatten(0, -2)[last][:, None]
        some = positions.flatten()[last][:, None]
        rotary = rotary_tables(some, self.rotary_dim, self.rope_theta, x.dtype)
        return self.norm(self.layers[-1](x, rotary, len(self.layers) - 1, None, attending))

    def _enter(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: StoringStep
    ) -> Tensor:
        """Leaves all rows in the cache; the input of the last layer [..., hidden]."""
        x, rotary = self._first_input(embedded, hidden, positions)
        last: Any = self.layers[-1]
        for index, layer in enumerate(self.layers[:-1]):
            x = layer(x, rotary, index, None, attention)
        last.self_attn.store(last.input_layernorm(x), rotary, len(self.layers) - 1, attention)
        return x

    def _first_input(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What goes into the first layer, and the rotary tables."""
        pair = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(pair, dim=-1))
        return x, rotary_tables(positions, self.rotary_dim, self.rope_theta, x.dtype)
