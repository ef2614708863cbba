"""`bench serve`: the load, the numbers, the engine and a server as targets, the command."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from serving import ENGINE, ENGINE_FLAGS, local_server

from trtllm_treewy import LLM, cli
from trtllm_treewy.bench import load, report, runner
from trtllm_treewy.bench.target import HttpTarget, RequestResult
from trtllm_treewy.outputs import AcceptanceStats


def spec(**settings):
    defaults = {"num_requests": 400, "mean_input_len": 100, "mean_output_len": 50}
    others = {"max_len": 2000, "request_rate": None, "concurrency": 4, "seed": 1}
    return load.LoadSpec(**{**defaults, **others, **settings})


class Letters:
    """A tokenizer: one id a character."""

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


def test_lengths_are_log_normal_about_their_mean():
    random = np.random.default_rng(0)
    drawn = np.array(load.lengths(random, 200, 10**6, 20_000))
    assert abs(drawn.mean() - 200) < 10
    assert abs(np.log(drawn).std() - load.SIGMA) < 0.05
    assert min(load.lengths(random, 5, 40, 1000)) == load.MIN_LENGTH
    assert max(load.lengths(random, 200, 40, 1000)) == 40


def test_a_load_is_the_same_for_the_same_seed():
    text = load.made_up_text(3, 50)
    assert text == load.made_up_text(3, 50) != load.made_up_text(4, 50)
    first = load.plan_load(spec(), text, Letters())
    assert first == load.plan_load(spec(), text, Letters())
    assert first != load.plan_load(spec(seed=2), text, Letters())
    assert all(len(r.prompt) + r.output_len <= 2000 for r in first)
    assert all(r.at == 0 for r in first)
    joined = "".join(map(chr, first[0].prompt))
    assert joined in text + text


def test_prompts_without_a_tokenizer_are_words():
    first = load.plan_load(spec(num_requests=1), "one two three four", None)[0]
    assert set(first.prompt.split()) == {"one", "two", "three", "four"}


def test_arrivals_are_a_poisson_process():
    times = [r.at for r in load.plan_load(spec(request_rate=20.0), "word", Letters())]
    gaps = np.diff(times)
    assert times[0] == 0
    assert abs(gaps.mean() - 1 / 20) < 0.01
    assert abs(gaps.std() / gaps.mean() - 1) < 0.15


def test_arrivals_in_bursts():
    load_spec = spec(request_rate=20.0, burstiness=0.25, num_requests=4000)
    gaps = np.diff([r.at for r in load.plan_load(load_spec, "word", Letters())])
    assert abs(gaps.mean() - 1 / 20) < 0.005
    assert abs(gaps.std() / gaps.mean() - 2) < 0.2  # burstiness ** -0.5
    with pytest.raises(ValueError, match="burstiness is 0"):
        load.plan_load(spec(burstiness=0.0), "word", None)


def test_lengths_without_a_spread():
    requests = load.plan_load(spec(sigma=0.0), "letters", Letters())
    assert {(len(r.prompt), r.output_len) for r in requests} == {(100, 50)}


def test_loads_that_cannot_be_made(tmp_path):
    with pytest.raises(ValueError, match="max_len is 7, expected at least 8"):
        load.plan_load(spec(max_len=7), "word", None)
    with pytest.raises(ValueError, match="is empty"):
        load.plan_load(spec(), " ", None)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    assert load.read_text(str(file)).split() == ["one", "two"]
    file.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ValueError, match="line 2: expected a JSON object with a text"):
        load.read_text(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        load.read_text(str(file))


def measurement():
    """Requests with latencies of 1..100 ms, 11 tokens each, and one that failed."""
    results = []
    for ms in range(1, 101):
        arrivals = [ms / 1000, ms / 1000 + 0.1]
        stats = AcceptanceStats(num_steps=5, num_drafted=50, num_accepted=5)
        results.append(RequestResult(0.0, arrivals, 20, 11, stats))
    results.append(RequestResult(0.0, error="429: too many"))
    return runner.Measurement(spec(), 0.0, 2.0, results)


def test_the_numbers():
    summary = report.summarise(measurement())
    assert (summary["completed"], summary["failed"]) == (100, 1)
    assert summary["errors"] == ["429: too many"]
    assert summary["output_tokens_per_second"] == 550
    assert summary["total_tokens_per_second"] == 1550
    assert summary["requests_per_second"] == 50
    expected = {"mean": 0.0505, "p50": 0.0505, "p90": 0.0901, "p99": 0.09901}
    assert summary["ttft"] == pytest.approx(expected)
    assert summary["tpot"] == pytest.approx(dict.fromkeys(expected, 0.01))
    assert summary["latency"]["p50"] == pytest.approx(0.1505)
    assert summary["speculation"]["acceptance_length"] == 2
    text = report.table(summary)
    assert "100 requests, 4 at a time, in 2.0 s; 1 failed" in text
    assert "time to first token        50.50     50.50     90.10     99.01" in text
    assert "failed: 429: too many" in text
    assert json.loads(json.dumps(summary)) == summary


def test_numbers_of_nothing():
    failed = [RequestResult(0.0, error="refused")]
    summary = report.summarise(runner.Measurement(spec(), 0.0, 0.0, failed))
    assert summary["ttft"] is None
    assert "time to first token" in report.table(summary)


class Sleeper:
    """A target that notes how many requests are under way."""

    def __init__(self):
        self.now, self.most, self.asked = 0, 0, 0

    async def run(self, request):
        self.now, self.asked = self.now + 1, self.asked + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.005)
        self.now -= 1
        return RequestResult(0.0, [0.1, 0.2], len(request.prompt), request.output_len)


@pytest.mark.parametrize(("rate", "most"), [(None, 4), (5000.0, 12)])
def test_the_load_keeps_its_shape(rate, most):
    """A fixed concurrency is never passed; a rate does not wait for answers."""
    target, shape = Sleeper(), spec(num_requests=12, request_rate=rate)
    requests = load.plan_load(shape, "word", Letters())
    measured = asyncio.run(runner.measure(target, shape, requests, warmup=requests[:2]))
    assert target.asked == 14
    assert target.most == most if rate is None else target.most > 4
    assert [r.output_tokens for r in measured.results] == [r.output_len for r in requests]


EVENTS = [
    ({"choices": [{"text": "one\u2028line\u0085"}]}, None),
    ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, None),
    ({"choices": [], "usage": 7}, "an event that is not OpenAI's: TypeError"),
    ("no JSON", "an event that is not OpenAI's: JSONDecodeError"),
    ({"error": {"message": "no more"}}, "no more"),
]


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_events_of_other_servers(cut):
    """In raw UTF-8, and in whatever parts they come; what is wrong is the request's own error."""
    httpx = pytest.importorskip("httpx")

    def run(events):
        texts = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in events]
        body = "".join(f"data: {text}\r\n\r\n" for text in texts).encode()
        parts = [body[i : i + cut] for i in range(0, len(body), cut)]

        async def stream():
            for part in parts:
                yield part

        async def main():
            target = HttpTarget("http://localhost", "m", None)
            await target.close()
            answer = httpx.MockTransport(lambda _: httpx.Response(200, content=stream()))
            target._client = httpx.AsyncClient(base_url="http://localhost", transport=answer)
            try:
                return await target.run(load.PlannedRequest("x", 3, 0.0))
            finally:
                await target.close()

        return asyncio.run(main())

    well, others = [event for event, error in EVENTS if error is None], EVENTS[2:]
    result = run([*well, "[DONE]"])
    assert (result.error, len(result.arrivals)) == (None, 1)
    assert (result.prompt_tokens, result.output_tokens) == (3, 1)
    for event, error in others:
        assert run([*well, event]).error.startswith(error)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from trtllm_treewy.bench import plot

    plot.draw(measurement(), str(tmp_path / "latency.png"))
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


SMALL = ["--num-requests", "5", "--mean-input-len", "12", "--mean-output-len", "8"]
SMALL += ["--max-len", "60", "--warmup", "1"]


def test_the_engine_and_a_server(shipped_model, tmp_path, capsys):
    """The same load against both gives the same counts of tokens."""
    pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    file = tmp_path / "result.json"
    flags = [*SMALL, *ENGINE_FLAGS, "--concurrency", "3", "--json"]
    assert cli.main(["bench", "serve", str(shipped_model), *flags, "--output", str(file)]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["completed"] == 5
    assert own["output_tokens"] > 0
    assert own["speculation"]["acceptance_length"] > 1
    written = json.loads(file.read_text())
    assert len(written.pop("requests")) == 5
    assert written == own
    settings = {"max_batch_size": 3, "max_seq_len": 128, **ENGINE}
    with LLM(shipped_model, **settings) as llm, local_server(llm) as local:
        url = ["--url", local.url]
        assert cli.main(["bench", "serve", str(shipped_model), *flags, *url]) == 0
        remote = json.loads(capsys.readouterr().out)
        assert remote["prompt_tokens"] == own["prompt_tokens"]
        assert remote["output_tokens"] == own["output_tokens"]
        accepted = [found["speculation"]["num_accepted"] for found in (own, remote)]
        assert accepted[0] == accepted[1]
        rate = ["--request-rate", "50", "--burstiness", "0.5"]
        assert cli.main(["bench", "serve", *SMALL, *url, *rate]) == 0
        assert "5 requests, 50 a second (burstiness 0.5)" in capsys.readouterr().out
        name = ["--served-model-name", "other"]
        assert cli.main(["bench", "serve", *SMALL, *url, *name]) == 1
        assert "failed: 404: the model 'other' is not here" in capsys.readouterr().out


def test_what_the_command_refuses(shipped_model, capsys, monkeypatch):
    def run(*flags):
        try:
            code = cli.main(["bench", "serve", *flags])
        except SystemExit as exit_:
            code = exit_.code
        assert code == 2
        return capsys.readouterr().err

    assert "no MODEL and no --url given (see trtllm-treewy bench serve" in run()
    assert "expected a number above 0, got '0'" in run("m", "--request-rate", "0")
    assert "not allowed with" in run("m", "--request-rate", "1", "--concurrency", "2")
    assert "needs --request-rate" in run("m", "--burstiness", "0.5")
    assert "does not exist" in run("no-such-model")
    assert "the directory of" in run(str(shipped_model), "--output", "no/such/place.json")
    assert "does not list a model" in run("--url", "http://127.0.0.1:9", "--num-requests", "1")
    assert "does not list a model" in run("--url", "http://[")
    assert "must begin with http:// or https://, got 'localhost'" in run("--url", "localhost")
    from trtllm_treewy.cli import extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert "pip install 'trtllm-treewy[bench]'" in run(str(shipped_model), "--plot", "x.png")
    with pytest.raises(ValueError, match=r"serve needs the packages? uvicorn: pip install"):
        extras.expect_packages("serve", "serve", "uvicorn")
    with pytest.raises(ValueError, match=r"the packages a, b: pip install 'trtllm-treewy\[c\]"):
        extras.expect_packages("serve", "c", "a", "b")
