"""`--treewy_plugin` and `--treewy_max_nodes` among TensorRT-LLM's plugin flags. Imports it.

Its PluginConfig drops names that it does not know, so the flags are fields of a subclass, which
takes the class's place in every module that makes one. The class was a dataclass behind a metaclass
in 1.0 and 1.1 and is a pydantic model in 1.2; annotations are read as objects by both, so this
module does without `from __future__ import annotations`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from tensorrt_llm import builder
from tensorrt_llm import plugin as plugin_package
from tensorrt_llm.commands import build
from tensorrt_llm.plugin import plugin

from .settings import DEFAULT_MAX_NODES

FLAGS = ("treewy_plugin", "treewy_max_nodes")
_OPTIONS = ("auto", "float16", "bfloat16", "float32")
_PLUGIN_HELP = (
    "Plugins for the Gated DeltaNet layers of Qwen3.5 hybrids, by the type in which they work; "
    "auto is the model's. With disable such models cannot be built."
)
_NODES_HELP = "Most nodes of a draft tree, root included: 1 (no drafts) to 128."
# Kept once: this module may be loaded when the names are bound to the subclass already.
_base: Any = plugin.PluginConfig

if hasattr(_base, "model_fields"):
    from pydantic import Field

    class TreewyPluginConfig(_base):  # type: ignore[misc]
        """The library's PluginConfig with our flags (1.2)."""

        treewy_plugin: Optional[  # noqa: UP045  (the parser looks for Union)
            Literal["auto", "float16", "bfloat16", "float32"]
        ] = Field(default="auto", description=_PLUGIN_HELP)
        treewy_max_nodes: int = Field(default=DEFAULT_MAX_NODES, description=_NODES_HELP)

else:

    @dataclass(slots=True)
    class TreewyPluginConfig(_base):  # type: ignore[no-redef,misc]
        """The library's PluginConfig with our flags (1.0 and 1.1)."""

        _treewy_plugin: Optional[str] = field(  # noqa: UP045
            default="auto", init=False, metadata={"help": _PLUGIN_HELP}
        )
        _treewy_max_nodes: int = field(
            default=DEFAULT_MAX_NODES, init=False, metadata={"help": _NODES_HELP}
        )


def install() -> None:
    """Puts the subclass in place, and its flags on the command's list; safe to call twice."""
    for module in (plugin, plugin_package, build, builder):
        module.PluginConfig = TreewyPluginConfig
    options = getattr(plugin, "PLUGIN_DTYPE_OPTIONS_MAP", None)
    if options is not None:
        options["treewy_plugin"] = [*_OPTIONS, None]
    for name in FLAGS:
        if name not in plugin.cli_plugin_args:
            plugin.cli_plugin_args.append(name)


# Workers unpickle a TreewyPluginConfig before they build: importing this module is enough.
install()
