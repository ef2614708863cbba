"""The TensorRT plugins driven as TensorRT drives them, without TensorRT and without a GPU.

The adapters are those that are shipped, compiled against TensorRT's headers; below them run the
kernels' own code, compiled for the machine of `plugins/tests/host_cuda.h`. On a GPU the same
checks run in `gpu/test_plugins.py`; a real registry loads the library in `test_plugin_registry.py`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

import kernel_suite as suite
import plugin_host as drive
import prefill_suite as prefills
import pytest
import torch
from gdn_cases import DECAYS, Dims, generator, random_slots, same_bits
from kernel_suite import BF16, F16, F32, TreeCase
from plugin_host import BUILD, RUNTIME, PluginLibrary, PluginMachine, Refused

from trtllm_treewy import cuda_library, cuda_ops
from trtllm_treewy.plugin_contract import PLUGINS

DIMS = (Dims(1, 2, 64, 128), Dims(2, 2, 128, 64), Dims(1, 4, 64, 64))
TYPES = ((F32, F32), (BF16, BF16), (F16, F32))
HEADS = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 64, "head_v_dim": 128}
FIELDS = {
    "TreeWyVerify": HEADS,
    "TreeWyCommit": {},
    "TreeWyCommitInputs": {"num_k_heads": 1},
    "TreeConv1d": {},
    "TreeConvCommit": {},
    "GdnPrefill": HEADS,
    "GdnPrefillConv1d": {},
}


@pytest.fixture(scope="module")
def libraries(repository):
    """Folders with the kernels and the plugins for the CPU; objects are kept between runs."""
    if drive.cuda_home() is None or drive.find_headers() is None:
        pytest.skip("needs g++, CUDA's headers and TensorRT's to compile the plugins for the host")
    folder = repository / ".cache" / "host_kernels"
    folder.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [
            str(repository / "plugins" / "tests" / "build_host_library.sh"),
            str(folder / "libtreewy_host.so"),
            str(folder),
        ],
        env={**os.environ, "CUDA_HOME": drive.cuda_home()},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert drive.build_host(folder / "plugin", folder)
    return folder


@pytest.fixture(scope="module")
def library(libraries):
    folder = libraries / "plugin"
    return PluginLibrary(folder / "libplugin_host.so", folder / "libtreewy_tensorrt_host.so")


@pytest.fixture
def host(libraries, library, monkeypatch):
    """A machine whose operators are plugins."""
    kernels = cuda_library.CudaLibrary(libraries / "libtreewy_host.so")
    monkeypatch.setattr(cuda_library, "load_library", lambda: kernels)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    library.log()
    yield PluginMachine("cpu", library)
    torch.set_num_threads(threads)
    cuda_ops._error_counters.clear()


def types_id(types):
    return "-".join(str(t)[6:] for t in types)


# ------------------------------------------------------------------ contract


def contract_lines():
    """The Python contract in the words of `treewy_plugin_tables`."""
    for plugin in PLUGINS.values():
        yield f"plugin {plugin.name}"
        for field in plugin.fields:
            words = ["field", field.name, field.type, *map(str, field.choices)]
            yield " ".join(words + ([] if field.required else ["default", str(field.default)]))
        for role, tensors in (("input", plugin.inputs), ("output", plugin.outputs)):
            for x in tensors:
                line = f"{role} {x.name} {x.kind} {','.join(x.shape)}"
                line += f" when {x.when[0]}={x.when[1]}" if x.when else ""
                yield line + (f" in {x.in_place}" if x.in_place else "")


def test_the_library_and_the_python_contract_are_the_same(libraries):
    library = ctypes.CDLL(str(libraries / "plugin" / "libtreewy_tensorrt_host.so"))
    library.treewy_plugin_tables.restype = ctypes.c_char_p
    assert library.treewy_plugin_tables().decode().splitlines() == list(contract_lines())


def test_creators_offer_the_fields(library):
    kinds = {"int32": drive.FIELD_INT32, "string": drive.FIELD_CHAR}
    expected = {x.name: [(f.name, kinds[f.type]) for f in x.fields] for x in PLUGINS.values()}
    assert library.fields == expected


# ------------------------------------------------------------------ fields


def all_values(name):
    """Fields of a plugin, none at its default."""
    values = dict(FIELDS[name])
    for field in PLUGINS[name].fields:
        if field.choices:
            values[field.name] = field.choices[-1]
    return values


@pytest.mark.parametrize("name", PLUGINS)
def test_copies_and_reloaded_plugins_have_every_field(library, name):
    for values in (FIELDS[name], all_values(name)):
        made = library.create(name, **values)
        assert made.values() == PLUGINS[name].values(**values)
        copies = [made.clone(), made.attach(), made.reload(), made.reload().clone().reload()]
        text = made.describe()
        del made  # a copy lives on without what it was copied of
        assert all(copy.describe() == text for copy in copies)
        # The timing cache tells plugins with other fields apart.
        assert text.split("|")[1].startswith(f"treewy::{name} 1")
    if all_values(name) != FIELDS[name]:
        assert library.create(name, **FIELDS[name]).describe() != text


def with_fields(**changes):
    return {name: x for name, x in {**HEADS, **changes}.items() if x is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_k_dim": None}, "field head_k_dim is missing"),
        ({"num_heads": 2}, "there is no field num_heads, only num_k_heads, num_v_heads"),
        ({"head_k_dim": 96}, "key_dim is 96, must be 64, 128 or 256"),
        ({"head_v_dim": 100}, "V is 100, must be a multiple of 8"),
        ({"head_k_dim": 512}, "K is 512, must be from 1 to 256"),
        ({"num_v_heads": 3, "num_k_heads": 2}, "HV is 3, must be a multiple of HK, which is 2"),
        ({"num_v_heads": 0}, "field num_v_heads is 0, must be from 1"),
        ({"num_v_heads": -4}, "field num_v_heads is -4"),
        ({"num_v_heads": "4"}, "field num_v_heads must be one int32"),
        ({"state_commit": "snapshot"}, "'snapshot', must be reconstruct or deferred"),
        ({"stash": 1}, "field stash must be a string"),
        ({"u_dtype": "float16"}, "'float16', must be float32 or bfloat16"),
    ],
)
def test_wrong_fields_are_refused_with_the_reason(library, change, message):
    library.log()
    with pytest.raises(Refused, match=f"TreeWyVerify: .*{message}"):
        library.create("TreeWyVerify", **with_fields(**change))


def test_other_forms_of_a_field(library):
    wide = [(n, drive.FIELD_INT64, x.to_bytes(8, "little"), 1) for n, x in HEADS.items()]
    made = library.create_raw("TreeWyVerify", wide)
    assert made.values() == PLUGINS["TreeWyVerify"].values(**HEADS)
    wide[0] = ("num_k_heads", drive.FIELD_INT64, (2**32 + 1).to_bytes(8, "little"), 1)
    with pytest.raises(Refused, match="num_k_heads is 4294967297, must be"):
        library.create_raw("TreeWyVerify", wide)
    plain = [drive.field_of(*item) for item in HEADS.items()]
    ended = ("stash", drive.FIELD_CHAR, b"inputs\0", 7)
    assert library.create_raw("TreeWyVerify", [*plain, ended]).values()["stash"] == "inputs"
    for bad, message in (
        (("stash", drive.FIELD_CHAR, b"input", 5), "'input', must be"),
        (("stash", drive.FIELD_CHAR, b"", 0), "'', must be"),
        (("num_k_heads", drive.FIELD_INT32, bytes(8), 2), "must be one int32"),
        (("num_k_heads", drive.FIELD_INT32, b"", 0), "must be one int32"),
        (("num_k_heads", drive.FIELD_FLOAT32, bytes(4), 1), "must be one int32"),
    ):
        rest = [field for field in plain if field[0] != bad[0]]
        with pytest.raises(Refused, match=message):
            library.create_raw("TreeWyVerify", [*rest, bad])
    with pytest.raises(Refused, match="num_k_heads is given twice"):
        library.create_raw("TreeWyVerify", [*plain, plain[0]])


# ------------------------------------------------------------------ types, shapes, formats


def verify_inputs(batch=2, nodes=5, *, dtype=F32, gate=F32, state=F32, slots=3, dims=DIMS[0]):
    """Inputs of TreeWyVerify, zeros with one chain a row."""
    channels, heads = dims.conv_dim, dims.value_heads
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32).repeat(batch, 1)
    return [
        torch.zeros(batch, nodes, channels, dtype=dtype),
        torch.zeros(batch, nodes, heads, dtype=gate),
        torch.zeros(batch, nodes, heads, dtype=gate),
        torch.zeros(heads),
        torch.zeros(heads),
        torch.zeros(slots, heads, dims.value_dim, dims.key_dim, dtype=state),
        torch.arange(batch, dtype=torch.int32) % max(slots, 1),
        parents,
        torch.full((batch,), nodes, dtype=torch.int32),
    ]


def test_shapes_of_the_outputs_are_symbolic(library):
    def shapes(name, ranks, outputs, **fields):
        made = library.create(name, **fields)
        return [",".join(shape) for shape in made.output_shapes(ranks, outputs)]

    ranks = [3, 3, 3, 1, 1, 4, 1, 2, 1]
    node = ["0.0,0.1,[2],[128]", "0.0,0.1,[2],[128]", "0.0,0.1,[2]"]
    assert shapes("TreeWyVerify", ranks, 3, **HEADS) == node
    assert shapes("TreeWyVerify", ranks, 1, **HEADS, stash="inputs") == node[:1]
    ranks = [5, 1, 2, 1, 1, 5, 5, 4]
    assert shapes("TreeWyCommit", ranks, 2) == ["0.0,0.1,0.2,0.3,0.4", "[1]"]
    with_history = shapes("TreeWyCommit", [*ranks, 5, 5, 4, 1], 6, state_commit="deferred")
    # Sizes come from the first input that has them: H from history_u.
    assert with_history[2:] == [
        "0.0,0.1,8.2,0.2,0.3",
        "0.0,0.1,8.2,6.3,0.4",
        "0.0,0.1,8.2,0.2",
        "0.1",
    ]
    assert shapes("TreeConv1d", [3, 3, 2, 1, 2, 1], 1) == ["0.0,0.1,0.2"]
    assert shapes("TreeConvCommit", [4, 1, 2, 1, 1, 4], 2) == ["0.0,0.1,0.2,0.3", "[1]"]
    ranks = [2, 2, 2, 1, 1, 4, 1, 1]
    assert shapes("GdnPrefill", ranks, 2, **HEADS) == ["0.0,[2],[128]", "5.0,[2],[128],[64]"]
    assert shapes("GdnPrefillConv1d", [2, 3, 2, 1, 1], 2) == ["0.0,0.1", "1.0,1.1,0.1"]


def test_types_of_the_outputs(library):
    names = {number: str(dtype)[6:] for dtype, number in drive.TYPES.items()}
    made = library.create("TreeWyVerify", **HEADS, u_dtype="bfloat16")
    half, wide, brain, int32 = 1, 0, 7, 3
    inputs = [half, brain, brain, wide, wide, brain, int32, int32, int32]
    types = [names[x] for x in made.output_types(inputs, 3)]
    assert types == ["float16", "bfloat16", "float32"]
    for position, wrong, message in (
        (0, int32, "input qkv is int32, must be float32, float16 or bfloat16"),
        (2, half, "input b is float16, must be bfloat16 like the others of its kind .gate"),
        (3, half, "input A_log is float16, must be float32"),
        (5, half, "input state is float16, must be float32 or bfloat16"),
        (6, 8, "input slot is of another type, must be int32"),
    ):
        given = list(inputs)
        given[position] = wrong
        with pytest.raises(Refused, match=message):
            made.output_types(given, 3)
    for count in (8, 13):
        with pytest.raises(Refused, match=f"takes 9 inputs .* not {count}"):
            made.output_types((inputs * 2)[:count], 3)
    with pytest.raises(Refused, match="gives 3 outputs"):
        made.output_types(inputs, 1)


def test_shapes_of_the_wrong_rank_are_refused_in_the_network(library):
    made = library.create("TreeWyVerify", **HEADS)
    with pytest.raises(Refused, match="input state has 5 dimensions, must have 4"):
        made.output_shapes([3, 3, 3, 1, 1, 5, 1, 2, 1], 3)


@pytest.mark.parametrize("name", PLUGINS)
def test_formats_that_are_taken(library, name):
    """All types that the contract allows, one for each kind, in linear format, and nothing else."""
    values = all_values(name)
    made = library.create(name, **values)
    inputs, outputs = (f(**values) for f in (made.spec.inputs_with, made.spec.outputs_with))
    tensors, count = (*inputs, *outputs), (len(inputs), len(outputs))
    bound = {"stash": "bfloat16"} if values.get("u_dtype") else {}

    def descs(position, dtype, form=drive.LINEAR):
        given = []
        for index, tensor in enumerate(tensors):
            kind = bound.get(tensor.kind, tensor.dtypes[-1])
            x = torch.zeros([1] * len(tensor.shape))
            chosen = dtype if index == position else kind
            given.append(drive.describe(x, dtype=drive.NAMES.get(chosen, chosen), form=form))
        return given

    for position, tensor in enumerate(tensors):
        earlier = [x for x in tensors[:position] if x.kind == tensor.kind]
        for dtype in (*drive.NAMES, 8, 2):  # and int64, int8
            expected = dtype in tensor.dtypes
            if earlier or tensor.kind in bound:
                expected = dtype == bound.get(tensor.kind, tensor.dtypes[-1])
            assert made.supports(position, descs(position, dtype), *count) == expected
        wanted = bound.get(tensor.kind, tensor.dtypes[-1])
        assert not made.supports(position, descs(position, wanted, drive.CHW32), *count)
    assert not made.supports(0, descs(0, tensors[0].dtypes[-1]), count[0] - 1, count[1] + 1)


def configure(node, inputs, outputs, **changes):
    """`changes`: position=(lowest, highest shape)."""
    tensors = []
    for position, x in enumerate((*inputs, *outputs)):
        low, high = changes.get(f"at{position}", (None, None))
        tensors.append(drive.describe(x, low=low, high=high))
    node.configure(tensors, len(inputs), len(outputs))


def test_profiles_are_checked_at_both_ends(library):
    node = library.create("TreeWyVerify", **HEADS)
    inputs = verify_inputs()
    outputs = node.allocate(inputs)
    channels = inputs[0].shape[-1]

    def profile(batch, nodes, last=channels):
        return {
            "at0": ((0, 0, channels), (batch, nodes, last)),
            "at1": ((0, 0, 2), (batch, nodes, 2)),
            "at2": ((0, 0, 2), (batch, nodes, 2)),
            "at5": ((0, 2, 128, 64), (100, 2, 128, 64)),
            "at6": ((0,), (batch,)),
            "at7": ((0, 0), (batch, nodes)),
            "at8": ((0,), (batch,)),
        }

    configure(node, inputs, outputs, **profile(64, 128))
    with pytest.raises(Refused, match="N is 129, must be from 0 to 128"):
        configure(node, inputs, outputs, **profile(64, 129))
    with pytest.raises(Refused, match=r"input qkv is \[64, 5, 512\], must be \[B, N, C\]"):
        configure(node, inputs, outputs, **profile(64, 5, 512))
    with pytest.raises(Refused, match=r"input slot is \[63\], must be \[B\] with B = 64"):
        configure(node, inputs, outputs, **{**profile(64, 5), "at6": ((0,), (63,))})


# ------------------------------------------------------------------ refusals of a run


def test_a_run_refuses_wrong_shapes_and_types(library):
    node = library.create("TreeWyVerify", RUNTIME, **HEADS)
    good = verify_inputs()
    outputs = node.allocate(good)

    def refuse(message, position=None, value=None):
        inputs = list(good)
        if position is not None:
            inputs[position] = value
        for steps in (1, 2):  # a shape change, and enqueue alone
            with pytest.raises(Refused, match=message):
                node.run(inputs, outputs, steps=steps)

    refuse(r"input a is \[2, 5, 3\], must be \[B, N, HV\] with B = 2, N = 5, HV = 2", 1,
           torch.zeros(2, 5, 3))  # fmt: skip
    refuse(r"input a is \[2, 4, 2\]", 1, torch.zeros(2, 4, 2))
    refuse("input b is bfloat16, must be float32", 2, torch.zeros(2, 5, 2, dtype=BF16))
    refuse(r"input state is \[3, 2, 64, 128\], must be \[slots, HV, V, K\]", 5,
           torch.zeros(3, 2, 64, 128))  # fmt: skip
    refuse("input parents is of another type", 7, torch.zeros(2, 5, dtype=torch.int64))
    refuse(r"input num_nodes is \[3\]", 8, torch.zeros(3, dtype=torch.int32))
    refuse(r"input qkv is \[2, 640\]", 0, torch.zeros(2, 640))
    outputs[1] = outputs[1].bfloat16()
    refuse("output u is bfloat16, must be float32")
    outputs[1] = torch.zeros(2, 5, 2, 64)
    refuse(r"output u is \[2, 5, 2, 64\]")


def test_too_many_nodes_and_key_dims_that_no_kernel_has(library):
    node = library.create("TreeWyVerify", RUNTIME, **HEADS)
    inputs = verify_inputs(1, 129)
    outputs = node.allocate(inputs)
    with pytest.raises(Refused, match="N is 129, must be from 0 to 128"):
        node.run(inputs, outputs, steps=1)
    with pytest.raises(Refused, match="max_nodes is 129, at most 128"):
        node.run(inputs, outputs, steps=2)
    state = torch.zeros(1, 2, 1, 64, 12)
    commit = library.create("TreeWyCommit", RUNTIME)
    tree = [torch.zeros(1, dtype=torch.int32), torch.tensor([[-1]], dtype=torch.int32),
            torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]  # fmt: skip
    stash = torch.zeros(1, 1, 1, 1, 64), torch.zeros(1, 1, 1, 1, 12), torch.zeros(1, 1, 1, 1)
    inputs = [state, *tree, *stash]
    with pytest.raises(Refused, match="K is 12, must be a multiple of 8"):
        commit.run(inputs, commit.allocate(inputs), steps=1)


def test_a_bfloat16_u_goes_with_a_bfloat16_state(library):
    node = library.create("TreeWyVerify", RUNTIME, **HEADS, u_dtype="bfloat16")
    inputs = verify_inputs()
    with pytest.raises(Refused, match="u_dtype"):
        node.run(inputs, node.allocate(inputs), steps=1)


WRITERS = [x.name for x in PLUGINS.values() if any(out.in_place for out in x.outputs)]


@pytest.mark.parametrize("name", WRITERS)
def test_in_place_is_refused_at_other_addresses(host, name):
    """The state of a context is updated where it is, and a copy would never be seen."""
    inputs, fields = in_place_case(name)
    library = host.library
    node = library.create(name, RUNTIME, **fields)
    outputs = node.allocate(inputs)
    before = [x.clone() for x in inputs]
    specs = node.spec.outputs_with(**node.values())
    for position, spec in enumerate(specs):
        if not spec.in_place:
            continue
        moved = list(outputs)
        moved[position] = torch.full_like(outputs[position], 7)
        with pytest.raises(Refused, match=f"output {spec.name} is at 0x.*bound to one address"):
            node.run(inputs, moved)
        assert (moved[position] == 7).all()
        assert all(same_bits(x, y) for x, y in zip(inputs, before, strict=True))
    # While an engine is built, the buffers are the builder's: the state is copied first.
    building = library.create(name, BUILD, **fields).attach()
    copies = [x.clone() if spec.in_place else x for x, spec in zip(outputs, specs, strict=True)]
    for copy, spec in zip(copies, specs, strict=True):
        if spec.in_place:
            copy.fill_(9)
    building.run(inputs, copies)
    assert all(same_bits(x, y) for x, y in zip(inputs, before, strict=True))
    node.run(inputs, outputs)
    for copy, mine, spec in zip(copies, outputs, specs, strict=True):
        if spec.in_place:
            assert same_bits(copy, mine)


def in_place_case(name):
    """Inputs and fields of a plugin that writes state, with every row moving."""
    dims, layers, slots = DIMS[0], 2, 5
    gen = generator(7)
    if name.startswith("GdnPrefill"):
        slot = random_slots(gen, 2, slots)
        cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        if name == "GdnPrefillConv1d":
            x, window = torch.randn(7, 16, generator=gen), torch.randn(slots, 3, 16, generator=gen)
            return [x, window, torch.randn(16, 4, generator=gen), slot, cu_seqlens], {}
        shapes = [(7, dims.conv_dim), (7, 2), (7, 2), (2,), (2,), (slots, 2, 128, 64)]
        return [*(torch.randn(s, generator=gen) for s in shapes), slot, cu_seqlens], HEADS
    case = TreeCase(3, dims, 4, layers=layers, batch=2, slots=slots, full=True)
    tree = [*case.trees, case.accepted]
    x = torch.randn(layers, 2, 4, dims.conv_dim, generator=gen)
    window = torch.randn(layers, slots, 3, dims.conv_dim, generator=gen)
    if name == "TreeConvCommit":
        return [window, *tree, x], {}
    if name == "TreeWyCommit":
        return [case.state, *tree, *(t.contiguous() for t in case.stash())], {}
    gates = [torch.randn(layers, 2, 4, 2, generator=gen) for _ in "ab"]
    weight = torch.randn(layers, dims.conv_dim, 4, generator=gen)
    rates = [torch.rand(layers, 2, generator=gen) for _ in range(2)]
    return [case.state, window, *tree, x, *gates, weight, *rates], {"num_k_heads": 1}


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [1, 5, 17])
def test_verify_equals_the_reference(host, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, DIMS[(nodes + index) % 3], nodes, dtype=types[0], state_dtype=types[1],
            decay=decay, shape=("random", "chain", "levels")[index], batch=2, pads=index % 2,
        )  # fmt: skip
        suite.check_verify(host, case)
        suite.check_verify(host, case, history=suite.random_history(case, 5, stash=F32))


def test_verify_selects_poison_away(host):
    suite.check_verify_poison(host, TreeCase(9, DIMS[0], 9), float("nan"))


def test_verify_with_nothing_for_a_stash(host):
    """With the input stash there are no u and g; the outputs keep their bits."""
    case = TreeCase(2, DIMS[1], 11, dtype=BF16, state_dtype=BF16)
    raw = case.raw[0]
    qkv = torch.cat([raw[name].flatten(-2) for name in "qkv"], -1)
    inputs = drive.plain(qkv, *[raw[n] for n in ("a", "b", "A_log", "dt_bias")], case.state[0])
    fields = drive.heads_of(raw["q"], raw["v"])
    inputs += drive.plain(*case.trees)
    out, u, g = host.execute("TreeWyVerify", inputs, **fields)
    (alone,) = host.execute("TreeWyVerify", inputs, **fields, stash="inputs")
    assert same_bits(alone, out)
    other, short, same = host.execute("TreeWyVerify", inputs, **fields, u_dtype="bfloat16")
    assert same_bits(other, out)
    assert same_bits(same, g)
    host.close("u in bfloat16", short, u)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [1, 17])
def test_commit_moves_every_layer_to_the_accepted_node(host, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, (*DIMS, Dims(2, 4, 8, 16))[(nodes + index) % 4], nodes, dtype=types[0],
            state_dtype=types[1], decay=decay, shape=("random", "chain", "star")[index], layers=2,
            pads=index % 2,
        )  # fmt: skip
        suite.check_commit(host, case)


def test_rows_that_accept_nothing_keep_every_bit(host):
    suite.check_nothing_accepted(host, TreeCase(6, DIMS[0], 9, layers=2))


def test_a_poisoned_sibling_does_not_reach_the_state(host):
    suite.check_commit_poison(host, TreeCase(8, DIMS[0], 12, layers=2, full=True))


def test_rows_that_cannot_move_are_counted_and_keep_their_state(host):
    suite.check_malformed_parents(host, TreeCase(5, DIMS[0], 6, full=True))
    case = TreeCase(4, DIMS[0], 6, layers=2, batch=3, slots=6)
    slots = case.state.shape[1]
    slot, accepted = case.slot.clone(), case.accepted.clone()
    slot[0], accepted[1] = slots, int(case.num_nodes[1])
    state = case.state.clone()
    inputs = [state, slot, *case.trees[1:], accepted, *drive.plain(*case.stash())]
    _, errors = host.execute("TreeWyCommit", inputs)
    assert errors.tolist() == [2]
    still = [s for s in range(slots) if s != int(case.slot[2])]
    assert same_bits(state[:, still], case.state[:, still])
    assert not same_bits(state, case.state)
    _, errors = host.execute("TreeWyCommit", [state, *case.trees, *inputs[4:]])
    assert errors.tolist() == [1]  # of this run, not of all


def test_the_deferred_commit(host):
    case = TreeCase(5, DIMS[2], 6, layers=2)
    suite.check_deferred(host, case, capacity=6, steps=4, stash=F32)
    case = TreeCase(1, DIMS[2], 5, layers=2, shape="chain", full=True)
    case.accepted[:] = torch.tensor([4, 1, 3])
    suite.check_too_long_for_history(host, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4])
def test_convs_equal_the_reference(host, dtype, width):
    for channels in (64, 20):
        case = suite.conv_case(width, nodes=9, dtype=dtype, channels=channels, width=width)
        suite.check_conv(host, case, bias=channels == 20, pad=0)
        suite.check_conv_commit(host, case, pad=0)
        suite.check_prefill_conv(
            host, channels, dtype=dtype, channels=channels, width=width, lengths=(1, 0, 9, 2)
        )


@pytest.mark.parametrize("types", TYPES, ids=types_id)
def test_prefill_equals_the_reference(host, types):
    prefills.check_prefill(
        host, 3, DIMS[1], lengths=(1, 40, 0, 7), dtype=types[0], state_dtype=types[1]
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=types_id)
def test_commit_from_inputs_is_the_commit_of_what_verify_leaves(host, types, bias):
    """Conv, verify and both commits by plugins, against TreeWyCommitInputs alone."""
    dims, layers, width = DIMS[0], 2, 4
    case = TreeCase(
        11, dims, 10, dtype=types[0], state_dtype=types[1], layers=layers, batch=3, pads=1
    )
    gen, heads = case.gen, dims.value_heads
    slots = case.state.shape[1]

    def draw(*shape):
        return torch.randn(*shape, generator=gen).to(types[0])

    x, window = draw(layers, 3, 10, dims.conv_dim), draw(layers, slots, width - 1, dims.conv_dim)
    weight, offset = draw(layers, dims.conv_dim, width), draw(layers, dims.conv_dim)
    a, b = draw(layers, 3, 10, heads), draw(layers, 3, 10, heads)
    rates = [torch.rand(layers, heads, generator=gen) for _ in range(2)]
    fields = {"num_k_heads": 1, "num_v_heads": heads, "head_k_dim": 64, "head_v_dim": 128}
    stash = []
    for layer in range(layers):
        biases = [offset[layer]] if bias else []
        conv = [x[layer], window[layer], weight[layer], *case.trees, *biases]
        (y,) = host.execute("TreeConv1d", conv, **({"bias": 1} if bias else {}))
        gates = [a[layer], b[layer], rates[0][layer], rates[1][layer]]
        _, u, g = host.execute(
            "TreeWyVerify", [y, *gates, case.state[layer], *case.trees], **fields
        )
        stash.append((u, y[..., 64:128].unflatten(-1, (1, 64)), g))
    u, k, g = (torch.stack(parts) for parts in zip(*stash, strict=True))
    goal = [*case.trees, case.accepted]
    state, moved = case.state.clone(), window.clone()
    host.execute("TreeWyCommit", [state, *goal, u, k.contiguous(), g])
    host.execute("TreeConvCommit", [moved, *goal, x])
    ours, windows = case.state.clone(), window.clone()
    inputs = [ours, windows, *goal, x, a, b, weight, *rates]
    if bias:
        _, _, errors = host.execute("TreeWyCommitInputs", [*inputs, offset], num_k_heads=1, bias=1)
    else:
        _, _, errors = host.execute("TreeWyCommitInputs", inputs, num_k_heads=1)
    assert errors.tolist() == [0]
    assert same_bits(windows, moved)
    host.close("state from inputs", ours, state)
    still = [s for s in range(slots) if s not in case.live_slots]
    assert same_bits(ours[:, still], case.state[:, still])


def test_channels_that_are_not_those_of_the_heads(library):
    inputs, fields = in_place_case("TreeWyCommitInputs")
    node = library.create("TreeWyCommitInputs", RUNTIME, **{**fields, "num_k_heads": 2})
    with pytest.raises(Refused, match="C is 384, must be 2 HK K [+] HV V = 512"):
        node.run(inputs, node.allocate(inputs))


def test_empty_batches(host):
    """Dynamic sizes may be 0: nothing is read or written, nothing fails."""
    for batch, nodes in ((0, 5), (2, 0), (0, 0)):
        inputs = verify_inputs(batch, nodes)
        out, u, g = host.execute("TreeWyVerify", inputs, **HEADS)
        assert out.shape == (batch, nodes, 2, 128)
    state = torch.randn(2, 3, 2, 128, 64)
    tree = [torch.zeros(0, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)]  # fmt: skip
    stash = torch.zeros(2, 0, 4, 2, 128), torch.zeros(2, 0, 4, 1, 64), torch.zeros(2, 0, 4, 2)
    before = state.clone()
    _, errors = host.execute("TreeWyCommit", [state, *tree, *stash])
    assert errors.tolist() == [0]
    assert same_bits(state, before)
    prefill = [torch.zeros(0, 384), torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(2),
               torch.zeros(2), before[0].clone(), tree[0],
               torch.zeros(1, dtype=torch.int32)]  # fmt: skip
    host.execute("GdnPrefill", prefill, **HEADS)
    assert same_bits(prefill[5], before[0])
