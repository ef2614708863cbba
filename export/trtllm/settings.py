"""What an engine of ours may be built with: one check for the command and the model class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..onnx_trees import MAX_NODES

DEFAULT_MAX_NODES = 64
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class BuildSettings:
    """The settings of a build that concern our layers.

    Attributes:
        plugin_dtype: type in which the GDN plugins work, and of the conv windows.
        max_nodes: columns of a tree.
    """

    plugin_dtype: str
    max_nodes: int

    @property
    def draft_len(self) -> int:
        """Nodes of a tree without its root, which is what the library calls draft tokens."""
        return self.max_nodes - 1


def build_settings(
    plugin_config: Any,
    dtype: str,
    *,
    max_draft_len: int = 0,
    max_beam_width: int = 1,
    max_num_tokens: int | None = None,
    gather_context_logits: bool = False,
    prompt_embedding_table_size: int = 0,
    draft_tokens_external: bool = False,
) -> BuildSettings:
    """Settings from the library's plugin_config and arguments.

    A plugin_config without our fields is that of the stock command: the plugin is on, and trees
    have `max_draft_len` + 1 nodes, or 64 where that is 0.

    Raises:
        ValueError: naming the flag, for what our layers cannot do.
    """
    plugin = getattr(plugin_config, "treewy_plugin", dtype)
    if plugin is None:
        raise ValueError("--treewy_plugin is disable: the GDN layers have no other implementation")
    plugin = dtype if plugin == "auto" else plugin
    if plugin not in DTYPES:
        raise ValueError(f"--treewy_plugin must be one of {', '.join(DTYPES)}, got {plugin!r}")
    nodes = _nodes(getattr(plugin_config, "treewy_max_nodes", None), max_draft_len)
    for flag, given, expected in (
        ("--gpt_attention_plugin", plugin_config.gpt_attention_plugin, "a type"),
        ("--remove_input_padding", plugin_config.remove_input_padding, "enable"),
    ):
        if not given:
            raise ValueError(f"{flag} is disable, expected {expected}: rows are packed")
    for flag, given in (
        ("--streamingllm", plugin_config.streamingllm),
        ("--lora_plugin", plugin_config.lora_plugin),
        ("--reduce_fusion", plugin_config.reduce_fusion),
        ("--pp_reduce_scatter", plugin_config.pp_reduce_scatter),
    ):
        if given:
            raise ValueError(f"{flag} is {given}, expected disable: our layers do without it")
    if plugin_config.paged_kv_cache is False:
        raise ValueError("--kv_cache_type must be paged: accepted rows are moved by block")
    if max_beam_width != 1:
        raise ValueError(f"--max_beam_width is {max_beam_width}, expected 1")
    if prompt_embedding_table_size:
        raise ValueError("--max_prompt_embedding_table_size must be 0")
    if draft_tokens_external:
        raise ValueError("--speculative_decoding_mode must not be given: trees are inputs")
    if gather_context_logits and nodes > 1:
        raise ValueError("--gather_context_logits needs --treewy_max_nodes 1")
    if max_num_tokens is not None and max_num_tokens < nodes:
        raise ValueError(f"--max_num_tokens is {max_num_tokens}, less than a tree's {nodes} nodes")
    return BuildSettings(plugin, nodes)


def _nodes(flag: int | None, max_draft_len: int) -> int:
    if flag is not None and max_draft_len not in (0, flag - 1):
        raise ValueError(
            f"--max_draft_len is {max_draft_len} and --treewy_max_nodes {flag}: leave the first "
            f"out, or give {flag - 1}"
        )
    nodes = flag if flag is not None else (max_draft_len + 1 if max_draft_len else None)
    nodes = DEFAULT_MAX_NODES if nodes is None else nodes
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"--treewy_max_nodes must be from 1 to {MAX_NODES}, got {nodes}")
    return nodes
