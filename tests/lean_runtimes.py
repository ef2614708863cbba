"""TensorRT's lean runtimes of PyPI: the real registry and the real classes, without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

RUNTIMES = {"10": ("cu12", "10.16.1.11"), "11": ("cu13", "11.4.0.106")}


def unavailable(reason):
    if os.environ.get("TREEWY_REQUIRE_TENSORRT") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def lean_runtime(name, repository):
    """Folder with a lean runtime, downloaded once."""
    cuda, version = RUNTIMES[name]
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        unavailable("the lean runtimes are for Linux on x86-64")
    python = f"{sys.version_info[0]}{sys.version_info[1]}"
    folder = repository / ".cache" / "tensorrt-lean" / f"{version}-cp{python}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        names = [f"tensorrt-lean-{cuda}-{half}=={version}" for half in ("bindings", "libs")]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        run = subprocess.run(
            [*command, "--target", str(part), *names], capture_output=True, text=True
        )
        if run.returncode != 0:
            shutil.rmtree(part, ignore_errors=True)
            unavailable(f"{' and '.join(names)} could not be had: {run.stderr[-300:]}")
        part.rename(folder)
    return folder
