"""What /v1/completions and /v1/chat/completions take: JSON to prompts and `SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..sampling_params import SamplingParams
from .errors import invalid
from .fields import Fields, expect_list, expect_text, kind_of

# OpenAI's own default for completions.
DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
# Fields that say who asks, or what for; they change nothing here.
_NO_EFFECT = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
)


@dataclass(frozen=True)
class GenerationRequest:
    """One parsed request.

    Attributes:
        model: name that the client gave.
        prompts: texts or lists of token ids; one for chat.
        messages: of a chat, before the template; None for completions.
        settings: of `SamplingParams`, by name; `max_tokens` may be missing (as long as fits).
        request_settings: of the engine's `Request`, by name.
        n: texts for each prompt.
        stream: send events as the text comes.
        include_usage: close a stream with an event that says the usage.
        wants_logprobs: send log probabilities.
        template_options: extra variables for the chat template.
        bad_words: texts that may not come; each must be one token.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, Any], ...] | None
    settings: dict[str, Any]
    request_settings: dict[str, Any]
    n: int
    stream: bool
    include_usage: bool
    wants_logprobs: bool
    template_options: dict[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def num_texts(self) -> int:
        return self.n * len(self.prompts or (0,))

    def sampling_params(self, room: int) -> list[SamplingParams]:
        """One for each of the `n` texts of a prompt that leaves `room` tokens.

        Text i has the seed `seed + i`, so that texts differ and yet are repeated by the same seed.

        Raises:
            ApiError: 400, a setting out of range, or one that this version does not have.
        """
        settings = {"max_tokens": max(1, room)} | self.settings
        try:
            first = SamplingParams(**settings)
        except ValueError as error:
            raise invalid(None, str(error).removeprefix("SamplingParams: ")) from None
        return replace(first, n=self.n).copies()


def completion_request(raw: dict[str, Any]) -> GenerationRequest:
    """The request of /v1/completions.

    Raises:
        ApiError: 400, naming the field, what was expected and what came.
    """
    fields = Fields(raw)
    settings = {"max_tokens": DEFAULT_MAX_TOKENS}
    given = fields.integer("max_tokens", 1)
    if given is not None:
        settings["max_tokens"] = given
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    fields.only("echo", (False,), "the answer never holds the prompt")
    fields.only("suffix", ("",), "text is only generated at the end")
    prompts = _prompts(fields.take("prompt"))
    return _request(fields, settings, prompts=prompts, messages=None, logprobs=logprobs)


def chat_request(raw: dict[str, Any]) -> GenerationRequest:
    """The request of /v1/chat/completions.

    Raises:
        ApiError: 400, naming the field, what was expected and what came.
    """
    fields = Fields(raw)
    settings: dict[str, Any] = {}
    for name in ("max_tokens", "max_completion_tokens"):
        given = fields.integer(name, 1)
        if given is not None:
            settings["max_tokens"] = given
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    for name in ("tools", "functions"):
        fields.only(name, ([],), "this server calls no tools")
    fields.only("tool_choice", ("none", "auto"), "this server calls no tools")
    fields.only("parallel_tool_calls", (True, False), "this server calls no tools")
    fields.only("response_format", ({"type": "text"},), "output is not constrained")
    fields.only("modalities", (["text"],), "text only")
    options = fields.object("chat_template_kwargs") or {}
    messages = _messages(fields.take("messages"))
    return _request(
        fields,
        settings,
        prompts=(),
        messages=messages,
        logprobs=(top or 0) if wanted else None,
        template_options=options,
    )


def _request(
    fields: Fields,
    settings: dict[str, Any],
    *,
    prompts: tuple[str | tuple[int, ...], ...],
    messages: tuple[dict[str, Any], ...] | None,
    logprobs: int | None,
    template_options: dict[str, Any] | None = None,
) -> GenerationRequest:
    """What both kinds of request have in common."""
    model = fields.required_text("model")
    n = fields.integer("n", 1) or 1
    best_of = fields.integer("best_of", 1)
    if best_of not in (None, n):
        raise invalid("best_of", f"best_of={best_of} is not supported: it must equal n={n}")
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    inner = Fields(options or {})
    include_usage = inner.boolean("include_usage") or False
    inner.ignore("include_obfuscation")
    inner.finish()
    _sampling(fields, settings)
    if logprobs is not None:
        settings["logprobs"] = logprobs
    own = _request_settings(fields)
    fields.ignore(*_NO_EFFECT)
    fields.finish()
    return GenerationRequest(
        model=model,
        prompts=prompts,
        messages=messages,
        settings=settings,
        request_settings=own,
        n=n,
        stream=stream,
        include_usage=include_usage,
        wants_logprobs=logprobs is not None,
        template_options=template_options or {},
    )


def _sampling(fields: Fields, settings: dict[str, Any]) -> None:
    """Adds the settings of decoding that are given; ranges are `SamplingParams`' matter."""
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "seed": _seed(fields),
        "stop": _stops(fields.take("stop")),
        "logit_bias": _logit_bias(fields.object("logit_bias")),
        # Beyond OpenAI's own:
        "top_k": fields.integer("top_k", 0),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "min_tokens": fields.integer("min_tokens", 0),
        "ignore_eos": fields.boolean("ignore_eos"),
        "stop_token_ids": _token_ids("stop_token_ids", fields.take("stop_token_ids")),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output"),
        "skip_special_tokens": fields.boolean("skip_special_tokens"),
    }
    settings |= _given(given)


def _request_settings(fields: Fields) -> dict[str, Any]:
    """What is ours alone: a request without drafts, or one that goes before others."""
    given = {
        "priority": fields.integer("priority", -(1 << 31), (1 << 31) - 1),
        "speculation": fields.boolean("speculation"),
    }
    if given["speculation"]:
        given["speculation"] = None  # with drafts, where the server has them: as without the field
    return _given(given)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    if value is None:
        raise invalid("prompt", "prompt is missing, expected a string or an array", "missing_field")
    if isinstance(value, str):
        return (expect_text("prompt", value),)
    if not isinstance(value, list):
        raise invalid("prompt", f"prompt must be a string or an array, got {kind_of(value)}")
    items = value
    if not items:
        raise invalid("prompt", "prompt is empty, expected at least one")
    if isinstance(items[0], int):
        return (_token_ids("prompt", items),)
    if isinstance(items[0], str):
        return tuple(expect_text(f"prompt[{i}]", item) for i, item in enumerate(items))
    return tuple(_token_ids(f"prompt[{i}]", item) for i, item in enumerate(items))


def _token_ids(name: str, value: Any) -> Any:
    """A tuple of integers; None for None."""
    if value is None:
        return None
    for index, item in enumerate(expect_list(name, value)):
        if isinstance(item, bool) or not isinstance(item, int):
            raise invalid(name, f"{name}[{index}] must be a token id, got {kind_of(item)}")
    return tuple(value)


def _stops(value: Any) -> list[str] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) else expect_list("stop", value)
    if len(items) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(items)} texts, expected at most {MAX_STOPS}")
    texts = [expect_text("stop", item) for item in items]
    if not all(texts):
        raise invalid("stop", "stop holds an empty string")
    return texts or None


def _logit_bias(value: dict[str, Any] | None) -> dict[int, float] | None:
    if not value:
        return None
    bias = {}
    for token in value:
        # Longer ones are ids of no model, and of thousands of digits Python makes no number.
        if not (token.isdecimal() and len(token) < 20):
            raise invalid("logit_bias", f"logit_bias: {token[:40]!r} is no token id")
        inner = Fields({"logit_bias": value[token]})
        bias[int(token)] = inner.number("logit_bias", -100, 100) or 0.0
    return bias


def _seed(fields: Fields) -> int | None:
    """64 bits; OpenAI's are signed."""
    seed = fields.integer("seed", -(1 << 63), (1 << 63) - 1)
    return None if seed is None else seed % (1 << 64)


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Messages with plain text; content given in parts is joined."""
    if value is None:
        raise invalid("messages", "messages is missing, expected an array", "missing_field")
    items = expect_list("messages", value)
    if not items:
        raise invalid("messages", "messages is empty, expected at least one")
    return tuple(_message(f"messages[{i}]", item) for i, item in enumerate(items))


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("messages", f"{where} must be an object, got {kind_of(value)}")
    fields = Fields(value)
    role = fields.text("role")
    if role is None:
        raise invalid("messages", f"{where}.role is missing")
    content = fields.take("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    message = {"role": role, "content": expect_text(f"{where}.content", content)}
    for name in ("name", "reasoning_content"):
        text = fields.text(name)
        if text is not None:
            message[name] = text
    fields.only("tool_calls", ([],), "this server calls no tools")
    fields.ignore("refusal", "annotations", "audio", "function_call")
    fields.finish()
    return message


def _part(where: str, value: Any) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise invalid("messages", f"{where} must be a part of type 'text': this model reads text")
    return expect_text(f"{where}.text", value.get("text"))
