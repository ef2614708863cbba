"""The functions that say what the plugins' nodes mean, against the operators of torch, in ORT."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gdn_cases import generator

from trtllm_treewy import ops as ops
from trtllm_treewy.plugin_contract import CONV, NAMESPACE, PREFILL, PREFILL_CONV, VERIFY, VERSION

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
functions = pytest.importorskip("trtllm_treewy.export.onnx_functions")
nodes = pytest.importorskip("trtllm_treewy.export.onnx_nodes")

HK, HV, K, V, W = 2, 6, 16, 24, 4
C = 2 * HK * K + HV * V
SLOTS = 7
HEADS = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}


def session(plugin, fields, tensors, **options):
    """A network of one node with its function."""
    fields = plugin.values(**fields)
    specs = plugin.inputs_with(**fields)
    types = {name: nodes.TYPES[x.dtype] for name, x in tensors.items()}
    inputs = [
        onnx.helper.make_tensor_value_info(
            s.name, types[s.name], [f"{s.name}_{i}" for i in s.shape]
        )
        for s in specs
    ]
    results = plugin.outputs_with(**fields)
    names = [f"{s.name}_out" if s.in_place else s.name for s in results]
    node = onnx.helper.make_node(
        plugin.name, [s.name for s in specs], names, domain=functions.DOMAIN,
        plugin_namespace=NAMESPACE, plugin_version=VERSION, **fields,
    )  # fmt: skip
    kinds = {"activation": types.get("qkv", types.get("x")), "state": types.get("state")}
    outputs = [
        onnx.helper.make_tensor_value_info(
            n, kinds.get(s.kind) or nodes.TYPES[torch.float32], [f"{n}_{i}" for i in s.shape]
        )
        for n, s in zip(names, results, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    model = onnx.helper.make_model(
        graph,
        functions=[functions.function_for(plugin, fields, **options)],
        opset_imports=[
            onnx.helper.make_opsetid("", nodes.OPSET),
            onnx.helper.make_opsetid(functions.DOMAIN, 1),
        ],
        ir_version=nodes.IR_VERSIONS[nodes.OPSET],
    )
    onnx.checker.check_model(model, full_check=True)
    run = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = run.run(names, {name: x.numpy() for name, x in tensors.items()})
    return dict(zip(names, (torch.from_numpy(np.array(x)) for x in values), strict=True))


def normal(gen, *shape, scale=1.0):
    return torch.randn(shape, generator=gen) * scale


def projections(gen, *lead, decay=1.0):
    return {
        "qkv": normal(gen, *lead, C),
        "a": normal(gen, *lead, HV) * decay,
        "b": normal(gen, *lead, HV),
        "A_log": normal(gen, HV),
        "dt_bias": normal(gen, HV),
        "state": normal(gen, SLOTS, HV, V, K),
    }


def random_trees(gen, batch, count):
    parents = torch.full((batch, count), -1, dtype=torch.int32)
    for t in range(1, count):
        parents[:, t] = torch.randint(0, t, (batch,), generator=gen)
    num_nodes = torch.randint(1, count + 1, (batch,), generator=gen, dtype=torch.int32)
    slot = torch.randperm(SLOTS, generator=gen)[:batch].to(torch.int32)
    slot[-1] = -1
    return {"slot": slot, "parents": parents, "num_nodes": num_nodes}


def split(x):
    q, k, v = x["qkv"].split([HK * K, HK * K, HV * V], -1)
    heads = (q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V)))
    return (*heads, x["a"], x["b"], x["A_log"], x["dt_bias"])


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("decay", [1.0, 300.0])
@pytest.mark.parametrize(("batch", "count"), [(4, 13), (2, 1), (2, 128)])
def test_verify(batch, count, decay):
    """Random trees, padding, a row without a slot, strong decay."""
    gen = generator(batch + count)
    x, trees = projections(gen, batch, count, decay=decay), random_trees(gen, batch, count)
    result = session(VERIFY, HEADS, {**x, **trees})
    out, u, g = torch.ops.treewy.tree_verify(*split(x), x["state"], *trees.values())
    close(result["out"], out)
    close(result["u"], u)
    close(result["g"], g)


def test_verify_without_a_stash():
    gen = generator(3)
    x, trees = projections(gen, 3, 9), random_trees(gen, 3, 9)
    result = session(VERIFY, {**HEADS, "stash": "inputs"}, {**x, **trees})
    out, _, _ = torch.ops.treewy.tree_verify(*split(x), x["state"], *trees.values())
    assert result.keys() == {"out"}
    close(result["out"], out)


@pytest.mark.parametrize("name", ["qkv", "a", "b"])
def test_a_nan_stays_with_its_descendants(name):
    gen = generator(5)
    x, trees = projections(gen, 2, 12), random_trees(gen, 2, 12)
    trees["num_nodes"][:] = 12
    trees["slot"] = torch.tensor([1, 4], dtype=torch.int32)
    clean = session(VERIFY, HEADS, {**x, **trees})
    x[name][0, 3] = torch.nan
    result = session(VERIFY, HEADS, {**x, **trees})
    hit = torch.zeros(2, 12, dtype=torch.bool)
    for t in range(12):
        hit[0, t] = t == 3 or (t > 3 and hit[0, trees["parents"][0, t]])
    assert not result["out"][hit].isfinite().any()
    assert torch.equal(result["out"][~hit], clean["out"][~hit])
    assert torch.equal(result["u"][~hit], clean["u"][~hit])


def test_a_spoiled_free_slot_reaches_nothing():
    gen = generator(6)
    x, trees = projections(gen, 3, 5), random_trees(gen, 3, 5)
    free = set(range(SLOTS)) - set(trees["slot"].tolist())
    x["state"][list(free)] = torch.inf
    assert session(VERIFY, HEADS, {**x, **trees})["out"].isfinite().all()


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("count", [1, 14])
def test_tree_conv(count, bias):
    gen = generator(count)
    trees = random_trees(gen, 4, count)
    x = {
        "x": normal(gen, 4, count, 10),
        "conv_state": normal(gen, SLOTS, W - 1, 10),
        "weight": normal(gen, 10, W),
    }
    more = {"bias": normal(gen, 10)} if bias else {}
    result = session(CONV, {"bias": bias}, {**x, **trees, **more}, width=W)
    expected = torch.ops.treewy.tree_conv(
        x["x"], x["conv_state"], *trees.values(), x["weight"], more.get("bias")
    )
    close(result["y"], expected)


PACKED = [[5], [1, 1, 1], [70, 3, 64, 1, 2], [0, 9, 0, 130]]


def packed(gen, lengths):
    slot = torch.randperm(SLOTS, generator=gen)[: len(lengths)].to(torch.int32)
    if len(lengths) > 3:
        slot[1] = -1
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"slot": slot, "cu_seqlens": bounds}


@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("decay", [1.0, 300.0])
def test_prefill(lengths, decay):
    """Packed prompts over several chunks of the scan, empty ones and one without a slot."""
    gen = generator(sum(lengths))
    x, rows = projections(gen, sum(lengths), decay=decay), packed(gen, lengths)
    result = session(PREFILL, HEADS, {**x, **rows})
    state = x["state"].clone()
    out = torch.ops.treewy.prefill(*split(x), state, *rows.values())
    close(result["out"], out)
    close(result["state_out"], state)
    untouched = [s for s in range(SLOTS) if s not in rows["slot"].tolist()]
    assert torch.equal(result["state_out"][untouched], x["state"][untouched])


def test_prefill_keeps_a_nan_in_its_sequence():
    gen = generator(9)
    lengths = [6, 7, 8]
    x, rows = projections(gen, 21), packed(gen, lengths)
    clean = session(PREFILL, HEADS, {**x, **rows})
    x["qkv"][8] = torch.nan
    result = session(PREFILL, HEADS, {**x, **rows})
    spoiled = slice(8, 13)
    assert not result["out"][spoiled].isfinite().any()
    others = [t for t in range(21) if not 8 <= t < 13]
    assert torch.equal(result["out"][others], clean["out"][others])
    slots = [s for s in range(SLOTS) if s != rows["slot"][1]]
    assert torch.equal(result["state_out"][slots], clean["state_out"][slots])
    assert not result["state_out"][rows["slot"][1]].isfinite().any()


@pytest.mark.parametrize("lengths", [*PACKED, [2, 1, 3]], ids=str)
@pytest.mark.parametrize("bias", [0, 1])
def test_prefill_conv(lengths, bias):
    gen = generator(sum(lengths))
    rows = packed(gen, lengths)
    x = {
        "x": normal(gen, sum(lengths), 10),
        "conv_state": normal(gen, SLOTS, W - 1, 10),
        "weight": normal(gen, 10, W),
    }
    more = {"bias": normal(gen, 10)} if bias else {}
    result = session(PREFILL_CONV, {"bias": bias}, {**x, **rows, **more}, width=W)
    pool = x["conv_state"].clone()
    expected = torch.ops.treewy.prefill_conv(
        x["x"], pool, *rows.values(), x["weight"], more.get("bias")
    )
    close(result["y"], expected)
    assert torch.equal(result["conv_state_out"], pool)


def test_half_precision():
    """In and out in float16, the arithmetic between in float32."""
    gen = generator(11)
    x, trees = projections(gen, 3, 6), random_trees(gen, 3, 6)
    half = {n: v.half() if n in ("qkv", "a", "b") else v for n, v in x.items()}
    result = session(VERIFY, HEADS, {**half, **trees})
    out, u, _ = torch.ops.treewy.tree_verify(*split(half), x["state"], *trees.values())
    assert result["out"].dtype == torch.float16
    close(result["out"].float(), out.float(), 2e-3)
    close(result["u"], u)


def test_what_has_no_function_is_refused():
    with pytest.raises(ValueError, match="state_commit must be reconstruct, got deferred"):
        functions.function_for(VERIFY, VERIFY.values(**HEADS, state_commit="deferred"))
