"""The kernels of `snapshot`, played by Triton's interpreter, against the float64 recurrence.

Run by `tests/test_triton_ops.py` in a process of its own, as `triton_suite.py` is.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import pytest
import torch
from gdn_cases import DECAYS, Dims, path_of, same_bits
from paged_attention_cases import unwritten_is_nan
from snapshot_cases import LAYERS, make_snapshots

from trtllm_treewy.triton_ops.snapshots import Tile, choose_tile

NAN = float("nan")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# GVA 1, 2 and 4; dims that are no powers of two, and V beyond a tile.
DIMS = (Dims(2, 2, 8, 5), Dims(1, 2, 16, 12), Dims(1, 4, 7, 3))


@pytest.fixture(autouse=True)
def poisoned():
    """A kernel that reads what no kernel wrote, or leaves some of its output, gives NaN."""
    with unwritten_is_nan():
        yield


@pytest.mark.parametrize("shape", ["random", "chain", "star", "levels"])
@pytest.mark.parametrize(("dims", "decay"), list(zip(DIMS, DECAYS, strict=True)), ids=str)
def test_every_node_has_the_state_of_the_recurrence(dims, decay, shape):
    """CASES 6, 7: random slots, padded rows and nodes; a buffer larger than the trees."""
    case = make_snapshots(1, dims, shape=shape, decay=decay)
    for layer in range(LAYERS):
        case.check(layer, case.verify(layer, Tile(8, 1)), shape == "chain")


@pytest.mark.parametrize("state_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype, state_dtype):
    shape = "random" if dtype == state_dtype else "chain"
    case = make_snapshots(30, DIMS[1], shape=shape, dtype=dtype, state_dtype=state_dtype)
    out = case.verify(0, Tile(16, 1))
    assert out.dtype == dtype
    case.check(0, out, shape == "chain")


@pytest.mark.parametrize("seed", range(3))
def test_commits_copy_the_accepted_nodes(seed):
    """Rows with -1, without a slot, or with a node that is not there, keep every bit."""
    case = make_snapshots(60 + seed, DIMS[seed], state_dtype=TYPES[seed], batch=5)
    for layer in range(LAYERS):
        case.verify(layer)
    got = case.commit()
    assert same_bits(got, case.committed())
    assert not same_bits(got, case.state)


def test_a_commit_of_more_than_a_program_copies():
    case = make_snapshots(70, Dims(1, 3, 48, 40), batch=2, nodes=1)
    for layer in range(LAYERS):
        case.verify(layer)
    assert same_bits(case.commit(), case.committed())


def test_nothing_at_all():
    case = make_snapshots(5, DIMS[0], batch=1, nodes=1)
    for raw in case.raw:
        for name in ("q", "k", "v", "a", "b"):
            raw[name] = raw[name][:0]
    case.slot, case.parents, case.num_nodes, case.accepted = (
        x[:0] for x in (case.slot, case.parents, case.num_nodes, case.accepted)
    )
    assert case.verify(0).shape[0] == 0
    assert same_bits(case.commit(), case.state)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
def test_what_is_not_finite_spoils_descendants_alone(name):
    """CASES: NaN in a sibling, a padded node or a row without a slot reaches nobody else."""
    case = make_snapshots(80, DIMS[1], nodes=6)
    clean = case.verify(0)
    kept = case.rows[0].clone()
    row = next(i for i in range(4) if case.slot[i] >= 0 and case.num_nodes[i] > 3)
    case.raw[0][name][row, 2] = NAN
    padded = ~case.real
    case.raw[0][name][padded] = NAN
    got = case.verify(0)
    for b in range(4):
        for t in range(6):
            spoiled = b == row and case.real[b, t] and 2 in path_of(case.parents, b, t)
            if spoiled and (t == 2 or name != "q"):
                assert got[b, t].isnan().any()
            else:
                assert same_bits(got[b, t], clean[b, t])
                if name != "q":
                    assert same_bits(case.rows[0, b, t], kept[b, t])


def test_gates_at_their_extremes():
    """Decays beyond what exp holds, and gates that are barely open; a NaN stays one."""
    case = make_snapshots(90, DIMS[0], shape="chain", batch=2, nodes=9)
    raw = case.raw[0]
    raw["a"][:] = torch.linspace(-120, 120, 9)[None, :, None]
    raw["b"][:] = torch.linspace(120, -120, 9)[None, :, None]
    raw["dt_bias"].zero_()
    for A_log in (-20.0, 0.0, 30.0):
        raw["A_log"].fill_(A_log)
        case.check(0, case.verify(0), True)
    raw["A_log"].fill_(100.0)  # beyond float32
    assert case.verify(0).isfinite().all()
    raw["A_log"].fill_(NAN)
    assert case.verify(0)[case.real].isnan().all()


def test_a_policy_runs_the_kernels():
    """Where they serve; float64 goes to the operators, to the same states."""
    from trtllm_treewy.batch import TreeBatch
    from trtllm_treewy.runtime.commit_policy import GdnInputs, StateShape, make_policy

    case = make_snapshots(7, DIMS[1], shape="levels", batch=4, nodes=5)
    pools = []
    for dtype in (torch.float32, torch.float64):
        shape = StateShape(LAYERS, 7, 1, 2, 16, 12, 5, 9, dtype, dtype, torch.device("cpu"))
        state = case.state.to(dtype, copy=True)
        policy = make_policy("snapshot", shape, state)
        tokens = torch.zeros(4, 5, dtype=torch.int64)
        tree = TreeBatch(tokens, case.parents, case.num_nodes, case.slot, case.accepted * 0, 0)
        for layer, raw in enumerate(case.raw):
            inputs = GdnInputs(**{name: x.to(dtype) for name, x in raw.items()})
            out = policy.verify(layer, tree, inputs)
            want = case.expected(layer)[0]
            torch.testing.assert_close(
                out[case.real].double(), want[case.real], rtol=1e-4, atol=1e-4
            )
        accepted = torch.where(case.accepted < case.num_nodes, case.accepted, -1)
        policy.commit(tree, accepted, None)
        pools.append(state)
        assert policy.stash_bytes == LAYERS * 5 * 9 * 2 * 12 * 16 * dtype.itemsize
    torch.testing.assert_close(pools[0].double(), pools[1], rtol=1e-4, atol=1e-4)
    assert not torch.equal(pools[0], case.state)


def test_the_kernel_benchmark_calls_it_right():
    """As a peer of the CUDA kernels, against their float64 reference."""
    from kernel_bench.bench import Bench
    from kernel_bench.cases import Case
    from kernel_bench.cases import Dims as Sizes
    from kernel_bench.floors import Rates
    from kernel_bench.peers.measure import peer_error
    from kernel_bench.peers.snapshots import Snapshots

    sizes = Sizes(key_heads=1, value_heads=2, key_dim=8, value_dim=8, layers=1)
    bench = Bench(None, Rates(1e12, 1e15), dims=sizes, device="cpu", slots=12, calls=1)
    peer = Snapshots()
    peer.load()
    with torch.random.fork_rng():
        assert peer_error(bench, peer, Case("tree_verify", "fp32", "tree", 7, 1, peer.stash)) < 5e-3


def test_tiles_fill_the_gpu():
    """Qwen3.5-35B-A3B on an H200, at batch 1 and 64; wider heads and narrow ones."""
    assert choose_tile(32, 128, 128, 132) == Tile(4, 1)
    assert choose_tile(64 * 32, 128, 128, 132) == Tile(8, 1)
    assert choose_tile(8192, 256, 256, 132) == Tile(4, 1)
    assert choose_tile(8192, 8192, 8, 132) == Tile(128, 1)
    assert choose_tile(8192, 3, 8192, 132) == Tile(1, 8)
