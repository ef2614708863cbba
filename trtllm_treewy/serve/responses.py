"""Answers and events as OpenAI's API writes them, from the outputs of requests."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..outputs import AcceptanceStats, CompletionOutput, RequestOutput
from .protocol import GenerationRequest
from .token_text import TokenText

if TYPE_CHECKING:
    from ..runtime.sampling import Logprob

DONE = b"data: [DONE]\n\n"


def encode(data: object) -> bytes:
    """JSON in ASCII: no reader splits a line in it, and half a character can be told, too."""
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class Answer:
    """Writes the answer to one request, whole or in events.

    Text `index` is the text number `index % n` of prompt `index // n`.
    """

    def __init__(self, request: GenerationRequest, model: str, tokenizer: Any) -> None:
        self._request, self._model, self._token_text = request, model, TokenText(tokenizer)
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent_tokens = [0] * request.num_texts
        # Where the next token begins in each text, whose last character may be unfinished.
        self._offset = [0] * request.num_texts
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._characters = [utf8("replace") for _ in range(request.num_texts)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer without streaming."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return self._head(kind) | {"choices": choices} | self._totals(outputs)

    def opening(self) -> list[dict[str, Any]]:
        """Events before any text: a chat names the role first."""
        if not self._request.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(self._request.num_texts)
        ]

    def news(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The event for what is new in text `index`; None where nothing can be shown yet."""
        completion = output.outputs[0]
        if not (completion.text_diff or output.finished):
            return None
        choice: dict[str, Any] = {"index": index}
        if self._request.is_chat:
            choice["delta"] = {"content": completion.text_diff} if completion.text_diff else {}
        else:
            choice["text"] = completion.text_diff
        choice["logprobs"] = self._logprobs(index, completion)
        choice["finish_reason"] = completion.finish_reason
        if output.finished:
            choice["stop_reason"] = completion.stop_reason
        return self._chunk(choice)

    def closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """The event with the usage, where the request asks for one."""
        if not self._request.include_usage:
            return None
        return self._head(self._chunk_kind) | {"choices": []} | self._totals(outputs)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._request.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head(self._chunk_kind) | {"choices": [choice]}
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        choice: dict[str, Any] = {"index": index}
        if self._request.is_chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        choice["logprobs"] = self._logprobs(index, completion)
        choice["finish_reason"] = completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
        return choice

    def _totals(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Usage, a prompt counted once for all its texts; acceptance where there were drafts."""
        prompts = sum(len(output.prompt_token_ids) for output in outputs[:: self._request.n])
        generated = sum(len(output.outputs[0].token_ids) for output in outputs)
        usage = {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
        }
        found = [output.speculation for output in outputs if output.speculation is not None]
        totals: dict[str, Any] = {"usage": usage}
        if found:
            totals["speculation"] = sum(found, AcceptanceStats()).to_dict()
        return totals

    # --- log probabilities ---

    def _logprobs(self, index: int, completion: CompletionOutput) -> dict[str, Any] | None:
        """Those of the tokens that no event has had yet."""
        if not self._request.wants_logprobs:
            return None
        start = self._sent_tokens[index]
        ids = completion.token_ids[start:]
        entries = (completion.logprobs or [])[start:]
        self._sent_tokens[index] = len(completion.token_ids)
        rows = [self._row(token, entry) for token, entry in zip(ids, entries, strict=False)]
        if self._request.is_chat:
            content = [
                row.for_chat() | {"top_logprobs": [top.for_chat() for top in row.best]}
                for row in rows
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for row in rows:
            offsets.append(self._offset[index])
            self._offset[index] += len(self._characters[index].decode(row.data))
        return {
            "tokens": [row.text for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [{top.text: top.logprob for top in row.best} for row in rows],
            "text_offset": offsets,
        }

    def _row(self, token: int, entry: Mapping[int, Logprob]) -> _Row:
        """A token, and the most probable ones in its place."""
        best = sorted(entry, key=lambda other: -entry[other].logprob)
        wanted = int(self._request.settings["logprobs"])
        return replace(
            self._token(token, entry),
            best=tuple(self._token(other, entry) for other in best[:wanted]),
        )

    def _token(self, token: int, entry: Mapping[int, Logprob]) -> _Row:
        return _Row(*self._token_text.of(token), entry[token].logprob)


@dataclass(frozen=True)
class _Row:
    """Text, bytes and log probability of a token; `best` are the most probable in its place."""

    text: str
    data: bytes
    logprob: float
    best: tuple[_Row, ...] = ()

    def for_chat(self) -> dict[str, Any]:
        """As chats write it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.data)}
