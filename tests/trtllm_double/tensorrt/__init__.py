"""Double of the parts of TensorRT's Python package that the contract names."""

from __future__ import annotations

from enum import Enum, IntEnum

import numpy as np

__version__ = "10.14.0-double"


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    BF16 = 7
    INT64 = 8


float32, float16, int32 = DataType.FLOAT, DataType.HALF, DataType.INT32
bfloat16, int64, bool = DataType.BF16, DataType.INT64, DataType.BOOL


class PluginFieldType(Enum):
    INT32 = 5
    CHAR = 6
    FLOAT32 = 1


class TensorRTPhase(Enum):
    BUILD = 0
    RUNTIME = 1


class PluginField:
    def __init__(self, name, data, type):
        assert isinstance(data, np.ndarray), f"{name}: a field's data is a numpy array"
        self.name, self.data, self.type = name, data, type


class PluginFieldCollection(list):
    pass


class Plugin:
    """A made plugin: its creator's name and its fields as Python values."""

    def __init__(self, name, fields):
        self.name = name
        self.fields = {}
        for field in fields:
            if field.type == PluginFieldType.INT32:
                assert field.data.dtype == np.int32
                self.fields[field.name] = int(field.data.reshape(-1)[0])
            elif field.type == PluginFieldType.CHAR:
                assert field.data.dtype == np.int8
                self.fields[field.name] = field.data.tobytes().decode()
            else:
                self.fields[field.name] = float(field.data.reshape(-1)[0])


class Creator:
    plugin_namespace, plugin_version = "treewy", "1"

    def __init__(self, name):
        self.name = name

    def create_plugin(self, name, fields, phase=None):
        assert isinstance(fields, PluginFieldCollection)
        assert phase is TensorRTPhase.BUILD, "a plugin of the V3 kind is made with its phase"
        return Plugin(self.name, fields)


class Registry:
    """Knows our plugins once their library is loaded."""

    def __init__(self):
        self.names = set()

    def load_library(self, path):
        from trtllm_treewy.plugin_contract import PLUGINS

        self.names = set(PLUGINS)
        return object()

    @property
    def all_creators(self):
        return [Creator(name) for name in self.names]

    def get_creator(self, name, version, namespace):
        known = name in self.names and (version, namespace) == ("1", "treewy")
        return Creator(name) if known else None


_registry = Registry()


def get_plugin_registry():
    return _registry
