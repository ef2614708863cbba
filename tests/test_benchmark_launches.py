"""The kernel benchmark's own launches, on the machine of `host_cuda.h`: all parameters fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import test_kernel_logic
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from kernel_bench import (
    acceptance,
    cases,
    check,
    commit_inputs,
    commits,
    convolution,
    deferred,
    prompts,
)
from kernel_bench.bench import Bench
from kernel_bench.cases import PATH, STATES, Case, Dims
from kernel_bench.clock import ALIGNMENT, Slots
from kernel_bench.floors import Rates
from kernel_bench.layer import Layer, Trees, new_pool
from kernel_bench.verification import Verification

DIMS = Dims(key_heads=1, value_heads=2, key_dim=64, value_dim=64, layers=2)
BATCH = 3

host_library = test_kernel_logic.host_library
host = test_kernel_logic.host


class Calling:
    """A clock that makes every call once."""

    def us(self, calls, before):
        before()
        for call in calls:
            call()
        return 60.0


@pytest.fixture
def bench(host):
    return Bench(Calling(), Rates(1e12, 1e15), dims=DIMS, device=host.device, slots=8, calls=2)


def measure(bench, case, time_case):
    row = bench.measure(case, time_case)
    assert row.note == ""
    assert row.floor_us > 0
    return row.us


def test_what_is_timed_is_checked_first(bench):
    assert 0 < check.check_verify(bench, True) < 1e-5


def test_a_wrong_kernel_is_not_timed(bench, monkeypatch):
    right = check.reference

    def other(layer, slot, states):
        truth = right(layer, slot, states)
        return replace(truth, u=truth.u * 1.0001)

    monkeypatch.setattr(check, "reference", other)
    with pytest.raises(RuntimeError, match="tree_verify is wrong: state bf16, tile auto"):
        check.check_verify(bench, True)


@pytest.mark.parametrize("state", STATES)
def test_verification(bench, state):
    verification = Verification()
    for stash in ("fp32", "none", *(["bf16"] if state == "bf16" else [])):
        for tile in ("auto", "rows_64"):
            case = Case("tree_verify", state, "tree", 15, BATCH, stash, tile)
            assert measure(bench, case, verification.time) == 60.0


@pytest.mark.parametrize("state", STATES)
def test_commits(bench, state):
    tiles = ["auto", commits.commit_tiles()[-1]]
    for stash in ("fp32", *(["bf16"] if state == "bf16" else [])):
        for tile in tiles:
            case = Case("commit", state, "chain", PATH, BATCH, stash, tile)
            assert measure(bench, case, commits.time_commit) == 30.0  # of two layers
    inputs = Case("commit_inputs", state, "chain", PATH, BATCH, "none")
    assert measure(bench, inputs, commit_inputs.time_commit_inputs) == 30.0


FOLDING = replace(DIMS, key_dim=128)  # whose verification folds


@pytest.mark.parametrize("state", STATES)
def test_steps_of_both_policies_over_a_whole_period(bench, state):
    bench.dims = FOLDING
    for operation in ("step_reconstruct", "step_deferred", "step_deferred_apart"):
        case = Case(operation, state, "tree", 16, BATCH)
        assert measure(bench, case, deferred.time_step) == 60.0 / 8 / 2


@pytest.mark.parametrize("state", STATES)
def test_the_phases_of_a_deferred_period(bench, state):
    bench.dims = FOLDING
    for case in cases.phase_cases(quick=True):
        if case.state == state:
            share = 1 / 2 if "append" in case.operation else 1  # of two layers
            us = measure(bench, replace(case, batch=BATCH), deferred.time_phase)
            assert us == 60.0 * share


def test_a_period_in_which_verification_folds_nothing_is_refused(bench):
    with pytest.raises(RuntimeError, match="folded histories of 0 rows, expected 3"):
        bench.measure(Case("step_deferred", "bf16", "tree", 16, BATCH), deferred.time_step)
    with pytest.raises(RuntimeError, match="folded histories of 0 rows, expected 3"):
        bench.measure(Case("deferred_fold", "bf16", "tree", 16, BATCH), deferred.time_phase)


def test_a_period_without_its_commits_is_refused(bench, monkeypatch):
    whole = deferred.step_calls
    monkeypatch.setattr(deferred, "step_calls", lambda *args: whole(*args)[:-1])
    with pytest.raises(RuntimeError, match=r"hold \[4, 4, 4\] entries after a step, expected 8"):
        bench.measure(Case("step_deferred", "bf16", "tree", 16, BATCH), deferred.time_step)


@pytest.mark.parametrize(
    ("operation", "topology", "nodes", "time_case"),
    [
        ("conv_commit", "chain", PATH, commits.time_conv_commit),
        ("tree_conv", "tree", 16, convolution.time_tree_conv),
        ("prefill_conv", "", 70, convolution.time_prefill_conv),
        ("greedy_accept", "tree", 40, acceptance.time_greedy_accept),
    ],
)
def test_other_operations(bench, operation, topology, nodes, time_case):
    assert measure(bench, Case(operation, "", topology, nodes, BATCH, ""), time_case) > 0


@pytest.mark.parametrize("state", STATES)
def test_prefill(bench, state):
    assert measure(bench, Case("prefill", state, "", 70, BATCH, ""), prompts.time_prefill) == 60.0


def test_what_the_library_refuses_is_a_row_with_the_reason(bench):
    case = Case("tree_verify", "fp32", "tree", 16, BATCH, "bf16")
    row = bench.measure(case, Verification().time)
    assert row.us is None
    assert "u_dtype" in row.note
    assert bench.rows == [row]


def test_rows_that_a_commit_leaves_behind_end_the_run(bench, monkeypatch):
    monkeypatch.setattr(Trees, "at_depth", lambda self, path: torch.full_like(self.num_nodes, 99))
    with pytest.raises(RuntimeError, match="could not be moved"):
        bench.measure(Case("commit", "bf16", "chain", PATH, BATCH), commits.time_commit)


# ------------------------------------------------------------------ buffers


def test_slots_of_a_call_differ_and_are_drawn_anew():
    slots = Slots(5, 3, 7, "cpu")
    seen = set()
    for _ in range(5):
        slots.draw()
        for row in slots.slot:
            assert len(set(row.tolist())) == 5
            assert set(row.tolist()) <= set(range(7))
            assert row.is_contiguous()
            assert row.data_ptr() % (4 * ALIGNMENT) == slots.slot[0].data_ptr() % (4 * ALIGNMENT)
        seen.add(str(slots.slot.tolist()))
    assert len(seen) > 1
    with pytest.raises(ValueError, match="batch of 8"):
        Slots(8, 1, 7, "cpu")


def test_paths_end_where_they_are_said_to():
    trees = Trees("tree", 16, 2, 8, "cpu")
    assert trees.at_depth(1).tolist() == [0, 0]
    assert trees.at_depth(4).tolist() == [13, 13]
    with pytest.raises(ValueError, match="longest has 4"):
        trees.at_depth(5)


def test_constants_are_exact_in_bfloat16():
    layer = Layer(DIMS, "chain", 2, 1, new_pool(DIMS, "bf16", 4, "cpu"))
    for constant in (layer.A_log, layer.dt_bias):
        assert constant.dtype == torch.float32
        assert torch.equal(constant, constant.bfloat16().float())
