"""The CUDA kernels on a GPU, against the float64 reference on the CPU.

TREEWY_TEST_REPORT names a JSON file for the greatest error of every result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import folding_suite as folds
import kernel_suite as suite
import prefill_suite as prefills
from gdn_cases import DECAYS, Dims, generator, randint, same_bits
from kernel_suite import BF16, F16, F32, F64, TYPES, Machine, TreeCase

from trtllm_treewy import cuda_library, cuda_ops

pytestmark = pytest.mark.gpu

# GVA 1, 2 and 4, and head dims that differ.
DIMS = (Dims(2, 2, 128, 64), Dims(1, 2, 64, 128), Dims(1, 4, 128, 128), Dims(2, 2, 256, 64))
HALF_TYPES = tuple(types for types in TYPES if types[0] != F32)
CHUNK_DIMS = (DIMS[0], DIMS[1], Dims(1, 4, 128, 48), Dims(1, 1, 64, 256))
ODD_DIMS = (Dims(2, 4, 8, 8), Dims(1, 3, 24, 40), Dims(1, 1, 200, 256))
NODES = (1, 2, 5, 16, 17, 31, 32, 33, 40, 64, 100, 128)
SHAPES = ("random", "chain", "star", "levels")


@pytest.fixture(scope="session")
def gpu():
    """The machine, and at the end the report of what was seen on it."""
    if cuda_library.find_library() is None:
        pytest.fail("no libtreewy.so: run ./build.sh first")
    machine = Machine("cuda")
    yield machine
    summary = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "library": str(cuda_library.load_library().path.name),
        "errors": {name: machine.errors[name] for name in sorted(machine.errors)},
    }
    print("\n" + json.dumps(summary, indent=1))
    if os.environ.get("TREEWY_TEST_REPORT"):
        Path(os.environ["TREEWY_TEST_REPORT"]).write_text(json.dumps(summary, indent=1) + "\n")


def types_id(types):
    return "-".join(str(t)[6:] for t in types)


# ------------------------------------------------------------------ verification


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", NODES)
def test_verify_equals_the_reference(gpu, nodes, types):
    for index, decay in enumerate(DECAYS):
        dims = DIMS[(nodes + index) % len(DIMS)]
        if types[0] == F32 and nodes > 64 and dims.key_dim == 256:
            dims = DIMS[0]  # more shared memory than a block has: the reference serves it
        case = TreeCase(
            nodes * 10 + index, dims, nodes, dtype=types[0], state_dtype=types[1], decay=decay,
            shape=SHAPES[(nodes + index) % 4], pads=index % 2, full=index == 2,
        )  # fmt: skip
        suite.check_verify(gpu, case, pad=((0, 0), (8, 1), (1, 1))[index])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("nodes", [17, 32, 33, 40, 48])
def test_verify_by_the_inverse_of_the_whole_matrix(gpu, nodes, dtype):
    """The kernel of 17 to 48 nodes, which takes the wide tile of many blocks."""
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, Dims(4, 8, 128, 128), nodes, dtype=dtype, decay=decay,
            shape=SHAPES[(nodes + index) % 4], batch=24, slots=40, pads=index,
        )  # fmt: skip
        suite.check_verify(gpu, case, pad=((0, 0), (8, 8))[index % 2])
    suite.check_verify_oracle(gpu, case)
    suite.check_verify_poison(gpu, case, float("nan"))


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("nodes", [12, 16, 21, 32, 40, 48, 56, 61, 64])
def test_verify_by_blocks_of_many_turns(gpu, nodes, state_dtype):
    """More turns a block than it has stages, on a GPU of up to 160 multiprocessors."""
    case = TreeCase(
        nodes, Dims(2, 8, 128, 128), nodes, dtype=BF16, state_dtype=state_dtype, batch=100,
        slots=110, pads=3,
    )  # fmt: skip
    with suite.verify_tile(cuda_library.load_library(), 2):
        suite.check_verify(gpu, case, pad=(8, 8))
        suite.check_verify_of_odd_rows(gpu, case)
        suite.check_verify_huge_keys(gpu, case, 1e25)
        suite.check_verify_poison(gpu, case, float("nan"))


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("capacity", [1, 8, 16, 17, 40])
def test_verify_with_a_history(gpu, capacity, types):
    for index, nodes in enumerate((5, 17, 40)):
        case = TreeCase(
            capacity + nodes, DIMS[index], nodes, dtype=types[0], state_dtype=types[1], pads=1
        )
        for stash in (None, types[1]):
            history = suite.random_history(case, capacity, stash=stash)
            suite.check_verify(gpu, case, history=history, name="verify history")


@pytest.mark.parametrize("types", [x for x in TYPES if x[0] != F32], ids=types_id)
@pytest.mark.parametrize("capacity", [1, 15, 16, 31, 32, 33])
def test_verify_with_a_short_history(gpu, capacity, types):
    """The kernel for K = 128 and inputs of 16 bits, by both tiles."""
    for nodes in (1, 5, 8, 9, 16):
        for tile in (1, 2):
            case = TreeCase(
                capacity + nodes, Dims(2, 4, 128, 128), nodes, dtype=types[0],
                state_dtype=types[1], decay=DECAYS[(capacity + nodes) % 3], batch=9, slots=40,
                pads=1,
            )  # fmt: skip
            history = suite.random_history(case, capacity, stash=types[1])
            with suite.verify_tile(cuda_library.load_library(), tile):
                suite.check_verify(gpu, case, pad=(8, 8), history=history, name="short history")


def test_verify_is_no_worse_than_twice_the_recurrence(gpu):
    for seed, decay in enumerate(DECAYS * 2):
        suite.check_no_worse_than_recurrence(gpu, TreeCase(seed, DIMS[2], 40, decay=decay))


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [7, 33, 100])
def test_verify_of_a_node_equals_its_path_run_alone(gpu, nodes, types):
    case = TreeCase(nodes, DIMS[0], nodes, dtype=types[0], state_dtype=types[1])
    suite.check_verify_oracle(gpu, case)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("nodes", [9, 33, 64])
def test_verify_selects_poison_away(gpu, nodes, poison):
    for types in ((F32, F32), (BF16, BF16)):
        case = TreeCase(nodes, DIMS[2], nodes, dtype=types[0], state_dtype=types[1])
        suite.check_verify_poison(gpu, case, poison)


# ------------------------------------------------------------------ commits


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", NODES)
def test_commit_moves_every_layer_to_the_accepted_node(gpu, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, DIMS[(nodes + index) % 4], nodes, dtype=types[0], state_dtype=types[1],
            decay=decay, shape=SHAPES[(nodes + index + 1) % 4], layers=2, pads=index % 2,
        )  # fmt: skip
        suite.check_commit(gpu, case)


def test_verify_with_either_stash_has_the_same_outputs(gpu):
    for dtype in (BF16, F16, F32):
        for nodes in (5, 16, 40):
            case = TreeCase(nodes, DIMS[2], nodes, dtype=dtype, state_dtype=BF16, pads=1)
            suite.check_verify_stashes(gpu, case)


@pytest.mark.parametrize("nodes", [5, 40])
def test_commit_of_bfloat16_pseudo_values(gpu, nodes):
    for pad in ((1, 1, 1), (0, 0, 0)):
        case = TreeCase(nodes, DIMS[2], nodes, dtype=BF16, state_dtype=BF16, layers=2, pads=1)
        suite.check_commit(gpu, case, pad=pad, u_dtype=BF16)


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_every_tile_gives_the_same_states(gpu, state_dtype):
    library = cuda_library.load_library()
    for dims, nodes in ((DIMS[2], 7), (Dims(1, 1, 24, 40), 20), (Dims(1, 2, 256, 72), 5)):
        case = TreeCase(nodes, dims, nodes, state_dtype=state_dtype, shape="chain", layers=2)
        suite.check_commit_tiles(gpu, case, library)
        case = suite.InputsCase(
            nodes, dims, nodes, state_dtype=state_dtype, shape="chain", layers=2
        )
        suite.check_inputs_tiles(gpu, case, library)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", NODES)
def test_commit_from_inputs_equals_that_from_pseudo_values(gpu, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = suite.InputsCase(
            nodes + index, (*DIMS, *ODD_DIMS)[(nodes + index) % 7], nodes, dtype=types[0],
            state_dtype=types[1], decay=decay, shape=SHAPES[(nodes + index + 1) % 4], layers=2,
            pads=index % 2, width=(4, 4, 2 + nodes % 6)[index], bias=index != 1,
        )  # fmt: skip
        suite.check_commit_inputs(gpu, case, pad=((0, 1, 0), (1, 1, 1), (0, 0, 0))[index])


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_commit_from_inputs_convolves_to_the_same_bits(gpu, dtype):
    for width, bias in ((4, False), (4, True), (3, True)):
        case = suite.InputsCase(width, DIMS[2], 3, dtype=dtype, width=width, bias=bias, pads=1)
        suite.check_inputs_conv_bits(gpu, case)


def test_commit_from_inputs_leaves_other_rows_alone(gpu):
    for state_dtype in (F32, BF16):
        case = suite.InputsCase(1, DIMS[1], 11, state_dtype=state_dtype, layers=2)
        suite.check_inputs_leave_rows_alone(gpu, case)


@pytest.mark.parametrize("dims", ODD_DIMS)
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_commit_of_head_dims_that_are_no_powers_of_two(gpu, dims, state_dtype):
    case = TreeCase(3, dims, 19, state_dtype=state_dtype, layers=2)
    suite.check_commit(gpu, case)
    suite.check_deferred(gpu, TreeCase(4, dims, 9, state_dtype=state_dtype, layers=2), capacity=7)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
def test_commit_by_blocks_of_several_items(gpu, types):
    """The next state is loaded during an update; the last block of a row has fewer items."""
    case = TreeCase(
        8, Dims(4, 16, 64, 64), 20, dtype=types[0], state_dtype=types[1], layers=7, batch=24,
        slots=27, pads=2,
    )  # fmt: skip
    suite.check_commit(gpu, case)
    suite.check_deferred(gpu, case, capacity=9, steps=3)


def test_rows_that_accept_nothing_keep_every_bit(gpu):
    for state_dtype in (F32, BF16):
        case = TreeCase(1, DIMS[1], 11, state_dtype=state_dtype, layers=2, pads=0)
        suite.check_nothing_accepted(gpu, case)


def test_commit_selects_poison_away(gpu):
    suite.check_commit_poison(gpu, TreeCase(2, DIMS[2], 40, layers=2, full=True))


@pytest.mark.parametrize("state_dtype", [F32, BF16])
@pytest.mark.parametrize("capacity", [4, 16, 32, 40])
def test_deferred_commit_equals_the_reference(gpu, capacity, state_dtype):
    for dtype in (F32, BF16, F16):
        case = TreeCase(
            capacity, DIMS[2], 24, dtype=dtype, state_dtype=state_dtype, layers=2, pads=1
        )
        suite.check_deferred(gpu, case, capacity=capacity, stash=state_dtype)


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("capacity", [1, 15, 16, 31, 32])
def test_verification_folds_histories(gpu, capacity, types):
    """Of rows that have more than half; the bits of a flush; both tiles, many blocks."""
    for nodes in (1, 8, 16):
        for tile in (1, 2) if types[1] == BF16 else (1,):
            case = TreeCase(
                capacity + nodes, Dims(2, 4, 128, 128), nodes, dtype=types[0],
                state_dtype=types[1], decay=DECAYS[(capacity + nodes) % 3], layers=2, batch=40,
                slots=70, pads=1,
            )  # fmt: skip
            with suite.verify_tile(cuda_library.load_library(), tile):
                folds.check_folding(gpu, case, capacity=capacity, stash=types[1])


@pytest.mark.parametrize(
    ("dims", "nodes", "dtype", "state_dtype", "tile", "pad"),
    [
        (Dims(2, 4, 64, 64), 9, BF16, BF16, 1, None),
        (Dims(2, 4, 128, 64), 20, BF16, F32, 1, None),
        (Dims(2, 4, 128, 128), 9, F32, F32, 1, None),
        (Dims(2, 4, 128, 128), 9, BF16, F32, 2, None),
        (Dims(2, 4, 128, 64), 9, F16, BF16, 1, (1, 1)),
    ],
)
def test_verification_that_cannot_fold_leaves_histories(
    gpu, dims, nodes, dtype, state_dtype, tile, pad
):
    case = TreeCase(nodes, dims, nodes, dtype=dtype, state_dtype=state_dtype, layers=2, pads=1)
    with suite.verify_tile(cuda_library.load_library(), tile):
        folds.check_folding(gpu, case, capacity=12, stash=state_dtype, folds=False, pad=pad)


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("batch", [1, 5, 60])
def test_commits_meet_what_verification_has_folded(gpu, batch, types):
    """In all layers, some and none, in one batch; kernels that cannot fold heed the flags."""
    for nodes, capacity in ((9, 16), (16, 32)):
        options = {"dtype": types[0], "state_dtype": types[1], "layers": 3, "batch": batch}
        options["slots"] = batch + 9
        case = TreeCase(nodes, Dims(2, 4, 128, 128), nodes, **options)
        other = TreeCase(batch, Dims(2, 4, 128, 128), 18, **options)
        other.slot, other.state = case.slot, case.state
        folds.check_deferred_folding(
            gpu, case, capacity=capacity, stash=types[1], steps=8, other=other
        )


def test_folds_by_other_kernels_than_tensor_cores_heed_the_flags(gpu):
    for seed, (dims, capacity, dtype) in enumerate(
        (
            (Dims(1, 2, 64, 200), 40, BF16),
            (Dims(1, 1, 24, 72), 9, F32),
            (Dims(2, 2, 64, 48), 9, BF16),
            (Dims(2, 4, 128, 128), 16, BF16),
        )
    ):
        for state_dtype in (F32, BF16):
            case = TreeCase(
                seed, dims, 5, dtype=dtype, state_dtype=state_dtype, layers=3, batch=4, slots=6
            )
            folds.check_flush_of_flags(gpu, case, capacity=capacity)


def test_folding_arguments_are_checked(gpu):
    case = TreeCase(1, Dims(1, 1, 64, 64), 3, layers=1)
    folds.check_folding_arguments(gpu, case, cuda_library.load_library())


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
def test_captured_steps_that_fold_replay(gpu, types):
    """One graph of a folding verification and its commit; it folds where the lengths say so."""
    capacity, nodes = 16, 9
    case = TreeCase(
        1, Dims(2, 4, 128, 128), nodes, dtype=types[0], state_dtype=types[1], batch=6, slots=9
    )
    pools = folds.FoldingPools(gpu, case, capacity, types[1])
    inputs = [gpu.put(x) for x in (*case.raw[0].values(),)]
    trees, accepted = [gpu.put(x) for x in case.trees], gpu.put(case.accepted)
    u = torch.empty(inputs[2].shape, dtype=types[1], device=gpu.device)
    g = torch.empty(inputs[2].shape[:3], device=gpu.device)
    of_layer = [x[0] for x in pools.history[:3]] + pools.history[3:]
    before = [x.clone() for x in (pools.state, *pools.history, *pools.folds)]

    def step():
        args = (*inputs, pools.state[0], *trees, u, g, *of_layer, pools.folds[0][0])
        out = gpu.call("tree_verify_folding", *args, pools.folds[1], 7)
        stash = u[None], inputs[1][None], g[None]
        given = (*pools.history, *trees, accepted, *stash, *pools.folds)
        gpu.call("commit_deferred_folding", pools.state, *given)
        return out

    replay = capture(step)
    for x, y in zip((pools.state, *pools.history, *pools.folds), before, strict=True):
        x.copy_(y)  # as before the warm-up
    folded = 0
    for seed in range(12):
        accepted.copy_(folds.accepted_within(case, capacity))
        held = pools.lengths
        folded += int((held[case.slot.long()] > 7).sum())
        exact = pools.exact[0], *case.trees, *(x[0] for x in pools.truth[:3]), pools.truth[3]
        wanted = torch.ops.treewy.tree_verify(*suite.wide(*case.raw[0].values()), *exact)
        out = replay()
        tolerance = 8e-3 if types[1] == BF16 or out.dtype == BF16 else 1e-3
        gpu.close(f"captured folding {seed % 2}", out, wanted[0], tolerance=tolerance)
        stash = u.cpu()[None], case.raw[0]["k"][None], g.cpu()[None]
        exact = pools.exact, *pools.truth, *case.trees, accepted.cpu()
        torch.ops.treewy.commit_deferred(*exact, *suite.wide(*stash))
        assert not pools.flags.any()
    assert folded > 6
    pools.check("captured folding state")


def test_histories_in_bfloat16_do_not_drift(gpu):
    suite.check_drift_in_bfloat16(gpu, steps=1000, dims=Dims(1, 2, 128, 128))


def test_a_path_longer_than_the_history_is_left_alone(gpu):
    suite.check_too_long_for_history(gpu, TreeCase(3, DIMS[1], 12, shape="chain", layers=2))


def test_malformed_parents_move_nothing(gpu):
    suite.check_malformed_parents(gpu, TreeCase(6, DIMS[1], 12, layers=2))


# ------------------------------------------------------------------ convolution


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_conv_equals_the_reference(gpu, width, dtype):
    for index, nodes in enumerate(NODES):
        channels = (64, 1032, 77)[index % 3]
        case = suite.conv_case(nodes, nodes=nodes, dtype=dtype, channels=channels, width=width)
        suite.check_conv(gpu, case, bias=index % 2 == 0, pad=(0, 8, 1)[index % 3])
        suite.check_conv_stash(gpu, case, pad=(0, 8, 1)[index % 3])
        suite.check_conv_commit(gpu, case, pad=(0, 8, 1)[index % 3])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [4, 5])
def test_conv_by_blocks_of_several_nodes(gpu, width, dtype):
    for channels, pad in ((1032, 8), (200, 1)):
        case = suite.conv_case(
            3, nodes=39, dtype=dtype, channels=channels, width=width, layers=1, batch=128, slots=130
        )
        suite.check_conv(gpu, case, bias=True, pad=pad)
        suite.check_conv_stash(gpu, case, pad=pad)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("nodes", [1, 2, 4, 5, 16, 17, 40, 64, 128])
def test_conv_by_columns(gpu, nodes, dtype):
    """One to 16 warps a block, and blocks that fill the machine; a last one that is not whole."""
    for batch, channels in ((1, 8192), (4, 1032), (70, 8200)):
        case = suite.conv_case(
            nodes, nodes=nodes, dtype=dtype, channels=channels, width=4, layers=1, batch=batch,
            slots=batch + 9,
        )  # fmt: skip
        suite.check_conv(gpu, case, bias=nodes % 2 == 1, pad=8)
        suite.check_conv_stash(gpu, case, pad=8)


def test_conv_where_columns_do_not_suit(gpu):
    for pad in (0, 1, 4):
        case = suite.conv_case(
            4, nodes=9, dtype=BF16, channels=64, width=4, weight_dtype=F32 if pad < 4 else BF16
        )
        suite.check_conv(gpu, case, bias=True, pad=pad)
        suite.check_conv_stash(gpu, case, pad=pad)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_conv_of_accepted_paths_has_the_bits_of_tree_conv(gpu, width, dtype):
    for index, nodes in enumerate(NODES):
        case = suite.conv_case(
            nodes, nodes=nodes, dtype=dtype, channels=(64, 2056, 77)[index % 3], width=width,
            layers=5,
        )  # fmt: skip
        suite.check_path_conv(gpu, case, bias=index % 2 == 0, pad=(0, 8, 1)[index % 3])


def test_conv_of_accepted_paths_of_many_rows(gpu):
    for channels, pad in ((2048, 0), (77, 1)):
        case = suite.conv_case(
            2, nodes=7, dtype=BF16, channels=channels, width=4, layers=30, batch=256, slots=300
        )
        suite.check_path_conv(gpu, case, bias=True, pad=pad)


def test_conv_of_accepted_paths_leaves_odd_rows_alone(gpu):
    suite.check_path_conv_of_odd_rows(gpu)


def test_conv_of_a_path_has_the_same_bits_everywhere(gpu):
    for dtype in (F32, BF16, F16):
        case = suite.conv_case(1, nodes=17, dtype=dtype, channels=136, width=4)
        suite.check_conv_path_bits(gpu, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize(
    "lengths", [(1,), (5, 0, 70, 1, 2, 33), (300, 31, 32), (3, 4, 5, 6, 7, 8, 1500)]
)
def test_prefill_conv_equals_the_reference(gpu, dtype, width, lengths):
    for channels, pad in ((1032, 8), (8192, 0), (40, 1), (19, 0)):
        suite.check_prefill_conv(
            gpu, width, dtype=dtype, channels=channels, width=width, lengths=lengths, pad=pad
        )


# ------------------------------------------------------------------ prefill


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", [(1,), (5, 0, 70, 1, 33), (257, 16, 32)])
def test_prefill_equals_the_reference(gpu, types, decay, lengths):
    dims = DIMS[len(lengths) % 4]
    prefills.check_prefill(
        gpu, 7, dims, lengths=lengths, dtype=types[0], state_dtype=types[1], decay=decay,
        kernel=prefills.GENERAL,
    )  # fmt: skip


@pytest.mark.parametrize("dims", [*DIMS, *ODD_DIMS])
def test_prefill_of_every_head_dim(gpu, dims):
    prefills.check_prefill(gpu, 8, dims, lengths=(70, 3, 40))


def test_prefill_of_many_sequences_takes_the_wide_tile(gpu):
    prefills.check_prefill(gpu, 9, Dims(4, 16, 64, 64), lengths=tuple(range(1, 24)))


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", [(1,), (31, 7), (1, 63, 64, 65, 0), (257, 16, 32), (1000,)])
@pytest.mark.parametrize("dims", CHUNK_DIMS)
def test_prefill_in_chunks_equals_the_reference(gpu, types, decay, lengths, dims):
    prefills.check_prefill(
        gpu, 7, dims, lengths=lengths, dtype=types[0], state_dtype=types[1], decay=decay, pad=8,
        kernel=prefills.CHUNKS,
    )  # fmt: skip


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("batch", [1, 2, 4, 9])
def test_prefill_in_chunks_of_a_whole_layer(gpu, types, batch):
    """Tiles of 32, 64 and 128 rows of V, more blocks than multiprocessors."""
    lengths = (130, 70, 64, 1, 200, 33, 96, 5, 128)[:batch]
    prefills.check_prefill(
        gpu, 9, Dims(16, 32, 128, 128), lengths=lengths, dtype=types[0], state_dtype=types[1],
        pad=8, kernel=prefills.CHUNKS,
    )  # fmt: skip


def test_prefill_takes_tensor_cores_where_it_can(gpu):
    prefills.check_prefill_choice(gpu, DIMS[0])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("dims", CHUNK_DIMS)
@pytest.mark.parametrize("lengths", [(40, 23), (100, 5)])
def test_prefill_does_not_spread_poison(gpu, dtype, dims, lengths):
    prefills.check_prefill_poison(gpu, 10, dims, dtype=dtype, lengths=lengths)


@pytest.mark.parametrize("cuts", [(1,), (63,), (64,), (65, 66), (500, 950)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_prefill_in_pieces_equals_the_whole(gpu, cuts, dtype):
    prefills.check_prefill_cuts(gpu, 12, DIMS[2], length=1000, cuts=cuts, dtype=dtype)


# ------------------------------------------------------------------ acceptance


@pytest.mark.parametrize("nodes", NODES)
def test_greedy_acceptance_equals_the_runtime_rule(gpu, nodes):
    for max_path in (None, 1, 4):
        suite.check_greedy(gpu, nodes, nodes, max_path=max_path)


# ------------------------------------------------------------------ many steps


@pytest.mark.parametrize("policy", ["reconstruct", "inputs", "deferred"])
@pytest.mark.parametrize("mode", ["reject", "full", "random"])
def test_a_thousand_commits_drift_no_more_than_plain_decoding(gpu, mode, policy):
    suite.check_drift(gpu, mode, steps=1000, dims=Dims(1, 2, 64, 64), policy=policy)


def test_deferred_and_reconstruct_agree(gpu):
    suite.check_policies_agree(gpu, steps=40, dims=Dims(1, 2, 64, 64))


# ------------------------------------------------------------------ graphs


class Step:
    """A whole step of one layer in static buffers: conv, verify, acceptance, commits."""

    def __init__(self, seed, nodes, policy):
        self.dims, self.nodes, self.policy = Dims(2, 4, 64, 64), nodes, policy
        self.batch, self.slots = 3, 6
        channels, capacity = self.dims.conv_dim, 8
        gen = generator(seed)
        self.weight = torch.randn(channels, 4, generator=gen)
        self.state = torch.randn(1, self.slots, 4, 64, 64, generator=gen)
        self.windows = torch.randn(1, self.slots, 3, channels, generator=gen)
        self.history = [
            torch.zeros(1, self.slots, capacity, 4, 64),
            torch.zeros(1, self.slots, capacity, 2, 64),
            torch.zeros(1, self.slots, capacity, 4),
            torch.zeros(self.slots, dtype=torch.int32),
        ]
        raw = suite.projections(gen, self.dims, self.batch, nodes, dtype=F32)
        self.gates = [raw["A_log"], raw["dt_bias"]]
        self.draw(seed)

    def draw(self, seed):
        """Fresh inputs: other trees, slots, node counts, tokens and activations."""
        gen = generator(seed)
        parents, num_nodes = suite.random_trees(gen, self.batch, self.nodes)
        depth = torch.zeros_like(parents)
        for node in range(1, self.nodes):  # no path longer than the history holds
            parent = parents[:, node, None].clamp(max=node - 1, min=0).long()
            shallow = depth.gather(1, parent) < 6
            parent = torch.where(shallow, parent, 0)
            parents[:, node] = parent[:, 0]
            depth[:, node] = depth.gather(1, parent)[:, 0] + 1
        heads = self.dims.value_heads
        return {
            "slot": suite.random_slots(gen, self.batch, self.slots, pads=randint(gen, 0, 2)),
            "parents": parents,
            "num_nodes": num_nodes,
            "x": torch.randn(self.batch, self.nodes, self.dims.conv_dim, generator=gen),
            "a": torch.randn(self.batch, self.nodes, heads, generator=gen),
            "b": torch.randn(self.batch, self.nodes, heads, generator=gen),
            "token_ids": torch.randint(0, 2, (self.batch, self.nodes), generator=gen),
            "target_ids": torch.randint(0, 2, (self.batch, self.nodes), generator=gen),
        }

    def pools(self, device, dtype):
        cast = [x.to(dtype) if x.is_floating_point() else x.clone() for x in self.history]
        floats = [x.to(dtype) for x in (self.state, self.windows)]
        return [x.to(device) for x in (*floats, *cast)]

    def run(self, inputs, pools, weight, gates, accept):
        state, windows, *history = pools
        dims = self.dims
        tree = [inputs[name] for name in ("slot", "parents", "num_nodes")]
        ops = torch.ops.treewy
        y = ops.tree_conv(inputs["x"], windows[0], *tree, weight, None)
        keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
        q, k, v = y.split((keys, keys, values), -1)
        q, k = (t.unflatten(-1, (dims.key_heads, dims.key_dim)) for t in (q, k))
        v = v.unflatten(-1, (dims.value_heads, dims.value_dim))
        layer = [x[0] for x in history[:3]] + history[3:] if self.policy == "deferred" else []
        delta = (q, k, v, inputs["a"], inputs["b"], *gates, state[0], *tree)
        if self.policy == "inputs":
            out, accepted = ops.tree_outputs(*delta), accept(inputs)
            stash = [inputs[name][None] for name in "xab"]
            of_layers = (weight[None], None, *(gate[None] for gate in gates))
            ops.commit_inputs(state, windows, *tree, accepted, *stash, *of_layers)
            ops.conv_commit(windows, *tree, accepted, inputs["x"][None])
            return out, accepted
        out, u, g = ops.tree_verify(*delta, *layer)
        accepted = accept(inputs)
        # As the runtime has it: the keys come again, those of the accepted paths alone.
        again, of_k = torch.full_like(k[None].flatten(3), float("nan")), slice(keys, 2 * keys)
        ops.path_conv(
            again, windows[..., of_k], *tree, accepted, inputs["x"][None, ..., of_k],
            weight[None, of_k],
        )  # fmt: skip
        stash = u[None], again.view_as(k[None]), g[None]
        if self.policy == "deferred":
            ops.commit_deferred(state, *history, *tree, accepted, *stash)
        else:
            ops.commit(state, *tree, accepted, *stash)
        ops.conv_commit(windows, *tree, accepted, inputs["x"][None])
        return out, accepted


def accept_on_device(inputs):
    names = ("token_ids", "target_ids", "slot", "parents", "num_nodes")
    return cuda_ops.greedy_accept(*(inputs[name] for name in names))[0]


def accept_by_runtime(inputs):
    batch = inputs["slot"].shape[0]
    tree = suite.TreeBatch(
        inputs["token_ids"], inputs["parents"].clamp(max=inputs["parents"].shape[1] - 1),
        inputs["num_nodes"], inputs["slot"], torch.zeros(batch).int(), 0,
    )  # fmt: skip
    return suite.acceptance.greedy_accept(tree, inputs["target_ids"]).accepted


@pytest.mark.parametrize("policy", ["reconstruct", "inputs", "deferred"])
@pytest.mark.parametrize("nodes", [6, 20])
def test_a_captured_step_replays_over_other_topologies(gpu, policy, nodes):
    step = Step(1, nodes, policy)
    static = {name: x.cuda() for name, x in step.draw(0).items()}
    pools = step.pools("cuda", F32)
    weight, gates = step.weight.cuda(), [x.cuda() for x in step.gates]
    step.run(static, [x.clone() for x in pools], weight, gates, accept_on_device)  # warm
    before = [x.clone() for x in pools]
    torch.cuda.synchronize()
    calls = cuda_ops.reference_calls.total()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, accepted = step.run(static, pools, weight, gates, accept_on_device)
    assert cuda_ops.reference_calls.total() == calls
    for pool, copy in zip(pools, before, strict=True):
        assert same_bits(pool.cpu(), copy.cpu())  # capture runs nothing
    exact = step.pools("cpu", F64)
    for seed in range(1, 9):
        inputs = step.draw(seed)
        for name, x in inputs.items():
            static[name].copy_(x)
        graph.replay()
        wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        truth, wanted = step.run(
            wide, exact, step.weight.double(), [x.double() for x in step.gates], accept_by_runtime
        )
        assert torch.equal(accepted.cpu(), wanted)
        gpu.close("graph out", out, truth)
        gpu.close("graph state", pools[0], exact[0])
        gpu.close("graph windows", pools[1], exact[1])
        if policy == "deferred":
            assert torch.equal(pools[5].cpu(), exact[5])


def capture(run):
    """A function that replays `run` from a CUDA graph and returns its results."""
    run()  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay():
        graph.replay()
        return results

    return replay


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [5, 8, 16])
@pytest.mark.parametrize("capacity", [16, 32])
def test_captured_verification_replays_over_other_histories(gpu, capacity, nodes, types):
    """Other trees, lengths and slots, through the kernel of small trees, by both tiles."""
    for tile in (1, 2):
        with suite.verify_tile(cuda_library.load_library(), tile):
            suite.check_verify_replays(
                gpu, capture, dims=Dims(2, 4, 128, 128), nodes=nodes, capacity=capacity, types=types
            )


# ------------------------------------------------------------------ size


@pytest.mark.slow
def test_offsets_past_two_to_the_31(gpu):
    """Batch 256, 40 nodes, slots near the end of a pool of more than 2^31 elements."""
    batch, nodes, slots = 256, 40, 4200
    dims = Dims(1, 32, 128, 128)
    per_slot = dims.value_heads * dims.value_dim * dims.key_dim
    assert slots * per_slot > 2**31
    gen = generator(11)
    parents, num_nodes = suite.random_trees(gen, batch, nodes, full=True)
    accepted = suite.random_accepted(gen, num_nodes)
    slot = (slots - 1 - torch.randperm(batch, generator=gen)).int()
    raw = {
        name: x.to("cuda", BF16 if name in "qkv" else F32)
        for name, x in suite.projections(gen, dims, batch, nodes, dtype=F32).items()
    }
    shape = (dims.value_heads, dims.value_dim, dims.key_dim)
    pool = torch.zeros(slots, *shape, dtype=BF16, device="cuda")
    used = torch.randn(batch, *pool.shape[1:], device="cuda").to(BF16)
    pool[slot.long().cuda()] = used
    tree = [x.cuda() for x in (slot, parents, num_nodes)]
    small_tree = [torch.arange(batch, dtype=torch.int32).cuda(), *tree[1:]]
    far = gpu.call("tree_verify", *raw.values(), pool, *tree)
    near = gpu.call("tree_verify", *raw.values(), used, *small_tree)
    for x, y in zip(far, near, strict=True):
        assert same_bits(x.cpu(), y.cpu())
    rows = slice(0, 2)
    inputs = [raw[n][rows].cpu().double() for n in ("q", "k", "v", "a", "b")]
    inputs += [raw[n].cpu().double() for n in ("A_log", "dt_bias")]
    truth = torch.ops.treewy.tree_verify(
        *inputs, used[rows].cpu().double(), torch.arange(2).int(), parents[rows], num_nodes[rows]
    )
    gpu.close("big u", far[1][rows], truth[1])

    # A stash whose second layer starts past 2^31 elements.
    u, k, g = far[1], raw["k"], far[2]
    whole = torch.empty(2**31 + u.numel(), device="cuda")
    far_u = whole.as_strided((2, *u.shape), (2**31, *u.stride()))
    far_u.copy_(u)
    stacked = k.expand(2, *k.shape), g.expand(2, *g.shape)
    goal = accepted.cuda()
    pools = torch.stack((used, used))
    gpu.call("commit", pools, *small_tree, goal, far_u, *stacked)
    gpu.call("commit", pool[None], *tree, goal, u[None], k[None], g[None])
    assert same_bits(pools[0].cpu(), pools[1].cpu())
    assert same_bits(pool[slot.long().cuda()].cpu(), pools[0].cpu())
    exact = used[rows].cpu().double()[None]
    stash = [x[None, rows].cpu().double() for x in (u, k, g)]
    torch.ops.treewy.commit(
        exact, torch.arange(2).int(), parents[rows], num_nodes[rows], accepted[rows], *stash
    )
    gpu.close("big commit", pools[0, rows], exact[0])


# ------------------------------------------------------------------ the boundary


def test_float64_on_the_gpu_is_served_by_the_reference(gpu):
    case = TreeCase(1, DIMS[1], 5)
    before = cuda_ops.reference_calls.total()
    inputs = [x.cuda().double() for x in case.raw[0].values()]
    tree = [x.cuda() for x in case.trees]
    out, _, _ = torch.ops.treewy.tree_verify(*inputs, case.state[0].cuda().double(), *tree)
    assert cuda_ops.reference_calls.total() == before + 1
    assert suite.relative_error(out.cpu(), case.truth()[0]) < 1e-12


def test_wrong_shapes_are_refused_on_the_gpu(gpu):
    case = TreeCase(1, DIMS[1], 5)
    inputs = [x.cuda() for x in case.raw[0].values()]
    tree = [x.cuda() for x in case.trees]
    with pytest.raises(ValueError, match="num_nodes must be"):
        torch.ops.treewy.tree_verify(*inputs, case.state[0].cuda(), *tree[:2], tree[2][:-1])


# ------------------------------------------------------------------ end to end


@pytest.mark.parametrize("speculation", ["plain", "tree", "deferred"])
def test_the_shipped_model_gives_the_tokens_of_the_cpu(gpu, shipped_model, speculation):
    from trtllm_treewy import LLM, SamplingParams

    settings = {
        "plain": None,
        "tree": {"draft_tree_widths": [3, 3, 3]},
        "deferred": {"draft_tree_widths": [3, 3, 3], "state_commit": "deferred"},
    }[speculation]
    prompts = [
        "The server reads its configuration file when it starts.",
        "A transaction that was not committed",
        "To install the package",
    ]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    texts = {}
    before = cuda_ops.reference_calls.total()
    for device in ("cpu", "cuda"):
        with LLM(shipped_model, dtype="float32", device=device, speculative_config=settings) as llm:
            texts[device] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert cuda_ops.reference_calls.total() == before
    assert texts["cuda"] == texts["cpu"]
