"""A real Triton server with the shipped model on the CPU, and Triton's own clients.

The repository is written and served with the arguments of examples/kubernetes/smoke.yaml, and is
moved in between. With `-m slow` the load run takes three minutes, or as many seconds as
TREEWY_LOAD_SECONDS says.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from serving import ENGINE, until

pytest.importorskip("yaml", reason="the extra test is not installed")
pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("tritonclient.grpc", reason="the extra test is not installed")
pytest.importorskip("tritonclient.http", reason="the extra test is not installed")
pytest.importorskip("prometheus_client", reason="the extra test is not installed")

import triton_server
import tritonclient.grpc as grpc
import tritonclient.http as http
import yaml
from triton_load import Load, infer_inputs, text_of

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.cli import main

MODEL = "treewy-tiny"
PROMPT = "The location of the error log"
PROMPTS = [f"{words} the server" for words in ("When", "If", "After", "Before", "While", "Once")]
# Long enough to be there when it is looked for, whatever the machine.
ENDLESS = {"text_input": PROMPT, "max_tokens": 4000, "ignore_eos": True}
FLAGS = ["--dtype", "float32", "--draft-tree-widths", "2,2,2", "--max-batch-size", "4"]
FLAGS += ["--max-queue", "64", "--quiet"]
# A model whose engine dies when it is told to.
MORTAL = """
class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        for request in requests:
            if b"the end" in request.inputs()[0].as_numpy().reshape(-1).tolist():
                self._front.service.llm._engine.step = self.fail
        super().execute(requests)

    def fail(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture(scope="module")
def pod(repository):
    """The pod of the smoke run on Kubernetes."""
    text = (repository / "examples" / "kubernetes" / "smoke.yaml").read_text()
    return yaml.safe_load(text)["spec"]


@pytest.fixture(scope="module")
def models(pod, shipped_model, tmp_path_factory):
    """Written in one place, served from another."""
    written = tmp_path_factory.mktemp("written") / "models"
    places = {"/opt/treewy-tiny": str(shipped_model), "/models": str(written)}
    command = [places.get(word, word) for word in pod["initContainers"][0]["args"]]
    assert main([*command, *FLAGS, "--max-seq-len", "4096"]) == 0
    pair = ["--name", "pair", "--replicas", "2", "--max-seq-len", "512"]
    assert main([*command, *FLAGS, *pair]) == 0
    brief = ["--name", "brief", "--request-timeout", "2", "--max-seq-len", "4096"]
    assert main([*command, *FLAGS, *brief]) == 0
    with (written / "pair" / "1" / "model.py").open("a") as file:
        file.write(MORTAL)
    folder = tmp_path_factory.mktemp("moved") / "elsewhere"
    shutil.move(written, folder)
    return folder


@pytest.fixture(scope="module")
def started(pod, models, repository):
    """The server, which loads its model while other things are done."""
    site = triton_server.installed(repository)
    flags = pod["containers"][0]["args"]
    assert flags[0] == "--model-repository=/models"
    server = triton_server.TritonServer(site, models.parent / "server", models, *flags[1:])
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def llm(started, shipped_model):
    """In this process: what the server's texts are compared with."""
    with LLM(shipped_model, max_batch_size=8, max_seq_len=256, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(started, llm):
    return started.wait_until_live()


@pytest.fixture(scope="module")
def expected(llm):
    """Texts by prompt and length."""
    pairs = [(prompt, 4 + 7 * number) for number, prompt in enumerate(PROMPTS)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in pairs]
    outputs = llm.generate([prompt for prompt, _ in pairs], params)
    return {pair: out.outputs[0].text for pair, out in zip(pairs, outputs, strict=True)}


@pytest.fixture
def grpc_client(server):
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        yield client


def generate(server, model=MODEL, **body):
    status, text = server.post(f"/v2/models/{model}/generate", body)
    return status, json.loads(text)


def refusal(server, **body):
    status, answer = generate(server, **body)
    assert status == 400, answer
    return answer["error"]


def gauge(server, name, model=MODEL):
    """The sum over all instances."""
    return sum(v for key, v in server.metrics(model).items() if key[0] == name)


def idle(server, model=MODEL):
    return all(
        gauge(server, f"treewy_{name}", model) == 0
        for name in ("requests_running", "requests_waiting", "state_slots_used", "kv_blocks_used")
    )


def finished(server, reason, model=MODEL):
    found = server.metrics(model).items()
    return sum(v for key, v in found if key[:2] == ("treewy_requests_finished_total", reason))


class Stream:
    """One gRPC stream, with what came over it."""

    def __init__(self, client, model=MODEL, **values):
        self.client, self.results, self.errors = client, [], []
        self.ended = threading.Event()
        client.start_stream(self._take)
        client.async_stream_infer(
            model, infer_inputs(grpc, **values), enable_empty_final_response=True
        )

    def _take(self, result, error):
        if error is not None:
            self.errors.append(error)
            self.ended.set()
            return
        self.results.append(result)
        parameters = result.get_response().parameters
        if parameters["triton_final_response"].bool_param:
            self.ended.set()

    def text(self):
        return "".join(map(text_of, self.results))


def test_the_probes_of_the_pod_are_answered(server, pod):
    container = pod["containers"][0]
    for probe in ("startupProbe", "readinessProbe"):
        assert server.get(container[probe]["httpGet"]["path"])[0] == 200
    assert server.get("/v2/models/another/ready")[0] == 400


def test_generate_gives_the_text_of_llm_generate(server, llm):
    for speculation in (True, False):
        status, answer = generate(
            server, text_input=PROMPT, max_tokens=40, speculation=speculation, ignore_eos=True
        )
        output = llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        assert (status, answer["text_output"]) == (200, output.outputs[0].text)
        assert answer["finish_reason"] == "length"
        if speculation:
            assert answer["num_verify_steps"] == output.speculation.num_steps
            assert answer["accepted_per_depth"] == output.speculation.accepted_per_depth
            assert answer["acceptance_length"] == pytest.approx(
                output.speculation.acceptance_length
            )
            assert answer["total_accepted_draft_tokens"] == output.speculation.num_accepted
            assert answer["total_draft_tokens"] == output.speculation.num_drafted
        else:
            assert not answer.keys() & {"acceptance_length", "num_verify_steps"}


def test_generate_stream_brings_the_text_in_pieces(server, llm):
    body = {"text_input": PROMPT, "max_tokens": 30, "stream": True, "return_num_input_tokens": True}
    body |= {"return_num_output_tokens": True}
    status, text = server.post("/v2/models/treewy-tiny/generate_stream", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    output = llm.generate(PROMPT, SamplingParams(max_tokens=30))
    assert status == 200
    assert "".join(event["text_output"] for event in events) == output.outputs[0].text
    assert len(events) > 3
    assert sum(event["num_output_tokens"] for event in events) == output.outputs[0].length
    assert {event["num_input_tokens"] for event in events} == {len(output.prompt_token_ids)}
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert "acceptance_length" in events[-1]


def test_a_seed_gives_the_text_of_llm_generate(server, llm):
    settings = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    params = SamplingParams(max_tokens=30, seed=11, ignore_eos=True, **settings)
    text = llm.generate(PROMPT, params).outputs[0].text
    for name in ("random_seed", "seed"):
        body = settings | {name: 11, "text_input": PROMPT, "max_tokens": 30, "ignore_eos": True}
        assert generate(server, **body)[1]["text_output"] == text
    assert generate(server, **(body | {"seed": 12}))[1]["text_output"] != text


def test_stop_and_bad_words(server, llm):
    text = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True)).outputs[0].text
    word = text.split()[2]
    body = {"text_input": PROMPT, "max_tokens": 30, "ignore_eos": True}
    _, answer = generate(server, **body, stop_words=["no such words", word], bad_words="")
    assert answer["text_output"] == text[: text.index(word)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", word)
    bad = llm.tokenizer.decode(llm.tokenizer.encode(f" {word}", add_special_tokens=False)[:1])
    _, answer = generate(server, **body, bad_words=[bad], stop_words="")
    params = SamplingParams(
        max_tokens=30,
        ignore_eos=True,
        bad_token_ids=llm.tokenizer.encode(bad, add_special_tokens=False),
    )
    assert answer["text_output"] == llm.generate(PROMPT, params).outputs[0].text != text


def test_end_id_and_the_prompt_in_the_text(server, llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)).outputs[0]
    body = {"text_input": PROMPT, "max_tokens": 8}
    _, answer = generate(server, **body, end_id=output.token_ids[3])
    end = llm.generate(PROMPT, SamplingParams(max_tokens=8, end_id=output.token_ids[3])).outputs[0]
    assert (answer["text_output"], answer["finish_reason"]) == (end.text, "stop")
    _, answer = generate(server, **body, ignore_eos=True, exclude_input_in_output=False)
    assert answer["text_output"] == PROMPT + output.text
    body |= {"ignore_eos": True, "exclude_input_in_output": False, "stream": True}
    _, text = server.post("/v2/models/treewy-tiny/generate_stream", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == PROMPT + output.text


def test_log_probabilities(server, llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=0)).outputs[0]
    values = [
        row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)
    ]
    _, answer = generate(server, text_input=PROMPT, max_tokens=12, return_log_probs=True)
    assert answer["output_log_probs"] == pytest.approx(values, abs=1e-4)
    assert answer["cum_log_probs"] == pytest.approx(sum(values), abs=1e-3)
    body = {"text_input": PROMPT, "max_tokens": 12, "return_log_probs": True, "stream": True}
    _, text = server.post("/v2/models/treewy-tiny/generate_stream", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line]
    rows = [event["output_log_probs"] for event in events]
    pieces = [x for row in rows for x in (row if isinstance(row, list) else [row])]
    assert pieces == pytest.approx(values, abs=1e-4)


def test_http_client_and_grpc_client(server, llm, grpc_client):
    """The requests of Triton's OpenAI frontend, with the shapes and types that it sends."""
    values = {"text_input": PROMPT, "stream": False, "max_tokens": 20, "stop_words": ["nowhere"]}
    values |= {"temperature": 0.0, "seed": 3, "exclude_input_in_output": True}
    values |= {"return_num_input_tokens": True, "return_num_output_tokens": True}
    output = llm.generate(PROMPT, SamplingParams(max_tokens=20))
    stream = Stream(grpc_client, **values)
    assert stream.ended.wait(60)
    grpc_client.stop_stream()
    (result,) = [one for one in stream.results if one.as_numpy("text_output") is not None]
    assert text_of(result) == output.outputs[0].text
    assert result.as_numpy("text_output").shape == (1, 1)
    assert result.as_numpy("num_input_tokens").item() == len(output.prompt_token_ids)
    assert result.as_numpy("num_output_tokens").item() == output.outputs[0].length
    # Triton's infer endpoints do not take decoupled models; that is theirs to say.
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        assert client.is_model_ready(MODEL)
        config = client.get_model_config(MODEL)
        assert [one["kind"] for one in config["instance_group"]] == ["KIND_CPU"]
        assert client.get_model_metadata(MODEL)["inputs"][0]["name"] == "text_input"
        with pytest.raises(http.InferenceServerException, match="decoupled"):
            client.infer(MODEL, infer_inputs(http, text_input=PROMPT, max_tokens=2))


def test_32_streams_at_once(server, llm):
    """More than there are slots; each has its own text, whole and once."""
    prompts = [f"{PROMPTS[number % 6]} {number}" for number in range(32)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    texts = {(p, 8): out.outputs[0].text for p, out in zip(prompts, outputs, strict=True)}
    load = Load(server, MODEL, texts)

    async def ask(way, prompt):
        request = {"text_input": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
        load.check(request, *(await way(request)))

    async def ask_all():
        async with load.connected():
            ways = (load.over_grpc, load.over_http)
            await asyncio.gather(*(ask(ways[i % 2], prompt) for i, prompt in enumerate(prompts)))

    asyncio.run(ask_all())
    assert (load.tally.whole, load.tally.faults) == (32, [])
    until(lambda: idle(server))


def test_cancellation_frees_the_request(server, grpc_client):
    before = finished(server, "cancelled")
    stream = Stream(grpc_client, **ENDLESS, stream=True)
    until(lambda: gauge(server, "treewy_requests_running") == 1 and len(stream.results) > 2)
    grpc_client.stop_stream(cancel_requests=True)
    until(lambda: idle(server))
    assert finished(server, "cancelled") == before + 1
    assert not any(one.as_numpy("finish_reason") for one in stream.results)


def test_a_request_that_waits_can_be_cancelled(server):
    """All slots are taken; what waits for one is gone as well."""
    clients = [grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") for _ in range(6)]
    for client in clients:
        Stream(client, **ENDLESS, stream=False)
    until(lambda: gauge(server, "treewy_requests_running") == 4)
    until(lambda: gauge(server, "treewy_requests_waiting") == 2)
    for client in reversed(clients):
        client.stop_stream(cancel_requests=True)
        client.close()
    until(lambda: idle(server))


CLIENT = """
import sys, threading
import tritonclient.grpc as grpc
from triton_load import infer_inputs
client = grpc.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: print("here", flush=True))
values = {"text_input": sys.argv[2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
client.async_stream_infer("treewy-tiny", infer_inputs(grpc, **values))
threading.Event().wait(60)
"""


def test_a_grpc_client_that_is_killed_frees_the_request(server):
    """It cancels nothing, and closes nothing itself."""
    before = finished(server, "cancelled")
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"127.0.0.1:{server.grpc}", PROMPT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with client:
        assert client.stdout.readline() == b"here\n"
        client.kill()
    until(lambda: finished(server, "cancelled") == before + 1)
    until(lambda: idle(server))


def test_disconnect_frees_the_request(server):
    before = finished(server, "cancelled")
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    head = "POST /v2/models/treewy-tiny/generate_stream HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.http)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert b"text_output" in connection.recv(1 << 16) + connection.recv(1 << 16)
    until(lambda: finished(server, "cancelled") == before + 1)
    until(lambda: idle(server))


def test_a_timeout_ends_a_request_whose_client_triton_does_not_miss(server):
    """One of `generate`, which Triton 24.10 takes for waiting; and what others are told."""
    assert server.load("brief")[0] == 200
    body = json.dumps(ENDLESS).encode()
    head = "POST /v2/models/brief/generate HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.http)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: gauge(server, "treewy_requests_running", "brief") == 1)
    until(lambda: finished(server, "cancelled", "brief") == 1, 20)
    until(lambda: idle(server, "brief"))
    status, answer = generate(server, "brief", **ENDLESS)
    assert (status, answer["error"]) == (
        400, "the request did not end within request_timeout=2 s"
    )  # fmt: skip
    assert generate(server, "brief", text_input=PROMPT, max_tokens=2)[0] == 200
    assert server.unload("brief")[0] == 200
    until(lambda: "successfully unloaded 'brief'" in server.log())


BAD = [
    ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
    ({"top_p": 1.5}, r"top_p must be in [0, 1], got 1.5"),
    ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
    ({"temprature": 1}, "unknown input 'temprature'; did you mean 'temperature'?"),
    ({"beam_width": 4}, "beam_width=4 is not supported: one text a prompt"),
    ({"num_return_sequences": 2}, "num_return_sequences=2 is not supported"),
    ({"seed": 1, "random_seed": 2}, "seed=1 and random_seed=2 differ"),
    ({"bad_words": ["of no one token"]}, "bad_words: 'of no one token' is"),
    ({"end_id": 10**6}, "stop or end token 1000000 is not an id below vocab_size"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens (9) is above max_tokens (3)"),
    ({"text_input": ""}, "has no tokens, expected at least one"),
    ({"max_tokens": 5000}, "4096"),
    ({"text_input": "word " * 4200, "max_tokens": 1}, "tokens, expected at most 4095"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_input_is_refused_with_the_reason(bad, message, server):
    assert message in refusal(server, **({"text_input": PROMPT, "max_tokens": 4} | bad))


def test_text_that_is_none_is_refused(server, grpc_client):
    inputs = infer_inputs(grpc, text_input="x", max_tokens=4)
    inputs[0].set_data_from_numpy(np.array([[b"\xff\xfe"]], np.object_))
    errors = []
    ended = threading.Event()
    grpc_client.start_stream(lambda result, error: (errors.append(error), ended.set()))
    grpc_client.async_stream_infer(MODEL, inputs)
    assert ended.wait(20)
    grpc_client.stop_stream()
    assert "text_input is not UTF-8" in str(errors[0])


def test_two_prompts_in_one_request_are_refused_by_triton(server, grpc_client):
    text = grpc.InferInput("text_input", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"a"], [b"b"]], np.object_))
    errors, ended = [], threading.Event()
    grpc_client.start_stream(lambda result, error: (errors.append(error), ended.set()))
    grpc_client.async_stream_infer(MODEL, [text])
    assert ended.wait(20)
    grpc_client.stop_stream()
    assert "batch-size must be <= 1" in str(errors[0])


def test_the_engine_s_metrics_are_among_triton_s(server):
    before = server.metrics(MODEL)
    _, answer = generate(server, text_input=PROMPT, max_tokens=25, ignore_eos=True)

    def grown(name, *labels):
        key = (name, *labels, "treewy-tiny_0_0")
        return server.metrics(MODEL).get(key, 0) - before.get(key, 0)

    steps, accepted = answer["num_verify_steps"], answer["total_accepted_draft_tokens"]
    expected = {
        ("treewy_requests_finished_total", "length"): 1,
        ("treewy_generation_tokens_total",): 25,
        ("treewy_verify_steps_total",): steps,
        ("treewy_acceptance_length_count",): steps,
        ("treewy_draft_tokens_total",): answer["total_draft_tokens"],
        ("treewy_acceptance_length_sum",): steps + accepted,
        ("treewy_request_seconds_bucket", "+Inf"): 1,
    }
    for depth, count in enumerate(answer["accepted_per_depth"], start=1):
        expected["treewy_accepted_tokens_total", str(depth)] = count
    # The model sets one number after the other, and the server may be asked between two.
    until(lambda: grown("treewy_requests_finished_total", "length") == 1)
    until(lambda: {key: grown(*key) for key in expected} == expected)
    assert server.metrics(MODEL)["treewy_engine_alive", "treewy-tiny_0_0"] == 1


def load_run(server, expected, seconds):
    """Every answer that was waited for is right; nothing is left, and nobody was lost."""
    load = Load(server, "pair", expected)
    tally = asyncio.run(load.run(seconds, num_clients=12))
    assert tally.faults == []
    assert min(tally.whole, tally.given_up) > 5
    until(lambda: idle(server, "pair"), 30)

    def all_ended():
        ended = gauge(server, "treewy_requests_finished_total", "pair")
        return ended == gauge(server, "treewy_request_prompt_tokens_count", "pair")

    until(all_ended)
    assert finished(server, "error", "pair") == 0
    assert finished(server, "length", "pair") >= tally.whole
    assert len(server.processes()) >= 4
    return tally


def test_load_on_two_replicas_with_random_disconnects(server, expected):
    assert server.load("pair")[0] == 200
    load_run(server, expected, 3)
    for replica in ("pair_0_0", "pair_0_1"):
        assert server.metrics("pair")["treewy_requests_finished_total", "length", replica] > 0


@pytest.mark.slow
def test_load_of_minutes(server, expected):
    seconds = float(os.environ.get("TREEWY_LOAD_SECONDS", "180"))
    if not server.ready("pair"):
        assert server.load("pair")[0] == 200
    tally = load_run(server, expected, seconds)
    figures = {"seconds": seconds, "whole": tally.whole, "given_up": tally.given_up}
    for reason in ("length", "cancelled", "error"):
        figures[reason] = finished(server, reason, "pair")
    print(json.dumps(figures))


def test_an_engine_that_died_is_not_ready(server):
    """Of two replicas one dies: the other goes too, as the dead one would answer first."""
    if not server.ready("pair"):
        assert server.load("pair")[0] == 200
    assert server.get("/v2/health/ready")[0] == 200
    status, answer = generate(server, "pair", text_input="the end", max_tokens=3)
    assert status == 400  # of Triton's generate endpoint, whatever the error's code is
    assert "the engine has failed: RuntimeError: CUDA error" in answer["error"]
    until(lambda: not server.ready("pair"))
    assert server.get("/v2/health/ready")[0] == 400
    until(lambda: "successfully unloaded 'pair'" in server.log())
    assert "pair: the engine has failed: RuntimeError: CUDA error" in server.log()
    assert not any(key[0].startswith("treewy_") for key in server.metrics("pair"))
    assert generate(server, text_input=PROMPT, max_tokens=2)[0] == 200


def test_a_bad_parameter_stops_the_loading_with_the_reason(server, models):
    """In the answer to whoever asked for it, and in the log."""
    folder = shutil.copytree(models / MODEL, models / "bad", symlinks=True)
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(
        text.replace('name: "treewy-tiny"', 'name: "bad"').replace("float32", "int8")
    )
    status, answer = server.load("bad")
    assert (status, "parameter dtype: invalid choice: 'int8'" in answer) == (400, True), answer
    assert "parameter dtype: invalid choice: 'int8'" in server.log()
    assert not server.ready("bad")
    shutil.rmtree(folder)
    assert server.ready(MODEL)


def test_unload_while_running_lets_requests_finish(server, expected, grpc_client):
    prompt, length = list(expected)[-1]
    stream = Stream(grpc_client, text_input=prompt, max_tokens=length, ignore_eos=True, stream=True)
    until(lambda: stream.results)
    assert server.unload(MODEL)[0] == 200
    assert not server.ready(MODEL)
    assert generate(server, text_input=PROMPT)[0] == 404
    assert stream.ended.wait(60)
    grpc_client.stop_stream()
    assert (stream.text(), stream.errors) == (expected[prompt, length], [])
    until(lambda: "successfully unloaded 'treewy-tiny'" in server.log())
    assert not any(key[0].startswith("treewy_") for key in server.metrics(MODEL))


def test_nothing_is_left_after_the_end(server):
    assert server.process.poll() is None
    assert server.stop() == 0
    assert (server.processes(), server.shared_memory()) == ([], [])
