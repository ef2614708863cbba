"""The network that our model class builds with the double: its nodes, and what they compute.

The double is no proof that the library takes it (see tests/trtllm_double/README.md); that the network
is the model's, these tests do show: it runs prompts in chunks, trees, commits and whole generations
as the torch executor does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from onnx_cases import LIMITS, random_prompts, random_tree
from trtllm_world import DoubleNetwork, build, trtllm_double

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_model
from trtllm_treewy.export.sharding import shard_config
from trtllm_treewy.export.trtllm.convert import convert_checkpoint
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
        engine = replace(engine, config=part)
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
