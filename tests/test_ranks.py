"""A model over several processes: the tokens of one device; what happens when a rank is lost."""

from __future__ import annotations

import asyncio
import json
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from checkpoints import hf_config, write_checkpoint
from serving import until

from trtllm_treewy import LLM, SamplingParams, weights
from trtllm_treewy.batch import PrefillBatch, TreeBatch
from trtllm_treewy.config import ModelConfig
from trtllm_treewy.export.checkpoint import load_rank
from trtllm_treewy.model import Qwen3_5ForCausalLM
from trtllm_treewy.model.collectives import SingleRank
from trtllm_treewy.model.dummy import dummy_rank
from trtllm_treewy.rank_config import shard_config
from trtllm_treewy.runtime import async_engine, rank_worker, rank_workers
from trtllm_treewy.runtime.errors import EngineDeadError
from trtllm_treewy.runtime.executor import ExecutorLimits
from trtllm_treewy.runtime.executor_distributed import RankGroup
from trtllm_treewy.runtime.rank_messages import places, put_tensors, take_tensors
from trtllm_treewy.runtime.rank_worker import Call, Note, make_torch_rank

PROMPTS = [[5, 6, 7, 8] * 9, [11, 3], [40, 41, 42, 43, 44], [5, 6, 7, 8] * 9 + [1, 2]]
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_seq_len": 256}
# Each kind has another tree and another way to commit: all of them go through the ranks.
KINDS = {
    "dense": (
        {"attention_bias": True},
        {"use_dynamic_tree": True, "max_total_draft_tokens": 7, "state_commit": "deferred"},
    ),
    "moe": ({"moe": True}, {"draft_tree_parents": [-1, 0, 0, 1, 1, 2], "stash": "inputs"}),
    "shipped": ({}, {"draft_tree_widths": [3, 3, 3], "acceptance_rule": "rejection"}),
}


def alive(process_id):
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def checkpoint_of(kind, folder, shipped_model):
    if kind == "shipped":
        return shipped_model
    changes = {"vocab_size": 96, **KINDS[kind][0]}
    write_checkpoint(folder, hf_config(moe=changes.pop("moe", False), **changes), seed=3)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_one_device(kind, tmp_path, shipped_model):
    """Greedy and sampled, in a batch, with prefixes taken over; half the weights on each rank."""
    model = checkpoint_of(kind, tmp_path, shipped_model)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_k=20, seed=7),
    ]
    texts, stats, weights = [], [], []
    for ranks in (1, 2):
        with LLM(
            model,
            **SETTINGS,
            speculative_config=KINDS[kind][1],
            kv_cache_config={"enable_block_reuse": True, "tokens_per_block": 8},
            tensor_parallel_size=ranks,
        ) as llm:
            runs = [llm.generate(PROMPTS, param) for param in params]
            texts.append([[o.outputs[0].token_ids for o in outputs] for outputs in runs])
            stats.append([[o.speculation for o in outputs] for outputs in runs])
            weights.append(llm.memory_report()["weights_bytes"])
            assert llm.stats.checkpoints_used > 0
            assert llm.stats.executor_faults == 0
            workers = getattr(llm._engine._executor, "process_ids", [])
    assert texts[0] == texts[1]
    assert stats[0] == stats[1], "other drafts were accepted"
    assert all(s.num_drafted for s in stats[1][0])
    assert kind != "shipped" or sum(s.num_accepted for s in stats[1][0]) > 10
    assert weights[0] / 2 < weights[1] < 0.7 * weights[0]
    assert len(workers) == 1
    assert not alive(workers[0])


@pytest.fixture
def pair(tmp_path, shipped_model):
    """An LLM over two ranks, of a model that is small."""
    model = checkpoint_of("dense", tmp_path, shipped_model)
    with LLM(
        model, **SETTINGS, speculative_config={"max_draft_len": 2}, tensor_parallel_size=2
    ) as llm:
        yield llm


def long_request(llm):
    return llm.generate_async([3, 4], SamplingParams(max_tokens=200, ignore_eos=True), True)


def test_random_weights_over_ranks_need_a_config_alone(tmp_path):
    """`load_format="dummy"` with several ranks: no weights are read, nor looked for."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(moe=True, vocab_size=96)))
    speculation = {"max_draft_len": 2}
    with LLM(
        tmp_path, **SETTINGS, speculative_config=speculation,
        load_format="dummy", tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12
    assert output.error is None


def test_random_weights_of_ranks_share_what_is_not_divided():
    class Rank(SingleRank):
        ranks = 2

        def __init__(self, rank):
            self.rank = rank

    whole = ModelConfig.from_dict(hf_config(moe=True, vocab_size=96))
    part = shard_config(whole, 2)
    one, two = (
        dict(dummy_rank(whole, part, torch.float32, torch.device("cpu"), Rank(rank))
        .named_parameters()) for rank in range(2)
    )  # fmt: skip
    undivided = Qwen3_5ForCausalLM(whole).state_dict()
    same = [name for name, x in undivided.items() if x.shape == one[name].shape]
    assert any("mlp.gate" in name for name in same)
    for name, x in one.items():
        if name in same:
            assert torch.equal(x, two[name])
        elif x.dim() > 1:
            assert not torch.equal(x, two[name])


def test_a_fault_of_all_ranks_and_the_loss_of_one(pair):
    """What fails on all alike is raised, and they go on; a rank that is killed ends everything."""
    executor = pair._engine._executor
    empty = torch.zeros(1, 1, dtype=torch.int32)
    tree = TreeBatch(empty.long(), empty - 1, empty[0] + 1, empty[0] + 5, empty[0], 0)
    with pytest.raises(ValueError, match="slot 5 is not allocated"):
        executor.verify(tree)
    first = pair.generate(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(first.outputs[0].token_ids) == 8

    (worker,) = executor.process_ids
    stream = long_request(pair)
    next(stream)
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {worker}\) was killed by SIGK"):
        stream.result()
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        pair.generate([1, 2, 3])
    assert time.monotonic() - began < 10
    # What sequences held is given back all the same.
    assert executor.pages.free_blocks == executor.limits.num_blocks


def test_a_line_that_breaks_first_names_how_the_rank_ended(pair, monkeypatch):
    """The writer of a call may meet the end of a worker before the watch does."""
    workers = pair._engine._executor._workers
    (worker,) = pair._engine._executor.process_ids
    monkeypatch.setattr(workers._watch, "closing", True)  # the watch says nothing of it
    os.kill(worker, signal.SIGKILL)

    def post_until_it_breaks():  # when all the worker's threads have ended
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            workers.post(Call(0, (), Note("verify", ())))
            time.sleep(0.01)

    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        post_until_it_breaks()


def test_a_rank_that_is_lost_while_nothing_runs(pair):
    """An engine thread without work finds out by itself, so that health turns false."""
    engine = pair._driver.make_front()
    try:
        (worker,) = pair._engine._executor.process_ids
        time.sleep(2 * async_engine.IDLE_SECONDS)
        assert engine.alive
        os.kill(worker, signal.SIGKILL)
        until(lambda: not engine.alive, 10)
        assert f"rank 1 (process {worker}) was killed by SIGKILL" in engine.failure
    finally:
        engine.close()


def test_the_interpreter_that_ranks_are_started_with(shipped_model, monkeypatch):
    """Where Python is embedded, `sys.executable` is none; multiprocessing's setting is heeded."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"")
    with pytest.raises(EngineDeadError, match="name one with multiprocessing.set_executable"):
        LLM(shipped_model, **SETTINGS, tensor_parallel_size=2)
    python = os.path.join(sys.prefix, "bin", "python3")
    multiprocessing.set_executable(python)
    assert rank_worker.command(3)[0] == python


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"], "device names 1 devices, expected one for each rank of tensor_parallel_size=2"),
        ("cpu,cpu,cpu", "device names 3 devices"),
        ("cuda:0,cuda:0", "device must be different GPUs, or the CPU for all ranks"),
        (["cuda:1", "cpu"], "or the CPU for all ranks, got cuda:1, cpu"),
        ("cuda:0,cuda:9", "device 'cuda:9' is not there: torch sees 3"),
        ("cuda:2", "needs 2 CUDA devices from cuda:2 on, torch sees 3"),
    ],
)
def test_devices_of_ranks_that_cannot_be(devices, message, shipped_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError) as error:
        LLM(shipped_model, **SETTINGS | {"device": devices}, tensor_parallel_size=2)
    assert message in str(error.value)


def test_each_rank_has_the_device_that_was_named(shipped_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    made = []

    def group(part, load, devices, **_):
        made.append([str(device) for device in devices])
        raise EngineDeadError("far enough")

    monkeypatch.setattr(weights, "RankGroup", group)
    for device in ("cuda:0,cuda:5", ["cuda:0", torch.device("cuda:5")], "cuda:4"):
        with pytest.raises(EngineDeadError, match="far enough"):
            LLM(shipped_model, **SETTINGS | {"device": device}, tensor_parallel_size=2)
    assert made == [["cuda:0", "cuda:5"], ["cuda:0", "cuda:5"], ["cuda:4", "cuda:5"]]


def test_a_rank_that_fails_alone_is_told(pair):
    """To a reader in an event loop, too; the engine thread takes nothing more."""
    executor = pair._engine._executor

    async def read():
        stream = long_request(pair)
        await anext(stream)
        with pair._driver.lock:
            call = Call(executor._number, (), Note("verify", ()))
            executor._workers._lines[0].send_bytes(pickle.dumps(call))
        with pytest.raises(EngineDeadError, match="rank 1 failed alone: TypeError: .*verify"):
            await stream.aresult()
        with pytest.raises(EngineDeadError, match="the engine has failed"):
            await long_request(pair).aresult()

    asyncio.run(read())
    until(lambda: not alive(executor.process_ids[0]))


def test_a_rank_that_hangs_ends_the_step(pair, monkeypatch):
    """Stopped, not dead: the collective's own time limit."""
    monkeypatch.setattr(rank_workers, "GRACE", 0.5)
    executor = pair._engine._executor
    (worker,) = executor.process_ids
    executor._group._backend.set_timeout(timedelta(seconds=2))
    os.kill(worker, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 0 failed alone: .*[Tt]imed out"):
        pair.generate(PROMPTS[1])
    assert time.monotonic() - began < 10
    until(lambda: not alive(worker), 30)


PROGRAM = """
import sys
from trtllm_treewy import LLM, SamplingParams
llm = LLM(
    sys.argv[1], dtype="float32", device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2
)
print(*llm._engine._executor.process_ids, flush=True)
params = SamplingParams(max_tokens=3000, ignore_eos=True)
for output in llm.generate_async([3, 4], params, True):
    print(len(output.outputs[0].token_ids), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_first(number, shipped_model):
    """A script without `if __name__ == "__main__"`: Ctrl-C in its terminal, and a kill."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(shipped_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A run in the background may ignore SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        worker = int(process.stdout.readline())
        assert process.stdout.readline().strip()
        assert alive(worker)
        os.killpg(process.pid, number)  # what a terminal does
        _, error = process.communicate(timeout=90)
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert error.rstrip().endswith("KeyboardInterrupt")
        assert "EngineDeadError" not in error
    until(lambda: not alive(worker), 30)


def test_a_rank_that_cannot_load_is_told(shipped_model):
    """What is wrong on another rank alone: here it does not find the checkpoint."""
    config = ModelConfig.from_pretrained(shipped_model)
    here, nowhere = (
        partial(make_torch_rank, partial(load_rank, x, config, "float32"))
        for x in (shipped_model, "nowhere")
    )
    part = shard_config(config, 2)
    group = RankGroup(part, nowhere, [torch.device("cpu")] * 2, make_first=here, timeout=20)
    limits = ExecutorLimits(1, 32, 1, 1, 8, 8)
    with pytest.raises(EngineDeadError, match="rank 1: FileNotFoundError: model directory 'now"):
        group.start(limits, {})
    group.close()


def test_tensors_of_a_call_travel_apart():
    """Nested in dataclasses and tuples; what was computed from them stays behind."""
    batch = PrefillBatch.pack([1, 2, 3], [2, 1], [0, 1], [4, 0], torch.device("cpu"))
    assert batch.positions.tolist() == [4, 5, 0]
    call = (batch, 5, [torch.ones(2, dtype=torch.bool), None])
    rest, tensors = take_tensors(call)
    assert [x.dtype for x in tensors] == [torch.int64] + [torch.int32] * 3 + [torch.bool]
    data = pickle.dumps(rest)
    assert len(data) < 1000
    assert [tuple(x.empty().shape) for x in places(rest)] == [(3,), (3,), (2,), (2,), (2,)]
    back = put_tensors(pickle.loads(data), [x + 1 if x.dtype != torch.bool else x for x in tensors])
    assert back[0].token_ids.tolist() == [2, 3, 4]
    assert back[0].context_lens_host == (4, 0)
    assert back[1:] == (5, [back[2][0], None])
