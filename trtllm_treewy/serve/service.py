"""From a parsed request to running streams: template, tokens, limits, admission."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..outputs import RequestOutput
from ..runtime.async_engine import DEFAULT_MAX_QUEUE
from ..runtime.errors import RequestError, TooLongError
from ..runtime.metrics import Metrics
from ..runtime.request_stream import Handle, RequestStream
from ..runtime.sampling import FAULT_REASONS, Fault
from .errors import ApiError, from_request_error, invalid
from .fields import expect_text
from .protocol import GenerationRequest

if TYPE_CHECKING:
    from ..llm import LLM

# What a request's own settings bring about, and what shows only once the logits are there.
_OF_ITS_SETTINGS = (FAULT_REASONS[Fault.NOTHING_ALLOWED], FAULT_REASONS[Fault.SETTINGS])


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and names of a server.

    Attributes:
        model_name: what clients call the model.
        api_key: what clients must show; None lets everyone in.
        max_queue: requests that may wait beyond those that run.
        max_body_bytes: longest body of a request.
        max_prompt_tokens: longest prompt; None leaves it to the engine's `max_seq_len`.
        max_texts: most texts of one request (prompts times n).
        body_seconds: a body must have come by then.
        shutdown_seconds: time that running requests get to finish when the server is told to end.
    """

    model_name: str
    api_key: str | None = None
    max_queue: int = DEFAULT_MAX_QUEUE
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_texts: int = 64
    body_seconds: float = 30.0
    shutdown_seconds: float = 30.0


class Service:
    """An `LLM` behind an `AsyncEngine`, for any number of concurrent requests."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        self.metrics = Metrics()
        limits = llm._engine._executor.limits
        self.max_seq_len = limits.max_seq_len
        self.max_prompt_tokens = settings.max_prompt_tokens or self.max_seq_len - 1
        self.engine = llm._driver.make_front(
            num_slots=limits.max_batch_size, max_queue=settings.max_queue, observer=self.metrics
        )
        self.metrics.watch(self.engine)
        # One thread, as a tokenizer may not be used by several at once; not the event loop's own,
        # as a long prompt takes its time.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="treewy-tokenizer")

    def close(self) -> None:
        """Ends the engine thread and all that still runs."""
        self.engine.close()
        self._tokenizing.shutdown()

    async def start(self, request: GenerationRequest) -> list[RequestStream]:
        """Streams of all texts of a request, in order; all are admitted, or none.

        Raises:
            ApiError: the request cannot run; the status says whose fault it is.
        """
        if request.model != self.settings.model_name:
            raise ApiError(
                404,
                f"the model {request.model!r} is not here, only {self.settings.model_name!r}",
                code="model_not_found",
                param="model",
            )
        if request.num_texts > self.settings.max_texts:
            raise invalid(
                "n",
                f"{request.num_texts} texts were asked for (prompts times n), at most "
                f"{self.settings.max_texts} may be",
            )
        loop = asyncio.get_running_loop()
        handles = await loop.run_in_executor(self._tokenizing, self._handles, request)
        try:
            return self.engine.submit(handles, streaming=request.stream)
        except TooLongError as error:
            raise invalid(None, str(error), "context_length_exceeded") from None
        except ValueError as error:
            raise invalid(None, str(error).removeprefix("SamplingParams: ")) from None
        except RequestError as error:
            raise from_request_error(error) from None

    def _handles(self, request: GenerationRequest) -> list[Handle]:
        prompts: Sequence[Any] = request.prompts
        special = True
        if request.messages is not None:
            # A chat template writes the special tokens itself.
            prompts, special = [self._render(request)], False
        if request.bad_words:
            request = replace(request, settings=request.settings | self._bad_tokens(request))
        handles: list[Handle] = []
        for prompt in prompts:
            ids = self._tokens(prompt, special)
            for params in request.sampling_params(self.max_seq_len - len(ids)):
                try:
                    handle = self.llm._requests.make({"prompt_token_ids": ids}, params)
                except ValueError as error:
                    raise invalid(None, str(error).removeprefix("SamplingParams: ")) from None
                for name, value in request.request_settings.items():
                    setattr(handle.request, name, value)
                handles.append(handle)
        return handles

    def _bad_tokens(self, request: GenerationRequest) -> dict[str, Any]:
        tokens = []
        for word in request.bad_words:
            ids = self.llm.tokenizer.encode(word, add_special_tokens=False)
            if len(ids) != 1:
                raise invalid(
                    "bad_words",
                    f"bad_words: {word!r} is {len(ids)} tokens, expected 1: this version forbids "
                    "single tokens",
                )
            tokens += ids
        return {"bad_token_ids": tokens}

    def _tokens(self, prompt: Any, special: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            ids: Sequence[int] = self.llm.tokenizer.encode(prompt, add_special_tokens=special)
        else:
            ids = prompt
        if not len(ids):
            raise invalid("prompt", "the prompt has no tokens, expected at least one")
        if len(ids) > self.max_prompt_tokens:
            raise invalid(
                "prompt",
                f"the prompt has {len(ids)} tokens, expected at most {self.max_prompt_tokens}",
                "context_length_exceeded",
            )
        return ids

    def _render(self, request: GenerationRequest) -> str:
        """The chat template of the tokenizer, which transformers runs in jinja's sandbox."""
        from jinja2 import TemplateError

        tokenizer = self.llm.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise invalid(
                "messages", "the model's tokenizer has no chat template; use /v1/completions"
            )
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
        if bad := sorted(reserved & set(request.template_options)):
            raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set {bad[0]}")
        try:
            text: str = tokenizer.apply_chat_template(
                list(request.messages or ()),
                tokenize=False,
                add_generation_prompt=True,
                **request.template_options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise invalid("messages", f"the model's chat template refuses this: {error}") from None
        return expect_text("chat_template_kwargs", text)


async def gather(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Waits for all; whatever goes wrong, an abandoned wait too, ends them all.

    Raises:
        ApiError: a request ended with an error.
    """
    try:
        outputs = []
        for stream in streams:
            async for output in stream:
                pass
            outputs.append(_sound(output))
        return outputs
    except RequestError as error:
        raise from_request_error(error) from None
    finally:
        for stream in streams:
            stream.abort()


async def merge(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(number of the stream, output) as they come; ends all streams when it is left.

    Raises:
        ApiError: a request ended with an error.
    """
    pending = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                output = _sound(task.result())
                if not output.finished:
                    pending[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    except RequestError as error:
        raise from_request_error(error) from None
    finally:
        for stream in streams:
            stream.abort()
        for task in pending:
            task.cancel()
        for task in pending:
            with contextlib.suppress(asyncio.CancelledError, RequestError, StopAsyncIteration):
                await task


def _sound(output: RequestOutput) -> RequestOutput:
    if output.error in _OF_ITS_SETTINGS:
        raise invalid(None, output.error)
    if output.error is not None:
        raise ApiError(500, output.error, code="request_failed")
    return output
