"""One rank's exported network in ONNX Runtime on the CPU: its collectives run in a process group.

ONNX Runtime has no collectives, so the graph is cut at them: what lies between is a session, and
the sums and gathers are the group's. Needs the packages `onnx` and `onnxruntime`. For checking
exports and for machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_treewy.binding_names import Bindings
from trtllm_treewy.model.collectives import Collectives

from .network_onnx import OnnxNetwork

COLLECTIVE = "DistCollective"
# Where a session that is made of bytes finds the weights.
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Step:
    """A collective: `output` is what all ranks make of `input`."""

    operation: str
    input: str
    output: str

    def carry_out(self, group: Collectives, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, or [ranks * n, ..], the `x` [n, ..] of all in order."""
        if self.operation == "all_reduce":
            return group.all_reduce(x)
        gathered: Tensor = group.all_gather(x.reshape(-1))
        return gathered.view(group.ranks * x.shape[0], *x.shape[1:])


@dataclass(frozen=True)
class Segment:
    """Nodes between two collectives, and the collective that follows; None after the last."""

    nodes: tuple[Any, ...]
    step: Step | None


@dataclass(frozen=True)
class Declared:
    """An input as ONNX Runtime names it and its type."""

    name: str
    type: str


class OnnxRankSession:
    """What `OnnxNetwork` needs of a session, over the segments of a graph.

    Args:
        model: the ModelProto, with or without its weights.
        folder: where its weights lie.
        group: of the ranks, as many as the graph was exported for.
        options: of every session.

    Raises:
        ValueError: the graph is for another number of ranks, or has another collective.
    """

    def __init__(self, model: Any, folder: Path, group: Collectives, options: Any) -> None:
        import onnx

        self._group = group
        self._segments = segments(model.graph.node, group.ranks)
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
        wanted = _needed(self._segments, {x.name for x in model.graph.output})
        known = {x.name: x for x in model.graph.input}
        self._sessions: list[Any] = []
        for segment, outputs in zip(self._segments, wanted, strict=True):
            part = _part(model, segment.nodes, known, outputs)
            session = _open(part, options)
            self._sessions.append(session)
            if session is not None:
                known |= {x.name: _value(x.name, x.type) for x in session.get_outputs()}
            if segment.step is not None:
                # A collective gives the type that it takes.
                kind = known[segment.step.input].type.tensor_type.elem_type
                output = segment.step.output
                known[output] = onnx.helper.make_tensor_value_info(output, kind, None)
        self._inputs = [Declared(x.name, _type_of(x)) for x in model.graph.input]

    def get_inputs(self) -> list[Declared]:
        """Of the whole graph, in order."""
        return self._inputs

    def run(self, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
        """The outputs of these names for all inputs by name."""
        values = dict(feed)
        for segment, session in zip(self._segments, self._sessions, strict=True):
            if session is not None:
                outputs = [x.name for x in session.get_outputs()]
                given = {x.name: values[x.name] for x in session.get_inputs()}
                values.update(zip(outputs, session.run(outputs, given), strict=True))
            if segment.step is not None:
                x = torch.from_numpy(values[segment.step.input])
                values[segment.step.output] = segment.step.carry_out(self._group, x).numpy()
        return [values[name] for name in names]


class OnnxRankNetwork(OnnxNetwork):
    """One rank's network; see `OnnxNetwork`.

    Args:
        path: the ONNX file; its weights lie beside it.
        tensors: its inputs and outputs.
        group: of the ranks.
        threads: of each session; 0 leaves it to ONNX Runtime.
    """

    def __init__(self, path: Path, tensors: Bindings, group: Collectives, threads: int = 0) -> None:
        self._group = group
        super().__init__(path, tensors, threads)

    def _open(self, path: Path, options: Any) -> Any:
        import onnx

        model = onnx.load(path, load_external_data=False)
        return OnnxRankSession(model, path.parent, self._group, options)


def segments(nodes: Any, ranks: int) -> list[Segment]:
    """A graph's nodes, cut at its collectives.

    Raises:
        ValueError: a collective of another number of ranks, or of another kind.
    """
    import onnx

    result: list[Segment] = []
    current: list[Any] = []
    for node in nodes:
        if node.op_type != COLLECTIVE:
            current.append(node)
            continue
        fields = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
        operation, reduction = fields["collective_operation"].decode(), fields["reduce_op"].decode()
        if fields["nb_rank"] != ranks:
            raise ValueError(f"its collectives are of {fields['nb_rank']} ranks, there are {ranks}")
        if (operation, reduction) not in (("all_reduce", "sum"), ("all_gather", "none")):
            raise ValueError(f"its collective {operation} with {reduction} is not known")
        result.append(Segment(tuple(current), Step(operation, node.input[0], node.output[0])))
        current = []
    result.append(Segment(tuple(current), None))
    return result


def _needed(parts: list[Segment], last: set[str]) -> list[set[str]]:
    """Of each segment: what it makes that its collective, a later one or the caller takes."""
    wanted, result = set(last), []
    for part in reversed(parts):
        if part.step is not None:
            wanted.add(part.step.input)
        made = {name for node in part.nodes for name in node.output}
        result.append(made & wanted)
        wanted |= {name for node in part.nodes for name in node.input}
    return result[::-1]


def _part(model: Any, nodes: tuple[Any, ...], known: Mapping[str, Any], outputs: set[str]) -> Any:
    """A segment as a model; what it takes from others is its input."""
    import onnx

    made = {name for node in nodes for name in node.output}
    taken = {name for node in nodes for name in node.input} - made
    part = onnx.ModelProto()
    part.CopyFrom(model)
    for name in ("node", "input", "output", "initializer", "value_info"):
        part.graph.ClearField(name)
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(x for x in model.graph.initializer if x.name in taken)
    part.graph.input.extend(known[name] for name in sorted(taken) if name in known)
    declared = {x.name: x for x in model.graph.output}
    part.graph.output.extend(
        declared.get(name) or onnx.ValueInfoProto(name=name) for name in sorted(outputs)
    )
    return part


def _open(part: Any, options: Any) -> Any:
    """A session; None for a segment that gives nothing."""
    if not part.graph.output:
        return None
    import onnxruntime

    return onnxruntime.InferenceSession(
        part.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _type_of(x: Any) -> str:
    """ONNX Runtime's name of a value's type."""
    import onnx

    name = onnx.TensorProto.DataType.Name(x.type.tensor_type.elem_type).lower()
    return f"tensor({name})"


def _value(name: str, kind: str) -> Any:
    """A value of a type by ONNX Runtime's name, of any shape."""
    import onnx

    text = kind.removeprefix("tensor(").removesuffix(")").upper()
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(text), None)
