"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_treewy.outputs import AcceptanceStats, FinishReason
from trtllm_treewy.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """State of a request that the scheduler and the engine share.

    Attributes:
        request_id: unique within the engine.
        prompt_token_ids: the prompt, at least one token.
        params: stop conditions and limits.
        end_ids: ids that end the text; empty where they are to be ignored.
        slot: state slot, None while waiting.
        num_prefilled: prompt tokens that are in the state.
        output_token_ids: the output so far; its last token is the next tree's root, and is not in
            the state yet.
        finish_reason: None while running, else why it ended (see `CompletionOutput`).
        stop_reason: the stop token id or stop string that ended it; None for an end token.
        error: what went wrong, where the reason is "error".
        stats: acceptance counts.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    slot: int | None = None
    num_prefilled: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at their longest."""
        return len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def prompt_done(self) -> bool:
        return self.num_prefilled == len(self.prompt_token_ids)

    @property
    def context_len(self) -> int:
        """Tokens in state and cache: the prompt, and all output tokens but the last."""
        if not self.prompt_done:
            return self.num_prefilled
        return len(self.prompt_token_ids) + max(0, len(self.output_token_ids) - 1)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def forbidden_until_min_tokens(self) -> frozenset[int]:
        """Ids that may not be chosen before `min_tokens` tokens are there."""
        if not self.params.min_tokens:
            return frozenset()
        return self.end_ids | frozenset(self.params.stop_ids)

    def fail(self, error: str) -> None:
        """Ends the request with an error of its own; others are not concerned."""
        self.finish_reason, self.error = "error", error

    def append(self, token_ids: Sequence[int]) -> int:
        """Takes tokens in order until a stop condition; returns how many were taken.

        An end or stop token is taken (it is part of `output_token_ids`) and ends the request.
        """
        for taken, token in enumerate(token_ids, start=1):
            self.output_token_ids.append(token)
            if token in self.end_ids:
                self.finish_reason = "stop"
            elif token in self.params.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif len(self.output_token_ids) >= self.params.max_tokens:
                self.finish_reason = "length"
            if self.finished:
                return taken
        return len(token_ids)
