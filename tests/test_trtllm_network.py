"""The network that our model class builds with the double: its nodes, and what they compute.

The double is no proof that the library takes it (see tests/trtllm_double/README.md); that the
network is the model's, these tests do show: it runs prompts in chunks, trees, commits and whole
generations as the torch executor does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from onnx_cases import random_prompts, random_tree
from trtllm_world import DoubleNetwork, build, trtllm_double

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.export.trtllm.convert import convert_checkpoint
from trtllm_treewy.rank_config import shard_config
from trtllm_treewy.runtime.acceptance import Acceptance
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.runtime.trtllm_engine import TrtllmEngine
from trtllm_treewy.runtime.trtllm_executor import TrtllmExecutor, packed_mask
from trtllm_treewy.topology import ancestor_mask
from trtllm_treewy.trtllm_bindings import engine_inputs, engine_outputs

BASE = {"vocab_size": 96, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
KINDS = {
    "dense": {},
    "moe": {"moe": True},
    "tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "attention first": {"layer_types": ["full_attention", "linear_attention"] * 2},
}
CPU = torch.device("cpu")
WIDE = ExecutorLimits(
    max_batch_size=5,
    max_seq_len=192,
    max_nodes=40,
    scratch_rows=60,
    num_blocks=60,
    tokens_per_block=32,
)


def make(tmp_path, kind, ranks=1, flags=(), **changes):
    """A checkpoint, converted and built with the double; networks of all ranks."""
    settings = {**BASE, **KINDS[kind], **changes}
    raw = hf_config(moe=settings.pop("moe", False), **settings)
    write_checkpoint(tmp_path / "hf", raw)
    convert_checkpoint(tmp_path / "hf", tmp_path / "ckpt", ranks=ranks)
    library = tmp_path / "libtreewy_tensorrt.so"
    return build(tmp_path / "ckpt", tmp_path / "engine", library, *flags)


@pytest.fixture
def world(monkeypatch):
    with trtllm_double(monkeypatch):
        yield


def executors(tmp_path, networks, limits=WIDE, ranks=1):
    """Torch's, and ours over the double; with several ranks it owns rank 0's pools."""
    engine = TrtllmEngine.read(tmp_path / "engine")
    engine.check_limits(limits)
    if ranks > 1:
        part = replace(shard_config(engine.config, ranks), mtp_num_hidden_layers=0)
        engine = replace(engine, config=part, ranks=1)
    network = DoubleNetwork(networks)
    ours = network.executor = TrtllmExecutor(engine, limits, network, CPU)
    return TorchExecutor(load_model(tmp_path / "hf"), limits), ours


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_the_model_does(tmp_path, world, kind, ranks):
    """Prompts in two chunks, then trees with padded rows and nodes, then commits; twice."""
    expected, ours = executors(tmp_path, make(tmp_path, kind, ranks), ranks=ranks)
    gen = torch.Generator().manual_seed(5)
    lengths, slots = [9, 40, 3], [3, 0, 4]
    for slot in slots:
        assert expected.try_allocate(slot, 100)
        assert ours.try_allocate(slot, 100)
    contexts = [0, 0, 0]
    for _ in range(2):
        batch = random_prompts(gen, 96, lengths, slots, contexts)
        a, b = expected.prefill(batch), ours.prefill(batch)
        close(b.logits, a.logits)
        close(b.hidden, a.hidden)
        contexts = [x + y for x, y in zip(contexts, lengths, strict=True)]
    for nodes in (37, 1):
        tree = random_tree(gen, 96, [*slots, -1], [*contexts, 7], nodes)
        real = torch.arange(nodes) < tree.num_nodes[:, None]
        real[-1] = False
        a, b = expected.verify(tree), ours.verify(tree)
        close(b.logits[real], a.logits[real])
        close(b.hidden[real], a.hidden[real])
        acceptance = random_acceptance(gen, tree)
        for executor in (expected, ours):
            executor.commit(tree, acceptance)
        contexts = [c + int(n) for c, n in zip(contexts, acceptance.num_accepted, strict=False)]
        if ranks == 1:
            close(ours.state.state[:, slots], expected.state.state[:, slots])
            close(ours.state.conv_state[:, slots], expected.state.conv_state[:, slots])
        else:
            commit_other_ranks(ours, tree, acceptance)


def random_acceptance(gen, tree):
    """A random node of each real row, anywhere in its tree, with the path that leads there."""
    rows, nodes = tree.parents.shape
    path = torch.full((rows, nodes), -1)
    accepted = torch.full((rows,), -1, dtype=torch.int32)
    count = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        if tree.slot[row] < 0:
            continue
        node = int(torch.randint(0, int(tree.num_nodes[row]), (1,), generator=gen))
        accepted[row], steps = node, []
        while node >= 0:
            steps.append(node)
            node = int(tree.parents[row, node])
        count[row] = len(steps)
        path[row, : len(steps)] = torch.tensor(steps[::-1])
    return Acceptance(accepted, count, path, torch.zeros(rows, dtype=torch.int64))


@torch.inference_mode()
def commit_other_ranks(ours, tree, acceptance):
    """What rank 0's executor does, for the pools of the other ranks."""
    goal = tree.slot, tree.parents, tree.num_nodes, acceptance.accepted
    path = torch.where(tree.slot[:, None] >= 0, acceptance.path, -1)
    network = ours._network
    for (pools, cache), outputs in zip(network.others, network.last[1:], strict=True):
        for layer in ours.config.linear_layers:
            u, k, g, x = (outputs[f"treewy_{n}_{layer}"][None] for n in ("u", "k", "g", "conv_x"))
            torch.ops.treewy.commit(pools[f"past_rnn_state_{layer}"][None], *goal, u, k, g)
            torch.ops.treewy.conv_commit(pools[f"past_conv_state_{layer}"][None], *goal, x)
        mine, ours.attention.data = ours.attention.data, cache
        ours.attention.compact(ours._blocks(tree.slot), path, tree.context_lens.long())
        ours.attention.data = mine


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_nodes(tmp_path, world, kind, ranks):
    networks = make(tmp_path, kind, ranks)
    assert len(networks) == ranks
    network = networks[0]
    for name in ("TreeConv1d", "GdnPrefillConv1d", "TreeWyVerify", "GdnPrefill"):
        assert len(network.find(name)) == 3, name
        for node in network.find(name):
            assert node.info[1] == name  # kept under the layer's last name
    heads = {"num_k_heads": 2 // ranks, "num_v_heads": 4 // ranks, "head_k_dim": 16,
             "head_v_dim": 24}  # fmt: skip
    assert network.find("GdnPrefill")[0].fields == heads
    assert network.find("TreeWyVerify")[0].fields == {
        **heads,
        "state_commit": "reconstruct",
        "stash": "pseudo_values",
        "u_dtype": "float32",
    }
    # The checkpoint has no bias for the conv, and the plugins are told so.
    assert network.find("TreeConv1d")[0].fields == {"bias": 0}
    assert network.find("GPTAttention")[0].fields == {
        "layer_idx": 0,  # among the attention layers
        "num_heads": 4 // ranks,
        "num_kv_heads": 2 // ranks,
        "head_size": 16,
        "q_scaling": 1.0,
        "rotary_embedding_dim": 4,
        "max_context_length": 192,
        "spec_decoding_max_generation_length": 40,
        "has_tree_mask": True,
    }
    experts = network.find("MixtureOfExperts")
    assert [node.fields for node in experts] == [{"top_k": 2, "normalization_mode": 1}] * (
        4 if kind == "moe" else 0
    )
    # A sum behind every mixer and every feed-forward block; the head's columns together.
    assert len(network.find("allreduce")) == (8 if ranks > 1 else 0)
    assert len(network.find("allgather")) == (1 if ranks > 1 else 0)


@pytest.mark.parametrize(
    ("ranks", "dtype", "plugin"),
    [(1, "float16", "auto"), (2, "bfloat16", "auto"), (1, "bfloat16", "float32")],
)
def test_tensors_are_those_of_the_list(tmp_path, world, ranks, dtype, plugin):
    """`trtllm_bindings` names every input and output of the network, with types and sizes."""
    from tensorrt_llm.network import torch_dtype

    raw = hf_config(**BASE, dtype=dtype)
    write_checkpoint(tmp_path / "hf", raw)
    convert_checkpoint(tmp_path / "hf", tmp_path / "ckpt", ranks=ranks)
    flags = ("--treewy_plugin", plugin)
    network = build(tmp_path / "ckpt", tmp_path / "engine", tmp_path / "lib.so", *flags)[0]
    engine = TrtllmEngine.read(tmp_path / "engine")
    assert engine.plugin_dtype == (dtype if plugin == "auto" else plugin)
    part = shard_config(ModelConfig.from_dict(raw), ranks)
    listed = {
        "inputs": engine_inputs(part, engine.plugin_dtype, 40, ranks),
        "outputs": engine_outputs(part, dtype, engine.plugin_dtype),
    }
    for kind, bindings in listed.items():
        tensors = getattr(network, kind)
        assert tensors.keys() == {x.name for x in bindings}
        for x in bindings:
            tensor = tensors[x.name]
            assert str(torch_dtype(tensor.dtype)) == f"torch.{x.dtype}", x.name
            assert len(tensor.shape) == len(x.shape), x.name
            for size, want in zip(tensor.shape, x.shape, strict=True):
                assert size in (-1, want) or want == "vocab", (x.name, tensor.shape)
    # A pool goes from the network's input into the plugins and out, with nothing between.
    for node in network.find("GdnPrefill"):
        pools = [x for x in network.inputs.values() if x.trt_tensor in node.inputs]
        assert len(pools) == 3  # the pool, slots, and where prompts begin
        assert any(x.trt_tensor is node.outputs[1] for x in network.outputs.values())


def test_plain_decoding(tmp_path, world):
    """With one node there is nothing of speculation in the network, and it decodes."""
    networks = make(tmp_path, "dense", flags=("--treewy_max_nodes", "1"))
    assert not any(name.startswith("spec_decoding") for name in networks[0].inputs)
    expected, ours = executors(tmp_path, networks, replace(WIDE, max_nodes=1))
    gen = torch.Generator().manual_seed(1)
    for executor in (expected, ours):
        assert executor.try_allocate(2, 40)
    batch = random_prompts(gen, 96, [11], [2], [0])
    close(ours.prefill(batch).logits, expected.prefill(batch).logits)
    tree = random_tree(gen, 96, [2], [11], 1)
    close(ours.verify(tree).logits, expected.verify(tree).logits)
    with pytest.raises(ValueError, match="cannot draft"):
        ours.draft_extend(batch, torch.zeros(11, 32))


def test_logits_of_another_type(tmp_path, world):
    expected, ours = executors(
        tmp_path, make(tmp_path, "dense", flags=("--logits_dtype", "float16"))
    )
    gen = torch.Generator().manual_seed(1)
    for executor in (expected, ours):
        assert executor.try_allocate(2, 40)
    batch = random_prompts(gen, 96, [11], [2], [0])
    logits = ours.prefill(batch).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected.prefill(batch).logits, rtol=1e-2, atol=1e-2)


def test_fused_and_plain_feed_forward(tmp_path, world):
    """The builder's own replacement of GatedMLP leaves the model what it is."""
    fused = make(tmp_path, "dense")
    plain = make(tmp_path, "dense", flags=("--use_fused_mlp", "disable"))
    assert len(fused[0].find("swiglu")) == 4
    assert not plain[0].find("swiglu")
    gen = torch.Generator().manual_seed(1)
    batch = random_prompts(gen, 96, [11], [2], [0])
    logits = []
    for networks in (fused, plain):
        _, ours = executors(tmp_path, networks)
        assert ours.try_allocate(2, 40)
        logits.append(ours.prefill(batch).logits)
    close(*logits)


def test_a_slot_used_before(tmp_path, world):
    """Plugins go on from what a slot holds; a new sequence finds zeros there, and its own text."""
    _, ours = executors(tmp_path, make(tmp_path, "dense"))
    gen = torch.Generator().manual_seed(1)
    batch = random_prompts(gen, 96, [11], [2], [0])
    logits = []
    for _ in range(2):
        assert ours.try_allocate(2, 40)
        logits.append(ours.prefill(batch).logits)
        ours.free(2)
    assert torch.equal(*logits)


def test_refusals_of_the_executor(tmp_path, world):
    _, ours = executors(tmp_path, make(tmp_path, "dense"))
    gen = torch.Generator().manual_seed(1)
    assert ours.try_allocate(0, 40)
    tree = random_tree(gen, 96, [0], [3], 41)
    with pytest.raises(ValueError, match="max_nodes 40"):
        ours.verify(tree)
    tree = random_tree(gen, 96, [0], [3], 4)
    with pytest.raises(ValueError, match="no verified tree"):
        ours.commit(tree, random_acceptance(gen, tree))
    ours.verify(tree)
    with pytest.raises(ValueError, match="is pending"):
        ours.verify(tree)
    ours.discard()
    ours.verify(tree)


def test_packed_mask():
    parents = torch.tensor([[-1, 0, 0, 1] + [3] * 30])
    sees = ancestor_mask(parents, torch.tensor([33]))
    words = packed_mask(sees)
    assert words.shape == (34, 2)
    assert words.dtype == torch.int32
    bits = [[(int(w) >> i) & 1 for w in row for i in range(32)] for row in words]
    assert [i for i, bit in enumerate(bits[3]) if bit] == [0, 1, 3]
    assert [i for i, bit in enumerate(bits[32]) if bit] == [0, 1, 3, 32]
    assert [i for i, bit in enumerate(bits[31]) if bit] == [0, 1, 3, 31]  # the sign bit
    assert [i for i, bit in enumerate(bits[33]) if bit] == [33]  # padding sees itself


@pytest.mark.parametrize("drafts", ["plain", "tree", "dynamic"])
def test_generates_the_same_text(tmp_path, world, monkeypatch, shipped_model, drafts):
    """The runtime from a directory: LLM, scheduler, drafter and acceptance over the double."""
    from trtllm_treewy import LLM, MTPDecodingConfig, SamplingParams
    from trtllm_treewy.runtime import trtllm_network

    convert_checkpoint(shipped_model, tmp_path / "ckpt", dtype="float32")
    engine = tmp_path / "engine"
    networks = build(tmp_path / "ckpt", engine, tmp_path / "libtreewy_tensorrt.so")
    speculation = {
        "plain": None,
        "tree": MTPDecodingConfig(draft_tree_widths=(3, 2)),
        "dynamic": MTPDecodingConfig(
            use_dynamic_tree=True,
            max_total_draft_tokens=12,
            dynamic_tree_max_topK=3,
            max_draft_len=3,
        ),
    }[drafts]
    network = DoubleNetwork(networks)
    monkeypatch.setattr(trtllm_network, "TrtllmNetwork", lambda *_: network)
    monkeypatch.setattr(TrtllmEngine, "check", lambda self, **_: None)
    init = TrtllmExecutor.__init__

    def connect(self, *args):
        init(self, *args)
        network.executor = self

    monkeypatch.setattr(TrtllmExecutor, "__init__", connect)
    texts = []
    for directory in (engine, shipped_model):
        with LLM(
            directory,
            device="cpu",
            dtype="float32",
            max_batch_size=3,
            max_seq_len=160,
            max_num_tokens=40,  # prompts come in chunks
            speculative_config=speculation,
            kv_cache_config={"enable_block_reuse": drafts == "tree"},
        ) as llm:
            prompts = ["Once upon a time", "The quick brown fox " * 12, "1 2 3"]
            texts.append([])
            for _ in range(1 + (drafts == "tree")):  # the second time from cached prefixes
                outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
                texts[-1] += [x.outputs[0].token_ids for x in outputs]
            if drafts == "tree":
                assert llm.stats.prefix_hit_tokens > 0
    assert texts[0] == texts[1]
    assert all(len(x) > 2 for x in texts[0])
