"""From a prompt and its settings to requests: tokens checked, texts and stop conditions set."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from .prompt_input import PromptInput, check_text, split_prompt
from .request_handle import RequestHandle
from .runtime.detokenizer import Detokenizer
from .runtime.request import Request
from .sampling_params import SamplingParams
from .text_group import TextGroup


class RequestMaker:
    """Makes requests for a model; from any thread, where its tokenizer may be used by several.

    Args:
        tokenizer: of the model, None for prompts of token ids and no text.
        vocab_size: tokens of the model.
        end_ids: its end tokens.
        drafts: whether the engine has drafts.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int], drafts: bool
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids, self._drafts = end_ids, drafts
        self._ids = itertools.count()

    def make_group(self, prompt: PromptInput, params: SamplingParams) -> TextGroup:
        """Requests for all texts of a prompt.

        Raises:
            ValueError: the prompt or a setting is not usable.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}"
            )
        params.validate()  # fields may have been assigned since it was made
        return TextGroup([self.make(prompt, each) for each in params.copies()])

    def make(self, prompt: PromptInput, params: SamplingParams) -> RequestHandle:
        """A request for one text of a prompt; `params` are valid by themselves.

        Raises:
            ValueError: the prompt is not usable, or a setting is not with this model.
        """
        end_ids = frozenset(params.end_ids(self._end_ids))
        for token in end_ids.union(params.stop_ids):
            if token >= self._vocab_size:
                raise ValueError(
                    f"stop or end token {token} is not an id below vocab_size={self._vocab_size}"
                )
        text, token_ids = self._read_prompt(prompt, params)
        request = Request(next(self._ids), token_ids, params, end_ids)
        return RequestHandle(request, text, self._detokenizer(params), self._drafts)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is not None and params.detokenize:
            return Detokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
            )
        if params.stop_strings:
            raise ValueError("stop strings need a tokenizer, but skip_tokenizer_init is set")
        return None

    def _read_prompt(
        self, prompt: PromptInput, params: SamplingParams
    ) -> tuple[str | None, tuple[int, ...]]:
        text, ids = split_prompt(prompt)
        if ids is None:
            check_text(text)
            if self._tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer, but skip_tokenizer_init is set; pass token "
                    "ids"
                )
            ids = self._tokenizer.encode(text, add_special_tokens=params.add_special_tokens)
        if not len(ids):
            raise ValueError(f"prompt {text!r} has no tokens, expected at least one")
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise ValueError(f"prompt token {index} is {token!r}, expected an integer id")
            if not 0 <= int(token) < self._vocab_size:
                raise ValueError(
                    f"prompt token {index} is {token}, expected an id in "
                    f"[0, vocab_size={self._vocab_size})"
                )
        return text, tuple(int(token) for token in ids)
