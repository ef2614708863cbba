"""The executor over TensorRT engines, with a double in TensorRT's place (tensorrt_double.py).

Everything but TensorRT itself is the real thing: engine directories, refusals, memory plan, pools,
buffers, buckets, the order of contexts, runs, captures and replays, and `LLM` on top.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from gdn_cases import generator

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import tensorrt_double
from onnx_cases import LIMITS, random_prompts, random_tree, torch_executor
from tensorrt_double import GPU, DoubleBuilder, make_module

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.binding_names import bindings
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import EngineConfig, EngineMismatchError
from trtllm_treewy.export.build_engine import BuildOptions, build_engine_directory
from trtllm_treewy.export.profiles import BuildLimits
from trtllm_treewy.plugin_contract import LIBRARY
from trtllm_treewy.runtime import engine_files, network_tensorrt
from trtllm_treewy.runtime.acceptance import greedy_accept
from trtllm_treewy.runtime.buckets import context_bucket
from trtllm_treewy.runtime.engine_files import check_engine, open_engine
from trtllm_treewy.runtime.executor_network import DrafterCapacity
from trtllm_treewy.runtime.step_buffers import ALIGNMENT, bytes_needed

CPU = torch.device("cpu")
BUILD = BuildOptions(
    "float32", limits=BuildLimits(max_seq_len=256, max_nodes=40, max_num_tokens=64)
)
PROMPTS = ["The river", "Once upon a time there was", "He"]
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
SETTINGS = {"max_batch_size": 3, "max_seq_len": 128, "device": "cpu"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory, shipped_model):
    """The shipped model, one with experts and one without attention, as engines of the double."""
    folder = tmp_path_factory.mktemp("tensorrt")
    write_checkpoint(folder / "moe", hf_config(moe=True), seed=1)
    linear = hf_config(layer_types=["linear_attention"] * 4, mtp_num_hidden_layers=0)
    write_checkpoint(folder / "linear", linear, seed=2)
    models = {"shipped": shipped_model, "moe": folder / "moe", "linear": folder / "linear"}
    for name, model in models.items():
        build_engine_directory(model, folder / f"{name}-engine", BUILD, DoubleBuilder())
    return {name: (model, folder / f"{name}-engine") for name, model in models.items()}


@pytest.fixture
def double(monkeypatch, tmp_path):
    """The double in TensorRT's place, on a GPU that is the CPU."""
    module = make_module()
    (tmp_path / LIBRARY).write_text("a library")
    monkeypatch.setenv("TREEWY_TENSORRT_LIBRARY", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(engine_files, "gpu_identity", lambda device: GPU)
    monkeypatch.setattr(engine_files, "make_streams", lambda device: module.streams)
    return module


@pytest.fixture(scope="module")
def expected(shipped_model):
    with LLM(shipped_model, dtype="float32", **SETTINGS) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]


# ------------------------------------------------------------------------------ whole engine


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        {"draft_tree_widths": [3, 3, 3]},
        {"max_draft_len": 3},
        {"use_dynamic_tree": True, "max_total_draft_tokens": 12, "dynamic_tree_max_topK": 3},
    ],
    ids=["plain", "tree", "chain", "dynamic"],
)
def test_same_texts_as_the_checkpoint(engines, double, expected, speculation):
    """Prompts longer than a step, drafts, graphs: the tokens and texts of torch."""
    with LLM(engines["shipped"][1], speculative_config=speculation, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.outputs[0].text for o in outputs] == [o.text for o in expected]
        if speculation:
            assert max(o.speculation.acceptance_length for o in outputs) > 1.5
    loaded = {id(engine) for what, engine in double.events if what == "context"}
    assert len(loaded) == (3 if speculation else 2), "without drafts no drafter is loaded"
    kinds = [what for what, _ in double.events]
    assert double.streams.replays > 2 * kinds.count("capture") > 0


def test_outputs_of_all_layers_are_aligned(engines, double):
    """TensorRT refuses addresses between multiples of 256 bytes; one row has outputs of 16."""
    with LLM(engines["shipped"][1], **SETTINGS) as llm:
        llm.generate("The river", SamplingParams(max_tokens=4, ignore_eos=True))
        steps = llm._engine._executor._parts["verify"]._steps.values()
        outputs = bindings("verify", llm.config).outputs
        assert steps
        for step in steps:
            addresses = step.context._addresses
            for x in outputs:
                first = addresses[f"{x.group}.0" if x.has_layer else x.name]
                assert (addresses[x.name] - first) % ALIGNMENT == 0, x.name


def test_levels_wider_than_the_tree_run_without_a_bucket(engines, double, expected):
    speculation = {
        "use_dynamic_tree": True,
        "max_total_draft_tokens": 4,
        "dynamic_tree_max_topK": 7,
        "max_draft_len": 4,
    }
    with LLM(engines["shipped"][1], speculative_config=speculation, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert llm._engine._executor._parts["draft"]._free is not None
    assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in expected]


def test_drafts_of_many_rows_come_in_parts(engines, double, expected, monkeypatch):
    """Where rows times nodes are more than the drafter's network takes."""
    small = DrafterCapacity(entries=2, nodes=4)
    monkeypatch.setattr(engine_files, "DrafterCapacity", lambda entries, nodes: small)
    speculation = {"draft_tree_widths": [3, 2, 1]}
    with LLM(engines["shipped"][1], speculative_config=speculation, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == [o.token_ids for o in expected]


def test_sampling_with_a_seed_gives_the_same_texts(engines, double, shipped_model):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5)
    settings = {**SETTINGS, "speculative_config": {"draft_tree_widths": [2, 2]}}
    with LLM(shipped_model, dtype="float32", **settings) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with LLM(engines["shipped"][1], **settings) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == wanted


def test_a_long_prompt_comes_in_chunks(engines, double, shipped_model):
    """The drafter's network takes no more tokens at once than it was built for."""
    prompt = list(range(3, 3 + 180))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    settings = {"device": "cpu", "max_batch_size": 2, "max_seq_len": 240}
    with LLM(shipped_model, dtype="float32", **settings) as llm:
        wanted = llm.generate(prompt, params).outputs[0].token_ids
    speculation = {"draft_tree_widths": [2, 2]}
    with LLM(engines["shipped"][1], speculative_config=speculation, **settings) as llm:
        assert llm.generate(prompt, params).outputs[0].token_ids == wanted


# ------------------------------------------------------------------------------ executor


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["shipped", "moe", "linear"])
def test_steps_equal_the_torch_executor(engines, double, name):
    """Random prompts, trees and accepted nodes; logits, hidden states, states, windows, caches."""
    model, folder = engines[name]
    pair = torch_executor(model), open_engine(folder, LIMITS, CPU)
    gen, vocab = generator(3), ModelConfig.from_pretrained(model).vocab_size
    slots, contexts = [3, 0, -1, 4], [0, 0, 0, 0]
    for executor in pair:
        for slot in (0, 3, 4):
            assert executor.try_allocate(slot, 100)

    def same(outputs):
        close(outputs[1].logits, outputs[0].logits)
        close(outputs[1].hidden, outputs[0].hidden)
        close(pair[1].state.state, pair[0].state.state)
        close(pair[1].state.conv_state, pair[0].state.conv_state)
        rows = LIMITS.num_blocks * LIMITS.tokens_per_block
        close(pair[1].kv_cache.k[:, :, :rows], pair[0].kv_cache.k[:, :, :rows])

    batch = random_prompts(gen, vocab, [30, 3, 2, 9], slots, contexts)
    same([executor.prefill(batch) for executor in pair])
    contexts = [30, 3, 2, 9]
    for step, nodes in enumerate((1, 7, 7, 24, 7)):
        tree = random_tree(gen, vocab, slots, contexts, nodes, chain=step == 2)
        outputs = [executor.verify(tree) for executor in pair]
        same(outputs)
        target = outputs[0].logits.argmax(-1)
        for row in range(len(slots)):
            node = int(torch.randint(0, int(tree.num_nodes[row]), (1,), generator=gen))
            while tree.parents[row, node] >= 0:
                target[row, tree.parents[row, node]] = tree.token_ids[row, node]
                node = int(tree.parents[row, node])
        acceptance = greedy_accept(tree, target)
        for executor in pair:
            executor.commit(tree, acceptance)
        same(outputs)
        moved = acceptance.num_accepted.tolist()
        contexts = [c + n for c, n in zip(contexts, moved, strict=True)]
    assert double.streams.replays >= 2  # the third and the fifth tree, by the graph of the second


def test_verified_tokens_in_parts_are_as_those_in_one(engines, double):
    """Rows longer and shorter than what the drafter's network takes at once."""
    model, folder = engines["shipped"]
    pair = torch_executor(model), open_engine(folder, LIMITS, CPU)
    gen, config = generator(5), ModelConfig.from_pretrained(model)
    slots, lengths, contexts = [3, 0, 1, 4], [3, 80, 41, 1], [2, 0, 7, 30]
    for executor in pair:
        for slot in slots:
            assert executor.try_allocate(slot, 100)
    first = random_prompts(gen, config.vocab_size, [2, 7, 30], [3, 1, 4], [0, 0, 0])
    hidden = torch.randn(39, config.hidden_size, generator=gen)
    for executor in pair:
        executor.draft_extend(first, hidden)
    batch = random_prompts(gen, config.vocab_size, lengths, slots, contexts)
    hidden = torch.randn(sum(lengths), config.hidden_size, generator=gen)
    want, got = [executor.draft_extend(batch, hidden) for executor in pair]
    close(got.logits, want.logits)
    close(got.hidden, want.hidden)
    layer = len(config.attention_layers)
    rows = LIMITS.num_blocks * LIMITS.tokens_per_block
    close(pair[1].kv_cache.v[layer:, :, :rows], pair[0].kv_cache.v[layer:, :, :rows])


# ------------------------------------------------------------------------------ contexts, graphs


@pytest.fixture
def executor(engines, double):
    made = open_engine(engines["shipped"][1], LIMITS, CPU)
    assert made.try_allocate(1, 100)
    return made


def verify(executor, nodes, context=5, batch=1):
    gen = generator(nodes)
    slots = [1, *[-1] * (batch - 1)]
    tree = random_tree(gen, executor.config.vocab_size, slots, [context] * batch, nodes)
    executor.verify(tree)
    executor.discard()


def test_each_bucket_runs_once_then_is_captured_then_replayed(executor, double):
    """In this order, in a context of its own; other contexts and prompts come between."""
    double.events.clear()
    verify(executor, 5)
    assert [what for what, _ in double.events] == ["context", "enqueue", "capture"]
    verify(executor, 6)  # the bucket of 8 nodes as well
    assert len(double.events) == 3
    assert double.streams.replays == 1
    batch = random_prompts(generator(1), executor.config.vocab_size, [4], [1], [0])
    executor.prefill(batch)
    executor.prefill(batch)
    assert [what for what, _ in double.events[3:]] == ["context", "enqueue", "enqueue"]
    verify(executor, 9)
    verify(executor, 5, context=70)  # rows of the context have buckets as well
    verify(executor, 5, batch=3)
    assert [what for what, _ in double.events[6:]] == ["context", "enqueue", "capture"] * 3
    verify(executor, 8)
    verify(executor, 12, context=60)
    assert double.streams.replays == 3


def test_the_oldest_graph_goes_when_there_are_too_many(executor, double, monkeypatch):
    monkeypatch.setattr(network_tensorrt, "MAX_GRAPHS", 2)
    for nodes in (1, 2, 4, 1):
        verify(executor, nodes)
    assert double.streams.waits == 2, "nothing is taken away while it may run"
    assert [what for what, _ in double.events].count("capture") == 4
    verify(executor, 4)
    assert double.streams.replays == 1


def test_what_cannot_be_captured_runs_all_the_same(executor, double, monkeypatch, caplog):
    def refuse(enqueue):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(double.streams, "capture", refuse)
    for _ in range(3):
        verify(executor, 4)
    assert [what for what, _ in double.events].count("enqueue") == 3
    assert [r.message for r in caplog.records] == [
        "verify runs without CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_graphs_can_be_left_out(engines, double):
    """`cuda_graph_config=None`: every step is enqueued."""
    with LLM(engines["shipped"][1], cuda_graph_config=None, **SETTINGS) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [what for what, _ in double.events].count("enqueue") > 3
    assert "capture" not in [what for what, _ in double.events]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, expected 1"),
        ({"load_format": "dummy"}, "load_format is 'dummy', expected 'auto'"),
    ],
)
def test_settings_that_an_engine_does_not_have(engines, double, setting, message):
    with pytest.raises(ValueError, match=f"{message}: .* is an engine for one device"):
        LLM(engines["shipped"][1], **setting, **SETTINGS)


def test_states_are_bound_in_place(executor, double):
    """Each state's output at the address of its input: the pools' own memory, layer by layer."""
    batch = random_prompts(generator(1), executor.config.vocab_size, [4], [1], [0])
    executor.prefill(batch)
    context = executor._parts["prefill"]._free.context
    found = 0
    for x in bindings("prefill", executor.config).outputs:
        if x.in_place is None:
            continue
        layer = int(x.name.partition(".")[2])
        pools = executor.state
        pool = pools.conv_state if x.name.startswith("conv") else pools.state
        assert context._addresses[x.name] == pool[layer].data_ptr()
        assert context._addresses[x.in_place] == pool[layer].data_ptr()
        found += 1
    assert found == 2 * len(executor.config.linear_layers) > 0
    assert executor.state.state[:, 1].abs().sum() > 0


def test_the_double_refuses_what_the_plugins_refuse(executor, double):
    """So the test above can fail: a state elsewhere is an error with the reason."""
    batch = random_prompts(generator(1), executor.config.vocab_size, [4], [1], [0])
    executor.prefill(batch)
    part = executor._parts["prefill"]
    step = part._free
    step.context.set_tensor_address("state_out.0", step.outputs["hidden"].data_ptr())
    with (
        pytest.raises(RuntimeError, match="prefill: .* state_out.0 must be bound to the address"),
        double.streams.scope(),
    ):
        part._enqueue(step)


def test_pools_must_fit_and_stay(executor):
    part = executor._parts["verify"]
    pools = dict(part._pools)
    with pytest.raises(ValueError, match="missing or unknown pools: state.0"):
        part.bind({name: pool for name, pool in pools.items() if name != "state.0"})
    strided = pools["state.0"].transpose(2, 3)
    with pytest.raises(ValueError, match="state.0 must be a contiguous torch.float32"):
        part.bind({**pools, "state.0": strided})
    many = pools["state.0"].new_zeros(9, *pools["state.0"].shape[1:])
    with pytest.raises(ValueError, match="state.0 is .* and the engine was built for"):
        part.bind({**pools, "state.0": many})


def test_context_buckets():
    """Never below the need, at most half as much again, few."""
    sizes = {context_bucket(n, 5000) for n in range(1, 5001)}
    assert all(n <= context_bucket(n, 5000) <= max(64, 1.5 * n) for n in range(1, 5001))
    assert sorted(sizes) == [
        64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5000
    ]  # fmt: skip


# ------------------------------------------------------------------------------ memory


def test_buffers_are_allocated_once_for_the_largest_step(executor, double):
    """As large as planned, and no step takes more."""
    part = executor._parts["verify"]
    before = part._buffers.bytes
    types = part._types
    parts = ("prefill", "verify", "draft")
    needed = bytes_needed(executor.config, parts, types, LIMITS, BUILD.limits.max_num_tokens)
    assert before == sum(needed.values())
    logits = LIMITS.max_batch_size * LIMITS.max_nodes * executor.config.vocab_size * 4
    assert needed["logits"] == -(-logits // 256) * 256
    verify(executor, LIMITS.max_nodes, context=150, batch=LIMITS.max_batch_size)
    assert executor._parts["draft"]._buffers.bytes == before


def test_weights_scratch_and_buffers_are_in_the_memory_plan(engines, double):
    """Each engine's weights, the shared scratch; too little is told before anything loads."""
    folder = engines["shipped"][1]
    engine = EngineConfig.read(folder)
    assert engine.scratch == dict.fromkeys(("prefill", "verify", "draft"), tensorrt_double.SCRATCH)
    with LLM(folder, speculative_config={"max_draft_len": 2}, **SETTINGS) as llm:
        report = llm.memory_report()
    plans = [file.bytes for name, file in engine.files.items() if name.endswith(".engine")]
    assert report["weights_bytes"] == sum(plans)
    with LLM(folder, **SETTINGS) as llm:
        without = llm.memory_report()
    assert without["weights_bytes"] == sum(plans) - engine.files["draft.engine"].bytes
    double.events.clear()
    with pytest.raises(MemoryError, match="weights .* exceed the"):
        LLM(folder, kv_cache_config={"memory_bytes": 10 << 20}, **SETTINGS)
    assert double.events == []


def test_the_batch_is_what_memory_and_engine_allow(engines, double):
    with LLM(engines["shipped"][1], max_batch_size=None, device="cpu") as llm:
        assert llm.memory_report()["max_batch_size"] == BUILD.limits.max_batch_size


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "NVIDIA H200 sm_90"}, f"for the GPU NVIDIA H200 sm_90, and this is {GPU}: build"),
        ({"builder": "tensorrt 10.15.1"}, "with tensorrt 10.15.1, this is tensorrt 10.14.1.48"),
        ({"plugin_version": "7"}, "built for version 7 of the plugins, this is version 1"),
        ({"plugins": False}, "built without the plugins"),
    ],
)
def test_engines_of_other_machines_are_refused(engines, double, change, message):
    folder = engines["shipped"][1]
    engine = replace(EngineConfig.read(folder), **change)
    with pytest.raises(EngineMismatchError, match=message) as caught:
        check_engine(engine, folder, CPU)
    assert "\n" not in str(caught.value)


def test_a_machine_without_its_gpu_or_tensorrt_is_told(engines, double, monkeypatch):
    folder = engines["shipped"][1]
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineMismatchError, match="the package tensorrt is not installed"):
        LLM(folder, **SETTINGS)
    monkeypatch.undo()
    with pytest.raises(EngineMismatchError, match=f"for the GPU {GPU}, and the device is cpu"):
        LLM(folder, **SETTINGS)


def test_the_plugins_library_is_loaded_once_and_needed(engines, double, monkeypatch, tmp_path):
    folder = engines["shipped"][1]
    monkeypatch.setenv("TREEWY_TENSORRT_LIBRARY", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="library is not there .*nowhere.*TREEWY_TENSORRT_LIBRARY"):
        open_engine(folder, LIMITS, CPU)
    monkeypatch.setenv("TREEWY_TENSORRT_LIBRARY", str(tmp_path / LIBRARY))
    for _ in range(2):
        open_engine(folder, LIMITS, CPU)
    assert double.registry._loaded == [str(tmp_path / LIBRARY)]
    double.registry._creators[0].plugin_version = "2"
    with pytest.raises(ValueError, match="registry are 1, 2, expected version 1"):
        open_engine(folder, LIMITS, CPU)


def test_plans_that_tensorrt_refuses_and_networks_of_another_model(engines, double, tmp_path):
    """A plan of another model under this model's config; with the first tensor that differs."""
    import shutil

    shutil.copytree(engines["shipped"][1], tmp_path / "mixed")
    for name in ("prefill", "verify"):
        source = engines["moe"][1] / f"{name}.engine"
        (tmp_path / "mixed" / f"{name}.engine").write_bytes(source.read_bytes())
    with pytest.raises(EngineMismatchError, match=r"prefill.engine has \d+ bytes, expected"):
        open_engine(tmp_path / "mixed", LIMITS, CPU)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(EngineConfig, "check_files", lambda *_, **__: None)
        with pytest.raises(EngineMismatchError, match="prefill: (not this model's|.* must be)"):
            open_engine(tmp_path / "mixed", LIMITS, CPU)
    original = double.Runtime.deserialize_cuda_engine

    def refuse(self, data):
        self._logger.log(1, "stdVersionRead == kSERIALIZATION_VERSION")
        return None

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(double.Runtime, "deserialize_cuda_engine", refuse)
        with pytest.raises(EngineMismatchError, match="cannot load it: stdVersionRead =="):
            open_engine(engines["shipped"][1], LIMITS, CPU)
    assert double.Runtime.deserialize_cuda_engine is original


def test_limits_beyond_the_engines_are_refused(engines, double):
    folder = engines["shipped"][1]
    with pytest.raises(EngineMismatchError, match="max_nodes is 41, .* at most 40"):
        open_engine(folder, replace(LIMITS, max_nodes=41), CPU)
    with pytest.raises(ValueError, match="kv_rows is .* and the engine was built for"):
        open_engine(folder, replace(LIMITS, max_seq_len=256, scratch_rows=129), CPU)
    with pytest.raises(ValueError, match="k_cache.0 is .* and the engine was built for"):
        open_engine(folder, replace(LIMITS, num_blocks=400), CPU)


def test_a_config_that_was_changed_after_the_build_is_refused(engines, double, tmp_path):
    import json
    import shutil

    shutil.copytree(engines["shipped"][1], tmp_path / "edited")
    path = Path(tmp_path / "edited" / "config.json")
    raw = json.loads(path.read_text())
    raw["rms_norm_eps"] = 0.1
    path.write_text(json.dumps(raw))
    with pytest.raises(EngineMismatchError, match="another model than the one that was built"):
        LLM(tmp_path / "edited", **SETTINGS)
