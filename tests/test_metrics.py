"""Metrics: acceptance from counts, what the engine keeps itself, a page that parses."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")

from trtllm_treewy.outputs import AcceptanceStats
from trtllm_treewy.runtime.metrics import Metrics


def request(number=0, prompt=(1, 2, 3)):
    return types.SimpleNamespace(
        request_id=number,
        prompt_token_ids=prompt,
        output_token_ids=[],
        stats=AcceptanceStats(),
        speculation=True,
    )


def samples(metrics):
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("told_every", [1, 3, 100])
def test_acceptance_is_counted_exactly(told_every):
    """The whole distribution, however many steps lie between two looks."""
    metrics, accepted = Metrics(), [0, 3, 1, 1, 0, 2, 3, 0, 5, 2]
    both = [request(0), request(1)]
    for step, count in enumerate(accepted):
        for one in both:
            one.stats.record(14, count)
            one.output_token_ids += [9] * (count + 1)
            if step % told_every == 0:
                metrics.advanced(one, count + 1)
    for one in both:
        metrics.finished(one, "length", 2.0, 0.1)
    found = samples(metrics)
    assert found["treewy_verify_steps_total",] == 20
    assert found["treewy_draft_tokens_total",] == 280
    for length in range(1, 7):
        below = sum(2 for count in accepted if count + 1 <= length)
        assert found["treewy_acceptance_length_bucket", f"{float(length)}"] == below
    assert found["treewy_acceptance_length_sum",] == 2 * (sum(accepted) + 10)
    for depth in range(1, 6):
        deep = sum(2 for count in accepted if count >= depth)
        assert found["treewy_accepted_tokens_total", str(depth)] == deep
    assert ("treewy_accepted_tokens_total", "6") not in found


def test_requests_that_ask_for_no_drafts_are_no_sign_of_bad_ones():
    metrics, one, plain = Metrics(), request(0), request(1)
    plain.speculation = False
    one.stats.record(14, 3)
    for _ in range(9):
        plain.stats.record(0, 0)
    for each in (one, plain):
        metrics.advanced(each, 4)
        metrics.finished(each, "length", 2.0, 0.1)
    found = samples(metrics)
    assert found["treewy_verify_steps_total",] == found["treewy_acceptance_length_count",] == 1
    assert found["treewy_acceptance_length_sum",] == 4


def test_a_request_from_arrival_to_end():
    metrics, one = Metrics(), request(prompt=(1,) * 40)
    metrics.queued(one)
    metrics.started(one, 0.3)
    one.output_token_ids = [5] * 11
    metrics.first_token(one, 0.7)
    metrics.advanced(one, 11)
    metrics.stepped(0.02, failed=False)
    metrics.stepped(0.02, failed=True)
    metrics.refused("queue_full")
    metrics.finished(one, "stop", 2.0, 0.04)
    metrics.finished(request(1), "cancelled", 0.1, None)
    found = samples(metrics)
    assert found["treewy_requests_finished_total", "stop"] == 1
    assert found["treewy_requests_finished_total", "cancelled"] == 1
    assert found["treewy_requests_refused_total", "queue_full"] == 1
    assert found["treewy_prompt_tokens_total",] == 40
    assert found["treewy_generation_tokens_total",] == 11
    assert found["treewy_queue_seconds_sum",] == 0.3
    assert found["treewy_time_to_first_token_seconds_sum",] == 0.7
    assert found["treewy_time_per_output_token_seconds_count",] == 1
    assert found["treewy_time_per_output_token_seconds_sum",] == 0.04
    assert found["treewy_request_seconds_count",] == 2
    assert found["treewy_step_seconds_count",] == 2
    assert found["treewy_failed_steps_total",] == 1


def engine(**stats):
    inner = types.SimpleNamespace(**({"stats": types.SimpleNamespace(**stats)} if stats else {}))
    return types.SimpleNamespace(num_running=2, num_waiting=5, alive=True, engine=inner)


def test_what_the_engine_keeps_is_read_when_asked():
    metrics, kept = Metrics(), engine(kv_blocks_used=7, preemptions=1, drafted_per_depth=[9, 4])
    metrics.watch(kept)
    found = samples(metrics)
    assert found["treewy_requests_running",] == 2
    assert found["treewy_requests_waiting",] == 5
    assert found["treewy_engine_alive",] == 1
    assert found["treewy_kv_blocks_used",] == 7
    assert found["treewy_preemptions_total",] == 1
    assert found["treewy_drafted_trees_total", "1"] == 9
    assert found["treewy_drafted_trees_total", "2"] == 4
    kept.engine.stats.preemptions = 3
    assert samples(metrics)["treewy_preemptions_total",] == 3


def test_what_the_engine_does_not_keep_is_left_out():
    metrics = Metrics()
    metrics.watch(engine())
    assert not any("kv_blocks" in name or "prefix" in name for name, *_ in samples(metrics))


def test_what_is_read_is_what_the_engine_calls_it():
    """Names drift apart silently otherwise: a metric would just be missing."""
    stats = pytest.importorskip("trtllm_treewy.runtime.stats")
    from trtllm_treewy.runtime import metrics as module

    known = set(stats.EngineStats.__dataclass_fields__)
    assert {name for name, *_ in module._GAUGES + module._COUNTERS} <= known
    assert "drafted_per_depth" in known
