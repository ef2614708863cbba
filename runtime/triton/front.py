"""One engine for all requests of a model instance: an event loop in a thread of its own."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Protocol

from trtllm_treewy.cli.drafts import speculation_of
from trtllm_treewy.cli.loading import loaded_llm
from trtllm_treewy.serve.errors import ApiError
from trtllm_treewy.serve.service import ServerSettings, Service, merge

from .answers import Answer
from .requests import TritonRequest


class Responder(Protocol):
    """Where the responses to one request go; `model.py` has Triton's."""

    def send(self, values: Mapping[str, Any], final: bool) -> None: ...
    def fail(self, error: ApiError) -> None: ...
    def cancelled(self) -> bool: ...
    def end_cancelled(self) -> None: ...


class Front:
    """A model, its engine thread, and the requests that run.

    Args:
        settings: as `read_parameters` gives them.
        directory: of the checkpoint or the engine.
        model: what Triton calls it.

    Raises:
        FileNotFoundError, ValueError, MemoryError: what `LLM` raises.
    """

    def __init__(self, settings: argparse.Namespace, directory: Path, model: str) -> None:
        self._running: dict[asyncio.Task[None], Responder] = {}
        self._timeout: float | None = settings.request_timeout
        with ExitStack() as stack:
            speculation = speculation_of(settings, str(directory))
            llm = stack.enter_context(loaded_llm(settings, str(directory), speculation))
            self.service = Service(
                llm,
                ServerSettings(
                    model_name=model,
                    max_queue=settings.max_queue,
                    max_prompt_tokens=settings.max_prompt_tokens,
                ),
            )
            stack.callback(self.service.close)
            self._stack = stack.pop_all()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="treewy-requests", daemon=True
        )
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing can run any more; None while it can."""
        engine = self.service.engine
        if engine.alive:
            return None
        return engine.failure or "the engine thread has ended"

    def start(self, request: TritonRequest, responder: Responder) -> None:
        """Runs a request; from any thread. It ends with one last response, whatever happens."""
        self._loop.call_soon_threadsafe(self._start, request, responder)

    def end_cancelled(self) -> None:
        """Ends the requests whose clients have given up; from a thread that may wait for Triton.

        An error in what Triton says of a request is raised, after all others were asked.
        """
        failed: Exception | None = None
        for task, responder in list(self._running.items()):
            try:
                if responder.cancelled():
                    self._loop.call_soon_threadsafe(task.cancel)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Ends the engine; a request that still runs is told so."""
        self.service.engine.close()
        asyncio.run_coroutine_threadsafe(self._answered(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._stack.close()

    # --- event loop ---

    def _start(self, request: TritonRequest, responder: Responder) -> None:
        run = _Run(self.service, request, responder, self._timeout)
        task = self._loop.create_task(run.run())
        self._running[task] = responder
        task.add_done_callback(self._running.pop)

    async def _answered(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)


class _Run:
    """One request from its start to its last response."""

    def __init__(
        self,
        service: Service,
        request: TritonRequest,
        responder: Responder,
        timeout: float | None = None,
    ) -> None:
        self._service, self._request, self._responder = service, request, responder
        self._timeout = timeout

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self._generate(), self._timeout)
        except asyncio.TimeoutError:  # another class before Python 3.11
            reason = f"the request did not end within request_timeout={self._timeout} s"
            self._responder.fail(ApiError(503, reason))
        except asyncio.CancelledError:
            self._responder.end_cancelled()
        except ApiError as error:
            self._responder.fail(error)
        except Exception as error:  # whatever it is, the client must not wait for ever
            reason = f"internal error: {type(error).__name__}: {error}"
            self._responder.fail(ApiError(500, reason))

    async def _generate(self) -> None:
        answer = Answer(self._request)
        streams = await self._service.start(self._request.generation)
        async with aclosing(merge(streams)) as outputs:
            async for _, output in outputs:
                values = answer.values(output)
                if values is not None:
                    self._responder.send(values, output.finished)
