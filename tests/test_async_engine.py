"""The engine thread: streams, slow readers, aborts, limits, failures, the end."""

from __future__ import annotations

import asyncio
import threading
from random import Random

import pytest
from checkpoints import hf_config, write_checkpoint
from serving import until

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.runtime.async_engine import MAX_FAILED_STEPS, AsyncEngine
from trtllm_treewy.runtime.errors import (
    EngineDeadError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
    StepFailedError,
)

SLOTS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hf_config(), seed=3)
    settings = {"dtype": "float32", "device": "cpu", "max_batch_size": SLOTS, "max_seq_len": 128}
    tree = {"draft_tree_widths": [2, 2]}
    with LLM(directory, skip_tokenizer_init=True, speculative_config=tree, **settings) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    engine = AsyncEngine(llm._engine, num_slots=SLOTS, max_queue=8, lock=llm._driver.lock)
    yield engine
    engine.close()
    assert not llm._engine.has_work
    executor = llm._engine._executor
    assert executor.kv_cache.free_blocks == executor.limits.num_blocks


def handle(llm, prompt, max_tokens=12):
    return llm._requests.make(prompt, SamplingParams(max_tokens=max_tokens))


def solo(llm, prompt, max_tokens=12):
    output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens))
    return output.outputs[0].token_ids


async def read(stream):
    """All tokens of a stream, which must add up to its last output."""
    pieces, last = [], None
    async for last in stream:
        pieces += last.outputs[0].token_ids_diff
        assert pieces == last.outputs[0].token_ids
    assert last.finished
    return pieces


def test_streams_give_what_each_gives_alone(llm, engine):
    """More streams than slots, with lengths of all kinds."""
    prompts = [[i + 1, 7] * (1 + i % 3) for i in range(7)]
    lengths = [1, 2, 14, 5, 9, 3, 6]
    pairs = list(zip(prompts, lengths, strict=True))
    expected = [solo(llm, *pair) for pair in pairs]

    async def main():
        streams = [engine.generate_async(handle(llm, p, n)) for p, n in pairs]
        return await asyncio.gather(*map(read, streams))

    assert asyncio.run(main()) == expected
    assert engine.num_open == 0


def test_whole_results(llm, engine):
    async def main():
        streams = engine.submit([handle(llm, [5, 6]), handle(llm, [9])], streaming=False)
        outputs = [output async for output in streams[0]]
        return outputs, await streams[1].result()

    outputs, other = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == [solo(llm, [5, 6])]
    assert other.outputs[0].token_ids == solo(llm, [9])


def test_slow_readers_lose_nothing_and_pile_up_nothing(llm, engine):
    expected = solo(llm, [3, 1], 20)

    async def main():
        stream = engine.generate_async(handle(llm, [3, 1], 20))
        first = await anext(stream)
        await asyncio.to_thread(until, lambda: engine.num_open == 0)
        rest = [output async for output in stream]
        return first, rest

    first, rest = asyncio.run(main())
    assert len(rest) == 1
    pieces = first.outputs[0].token_ids_diff + rest[0].outputs[0].token_ids_diff
    assert pieces == rest[0].outputs[0].token_ids == expected


def test_a_reader_that_catches_up_is_told_without_a_new_step(llm, engine, monkeypatch):
    """What came while an output lay unread is published when it is fetched."""
    gate, steps, step = threading.Semaphore(3), [], llm._engine.step

    def gated():
        if not gate.acquire(timeout=0.05):
            return
        step()
        steps.append(None)

    monkeypatch.setattr(llm._engine, "step", gated)

    async def main():
        stream = engine.generate_async(handle(llm, [3, 1], 40))
        await asyncio.to_thread(until, lambda: len(steps) == 3)
        first = await anext(stream)
        second = await asyncio.wait_for(anext(stream), 10)
        stream.abort()
        return first.outputs[0].token_ids, second.outputs[0].token_ids

    first, second = asyncio.run(main())
    assert second[: len(first)] == first
    assert len(second) > len(first)


@pytest.mark.parametrize("how", ["abort", "async with", "cancelled task", "at once"])
def test_leaving_early_frees_the_slot(how, llm, engine):
    async def main():
        stream = engine.generate_async(handle(llm, [1, 2, 3], 100))
        if how == "at once":
            stream.abort()
            return await anext(stream)
        await anext(stream)
        if how == "abort":
            stream.abort()
            return [output async for output in stream][-1]
        if how == "async with":
            async with stream:
                pass
        else:
            task = asyncio.ensure_future(stream.result())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(until, lambda: engine.num_open == 0)
        return None

    last = asyncio.run(main())
    if last is not None:
        assert last.outputs[0].finish_reason == "cancelled"
    until(lambda: not llm._engine.has_work)
    assert len(solo(llm, [1, 2])) == 12


def test_streams_of_a_closed_event_loop_are_aborted(llm, engine):
    async def main():
        engine.generate_async(handle(llm, [1, 2, 3], 100))

    asyncio.run(main())
    until(lambda: engine.num_open == 0)


def test_a_full_queue_refuses_all_or_none(llm, engine):
    async def main():
        handles = [handle(llm, [1], 60) for _ in range(SLOTS + 8)]
        with pytest.raises(QueueFullError, match=r"0 requests run or wait and 11 .* most 10 may"):
            engine.submit([*handles, handle(llm, [1])], streaming=True)
        assert engine.num_open == 0
        streams = engine.submit(handles, streaming=True)
        with pytest.raises(QueueFullError):
            engine.generate_async(handle(llm, [1]))
        await asyncio.to_thread(until, lambda: engine.num_running == SLOTS)
        assert engine.num_waiting == 8
        for stream in streams:
            stream.abort()
        await asyncio.to_thread(until, lambda: engine.num_open == 0)
        return await engine.generate_async(handle(llm, [1])).result()

    assert asyncio.run(main()).outputs[0].token_ids == solo(llm, [1])


def test_what_can_never_run_is_refused_at_once(llm, engine):
    async def main():
        with pytest.raises(ValueError, match="expected at most max_seq_len=128"):
            engine.submit([handle(llm, [1]), handle(llm, [1], 128)], streaming=True)

    asyncio.run(main())
    assert engine.num_open == 0
    with pytest.raises(ValueError, match="max_queue must be an integer >= 1, got 0"):
        AsyncEngine(llm._engine, max_queue=0)


def failing(llm, monkeypatch, error, times):
    """Makes the engine's next steps raise."""
    step, left = llm._engine._step, [times]

    def fail():
        if left[0]:
            left[0] -= 1
            raise error
        step()

    monkeypatch.setattr(llm._engine, "_step", fail)


def test_a_failed_step_ends_its_requests_and_no_others(llm, engine, monkeypatch):
    expected = solo(llm, [5, 6])
    failing(llm, monkeypatch, RuntimeError("boom"), times=1)

    async def main():
        streams = engine.submit([handle(llm, [5, 6]), handle(llm, [7])], streaming=True)
        for stream in streams:
            with pytest.raises(StepFailedError, match="RuntimeError: boom"):
                await anext(stream)
            assert await anext(stream, None) is None
        assert engine.alive
        return await read(engine.generate_async(handle(llm, [5, 6])))

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize(
    ("error", "steps"), [("boom", MAX_FAILED_STEPS), ("CUDA error: an illegal memory access", 1)]
)
def test_a_dead_engine_tells_everyone(error, steps, llm, engine, monkeypatch):
    failing(llm, monkeypatch, RuntimeError(error), times=99)

    async def main():
        for _ in range(steps - 1):
            with pytest.raises(StepFailedError):
                await anext(engine.generate_async(handle(llm, [1])))
        assert engine.alive
        stream = engine.generate_async(handle(llm, [1]))
        with pytest.raises(EngineDeadError, match=f"the engine has failed: RuntimeError: {error}"):
            await anext(stream)
        assert not engine.alive
        with pytest.raises(EngineDeadError):
            engine.generate_async(handle(llm, [1]))

    asyncio.run(main())
    assert error in engine.failure


def test_a_text_that_fails_fails_alone(llm, engine):
    """Such as a tokenizer that raises on one request's tokens."""
    expected = solo(llm, [5, 6])

    async def main():
        bad = handle(llm, [7])

        def update(_stop):
            raise KeyError("no such token")

        bad.update = update
        good, failed = engine.submit([handle(llm, [5, 6]), bad], streaming=True)
        with pytest.raises(RequestError, match="KeyError: 'no such token'"):
            await anext(failed)
        return await read(good)

    assert asyncio.run(main()) == expected
    assert engine.alive


@pytest.mark.parametrize("after", [0, 2])
def test_an_output_that_fails_fails_alone(after, llm, engine, monkeypatch):
    """At the first output of a request, or at a later one that its reader waits for."""
    expected = solo(llm, [5, 6])

    async def main():
        bad = handle(llm, [7], 60)
        output, left = bad.output, [after]

        def fail():
            if not left[0]:
                raise KeyError("no such text")
            left[0] -= 1
            return output()

        monkeypatch.setattr(bad, "output", fail)
        good, failed = engine.submit([handle(llm, [5, 6]), bad], streaming=True)
        with pytest.raises(RequestError, match="KeyError: 'no such text'"):
            await read(failed)
        assert bad.request.slot is None
        assert bad.request.finish_reason == "error"
        return await read(good)

    assert asyncio.run(main()) == expected
    assert engine.alive
    assert engine.num_open == 0


def test_a_refresh_that_fails_fails_alone(llm, engine, monkeypatch):
    """An output that is asked for because its reader has caught up."""
    gate, step = threading.Semaphore(3), llm._engine.step
    monkeypatch.setattr(llm._engine, "step", lambda: gate.acquire(timeout=0.05) and step())

    async def main():
        bad = handle(llm, [3, 1], 60)
        stream = engine.generate_async(bad)
        await asyncio.to_thread(until, lambda: gate._value == 0 and stream._behind)

        def fail():
            raise KeyError("no such text")

        monkeypatch.setattr(bad, "output", fail)
        await anext(stream)
        with pytest.raises(RequestError, match="KeyError: 'no such text'"):
            await asyncio.wait_for(anext(stream), 10)

    asyncio.run(main())
    assert engine.alive


def test_a_text_that_fails_in_an_llm_fails_alone(llm):
    """`LLM.generate`: its output says so; others, and streams of other threads, go on."""
    expected = [solo(llm, [5, 6]), solo(llm, [9])]
    streams = [llm.generate_async(p, SamplingParams(max_tokens=12)) for p in ([7], [9])]
    bad = streams[0]._group.texts[0]

    def update(_stop):
        raise KeyError("no such token")

    bad.update = update
    assert solo(llm, [5, 6]) == expected[0]
    assert streams[0].result().error == "KeyError: 'no such token'"
    assert streams[0]._group.texts[0].request.finish_reason == "error"
    assert streams[1].result().outputs[0].token_ids == expected[1]
    assert not llm._driver._handles
    assert not llm._engine.has_work


def test_draining_finishes_what_runs(llm, engine):
    expected = solo(llm, [5, 6], 16)

    async def main():
        stream = engine.generate_async(handle(llm, [5, 6], 16))
        engine.drain()
        with pytest.raises(ShuttingDownError):
            engine.generate_async(handle(llm, [1]))
        tokens = await read(stream)
        assert await engine.drained(5)
        return tokens

    assert asyncio.run(main()) == expected


def test_closing_ends_what_runs(llm, engine):
    async def main():
        stream = engine.generate_async(handle(llm, [1, 2], 100), streaming=False)
        await asyncio.to_thread(until, lambda: engine.num_running == 1)
        assert not await engine.drained(0.05)
        await asyncio.to_thread(engine.close)
        with pytest.raises(ShuttingDownError):
            await stream.result()

    asyncio.run(main())
    assert not engine.alive


def test_requests_that_come_and_go_at_random(llm, engine):
    """Every request that is not left early gives what it gives alone, and nothing is lost."""
    random = Random(7)
    lengths = [random.randint(1, 12) for _ in range(24)]
    prompts = [[random.randrange(97) for _ in range(random.randint(1, 9))] for _ in lengths]
    pairs = list(zip(prompts, lengths, strict=True))
    params = [SamplingParams(max_tokens=length) for length in lengths]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    leaving = [random.random() < 0.4 for _ in pairs]
    slots = asyncio.Semaphore(4)  # one that left is counted until its slot is free

    async def one(prompt, length, leaves):
        await asyncio.sleep(random.random() / 5)
        async with slots, engine.generate_async(handle(llm, prompt, length)) as stream:
            if not leaves:
                return await read(stream)
            for _ in range(random.randint(0, 2)):
                await anext(stream, None)
            return None

    async def main():
        return await asyncio.gather(
            *(one(*p, leaves) for p, leaves in zip(pairs, leaving, strict=True))
        )

    found = asyncio.run(main())
    assert found == [None if leaves else ids for ids, leaves in zip(expected, leaving, strict=True)]
    until(lambda: engine.num_open == 0)


def test_the_streams_of_an_llm(llm):
    """`LLM.generate_async` in an event loop, beside `LLM.generate` in a thread."""
    prompts = [[i, i + 1] for i in range(1, 11)]
    params = SamplingParams(max_tokens=6)
    expected = [solo(llm, prompt, 6) for prompt in prompts]

    async def main():
        other = asyncio.ensure_future(asyncio.to_thread(llm.generate, prompts[:2], params))
        streams = [llm.generate_async(prompt, params, streaming=True) for prompt in prompts[2:8]]
        whole = [llm.generate_async(prompt, params) for prompt in prompts[8:]]
        found = await asyncio.gather(*map(read, streams), *(stream.aresult() for stream in whole))
        left = llm.generate_async([1, 2], SamplingParams(max_tokens=100), streaming=True)
        await anext(left)
        left.abort()
        assert [o async for o in left][-1].outputs[0].finish_reason == "cancelled"
        outputs = [*await other, *found[6:]]
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens[:2] + found[:6] + tokens[2:]

    assert asyncio.run(main()) == expected
    until(lambda: not llm._engine.has_work)


def test_an_adopted_request_goes_on(llm, engine):
    """One that was stepped by `LLM` so far."""
    expected = solo(llm, [5, 6], 12)
    late = handle(llm, [5, 6], 12)
    with llm._driver.lock:
        llm._engine.add(late.request)
        llm._engine.step()
        llm._engine.step()

    async def main():
        return await read(engine.adopt(late, streaming=True))

    assert asyncio.run(main()) == expected
    done = handle(llm, [7], 1)
    with llm._driver.lock:
        llm._engine.add(done.request)
        while not done.request.finished:
            llm._engine.step()

    async def finished():
        return await engine.adopt(done, streaming=False).result()

    assert asyncio.run(finished()).finished


def test_whoever_steps_the_engine_tells_the_readers(llm, engine):
    """With the lock held all the time the engine thread cannot; `poll` does."""
    expected = solo(llm, [5, 6], 12)

    async def main():
        with llm._driver.lock:
            stream = engine.generate_async(handle(llm, [5, 6], 12))
            engine.poll()
            while engine.num_open:
                llm._engine.step()
                engine.poll()
        return await read(stream)

    assert asyncio.run(main()) == expected


def test_generate_and_streams_at_the_same_time(llm, engine):
    """`LLM.generate` in another thread shares the engine, under its lock."""
    prompts = [[i, i + 1] for i in range(1, 7)]
    expected = [solo(llm, prompt, 8) for prompt in prompts]

    async def main():
        def generate():
            outputs = llm.generate(prompts[:3], SamplingParams(max_tokens=8))
            return [output.outputs[0].token_ids for output in outputs]

        other = asyncio.ensure_future(asyncio.to_thread(generate))
        streams = [engine.generate_async(handle(llm, p, 8)) for p in prompts[3:]]
        found = await asyncio.gather(*map(read, streams))
        return await other + found

    assert asyncio.run(main()) == expected
