"""Failures at random places while requests come and go: nothing hangs, leaks or is answered twice.

Whatever fails, a request has one end: the text that it gives alone, or an error; and when all have
ended, no slot, page or checkpoint is held. Failures come before and after what they are in.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import contextmanager, suppress

import pytest
from engine_world import check_nothing_leaked
from serving import ENGINE, local_server, until

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.request_handle import RequestHandle
from trtllm_treewy.runtime.async_engine import MAX_FAILED_STEPS
from trtllm_treewy.runtime.errors import EngineDeadError, RequestError

PROMPTS = ["The error log", "If the server", "When a client", "A request", "The location of"]
LONGEST = 14


class FaultError(Exception):
    """What is thrown in."""


class Faults:
    """Makes methods fail at random, before or after what they do."""

    def __init__(self, monkeypatch, seed):
        self._patch, self._random = monkeypatch, random.Random(seed)
        self.thrown: dict[str, int] = {}
        self.active = False

    def into(self, owner, name, rate, most=10**9):
        inner = getattr(owner, name)

        def maybe():
            if self.active and self._random.random() < rate and self.thrown.get(name, 0) < most:
                self.thrown[name] = self.thrown.get(name, 0) + 1
                raise FaultError(name)

        def call(*args, **kwargs):
            maybe()
            result = inner(*args, **kwargs)
            maybe()
            return result

        self._patch.setattr(owner, name, call)

    def into_engine(self, llm):
        """Steps of a part of the batch, whole steps, texts and outputs."""
        for name in ("prefill", "verify", "commit"):
            self.into(llm._engine._executor, name, 0.05)
        self.into(llm._engine._drafter, "propose", 0.03)
        self.into(llm._engine, "_step", 0.01, MAX_FAILED_STEPS - 1)
        self.into(llm.tokenizer, "decode", 0.005)
        self.into(RequestHandle, "output", 0.02)

    @contextmanager
    def thrown_in(self):
        self.active = True
        try:
            yield
        finally:
            self.active = False
        assert self.thrown, "no failure was tried"


@pytest.fixture(scope="module")
def llm(shipped_model):
    """Less memory than its sequences ask for: they preempt one another."""
    cache = {"enable_block_reuse": True, "tokens_per_block": 4, "checkpoint_interval": 8}
    cache |= {"max_tokens": 4 * 18, "max_checkpoints": 3}
    settings = {"max_batch_size": 3, "max_seq_len": 64, "kv_cache_config": cache}
    with LLM(shipped_model, **settings, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm):
    """Of every prompt at its longest, of which shorter ones are the beginning."""
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    return {p: llm.generate(p, params).outputs[0].token_ids for p in PROMPTS}


@pytest.fixture(autouse=True)
def nothing_is_left(llm, texts):
    yield
    until(lambda: not llm._engine.has_work)
    with llm._driver.lock:
        assert not llm._driver._handles
        check_nothing_leaked(llm._engine)
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    assert llm.generate(prompt, params).outputs[0].token_ids == texts[prompt]


def within(seconds, coroutine):
    async def bounded():
        found = await asyncio.wait_for(coroutine, seconds)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            await asyncio.wait_for(asyncio.wait([task]), 5)
        return found

    return asyncio.run(bounded())


async def one_stream(llm, texts, choice):
    """One request, left at a random point or read to its end; what came of it."""
    prompt, length = choice.choice(PROMPTS), choice.randint(1, LONGEST)
    params = SamplingParams(max_tokens=length, ignore_eos=True, n=choice.choice([1, 1, 2]))
    streaming, leaves = choice.random() < 0.7, choice.choice(["no", "no", "abort", "cancel"])
    await asyncio.sleep(choice.random() / 4)
    stream = llm.generate_async(prompt, params, streaming=streaming)

    async def read():
        ends = 0
        async for output in stream:
            ends += output.finished
            for one in output.outputs:
                assert one.token_ids == texts[prompt][: len(one.token_ids)]
                assert output.error or not output.finished or len(one.token_ids) == length or left
            if leaves == "abort" and choice.random() < 0.4:
                left.append(True)
                stream.abort()
        assert ends == 1
        return "error" if output.error else "left" if left else "whole"

    left: list[bool] = []
    reader = asyncio.ensure_future(read())
    if leaves == "cancel":
        left.append(True)
        await asyncio.sleep(choice.random() / 4)
        reader.cancel()
    try:
        return await reader
    except asyncio.CancelledError:
        return "left"
    except (RequestError, FaultError):
        return "error"
    finally:
        stream.abort()


@pytest.mark.parametrize("seed", range(2))
def test_streams_of_an_llm_under_failures(seed, llm, texts, monkeypatch):
    """Beside `generate` in another thread, which shares the engine."""
    faults, choice, ended = Faults(monkeypatch, seed), random.Random(seed), []
    faults.into_engine(llm)

    def generate():
        for _ in range(6):
            with suppress(FaultError):
                params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
                for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
                    ids = output.outputs[0].token_ids
                    assert output.finished
                    assert output.error or ids == texts[prompt]
            ended.append(True)

    async def main():
        other = asyncio.ensure_future(asyncio.to_thread(generate))
        streams = (one_stream(llm, texts, choice) for _ in range(40))
        return (await asyncio.gather(*streams, other))[:-1]

    with faults.thrown_in():
        found = within(60, main())
    assert len(ended) == 6
    assert "whole" in found
    assert llm._driver._async_engine.alive
    until(lambda: llm._driver._async_engine.num_open == 0)


# --- the server ---


async def send(port, path, body, cut):
    """The answer as bytes; with `cut` only so many of them, and the client has gone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        writer.write(head.encode() + data)
        if cut is None:
            return await reader.read()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(cut), cut / 1000)
        return None
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort() if cut is not None else writer.close()


def split_answer(raw):
    """Status, and the events of an answer or its only object; None where it was broken off."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert raw.count(b"HTTP/1.1 ") <= 1, "a request was answered twice"
    status = int(head.split()[1]) if head else None
    if b"chunked" not in head.lower():
        return status, json.loads(body) if body else None
    data, broken = b"", True
    while body:
        size, _, rest = body.partition(b"\r\n")
        if not int(size, 16):
            broken = False
            break
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert events.count(b"[DONE]") <= 1
    assert broken or events[-1] == b"[DONE]"
    return status, [json.loads(event) for event in events if event != b"[DONE]"]


async def one_answer(port, whole, choice):
    prompt, length = choice.choice(PROMPTS), choice.randint(1, LONGEST)
    n, stream = choice.choice([1, 1, 2]), choice.random() < 0.6
    cut = choice.randint(1, 400) if choice.random() < 0.3 else None
    body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "n": n, "stream": stream}
    await asyncio.sleep(choice.random() / 2)
    raw = await send(port, "/v1/completions", body | {"ignore_eos": True}, cut)
    if raw is None:
        return "left"
    status, answer = split_answer(raw)
    if not stream or status != 200:
        assert status in (200, 500)
        if status == 500:
            assert answer["error"]["type"] == "server_error"
            return "error"
        assert len(answer["choices"]) == n
        assert all(c["text"] == whole[prompt, length] for c in answer["choices"])
        return "whole"
    pieces, ends = [""] * n, [0] * n
    for event in answer:
        for one in event.get("choices", ()):
            assert not ends[one["index"]], "there is more after the end"
            pieces[one["index"]] += one["text"]
            ends[one["index"]] += one["finish_reason"] is not None
    assert all(whole[prompt, length].startswith(piece) for piece in pieces)
    errors = [event for event in answer if "error" in event]
    assert len(errors) <= 1
    if errors:
        assert answer[-1] is errors[0]
        return "error"
    if not all(ends):
        return "broken"
    assert pieces == [whole[prompt, length]] * n
    return "whole"


@pytest.mark.parametrize("seed", range(2))
def test_a_server_under_failures(seed, llm, texts, monkeypatch):
    from trtllm_treewy.serve.event_stream import EventStream
    from trtllm_treewy.serve.responses import Answer

    whole = {}
    for prompt, ids in texts.items():
        for length in range(1, LONGEST + 1):
            whole[prompt, length] = llm.tokenizer.decode(ids[:length])
    faults, choice = Faults(monkeypatch, seed), random.Random(seed)
    faults.into_engine(llm)
    faults.into(llm.tokenizer, "encode", 0.03)
    faults.into(Answer, "__init__", 0.03)
    faults.into(Answer, "news", 0.01)
    faults.into(Answer, "whole", 0.03)

    async def broken_socket(self, send, inner=EventStream._send):
        async def fail(message):
            if faults.active and choice.random() < 0.01:
                faults.thrown["socket"] = faults.thrown.get("socket", 0) + 1
                raise OSError("the socket is gone")
            await send(message)

        await inner(self, fail)

    monkeypatch.setattr(EventStream, "_send", broken_socket)
    with local_server(llm) as local:
        port = int(local.url.rpartition(":")[2])

        async def main():
            found = []
            while "whole" not in found and len(found) < 400:  # one in ten is, by chance
                found += await asyncio.gather(*(one_answer(port, whole, choice) for _ in range(40)))
            return found

        with faults.thrown_in():
            found = within(60, main())
        until(lambda: local.service.engine.num_open == 0)
        assert "whole" in found
        assert found.count("broken") <= faults.thrown.get("socket", 0)
        assert local.service.engine.alive


@pytest.fixture
def local(llm, texts):
    with local_server(llm) as local:
        local.port = int(local.url.rpartition(":")[2])
        yield local


def ask(local, stream):
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": LONGEST, "stream": stream}
    return within(20, send(local.port, "/v1/completions", body | {"ignore_eos": True}, None))


def failing(*_):
    raise FaultError("here")


def test_an_event_that_fails_is_told_in_the_stream(local, monkeypatch):
    """And the stream is broken off, as it is not whole."""
    from trtllm_treewy.serve.responses import Answer

    monkeypatch.setattr(Answer, "news", failing)
    raw = ask(local, stream=True)
    status, (event,) = split_answer(raw)
    assert (status, event["error"]["code"]) == (200, "internal")
    assert event["error"]["message"] == "internal error: FaultError"
    assert b"[DONE]" not in raw
    until(lambda: local.service.engine.num_open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_runs_for_an_answer_that_cannot_be_written(stream, local, monkeypatch):
    from trtllm_treewy.serve.responses import Answer

    started, submit = [], local.service.engine.submit
    monkeypatch.setattr(Answer, "__init__", failing)
    monkeypatch.setattr(
        local.service.engine, "submit", lambda *a, **k: started.append(a) or submit(*a, **k)
    )
    status, answer = split_answer(ask(local, stream))
    assert (status, answer["error"]["code"]) == (500, "internal")
    assert not started


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_the_engine_thread_refuses_leaves_nothing(n, shipped_model):
    """Its thread is dead: the request was queued, and would run with whoever steps next."""
    with LLM(shipped_model, max_batch_size=2, max_seq_len=64, **ENGINE) as llm:

        async def main():
            await llm.generate_async("x", SamplingParams(max_tokens=1))
            late = llm.generate_async("x", SamplingParams(max_tokens=40, n=n), streaming=True)
            llm._driver._async_engine._die(FaultError("the end"))
            with pytest.raises(EngineDeadError, match="the end"):
                await anext(late)
            assert not llm._engine.has_work
            assert not llm._driver._handles

        within(20, main())


def test_whoever_waits_for_a_step_that_another_makes_is_told_of_its_error(llm, monkeypatch):
    """Not that the request was cancelled, which nobody did."""
    params = SamplingParams(max_tokens=LONGEST)
    other = llm.generate_async(PROMPTS[0], params)
    monkeypatch.setattr(llm._engine, "_step", failing)
    with pytest.raises(FaultError):
        llm.generate(PROMPTS[1], params)
    output = other.result()
    assert output.error == "the engine step failed: FaultError: here"
    assert output.outputs[0].finish_reason == "error"
    monkeypatch.undo()
