"""The double of TensorRT-LLM in a test's process, and out of it again."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

DOUBLE = Path(__file__).parent / "trtllm_double"
_OURS = (
    "trtllm_treewy.export.trtllm.inputs",
    "trtllm_treewy.export.trtllm.layers",
    "trtllm_treewy.export.trtllm.model",
    "trtllm_treewy.export.trtllm.model_class",
    "trtllm_treewy.export.trtllm.plugin_config",
    "trtllm_treewy.export.trtllm.plugin_nodes",
)


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt", "tensorrt_llm", "models") or name in _OURS:
            del sys.modules[name]
    package = sys.modules.get("trtllm_treewy.export.trtllm")
    for name in _OURS:
        if package is not None and hasattr(package, name.rpartition(".")[2]):
            delattr(package, name.rpartition(".")[2])


@contextmanager
def trtllm_double(monkeypatch, version="1.2.0", devices=1):
    """tensorrt_llm of this version, with `devices` GPUs, and a plugin library that loads."""
    import ctypes
    from importlib import metadata

    import torch

    from trtllm_treewy.export.trtllm import plugin_library

    _forget()
    plugin_library.load_plugin_library.cache_clear()
    monkeypatch.syspath_prepend(DOUBLE)
    monkeypatch.setenv("TRTLLM_DOUBLE", version.rpartition(".")[0])
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "tensorrt_llm" else real(name)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    def load(path, mode=0):
        import tensorrt

        tensorrt.get_plugin_registry().load()

    monkeypatch.setattr(ctypes, "CDLL", load)
    try:
        yield
    finally:
        _forget()
        plugin_library.load_plugin_library.cache_clear()
