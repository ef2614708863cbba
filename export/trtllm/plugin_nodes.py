"""Our TensorRT plugins as nodes of a TensorRT-LLM network. Imports tensorrt_llm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorrt as trt
from tensorrt_llm._common import default_trtnet
from tensorrt_llm.functional import Tensor, _add_plugin_info, _create_tensor

from trtllm_treewy.plugin_contract import NAMESPACE, VERSION, PluginSpec
from trtllm_treewy.tensorrt_package import load_plugins


def add_plugin(spec: PluginSpec, inputs: Sequence[Tensor], **fields: int | str) -> list[Tensor]:
    """A node of the plugin `spec`; its outputs.

    Args:
        spec: from `trtllm_treewy.plugin_contract`.
        inputs: in the plugin's order, of the types that it takes.
        fields: the plugin's fields; those left out have their defaults.

    Raises:
        ValueError: a field or the number of inputs is wrong, or the plugin library is not loaded
            and cannot be.
    """
    expected = spec.inputs_with(**fields)
    if len(inputs) != len(expected):
        names = ", ".join(x.name for x in expected)
        raise ValueError(f"{spec.name}: expected the inputs {names}, got {len(inputs)}")
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(spec.name, VERSION, NAMESPACE)
    if creator is None:  # a worker of the build, in a process of its own
        load_plugins(trt)
        creator = registry.get_creator(spec.name, VERSION, NAMESPACE)
    collection = trt.PluginFieldCollection(
        [_field(name, value) for name, value in spec.values(**fields).items()]
    )
    plugin = creator.create_plugin(spec.name, collection, trt.TensorRTPhase.BUILD)
    layer = default_trtnet().add_plugin_v3([x.trt_tensor for x in inputs], [], plugin)
    outputs = [
        _create_tensor(layer.get_output(index), layer)
        for index in range(len(spec.outputs_with(**fields)))
    ]
    # Last: making an output names the layer, and the library moves what it keeps under the old
    # name for plugins of the V2 kind only.
    _add_plugin_info(layer, creator, spec.name, collection)
    return outputs


def _field(name: str, value: int | str) -> Any:
    if isinstance(value, int):
        return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
    text = np.frombuffer(value.encode(), np.int8)
    return trt.PluginField(name, text, trt.PluginFieldType.CHAR)
