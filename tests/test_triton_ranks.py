"""A model over two ranks in a real Triton server, on the CPU: gloo in place of NCCL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from serving import ENGINE, until

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("tritonclient.grpc", reason="the extra test is not installed")
pytest.importorskip("prometheus_client", reason="the extra test is not installed")

import triton_server
import tritonclient.grpc as grpc
from triton_load import Load, infer_inputs, text_of

from trtllm_treewy import LLM, SamplingParams
from trtllm_treewy.cli import main

MODEL = "ranks"
PROMPT = "The location of the error log"
PROMPTS = [f"{words} the server" for words in ("When", "If", "After", "Before", "While")]
# Of KIND_MODEL, as on GPUs; where torch sees none, the ranks are on the CPU.
FLAGS = ["--dtype", "float32", "--draft-tree-widths", "2,2,2", "--max-batch-size", "4"]
FLAGS += ["--tensor-parallel-size", "2", "--max-seq-len", "4096", "--name", MODEL, "--quiet"]


@pytest.fixture(scope="module")
def started(shipped_model, repository, tmp_path_factory):
    """The server, which loads its model while other things are done."""
    site = triton_server.installed(repository)
    folder = tmp_path_factory.mktemp("triton")
    models = folder / "models"
    assert main(["triton-repo", str(shipped_model), "--output", str(models), *FLAGS]) == 0
    flags = ["--model-control-mode=explicit", f"--load-model={MODEL}", "--exit-timeout-secs=45"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        server = triton_server.TritonServer(site, folder / "server", models, *flags)
    server.config = models / MODEL / "config.pbtxt"
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def llm(started, shipped_model):
    with LLM(
        shipped_model, max_batch_size=4, max_seq_len=256, tensor_parallel_size=2, **ENGINE
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(started, llm):
    return started.wait_until_live()


@pytest.fixture
def loaded(server):
    if not server.ready(MODEL):
        until(lambda: MODEL not in server.post("/v2/repository/index", {"ready": True})[1])
        status, text = server.load(MODEL)
        assert status == 200, text
    return server


def ranks(server):
    """Processes of ranks 1, 2, .. whose rank 0 is the stub of this server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in server.processes() and b"rank_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Stream:
    """One gRPC stream over the model, with what came over it."""

    def __init__(self, client, **values):
        self.texts, self.errors, self.ended = [], [], threading.Event()
        client.start_stream(self._take)
        client.async_stream_infer(
            MODEL, infer_inputs(grpc, **values), enable_empty_final_response=True
        )

    def _take(self, result, error):
        if error is not None:
            self.errors.append(str(error))
        elif result.as_numpy("text_output") is not None:
            self.texts.append(text_of(result))
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            self.ended.set()


def test_the_texts_of_llm_generate(server, llm):
    """All at once, over gRPC streams; the same ranks, and one more process for them."""
    (rank,) = ranks(server)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    clients = [grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") for _ in PROMPTS]
    streams = [
        Stream(client, text_input=prompt, max_tokens=24, ignore_eos=True, stream=True)
        for client, prompt in zip(clients, PROMPTS, strict=True)
    ]
    for client, stream, output in zip(clients, streams, outputs, strict=True):
        assert stream.ended.wait(60)
        assert ("".join(stream.texts), stream.errors) == (output.outputs[0].text, [])
        assert len(stream.texts) > 3
        client.stop_stream()
        client.close()
    body = {"text_input": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 5}
    status, text = server.post(f"/v2/models/{MODEL}/generate", body)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    assert status == 200, text
    assert json.loads(text)["text_output"] == llm.generate(PROMPT, params).outputs[0].text
    assert json.loads(text)["acceptance_length"] > 1
    assert ranks(server) == [rank]


def test_load_with_random_disconnects(server, llm):
    """The ranks stay in step, and nothing of what was given up is left."""
    pairs = [(prompt, 4 + 5 * number) for number, prompt in enumerate(PROMPTS)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in pairs]
    outputs = llm.generate([prompt for prompt, _ in pairs], params)
    expected = {pair: out.outputs[0].text for pair, out in zip(pairs, outputs, strict=True)}
    tally = asyncio.run(Load(server, MODEL, expected).run(3, num_clients=8))
    assert tally.faults == []
    assert min(tally.whole, tally.given_up) > 2

    def idle():
        names = ("requests_running", "requests_waiting", "state_slots_used", "kv_blocks_used")
        found = server.metrics(MODEL)
        return not any(found[f"treewy_{name}", f"{MODEL}_0_0"] for name in names)

    until(idle, 30)


def test_a_killed_rank_ends_what_runs_and_the_model_is_not_ready(loaded):
    (rank,) = ranks(loaded)
    with grpc.InferenceServerClient(f"127.0.0.1:{loaded.grpc}") as client:
        stream = Stream(client, text_input=PROMPT, max_tokens=4000, ignore_eos=True, stream=True)
        until(lambda: stream.texts)
        os.kill(rank, signal.SIGKILL)
        assert stream.ended.wait(20)
        client.stop_stream()
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in stream.errors[0]
    until(lambda: not loaded.ready(MODEL), 20)
    assert loaded.get("/v2/health/ready")[0] == 400
    assert loaded.post(f"/v2/models/{MODEL}/generate", {"text_input": PROMPT})[0] != 200
    assert "SIGKILL; unloading the model" in loaded.log()


def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(loaded):
    """No request has to fail before the orchestrator sees it."""
    (rank,) = ranks(loaded)
    os.kill(rank, signal.SIGKILL)
    until(lambda: not loaded.ready(MODEL), 20)


def test_unload_leaves_no_process(loaded):
    stubs, found = loaded.processes(), ranks(loaded)
    assert (len(stubs), len(found)) == (3, 1)  # the server, the stub and its guard
    assert loaded.unload(MODEL)[0] == 200
    until(lambda: all(map(gone, found)) and len(loaded.processes()) == 1, 20)


def test_a_bad_interpreter_stops_the_loading_with_the_reason(server):
    text = server.config.read_text()
    bad = 'parameters { key: "python_executable" value { string_value: "/no/python3" } }\n'
    server.config.write_text(text + bad)
    status, answer = server.load(MODEL)
    server.config.write_text(text)
    reason = "parameter python_executable: '/no/python3' cannot run ranks: No such file or dir"
    assert (status, reason in answer) == (400, True), answer
    assert reason in server.log()


def test_ranks_end_with_a_server_that_is_killed(loaded):
    found = ranks(loaded)
    loaded.process.kill()
    loaded.process.wait()
    # A fraction of a second; a rank that is just being started imports torch before it looks.
    until(lambda: all(map(gone, found)) and not loaded.processes(), 20)
    assert not loaded.shared_memory()
