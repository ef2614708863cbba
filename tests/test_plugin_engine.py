"""The checks of whole engines (engine_suite.py), with the plugins driven on the CPU.

It shows that the checks are right and that the plugins work together in a network; a real TensorRT
runs the same ones on a GPU: see docs/verification.md.
"""

from __future__ import annotations

import pytest
from engine_backends import HostBackend
from engine_suite import run_all
from kernel_suite import BF16, F16, F32, Machine
from test_plugin import host, libraries, library  # noqa: F401  the fixtures


@pytest.mark.parametrize("types", [(F32, F32), (F16, F32), (BF16, BF16)])
def test_engines(host, tmp_path, types):  # noqa: F811
    machine = Machine("cpu")
    rows = run_all(HostBackend(host.library), machine, [types], tmp_path, steps=4)
    failed = [row for row in rows if not row["passed"]]
    assert len(rows) == 5
    assert not failed, "\n".join(f"{row['check']}: {row['said']}" for row in failed)
