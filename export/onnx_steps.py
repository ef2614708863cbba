"""What stands behind the model's two seams (`model.steps`) while it is traced into a graph.

GDN work becomes the plugins' nodes. Attention becomes standard operators over the rows that
`kv_rows` picks from the caches and the new rows of this step. The caches are read and not written:
the new rows are outputs, and whoever runs the network puts them into the pools. So no copy of a
cache is ever made, and what a network must have bound in place is the states alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_treewy.config import ModelConfig
from trtllm_treewy.engine_config import ATTENTION_OP, STANDARD
from trtllm_treewy.plugin_contract import (
    CONV,
    NAMESPACE,
    PREFILL,
    PREFILL_CONV,
    VERIFY,
    VERSION,
    PluginSpec,
)

from .onnx_functions import DOMAIN, function_for
from .onnx_nodes import Nodes
from .onnx_trace import Dim, Value, fixed


class PluginNodes:
    """Nodes of the plugins in one graph, and the functions of those that occur."""

    def __init__(self, f: Nodes, conv_width: int) -> None:
        self._f, self._width = f, conv_width
        self.functions: dict[str, Any] = {}

    def add(
        self, plugin: PluginSpec, inputs: list[str], outputs: list[str], **fields: int | str
    ) -> None:
        """One node; `fields` as for `plugin.values`."""
        values = plugin.values(**fields)
        if plugin.name not in self.functions:
            function = function_for(plugin, values, self._width, self._f.opset)
            self.functions[plugin.name] = function
        attributes = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION, **values}
        self._f.outputs(plugin.name, inputs, outputs, domain=DOMAIN, **attributes)


def _heads(config: ModelConfig) -> dict[str, int]:
    return {
        "num_k_heads": config.linear_num_key_heads,
        "num_v_heads": config.linear_num_value_heads,
        "head_k_dim": config.linear_key_head_dim,
        "head_v_dim": config.linear_value_head_dim,
    }


class TreeGdn:
    """GDN layers over trees: `TreeConv1d` and `TreeWyVerify`."""

    trees = ("slot", "parents", "num_nodes")

    def __init__(self, plugins: PluginNodes, config: ModelConfig, stash: str, u_dtype: str) -> None:
        self._plugins, self._config = plugins, config
        self._fields: dict[str, int | str] = {**_heads(config), "stash": stash, "u_dtype": u_dtype}
        self._mixed: dict[int, Value] = {}

    def conv(self, layer: int, x: Value, weight: Value) -> Value:
        f = x.f
        f.outputs("Identity", [x.name], [f"conv_x.{layer}"])
        y = f"qkv.{layer}"
        given = [x.name, f"conv_state.{layer}", weight.name, *self.trees]
        self._plugins.add(CONV, given, [y])
        self._mixed[layer] = x.like(y)
        return self._mixed[layer]

    def delta_rule(
        self,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        a: Value,
        b: Value,
        A_log: Value,
        dt_bias: Value,
    ) -> Value:
        # The plugin reads the conv's output as it is; q, k and v are views of it.
        mixed = self._mixed.pop(layer)
        out = f"gdn_out.{layer}"
        gates = [a.name, b.name, A_log.name, dt_bias.name]
        results = [out]
        if self._fields["stash"] == "pseudo_values":
            results += [f"u.{layer}", f"g.{layer}"]
            a.f.outputs("Identity", [k.name], [f"k.{layer}"])
        else:
            a.f.outputs("Identity", [a.name], [f"a.{layer}"])
            a.f.outputs("Identity", [b.name], [f"b.{layer}"])
        given = [mixed.name, *gates, f"state.{layer}", *self.trees]
        self._plugins.add(VERIFY, given, results, **self._fields)
        return v.like(out)


class PackedGdn:
    """GDN layers over packed prompts: `GdnPrefillConv1d` and `GdnPrefill`."""

    def __init__(self, plugins: PluginNodes, config: ModelConfig) -> None:
        self._plugins, self._config = plugins, config
        self._mixed: dict[int, Value] = {}

    def conv(self, layer: int, x: Value, weight: Value) -> Value:
        given = [x.name, f"conv_state.{layer}", weight.name, "slot", "cu_seqlens"]
        y = f"qkv.{layer}"
        self._plugins.add(PREFILL_CONV, given, [y, f"conv_state_out.{layer}"])
        self._mixed[layer] = x.like(y)
        return self._mixed[layer]

    def delta_rule(
        self,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        a: Value,
        b: Value,
        A_log: Value,
        dt_bias: Value,
    ) -> Value:
        mixed = self._mixed.pop(layer)
        gates = [a.name, b.name, A_log.name, dt_bias.name]
        given = [mixed.name, *gates, f"state.{layer}", "slot", "cu_seqlens"]
        out = f"gdn_out.{layer}"
        self._plugins.add(PREFILL, given, [out, f"state_out.{layer}"], **_heads(self._config))
        return v.like(out)


@dataclass(frozen=True)
class Rows:
    """What the queries of a step see.

    Attributes:
        mask: bool [B, Q, S + Q]: the context's rows, then the new ones.
        attends: bool [B, Q]: queries that see anything; the others give zero. None for all.
        pad: brings [.., heads, dim] of the network's layout to [B, Q, heads, dim].
        unpad: the other way.
    """

    mask: str
    attends: str | None
    pad: Callable[[Value], Value]
    unpad: Callable[[Value], Value]


class CachedAttention:
    """`AttentionStep` over the caches' rows and the new ones."""

    def __init__(self, f: Nodes, rows: Rows) -> None:
        self._f, self._rows = f, rows
        self._mask = self._make_mask()
        self._seen = f.unsqueeze(f.cast(rows.mask, torch.float32), 1)

    def attend(self, layer: int, q: Value, k: Value, v: Value, scale: float) -> Value:
        f, (kv_heads, heads, dim) = self._f, fixed([k.shape[-2], *q.shape[-2:]])
        for value, name in ((k, f"new_k.{layer}"), (v, f"new_v.{layer}")):
            f.outputs("Identity", [value.name], [name])
        queries = self._rows.pad(q)
        keys = self._all_rows(k, f"k_cache.{layer}")
        values = self._all_rows(v, f"v_cache.{layer}")
        out, bad = self._mix(queries, keys, values, kv_heads, scale)
        # A query that sees a row that is not finite gives NaN, and no other does.
        faulty = f.op("Greater", f.op("MatMul", self._seen, bad), f.f32(0.5))
        out = f.where(f.unsqueeze(faulty, 2), self._number(np.nan, q.dtype), out)
        if self._rows.attends is not None:
            attends = f.unsqueeze(self._rows.attends, 1, 2, 4)
            out = f.where(attends, out, self._number(0.0, q.dtype))
        out = f.reshape(f.transpose(out, 0, 3, 1, 2, 4), 0, 0, heads, dim)
        return self._rows.unpad(queries.like(out))

    def _mix(
        self, queries: Value, keys: str, values: str, kv_heads: int, scale: float
    ) -> tuple[str, str]:
        """Softmax of the scores times the values.

        Args:
            queries: [B, Q, heads, D].
            keys, values: [B, kv_heads, S + Q, D].
            kv_heads: that many.
            scale: factor of the scores.

        Returns:
            [B, kv_heads, heads / kv_heads, Q, D], and the rows that are not finite and were taken
            for zero: float32 [B, kv_heads, S + Q, 1], 1 where so. Other rows that are not finite
            reach the queries that see them by themselves.
        """
        f, (heads, dim) = self._f, fixed(queries.shape[-2:])
        grouped = f.reshape((queries * scale).name, 0, 0, kv_heads, heads // kv_heads, dim)
        grouped = f.transpose(grouped, 0, 2, 3, 1, 4)  # [B, kv_heads, groups, Q, D]
        values, bad = self._finite_rows(values, queries.dtype)
        scores = f.op("MatMul", grouped, f.transpose(f.unsqueeze(keys, 2), 0, 1, 2, 4, 3))
        hidden = f.f32(float(np.finfo(np.float32).min))
        scores = f.where(self._mask, f.cast(scores, torch.float32), hidden)
        weights = f.cast(f.op("Softmax", scores, axis=4), queries.dtype)
        return f.op("MatMul", weights, f.unsqueeze(values, 2)), bad

    def _make_mask(self) -> str:
        return self._f.unsqueeze(self._rows.mask, 1, 2)

    def _all_rows(self, new: Value, cache: str) -> str:
        """Rows of the context, then the new ones: [B, kv_heads, S + Q, D]."""
        f = self._f
        old = f.transpose(f.gather(cache, "kv_rows", axis=1), 1, 0, 2, 3)
        own = f.transpose(self._rows.pad(new).name, 0, 2, 1, 3)
        return f.concat(f.op("CastLike", old, own), own, axis=2)

    def _finite_rows(self, rows: str, dtype: torch.dtype) -> tuple[str, str]:
        """The rows, zero where not finite, and where that is: float32 [B, kv_heads, S + Q, 1]."""
        f = self._f
        size = f.total(f.op("Abs", f.cast(rows, torch.float32)), 3, keep=True)
        bad = f.op("Not", f.finite(size))
        return f.where(bad, self._number(0.0, dtype), rows), f.cast(bad, torch.float32)

    def _number(self, value: float, dtype: torch.dtype) -> str:
        return self._f.cast(self._f.f32(value), dtype)


class AttentionOperator(CachedAttention):
    """The same by the Attention operator of opset 23, which runtimes fuse.

    It adds its mask to the scores, so no key that is not finite may come near it, and no query may
    see nothing at all. The softmax has the precision that the runtime gives it: TensorRT's parser
    refuses the attribute `softmax_precision`.
    """

    def _make_mask(self) -> str:
        f, mask = self._f, self._rows.mask
        if self._rows.attends is not None:  # the others see everything, and are zero afterwards
            mask = f.op("Or", mask, f.unsqueeze(f.op("Not", self._rows.attends), 2))
        return f.unsqueeze(mask, 1)

    def _mix(
        self, queries: Value, keys: str, values: str, kv_heads: int, scale: float
    ) -> tuple[str, str]:
        f, dtype, (heads, dim) = self._f, queries.dtype, fixed(queries.shape[-2:])
        keys, bad_keys = self._finite_rows(keys, dtype)
        values, bad_values = self._finite_rows(values, dtype)
        out = f.op(
            "Attention",
            f.transpose(queries.name, 0, 2, 1, 3),
            keys,
            values,
            self._mask,
            scale=scale,
        )
        out = f.reshape(out, 0, kv_heads, heads // kv_heads, -1, dim)
        return out, f.op("Max", bad_keys, bad_values)


ATTENTION_STEPS = {STANDARD: CachedAttention, ATTENTION_OP: AttentionOperator}


def same_layout(value: Value) -> Value:
    """For networks whose layout is [B, Q, ..] anyway."""
    return value


def padded_layout(lead: tuple[Dim, ...]) -> Mapping[str, Callable[[Value], Value]]:
    """`pad` and `unpad` between packed [T, ..] and `lead` = (B, M), by the two index inputs."""

    def pad(value: Value) -> Value:
        f = value.f
        return value.like(f.gather(value.name, "query_index"), (*lead, *value.shape[1:]))

    def unpad(value: Value) -> Value:
        f, rest = value.f, value.shape[2:]
        flat = f.reshape(value.name, -1, *(size for size in rest if isinstance(size, int)))
        return value.like(f.gather(flat, "packed_index"), ("T", *rest))

    return {"pad": pad, "unpad": unpad}
