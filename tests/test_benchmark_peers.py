"""The kernel benchmark's peers: absent, wrong, failing and right ones, without a GPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from kernel_bench.bench import Bench
from kernel_bench.cases import Case, Dims
from kernel_bench.check import reference
from kernel_bench.floors import Rates
from kernel_bench.peers import FlashInferSnapshots, SGLang, all_peers
from kernel_bench.peers.measure import measure_peer, measure_peers, peer_error
from kernel_bench.peers.peer import Peer, gates_of
from kernel_bench.peers.sglang import load_alone

DIMS = Dims(key_heads=2, value_heads=4, key_dim=8, value_dim=8, layers=1)


class Counting:
    """A clock that only makes the calls."""

    def __init__(self):
        self.made = 0

    def us(self, calls, before):
        before()
        for call in calls:
            call()
            self.made += 1
        return 7.0


@pytest.fixture
def bench():
    return Bench(Counting(), Rates(1e12, 1e15), dims=DIMS, device="cpu", slots=12, calls=2)


class Reference(Peer):
    """A peer that computes with our own reference, off by a factor."""

    name = "reference"
    distributions = ()
    state = "fp32"
    shapes = (("chain", 3), ("tree", 7))
    quick_shapes = shapes

    def __init__(self, factor=1.0, key_major=False):
        self.factor, self.key_major = factor, key_major

    def load(self):
        pass

    def output(self, layer, slot):
        states = layer.pool[0].transpose(-1, -2) if self.key_major else layer.pool[0]
        truth = reference(layer, slot, states)
        assert truth.heads == slice(0, DIMS.value_heads)
        return truth.out.float() * self.factor

    def calls(self, layer, slots):
        return [partial(self.output, layer, slot) for slot in slots]


class Failing(Reference):
    name = "failing"

    def calls(self, layer, slots):
        raise TypeError("an argument is gone")


def cases(peer, batches=(1, 5)):
    first = [Case("tree_verify", peer.state, *shape, 1, peer.stash) for shape in peer.shapes]
    return [Case(*list(vars(c).values())[:4], batch, c.stash) for c in first for batch in batches]


@pytest.mark.parametrize("key_major", [False, True])
def test_a_right_peer_is_timed(bench, key_major):
    peer = Reference(key_major=key_major)
    pool = torch.randn(1, 12, 4, 8, 8)
    measure_peer(bench, peer, cases(peer), pool)
    assert [row.us for row in bench.rows] == [7.0] * 4
    assert all(row.error < 1e-6 and row.implementation == "reference" for row in bench.rows)
    assert bench.clock.made == 8


def test_a_peer_of_another_layout_is_found_wrong(bench):
    peer = Reference()
    peer.key_major = True  # of what it is told; it reads the states as they are not
    peer.output = lambda layer, slot: reference(layer, slot, layer.pool[0]).out
    assert peer_error(bench, peer, cases(peer)[0]) > 0.1


def test_a_wrong_peer_is_reported_and_not_timed(bench):
    peer = Reference(factor=1.1)
    measure_peer(bench, peer, cases(peer), torch.randn(1, 12, 4, 8, 8))
    assert [row.us for row in bench.rows] == [None] * 4
    assert all("output differs" in row.note for row in bench.rows)
    assert all(row.error == pytest.approx(0.1, rel=1e-3) for row in bench.rows)
    assert bench.clock.made == 0


def test_an_output_that_is_not_finite_is_wrong(bench):
    peer = Reference(factor=float("nan"))
    measure_peer(bench, peer, cases(peer)[:1], torch.randn(1, 12, 4, 8, 8))
    assert bench.rows[0].us is None
    assert bench.rows[0].error == float("inf")


def test_a_failing_peer_does_not_end_the_run(bench):
    measure_peer(bench, Failing(), cases(Failing())[:1], torch.randn(1, 12, 4, 8, 8))
    assert bench.rows[0].note == "TypeError: an argument is gone"


def test_a_shape_that_a_peer_must_not_run_is_left_out(bench):
    peer = Reference()
    peer.refusal = lambda layer: "faults" if layer.batch == 5 else ""
    measure_peer(bench, peer, cases(peer)[:2], torch.randn(1, 12, 4, 8, 8))
    assert [(row.us, row.note) for row in bench.rows] == [(7.0, ""), (None, "faults")]


def test_peers_that_are_not_installed_are_absent(bench, monkeypatch):
    for name in ("flashinfer", "sglang", "fla", "trtllm_treewy.triton_ops.snapshots"):
        monkeypatch.setitem(sys.modules, name, None)
    absent = measure_peers(bench, all_peers(), True)
    assert set(absent) == {
        "flashinfer", "flashinfer-snapshots", "sglang", "fla", "treewy-snapshots",
    }  # fmt: skip
    assert all("Error: " in reason for reason in absent.values())
    assert bench.rows == []


def test_names_of_peers_are_their_own():
    peers = all_peers()
    assert len({peer.name for peer in peers}) == len(peers)
    for peer in peers:
        for quick in (True, False):
            found = peer.cases(quick)
            assert len(set(found)) == len(found)
            assert {case.state for case in found} == {peer.state}


def test_the_32_bit_fault_is_guarded():
    def refusal(batch, nodes):
        return SGLang().refusal(SimpleNamespace(batch=batch, nodes=nodes, dims=Dims()))

    assert refusal(64, 40) == "" and refusal(256, 15) == ""  # noqa: PT018
    assert "32-bit" in refusal(128, 40)
    layer = SimpleNamespace(batch=256, nodes=16, dims=Dims())
    assert "2147483648 elements" in FlashInferSnapshots().refusal(layer)


def test_gates_are_those_of_the_reference():
    from trtllm_treewy.reference import gates

    a, b = torch.randn(2, 3, 5, 4).bfloat16()
    layer = SimpleNamespace(a=a, b=b, A_log=torch.randn(4), dt_bias=torch.randn(4))
    found = gates_of(layer)
    expected = gates(a.float(), b.float(), layer.A_log, layer.dt_bias)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


# ------------------------------------------------------------------ loading one file of a package


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose own imports fail, with one file that needs little."""
    folder = tmp_path / "sglang" / "srt" / "layers"
    folder.mkdir(parents=True)
    for place in (tmp_path / "sglang", tmp_path / "sglang" / "srt"):
        (place / "__init__.py").write_text("raise RuntimeError('the whole engine')\n")
    (folder / "near.py").write_text("VALUE = 3\n")
    (folder / "kernel.py").write_text(
        "from sglang.srt.layers.near import VALUE\n"
        "from sglang.srt.utils.common import torch_release\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)


@pytest.mark.usefixtures("package")
def test_a_file_is_loaded_without_its_package():
    module = load_alone("sglang.srt.layers", "kernel")
    assert module.VALUE == 3
    assert module.torch_release[:2] == tuple(int(n) for n in torch.__version__.split(".")[:2])
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]


@pytest.mark.usefixtures("package")
def test_a_file_that_is_not_there_is_an_import_error():
    with pytest.raises(ImportError, match=r"layers/other\.py"):
        load_alone("sglang.srt.layers", "other")
    with pytest.raises(ImportError, match="no package"):
        load_alone("sglang_is_not_here.srt", "kernel")
