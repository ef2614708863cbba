"""What a request returns, in the shape of TensorRT-LLM's LLM API, and its acceptance statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .runtime.sampling import Logprob

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass
class AcceptanceStats:
    """How much of what was drafted the model agreed with.

    Every verification step yields the accepted drafts and one token more (the bonus), which the
    model chose itself. The first token of a text comes from the prompt pass and is not counted.

    Attributes:
        num_steps: verification steps.
        num_drafted: draft tokens verified, the roots not among them.
        num_accepted: draft tokens accepted.
        accepted_per_depth: `accepted_per_depth[d]` steps accepted a draft at depth d + 1.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one verification step of one sequence (both counts without the root)."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(
                f"num_accepted must be in [0, num_drafted = {num_drafted}], got {num_accepted}"
            )
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        missing = num_accepted - len(self.accepted_per_depth)
        self.accepted_per_depth.extend([0] * missing)
        for depth in range(num_accepted):
            self.accepted_per_depth[depth] += 1

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        """Statistics of both together, such as of all requests of a run."""
        longest = max(len(self.accepted_per_depth), len(other.accepted_per_depth))
        padded = [
            stats.accepted_per_depth + [0] * (longest - len(stats.accepted_per_depth))
            for stats in (self, other)
        ]
        return AcceptanceStats(
            num_steps=self.num_steps + other.num_steps,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            accepted_per_depth=[a + b for a, b in zip(*padded, strict=True)],
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step, the bonus included; 0.0 before the first step."""
        return (self.num_accepted + self.num_steps) / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafts; 0.0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates as plain values for JSON."""
        return {
            "num_steps": self.num_steps,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "accepted_per_depth": list(self.accepted_per_depth),
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
        }


@dataclass
class CompletionOutput:
    """One generated text.

    Attributes:
        index: number of the text among those of the request.
        text: everything generated so far, without the prompt.
        token_ids: the same as token ids, the end or stop token included.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens
            reached), "cancelled", "error" (see `RequestOutput.error`), or None while the request
            runs.
        stop_reason: the stop string or stop token id that ended it; None for an end token.
        text_diff: what this output adds to the text of the one before, when streaming.
        token_ids_diff: the same for the token ids.
        logprobs: for each of `token_ids` the log probability and rank of the token and of the most
            likely ones in its place, by token id; None where `SamplingParams.logprobs` is None.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


@dataclass
class RequestOutput:
    """Everything about one request.

    Attributes:
        request_id: unique number of the request within its `LLM`.
        prompt: the prompt text; None if token ids were given.
        prompt_token_ids: the prompt as token ids.
        outputs: the generated texts, `SamplingParams.n` of them.
        finished: whether the request has ended.
        speculation: acceptance statistics; None when the request ran without drafts.
        error: what went wrong with this request alone, where its finish reason is "error".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    speculation: AcceptanceStats | None = None
    error: str | None = None
