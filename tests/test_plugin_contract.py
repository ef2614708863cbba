"""The contract of the TensorRT plugins: the Python module, its documentation, and its refusals."""

from __future__ import annotations

import pytest
from plugin_tables import tables

from trtllm_treewy.plugin_contract import KINDS, PLUGINS, VERIFY

HEADS = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 128}


def test_the_page_has_the_tables(repository):
    text = (repository / "docs" / "plugin.md").read_text()
    assert tables() in text, "docs/plugin.md is behind: put in what tests/plugin_tables.py prints"


def test_every_tensor_is_of_a_known_kind_and_shape():
    symbols = {"B", "N", "T", "L", "slots", "HK", "HV", "K", "V", "C", "W", "H"}
    for plugin in PLUGINS.values():
        fields = {field.name: field for field in plugin.fields}
        for tensor in (*plugin.inputs, *plugin.outputs):
            assert tensor.dtypes == KINDS[tensor.kind]
            assert {dim.split("+")[0].split("-")[0] for dim in tensor.shape} <= symbols | {"1"}
            if tensor.when:
                assert tensor.when[1] in fields[tensor.when[0]].choices
        by_name = {tensor.name: tensor for tensor in plugin.inputs}
        for tensor in plugin.outputs:
            if tensor.in_place:
                source = by_name[tensor.in_place]
                assert (source.shape, source.kind) == (tensor.shape, tensor.kind)
                assert source.when == tensor.when


def test_what_is_there_depends_on_the_fields():
    plain = [x.name for x in VERIFY.inputs_with(**HEADS)]
    assert plain[-1] == "num_nodes"
    deferred = [x.name for x in VERIFY.inputs_with(**HEADS, state_commit="deferred")]
    assert deferred == [*plain, "history_u", "history_k", "history_g", "history_len"]
    assert [x.name for x in VERIFY.outputs_with(**HEADS)] == ["out", "u", "g"]
    assert [x.name for x in VERIFY.outputs_with(**HEADS, stash="inputs")] == ["out"]
    assert VERIFY.values(**HEADS)["u_dtype"] == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_k_dim": None}, "head_k_dim is missing"),
        ({"heads": 3}, "must be one of num_k_heads.*got 'heads'"),
        ({"head_k_dim": "128"}, "head_k_dim must be int32, got '128'"),
        ({"head_k_dim": True}, "head_k_dim must be int32"),
        ({"head_k_dim": 0}, "head_k_dim must be positive, got 0"),
        ({"stash": "u"}, "stash must be one of pseudo_values, inputs, got 'u'"),
    ],
)
def test_fields_that_are_refused(change, message):
    fields = {name: x for name, x in {**HEADS, **change}.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        VERIFY.values(**fields)
