"""SGLang's Triton kernel for chains and trees: a state a node, float32.

Read in sglang 0.5.9, `sglang/srt/layers/attention/fla/fused_recurrent.py`. That file takes little
of SGLang, but importing it the usual way runs the whole engine's imports; so only its folder is
looked up, and the packages above it are stood in for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..layer import Layer
from .peer import INT32_ELEMENTS, Peer, contiguous_projections, gates_of, snapshot_elements

FOLDER = "sglang.srt.layers.attention.fla"
SETTINGS = "sglang.srt.utils.common"  # of which the files take torch's version alone


class SGLang(Peer):
    """`fused_recurrent_gated_delta_rule_update` with a snapshot of the state of every node.

    Called on [B, N, ...] as it lies. The engine flattens the batch and passes `cu_seqlens`, which
    makes the kernel search the parents among the nodes of all sequences: that is slower. Gates are
    ready made, as in the engine, where another launch computes them: not in the time.
    """

    name = "sglang"
    distributions = ("sglang",)
    state = "fp32"
    shapes = (("chain", 4), ("tree", 15), ("tree", 40))
    quick_shapes = shapes
    stash = "snapshots"
    key_major = True
    gates_inside = False

    def load(self) -> None:
        module = load_alone(FOLDER, "fused_recurrent")
        self._kernel = module.fused_recurrent_gated_delta_rule_update

    def refusal(self, layer: Layer) -> str:
        elements = snapshot_elements(layer)
        if elements < INT32_ELEMENTS:
            return ""
        return f"faults: {elements} elements of snapshots pass its 32-bit offsets"

    def calls(self, layer: Layer, slots: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        q, k, v, _, _ = contiguous_projections(layer)
        g, beta = gates_of(layer)
        dims = layer.dims
        shape = (layer.batch, layer.nodes, dims.value_heads, dims.key_dim, dims.value_dim)
        snapshots = torch.empty(shape, device=layer.device)
        rows = torch.arange(layer.batch, dtype=torch.int32, device=layer.device)
        is_chain = bool((layer.trees.parents[0].diff() == 1).all())
        parents = None if is_chain else layer.trees.parents
        call = partial(
            self._kernel,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state_source=layer.pool[0],
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=snapshots,
            intermediate_state_indices=rows,
            cache_steps=layer.nodes,
            retrieve_parent_token=parents,
        )
        return [partial(call, initial_state_indices=slot) for slot in slots]


def load_alone(package: str, name: str) -> ModuleType:
    """A module of a package whose parents are stood in for by empty ones.

    Raises:
        ImportError: the package is not installed, or lacks the module.
    """
    top, *rest = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {top}")
    places = [Path(place) for place in spec.submodule_search_locations]
    folder = Path(*rest)
    found = [place for place in places if (place / folder / f"{name}.py").is_file()]
    if not found:
        raise ImportError(f"{top} has no {folder / name}.py")
    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] == top}
    for key in before:
        del sys.modules[key]
    try:
        _stand_in(top, found[0])
        for depth in range(1, len(rest) + 1):
            _stand_in(".".join([top, *rest[:depth]]), found[0].joinpath(*rest[:depth]))
        _stand_in_settings()
        return importlib.import_module(f"{package}.{name}")
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == top]:
            del sys.modules[key]
        sys.modules.update(before)


def _stand_in(name: str, folder: Path) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return module


def _stand_in_settings() -> None:
    package, _, _ = SETTINGS.rpartition(".")
    _stand_in(package, Path())
    settings = _stand_in(SETTINGS, Path())
    numbers = torch.__version__.split("+")[0].split(".")
    settings.torch_release = tuple(int(n) for n in numbers if n.isdigit())  # type: ignore[attr-defined]
