"""Every tensor of the exported networks: name, shape and type. One list for export and runtime.

Dynamic dimensions are names: B rows, N nodes of a tree, T packed prompt tokens, M the longest
prompt of the batch, S context rows of the KV cache, W draft nodes, Q nodes whose logits are wanted;
`slots`, and `rows` of the KV cache's pools. Layers count from 0 among those of their kind.

KV rows, states and windows of a sequence are found by index alone: `kv_rows` says where the rows of
its context lie in the pools (so the cache may be paged), `slot` which state is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig

Shape = tuple[int | str, ...]
PREFILL, VERIFY, DRAFT = "prefill", "verify", "draft"
PSEUDO_VALUES, INPUTS = "pseudo_values", "inputs"
KINDS = ("activation", "state", "stash", "kv", "float32", "int32", "bool")


@dataclass(frozen=True)
class Binding:
    """A network's input or output.

    Attributes:
        name: in the network.
        shape: numbers, and names of dynamic dimensions.
        kind: what decides its type: one of `KINDS`.
        in_place: of an output: the input whose address it is bound to.
    """

    name: str
    shape: tuple[int | str, ...]
    kind: str
    in_place: str | None = None

    @property
    def group(self) -> str:
        """The name without the layer: tensors of all layers that belong together."""
        return self.name.partition(".")[0]

    @property
    def has_layer(self) -> bool:
        """Whether there is one for each layer."""
        return "." in self.name

    @property
    def is_pool(self) -> bool:
        """Whether it lasts from step to step: a cache, or the states of all slots."""
        return "rows" in self.shape or "slots" in self.shape


@dataclass(frozen=True)
class Bindings:
    """All of a network's, in the network's order."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]

    @property
    def dynamic(self) -> tuple[str, ...]:
        """Names of the dynamic dimensions of the inputs."""
        sizes = [size for x in self.inputs for size in x.shape if isinstance(size, str)]
        return tuple(dict.fromkeys(sizes))


def networks(config: ModelConfig) -> tuple[str, ...]:
    """The networks that a model has."""
    return (PREFILL, VERIFY, DRAFT) if config.mtp_num_hidden_layers else (PREFILL, VERIFY)


def bindings(network: str, config: ModelConfig, stash: str = PSEUDO_VALUES) -> Bindings:
    """The tensors of one network.

    Args:
        network: one of `networks(config)`.
        config: the model's.
        stash: what a commit works from, "pseudo_values" or "inputs".

    Raises:
        ValueError: for an unknown network or stash, or a drafter of a model without MTP.
    """
    if network not in networks(config):
        raise ValueError(
            f"network must be one of {', '.join(networks(config))} for this model, got {network!r}"
        )
    if stash not in (PSEUDO_VALUES, INPUTS):
        raise ValueError(f"stash must be {PSEUDO_VALUES} or {INPUTS}, got {stash!r}")
    if network == PREFILL:
        return _prefill(config)
    if network == VERIFY:
        return _verify(config, stash)
    return _draft(config)


def _int32(**shapes: tuple[int | str, ...]) -> list[Binding]:
    return [Binding(name, shape, "int32") for name, shape in shapes.items()]


def _caches(config: ModelConfig, layers: int) -> list[Binding]:
    shape = (config.num_key_value_heads, "rows", config.head_dim)
    return [
        Binding(f"{name}.{layer}", shape, "kv")
        for layer in range(layers)
        for name in ("k_cache", "v_cache")
    ]


def _new_rows(config: ModelConfig, layers: int, *lead: str) -> list[Binding]:
    shape: Shape = (*lead, config.num_key_value_heads, config.head_dim)
    return [
        Binding(f"{name}.{layer}", shape, "activation")
        for layer in range(layers)
        for name in ("new_k", "new_v")
    ]


def _pools(config: ModelConfig, *, written: bool = False) -> list[Binding]:
    """Conv windows and states of the GDN layers; as outputs, in place of the inputs."""
    window: Shape = ("slots", config.linear_conv_kernel_dim - 1, config.conv_dim)
    heads = (config.linear_num_value_heads, config.linear_value_head_dim)
    state: Shape = ("slots", *heads, config.linear_key_head_dim)
    result = []
    for layer in range(len(config.linear_layers)):
        for name, shape, kind in (
            ("conv_state", window, "activation"),
            ("state", state, "state"),
        ):
            given = f"{name}.{layer}"
            if written:
                result.append(Binding(f"{name}_out.{layer}", shape, kind, in_place=given))
            else:
                result.append(Binding(given, shape, kind))
    return result


def _prefill(config: ModelConfig) -> Bindings:
    layers = len(config.attention_layers)
    inputs = _int32(
        token_ids=("T",),
        cu_seqlens=("B+1",),
        slot=("B",),
        context_lens=("B",),
        kv_rows=("B", "S"),
        query_index=("B", "M"),
        packed_index=("T",),
    )
    outputs = [
        Binding("logits", ("B", config.vocab_size), "float32"),
        Binding("hidden", ("T", config.hidden_size), "activation"),
    ]
    return Bindings(
        (*inputs, *_caches(config, layers), *_pools(config)),
        (*outputs, *_new_rows(config, layers, "T"), *_pools(config, written=True)),
    )


def _verify(config: ModelConfig, stash: str) -> Bindings:
    layers = len(config.attention_layers)
    inputs = _int32(
        token_ids=("B", "N"),
        parents=("B", "N"),
        num_nodes=("B",),
        slot=("B",),
        context_lens=("B",),
        kv_rows=("B", "S"),
    )
    outputs = [
        Binding("logits", ("B", "N", config.vocab_size), "float32"),
        Binding("hidden", ("B", "N", config.hidden_size), "activation"),
    ]
    for layer in range(len(config.linear_layers)):
        outputs += [
            Binding(f"{name}.{layer}", ("B", "N", *shape), kind)
            for name, shape, kind in stash_tensors(config, stash)
        ]
    return Bindings(
        (*inputs, *_caches(config, layers), *_pools(config)),
        (*outputs, *_new_rows(config, layers, "B", "N")),
    )


def stash_tensors(config: ModelConfig, stash: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """What verification leaves of a layer for the commit: name, shape of a node, kind."""
    heads = config.linear_num_value_heads
    inputs: tuple[str, tuple[int, ...], str] = ("conv_x", (config.conv_dim,), "activation")
    if stash == INPUTS:
        return inputs, ("a", (heads,), "activation"), ("b", (heads,), "activation")
    keys = (config.linear_num_key_heads, config.linear_key_head_dim)
    return (
        inputs,
        ("k", keys, "activation"),
        ("u", (heads, config.linear_value_head_dim), "stash"),
        ("g", (heads,), "float32"),
    )


def _draft(config: ModelConfig) -> Bindings:
    layers = config.mtp_num_hidden_layers
    return Bindings(
        (
            *_int32(token_ids=("B", "W"), positions=("B", "W")),
            Binding("hidden_in", ("B", "W", config.hidden_size), "activation"),
            *_int32(kv_rows=("B", "S"), logit_index=("B", "Q")),
            Binding("mask", ("B", "W", "S+W"), "bool"),
            *_caches(config, layers),
        ),
        (
            Binding("logits", ("B", "Q", config.vocab_size), "float32"),
            Binding("hidden", ("B", "W", config.hidden_size), "activation"),
            *_new_rows(config, layers, "B", "W"),
        ),
    )
