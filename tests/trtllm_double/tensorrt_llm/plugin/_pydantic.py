"""Double of PluginConfig as of 1.2."""

from typing import Literal, Optional, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator

_Dtype = Literal["auto", "float16", "float32", "bfloat16", "int32", None]


class PluginConfig(BaseModel):
    model_config = ConfigDict(validate_assignment=True, extra="ignore")

    dtype: str = Field(default="float16", description="base type")
    gpt_attention_plugin: Optional[_Dtype] = Field(default="auto", description="attention")
    gemm_plugin: Optional[_Dtype] = Field(default=None, description="products")
    lora_plugin: Optional[_Dtype] = Field(default=None, description="LoRA")
    moe_plugin: Optional[_Dtype] = Field(default="auto", description="experts")
    mamba_conv1d_plugin: Optional[_Dtype] = Field(default="auto", description="Mamba")
    nccl_plugin: Optional[_Dtype] = Field(default="auto", description="collectives")
    paged_kv_cache: Optional[bool] = Field(default=None, description="paged cache")
    remove_input_padding: bool = Field(default=True, description="packed rows")
    tokens_per_block: int = Field(default=32, description="rows of a block")
    multiple_profiles: bool = Field(default=False, description="several profiles")
    paged_state: bool = Field(default=True, description="paged recurrent state")
    streamingllm: bool = Field(default=False, description="streaming")
    reduce_fusion: bool = Field(default=False, description="fusion")
    use_fused_mlp: bool = Field(default=True, description="fused MLP")
    pp_reduce_scatter: bool = Field(default=False, description="pipeline")

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return (
            self.dtype if name != "dtype" and isinstance(value, str) and value == "auto" else value
        )

    @field_validator("*", mode="before")
    @classmethod
    def words(cls, value, info):
        if value == "enable":
            return True
        if value == "disable":
            annotation = cls.model_fields[info.field_name].annotation
            options = get_args(annotation) if get_origin(annotation) is Union else ()
            return False if annotation is bool or bool in options else None
        return value

    @classmethod
    def from_arguments(cls, args):
        return cls(**vars(args))

    def validate(self):
        return None

    def dump(self):
        return self.model_dump(mode="json")


def parser_options(config, names):
    for name, field in config.model_fields.items():
        if name not in names:
            continue
        if not field.description:
            raise AttributeError(f"Please add help message for {name}.")
        annotation, choices = field.annotation, None
        if get_origin(annotation) is Union:
            for arg in get_args(annotation):
                if get_origin(arg) is Literal:
                    choices = [x or "disable" for x in [*get_args(arg), None]]
        if choices is not None:
            default = field.default or ("disable" if name != "gemm_plugin" else None)
            yield name, {"type": str, "default": default, "choices": choices}
        elif annotation is bool:
            default = "enable" if field.default else "disable"
            yield name, {"type": str, "default": default, "choices": ["enable", "disable"]}
        else:
            yield name, {"type": annotation, "default": field.default}
