"""Captured prompt steps, called instead of replayed: they leave what uncaptured ones leave.

The same over kernels is in `fused_suite.py` (by Triton's interpreter) and, on a GPU, in
`gpu/test_executor_graphs.py`.
"""

from __future__ import annotations

import pytest
import torch
from engine_world import (
    check_nothing_leaked,
    make_engine,
    make_executor,
    make_request,
    run,
    solo_texts,
    tiny_config,
    tiny_model,
)
from prompt_cases import (
    ROOM,
    SHAPES,
    captured_executor,
    check_equal,
    committed,
    play,
    random_steps,
)
from test_cuda_graphs import TOPOLOGIES, agreeable, graph_engine, random_jobs

from trtllm_treewy.batch import PrefillBatch, carve, packed_bytes, upload_into
from trtllm_treewy.llmapi import CudaGraphConfig, MTPDecodingConfig
from trtllm_treewy.runtime.build import make_drafter
from trtllm_treewy.runtime.cuda_graphs import RecordedCalls
from trtllm_treewy.runtime.drafter import MtpDynamicDrafter, NullDrafter
from trtllm_treewy.runtime.graph_capture import make_decoder
from trtllm_treewy.runtime.prompt_buffers import PromptShape, draft_shapes, fit, prompt_shapes

MOE = dict(moe=True, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16)


@pytest.fixture(scope="module")
def model():
    return agreeable(tiny_model(5))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("commit", ["reconstruct", "deferred", "snapshot"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_captured_steps_leave_what_uncaptured_ones_leave(kind, commit):
    """Chunks behind contexts, rows of slot -1, every fill; states, rows, hidden states, logits."""
    model = tiny_model(3, tiny_config(**(MOE if kind == "experts" else {})))
    steps = random_steps(7, 40, 24)
    mine = captured_executor(model, state_commit=commit, **ROOM)
    theirs = make_executor(model, state_commit=commit, **ROOM)
    ours, want = play(mine, steps, 1), play(theirs, steps, 1)
    assert mine.prompt_graphs.replays == 2 * len(steps)
    check_equal(ours, want, steps, close)
    for got, expected in zip(committed(mine), committed(theirs), strict=True):
        assert expected.any()
        close(got, expected)


def test_every_shape_is_met(model):
    """What `random_steps` covers: each shape, full and padded, rows of slot -1, contexts."""
    steps = random_steps(7, 40, 24)
    met = {}
    for lengths, slots, _, _ in steps:
        shape = fit(SHAPES, sum(lengths), len(lengths))
        met.setdefault(shape, set()).add(sum(lengths) == shape.tokens)
    assert set(met) == set(SHAPES)
    assert any(-1 in slots for _, slots, _, _ in steps)
    assert any(context for _, _, contexts, _ in steps for context in contexts)
    assert {True, False} <= set().union(*met.values())


def test_nothing_but_its_own_sequences_is_written(model):
    """Padding writes no state, no window and no row of another sequence; nor does a capture."""
    executor = make_executor(model, **ROOM)
    for slot in range(4):
        assert executor.try_allocate(slot, 60)
    pools = executor.state.state, executor.state.conv_state, executor.kv_cache.k
    for pool in pools:
        pool.normal_()
    before = [pool.clone() for pool in pools]
    graphs = executor.make_prompt_graphs(RecordedCalls(), SHAPES, drafts=True)
    graphs.capture_all()
    sink = executor.kv_cache._sink
    for pool, old in zip(pools[:2], before[:2], strict=True):
        assert torch.equal(pool, old)
    assert torch.equal(pools[2][:, :, :sink], before[2][:, :, :sink])
    executor.prefill(PrefillBatch.pack([1, 2, 3], [3], [2], [0], executor.device))
    assert graphs.replays == 1
    others = [0, 1, 3]
    for pool, old in zip(pools[:2], before[:2], strict=True):
        assert torch.equal(pool[:, others], old[:, others])
        assert not torch.equal(pool[:, 2], old[:, 2])
    rows = executor.kv_cache.host_rows(2, 0, 3)
    kept = torch.ones(sink, dtype=torch.bool)
    kept[rows] = False
    assert torch.equal(pools[2][:, :, :sink][:, :, kept], before[2][:, :, :sink][:, :, kept])


def test_hidden_states_outlive_the_next_step(model):
    """The drafter keeps them until the prompt's next chunk."""
    executor = captured_executor(model)
    assert executor.try_allocate(0, 60)
    first = executor.prefill(PrefillBatch.pack([1, 2, 3], [3], [0], [0], executor.device)).hidden
    kept = first.clone()
    executor.prefill(PrefillBatch.pack([4, 5, 6], [3], [0], [3], executor.device))
    assert torch.equal(first, kept)


def test_a_step_that_does_not_fit_runs_uncaptured(model):
    """More tokens or sequences than any shape has, and no tokens at all."""
    executor = captured_executor(model, shapes=SHAPES[:2], **ROOM)
    for slot in range(4):
        assert executor.try_allocate(slot, 60)
    device = executor.device
    for lengths, slots in (([9], [0]), ([1, 1, 1, 1], [0, 1, 2, 3])):
        batch = PrefillBatch.pack([1] * sum(lengths), lengths, slots, [0] * len(slots), device)
        assert executor.prefill(batch).hidden.shape[0] == sum(lengths)
    assert executor.prompt_graphs.replays == 0
    assert executor.prompt_graphs.prefill(PrefillBatch.pack([], [], [], [], device)) is None


def test_wrong_batches_are_refused_before_anything_is_written(model):
    executor = captured_executor(model)
    assert executor.try_allocate(0, 8)
    device = executor.device
    before = executor.state.state.clone()
    for slots, contexts, message in (
        ([1], [0], "slot 1 is not allocated"),
        ([0], [100], "is not reserved"),
        ([0, 0], [0, 0], "may occur once"),
    ):
        batch = PrefillBatch.pack([1] * len(slots), [1] * len(slots), slots, contexts, device)
        with pytest.raises(ValueError, match=message):
            executor.prefill(batch)
    with pytest.raises(ValueError, match="is not reserved"):
        executor.draft_extend(PrefillBatch.pack([1], [1], [0], [100], device), torch.zeros(1, 24))
    assert torch.equal(executor.state.state, before)
    assert executor.prompt_graphs.replays == 0


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_engines_give_the_same_tokens(model, name):
    """Beside captured decoding: under pressure, with prefixes taken over, in chunks."""
    jobs = random_jobs(5, 10)
    jobs += [(jobs[0][0] + [7, 8], 12), (jobs[3][0], 20), (jobs[0][0] + [7], 9)]
    texts = solo_texts(model, jobs)
    engine = graph_engine(
        model, TOPOLOGIES[name], num_blocks=30, num_checkpoints=4, interval=8, max_seq_len=64,
        prompts=SHAPES, budget=48,
    )  # fmt: skip
    requests = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(engine, requests)
    assert [list(r.output_token_ids) for r in requests] == [texts[i] for i in range(len(jobs))]
    check_nothing_leaked(engine)
    assert engine.stats.prefix_hits
    assert engine._executor.prompt_graphs.replays > 20


def test_a_dynamic_drafter_uses_the_captured_module(model):
    jobs = random_jobs(6, 8)
    texts = solo_texts(model, jobs)
    executor = captured_executor(model)
    drafter = MtpDynamicDrafter(executor, max_nodes=6, max_depth=3, top_k=2)
    engine = make_engine(executor, drafter)
    requests = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(engine, requests)
    assert [list(r.output_token_ids) for r in requests] == [texts[i] for i in range(len(jobs))]
    check_nothing_leaked(engine)
    prompts = executor.prompt_graphs
    assert prompts.replays > engine.stats.steps


def test_all_that_is_captured_is_told_as_one(model):
    """`make_decoder` captures prompts and decoding steps; the least of `max_num_tokens` counts."""
    executor = make_executor(model)
    speculation = MTPDecodingConfig(draft_tree_widths=(2, 2))
    drafter = make_drafter(executor, speculation)
    told = []
    graphs = CudaGraphConfig(batch_sizes=(1, 4))
    make_decoder(executor, drafter, speculation, graphs, 100, lambda *of: told.append(of))
    prompts = executor.prompt_graphs
    assert prompts.shapes == prompt_shapes(100, 4)
    assert prompts.draft_shapes
    assert told == [(n + 1, len(told)) for n in range(len(told))]
    assert len(told) == prompts.num_shapes + 2
    executor = make_executor(model)
    graphs = CudaGraphConfig(batch_sizes=(4,), max_prompt_tokens=0)
    make_decoder(executor, NullDrafter(), MTPDecodingConfig(), graphs, 100)
    assert executor.prompt_graphs is None


def test_all_numbers_of_nodes_are_told(model):
    """`auto` captures steps of each size for each batch."""
    executor = make_executor(model)
    speculation = MTPDecodingConfig(max_draft_len=3, tree_policy="auto")
    drafter = make_drafter(executor, speculation)
    told = []
    graphs = CudaGraphConfig(batch_sizes=(1, 4), max_prompt_tokens=0)
    make_decoder(executor, drafter, speculation, graphs, 100, lambda *of: told.append(of))
    assert len(told) == 2 * len(executor.graphs.sizes.nodes) > 2
    assert told == [(n + 1, len(told)) for n in range(len(told))]


def test_shapes():
    """A sequence count has tokens to share; the largest shape is the limit itself."""
    shapes = prompt_shapes(2048, 64)
    assert shapes == tuple(sorted(shapes))
    assert shapes[0] == PromptShape(64, 1)
    assert shapes[-1] == PromptShape(2048, 64)
    assert PromptShape(64, 16) not in shapes
    assert prompt_shapes(100, 3) == tuple(
        PromptShape(tokens, count) for tokens in (64, 100) for count in (1, 3)
    )
    assert prompt_shapes(20, 8) == (PromptShape(20, 1),)
    assert prompt_shapes(0, 8) == ()
    assert draft_shapes(prompt_shapes(128, 3), 3) == (PromptShape(64, 3), PromptShape(128, 3))
    assert fit(shapes, 512, 1) == PromptShape(512, 1)
    assert fit(shapes, 513, 2) == PromptShape(768, 4)
    assert fit(shapes, 30, 5) == PromptShape(256, 16)
    assert fit(shapes, 2049, 1) is None
    assert fit(shapes, 100, 65) is None
    assert fit(shapes, 0, 0) is None


def test_parts_of_an_upload_are_found_in_the_buffer():
    parts = [torch.arange(5), torch.arange(3).int(), torch.zeros(0, 4).int(), torch.ones(2, 2)]
    buffer = torch.full((packed_bytes(parts) + 32,), 7, dtype=torch.uint8)
    upload_into(parts, buffer)
    for got, want in zip(carve(buffer, parts), parts, strict=True):
        assert torch.equal(got, want)
    assert (buffer[-32:] == 7).all()
