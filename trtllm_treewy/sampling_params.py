"""`SamplingParams`: how one request is decoded, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

# Settings of TensorRT-LLM that this version knows but does not carry out: the values that ask for
# nothing and are therefore accepted, and what any other value would have asked for.
_NOT_IN_THIS_VERSION: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one sequence per prompt only"),
    "best_of": ((None, 1), "one sequence per prompt only"),
    "use_beam_search": ((False,), "no beam search"),
    "top_p_min": ((None,), "greedy only"),
    "top_p_reset_ids": ((None,), "greedy only"),
    "top_p_decay": ((None, 1.0), "greedy only"),
    "min_p": ((None, 0.0), "greedy only"),
    "beam_search_diversity_rate": ((None,), "no beam search"),
    "repetition_penalty": ((None, 1.0), "no penalties"),
    "presence_penalty": ((None, 0.0), "no penalties"),
    "frequency_penalty": ((None, 0.0), "no penalties"),
    "length_penalty": ((None,), "no beam search"),
    "early_stopping": ((None,), "no beam search"),
    "no_repeat_ngram_size": ((None, 0), "no penalties"),
    "beam_width_array": ((None,), "no beam search"),
    "bad": ((None, [], ()), "no forbidden words"),
    "bad_token_ids": ((None, [], ()), "no forbidden words"),
    "embedding_bias": ((None,), "no logit bias"),
    "logits_processor": ((None,), "no logits processors"),
    "apply_batched_logits_processor": ((False,), "no logits processors"),
    "guided_decoding": ((None,), "no guided decoding"),
    "lookahead_config": ((None,), "drafts come from the model's MTP module only"),
    "logprobs": ((None, 0, False), "no log probabilities"),
    "prompt_logprobs": ((None, 0, False), "no log probabilities"),
    "return_context_logits": ((False,), "no logits in the output"),
    "return_generation_logits": ((False,), "no logits in the output"),
    "exclude_input_from_output": ((True,), "the output never holds the prompt"),
    "return_encoder_output": ((False,), "decoder-only models"),
    "return_perf_metrics": ((False,), "no per-request metrics; see RequestOutput.speculation"),
    "additional_model_outputs": ((None, [], ()), "no extra outputs"),
    "truncate_prompt_tokens": ((None,), "prompts are never shortened"),
    "spaces_between_special_tokens": ((True,), "the tokenizer's own spacing only"),
}


@dataclass(kw_only=True)
class SamplingParams:
    """How to decode one request.

    Names and defaults are those of TensorRT-LLM. This version decodes greedily. A setting it does
    not carry out raises ValueError when it asks for anything; nothing is silently ignored.

    Attributes:
        end_id: token id that ends the text; None takes the model's own end tokens.
        pad_id: accepted for compatibility; sequences are never padded, so it has no effect.
        max_tokens: most tokens to generate, at least 1.
        min_tokens: fewest tokens to generate; end and stop tokens cannot be chosen before.
        stop: string or strings at which the text ends. They may begin and end inside a token.
        stop_token_ids: token ids at which the text ends, besides the end tokens.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not stop at the end tokens; `max_tokens` and the stops still hold.
        temperature, top_k, top_p: None, or values that mean greedy: temperature 0, top_k 1 or
            top_p 0. Where one of them does, the others have no effect.
        seed: accepted; greedy decoding draws no random number.
        detokenize: turn token ids into text; False leaves `text` empty, and excludes `stop`.
        skip_special_tokens: leave special tokens out of the text.
        add_special_tokens: let the tokenizer add its special tokens to a text prompt.

    Raises:
        ValueError: a value out of range, or a setting that this version does not have.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False

    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[Any] | None = None

    lookahead_config: Any = None
    guided_decoding: Any = field(default=None, repr=False)

    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Validate at once, so that the error points at the line that made the object."""
        self.validate()

    def validate(self) -> None:
        """Checks every field; called again when a request is made, as fields may be assigned.

        Raises:
            ValueError: naming the field, what was expected and what came.
        """
        _check_int("max_tokens", self.max_tokens, minimum=1)
        for name in ("min_tokens", "end_id", "pad_id", "seed", "top_k"):
            value = getattr(self, name)
            if value is not None:
                # TensorRT-LLM has -1 for "no end token" and for "no pad token".
                _check_int(name, value, minimum=-1 if name in ("end_id", "pad_id") else 0)
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams: min_tokens ({self.min_tokens}) is above max_tokens "
                f"({self.max_tokens})"
            )
        self._check_several("stop", "a non-empty string or several")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"SamplingParams: stop must be a non-empty string or several, got {text!r}"
                )
        self._check_several("stop_token_ids", "a list of token ids")
        for token_id in self.stop_ids:
            _check_int("stop_token_ids", token_id, minimum=0)
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                "SamplingParams: stop strings need text, so detokenize must be True; "
                "with detokenize=False use stop_token_ids"
            )
        self._check_greedy()
        for name, (accepted, reason) in _NOT_IN_THIS_VERSION.items():
            value = getattr(self, name)
            if not _is_one_of(value, accepted):
                raise ValueError(
                    f"SamplingParams: {name}={value!r} is not supported in this version ({reason})"
                )

    def _check_several(self, name: str, expected: str) -> None:
        value = getattr(self, name)
        if value is not None and not isinstance(value, Sequence | Set):
            raise ValueError(f"SamplingParams: {name} must be {expected}, got {value!r}")

    def _check_greedy(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"SamplingParams: {name} must be a number >= 0, got {value!r}")
        if not self.greedy:
            given = ", ".join(
                f"{name}={value}"
                for name in ("temperature", "top_k", "top_p")
                if (value := getattr(self, name)) is not None
            )
            raise ValueError(
                f"SamplingParams: {given} asks for random sampling; this version decodes greedily "
                "only. Leave them out, or set temperature=0 or top_k=1"
            )

    @property
    def greedy(self) -> bool:
        """Whether the settings mean greedy decoding, by TensorRT-LLM's rule."""
        unset = self.temperature is None and self.top_k is None and self.top_p is None
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)

    def end_ids(self, model_end_ids: Sequence[int]) -> tuple[int, ...]:
        """Token ids that end the text: `end_id`, else the model's own; none under `ignore_eos`."""
        if self.ignore_eos or self.end_id == -1:
            return ()
        return tuple(model_end_ids) if self.end_id is None else (self.end_id,)


def _is_one_of(value: object, accepted: tuple[Any, ...]) -> bool:
    """Equality that survives values such as tensors, whose == is not a bool."""
    return any(value is other or _equal(value, other) for other in accepted)


def _equal(value: object, other: object) -> bool:
    return isinstance(value, (bool, int, float, str, list, tuple)) and value == other


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"SamplingParams: {name} must be an integer >= {minimum}, got {value!r}")
