"""Double of configs and pretrained models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from safetensors.torch import load_file

from ..layers import PositionEmbeddingType
from ..mapping import Mapping
from ..module import Module
from .generation_mixin import GenerationMixin


class QuantConfig:
    def __init__(self, quant_algo=None, kv_cache_quant_algo=None):
        self.quant_algo, self.kv_cache_quant_algo = quant_algo, kv_cache_quant_algo

    def to_dict(self):
        return dict(self.__dict__)


class PretrainedConfig:
    def __init__(
        self,
        *,
        architecture,
        dtype,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        vocab_size=None,
        hidden_act="gelu",
        logits_dtype="float32",
        norm_epsilon=1e-5,
        position_embedding_type=PositionEmbeddingType.learned_absolute,
        max_position_embeddings=None,
        rotary_embedding_dim=None,
        num_key_value_heads=None,
        intermediate_size=None,
        mapping=None,
        quantization=None,
        use_parallel_embedding=False,
        embedding_sharding_dim=0,
        head_size=None,
        qk_layernorm=False,
        runtime_defaults=None,
        **kwargs,
    ):
        given = {k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")}
        self.__dict__.update(given)
        if isinstance(position_embedding_type, str):
            kind = PositionEmbeddingType.from_string(position_embedding_type)
            self.position_embedding_type = kind
        self.mapping = Mapping.from_dict(mapping) if isinstance(mapping, dict) else Mapping()
        self.quantization = QuantConfig(**(quantization or {}))
        for name, value in kwargs.items():
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, config):
        from . import MODEL_MAP

        model_cls = MODEL_MAP[config["architecture"]]
        return getattr(model_cls, "config_class", cls)(**config)

    @classmethod
    def from_json_file(cls, config_file):
        return cls.from_dict(json.loads(Path(config_file).read_text()))

    def to_dict(self):
        output = copy.deepcopy(self.__dict__)
        output["position_embedding_type"] = str(self.position_embedding_type)
        output["mapping"] = self.mapping.to_dict()
        output["mapping"].pop("rank")
        output["quantization"] = self.quantization.to_dict()
        return output

    def set_rank(self, rank):
        self.mapping.rank = rank


class PostInitCaller(type):
    def __call__(cls, *args, **kwargs):
        made = type.__call__(cls, *args, **kwargs)
        made.__post_init__()
        return made


class PretrainedModel(Module, GenerationMixin, metaclass=PostInitCaller):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def __post_init__(self):
        assert self.config.quantization.quant_algo is None

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        rank = config.mapping.rank if rank is None else rank
        weights = load_file(Path(ckpt_dir) / f"rank{rank}.safetensors")
        model = cls(config)
        model.load(weights)
        return model

    def load(self, weights):
        expected = {n for n, p in self.named_parameters() if not p.is_buffer}
        missing = expected - weights.keys()
        if missing:
            raise RuntimeError(f"Required but not provided tensors:{missing}")
        self.unexpected = weights.keys() - expected
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.value = weights[name]
