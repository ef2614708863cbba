"""Double: architectures that the library knows."""

MODEL_MAP = {"LlamaForCausalLM": None}
