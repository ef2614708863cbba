"""Exported networks of a divided model: all ranks together compute what the whole computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx_cases import LIMITS, TYPES
from parallel_ranks import (
    KINDS,
    Meeting,
    Parallel,
    RankNetwork,
    compare,
    join_ranks,
    joint_bindings,
    random_model,
    rank_tensors,
)

from trtllm_treewy.binding_names import bindings, networks
from trtllm_treewy.export.onnx_export import ExportTypes, export_onnx, make_network, write_networks
from trtllm_treewy.export.tensorrt_builder import TensorRTBuilder
from trtllm_treewy.rank_config import bound_config, shard_config
from trtllm_treewy.runtime.executor_network import NetworkExecutor
from trtllm_treewy.runtime.executor_torch import TorchExecutor
from trtllm_treewy.runtime.network_onnx import OnnxNetwork


def joint_executor(model, ranks, folder):
    """Ranks whose networks are one graph in ONNX Runtime."""
    config, bound = model.config, bound_config(model.config, ranks)
    for rank in range(ranks):
        tensors = rank_tensors(model, ranks, rank)
        write_networks(
            config, tensors, folder / f"rank{rank}", ExportTypes(), ranks=ranks, rank=rank
        )
    joint = {}
    for name in networks(config):
        files = [folder / f"rank{rank}" / f"{name}.onnx" for rank in range(ranks)]
        whole = join_ranks([onnx.load(file, load_external_data=False) for file in files])
        (folder / f"{name}.onnx").write_bytes(whole.SerializeToString())
        tensors = joint_bindings(bindings(name, bound), ranks)
        joint[name] = OnnxNetwork(folder / f"{name}.onnx", tensors, threads=1)
    meeting, executors = Meeting(ranks), []
    pools = {name: {} for name in joint}
    for rank in range(ranks):
        parts = {
            name: RankNetwork(network, pools[name], rank, meeting)
            for name, network in joint.items()
        }
        part = shard_config(config, ranks)
        executors.append(
            NetworkExecutor(part, LIMITS, parts, types=TYPES, device=torch.device("cpu"))
        )
    return Parallel(executors)


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("dense", 4)])
@torch.inference_mode()
def test_exported_ranks_compute_what_the_whole_computes(kind, ranks, tmp_path):
    """All three networks, the drafter too; KV heads are repeated with 4 ranks."""
    model = random_model(kind)
    parallel = joint_executor(model, ranks, tmp_path)
    compare(TorchExecutor(model, LIMITS), parallel, model.config)


def test_collectives_are_where_they_must_be(shipped_model, tmp_path):
    """One sum behind the embedding, each mixer and each feed-forward block; one gather."""
    files = export_onnx(shipped_model, tmp_path, dtype="float32", ranks=2, rank=1)
    weights = (shipped_model / "model.safetensors").stat().st_size  # of bfloat16
    assert (tmp_path / "weights.bin").stat().st_size < 1.1 * weights
    counts = {}
    for file in files[1:]:
        model = onnx.load(file, load_external_data=False)
        nodes = [node for node in model.graph.node if node.op_type == "DistCollective"]
        assert {node.domain for node in nodes} == {"treewy"}
        kinds = [onnx.helper.get_attribute_value(node.attribute[0]) for node in nodes]
        counts[file.stem] = kinds.count(b"all_reduce"), kinds.count(b"all_gather")
    assert counts == {"prefill": (17, 1), "verify": (17, 1), "draft": (3, 1)}


def test_one_rank_has_no_collectives():
    config = random_model("dense").config
    model = make_network("verify", config, ExportTypes())
    assert not [node for node in model.graph.node if node.op_type == "DistCollective"]


def test_a_tensorrt_that_has_no_collectives_is_told(tmp_path):
    """Before 10.16 its parser does not know the node."""

    class Parser:
        num_errors = 1

        def __init__(self, network, logger):
            pass

        def parse_from_file(self, path):
            return False

        def get_error(self, index):
            return "no importer for operator: DistCollective"

    class Builder:
        def __init__(self, logger):
            pass

        def create_network(self, flags):
            return None

    class Logger:
        ERROR = 1

    trt = SimpleNamespace(
        __name__="tensorrt", __version__="10.14.1", ILogger=Logger, Builder=Builder,
        OnnxParser=Parser, LayerType=SimpleNamespace(), NetworkDefinitionCreationFlag=None,
    )  # fmt: skip
    builder = TensorRTBuilder(trt=trt)
    with pytest.raises(
        ValueError, match=r"DistCollective; networks of several ranks need .* 10.16"
    ):
        builder.build(tmp_path / "a.onnx", tmp_path / "a.engine", [], tmp_path / "times")
