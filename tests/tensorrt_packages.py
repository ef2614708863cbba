"""What PyPI has of TensorRT for machines without a GPU, kept in .cache/.

The lean runtimes of TensorRT 10 and 11 (46 MB each) have the whole plugin registry and the classes
of the runtime; TensorRT-RTX (96 MB) has the parser and the builder.
"""

from __future__ import annotations

import os
import sys

import downloads

REQUIRED = "TREEWY_REQUIRE_TENSORRT"
RUNTIMES = {"10": ("cu12", "10.16.1.11"), "11": ("cu13", "11.4.0.106")}
RTX = "1.7.1.116"


def unavailable(reason):
    downloads.unavailable(REQUIRED, reason)


def lean_runtime(name, repository):
    """Folder with a lean runtime, downloaded once."""
    cuda, version = RUNTIMES[name]
    names = [f"tensorrt-lean-{cuda}-{half}=={version}" for half in ("bindings", "libs")]
    return _folder(repository / ".cache" / "tensorrt-lean", version, names)


def rtx(repository):
    """Folder with TensorRT-RTX, downloaded once; its libraries are in `tensorrt_rtx_libs`."""
    names = [f"tensorrt-rtx-cu13-{half}=={RTX}" for half in ("bindings", "libs")]
    return _folder(repository / ".cache" / "tensorrt-rtx", RTX, names)


def _folder(place, version, names):
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        unavailable("these packages are for Linux on x86-64")
    python = f"{sys.version_info[0]}{sys.version_info[1]}"
    return downloads.downloaded(place / f"{version}-cp{python}", names, REQUIRED)
