"""The Triton kernels, in a process of their own: see the suites that are named below."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "suite", ["triton_suite.py", "fused_suite.py", "snapshot_suite.py", "step_tables_suite.py"]
)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_by_the_interpreter(suite):
    suite = Path(__file__).with_name(suite)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
