"""The benchmark's commits by FlashInfer's u-cache, whose kernel a stand-in plays on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import hf_config
from engine_world import CONFIG, VOCAB, tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from kernel_bench.bench import Bench
from kernel_bench.cases import Case, Dims
from kernel_bench.floors import Rates
from kernel_bench.goals import goals as kernel_goals
from kernel_bench.peers import ucache as ucache_steps
from kernel_bench.report import describe
from kernel_bench.results import Results, Row
from serving_bench import compare, engines, points, session, ucache
from serving_bench.measure import Effort
from serving_bench.points import Arrivals, Setting, Site, Workload

from trtllm_treewy import reference
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.memory_plan import plan
from trtllm_treewy.runtime import commit_policy
from trtllm_treewy.runtime.request import Request
from trtllm_treewy.sampling_params import SamplingParams

SIZES = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12}
TINY = Workload("tiny", 12, 12, 0.0, 96)


class StandIn:
    """What FlashInfer's file says of its kernel, row by row, a recurrence in place of WY forms.

    Attributes:
        folds: states that were folded.
        wrong: what it does not do: "fold", or look at the "base".
    """

    def __init__(self, wrong=""):
        self.folds, self.wrong = 0, wrong

    def __call__(
        self, *, q, k, v, a, b, A_log, dt_bias, initial_state_source, initial_state_indices,
        k_cache, u_cache, g_cache, hist_len, cache_base, restart_hist_on_flush, output,
    ):  # fmt: skip
        width = q.shape[1]
        assert width in ucache.WIDTHS
        assert not restart_hist_on_flush
        assert all(x.stride(0) == width * x.stride(1) for x in (q, k, v, a, b))
        assert output.is_contiguous()
        assert k_cache.shape[2] == ucache.RING
        kind = g_cache.dtype
        g, beta = reference.gates(a.to(kind), b.to(kind), A_log.to(kind), dt_bias.to(kind))
        q, k = reference.normalize_qk(q.to(kind), k.to(kind))
        heads = v.shape[2]
        repeat = heads // k.shape[2]
        for row, slot in enumerate(initial_state_indices.tolist()):
            if slot < 0:
                continue
            length, base = int(hist_len[row]), int(cache_base[row])
            assert 0 <= length <= ucache.WINDOW
            assert 0 <= base < ucache.RING
            base *= self.wrong != "base"
            kept = [(base + j) % ucache.RING for j in range(length)]
            state = initial_state_source[slot].to(kind)
            if length:
                last = g_cache[slot, :, kept[-1]]
                weight = (last[:, None] - g_cache[slot][:, kept]).exp()
                keys = k_cache[slot][:, kept].to(kind).repeat_interleave(repeat, 0)
                added = torch.einsum(
                    "hj,hjv,hjk->hvk", weight, u_cache[slot][:, kept].to(kind), keys
                )
                state = last.exp()[:, None, None] * state + added
            flush = length > ucache.WINDOW - width
            so_far = torch.zeros(heads, dtype=kind)
            if length and not flush:
                so_far = g_cache[slot, :, kept[-1]].clone()
            if flush and self.wrong != "fold":
                initial_state_source[slot] = state
                self.folds += 1
            for t in range(width):
                place = (base + length + t) % ucache.RING
                so_far = so_far + g[row, t]
                key = k[row, t].repeat_interleave(repeat, 0)
                query = q[row, t].repeat_interleave(repeat, 0)
                state = g[row, t].exp()[:, None, None] * state
                u = beta[row, t][:, None] * (
                    v[row, t].to(kind) - torch.einsum("hvk,hk->hv", state, key)
                )
                state = state + u[:, :, None] * key[:, None, :]
                output[row, t] = torch.einsum("hvk,hk->hv", state, query)
                k_cache[slot, :, place], u_cache[slot, :, place] = k[row, t], u
                g_cache[slot, :, place] = so_far
        return output


@pytest.fixture
def kernel(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(ucache, "load_kernel", lambda: stand_in)
    return stand_in


# Chains of 3 and 7 drafts, a root alone, and one that a kernel's tokens are more than.
@pytest.mark.parametrize("nodes", [4, 8, 1, 6])
def test_chains_through_several_folds(kernel, nodes):
    steps = 24 if nodes > 1 else 80
    error = ucache.check(nodes, torch.device("cpu"), torch.float64, **SIZES, steps=steps)
    assert error < 1e-12
    assert kernel.folds > 2
    assert ucache.check(nodes, torch.device("cpu"), torch.bfloat16, **SIZES) < ucache.BOUND


@pytest.mark.parametrize("wrong", ["fold", "base"])
def test_a_kernel_that_is_wrong_is_found(monkeypatch, wrong):
    monkeypatch.setattr(ucache, "load_kernel", lambda: StandIn(wrong))
    ucache.check_once.cache_clear()
    assert ucache.check(4, torch.device("cpu"), torch.bfloat16, **SIZES) > ucache.BOUND
    monkeypatch.setattr(ucache, "check", lambda *args, **sizes: 0.5)
    with pytest.raises(ucache.PeerError, match="relative error 5.0e-01, 3e-02"):
        ucache.check_once(torch.device("cpu"), 4)
    monkeypatch.setattr(ucache, "check", lambda *args, **sizes: 1 / 0)
    with pytest.raises(ucache.PeerError, match="fails: ZeroDivisionError"):
        ucache.check_once(torch.device("cpu"), 8)


def test_it_is_absent(monkeypatch):
    def absent(name):
        raise ImportError("no module cutlass")

    monkeypatch.setattr(ucache.importlib, "import_module", absent)
    with pytest.raises(ucache.PeerError, match="absent: ImportError: no module cutlass"):
        ucache.load_kernel()
    module = SimpleNamespace(gated_delta_rule_mtp_ucache_flush=len, _STRIDED_QKV=False)
    monkeypatch.setattr(ucache.importlib, "import_module", {ucache.MODULE: module}.__getitem__)
    assert ucache.load_kernel() is len
    assert module._STRIDED_QKV


def test_a_tree_that_it_cannot_take(kernel):
    with pytest.raises(ValueError, match="chains of up to 8 nodes, got 15"):
        ucache.check(15, torch.device("cpu"), torch.float64, **SIZES)
    for tree in ("auto", "2,2,2", "5"):
        with pytest.raises(ValueError, match=f"expected a chain of 3 or 7, got {tree}"):
            Setting(ucache.NAME, tree).speculation({})
    found = Setting(ucache.NAME, "7").speculation({})
    assert (found.state_commit, found.deferred_history) == ("deferred", 16)
    assert (
        found.simulated_acceptance == Setting("deferred", "7").speculation({}).simulated_acceptance
    )


def build_in_place_and_fail():
    with ucache.in_place_of_deferred():
        assert commit_policy.POLICIES["deferred"] is ucache.UCachePolicy
        raise KeyError


def test_deferred_is_ours_again_afterwards():
    with pytest.raises(KeyError):
        build_in_place_and_fail()
    assert commit_policy.POLICIES["deferred"] is commit_policy.DeferredPolicy


@pytest.fixture
def ground(monkeypatch):
    monkeypatch.setattr(engines.ucache, "check_once", lambda device, nodes: 0.0)
    return engines.Ground(CONFIG, tiny_model(), 1 << 22, 4, "float32", {}, captured=False)


def texts(engine, prompts):
    """What an engine says after `prompts`, all at once, some waiting for a slot."""
    requests = [
        Request(number, tuple(prompt), SamplingParams(max_tokens=40, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def test_an_engine_says_the_same_with_it(kernel, ground, monkeypatch):
    """Greedily, by the model's own acceptance, through folds and slots that are used again."""
    plain = Setting.speculation

    def honest(self, laws):
        return replace(plain(self, laws), simulated_acceptance=None)

    monkeypatch.setattr(Setting, "speculation", honest)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (5, 9, 3, 12, 7, 4)]
    said = {}
    for policy in ("reconstruct", ucache.NAME):
        built = engines.build_site(ground, Site(TINY, 0.9, Setting(policy, "3")), (2,))
        said[policy] = texts(built.engine, prompts)
    assert isinstance(built.engine._executor.state.policy, ucache.UCachePolicy)
    assert kernel.folds > 6
    assert said[ucache.NAME] == said["reconstruct"]


def test_a_point_is_measured_with_it(kernel, ground):
    run = {"rows": [], "left_out": []}
    clock = session.Clock(Effort(1, 4, rate_seconds=1.0, seconds=None, seed=0), None)
    made = session.Session(ground, clock, 2, run, lambda: None)
    plan = {Site(TINY, 0.9, Setting(p, "3")): [Arrivals(2)] for p in ("deferred", ucache.NAME)}
    made.measure(plan)
    assert [(r["policy"], r["completed"], r["engines"]) for r in run["rows"]] == [
        ("deferred", 4, 2), (ucache.NAME, 4, 2),
    ]  # fmt: skip
    ((_, select),) = [c for c in compare.COMPARISONS if ucache.NAME in c[0]]
    (found,) = select(run["rows"])
    assert (found.rounds, found.base["policy"]) == (2, ucache.NAME)


def test_where_it_cannot_be_used_a_point_says_so(ground, monkeypatch):
    def unusable(device, nodes):
        raise ucache.PeerError("flashinfer-ucache is absent: ImportError")

    monkeypatch.setattr(engines.ucache, "check_once", unusable)
    run = {"rows": [], "left_out": []}
    clock = session.Clock(Effort(1, 1, rate_seconds=1.0, seconds=None, seed=0), None)
    session.Session(ground, clock, 1, run, lambda: None).measure(
        {Site(TINY, 0.9, Setting(ucache.NAME, "3")): [Arrivals(1)]}
    )
    assert [r["error"] for r in run["rows"]] == ["flashinfer-ucache is absent: ImportError"]


def test_its_rings_take_what_is_planned(kernel):
    """Those of Qwen3.5-35B-A3B's layers: what a history of 16 and the pseudo-values take."""
    config = ModelConfig.from_dict(
        hf_config(
            linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
            linear_value_head_dim=128, num_hidden_layers=1, layer_types=["linear_attention"],
        )
    )  # fmt: skip
    planned = plan(config, num_nodes=4, state_dtype="bfloat16", history=ucache.WINDOW)
    shape = commit_policy.StateShape(
        1, 2, 16, 32, 128, 128, 2, 4, torch.bfloat16, torch.bfloat16, torch.device("cpu")
    )
    policy = ucache.UCachePolicy(shape, torch.zeros(1, 2, 1))
    pseudo_values = planned.pseudo_values - planned.conv_inputs
    assert policy.pool_bytes / 2 == pytest.approx(planned.history_pool + pseudo_values, rel=0.01)
    assert points.PEERS == (ucache.NAME,)


# ------------------------------------------------------------------ kernels alone


class Counting:
    """A clock that only makes the calls."""

    def us(self, calls, before):
        before()
        for call in calls:
            call()
        return 240.0


@pytest.fixture
def bench(kernel, monkeypatch):
    monkeypatch.setattr(ucache, "check_once", lambda device, nodes: 0.002)
    dims = Dims(key_heads=2, value_heads=4, key_dim=8, value_dim=8, layers=2)
    return Bench(Counting(), Rates(1e12, 1e15), dims=dims, device="cpu")


def test_steps_are_timed_over_a_whole_period(bench, kernel):
    """Rings of 4, 8, 12 and 16 tokens for 4 nodes, of 4, 8 and 12 for 8: the last is folded."""
    cases = [replace(c, batch=3) for c in ucache_steps.step_cases(True)]
    assert ucache_steps.measure_steps(bench, cases) == {}
    assert [(r.case.nodes, r.us, r.error) for r in bench.rows] == [
        (4, 240.0 / 4 / 2, 0.002), (8, 240.0 / 3 / 2, 0.002),
    ]  # fmt: skip
    # Each folds once a period, of three rows and two layers: while it is checked, and timed.
    assert kernel.folds == 2 * 2 * 3 * 2
    assert "flashinfer-ucache: step, deferred" in describe(bench.rows[0])


def test_steps_whose_rings_are_not_as_expected_are_not_timed(bench, monkeypatch):
    monkeypatch.setattr(ucache.UCachePolicy, "commit", lambda *args: None)
    ucache_steps.measure_steps(bench, ucache_steps.step_cases(True)[:1])
    assert bench.rows[0].us is None
    assert "rings hold [4, 4" in bench.rows[0].note


def test_kernels_that_cannot_be_used_are_absent(bench, monkeypatch):
    def absent(device, nodes):
        raise ucache.PeerError("no cutlass")

    monkeypatch.setattr(ucache, "check_once", absent)
    cases = ucache_steps.step_cases(False)
    assert ucache_steps.measure_steps(bench, cases) == {ucache.NAME: "no cutlass"}
    assert bench.rows == []


def test_the_goal_of_steps_is_judged_at_equal_precision():
    """Pseudo-values in bfloat16, as the rings hold them."""
    case = Case("step_deferred", "bf16", "chain", 4, 64, "bf16")
    rows = [
        Row(case, 30.0, 1.0), Row(replace(case, stash="fp32"), 90.0, 1.0),
        Row(case, 40.0, 1.0, implementation=ucache.NAME),
    ]  # fmt: skip
    found = Results("X", "today", 1e12, rows=rows)
    (goal,) = [g for g in kernel_goals(found) if "u-cache" in g.name]
    assert (goal.met, goal.measured) == (True, "0.75x (4 nodes, batch 64)")
