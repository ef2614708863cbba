"""The names and parameters that are used of TensorRT, in real TensorRT 10 and 11.

The executor runs over tensorrt_double.py, so it calls nothing that the double lacks; here the
double is held to the classes of the lean runtimes of PyPI, and of TensorRT-RTX. What the
methods do is not checked: that needs a GPU.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
from tensorrt_packages import RUNTIMES, lean_runtime, rtx

pytest.importorskip("onnx")

import tensorrt_double as double

CLASSES = (
    double.Runtime,
    double.ICudaEngine,
    double.IExecutionContext,
    double.IPluginRegistry,
    double.DataType,
    double.TensorIOMode,
    double.ExecutionContextAllocationStrategy,
)
# Prints what a module has of the names on stdin: docstrings of methods, which pybind11 writes the
# parameters into, and "property" or "value" of the rest.
PROGRAM = """
import importlib, json, sys
trt = importlib.import_module(sys.argv[1])
found = {"version": trt.__version__, "get_plugin_registry": hasattr(trt, "get_plugin_registry")}
for name, members in json.load(sys.stdin).items():
    for member in members:
        value = getattr(getattr(trt, name, None), member, None)
        kind = "property" if isinstance(value, property) else "value"
        found[f"{name}.{member}"] = value and ((callable(value) and value.__doc__) or kind)
print(json.dumps(found))
"""


def public(kind):
    """Names of a class of the double, with the parameters of methods."""
    if issubclass(kind, double.enum.Enum):
        return {member.name: None for member in kind}
    result = {}
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and (not name.startswith("_") or name == "__init__"):
            result[name] = list(inspect.signature(value).parameters)[1:]
        elif isinstance(value, property) or (name.isupper() and not name.startswith("_")):
            result[name] = None
    return result


NAMES = {kind.__name__: public(kind) for kind in CLASSES}
# Objects that TensorRT makes are not made by calls of ours.
for made in ("ICudaEngine", "IExecutionContext", "IPluginRegistry"):
    NAMES[made].pop("__init__", None)
NAMES["ILogger"] = {"ERROR": None}


def ask(module, **environment):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        input=json.dumps({name: list(members) for name, members in NAMES.items()}),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def check(found):
    assert found["get_plugin_registry"]
    for name, members in NAMES.items():
        for member, wanted in members.items():
            said = found[f"{name}.{member}"]
            assert said is not None, f"TensorRT {found['version']} has no {name}.{member}"
            if wanted is None:
                assert said in ("property", "value"), (name, member, said)
                continue
            calls = re.findall(rf"{member}\(self: \S+?(?:, (.*?))?\) -> ", said)
            given = [re.findall(r"(?:^|, )(\w+): ", call) for call in calls]
            assert wanted in given, f"{name}.{member}({', '.join(wanted)}): {said}"


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_double_has_the_names_of_tensorrt(name, repository):
    folder = lean_runtime(name, repository)
    found = ask("tensorrt_lean_bindings", PYTHONPATH=str(folder))
    assert found["version"] == RUNTIMES[name][1]
    check(found)


def test_the_double_has_the_names_of_tensorrt_rtx(repository):
    folder = rtx(repository)
    libraries = str(folder / "tensorrt_rtx_libs")
    check(ask("tensorrt_rtx_bindings", PYTHONPATH=str(folder), LD_LIBRARY_PATH=libraries))


def test_a_name_that_tensorrt_lacks_is_seen(monkeypatch):
    """The check can fail: for a method, for a parameter."""
    doc = "f(self: x.T, memory: int, size: typing.SupportsInt) -> None"
    found = {"version": "1", "get_plugin_registry": True, "T.f": doc, "T.g": None}
    monkeypatch.setitem(globals(), "NAMES", {"T": {"f": ["memory", "size"]}})
    check(found)
    for names in ({"f": ["memory"]}, {"g": []}, {"f": None}):
        monkeypatch.setitem(globals(), "NAMES", {"T": names})
        with pytest.raises(AssertionError):
            check(found)
