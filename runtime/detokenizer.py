"""Token ids to text, a few tokens at a time, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this uses."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Turns one request's growing output into text.

    `text` only ever grows: bytes of an unfinished character, and text that may become a stop
    string, are held back until they are decided.
    """

    # Tokens decoded again for context: byte-level tokens and leading spaces depend on neighbours.
    CONTEXT = 8

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._ids: list[int] = []
        # Ids before `_decoded` are in `_full`; decoding restarts `CONTEXT` ids before it.
        self._decoded = 0
        self._full = ""
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._ids)

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> None:
        """Takes tokens one by one until a stop string is complete.

        Args:
            token_ids: the tokens that follow those taken before.
            last: nothing will follow, so nothing is held back.
        """
        for token in token_ids:
            if self.stopped_by is not None:
                return
            self._ids.append(token)
            self._decode()
            self._find_stop()
        if self.stopped_by is None:
            if last:
                self._decode(unfinished=True)
                self._find_stop()
            if self.stopped_by is None:
                held = 0 if last else self._held_back()
                self.text = self._full[: len(self._full) - held]

    def _decode(self, unfinished: bool = False) -> None:
        """Appends the text of the ids not decoded yet, unless it ends inside a character."""
        start = max(0, self._decoded - self.CONTEXT)
        before = self._tokens_to_text(self._ids[start : self._decoded])
        after = self._tokens_to_text(self._ids[start:])
        if after.endswith(REPLACEMENT) and not unfinished:
            return
        self._full += after[len(before) :]
        self._decoded = len(self._ids)

    def _tokens_to_text(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _find_stop(self) -> None:
        found = [(self._full.find(stop, len(self.text)), stop) for stop in self._stop]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return
        at, stop = min(found, key=lambda hit: hit[0])
        self.stopped_by = stop
        self.text = self._full[: at + len(stop) if self._include_stop else at]

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._full) - len(self.text)), 0, -1):
            if any(stop.startswith(self._full[-length:]) for stop in self._stop):
                return length
        return 0
