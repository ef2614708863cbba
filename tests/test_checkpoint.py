import json
from pathlib import Path

import pytest
import torch
from checkpoints import hf_config
from safetensors.torch import save_file

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export import checkpoint
from trtllm_treewy.export.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    find_sources,
    load_model,
    read_tensors,
)
from trtllm_treewy.model import Qwen3_5ForCausalLM


def small_config(moe=False, **changes):
    return hf_config(moe=moe, vocab_size=40, **changes)


def weights(raw, dtype=torch.float32):
    """Random tensors under the model's own names."""
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in Qwen3_5ForCausalLM(ModelConfig.from_dict(raw)).state_dict().items()
        }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write(directory: Path, raw, tensors, shards=1):
    """A checkpoint directory; tensors go to the shards in turn."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, directory / SINGLE_NAME)
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: tensors[n] for n in tensors if weight_map[n] == file}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_index(directory, edit):
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def split_experts(tensors):
    """The same weights with every expert stored by itself."""
    result = {}
    for name, tensor in tensors.items():
        block, _, kind = name.rpartition(".experts.")
        if not block:
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            parts = halves if kind == "gate_up_proj" else {"down_proj": matrix}
            for half, part in parts.items():
                result[f"{block}.experts.{expert}.{half}.weight"] = part.contiguous()
    return result


def assert_loaded(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


@pytest.fixture
def dense(tmp_path):
    raw = small_config()
    tensors = weights(raw)
    write(tmp_path / "m", raw, tensors)
    return tmp_path / "m", raw, tensors


@pytest.fixture
def sharded(tmp_path):
    raw = small_config()
    tensors = weights(raw)
    write(tmp_path / "m", raw, tensors, shards=3)
    return tmp_path / "m", raw, tensors


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path, shards, moe, tied):
    raw = small_config(moe=moe, tie_word_embeddings=tied)
    tensors = weights(raw)
    write(tmp_path, raw, tensors, shards)
    model = load_model(tmp_path)
    assert_loaded(model, tensors)
    assert ("lm_head.weight" in model.state_dict()) is not tied
    assert any(name.startswith("mtp.") for name in model.state_dict())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_loads_what_transformers_saves(tmp_path):
    from checkpoints import write_checkpoint

    hf = write_checkpoint(tmp_path, small_config(moe=True))
    state = load_model(tmp_path).state_dict()
    for name, tensor in hf.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_text_part_of_multimodal_checkpoints(tmp_path, prefix, head):
    text = small_config()
    tensors = weights(text)
    stored = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2),
        "visual.merger.norm.bias": torch.zeros(3, dtype=torch.int8),
    }
    for name, tensor in tensors.items():
        name = head if name == "lm_head.weight" else name
        stored[prefix + name.removeprefix("model.") if name.startswith("model.") else name] = tensor
    write(tmp_path, {"model_type": "qwen3_5", "text_config": text}, stored, shards=2)
    assert_loaded(load_model(tmp_path), tensors)


def test_lm_head_of_a_tied_checkpoint_is_ignored(tmp_path):
    raw = small_config(tie_word_embeddings=True)
    tensors = weights(raw)
    write(tmp_path, raw, {**tensors, "lm_head.weight": torch.zeros(3, 3)})
    assert_loaded(load_model(tmp_path), tensors)


def test_mtp_tensors_are_ignored_when_the_config_has_no_mtp(tmp_path):
    raw = small_config()
    tensors = weights(raw)
    write(tmp_path, {**raw, "mtp_num_hidden_layers": 0}, tensors)
    model = load_model(tmp_path)
    assert model.mtp is None
    assert_loaded(model, {n: t for n, t in tensors.items() if not n.startswith("mtp.")})


@pytest.mark.parametrize("shards", [1, 4])
def test_experts_stored_one_by_one(tmp_path, shards):
    raw = small_config(moe=True)
    tensors = weights(raw)
    write(tmp_path, raw, split_experts(tensors), shards)
    assert_loaded(load_model(tmp_path), tensors)


def test_experts_of_the_mtp_layer_alone_one_by_one(tmp_path):
    raw = small_config(moe=True)
    tensors = weights(raw)
    mtp = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    rest = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    write(tmp_path, raw, {**rest, **split_experts(mtp)})
    assert_loaded(load_model(tmp_path), tensors)


def test_a_single_expert(tmp_path):
    raw = small_config(moe=True, num_experts=1, num_experts_per_tok=1)
    tensors = weights(raw)
    for form in (tensors, split_experts(tensors)):
        write(tmp_path, raw, form)
        assert_loaded(load_model(tmp_path), tensors)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtypes(tmp_path, dtype, expected, stored):
    raw = small_config(dtype="bfloat16")
    tensors = weights(raw, stored)
    write(tmp_path, raw, tensors)
    model = load_model(tmp_path, dtype=dtype)
    assert_loaded(model, tensors)
    for name, tensor in model.state_dict().items():
        is_gate = name.endswith((".A_log", ".dt_bias"))
        assert tensor.dtype == (torch.float32 if is_gate else expected), name


def test_gates_are_not_rounded_on_the_way(tmp_path):
    raw = small_config(dtype="bfloat16")
    tensors = weights(raw)
    write(tmp_path, raw, tensors)
    name = "model.layers.0.linear_attn.A_log"
    assert torch.equal(load_model(tmp_path).state_dict()[name], tensors[name])


def test_config_argument_comes_before_the_file(dense):
    directory, raw, _ = dense
    config = ModelConfig.from_dict({**raw, "mtp_num_hidden_layers": 0})
    assert load_model(directory, config).mtp is None


def test_progress_counts_every_tensor(dense):
    directory, _, tensors = dense
    seen = []
    load_model(directory, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(tensors)) for i in range(len(tensors))]


def test_weights_are_copies(dense):
    directory, _, tensors = dense
    model = load_model(directory)
    file = directory / SINGLE_NAME
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\xff" * 1000)
    assert_loaded(model, tensors)


def test_index_that_names_the_single_file(dense):
    directory, _, tensors = dense
    index = {"weight_map": dict.fromkeys(tensors, SINGLE_NAME)}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    assert_loaded(load_model(directory), tensors)


# --- names and shapes, without a model -------------------------------------------------------


def test_find_sources_reads_no_data(tmp_path, monkeypatch):
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / SINGLE_NAME)
    monkeypatch.setattr(checkpoint, "_read", lambda *_: pytest.fail("data was read"))
    (source,) = find_sources(tmp_path, {"a.weight": torch.Size([2, 3])})
    assert (source.name, source.shape) == ("a.weight", (2, 3))
    assert (source.parts[0].dtype, source.parts[0].file) == ("F32", tmp_path / SINGLE_NAME)


def test_all_problems_in_one_error_and_nothing_read(tmp_path, monkeypatch):
    raw = small_config()
    tensors = weights(raw)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
    write(tmp_path, raw, tensors)
    monkeypatch.setattr(checkpoint, "_read", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        load_model(tmp_path)
    text = str(error.value)
    assert "tensors missing from model.safetensors (1):\n    model.norm.weight [32]" in text
    assert "unexpected tensors (1):\n    model.layers.9.mlp.up_proj.weight" in text
    assert "model.layers.1.mlp.up_proj.weight (model.safetensors): expected [48, 32], got" in text
    assert "got [3, 5]" in text


def test_long_lists_are_cut_with_a_count(tmp_path):
    expected = {f"w{i}": (1,) for i in range(100)}
    save_file({f"x{i}": torch.zeros(1) for i in range(20)}, tmp_path / SINGLE_NAME)
    with pytest.raises(ValueError, match=r"missing from model.safetensors \(100\)") as error:
        find_sources(tmp_path, expected)
    assert "unexpected tensors (20)" in str(error.value)
    assert "... and 92 more" in str(error.value)
    assert "... and 12 more" in str(error.value)


def test_missing_mtp_says_how_to_do_without(tmp_path):
    raw = small_config()
    tensors = {n: t for n, t in weights(raw).items() if not n.startswith("mtp.")}
    write(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=r"(?s)mtp\.fc\.weight.*hint.*mtp_num_hidden_layers 0"):
        load_model(tmp_path)


def test_missing_head_of_an_untied_model(dense):
    directory, raw, tensors = dense
    del tensors["lm_head.weight"]
    write(directory, raw, tensors)
    with pytest.raises(ValueError, match=r"(?s)lm_head\.weight.*hint: tie_word_embeddings"):
        load_model(directory)


def test_an_expert_that_is_missing_or_misshapen_is_named(tmp_path):
    raw = small_config(moe=True)
    tensors = split_experts(weights(raw))
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    tensors["model.layers.2.mlp.experts.0.down_proj.weight"] = torch.zeros(1, 1)
    write(tmp_path, raw, tensors)
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    text = str(error.value)
    assert "missing from model.safetensors (1):" in text
    assert "model.layers.1.mlp.experts.4.up_proj.weight [24, 32]" in text
    assert "model.layers.2.mlp.experts.0.down_proj.weight" in text
    assert "expected [32, 24], got [1, 1]" in text
    assert "unexpected" not in text


def test_absent_experts_are_named_once_a_tensor(tmp_path):
    raw = small_config(moe=True)
    tensors = {n: t for n, t in weights(raw).items() if "layers.1.mlp.experts" not in n}
    write(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=r"missing from model.safetensors \(2\)") as error:
        load_model(tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj [6, 48, 32]" in str(error.value)


def test_surplus_experts_are_unexpected(tmp_path):
    raw = small_config(moe=True)
    tensors = weights(raw)
    extra = {"model.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(24, 32)}
    write(tmp_path, raw, {**tensors, **extra})
    with pytest.raises(ValueError, match=r"unexpected tensors \(1\)"):
        load_model(tmp_path)


def test_a_second_mtp_layer_is_unexpected(dense):
    directory, raw, tensors = dense
    extra = {"mtp.layers.1.input_layernorm.weight": torch.zeros(32)}
    write(directory, raw, {**tensors, **extra})
    with pytest.raises(ValueError, match=r"unexpected tensors \(1\):\n *mtp\.layers\.1"):
        load_model(directory)


def test_one_tensor_under_two_names(dense):
    directory, raw, tensors = dense
    twin = {"model.language_model.norm.weight": tensors["model.norm.weight"].clone()}
    write(directory, raw, {**tensors, **twin})
    with pytest.raises(ValueError, match=r"duplicate tensors.*\n.*norm.*are both model\.norm"):
        load_model(directory)


# --- quantised -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn]
)
def test_quantised_dtypes(dense, dtype):
    directory, raw, tensors = dense
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(48, 32).to(dtype)
    write(directory, raw, tensors)
    with pytest.raises(ValueError, match=r"quantised tensors, which are not supported \(1\)"):
        load_model(directory)


@pytest.mark.parametrize(
    "suffix",
    [
        "weight_scale_inv",
        "weight_scale",
        "weight_packed",
        "weight_zero_point",
        "input_scale",
        "qweight",
        "qzeros",
        "scales",
        "biases",
        "g_idx",
    ],
)
def test_quantised_names(dense, suffix):
    directory, raw, tensors = dense
    tensors[f"model.layers.0.mlp.up_proj.{suffix}"] = torch.zeros(4)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    write(directory, raw, tensors)
    with pytest.raises(ValueError, match=rf"quantised[^\n]*\n[^\n]*{suffix}") as error:
        load_model(directory)
    assert "missing" not in str(error.value)


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 4, 8, 100, 0.5, 0.999, -1])
def test_truncated_single_file(dense, fraction):
    directory, _, _ = dense
    file = directory / SINGLE_NAME
    data = file.read_bytes()
    cut = int(fraction * len(data)) if isinstance(fraction, float) else fraction
    file.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable .*truncated"):
        load_model(directory)


def test_trailing_bytes(dense):
    directory, _, _ = dense
    with (directory / SINGLE_NAME).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_model(directory)


def test_truncated_and_absent_shards_are_named_together(sharded):
    directory, _, tensors = sharded
    first, second, _ = sorted(directory.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-7])
    second.unlink()
    with pytest.raises(ValueError, match=r"unreadable files \(2\)") as error:
        load_model(directory)
    text = str(error.value)
    assert f"{first} is not a readable safetensors file" in text
    assert f"{second} does not exist" in text
    # What those shards would have held is not reported a second time.
    assert "missing" not in text


def test_other_problems_are_told_beside_an_unreadable_shard(sharded):
    directory, raw, tensors = sharded
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["odd"] = torch.zeros(1)
    write(directory, raw, tensors, shards=3)
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    files = set(index.values()) - {index["model.norm.weight"], index["odd"]}
    (directory / files.pop()).write_bytes(b"")
    with pytest.raises(ValueError, match="unreadable") as error:
        load_model(directory)
    assert "misshapen tensors (1)" in str(error.value)
    assert "unexpected tensors (1)" in str(error.value)


def test_unreadable_shard_of_experts_stored_one_by_one(tmp_path):
    raw = small_config(moe=True)
    write(tmp_path, raw, split_experts(weights(raw)), shards=2)
    first = min(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"unreadable files \(1\)") as error:
        load_model(tmp_path)
    assert "missing" not in str(error.value)
    assert "unexpected" not in str(error.value)


def test_git_lfs_pointer(dense):
    directory, _, _ = dense
    (directory / SINGLE_NAME).write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        load_model(directory)


def test_directory_in_place_of_a_shard(sharded):
    directory, _, _ = sharded
    file = min(directory.glob("*.safetensors"))
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match="unreadable files"):
        load_model(directory)


def test_index_that_names_a_tensor_the_shard_lacks(sharded):
    directory, _, _ = sharded
    edit_index(directory, lambda m: m.update({"model.norm.weight": m["lm_head.weight"]}))
    with pytest.raises(ValueError, match="index") as error:
        load_model(directory)
    assert "model.norm.weight: the index says model-" in str(error.value)
    assert "which lacks it" in str(error.value)


def test_index_that_leaves_a_tensor_out(sharded):
    directory, _, _ = sharded
    edit_index(directory, lambda m: m.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: in model-.* the index leaves out"):
        load_model(directory)


def test_tensor_in_two_shards(sharded):
    directory, _, tensors = sharded
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    home = index["model.norm.weight"]
    other = next(file for file in index.values() if file != home)
    held = {n: tensors[n] for n, file in index.items() if file == other}
    save_file({**held, "model.norm.weight": torch.zeros(32)}, directory / other)
    with pytest.raises(ValueError, match="duplicate tensors") as error:
        load_model(directory)
    assert f"model.norm.weight: in {home} and in {other}" in str(error.value)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", "", ".", "..", "a\0b", 3],
)
def test_index_that_leaves_the_directory(sharded, file):
    directory, _, _ = sharded
    edit_index(directory, lambda m: m.update({"model.norm.weight": file}))
    with pytest.raises(ValueError, match="expected the name of a file beside the index"):
        load_model(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(sharded, text):
    directory, _, _ = sharded
    (directory / INDEX_NAME).write_text(text)
    with pytest.raises(ValueError, match=INDEX_NAME):
        load_model(directory)


def test_stale_single_file_beside_shards(sharded):
    directory, _, tensors = sharded
    save_file(tensors, directory / SINGLE_NAME)
    with pytest.raises(ValueError, match=r"both model\.safetensors and an index"):
        load_model(directory)


def test_absent_directory_config_and_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    with pytest.raises(FileNotFoundError, match="no weight files"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors.*pytorch_model\.bin"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_sources(tmp_path / "nowhere", {})


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "fp32", "", torch.int32, None, 3])
def test_unknown_dtype(dense, dtype):
    with pytest.raises(ValueError, match="dtype: expected auto, float32"):
        load_model(dense[0], dtype=dtype)


def test_weights_beyond_float16_are_refused(dense):
    directory, raw, tensors = dense
    tensors["model.norm.weight"][3] = -1e6
    write(directory, raw, tensors)
    with pytest.raises(ValueError, match=r"model\.norm\.weight does not fit float16.*1e\+06"):
        load_model(directory, dtype="float16")
    load_model(directory, dtype="bfloat16")


def test_file_that_changes_between_check_and_read(tmp_path):
    file = tmp_path / SINGLE_NAME
    save_file({"a": torch.zeros(4, 1)}, file)
    sources = find_sources(tmp_path, {"a": (4, 1)})
    save_file({"a": torch.zeros(1, 1)}, file)
    with pytest.raises(ValueError, match=r"changed.*a: expected \[4, 1\], got \[1, 1\]"):
        list(read_tensors(sources, torch.float32))
    save_file({"b": torch.zeros(1, 1)}, file)
    with pytest.raises(ValueError, match="a cannot be read"):
        list(read_tensors(sources, torch.float32))
    file.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        list(read_tensors(sources, torch.float32))


def test_scalars_and_empty_expectations(tmp_path):
    save_file({"a": torch.tensor(3.0)}, tmp_path / SINGLE_NAME)
    ((_, value),) = read_tensors(find_sources(tmp_path, {"a": ()}), torch.float32)
    assert value == 3.0
    assert list(read_tensors((), torch.float32)) == []
