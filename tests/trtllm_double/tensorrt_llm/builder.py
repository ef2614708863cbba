"""Double of a build: the order of its steps, and what it writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .bindings import KVCacheType
from .layers import FusedGatedMLP, GatedMLP
from .network import Network
from .plugin import PluginConfig
from .plugin.plugin import init_all_reduce_helper

# The networks of this process, for the tests.
built = []


@dataclass
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: str | None = None
    gather_context_logits: bool = False
    max_draft_len: int = 0
    dry_run: bool = False
    plugin_config: PluginConfig | None = None

    def update_kv_cache_type(self, architecture):
        if self.kv_cache_type is None:
            self.plugin_config.paged_kv_cache = True
        else:
            kind = KVCacheType[self.kv_cache_type.upper()]
            self.plugin_config.paged_kv_cache = kind is KVCacheType.PAGED
        self.plugin_config.paged_state = False

    def to_dict(self):
        plugin = self.plugin_config
        self.plugin_config = None
        output = asdict(self)
        self.plugin_config = plugin
        output.pop("dry_run")
        return {**output, "plugin_config": plugin.dump()}


class Engine:
    def __init__(self, config, build_config, engine):
        self.config, self.build_config, self.engine = config, build_config, engine

    def save(self, engine_dir):
        folder = Path(engine_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self.config.mapping.rank
        if rank == 0:
            text = {
                "version": "1.2.0",
                "pretrained_config": self.config.to_dict(),
                "build_config": self.build_config.to_dict(),
            }
            (folder / "config.json").write_text(json.dumps(text))
        if self.engine is not None:
            (folder / f"rank{rank}.engine").write_bytes(b"an engine of the double")


def optimize(module, fused):
    for name, child in list(module._modules.items()):
        if fused and isinstance(child, GatedMLP):
            module._modules[name] = FusedGatedMLP(child)
        elif child is not None:
            optimize(child, fused)


def build(model, build_config):
    plugin = build_config.plugin_config
    assert isinstance(plugin, PluginConfig)
    plugin.dtype = model.config.dtype
    build_config.update_kv_cache_type(model.config.architecture)
    if build_config.max_seq_len is None:
        build_config.max_seq_len = model.config.max_position_embeddings
    build_config.max_input_len = min(build_config.max_input_len, build_config.max_seq_len)
    optimize(model, plugin.use_fused_mlp)
    network = Network(plugin)
    init_all_reduce_helper()
    with network:
        inputs = model.prepare_inputs(
            max_batch_size=build_config.max_batch_size,
            max_input_len=build_config.max_input_len,
            max_seq_len=build_config.max_seq_len,
            use_cache=True,
            max_beam_width=build_config.max_beam_width,
            max_num_tokens=build_config.max_num_tokens,
            opt_num_tokens=build_config.opt_num_tokens,
            prompt_embedding_table_size=build_config.max_prompt_embedding_table_size,
            max_draft_len=build_config.max_draft_len,
            speculative_decoding_draft_tokens_external=False,
            gather_context_logits=build_config.gather_context_logits,
            lora_target_modules=None,
        )
        model(**inputs)
    assert next(iter(network.inputs)) == "input_ids", "profiles are counted in the first input"
    built.append(network)
    return Engine(model.config, build_config, None if build_config.dry_run else network)
