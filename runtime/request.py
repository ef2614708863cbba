"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtllm_treewy.outputs import AcceptanceStats, FinishReason
from trtllm_treewy.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .sampling import Logprob


@dataclass(eq=False)
class Request:
    """State of a request that the scheduler and the engine share.

    Attributes:
        request_id: unique within the engine.
        prompt_token_ids: the prompt, at least one token.
        params: stop conditions and limits.
        end_ids: ids that end the text; empty where they are to be ignored.
        speculation: False decodes this request without drafts.
        sequence: its number among the sequences of one prompt (n > 1), which draw differently.
        priority: requests of a higher one are admitted first, and preempted last.
        slot: state slot, None while waiting (at first, and again after a preemption).
        num_computed: tokens of prompt and output that are in state and cache.
        num_cached: those of them that the prefix cache gave at the last admission.
        output_token_ids: the output so far; its last token is the next tree's root, and is not in
            the state yet.
        logprobs: of the output tokens, where they are asked for; one entry a token.
        finish_reason: None while running, else why it ended (see `CompletionOutput`).
        stop_reason: the stop token id or stop string that ended it; None for an end token.
        error: what went wrong, where the reason is "error".
        stats: acceptance counts.
        num_preemptions: times it lost its slot and was computed again.
        isolated: it was in a step that failed, and runs in a batch of its own until one succeeds.
        arrival: number in order of arrival, given by the scheduler.
        added_at, admitted_at, first_token_at, finished_at: seconds on the engine's clock, None
            until then; `admitted_at` is the first admission.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    speculation: bool = True
    sequence: int = 0
    priority: int = 0
    slot: int | None = None
    num_computed: int = 0
    num_cached: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    num_preemptions: int = 0
    isolated: bool = False
    arrival: int = -1
    added_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def held_slot(self) -> int:
        """The slot, of a request that holds one."""
        if self.slot is None:
            raise RuntimeError(f"request {self.request_id} holds no slot")
        return self.slot

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at their longest."""
        return len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_to_prefill(self) -> int:
        """Tokens that must be in the state before the next tree: all but a chosen last one."""
        return len(self.prompt_token_ids) + max(0, len(self.output_token_ids) - 1)

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens that are in the state."""
        return min(self.num_computed, len(self.prompt_token_ids))

    @property
    def prompt_done(self) -> bool:
        """Whether trees come next: the prompt, and the output after a preemption, is computed."""
        return self.num_computed >= self.num_to_prefill and bool(self.output_token_ids)

    @property
    def context_len(self) -> int:
        """Tokens in state and cache."""
        return self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

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
                del self.logprobs[len(self.output_token_ids) :]
                return taken
        return len(token_ids)
