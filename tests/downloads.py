"""Packages that a test runs beside its own environment: kept in .cache/, downloaded once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


def unavailable(variable, reason):
    """Skips with the reason; with VARIABLE=1 in the environment, as in CI, fails."""
    if os.environ.get(variable) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def downloaded(folder, names, variable):
    """`folder`, with the packages in it and none of those that they depend on."""
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        run = subprocess.run(
            [*command, "--target", str(part), *names], capture_output=True, text=True
        )
        if run.returncode != 0:
            shutil.rmtree(part, ignore_errors=True)
            unavailable(variable, f"{' and '.join(names)} could not be had: {run.stderr[-300:]}")
        part.rename(folder)
    return folder
