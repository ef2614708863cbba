"""What the TensorRT plugins are called, and what goes in and out of them: one list, as data.

The export writes its custom nodes from it, and the tests hold the library (`plugins/tensorrt/`)
and `docs/plugin.md` to it. In an ONNX graph a node has the plugin's name as its operator, the
attributes `plugin_namespace` and `plugin_version`, and the fields as further attributes. Inputs
and outputs are in the order given here.

Shapes are in the symbols of the operators: B rows, N node columns, T packed tokens, L layers,
`slots`; HK key heads and HV value heads, K and V their dims; C = 2 HK K + HV V channels, in the
order q, k, v; W the conv's width; H entries of a history. `W-1` and `B+1` mean what they say.
Every tensor is linear (row-major, contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "treewy"
VERSION = "1"
LIBRARY = "libtreewy_tensorrt.so"

FLOAT_TYPES = ("float32", "float16", "bfloat16")
# The types that each kind of tensor may have. In one node, tensors of one kind have one type.
KINDS: dict[str, tuple[str, ...]] = {
    "activation": FLOAT_TYPES,
    "gate": FLOAT_TYPES,
    "weight": FLOAT_TYPES,
    "state": ("float32", "bfloat16"),
    "stash": ("float32", "bfloat16"),
    "float32": ("float32",),
    "int32": ("int32",),
}


@dataclass(frozen=True)
class FieldSpec:
    """One field of a plugin: an ONNX attribute, a `PluginField`.

    Attributes:
        name: as in the library.
        type: "int32", one value (ONNX: an INT attribute), or "string" (ONNX: a STRING).
        meaning: one line for people.
        default: what holds where the field is not given; None for a required one.
        choices: the only values allowed; empty where any positive number is.
    """

    name: str
    type: str
    meaning: str
    default: int | str | None = None
    choices: tuple[int | str, ...] = ()

    @property
    def required(self) -> bool:
        """Whether a node without it is refused."""
        return self.default is None


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    Attributes:
        name: for people and messages; TensorRT and ONNX go by position.
        shape: a symbol of the module, a number, or a symbol plus or minus one, for each dimension.
        kind: a key of `KINDS`.
        when: a field and the value of it that the tensor is there with; None where it always is.
        in_place: of an output: the input whose address it must be bound to. The plugin writes the
            input's memory, and refuses to run where the two addresses differ.
    """

    name: str
    shape: tuple[str, ...]
    kind: str
    when: tuple[str, int | str] | None = None
    in_place: str | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types it may have."""
        return KINDS[self.kind]


@dataclass(frozen=True)
class PluginSpec:
    """One plugin.

    Attributes:
        name: plugin name, and ONNX operator.
        operator: the function of `torch.ops.treewy` with the same meaning.
        meaning: one line for people.
        fields, inputs, outputs: in order.
    """

    name: str
    operator: str
    meaning: str
    fields: tuple[FieldSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def values(self, **fields: int | str) -> dict[str, int | str]:
        """The values of all fields, defaults included.

        Raises ValueError for a field that is missing, unknown, or has a value it cannot have.
        """
        known = {field.name: field for field in self.fields}
        for name in fields.keys() - known.keys():
            raise ValueError(
                f"{self.name}: a field must be one of {', '.join(known) or 'none'}, got {name!r}"
            )
        result: dict[str, int | str] = {}
        for name, field in known.items():
            value = fields.get(name, field.default)
            if value is None:
                raise ValueError(f"{self.name}: the field {name} is missing")
            _check_value(self.name, field, value)
            result[name] = value
        return result

    def inputs_with(self, **fields: int | str) -> tuple[TensorSpec, ...]:
        """The inputs of a node with these fields; ValueError as for `values`."""
        return _present(self.inputs, self.values(**fields))

    def outputs_with(self, **fields: int | str) -> tuple[TensorSpec, ...]:
        """The outputs of a node with these fields; ValueError as for `values`."""
        return _present(self.outputs, self.values(**fields))


def _check_value(plugin: str, field: FieldSpec, value: int | str) -> None:
    expected: type = int if field.type == "int32" else str
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"{plugin}: the field {field.name} must be {field.type}, got {value!r}")
    if field.choices and value not in field.choices:
        choices = ", ".join(str(choice) for choice in field.choices)
        raise ValueError(
            f"{plugin}: the field {field.name} must be one of {choices}, got {value!r}"
        )
    if isinstance(value, int) and not field.choices and not 0 < value < 2**31:
        raise ValueError(f"{plugin}: the field {field.name} must be positive, got {value}")


def _present(
    tensors: tuple[TensorSpec, ...], values: dict[str, int | str]
) -> tuple[TensorSpec, ...]:
    return tuple(x for x in tensors if x.when is None or values[x.when[0]] == x.when[1])


def _heads() -> tuple[FieldSpec, ...]:
    return (
        FieldSpec("num_k_heads", "int32", "HK, key heads"),
        FieldSpec("num_v_heads", "int32", "HV, value heads, a multiple of HK"),
        FieldSpec("head_k_dim", "int32", "K, dim of a key head"),
        FieldSpec("head_v_dim", "int32", "V, dim of a value head"),
    )


_DEFERRED = ("state_commit", "deferred")
_STATE_COMMIT = FieldSpec(
    "state_commit",
    "string",
    "the commit policy; `deferred` has a history",
    "reconstruct",
    ("reconstruct", "deferred"),
)
_PSEUDO_VALUES = ("stash", "pseudo_values")
_STASH = FieldSpec(
    "stash",
    "string",
    "what a commit will need: u and g from here, or with `inputs` nothing from here",
    "pseudo_values",
    ("pseudo_values", "inputs"),
)
_U_DTYPE = FieldSpec(
    "u_dtype",
    "string",
    "type of u, where there is one; bfloat16 goes with a bfloat16 state",
    "float32",
    ("float32", "bfloat16"),
)
_HAS_BIAS = FieldSpec("bias", "int32", "1: the conv has a bias", 0, (0, 1))


def _trees() -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("slot", ("B",), "int32"),
        TensorSpec("parents", ("B", "N"), "int32"),
        TensorSpec("num_nodes", ("B",), "int32"),
    )


def _packed() -> tuple[TensorSpec, ...]:
    return TensorSpec("slot", ("B",), "int32"), TensorSpec("cu_seqlens", ("B+1",), "int32")


def _projections(*lead: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("qkv", (*lead, "C"), "activation"),
        TensorSpec("a", (*lead, "HV"), "gate"),
        TensorSpec("b", (*lead, "HV"), "gate"),
        TensorSpec("A_log", ("HV",), "float32"),
        TensorSpec("dt_bias", ("HV",), "float32"),
    )


def _history(*lead: str, in_place: bool = False) -> tuple[TensorSpec, ...]:
    def spec(name: str, shape: tuple[str, ...], kind: str) -> TensorSpec:
        return TensorSpec(name, shape, kind, _DEFERRED, name if in_place else None)

    return (
        spec("history_u", (*lead, "slots", "H", "HV", "V"), "stash"),
        spec("history_k", (*lead, "slots", "H", "HK", "K"), "activation"),
        spec("history_g", (*lead, "slots", "H", "HV"), "float32"),
        spec("history_len", ("slots",), "int32"),
    )


_POOL = ("slots", "HV", "V", "K")
_WINDOWS = ("slots", "W-1", "C")
_WEIGHT = TensorSpec("weight", ("C", "W"), "weight")
_BIAS = TensorSpec("bias", ("C",), "weight", when=("bias", 1))

VERIFY = PluginSpec(
    "TreeWyVerify",
    "tree_verify",
    "Outputs of all nodes of the draft trees of one layer, and the stash of a commit.",
    (*_heads(), _STATE_COMMIT, _STASH, _U_DTYPE),
    (
        *_projections("B", "N"),
        TensorSpec("state", _POOL, "state"),
        *_trees(),
        *_history(),
    ),
    (
        TensorSpec("out", ("B", "N", "HV", "V"), "activation"),
        TensorSpec("u", ("B", "N", "HV", "V"), "stash", _PSEUDO_VALUES),
        TensorSpec("g", ("B", "N", "HV"), "float32", _PSEUDO_VALUES),
    ),
)

COMMIT = PluginSpec(
    "TreeWyCommit",
    "commit",
    "Moves the states of all layers to the accepted nodes (`deferred`: commit_deferred).",
    (_STATE_COMMIT,),
    (
        TensorSpec("state", ("L", *_POOL), "state"),
        *_trees(),
        TensorSpec("accepted", ("B",), "int32"),
        TensorSpec("u", ("L", "B", "N", "HV", "V"), "stash"),
        TensorSpec("k", ("L", "B", "N", "HK", "K"), "activation"),
        TensorSpec("g", ("L", "B", "N", "HV"), "float32"),
        *_history("L"),
    ),
    (
        TensorSpec("state", ("L", *_POOL), "state", in_place="state"),
        TensorSpec("errors", ("1",), "int32"),
        *_history("L", in_place=True),
    ),
)

COMMIT_INPUTS = PluginSpec(
    "TreeWyCommitInputs",
    "commit_inputs",
    "The same from the conv's inputs and the gates of the nodes; moves the conv windows as well.",
    (FieldSpec("num_k_heads", "int32", "HK, key heads"), _HAS_BIAS),
    (
        TensorSpec("state", ("L", *_POOL), "state"),
        TensorSpec("conv_state", ("L", *_WINDOWS), "activation"),
        *_trees(),
        TensorSpec("accepted", ("B",), "int32"),
        TensorSpec("x", ("L", "B", "N", "C"), "activation"),
        TensorSpec("a", ("L", "B", "N", "HV"), "gate"),
        TensorSpec("b", ("L", "B", "N", "HV"), "gate"),
        TensorSpec("weight", ("L", "C", "W"), "weight"),
        TensorSpec("A_log", ("L", "HV"), "float32"),
        TensorSpec("dt_bias", ("L", "HV"), "float32"),
        TensorSpec("bias", ("L", "C"), "weight", when=("bias", 1)),
    ),
    (
        TensorSpec("state", ("L", *_POOL), "state", in_place="state"),
        TensorSpec("conv_state", ("L", *_WINDOWS), "activation", in_place="conv_state"),
        TensorSpec("errors", ("1",), "int32"),
    ),
)

CONV = PluginSpec(
    "TreeConv1d",
    "tree_conv",
    "Causal depthwise conv along the path of every node of one layer, SiLU fused.",
    (_HAS_BIAS,),
    (
        TensorSpec("x", ("B", "N", "C"), "activation"),
        TensorSpec("conv_state", _WINDOWS, "activation"),
        _WEIGHT,
        *_trees(),
        _BIAS,
    ),
    (TensorSpec("y", ("B", "N", "C"), "activation"),),
)

CONV_COMMIT = PluginSpec(
    "TreeConvCommit",
    "conv_commit",
    "Moves the conv windows of all layers to the accepted nodes.",
    (),
    (
        TensorSpec("conv_state", ("L", *_WINDOWS), "activation"),
        *_trees(),
        TensorSpec("accepted", ("B",), "int32"),
        TensorSpec("x", ("L", "B", "N", "C"), "activation"),
    ),
    (
        TensorSpec("conv_state", ("L", *_WINDOWS), "activation", in_place="conv_state"),
        TensorSpec("errors", ("1",), "int32"),
    ),
)

PREFILL = PluginSpec(
    "GdnPrefill",
    "prefill",
    "The gated delta rule over packed prompts of one layer.",
    _heads(),
    (
        *_projections("T"),
        TensorSpec("state", _POOL, "state"),
        *_packed(),
    ),
    (
        TensorSpec("out", ("T", "HV", "V"), "activation"),
        TensorSpec("state", _POOL, "state", in_place="state"),
    ),
)

PREFILL_CONV = PluginSpec(
    "GdnPrefillConv1d",
    "prefill_conv",
    "The same conv over packed prompts of one layer.",
    (_HAS_BIAS,),
    (
        TensorSpec("x", ("T", "C"), "activation"),
        TensorSpec("conv_state", _WINDOWS, "activation"),
        _WEIGHT,
        *_packed(),
        _BIAS,
    ),
    (
        TensorSpec("y", ("T", "C"), "activation"),
        TensorSpec("conv_state", _WINDOWS, "activation", in_place="conv_state"),
    ),
)

PLUGINS: dict[str, PluginSpec] = {
    plugin.name: plugin
    for plugin in (VERIFY, COMMIT, COMMIT_INPUTS, CONV, CONV_COMMIT, PREFILL, PREFILL_CONV)
}
