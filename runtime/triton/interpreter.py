"""A Python interpreter for processes beside Triton's stub, which Python is only embedded in.

The stub loads libpython, so `sys.executable` is a guess there: empty, the stub, or the first
`python3` in PATH, whichever that is. What the ranks are started with is tried first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Seconds in which an interpreter has to import this package; torch is not imported.
CHECK_SECONDS = 60.0
_CHECK = """
import sys
sys.path[:] = {path!r}
import importlib.util
import trtllm_treewy
found = importlib.util.find_spec("torch") is not None
print(sys.implementation.name, *sys.version_info[:2], "with" if found else "without", "torch")
"""


def find_interpreter(given: str | None = None) -> str:
    """The interpreter that `given` names, or else the first usable one of this Python's own.

    Usable is one of this version that, with this process's import path, imports this package and
    finds torch.

    Raises:
        ValueError: there is none, and why each that was tried is not usable.
    """
    if given is not None:
        why = unusable(given)
        if why is not None:
            raise ValueError(f"parameter python_executable: {given!r} cannot run ranks: {why}")
        return given
    tried = []
    for candidate in dict.fromkeys(candidates()):
        why = unusable(candidate)
        if why is None:
            return candidate
        tried.append(f"{candidate}: {why}")
    raise ValueError(
        "no Python interpreter for the ranks of tensor_parallel_size was found; name one with the "
        f"parameter python_executable (tried {'; '.join(tried) or 'none'})"
    )


def candidates() -> Iterator[str]:
    """Where an interpreter of this Python may be, the likeliest first."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for found in (sys.executable, getattr(sys, "_base_executable", None)):
        # Anything else in there is the program that Python is embedded in; it is not run.
        if found and Path(found).name.startswith("python"):
            yield found
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix):
        for name in (version, "python3"):
            if (file := Path(prefix, "bin", name)).is_file():
                yield str(file)


def unusable(interpreter: str) -> str | None:
    """Why ranks cannot be started with this interpreter; None where they can."""
    code = _CHECK.format(path=sys.path)
    try:
        run = subprocess.run(
            [interpreter, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"it does not import trtllm_treewy within {CHECK_SECONDS:.0f} s"
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return f"it does not import trtllm_treewy: {last}"
    major, minor = sys.version_info[:2]
    expected = f"{sys.implementation.name} {major} {minor} with torch"
    said = (run.stdout.strip().splitlines() or [""])[-1]
    return None if said == expected else f"expected {expected!r}, it says {said!r}"
