"""Captured decoding steps on a GPU: replays give what the same functions give when called."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoints import hf_config
from engine_world import (
    VOCAB,
    GraftingDrafter,
    make_engine,
    make_executor,
    make_request,
    run,
    tiny_config,
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
from test_cuda_graphs import (
    TOPOLOGIES,
    Sizes,
    agreeable,
    check,
    graph_engine,
    random_jobs,
    sized_engine,
)

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.batch import PrefillBatch, upload_all
from trtllm_treewy.draft_tree import DraftTree, to_tree_batch
from trtllm_treewy.model.dummy import dummy_model
from trtllm_treewy.runtime import prompt_graphs
from trtllm_treewy.runtime.acceptance_law import accept_by_depth
from trtllm_treewy.runtime.cuda_graphs import CudaGraphRunner, GraphSizes, RecordedCalls
from trtllm_treewy.runtime.decode_graphs import GraphOptions
from trtllm_treewy.runtime.drafter import MtpStaticDrafter
from trtllm_treewy.runtime.tree_sampler import TreeSampler

pytestmark = pytest.mark.gpu

# Head dims that the CUDA kernels take, a mixture of experts, and two layers of each kind.
SIZES = dict(
    hidden_size=128,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=128,
)
DENSE = dict(intermediate_size=128)
EXPERTS = dict(
    moe=True,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)


def make_model(dtype, kind=DENSE):
    config = tiny_config(**SIZES, **kind)
    return agreeable(dummy_model(config, dtype=dtype, device="cuda"))


def texts_of(model, topology, jobs, runner, **settings):
    engine = graph_engine(model, topology, runner=runner, **settings)
    requests = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(engine, requests)
    assert not [r.error for r in requests if r.error]
    assert engine.stats.graph_steps
    return [list(r.output_token_ids) for r in requests], engine.stats


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_replays_give_what_calls_give(name, dtype, kind):
    """CASES 23: slots, contexts and acceptance change under every replay; the bits do not."""
    model, jobs = make_model(dtype, kind), random_jobs(3, 14)
    called, want = texts_of(model, TOPOLOGIES[name], jobs, RecordedCalls())
    replayed, stats = texts_of(model, TOPOLOGIES[name], jobs, CudaGraphRunner(torch.device("cuda")))
    assert replayed == called
    assert stats.accepted_lengths == want.accepted_lengths
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_drafts_of_replays_are_those_of_the_drafter(name, kind):
    """The bookkeeping of a step by its kernels: the same trees are verified, step by step."""
    model, jobs, topology = make_model(torch.float32, kind), random_jobs(8, 6), TOPOLOGIES[name]
    runner = CudaGraphRunner(torch.device("cuda"))
    _, stats = texts_of(model, topology, jobs, runner)
    executor = make_executor(model, max_nodes=topology.num_nodes)
    other = make_engine(executor, MtpStaticDrafter(executor, topology))
    run(other, [make_request(i, *job) for i, job in enumerate(jobs)])
    for field in ("accepted_lengths", "accepted_per_depth", "drafted_per_depth"):
        assert getattr(stats, field) == getattr(other.stats, field)
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("policy", ["reconstruct", "deferred", "snapshot"])
def test_tokens_are_those_of_plain_decoding(policy):
    """In float32, with graphs and drafts, and without either."""
    model, jobs = make_model(torch.float32), random_jobs(4, 12)
    executor = make_executor(model, max_nodes=1, scratch_rows=1)
    plain = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(make_engine(executor), plain)
    texts = {r.request_id: list(r.output_token_ids) for r in plain}
    engine = graph_engine(
        model, TOPOLOGIES["tree"], runner=CudaGraphRunner(torch.device("cuda")),
        state_commit=policy,
    )  # fmt: skip
    check(engine, texts, jobs)


def test_random_trees_replay_one_capture():
    """Trees of the host, another topology at every step, verified and committed by replays."""
    model, jobs = make_model(torch.float32), random_jobs(5, 10)
    executor = make_executor(model, max_nodes=1, scratch_rows=1)
    plain = [make_request(i, *job) for i, job in enumerate(jobs)]
    run(make_engine(executor), plain)
    texts = {r.request_id: list(r.output_token_ids) for r in plain}
    executor = make_executor(model, max_nodes=8)
    options = GraphOptions(GraphSizes((4,), (8,)), 8)
    graphs = executor.make_graphs(CudaGraphRunner(torch.device("cuda")), options)
    graphs.capture_all()
    drafter = GraftingDrafter(executor, texts, seed=2)
    drafter.engine = engine = make_engine(executor, drafter)
    check(engine, texts, jobs)
    assert engine.stats.accepted_tokens > 0


def test_a_step_waits_for_the_device_once():
    """Nothing in a launch makes the host wait; torch raises where something would."""
    model, jobs = make_model(torch.bfloat16), random_jobs(6, 4)
    engine = graph_engine(
        model, TOPOLOGIES["tree"], runner=CudaGraphRunner(torch.device("cuda")), num_blocks=200
    )
    for number, (prompt, _) in enumerate(jobs):
        engine.add(make_request(number, prompt, 60))
    while len(engine._scheduler.decoding) < 4:
        engine.step()
    engine.step()
    steps = engine.stats.steps
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats.steps == steps + 8
    assert engine.stats.executor_faults == 0


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_steps_of_changing_sizes_give_the_same_tokens_and_wait_once(name):
    """Sizes are chosen while the steps before are under way, as `auto` does."""
    model, jobs = make_model(torch.float32), random_jobs(6, 4)
    executor = make_executor(model, max_nodes=1, scratch_rows=1)
    plain = [make_request(i, prompt, 60) for i, (prompt, _) in enumerate(jobs)]
    run(make_engine(executor), plain)
    runner = CudaGraphRunner(torch.device("cuda"))
    sizes = Sizes([1, 1, 3, 1, 1, 1, 1, 1, 1, 7, 3, 7] if name == "tree" else [1, 1, 4, 2, 1, 3])
    engine = sized_engine(model, name, sizes, runner=runner, num_blocks=200)
    requests = [make_request(i, prompt, 60) for i, (prompt, _) in enumerate(jobs)]
    for request in requests:
        engine.add(request)
    while len(engine._scheduler.decoding) < 4:
        engine.step()
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_work:
        engine.step()
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    assert engine.stats.executor_faults == 0


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("commit", ["reconstruct", "deferred"])
def test_a_prompt_step_does_not_wait_for_the_device(kind, commit):
    """Prompts, what the drafter learns of them, and the first tokens, until these are asked for."""
    executor = make_executor(make_model(torch.bfloat16, kind), state_commit=commit)
    lengths, slots = [20, 7, 33], [2, 0, 3]
    tokens = torch.randint(VOCAB, (60,)).tolist()
    requests = [make_request(i, [1] * n, 4) for i, n in enumerate(lengths)]
    sampler, device = TreeSampler(VOCAB, executor.device), executor.device

    def step():
        batch = PrefillBatch.pack(tokens, lengths, slots, [0, 0, 0], device)
        output = executor.prefill(batch)
        trees = [DraftTree.root_only(5) for _ in slots]
        to_tree_batch(trees, slots, [n - 1 for n in lengths], device)
        sampler._rows(requests)
        executor.draft_extend(batch, output.hidden)
        executor.draft_enter(batch, output.hidden)
        return output.logits

    for slot, length in zip(slots, lengths, strict=True):
        assert executor.try_allocate(slot, length)
    step()  # compiles
    for slot, length in zip(slots, lengths, strict=True):
        executor.free(slot)
        assert executor.try_allocate(slot, length)
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()


@pytest.mark.parametrize("commit", ["reconstruct", "deferred"])
@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_replayed_prompts_leave_what_uncaptured_ones_leave(kind, commit):
    """Chunks behind contexts, rows of slot -1, padding; the MTP module's pass behind each."""
    model, steps = make_model(torch.float32, kind), random_steps(7, 40, 24)
    mine = captured_executor(
        model, runner=CudaGraphRunner(torch.device("cuda")), state_commit=commit, **ROOM
    )
    theirs = make_executor(model, state_commit=commit, **ROOM)
    ours, want = play(mine, steps, 1), play(theirs, steps, 1)
    assert mine.prompt_graphs.replays == 2 * len(steps)

    def close(got, expected):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-4)

    check_equal(ours, want, steps, close)
    for got, expected in zip(committed(mine), committed(theirs), strict=True):
        close(got, expected)


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_replayed_prompts_are_the_calls_that_were_captured(kind):
    """In 16 bits, where another padding may round otherwise: the same shapes, called."""
    model, steps = make_model(torch.bfloat16, kind), random_steps(8, 40, 16)
    executors = [
        captured_executor(model, runner=runner, **ROOM)
        for runner in (CudaGraphRunner(torch.device("cuda")), RecordedCalls())
    ]
    ours, want = (play(executor, steps, 1) for executor in executors)

    def close(got, expected):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)

    check_equal(ours, want, steps, close)
    for got, expected in zip(*map(committed, executors), strict=True):
        close(got, expected)


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_engines_with_replayed_prompts_give_the_same_tokens(kind):
    """Prompts and decoding share a pool and a stream; prefixes, pressure, drafts between them."""
    model, jobs = make_model(torch.float32, kind), random_jobs(5, 10)
    jobs += [(jobs[0][0] + [7, 8], 12), (jobs[3][0], 20), (jobs[0][0] + [7], 9)]
    settings = dict(num_blocks=30, num_checkpoints=4, interval=8, max_seq_len=64, budget=48)
    runner = CudaGraphRunner(torch.device("cuda"))
    want, _ = texts_of(model, TOPOLOGIES["tree"], jobs, RecordedCalls(), **settings)
    got, stats = texts_of(
        model, TOPOLOGIES["tree"], jobs, runner, prompts=SHAPES, **settings
    )  # fmt: skip
    assert got == want
    assert stats.prefix_hits


@pytest.mark.parametrize("commit", ["reconstruct", "deferred"])
def test_a_replayed_prompt_does_not_wait_for_the_device(commit):
    model = make_model(torch.bfloat16, EXPERTS)
    executor = captured_executor(
        model, runner=CudaGraphRunner(torch.device("cuda")), state_commit=commit, **ROOM
    )
    lengths, slots = [20, 1, 9], [2, 0, 3]
    for slot, length in zip(slots, lengths, strict=True):
        assert executor.try_allocate(slot, length)

    def step():
        batch = PrefillBatch.pack([3] * 30, lengths, slots, [0, 0, 0], executor.device)
        output = executor.prefill(batch)
        return executor.draft_extend(batch, output.hidden).logits

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert executor.prompt_graphs.replays == 4
    assert logits.isfinite().all()


def test_without_the_kernels_prompts_are_not_captured(monkeypatch):
    """The torch reference of the delta rule reads lengths on the host: a warning says so."""
    monkeypatch.setattr(prompt_graphs, "find_library", lambda: None)
    with pytest.warns(UserWarning, match="prompt steps are not captured"):
        executor = captured_executor(
            make_model(torch.float32), runner=CudaGraphRunner(torch.device("cuda")), **ROOM
        )
    assert executor.try_allocate(0, 5)
    batch = PrefillBatch.pack([1, 2, 3], [3], [0], [0], executor.device)
    assert executor.prefill(batch).logits.isfinite().all()
    assert executor.prompt_graphs.replays == 0


def test_parts_of_one_upload_arrive_whole_and_aligned():
    parts = [
        torch.arange(7),
        torch.arange(3, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([[True, False, True]]),
        torch.randn(2, 5),
    ]
    got = upload_all(parts, torch.device("cuda"))
    for part, there in zip(parts, got, strict=True):
        assert there.dtype == part.dtype
        assert torch.equal(there.cpu(), part)
        assert there.data_ptr() % 16 == 0


def test_the_law_of_acceptance_under_graphs():
    """Random numbers are drawn anew at every replay."""
    engine = graph_engine(
        make_model(torch.bfloat16), TOPOLOGIES["chain"],
        runner=CudaGraphRunner(torch.device("cuda")),
        options={"accept": accept_by_depth((0.8, 0.5, 0.9))}, max_seq_len=1024, num_blocks=1200,
    )  # fmt: skip
    run(engine, [make_request(i, [i + 1], 900) for i in range(4)])
    for depth, part in enumerate((0.8, 0.4, 0.36)):
        assert abs(engine.stats.accepted_per_depth[depth] / engine.stats.trees - part) < 0.05


def test_through_the_public_api(tmp_path):
    """Graphs are on by default; sampled requests share their verification."""
    config = hf_config(**SIZES, **EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = random.Random(1)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7 * (i % 3 == 2), seed=i)
        for i in range(12)
    ]
    settings = dict(
        load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16",
        max_seq_len=256, speculative_config={"draft_tree_widths": [2, 2]},
    )  # fmt: skip
    with LLM(tmp_path, **settings) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats
    assert [len(o.outputs[0].token_ids) for o in outputs] == [30] * 12
    assert not any(o.error for o in outputs)
    assert stats.graph_steps
    with LLM(tmp_path, cuda_graph_config=None, **settings) as llm:
        llm.generate(prompts[:2], params[:2])
        assert not llm.stats.graph_steps
