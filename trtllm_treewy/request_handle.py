"""A request with its text, and what the caller has been told of it so far."""

from __future__ import annotations

from collections.abc import Callable

from .outputs import CompletionOutput, RequestOutput
from .runtime.detokenizer import Detokenizer
from .runtime.request import Request


class RequestHandle:
    """Turns a request's tokens into text, and into outputs with what is new in each.

    Args:
        request: as the engine knows it.
        prompt: its text, None where it was given as token ids.
        detokenizer: None where no text is wanted.
        drafts: whether the engine has drafts, so that acceptance is told.
    """

    def __init__(
        self, request: Request, prompt: str | None, detokenizer: Detokenizer | None, drafts: bool
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._detokenizer = detokenizer
        self._drafts = drafts
        self._told_tokens = 0
        self._told_text = 0

    @property
    def finished(self) -> bool:
        return self.request.finished

    @property
    def has_news(self) -> bool:
        return self.finished or len(self.request.output_token_ids) > self._told_tokens

    def update(self, stop: Callable[[Request, int, str], None]) -> None:
        """Turns new tokens into text; calls `stop` where a stop string is complete."""
        text, request = self._detokenizer, self.request
        if text is None or text.stopped_by is not None:
            return
        text.add(request.output_token_ids[text.num_tokens :], last=request.finished)
        if text.stopped_by is not None:
            stop(request, text.num_tokens, text.stopped_by)

    def output(self) -> RequestOutput:
        """Everything so far; the differences are against the last call."""
        request = self.request
        text = self._detokenizer.text if self._detokenizer is not None else ""
        # The engine notes those of a whole step, of which a stop may have cut tokens off.
        noted = request.logprobs[: len(request.output_token_ids)]
        completion = CompletionOutput(
            text=text,
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            text_diff=text[self._told_text :],
            token_ids_diff=request.output_token_ids[self._told_tokens :],
            logprobs=None if request.params.num_logprobs is None else noted,
        )
        self._told_text, self._told_tokens = len(text), len(request.output_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=request.finished,
            speculation=request.stats if self._drafts and request.speculation else None,
            error=request.error,
        )
