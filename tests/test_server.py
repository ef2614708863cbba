"""The server: OpenAI's client and curl against the real process; failures in this one."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch
from serving import ENGINE, ServerProcess, local_server, until

from trtllm_treewy import LLM, SamplingParams

openai = pytest.importorskip("openai", reason="the extra test is not installed")
httpx = pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")

KEY = "a secret"
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
PROMPT = "The location of the error log"
PROMPTS = [f"{words} the server" for words in ("When", "If", "After", "Before", "While", "Once")]


@pytest.fixture(scope="module")
def model(shipped_model, tmp_path_factory):
    """The shipped model with a chat template."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    directory.mkdir()
    for file in shipped_model.iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((shipped_model / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": TEMPLATE})
    )
    return directory


@pytest.fixture(scope="module")
def server(model):
    process = ServerProcess(model, "--max-batch-size", "4", "--max-seq-len", "400", key=KEY)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def llm(server, model):
    """In this process; it loads while the server starts, which is waited for."""
    with LLM(model, max_batch_size=2, max_seq_len=256, **ENGINE) as llm:
        server.wait_until_ready()
        yield llm


@pytest.fixture(scope="module")
def client(llm, server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def local(llm):
    limits = {"max_queue": 1, "max_body_bytes": 2000, "max_prompt_tokens": 40, "max_texts": 4}
    with local_server(llm, **limits) as local, httpx.Client(base_url=local.url) as local.http:
        yield local


def expect(llm, prompt, max_tokens=16, **settings):
    output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, **settings))
    return output.outputs[0]


def samples(text):
    """The samples of a metrics page, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- the real process ---


def test_the_server_says_how_many_run_at_once(client, server):
    assert server.said.startswith("[requests that run at once: 4]\n[serving tiny on ")


def test_completion(llm, client):
    whole = expect(llm, PROMPT)
    answer = client.completions.create(model="tiny", prompt=PROMPT)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == whole.text
    assert answer.choices[0].finish_reason == "length"
    tokens = len(llm.tokenizer.encode(PROMPT))
    assert answer.usage.prompt_tokens == tokens
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == tokens + 16
    assert answer.speculation["num_accepted"] > 0
    ids = llm.tokenizer.encode(PROMPT)
    assert client.completions.create(model="tiny", prompt=ids).choices[0].text == whole.text


def test_streamed_completion(llm, client):
    whole = expect(llm, PROMPT, 30)
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            seed=1,
            user="someone",
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.text
    assert len(texts) > 3
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(llm, client):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, TEXT_PART]},
    ]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a log?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    whole = expect(llm, rendered, 20)
    settings = {"model": "tiny", "messages": messages, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**settings)
    assert answer.choices[0].message.content == whole.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode(rendered))
    chunks = list(client.chat.completions.create(**settings, stream=True, n=2))
    for index in range(2):
        deltas = [c.choices[0].delta for c in chunks if c.choices[0].index == index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == whole.text
    opened = client.chat.completions.create(
        **settings, extra_body={"chat_template_kwargs": {"opening": "Well,"}}
    )
    assert opened.choices[0].message.content == expect(llm, rendered + "Well,", 20).text


TEXT_PART = {"type": "text", "text": "a log?"}


def test_stops_and_lengths(llm, client):
    whole = expect(llm, PROMPT, 24)
    stop = whole.text[len(whole.text) // 2 :][:4]
    cut = whole.text[: whole.text.index(stop)]

    def ask(**settings):
        create = client.completions.create
        return create(model="tiny", prompt=PROMPT, max_tokens=24, **settings).choices[0]

    stopped = ask(stop=[stop, "\x00"])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (cut, "stop", stop)
    kept = ask(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.text == cut + stop
    token = whole.token_ids[4]
    count = whole.token_ids.index(token) + 1
    answer = ask(extra_body={"stop_token_ids": [token], "ignore_eos": True})
    assert answer.text == llm.tokenizer.decode(whole.token_ids[:count])
    streamed = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut


def test_several_prompts_and_texts(llm, client):
    answer = client.completions.create(model="tiny", prompt=PROMPTS[:2], n=2, max_tokens=5)
    expected = [expect(llm, prompt, 5).text for prompt in PROMPTS[:2]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        expected[0],
        expected[0],
        expected[1],
        expected[1],
    ]
    assert answer.usage.completion_tokens == 20
    tokens = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS[:2]]
    assert answer.usage.prompt_tokens == sum(tokens), "a prompt counts once"


def test_log_probabilities(llm, client):
    """Those of `LLM`, whole and streamed, at both endpoints."""
    sampling = {"model": "tiny", "max_tokens": 12, "temperature": 0.8, "seed": 5}
    whole = expect(llm, PROMPT, 12, temperature=0.8, seed=5, logprobs=2)
    chosen = [at[token].logprob for token, at in zip(whole.token_ids, whole.logprobs, strict=True)]
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **sampling).choices[0]
    assert answer.text == whole.text
    assert answer.logprobs.tokens == [llm.tokenizer.decode([token]) for token in whole.token_ids]
    assert answer.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-3)
    assert [len(top) for top in answer.logprobs.top_logprobs] == [2] * 12
    chunks = client.completions.create(prompt=PROMPT, logprobs=2, stream=True, **sampling)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part, name)]
        assert joined == getattr(answer.logprobs, name)

    chat = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    choice = client.chat.completions.create(top_logprobs=3, **chat, **sampling).choices[0]
    for row in choice.logprobs.content:
        values = [at.logprob for at in row.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert max(*values, row.logprob) <= 0
    assert "".join(row.token for row in choice.logprobs.content) == choice.message.content
    bare = client.chat.completions.create(**chat, **sampling).choices[0].logprobs.content
    assert [row.logprob for row in bare] == [row.logprob for row in choice.logprobs.content]
    assert not any(row.top_logprobs for row in bare)
    assert client.completions.create(prompt=PROMPT, **sampling).choices[0].logprobs is None


def test_a_seed_is_repeated_and_its_texts_differ(llm, client):
    sampling = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8}
    texts = [choice.text for choice in client.completions.create(n=2, seed=5, **sampling).choices]
    assert texts == [expect(llm, PROMPT, 12, temperature=0.8, seed=s).text for s in (5, 6)]
    assert texts[0] != texts[1]
    body = {"speculation": False}
    again = client.completions.create(seed=5, extra_body=body, **sampling).choices[0]
    assert again.text == texts[0]


def test_sixteen_streams_at_once(llm, server):
    """On four slots; each says what `LLM.generate` says of its prompt alone."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(16)]
    expected = {prompt: expect(llm, prompt, 8).text for prompt in PROMPTS}

    async def read(client, prompt):
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(read(client, prompt) for prompt in prompts))

    assert asyncio.run(main()) == [expected[prompt] for prompt in prompts]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(llm, server):
    def curl(path, *flags):
        command = ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", *flags]
        out = subprocess.run(
            [*command, server.url + path], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        body, _, status = out.rpartition("\n")
        return int(status), body

    key = ["-H", f"Authorization: Bearer {KEY}"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9}
    post = [*key, "-H", "Content-Type: application/json", "-d"]
    whole = expect(llm, PROMPT, 9).text
    status, answer = curl("/v1/completions", *post, json.dumps(body))
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, whole)
    status, answer = curl("/v1/completions", "-N", *post, json.dumps(body | {"stream": True}))
    events = answer.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert curl("/v1/completions", *post, "{")[0] == 400
    assert curl("/v1/models", "-H", "Authorization: Bearer wrong")[0] == 401
    assert json.loads(curl("/v1/models", *key)[1])["data"][0]["id"] == "tiny"
    assert curl("/v1/models/other", *key)[0] == 404
    assert curl("/health")[0] == 200


def test_the_key(server, client):
    assert client.models.list().data[0].id == "tiny"
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a secret?", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError, match="expected the server's API key"):
        wrong.completions.create(model="tiny", prompt="x")
    for headers in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_client_that_leaves_frees_its_slot(llm, server, client):
    def cancelled():
        found = samples(httpx.get(f"{server.url}/metrics").text)
        return found.get(("treewy_requests_finished_total", (("reason", "cancelled"),)), 0)

    def idle():
        return httpx.get(f"{server.url}/health").json() == {
            "status": "ok",
            "running": 0,
            "waiting": 0,
        }

    before = cancelled()
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 380}
    settings["extra_body"] = {"ignore_eos": True}
    stream = client.completions.create(**settings, stream=True)
    next(stream)
    stream.close()
    until(lambda: cancelled() == before + 1)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**settings, n=6, timeout=0.5)
    until(lambda: cancelled() == before + 7)
    until(idle)


def test_metrics(server, client):
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20)
    found = samples(httpx.get(f"{server.url}/metrics").text)
    done = ("treewy_requests_finished_total", (("reason", "length"),))
    assert found[done] >= 1
    steps = found["treewy_verify_steps_total", ()]
    assert found["treewy_acceptance_length_count", ()] == steps > 0
    accepted = sum(v for (name, _), v in found.items() if name == "treewy_accepted_tokens_total")
    assert found["treewy_acceptance_length_sum", ()] == steps + accepted
    assert found["treewy_accepted_tokens_total", (("depth", "1"),)] > 0
    for name in ("time_to_first_token", "time_per_output_token", "queue", "request"):
        assert found[f"treewy_{name}_seconds_count", ()] >= 1
    assert found["treewy_requests_running", ()] == found["treewy_requests_waiting", ()] == 0
    assert found["treewy_engine_alive", ()] == 1


def test_sigterm_finishes_what_runs(llm, server, client):
    """The last test of the process: it ends it."""
    whole = expect(llm, PROMPT, 48, ignore_eos=True)
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48}
    stream = client.completions.create(**settings, extra_body={"ignore_eos": True}, stream=True)
    text = next(stream).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(openai.APIConnectionError):  # nobody listens any more
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0).models.list()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole.text
    assert server.process.wait(20) == 0


# --- a server in this process ---


def ask(local, path="/v1/completions", **body):
    answer = local.http.post(path, json={"model": "tiny", "prompt": "x", "max_tokens": 2} | body)
    return answer.status_code, answer.json()


BAD = [
    ({"prompt": None}, "prompt is missing", "prompt"),
    ({"prompt": []}, "prompt is empty", "prompt"),
    ({"prompt": ""}, "the prompt has no tokens", "prompt"),
    ({"prompt": ["x", ""]}, "the prompt has no tokens", "prompt"),
    ({"prompt": 7}, "prompt must be a string or an array, got an integer", "prompt"),
    ({"prompt": [1, "x"]}, r"prompt[1] must be a token id, got a string", "prompt"),
    ({"prompt": ["x", 1]}, r"prompt[1] must be a string, got an integer", r"prompt[1]"),
    ({"prompt": [5000]}, "prompt token 0 is 5000", None),
    ({"prompt": [True]}, "prompt[0] must be a token id, got a boolean", "prompt"),
    ({"prompt": "\ud800"}, "not text", "prompt"),
    ({"prompt": "word " * 60}, "tokens, expected at most 40", "prompt"),
    ({"max_tokens": 256}, "expected at most max_seq_len=256", None),
    ({"max_tokens": 0}, "max_tokens must be >= 1, got 0", "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer, got a number", "max_tokens"),
    ({"max_tokens": True}, "got a boolean", "max_tokens"),
    ({"min_tokens": 5}, "min_tokens (5) is above max_tokens", None),
    ({"temperature": "hot"}, "temperature must be a number, got a string", "temperature"),
    ({"temperature": 3}, "temperature must be in [0, 2], got 3", "temperature"),
    ({"stop": [""]}, "stop holds an empty string", "stop"),
    ({"stop": ["x"] * 17}, "stop has 17 texts", "stop"),
    ({"stop_token_ids": [4096]}, "not an id below vocab_size", None),
    ({"logit_bias": {"x": 1}}, "'x' is no token id", "logit_bias"),
    ({"logit_bias": {"7": 101}}, "logit_bias must be in [-100, 100], got 101", "logit_bias"),
    ({"logit_bias": {"4096": 1}}, "logit_bias has token id 4096", None),
    ({"seed": -(2**63) - 1}, "seed must be in [", "seed"),
    ({"\ud800": 1}, "unknown field", "\ud800"),
    ({"n": 5}, "5 texts were asked for (prompts times n), at most 4", "n"),
    ({"n": 2, "best_of": 3}, "best_of=3 is not supported", "best_of"),
    ({"echo": True}, "echo=true is not supported", "echo"),
    ({"max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?", "max_token"),
    ({"stream_options": {}}, "needs stream=true", "stream_options"),
    ({"stream": True, "stream_options": {"usage": 1}}, "unknown field 'usage'", "usage"),
]


@pytest.mark.parametrize(("body", "message", "param"), BAD)
def test_requests_that_are_refused(body, message, param, local):
    raw = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2} | body)
    headers = {"Content-Type": "application/json"}
    answer = local.http.post("/v1/completions", content=raw, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    too_long = "max_seq_len" in message or "at most 40" in message
    assert (error["code"] == "context_length_exceeded") == too_long


CHATS = [
    ([], "messages is empty"),
    ({}, "messages must be an array"),
    ([{"content": "x"}], "messages[0].role is missing"),
    ([{"role": "user"}], "messages[0].content must be a string, got null"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "this model reads text"),
    ([{"role": "user", "content": "x", "tool_calls": [1]}], "calls no tools"),
    ([{"role": "wizard", "content": "x"}], "template refuses this: no role wizard"),
]


@pytest.mark.parametrize(("messages", "message"), CHATS)
def test_chats_that_are_refused(messages, message, local):
    body = {"model": "tiny", "messages": messages}
    answer = local.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_chat_fields_that_are_refused(local):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    for extra, message in (
        ({"tools": [{}]}, "calls no tools"),
        ({"response_format": {"type": "json_object"}}, "output is not constrained"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
        ({"chat_template_kwargs": {"opening": "\ud800"}}, "is not text that can be encoded"),
    ):
        raw = json.dumps(body | extra)  # httpx itself does not write half a character
        headers = {"Content-Type": "application/json"}
        answer = local.http.post("/v1/chat/completions", content=raw, headers=headers)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_bodies_that_are_refused(local):
    def post(content, kind="application/json", **headers):
        headers = {"Content-Type": kind, **headers}
        answer = httpx.post(f"{local.url}/v1/completions", content=content, headers=headers)
        return answer.status_code, answer.json()["error"]["message"]

    for body in (b"{", b"", b"\xff", b"[" * 1000, b'{"model": NaN}'):
        status, message = post(body)
        assert (status, message[:23]) == (400, "the body is not JSON: " + message[22])
    assert post(b"[]") == (400, "the body must be a JSON object, got an array")
    assert post(b"x" * 2001) == (413, "the body has 2001 bytes, expected at most 2000")
    # Without a length: it is counted as it comes.
    assert post(b"x" * 700 for _ in range(3)) == (
        413,
        "the body has more bytes, expected at most 2000",
    )
    assert post(b"{}", "text/plain")[0] == 415
    assert ask(local)[0] == 200


def test_a_request_may_do_without_drafts(llm, local):
    status, body = ask(local, max_tokens=9, speculation=True)
    assert (status, body["speculation"]["num_drafted"] > 0) == (200, True)
    other, plain = ask(local, max_tokens=9, speculation=False, priority=3)
    assert other == 200
    assert plain["choices"][0]["text"] == body["choices"][0]["text"]
    assert "speculation" not in plain


def test_what_the_engine_keeps_is_in_the_metrics(llm, local):
    ask(local)
    found = samples(local.http.get("/metrics").text)
    assert found["treewy_kv_blocks", ()] == llm.stats.kv_blocks_total > 0


def test_other_paths_and_models(local):
    status, body = ask(local, model="gpt-4")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "only 'tiny'" in body["error"]["message"]
    missing = local.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert local.http.get("/v1/completions").status_code == 405


def test_a_key_may_be_any_text(llm):
    key = "ключ"
    with local_server(llm, api_key=key) as local:
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.get(f"{local.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{local.url}/v1/models").status_code == 401


def test_slow_bodies_are_given_up(llm):
    import socket

    with local_server(llm, body_seconds=0.2) as local:
        host, port = local.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
            assert b" 408 " in sock.recv(4096).partition(b"\r\n")[0]


def test_a_full_queue_is_429(llm, local, monkeypatch):
    """Two slots and one that may wait: the fourth is told to come again."""
    go, step = [False], llm._engine.step
    monkeypatch.setattr(llm._engine, "step", lambda: step() if go[0] else time.sleep(0.01))

    async def main():
        async with httpx.AsyncClient(base_url=local.url, timeout=60) as http:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
            waiting = [
                asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(3)
            ]
            await asyncio.to_thread(until, lambda: local.service.engine.num_open == 3)
            refused = await http.post("/v1/completions", json=body)
            go[0] = True
            return refused, await asyncio.gather(*waiting)

    refused, others = asyncio.run(main())
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert [answer.status_code for answer in others] == [200] * 3
    found = samples(local.http.get("/metrics").text)
    assert found["treewy_requests_refused_total", (("reason", "queue_full"),)] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_none_fail_their_request_alone(stream, llm, local, monkeypatch):
    executor = llm._engine._executor
    original = executor.prefill

    def poisoned(batch):
        output = original(batch)
        with torch.inference_mode():
            output.logits.fill_(torch.nan)
        return output

    monkeypatch.setattr(executor, "prefill", poisoned)
    if stream:
        with openai.OpenAI(base_url=f"{local.url}/v1", api_key="any", max_retries=0) as client:
            chunks = client.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="not finite"):
                list(chunks)
    else:
        status, body = ask(local)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "not finite" in body["error"]["message"]
    monkeypatch.undo()
    assert ask(local)[0] == 200


def test_a_dead_engine_is_told(llm, monkeypatch):
    def fail():
        raise RuntimeError("the device is gone")

    with local_server(llm) as local, httpx.Client(base_url=local.url) as local.http:
        http = local.http
        assert http.get("/health").status_code == 200
        monkeypatch.setattr(llm._engine, "_step", fail)
        for code in ("request_failed", "request_failed", "engine_failed", "engine_failed"):
            status, body = ask(local)
            assert (status, body["error"]["code"]) == (500, code)
            assert "the device is gone" in body["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        assert "the device is gone" in health.json()["reason"]
        found = samples(http.get("/metrics").text)
        assert found["treewy_engine_alive", ()] == 0
        assert found["treewy_failed_steps_total", ()] == 3


def test_shutting_down_is_told(llm):
    with local_server(llm) as local, httpx.Client(base_url=local.url) as local.http:
        local.service.engine.drain()
        status, body = ask(local)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert local.http.get("/health").json()["status"] == "shutting_down"


@pytest.mark.parametrize(("stream", "signals"), [(False, 1), (True, 1), (False, 2)])
def test_the_end_waits_no_longer_than_it_may(stream, signals, llm):
    """A request that takes too long is told so, instead of being cut off; at once if told twice."""
    with local_server(llm, shutdown_seconds=0.3 if signals == 1 else 60) as local:

        def end():
            until(lambda: local.service.engine.num_running == 1)
            for _ in range(signals):
                local.server.handle_exit(signal.SIGTERM, None)

        thread = threading.Thread(target=end)
        thread.start()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
        answer = httpx.post(f"{local.url}/v1/completions", json=body | {"stream": stream})
        thread.join()
        assert answer.status_code == (200 if stream else 503)
        assert '"code": "shutting_down"' in answer.text.replace('":"', '": "')
        until(lambda: not local.service.engine.alive)
        assert local.server.received == signal.SIGTERM


def test_log_probabilities_as_openai_writes_them(llm):
    """From what TensorRT-LLM's outputs hold: a mapping of token ids for each token."""
    from trtllm_treewy.outputs import CompletionOutput, RequestOutput
    from trtllm_treewy.runtime.sampling import Logprob
    from trtllm_treewy.serve.protocol import GenerationRequest
    from trtllm_treewy.serve.responses import Answer

    ids = llm.tokenizer.encode("the log")
    at = [{token: Logprob(-0.5 - i, 2), 7: Logprob(-0.25, 1)} for i, token in enumerate(ids)]
    completion = CompletionOutput(text="the log", token_ids=ids, finish_reason="stop", logprobs=at)
    output = RequestOutput(0, None, [1], [completion], finished=True)
    pieces = [llm.tokenizer.decode([token]) for token in ids]

    def choice(messages):
        request = GenerationRequest(
            model="tiny",
            prompts=(),
            messages=messages,
            settings={"logprobs": 1},
            request_settings={},
            n=1,
            stream=False,
            include_usage=False,
            wants_logprobs=True,
        )
        return Answer(request, "tiny", llm.tokenizer).whole([output])["choices"][0]["logprobs"]

    found = choice(None)
    assert found["tokens"] == pieces
    assert found["token_logprobs"] == [-0.5 - i for i in range(len(ids))]
    assert found["top_logprobs"] == [{llm.tokenizer.decode([7]): -0.25}] * len(ids)
    assert found["text_offset"] == [sum(map(len, pieces[:i])) for i in range(len(ids))]
    rows = choice(({"role": "user", "content": "x"},))["content"]
    assert [row["token"] for row in rows] == pieces
    assert bytes(rows[0]["bytes"]).decode() == pieces[0]
    assert rows[0]["top_logprobs"][0]["logprob"] == -0.25


def test_log_probabilities_of_parts_of_characters(llm, local):
    """A character of several tokens: their bytes join to it, and their offsets stand still."""
    text = "a\U0001f642b"
    ids = llm.tokenizer.encode(text)
    emoji = [token for token in ids if "\ufffd" in llm.tokenizer.decode([token])]
    assert len(emoji) > 1, "this tokenizer has the character in one token"
    found = {token: _row_of(llm, local, token) for token in emoji}
    assert len({row["token"] for row in found.values()}) == len(set(emoji))
    joined = b"".join(bytes(found[token]["bytes"]) for token in emoji)
    assert joined.decode("utf-8") == "\U0001f642"

    from trtllm_treewy.outputs import CompletionOutput, RequestOutput
    from trtllm_treewy.runtime.sampling import Logprob
    from trtllm_treewy.serve.protocol import completion_request
    from trtllm_treewy.serve.responses import Answer

    request = completion_request({"model": "tiny", "prompt": "x", "logprobs": 2})
    at = [{token: Logprob(-0.5, 1), emoji[0]: Logprob(-0.5, 1)} for token in ids]
    at[0][emoji[1]] = Logprob(-1.0, 2)
    completion = CompletionOutput(text=text, token_ids=ids, finish_reason="stop", logprobs=at)
    output = RequestOutput(0, None, [1], [completion], finished=True)
    rows = Answer(request, "tiny", llm.tokenizer).whole([output])["choices"][0]["logprobs"]
    offsets = dict(zip(rows["text_offset"], rows["tokens"], strict=True))
    assert offsets[0] == "a"
    assert offsets[2] == "b"
    assert len(rows["top_logprobs"][0]) == 2, "two parts of characters do not become one"


def _row_of(llm, local, token):
    """What a chat tells of `token`, which its bias makes the most probable."""
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    body |= {"logit_bias": {str(token): 100}, "max_tokens": 1, "model": "tiny"}
    answer = local.http.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0]["logprobs"]["content"][0]


def test_a_token_id_of_too_many_digits_for_python():
    from trtllm_treewy.serve.errors import ApiError
    from trtllm_treewy.serve.protocol import completion_request

    body = {"model": "tiny", "prompt": "x", "logit_bias": {"9" * 5000: 1}}
    with pytest.raises(ApiError, match="is no token id") as caught:
        completion_request(body)
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


def test_settings_that_overflow_are_the_clients_fault(local):
    alarms = local.service.llm.stats.non_finite_logits
    status, body = ask(local, repetition_penalty=1e-300)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "penalties or biases" in body["error"]["message"]
    assert local.service.llm.stats.non_finite_logits == alarms
    assert ask(local)[0] == 200


def test_seeds_may_be_negative(local):
    """OpenAI's seeds are signed; -1 is the seed 2^64 - 1."""
    sampling = {"temperature": 1.0, "max_tokens": 8}
    status, body = ask(local, seed=-1, **sampling)
    assert status == 200
    texts = [ask(local, seed=seed, **sampling)[1]["choices"][0]["text"] for seed in (-1, 1)]
    assert texts[0] == body["choices"][0]["text"] != texts[1]


def test_a_large_top_k_keeps_all(local):
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    texts = [ask(local, top_k=top_k, **sampling)[1]["choices"][0]["text"] for top_k in (0, 2**70)]
    assert texts[0] == texts[1]


def test_streams_that_never_began_are_ended_too():
    """The client goes while the head of the answer waits to be sent."""
    from trtllm_treewy.serve.event_stream import EventStream

    told = []

    async def events():
        yield b"data: never\n\n"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(_):
        await asyncio.sleep(60)

    async def main():
        await EventStream(events(), lambda: told.append("end"))({"type": "http"}, receive, send)

    asyncio.run(main())
    assert told == ["end"]


# --- the command ---


@pytest.mark.parametrize("words", [("serve",), ("bench", "serve")])
def test_every_option_says_what_it_does_and_its_default(words):
    from trtllm_treewy.cli import arguments

    parser = arguments._parser()
    for word in words:
        (commands,) = parser._subparsers._group_actions
        parser = commands.choices[word]
    for action in parser._actions:
        assert action.help, action
        assert not action.option_strings or action.dest == "help" or "(default: " in action.help
    assert "TREEWY_DEBUG=1" in parser.format_help()


def test_the_command_refuses_before_it_loads(model, capsys, monkeypatch):
    import socket

    from trtllm_treewy import cli

    def run(*flags):
        try:
            code = cli.main(["serve", *flags])
        except SystemExit as exit_:
            code = exit_.code
        return code, capsys.readouterr().err

    assert run("no-such-model")[1].endswith("does not exist (nothing is downloaded)\n")
    assert "expected a port in [0, 65535], got '70000'" in run(str(model), "--port", "70000")[1]
    assert "cannot listen on 192.0.2.1" in run(str(model), "--host", "192.0.2.1")[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}" in run(str(model), "--port", port)[1]
    monkeypatch.setenv("TREEWY_API_KEY", " ")
    assert run(str(model)) == (
        2,
        "trtllm-treewy: error: TREEWY_API_KEY is set but empty; unset it, or give it a key\n",
    )
