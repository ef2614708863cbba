"""From the tensors of a Triton request to the request that every server of ours runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_treewy.serve.errors import invalid
from trtllm_treewy.serve.fields import Fields
from trtllm_treewy.serve.protocol import DEFAULT_MAX_TOKENS, GenerationRequest

from .tensors import INPUT

# What Triton's own protocol puts among the parameters of a request.
_TRITONS = frozenset(
    ("id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
) | frozenset(("binary_data_output", "binary_data_size"))


@dataclass(frozen=True)
class TritonRequest:
    """A parsed request.

    Attributes:
        generation: what to generate.
        exclude_input: leave the prompt out of `text_output`.
        count_input, count_output: say how many tokens came and went.
    """

    generation: GenerationRequest
    exclude_input: bool
    count_input: bool
    count_output: bool


def check_parameters(names: Iterable[str]) -> None:
    """Refuses parameters that nobody reads; the generate endpoints make one of an unknown key.

    Raises:
        ApiError: 400, naming the parameter.
    """
    for name in names:
        if name not in _TRITONS and not name.startswith("triton_"):
            close = difflib.get_close_matches(name, INPUT, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise invalid(name, f"unknown input {name!r}{hint}", "unknown_field")


def parse(raw: Mapping[str, Any], *, model: str, exclude_input: bool) -> TritonRequest:
    """The request in values by input name, as `TensorSpec.read` gives them.

    Args:
        raw: what came; an input that is missing is not in it.
        model: name of the model.
        exclude_input: where the request does not say.

    Raises:
        ApiError: 400, naming the input, what was expected and what came.
    """
    fields = Fields(dict(raw))
    prompt = fields.required_text("text_input")
    stream = fields.boolean("stream") or False
    wants_logprobs = fields.boolean("return_log_probs") or False
    given = _settings(fields)
    if wants_logprobs:
        given["logprobs"] = 0
    for name in ("beam_width", "num_return_sequences"):
        fields.only(name, (1,), "one text a prompt")
    fields.ignore("pad_id")  # sequences are never padded
    asked = fields.boolean("exclude_input_in_output")
    generation = GenerationRequest(
        model=model,
        prompts=(prompt,),
        messages=None,
        settings={name: value for name, value in given.items() if value is not None},
        request_settings=_own(fields),
        n=1,
        stream=stream,
        include_usage=False,
        wants_logprobs=wants_logprobs,
        bad_words=_words(fields.take("bad_words")),
    )
    request = TritonRequest(
        generation=generation,
        exclude_input=exclude_input if asked is None else asked,
        count_input=fields.boolean("return_num_input_tokens") or False,
        count_output=fields.boolean("return_num_output_tokens") or False,
    )
    fields.finish()
    return request


def _settings(fields: Fields) -> dict[str, Any]:
    """Of `SamplingParams`, by its names; None where they are not given."""
    max_tokens = fields.integer("max_tokens", 1)
    return {
        "max_tokens": DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        "min_tokens": fields.integer("min_tokens", 0),
        "temperature": fields.number("temperature", 0),
        "top_k": fields.integer("top_k", 0),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "seed": _seed(fields),
        "stop": list(_words(fields.take("stop_words"))) or None,
        "end_id": fields.integer("end_id", -1),
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "ignore_eos": fields.boolean("ignore_eos"),
    }


def _own(fields: Fields) -> dict[str, Any]:
    """What is ours alone: a request without drafts, or one that goes before others."""
    own: dict[str, Any] = {}
    priority = fields.integer("priority")
    if priority is not None:
        own["priority"] = priority
    if fields.boolean("speculation") is False:
        own["speculation"] = False
    return own


def _seed(fields: Fields) -> int | None:
    """`seed`, which TensorRT-LLM called `random_seed` before."""
    seed, before = fields.integer("seed"), fields.integer("random_seed")
    if None not in (seed, before) and seed != before:
        raise invalid("seed", f"seed={seed} and random_seed={before} differ; one is enough")
    return before if seed is None else seed


def _words(value: list[str] | None) -> tuple[str, ...]:
    """The words; clients write "" for none."""
    return tuple(word for word in value or () if word)
