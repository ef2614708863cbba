"""What Triton's Python backend runs: our requests and responses in its terms.

Triton makes one `TritonPythonModel` for each instance, in a process of its own. torch is imported
when it is initialised, and not before: Triton also imports this to ask for a configuration.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_treewy.serve.errors import ApiError

    from .requests import TritonRequest

# From which of ours to which of Triton's codes; all else is Triton's INTERNAL.
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 429: "UNAVAILABLE", 503: "UNAVAILABLE"}


class TritonPythonModel:
    """One instance of the model: one engine, in which all its requests run together."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds nothing; Triton asks in a process of its own, which must not outlive it either."""
        from .guard import end_with_server

        end_with_server()
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model; an exception keeps Triton from serving it, and is in Triton's log."""
        from .guard import end_with_server

        end_with_server()

        import triton_python_backend_utils as pb_utils

        from .places import device_of
        from .settings import read_parameters

        self._utils = pb_utils
        self._log = pb_utils.Logger
        config = json.loads(args["model_config"])
        settings = read_parameters(config.get("parameters", {}))
        _check_arrays(pb_utils)
        settings.device = device_of(args, settings)
        if settings.tensor_parallel_size > 1:
            _choose_interpreter(settings.python_executable)
        version = Path(args["model_repository"], args["model_version"]).resolve()
        self._exclude_input = settings.exclude_input_in_output
        self._model = config["name"]

        from .front import Front
        from .metrics import MetricsMirror
        from .watch import Watch

        self._front = Front(settings, version / settings.model, self._model)
        labels = {
            "model": self._model,
            "version": args["model_version"],
            "replica": args["model_instance_name"],
        }
        self._mirror = MetricsMirror(self._front.service.metrics, pb_utils.MetricFamily, labels)
        self._watch = Watch(self._front, self._mirror, self._engine_failed, self._watch_failed)

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts the requests, and returns at once; responses come as the text does."""
        from trtllm_treewy.runtime.errors import describe
        from trtllm_treewy.serve.errors import ApiError

        for request in requests:
            responder = TritonResponder(self._utils, request.get_response_sender())
            try:
                parsed = self._parse(request)
            except ApiError as error:
                responder.fail(error)
            except Exception as error:  # raised, it would be the answer to all of `requests`
                responder.fail(ApiError(500, f"internal error: {describe(error)}"))
            else:
                self._front.start(parsed, responder)

    def is_ready(self) -> bool:
        """Whether requests can run; what the Python backend of March 2026 and later asks."""
        engine = self._front.service.engine
        return engine.alive and not engine.draining

    def finalize(self) -> None:
        """The end: Triton lets the requests that run finish first, and takes no new ones."""
        self._watch.close()
        self._front.close()
        self._mirror.close()

    def _parse(self, request: Any) -> TritonRequest:
        from .requests import check_parameters, parse
        from .tensors import INPUT

        check_parameters(json.loads(request.parameters() or "{}"))
        raw = {
            tensor.name(): INPUT[tensor.name()].read(tensor.as_numpy())
            for tensor in request.inputs()
        }
        return parse(raw, model=self._model, exclude_input=self._exclude_input)

    def _watch_failed(self, reason: str) -> None:
        self._log.log_error(f"{self._model}: {reason}")

    def _engine_failed(self, reason: str) -> None:
        """Takes the model out of service, all its instances: an orchestrator sees it not ready."""
        self._log.log_error(f"{self._model}: {reason}; unloading the model")
        try:
            self._utils.unload_model(self._model)
        except Exception as error:
            self._log.log_error(
                f"{self._model} cannot be unloaded, every request will be refused: {error}. Use "
                "--model-control-mode=explicit"
            )


class TritonResponder:
    """The responses to one request.

    With the last response Triton frees what a sender points to, and a question after that takes
    the whole server down; so it is asked under the lock that the last response is sent with.
    """

    def __init__(self, utils: Any, sender: Any) -> None:
        self._utils, self._sender = utils, sender
        self._mutex = threading.Lock()
        self._ended = False

    def send(self, values: Mapping[str, Any], final: bool) -> None:
        """A response with `values` by output name; the last one if `final`."""
        from .tensors import OUTPUT

        tensors = [
            self._utils.Tensor(name, OUTPUT[name].write(value)) for name, value in values.items()
        ]
        self._respond(self._utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: ApiError) -> None:
        """An error as the last response."""
        self._error(error.message, _CODES.get(error.status, "INTERNAL"))

    def cancelled(self) -> bool:
        """Whether the client has cancelled, or has gone."""
        with self._mutex:
            return not self._ended and bool(self._sender.is_cancelled())

    def end_cancelled(self) -> None:
        """The last response to a request that was cancelled."""
        self._error("the request was cancelled", "CANCELLED")

    def _error(self, message: str, code: str) -> None:
        error = self._utils.TritonError(message, getattr(self._utils.TritonError, code))
        self._respond(self._utils.InferenceResponse(output_tensors=[], error=error), True)

    def _respond(self, response: Any, final: bool) -> None:
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._mutex:
            if not self._ended:
                self._ended = final
                self._sender.send(response, flags=flags)


def _choose_interpreter(given: str | None) -> None:
    """What ranks are started with, as this process is Triton's stub and no interpreter."""
    import multiprocessing

    from .interpreter import find_interpreter

    multiprocessing.set_executable(find_interpreter(given))


def _check_arrays(utils: Any) -> None:
    """Refuses a backend that reads numpy's arrays wrongly, before its first text crashes it.

    The Python backend was built for numpy 1 until October 2024 (Triton 24.10).
    """
    import torch

    # Not an array of numpy 1 itself, whose capsules the backend does not take.
    expected = [1, 2, 3]
    found = utils.Tensor.from_dlpack("check", torch.tensor(expected, dtype=torch.int32))
    if found.as_numpy().tolist() != expected:
        import numpy as np

        raise RuntimeError(
            f"this Triton's Python backend does not work with numpy {np.__version__}: install "
            "'numpy<2', or use a newer Triton"
        )
