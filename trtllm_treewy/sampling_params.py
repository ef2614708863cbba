"""`SamplingParams`: how one request is decoded, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

# Settings of TensorRT-LLM that this version knows but does not carry out: the values that ask for
# nothing and are therefore accepted, and what any other value would have asked for.
_NOT_IN_THIS_VERSION: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "n texts of each prompt, and no choice among more"),
    "use_beam_search": ((False,), "no beam search"),
    "top_p_min": ((None,), "top_p stays as it is"),
    "top_p_reset_ids": ((None,), "top_p stays as it is"),
    "top_p_decay": ((None, 1.0), "top_p stays as it is"),
    "beam_search_diversity_rate": ((None,), "no beam search"),
    "length_penalty": ((None,), "no beam search"),
    "early_stopping": ((None,), "no beam search"),
    "no_repeat_ngram_size": ((None, 0), "repetition_penalty counts single tokens"),
    "beam_width_array": ((None,), "no beam search"),
    "bad": ((None, [], ()), "no forbidden words; bad_token_ids forbids single tokens"),
    "logits_processor": ((None,), "no logits processors"),
    "apply_batched_logits_processor": ((False,), "no logits processors"),
    "guided_decoding": ((None,), "no guided decoding"),
    "lookahead_config": ((None,), "drafts come from the model's MTP module only"),
    "prompt_logprobs": ((None, 0, False), "log probabilities of generated tokens only"),
    "return_context_logits": ((False,), "no logits in the output"),
    "return_generation_logits": ((False,), "no logits in the output"),
    "exclude_input_from_output": ((True,), "the output never holds the prompt"),
    "return_encoder_output": ((False,), "decoder-only models"),
    "return_perf_metrics": ((False,), "no per-request metrics; see RequestOutput.speculation"),
    "additional_model_outputs": ((None, [], ()), "no extra outputs"),
    "truncate_prompt_tokens": ((None,), "prompts are never shortened"),
    "spaces_between_special_tokens": ((True,), "the tokenizer's own spacing only"),
}
# Settings are computed with in float32.
_LARGEST = 3.4028234663852886e38


@dataclass(kw_only=True)
class SamplingParams:
    """How to decode one request.

    Names and defaults are those of TensorRT-LLM; `logit_bias` is OpenAI's. A setting that this
    version does not carry out raises ValueError when it asks for anything; nothing is silently
    ignored.

    The next token's logits are changed in this order: repetition penalty, presence and frequency
    penalty, biases, forbidden tokens (-inf). Greedy decoding takes the largest. Random sampling
    divides by the temperature, keeps the `top_k` best, of those the fewest that have probability
    `top_p` together, of those the ones that `min_p` allows, and draws from what is left,
    renormalised. Tokens as likely as the last one kept are kept too.

    Attributes:
        end_id: token id that ends the text; None takes the model's own end tokens.
        pad_id: accepted for compatibility; sequences are never padded, so it has no effect.
        max_tokens: most tokens to generate, at least 1.
        min_tokens: fewest tokens to generate; end and stop tokens cannot be chosen before.
        stop: string or strings at which the text ends. They may begin and end inside a token.
        stop_token_ids: token ids at which the text ends, besides the end tokens.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not stop at the end tokens; `max_tokens` and the stops still hold.
        temperature: at least 0, 0 is greedy; 1 where not given but top_k or top_p is.
        top_k: tokens to keep, 1 is greedy, 0 keeps all.
        top_p: in [0, 1], 0 is greedy, 1 keeps all. Decoding is greedy too where temperature, top_k
            and top_p are all left out; where one of them means greedy, the others have no effect.
        n: texts of each prompt. Text i has the seed `seed + i`, so that they differ and yet are
            repeated by the same seed; greedy ones are all the same.
        min_p: in [0, 1]; keeps tokens at least this times as likely as the most likely one.
        seed: in [0, 2^64). One seed gives one text, whatever else is in the batch; None takes a
            fresh one for every request.
        repetition_penalty: above 0; logits of tokens in prompt or output are divided by it where
            positive, multiplied where negative.
        presence_penalty: subtracted from the logits of tokens in prompt or output.
        frequency_penalty: the same, times how often the token is there.
        prompt_ignore_length: so many first prompt tokens do not count for the presence and
            frequency penalties; with the prompt's length, they count the output alone.
        logit_bias: token id to what is added to its logit; -inf forbids it.
        embedding_bias: tensor [vocab], added to the logits.
        bad_token_ids: ids that are never chosen.
        logprobs: None for none; n returns the log probability of each generated token and of the n
            most likely ones in its place.
        logprobs_mode: "raw" takes them from the model's logits, "processed" from the distribution
            that the token was drawn from.
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
    bad_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = field(default=None, compare=False)
    logit_bias: Mapping[int, float] | None = None
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
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None

    logprobs: int | None = None
    logprobs_mode: str = "raw"
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
        _check_int("n", self.n, minimum=1)
        for name in ("min_tokens", "end_id", "pad_id", "seed", "top_k", "prompt_ignore_length"):
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
        self._check_sampling()
        self._check_biases()
        self._check_logprobs()
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

    def _check_sampling(self) -> None:
        _check_number("temperature", self.temperature)
        _check_number("top_p", self.top_p, highest=1.0)
        _check_number("min_p", self.min_p, highest=1.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), lowest=-inf)
        _check_number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty == 0:
            raise ValueError("SamplingParams: repetition_penalty must be above 0, got 0")
        if self.seed is not None and self.seed >= 2**64:
            raise ValueError(f"SamplingParams: seed must be below 2^64, got {self.seed}")

    def _check_biases(self) -> None:
        self._check_several("bad_token_ids", "a list of token ids")
        for token_id in self.bad_token_ids or ():
            _check_int("bad_token_ids", token_id, minimum=0)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                "SamplingParams: logit_bias must be a dict of token id to number, got "
                f"{self.logit_bias!r}"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, minimum=0)
            if bias != -inf:
                _check_number(f"logit_bias of token {token_id}", bias, lowest=-inf)
        if self.embedding_bias is not None and getattr(self.embedding_bias, "ndim", None) != 1:
            raise ValueError(
                "SamplingParams: embedding_bias must be a tensor [vocab], got "
                f"{type(self.embedding_bias).__name__}"
            )

    def _check_logprobs(self) -> None:
        if self.num_logprobs is not None:
            _check_int("logprobs", self.logprobs, minimum=0)
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(
                "SamplingParams: logprobs_mode must be 'raw' or 'processed', got "
                f"{self.logprobs_mode!r}"
            )

    def copies(self) -> list[SamplingParams]:
        """The settings of each of the `n` texts."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % 2**64 for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def greedy(self) -> bool:
        """Whether the settings mean greedy decoding, by TensorRT-LLM's rule."""
        unset = self.temperature is None and self.top_k is None and self.top_p is None
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside the chosen one; None reports nothing."""
        return None if self.logprobs is None or self.logprobs is False else self.logprobs

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


def _check_number(
    name: str, value: object, *, lowest: float = 0.0, highest: float = _LARGEST
) -> None:
    if value is None:
        return
    expected = f">= {lowest:g}" if lowest > -inf else "that is finite"
    if highest != _LARGEST:
        expected = f"in [{lowest:g}, {highest:g}]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if max(lowest, -_LARGEST) <= value <= highest:
            return
        if _LARGEST < abs(value) < inf:
            expected = "that float32 can hold"
    raise ValueError(f"SamplingParams: {name} must be a number {expected}, got {value!r}")
