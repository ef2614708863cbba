"""Loads the plugin library into a real TensorRT registry and prints what came of it, as JSON.

Run by test_plugin_registry.py in a process of its own, one for each TensorRT and way of loading:
`python plugin_registry.py LIBRARY load|dlopen|both|none`, with the lean runtime on PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import json
import sys

import numpy as np
import tensorrt_lean_bindings as trt

HEADS = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
LOG: list[str] = []


class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)

    def log(self, severity, message):
        LOG.append(message)


def field(name, value):
    if isinstance(value, str):
        data = np.frombuffer(value.encode(), np.int8)
        return trt.PluginField(name, data, trt.PluginFieldType.CHAR)
    if isinstance(value, float):
        data = np.array([value], np.float32)
        return trt.PluginField(name, data, trt.PluginFieldType.FLOAT32)
    return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)


def create(registry, name, fields, phase):
    """What a created plugin says of itself, or the log."""
    LOG.clear()
    creator = registry.get_creator(name, "1", "treewy")
    collection = trt.PluginFieldCollection([field(*item) for item in fields.items()])
    plugin = creator.create_plugin("node", collection, phase)
    if plugin is None:
        return {"refused": LOG.copy()}
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    return {"made": [core.plugin_name, core.plugin_namespace, core.plugin_version]}


def main():
    path, way = sys.argv[1:]
    registry = trt.get_plugin_registry()
    result = {"tensorrt": trt.__version__, "with_gpu": not LOG}
    if way in ("dlopen", "both"):
        ctypes.CDLL(path)
    if way in ("load", "both"):
        result["loaded"] = registry.load_library(path) is not None
    creators = [x for x in registry.all_creators if x.plugin_namespace == "treewy"]
    result["creators"] = {x.name: [f.name for f in x.field_names] for x in creators}
    cases = json.load(sys.stdin)
    if creators:
        phases = trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME
        result["cases"] = [
            [create(registry, name, fields, phase) for phase in phases] for name, fields in cases
        ]
    print(json.dumps(result))


# Makes TensorRT keep the logger. Without a GPU it fails to start, and crashes if deleted early.
LOGGER = Logger()
RUNTIME = trt.Runtime(LOGGER)
main()
