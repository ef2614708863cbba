"""From the outputs of a request to the tensors of its responses."""

from __future__ import annotations

from typing import Any

from trtllm_treewy.outputs import AcceptanceStats, CompletionOutput, RequestOutput

from .requests import TritonRequest


class Answer:
    """The responses to one request; what each of them has had is not said again."""

    def __init__(self, request: TritonRequest) -> None:
        self._request = request
        self._num_responses = self._num_tokens = 0
        self._log_prob = 0.0

    def values(self, output: RequestOutput) -> dict[str, Any] | None:
        """Values by output name; None where there is nothing to show yet.

        `text_output` is what is new since the last response, or all of it without streaming.
        What is known only at the end comes with the last response: why the text ended, and how
        the drafts did.
        """
        completion = output.outputs[0]
        if not (output.finished or completion.text_diff):
            return None
        tokens = completion.token_ids[self._num_tokens :]
        values: dict[str, Any] = {"text_output": self._text(output, completion)}
        if self._request.generation.wants_logprobs:
            values |= self._log_probs(completion)
        if self._request.count_input:
            values["num_input_tokens"] = len(output.prompt_token_ids)
        if self._request.count_output:
            values["num_output_tokens"] = len(tokens)
        if output.finished:
            values["finish_reason"] = str(completion.finish_reason)
            if completion.stop_reason is not None:
                values["stop_reason"] = str(completion.stop_reason)
            if output.speculation is not None:
                values |= _acceptance(output.speculation)
        self._num_tokens += len(tokens)
        self._num_responses += 1
        return values

    def _text(self, output: RequestOutput, completion: CompletionOutput) -> str:
        text = completion.text_diff if self._request.generation.stream else completion.text
        if self._request.exclude_input or self._num_responses:
            return text
        prompt = self._request.generation.prompts[0]
        assert isinstance(prompt, str), "Triton requests have texts"
        return prompt + text

    def _log_probs(self, completion: CompletionOutput) -> dict[str, Any]:
        start = self._num_tokens
        new = zip(completion.token_ids[start:], (completion.logprobs or [])[start:], strict=False)
        values = [entry[token].logprob for token, entry in new]
        self._log_prob += sum(values)
        return {"output_log_probs": [values], "cum_log_probs": [self._log_prob]}


def _acceptance(stats: AcceptanceStats) -> dict[str, Any]:
    """Names of TensorRT-LLM where it has them."""
    return {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "num_verify_steps": stats.num_steps,
        "total_draft_tokens": stats.num_drafted,
        "total_accepted_draft_tokens": stats.num_accepted,
        "accepted_per_depth": list(stats.accepted_per_depth),
    }
