"""The machine of a run: GPU, driver, versions."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata

import torch

from .floors import Rates
from .results import Results


def describe_machine(rates: Rates, distributions: Iterable[str]) -> Results:
    """Results without rows."""
    return Results(
        gpu=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        read_bandwidth=rates.bandwidth,
        matmul_rate=rates.operations,
        driver=driver_version(),
        versions=versions(distributions),
    )


def driver_version() -> str:
    """Of the first GPU; empty where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.stdout.split("\n")[0].strip()


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Python, CUDA, and the packages that are installed."""
    found = {"Python": platform.python_version()}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    for name in ("torch", "triton", "trtllm-treewy", *distributions):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
