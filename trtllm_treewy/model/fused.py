"""The same model in few launches, for a GPU.

A decoding step is as long as its kernels in a row: at batch 1 most are so short that the time goes
into their number. So the weights of one input are joined into one product, each residual sum is
taken together with the norm that follows it (the next layer's too), and what lies between the
products of an attention layer or of a mixture of experts is a kernel or two.

What is computed is said by the modules beside this one, and every value is rounded where theirs
are. This is another way to run them: they keep the weights, under their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import triton_ops
from .attention import GatedAttention
from .gated_delta_net import GatedDeltaNet
from .joined import join
from .mlp import MLP, SparseMoE
from .mtp import MultiTokenPredictor
from .norm import RMSNorm
from .qwen3_5 import DecoderLayer, Qwen3_5ForCausalLM
from .rotary import rotary_frequencies
from .steps import AttentionStep, GdnStep, PackedAttentionStep, PackedHeads, StoringStep

Sums = tuple[Tensor, Tensor]  # the residual stream [T, hidden], and its norm


def add_norm(x: Tensor, y: Tensor, norm: RMSNorm) -> Sums:
    """`x + y` and the norm of it."""
    from ..triton_ops.norm import add_rms_norm

    return add_rms_norm(x, y, norm.weight, norm.eps)


class FusedGdn:
    """`GatedDeltaNet` with one product for queries, keys, values and gates."""

    def __init__(self, module: GatedDeltaNet) -> None:
        self._module = module
        parts = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        self._weight = join([part.weight for part in parts])
        self._sizes = [part.out_features for part in parts]

    def __call__(self, x: Tensor, layer: int, step: GdnStep) -> Tensor:
        m = self._module
        projected = F.linear(x, self._weight)
        qkv, z, b, a = projected[..., : sum(self._sizes)].split(self._sizes, -1)
        mixed = step.conv(layer, qkv, m.conv1d.weight.squeeze(1))
        q, k, v = mixed.split(m.splits, dim=-1)
        out = step.delta_rule(
            layer,
            q.unflatten(-1, (m.num_k_heads, m.head_k_dim)),
            k.unflatten(-1, (m.num_k_heads, m.head_k_dim)),
            v.unflatten(-1, (m.num_v_heads, m.head_v_dim)),
            a,
            b,
            m.A_log,
            m.dt_bias,
        )
        gate = z.unflatten(-1, (m.num_v_heads, m.head_v_dim))
        return m.out_proj(m.norm(out, gate).flatten(-2))


class FusedAttention:
    """`GatedAttention` with one product in front of the step, which does the rest."""

    def __init__(self, module: GatedAttention, frequencies: Tensor) -> None:
        self._module, self._frequencies = module, frequencies
        parts = (module.q_proj, module.k_proj, module.v_proj)
        self._weight = join([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = join(biases) if biases else None

    def __call__(
        self, x: Tensor, positions: Tensor, layer: int, step: PackedAttentionStep
    ) -> Tensor:
        return self.attend(self.heads(x, positions), layer, step)

    def attend(self, heads: PackedHeads, layer: int, step: PackedAttentionStep) -> Tensor:
        """What lies behind the product of `heads`."""
        m = self._module
        return m.o_proj(step.attend_packed(layer, heads, m.scale).flatten(-2))

    def heads(self, x: Tensor, positions: Tensor) -> PackedHeads:
        """The one product of `x` [..., hidden]."""
        m = self._module
        return PackedHeads(
            F.linear(x, self._weight, self._bias),
            m.num_heads,
            positions,
            self._frequencies,
            (m.q_norm.weight, m.q_norm.eps),
            (m.k_norm.weight, m.k_norm.eps),
        )


class FusedMLP:
    """`MLP` with one product for gate and up; the sum and the norm behind it are one launch."""

    def __init__(self, layer: DecoderLayer, module: MLP) -> None:
        self._layer, self._module = layer, module
        self._weight = join([module.gate_proj.weight, module.up_proj.weight])

    def __call__(self, x: Tensor, normed: Tensor, norm: RMSNorm) -> Sums:
        from ..triton_ops.elementwise import silu_mul

        inner = self._module.gate_proj.out_features
        gate, up = F.linear(normed, self._weight)[:, : 2 * inner].chunk(2, -1)
        out = self._module.down_proj(silu_mul(gate, up))
        return add_norm(x, self._layer.collectives.all_reduce(out), norm)


class FusedMoE:
    """`SparseMoE` in four launches for a few tokens, and in a few more for others.

    The router, the shared expert's gate and the shared expert's first product have one matrix. Few
    tokens take its first rows alone: the shared expert is then one of the experts.
    """

    def __init__(self, layer: DecoderLayer, module: SparseMoE) -> None:
        self._layer, self._module = layer, module
        shared = module.shared_expert
        routers = [module.gate.weight, module.shared_expert_gate.weight]
        self._routers = join(routers)
        self._gate_up = join([shared.gate_proj.weight, shared.up_proj.weight])
        self._inner = shared.gate_proj.out_features
        self._experts = module.gate.weight.shape[0]

    def __call__(self, x: Tensor, normed: Tensor, norm: RMSNorm) -> Sums:
        from ..triton_ops import moe
        from ..triton_ops.norm import add_rms_norm

        m = self._module
        logits = F.linear(normed, self._routers)
        gate = logits[:, self._experts]
        weights, experts = moe.route(logits[:, : self._experts], m.gate.top_k, normed.dtype)
        routed, shared = self._run(normed, weights, experts)
        if self._layer.collectives.ranks == 1:
            return add_rms_norm(x, routed, norm.weight, norm.eps, shared, gate)
        from ..triton_ops.elementwise import mix

        out = mix(routed, shared, gate[:, None])
        return add_norm(x, self._layer.collectives.all_reduce(out), norm)

    def _run(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted experts [T, top_k, hidden], and the shared one [T, hidden] as it is."""
        from ..triton_ops import elementwise, moe_few

        m, shared = self._module, self._module.shared_expert
        if moe_few.takes(experts.numel()):
            out = moe_few.run_few_experts(
                x,
                weights,
                experts,
                m.experts.gate_up_proj,
                m.experts.down_proj,
                self._gate_up[: 2 * self._inner],
                shared.down_proj.weight,
            )
            return out[:, :-1], out[:, -1]
        gate, up = F.linear(x, self._gate_up)[:, : 2 * self._inner].chunk(2, -1)
        own = shared.down_proj(elementwise.silu_mul(gate, up))
        return m.experts.each(x, weights, experts), own


class FusedLayer:
    """`DecoderLayer` between two norms: that of its input is taken where the input is summed."""

    def __init__(self, module: DecoderLayer, frequencies: Tensor) -> None:
        self._module = module
        self.mixer: FusedGdn | FusedAttention
        if module.is_linear:
            self.mixer = FusedGdn(module.linear_attn)
        else:
            self.mixer = FusedAttention(module.self_attn, frequencies)
        block: Any = module.mlp
        self._block = (
            FusedMoE(module, block) if isinstance(block, SparseMoE) else FusedMLP(module, block)
        )

    def __call__(
        self,
        sums: Sums,
        positions: Tensor,
        layer: int,
        gdn: GdnStep | None,
        attention: PackedAttentionStep,
        next_norm: RMSNorm,
    ) -> Sums:
        """`sums` are the layer's input and the norm of it; its output and `next_norm` of that."""
        x, normed = sums
        normed = normed.view(*positions.shape, -1)
        if isinstance(self.mixer, FusedGdn):
            assert gdn is not None
            mixed = self.mixer(normed, layer, gdn)
        else:
            mixed = self.mixer(normed, positions, layer, attention)
        return self.behind(x, mixed, next_norm)

    def behind(self, x: Tensor, mixed: Tensor, next_norm: RMSNorm) -> Sums:
        """What lies behind the mixer, whose partial sums for `x` [T, hidden] are `mixed`."""
        mixed = self._module.collectives.all_reduce(mixed).view(x.shape)
        x, normed = add_norm(x, mixed, self._module.post_attention_layernorm)
        return self._block(x, normed, next_norm)


class FusedModel:
    """Runs a model's steps in few launches; what it is called with, the model is.

    Args:
        model: whose weights are joined (`joined.join`), and stay where they are from then on.
    """

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.model = model
        self.config = config = model.config
        device = model.model.embed_tokens.weight.device
        frequencies = rotary_frequencies(config.rotary_dim, config.rope_theta, device)
        self._layers = _fuse(model.model.layers, frequencies)
        self._drafts = [] if model.mtp is None else _fuse(model.mtp.layers, frequencies)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, gdn: GdnStep, attention: AttentionStep
    ) -> Tensor:
        """As the model; `positions` are contiguous."""
        if not isinstance(attention, PackedAttentionStep):
            return self.model(token_ids, positions, gdn, attention)
        core = self.model.model
        x = core.embed(token_ids).flatten(0, -2)
        first, *norms = _norms(core.layers, core.norm)
        sums = x, first(x)
        for layer, index, norm in zip(self._layers, core.layer_index, norms, strict=True):
            sums = layer(sums, positions, index, gdn, attention, norm)
        return sums[1].view(*positions.shape, -1)

    def draft(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionStep
    ) -> Tensor:
        """As the model's; `positions` are contiguous."""
        mtp = self.model.mtp
        if mtp is None or not isinstance(attention, PackedAttentionStep):
            return self.model.draft(token_ids, hidden, positions, attention)
        sums = self._through(self._drafts, token_ids, hidden, positions, attention, mtp)
        return sums[1].view(*positions.shape, -1)

    def draft_enter(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attention: StoringStep
    ) -> None:
        """As the model's; `positions` are contiguous."""
        mtp = self.model.mtp
        if mtp is None or not isinstance(attention, PackedAttentionStep):
            self.model.draft_enter(token_ids, hidden, positions, attention)
            return
        self._enter(token_ids, hidden, positions, attention, mtp)

    def draft_last(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: StoringStep,
        last: Tensor,
        attending: AttentionStep,
    ) -> Tensor:
        """As the model's; `positions` are contiguous."""
        mtp = self.model.mtp
        if (
            mtp is None
            or not isinstance(attention, PackedAttentionStep)
            or not isinstance(attending, PackedAttentionStep)
        ):
            return self.model.draft_last(token_ids, hidden, positions, attention, last, attending)
        x, heads = self._enter(token_ids, hidden, positions, attention, mtp)
        heads = replace(
            heads,
            packed=heads.packed.flatten(0, -2).index_select(0, last)[:, None],
            positions=positions.flatten().index_select(0, last)[:, None],
        )
        layer, mixer = self._drafts[-1], self._drafts[-1].mixer
        assert isinstance(mixer, FusedAttention)
        mixed = mixer.attend(heads, len(self._drafts) - 1, attending)
        return layer.behind(x.index_select(0, last), mixed, mtp.norm)[1][:, None]

    def _enter(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: PackedAttentionStep,
        mtp: MultiTokenPredictor,
    ) -> tuple[Tensor, PackedHeads]:
        """Leaves all rows in the cache; the input of the last layer [T, hidden], and its heads.

        Its product is the whole one: the columns of keys and values lie among its others.
        """
        *inner, last = self._drafts
        x, normed = self._through(inner, token_ids, hidden, positions, attention, mtp)
        mixer = last.mixer
        assert isinstance(mixer, FusedAttention)
        heads = mixer.heads(normed.view(*positions.shape, -1), positions)
        attention.store_packed(len(inner), heads)
        return x, heads

    def _through(
        self,
        layers: Sequence[FusedLayer],
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: PackedAttentionStep,
        mtp: MultiTokenPredictor,
    ) -> Sums:
        """Behind the first `layers` of the MTP module, with the norm that comes next."""
        x = mtp.fc(self._pair(token_ids.flatten(), hidden.flatten(0, -2)))
        first, *norms = _norms(mtp.layers, mtp.norm)
        sums = x, first(x)
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=False)):
            sums = layer(sums, positions, index, None, attention, norm)
        return sums

    def _pair(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The MTP module's two norms side by side [T, 2 hidden]."""
        from ..triton_ops.norm import norm_pair

        mtp, core = self.model.mtp, self.model.model
        assert mtp is not None
        first, second = mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden
        if core.collectives.ranks == 1:
            embedded, ids = core.embed_tokens.weight, token_ids
        else:
            embedded, ids = core.embed(token_ids), None
        return norm_pair(embedded, hidden.contiguous(), first.weight, second.weight, first.eps, ids)

    def head(self, hidden: Tensor) -> Tensor:
        """The model's."""
        return self.model.head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's."""
        return self.model.logits(hidden)


def fuse(model: Qwen3_5ForCausalLM) -> FusedModel | Qwen3_5ForCausalLM:
    """The model in few launches where there are kernels for it, else the model."""
    if not triton_ops.serves(model.model.embed_tokens.weight):
        return model
    return FusedModel(model)


def _fuse(layers: Any, frequencies: Tensor) -> list[FusedLayer]:
    fused = []
    for layer in layers:
        fused.append(FusedLayer(layer, frequencies))
        if frequencies.is_cuda:
            # The parts' own memory is free now, in pieces that no later allocation may fit.
            torch.cuda.empty_cache()
    return fused


def _norms(layers: Any, last: RMSNorm) -> list[RMSNorm]:
    """The norm in front of each layer, and the one behind all."""
    return [*(layer.input_layernorm for layer in layers), last]
