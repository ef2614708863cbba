"""Converted checkpoints: whole and exact, and refused with one line where they cannot be made."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from onnx_cases import LIMITS, random_prompts
from safetensors.torch import load_file, save_file

from trtllm_treewy.cli import main
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.export.trtllm.convert import convert_checkpoint, load_checkpoint
from trtllm_treewy.export.trtllm.safetensors_writer import SafetensorsWriter
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.trtllm_config import ARCHITECTURE, checkpoint_ranks, model_config

KINDS = {
    "dense": {"vocab_size": 96},
    "moe": {"vocab_size": 96, "moe": True},
    "tied, biased": {"vocab_size": 96, "tie_word_embeddings": True, "attention_bias": True},
    "one KV head": {"vocab_size": 96, "num_key_value_heads": 1},
}


def write(directory, kind):
    changes = dict(KINDS[kind])
    raw = hf_config(moe=changes.pop("moe", False), **changes)
    return raw, write_checkpoint(directory, raw)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_same_logits_as_transformers(tmp_path, kind, ranks):
    raw, hf = write(tmp_path / "hf", kind)
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", ranks=ranks)
    model = load_checkpoint(tmp_path / "out")
    gen = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, raw["vocab_size"], (1, 23), generator=gen)
    with torch.no_grad():
        expected = hf(tokens).logits[0]
    executor = TorchExecutor(model, LIMITS)
    assert executor.try_allocate(0, 30)
    batch = random_prompts(gen, 96, [23], [0], [0])
    batch.token_ids.copy_(tokens[0])
    got = executor.model.logits(executor.prefill(batch).hidden)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_weights_come_back(tmp_path):
    """Bit for bit, but for norms, whose one plus weight does."""
    write(tmp_path / "hf", "moe")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", ranks=2)
    stored = load_model(tmp_path / "hf").state_dict()
    got = load_checkpoint(tmp_path / "out").state_dict()
    assert got.keys() == stored.keys()
    for name, tensor in stored.items():
        if name.endswith("norm.weight") and "linear_attn" not in name and "mtp" not in name:
            assert torch.equal(1.0 + got[name], 1.0 + tensor), name
        else:
            assert torch.equal(got[name], tensor), name


def test_types(tmp_path):
    write(tmp_path / "hf", "moe")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    wide = ("layernorm.weight", "ln_f.weight", "A_log", "dt_bias", "router.weight")
    for name, tensor in tensors.items():
        expected = torch.float32 if name.endswith(wide) else torch.bfloat16
        assert tensor.dtype == expected, name
    assert tensors["transformer.layers.0.gdn.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("ranks", [1, 2])
def test_config(tmp_path, ranks):
    """Every key that the library, or its C++ runtime, reads of a hybrid, as it spells them."""
    raw, _ = write(tmp_path / "hf", "moe")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", ranks=ranks, max_position_embeddings=256)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architecture"] == ARCHITECTURE
    assert config["layer_types"] == ["recurrent", "recurrent", "recurrent", "attention"]
    assert config["mapping"]["tp_size"] == config["mapping"]["world_size"] == ranks
    assert config["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    assert config["logits_dtype"] == "float32"
    assert (config["head_size"], config["rotary_dim"], config["rotary_pct"]) == (16, 4, 0.25)
    assert config["rotary_base"] == 10000000.0
    assert config["max_position_embeddings"] == 256
    # The library's formula for the state: hidden / head, state_size, head.
    heads = config["rnn_hidden_size"] // config["rnn_head_size"]
    assert (heads, config["state_size"], config["rnn_head_size"]) == (4, 24, 16)
    assert model_config(config, "x") == ModelConfig.from_dict(raw)
    assert checkpoint_ranks(config, "x") == ranks


def test_text_files_and_drafter(tmp_path, shipped_model):
    convert_checkpoint(shipped_model, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "rank0.safetensors",
        "draft.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    stored = load_file(shipped_model / "model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "draft.safetensors").items():
        assert torch.equal(tensor, stored[name]), name


def test_without_mtp(tmp_path):
    raw = hf_config(vocab_size=96, mtp_num_hidden_layers=0)
    write_checkpoint(tmp_path / "hf", raw)
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out" / "draft.safetensors").exists()
    assert load_checkpoint(tmp_path / "out").mtp is None


def command(capsys, *words):
    capsys.readouterr()  # transformers shows a bar while a checkpoint is written
    code = main(["convert-checkpoint", *map(str, words)])
    out = capsys.readouterr()
    assert out.out == ""
    return code, out.err


def test_command(tmp_path, capsys):
    write(tmp_path / "hf", "dense")
    target = tmp_path / "made" / "here"
    code, err = command(capsys, tmp_path / "hf", "--output", target, "--tp-size", 2)
    assert (code, err) == (0, f"{target} converted\n")
    assert (target / "rank1.safetensors").is_file()
    # An earlier conversion is replaced, whole.
    code, _ = command(capsys, tmp_path / "hf", "--output", target, "--dtype", "bfloat16")
    assert code == 0
    assert not (target / "rank1.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tp-size", "3"], "tensor parallel size 3 does not divide"),
        (["--tp-size", "0"], "--tp-size"),
        (["--dtype", "int8"], "invalid choice"),
        (["--max-position-embeddings", "5000"], "from 1 to the model's 4096, got 5000"),
        (["--quant", "fp8"], "unrecognized arguments"),
    ],
)
def test_wrong_flags(tmp_path, capsys, words, reason):
    write(tmp_path / "hf", "dense")
    try:
        code, err = command(capsys, tmp_path / "hf", "--output", tmp_path / "out", *words)
    except SystemExit as stop:
        code, err = stop.code, capsys.readouterr().err
    assert code == 2
    assert reason in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def refused(tmp_path, capsys, reason, output="out"):
    before = sorted(tmp_path.rglob("*"))
    code, err = command(capsys, tmp_path / "hf", "--output", tmp_path / output)
    assert code == 2
    assert reason in err
    assert sorted(tmp_path.rglob("*")) == before


def test_other_models_and_broken_ones(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    refused(tmp_path, capsys, "config.json does not exist")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    refused(tmp_path, capsys, "unsupported model_type")
    raw = hf_config(vocab_size=96)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    refused(tmp_path, capsys, "no weight files")
    write_checkpoint(tmp_path / "hf", raw)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**raw, "hidden_size": 48}))
    refused(tmp_path, capsys, "misshapen tensors")


def test_without_attention(tmp_path, capsys):
    raw = hf_config(vocab_size=96, layer_types=["linear_attention"] * 4)
    write_checkpoint(tmp_path / "hf", raw)
    refused(tmp_path, capsys, "no attention layer")


def test_what_is_there_is_not_lost(tmp_path, capsys):
    write(tmp_path / "hf", "dense")
    (tmp_path / "file").write_text("mine")
    refused(tmp_path, capsys, "is a file", output="file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    refused(tmp_path, capsys, "holds no converted checkpoint", output="other")
    refused(tmp_path, capsys, "is the checkpoint itself", output="hf")


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "hf", "dense")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    before = (tmp_path / "out" / "rank0.safetensors").read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(SafetensorsWriter, "write", fail)
    for target in ("out", "new"):
        with pytest.raises(OSError, match="no space"):
            convert_checkpoint(tmp_path / "hf", tmp_path / target, ranks=2)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}
    assert (tmp_path / "out" / "rank0.safetensors").read_bytes() == before


def test_weights_beyond_float16(tmp_path):
    write(tmp_path / "hf", "dense")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6

    save_file(tensors, path)
    with pytest.raises(ValueError, match="does not fit float16"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_reader_refuses(tmp_path):
    write(tmp_path / "hf", "dense")
    made = tmp_path / "made"
    convert_checkpoint(tmp_path / "hf", made, ranks=2)
    path = made / "config.json"
    good = json.loads(path.read_text())

    def reads(reason, **changes):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(ValueError, match=reason):
            load_checkpoint(made)

    with pytest.raises(ValueError, match="made is a converted checkpoint, for TensorRT-LLM: build"):
        convert_checkpoint(made, tmp_path / "again")
    path.write_text('{"pretrained_config": 7}')
    with pytest.raises(ValueError, match="pretrained_config: expected an object, got 7"):
        ModelConfig.from_pretrained(made)
    reads("architecture is 'LlamaForCausalLM'", architecture="LlamaForCausalLM")
    reads("format 7", treewy={"format": 7})
    reads("missing or unknown: dtype", treewy={"format": 1, "model_config": {
        k: v for k, v in good["treewy"]["model_config"].items() if k != "dtype"}})  # fmt: skip
    reads("tensor parallelism alone", mapping={"tp_size": 2, "world_size": 4})
    reads("quant_algo is FP8", quantization={"quant_algo": "FP8"})
    reads("quantization must be an object, got 7", quantization=7)
    reads("expected a mapping with tp_size", mapping={"tp_size": True, "world_size": True})
    reads("dtype must be one of", dtype="int8")
    ours = good["treewy"]
    for name, value in (
        ("hidden_size", 1.5), ("num_key_value_heads", True), ("layer_types", None),
        ("layer_types", [1]), ("mtp_num_hidden_layers", "x"), ("tie_word_embeddings", 1),
        ("rope_theta", "1e6"), ("eos_token_id", [None]), ("bos_token_id", "a"), ("dtype", None),
    ):  # fmt: skip
        spoilt = {**ours, "model_config": {**ours["model_config"], name: value}}
        reads(f"model_config.{name} must be .*, got .*: convert it again", treewy=spoilt)
    path.write_text(json.dumps(good))
    shutil.copyfile(made / "draft.safetensors", made / "rank1.safetensors")
    with pytest.raises(ValueError, match="missing or unknown"):
        load_checkpoint(made)
    (made / "rank1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="rank1"):
        load_checkpoint(made)


def test_writer(tmp_path):
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    empty = torch.zeros(0, 4)
    header = {"x": (x.shape, x.dtype), "empty": (empty.shape, empty.dtype)}
    with SafetensorsWriter(tmp_path / "a.safetensors", header) as writer:
        with pytest.raises(ValueError, match="expected x"):
            writer.write("empty", empty)
        writer.write("x", x.T.contiguous().T)  # strided
        writer.write("empty", empty)
    got = load_file(tmp_path / "a.safetensors")
    assert torch.equal(got["x"], x)
    assert got["empty"].shape == (0, 4)
    with (
        pytest.raises(ValueError, match="x was not written"),
        SafetensorsWriter(tmp_path / "b.safetensors", header),
    ):
        pass
