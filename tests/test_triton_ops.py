"""The Triton kernels, in a process of their own: see the suites that are named below."""

import os
import re
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


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtllm_treewy.triton_ops import step_tables

kinds = {
    "*i64": ("token_ptr", "path_ptr", "bonus_ptr", "token_table", "root_table"),
    "*bf16": ("hidden_ptr", "hidden_table"),
    "i32": ("nodes", "columns", "room", "size", "width"),
    "constexpr": ("APPEND", "BLOCK"),
}
kind = {name: kind for kind, names in kinds.items() for name in names}
signature = {name: kind.get(name, "*i32") for name in step_tables._note.arg_names}
source = ASTSource(step_tables._note, signature, {"APPEND": True, "BLOCK": 1024})
print(compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}).asm["ttgir"])
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_all_warps_have_read_how_many_pairs_wait_before_one_writes_it():
    """The interpreter has no warps: it is seen in what is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    table = next(
        re.match(r"\s*(%\S+) = tt.addptr %len_table", line)[1]
        for line in lines
        if "tt.addptr %len_table" in line
    )
    at = {
        what: next(n for n, line in enumerate(lines) if re.search(f"{op}\\b.*{table}\\b", line))
        for what, op in (("read", "tt.load"), ("written", "tt.store"))
    }
    barriers = [n for n, line in enumerate(lines) if "barrier" in line]
    assert any(at["read"] < n < at["written"] for n in barriers), done.stdout
