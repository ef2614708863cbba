"""Loading the plugin library into a process that has TensorRT."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from .plugin_contract import LIBRARY, NAMESPACE, VERIFY, VERSION

LIBRARY_VARIABLE = "TREEWY_TENSORRT_LIBRARY"


def plugin_library_candidates() -> list[Path]:
    """Where the library is looked for, in order.

    What the environment variable TREEWY_TENSORRT_LIBRARY names (the file or its folder), else
    `build/` of the checkout and the folder of the package.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        path = Path(named)
        return [path / LIBRARY if path.is_dir() else path]
    folders = Path(__file__).resolve().parents[:2]
    return [folder / part / LIBRARY for folder in folders for part in ("build", ".")]


def find_plugin_library(path: str | Path | None = None) -> Path:
    """The library's file.

    Args:
        path: the file; None: the first of `plugin_library_candidates` that is there.

    Raises:
        FileNotFoundError: there is none; the message says where was looked.
    """
    looked = [Path(path)] if path is not None else plugin_library_candidates()
    for candidate in looked:
        if candidate.is_file():
            return candidate
    places = ", ".join(str(candidate) for candidate in looked)
    raise FileNotFoundError(
        f"there is no {LIBRARY} (looked for {places}): run ./build.sh, and name it with "
        f"--treewy_library or {LIBRARY_VARIABLE}"
    )


@cache
def load_plugin_library(path: str | Path | None = None) -> Path:
    """Loads the library once TensorRT is there, and looks for its creators in the registry.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it does not load, or TensorRT does not know its plugins afterwards.
    """
    import tensorrt as trt

    found = find_plugin_library(path)
    try:
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ValueError(f"{found} cannot be loaded: {error}") from None
    if trt.get_plugin_registry().get_creator(VERIFY.name, VERSION, NAMESPACE) is None:
        raise ValueError(
            f"{found} is loaded, and TensorRT {trt.__version__} does not know its plugins: is the "
            "library for this version (10 or 11)?"
        )
    return found
