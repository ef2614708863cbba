"""What this machine has of CUDA, TensorRT, Triton and our own libraries, and what that means.

Looks without importing: versions come from package metadata, libraries from the loader's search
path. Only torch is imported, as everything else here needs it. Nothing in here raises.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any, TypedDict

from .cuda_library import LIBRARY_VARIABLE, library_candidates
from .tensorrt_package import LIBRARY_VARIABLE as PLUGINS_VARIABLE
from .tensorrt_package import plugin_candidates

_TIMEOUT_S = 10.0


class Check(TypedDict):
    """One finding; plain data, so that a list of them is JSON.

    `detail` is the version and place, or where was looked; `meaning` is what follows for the user.
    """

    name: str
    found: bool
    detail: str
    meaning: str


def collect() -> list[Check]:
    """All findings of this machine, in the order of `report`."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("Python", _python),
        ("torch", _torch),
        ("CUDA devices", _cuda_devices),
        ("nvcc", _nvcc),
        ("TensorRT Python package", _tensorrt_package),
        ("TensorRT library", _tensorrt_library),
        ("TensorRT-LLM", _tensorrt_llm),
        ("ONNX Runtime", _onnx_runtime),
        ("Triton client", _triton_client),
        ("Triton server", _triton_server),
        ("Triton compiler", _triton_compiler),
        ("CUDA kernels", _cuda_kernels),
        ("TensorRT plugins", _tensorrt_plugins),
        ("transformers", _transformers),
    ]
    return [_guarded(name, check) for name, check in checks]


def report(checks: Sequence[Check] | None = None) -> str:
    """The findings as text, one line each and one for what it means."""
    checks = collect() if checks is None else checks
    width = max((len(check["name"]) for check in checks), default=0)
    lines = []
    for check in checks:
        mark = "found    " if check["found"] else "not found"
        lines.append(f"{check['name']:<{width}}  {mark}  {check['detail']}".rstrip())
        lines.append(f"{'':<{width}}             {check['meaning']}")
    return "\n".join(lines)


class TrtllmReport(TypedDict):
    """What an installed TensorRT-LLM has of the symbols that we rely on; plain data.

    `problem` says why its version is not one of those that we know, or is empty. `failed` and
    `passed` hold "module.name: what is wrong" and "module.name".
    """

    version: str | None
    problem: str
    failed: list[str]
    passed: list[str]


def check_trtllm() -> TrtllmReport:
    """Imports what is installed and compares it with `export/trtllm/contract.py`."""
    from .export.trtllm import contract

    version = _version("tensorrt_llm")
    problem = contract.version_problem(version)
    findings = contract.check() if version is not None else []
    return TrtllmReport(
        version=version,
        problem=problem,
        failed=[str(finding) for finding in findings if finding.problem],
        passed=[str(finding) for finding in findings if not finding.problem],
    )


def trtllm_report(report: TrtllmReport) -> str:
    """The report as text: the version, then one line for each symbol that is not as expected."""
    lines = [report["problem"] or f"tensorrt_llm {report['version']}: a version that we know"]
    lines += [f"not as expected  {line}" for line in report["failed"]]
    if report["passed"] or report["failed"]:
        count = len(report["passed"]) + len(report["failed"])
        lines.append(f"{len(report['passed'])} of {count} symbols are as expected")
    return "\n".join(lines)


def _check(name: str, found: bool, detail: str, if_found: str, if_not: str) -> Check:
    return Check(name=name, found=found, detail=detail, meaning=if_found if found else if_not)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """`check()`; a broken installation becomes a finding, whatever it raises."""
    try:
        return check()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Check(
            name=name, found=False, detail=reason, meaning="installed, it seems, but not usable"
        )


def _python() -> Check:
    version = platform.python_version()
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    meaning = "supported" if supported else "not tried with this version; 3.10 to 3.13 are"
    detail = f"{version}, {platform.system()} {platform.machine()}"
    return Check(name="Python", found=True, detail=detail, meaning=meaning)


def _torch() -> Check:
    version = _version("torch")
    detail = version or ""
    if version:
        built = _import_torch().version.cuda
        detail += f", built for CUDA {built}" if built else ", built without CUDA"
    return _check(
        "torch",
        version is not None,
        detail,
        "runs the models",
        "needed for everything: pip install torch",
    )


def _cuda_devices() -> Check:
    devices = _devices()
    return _check(
        "CUDA devices",
        bool(devices),
        "; ".join(devices),
        "models run here with device='cuda'",
        "models run on the CPU, slowly; the results are the same",
    )


def _devices() -> list[str]:
    """Name, compute capability and memory of each CUDA device that torch can use."""
    if _version("torch") is None:
        return []
    cuda = _import_torch().cuda
    if not cuda.is_available():
        return []
    properties = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    return [
        f"{device.name} (compute capability {device.major}.{device.minor}, "
        f"{device.total_memory / 1024**3:.0f} GiB)"
        for device in properties
    ]


def _import_torch() -> Any:
    import torch

    return torch


def _nvcc() -> Check:
    path = shutil.which("nvcc") or _in_cuda_home("nvcc")
    detail = ""
    if path:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        release = re.search(r"release ([\d.]+)", done.stdout)
        detail = f"{release[1] if release else 'unknown version'}, {path}"
    return _check(
        "nvcc",
        path is not None,
        detail,
        "build.sh compiles the CUDA kernels",
        "CUDA kernels cannot be compiled here; the torch operators need no compiler",
    )


def _in_cuda_home(program: str) -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            candidate = Path(home) / "bin" / program
            if os.access(candidate, os.X_OK):
                return str(candidate)
    return None


def _tensorrt_package() -> Check:
    version = _version("tensorrt")
    return _check(
        "TensorRT Python package",
        version is not None,
        version or "",
        "engines can be built and run from Python",
        "no TensorRT engines from Python; models run in torch",
    )


def _tensorrt_library() -> Check:
    name = ctypes.util.find_library("nvinfer")
    return _check(
        "TensorRT library",
        name is not None,
        _library_file(name) if name else "libnvinfer is not on the loader's path",
        "the plugin library can be loaded into TensorRT programs",
        "TensorRT programs do not run here, unless the Python package brings the library",
    )


def _library_file(name: str) -> str:
    """The file behind a library's name, whose own name has the full version, without loading it."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    files = [Path(folder) / name for folder in folders]
    if ldconfig := shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"):
        done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        files += map(Path, re.findall(rf"{re.escape(name)} .*=> (\S+)", done.stdout))
    present = [file for file in files if file.exists()]
    return str(present[0].resolve()) if present else name


def _tensorrt_llm() -> Check:
    version = _version("tensorrt_llm")
    return _check(
        "TensorRT-LLM",
        version is not None,
        version or "",
        "trtllm-build makes engines of converted checkpoints; --trtllm looks more closely",
        "no trtllm-build; convert-checkpoint, and models in torch, do without",
    )


def _onnx_runtime() -> Check:
    version = _version("onnxruntime")
    return _check(
        "ONNX Runtime",
        version is not None,
        version or "",
        "engines of build --backend onnx run here",
        "engines of build --backend onnx do not run here: pip install onnxruntime",
    )


def _triton_client() -> Check:
    version = _version("tritonclient")
    return _check(
        "Triton client",
        version is not None,
        version or "",
        "this machine can send requests to a Triton server",
        "no requests to a Triton server from Python; not needed to run models here",
    )


def _triton_server() -> Check:
    path = shutil.which("tritonserver")
    if path is None and os.access("/opt/tritonserver/bin/tritonserver", os.X_OK):
        path = "/opt/tritonserver/bin/tritonserver"
    version = _version("tritonserver")
    detail = ", ".join(part for part in (version, path) if part)
    return _check(
        "Triton server",
        bool(detail),
        detail,
        "models can be served by Triton on this machine",
        "no serving by Triton on this machine; the command line and the Python API do without",
    )


def _triton_compiler() -> Check:
    version = _version("triton")
    return _check(
        "Triton compiler",
        version is not None,
        version or "",
        "attention, experts and norms run by its kernels on a GPU",
        "attention, experts and norms run by torch alone; it comes with torch for CUDA",
    )


def _cuda_kernels() -> Check:
    return _library(
        "CUDA kernels",
        library_candidates(),
        "they serve the operators on a GPU",
        f"reference operators in torch serve; {LIBRARY_VARIABLE} names a library elsewhere",
    )


def _tensorrt_plugins() -> Check:
    return _library(
        "TensorRT plugins",
        plugin_candidates(),
        "TensorRT engines can be built and run with them",
        f"no TensorRT engines: run ./build.sh; {PLUGINS_VARIABLE} names a library elsewhere",
    )


def _library(name: str, looked: Sequence[Path], if_found: str, if_not: str) -> Check:
    present = [path for path in looked if path.is_file()]
    detail = f"looked for {', '.join(map(str, looked))}" if looked else "switched off"
    return _check(name, bool(present), str(present[0]) if present else detail, if_found, if_not)


def _transformers() -> Check:
    version = _version("transformers")
    return _check(
        "transformers",
        version is not None,
        version or "",
        "tokenizers and chat templates can be read",
        "no tokenizers: pip install transformers; skip_tokenizer_init=True does without",
    )


def _version(package: str) -> str | None:
    """Version of an installed package; None where there is none, without importing it."""
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):  # a half-removed package, or one that hides its spec
        return None
    if spec is None or spec.origin is None:  # a folder that happens to have the name is no package
        return None
    for distribution in (package, f"{package}-cu12", f"{package}-cu13"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown version"
