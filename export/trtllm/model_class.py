"""The file for `trtllm-build --model_cls_file FILE --model_cls_name TreewyQwen3_5ForCausalLM`.

The library loads it as a module named `models`, from which its workers could unpickle nothing;
so the class comes from its own module. Loading the plugin library belongs here for the same reason:
without the wrapper nobody else does.
"""

from __future__ import annotations

from trtllm_treewy.export.trtllm.contract import ADVICE
from trtllm_treewy.tensorrt_package import load_plugins

try:
    import tensorrt
    import tensorrt_llm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this file is a model class for TensorRT-LLM, which cannot be imported: {error}; {ADVICE}"
    ) from error

load_plugins(tensorrt)

from trtllm_treewy.export.trtllm.model import TreewyQwen3_5ForCausalLM  # noqa: E402

__all__ = ["TreewyQwen3_5ForCausalLM"]
