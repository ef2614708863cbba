"""Double of TensorRT-LLM; see the README beside it."""

__version__ = "1.2.0"
