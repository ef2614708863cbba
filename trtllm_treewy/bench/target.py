"""What is measured: a model in this process, or a server of OpenAI's HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..outputs import AcceptanceStats
from ..runtime.errors import RequestError, describe
from ..sampling_params import SamplingParams
from .load import PlannedRequest

if TYPE_CHECKING:
    from ..llm import LLM


@dataclass
class RequestResult:
    """Times of one request, in seconds of one clock.

    Attributes:
        sent: when it was sent.
        arrivals: when something new came.
        prompt_tokens, output_tokens: as the target counts them.
        stats: acceptance, where the target tells.
        error: what went wrong; None for a request that ran to its end.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    stats: AcceptanceStats | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """From sending to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    def to_dict(self, start: float) -> dict[str, Any]:
        """For JSON, with times since `start`."""
        done = self.error is None
        return {
            "sent": round(self.sent - start, 6),
            "ttft": round(self.ttft, 6) if done else None,
            "tpot": round(self.tpot, 6) if done and self.tpot is not None else None,
            "latency": round(self.latency, 6) if done else None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "error": self.error,
        }


class Target(Protocol):
    """Runs one request and says when what came."""

    async def run(self, request: PlannedRequest) -> RequestResult: ...
    async def close(self) -> None: ...


class EngineTarget:
    """The engine of an `LLM` in this process."""

    def __init__(self, llm: LLM, num_requests: int) -> None:
        self._llm = llm
        self._engine = llm._driver.make_front(max_queue=num_requests)

    async def run(self, request: PlannedRequest) -> RequestResult:
        """One request; a failure is part of the result."""
        params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
        result = RequestResult(time.perf_counter())
        prompt: Any = request.prompt
        try:
            handle = self._llm._requests.make(prompt, params)
            async with self._engine.generate_async(handle) as stream:
                async for output in stream:
                    if output.outputs[0].token_ids_diff:
                        result.arrivals.append(time.perf_counter())
        except (RequestError, ValueError) as error:
            result.error = str(error)
            return result
        result.error = output.error
        result.prompt_tokens = len(output.prompt_token_ids)
        result.output_tokens = len(output.outputs[0].token_ids)
        result.stats = output.speculation
        return result

    async def close(self) -> None:
        """Ends the engine thread."""
        self._engine.close()


class HttpTarget:
    """A server at `url`; its model's name is asked for unless given.

    Raises:
        ValueError: `url` is not one of HTTP.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        import httpx

        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        root = url.rstrip("/").removesuffix("/v1")
        self._failures: tuple[type[Exception], ...] = (httpx.HTTPError, httpx.InvalidURL)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url must begin with http:// or https://, got {url!r}")
        self._client = httpx.AsyncClient(
            base_url=f"{root}/v1/",
            headers=headers,
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._url, self._model = url, model

    async def connect(self) -> str:
        """The model's name.

        Raises:
            ValueError: nobody answers there, or not as this API does.
        """
        if self._model is None:
            expected: tuple[type[Exception], ...] = (ValueError, LookupError, TypeError)
            expected += self._failures
            try:
                answer = await self._client.get("models")
                answer.raise_for_status()
                self._model = str(answer.json()["data"][0]["id"])
            except expected as error:
                reason = str(error) or type(error).__name__
                raise ValueError(f"{self._url} does not list a model: {reason}") from None
        return self._model

    async def run(self, request: PlannedRequest) -> RequestResult:
        """One streamed completion; a failure is part of the result."""
        body = {
            "model": await self.connect(),
            "prompt": request.prompt,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        result = RequestResult(time.perf_counter())
        try:
            async with self._client.stream("POST", "completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    result.error = f"{answer.status_code}: {_message(text)}"
                    return result
                await _read_events(answer.aiter_bytes(), result)
        except self._failures as error:
            result.error = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            result.error = f"an event that is not OpenAI's: {describe(error)}"
        if result.error is None and not (result.arrivals and result.output_tokens):
            result.error = "the answer ended without text or without usage"
        return result

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of events. httpx's own are those of text, which U+2028 within an event ends too."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _read_events(parts: AsyncIterator[bytes], result: RequestResult) -> None:
    async for line in _lines(parts):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        data = json.loads(line[5:])
        if data.get("error"):
            result.error = str(data["error"].get("message", data["error"]))
            return
        if any(choice.get("text") for choice in data.get("choices", ())):
            result.arrivals.append(time.perf_counter())
        if usage := data.get("usage"):
            result.prompt_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
        if stats := data.get("speculation"):
            names = asdict(AcceptanceStats())
            result.stats = AcceptanceStats(**{name: stats[name] for name in names})


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
