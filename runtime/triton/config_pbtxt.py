"""Writes `config.pbtxt`, the configuration of a Triton model, in protobuf's text format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .tensors import INPUTS, OUTPUTS, TensorSpec


@dataclass(frozen=True)
class Instances:
    """Where a model runs, and how many times: each instance is an engine of its own.

    Attributes:
        count: instances on each device.
        gpus: numbers of the GPUs; None takes every GPU that Triton finds, or else the CPU.
        cpu: run on the CPU, whatever there is.
        ranks: GPUs, or processes on the CPU, that each instance is divided over. Triton gives an
            instance one GPU at most, so those with several choose them, from the parameter `gpus`.
    """

    count: int = 1
    gpus: Sequence[int] | None = None
    cpu: bool = False
    ranks: int = 1

    def text(self) -> str:
        """The instance group."""
        fields = [f"count: {self.count}"]
        if self.cpu:
            fields.append("kind: KIND_CPU")
        elif self.ranks > 1:
            sets = len(self.gpus) // self.ranks if self.gpus is not None else 1
            fields = [f"count: {self.count * sets}", "kind: KIND_MODEL"]
        elif self.gpus is not None:
            fields += ["kind: KIND_GPU", f"gpus: [ {', '.join(map(str, self.gpus))} ]"]
        return f"instance_group [ {{ {' '.join(fields)} }} ]"


def config_text(name: str, parameters: Mapping[str, str], instances: Instances) -> str:
    """The whole file; `docs/triton.md` says what it means."""
    blocks = [
        "# Written by trtllm-treewy triton-repo. docs/triton.md names all parameters.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "# One prompt a request: the engine batches what runs together, at every step anew.",
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        instances.text(),
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
        _tensors("input", INPUTS),
        _tensors("output", OUTPUTS),
    ]
    return "\n".join(blocks) + "\n"


def _tensors(kind: str, specs: Iterable[TensorSpec]) -> str:
    return f"{kind} [\n" + ",\n".join(f"  {_tensor(kind, spec)}" for spec in specs) + "\n]"


def _tensor(kind: str, spec: TensorSpec) -> str:
    dims = ", ".join(map(str, spec.dims))
    optional = " optional: true" if kind == "input" and spec.optional else ""
    return (
        f"{{ name: {_quoted(spec.name)} data_type: TYPE_{spec.type} dims: [ {dims} ]{optional} }}"
    )


def _quoted(text: str) -> str:
    """JSON's escapes are among those of the text format, but for those beyond ASCII."""
    return json.dumps(text, ensure_ascii=False)
