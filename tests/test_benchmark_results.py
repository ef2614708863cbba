"""The kernel benchmark's pure parts: cases, floors, results, goals, tables, picture."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import kernels
from kernel_bench import cases, floors, goals, plot, recorded, report
from kernel_bench.cases import Case, Dims, header_tiles, parents_of
from kernel_bench.commits import commit_tiles
from kernel_bench.floors import Rates, Work, ancestor_pairs, work_of
from kernel_bench.results import Results, Row

SMALL = Dims(key_heads=1, value_heads=2, key_dim=4, value_dim=8, layers=3, conv_width=4)
BANDWIDTH = 4e12
STATE = 32 * 128 * 128  # elements, of the default layer


def verify(state, nodes, batch, us, *, topology="tree", stash="fp32", tile="auto", floor=None):
    case = Case("tree_verify", state, topology, nodes, batch, stash, tile)
    rates = Rates(BANDWIDTH, 1e15)
    floor_us = rates.bytes_us(work_of(Dims(), case)) if floor is None else floor
    return Row(case, us, floor_us)


def results(*rows, gpu=recorded.GPU, **more):
    return Results(gpu=gpu, date="2026-01-02", read_bandwidth=BANDWIDTH, rows=list(rows), **more)


def goal(found, name):
    matching = [g for g in goals.goals(found) if name in g.name]
    assert len(matching) == 1, [g.name for g in goals.goals(found)]
    return matching[0]


# ------------------------------------------------------------------ cases


def test_parents_of_chains_and_of_both_trees():
    assert parents_of("chain", 4) == [-1, 0, 1, 2]
    assert parents_of("tree", 4) == [-1, 0, 0, 0]
    fifteen, forty = parents_of("tree", 15), parents_of("tree", 40)
    assert [fifteen.count(node) for node in range(7)] == [2] * 7
    assert [forty.count(node) for node in range(13)] == [3] * 13
    for nodes in range(1, 129):
        parents = parents_of("tree", nodes)
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)


def test_cases_cover_what_is_asked_and_name_known_operations():
    from kernel_bench.results import OPERATIONS

    full = cases.verify_cases(False)
    assert {1, 16, 40, 128} <= {c.nodes for c in full}
    assert {c.batch for c in full} == {1, 8, 32, 64, 128, 256}
    for quick in (True, False):
        found = (
            cases.verify_cases(quick)
            + cases.stash_cases(quick)
            + cases.commit_cases(quick)
            + cases.step_cases(quick)
            + cases.phase_cases(quick)
            + cases.other_cases(quick)
        )
        assert len(found) == len(set(found))
        assert {c.operation for c in found} == set(OPERATIONS)
        for case in found:
            assert work_of(Dims(), case).bytes > 0
    assert set(cases.verify_cases(True)) <= {
        c for c in full if c.nodes in cases.QUICK_NODES and c.batch in cases.QUICK_BATCHES
    }


def test_tiles_are_read_from_the_header():
    names = "TREEWY_X_AUTO = 0,\n TREEWY_X_A_64 = 1, /* 64 rows */\n TREEWY_X_B = 12\n"
    header = f"typedef enum treewy_x_tile {{\n {names}}} treewy_x_tile;"
    assert header_tiles(header, "treewy_x_tile") == {"a_64": 1, "b": 12}
    assert header_tiles(header, "treewy_y_tile") == {}
    ours = header_tiles(cases.read_header(), "treewy_verify_tile")
    assert ours["rows_64"] == 1
    assert 0 not in ours.values()
    base = [Case("tree_verify", "bf16", t, 16, 1) for t in ("chain", "tree")]
    assert [c.tile for c in cases.tile_cases(base, list(ours))] == list(ours)


# ------------------------------------------------------------------ floors


def test_ancestor_pairs_count_depths():
    assert ancestor_pairs(parents_of("chain", 5)) == 10
    assert ancestor_pairs(parents_of("tree", 40)) == 3 + 2 * 9 + 3 * 27
    assert ancestor_pairs([-1]) == 0


def test_bytes_of_a_verification():
    # a node: q and k 4, v and out 2 * 8 each, both gates 2 each; two bytes
    per_node = 2 * (2 * 4 + 2 * 16 + 2 * 2)
    case = Case("tree_verify", "bf16", "chain", 3, 5)
    state, u, g = 2 * 2 * 8 * 4, 4 * 2 * 8, 4 * 2
    assert work_of(SMALL, case).bytes == 5 * (state + 3 * (per_node + u + g))
    rounded = replace(case, stash="bf16")
    assert work_of(SMALL, rounded).bytes == 5 * (state + 3 * (per_node + u / 2 + g))
    for stash in ("none", "snapshots"):
        assert work_of(SMALL, replace(case, stash=stash)).bytes == 5 * (state + 3 * per_node)
    wide = work_of(SMALL, replace(case, state="fp32", stash="none")).bytes
    assert wide == 5 * (2 * state + 3 * per_node)


def test_the_floor_of_16_nodes_is_that_of_the_notes():
    """0.6 of a bfloat16 state for activations and a float32 stash."""
    work = work_of(Dims(), Case("tree_verify", "bf16", "chain", 16, 1))
    assert work.bytes / (2 * STATE) == pytest.approx(1.63, abs=0.01)


def test_operations_of_a_verification_grow_with_depth():
    chain = work_of(SMALL, Case("tree_verify", "bf16", "chain", 40, 1)).operations
    tree = work_of(SMALL, Case("tree_verify", "bf16", "tree", 40, 1)).operations
    products = 4 * 40 * 2 * 8 * 4
    assert tree == products + 102 * 4 * (1 * 4 + 2 * 8)
    assert chain == products + 780 * 4 * (1 * 4 + 2 * 8)


def test_bytes_of_commits_count_all_layers():
    case = Case("commit", "fp32", "chain", 4, 2)
    state, u, k, g = 4 * 2 * 8 * 4, 4 * 16, 2 * 4, 4 * 2
    assert work_of(SMALL, case).bytes == 3 * 2 * (2 * state + 4 * (u + k + g))
    inputs = work_of(SMALL, replace(case, operation="commit_inputs", stash="none"))
    channels = 2 * 4 + 16
    assert inputs.bytes == 3 * 2 * (2 * state + 2 * (7 * channels + 2 * 4 * 2))
    assert inputs.operations > work_of(SMALL, case).operations
    conv = Case("conv_commit", "", "chain", 4, 2, "")
    assert work_of(SMALL, conv).bytes == 3 * 2 * 2 * 3 * channels * 2


def test_a_deferred_step_moves_less_than_a_reconstructed_one():
    for state in cases.STATES:
        step = Case("step_deferred", state, "tree", 16, 64)
        whole = work_of(Dims(), replace(step, operation="step_reconstruct")).bytes
        apart = work_of(Dims(), replace(step, operation="step_deferred_apart")).bytes
        assert work_of(Dims(), step).bytes < apart < whole
    verified = work_of(Dims(), Case("tree_verify", "fp32", "tree", 16, 64)).bytes
    committed = work_of(Dims(), Case("commit", "fp32", "chain", 4, 64)).bytes
    assert whole == pytest.approx(30 * verified + committed)


def test_work_of_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="sort"):
        work_of(Dims(), Case("sort", "", "", 1, 1))


def test_rates_turn_work_into_microseconds():
    rates, work = Rates(2e12, 5e14), Work(4e6, 1e9)
    assert (rates.bytes_us(work), rates.operations_us(work)) == (2.0, 2.0)
    assert (work + work.scaled(0.5)).bytes == 6e6


# ------------------------------------------------------------------ results


def test_results_survive_their_file(tmp_path):
    skipped = Row(Case("commit", "bf16", "chain", 4, 1), None, 1.0, note="refused")
    peer = replace(verify("bf16", 16, 64, 26.4, topology="chain"), implementation="flashinfer")
    before = results(verify("fp32", 1, 256, 9.0), skipped, replace(peer, error=1e-3))
    before.versions["torch"], before.absent["fla"] = "2.11", "no module"
    before.save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json") == before


def test_results_of_the_first_format_are_read(repository):
    old = Results.load(repository / "benchmarks" / "results" / "kernels-h200-2026-11-29.json")
    assert old.us(operation="tree_verify", state="bf16", topology="tree", nodes=16, batch=64) > 50
    assert goal(old, "64 nodes over 16").met is False


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": 3}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        Results.load(tmp_path / "x.json")


def test_find_leaves_out_peers_other_tiles_and_rows_without_a_time():
    rows = [
        verify("bf16", 16, 64, 3.0, tile="rows_64"),
        replace(verify("bf16", 16, 64, 2.0), implementation="sglang"),
        verify("bf16", 16, 64, None),
        verify("bf16", 16, 64, 5.0),
    ]
    found = results(*rows)
    assert found.us(nodes=16) == 5.0
    assert found.us(nodes=16, implementation="sglang") == 2.0
    assert found.us(nodes=16, tile="rows_64") == 3.0
    assert found.us(nodes=17) is None


# ------------------------------------------------------------------ goals


def test_nothing_measured_meets_no_goal():
    found = goals.goals(results())
    assert len(found) >= 15
    assert {g.met for g in found} == {None}
    assert {g.measured for g in found} == {"not measured"}


def test_the_floor_goal_takes_the_worst_of_small_trees_in_large_batches():
    rows = [
        verify("bf16", 16, 64, 12.0, floor=10.0),
        verify("bf16", 4, 256, 11.0, floor=10.0),
        verify("bf16", 16, 32, 90.0, floor=10.0),
        verify("bf16", 40, 64, 90.0, floor=10.0),
        verify("bf16", 16, 64, 90.0, floor=10.0, stash="none"),
    ]
    found = goal(results(*rows), "bf16 state, up to 16 nodes")
    assert (found.met, found.measured) == (True, "1.20x (tree of 16, batch 64)")
    rows.append(verify("bf16", 8, 128, 12.1, floor=10.0))
    found = goal(results(*rows), "bf16 state, up to 16 nodes")
    assert (found.met, found.measured) == (False, "1.21x (tree of 8, batch 128)")


def test_flashinfer_of_the_same_run_comes_before_the_recorded_one():
    ours = verify("bf16", 16, 64, 26.0)
    alone = goal(results(ours), "up to batch 64: time over FlashInfer")
    assert alone.met is True
    assert "another run" in alone.measured
    theirs = Row(
        Case("tree_verify", "bf16", "chain", 16, 64, "none"), 20.0, 1.0, implementation="flashinfer"
    )
    same = goal(results(ours, theirs), "up to batch 64: time over FlashInfer")
    assert (same.met, same.measured) == (False, "1.30x (batch 64, u fp32)")
    faster = verify("bf16", 16, 64, 19.0, stash="bf16")
    best = goal(results(ours, theirs, faster), "up to batch 64: time over FlashInfer")
    assert (best.met, best.measured) == (True, "0.95x (batch 64, u bf16)")


def test_recorded_times_do_not_count_on_other_gpus():
    found = results(verify("bf16", 16, 64, 26.0), gpu="another")
    assert goal(found, "up to batch 64: time over FlashInfer").met is None
    assert goal(found, "15 nodes: faster than TensorRT").met is None


def test_large_batches_may_cost_the_bytes_of_the_stash():
    stash_us = 128 * floors.stash_bytes(Dims(), "fp32", 16) / BANDWIDTH * 1e6
    name = "FlashInfer's chain and the stash"
    for more, met in ((-0.1, True), (0.1, False)):
        found = results(verify("bf16", 16, 128, 47.4 + stash_us + more))
        assert goal(found, name).met is met
    inputs = "input stash: time over FlashInfer"
    assert goal(results(verify("bf16", 16, 128, 47.3, stash="none")), inputs).met is True
    assert goal(results(verify("bf16", 16, 128, 47.5, stash="none")), inputs).met is False
    assert goal(results(verify("bf16", 16, 64, 99.0, stash="none")), inputs).met is None


def test_growth_with_the_nodes():
    rows = [verify("bf16", 16, 64, 10.0), verify("bf16", 40, 64, 15.0), verify("bf16", 64, 64, 21)]
    assert goal(results(*rows), "40 nodes over 16 nodes").met is True
    assert goal(results(*rows), "64 nodes over 16 nodes").measured == "2.10x"


def test_faster_than_tree_peers():
    rows = [verify("fp32", 15, 64, 362 / 7), verify("fp32", 40, 64, 870 / 8.9)]
    found = results(*rows)
    assert goal(found, "15 nodes: faster than TensorRT").met is True
    assert goal(found, "40 nodes: faster than TensorRT").met is False
    assert goal(found, "40 nodes: faster than SGLang").measured.startswith("34.57x (3379 us")
    single = results(verify("fp32", 4, 1, 26 / 4), verify("fp32", 40, 1, 20))
    assert goal(single, "batch 1: time over TensorRT").measured.startswith("0.27x (40 nodes")


def test_small_batches_and_shapes():
    rows = [verify("bf16", 16, 1, 4.9), verify("fp32", 16, 1, 5.1)]
    assert goal(results(*rows), "batch 1, 16 nodes").measured == "5.10 us (fp32 state)"
    rows = [verify("bf16", 16, 8, 97.5), verify("bf16", 16, 8, 100.0, topology="chain")]
    assert goal(results(*rows), "tree and chain").met is True
    rows.append(verify("bf16", 40, 8, 103.5))
    rows.append(verify("bf16", 40, 8, 100.0, topology="chain"))
    assert goal(results(*rows), "tree and chain").measured == "3.50% (bf16, 40 nodes, batch 8)"


def test_commit_goals():
    commit = [
        Row(Case("commit", state, "chain", 4, batch), us, 10.0)
        for state, batch, us in (("bf16", 64, 11.0), ("fp32", 1, 12.5))
    ]
    assert goal(results(*commit), "commit of 4 nodes").measured == "1.25x (fp32, batch 1)"
    steps = [
        Row(Case(f"step_{policy}", "bf16", "tree", 16, 64), us, 1.0)
        for policy, us in (("deferred", 70.0), ("reconstruct", 100.0))
    ]
    assert goal(results(*steps), "deferred over").met is True
    assert goal(results(steps[0]), "deferred over").met is None


# ------------------------------------------------------------------ tables and picture


def a_run():
    rows = [verify("bf16", n, b, 2.0 * n + b) for n in (4, 16, 40) for b in (1, 64)]
    rows += [verify("fp32", n, 64, 3.0 * n) for n in (4, 16, 40)]
    rows.append(verify("bf16", 16, 64, 40.0, stash="none"))
    rows.append(verify("bf16", 16, 64, 39.0, tile="rows_64"))
    for batch, us, note in ((64, 3379.0, ""), (128, None, "faults: too many elements")):
        case = Case("tree_verify", "fp32", "tree", 40, batch, "snapshots")
        rows.append(Row(case, us, 50.0, implementation="sglang", error=1e-3, note=note))
    rows.append(Row(Case("prefill", "bf16", "", 512, 8, ""), 100.0, 20.0))
    rows.append(Row(Case("commit_inputs", "bf16", "chain", 4, 64, "none"), None, 9.0, note="no"))
    absent = {"flashinfer": "ModuleNotFoundError: no flashinfer"}
    return results(*rows, absent=absent, versions={"torch": "2.11"}, driver="580")


def test_the_terminal_table(capsys):
    report.print_report(a_run())
    text = capsys.readouterr().out
    assert "absent: flashinfer: ModuleNotFoundError" in text
    assert "too many elements (batch 128)" in text
    assert "tile rows_64" in text
    assert "40.96M tokens/s" in text
    assert "not measured" in text


def test_tiles_that_beat_the_choice_are_named():
    rows = [
        verify("bf16", 16, 64, 10.0),
        verify("bf16", 16, 64, 8.0, tile="a"),
        verify("bf16", 16, 64, 9.0, tile="b"),
        verify("bf16", 4, 64, 10.0),
        verify("bf16", 4, 64, 9.9, tile="a"),
        verify("bf16", 40, 64, None),
        verify("bf16", 40, 64, 1.0, tile="a"),
    ]
    expected = "tree, 16 nodes, tile a, bf16, batch 64: 1.25x faster than auto"
    assert report.faster_tiles(rows) == [expected]


def test_markdown_is_made_of_whole_tables():
    text = report.markdown(a_run())
    assert text.startswith("NVIDIA H200, driver 580, 2026-01-02; torch 2.11. Reads 4.00 TB/s")
    assert "| tree, 16 nodes, bf16 | 33.0 | 96.0 (" in text
    assert "| sglang: tree, 40 nodes, snapshots, fp32 | 3379 | – |" in text
    assert "nothing kept" in text
    assert "prefill: 512 tokens, bf16" in text
    assert "rows_64" not in text
    assert "- flashinfer is absent" in text
    blocks = [b.split("\n") for b in text.strip().split("\n\n") if b.startswith("|")]
    assert len(blocks) >= 4
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1


def test_series_of_the_picture():
    run = a_run()
    over_nodes = plot.series_over_nodes(run, "fp32")
    assert over_nodes["trtllm-treewy"] == [(4, 12.0), (16, 48.0), (40, 120.0)]
    assert [x for x, _ in over_nodes["floor (bytes)"]] == [4, 16, 40]
    assert over_nodes["SGLang, snapshots"] == [(40, 3379.0)]
    edge = next(points for name, points in over_nodes.items() if "Edge-LLM" in name)
    assert (40.0, 870) in edge
    run.gpu = "another"
    assert not any("Edge-LLM" in name for name in plot.series_over_nodes(run, "fp32"))
    over_batches = plot.series_over_batches(run, "bf16")
    assert over_batches["trtllm-treewy"] == [(1, 33.0), (64, 96.0)]
    assert over_batches["trtllm-treewy, input stash"] == [(64, 40.0)]
    assert plot.series_over_nodes(results(), "fp32") == {}


def test_the_picture_is_drawn_without_a_gpu(tmp_path):
    pytest.importorskip("matplotlib")
    plot.plot(a_run(), tmp_path / "p.svg")
    assert "SGLang" in (tmp_path / "p.svg").read_text()
    plot.plot(results(), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def run_command(repository, *options):
    command = [sys.executable, str(repository / "benchmarks" / "kernels.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=repository)


def test_the_command_renders_a_saved_run(repository, tmp_path):
    a_run().save(tmp_path / "r.json")
    done = run_command(repository, "--from", tmp_path / "r.json", "--markdown")
    assert done.returncode == 0, done.stderr
    assert done.stdout == report.markdown(a_run())
    wrong = run_command(repository, "--from", tmp_path / "none.json")
    assert wrong.returncode == 2
    assert "none.json" in wrong.stderr
    (tmp_path / "x.json").write_text(json.dumps({"rows": []}))
    assert run_command(repository, "--from", tmp_path / "x.json").returncode == 2


@pytest.mark.parametrize("quick", [True, False])
def test_sections_of_the_command(quick):
    measured = {}

    def measure_all(title, cases, time_case):
        measured[title] = list(cases)

    bench = SimpleNamespace(measure_all=measure_all)
    arguments = ["--quick"] * quick
    parser = kernels.build_parser()
    plain = kernels.sections(bench, parser.parse_args(arguments), results())
    assert tuple(plain) == kernels.SECTIONS
    for name in set(plain) - {"peers"}:
        plain[name]()
    counts = {name: len(found) for name, found in measured.items()}
    assert set(counts) == set(plain) - {"peers"}
    tiled = kernels.sections(bench, parser.parse_args([*arguments, "--tiles"]), results())
    for name in set(tiled) - {"peers"}:
        tiled[name]()
    grown = {name for name, found in measured.items() if len(found) > counts[name]}
    assert grown == {"verify", "commit"}
    tiles = {case.tile for case in measured["verify"]}
    assert tiles == {"auto", *header_tiles(cases.read_header(), "treewy_verify_tile")}
    assert {case.tile for case in measured["commit"]} == {"auto", *commit_tiles()}


def test_the_command_ends_before_it_measures_what_it_cannot_write(repository, tmp_path):
    missing = run_command(repository, "--output", tmp_path / "no" / "r.json")
    assert missing.returncode == 2
    assert "no folder" in missing.stderr
    assert "--replays is 0" in run_command(repository, "--replays", 0).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_the_command_takes_a_gpu(repository):
    done = run_command(repository, "--quick")
    assert done.returncode == 2
    assert "this takes a GPU" in done.stderr
