"""The forms that a prompt may have: text, token ids, a dict of either, and lists of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from .sampling_params import SamplingParams

PromptInput = str | Sequence[int] | Mapping[str, Any]


def is_single(inputs: Any) -> bool:
    """Whether this is one prompt and no list of them; ValueError where it is neither."""
    if isinstance(inputs, (str, Mapping)):
        return True
    if not isinstance(inputs, Sequence) or isinstance(inputs, (bytes, bytearray)):
        raise ValueError(
            f"inputs must be a text, token ids, a dict, or a list of these, got "
            f"{type(inputs).__name__}"
        )
    return bool(inputs) and all(isinstance(item, Integral) for item in inputs)


def params_for(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """The settings of each prompt; ValueError where there are fewer or more."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"got {len(params)} sampling_params for {len(prompts)} prompts")
    return list(params)


def check_text(text: Any) -> None:
    """Raises ValueError for what no tokenizer takes, before one raises whatever it may."""
    if not isinstance(text, str):
        raise ValueError(f"a prompt's text must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: {error.object[error.start]!r} at {error.start} is half a character, which no "
            "tokenizer encodes"
        ) from None


def split_prompt(prompt: Any) -> tuple[str | None, Sequence[int] | None]:
    """Text and token ids of a prompt in any of its forms; one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
        if unknown or not prompt:
            raise ValueError(
                f"a prompt dict has keys 'prompt' or 'prompt_token_ids', got {sorted(prompt)}"
            )
        return prompt.get("prompt"), prompt.get("prompt_token_ids")
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return None, prompt
    raise ValueError(f"a prompt is a text, token ids or a dict, got {type(prompt).__name__}")
