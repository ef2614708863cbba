"""`executor_network.Network` over an engine of TensorRT 8.6 (or of a double of its program)."""

from __future__ import annotations

import torch

from trtllm_treewy.runtime.step_buffers import shape_of, sizes_of


class TensorRT86Network:
    """A network without buckets or graphs: every run has its own shapes and its own outputs.

    Args:
        engine: has `names()` and `context()`, whose `run(bindings)` enqueues on torch's stream.
        tensors: the network's inputs and outputs.
        types: torch's type of each `Binding.kind`.

    Raises:
        ValueError: the engine's tensors are not the network's.
    """

    def __init__(self, engine, tensors, types):
        # Bool inputs are int32 in the file: onnx_tensorrt86.py.
        self._types = {**types, "bool": torch.int32}
        self._tensors, self._context = tensors, engine.context()
        self._names, self._pools, self.runs = set(engine.names()), {}, 0
        outputs = {x.name for x in tensors.outputs}
        known = outputs | {x.name for x in tensors.inputs}
        odd = (outputs - self._names) | (self._names - known)
        if odd:
            raise ValueError(f"the engine differs from the network in {', '.join(sorted(odd))}")

    def close(self):
        """See `executor_network.Network`; the engine goes with the network."""

    def bind(self, pools):
        """See `executor_network.Network`."""
        for x in self._tensors.inputs:
            if x.is_pool and pools[x.name].dtype != self._types[x.kind]:
                raise ValueError(f"{x.name} must be {self._types[x.kind]}: {pools[x.name].dtype}")
        self._pools = dict(pools)

    def run(self, inputs):
        """See `executor_network.Network`."""
        sizes = sizes_of(inputs, self._tensors.inputs)
        given, groups = dict(self._pools), {}
        for x in self._tensors.inputs:
            if not x.is_pool:
                given[x.name] = inputs[x.name].to(self._types[x.kind]).contiguous()
        device = next(iter(given.values())).device
        for x in self._tensors.outputs:
            if x.in_place is not None:
                given[x.name] = given[x.in_place]
                continue
            # One allocation each: TensorRT wants its addresses at multiples of 256 bytes.
            shape, dtype = shape_of(x, sizes), self._types[x.kind]
            given[x.name] = torch.empty(shape, dtype=dtype, device=device)
            groups.setdefault(x.group, []).append(given[x.name])
        self._context.run({name: x for name, x in given.items() if name in self._names})
        self.runs += 1
        layered = {x.group for x in self._tensors.outputs if x.has_layer}
        return {
            name: torch.stack(parts) if name in layered else parts[0]
            for name, parts in groups.items()
        }
