"""The one module that builds with TensorRT: an ONNX file to a plan.

Written against the documented Python API of TensorRT 10.14 to 11 (`pip install tensorrt`), which
TensorRT-RTX (`tensorrt_rtx_bindings`) shares.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from .profiles import Profile

OLDEST, NEWEST = (10, 14), (12, 0)
Stage = Callable[[str, int, int], None]


class NetworkBuilder(Protocol):
    """What turns an ONNX file into an engine; `version` and `gpu` go into the engine's config."""

    version: str
    gpu: str | None

    def build(
        self,
        onnx_file: Path,
        plan: Path,
        profiles: Sequence[Profile],
        timing_cache: Path,
        progress: Stage | None = None,
    ) -> None:
        """Writes `plan`, and what was timed to `timing_cache`, which is read if it is there.

        Raises:
            ValueError: TensorRT refuses the network; the message has its reasons.
        """
        ...


class TensorRTBuilder:
    """`NetworkBuilder` by the `tensorrt` package.

    Args:
        plugins: libtreewy_tensorrt.so; without it the GDN nodes are expanded to their functions,
            which is for checking an export and not for speed.
        trt: the module, `tensorrt` if not given.
        configure: what else to set in an IBuilderConfig.
        gpu: name of the GPU that engines are for.
        workspace: bytes of scratch that tactics may take.

    Raises:
        ImportError: there is no such package.
        ValueError: a version that this was not written for, or a library that is not there.
    """

    def __init__(
        self,
        plugins: Path | None = None,
        *,
        trt: Any = None,
        configure: Callable[[Any], None] | None = None,
        gpu: str | None = None,
        workspace: int | None = None,
    ) -> None:
        if trt is None:
            trt = importlib.import_module("tensorrt")
            _check_version(trt.__version__)
        self._trt, self._configure, self._workspace = trt, configure, workspace
        self.version = f"{trt.__name__} {trt.__version__}"
        self.gpu = gpu
        self._logger = _make_logger(trt)
        if plugins is not None:
            if not plugins.is_file():
                raise ValueError(f"plugins {str(plugins)!r} is not a file; run ./build.sh first")
            trt.get_plugin_registry().load_library(str(plugins))

    def build(
        self,
        onnx_file: Path,
        plan: Path,
        profiles: Sequence[Profile],
        timing_cache: Path,
        progress: Stage | None = None,
    ) -> None:
        """See `NetworkBuilder`."""
        trt, self._logger.errors[:] = self._trt, []
        builder = trt.Builder(self._logger)
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        # Where the flag is gone every network is strongly typed.
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse_from_file(str(onnx_file)):
            reasons = [str(parser.get_error(i)) for i in range(parser.num_errors)]
            raise ValueError(f"{onnx_file.name}: TensorRT cannot parse it: {'; '.join(reasons)}")
        config = self._make_config(builder, profiles, timing_cache, progress)
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            reasons = self._logger.errors or ["no reason given"]
            raise ValueError(f"{onnx_file.name}: TensorRT cannot build it: {'; '.join(reasons)}")
        plan.write_bytes(memoryview(engine))
        cache = config.get_timing_cache()
        if cache is not None:
            timing_cache.write_bytes(memoryview(cache.serialize()))

    def _make_config(
        self, builder: Any, profiles: Sequence[Profile], timing_cache: Path, progress: Stage | None
    ) -> Any:
        config = builder.create_builder_config()
        if self._workspace is not None:
            config.set_memory_pool_limit(self._trt.MemoryPoolType.WORKSPACE, self._workspace)
        if hasattr(config, "create_timing_cache"):
            known = timing_cache.read_bytes() if timing_cache.is_file() else b""
            # A cache of another version or GPU is refused by TensorRT, and a new one is begun.
            if not config.set_timing_cache(config.create_timing_cache(known), False):
                config.set_timing_cache(config.create_timing_cache(b""), False)
        for profile in profiles:
            part = builder.create_optimization_profile()
            for name, shapes in profile.shapes.items():
                part.set_shape(name, *shapes)
            config.add_optimization_profile(part)
        if progress is not None and hasattr(self._trt, "IProgressMonitor"):
            config.progress_monitor = _make_monitor(self._trt, progress)
        if self._configure is not None:
            self._configure(config)
        return config


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < NEWEST:
        raise ValueError(f"tensorrt must be 10.14 or later and below 12, got {version}")


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors, for the exception."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

    return Logger()


def _make_monitor(trt: Any, progress: Stage) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Tells `progress` of the phases of a build."""

        def __init__(self) -> None:
            super().__init__()
            self._steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            self._steps[phase] = num_steps
            progress(phase, 0, num_steps)

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, step + 1, self._steps.get(phase, step + 1))
            return True

        def phase_finish(self, phase: str) -> None:
            steps = self._steps.pop(phase, 0)
            progress(phase, steps, steps)

    return Monitor()
