import dataclasses
import json

import pytest
from checkpoints import hf_config

from trtllm_treewy.config import ModelConfig, shipped_configs
from trtllm_treewy.tokenizer import end_token_ids

HF_FIELDS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
]
MOE_FIELDS = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
]


def nested(text=None, **top):
    text = hf_config() if text is None else text
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5", "hidden_size": 7, "depth": 2},
        "image_token_id": 5,
        **top,
    }


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def read(raw):
    return ModelConfig.from_dict(raw)


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen3_5_text"},
        {"model_type": "qwen3_5_moe_text"},
        hf_config(),
        hf_config(moe=True, tie_word_embeddings=True, attention_bias=True),
        without(hf_config(rope_theta=5e5, partial_rotary_factor=0.5), "rope_parameters"),
        without(hf_config(rope_theta=7e4), "rope_parameters"),
        hf_config(rope_scaling={"type": "default", "rope_theta": 3e4}),
        hf_config(rope_theta=1.0, rope_parameters={"rope_theta": 9e4}),
        hf_config(num_hidden_layers=7, full_attention_interval=3),
        hf_config(layer_types=["full_attention", "linear_attention"] * 2),
        hf_config(eos_token_id=[3, 5], bos_token_id=1, pad_token_id=0),
    ],
)
def test_agrees_with_transformers(raw):
    import transformers

    moe = raw["model_type"] == "qwen3_5_moe_text"
    hf_class = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    hf = hf_class(**json.loads(json.dumps(without(raw, "model_type", "architectures"))))
    config = read(raw)
    for field in HF_FIELDS + (MOE_FIELDS if moe else ["intermediate_size"]):
        assert getattr(config, field) == getattr(hf, field), field
    assert list(config.layer_types) == hf.layer_types
    assert config.rope_theta == hf.rope_parameters["rope_theta"]
    assert config.partial_rotary_factor == hf.rope_parameters["partial_rotary_factor"]
    eos = hf.eos_token_id
    assert list(config.eos_token_id) == (
        [] if eos is None else [eos] if isinstance(eos, int) else eos
    )
    assert (config.bos_token_id, config.pad_token_id) == (hf.bos_token_id, hf.pad_token_id)
    assert config.is_moe == moe


def test_dense_has_no_expert_sizes_and_moe_no_dense_size():
    dense, moe = read(hf_config()), read(hf_config(moe=True))
    assert dense.intermediate_size == 48
    assert [getattr(dense, field) for field in MOE_FIELDS] == [0, 0, 0, 0]
    assert moe.intermediate_size == 0
    assert [getattr(moe, field) for field in MOE_FIELDS] == [6, 2, 24, 40]


def test_derived_sizes():
    config = read(hf_config())
    assert (config.key_dim, config.value_dim, config.conv_dim) == (32, 96, 160)
    assert config.rotary_dim == 4
    assert config.linear_layers == (0, 1, 2)
    assert config.attention_layers == (3,)


@pytest.mark.parametrize("moe", [False, True])
def test_flat_and_nested_agree(moe):
    text = hf_config(moe=moe)
    flat = read({**text, "model_type": text["model_type"].removesuffix("_text")})
    unnamed = {**nested(text), "text_config": without(text, "model_type")}
    assert flat == read(text) == read(nested(text)) == read(unnamed)
    assert flat.model_type == text["model_type"]


def test_wrapper_sizes_are_not_taken_for_the_text_models():
    raw = nested(without(hf_config(), "hidden_size"), hidden_size=11)
    assert read(raw).hidden_size == 4096


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("at_top", [False, True])
def test_dtype_by_either_name_at_either_level(key, value, at_top):
    text = without(hf_config(), "dtype")
    raw = nested(text, **{key: value}) if at_top else nested({**text, key: value})
    assert read(raw).dtype == "bfloat16"


def test_absent_dtype_loses_nothing():
    assert read(without(hf_config(), "dtype")).dtype == "float32"


def test_text_level_wins_for_dtype_and_tokens():
    text = hf_config(dtype="bfloat16", eos_token_id=4)
    config = read(nested(text, dtype="float16", eos_token_id=9, bos_token_id=2))
    assert (config.dtype, config.eos_token_id, config.bos_token_id) == ("bfloat16", (4,), 2)


@pytest.mark.parametrize("value", [True, False])
def test_tie_word_embeddings_at_either_level(value):
    text = without(hf_config(), "tie_word_embeddings")
    assert read(nested({**text, "tie_word_embeddings": value})).tie_word_embeddings is value
    assert read(nested(text, tie_word_embeddings=value)).tie_word_embeddings is value
    assert read(nested(text)).tie_word_embeddings is False


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_eos_token_ids(given, ids):
    assert read(hf_config(eos_token_id=given)).eos_token_id == ids


def test_unknown_keys_are_ignored():
    assert read(hf_config(some_new_key=1, use_cache=True)) == read(hf_config())


def test_absent_mtp_is_no_mtp():
    assert read(without(hf_config(), "mtp_num_hidden_layers")).mtp_num_hidden_layers == 0


def test_config_is_hashable_and_frozen():
    config = read(hf_config())
    assert hash(config) == hash(read(hf_config()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1


# --- refusals --------------------------------------------------------------------------------

NUMBER_REFUSALS = [
    ({"hidden_size": 0}, "hidden_size: expected a positive integer, got 0"),
    ({"vocab_size": -1}, "vocab_size"),
    ({"num_hidden_layers": "4"}, 'num_hidden_layers: expected a positive integer, got "4"'),
    ({"head_dim": 16.0}, "head_dim"),
    ({"head_dim": None}, "head_dim: expected a positive integer, got null"),
    ({"linear_num_key_heads": True}, "linear_num_key_heads"),
    ({"intermediate_size": 0}, "intermediate_size"),
    ({"full_attention_interval": 0}, "full_attention_interval"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    ({"rope_parameters": {"partial_rotary_factor": float("inf")}}, "partial_rotary_factor"),
    ({"num_attention_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "above 0 and at most 1, got 1.5"),
    ({"rope_parameters": {"partial_rotary_factor": 1e308}}, "partial_rotary_factor: .*at most 1"),
    ({"rope_parameters": {"partial_rotary_factor": 10**400}}, "partial_rotary_factor"),
    ({"vocab_size": 10**20}, "vocab_size: expected a positive integer up to 2147483647, got 10"),
    ({"hidden_size": 2**31}, "hidden_size: .*up to 2147483647, got 2147483648"),
    ({"head_dim": 10**20}, "head_dim: .*up to 2147483647"),
    ({"head_dim": 10**5000}, "head_dim: .*up to 2147483647, got something too large to show"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: .*up to 65536, got 1000000000"),
    ({"full_attention_interval": 10**20}, "full_attention_interval"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number"),
    ({"rope_theta": 10**400, "rope_parameters": {}}, "rope_theta: expected a positive number"),
    ({"eos_token_id": 97}, r"eos_token_id: expected ids below vocab_size \(97\), got \[97\]"),
    ({"eos_token_id": [3, 10**20]}, "eos_token_id: expected ids below vocab_size"),
    ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "gives 3"),
    ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "gives 0"),
]
FEATURE_REFUSALS = [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type.*'default'.*yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type.*linear"),
    ({"rope_parameters": [1]}, "rope_parameters: expected an object"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got \"gelu\""),
    ({"attention_bias": "no"}, "attention_bias: expected true or false"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: expected 0 or 1, got 2"),
    ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers"),
    ({"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ({"dtype": "float8_e4m3fn"}, "dtype: expected one of float32, bfloat16, float16"),
    ({"dtype": 3}, "dtype"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"bos_token_id": -1}, "bos_token_id"),
    ({"pad_token_id": 1.5}, "pad_token_id"),
    ({"layer_types": "full_attention"}, "layer_types: expected a list of strings"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types: expected 4 entries.*got 3"),
    ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
    ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "architectures.*Qwen3_5ForCausalLM"),
    ({"architectures": "Qwen3_5ForCausalLM"}, "architectures"),
]
MOE_REFUSALS = [
    ({"num_experts": 0}, "num_experts"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most num_experts"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
]


@pytest.mark.parametrize(("changes", "message"), NUMBER_REFUSALS + FEATURE_REFUSALS)
@pytest.mark.parametrize("wrap", [dict, nested])
def test_refused(changes, message, wrap):
    raw = wrap(hf_config(**changes))
    if "architectures" in changes:
        raw["architectures"] = changes["architectures"]
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_dict(raw, source="some/config.json")
    assert str(error.value).startswith("some/config.json: ")


@pytest.mark.parametrize(("changes", "message"), MOE_REFUSALS)
def test_moe_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(hf_config(moe=True, **changes))


def test_dense_models_ignore_expert_settings():
    assert not read(hf_config(norm_topk_prob=False, mlp_only_layers=[1])).is_moe


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "llama", "text_config": hf_config()},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_vl_text"}},
        {"model_type": None},
        {"model_type": ["qwen3_5"]},
        {"hidden_size": 64},
        {},
    ],
)
def test_other_models_are_refused_with_the_supported_ones_listed(raw):
    with pytest.raises(ValueError, match="unsupported model_type") as error:
        read(raw)
    for name in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        assert name in str(error.value)


def test_text_config_must_be_an_object():
    with pytest.raises(ValueError, match="text_config: expected an object"):
        read({"model_type": "qwen3_5", "text_config": "x"})


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"bits": 4}}, "unknown method"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "affine"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
    ],
)
@pytest.mark.parametrize("at_top", [False, True])
def test_quantised_configs_are_refused(settings, method, at_top):
    raw = nested(hf_config(), **settings) if at_top else nested(hf_config(**settings))
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: quantised.*{method}"):
        read(raw)


def test_contradicting_tie_word_embeddings_are_refused():
    raw = nested(hf_config(tie_word_embeddings=False), tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tie_word_embeddings: text_config says false"):
        read(raw)


def test_everything_wrong_is_in_one_error():
    with pytest.raises(ValueError, match="3 problems") as error:
        read(hf_config(hidden_size=0, hidden_act="gelu", dtype="int8"))
    for key in ("hidden_size", "hidden_act", "dtype"):
        assert key in str(error.value)


def test_constructed_configs_are_checked_too():
    config = read(hf_config())
    with pytest.raises(ValueError, match="num_attention_heads"):
        dataclasses.replace(config, num_attention_heads=3)
    with pytest.raises(ValueError, match="hidden_size"):
        dataclasses.replace(config, hidden_size=0)
    with pytest.raises(ValueError, match="vocab_size: .*up to"):
        dataclasses.replace(config, vocab_size=10**5000)
    with pytest.raises(ValueError, match="partial_rotary_factor: "):
        dataclasses.replace(config, partial_rotary_factor=1e308)
    with pytest.raises(ValueError, match="eos_token_id: expected ids below"):
        dataclasses.replace(config, eos_token_id=(-1,))


def test_absurd_numbers_that_do_not_matter_are_ignored():
    assert read(hf_config(some_new_key=10**5000)) == read(hf_config())


# --- files -----------------------------------------------------------------------------------


def test_from_pretrained(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    assert ModelConfig.from_pretrained(tmp_path) == read(hf_config())
    assert ModelConfig.from_pretrained(str(tmp_path)) == read(hf_config())


def test_absent_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe{}", b"{'a': 1}", b"[" * 100000])
def test_files_that_are_not_json(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)


def test_integers_longer_than_python_reads(tmp_path):
    raw = json.dumps(hf_config()).replace('"head_dim": 16', '"head_dim": ' + "1" * 5000)
    (tmp_path / "config.json").write_text(raw)
    message = r"config\.json: head_dim: expected a positive integer, got .*5000 characters"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(raw.replace("head_dim", "unknown"))
    assert ModelConfig.from_pretrained(tmp_path).head_dim == 256


GENERATION_REFUSALS = [
    ("[" * 100000, "is not valid JSON"),
    ('{"a": ' * 100000, "is not valid JSON"),
    ("{", "is not valid JSON"),
    ("[]", "expected a JSON object, got list"),
    ('{"eos_token_id": 97}', "eos_token_id 97 is not an id below vocab_size=97"),
    ('{"eos_token_id": [3, -1]}', "eos_token_id -1 is not an id.*ids start at 0"),
    ('{"eos_token_id": true}', "eos_token_id True is not an id"),
    ('{"eos_token_id": %s}' % ("1" * 5000), "eos_token_id '1.*5000 characters.*is not an id"),
]


@pytest.mark.parametrize(("text", "message"), GENERATION_REFUSALS)
def test_generation_configs_that_are_refused(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        end_token_ids(tmp_path, read(hf_config()))
    assert "generation_config.json" in str(error.value)


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    config = read(hf_config(eos_token_id=4))
    assert end_token_ids(tmp_path, config) == (4,)
    for text, ids in (("{}", (4,)), ('{"eos_token_id": 0}', (0,)), ('{"eos_token_id": []}', ())):
        (tmp_path / "generation_config.json").write_text(text)
        assert end_token_ids(tmp_path, config) == ids


def test_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got list"):
        ModelConfig.from_pretrained(tmp_path)


def test_modelopt_sidecar_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    sidecar = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantised weights \(NVFP4\)"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "linear", "attention", "value_heads", "experts"),
    [("qwen3.5-35b-a3b", 30, 10, 32, 256), ("qwen3.5-397b-a17b", 45, 15, 64, 512)],
)
def test_shipped_configs(name, linear, attention, value_heads, experts):
    path = shipped_configs()[name]
    config = ModelConfig.from_dict(json.loads(path.read_text()), source=path.name)
    assert (len(config.linear_layers), len(config.attention_layers)) == (linear, attention)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (16, value_heads)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (128, 128)
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (2, 256, 64)
    assert config.num_experts == experts
    assert config.mtp_num_hidden_layers == 1
