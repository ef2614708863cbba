"""The one module that builds with TensorRT: an ONNX file to a plan (see `tensorrt_package`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from trtllm_treewy.tensorrt_package import (
    COLLECTIVES_SINCE,
    import_tensorrt,
    load_plugins,
    make_logger,
    name_of,
    reasons,
)

from .onnx_collectives import COLLECTIVE
from .profiles import Profile

Stage = Callable[[str, int, int], None]


class NetworkBuilder(Protocol):
    """What turns an ONNX file into an engine; its attributes go into the engine's config.

    Attributes:
        version: program and version.
        gpu: that the engines are for, by `engine_config.gpu_identity`; None for any.
        plugins: whether GDN nodes become plugins, and not what their functions say.
        collectives: whether it takes the networks of several ranks.
    """

    version: str
    gpu: str | None
    plugins: bool
    collectives: bool

    def build(
        self,
        onnx_file: Path,
        plan: Path,
        profiles: Sequence[Profile],
        timing_cache: Path,
        progress: Stage | None = None,
    ) -> int:
        """Writes `plan`, and what was timed to `timing_cache`, which is read if it is there.

        Returns:
            Bytes of scratch that the engine takes when it runs; 0 where that was not measured.

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
        measure: load each engine once to see what scratch it takes; needs the GPU that it is for.

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
        measure: bool = True,
    ) -> None:
        trt = import_tensorrt() if trt is None else trt
        self._trt, self._configure, self._workspace = trt, configure, workspace
        self._measure = measure
        self.version = name_of(trt)
        self.gpu = gpu
        self.plugins = plugins is not None
        self.collectives = hasattr(trt.LayerType, "DIST_COLLECTIVE")
        self._logger = make_logger(trt)
        if plugins is not None:
            if not plugins.is_file():
                raise ValueError(f"plugins {str(plugins)!r} is not a file; run ./build.sh first")
            load_plugins(trt, plugins)

    def build(
        self,
        onnx_file: Path,
        plan: Path,
        profiles: Sequence[Profile],
        timing_cache: Path,
        progress: Stage | None = None,
    ) -> int:
        """See `NetworkBuilder`."""
        trt, self._logger.errors[:] = self._trt, []
        builder = trt.Builder(self._logger)
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        # Where the flag is gone every network is strongly typed.
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse_from_file(str(onnx_file)):
            errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
            if any(COLLECTIVE in error for error in errors) and not self.collectives:
                errors.append(f"networks of several ranks need {COLLECTIVES_SINCE}")
            raise ValueError(f"{onnx_file.name}: TensorRT cannot parse it: {'; '.join(errors)}")
        config = self._make_config(builder, profiles, timing_cache, progress)
        if self.collectives:
            self._allow_collectives(network, config)
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            said = reasons(self._logger)
            raise ValueError(f"{onnx_file.name}: TensorRT cannot build it: {said}")
        plan.write_bytes(memoryview(engine))
        cache = config.get_timing_cache()
        if cache is not None:
            timing_cache.write_bytes(memoryview(cache.serialize()))
        return self._scratch(onnx_file.name, engine) if self._measure else 0

    def _scratch(self, name: str, plan: Any) -> int:
        runtime = self._trt.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            said = reasons(self._logger)
            raise ValueError(f"{name}: TensorRT cannot load what it has built: {said}")
        return int(engine.device_memory_size_v2)

    def _allow_collectives(self, network: Any, config: Any) -> None:
        """Networks of several ranks were a preview feature in 10.16."""
        kind = self._trt.LayerType.DIST_COLLECTIVE
        if not any(network.get_layer(i).type == kind for i in range(network.num_layers)):
            return
        for name, feature in self._trt.PreviewFeature.__members__.items():
            if name.startswith("MULTIDEVICE"):
                config.set_preview_feature(feature, True)

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
