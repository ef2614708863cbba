"""The `tensorrt` Python package, for building engines and for running them: versions, log, plugins.

Written against the documented API of TensorRT 10.14 to 11, which TensorRT-RTX shares. The module is
always handed on as a value, so that nothing here needs it to be installed.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from .plugin_contract import LIBRARY, NAMESPACE, VERSION

OLDEST, NEWEST = (10, 14), (12, 0)
# Which has the collectives of several ranks.
COLLECTIVES_SINCE = "TensorRT 10.16 or later"
LIBRARY_VARIABLE = "TREEWY_TENSORRT_LIBRARY"


def import_tensorrt() -> Any:
    """The module `tensorrt`.

    Raises:
        ImportError: there is no such package.
        ValueError: its version is not one that this was written for.
    """
    trt = importlib.import_module("tensorrt")
    check_version(trt.__version__)
    return trt


def check_version(version: str) -> None:
    """Raises ValueError for a version of TensorRT below 10.14, or from 12 on."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < NEWEST:
        raise ValueError(f"tensorrt must be 10.14 or later and below 12, got {version}")


def name_of(trt: Any) -> str:
    """Package and version, as engines are marked with."""
    return f"{trt.__name__} {trt.__version__}"


def make_logger(trt: Any) -> Any:
    """An ILogger that keeps errors in its list `errors`, for the exception that follows."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

    return Logger()


def reasons(logger: Any) -> str:
    """What a logger of `make_logger` has kept, which it forgets."""
    said = "; ".join(logger.errors) or "no reason given"
    logger.errors.clear()
    return said


def plugin_candidates() -> list[Path]:
    """Where the plugins' library is looked for, in order.

    What the environment variable TREEWY_TENSORRT_LIBRARY names, else `build/` of the checkout and
    the folder of this module.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        path = Path(named)
        return [path / LIBRARY if path.is_dir() else path]
    package = Path(__file__).resolve().parent
    return [package.parent / "build" / LIBRARY, package / LIBRARY]


def find_plugins() -> Path:
    """The first of `plugin_candidates` that is there; ValueError where there is none."""
    candidates = plugin_candidates()
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        looked = ", ".join(map(str, candidates))
        raise ValueError(
            f"the plugins' library is not there (looked for {looked}): run ./build.sh, or name it "
            f"with {LIBRARY_VARIABLE}"
        )
    return found


def load_plugins(trt: Any, library: Path | None = None) -> None:
    """Puts the plugins into TensorRT's registry, unless they are there.

    TensorRT refuses a library whose creators are registered already, by a preload for example.

    Args:
        trt: the module.
        library: the file; without it that of `find_plugins`.

    Raises:
        ValueError: there is no library, TensorRT does not take it, or what is there is another
            version of the plugins.
    """
    registry = trt.get_plugin_registry()
    versions = _registered(registry)
    if not versions:
        found = find_plugins() if library is None else library
        if registry.load_library(str(found)) is None:
            raise ValueError(f"{found}: TensorRT {trt.__version__} cannot load it as plugins")
        versions = _registered(registry)
    if versions != {VERSION}:
        listed = ", ".join(sorted(versions)) or "no version"
        raise ValueError(
            f"the plugins in TensorRT's registry are {listed}, expected version {VERSION}: run "
            "./build.sh, and load no other library of them"
        )


def _registered(registry: Any) -> set[str]:
    """Versions of the plugins that are there."""
    creators = registry.all_creators
    return {x.plugin_version for x in creators if x.plugin_namespace == NAMESPACE}
