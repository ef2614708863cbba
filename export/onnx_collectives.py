"""The model's collectives in a graph: nodes that TensorRT 10.16 and later run over NCCL.

A `DistCollective` node of this project's domain is what TensorRT's parser makes an
`IDistCollectiveLayer` of, whatever the domain; its attributes are those of the layer. It has no
function in standard operators: a graph of one rank means nothing without the others.
"""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, helper

from .onnx_functions import DOMAIN
from .onnx_nodes import Nodes
from .onnx_trace import Value

COLLECTIVE = "DistCollective"


class GraphCollectives:
    """`model.Collectives` of one rank while its model is traced."""

    def __init__(self, f: Nodes, rank: int, ranks: int) -> None:
        self._f, self.rank, self.ranks = f, rank, ranks

    def all_reduce(self, x: Any) -> Any:
        """The sum of all ranks' values."""
        return x.like(self._node(x.name, "all_reduce", "sum"))

    def all_gather(self, x: Any) -> Any:
        """[..., n] of all ranks to [..., ranks * n]; the layer joins along a first axis."""
        value: Value = x[None]
        parts = value.like(
            self._node(value.name, "all_gather", "none"), (self.ranks, *value.shape[1:])
        )
        last = parts.ndim - 1
        return parts.permute(*range(1, last), 0, last).flatten(-2)

    def _node(self, x: str, operation: str, reduction: str) -> str:
        name = self._f.fresh(operation)
        self._f.outputs(
            COLLECTIVE,
            [x],
            [name],
            domain=DOMAIN,
            collective_operation=operation,
            reduce_op=reduction,
            root=-1,
            nb_rank=self.ranks,
            group_size=0,  # all ranks
        )
        groups = helper.make_attribute("groups", [], attr_type=AttributeProto.INTS)
        self._f.nodes[-1].attribute.append(groups)
        return name
