"""The CUDA kernels without a GPU: their own code, compiled for a machine played on the CPU.

`plugins/tests/host_cuda.h` says what that machine finds: wrong indices, missing barriers, races
between blocks, tails and padding; not speed, and not what only real hardware does. On a GPU the
same checks run in `gpu/test_kernels.py`, on more shapes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import folding_suite as folds
import kernel_suite as suite
import prefill_suite as prefills
import pytest
import torch
from gdn_cases import DECAYS, Dims
from kernel_suite import BF16, F16, F32, TYPES, Machine, TreeCase
from plugin_host import cuda_home

from trtllm_treewy import cuda_library, cuda_ops

HALF_TYPES = tuple(types for types in TYPES if types[0] != F32)
DIMS = (Dims(1, 2, 64, 128), Dims(2, 2, 128, 64), Dims(1, 4, 64, 64))


@pytest.fixture(scope="module")
def host_library(repository):
    """The kernels built for the host; objects are kept in .cache between runs."""
    home = cuda_home()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if home is None or compiler is None:
        pytest.skip("needs g++ and CUDA's headers to compile the kernels for the host")
    folder = repository / ".cache" / "host_kernels"
    folder.mkdir(parents=True, exist_ok=True)
    script = repository / "plugins" / "tests" / "build_host_library.sh"
    output = folder / "libtreewy_host.so"
    run = subprocess.run(
        [str(script), str(output), str(folder)],
        env={**os.environ, "CUDA_HOME": home},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return cuda_library.CudaLibrary(output)


@pytest.fixture
def host(host_library, monkeypatch):
    """A machine whose kernels run on the CPU."""
    monkeypatch.setattr(cuda_library, "load_library", lambda: host_library)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Machine("cpu")
    torch.set_num_threads(threads)
    cuda_ops._error_counters.clear()


def types_id(types):
    return "-".join(str(t)[6:] for t in types)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [1, 5, 16, 17, 33])
def test_verify_equals_the_reference(host, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, DIMS[(nodes + index) % 3], nodes, dtype=types[0], state_dtype=types[1],
            decay=decay, shape=("random", "chain", "levels")[index], batch=2, pads=index % 2,
        )  # fmt: skip
        suite.check_verify(host, case, pad=((0, 0), (8, 1), (1, 1))[index])
        for stash in (None, types[1]):
            history = suite.random_history(case, (3, 16, 18)[index], stash=stash)
            suite.check_verify(host, case, history=history)


@pytest.mark.parametrize("types", [x for x in TYPES if x[0] != F32], ids=types_id)
@pytest.mark.parametrize("capacity", [1, 16, 32])
def test_verify_with_a_short_history(host, host_library, capacity, types):
    """The kernel for K = 128 and inputs of 16 bits, by both tiles."""
    for index, nodes in enumerate((5, 16)):
        case = TreeCase(
            capacity + nodes, Dims(1, 2, 128, 128), nodes, dtype=types[0], state_dtype=types[1],
            decay=DECAYS[(capacity + index) % 3], batch=3, pads=index,
        )  # fmt: skip
        history = suite.random_history(case, capacity, stash=types[1])
        for tile in (1, 2):
            with suite.verify_tile(host_library, tile):
                suite.check_verify(host, case, pad=(8, 8), history=history)


@pytest.mark.parametrize("types", [(BF16, BF16), (F16, F32)], ids=types_id)
def test_a_short_history_leaves_nothing_behind(host, types):
    """Calls over the same buffers, as `gpu/test_kernels.py` replays them."""
    for nodes, capacity in ((8, 16), (16, 32)):
        suite.check_verify_replays(
            host, lambda run: run, dims=Dims(1, 2, 128, 64), nodes=nodes, capacity=capacity,
            types=types,
        )  # fmt: skip


def test_infinities_of_a_history_reach_no_other_row(host):
    """They are in the state that every node starts from: all outputs of their rows of V are NaN."""
    case = TreeCase(2, Dims(1, 2, 128, 128), 9, dtype=BF16, state_dtype=BF16, batch=2, slots=3)
    u, k, g, length = suite.random_history(case, 20, stash=BF16)
    length[:] = 18
    for x in (u, k, g):
        x[:] = 0.1 * torch.ones_like(x) if x is not g else -0.1
    u[case.slot[0], 17, 1, 5] = float("inf")
    out, mine, _ = suite.run_verify(host, case, history=(u, k, g, length))
    clean = torch.ones_like(out, dtype=torch.bool)
    clean[0, :, 1, 5] = False
    assert out[clean].isfinite().all()
    assert mine[clean].isfinite().all()
    real = int(case.num_nodes[0])
    assert not out[0, :real, 1, 5].isfinite().any()


def test_verify_with_either_stash_has_the_same_outputs(host):
    for dtype in (BF16, F32):
        for nodes in (5, 20):
            case = TreeCase(nodes, DIMS[0], nodes, dtype=dtype, state_dtype=BF16, batch=2, pads=1)
            suite.check_verify_stashes(host, case)


def test_verify_of_the_largest_tree(host):
    case = TreeCase(1, DIMS[0], 128, shape="chain", batch=1, full=True)
    suite.check_verify(host, case)
    suite.check_no_worse_than_recurrence(host, case)


@pytest.fixture(params=[True, False], ids=["warpgroups", "warps"])
def few_multiprocessors(host_library, request):
    """So few that the blocks of a kernel whose blocks stay have several turns each.

    Their products are those of warpgroups (GPUs of 9.0), or of warps (all others).
    """
    host_library._library.host_cuda_set_multiprocessors(2)
    host_library._library.host_cuda_set_warpgroups(request.param)
    yield
    host_library._library.host_cuda_set_multiprocessors(132)
    host_library._library.host_cuda_set_warpgroups(True)


@pytest.mark.parametrize("index", range(6))
def test_verify_by_blocks_that_take_head_after_head(host, host_library, few_multiprocessors, index):
    """The kernel of blocks that stay, which takes the wide tile: more turns than stages."""
    nodes = (17, 33, 48, 41, 40, 32)[index]
    case = TreeCase(
        nodes, Dims(1, 1 + index % 2, 128, (128, 256)[index % 3 == 1]), nodes,
        dtype=(BF16, F16)[index % 2], state_dtype=(F32, BF16, F32, BF16, BF16, BF16)[index],
        decay=DECAYS[index % len(DECAYS)], shape=("random", "chain", "levels")[index % 3],
        batch=(9, 3, 8, 4, 5, 8)[index], slots=12, pads=index % 2,
    )  # fmt: skip
    with suite.verify_tile(host_library, 2):
        suite.check_verify(host, case, pad=((0, 0), (8, 8))[index % 2])
        assert "stream" in kernel_name(host_library)
        suite.check_verify_poison(host, case, (float("nan"), float("inf"))[index % 2])


@pytest.mark.parametrize("index", range(5))
def test_verify_by_blocks_whose_stages_are_filled_ahead(host, host_library, index):
    """Few nodes: other warps copy and follow paths; more turns than stages."""
    case = TreeCase(
        index, Dims(1, 1 + index % 2, 128, (128, 256)[index % 3 == 1]), (9, 16, 24, 31, 32)[index],
        dtype=BF16, state_dtype=(F32, F32, BF16, BF16, BF16)[index],
        decay=DECAYS[index % len(DECAYS)], shape=("random", "chain", "levels")[index % 3],
        batch=(9, 3, 8, 4, 8)[index], slots=12, pads=index % 2,
    )  # fmt: skip
    host_library._library.host_cuda_set_multiprocessors(2)
    try:
        with suite.verify_tile(host_library, 2):
            suite.check_verify(host, case, pad=((0, 0), (8, 8))[index % 2])
            assert "stream" in kernel_name(host_library)
            assert "Lb1E" in kernel_name(host_library)  # kAhead
            suite.check_verify_poison(host, case, (float("nan"), float("inf"))[index % 2])
            if case.nodes > 9:
                suite.check_verify_of_odd_rows(host, case)
            if case.nodes == 16:
                suite.check_verify_huge_keys(host, case, 1e25)
    finally:
        host_library._library.host_cuda_set_multiprocessors(132)


@pytest.mark.parametrize("multiprocessors", [1, 3, 5])
def test_verify_by_blocks_of_any_count_of_turns(host, host_library, multiprocessors):
    """One block with all turns; fewer turns than stages; one turn more for some; four value heads
    a key head and two blocks of V a head."""
    host_library._library.host_cuda_set_multiprocessors(multiprocessors)
    try:
        for index, (batch, dims) in enumerate(
            ((1, Dims(1, 1, 128, 128)), (13, Dims(1, 1, 128, 128)), (1, Dims(1, 4, 128, 256)))
        ):
            case = TreeCase(
                batch, dims, 17, dtype=BF16, state_dtype=(F32, BF16, F32)[index], batch=batch,
                slots=batch + 2,
            )  # fmt: skip
            with suite.verify_tile(host_library, 2):
                suite.check_verify(host, case)
                assert "stream" in kernel_name(host_library)
    finally:
        host_library._library.host_cuda_set_multiprocessors(132)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_groups_do_not_meet_at_each_others_barriers(host, host_library, state_dtype):
    """Three stages and two groups, or four filled ahead; each warp is late once in a while."""
    host_library._library.host_cuda_set_multiprocessors(1)
    try:
        with suite.verify_tile(host_library, 2):
            for seed in range(12):
                case = TreeCase(
                    seed, Dims(1, 1, 128, 128), 17, dtype=BF16, state_dtype=state_dtype, batch=12,
                    slots=14,
                )  # fmt: skip
                suite.check_verify(host, case)
    finally:
        host_library._library.host_cuda_set_multiprocessors(132)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_blocks_that_take_head_after_head_keep_to_what_a_row_may_hold(
    host, host_library, few_multiprocessors, state_dtype
):
    case = TreeCase(
        5, Dims(1, 1, 128, 128), 21, dtype=BF16, state_dtype=state_dtype, batch=9, slots=12,
        full=True,
    )  # fmt: skip
    with suite.verify_tile(host_library, 2):
        suite.check_verify_of_odd_rows(host, case)
        suite.check_verify_huge_keys(host, case, 1e25)
        assert "stream" in kernel_name(host_library)
        if state_dtype == BF16:
            suite.check_verify_stashes(host, case)


@pytest.mark.parametrize(("nodes", "state_dtype"), [(56, F32), (61, BF16), (64, F32)], ids=str)
def test_verify_of_larger_trees_by_blocks_that_stay(host, host_library, nodes, state_dtype):
    """49 to 64 nodes, where products are those of warpgroups."""
    host_library._library.host_cuda_set_multiprocessors(2)
    case = TreeCase(
        nodes, Dims(1, 2, 128, 128), nodes, dtype=BF16, state_dtype=state_dtype, batch=4, slots=6
    )
    try:
        with suite.verify_tile(host_library, 2):
            suite.check_verify(host, case)
            assert "stream" in kernel_name(host_library)
            suite.check_verify_poison(host, case, float("nan"))
    finally:
        host_library._library.host_cuda_set_multiprocessors(132)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_verify_of_paths_by_blocks_that_take_head_after_head(
    host, host_library, few_multiprocessors, state_dtype
):
    case = TreeCase(4, Dims(1, 1, 128, 128), 33, dtype=BF16, state_dtype=state_dtype, batch=5)
    with suite.verify_tile(host_library, 2):
        suite.check_verify_oracle(host, case)


@pytest.mark.parametrize("types", [(F32, F32), (BF16, BF16)], ids=types_id)
def test_verify_of_a_node_equals_its_path_run_alone(host, types):
    case = TreeCase(4, DIMS[1], 20, dtype=types[0], state_dtype=types[1])
    suite.check_verify_oracle(host, case)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_verify_selects_poison_away(host, poison):
    for nodes in (9, 33):
        suite.check_verify_poison(host, TreeCase(nodes, DIMS[0], nodes), poison)


@pytest.mark.parametrize("types", [x for x in TYPES if x[0] != F32], ids=types_id)
@pytest.mark.parametrize("nodes", [7, 16])
def test_verify_of_small_trees_selects_poison_away(host, host_library, nodes, types):
    """The kernels for K = 128 and inputs of 16 bits, whose weights may lie on keys and queries."""
    case = TreeCase(
        nodes, Dims(1, 2, 128, 128), nodes, dtype=types[0], state_dtype=types[1], batch=2,
        full=True,
    )  # fmt: skip
    histories = (), suite.random_history(case, 20, stash=types[1])
    for tile, poison in ((1, float("nan")), (2, float("inf"))):
        with suite.verify_tile(host_library, tile):
            for history in histories:
                suite.check_verify_poison(host, case, poison, history=history)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [1, 2, 17, 40])
def test_commit_moves_every_layer_to_the_accepted_node(host, nodes, types):
    for index, decay in enumerate(DECAYS):
        case = TreeCase(
            nodes + index, (*DIMS, Dims(2, 4, 8, 8), Dims(1, 1, 24, 40))[(nodes + index) % 5],
            nodes, dtype=types[0], state_dtype=types[1], decay=decay,
            shape=("random", "chain", "star")[index], layers=2, pads=index % 2,
        )  # fmt: skip
        suite.check_commit(host, case)


def test_commit_of_bfloat16_pseudo_values(host):
    for nodes, pad in ((5, (1, 1, 1)), (20, (0, 0, 0))):
        case = TreeCase(nodes, DIMS[0], nodes, dtype=BF16, state_dtype=BF16, layers=2, pads=1)
        suite.check_commit(host, case, pad=pad, u_dtype=BF16)


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_every_tile_gives_the_same_states(host, host_library, state_dtype):
    for dims, nodes in ((DIMS[1], 7), (Dims(1, 1, 24, 40), 20), (Dims(1, 2, 256, 72), 5)):
        case = TreeCase(nodes, dims, nodes, state_dtype=state_dtype, shape="chain", layers=2)
        suite.check_commit_tiles(host, case, host_library)
        case = suite.InputsCase(
            nodes, dims, nodes, state_dtype=state_dtype, shape="chain", layers=2, bias=True
        )
        suite.check_inputs_tiles(host, case, host_library)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("nodes", [1, 6, 17, 40])
def test_commit_from_inputs_equals_that_from_pseudo_values(host, nodes, types):
    for index, decay in enumerate(DECAYS):
        dims = (*DIMS, Dims(2, 4, 8, 8), Dims(1, 1, 24, 40))[(nodes + index) % 5]
        case = suite.InputsCase(
            nodes + index, dims, nodes, dtype=types[0], state_dtype=types[1], decay=decay,
            shape=("random", "chain", "star")[index], layers=2, pads=index % 2,
            width=(4, 4, 2 + nodes % 6)[index], bias=index != 1, batch=2,
        )  # fmt: skip
        suite.check_commit_inputs(host, case, pad=((0, 1, 0), (1, 1, 1), (0, 0, 0))[index])


def test_commit_from_inputs_of_the_longest_path_and_large_heads(host):
    case = suite.InputsCase(2, Dims(1, 1, 8, 8), 128, shape="chain", batch=2, full=True)
    case.accepted[0] = 127
    suite.check_commit_inputs(host, case)
    for state_dtype in (F32, BF16):
        dims = Dims(1, 2, 256, 200)
        suite.check_commit_inputs(
            host, suite.InputsCase(5, dims, 6, state_dtype=state_dtype, layers=1, batch=2)
        )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_commit_from_inputs_convolves_to_the_same_bits(host, dtype):
    for width, bias in ((4, False), (4, True), (3, True)):
        case = suite.InputsCase(width, DIMS[0], 3, dtype=dtype, width=width, bias=bias, pads=1)
        suite.check_inputs_conv_bits(host, case)


def test_commit_from_inputs_leaves_other_rows_alone(host):
    for state_dtype in (F32, BF16):
        case = suite.InputsCase(1, DIMS[0], 7, state_dtype=state_dtype, layers=2)
        suite.check_inputs_leave_rows_alone(host, case)


def test_commit_splits_large_heads(host):
    for state_dtype in (F32, BF16):
        dims = Dims(1, 1, 256, 200)
        suite.check_commit(host, TreeCase(5, dims, 20, state_dtype=state_dtype, layers=2))


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_commit_by_blocks_of_several_items(host, state_dtype):
    """208 items a row, 3 a block and 1 in the last: the next state is loaded during the update."""
    case = TreeCase(
        8, Dims(2, 16, 8, 8), 9, state_dtype=state_dtype, layers=13, batch=15, slots=17, pads=2
    )
    suite.check_commit(host, case)
    suite.check_deferred(host, case, capacity=7, steps=3)


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_commit_of_states_that_stream(host, host_library, state_dtype):
    """Blocks of several heads and layers, paths of more nodes than warps, V that pieces do not
    divide, one multiprocessor, so that blocks have as many heads as they may."""
    host_library._library.host_cuda_set_multiprocessors(1)
    try:
        for index, dims in enumerate(
            (Dims(1, 3, 128, 72), Dims(2, 4, 64, 40), Dims(1, 2, 256, 200), Dims(1, 2, 128, 128))
        ):
            case = TreeCase(
                index, dims, (16, 6, 9, 24)[index], dtype=(BF16, F16, F32, BF16)[index],
                state_dtype=state_dtype, shape="chain", layers=3, batch=5, slots=7, pads=1,
                decay=DECAYS[index % len(DECAYS)],
            )  # fmt: skip
            suite.check_commit(host, case, pad=((1, 1, 1), (0, 0, 0))[index % 2])
            suite.check_commit_tiles(host, case, host_library)
    finally:
        host_library._library.host_cuda_set_multiprocessors(132)


def test_rows_that_accept_nothing_keep_every_bit(host):
    suite.check_nothing_accepted(host, TreeCase(1, DIMS[0], 7, layers=2))


def test_commit_selects_poison_away(host):
    suite.check_commit_poison(host, TreeCase(2, DIMS[1], 20, layers=2, full=True))


@pytest.mark.parametrize("state_dtype", [F32, BF16])
@pytest.mark.parametrize("capacity", [3, 9, 20])
def test_deferred_commit_equals_the_reference(host, capacity, state_dtype):
    dims = (DIMS[2], Dims(1, 2, 256, 48), DIMS[0])[capacity % 3]
    case = TreeCase(capacity, dims, 12, state_dtype=state_dtype, layers=2, pads=1)
    suite.check_deferred(host, case, capacity=capacity)
    for dtype in (BF16, F16):
        case = TreeCase(capacity, dims, 12, dtype=dtype, state_dtype=state_dtype, layers=2, pads=1)
        suite.check_deferred(host, case, capacity=capacity, stash=state_dtype)


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("capacity", [7, 16, 32])
def test_histories_fold_by_tensor_cores(host, capacity, types):
    """Warps with tiles of two value heads, of one and of none; u of both types; padded stashes."""
    for index, dims in enumerate((Dims(1, 3, 128, 48), Dims(2, 2, 64, 16), Dims(1, 1, 128, 64))):
        case = TreeCase(
            capacity + index, dims, 9, dtype=types[0], state_dtype=types[1], layers=2,
            decay=DECAYS[index], shape=("chain", "random", "levels")[index], pads=1,
        )  # fmt: skip
        suite.check_deferred(
            host, case, capacity=capacity, stash=F32 if index == 1 else types[1],
            pad=((0, 0), (1, 1), (8, 0))[index],
        )  # fmt: skip


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("capacity", [1, 16, 31])
def test_verification_folds_histories(host, host_library, capacity, types):
    """Both tiles: a block has one flag or two; value heads that share a key head; padded rows."""
    for index, (nodes, dims) in enumerate(((7, Dims(1, 2, 128, 128)), (16, Dims(2, 2, 128, 128)))):
        case = TreeCase(
            capacity + nodes, dims, nodes, dtype=types[0], state_dtype=types[1], layers=2, batch=4,
            decay=DECAYS[(capacity + index) % 3], pads=index,
        )  # fmt: skip
        stash = F32 if index else types[1]
        wide = types[1] == BF16 and (capacity > 16 or (capacity == 16) == bool(index))
        with suite.verify_tile(host_library, 2 if wide else 1):
            folds.check_folding(host, case, capacity=capacity, stash=stash)


@pytest.mark.parametrize(
    ("dims", "nodes", "dtype", "state_dtype", "tile", "pad"),
    [
        (Dims(1, 2, 64, 64), 9, BF16, BF16, 1, None),  # K = 64
        (Dims(1, 1, 128, 64), 20, BF16, F32, 1, None),  # two node blocks
        (Dims(1, 1, 128, 128), 9, F32, F32, 1, None),
        (Dims(1, 1, 128, 128), 9, BF16, F32, 2, None),  # the wide tile of a float32 state
        (Dims(1, 1, 128, 64), 9, F16, BF16, 1, (1, 1)),  # odd addresses
    ],
)
def test_verification_that_cannot_fold_leaves_histories(
    host, host_library, dims, nodes, dtype, state_dtype, tile, pad
):
    case = TreeCase(nodes, dims, nodes, dtype=dtype, state_dtype=state_dtype, layers=2, pads=1)
    with suite.verify_tile(host_library, tile):
        folds.check_folding(host, case, capacity=12, stash=state_dtype, folds=False, pad=pad)


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
def test_commits_meet_what_verification_has_folded(host, types):
    """Of all layers, of some and of none, in one batch; kernels that cannot fold heed the flags."""
    seen = set()
    for seed, dims in enumerate((Dims(1, 1, 128, 64), Dims(1, 2, 128, 64))):
        options = {
            "dtype": types[0], "state_dtype": types[1], "layers": 2, "batch": 5, "slots": 7,
        }  # fmt: skip
        case = TreeCase(seed, dims, (9, 6)[seed], pads=seed % 2, **options)
        other = TreeCase(seed + 9, dims, 18, **options)
        other.slot, other.state = case.slot, case.state
        seen |= folds.check_deferred_folding(
            host, case, capacity=(11, 24)[seed], stash=types[1],
            other=other if seed == 0 else None, steps=(6, 4)[seed],
        )  # fmt: skip
    assert seen == {"all", "some", "none"}


def test_one_sequence_is_folded_by_several_blocks(host, host_library):
    """Batch 1: the narrow tile, by which V of a head is shared out among blocks."""
    case = TreeCase(3, Dims(1, 2, 128, 256), 8, dtype=BF16, state_dtype=BF16, layers=2, batch=1)
    folds.check_deferred_folding(host, case, capacity=9, stash=BF16)
    folds.check_folding(host, case, capacity=9, stash=BF16)


def test_folds_of_what_is_not_finite_come_last(host):
    """Rows that are done again by the recurrence read the state before it is written."""
    case = TreeCase(2, Dims(1, 1, 128, 128), 9, dtype=BF16, state_dtype=BF16, batch=2, slots=3)
    case.raw[0]["k"][:, 8] = 1e25
    case.parents[:], case.parents[:, 0] = 0, -1
    case.num_nodes[:] = 9
    pools = folds.FoldingPools(host, case, 20, BF16)
    history = suite.random_history(case, 20, stash=BF16)
    history[3][:] = 18
    for ours, there in zip(pools.history, history, strict=True):
        ours.copy_(there.nan_to_num())
    plain = suite.run_verify(host, case, history=[x[0] for x in pools.history[:3]] + [history[3]])
    flushed, copies = pools.state.clone(), [x.clone() for x in pools.history]
    host.call("flush_history", flushed, *copies, case.slot)
    u, g = torch.empty_like(plain[1]), torch.empty_like(plain[2])
    args = (*case.raw[0].values(), pools.state[0], *case.trees, u, g)
    of_layer = [x[0] for x in pools.history[:3]] + pools.history[3:]
    out = host.call("tree_verify_folding", *args, *of_layer, pools.folds[0][0], pools.folds[1], 16)
    assert out[:, :8].isfinite().all()
    for mine, there in zip((out, u, g), plain, strict=True):
        assert suite.same_bits(mine, there)
    assert suite.same_bits(pools.state, flushed)


def test_folds_by_other_kernels_than_tensor_cores_heed_the_flags(host):
    """A commit whose histories are long or have float32 keys; V that no flag divides."""
    for seed, (dims, capacity, dtype) in enumerate(
        (
            (Dims(1, 2, 64, 200), 40, BF16),
            (Dims(1, 1, 24, 72), 9, F32),
            (Dims(2, 2, 64, 48), 9, BF16),
        )
    ):
        for state_dtype in (F32, BF16):
            folds.check_flush_of_flags(
                host, TreeCase(seed, dims, 5, dtype=dtype, state_dtype=state_dtype, layers=3,
                               batch=4, slots=6),
                capacity=capacity,
            )  # fmt: skip


def test_folding_arguments_are_checked(host, host_library):
    case = TreeCase(1, Dims(1, 1, 64, 64), 3, layers=1)
    folds.check_folding_arguments(host, case, host_library)


@pytest.mark.parametrize("op", ["flush_history", "commit_deferred"])
def test_lengths_that_a_commit_writes_may_be_a_view(host, op):
    """They are written where they are: every other one here, and nothing between them."""
    case = TreeCase(4, DIMS[0], 5, dtype=BF16, state_dtype=BF16, batch=3, slots=5)
    *history, length = (x[None] for x in suite.random_history(case, 12, stash=BF16))
    views, between = length[0].repeat_interleave(2), slice(1, None, 2)
    views[between] = 77
    goal = (*case.trees, case.accepted, *case.stash(BF16))
    given = (case.slot,) if op == "flush_history" else goal
    found = []
    for lengths in (length[0].clone(), views[::2]):
        state, pools = case.state.clone(), [x.clone() for x in history]
        cuda_ops.KERNELS[op](state, *pools, lengths, *given)
        found.append((state, lengths))
    (state, lengths), (mine, own) = found
    assert torch.equal(own, lengths)
    assert (views[between] == 77).all()
    host.close(op, mine, state)


def test_folds_by_blocks_of_several_key_heads(host):
    """160 key heads a row, which 103 blocks share: keys are staged again for the next."""
    case = TreeCase(
        3, Dims(4, 4, 64, 16), 5, dtype=BF16, state_dtype=BF16, layers=40, batch=40, slots=42
    )
    suite.check_deferred(host, case, capacity=5, steps=2, stash=BF16)


@pytest.mark.parametrize("types", [(BF16, BF16), (F16, F32)], ids=types_id)
def test_a_history_longer_than_is_staged_at_once_is_folded(host, types):
    case = TreeCase(
        1, DIMS[2], 20, dtype=types[0], state_dtype=types[1], shape="chain", full=True, batch=2
    )
    suite.check_deferred(host, case, capacity=60, steps=16, stash=types[1])


def test_histories_in_bfloat16_do_not_drift(host):
    suite.check_drift_in_bfloat16(host, steps=20, dims=Dims(1, 1, 128, 128))


def test_a_path_longer_than_the_history_is_left_alone(host):
    suite.check_too_long_for_history(host, TreeCase(3, DIMS[0], 12, shape="chain", layers=2))


def test_malformed_parents_move_nothing(host):
    suite.check_malformed_parents(host, TreeCase(6, DIMS[0], 12, layers=2))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_conv_equals_the_reference(host, width, dtype):
    for index, nodes in enumerate((1, 9, 40)):
        case = suite.conv_case(
            nodes, nodes=nodes, dtype=dtype, channels=(64, 1032, 19)[index], width=width
        )
        suite.check_conv(host, case, bias=index % 2 == 0, pad=(0, 8, 1)[index])
        suite.check_conv_stash(host, case, pad=(0, 8, 1)[index])
        suite.check_conv_commit(host, case, pad=(0, 8, 1)[index])


def kernel_name(library):
    """Of the kernel launched last, without its types."""
    last = library._library.host_cuda_last_kernel
    last.restype = ctypes.c_char_p
    return last().decode()


def test_conv_by_blocks_of_several_nodes(host):
    """Width 5: the general kernel, its blocks with a run of nodes each."""
    case = suite.conv_case(
        3, nodes=39, dtype=F32, channels=8, width=5, layers=1, batch=128, slots=130
    )
    suite.check_conv(host, case, bias=True, pad=0)
    suite.check_conv_stash(host, case, pad=0)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("nodes", "channels", "batch"),
    # One to 16 warps a block; a last block of columns that is not whole.
    [(1, 264, 4), (2, 8, 4), (3, 1032, 4), (17, 264, 4), (64, 40, 4), (128, 40, 4), (128, 8, 300)],
)
def test_conv_by_columns(host, host_library, nodes, channels, batch, dtype):
    case = suite.conv_case(
        nodes, nodes=nodes, dtype=dtype, channels=channels, width=4, layers=1, batch=batch,
        slots=batch + 3,
    )  # fmt: skip
    suite.check_conv(host, case, bias=nodes % 2 == 1, pad=8)
    suite.check_conv_stash(host, case, pad=8)
    assert "tree_conv_columns" in kernel_name(host_library)


def test_conv_by_columns_of_one_warp(host, host_library):
    """Batches that fill the machine: stages follow each other without a barrier."""
    for nodes in (4, 5, 21):
        case = suite.conv_case(
            nodes, nodes=nodes, dtype=BF16, channels=512, width=4, layers=1, batch=800, slots=900
        )
        suite.check_conv(host, case, bias=False, pad=0)
        suite.check_conv_stash(host, case, pad=0)
        assert "tree_conv_columns" in kernel_name(host_library)


def test_conv_where_columns_do_not_suit(host, host_library):
    """Weights of another type, and odd addresses."""
    case = suite.conv_case(4, nodes=9, dtype=BF16, channels=64, width=4, weight_dtype=F32, batch=3)
    for pad in (0, 1):
        suite.check_conv(host, case, bias=True, pad=pad)
        suite.check_conv_stash(host, case, pad=pad)
        assert "columns" not in kernel_name(host_library)
    case = suite.conv_case(4, nodes=9, dtype=BF16, channels=64, width=4)
    suite.check_conv(host, case, bias=True, pad=4)
    suite.check_conv_stash(host, case, pad=4)
    assert "columns" not in kernel_name(host_library)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_conv_of_accepted_paths_has_the_bits_of_tree_conv(host, width, dtype):
    for index, nodes in enumerate((1, 9, 40)):
        case = suite.conv_case(
            nodes, nodes=nodes, dtype=dtype, channels=(64, 1032, 19)[index], width=width, layers=3
        )
        suite.check_path_conv(host, case, bias=index % 2 == 0, pad=(0, 8, 1)[index])


@pytest.mark.parametrize(("channels", "pad"), [(64, 0), (19, 1)])
def test_conv_of_accepted_paths_of_many_rows(host, channels, pad):
    """Several items a warp."""
    case = suite.conv_case(
        2, nodes=7, dtype=BF16, channels=channels, width=4, layers=30, batch=600, slots=700
    )
    suite.check_path_conv(host, case, bias=True, pad=pad)


def test_conv_of_accepted_paths_leaves_odd_rows_alone(host):
    suite.check_path_conv_of_odd_rows(host)


def test_conv_of_a_path_has_the_same_bits_everywhere(host):
    for dtype in (F32, BF16):
        case = suite.conv_case(1, nodes=17, dtype=dtype, channels=40, width=4)
        suite.check_conv_path_bits(host, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_prefill_conv_equals_the_reference(host, width, dtype):
    for lengths in ((1,), (3, 4), (5, 0, 70, 1, 2, 33)):
        for channels, pad in ((40, 8), (19, 1)):
            suite.check_prefill_conv(
                host, width, dtype=dtype, channels=channels, width=width, lengths=lengths, pad=pad
            )


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_prefill_conv_by_columns(host, host_library, dtype):
    """Runs of 8 to 32 tokens; sequences begin and end at every place of a run."""
    for lengths in ((1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33), (600, 1, 433)):
        for channels in (264, 8 * 32 * 40) if len(lengths) == 3 else (264, 8):
            suite.check_prefill_conv(
                host, 3, dtype=dtype, channels=channels, width=4, lengths=lengths, pad=8
            )
            assert "prefill_conv_columns" in kernel_name(host_library)


@pytest.mark.parametrize("types", TYPES, ids=types_id)
@pytest.mark.parametrize("decay", DECAYS)
def test_prefill_equals_the_reference(host, types, decay):
    for dims, lengths in ((DIMS[0], (5, 0, 70, 1, 33)), (Dims(1, 2, 136, 40), (19,))):
        prefills.check_prefill(
            host, 7, dims, lengths=lengths, dtype=types[0], state_dtype=types[1], decay=decay,
            kernel=prefills.GENERAL,
        )  # fmt: skip


def test_prefill_of_many_sequences_takes_the_wide_tile(host):
    prefills.check_prefill(host, 9, Dims(4, 16, 8, 64), lengths=tuple(range(1, 18)))


@pytest.mark.parametrize("types", HALF_TYPES, ids=types_id)
@pytest.mark.parametrize("decay", DECAYS)
def test_prefill_in_chunks_equals_the_reference(host, types, decay):
    """Chunks of 64 tokens and of 32, tails, tiles of 64, 32 and 16 rows of V."""
    for dims, lengths in (
        (Dims(1, 2, 128, 64), (5, 0, 150, 1, 33)),
        (Dims(1, 2, 128, 48), (31, 7, 0)),
        (Dims(2, 2, 64, 32), (1, 63, 64, 65)),
    ):
        prefills.check_prefill(
            host, 7, dims, lengths=lengths, dtype=types[0], state_dtype=types[1], decay=decay,
            pad=8, kernel=prefills.CHUNKS,
        )  # fmt: skip


def test_prefill_in_chunks_of_many_sequences_takes_whole_heads(host):
    prefills.check_prefill(
        host, 9, Dims(1, 8, 64, 128), lengths=(*range(1, 16), 40), dtype=BF16, state_dtype=BF16,
        pad=8, kernel=prefills.CHUNKS,
    )  # fmt: skip


def test_prefill_in_chunks_of_a_long_prompt(host):
    for decay in DECAYS:
        prefills.check_prefill(
            host, 10, Dims(1, 1, 128, 16), lengths=(1000,), dtype=BF16, decay=decay, pad=8
        )


def test_prefill_takes_tensor_cores_where_it_can(host):
    prefills.check_prefill_choice(host, Dims(1, 1, 128, 16))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_prefill_does_not_spread_poison(host, dtype):
    prefills.check_prefill_poison(host, 10, DIMS[2], dtype=dtype)
    if dtype == BF16:
        prefills.check_prefill_poison(host, 11, DIMS[1], dtype=dtype, lengths=(100, 5))


@pytest.mark.parametrize("cuts", [(1,), (63,), (64,), (65, 66), (50, 100)])
def test_prefill_in_pieces_equals_the_whole(host, cuts):
    prefills.check_prefill_cuts(host, 12, Dims(1, 2, 128, 32), length=150, cuts=cuts)


@pytest.mark.parametrize("nodes", [1, 2, 17, 128])
def test_greedy_acceptance_equals_the_runtime_rule(host, nodes):
    for max_path in (None, 1, 4):
        suite.check_greedy(host, nodes, nodes, max_path=max_path)


@pytest.mark.parametrize("policy", ["reconstruct", "inputs", "deferred"])
def test_many_commits_drift_no_more_than_plain_decoding(host, policy):
    suite.check_drift(host, "random", steps=20, dims=Dims(1, 1, 64, 64), policy=policy)


def test_deferred_and_reconstruct_agree(host):
    suite.check_policies_agree(host, steps=6, dims=Dims(1, 2, 64, 64))
