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
    string, are held back until they are decided. The work is linear in the number of tokens,
    whatever they are.
    """

    # Tokens decoded again for context: byte-level tokens and leading spaces depend on neighbours.
    CONTEXT = 8
    # Tokens without a whole character at their end that are waited for: then they are no text.
    PATIENCE = 16
    # Longest UTF-8 character: of so many places between tokens one is not inside of a character.
    CHARACTER_BYTES = 4

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
        # The tokens that are not in `_full` yet, behind `_known` ones for context, whose text is
        # `_before`; and the text of all of them.
        self._ids: list[int] = []
        self._known = 0
        self._before = self._after = ""
        self._full = ""
        self._searched = 0
        self.num_tokens = 0  # taken so far
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> None:
        """Takes tokens one by one until a stop string is complete.

        Args:
            token_ids: the tokens that follow those taken before.
            last: nothing will follow, so nothing is held back.
        """
        for token in token_ids:
            if self.stopped_by is not None:
                return
            self.num_tokens += 1
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
        after = self._tokens_to_text(self._ids)
        if unfinished or not after.endswith(REPLACEMENT):
            self._take(len(self._ids), after)
            return
        unchanged, self._after = after == self._after, after
        if unchanged and self._ids and not self._tokens_to_text(self._ids[-1:]):
            self._ids.pop()  # a token without bytes, such as one that is skipped
        elif len(self._ids) - self._known > self.PATIENCE:
            self._take_some(after)

    def _take(self, count: int, text: str) -> None:
        """Appends what the first `count` ids add to the context: `text` is that of both."""
        self._full += text[len(self._before) :]
        del self._ids[: max(0, count - self.CONTEXT)]
        self._known = min(count, self.CONTEXT)
        self._before = self._tokens_to_text(self._ids[: self._known])
        self._after = ""

    def _take_some(self, after: str) -> None:
        """Appends the bytes that are no text, but for the last of them, which may become some.

        Between two tokens there is no character where both sides have the text that they have
        together; bytes of one character would be replaced on either side.
        """
        for count in range(len(self._ids) - 1, len(self._ids) - 1 - self.CHARACTER_BYTES, -1):
            first, rest = map(self._tokens_to_text, (self._ids[:count], self._ids[count:]))
            if rest and first + rest == after:
                self._take(count, first)
                return

    def _tokens_to_text(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _find_stop(self) -> None:
        start = max(len(self.text), self._searched + 1 - max(map(len, self._stop), default=0))
        self._searched = len(self._full)
        found = [(self._full.find(stop, start), stop) for stop in self._stop]
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
