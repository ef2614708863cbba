"""The texts of one prompt (`SamplingParams.n`), each a request of its own, told of as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from .outputs import AcceptanceStats, CompletionOutput, RequestOutput


class Text(Protocol):
    """A request with its text, as `LLM` keeps it."""

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `output` would tell more than the last time."""
        ...

    def output(self) -> RequestOutput:
        """Everything so far."""
        ...


class Stream(Protocol):
    """Outputs of one text as they come."""

    async def __anext__(self) -> RequestOutput: ...

    def abort(self) -> None:
        """Ends the text where it stands."""
        ...


class TextGroup:
    """All texts of a prompt.

    Args:
        texts: at least one, in order.
    """

    def __init__(self, texts: Sequence[Any]) -> None:
        self.texts = list(texts)
        # Those whose end was told: they are finished ever after, and that is no news.
        self._told: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether all have ended."""
        return all(text.finished for text in self.texts)

    @property
    def has_news(self) -> bool:
        """Whether there is more of any."""
        return any(
            text.has_news for index, text in enumerate(self.texts) if index not in self._told
        )

    def output(self) -> RequestOutput:
        """All of them as one output."""
        self._told |= {index for index, text in enumerate(self.texts) if text.finished}
        return merged([text.output() for text in self.texts])


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the texts of several; counts are summed, the first error is the error."""
    if len(outputs) == 1:
        return outputs[0]
    stats = [output.speculation for output in outputs if output.speculation is not None]
    return replace(
        outputs[0],
        outputs=[replace(output.outputs[0], index=index) for index, output in enumerate(outputs)],
        finished=all(output.finished for output in outputs),
        speculation=sum(stats, AcceptanceStats()) if stats else None,
        error=next((output.error for output in outputs if output.error), None),
    )


class MergedStream:
    """The streams of all texts as one: an output whenever there is more of any, or the whole.

    A wait that is cancelled loses nothing, as with a stream of one text. Where one of them raises,
    all of them are ended.

    Args:
        streams: one of each text, in order.
        streaming: what they were made with; without it there is one output, at the end.
    """

    def __init__(self, streams: Sequence[Stream], streaming: bool) -> None:
        self._streams, self._streaming = list(streams), streaming
        self._latest: list[RequestOutput | None] = [None] * len(self._streams)
        self._waiting: dict[asyncio.Future[RequestOutput], int] | None = None

    def __aiter__(self) -> MergedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._waiting is None:
            self._waiting = {}
            for index in range(len(self._streams)):
                self._wait_for(index)
        if not self._waiting:
            raise StopAsyncIteration
        until = asyncio.FIRST_COMPLETED if self._streaming else asyncio.FIRST_EXCEPTION
        done, _ = await asyncio.wait(self._waiting, return_when=until)
        self._latest = [None if output is None else _told(output) for output in self._latest]
        try:
            for task in done:
                output = task.result()
                index = self._waiting.pop(task)
                self._latest[index] = output
                if not output.finished:
                    self._wait_for(index)
        except BaseException:
            self._end()
            raise
        some = next(output for output in self._latest if output is not None)
        return merged([_nothing_of(some) if one is None else one for one in self._latest])

    def _wait_for(self, index: int) -> None:
        assert self._waiting is not None
        self._waiting[asyncio.ensure_future(_next(self._streams[index]))] = index

    def _end(self) -> None:
        """Ends all texts; what else they have to say is not heard."""
        for task in self._waiting or ():
            if not task.cancel() and not task.cancelled():
                task.exception()  # or asyncio would log that nobody asked for it
        self._waiting = {}
        for stream in self._streams:
            stream.abort()


async def _next(stream: Stream) -> RequestOutput:
    return await stream.__anext__()


def _nothing_of(other: RequestOutput) -> RequestOutput:
    """What there is to tell of a text of the same prompt before its first token."""
    return replace(
        other, outputs=[CompletionOutput()], finished=False, speculation=None, error=None
    )


def _told(output: RequestOutput) -> RequestOutput:
    """The same without news."""
    texts = [replace(text, text_diff="", token_ids_diff=[]) for text in output.outputs]
    return replace(output, outputs=texts)
