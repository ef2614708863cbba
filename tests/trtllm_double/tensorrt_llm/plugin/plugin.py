"""Double of the plugin options in both forms: pydantic (1.2) and dataclass (1.0, 1.1)."""

from __future__ import annotations

import os
from collections import OrderedDict

import tensorrt as trt

if os.environ.get("TRTLLM_DOUBLE") == "1.1":
    from ._dataclass import (  # noqa: F401
        PLUGIN_DTYPE_OPTIONS_MAP,
        PluginConfig,
        parser_options,
    )
else:
    from ._pydantic import PluginConfig, parser_options

TRT_LLM_PLUGIN_NAMESPACE = "tensorrt_llm"
cli_plugin_args = [
    "gpt_attention_plugin",
    "gemm_plugin",
    "lora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "nccl_plugin",
    "remove_input_padding",
    "tokens_per_block",
    "multiple_profiles",
    "paged_state",
    "streamingllm",
    "reduce_fusion",
    "use_fused_mlp",
    "pp_reduce_scatter",
]


def add_plugin_argument(parser):
    for name, options in parser_options(PluginConfig, cli_plugin_args):
        parser.add_argument(f"--{name}", **options)
    return parser


class _AllReduceHelper:
    workspace = None

    def set_workspace_tensor(self, mapping, num_profiles=None):
        from ..functional import Tensor

        size = 7 * mapping.tp_size + 3
        ranges = OrderedDict([("all_reduce_size", [size] * num_profiles)])
        self.workspace = Tensor("all_reduce_workspace", trt.int64, [size], ranges)


_helper = None


def init_all_reduce_helper():
    global _helper
    _helper = _AllReduceHelper()


def current_all_reduce_helper():
    assert _helper is not None, "call init_all_reduce_helper first"
    return _helper
