"""Every tensor of an engine of `trtllm-build`, of our models: name, shape, type, where it is.

The library's own inputs keep its names and meanings; ours begin with `treewy_`, or are its names
for recurrent states. Layers are counted over all layers, as the library does.

Dynamic dimensions are names: P prompts, B trees, R = P + B requests, N columns of a tree, T tokens
(prompts packed first, then B times N), Q rows of logits, `slots`, `blocks` of a sequence. Sizes are
those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig

Shape = tuple[int | str, ...]
DEVICE, HOST = "device", "host"
KV_POOLS = 1
PERF_KNOBS = 16
# What the library keeps for its collectives: 7 pointers of each rank and 3 counters.
ALL_REDUCE_POINTERS, ALL_REDUCE_COUNTERS = 7, 3


@dataclass(frozen=True)
class EngineBinding:
    """A tensor of the engine.

    Attributes:
        name: in the engine.
        shape: numbers, and names of dynamic dimensions.
        dtype: torch's name.
        meaning: one line for people.
        place: `device` or `host`, where TensorRT wants the data.
        in_place: of an output: the input whose address it is bound to.
    """

    name: str
    shape: Shape
    dtype: str
    meaning: str
    place: str = DEVICE
    in_place: str | None = None


def state_inputs(part: ModelConfig, plugin_dtype: str) -> list[EngineBinding]:
    """The pools of the GDN layers of `part`, one rank's config; windows are of `plugin_dtype`."""
    window = ("slots", part.linear_conv_kernel_dim - 1, part.conv_dim)
    heads, dim = part.linear_num_value_heads, part.linear_value_head_dim
    state = ("slots", heads, dim, part.linear_key_head_dim)
    result = []
    for i in part.linear_layers:
        result += [
            EngineBinding(f"past_conv_state_{i}", window, plugin_dtype, "conv windows by slot"),
            EngineBinding(f"past_rnn_state_{i}", state, "float32", "recurrent states by slot"),
        ]
    return result


def tree_inputs() -> list[EngineBinding]:
    """Which rows are prompts and which trees."""
    rows = {
        "treewy_context_slot": (("P",), "slot of each prompt"),
        "treewy_cu_seqlens": (("P+1",), "where each prompt begins among the tokens, and the end"),
        "treewy_slot": (("B",), "slot of each tree, -1 for a padded one"),
        "treewy_parents": (("B", "N"), "parent of each node, root first with -1"),
        "treewy_num_nodes": (("B",), "real nodes of each tree"),
    }
    return [EngineBinding(name, shape, "int32", text) for name, (shape, text) in rows.items()]


def library_inputs(part: ModelConfig, max_nodes: int, ranks: int) -> list[EngineBinding]:
    """The library's inputs, as its GenerationMixin makes them for packed rows and a paged cache."""
    layers = len(part.attention_layers)

    def of_requests(name: str, meaning: str, place: str = DEVICE) -> EngineBinding:
        return EngineBinding(name, ("R",), "int32", meaning, place)

    offsets: Shape = (KV_POOLS, "R", 2, "blocks")
    result = [
        EngineBinding("input_ids", ("T",), "int32", "tokens"),
        EngineBinding("position_ids", ("T",), "int32", "not read: rotary positions are lengths"),
        EngineBinding("last_token_ids", ("Q",), "int32", "1-based rows whose logits are wanted"),
        of_requests("sequence_length", "tokens in the cache after this step"),
        of_requests("context_lengths", "tokens of the prompt"),
        of_requests("host_context_lengths", "the same", HOST),
        of_requests("host_request_types", "0 a prompt, 1 a tree", HOST),
        of_requests(
            "host_past_key_value_lengths", "of a tree: tokens before it; else the prompt's", HOST
        ),
        EngineBinding(
            "kv_cache_block_offsets", offsets, "int32", "block * 2 * layers + (0 K, 1 V)"
        ),
        EngineBinding("host_kv_cache_block_offsets", offsets, "int32", "the same", HOST),
        EngineBinding(
            "host_kv_cache_pool_pointers",
            (KV_POOLS, 2),
            "int64",
            "address of the pool [blocks, layers, 2, kv_heads, tokens_per_block, head_dim], and 0",
            HOST,
        ),
        EngineBinding(
            "host_kv_cache_pool_mapping", (layers, 2), "int32", "pool 0, and the layer in it", HOST
        ),
        EngineBinding("cache_indirection", ("R", 1, "length"), "int32", "zeros: no beams"),
        EngineBinding(
            "host_max_attention_window_sizes", (layers,), "int32", "longest sequence", HOST
        ),
        EngineBinding("host_sink_token_length", (1,), "int32", "0", HOST),
        EngineBinding("host_runtime_perf_knobs", (PERF_KNOBS,), "int64", "-1, or the knobs", HOST),
        EngineBinding("host_context_progress", (1,), "int64", "0", HOST),
    ]
    if max_nodes > 1:
        result += _tree_mask()
    if ranks > 1:
        size = ALL_REDUCE_POINTERS * ranks + ALL_REDUCE_COUNTERS
        result.append(
            EngineBinding("all_reduce_workspace", (size,), "int64", "the library's workspace")
        )
    return result


def _tree_mask() -> list[EngineBinding]:
    return [
        EngineBinding("spec_decoding_generation_lengths", ("B",), "int32", "N for each tree"),
        EngineBinding("spec_decoding_position_offsets", ("B", "N"), "int32", "depth of each node"),
        EngineBinding(
            "spec_decoding_packed_mask",
            ("B*N", "words"),
            "int32",
            "bit j of a node's row: it sees node j (itself and its ancestors)",
        ),
        EngineBinding("spec_decoding_use", (1,), "int32", "1 where there are trees", HOST),
    ]


def engine_inputs(
    part: ModelConfig, plugin_dtype: str, max_nodes: int, ranks: int
) -> list[EngineBinding]:
    """All inputs of a rank's engine."""
    return [
        *library_inputs(part, max_nodes, ranks),
        *tree_inputs(),
        *state_inputs(part, plugin_dtype),
    ]


def engine_outputs(
    part: ModelConfig, dtype: str, plugin_dtype: str, logits_dtype: str = "float32"
) -> list[EngineBinding]:
    """All outputs; `part` is one rank's config, logits are whole."""
    heads, dim = part.linear_num_value_heads, part.linear_value_head_dim
    keys = (part.linear_num_key_heads, part.linear_key_head_dim)
    result = [
        EngineBinding("logits", ("Q", "vocab"), logits_dtype, "of the rows in last_token_ids"),
        EngineBinding(
            "treewy_hidden_states", ("T", part.hidden_size), dtype, "after the last norm"
        ),
    ]
    pools = {x.name: x for x in state_inputs(part, plugin_dtype)}
    stash: tuple[tuple[str, Shape, str, str], ...] = (
        ("conv_x", (part.conv_dim,), plugin_dtype, "the conv's inputs"),
        ("k", keys, plugin_dtype, "raw keys"),
        ("u", (heads, dim), "float32", "pseudo-values"),
        ("g", (heads,), "float32", "log decays"),
    )
    for i in part.linear_layers:
        for kind in ("conv_state", "rnn_state"):
            pool = pools[f"past_{kind}_{i}"]
            name = f"present_{kind}_{i}"
            result.append(
                EngineBinding(name, pool.shape, pool.dtype, "the pool, updated", DEVICE, pool.name)
            )
        result += [
            EngineBinding(f"treewy_{name}_{i}", ("B", "N", *shape), kind, text)
            for name, shape, kind, text in stash
        ]
    return result
