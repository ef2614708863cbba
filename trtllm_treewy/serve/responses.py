"""Answers and events as OpenAI's API writes them, from the outputs of requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..outputs import AcceptanceStats, CompletionOutput, RequestOutput
from .protocol import GenerationRequest

if TYPE_CHECKING:
    from ..runtime.sampling import Logprob

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode("utf-8") + b"\n\n"


class Answer:
    """Writes the answer to one request, whole or in events.

    Text `index` is the text number `index % n` of prompt `index // n`.
    """

    def __init__(self, request: GenerationRequest, model: str, tokenizer: Any) -> None:
        self._request, self._model, self._tokenizer = request, model, tokenizer
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent_tokens = [0] * request.num_texts
        self._sent_text = [0] * request.num_texts

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
            return {"content": [self._chat_row(row) for row in rows], "refusal": None}
        offsets = []
        for row in rows:
            offsets.append(self._sent_text[index])
            self._sent_text[index] += len(row[0])
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [dict(top) for _, _, top in rows],
            "text_offset": offsets,
        }

    def _row(
        self, token: int, entry: Mapping[int, Logprob]
    ) -> tuple[str, float, list[tuple[str, float]]]:
        """Text and log probability of a token, and those of the most probable ones."""
        values = {other: at.logprob for other, at in entry.items()}
        best = sorted(values.items(), key=lambda pair: -pair[1])
        wanted = int(self._request.settings["logprobs"])
        return (
            self._text(token),
            values[token],
            [(self._text(other), value) for other, value in best[:wanted]],
        )

    def _chat_row(self, row: tuple[str, float, list[tuple[str, float]]]) -> dict[str, Any]:
        text, logprob, top = row
        return _token(text, logprob) | {"top_logprobs": [_token(*pair) for pair in top]}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}
