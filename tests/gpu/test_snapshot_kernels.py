"""The kernels of `snapshot` on a GPU: against float64, under replay, and without waiting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gdn_cases import DECAYS, Dims, same_bits
from paged_attention_cases import unwritten_is_nan
from snapshot_cases import LAYERS, make_snapshots

from trtllm_treewy.runtime.cuda_graphs import CudaGraphRunner

pytest.importorskip("triton", reason="Triton is not installed")
from trtllm_treewy.triton_ops.snapshots import Tile

pytestmark = pytest.mark.gpu

# Qwen3.5's heads, fewer of them; K of 256; dims that are no powers of two.
DIMS = (Dims(4, 8, 128, 128), Dims(2, 2, 256, 64), Dims(1, 3, 40, 24))
TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", ["random", "chain", "star", "levels"])
@pytest.mark.parametrize("state_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_node_and_commit(dims, dtype, state_dtype, shape, decay):
    case = make_snapshots(
        3, dims, batch=9, nodes=14, shape=shape, decay=decay, dtype=dtype,
        state_dtype=state_dtype, device="cuda",
    )  # fmt: skip
    for layer in range(LAYERS):
        with unwritten_is_nan():
            out = case.verify(layer)
        case.check(layer, out, shape == "chain")
    assert same_bits(case.commit(), case.committed())


@pytest.mark.parametrize(
    "tile", [Tile(4, 1), Tile(8, 1), Tile(8, 4), Tile(16, 2), Tile(32, 4), Tile(64, 8)], ids=str
)
def test_siblings_read_what_other_threads_of_a_program_wrote(tile):
    """Many trees at once, each node beside its elder siblings; every size of a program."""
    case = make_snapshots(4, DIMS[0], batch=128, nodes=40, shape="random", device="cuda")
    for _ in range(3):
        case.kept.fill_(float("nan"))
        case.check(0, case.verify(0, tile))


def test_replays_follow_the_trees():
    """Other slots, trees, values and accepted nodes under one capture; nothing waits."""
    make = dict(batch=6, nodes=9, device="cuda", dtype=torch.bfloat16)
    case, made = make_snapshots(10, DIMS[0], **make), {}

    def step():
        for layer in range(LAYERS):
            made[layer] = case.verify(layer)
        made["pool"] = case.commit()

    runner = CudaGraphRunner(torch.device("cuda"))
    runner.record("step", step)
    for seed in range(11, 15):
        other = make_snapshots(seed, DIMS[0], **make, shape=("random", "chain")[seed % 2])
        for name in ("state", "slot", "parents", "num_nodes", "accepted"):
            getattr(case, name).copy_(getattr(other, name))
        for mine, theirs in zip(case.raw, other.raw, strict=True):
            for name, x in theirs.items():
                mine[name].copy_(x)
        case.kept.fill_(float("nan"))
        runner.replay("step")
        for layer in range(LAYERS):
            case.check(layer, made[layer])
            assert same_bits(made[layer], other.verify(layer))
        assert same_bits(made["pool"], case.committed())


def test_nothing_waits_for_the_device():
    case = make_snapshots(16, DIMS[0], device="cuda")
    case.verify(0), case.commit()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, pool = case.verify(0), case.commit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case.check(0, out)
    assert same_bits(pool, case.committed())


def test_offsets_beyond_32_bits():
    """A buffer of more than 2^31 numbers, whose last row is used alone."""
    dims, batch, nodes = Dims(16, 32, 128, 128), 300, 14
    case = make_snapshots(20, dims, batch=1, nodes=nodes, shape="chain", device="cuda")
    case.num_nodes[:], case.accepted[:] = nodes, nodes - 1
    case.parents[:] = torch.arange(-1, nodes - 1)
    want, states = case.expected(0)
    for name in ("slot", "parents", "num_nodes", "accepted"):
        x = getattr(case, name)
        setattr(case, name, x.expand(batch, *x.shape[1:]).contiguous())
    case.slot[:-1] = -1
    for name in ("q", "k", "v", "a", "b"):
        x = case.raw[0][name]
        case.raw[0][name] = x.expand(batch, *x.shape[1:])
    case.state = case.state[:1]
    case.kept = case.state.new_zeros(1, batch, nodes, *case.state.shape[2:])
    assert case.kept.numel() > 1 << 31
    out = case.verify(0)
    assert not out[:-1].any()
    torch.testing.assert_close(out[-1].double(), want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(case.kept[0, -1].double(), states[0], rtol=1e-4, atol=1e-4)
    assert same_bits(case.commit()[0, case.slot[-1]], case.kept[0, -1, -1])
