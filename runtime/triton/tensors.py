"""The tensors of a request and of its responses: what `config.pbtxt` declares, and what is read.

Names and types are those that clients of TensorRT-LLM on Triton know; what is not among theirs
belongs to speculation. Every tensor has one more dimension in front, the batch, which is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_treewy.serve.errors import invalid

_NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "STRING": np.object_,
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor.

    Attributes:
        name: as clients name it.
        type: of `config.pbtxt`, without `TYPE_`.
        dims: without the batch; -1 is any length.
        optional: whether a request may leave it out.
    """

    name: str
    type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True

    def read(self, array: np.ndarray[Any, Any]) -> Any:
        """The value: a list where any length may come, else a scalar.

        Raises:
            ApiError: a text is not UTF-8.
        """
        values = [self._plain(value) for value in array.reshape(-1).tolist()]
        return values if -1 in self.dims else values[0]

    def write(self, value: Any) -> np.ndarray[Any, Any]:
        """`value`, a scalar or nested lists, with the batch in front."""
        if self.type == "STRING":
            value = value.encode("utf-8")
        array = np.array(value, dtype=_NUMPY[self.type])
        return array.reshape(1, *(array.shape or (1,)))

    def _plain(self, value: Any) -> Any:
        if self.type == "FP32":
            # The shortest decimal of the float32 is what the client wrote: 0.7, not 0.69999999.
            return float(str(np.float32(value)))
        if self.type == "STRING":
            try:
                return value.decode("utf-8") if isinstance(value, bytes) else str(value)
            except UnicodeDecodeError as error:
                raise invalid(self.name, f"{self.name} is not UTF-8: {error}") from None
        return value


INPUTS = (
    TensorSpec("text_input", "STRING", optional=False),
    TensorSpec("max_tokens", "INT32"),
    TensorSpec("stream", "BOOL"),
    TensorSpec("temperature", "FP32"),
    TensorSpec("top_k", "INT32"),
    TensorSpec("top_p", "FP32"),
    TensorSpec("min_p", "FP32"),
    TensorSpec("random_seed", "UINT64"),
    TensorSpec("seed", "UINT64"),
    TensorSpec("stop_words", "STRING", (-1,)),
    TensorSpec("bad_words", "STRING", (-1,)),
    TensorSpec("end_id", "INT32"),
    TensorSpec("pad_id", "INT32"),
    TensorSpec("min_tokens", "INT32"),
    TensorSpec("repetition_penalty", "FP32"),
    TensorSpec("presence_penalty", "FP32"),
    TensorSpec("frequency_penalty", "FP32"),
    TensorSpec("beam_width", "INT32"),
    TensorSpec("num_return_sequences", "INT32"),
    TensorSpec("exclude_input_in_output", "BOOL"),
    TensorSpec("return_log_probs", "BOOL"),
    TensorSpec("return_num_input_tokens", "BOOL"),
    TensorSpec("return_num_output_tokens", "BOOL"),
    TensorSpec("ignore_eos", "BOOL"),
    TensorSpec("priority", "INT32"),
    TensorSpec("speculation", "BOOL"),
)
OUTPUTS = (
    TensorSpec("text_output", "STRING"),
    TensorSpec("finish_reason", "STRING"),
    TensorSpec("stop_reason", "STRING"),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
    TensorSpec("acceptance_length", "FP32"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("num_verify_steps", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("accepted_per_depth", "INT32", (-1,)),
)
INPUT: Mapping[str, TensorSpec] = {spec.name: spec for spec in INPUTS}
OUTPUT: Mapping[str, TensorSpec] = {spec.name: spec for spec in OUTPUTS}
