"""Double of PluginConfig as of 1.0 and 1.1: fields `_name` behind properties."""

from dataclasses import asdict, dataclass, field, fields
from typing import Optional

_DEFAULT_OPTIONS = ["auto", "float16", "float32", "bfloat16", "int32", None]
PLUGIN_DTYPE_OPTIONS_MAP = {"gemm_swiglu_plugin": ["fp8", None]}


def _property(name, kind):
    storage = f"_{name}"

    def read(self):
        value = getattr(self, storage)
        return self.dtype if name != "dtype" and value == "auto" else value

    def write(self, value):
        if kind is bool:
            assert isinstance(value, bool), f"Plugin {name} expects {kind}, got {type(value)}"
        elif kind in (str, Optional[str]):
            options = PLUGIN_DTYPE_OPTIONS_MAP.get(name, _DEFAULT_OPTIONS)
            assert value in options, f"Plugin {name} expects values in {options}, got {value}"
        setattr(self, storage, value)

    return property(read, write)


class PluginConfigMeta(type):
    def __new__(cls, name, bases, attrs):
        for storage, kind in attrs["__annotations__"].items():
            assert storage.startswith("_")
            attrs[storage.lstrip("_")] = _property(storage.lstrip("_"), kind)
        return super().__new__(cls, name, bases, attrs)


def _option(default):
    return field(default=default, init=False, metadata={"help": "an option"})


@dataclass(slots=True)
class PluginConfig(metaclass=PluginConfigMeta):
    _dtype: str = field(default="float16", init=False)
    _gpt_attention_plugin: Optional[str] = _option("auto")
    _gemm_plugin: Optional[str] = _option(None)
    _lora_plugin: Optional[str] = _option(None)
    _moe_plugin: Optional[str] = _option("auto")
    _mamba_conv1d_plugin: Optional[str] = _option("auto")
    _nccl_plugin: Optional[str] = _option("auto")
    _paged_kv_cache: Optional[bool] = _option(None)
    _remove_input_padding: bool = _option(True)
    _tokens_per_block: int = _option(32)
    _multiple_profiles: bool = _option(False)
    _paged_state: bool = _option(True)
    _streamingllm: bool = _option(False)
    _reduce_fusion: bool = _option(False)
    _use_fused_mlp: bool = _option(True)
    _pp_reduce_scatter: bool = _option(False)

    @classmethod
    def from_arguments(cls, args):
        made = cls()
        for name, value in vars(args).items():
            if not hasattr(made, name):
                continue
            if isinstance(getattr(made, name), bool) or name == "paged_kv_cache":
                value = {"enable": True, "disable": False}.get(value, value)
            elif value == "disable":
                value = None
            setattr(made, name, value)
        return made

    def validate(self):
        return None

    def dump(self):
        return {name.lstrip("_"): value for name, value in asdict(self).items()}


def parser_options(config, names):
    for item in fields(config()):
        name = item.name.lstrip("_")
        if name not in names:
            continue
        if "help" not in item.metadata:
            raise AttributeError(f"Please add help message for {name}.")
        if item.type is bool:
            default = "enable" if item.default else "disable"
            yield name, {"type": str, "default": default, "choices": ["enable", "disable"]}
        elif item.type in (str, Optional[str]):
            options = PLUGIN_DTYPE_OPTIONS_MAP.get(name, _DEFAULT_OPTIONS)
            choices = [x or "disable" for x in options]
            default = item.default or ("disable" if name != "gemm_plugin" else None)
            yield name, {"type": str, "default": default, "choices": choices}
        else:
            yield name, {"type": item.type, "default": item.default}
