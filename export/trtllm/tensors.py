"""Which tensors a TensorRT-LLM checkpoint of our models has, and what each is made of.

A tensor of a rank is packed from shares of the Hugging Face tensors (`export/sharding.py`), and the
packing can be undone: `load_checkpoint` reads the whole model back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_treewy.config import LINEAR, ModelConfig
from trtllm_treewy.rank_config import shard_config

from ..sharding import join_shards, shard_tensor

Pack = Callable[..., Tensor]
Unpack = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Target:
    """One tensor of a rank.

    Attributes:
        name: in the rank's file.
        sources: names in the model's `state_dict`.
        pack: shares of the sources, in that order, to the tensor.
        unpack: the inverse; a source that nothing can be read for (`readable`) is not in it.
        wide: float32 whatever the checkpoint's type: norms, gates of the recurrence, the router.
        whole: every rank has the whole sources and not shares of them.
        readable: the sources that `unpack` yields.
    """

    name: str
    sources: tuple[str, ...]
    pack: Pack
    unpack: Unpack
    wide: bool = False
    whole: bool = False
    readable: tuple[str, ...] = ()

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Its type in a checkpoint of this type."""
        return torch.float32 if self.wide else dtype

    def of_rank(
        self, sources: Sequence[Tensor], config: ModelConfig, ranks: int, rank: int
    ) -> Tensor:
        """A rank's tensor from the whole sources; `config` is the whole model's."""
        if self.whole:
            return self.pack(*sources)
        shares = [
            shard_tensor(name, tensor, config, ranks, rank)
            for name, tensor in zip(self.sources, sources, strict=True)
        ]
        return self.pack(*shares)


def targets(config: ModelConfig, ranks: int) -> list[Target]:
    """Every tensor of a rank's file; `config` is the whole model's.

    Raises:
        ValueError: `ranks` does not divide the model, or the library cannot hold it: no attention
            layer at all.
    """
    if not config.attention_layers:
        raise ValueError(
            "the model has no attention layer, and TensorRT-LLM's KV cache needs one at least"
        )
    part = shard_config(config, ranks)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    result = [
        _same("transformer.vocab_embedding.weight", "model.embed_tokens.weight", whole=True),
        *_head(head, tied=config.tie_word_embeddings),
        _norm("transformer.ln_f.weight", "model.norm.weight"),
    ]
    for layer, kind in enumerate(config.layer_types):
        source, name = f"model.layers.{layer}", f"transformer.layers.{layer}"
        result += [
            _norm(f"{name}.input_layernorm.weight", f"{source}.input_layernorm.weight"),
            _norm(f"{name}.post_layernorm.weight", f"{source}.post_attention_layernorm.weight"),
        ]
        if kind == LINEAR:
            result += _delta_net(f"{name}.gdn", f"{source}.linear_attn")
        else:
            result += _attention(f"{name}.attention", f"{source}.self_attn", part)
        result += (_experts if config.is_moe else _feed_forward)(f"{name}.mlp", f"{source}.mlp")
    return result


def whole_tensors(
    parts: Sequence[Mapping[str, Tensor]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by the names of its `state_dict`, without the MTP module's.

    Args:
        parts: the tensors of each rank's file, in order; float32 ones stay float32.
        config: the whole model's.
    """
    for target in targets(config, len(parts)):
        if not target.readable:
            continue
        shares = [target.unpack(part[target.name]) for part in parts]
        for index, name in enumerate(target.readable):
            column = [share[index] for share in shares]
            yield name, column[0] if target.whole else join_shards(name, column, config)


def _same(name: str, source: str, *, wide: bool = False, whole: bool = False) -> Target:
    return Target(name, (source,), lambda x: x, lambda x: (x,), wide, whole, (source,))


def _norm(name: str, source: str) -> Target:
    """The library's RmsNorm multiplies by its weight; ours by 1 + weight, formed in float32."""
    return Target(
        name, (source,), lambda x: x + 1.0, lambda x: (x - 1.0,), wide=True, readable=(source,)
    )


def _head(source: str, *, tied: bool) -> list[Target]:
    """The head is there for tied models too, as a share of its own: the embedding is whole."""
    if not tied:
        return [_same("lm_head.weight", source)]
    return [Target("lm_head.weight", (source,), lambda x: x, lambda x: ())]


def _attention(name: str, source: str, part: ModelConfig) -> list[Target]:
    """One projection: query, key, value, gate. `q_proj` has query and gate of each head in turn."""
    heads, dim = part.num_attention_heads, part.head_dim
    keys = part.num_key_value_heads * dim

    def query(q: Tensor) -> Tensor:
        return q.unflatten(0, (heads, 2, dim))[:, 0].flatten(0, 1)

    def gate(q: Tensor) -> Tensor:
        return q.unflatten(0, (heads, 2, dim))[:, 1].flatten(0, 1)

    def pack(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return torch.cat([query(q), k, v, gate(g)])

    def unpack(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g = x.split([heads * dim, keys, keys, heads * dim])
        both = torch.stack([q.unflatten(0, (heads, dim)), g.unflatten(0, (heads, dim))], dim=1)
        return both.flatten(0, 2), k, v

    result = []
    for kind in ("weight", "bias") if part.attention_bias else ("weight",):
        q, k, v = (f"{source}.{x}_proj.{kind}" for x in "qkv")
        result.append(Target(f"{name}.qkv.{kind}", (q, k, v, q), pack, unpack, readable=(q, k, v)))
    result.append(_same(f"{name}.dense.weight", f"{source}.o_proj.weight"))
    if part.attention_bias:  # added after the sum over ranks, so each rank has all of it
        result.append(_same(f"{name}.dense.bias", f"{source}.o_proj.bias", whole=True))
    return result + [
        _norm(f"{name}.qkv.{x}_layernorm.weight", f"{source}.{x}_norm.weight") for x in "qk"
    ]


def _delta_net(name: str, source: str) -> list[Target]:
    conv = f"{source}.conv1d.weight"
    projections = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    return [
        *(_same(f"{name}.{x}.weight", f"{source}.{x}.weight") for x in projections),
        Target(
            f"{name}.conv_weight",
            (conv,),
            lambda x: x.squeeze(1),
            lambda x: (x.unsqueeze(1),),
            readable=(conv,),
        ),
        _same(f"{name}.A_log", f"{source}.A_log", wide=True),
        _same(f"{name}.dt_bias", f"{source}.dt_bias", wide=True),
        _same(f"{name}.norm.weight", f"{source}.norm.weight"),
    ]


def _feed_forward(name: str, source: str) -> list[Target]:
    """The library's GatedMLP is proj(act(fc) * gate): its fc is the checkpoint's gate."""
    pairs = {"fc": "gate_proj", "gate": "up_proj", "proj": "down_proj"}
    return [_same(f"{name}.{a}.weight", f"{source}.{b}.weight") for a, b in pairs.items()]


def _experts(name: str, source: str) -> list[Target]:
    """SharedMoE: first projections are up, then gate; its router is float32."""
    shared = f"{source}.shared_expert"
    up, gate = f"{shared}.up_proj.weight", f"{shared}.gate_proj.weight"
    fused = f"{source}.experts.gate_up_proj"

    def swap(x: Tensor) -> Tensor:
        return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)

    return [
        _same(f"{name}.router.weight", f"{source}.gate.weight", wide=True),
        Target(f"{name}.fc.weight", (fused,), swap, lambda x: (swap(x),), readable=(fused,)),
        _same(f"{name}.proj.weight", f"{source}.experts.down_proj"),
        Target(
            f"{name}.shared_expert.fc.weight",
            (up, gate),
            lambda *halves: torch.cat(halves),
            lambda x: x.chunk(2),
            readable=(up, gate),
        ),
        _same(f"{name}.shared_expert.proj.weight", f"{shared}.down_proj.weight"),
        _same(f"{name}.shared_expert_gate.weight", f"{source}.shared_expert_gate.weight"),
    ]
