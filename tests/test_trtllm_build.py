"""`trtllm-build` with our flags, against the double; and the 15 traps of its contract."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import hf_config, write_checkpoint
from trtllm_world import DOUBLE, build, trtllm_double

from trtllm_treewy.cli import main
from trtllm_treewy.export import trtllm_build
from trtllm_treewy.export.trtllm.convert import convert_checkpoint
from trtllm_treewy.trtllm_config import ARCHITECTURE

RAW = hf_config(vocab_size=96, num_hidden_layers=4)
VERSIONS = ["1.0.0", "1.1.0rc3", "1.2.1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A converted checkpoint, which no test changes."""
    folder = tmp_path_factory.mktemp("converted")
    write_checkpoint(folder / "hf", RAW)
    convert_checkpoint(folder / "hf", folder / "ckpt", max_position_embeddings=256)
    return folder / "ckpt"


@pytest.fixture
def world(monkeypatch):
    with trtllm_double(monkeypatch):
        yield


@pytest.fixture
def make(tmp_path, checkpoint):
    """Builds into tmp_path / "engine"; the one network."""

    def run(*flags):
        return build(checkpoint, tmp_path / "engine", tmp_path / "libtreewy_tensorrt.so", *flags)[0]

    return run


def engine_config(tmp_path):
    return json.loads((tmp_path / "engine" / "config.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_flags_parse_and_are_recorded(monkeypatch, tmp_path, make, version):
    with trtllm_double(monkeypatch, version):
        make("--treewy_plugin", "bfloat16", "--log_level", "error", "--tokens_per_block", "64")
        plugin = engine_config(tmp_path)["build_config"]["plugin_config"]
        assert plugin["treewy_plugin"] == "bfloat16"
        assert plugin["treewy_max_nodes"] == 40
        assert plugin["tokens_per_block"] == 64  # every other flag passes through
        from tensorrt_llm.commands import build as command

        options = {x.dest: x for x in command.parse_arguments()._actions}
        choices = ["auto", "float16", "bfloat16", "float32", "disable"]
        assert options["treewy_plugin"].choices == choices
        assert options["treewy_plugin"].default == "auto"
        assert options["treewy_max_nodes"].default == 64
        assert options["treewy_max_nodes"].type is int
        assert "gpt_attention_plugin" in options


def test_engine_directory(world, tmp_path, make, checkpoint):
    make()
    names = {path.name for path in (tmp_path / "engine").iterdir()}
    assert names == {"config.json", "rank0.engine", "draft.safetensors", "generation_config.json"}
    raw = engine_config(tmp_path)
    assert raw["pretrained_config"]["architecture"] == ARCHITECTURE
    flags = raw["build_config"]["plugin_config"]
    assert (flags["treewy_plugin"], flags["treewy_max_nodes"]) == ("auto", 40)
    # Built again in its place; what else is there goes with the engine that it belonged to.
    (tmp_path / "engine" / "old").write_text("of the engine before")
    make()
    assert not (tmp_path / "engine" / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"engine", "libtreewy_tensorrt.so"}


def test_both_commands(world, tmp_path, checkpoint, capsys):
    library = tmp_path / "libtreewy_tensorrt.so"
    library.write_bytes(b"")
    words = ["--checkpoint_dir", str(checkpoint), "--treewy_library", str(library),
             "--max_seq_len", "64"]  # fmt: skip
    assert main(["trtllm-build", *words, "--output_dir", str(tmp_path / "a")]) == 0
    assert trtllm_build.main([*words, "--output_dir", str(tmp_path / "b")]) == 0
    for name in "ab":
        assert (tmp_path / name / "rank0.engine").is_file()
    with pytest.raises(SystemExit) as stop:
        main(["trtllm-build", "--help"])
    assert stop.value.code == 0
    assert "--treewy_max_nodes" in capsys.readouterr().out


def test_other_models_build_as_without_us(world, tmp_path, monkeypatch):
    """disable: no library is loaded, and the library's own command does the rest."""
    from tensorrt_llm.commands import build as command

    (tmp_path / "config.json").write_text('{"architecture": "LlamaForCausalLM"}')
    seen = []
    monkeypatch.setattr(command, "main", lambda: seen.append(list(sys.argv)))
    trtllm_build.run(["--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "out"),
                      "--treewy_plugin", "disable", "--max_batch_size", "3"])  # fmt: skip
    assert seen[0][:3] == ["trtllm-build", "--checkpoint_dir", str(tmp_path)]
    assert seen[0][3:5] == ["--output_dir", str(tmp_path / "out")]
    assert "--max_batch_size" in seen[0]


REFUSALS = {
    "plugin": (["--treewy_plugin", "int8"], "invalid choice"),
    "off": (["--treewy_plugin", "disable"], "no other implementation"),
    "nodes": (["--treewy_max_nodes", "129"], "from 1 to 128, got 129"),
    "no nodes": (["--treewy_max_nodes", "0"], "from 1 to 128, got 0"),
    "word": (["--treewy_max_nodes", "x"], "invalid int value"),
    "unknown": (["--treewy_nodes", "4"], "unrecognized arguments"),
    "draft": (["--max_draft_len", "8"], "--max_draft_len is 8 and --treewy_max_nodes 40"),
    "mode": (["--speculative_decoding_mode", "medusa"], "trees are inputs"),
    "gather": (["--gather_context_logits"], "--gather_context_logits needs"),
    "beams": (["--max_beam_width", "4"], "--max_beam_width is 4"),
    "padded": (["--remove_input_padding", "disable"], "rows are packed"),
    "attention": (["--gpt_attention_plugin", "disable"], "rows are packed"),
    "continuous": (["--kv_cache_type", "continuous"], "expected paged"),
    "lora": (["--lora_plugin", "auto"], "--lora_plugin is"),
    "fusion": (["--reduce_fusion", "enable"], "--reduce_fusion is True"),
    "streaming": (["--streamingllm", "enable"], "--streamingllm is True"),
    "prompts": (["--max_prompt_embedding_table_size", "8"], "must be 0"),
    "tokens": (["--max_num_tokens", "20"], "less than a tree's 40 nodes"),
    "length": (["--max_seq_len", "1000"], "rotary tables for 256 positions"),
    "library": (["--treewy_library", "/nowhere/x.so"], "there is no file /nowhere/x.so"),
    "no checkpoint": (["--checkpoint_dir", "/nowhere"], "/nowhere/config.json does not exist"),
}


@pytest.mark.parametrize(
    ("version", "case"),
    [("1.2.0", case) for case in REFUSALS] + [("1.1.0", case) for case in ("off", "lora", "nodes")],
)
def test_refused_with_one_line_and_nothing_written(
    monkeypatch, tmp_path, checkpoint, capsys, version, case
):
    flags, reason = REFUSALS[case]
    library = tmp_path / "libtreewy_tensorrt.so"
    library.write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with trtllm_double(monkeypatch, version):
        code = trtllm_build.main(
            ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine"),
             "--treewy_library", str(library), "--treewy_max_nodes", "40",
             "--max_seq_len", "128", *flags]
        )  # fmt: skip
    err = capsys.readouterr().err
    assert code == 2
    assert reason in err
    assert err.startswith("trtllm-build: error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RAW, "convert it first"),
        ({"architecture": "NobodyForCausalLM"}, "knows no architecture 'NobodyForCausalLM'"),
        ({"architecture": ARCHITECTURE}, "treewy has format None"),
        (None, "is not valid JSON"),
    ],
)
def test_checkpoints_of_others(world, tmp_path, capsys, config, reason):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.json").write_text("{" if config is None else json.dumps(config))
    words = ["--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "engine")]
    assert main(["trtllm-build", *words]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert not (tmp_path / "engine").exists()


def test_what_is_there_is_not_lost(world, tmp_path, make, capsys):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no engine"):
        make()
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("there", [False, True])
def test_a_build_that_fails_leaves_what_was(world, tmp_path, make, monkeypatch, there):
    if there:
        make()
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    from tensorrt_llm import builder

    def fail(self, engine_dir):
        (Path(engine_dir) / "rank0.engine").write_bytes(b"half")
        raise RuntimeError("out of memory\nin tactic 7")

    monkeypatch.setattr(builder.Engine, "save", fail)
    with pytest.raises(ValueError, match="the build failed: out of memory in tactic 7"):
        make()
    after = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    after.pop("libtreewy_tensorrt.so"), before.pop("libtreewy_tensorrt.so", None)
    assert after == before
    assert not [path for path in tmp_path.iterdir() if "building" in path.name]


def test_dry_run(world, tmp_path, make):
    make("--dry_run")
    assert not (tmp_path / "engine" / "rank0.engine").exists()
    assert engine_config(tmp_path)["build_config"]["plugin_config"]["treewy_max_nodes"] == 40
    with pytest.raises(ValueError, match="--dry_run would replace"):
        make("--dry_run")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.3.0rc1", "ended with 1.2"),
        ("2.0.0", "ended with 1.2"),
        ("0.21.0", "expected 1.0 to 1.2"),
        ("odd", "expected 1.0 to 1.2"),
    ],
)
def test_other_versions(monkeypatch, capsys, version, reason):
    with trtllm_double(monkeypatch, version):
        assert main(["trtllm-build", "--checkpoint_dir", "x"]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert 'pip install "tensorrt-llm>=1.0,<1.3"' in err
    assert err.count("\n") == 1


def test_without_the_library(capsys):
    assert main(["trtllm-build", "--checkpoint_dir", "x"]) == 2
    err = capsys.readouterr().err
    assert "tensorrt_llm is not installed" in err
    assert err.count("\n") == 1
    assert main(["trtllm-build", "--help"]) == 0
    out = capsys.readouterr().out
    for said in ("--checkpoint_dir", "--treewy_plugin", "--treewy_library", "is not installed"):
        assert said in out


def test_a_library_that_is_not_as_expected(world, monkeypatch, capsys):
    from tensorrt_llm import functional
    from tensorrt_llm.layers import moe

    monkeypatch.delattr(functional, "gather_last_token_logits")
    monkeypatch.delattr(moe, "SharedMoE")
    assert main(["trtllm-build", "--checkpoint_dir", "x"]) == 2
    err = capsys.readouterr().err
    assert "tensorrt_llm.layers.moe.SharedMoE: missing and 1 more" in err


def test_plugins_that_do_not_register(world, tmp_path, make, monkeypatch):
    import tensorrt

    monkeypatch.setattr(tensorrt.Registry, "load_library", lambda self, path: None)
    with pytest.raises(ValueError, match="cannot load it as plugins"):
        make()
    assert not (tmp_path / "engine").exists()


def test_stock_command(world, tmp_path, checkpoint, monkeypatch):
    """Without the wrapper: the class file alone, the plugin on, 64 nodes or the draft length's."""
    from tensorrt_llm import builder
    from tensorrt_llm.commands import build as command

    import trtllm_treewy.export.trtllm as package

    file = Path(package.__file__).parent / "model_class.py"
    library = tmp_path / "libtreewy_tensorrt.so"
    library.write_bytes(b"")
    monkeypatch.setenv("TREEWY_TENSORRT_LIBRARY", str(tmp_path))
    words = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir",
             str(tmp_path / "engine"), "--model_cls_file", str(file), "--model_cls_name",
             "TreewyQwen3_5ForCausalLM", "--max_seq_len", "64",
             "--max_batch_size", "2"]  # fmt: skip
    for flags, nodes in (([], 64), (["--max_draft_len", "15"], 16)):
        monkeypatch.setattr(sys, "argv", [*words, *flags])
        command.main()
        tree = builder.built[-1].inputs["treewy_parents"]
        assert tree.dim_range["treewy_N"] == [[1, nodes, nodes]]
    from trtllm_treewy.runtime.trtllm_engine import TrtllmEngine

    engine = TrtllmEngine.read(tmp_path / "engine")
    assert (engine.max_nodes, engine.plugin_dtype) == (16, "float32")
    monkeypatch.delenv("TREEWY_TENSORRT_LIBRARY")


def test_the_class_file_without_the_library():
    import trtllm_treewy.export.trtllm as package

    file = Path(package.__file__).parent / "model_class.py"
    code = f"import runpy; runpy.run_path({str(file)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a model class for TensorRT-LLM, which cannot be imported" in done.stderr
    assert "pip install" in done.stderr


# ---- the traps, by their numbers in the notes of the contract


def test_trap_1_architecture_is_registered(world, tmp_path, make, checkpoint):
    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    with pytest.raises(KeyError):
        PretrainedConfig.from_json_file(checkpoint / "config.json")
    make()
    assert MODEL_MAP[ARCHITECTURE].config_class.__name__ == "TreewyQwen3_5Config"
    # As `Engine.from_dir` reads an engine's config.
    config = PretrainedConfig.from_dict(engine_config(tmp_path)["pretrained_config"])
    assert config.setting.whole.num_hidden_layers == 4


def test_trap_2_paged_state_plays_no_part(world, make):
    networks = [make("--paged_state", word) for word in ("enable", "disable")]
    assert networks[0].inputs.keys() == networks[1].inputs.keys()
    assert "past_rnn_state_0" in networks[0].inputs
    assert not any("ptr" in name or name == "slot_mapping" for name in networks[0].inputs)


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0"])
def test_trap_3_workers(monkeypatch, tmp_path, make, checkpoint, version):
    """A spawned worker unpickles the config and the flags, and knows the architecture by that."""
    with trtllm_double(monkeypatch, version):
        make()
        from trtllm_treewy.export.trtllm import model, plugin_config

        flags = plugin_config.TreewyPluginConfig()
        flags.treewy_max_nodes = 12
        classes = model.TreewyQwen3_5ForCausalLM, model.TreewyQwen3_5Config
        assert {x.__module__ for x in classes} == {"trtllm_treewy.export.trtllm.model"}
        data = pickle.dumps((flags, classes))
    code = (
        "import pickle, sys; flags, classes = pickle.load(sys.stdin.buffer);"
        "from tensorrt_llm.models import MODEL_MAP; from tensorrt_llm import builder;"
        f"assert MODEL_MAP[{ARCHITECTURE!r}] is classes[0];"
        "assert isinstance(flags, builder.PluginConfig); print(flags.treewy_max_nodes)"
    )
    paths = [str(DOUBLE), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
           "TRTLLM_DOUBLE": version.rpartition(".")[0]}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, env=env)
    assert done.stdout.strip() == b"12", done.stderr.decode()


def test_trap_3_workers_find_the_plugins(world, tmp_path, make, monkeypatch):
    """A worker is a process without our library: its path is in the environment meanwhile."""
    from tensorrt_llm.commands import build as command

    seen = []
    real = command.main

    def run():
        import tensorrt

        seen.append(os.environ["TREEWY_TENSORRT_LIBRARY"])
        tensorrt.get_plugin_registry().names.clear()
        real()

    monkeypatch.setattr(command, "main", run)
    monkeypatch.delenv("TREEWY_TENSORRT_LIBRARY", raising=False)
    assert make().find("TreeWyVerify")
    assert seen == [str(tmp_path / "libtreewy_tensorrt.so")]
    assert "TREEWY_TENSORRT_LIBRARY" not in os.environ


def test_trap_3_no_gpu(monkeypatch, tmp_path, make):
    with (
        trtllm_double(monkeypatch, devices=0),
        pytest.raises(ValueError, match="torch finds no CUDA device"),
    ):
        make()
    assert not (tmp_path / "engine").exists()


def test_trap_4_rows_of_a_tree_have_blocks(world, make):
    """The library does not lengthen sequences without a mode; our inputs do it themselves."""
    network = make()
    blocks = network.inputs["kv_cache_block_offsets"].dim_range["max_blocks_per_seq"]
    assert blocks[0][2] == -(-(192 + 39) // 32)
    assert "spec_decoding_packed_mask" in network.inputs


def test_trap_5_layer_types(tmp_path, checkpoint):
    raw = json.loads((checkpoint / "config.json").read_text())
    assert set(raw["layer_types"]) == {"recurrent", "attention"}


def test_trap_6_not_for_the_stock_session(world, make):
    """It asks for exactly the tensors it knows: with ours beside them it refuses the engine."""
    network = make()
    assert any(name.startswith("treewy_") for name in network.inputs)
    assert any(name.startswith("treewy_") for name in network.outputs)


def test_trap_7_and_8_defaults_that_would_be_wrong(world, make, checkpoint):
    network = make()
    assert {node.fields["eps"] for node in network.find("rms_norm")} == {1e-6}
    # Two norms of a block and the last one; q and k of one layer; the gated norm of three.
    assert len(network.find("rms_norm")) == 2 * 4 + 1 + 2 + 3
    from tensorrt_llm.layers import AttentionMaskType
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    from trtllm_treewy.export.trtllm.model import TreewyQwen3_5ForCausalLM

    config = PretrainedConfig.from_json_file(checkpoint / "config.json")
    assert (config.head_size, config.hidden_size // config.num_attention_heads) == (16, 8)
    model = TreewyQwen3_5ForCausalLM(config)
    attention = model.transformer.layers[3].attention
    assert attention.mask_type is AttentionMaskType.causal
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")
                and not name.endswith("dt_bias")]  # fmt: skip


def test_trap_9_fused_feed_forward(world, make):
    assert len(make().find("swiglu")) == 4  # replaced by the builder; see test_trtllm_network


def test_trap_10_and_12_types(world, tmp_path):
    """No constant or weight of another type than the graph's: strongly typed, as the double is."""
    write_checkpoint(tmp_path / "hf", {**RAW, "dtype": "bfloat16"})
    convert_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    network = build(tmp_path / "ckpt", tmp_path / "engine", tmp_path / "lib.so")[0]
    assert not network.find("where")
    from safetensors.torch import load_file
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    from trtllm_treewy.export.trtllm.model import TreewyQwen3_5ForCausalLM

    config = PretrainedConfig.from_json_file(tmp_path / "ckpt" / "config.json")
    model = TreewyQwen3_5ForCausalLM(config)
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.load(load_file(tmp_path / "ckpt" / "rank0.safetensors"))
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before
    assert not model.unexpected


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0"])
def test_trap_11_our_flags_before_the_stock_class(monkeypatch, tmp_path, make, version):
    """An engine's flags, read where the wrapper is not: the stock class leaves ours alone."""
    with trtllm_double(monkeypatch, version):
        make()
        flags = engine_config(tmp_path)["build_config"]["plugin_config"]
        from types import SimpleNamespace

        from trtllm_treewy.export.trtllm import plugin_config

        stock = plugin_config._base.from_arguments(SimpleNamespace(**flags))
        assert not hasattr(stock, "treewy_max_nodes")
        ours = plugin_config.TreewyPluginConfig.from_arguments(SimpleNamespace(**flags))
        assert ours.treewy_max_nodes == 40


def test_trap_13_the_conv_has_no_bias(world, make):
    assert {node.fields["bias"] for node in make().find("GdnPrefillConv1d")} == {0}


def test_trap_14_rotary_tables(world, checkpoint):
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    from trtllm_treewy.export.trtllm.model import TreewyQwen3_5ForCausalLM

    config = PretrainedConfig.from_json_file(checkpoint / "config.json")
    model = TreewyQwen3_5ForCausalLM(config)
    assert model.embed_positions_for_gpt_attention.shape == (1, 256 * 4)  # not the model's 4096


def test_trap_15_plugin_infos_have_the_last_name(world, make):
    for node in make().find("TreeWyVerify"):
        assert node.name is not None
        assert node.info[1] == "TreeWyVerify"
