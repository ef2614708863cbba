"""Exported networks in ONNX Runtime against the torch executor: everything they give and leave."""

from __future__ import annotations

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from gdn_cases import generator

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx_cases import (
    LIMITS,
    onnx_executor,
    random_prompts,
    random_tree,
    torch_executor,
)

from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.onnx_export import (
    ExportTypes,
    export_onnx,
    make_network,
)
from trtllm_treewy.llmapi import speculation_config_from
from trtllm_treewy.plugin_contract import PLUGINS
from trtllm_treewy.runtime.acceptance import greedy_accept
from trtllm_treewy.runtime.build import make_drafter
from trtllm_treewy.runtime.engine import Engine
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.runtime.tree_sampler import TreeSampler
from trtllm_treewy.sampling_params import SamplingParams

KINDS = {
    "dense": {},
    "moe": {"moe": True},
    "tied": {"tie_word_embeddings": True, "attention_bias": True, "linear_num_value_heads": 6},
    "attention only": {"layer_types": ["full_attention"] * 4},
    "gdn only": {"layer_types": ["linear_attention"] * 4, "mtp_num_hidden_layers": 0},
    "attention operator": {"attention": "onnx", "attention_bias": True},
}


@pytest.fixture(scope="module", params=[*KINDS, "shipped"])
def case(request, tmp_path_factory, shipped_model):
    """A checkpoint and its export in float32."""
    folder = tmp_path_factory.mktemp("export")
    checkpoint, attention = shipped_model, "standard"
    if request.param != "shipped":
        checkpoint = folder / "model"
        changes = dict(KINDS[request.param])
        attention = changes.pop("attention", attention)
        write_checkpoint(checkpoint, hf_config(moe=changes.pop("moe", False), **changes), seed=1)
    export_onnx(checkpoint, folder / "onnx", dtype="float32", attention=attention)
    return checkpoint, folder / "onnx"


@pytest.fixture
def executors(case):
    pair = torch_executor(case[0]), onnx_executor(*case)
    for executor in pair:
        for slot in (0, 1, 3, 4):
            assert executor.try_allocate(slot, 100 + slot)
    return pair


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def same_pools(expected, actual):
    close(actual.state.state, expected.state.state)
    close(actual.state.conv_state, expected.state.conv_state)
    rows = expected.kv_cache.num_blocks * expected.kv_cache.block_size
    close(actual.kv_cache.k[:, :, :rows], expected.kv_cache.k[:, :, :rows])
    close(actual.kv_cache.v[:, :, :rows], expected.kv_cache.v[:, :, :rows])


def same_output(expected, actual):
    close(actual.logits, expected.logits)
    close(actual.hidden, expected.hidden)


def prefilled(executors, gen, vocab):
    """Two packed chunks each, a row without a slot between; lengths of the contexts."""
    reference, exported = executors
    lengths, slots = [70, 3, 9, 1], [3, 0, -1, 4]
    contexts = [0, 0, 0, 0]
    for _ in range(2):
        batch = random_prompts(gen, vocab, lengths, slots, contexts)
        same_output(reference.prefill(batch), exported.prefill(batch))
        same_pools(reference, exported)
        contexts = [c + n for c, n in zip(contexts, lengths, strict=True)]
        lengths = [5, 11, 2, 1]
    return slots, contexts


def test_prefill_verify_and_commit(executors, case):
    """Random trees and chains, padding, a row without a slot, random accepted nodes."""
    reference, exported = executors
    vocab, gen = reference.model.config.vocab_size, generator(1)
    slots, contexts = prefilled(executors, gen, vocab)
    longest = 0
    for step in range(4):
        nodes = (1, 11, 24, 6)[step]
        tree = random_tree(gen, vocab, slots, contexts, nodes, chain=step == 3)
        expected, actual = reference.verify(tree), exported.verify(tree)
        same_output(expected, actual)
        # Tokens of the tree as the target's choice: random nodes are accepted, not prefixes.
        target = expected.logits.argmax(-1)
        for row in range(len(slots)):
            node = int(torch.randint(0, int(tree.num_nodes[row]), (1,), generator=gen))
            while tree.parents[row, node] >= 0:
                target[row, tree.parents[row, node]] = tree.token_ids[row, node]
                node = int(tree.parents[row, node])
        acceptance = greedy_accept(tree, target)
        reference.commit(tree, acceptance)
        exported.commit(tree, acceptance)
        same_pools(reference, exported)
        moved = acceptance.num_accepted.tolist()
        contexts = [c + n for c, n in zip(contexts, moved, strict=True)]
        longest = max(longest, *moved)
    assert longest > 2


def test_drafter(executors):
    """Verified pairs are entered, then two levels of draft nodes, some of them padding."""
    reference, exported = executors
    config = reference.model.config
    if not config.mtp_num_hidden_layers:
        pytest.skip("a model without MTP")
    gen, slots, contexts = generator(2), [3, 0, 4], [0, 0, 0]
    for lengths in ([6, 1, 4], [1, 3, 2]):
        batch = random_prompts(gen, config.vocab_size, lengths, slots, contexts)
        hidden = torch.randn(sum(lengths), config.hidden_size, generator=gen)
        same_output(reference.draft_extend(batch, hidden), exported.draft_extend(batch, hidden))
        contexts = [c + n for c, n in zip(contexts, lengths, strict=True)]
    context = torch.tensor(contexts)[:, None]
    slot = torch.tensor([3, -1, 4], dtype=torch.int32)
    for first in (0, 3):
        write = context + first + torch.arange(3)
        write[2, 2] = -1
        rows = torch.arange(max(contexts) + first + 3)
        own = rows == write[..., None]
        mask = (rows < context)[:, None] | own
        if first:
            mask |= rows == (context + torch.tensor([[0, 1, 0]]))[..., None]
        args = (
            torch.randint(0, config.vocab_size, (3, 3), generator=gen),
            torch.randn(3, 3, config.hidden_size, generator=gen),
            (context + first // 3).expand(3, 3),
            slot,
            write,
            mask,
        )
        expected, actual = reference.draft(*args), exported.draft(*args)
        keep = torch.ones(3, 3, dtype=torch.bool)
        keep[2, 2] = False  # padding: its outputs mean nothing
        close(actual.logits[keep], expected.logits[keep])
        close(actual.hidden[keep], expected.hidden[keep])
    same_pools(reference, exported)


def generate(executor, speculation, prompts, count):
    drafter = make_drafter(executor, speculation_config_from(speculation))
    config = executor.model.config if hasattr(executor, "model") else executor.config
    engine = Engine(executor, drafter, TreeSampler(config.vocab_size, executor.device), 64)
    requests = [
        Request(i, tuple(p), SamplingParams(max_tokens=count, ignore_eos=True), frozenset())
        for i, p in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(request.error is None for request in requests)
    return [request.output_token_ids for request in requests], requests


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        {"draft_tree_widths": [3, 2, 2]},
        {"max_draft_len": 3},
        {"use_dynamic_tree": True, "max_total_draft_tokens": 12, "dynamic_tree_max_topK": 3},
    ],
    ids=["plain", "tree", "chain", "dynamic"],
)
def test_speculative_decoding_gives_the_same_tokens(case, speculation):
    """64 tokens of three prompts through the engine, prompts in chunks."""
    config = ModelConfig.from_pretrained(case[0])
    if speculation and not config.mtp_num_hidden_layers:
        pytest.skip("a model without MTP")
    gen = generator(4)
    prompts = [
        torch.randint(0, config.vocab_size, (n,), generator=gen).tolist() for n in (75, 1, 9)
    ]
    expected, _ = generate(torch_executor(case[0]), None, prompts, 64)
    actual, requests = generate(onnx_executor(*case), speculation, prompts, 64)
    assert actual == expected
    if speculation and case[0].name == "treewy-tiny":
        assert max(request.stats.acceptance_length for request in requests) > 1


def test_the_nodes_are_as_the_plugins_want_them(case):
    """Names, namespace, version and all fields on the nodes; declared by the functions."""
    config = ModelConfig.from_pretrained(case[0])
    seen = set()
    for network in networks(config):
        path = case[1] / f"{network}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        functions = {function.name: function for function in model.functions}
        for node in model.graph.node:
            if node.domain != "treewy":
                assert node.domain == ""
                continue
            given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert given.pop("plugin_namespace") == b"treewy"
            assert given.pop("plugin_version") == b"1"
            fields = {n: x.decode() if isinstance(x, bytes) else x for n, x in given.items()}
            plugin = PLUGINS[node.op_type]
            assert fields == plugin.values(**fields)
            assert len(node.input) == len(plugin.inputs_with(**fields))
            assert len(node.output) == len(plugin.outputs_with(**fields))
            names = [a.name for a in node.attribute]
            assert sorted(functions[node.op_type].attribute) == sorted(names)
            seen.add(node.op_type)
    linear = {"TreeWyVerify", "TreeConv1d", "GdnPrefill", "GdnPrefillConv1d"}
    assert seen == (linear if config.linear_layers else set())


def test_states_go_straight_from_input_to_plugin_to_output(case):
    """What is bound in place meets nothing on its way but the plugin."""
    config = ModelConfig.from_pretrained(case[0])
    model = onnx.load(case[1] / "prefill.onnx", load_external_data=False)
    for x in bindings("prefill", config).outputs:
        if x.in_place is None:
            continue
        (maker,) = [node for node in model.graph.node if x.name in node.output]
        users = [node for node in model.graph.node if x.in_place in node.input]
        assert maker.domain == "treewy"
        assert users == [maker]


@pytest.mark.parametrize("attention", ["standard", "onnx"])
@pytest.mark.parametrize("network", ["prefill", "verify", "draft"])
def test_attention_by_standard_operators_or_by_one(network, attention):
    """The operator that was asked for in every attention layer, and none of the others."""
    config = ModelConfig.from_dict(hf_config())
    model = make_network(network, config, ExportTypes(), attention=attention)
    kinds = [node.op_type for node in model.graph.node]
    layers = config.mtp_num_hidden_layers if network == "draft" else len(config.attention_layers)
    fused = attention == "onnx"
    assert kinds.count("Attention") == layers * fused
    assert kinds.count("Softmax") == layers * (not fused)
    versions = {
        model.opset_import[0].version,
        *(f.opset_import[0].version for f in model.functions),
    }
    assert versions == {23 if fused else 17}
    with pytest.raises(ValueError, match="attention must be one of standard, onnx, got 'flash'"):
        make_network(network, config, ExportTypes(), attention="flash")


def test_what_is_not_finite_reaches_only_who_sees_it(tmp_path):
    """NaN and infinity in rows of the cache: the same queries are NaN by either attention."""
    write_checkpoint(tmp_path / "model", hf_config(layer_types=["full_attention"] * 4), seed=2)
    results = []
    for attention in ("standard", "onnx"):
        folder = tmp_path / attention
        export_onnx(tmp_path / "model", folder, dtype="float32", attention=attention)
        executor, gen = onnx_executor(tmp_path / "model", folder), generator(3)
        for slot in (0, 2):
            assert executor.try_allocate(slot, 60)
        vocab = executor.config.vocab_size
        executor.prefill(random_prompts(gen, vocab, [9, 5], [2, 0], [0, 0]))
        row = int(executor._rows.at(torch.tensor([0]), torch.tensor([[2]])))
        beyond = int(executor._rows.at(torch.tensor([2]), torch.tensor([[9]])))
        executor.kv_cache.k[0, 0, row, 1] = float("inf")
        executor.kv_cache.v[1, 0, row, 3] = float("nan")
        executor.kv_cache.k[:, :, beyond] = float("nan")
        tree = random_tree(gen, vocab, [2, 0], [9, 5], 6)
        results.append(executor.verify(tree).logits)
    nodes = tree.num_nodes.tolist()
    assert results[0][0, : nodes[0]].isfinite().all()
    assert results[0][1, : nodes[1]].isnan().all()
    close(results[1][0, : nodes[0]], results[0][0, : nodes[0]])
    assert results[1][1, : nodes[1]].isnan().all()


@pytest.mark.parametrize("stash", ["pseudo_values", "inputs"])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(
    ("activation", "state"),
    [("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_types(activation, state, moe, stash):
    """Every type checks, with its shapes inferred."""
    config = ModelConfig.from_dict(hf_config(moe=moe))
    stash_dtype = torch.bfloat16 if state == "bfloat16" else torch.float32
    types = ExportTypes(getattr(torch, activation), getattr(torch, state), stash_dtype)
    for network in networks(config):
        model = make_network(network, config, types, stash)
        for tensor in model.graph.initializer:
            tensor.raw_data = b"\0" * (
                2 ** (tensor.data_type == 1) * 2 * int(torch.tensor(list(tensor.dims)).prod())
            )
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        assert len(inferred.graph.value_info) > 50


def test_weights_are_written_once(case):
    """One file for all networks, as large as the checkpoint's weights and some alignment."""
    config = ModelConfig.from_pretrained(case[0])
    files = {path.name for path in case[1].iterdir()}
    assert files == {"weights.bin", *(f"{name}.onnx" for name in networks(config))}
    assert max(path.stat().st_size for path in case[1].glob("*.onnx")) < 2_000_000


def test_limits_hold(executors):
    """What the executor refuses, with the reason."""
    _, exported = executors
    gen = generator(7)
    vocab = exported.config.vocab_size
    tree = random_tree(gen, vocab, [3], [1], LIMITS.max_nodes + 1)
    with pytest.raises(ValueError, match="exceeds max_batch_size 5 or max_nodes 24"):
        exported.verify(tree)
    with pytest.raises(ValueError, match="slot 2 is not allocated"):
        exported.verify(random_tree(gen, vocab, [2], [1], 3))
    with pytest.raises(ValueError, match="no verified tree is pending"):
        exported.commit(tree, None)
    with pytest.raises(ValueError, match="slot 3"):
        exported.try_allocate(3, 200)


def test_types_that_do_not_go_together():
    with pytest.raises(ValueError, match="state type must be one of float32, bfloat16"):
        ExportTypes(state=torch.float16)
    with pytest.raises(ValueError, match="bfloat16 stash needs a bfloat16 state"):
        ExportTypes(stash=torch.bfloat16)
