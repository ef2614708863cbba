"""The load: how long prompts and outputs are, what they say, when they are sent. Seeded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Spread of the logarithm of a length. Conversations between people and models (ShareGPT) have means
# near 220 tokens in and 200 out, and a long tail that a log-normal distribution of about this
# spread describes.
SIGMA = 1.0
MIN_LENGTH = 4
# English text has about four tokens for three words.
WORDS_PER_TOKEN = 0.75

_SUBJECTS = "the server|a client|the scheduler|every request|the cache|this module|a reader|the log"
_VERBS = "reads|writes|opens|returns|describes|replaces|waits for|counts|stores|compares|checks"
_OBJECTS = "the file|a directory|its state|the next line|an error|the first value|all tokens|a list"
_ENDS = "before it starts|at the end|when asked|in order|by default|if needed|without a copy|once"


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """A load to be made.

    Attributes:
        num_requests: how many.
        mean_input_len, mean_output_len: tokens; lengths are log-normal about these means.
        max_len: most tokens of a prompt and its output.
        request_rate: requests a second, or None.
        concurrency: requests under way at any time, where there is no rate.
        seed: of everything random.
        sigma: spread of the logarithm of the lengths; 0 makes all of them their mean.
        burstiness: shape of the gamma distribution of the distances between requests: 1 is a
            Poisson process, less comes in bursts (the distances deviate by burstiness^-1/2 means).
    """

    num_requests: int
    mean_input_len: int
    mean_output_len: int
    max_len: int
    request_rate: float | None
    concurrency: int
    seed: int
    sigma: float = SIGMA
    burstiness: float = 1.0


@dataclass(frozen=True)
class PlannedRequest:
    """One request: its prompt, how many tokens to ask for, seconds after the start (or 0)."""

    prompt: str | list[int]
    output_len: int
    at: float


def plan_load(spec: LoadSpec, text: str, tokenizer: Any | None) -> list[PlannedRequest]:
    """The requests of a load; the same for the same spec and text.

    Args:
        spec: the load.
        text: what prompts are cut from; it is repeated where it is too short.
        tokenizer: makes prompts of exact lengths, as token ids; without one prompts are words, at
            about the right length.

    Raises:
        ValueError: `max_len` leaves no room for a prompt and an output, or `burstiness` is no
            shape of a distribution.
    """
    if spec.max_len < 2 * MIN_LENGTH:
        raise ValueError(f"max_len is {spec.max_len}, expected at least {2 * MIN_LENGTH}")
    if spec.burstiness <= 0:
        raise ValueError(f"burstiness is {spec.burstiness}, expected a number above 0")
    random = np.random.default_rng(spec.seed)
    units: Sequence[Any] = text.split()
    if tokenizer is not None:
        units = tokenizer.encode(text, add_special_tokens=False)
    if not len(units):
        raise ValueError("the text that prompts are cut from is empty")
    count, sigma = spec.num_requests, spec.sigma
    inputs = lengths(random, spec.mean_input_len, spec.max_len - MIN_LENGTH, count, sigma)
    outputs = lengths(random, spec.mean_output_len, spec.max_len, count, sigma)
    gaps = np.zeros(count)
    if spec.request_rate is not None:
        gaps[1:] = _gaps(random, spec.request_rate, spec.burstiness, count - 1)
    starts = random.integers(0, len(units), count)
    requests = []
    for size, wanted, at, start in zip(inputs, outputs, np.cumsum(gaps), starts, strict=True):
        taken = size if tokenizer is not None else max(1, round(size * WORDS_PER_TOKEN))
        cut = [units[(int(start) + index) % len(units)] for index in range(taken)]
        prompt = cut if tokenizer is not None else " ".join(cut)
        requests.append(PlannedRequest(prompt, min(wanted, spec.max_len - size), float(at)))
    return requests


def lengths(
    random: np.random.Generator, mean: int, most: int, count: int, sigma: float = SIGMA
) -> list[int]:
    """`count` log-normal lengths with this mean before they are cut to [MIN_LENGTH, most]."""
    drawn = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return [int(value) for value in np.clip(np.rint(drawn), MIN_LENGTH, most)]


def _gaps(
    random: np.random.Generator, rate: float, burstiness: float, count: int
) -> np.ndarray[Any, Any]:
    """Seconds between requests, 1 / rate on average."""
    if burstiness == 1.0:
        return random.exponential(1 / rate, count)
    return random.gamma(burstiness, 1 / (rate * burstiness), count)


def made_up_text(seed: int, sentences: int = 2000) -> str:
    """Sentences from a small grammar, where no text is given."""
    random = np.random.default_rng(seed)
    parts = [column.split("|") for column in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)]
    made = (" ".join(str(random.choice(part)) for part in parts) for _ in range(sentences))
    return " ".join(f"{sentence.capitalize()}." for sentence in made)


def read_text(path: str) -> str:
    """The text of a file: plain, or JSON lines with a "prompt" each.

    Raises:
        ValueError: it is not text, or holds none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if path.endswith(".jsonl"):
        text = "\n".join(_prompt_of(path, *line) for line in enumerate(text.splitlines(), 1))
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def _prompt_of(path: str, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f'{path}, line {number}: expected a JSON object with a text in "prompt"')
    return prompt
