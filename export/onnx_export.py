"""ONNX files of a checkpoint: prefill, verify and the MTP drafter, over one file of weights.

With several ranks these are one rank's, with its share of the weights; see `onnx_collectives`.

The model definition (`trtllm_treewy.model`) is traced, on the meta device, so an export needs the
memory of one tensor. `export_onnx` writes

    prefill.onnx, verify.onnx, draft.onnx   the networks (`binding_names`), all dimensions dynamic
    weights.bin                             the weights of all three, as they are in the checkpoint

Needs the `onnx` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from trtllm_treewy.binding_names import (
    DRAFT,
    PREFILL,
    PSEUDO_VALUES,
    Binding,
    bindings,
    networks,
)
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import ATTENTIONS, STANDARD
from trtllm_treewy.model import SINGLE_RANK, Collectives, Qwen3_5ForCausalLM
from trtllm_treewy.rank_config import bound_config, shard_config

from .checkpoint import Progress, find_sources, read_tensors, resolve_dtype
from .onnx_collectives import GraphCollectives
from .onnx_experts import replace_experts
from .onnx_functions import DOMAIN
from .onnx_nodes import ATTENTION_OPSET, IR_VERSIONS, OPSET, TYPES, Nodes
from .onnx_steps import (
    ATTENTION_STEPS,
    CachedAttention,
    PackedGdn,
    PluginNodes,
    Rows,
    TreeGdn,
    padded_layout,
    same_layout,
)
from .onnx_trace import Value, take_parameters
from .onnx_trees import segments, tree
from .sharding import shard_tensor

WEIGHTS = "weights.bin"
# Where a tensor may start: on a page, so that runtimes can map the file.
ALIGNMENT = 4096
_FLOAT32_NAMES = ("A_log", "dt_bias")


@dataclass(frozen=True)
class ExportTypes:
    """Types of an export: of weights and activations, of the states and of pseudo-values."""

    activation: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    stash: torch.dtype = torch.float32
    kv: torch.dtype | None = None

    def __post_init__(self) -> None:
        wide = (torch.float32, torch.bfloat16)
        for name, value, allowed in (
            ("activation", self.activation, (*wide, torch.float16)),
            ("state", self.state, wide),
            ("stash", self.stash, wide),
        ):
            if value not in allowed:
                expected = ", ".join(str(x).removeprefix("torch.") for x in allowed)
                raise ValueError(f"{name} type must be one of {expected}, got {value}")
        if self.stash == torch.bfloat16 and self.state != torch.bfloat16:
            raise ValueError(f"a bfloat16 stash needs a bfloat16 state, which is {self.state}")

    def of(self, kind: str) -> torch.dtype:
        """The type of a binding's kind."""
        known = {
            "activation": self.activation,
            "state": self.state,
            "stash": self.stash,
            "kv": self.kv or self.activation,
            "float32": torch.float32,
            "int32": torch.int32,
            "bool": torch.bool,
        }
        return known[kind]


def export_onnx(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    state_dtype: torch.dtype = torch.float32,
    stash: str = PSEUDO_VALUES,
    stash_dtype: torch.dtype = torch.float32,
    attention: str = STANDARD,
    ranks: int = 1,
    rank: int = 0,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Writes the networks of a Hugging Face directory.

    Args:
        checkpoint: the directory.
        output: a directory, made if it is not there; the files in it are replaced.
        dtype: of weights and activations, as for `checkpoint.load_model`.
        state_dtype, stash_dtype: float32, or bfloat16.
        stash: what commits will work from, "pseudo_values" or "inputs".
        attention: "standard" operators, or "onnx", the Attention operator of opset 23.
        ranks, rank: how many the model is divided over, and which one's networks to write.
        progress: called as `progress(done, total)` after each tensor.

    Returns:
        The files written.

    Raises:
        FileNotFoundError, ValueError: as for `checkpoint.load_model`, and for types that do not
            go together, or ranks that the model cannot be divided over. Files that are half
            written are removed.
    """
    config = ModelConfig.from_pretrained(checkpoint)
    types = ExportTypes(resolve_dtype(dtype, config), state_dtype, stash_dtype)
    sources = find_sources(checkpoint, parameter_shapes(config))
    tensors = read_tensors(sources, types.activation)
    shares = ((name, shard_tensor(name, x, config, ranks, rank)) for name, x in tensors)
    return write_networks(
        config,
        shares,
        Path(output),
        types,
        stash,
        attention=attention,
        ranks=ranks,
        rank=rank,
        total=len(sources),
        progress=progress,
    )


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the model's tensors."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def write_networks(
    config: ModelConfig,
    tensors: Iterator[tuple[str, torch.Tensor]],
    output: Path,
    types: ExportTypes,
    stash: str = PSEUDO_VALUES,
    *,
    attention: str = STANDARD,
    ranks: int = 1,
    rank: int = 0,
    total: int = 0,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """`export_onnx` of tensors that come one by one, in their final types."""
    output.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        written.append(output / WEIGHTS)
        places = _write_weights(tensors, written[0], total, progress)
        for network in networks(config):
            model = make_network(
                network, config, types, stash, places, attention, ranks=ranks, rank=rank
            )
            path = output / f"{network}.onnx"
            written.append(path)
            path.write_bytes(model.SerializeToString())
            onnx.checker.check_model(str(path))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return tuple(written)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file of weights."""

    offset: int
    length: int


def _write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]],
    path: Path,
    total: int,
    progress: Progress | None,
) -> dict[str, Place]:
    places: dict[str, Place] = {}
    with path.open("wb") as file:
        for name, tensor in tensors:
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            places[name] = Place(file.tell(), data.nbytes)
            file.write(data.data)
            if progress is not None:
                progress(len(places), total)
    return places


def make_network(
    network: str,
    config: ModelConfig,
    types: ExportTypes,
    stash: str = PSEUDO_VALUES,
    places: Mapping[str, Place] | None = None,
    attention: str = STANDARD,
    *,
    ranks: int = 1,
    rank: int = 0,
) -> Any:
    """The ModelProto of one network.

    Args:
        network: one of `binding_names.networks(config)`.
        config, types, stash: of the model and of its export.
        places: where the weights lie in `weights.bin`; without them the model has none, which
            does for looking at it.
        attention: "standard" or "onnx".
        ranks, rank: as for `export_onnx`; `config` is the whole model's.

    Raises:
        ValueError: for another `attention`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
    opset = OPSET if attention == STANDARD else ATTENTION_OPSET
    tensors = bindings(network, bound_config(config, ranks), stash)
    f = Nodes(opset=opset)
    config = shard_config(config, ranks)
    collectives = GraphCollectives(f, rank, ranks) if ranks > 1 else SINGLE_RANK
    model = _traceable(config, f, types, collectives)
    plugins = PluginNodes(f, config.linear_conv_kernel_dim)
    given = {x.name: Value(f, x.name, x.shape, types.of(x.kind)) for x in tensors.inputs}
    step = ATTENTION_STEPS[attention]
    if network == PREFILL:
        _prefill(f, model, PackedGdn(plugins, config), step, given)
    elif network == DRAFT:
        _draft(f, model, step, given)
    else:
        kind = str(types.stash).removeprefix("torch.")
        _verify(f, model, TreeGdn(plugins, config, stash, kind), step, given)
    outputs = [x.name for x in tensors.outputs]
    nodes = _reachable(f.nodes, outputs)
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        network,
        [_value_info(x, types) for x in tensors.inputs],
        [_value_info(x, types) for x in tensors.outputs],
        initializer=_initializers(config, types, used, places or {}),
    )
    return helper.make_model(
        graph,
        functions=list(plugins.functions.values()),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=IR_VERSIONS[opset],
        producer_name="trtllm-treewy",
    )


def _traceable(
    config: ModelConfig, f: Nodes, types: ExportTypes, collectives: Collectives
) -> Qwen3_5ForCausalLM:
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config, collectives)
    replace_experts(model)
    take_parameters(model, f, lambda name: _weight_type(name, types))
    return model


def _weight_type(name: str, types: ExportTypes) -> torch.dtype:
    return torch.float32 if name.rpartition(".")[2] in _FLOAT32_NAMES else types.activation


def _value_info(x: Binding, types: ExportTypes) -> Any:
    return helper.make_tensor_value_info(x.name, TYPES[types.of(x.kind)], x.shape)


def _initializers(
    config: ModelConfig, types: ExportTypes, used: set[str], places: Mapping[str, Place]
) -> list[Any]:
    result = []
    for name, shape in parameter_shapes(config).items():
        if name not in used:
            continue
        tensor = TensorProto(name=name, data_type=TYPES[_weight_type(name, types)], dims=shape)
        if name in places:
            tensor.data_location = TensorProto.EXTERNAL
            place = places[name]
            for key, value in (
                ("location", WEIGHTS),
                ("offset", str(place.offset)),
                ("length", str(place.length)),
            ):
                tensor.external_data.add(key=key, value=value)
        result.append(tensor)
    return result


def _reachable(nodes: list[Any], outputs: list[str]) -> list[Any]:
    """The nodes that an output depends on, in their order."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.output):
            continue
        kept.append(node)
        wanted.update(node.input)
    return kept[::-1]


def _result(f: Nodes, value: Value, name: str) -> None:
    f.outputs("Identity", [value.name], [name])


Given = Mapping[str, Value]
AttentionStep = type[CachedAttention]


def _verify(
    f: Nodes, model: Qwen3_5ForCausalLM, gdn: Any, step: AttentionStep, given: Given
) -> None:
    nodes = tree(f, "parents", "num_nodes")
    counts = f.total(f.cast(nodes.ancestors, torch.int32), 2)
    depth = f.op("Sub", counts, f.i32(1))
    positions = f.op("Add", f.unsqueeze("context_lens", 1), depth)
    token_ids = given["token_ids"]
    real = f.op("GreaterOrEqual", "slot", f.i32(0))
    old = _context(f, token_ids)
    mask = f.concat(old, nodes.ancestors, axis=2)
    attends = f.op("And", nodes.valid, f.unsqueeze(real, 1))
    attention = step(f, Rows(mask, attends, same_layout, same_layout))
    hidden = _run(model, token_ids, token_ids.like(positions), gdn, attention)
    _result(f, hidden, "hidden")
    _result(f, _logits(model, hidden), "logits")


def _run(model: Any, *args: Any) -> Any:
    """The model over `Value`s, which its annotations do not know of."""
    return model(*args)


def _logits(model: Any, hidden: Value) -> Value:
    logits: Value = model.logits(hidden)
    return logits


def _context(f: Nodes, queries: Value) -> str:
    """Bool [B, Q, S]: rows of `kv_rows` that are in the context, the same for all queries."""
    row = f.unsqueeze(f.count(f.size("kv_rows", 1)), 0)
    within = f.unsqueeze(f.op("Less", row, f.unsqueeze("context_lens", 1)), 1)
    shape = f.concat(f.op("Shape", queries.name), f.size("kv_rows", 1), axis=0)
    return f.op("Expand", within, shape)


def _prefill(
    f: Nodes, model: Qwen3_5ForCausalLM, gdn: Any, step: AttentionStep, given: Given
) -> None:
    token_ids = given["token_ids"]
    where = segments(f, "cu_seqlens", "token_ids")
    positions = f.op("Add", f.gather("context_lens", where.row), where.place)
    index = f.count(f.size("query_index", 1))
    causal = f.op("GreaterOrEqual", f.unsqueeze(index, 1), f.unsqueeze(index, 0))
    real = f.op("GreaterOrEqual", "slot", f.i32(0))
    within = f.op("Less", f.unsqueeze(index, 0), f.unsqueeze(where.length, 1))
    own = f.op("And", f.unsqueeze(causal, 0), f.unsqueeze(within, 1))
    mask = f.concat(_context(f, given["query_index"]), own, axis=2)
    attends = f.op("And", within, f.unsqueeze(real, 1))
    attention = step(f, Rows(mask, attends, **padded_layout(("B", "M"))))
    hidden = _run(model, token_ids, token_ids.like(positions), gdn, attention)
    _result(f, hidden, "hidden")
    stop = f.slice("cu_seqlens", 1, 2**31 - 1, 0)
    last = f.op("Max", f.op("Sub", stop, f.i32(1)), f.i32(0))
    ends = hidden[token_ids.like(last, ("B",))]
    _result(f, _logits(model, ends), "logits")


def _draft(f: Nodes, model: Qwen3_5ForCausalLM, step: AttentionStep, given: Given) -> None:
    rows = Rows("mask", _any(f, "mask"), same_layout, same_layout)
    attention: Any = step(f, rows)
    draft: Any = model.draft
    hidden = draft(given["token_ids"], given["hidden_in"], given["positions"], attention)
    _result(f, hidden, "hidden")
    index = f.unsqueeze(f.cast("logit_index", torch.int64), 2)
    picked = f.op("GatherND", hidden.name, index, batch_dims=1)
    shape = (*given["logit_index"].shape, *hidden.shape[2:])
    _result(f, _logits(model, hidden.like(picked, shape)), "logits")


def _any(f: Nodes, mask: str) -> str:
    """Bool [B, Q]: whether anything is True along the last axis of [B, Q, S]."""
    return f.op("Greater", f.total(f.cast(mask, torch.float32), 2), f.f32(0.5))
