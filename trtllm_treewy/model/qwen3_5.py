"""The Qwen3.5 text model: one definition, for running and for exporting.

Module names are the checkpoint's names, so a checkpoint loads without a mapping.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig
from .attention import GatedAttention
from .collectives import SINGLE_RANK, Collectives, embed
from .gated_delta_net import GatedDeltaNet
from .mlp import feed_forward
from .mtp import MultiTokenPredictor
from .norm import RMSNorm, compute_dtype
from .rotary import rotary_tables
from .steps import AttentionStep, GdnStep, StoringStep


class DecoderLayer(nn.Module):
    """Pre-norm residual block: a GDN or attention mixer, then a feed-forward block.

    Both yield partial sums where the model is divided; each is summed over ranks once.
    """

    def __init__(
        self, config: ModelConfig, layer_type: str, collectives: Collectives = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.collectives = collectives
        self.is_linear = layer_type == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = GatedAttention(config)
        self.mlp = feed_forward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        layer: int,
        gdn: GdnStep | None,
        attention: AttentionStep,
    ) -> Tensor:
        """`layer` counts layers of this one's kind; `gdn` may be None for an attention layer."""
        normed = self.input_layernorm(x)
        if self.is_linear:
            assert gdn is not None
            mixed = self.linear_attn(normed, layer, gdn)
        else:
            mixed = self.self_attn(normed, rotary, layer, attention)
        x = x + self.collectives.all_reduce(mixed)
        return x + self.collectives.all_reduce(self.mlp(self.post_attention_layernorm(x)))


class Qwen3_5Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, collectives: Collectives = SINGLE_RANK) -> None:
        super().__init__()
        self.config, self.collectives = config, collectives
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, collectives) for kind in config.layer_types
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        seen = {"linear_attention": 0, "full_attention": 0}
        self.layer_index: list[int] = []
        for kind in config.layer_types:
            self.layer_index.append(seen[kind])
            seen[kind] += 1

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of `token_ids` int64 [...]."""
        return embed(self.embed_tokens, token_ids, self.collectives)

    def forward(
        self, token_ids: Tensor, positions: Tensor, gdn: GdnStep, attention: AttentionStep
    ) -> Tensor:
        """`token_ids`, `positions` int64 [...] to final-normed hidden states [..., hidden]."""
        x = self.embed(token_ids)
        rotary = rotary_tables(positions, self.config.rotary_dim, self.config.rope_theta, x.dtype)
        for layer, index in zip(self.layers, self.layer_index, strict=True):
            x = layer(x, rotary, index, gdn, attention)
        return self.norm(x)


class Qwen3_5ForCausalLM(nn.Module):
    """The text model with its head, and the MTP module where the checkpoint has one.

    Args:
        config: sizes; of one rank's share where the model is divided (`export.sharding`).
        collectives: that rank's end of the group.
    """

    def __init__(self, config: ModelConfig, collectives: Collectives = SINGLE_RANK) -> None:
        super().__init__()
        self.config, self.collectives = config, collectives
        self.model = Qwen3_5Model(config, collectives)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp: MultiTokenPredictor | None = None
        if config.mtp_num_hidden_layers:
            layers = [
                DecoderLayer(config, "full_attention", collectives)
                for _ in range(config.mtp_num_hidden_layers)
            ]
            self.mtp = MultiTokenPredictor(config, layers)

    def forward(
        self, token_ids: Tensor, positions: Tensor, gdn: GdnStep, attention: AttentionStep
    ) -> Tensor:
        """Final-normed hidden states [..., hidden]; see `logits` for the head."""
        return self.model(token_ids, positions, gdn, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., hidden] to logits [..., vocab], float32 (float64 stays).

        They are of the whole vocabulary on every rank.
        """
        return self.head(hidden).to(compute_dtype(hidden))

    def head(self, hidden: Tensor) -> Tensor:
        """The same in the type of `hidden`, which is what the head computes."""
        tied = self.config.tie_word_embeddings
        weight = self.model.embed_tokens.weight if tied else self.lm_head.weight
        return self.collectives.all_gather(F.linear(hidden, weight))

    def draft(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        """Runs the MTP module; see `MultiTokenPredictor`. Returns hidden states for `logits`.

        Raises:
            ValueError: the model has no MTP module.
        """
        return self._module()(self.model.embed(token_ids), hidden, positions, attention)

    def draft_enter(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attention: StoringStep
    ) -> None:
        """Enters tokens into the MTP module's cache as `draft` does, of which nothing is asked.

        Raises:
            ValueError: the model has no MTP module.
        """
        self._module().enter(self.model.embed(token_ids), hidden, positions, attention)

    def draft_last(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: StoringStep,
        last: Tensor,
        attending: AttentionStep,
    ) -> Tensor:
        """Enters tokens as `draft` does, and gives its hidden states of some [B, 1, hidden] alone.

        See `MultiTokenPredictor.last`.

        Raises:
            ValueError: the model has no MTP module.
        """
        embedded = self.model.embed(token_ids)
        return self._module().last(embedded, hidden, positions, attention, last, attending)

    def _module(self) -> MultiTokenPredictor:
        if self.mtp is None:
            raise ValueError(
                "the model has no MTP module (mtp_num_hidden_layers is 0): it cannot draft"
            )
        return self.mtp
