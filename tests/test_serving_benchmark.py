"""`benchmarks/serving.py`: points, engines by memory, the loop, tables, goals, a whole run."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import hf_config
from engine_world import CONFIG, VOCAB

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from serving_bench import (
    compare,
    engines,
    goals,
    plot,
    points,
    repeats,
    report,
    session,
    split,
    warm,
)
from serving_bench.drive import drive
from serving_bench.measure import Effort, measure
from serving_bench.points import Arrivals, Point, Setting, Site, Workload

from trtllm_treewy.bench.load import PlannedRequest, plan_load
from trtllm_treewy.model.dummy import dummy_model
from trtllm_treewy.runtime.stats import EngineStats

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TINY = Workload("tiny", 12, 12, 0.0, 24)


def script():
    """benchmarks/serving.py; tests have a module of that name themselves."""
    spec = importlib.util.spec_from_file_location("serving_benchmark", BENCHMARKS / "serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site(policy="reconstruct", tree="3", fraction=0.9, workload=TINY):
    return Site(workload, fraction, Setting(policy, tree))


# ------------------------------------------------------------------ points


def test_laws_have_the_lengths_that_they_stand_for():
    for tree, length in (("3", 3.24), *points.TREE_LENGTHS.items()):
        law = points.default_law(tree)
        reached, total = 1.0, 1.0
        for probability in law:
            reached *= probability
            total += reached
        assert total == pytest.approx(length, abs=1e-4)
    # A tree that nothing is known of accepts what its chain does, and so do `auto` and chain 7.
    assert set(points.default_law("4,1")) == set(points.default_law("3"))
    assert points.default_law("auto") == points.default_law("7")
    with pytest.raises(ValueError, match="expected 1 to 4"):
        points.probability_of(4.5, 3)


def test_settings_are_what_the_engine_takes():
    chain = Setting("deferred", "3").speculation({})
    assert (chain.draft_tree_widths, chain.state_commit) == ((1, 1, 1), "deferred")
    assert chain.tree_policy is None
    auto = Setting("reconstruct", "auto").speculation({})
    assert (auto.max_nodes, auto.tree_policy) == (8, "auto")
    assert not Setting("none", "none").speculation({}).enabled
    own = Setting("snapshot", "2,2,2").speculation({"2,2,2": (0.5, 0.25)})
    assert own.simulated_acceptance == (0.5, 0.25, 0.25)
    named = [s.name for s in points.settings(("none", "snapshot"), ("3", "auto"))]
    assert named == ["none", "snapshot 3", "snapshot auto"]


@pytest.mark.parametrize("tree", ["0", "x", "2,,2", "", "2,0"])
def test_trees_that_are_none(tree):
    with pytest.raises(ValueError, match="tree '"):
        points.widths_of(tree)


def test_every_setting_gets_the_same_load():
    loads = [Point(site(tree=tree), Arrivals(4)).load(9, 1) for tree in ("3", "2,2,2")]
    assert loads[0] == loads[1]
    burst = Point(site(), Arrivals(None, 5.0, 0.25)).load(9, 1)
    assert (burst.request_rate, burst.burstiness, burst.sigma) == (5.0, 0.25, 0.0)


def test_points_that_are_chosen():
    """In the order of their first mention, an engine for all loads of a site."""
    plan = points.chosen(
        ["chat:0.65:snapshot+reconstruct:3:256", "anchor:0.9:none+reconstruct:2,2,2:1+8/s@0.25",
         "chat:0.65:none+snapshot:3+auto:64+256+4/s"]
    )  # fmt: skip
    found = [
        (site.workload.name, site.fraction, site.setting.name, *(load.name for load in loads))
        for site, loads in plan.items()
    ]
    assert found == [
        ("chat", 0.65, "snapshot 3", "256 at once", "64 at once", "4/s"),
        ("chat", 0.65, "reconstruct 3", "256 at once"),
        ("anchor", 0.9, "none", "1 at once", "8/s in bursts (0.25)"),
        ("anchor", 0.9, "reconstruct 2,2,2", "1 at once", "8/s in bursts (0.25)"),
        ("chat", 0.65, "none", "64 at once", "256 at once", "4/s"),
        ("chat", 0.65, "snapshot auto", "64 at once", "256 at once", "4/s"),
    ]
    small = points.chosen(["anchor:1:none:-:2"], 0.05)
    assert [site.workload.prompt for site in small] == [26]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("chat:0.65:snapshot:3", "WORKLOAD:FRACTION:POLICY:TREE:LOAD"),
        ("talk:0.65:snapshot:3:8", "no workload 'talk'"),
        ("chat:1.5:snapshot:3:8", "1.5 is not above 0 and at most 1"),
        ("chat:0.65:copy:3:8", "no policy 'copy'"),
        ("chat:0.65:snapshot:3:0", "0 is not above 0"),
        ("chat:0.65:snapshot:3:x", "invalid literal"),
        ("chat:0.65:snapshot:3:8/sec", "load '8/sec'"),
        ("chat:0.65:snapshot:3:8/s@-1", "-1 is not above 0"),
    ],
)
def test_points_that_are_none(item, said):
    with pytest.raises(ValueError, match=f"point '{item}'.*{said}"):
        points.chosen([item])


# ------------------------------------------------------------------ engines


@pytest.fixture(scope="module")
def ground():
    model = dummy_model(CONFIG, dtype=torch.float32, device="cpu")
    return engines.Ground(CONFIG, model, 1 << 20, 64, "float32", {}, captured=False)


def test_memory_sets_the_number_of_sequences(ground):
    found = {}
    for policy, tree in (("none", "none"), ("reconstruct", "3,3,3"), ("snapshot", "3,3,3")):
        built = engines.build_site(ground, site(policy, tree, 0.6), (2,))
        assert built.report["total_bytes"] <= 0.6 * ground.memory
        memory = engines.memory_by_kind(built, 0, 1)
        kinds = ("weights", "states", "stash", "kv_cache")
        assert sum(memory[kind] for kind in kinds) == memory["planned"]
        assert memory["used_states_and_stash"] * built.slots == memory["states"] + memory["stash"]
        # The pools are those that the plan speaks of.
        state = built.engine._executor.state
        assert state.pool_bytes + state.stash_bytes == memory["states"] + memory["stash"]
        found[policy] = built
    assert found["snapshot"].slots < found["reconstruct"].slots <= found["none"].slots
    assert found["snapshot"].bound_by_memory
    assert found["snapshot"].engine._executor.model is ground.model
    few = engines.build_site(replace(ground, most=2), site(), (2,))
    assert (few.slots, few.bound_by_memory) == (2, False)


def test_captured_steps_are_measured_by_the_same_loop(ground):
    """A step under way when a load ends must not spoil the next one on the engine."""
    built = engines.build_site(replace(ground, captured=True, most=4), site(), (2,))
    effort = Effort(per_sequence=2, least=3, rate_seconds=1.0, seconds=None, seed=0)
    for count in (4, 1, 4):
        found = measure(built, Point(site(), Arrivals(count)), effort, VOCAB)
        assert found["completed"] == max(3, 2 * count)
        assert found["output_tokens"] == 12 * found["completed"]
        assert found["graph_steps"] > 0
        assert found["sequences_peak"] == count
        assert 2.2 < found["acceptance_length"] < 4.0


def test_kernels_are_compiled_on_prompts_of_all_sizes(ground):
    long = Workload("long", 12, 12, 1.0, 300)
    built = engines.build_site(ground, site(workload=long), (2,))
    before = built.engine.stats.prefilled_tokens
    warm.warm_prompts(built, Point(site(workload=long), Arrivals(2)), VOCAB)
    stats = built.engine.stats
    sizes = warm.prompt_sizes(298)
    assert stats.prefilled_tokens - before == sum(map(sum, sizes))
    assert (stats.requests_failed, stats.waiting, stats.running) == (0, 0, 0)
    for wanted in ([16], [13], [256], [253, 256], [255] * 3, [298], [298] * 16):
        assert wanted in sizes
    assert [512] * 16 in warm.prompt_sizes(6142)


def test_kernels_that_are_compiled_late_are_counted(ground, monkeypatch):
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setattr(warm.triton_ops, "installed", lambda: True)
    monkeypatch.setitem(
        sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    )
    compiles = warm.Compiles()
    built = engines.build_site(ground, site(), (2,))
    step = built.engine.step
    calls = []

    def compiling():
        calls.append(runtime.jit_post_compile_hook(key="k", fn=None))
        return step()

    effort = Effort(per_sequence=1, least=2, rate_seconds=1.0, seconds=None, seed=0)
    built.engine.step = compiling
    found = measure(built, Point(site(), Arrivals(1)), effort, VOCAB, compiles)
    assert 0 < found["late"] < len(calls) == compiles.count  # what warms up does not count
    assert calls[0] is None  # anything else would stop Triton
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    assert warm.Compiles().count is None


def test_the_longest_sequence_fits_among_few(ground):
    long = Workload("long", 12, 12, 1.0, 600)
    weights = engines.build_site(ground, site(), (2,)).report["weights_bytes"]
    tight = replace(ground, memory=weights + 300_000)
    built = engines.build_site(tight, site("snapshot", "3,3,3", 1.0, long), (2,))
    assert built.slots * long.mean_len < long.max_len
    with pytest.raises(MemoryError, match="exceed"):
        engines.build_site(replace(ground, memory=weights), site(fraction=1.0), (2,))


# ------------------------------------------------------------------ the loop


class FakeEngine:
    """One token a request and step, a second a step; two slots; a request waits for its slot."""

    def __init__(self, slots=2, blocked=()):
        self.now, self.slots = 0.0, slots
        self.stats = EngineStats(slots_total=slots)
        self.waiting, self.running, self.blocked = [], [], set(blocked)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 0.01)

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def add(self, request):
        if len(request.prompt_token_ids) > 9:
            raise ValueError("too long")
        self.stats.requests_added += 1
        request.added_at = self.now
        self.waiting.append(request)

    def cancel(self, requests):
        for request in requests:
            request.finish_reason, request.finished_at = "cancelled", self.now

    def step(self):
        room = self.slots - len(self.running) - (round(self.now) in self.blocked)
        while self.waiting and room > 0:
            self.running.append(self.waiting.pop(0))
            room -= 1
        self.now += 1.0
        for request in self.running:
            request.append([1])
            self.stats.generated_tokens += 1
            request.first_token_at = request.first_token_at or self.now
            if request.finished:
                request.finished_at = self.now
                self.stats.requests_finished += 1
        self.running = [r for r in self.running if not r.finished]
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)
        self.stats.slots_used = len(self.running)
        self.stats.kv_blocks_used = 3 * len(self.running)


def spec(concurrency=1, rate=None):
    return replace(Point(site(), Arrivals(concurrency)).load(1, 0), request_rate=rate)


def run_on(engine, requests, *args, **settings):
    return drive(engine, requests, spec(*args), clock=engine.clock, sleep=engine.sleep, **settings)


def planned(output, at=0.0):
    return PlannedRequest([1, 2], output, at)


def test_a_closed_loop_to_its_end():
    engine = FakeEngine()
    run = run_on(engine, [planned(3)] * 3, 3)
    assert run.seconds == 6.0  # the third has to wait for a slot
    assert run.tokens == 9
    assert [round(r.ttft) for r in run.results] == [1, 1, 4]
    assert [r.tpot for r in run.results] == [1.0] * 3
    assert not run.unfinished
    # Two of the slots there are: the third waits because there are no more, not for memory.
    assert run.watch.bound_seconds == 0.0
    assert run.watch.peak_running == 2
    assert run.watch.running_seconds == 2 * 2 + 1 * 2


def test_waiting_counts_as_memory_bound_where_memory_set_the_slots():
    run = run_on(FakeEngine(), [planned(3)] * 3, 3, slots_by_memory=True)
    assert run.watch.bound_seconds == 3.0


def test_waiting_beside_a_free_slot_is_memory_bound():
    run = run_on(FakeEngine(blocked=(0,)), [planned(3)] * 2, 2)
    assert run.watch.bound_seconds == 1.0
    engine = FakeEngine()
    engine.stats.preemptions = 7  # of earlier loads
    assert run_on(engine, [planned(3)] * 2, 2).watch.bound_seconds == 0.0


def test_requests_at_their_times():
    engine = FakeEngine()
    run = run_on(engine, [planned(2, 0.0), planned(2, 1.5), planned(2, 9.0)], 1, 1.0)
    # The second is due within a step and has waited half a second when it is sent.
    assert [round(r.ttft, 1) for r in run.results] == [1.0, 1.5, 1.0]
    assert run.seconds == pytest.approx(11.0, abs=0.1)


def test_a_load_that_is_cut():
    run = run_on(FakeEngine(), [planned(3), planned(9), planned(9)], 3, seconds=5.0)
    assert (len(run.results), len(run.unfinished), run.seconds) == (1, 2, 5.0)
    assert run.tokens == 3 + 5 + 2
    late = run_on(FakeEngine(slots=1), [planned(9), planned(9)], 2, seconds=5.0)
    assert sorted(late.first_token_times()) == [1.0, 5.0]  # the other still waits


def test_a_load_that_settles_first():
    """Steps of a second, two slots: 0 to 3, 3 to 6, and so on; counted from 4 on."""
    engine = FakeEngine()
    requests = [planned(3)] * 20
    run = run_on(engine, requests, 4, seconds=5.0, settle=4.0, slots_by_memory=True)
    assert (run.began, run.start, run.seconds, run.tokens) == (0.0, 4.0, 5.0, 10)
    # The pair whose first tokens came at 4 ends at 6; the next one begins at 7 and ends at 9.
    assert len(run.results) == 4
    assert run.watch.seconds == run.watch.bound_seconds == 5.0
    assert run.before["generated_tokens"] == 8
    # Two sent at 0 have theirs at 4, those sent at 3 at 7; those sent at 6 still wait at the end.
    assert [round(r.ttft) for r in run.first_tokens() if r.arrivals] == [4, 4, 4, 4]
    assert sorted(run.first_token_times()) == [3.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    # Those that fit are waited for, where they come; at most five times as long.
    assert run_on(FakeEngine(), requests, 4, seconds=5.0, settle=0.5).start == 1.0
    slow = FakeEngine(blocked=range(3))
    assert run_on(slow, requests, 4, seconds=5.0, settle=1.5).start == 4.0
    stuck = FakeEngine(blocked=range(99))
    stuck.slots = 1  # always blocked
    assert run_on(stuck, requests, 4, seconds=5.0, settle=1.0).start == 5.0
    # Requests that end with their first token are never there at once with one.
    assert run_on(FakeEngine(), [planned(1)] * 40, 4, seconds=5.0, settle=1.0).start == 1.0
    early = FakeEngine()
    whole = run_on(early, [planned(2)], 1, settle=9.0)
    assert (whole.start, whole.tokens, len(whole.results)) == (whole.began, 2, 1)


def test_a_request_that_is_refused():
    run = run_on(FakeEngine(), [PlannedRequest([1] * 10, 1, 0.0), planned(1)], 1)
    assert [r.error for r in run.results] == ["too long", None]


# ------------------------------------------------------------------ rows


def row(policy, speed, tree="3", bound=0.0, fraction=0.9, concurrency=256, **more):
    spread = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 2.0}
    plain = {"completed": 1, "unfinished": 0, "failed": 0, "preemptions": 0, "slots": 9}
    return {
        "workload": "anchor", "fraction": fraction, "load": f"{concurrency} at once", "rate": None,
        "concurrency": concurrency, "policy": policy, "tree": tree, "errors": [],
        "output_tokens": 5, "output_tokens_per_second": speed, "memory_bound_share": bound,
        "ttft": spread, "tpot": spread, "sequences_mean": 3.0, "sequences_peak": 250,
        "acceptance_length": 3.2, "memory": {"used_states_and_stash": 1, "used_kv_cache": 1},
        **plain, **more,
    }  # fmt: skip


def test_points_are_split_by_what_snapshots_do():
    rows = [
        row("snapshot", 100, bound=0.5), row("reconstruct", 300), row("none", 90, "none"),
        row("snapshot", 100, concurrency=8, bound=0.04), row("reconstruct", 50, concurrency=8),
        row("deferred", 70, "2,2,2", concurrency=8, bound=0.9),
        row("snapshot", 0, "7", concurrency=8, error="does not fit"),
        row("reconstruct", 40, "7", concurrency=8),
    ]  # fmt: skip
    bound, free = split.split(rows)
    names = [[(r["policy"], r["tree"], r["concurrency"]) for r in part] for part in (bound, free)]
    assert names[0] == [
        ("snapshot", "3", 256), ("reconstruct", "3", 256), ("none", "none", 256),
        ("deferred", "2,2,2", 8), ("reconstruct", "7", 8),
    ]  # fmt: skip
    assert names[1] == [("snapshot", "3", 8), ("reconstruct", "3", 8)]
    # A window of a steady state is compared with windows alone.
    window = row("reconstruct", 300, settle_seconds=2.0)
    assert split.split([rows[0], window])[1] == [window]


def test_goals_are_judged_where_there_are_rows():
    judged = {g.name: g for g in goals.goals([])}
    assert all(goal.met is None for goal in judged.values())
    rows = [
        row("snapshot", 4000, bound=0.5), row("reconstruct", 8000), row("deferred", 9000),
        row("reconstruct", 8000, "auto"), row("none", 8500, "none"),
        row("reconstruct", 5000, fraction=0.65, sequences_peak=199),
    ]  # fmt: skip
    judged = {g.name: g for g in goals.goals(rows)}

    def met(part):
        (goal,) = [g for name, g in judged.items() if part in name]
        return goal.met, goal.measured

    assert met("256 at once, fraction 0.9: over vLLM's MTP-3") == (True, "2.13x")
    assert met("over vLLM's run without speculation") == (True, "1.48x")
    assert met("256 at once, fraction 0.65") == (False, "1.15x")
    assert met("sequences at once") == (False, "199")
    assert met("64 at once, fraction 0.9") == (None, "")
    assert met("memory-bound: throughput") == (True, "2.00x (1 point, least 2.00x)")
    assert met("deferred over reconstruct") == (True, "1.12x (anchor, 0.9, 256 at once)")
    assert met("auto over the better") == (False, "0.94x (anchor, 0.9, 256 at once)")
    # What vLLM measured are whole runs: a window, or a run that was cut, is not set against them.
    rows = [row("reconstruct", 9000, settle_seconds=2.0), row("deferred", 9000, unfinished=3)]
    judged = {g.name: g for g in goals.goals(rows)}
    assert met("256 at once, fraction 0.9: over vLLM's MTP-3") == (None, "")


def test_repeats_are_one_row():
    rows = [row("none", speed, "none", late=late) for speed, late in ((90, 1), (120, 0), (100, 0))]
    found = repeats.combine(rows)
    assert (found["output_tokens_per_second"], found["late"]) == (100, 0)
    assert repeats.speeds(found) == [90, 120, 100]  # in the order of the rounds
    assert found["repeats"][0] == {
        "output_tokens_per_second": 90, "acceptance_length": 3.2, "memory_bound_share": 0.0,
        "late": 1, "ttft_p50": 1.0, "ttft_p99": 2.0, "tpot_p50": 1.0,
    }  # fmt: skip
    even = repeats.combine(rows[:2])
    assert (even["output_tokens_per_second"], even["late"]) == (105, 1)
    assert repeats.combine(rows[:1]) == rows[0]
    failed = row("none", 0, "none", error="ran out of memory")
    assert repeats.combine([rows[0], failed]) == rows[0]
    assert repeats.combine([failed]) == failed
    assert "100 (90 to 120, 3)" in report.point(found)


def repeated(policy, speeds, tree="3", **more):
    return repeats.combine([row(policy, speed, tree, **more) for speed in speeds])


def test_ratios_are_taken_round_by_round():
    """The device slows down from round to round, which no ratio shall see."""
    rows = [
        repeated("reconstruct", [100, 90, 50]), repeated("deferred", [103, 90, 52]),
        repeated("reconstruct", [98, 91, 49], "auto"), repeated("none", [50, 45, 60], "none"),
        row("snapshot", 40), repeated("reconstruct", [60, 54, 30], "2,2,2"),
        repeated("deferred", [9], "3", concurrency=8), row("reconstruct", 10, concurrency=8),
    ]  # fmt: skip
    (found, alone) = compare.over(rows, "deferred", "reconstruct")
    assert (found.ratio, found.low, found.high, found.rounds) == (1.03, 1.0, 1.04, 3)
    assert (alone.ratio, alone.rounds) == (0.9, 1)
    # By chance it accepted less, in the second round alone.
    unlucky = {**rows[1], "repeats": [dict(r) for r in rows[1]["repeats"]]}
    unlucky["repeats"][1]["acceptance_length"] = 3.2 / 1.1
    (found, _) = compare.over([rows[0], unlucky, *rows[2:]], "deferred", "reconstruct")
    assert (found.ratio, found.equal) == (1.03, pytest.approx(1.04))
    (goal,) = [g for g in goals.goals([rows[0], unlucky]) if "deferred over reconstruct" in g.name]
    assert goal.measured == "1.04x (anchor, 0.9, 256 at once; rounds 1.03 to 1.10)"
    # The median of the rounds against each rival, and of those the least: here chain 3's.
    (found,) = compare.auto_over_best(rows)
    assert (found.base["tree"], found.ratio, found.low) == ("3", 0.98, 0.98)
    # Of a row that time ended in the first round, that round stands beside the others' first.
    (first, *others) = compare.over_snapshots(rows)
    assert (first.ratio, first.rounds, len(others)) == (100 / 40, 1, 1)
    (tree,) = compare.trees_over_chain(rows)
    assert (tree.row["tree"], tree.base["tree"], tree.ratio) == ("2,2,2", "3", 0.6)
    (goal,) = [g for g in goals.goals(rows) if "auto over" in g.name]
    assert goal.measured == "0.98x (anchor, 0.9, 256 at once; rounds 0.98 to 1.01)"
    (goal,) = [g for g in goals.goals(rows) if "deferred over reconstruct" in g.name]
    assert (goal.met, goal.measured) == (False, "0.90x (anchor, 0.9, 8 at once)")


def at_budget(fraction, speeds, tails, bound, **more):
    """Snapshots, which memory binds or not, and reconstruct."""
    for policy, speed, tail in zip(("snapshot", "reconstruct"), speeds, tails, strict=True):
        share = bound if policy == "snapshot" else 0.0
        times = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": tail}
        yield row(policy, speed, bound=share, fraction=fraction, ttft=times, **more)


def test_means_by_budget():
    rows = [
        *at_budget(0.6, (100, 200), (30.0, 1.0), 0.9),
        *at_budget(0.6, (100, 450), (120.0, 1.0), 0.9, workload="chat"),
        *at_budget(0.75, (100, 150), (2.0, 1.0), 0.3),
        *at_budget(0.9, (100, 99), (1.0, 1.0), 0.0),
        # At a rate everybody has the throughput of the arrivals.
        *at_budget(0.6, (100, 100), (9.0, 1.0), 0.5, load="8/s in bursts (0.25)", rate=8.0),
    ]  # fmt: skip
    found = [
        (b.fraction, b.bound, b.points, round(b.throughput, 3), round(b.least, 2))
        for b in compare.by_budget(rows)
    ]
    assert found == [
        (0.6, True, 2, 3.0, 2.0), (0.75, True, 1, 1.5, 1.5),
        (None, True, 3, round(13.5 ** (1 / 3), 3), 1.5),
        (0.9, False, 1, 0.99, 0.99), (None, False, 1, 0.99, 0.99),
    ]  # fmt: skip
    tightest = compare.by_budget(rows)[0]
    assert tightest.first_tokens == pytest.approx(60.0)
    judged = {g.name.split(":")[0] + g.target: g for g in goals.goals(rows)}
    assert judged["memory-boundat least 1.5x"].measured == "2.38x (3 points, least 1.50x)"
    assert (
        judged["memory-bound, tightest budgetat least 10x"].measured == "60.00x (2 points at 0.6)"
    )
    assert judged["headroomat least 0.99x"].met
    (first, second) = compare.bursts(rows)
    assert (first.key[2], first.shares, first.first_tokens) == ("snapshot", {0.6: 0.5}, {0.6: 9.0})
    assert (second.key[2], second.shares) == ("reconstruct", {0.6: 0.0})
    # Nothing of memory-bound points, nothing judged.
    assert not compare.by_budget([row("snapshot", 1), row("none", 1, "none")])


def test_lines_of_a_plot():
    rows = [row("snapshot", 3, concurrency=8), row("snapshot", 5), row("none", 4, "none")]
    lines = plot.lines_of(rows, "concurrency", lambda r: r["output_tokens_per_second"])
    assert lines == {"snapshot 3": [(8.0, 3.0), (256.0, 5.0)], "none": [(256.0, 4.0)]}
    window = row("snapshot", 6, settle_seconds=2.0)
    lines = plot.lines_of([window], "concurrency", lambda r: r["output_tokens_per_second"])
    assert lines == {"snapshot 3, steady": [(256.0, 6.0)]}


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw([row("snapshot", 3), row("none", 4, "none")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.draw([row("snapshot", 3, error="none")], tmp_path / "b.png")


# ------------------------------------------------------------------ the whole


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    sizes = dict(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=1,
        intermediate_size=24, linear_key_head_dim=8, linear_value_head_dim=12,
        linear_num_key_heads=1, linear_num_value_heads=2,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(hf_config(**sizes)))
    return folder


COMMON = ("--device", "cpu", "--dtype", "float32", "--scale", "0.05", "--most", "8")


def test_the_whole_on_a_cpu(tiny, tmp_path, capsys):
    output = tmp_path / "run.json"
    script().main(
        [
            str(tiny), *COMMON, "--memory", "400KiB", "--workload", "anchor", "--fraction", "0.6",
            "--policy", "none", "snapshot", "reconstruct", "--tree", "3,3,3", "auto",
            "--concurrency", "8", "--rate", "40", "--burstiness", "0.2",
            "--rate-seconds", "0.2", "--least-requests", "4", "--output", str(output),
        ]
    )  # fmt: skip
    printed = capsys.readouterr()
    run = json.loads(output.read_text())
    rows = run["rows"]
    assert len(rows) == (1 + 2 * 2) * 2
    assert all(r["completed"] and not r["failed"] and not r["unfinished"] for r in rows)
    by = {(r["policy"], r["tree"], r["load"]): r for r in rows}
    assert by["none", "none", "8 at once"]["acceptance_length"] == 1.0
    wide = by["reconstruct", "3,3,3", "8 at once"]
    assert 2.5 < wide["acceptance_length"] <= 4.0
    few = by["snapshot", "3,3,3", "8 at once"]
    assert few["slots"] < wide["slots"]
    assert few["memory_bound_share"] > split.BOUND_SHARE
    assert few["sequences_peak"] <= few["slots"]
    assert by["none", "none", "8 at once"]["memory_bound_share"] == 0.0
    # Every request of the anchor has the same lengths.
    assert wide["output_tokens"] == wide["completed"] * round(192 * 0.05)
    assert "acceptance is simulated" in printed.err
    assert "ACCEPTANCE IS SIMULATED" in printed.out
    for part in ("Memory-bound points", "Points with headroom", "40/s in bursts (0.2)", "Share of"):
        assert part in printed.out
    script().main(["--from", str(output), "--markdown", str(tmp_path / "run.md")])
    assert capsys.readouterr().out == printed.out == (tmp_path / "run.md").read_text()


def test_chosen_points_in_a_time(tiny, tmp_path, capsys, monkeypatch):
    output = tmp_path / "run.json"
    module = script()
    flags = [str(tiny), *COMMON, "--memory", "400KiB", "--output", str(output)]
    chosen = ["anchor:0.6:snapshot+reconstruct:3:8+4", "anchor:0.6:none:-:2"]
    settle = ["--settle", "0.05", "--point-seconds", "0.2", "--requests-per-sequence", "500"]
    module.main([*flags, "--point", *chosen, *settle, "--repeats", "2"])
    run = json.loads(output.read_text())
    found = [(r["policy"], r["load"]) for r in run["rows"]]
    assert found == [
        ("snapshot", "8 at once"), ("snapshot", "4 at once"),
        ("reconstruct", "8 at once"), ("reconstruct", "4 at once"),
        ("none", "2 at once"),
    ]  # fmt: skip
    assert all(r["settle_seconds"] >= 0.05 and r["seconds"] >= 0.19 for r in run["rows"])
    assert run["left_out"] == []
    assert all(len(r["repeats"]) == 2 for r in run["rows"])
    printed = capsys.readouterr().out
    for part in ("s before they were counted", "8 at once, steady", "Over `snapshot`:", "repeated"):
        assert part in printed

    # Time is up after the first point: what is left is said, and another run adds it.
    real, calls = session.measure, []

    def counted(*args):
        calls.append(real(*args))
        return calls[-1]

    monkeypatch.setattr(session, "measure", counted)
    monkeypatch.setattr(session.Clock, "has_time", lambda self, point: not calls)
    module.main([*flags, "--point", *chosen, "--seconds", "500"])
    cut = json.loads(output.read_text())
    assert [r["load"] for r in cut["rows"]] == ["8 at once"]
    assert cut["left_out"] == [
        "anchor, fraction 0.6, snapshot 3, 4 at once",
        "anchor, fraction 0.6, reconstruct 3, 8 at once",
        "anchor, fraction 0.6, reconstruct 3, 4 at once",
        "anchor, fraction 0.6, none, 2 at once",
    ]
    assert "- anchor, fraction 0.6, none, 2 at once: left out" in capsys.readouterr().out
    rest = {"about": run["about"], "rows": run["rows"][1:4]}
    assert module.merge([cut, rest])["left_out"] == cut["left_out"][3:]


def test_points_end_before_the_time_does(monkeypatch):
    effort = Effort(2, 1, rate_seconds=20.0, seconds=5.0, seed=0, settle=2.0)
    closed, rate = Point(site(), Arrivals(8)), Point(site(), Arrivals(None, 4.0))
    clock = session.Clock(effort, 140.0)
    assert [effort.cut(point) for point in (closed, rate)] == [5.0, 18.0]
    now = [124.9]
    monkeypatch.setattr(session.time, "perf_counter", lambda: now[0])
    assert clock.has_time(closed)
    assert not clock.has_time(rate)
    now[0] += 0.2
    assert not clock.has_time(closed)
    endless = session.Clock(replace(effort, seconds=None), None)
    assert endless.has_time(rate)
    assert endless.effort.cut(rate) is None
    # Of a run without a cut the first round tells how long the next one takes.
    whole = session.Clock(replace(effort, seconds=None, settle=0.0), 140.0)
    assert whole.has_time(closed)
    whole.note(closed, 20.0)
    assert not whole.has_time(closed)


def a_session(ground, repeats, memory=1 << 20):
    effort = Effort(1, 1, rate_seconds=1.0, seconds=None, seed=0)
    run = {"rows": [], "left_out": []}
    ground = replace(ground, memory=memory)
    return session.Session(ground, session.Clock(effort, None), repeats, run, lambda: None)


def test_engines_that_are_compared_stand_together(ground):
    """Of one workload and fraction, as far as the memory holds them."""
    ways = [("none", "none"), ("reconstruct", "3"), ("snapshot", "3,3,3"), ("deferred", "3")]
    plan = {site(*way, 0.6): [Arrivals(2), Arrivals(1)] for way in ways}
    plan |= {site(*way, 0.9): [Arrivals(None, 4.0)] for way in ways[:2]}

    def grouped(made):
        return [[s.setting.policy for s in group] for group in made.groups(plan)]

    assert grouped(a_session(ground, 1)) == [[policy] for policy, _ in [*ways, *ways[:2]]]
    # Two sequences each take little; at a rate as many as fit are held, which is all of it.
    assert grouped(a_session(ground, 2)) == [
        ["none", "reconstruct", "snapshot", "deferred"], ["none"], ["reconstruct"]
    ]  # fmt: skip
    plan = {site(*way, 1.0): [Arrivals(2)] for way in ways}
    sizes = [engines.plan_site(ground, s, *session.limits_of(plan[s])) for s in plan]
    assert all(planned.slots == 2 and not planned.bound_by_memory for planned in sizes)
    taken = [planned.total - planned.weights for planned in sizes]
    tight = int((sizes[0].weights + sum(taken[:3]) - 1) / session.TOGETHER)
    assert grouped(a_session(ground, 2, tight)) == [
        ["none", "reconstruct"], ["snapshot", "deferred"]
    ]  # fmt: skip


def test_kernels_of_prompts_are_compiled_once(ground, monkeypatch):
    """With the drafter's for the first that drafts; again where prompts are longer."""
    warmed = []
    monkeypatch.setattr(
        session, "warm_prompts", lambda built, point, vocab: warmed.append(point.site)
    )
    monkeypatch.setattr(session, "measure", lambda built, point, *rest: point.to_dict())
    made = a_session(replace(ground, captured=True, most=2), 1)
    longer = Workload("longer", 12, 12, 0.0, 30)
    ways = [("none", "none"), ("reconstruct", "3"), ("deferred", "3"), ("none", "none")]
    plan = {site(*way): [Arrivals(1)] for way in ways[:3]}
    plan |= {site(*way, workload=longer): [Arrivals(1)] for way in ways[2:]}
    made.measure(plan)
    assert [(s.workload.name, s.setting.policy) for s in warmed] == [
        ("tiny", "none"), ("tiny", "reconstruct"), ("longer", "deferred"),
    ]  # fmt: skip


def test_engines_take_turns(ground, monkeypatch):
    made, seen = a_session(ground, 3), []

    def measured(built, point, effort, vocab, compiles):
        seen.append((point.site.setting.policy, point.arrivals.concurrency, effort.seed))
        speed = 10.0 * built.slots + effort.seed
        return point.to_dict() | {"output_tokens_per_second": speed, "slots": built.slots}

    monkeypatch.setattr(session, "measure", measured)
    made.measure({site(p): [Arrivals(1), Arrivals(2)] for p in ("reconstruct", "deferred")})
    once = [("reconstruct", 1), ("reconstruct", 2), ("deferred", 1), ("deferred", 2)]
    assert seen == [(*what, seed) for seed in (0, 1, 2) for what in once]
    rows = made.run["rows"]
    assert [(r["policy"], r["load"]) for r in rows] == [(p, f"{n} at once") for p, n in once]
    assert all(r["output_tokens_per_second"] == 21 and r["engines"] == 2 for r in rows)
    assert [repeats.speeds(r) for r in rows] == [[20, 21, 22]] * 4
    assert made.run["left_out"] == []

    # Rounds that time did not reach are told.
    short = a_session(ground, 3)
    seen.clear()
    monkeypatch.setattr(short.clock, "has_time", lambda point: len(seen) < 4)
    short.measure({site(p): [Arrivals(1)] for p in ("reconstruct", "deferred")})
    names = [session.named(row) for row in short.run["rows"]]
    assert short.run["left_out"] == [f"{names[0]}, rounds 3 to 3", f"{names[1]}, rounds 3 to 3"]

    # A point that fails is not tried again.
    seen.clear()
    failing = a_session(ground, 3)

    def fails(built, point, *rest):
        seen.append(point)
        raise MemoryError("too much")

    monkeypatch.setattr(session, "measure", fails)
    failing.measure({site(): [Arrivals(1)]})
    assert len(seen) == 1
    assert [r["error"] for r in failing.run["rows"]] == ["ran out of memory: too much"]


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    module, file = script(), tmp_path / "run.json"
    module.save(file, {"rows": []})
    monkeypatch.setattr(module.json, "dumps", lambda *args, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.save(file, {"rows": [1]})
    assert file.read_text() == '{\n "rows": []\n}\n'


def a_run(*rows, **settings):
    plain = dict.fromkeys(("layers", "dtype", "state_dtype", "most", "seed"))
    return {
        "about": {
            "device": "X", "memory": 1 << 30, "torch": "2", "date": "today",
            "laws": {"3": [0.9]}, "settings": {"model": "m", "scale": 1.0, **plain, **settings},
        },
        "rows": list(rows),
    }  # fmt: skip


def test_runs_are_put_together():
    merge = script().merge
    again = row("snapshot", 5)
    found = merge([a_run(row("snapshot", 3), row("none", 1, "none")), a_run(again)])
    assert found["rows"] == [again | {"run": 2}, row("none", 1, "none") | {"run": 1}]
    assert "snapshot" in report.text(found)
    # A window of a steady state stands beside the whole run of the same point.
    window = row("snapshot", 4, settle_seconds=2.0)
    both = merge([a_run(row("snapshot", 3)), a_run(window)])["rows"]
    assert both == [row("snapshot", 3) | {"run": 1}, window | {"run": 2}]
    # What is compared across runs is marked, and has no rounds in common.
    runs = [a_run(repeated(policy, (4, 6, 8))) for policy in ("snapshot", "reconstruct")]
    found = merge(runs)
    assert "1.000x†" in report.text(found)
    assert "† of two runs" in report.text(found)
    assert compare.over_snapshots(found["rows"])[0].rounds == 1
    with pytest.raises(ValueError, match="dtype is a beside None"):
        merge([a_run(), a_run(dtype="a")])
    assert merge([a_run(), a_run(batch_wait_iters=0)])["rows"] == []
    with pytest.raises(ValueError, match="batch_wait_iters is 4 beside 0"):
        merge([a_run(), a_run(batch_wait_iters=4)])
    other = a_run()
    other["about"]["laws"] = {"3": [0.8]}
    with pytest.raises(ValueError, match="law of 3"):
        merge([a_run(), other])


def test_what_does_not_fit_is_said(tiny, tmp_path, capsys):
    flags = ("--workload", "anchor", "--fraction", "1", "--concurrency", "1", "--policy")
    script().main([str(tiny), *COMMON, "--memory", "60KiB", *flags, "snapshot", "--tree", "3,3,3"])
    assert "does not fit: weights (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cpu"], "no model"),
        (["m", "--device", "cpu"], "needs --memory"),
        (["m", "--tree", "2,x"], "tree '2,x'"),
        (["m", "--law", "3"], "expected TREE=P,P"),
        (["m", "--law", "3=0.5,2"], "probabilities"),
        (["m", "--fraction", "1.5"], "at most 1"),
        (["m", "--rate", "-1"], "--rate: expected above 0"),
        (["m", "--concurrency"], "neither"),
        (["m", "--settle", "-1"], "--settle: expected at least 0"),
        (["m", "--cuda-graph-max-prompt-tokens", "-1"], "expected at least 0, got -1"),
        (["m", "--point", "chat:0.9:flashinfer-ucache:3:8"], "expected --dtype and --state-dtype"),
        (["m", "--point", "chat:0.9:flashinfer-ucache:auto:8"], "expected a chain of 3 or 7"),
        (["m", "--repeats", "0"], "--repeats: expected above 0"),
        (["m", "--seconds", "0"], "--seconds: expected above 0"),
        (["m", "--point", "chat:0.9:none:-"], "WORKLOAD:FRACTION:POLICY:TREE:LOAD"),
        (["m", "--point", "chat:0.9:snapshot:x:8"], "tree 'x'"),
        (["m", "--point", "chat:0.9:none:-:8", "--tree", "3"], "without --tree"),
        (["m", "--point", "chat:0.9:none:-:8", "--quick"], "without --quick"),
        (["m", "--output", "/no/such/folder/x"], "does not exist"),
        (["--from", "/no/such/file"], "not a run"),
    ],
)
def test_flags_that_cannot_be(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        script().main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_vllm_was_measured_with():
    anchor = points.WORKLOADS["anchor"]
    load = Point(Site(anchor, 0.9, Setting("none", "none")), Arrivals(4)).load(6, 0)
    tokens = SimpleNamespace(encode=lambda text, add_special_tokens: [1] * len(text))
    requests = plan_load(load, "letters", tokens)
    assert {(len(r.prompt), r.output_len) for r in requests} == {(512, 192)}
    assert report.is_comparable(
        {"device": goals.GPU, "settings": {"model": goals.MODEL, "layers": None, "scale": 1.0}}
    )
