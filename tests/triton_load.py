"""Load on a Triton server: streams and whole answers, HTTP and gRPC, many of them given up.

Every answer that is waited for must be the expected text, told once and to its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import httpx
import numpy as np
import tritonclient.grpc.aio as grpc_aio

INPUT_TYPES = {
    "text_input": ("BYTES", np.object_),
    "max_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "beam_width": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "random_seed": ("UINT64", np.uint64),
    "seed": ("UINT64", np.uint64),
    "stop_words": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
}


def infer_inputs(client, **values):
    """`values` as a client's `InferInput`s, in the shapes that TensorRT-LLM's clients send."""
    inputs = []
    for name, value in values.items():
        kind, dtype = INPUT_TYPES.get(name, ("BOOL", np.bool_))
        row = value if isinstance(value, list) else [value]
        array = np.array([[v.encode() if isinstance(v, str) else v for v in row]], dtype)
        tensor = client.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Tally:
    """What happened."""

    whole: int = 0
    given_up: int = 0
    faults: list[str] = field(default_factory=list)


class Load:
    """Clients that ask, one request after another each, until the time is over.

    Args:
        server: a `TritonServer`.
        model: name of the model.
        expected: {(prompt, max_tokens): text}.
    """

    def __init__(self, server, model, expected, seed=0):
        self.server, self.model, self.expected = server, model, expected
        self.random = Random(seed)
        self.tally = Tally()

    async def run(self, seconds, num_clients):
        end = time.monotonic() + seconds
        async with self.connected():
            await asyncio.gather(*(self._client(end) for _ in range(num_clients)))
        return self.tally

    @asynccontextmanager
    async def connected(self):
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.server.url, limits=limits, timeout=120) as self.http,
            grpc_aio.InferenceServerClient(f"127.0.0.1:{self.server.grpc}") as self.grpc,
        ):
            yield

    async def _client(self, end):
        random = self.random
        ways = [self.over_http, self.over_grpc]
        while time.monotonic() < end:
            prompt, max_tokens = random.choice(list(self.expected))
            request = {"text_input": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            request |= {"stream": random.random() < 0.7, "speculation": random.random() < 0.8}
            patience = random.uniform(0, 1) if random.random() < 0.4 else None
            asked = asyncio.ensure_future(random.choice(ways)(request))
            if patience is not None:
                await asyncio.wait({asked}, timeout=patience)
                if asked.cancel():
                    await asyncio.wait({asked})
                    self.tally.given_up += 1
                    continue
            self.check(request, *(await asked))

    def check(self, request, texts, reasons):
        expected = self.expected[request["text_input"], request["max_tokens"]]
        if "".join(texts) != expected or reasons != ["length"]:
            self.tally.faults.append(f"{request}: {texts} {reasons}, not {expected!r}")
        self.tally.whole += 1

    async def over_http(self, request):
        texts, reasons = [], []
        path = "generate_stream" if request["stream"] else "generate"
        url = f"/v2/models/{self.model}/{path}"
        async with self.http.stream("POST", url, json=request) as answer:
            async for line in answer.aiter_lines():
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    texts.append(event.get("text_output", repr(event)))
                    reasons += [event["finish_reason"]] if "finish_reason" in event else []
        return texts, reasons

    async def over_grpc(self, request):
        texts, reasons = [], []

        async def requests():
            yield {"model_name": self.model, "inputs": infer_inputs(grpc_aio, **request)}

        answers = self.grpc.stream_infer(requests())
        try:
            async for result, error in answers:
                if error is not None:
                    return [*texts, repr(error)], reasons
                texts.append(text_of(result))
                reason = result.as_numpy("finish_reason")
                reasons += [] if reason is None else [reason.item().decode()]
        except asyncio.CancelledError:
            answers.cancel()
            raise
        return texts, reasons


def text_of(result):
    return result.as_numpy("text_output").item().decode()
